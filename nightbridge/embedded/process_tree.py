"""Processes of this machine: their identity, their trees, how they start and end. Linux only (/proc).

Standard library only: srun starts through here many times a night, and must start fast.
"""

import contextlib
import ctypes
import os
import signal
import socket
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

# linux/prctl.h
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36

COULD_NOT_START = 2
"""Exit code of a process whose program could not be started, the same as slurmstepd's."""


@dataclass(frozen=True)
class ProcessIdentity:
    """One process of one machine, never mistaken for a later one with the same number.

    `start_ticks` is when the process started, in clock ticks since boot (proc(5), stat field 22); `boot_id` names the
    boot. `process_table` is the PID namespace, of which each container has its own; empty in older records.
    """

    host: str
    boot_id: str
    pid: int
    start_ticks: int
    process_table: str = field(default="", compare=False)


@dataclass(frozen=True)
class ProcessEntry:
    """A process by its /proc/<pid>/stat."""

    pid: int
    state: str
    parent: int
    session: int
    start_ticks: int

    @property
    def is_running(self) -> bool:
        """Whether it still runs: a zombie is an exit code that is not collected yet."""
        return self.state not in "ZX"


class ChildEnd(NamedTuple):
    """How a child ended: exit code and signal, one of which is 0."""

    pid: int
    code: int
    signal: int


def identify(pid: int) -> ProcessIdentity | None:
    """Who the process is; None when no such process runs."""
    entry = read_entry(pid)
    if entry is None or not entry.is_running:
        return None
    return ProcessIdentity(socket.gethostname(), _boot_id(), pid, entry.start_ticks, _process_table())


def is_elsewhere(identity: ProcessIdentity) -> bool:
    """Whether the process cannot be seen here: another host's, or one in another process table of this one."""
    if identity.host != socket.gethostname():
        return True
    return identity.boot_id == _boot_id() and identity.process_table not in ("", _process_table())


def is_gone(identity: ProcessIdentity) -> bool:
    """Whether the process has certainly ended; of one that is elsewhere that is unknown."""
    return not is_elsewhere(identity) and identify(identity.pid) != identity


def _boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


def _process_table() -> str:
    return os.readlink("/proc/self/ns/pid")


def read_entry(pid: int) -> ProcessEntry | None:
    """Read one process's entry; None when there is no such process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The command's name stands in parentheses and may hold spaces and parentheses itself.
    fields = text[text.rindex(")") + 2 :].split()
    parent, session, start_ticks = (int(fields[index]) for index in (1, 3, 19))
    return ProcessEntry(pid, fields[0], parent, session, start_ticks)


def running_processes() -> dict[int, ProcessEntry]:
    """Every process that runs now, by pid; but for those of other users where /proc hides them (`hidepid=1`)."""
    found = {}
    for pid in (int(name) for name in os.listdir("/proc") if name.isdigit()):
        with contextlib.suppress(PermissionError):
            if (entry := read_entry(pid)) is not None and entry.is_running:
                found[pid] = entry
    return found


def descendants(ancestor: int, *, without: Collection[int] = ()) -> set[int]:
    """Pids of all running children, grandchildren... of a process, leaving out the trees under `without`."""
    parents = {entry.pid: entry.parent for entry in running_processes().values() if entry.pid not in without}
    found, before = {ancestor}, 0
    while len(found) > before:
        before = len(found)
        found |= {pid for pid, parent in parents.items() if parent in found}
    return found - {ancestor}


def processes_with_variable(name: str, value: str) -> set[int]:
    """Pids of the running processes that were started with this environment variable. Others' processes are skipped."""
    wanted = f"{name}={value}".encode()
    found = set()
    for pid in running_processes():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError, PermissionError):
            if wanted in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                found.add(pid)
    return found


def send_signal(pid: int, number: int) -> None:
    """Send a signal to one process; one that has ended is no error."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def signal_group(leader: int, number: int) -> None:
    """Send a signal to the process group of a child that was started by `start_session` and not yet collected."""
    try:
        os.killpg(leader, number)
    except ProcessLookupError:  # it is so young that it has not made its group yet
        send_signal(leader, number)


def kill_until_gone(find: Callable[[], set[int]], *, patience: float) -> bool:
    """Kill what `find` returns until it returns nothing; return whether that was reached within `patience` seconds.

    Repeated, because a process may fork between being found and being killed. Nothing is collected: the caller's
    children may be another's business.
    """
    deadline = time.monotonic() + patience
    while members := find():
        if time.monotonic() > deadline:
            return False
        for pid in members:
            send_signal(pid, signal.SIGKILL)
        time.sleep(0.005)
    return True


def collect_child() -> ChildEnd | None:
    """Collect any child that has ended; None when there is none."""
    try:
        return _child_end(os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG))
    except ChildProcessError:
        return None


def ended_child(pid: int) -> ChildEnd | None:
    """How a child ended; None while it runs. It stays uncollected: its number, also its session's, stays its own."""
    return _child_end(os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT))


def _child_end(found: os.waitid_result | None) -> ChildEnd | None:
    if found is None:
        return None
    code, number = (found.si_status, 0) if found.si_code == os.CLD_EXITED else (0, found.si_status)
    return ChildEnd(found.si_pid, code, number)


def adopt_orphans() -> None:
    """Make this process the parent of every orphan among its descendants, so that none leaves its tree (prctl(2))."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def start_session(
    argv: Sequence[str], environment: Mapping[str, str], directory: str, streams: tuple[int, int, int]
) -> int:
    """Start a program in a session of its own, which also is its process group; return its pid.

    Only for single-threaded programs: it forks. The kernel kills the program when this process dies. One that cannot
    be started reports that on its standard error and exits with `COULD_NOT_START`.

    `streams` are its standard input, output and error.
    """
    parent = os.getpid()
    # Blocked until the child has left our handlers behind: a signal in between would be lost.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    pid = os.fork()
    if pid:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return pid
    try:
        os.setsid()
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(COULD_NOT_START)  # the parent died before the kernel knew of the request
        # Python ignores SIGPIPE, and ignored and blocked signals pass through exec: a job expects none of either.
        for name in ("HUP", "INT", "QUIT", "PIPE", "TERM", "USR1", "USR2", "CHLD"):
            signal.signal(signal.Signals[f"SIG{name}"], signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        for target, source in enumerate(streams):
            os.dup2(source, target)
        os.chdir(directory)
        os.execvpe(argv[0], list(argv), dict(environment))
    except OSError as error:
        os.write(2, f"slurmstepd: error: execve(): {argv[0]}: {error.strerror}\n".encode())
    finally:
        os._exit(COULD_NOT_START)
