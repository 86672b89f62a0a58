"""Processes of this machine: their identity, their trees, how they start and end. Linux only (/proc).

Standard library only: srun starts through here many times a night, and must start fast.
"""

import ctypes
import os
import signal
import socket
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
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
    boot.
    """

    host: str
    boot_id: str
    pid: int
    start_ticks: int


@dataclass(frozen=True)
class ProcessEntry:
    """What /proc/<pid>/stat says about one process."""

    pid: int
    state: str
    parent: int
    session: int
    start_ticks: int

    @property
    def is_running(self) -> bool:
        """Whether it still runs: a zombie is an exit code that nobody has collected."""
        return self.state not in "ZX"


class ChildEnd(NamedTuple):
    """How a child ended: exit code and signal, one of which is 0."""

    pid: int
    code: int
    signal: int


def boot_id() -> str:
    """The kernel's name for the current boot."""
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


def identify(pid: int) -> ProcessIdentity | None:
    """Who the process is; None when no such process runs."""
    entry = read_entry(pid)
    if entry is None or not entry.is_running:
        return None
    return ProcessIdentity(host=socket.gethostname(), boot_id=boot_id(), pid=pid, start_ticks=entry.start_ticks)


def is_gone(identity: ProcessIdentity) -> bool:
    """Whether the process has certainly ended. A process of another host is never certain: it cannot be seen here."""
    return identity.host == socket.gethostname() and identify(identity.pid) != identity


def read_entry(pid: int) -> ProcessEntry | None:
    """Read one process's entry; None when there is no such process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The command's name stands in parentheses and may hold spaces and parentheses itself.
    fields = text[text.rindex(")") + 2 :].split()
    return ProcessEntry(
        pid=pid,
        state=fields[0],
        parent=int(fields[1]),
        session=int(fields[3]),
        start_ticks=int(fields[19]),
    )


def running_processes() -> dict[int, ProcessEntry]:
    """Every process that runs now, by pid."""
    entries = (read_entry(int(name)) for name in os.listdir("/proc") if name.isdigit())
    return {entry.pid: entry for entry in entries if entry is not None and entry.is_running}


def descendants(ancestor: int, *, without: Iterable[int] = ()) -> set[int]:
    """Pids of all running children, grandchildren... of a process, leaving out the trees under `without`."""
    left_out = set(without)
    children: dict[int, list[int]] = {}
    for entry in running_processes().values():
        children.setdefault(entry.parent, []).append(entry.pid)
    found: set[int] = set()
    waiting = [ancestor]
    while waiting:
        for child in children.get(waiting.pop(), []):
            if child not in left_out and child not in found:
                found.add(child)
                waiting.append(child)
    return found


def processes_with_variable(name: str, value: str) -> set[int]:
    """Pids of the running processes that were started with this environment variable. Others' processes are skipped."""
    wanted = f"{name}={value}".encode()
    found = set()
    for pid in running_processes():
        try:
            environment = Path(f"/proc/{pid}/environ").read_bytes()
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
        if wanted in environment.split(b"\0"):
            found.add(pid)
    return found


def send_signal(pid: int, number: int) -> None:
    """Send a signal to one process; one that has ended is no error."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return


def signal_group(leader: int, number: int) -> None:
    """Send a signal to the process group of a child that was started by `start_session` and not yet collected."""
    try:
        os.killpg(leader, number)
    except ProcessLookupError:  # it is so young that it has not made its group yet
        send_signal(leader, number)


def kill_until_gone(find: Callable[[], set[int]], *, patience: float) -> bool:
    """Kill what `find` returns until it returns nothing; return whether that was reached within `patience` seconds.

    Asked again and again, because a process may fork between being found and being killed. Nothing is collected: the
    caller's children may be somebody else's business.
    """
    deadline = time.monotonic() + patience
    while members := find():
        if time.monotonic() > deadline:
            return False
        for pid in members:
            send_signal(pid, signal.SIGKILL)
        time.sleep(0.005)
    return True


def ended_child(pid: int = 0, *, collect: bool) -> ChildEnd | None:
    """A child that has ended, of all children or this one; None when there is none.

    Args:
        pid: This child; any child for 0.
        collect: Whether it is collected. Else its number, which is also its session's, is given to no other process.

    """
    try:
        flags = os.WEXITED | os.WNOHANG | (0 if collect else os.WNOWAIT)
        found = os.waitid(os.P_PID if pid else os.P_ALL, pid, flags)
    except ChildProcessError:
        return None
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
    argv: Sequence[str],
    *,
    environment: Mapping[str, str],
    directory: str,
    stdin: int,
    stdout: int,
    stderr: int,
) -> int:
    """Start a program in a session of its own, which also is its process group; return its pid.

    Only for single-threaded programs: it forks. The kernel kills the program when this process dies. One that cannot
    be started says so on `stderr` and exits with `COULD_NOT_START`.
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
        _reset_signals()
        for source, target in ((stdin, 0), (stdout, 1), (stderr, 2)):
            os.dup2(source, target)
        os.chdir(directory)
        os.execvpe(argv[0], list(argv), dict(environment))
    except OSError as error:
        os.write(2, f"slurmstepd: error: execve(): {argv[0]}: {error.strerror}\n".encode())
    finally:
        os._exit(COULD_NOT_START)


def _reset_signals() -> None:
    # Python ignores SIGPIPE, and ignored and blocked signals pass through exec: a job expects none of either.
    for name in ("HUP", "INT", "QUIT", "PIPE", "TERM", "USR1", "USR2", "CHLD"):
        signal.signal(signal.Signals[f"SIG{name}"], signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
