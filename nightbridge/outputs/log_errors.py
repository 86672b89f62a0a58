"""The one line of a log that best says why a run died, and the first rank and node that failed."""

import re
from typing import Any, Literal, get_args

_TRACEBACK = "Traceback (most recent call last)"
_BEFORE = r"^\s*(?:\d{4}-\d\d-\d\d \S{8,30} )?(?:[\w.-]+/\d+ )?(?:\[default\d+\]:)?(?:\[?\d+\]?:? (?=\[rank))?"
"""What a log collector, NeMo-Run, torchrun and srun --label write before a rank's prefix."""
_RANK_PREFIX = re.compile(
    _BEFORE + r"(?:\[rank\d+\]:\s?|\[?\d+\]?:\s|.{0,40}\[(?:\d+,)?\d+\]<std\w+>:|\(\w+ pid=[^)]{1,80}\) |(?<=\]:))"
)
"""What stands before a line of a rank: as torch, srun --label, mpirun, NeMo-Run, torchrun and Ray write it."""
_LONGEST_BEFORE = 200
_NUMBER = re.compile(r"\d+")
_NAMED_RANK = re.compile(_BEFORE + r"\[rank\d+\]: ")
_EXCEPTION = re.compile(
    r"^(?:[A-Za-z_][\w.]*(?:Error|Exception|Exit|Interrupt|Timeout|Failure|Unavailable|Expired)\b"
    r"|Exception(?=: |$)|StopIteration\b|[A-Z][a-z]+[A-Z]\w*(?=: )|[a-z_]\w*(?:\.\w+)+(?=: |$))"
)
# What a script complains of, and may outlive: who writes it, and in which words.
_COMPLAINTS: dict[str, str] = {
    "shell": r"command not found|: not found$|Exec format error|bad interpreter|cannot execute|unbound variable"
    r"|syntax error (?:near|:)|Argument list too long",
    "system": r"[Nn]o such file or directory|Permission denied|No space left on device|[Dd]isk quota exceeded"
    r"|Read-only file system|Too many open files|Stale file handle|Input/output error|Cannot allocate memory"
    r"|(?i:address already in use)|Name or service not known|Temporary failure in name resolution|[Ee]xecve\(\)",
    "loader": r"cannot open shared object file|undefined symbol|symbol lookup error|version `[^']+' not found"
    r"|cannot allocate memory in static TLS|invalid ELF header|wrong ELF class|/ld: cannot find"
    r"|python[\d.]*: No module named ",
    "C++": r"\bwhat\(\): +\S",
    "Slurm's clients": r"(?:sbatch|salloc): error: \S",
    "installers": r"No matching distribution found|Could not find a version that satisfies|Could not resolve host"
    r"|fatal: (?:not a git|could not|unable to|repository|Could not)",
}
# What ends the process that says it, without a traceback.
_ENDINGS: dict[str, str] = {
    "options": r"[Uu]nrecognized (?:option|argument)|the following arguments are required|error: argument .+: "
    r"|invalid option -- |ambiguous option|[Nn]o such option|Could not override |is not in struct|Missing mandatory",
    "crash": r"(?i:segmentation fault)|[Bb]us error|Illegal instruction|[Ff]loating point exception|double free"
    r"|corrupted size vs|(?:malloc|free|realloc|munmap_chunk)\(\): \w|stack smashing|Fatal Python error: "
    r"|Caught signal \d+|\bSIG[A-Z]+ received at time|Assertion `.+[`'] failed|panicked at|pure virtual method",
    "memory": r"oom[-_]kill|(?i:out of memory)|[Ee]xceeded (?:job )?memory limit|Memory cgroup out of",
    "CUDA": r"CUDA (?:error|driver version)|CUDA_ERROR_\w+|CUDNN_STATUS|CUBLAS_STATUS|CUSOLVER_STATUS|cudaError\w+"
    r"|no kernel image is available|illegal memory access|unspecified launch failure|device-side assert triggered"
    r"|no CUDA-capable device|Found no NVIDIA driver|nvidia-smi has failed|Failed to initialize NVML|uncorrectable ECC"
    r"|Xid \(|fallen off the bus|ptxas fatal|nvcc fatal|Cuda failure",
    "NCCL": r"NCCL (?:error|WARN (?:Cuda failure|Call to|NET|Timeout|Net|Duplicate GPU|Mismatch|Invalid config"
    r"|Bootstrap :|Error while (?:creating|attaching)|Failed to CUDA|Could not (?:find|init)|No (?:interface|socket)))"
    r"|nccl\w+Error|Watchdog caught collective operation timeout|Duplicate GPU detected|No socket interface found"
    r"|Heartbeat monitor timed out|watchdog got stuck for",
    "MPI": r"was not built with|Host key verification failed|daemon has unexpectedly failed"
    r"|not enough slots available|noticed that process rank \d+|pml_ucx\.c:\d+ +Error|plugin (?:name|type) for mpi/"
    r"|no usable transports",
    "containers": r"pyxis:\s+\[ERROR\] |failed to import docker|nvidia-container-cli"
    r"|enroot-\w+: failed|Error response from daemon|manifest unknown|FATAL:   \S"
    r"|(?:unauthorized|denied): |failed to (?:mount|execute|extract|create squashfs)",
    "Slurm": r"Plugin initialization failed|Application launch failed"
    r"|DUE TO (?:TIME LIMIT|NODE FAILURE|PREEMPTION|JOB REQUEUE)|Node failure on"
    r"|Unable to (?:contact|confirm|resolve|allocate resources|create step)|Could not establish"
    r"|Batch job submission failed|Invalid (?:generic|account|partition|qos|job credential)|Job credential expired"
    r"|launch failed: |Kill task failed|Could not open std\w+ file|Munge (?:en|de)code failed",
    "torchrun": r"(?:failed|FAILED) \(exitcode:? -?\d+\)|timed out after \d+ ?m?s while trying to connect"
    r"|has failed to connect to any|Signal \d+ \(SIG\w+\) received by PID",
    "other launchers": r"\b(?:worker|actor|process)\b.{0,40} (?:died|is dead|not registered)\b",
}
_ENDING = re.compile("|".join(_ENDINGS.values()))
_MEMORY = re.compile(_ENDINGS["memory"])
_KNOWN_CAUSE = re.compile("|".join((*_ENDINGS.values(), *_COMPLAINTS.values())))
_HARMLESS = re.compile(r"\bwarn(?:ing)?\b|^rm: cannot remove|could not remove squashfs", re.IGNORECASE)
_INFORMS = re.compile(r"(?<![=\w])(?:INFO|DEBUG)\b|level=info|(?:^|: |\[)[DI]\d{0,4} [a-zA-Z\d]")
_TOLD = re.compile(
    _INFORMS.pattern + r"|(?:^|: |\[)W\d{0,4} [a-zA-Z\d]|(?:^|srun: error: )\s*(?:If|Hint|Note|Tip|To|Try)\b"
    r"|(?i:\b(?:retry|retrying|falling back|skipping|ignor(?:ed|ing))\b)"
)
"""The level of a line that does not complain, as Python, glog and torch write it; a process that goes on; advice."""
_NCCL_WARNING = re.compile(r"NCCL WARN |\.(?:h|cc?):\d+ WARN ")
"""Of its warnings NCCL makes the one on which a run died, too."""
_BARE_EXCEPTION = re.compile(
    r"^(?:[A-Za-z_]\w*\.)*(?:[A-Z]\w*(?:Error|Exception)(?:\(\w+\))?|Exception): (?:\S|$)|^\S*ChildFailedError:"
)
_NCCL_DETAIL = "Last error:"
"""What stands above the one line of a DistBackendError that names the reason."""
# A line that says why a run died has one of these words in lower case. To look for them first is five times as fast.
_FAILURE_WORDS = (
    "error", "fail", "fatal", "critical", "exception", "abort", "panic", "crash", "assert", "kill", "died", "dead",
    " fault", "signal", "terminat", "exit ", "exits ", "exited", "not ", "n't ", "no such", "no space", "no route",
    "no module", "no matching", "no usable", "cannot", "could", "unable", "must be", "denied", "refused",
    "unauthorized", "forbidden", "invalid", "illegal", "unrecognized", "unknown", "unsupported", "undefined",
    "unexpected", "unavailable", "unbound", "ambiguous", "missing", "required", "mismatch", "conflict", "duplicate",
    "syntax", "corrupt", "smash", "overflow", "out of", "oom", "quota", "limit", "exceed", "insufficient", "too many",
    "too long", "too large", "timed out", "timeout", "busy", "stuck", "hang", "lost", "unreachable", "disconnect",
    "reset by", "broken", "bad ", "stale", "expired", "read-only", "in use", "double free", "cancelled", "preempt",
    "evict", "low on", "fallen off", "uncorrectable", " vs ", " warn ",
)  # fmt: skip
_WORDS = (
    *_FAILURE_WORDS, "no interface", "no socket", "no kernel", "no cuda", "no nvidia", "floating point", "malloc():",
    "free():", "munmap_chunk", "sigabrt", "sigsegv", "sigbus", "pure virtual", "endpoint", "execve", "elf", "xid",
    "cuda", "cudnn", "cublas", "cusolver", "launch", "device-side", "orte ", "watchdog", "mpi", "container", "enroot",
    "manifest", "due to", "credential", "status code", "resolution", "bus ", "what()",
)  # fmt: skip
# How well a line that only sounds like a failure says why, best first: in one of these ways, or only with a word.
_SOUNDS_SO = re.compile(
    r"(?<![\w=-])(?i:error|fatal|critical|exception|failed|failure|abort(?:ed|ing)?|died|dead|crash(?:ed)?|panic"
    r"|fault|denied|refused|corrupt(?:ed)?|unrecognized|no such|timed out|exceed(?:s|ed)?|stuck|unreachable|illegal"
    r"|lost|mismatch|preempted|evicted)\b(?! ?[=:] ?[\d.])(?!.*\{$)"
    r"|\b[A-Z]\w*(?:Error|Exception): \S| WARN |(?:^|: |\[)[EF]\d{0,4} [a-zA-Z\d]"
)
_EXPLAINS = re.compile(r"\b(?:may|might|likely|usually|appears? to|[Ii]t looks like)\b")
"""What supposes a reason, or explains what was said above."""
_QUOTES_EXCEPTION = re.compile(r"\w(?:Error|Exception): \S")
"""What makes a line that only informs worth naming."""
_SOUNDS, _WORDED, _ENDED, _WARNED, _BEFORE_PROGRESS, _ENDED_LAST = range(0, 12, 2)
"""That a process ended comes below; then a warning, what training went on after, and how Slurm reports a task's end."""
_OUTLIVABLE, _OUTLIVED = {_SOUNDS, _WORDED}, 1
"""What is added where something went on after a line."""
_SAYS_LITTLE = re.compile(
    r"(?i:exit(?:ed)?[ _]?(?:code|status)|non-zero|(?:error|return) code:? -?\d+|returned (?:error )?-?\d+ |\bkilled\b)"
    r"|(?i:\b(?:aborting|terminat(?:ed?|ing)(?! with exception)|shutting down)\b)|Some NCCL operations have"
    r"|container exited too soon|^[^a-z]+$|\bFAILED$|\brc=|(?:\.\.\.|:)$"
)
"""What tells that something ended, not why, or only announces what the next line says."""
# What says that a process ended, and not why; the last of a chain that another line heads.
_REPORT = re.compile(
    r"(?:failed|FAILED) \(exitcode:? -?(?!-?(?:4|7|8|11)\b)|Signal (?!(?:4|7|8|11) )\d+ \(SIG\w+\) received by PID"
    r"|tasks? [\d,-]+: (?:Killed|Aborted)|exit(?:s|ed) with return code"
    r"|exited on signal (?!(?:4|7|8|11) )|SIG(?:ABRT|TERM|INT|HUP) received"
    r"|[Ss]ignal (?:1|2|6|10|12|15)\b|killed by signal: (?:Killed|Aborted|Terminated)|failed to import docker"
    r"|nccl\w+Error|(?:unhandled (?:system|cuda)|NCCL.*internal) error|Call to CUDA function failed"
    r"|: (?i:no|unspecified) error\b"
)
# What a process says of another one: it did not answer, or is no more.
_OF_ANOTHER = re.compile(
    r"(?i:connection (?:refused|reset|closed|aborted)|broken pipe|no route to host|unreachable)"
    r"|(?<!monitor )[Tt]imed out|endpoint is not connected"
    r"|NCCL WARN (?:NET|Net|Timeout|Could not|Bootstrap)|exited unexpectedly|lost communication|remote process"
    r"|UCX +ERROR|Got completion (?:from|with)"
    r"|(?:Died|Dead|Crashed|Closed)\w*(?:Error|Exception)|(?: died| is dead| not registered)\b"
)
_RANK = re.compile(
    _BEFORE
    + r"(?:\[rank(\d+)\]:|\[?(\d+)\]?: |.{0,40}\[(?:\d+,)?(\d+)\]<std|.{0,80}[\[(][^\]]{0,60}\b[Rr]ank[ =:]?(\d+)\b)"
)
_EXITED = re.compile(r"srun: error: ([\w.-]+): tasks? ([\d,-]+): (?!Terminated)")
_EXITED_UNDER_MPI = re.compile(r"noticed that process rank (\d+) with PID \d+ on node ([\w.-]+) exited")
_BY_LAUNCHER = re.compile(r"srun: (?!error: |fatal: )|srun: error: \S+: tasks? \S+: | ON \S+ CANCELLED AT ")
"""How Slurm reports a task's end, and ends those that are left: whatever the reason."""
_IS_NAME = re.compile(r"[A-Za-z_][\w.]*$")
_STATEMENT = re.compile(r"\s+(?!File \"|raise |[~^ ]+$)\S")
"""A line of code below the place where it stands, which says more than that it raised."""
_FRAME = re.compile(r"\s*(?:File \"|frame #|at |PC: |@ |#\d+ |\[ ?\d+\] \S*[/(]|raise |Exception raised from )")
"""A line of a stack."""
_CONSEQUENCES = re.compile(
    r"DistBackendError|DistNetworkError|DistStoreError|BrokenPipeError|ConnectionResetError|KeyboardInterrupt|EOFError"
    r"|SignalException|Rendezvous\w+Error|ProcessRaisedException|ProcessExitedException|CalledProcessError"
)
"""Exceptions of processes that ended because another one did."""
_CLIENT = re.compile(r"(?:srun|sbatch|salloc): (?:error|fatal): +(?!If |\S+: tasks? )")
"""A complaint of a client of Slurm, which heads the next one of it."""
_NO_MESSAGE = re.compile(r"\++ |.*NCCL INFO ")
"""A command that a shell is about to run, and what NCCL tells of its work."""
_CHAINED = "the above exception"
"""What Python writes between two tracebacks of one process."""
_ASIDE = re.compile(r"Exception (?:ignored in|in thread)|Error in (?:atexit|sys\.)|--- Logging error ---")
"""What heads a traceback that the process outlives, or prints when it has ended."""
_ENDED_FOR_ALL = re.compile(r"DUE TO (?:TIME LIMIT|NODE FAILURE|PREEMPTION|JOB REQUEUE)|Node failure on ")
"""After Slurm has ended the job, nothing that a process complains of is why it ended."""
_OF_THE_END = re.compile(r"\s|$|srun: |[-=*]+$|Primary job|mpirun ")
"""What continues the line above it, and what launchers say of a job that ended: no sign that a script went on."""
_FAILED_NODE = re.compile(r"Node failure on ([\w.-]+)")
_WAITED = re.compile(r"[Ww]atchdog caught|Heartbeat monitor|watchdog got stuck")
"""A rank that waited for the others in vain: only where none is known to have ended."""
_OOM_KILL = re.compile(r"oom[-_]kill|OOM Killed")
_ROOT_CAUSE = "Root Cause (first observed failure)"
_ROOT_FIELD = re.compile(r"^\s+(rank|host)\s*: (\S+)")
"""What stands below it in torchrun's summary."""
_PROGRESS = re.compile(r" iteration +\d+/ *\d+ \|")
"""Training that goes on, as Megatron-Bridge prints it."""
_BAR = re.compile(r"(?<!\d)(\d{1,12})(/\d{1,12}) \[\d+:\d\d")
"""tqdm's progress bar, which is drawn once more when a process ends."""
_FOUND_NAN = re.compile(r"Rank (\d+): found .* node: ([\w.-]+)")
"""How Megatron-LM ends where a gradient or a loss is no number."""
_ERROR_LIMIT = 500

POSSIBLY = "possibly: "
"""What a line begins with that is not certain."""

# A "complaint" is one of a script that may have gone on; the "summary" is torchrun's: it only announces what the lines
# below it say.
_Kind = Literal["cause", "known", "bare", "complaint", "of another", "consequence", "report", "summary"]
_BEST_FIRST: tuple[_Kind, ...] = get_args(_Kind)
_ENDS = ("report", "summary")
"""What only says that a process ended: a line above it that sounds like a failure says more."""
_OF_A_PROCESS = ("cause", "known", "bare")
_AT_FIRST_HAND = (*_OF_A_PROCESS, "complaint")
"""What a process says of itself. Only this can be certain: the others say that one ended, and not why."""


def _is_harmless(line: str) -> bool:
    return bool(_HARMLESS.search(line)) and not _NCCL_WARNING.search(line)


def _rank_of(line: str) -> str:
    found = _RANK.match(line)
    return next(number for number in found.groups() if number) if found else ""


def _rank_of_possible(line: str) -> int | None:
    """How well a line with one of the words says why a run died; None for one that does not say anything."""
    sounds_so = _SOUNDS_SO.search(line)
    if _INFORMS.search(line):
        return _WARNED if _QUOTES_EXCEPTION.search(line) else None
    if _EXPLAINS.search(line):
        return _WORDED if sounds_so else None
    if (_is_harmless(line) or _TOLD.search(line)) and not ("errno" in line and not _OF_ANOTHER.search(line)):
        return _WARNED if sounds_so else _WARNED + 1
    if _BY_LAUNCHER.search(line):
        return _ENDED_LAST
    if _FRAME.match(_RANK_PREFIX.sub("", line)):
        return None
    lower = line.lower()
    if not sounds_so and not any(word in lower for word in _FAILURE_WORDS):
        return None
    if _SAYS_LITTLE.search(line):
        return _ENDED
    return _SOUNDS if sounds_so else _WORDED


def _cut(text: str) -> str:
    """A line without its middle where it is long: launchers write what ended a process behind its whole command."""
    return text if len(text) <= _ERROR_LIMIT else f"{text[: _ERROR_LIMIT // 2]} ... {text[5 - _ERROR_LIMIT // 2 :]}"


def _kind_of(text: str) -> _Kind:
    """The kind of a line of the tables."""
    if _REPORT.search(text) or (text.startswith("what(): ") and _OF_ANOTHER.search(text)):
        return "report"
    if _OF_ANOTHER.search(text):
        return "of another"
    return "known" if _ENDING.search(text) else "complaint"


class ErrorFinder:
    """Finds the line that best says why a run died.

    That is the last line of the last traceback, or the exception that a rank named. Without any it is the first line
    that is known to end a process, the last exception that stands alone, or the first complaint of a script; else what
    one process says of another, what only reports an end, and where no table knows any line, the first after the last
    sign of going on that sounds like a failure. Behind it stand the first rank and node that failed, where the log
    names them.

    A line is certain where a process says why itself ended, and nothing contradicts it: that Slurm ended the job later
    for a reason of its own, that a process was killed for its memory and the line speaks of something else, that two
    tracebacks end differently and neither led to the other, that training or the script went on, that another rank did
    and no end is reported, or that another line sounds like a failure, which is then named, too. Any other line is
    called possible: that a process ended and not why, that another one did not answer, a warning, and what only sounds
    like a failure.
    """

    def __init__(self) -> None:
        self._in_traceback = False
        self._before = _RANK_PREFIX
        """What stands before each line of the traceback, with any number: a time, a rank, a margin."""
        self._found: dict[_Kind, str] = {}
        self._announced: tuple[dict[Any, str], Any] | None = None
        """The line that the next one explains: where it is, and under which key."""
        self._possible: dict[int, str] = {}
        self._below_root_cause = self._is_aside = False
        self._is_over = self._in_doubt = self._was_killed_for_memory = False
        self._went_on = self._others_went_on = self._has_ended = False
        self._client_said = ""
        """The first complaint of those of a client of Slurm that follow each other up to the line above."""
        self._is_the_same = False
        """Whether the process that raised the exception above raised the one below, too."""
        self._ended_for_all = ""
        self._bars: dict[str, int] = {}
        """Where each progress bar was when it was first drawn after the line that was found."""
        self._rank = self._node = self._noticed_by = self._previous = self._heading = self._statement = ""

    def see(self, line: str) -> None:
        """Take in the next line."""
        self._see_whether_it_goes_on(line)
        if self._is_over or self._explains(line.strip()):
            return
        is_exception = False
        if _TRACEBACK in line:
            self._begin_traceback(line)
        elif self._in_traceback or _NAMED_RANK.match(line):
            is_exception = self._see_in_traceback(self._before.sub("", line, count=1).rstrip(), line)
        elif ("Error" in line or "Exception" in line) and _BARE_EXCEPTION.match(bare := _RANK_PREFIX.sub("", line)):
            is_exception = self._see_exception(bare.strip(), "bare") or True
        self._previous = line
        if "error: " in line:
            self._see_scheduler(line)
        self._see_root_cause(line)
        self._client_said = (self._client_said or line.strip()) if _CLIENT.match(line) else ""
        if line.rstrip().endswith(_NCCL_DETAIL):
            said = next((kind for kind in _BEST_FIRST if "NCCL error" in self._found.get(kind, "")), "report")
            is_known = said in self._found or not self._possible
            self._announced = (self._found, said) if is_known else (self._possible, min(self._possible))
        lower = line.lower()
        self._is_the_same |= _CHAINED in lower
        if not any(word in lower for word in _WORDS):
            goes_on = not _OF_THE_END.match(line)
            self._went_on |= goes_on and "complaint" in self._found
            self._is_the_same |= goes_on and not self._in_traceback
        elif not _NO_MESSAGE.match(line):
            self._see_words(line, is_exception=is_exception)

    def _see_words(self, line: str, *, is_exception: bool) -> None:
        """Take in a line that may say why a run died, by its words."""
        self._is_aside |= _ASIDE.search(line) is not None
        self._see_mpirun(line)
        # An exception that speaks of another process is a consequence: what it said of that one may stand below.
        is_consequence = is_exception and _OF_ANOTHER.search(line)
        if _KNOWN_CAUSE.search(line) and not (is_consequence or _is_harmless(line) or _TOLD.search(line)):
            self._see_known(line)
        elif not is_exception and self._wants(line):
            self._note_possible(_rank_of_possible(line), line.strip())

    def _see_whether_it_goes_on(self, line: str) -> None:
        """Call what was found possible where training goes on, or a script after its complaint; the possible weaker."""
        best = self._best_kind()
        if not best and not self._possible:
            return
        if _PROGRESS.search(line) or self._bar_moved(line):
            self._possible = {_BEFORE_PROGRESS: self._found[best] if best else self._possible[min(self._possible)]}
            self._found.clear()
            self._bars.clear()
            self._is_over = self._in_doubt = self._was_killed_for_memory = False
            self._went_on = self._others_went_on = False
        elif "complaint" in self._found and _TOLD.search(line):
            self._possible.setdefault(_SOUNDS + _OUTLIVED, self._found.pop("complaint"))
        elif best in _OF_A_PROCESS:
            self._others_went_on |= _INFORMS.search(line) is not None
        elif not best and "NCCL INFO" not in line and _INFORMS.search(line):
            for rank in _OUTLIVABLE & self._possible.keys():
                self._possible[rank + _OUTLIVED] = self._possible.pop(rank)

    def _bar_moved(self, line: str) -> bool:
        """Whether a progress bar is farther than where it was first drawn after the line that was found."""
        if not (bar := _BAR.search(line)):
            return False
        name = line[: bar.start()].partition("%")[0].rstrip(" 0123456789") + bar[2]
        return self._bars.setdefault(name, int(bar[1])) < int(bar[1])

    def _wants(self, line: str) -> bool:
        """Whether a line that only sounds like a failure can be better than what was found."""
        if self._best_kind() in _OF_A_PROCESS or (self._in_traceback and line[:1].isspace()):
            return False
        return _SOUNDS not in self._possible and (_WORDED not in self._possible or bool(_SOUNDS_SO.search(line)))

    def _note_possible(self, rank: int | None, line: str) -> None:
        if rank is not None and rank not in self._possible:
            self._possible[rank] = _cut(line)
            if line.endswith(":") and not self._announced:
                self._announced = self._possible, rank

    def _see_known(self, line: str) -> None:
        self._was_killed_for_memory |= _OOM_KILL.search(line) is not None
        if _ENDED_FOR_ALL.search(line):
            self._is_over, self._in_doubt = True, bool(self._found)
            self._ended_for_all = _cut(line.strip()) if self._found else ""
            if failed := _FAILED_NODE.search(line):
                self._note_where("", failed[1])
        elif _WAITED.search(line) and "known" not in self._found:
            self._in_doubt = bool(self._node) or not all(map(_WAITED.search, self._found.values()))
        text = _cut(_RANK_PREFIX.sub("", line).strip())
        kind = _kind_of(text)
        if kind == "known" and all(map(_NCCL_WARNING.search, (text, self._found.get("of another", "")))):
            kind = "consequence"
        if self._client_said not in ("", line.strip()) and (client := _CLIENT.match(line)):
            text = _cut(f"{self._client_said}; {line[client.end() :].strip()}")
        self._has_ended |= kind == "report"
        if kind not in self._found and not self._says_more(kind):
            self._found[kind] = text
            self._bars.clear()
            self._note_where(_rank_of(line))

    def _says_more(self, kind: _Kind) -> bool:
        """Whether a line that sounds like a failure says more than this one below it, that a process ended."""
        return kind in _ENDS and min(self._possible, default=_WORDED) < _WORDED

    def _explains(self, line: str) -> bool:
        """Take in what stands below a line that announces it; whether that is all that it can say."""
        if not self._announced or not line or _TRACEBACK in line:
            return False
        texts, key = self._announced
        if key in texts:
            texts[key] = _cut(f"{texts[key]} {line}")
        self._announced = (texts, key) if line.endswith(":") else None
        return texts is self._found

    def _begin_traceback(self, line: str) -> None:
        self._in_traceback, self._statement = True, ""
        self._heading = self._previous.strip() if " ERROR " in self._previous else ""
        before = line[: line.index(_TRACEBACK)][-_LONGEST_BEFORE:]
        margin = before[: len(before) - len(before.lstrip())]
        alike = _NUMBER.sub(r"\\d+", re.escape(before)) or _RANK_PREFIX.pattern
        self._before = re.compile(f"^(?:{alike}|{_RANK_PREFIX.pattern}|{margin})")

    def _see_scheduler(self, line: str) -> None:
        exited = _EXITED.search(line)
        if exited and not self._node:
            self._note_where(re.split("[,-]", exited[2])[0], exited[1])

    def _see_mpirun(self, line: str) -> None:
        if exited := _EXITED_UNDER_MPI.search(line):
            self._note_where(*exited.groups())

    def _see_root_cause(self, line: str) -> None:
        """Take in which rank torchrun saw fail first, and where: it knows better than the order of the lines."""
        self._below_root_cause |= _ROOT_CAUSE in line
        field = _ROOT_FIELD.match(line) if self._below_root_cause else None
        if field and field[1] == "rank":
            self._rank = field[2]
        elif field:
            self._node = field[2]

    def _note_where(self, rank: str, node: str = "") -> None:
        self._rank, self._node = self._rank or rank, self._node or node

    def _see_in_traceback(self, line: str, printed: str) -> bool:
        if not _EXCEPTION.match(line):
            self._statement = line.strip() if _STATEMENT.match(line) else self._statement
            return False
        self._in_traceback = False
        line = self._with_statement(line) if _IS_NAME.match(line) else line
        first, rank = self._found.get("cause"), _rank_of(printed)
        if not self._see_exception(line, "cause"):
            self._noticed_by = self._noticed_by or rank
            return True
        self._note_where(rank)
        if first and first.split(":")[0] != line.split(":")[0]:
            if rank not in ("", self._rank):
                self._found["cause"], self._in_doubt = first, True
            else:
                self._in_doubt |= not self._is_the_same
        self._is_the_same = False
        return True

    def _with_statement(self, exception: str) -> str:
        """An exception without a message, and the statement of the last traceback, which says more."""
        return f"{exception} at {self._statement}" if self._statement else exception

    def _see_exception(self, line: str, kind: _Kind) -> bool:
        """Take in an exception; whether it is more than the consequence of another one."""
        if "ChildFailedError" in line:
            self._has_ended = True
            if not self._says_more("summary"):
                self._found.setdefault("summary", _cut(line))
            return False
        is_consequence = self._is_aside or any(known.search(line) for known in (_CONSEQUENCES, _REPORT, _OF_ANOTHER))
        kind = ("report" if self._is_aside else "consequence") if is_consequence else kind
        self._is_aside = False
        if self._says_more(kind):
            return False
        self._found[kind] = _cut(f"{self._heading} {line}".strip() if is_consequence else line)
        self._bars.clear()
        if named := _FOUND_NAN.search(line):
            self._note_where(*named.groups())
        self._announced = (self._found, kind) if line.endswith(":") else None
        return not is_consequence

    def _best_kind(self) -> _Kind | None:
        return next((kind for kind in _BEST_FIRST if kind in self._found), None)

    def _is_certain(self, kind: _Kind) -> bool:
        by_memory = self._was_killed_for_memory and not _MEMORY.search(self._found[kind])
        has_ended, is_cut = self._node or self._has_ended, self._found[kind].endswith(":")
        outlived = self._went_on if kind == "complaint" else self._others_went_on and not has_ended
        return kind in _AT_FIRST_HAND and not (
            self._rival_of(kind) or self._in_doubt or by_memory or outlived or is_cut
        )

    def _rival_of(self, kind: _Kind | None) -> str:
        """Another line that may be why: one that sounds like a failure, beside what a process says of itself, or what
        ended the job for all after it.
        """
        best = min(self._possible, default=_ENDED)
        sounds_so = self._possible[best] if kind in _AT_FIRST_HAND and best <= _WORDED else ""
        return sounds_so or self._ended_for_all

    @property
    def best(self) -> str:
        """The line, with rank and node behind it; empty without any."""
        if kind := self._best_kind():
            text = self._found[kind]
        elif self._possible:
            text = self._possible[min(self._possible)]
        else:
            return ""
        rank = self._rank or (self._noticed_by if kind == "consequence" else "") or _rank_of(text)
        where = [f"rank {rank}"] if rank else []
        where += [self._node] if self._node and self._node not in text else []
        if text.endswith(":") or (self._in_traceback and _IS_NAME.match(text)):
            text = self._with_statement(text)  # the log is cut before the message
        rival = self._rival_of(kind)
        text += f"; also: {rival}" if rival else ""
        text = text if kind and self._is_certain(kind) else f"{POSSIBLY}{text}"
        return f"{text} ({', '.join(where)})" if where else text
