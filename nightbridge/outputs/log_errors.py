"""The one line of a log that best says why a run died, and the first rank and node that failed."""

import re
from typing import Literal

_TRACEBACK = "Traceback (most recent call last)"
_RANK_PREFIX = re.compile(r"^\s*(?:\[rank\d+\]:\s?|\[?\d+\]?:\s)")
_NAMED_RANK = re.compile(r"^\s*\[rank\d+\]: ")
_EXCEPTION = re.compile(
    r"^(?:[A-Za-z_][\w.]*(?:Error|Exception|Exit|Interrupt|Timeout|Failure|Unavailable)\b|[a-z_]\w*(?:\.\w+)+(?=: |$))"
)
# What ends a job without a traceback, in the words of shells, the loader, argparse, C++, CUDA, NCCL, enroot and pyxis.
_KNOWN_CAUSE = re.compile(
    r"command not found|: not found$|[Uu]nrecognized (?:option|arguments)|No such file or directory|Permission denied"
    r"|No space left on device|[Ee]xecve\(\)|cannot open shared object file|CUDA out of memory"
    r"|CUDA (?:error|driver version)"
    r"|CUDNN_STATUS|CUBLAS_STATUS|NCCL (?:error|WARN (?:Cuda failure|Call to|NET|Timeout|Net))|nccl\w+Error"
    r"|Watchdog caught collective operation timeout|Segmentation fault|[Bb]us error|Illegal instruction|double free"
    r"|\[ERROR\] (?!- |.*\{$)|container start failed|failed to import|couldn't start container|nvidia-container-cli"
    r"|Plugin initialization failed|Application launch failed|oom[-_]kill|[Oo]ut [Oo]f [Mm]emory"
    r"|exceeded (?:job )?memory limit|DUE TO (?:TIME LIMIT|NODE FAILURE|PREEMPTION)|Node failure on"
    r"|Unable to (?:contact|confirm)"
    r"|(?:failed|FAILED) \(exitcode:? -?\d+\)|Could not establish|uncorrectable ECC|Xid \(|[Aa]ddress already in use"
    r"|timed out after \d+ ?s while trying to connect"
    r"|Invalid (?:generic|account|partition|qos)|line \d+: +\d+ (?:Aborted|Killed|Terminated)\b"
    r"|Assertion `.+[`'] failed|was not built with"
)
_HARMLESS = re.compile(r"\b(?<!NCCL )warn(?:ing)?\b|^rm: cannot remove", re.IGNORECASE)
_BARE_EXCEPTION = re.compile(r"^(?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception): \S")
_NCCL_DETAIL = "Last error:"
"""What stands above the one line of a DistBackendError that names the reason."""
_WORDS = ("error", "fatal", "critical", "exception", "fail", "abort")
_POSSIBLE = re.compile(
    r"(?<![\w=-])(?:error|fatal|critical|exception|failed|failure|abort(?:ed|ing)?)\b(?! ?[=:] ?[\d.])(?!.*\{$)",
    re.IGNORECASE,
)
# The best of several: what only reports that another line happened comes last.
_REPORT = re.compile(
    r"(?:failed|FAILED) \(exitcode|container start failed|couldn't start container|failed to import"
    r"|Application launch failed|nccl\w+Error|line \d+: +\d+ \w"
)
_RANK = re.compile(r"^\s*(?:\[rank(\d+)\]:|\[?(\d+)\]?: |.{0,80}\[(?:PG [^\]]*)?Rank (\d+)\])")
_EXITED = re.compile(r"srun: error: ([\w.-]+): tasks? ([\d,-]+): (?!Terminated)")
# slurmstepd adds its node's name where several slurmds run on one machine; since Slurm 25.11 it gives the time instead.
_SCHEDULER_ERROR = re.compile(
    r"(?:(?:slurmstepd(?:-[\w.-]{1,255})?|srun):|^\[\d{4}-\d\d-\d\dT[\d:.]{1,32}\]) error: .*"
)
_CONSEQUENCES = re.compile(r"DistBackendError|DistNetworkError|BrokenPipeError|ConnectionResetError|KeyboardInterrupt")
"""Exceptions of ranks that died because another one did."""
# Training that goes on, as Megatron-Bridge and tqdm print it.
_PROGRESS = re.compile(r" iteration +\d+/ *\d+ \||\d/\d+ \[\d+:\d\d")
_ERROR_LIMIT = 500

_Kind = Literal["cause", "known", "bare", "consequence", "report"]
_BEST_FIRST: tuple[_Kind, ...] = ("cause", "known", "bare", "consequence", "report")


class ErrorFinder:
    """Finds the line that best says why a run died.

    That is the last line of the last traceback, or the exception that a rank named; but not of a rank that only noticed
    another one's death, when there is a better one. Without any it is the first line that is known to end jobs, else
    the last exception that stands alone, else Slurm's first complaint. A line that only sounds like a failure, or that
    training went on after, is called possible. Behind it stand the first rank and node that failed, where the log names
    them.
    """

    def __init__(self) -> None:
        self._in_traceback = False
        self._found: dict[_Kind, str] = {}
        self._announced_by: _Kind | None = None
        self._possible = self._scheduler = self._rank = self._node = ""

    def see(self, line: str) -> None:
        """Take in the next line."""
        if self._found and _PROGRESS.search(line):
            self._possible = self._possible or self._best_kind()
            self._found.clear()
        if self._announced_by and line.strip():
            self._explain(self._announced_by, line.strip())
        if _TRACEBACK in line:
            self._in_traceback = True
        elif self._in_traceback or _NAMED_RANK.match(line):
            self._see_in_traceback(_RANK_PREFIX.sub("", line).rstrip(), line)
        elif _BARE_EXCEPTION.match(line):
            self._see_exception(line.strip(), "bare")
        if "error: " in line:
            self._see_scheduler(line)
        if "known" not in self._found and _KNOWN_CAUSE.search(line) and not _HARMLESS.search(line):
            text = _RANK_PREFIX.sub("", line).strip()[:_ERROR_LIMIT]
            self._found.setdefault("report" if _REPORT.search(text) else "known", text)
            self._note_rank_of(line)
        elif not self._possible and self._sounds_so(line):
            self._possible = line.strip()[:_ERROR_LIMIT]
        if line.rstrip().endswith(_NCCL_DETAIL) and "NCCL error" in self._found.get("known", ""):
            self._announced_by = "known"

    @staticmethod
    def _sounds_so(line: str) -> bool:
        lower = line.lower()
        # Of a log's lines one in thousands has such a word, and to look for it is ten times as fast.
        return any(word in lower for word in _WORDS) and bool(
            _POSSIBLE.search(line) and not _HARMLESS.search(line) and not _EXITED.search(line)
        )

    def _explain(self, kind: _Kind, line: str) -> None:
        """Take in what stands below a line that announces it."""
        if kind in self._found:
            self._found[kind] = f"{self._found[kind][: _ERROR_LIMIT // 2]} {line}"[:_ERROR_LIMIT]
        self._announced_by = kind if line.endswith(":") else None

    def _see_scheduler(self, line: str) -> None:
        exited = _EXITED.search(line)
        if exited and not self._node:
            self._node = exited[1]
            self._note_rank(re.split("[,-]", exited[2])[0])
        if not self._scheduler and (match := _SCHEDULER_ERROR.search(line)):
            self._scheduler = match[0].rstrip()[:_ERROR_LIMIT]

    def _note_rank_of(self, line: str) -> None:
        if found := _RANK.match(line):
            self._note_rank(next(number for number in found.groups() if number))

    def _note_rank(self, rank: str) -> None:
        self._rank = self._rank or rank

    def _see_in_traceback(self, line: str, printed: str) -> None:
        if not _EXCEPTION.match(line):
            return
        if self._see_exception(line, "cause"):
            self._note_rank_of(printed)
        self._in_traceback = False

    def _see_exception(self, line: str, kind: _Kind) -> bool:
        """Take in an exception; whether it is more than the consequence of another one."""
        if "ChildFailedError" in line:
            self._found.setdefault("report", line[:_ERROR_LIMIT])
            return False
        is_consequence = _CONSEQUENCES.search(line) is not None
        kind = "consequence" if is_consequence else kind
        self._found[kind] = line[:_ERROR_LIMIT]
        self._announced_by = kind if line.endswith(":") else None
        return not is_consequence

    def _best_kind(self) -> str:
        return next((self._found[kind] for kind in _BEST_FIRST if kind in self._found), "")

    @property
    def best(self) -> str:
        """The line, with rank and node behind it; empty without any."""
        text = self._best_kind()
        if not text and self._possible and (not self._scheduler or _EXITED.match(self._scheduler)):
            text = f"possibly: {self._possible}"
        text = text or self._scheduler
        where = [f"rank {self._rank}"] if self._rank else []
        where += [self._node] if self._node and self._node not in text else []
        return f"{text} ({', '.join(where)})" if text and where else text
