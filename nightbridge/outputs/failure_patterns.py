"""What one line of a log says of a failure: tables of what programs write, and how well a line says why a run died."""

import re
from typing import Literal, get_args

TRACEBACK = "Traceback (most recent call last)"
_BEFORE = r"^\s*(?:\d{4}-\d\d-\d\d \S{8,30} )?(?:[\w.-]+/\d+ )?(?:\[default\d+\]:)?(?:\[?\d+\]?:? (?=\[rank))?"
"""What a log collector, NeMo-Run, torchrun and srun --label write before a rank's prefix."""
RANK_PREFIX = re.compile(
    _BEFORE + r"(?:\[rank\d+\]:\s?|\[?\d+\]?:\s|.{0,40}\[(?:\d+,)?\d+\]<std\w+>:|\(\w+ pid=[^)]{1,80}\) |(?<=\]:))"
)
"""What stands before a line of a rank: as torch, srun --label, mpirun, NeMo-Run, torchrun and Ray write it."""
LONGEST_BEFORE = 200
NUMBER = re.compile(r"\d+")
NAMED_RANK = re.compile(_BEFORE + r"\[rank\d+\]: ")
EXCEPTION = re.compile(
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
    "installers": r"make(?:\[\d+\])?: \*\*\* |No matching distribution found"
    r"|Could not find a version that satisfies|Could not resolve host"
    r"|fatal: (?:not a git|could not|unable to|repository|Could not)",
}
# What ends the process that says it, without a traceback.
_ENDINGS: dict[str, str] = {
    "options": r"[Uu]nrecognized (?:option|argument)|the following arguments are required|error: argument .+: "
    r"|invalid option -- |ambiguous option|[Nn]o such option|Could not override |is not in struct|Missing mandatory",
    "crash": r"(?i:segmentation fault|segfault encountered|memory access fault|bus error)|Illegal instruction"
    r"|[Ff]loating point exception|double free|corrupted size vs|(?:malloc|free|realloc|munmap_chunk)\(\): \w"
    r"|stack smashing|Fatal Python error: |Caught signal \d+|\bSIG[A-Z]+ received at time|Assertion `.+[`'] failed"
    r"|panicked at|pure virtual method",
    "memory": r"oom[-_]kill|(?i:out of memory)|[Ee]xceeded (?:job )?memory limit|Memory cgroup out of",
    "CUDA": r"CUDA (?:error|driver version)|CUDA_ERROR_\w+|CUDNN_STATUS|CUBLAS_STATUS|CUSOLVER_STATUS|cudaError\w+"
    r"|no kernel image is available|illegal memory access|unspecified launch failure|device-side assert triggered"
    r"|no CUDA-capable device|Found no NVIDIA driver|nvidia-smi has failed|Failed to initialize NVML|uncorrectable ECC"
    r"|Xid \(|fallen off the bus|ptxas fatal|nvcc fatal|Cuda failure",
    "NCCL": r"NCCL (?:error|WARN (?:Cuda failure|Call to|NET|Timeout|Net|Duplicate GPU|Mismatch|Invalid config"
    r"|Bootstrap :|socket\w+: Connect to|Error while (?:creating|attaching)|Failed to CUDA|Could not (?:find|init)"
    r"|No (?:interface|socket)))"
    r"|nccl\w+Error|Watchdog caught collective operation timeout|Duplicate GPU detected|No socket interface found"
    r"|Heartbeat monitor timed out|watchdog got stuck for",
    "MPI": r"was not built with|Host key verification failed|daemon has unexpectedly failed"
    r"|Attempting to use an MPI routine"
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
MEMORY = re.compile(_ENDINGS["memory"])
KNOWN_CAUSE = re.compile("|".join((*_ENDINGS.values(), *_COMPLAINTS.values())))
_HARMLESS = re.compile(
    r"\b\w*warn(?:ing)?\b|^rm: cannot remove|going to /tmp instead|could not remove squashfs"
    r"|when one has already been registered|for benchmark choice ",
    re.IGNORECASE,
)
_LISTED = re.compile(
    r"\s*\w+ \.{3,} |\s*[a-z]+_\w+: (?i:null|none|true|false|<n/a>|[\d.e+-]+)\s*$|\s*traceback : To enable "
)
"""A setting in the list that a program prints as it starts, and a field of torchrun's summary, which say nothing."""
INFORMS = re.compile(r"(?<![=\w])(?:INFO|DEBUG)\b|level=info|(?:^|: |\[)[DI]\d{0,4} [a-zA-Z\d]|\] datetime: \d{4}-")
REMARKS = re.compile(
    INFORMS.pattern + r"|(?:^|: |\[|\[NeMo )W\d{0,4} [a-zA-Z\d]|(?:^|srun: error: )\s*(?:If|Hint|Note|Tip|To|Try)\b"
    r"|(?i:\b(?:retry|retrying|falling back|skipping|ignor(?:ed|ing))\b)"
)
"""The level of a line that does not complain, as Python, glog and torch write it; a process that continues; advice."""
NCCL_WARNING = re.compile(r"NCCL WARN |\.(?:h|cc?):\d+ WARN ")
"""Of its warnings NCCL makes the one on which a run died, too."""
BARE_EXCEPTION = re.compile(
    r"^(?:[A-Za-z_]\w*\.)*(?:[A-Z]\w*(?:Error|Exception)(?:\(\w+\))?|Exception): (?:\S|$)|^\S*ChildFailedError:"
)
NCCL_DETAIL = "Last error:"
"""What stands above the one line of a DistBackendError that names the reason."""
OF_NCCL = re.compile(r"NCCL error|nccl\w+Error")
# A line that says why a run died has one of these words in lower case. To look for them first is five times as fast.
_FAILURE_WORDS = (
    "error", "fail", "fatal", "critical", "exception", "abort", "panic", "crash", "assert", "kill", "died", "dead",
    " fault", "signal", "terminat", "exit ", "exits ", "exited", "not ", "n't ", "no such", "no space", "no route",
    "no module", "no matching", "no usable", "cannot", "could", "unable", "must be", "denied", "refused",
    "unauthorized", "forbidden", "invalid", "illegal", "unrecognized", "unknown", "unsupported", "undefined",
    "unexpected", "unavailable", "unbound", "ambiguous", "missing", "required", "mismatch", "conflict", "duplicate",
    "syntax", "corrupt", "smash", "overflow", "out of", "oom", "quota", "limit", "exceed", "insufficient", "too many",
    "too long", "too large", "timed out", "timeout", "busy", "stuck", "hang", "lost", "unreachable", "disconnect",
    "reset by", "broken", "violat", "bad ", "stale", "expired", "read-only", "in use", "double free", "cancelled",
    "preempt", "evict", "low on", "fallen off", "uncorrectable", " vs ", " warn ",
)  # fmt: skip
WORDS = (
    *_FAILURE_WORDS, "no interface", "no socket", "no kernel", "no cuda", "no nvidia", "floating point", "malloc():",
    "free():", "munmap_chunk", "sigabrt", "sigsegv", "sigbus", "pure virtual", "endpoint", "execve", "elf", "xid",
    "segfault", "cuda", "cudnn", "cublas", "cusolver", "launch", "device-side", "orte ", "watchdog", "mpi", "container",
    "enroot", "manifest", "due to", "credential", "status code", "resolution", "bus ", "what()", "*** ",
)  # fmt: skip
# How well a line that only sounds like a failure says why, best first: in one of these ways, or only with a word.
SOUNDS_SO = re.compile(
    r"(?<![\w=-])(?i:error|fatal|critical|exception|failed|failure|abort(?:ed|ing)?|died|dead|crash(?:ed)?|panic"
    r"|fault|denied|refused|corrupt(?:ed)?|unrecognized|no such|timed out|exceed(?:s|ed)?|stuck|unreachable|illegal"
    r"|lost|mismatch|preempted|evicted)\b(?! ?[=:] ?[\d.])(?!.*\{$)"
    r"|\b[A-Z]\w*(?:Error|Exception): \S| WARN |(?:^|: |\[)[EF]\d{0,4} [a-zA-Z\d]"
)
SOUNDS, WORDED, ENDED, _ENDED_LAST, _WARNED, BEFORE_PROGRESS = range(0, 24, 4)
"""That a process ended comes below; then how Slurm reports a task's end, a warning, and what training went on after."""
ENDED_POSSIBLY = {ENDED, _ENDED_LAST}
OUTLIVABLE, OUTLIVED = {SOUNDS, WORDED}, 14
"""What is added where something went on after a line, so that any end says more."""
WENT_ON_AFTER = (SOUNDS + OUTLIVED, WORDED + OUTLIVED)
ANNOUNCES = re.compile(r":$|\b\d{1,6} validation errors? for \w+$")
"""What ends a line that the next one explains."""
_SAYS_LITTLE = re.compile(
    r"(?i:exit(?:ed)?[ _-]?(?:code|status)|non-zero|(?:error|return) code:? -?\d+|returned (?:error )?-?\d+ )"
    r"|(?i:code=exited|\bkill(?:ed|ing)\b)"
    r"|(?i:\b(?:aborting|terminat(?:ed?|ing)(?! with exception)|shutting down)\b)|Some NCCL operations have"
    r"|container exited too soon|Timed out waiting for job step|Error executing job with overrides"
    r"|^[^a-z]+$|\bFAILED$|\brc=|(?:\.\.\.|:)$"
)
"""What tells that something ended, not why, or only announces what the next line says."""
# What says that a process ended, and not why; the last of a chain that another line heads.
REPORT = re.compile(
    r"(?:failed|FAILED) \(exitcode:? -?(?!-?(?:4|7|8|11)\b)|Signal (?!(?:4|7|8|11) )\d+ \(SIG\w+\) received by PID"
    r"|tasks? [\d,-]+: (?:Killed|Aborted)|exit(?:s|ed) with return code"
    r"|exited on signal (?!(?:4|7|8|11) )|SIG(?:ABRT|TERM|INT|HUP) received"
    r"|[Ss]ignal (?:1|2|6|10|12|15)\b|killed by signal: (?:Killed|Aborted|Terminated)|failed to import docker"
    r"|nccl\w+Error|(?:unhandled (?:system|cuda)|NCCL.*internal) error|Call to CUDA function failed"
    r"|: (?i:no|unspecified) error\b"
)
# What a process says of another one: it did not answer, or is no more.
OF_ANOTHER = re.compile(
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
EXITED = re.compile(r"srun: error: ([\w.-]+): tasks? ([\d,-]+): (?!Terminated)")
_CANCELLED = re.compile(r"\*\*\* JOB \d+ ON \S+ CANCELLED AT \S+ \*\*\*")
"""How Slurm tells that somebody cancelled the job. That of a step follows every end."""
_BY_LAUNCHER = re.compile(r"srun: (?!error: |fatal: )|srun: error: \S+: tasks? \S+: | ON \S+ CANCELLED AT ")
"""How Slurm reports a task's end, and ends those that are left: whatever the reason."""
IS_NAME = re.compile(r"[A-Za-z_][\w.]*$")
STATEMENT = re.compile(r"\s+(?!File \"|raise |[~^ ]+$)\S")
"""A line of code below the place where it stands, which says more than that it raised."""
FRAME = re.compile(r"\s*(?:File \"|frame #|at |PC: |@ |#\d+ |\[ ?\d+\] \S*[/(]|raise |[~^]+ *$|Exception raised from )")
"""A line of a stack."""
CONSEQUENCES = re.compile(
    r"DistBackendError|DistNetworkError|DistStoreError|BrokenPipeError|ConnectionResetError|KeyboardInterrupt|EOFError"
    r"|SignalException|RayTaskError|SupervisionError|Rendezvous\w+Error|ProcessRaisedException|ProcessExitedException"
    r"|CalledProcessError"
)
"""Exceptions of processes that ended because another one did."""
REMOTE = "RayTaskError("
"""How Ray heads the stack of a worker and the exception below it, which says why."""
BY_SIGNAL = "SignalException: "
"""How torchrun ends by the signal that Slurm ends a job with."""
OF_A_CHILD = re.compile(r"CalledProcessError: .*returned non-zero exit status")
"""A command that failed has complained itself."""
BAR = re.compile(r"\d%\|")
"""A bar of tqdm, which is drawn between the lines of a message."""
OF_OTHERS = re.compile(r"\[NeMo I |" + INFORMS.pattern)
"""What another rank tells of its work, between a line that announces a message and that message."""
CLOSING = re.compile(
    r"closing signal SIGTERM|destroy_process_group\(\) was not called|process group has NOT been destroyed"
)
"""What torch warns of as a rank ends, and torchrun as it ends the others: no sign that anything went on."""
OF_THE_CODE = re.compile(
    _ENDINGS["options"] + r"|Assertion `.+[`'] failed|panicked at"
    r"|CUDA error: (?:device-side assert|no kernel image|misaligned address|invalid (?:configuration )?argument)"
)
"""What no machine causes, although it ends a process as a broken one does."""
OF_THE_MACHINE = re.compile(
    r"(?:Connection|Timeout|HTTP|Proxy|SSL)\w*Error\b|\w(?:Timeout|Unavailable)\b|gaierror|Socket Timeout|Wait timeout"
    r"|error: timeout|socket has failed|[Aa]ddress already in use|name resolution|Name or service not known|Network is "
    r"|(?i:\b(?:CUDA|cuBLAS|cuDNN|NCCL) error)|nccl\w+Error|CUDA unknown error|CUDA driver|cudaError"
    r"|(?:CUDNN|CUBLAS|CUSOLVER)_STATUS|No CUDA GPUs|NVIDIA driver|NVML|killed by signal"
    r"|NCCL communicator was aborted|cudaGetDeviceCount|No space left on device"
    r"|(?:Input/output|Remote I/O) error|Stale file handle|(?i:transport endpoint)"
    r"|Service Unavailable|Bad Gateway|Too Many Requests|Server Error"
)
"""What a rank says in an exception of its own when its machine, the network or a file system failed."""
CLIENT = re.compile(r"(?:srun|sbatch|salloc): (?:error|fatal): +(?!If |\S+: tasks? )")
"""A complaint of a client of Slurm, which heads the next one of it."""
NO_MESSAGE = re.compile(r"\++ |.*NCCL INFO ")
"""A command that a shell is about to run, and what NCCL tells of its work."""
CHAINED = "the above exception"
"""What Python writes between two tracebacks of one process."""
ASIDE = re.compile(r"Exception (?:ignored in|in thread)|Error in (?:atexit|sys\.)|--- Logging error ---")
"""What heads a traceback that the process outlives, or prints when it has ended."""
ENDED_FOR_ALL = re.compile(r"DUE TO (?:TIME LIMIT|NODE FAILURE|PREEMPTION|JOB REQUEUE)|Node failure on ")
"""After Slurm has ended the job, nothing that a process complains of is why it ended."""
OF_THE_END = re.compile(r"\s|$|srun: |[-=*]+$|Primary job|mpirun ")
"""What continues the line above it, and what launchers say of a job that ended: no sign that a script went on."""
CONTAINER_LOG = "pyxis:     "
"""What pyxis writes before a line of the container's own log, whose last complaint is why it did not start."""
FAILED_NODE = re.compile(r"Node failure on ([\w.-]+)")
WAITED = re.compile(r"[Ww]atchdog caught|Heartbeat monitor|watchdog got stuck")
"""A rank that waited for the others in vain: only where none is known to have ended."""
OOM_KILL = re.compile(r"oom[-_]kill|OOM Killed")
ROOT_CAUSE = "Root Cause (first observed failure)"
ROOT_FIELD = re.compile(r"^\s+(rank|host)\s*: (\S+)")
"""What stands below it in torchrun's summary."""
PROGRESS = re.compile(r" iteration +\d+/ *\d+ \|")
"""Training that continues, as Megatron-Bridge prints it."""
FOUND_NAN = re.compile(r"Rank (\d+): found .* node: ([\w.-]+)")
"""How Megatron-LM ends where a gradient or a loss is no number."""
FLAKY_MARKERS = (
    "The server socket has failed to listen on any local network address.",
    "Some NCCL operations have failed or timed out.",
    "uncorrectable ECC error encountered",
    "illegal memory access",
    "illegal instruction",
    "torch.distributed.DistNetworkError",
    "torch.distributed.DistBackendError",
    "ncclRemoteError",
    "Watchdog caught collective operation timeout",
    "Segmentation fault",
    "For debugging consider passing CUDA_LAUNCH_BLOCKING=1",
    "double free or corruption",
    "Call to CUDA function failed.",
    "Connection reset by peer",
    "invalid pointer",
    "malloc(): unaligned tcache chunk detected",
    "zmq.error.ZMQError: Address already in use",
    "We couldn't connect to 'https://huggingface.co'",
    "Unpack failed: incomplete input",
    "unspecified launch failure",
    "free(): corrupted unsorted chunks",
    "Segfault encountered",
    "Fatal glibc error",
    "EOFError: No data left in file",
)
"""Texts after which trying again is worth it, as Megatron-Bridge's launcher sees it. Its list also has `found NaN in`;
here a NaN is a result of the code under test (`logs.LogReading.nan_marker`), never the machine's fault."""
_ERROR_LIMIT = 500

# A "complaint" is one of a script that may have gone on; the "summary" is torchrun's: it only announces what the lines
# below it say.
Kind = Literal["cause", "known", "bare", "complaint", "of another", "consequence", "report", "summary"]
BEST_FIRST: tuple[Kind, ...] = get_args(Kind)
ENDS = ("report", "summary")
"""What only says that a process ended: a line above it that sounds like a failure says more."""
OF_A_PROCESS = ("cause", "known", "bare")
AT_FIRST_HAND = (*OF_A_PROCESS, "complaint")
"""What a process says of itself. Only this can be certain: the others say that one ended, and not why."""


def is_harmless(line: str) -> bool:
    """Whether a line only warns, or tells of what was to be removed."""
    return bool(_HARMLESS.search(line)) and not NCCL_WARNING.search(line)


def rank_of(line: str) -> str:
    """The rank that a line begins with or names; empty where it has none."""
    found = _RANK.match(line)
    return next(number for number in found.groups() if number) if found else ""


def rank_of_possible(line: str) -> int | None:
    """How well a line with one of the words says why a run died; None for one that does not say anything."""
    sounds_so = SOUNDS_SO.search(line)
    if INFORMS.search(line) or _LISTED.match(RANK_PREFIX.sub("", line)):
        return None
    if (is_harmless(line) or REMARKS.search(line)) and not ("errno" in line and not OF_ANOTHER.search(line)):
        return _WARNED if sounds_so else _WARNED + 1
    if _CANCELLED.search(line):
        return WORDED
    if _BY_LAUNCHER.search(line):
        return _ENDED_LAST
    if FRAME.match(RANK_PREFIX.sub("", line)):
        return None
    lower = line.lower()
    if not sounds_so and not any(word in lower for word in _FAILURE_WORDS):
        return None
    if _SAYS_LITTLE.search(line) and "crashed" not in lower:
        return ENDED
    return SOUNDS if sounds_so else WORDED


def cut(text: str) -> str:
    """A line without its middle where it is long: launchers write what ended a process behind its whole command."""
    return text if len(text) <= _ERROR_LIMIT else f"{text[: _ERROR_LIMIT // 2]} ... {text[5 - _ERROR_LIMIT // 2 :]}"


def kind_of(text: str) -> Kind:
    """The kind of a line of the tables."""
    if REPORT.search(text) or (text.startswith("what(): ") and OF_ANOTHER.search(text)):
        return "report"
    if OF_ANOTHER.search(text):
        return "of another"
    return "known" if _ENDING.search(text) else "complaint"
