"""The one line of a log that best says why a run died, and the first rank and node that failed."""

import re
from typing import Any

from nightbridge.outputs import failure_patterns as patterns
from nightbridge.outputs.failure_patterns import Kind

POSSIBLY = "possibly: "
"""What a line begins with that is not certain."""


class ErrorFinder:
    """Finds the line that best says why a run died.

    That is the last line of the last traceback, or the exception that a rank named. Without any it is the first line
    that is known to end a process, the last exception that stands alone, or the first complaint of a script; else what
    one process says of another, what only reports an end, and where no table knows any line, the first after the last
    sign of continuing that sounds like a failure. Behind it stand the first rank and node that failed, where the log
    names them; behind an exception that another one led to, that one.

    A line is certain where a process says why itself ended, and nothing contradicts it: that Slurm ended the job later
    for a reason of its own, that a process was killed for its memory and the line speaks of something else, that two
    tracebacks end differently and neither led to the other, that training or the script went on, that another rank did
    and no end is reported, or that another line sounds like a failure, which is then named, too. Any other line is
    called possible: that a process ended and not why, that another one did not answer, a warning, and what only sounds
    like a failure.
    """

    def __init__(self) -> None:
        self._in_traceback = False
        self._before = patterns.RANK_PREFIX
        """What stands before each line of the traceback, with any number: a time, a rank, a margin."""
        self._found: dict[Kind, str] = {}
        self._announced: tuple[dict[Any, str], Any, bool] | None = None
        """The line that the next one may explain: where it is, under which key, and whether it is whole, so that only
        what is set in below it belongs to it, as to an exception with several patterns.
        """
        self._possible: dict[int, str] = {}
        self._below_root_cause = self._is_aside = False
        self._is_over = self._in_doubt = self._was_killed_for_memory = False
        self._went_on = self._others_went_on = self._has_ended = False
        self._is_uncaught = self._is_consequence_uncaught = False
        """Whether torch's mark of a rank whose process an exception ended stands before the one found, or another's."""
        self._client_said = ""
        """The first complaint of those of a client of Slurm that follow each other up to the line above."""
        self._is_the_same = False
        """Whether the process that raised the exception above raised the one below, too."""
        self._ended_for_all = self._exception = self._led_to = self._after = ""
        self._rank = self._node = self._noticed_by = self._previous = self._heading = self._statement = ""

    def see(self, line: str) -> None:
        """Take in the next line."""
        self._see_whether_it_goes_on(line)
        if self._is_over or self._explains(line):
            return
        is_exception = False
        if patterns.TRACEBACK in line:
            self._begin_traceback(line)
        elif self._in_traceback or patterns.NAMED_RANK.match(line):
            is_exception = self._see_in_traceback(self._before.sub("", line, count=1).rstrip(), line)
        elif ("Error" in line or "Exception" in line) and patterns.BARE_EXCEPTION.match(
            bare := patterns.RANK_PREFIX.sub("", line)
        ):
            is_exception = self._see_exception(bare.strip(), "bare") or True
        self._previous = line
        if "error: " in line and not self._node and (exited := patterns.EXITED.search(line)):
            self._note_where(re.split("[,-]", exited[2])[0], exited[1])
        self._see_root_cause(line)
        self._client_said = (self._client_said or line.strip()) if patterns.CLIENT.match(line) else ""
        if line.rstrip().endswith(patterns.NCCL_DETAIL):
            said = next(
                (kind for kind in patterns.BEST_FIRST if patterns.OF_NCCL.search(self._found.get(kind, ""))), "report"
            )
            is_known = said in self._found or not self._possible
            self._announced = (self._found, said, False) if is_known else (self._possible, min(self._possible), False)
        lower = line.lower()
        if patterns.CHAINED in lower:
            self._is_the_same, self._led_to = True, self._led_to or self._exception
        if not any(word in lower for word in patterns.WORDS):
            goes_on = not patterns.OF_THE_END.match(line)
            self._went_on |= goes_on and "complaint" in self._found
            self._is_the_same |= goes_on and not self._in_traceback
        elif not patterns.NO_MESSAGE.match(line):
            self._see_words(line, is_exception=is_exception)

    def _see_words(self, line: str, *, is_exception: bool) -> None:
        """Take in a line that may say why a run died, by its words."""
        self._is_aside |= patterns.ASIDE.search(line) is not None
        # An exception that speaks of another process is a consequence: what it said of that one may stand below.
        is_consequence = is_exception and patterns.OF_ANOTHER.search(line)
        if patterns.KNOWN_CAUSE.search(line) and not (
            is_consequence
            or patterns.is_harmless(line)
            or patterns.REMARKS.search(line)
            or patterns.FRAME.match(patterns.RANK_PREFIX.sub("", line))
        ):
            self._see_known(line)
        elif not is_exception and self._wants(line):
            self._note_possible(patterns.rank_of_possible(line), line.strip())

    def _see_whether_it_goes_on(self, line: str) -> None:
        """Where training, or a script after its complaint, continues, what was found is possible only."""
        best = self._best_kind()
        if not best and not self._possible:
            return
        if patterns.PROGRESS.search(line):
            self._possible = {
                patterns.BEFORE_PROGRESS: self._found[best] if best else self._possible[min(self._possible)]
            }
            self._found.clear()
            self._is_over = self._in_doubt = self._was_killed_for_memory = False
            self._ended_for_all = self._led_to = self._after = ""
            self._went_on = self._others_went_on = self._is_uncaught = self._is_consequence_uncaught = False
        elif "complaint" in self._found and patterns.REMARKS.search(line) and not patterns.CLOSING.search(line):
            self._possible[patterns.SOUNDS + patterns.OUTLIVED] = self._found.pop("complaint")
        elif best in patterns.OF_A_PROCESS:
            self._others_went_on |= patterns.INFORMS.search(line) is not None
        elif not best and "NCCL INFO" not in line and patterns.INFORMS.search(line):
            for rank in patterns.OUTLIVABLE & self._possible.keys():
                self._possible[rank + patterns.OUTLIVED] = self._possible.pop(rank)

    def _wants(self, line: str) -> bool:
        """Whether a line that only sounds like a failure can be better than what was found."""
        if self._best_kind() in patterns.OF_A_PROCESS:
            return False
        is_in_stack = self._in_traceback or patterns.NAMED_RANK.match(line)
        if is_in_stack and self._before.sub("", line, count=1)[:1].isspace():
            return False
        return patterns.SOUNDS not in self._possible and (
            patterns.WORDED not in self._possible or bool(patterns.SOUNDS_SO.search(line))
        )

    def _note_possible(self, rank: int | None, line: str) -> None:
        if rank is not None and rank not in self._possible:
            self._possible[rank] = patterns.cut(line)
            if patterns.ANNOUNCES.search(line) and not self._announced:
                self._announced = self._possible, rank, False

    def _see_known(self, line: str) -> None:
        self._was_killed_for_memory |= patterns.OOM_KILL.search(line) is not None
        if patterns.ENDED_FOR_ALL.search(line):
            self._is_over, self._in_doubt = True, any(patterns.BY_SIGNAL not in said for said in self._found.values())
            self._ended_for_all = patterns.cut(line.strip()) if self._in_doubt else ""
            if failed := patterns.FAILED_NODE.search(line):
                self._note_where("", failed[1])
        elif patterns.WAITED.search(line) and "known" not in self._found:
            self._in_doubt = bool(self._node) or not all(map(patterns.WAITED.search, self._found.values()))
        text = patterns.cut(patterns.RANK_PREFIX.sub("", line).strip())
        kind = patterns.kind_of(text)
        if kind == "known" and all(map(patterns.NCCL_WARNING.search, (text, self._found.get("of another", "")))):
            kind = "consequence"
        if self._client_said not in ("", line.strip()) and (client := patterns.CLIENT.match(line)):
            text = patterns.cut(f"{self._client_said}; {line[client.end() :].strip()}")
        self._has_ended |= kind == "report"
        if (
            kind == "complaint"
            and patterns.CONTAINER_LOG in text
            and patterns.CONTAINER_LOG in self._found.get(kind, "")
        ):
            self._possible.setdefault(patterns.SOUNDS, self._found.pop(kind))
        if kind not in self._found and not self._says_more(kind):
            self._found[kind] = text
            self._note_where(patterns.rank_of(line))

    def _says_more(self, kind: Kind) -> bool:
        """Whether a line that sounds like a failure says more than this one below it, that a process ended."""
        return kind in patterns.ENDS and patterns.SOUNDS in self._possible

    def _explains(self, line: str) -> bool:
        """Take in what stands below a line that announces it; whether that is all that it can say."""
        if not self._announced or not line.strip() or patterns.TRACEBACK in line or patterns.BAR.search(line):
            return False
        if not self._announced[2] and patterns.OF_OTHERS.search(line):
            return False
        if patterns.CLOSING.search(line) or "(exitcode: " in line or patterns.EXITED.search(line):
            self._announced = None  # the log is cut before what was announced
            return False
        (texts, key, is_whole), said = self._announced, patterns.RANK_PREFIX.sub("", line)
        goes_on = not is_whole or (said[:1].isspace() and not patterns.FRAME.match(said))
        self._announced = (texts, key, is_whole) if goes_on and patterns.ANNOUNCES.search(said.rstrip()) else None
        if not goes_on:
            return False
        if said.strip() not in texts.get(key, said):
            texts[key] = patterns.cut(f"{texts[key]} {said.strip()}")
        return texts is self._found

    def _begin_traceback(self, line: str) -> None:
        self._in_traceback, self._statement = True, ""
        self._heading = self._previous.strip() if " ERROR " in self._previous else ""
        before = line[: line.index(patterns.TRACEBACK)][-patterns.LONGEST_BEFORE :]
        margin = before[: len(before) - len(before.lstrip())]
        alike = patterns.NUMBER.sub(r"\\d+", re.escape(before)) or patterns.RANK_PREFIX.pattern
        self._before = re.compile(f"^(?:{alike}|{patterns.RANK_PREFIX.pattern}|{margin})")

    def _see_root_cause(self, line: str) -> None:
        """Take in which rank torchrun saw fail first, and where: it knows better than the order of the patterns."""
        self._below_root_cause |= patterns.ROOT_CAUSE in line
        field = patterns.ROOT_FIELD.match(line) if self._below_root_cause else None
        if field and field[1] == "rank":
            self._rank = field[2]
        elif field:
            self._node = field[2]

    def _note_where(self, rank: str, node: str = "") -> None:
        self._rank, self._node = self._rank or rank, self._node or node

    def _see_in_traceback(self, line: str, printed: str) -> bool:
        if not patterns.EXCEPTION.match(line):
            self._statement = line.strip() if patterns.STATEMENT.match(line) else self._statement
            return False
        is_uncaught = patterns.NAMED_RANK.match(printed) is not None
        self._in_traceback = patterns.REMOTE in line
        if self._is_consequence_uncaught and not is_uncaught and patterns.CONSEQUENCES.search(line):
            return True  # of the launcher, after a rank told of another
        if patterns.IS_NAME.match(line) and not patterns.CONSEQUENCES.match(line):
            line = self._with_statement(line)
        first, rank = self._found.get("cause"), patterns.rank_of(printed)
        if not self._see_exception(line, "cause"):
            self._is_consequence_uncaught |= is_uncaught
            self._noticed_by = self._noticed_by or rank
            return True
        self._note_where(rank)
        if first and first.split(":")[0] != line.split(":")[0]:
            if rank not in ("", self._rank):
                self._found["cause"], self._announced = first, None
                if line == self._after:
                    return True  # it led to the same one there
                self._in_doubt = True
            else:
                self._in_doubt |= not self._is_the_same
        self._is_the_same, self._after, self._led_to = False, self._led_to, ""
        self._is_uncaught |= is_uncaught
        return True

    def _with_statement(self, exception: str) -> str:
        """An exception without a message, and the statement of the last traceback, which says more."""
        return f"{exception} at {self._statement}" if self._statement else exception

    def _see_exception(self, line: str, kind: Kind) -> bool:
        """Take in an exception; whether it is more than the consequence of another one."""
        if "ChildFailedError" in line:
            self._has_ended = True
            if not self._says_more("summary"):
                self._found.setdefault("summary", patterns.cut(line))
            return False
        is_consequence = self._is_aside or any(
            known.search(line) for known in (patterns.CONSEQUENCES, patterns.REPORT, patterns.OF_ANOTHER)
        )
        if is_consequence:
            kind = "report" if self._is_aside or patterns.OF_A_CHILD.search(line) else "consequence"
        self._is_aside = False
        if self._says_more(kind):
            return False
        if not self._found.get(kind, "").startswith(line):  # another rank's, which may have a line less
            self._found[kind] = patterns.cut(f"{self._heading} {line}".strip() if is_consequence else line)
        self._exception = self._found[kind]
        if named := patterns.FOUND_NAN.search(line):
            self._note_where(*named.groups())
        self._announced = self._found, kind, not patterns.ANNOUNCES.search(line)
        return not is_consequence

    def _best_kind(self) -> Kind | None:
        return next((kind for kind in patterns.BEST_FIRST if kind in self._found), None)

    def _is_certain(self, kind: Kind) -> bool:
        by_memory = self._was_killed_for_memory and not patterns.MEMORY.search(self._found[kind])
        has_ended, is_cut = self._node or self._has_ended, patterns.ANNOUNCES.search(self._found[kind])
        outlived = self._went_on if kind == "complaint" else self._others_went_on and not has_ended
        return kind in patterns.AT_FIRST_HAND and not (
            self._rival_of(kind) or self._in_doubt or by_memory or outlived or is_cut
        )

    def _rival_of(self, kind: Kind | None) -> str:
        """Another line that may be why: beside what a process says of itself one that sounds like a failure, beside
        that a process ended the last one before something, maybe another rank, went on, else what ended the job
        for all after it.
        """
        best = min(self._possible, default=patterns.ENDED)
        if kind in patterns.ENDS or (kind is None and best in patterns.ENDED_POSSIBLY):
            sounds_so = next((self._possible[rank] for rank in patterns.WENT_ON_AFTER if rank in self._possible), "")
        else:
            sounds_so = self._possible[best] if kind in patterns.AT_FIRST_HAND and best in patterns.OUTLIVABLE else ""
        if self._found.get(kind or "summary") != self._ended_for_all:
            return sounds_so or self._ended_for_all
        return sounds_so or next((said for said in self._found.values() if said != self._ended_for_all), "")

    @property
    def own(self) -> str:
        """What the program of a rank says of itself: the exception that it raised, and the one that led to it.

        Empty where ranks tell of each other, of the machine or of the network only, and where the exception may have
        been logged and outlived: torch marks those with the rank that end a process.
        """
        kind = self._best_kind()
        said = f"{self._found[kind]} {self._after}" if kind in patterns.OF_A_PROCESS else ""
        if patterns.OF_THE_CODE.search(said):
            return said
        went_on = self._others_went_on or self._is_consequence_uncaught
        is_outlived = self._ended_for_all or (went_on and not self._is_uncaught)
        return "" if kind == "known" or is_outlived or patterns.OF_THE_MACHINE.search(said) else said

    @property
    def best(self) -> str:
        """The line, with rank and node behind it; empty without any."""
        if kind := self._best_kind():
            text = self._found[kind]
        elif self._possible:
            text = self._possible[min(self._possible)]
        else:
            return ""
        rank = self._rank or (self._noticed_by if kind in ("consequence", "report") else "") or patterns.rank_of(text)
        where = [f"rank {rank}"] if rank else []
        where += [self._node] if self._node and self._node not in text else []
        if patterns.ANNOUNCES.search(text) or (self._in_traceback and patterns.IS_NAME.match(text)):
            text = self._with_statement(text)  # the log is cut before the message
        after = {"cause": self._after, "consequence": self._led_to}.get(kind or "", "")
        text += f"; after: {after}" if after and after not in text else ""
        rival = self._rival_of(kind)
        text += f"; also: {rival}" if rival else ""
        text = text if kind and self._is_certain(kind) else f"{POSSIBLY}{text}"
        return f"{text} ({', '.join(where)})" if where else text
