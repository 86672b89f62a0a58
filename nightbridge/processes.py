"""Processes that this one starts: run to their end or their time limit, and never orphaned.

A process that is killed cannot end its children, and its git or its launcher would run for minutes. `GUARD` is a small
helper process that reads the process groups to end from a pipe; at the pipe's end, which comes with the end of this
process, it kills them. A process that is killed between a program's start and that note leaves it behind.

Also here: the command line of a module of this package as a program of its own (`own_program`), and the end of this
process in time (`end_after_signals`). Python ends only when all threads of its pools have ended, which may take hours
during an upload. All work can be killed at any moment, so after a while it is.

Standard library only: some programs that import this must start quickly.
"""

import contextlib
import errno
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Protocol

from nightbridge.errors import NightbridgeError, PermanentError, TransientError
from nightbridge.files import PASSING

TAIL_LINES = 12
DRAIN_SECONDS = 10.0
"""How long to wait for the last output of a program that has ended: what left its session may hold a pipe."""

# Nothing can be started now: processes, memory or open files are used up, or the program is being replaced.
_BUSY = PASSING | {errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ETXTBSY}


class Process(Protocol):
    """What `run` needs of a process, which leads its process group; `subprocess.Popen` has it."""

    pid: int
    stdin: IO[bytes] | None
    stdout: IO[bytes] | None
    stderr: IO[bytes] | None

    def wait(self) -> int:
        """The exit code, negative for a signal."""


@dataclass(frozen=True)
class Finished:
    """How a program ended. `code` is negative for a signal, as in `subprocess`."""

    code: int
    stdout: bytes
    stderr: str

    @property
    def tail(self) -> str:
        """The last lines of stderr in one line, for a message."""
        lines = [line.strip() for line in self.stderr.splitlines() if line.strip()]
        return " | ".join(lines[-TAIL_LINES:])


def run(
    argv: Sequence[str | Path],
    *,
    environment: Mapping[str, str],
    timeout: float,
    cwd: Path | None = None,
    on_line: Callable[[str], None] | None = None,
    given: bytes = b"",
    merged: bool = False,
    started: Process | None = None,
) -> Finished:
    """Run a program without a terminal, in a session of its own; what it leaves running in that session is killed.

    Args:
        argv: The program and its arguments.
        environment: Its whole environment.
        timeout: Seconds after which it and all its children are killed.
        cwd: Where it runs.
        on_line: Called in another thread with each line of its stderr as it comes.
        given: Its whole standard input.
        merged: Whether its stdout joins its stderr, line by line.
        started: The process, where it is started otherwise; then the time limit alone is for this function.

    Raises:
        PermanentError: There is no such program, or it cannot be started.
        TransientError: It ran into the time limit, or nothing can be started now.
    """
    name = Path(argv[0]).name
    try:
        # A session of its own: nothing can prompt for a password on the terminal, and all children can be killed.
        process: Process = started or subprocess.Popen(
            [str(part) for part in argv],
            env=dict(environment),
            cwd=cwd,
            stdin=subprocess.PIPE if given else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT if merged else subprocess.PIPE,
            start_new_session=True,
        )
    except OSError as error:
        raise _not_started(error, argv, cwd, environment) from error
    stdout: list[bytes] = []
    lines: list[str] = []
    pumps = [threading.Thread(target=_read_lines, args=(process.stderr or process.stdout, lines, on_line), daemon=True)]
    if process.stderr is not None:
        pumps.append(threading.Thread(target=_read_all, args=(process.stdout, stdout), daemon=True))
    if process.stdin is not None:
        pumps.append(threading.Thread(target=_write_all, args=(process.stdin, given), daemon=True))
    expired = threading.Event()

    def expire() -> None:
        expired.set()
        _kill([process.pid])

    timer = threading.Timer(timeout, expire)
    timer.daemon = True
    with GUARD.over(process):
        try:
            for thread in (timer, *pumps):
                thread.start()
            code = process.wait()
        except RuntimeError as error:  # a thread counts as a process where these are used up
            raise _not_now(name, error) from error
        finally:
            timer.cancel()
            _kill([process.pid])
            process.wait()
            for pump in pumps:
                if pump.ident is not None:
                    pump.join(DRAIN_SECONDS)
    if expired.is_set():
        raise TransientError(f"{name} did not end within {timeout:.0f} s", advice="It was killed; will retry")
    return Finished(code=code, stdout=b"".join(stdout), stderr="\n".join(lines))


def _not_started(
    error: OSError, argv: Sequence[str | Path], cwd: Path | None, environment: Mapping[str, str]
) -> NightbridgeError:
    name = Path(argv[0]).name
    if error.errno in _BUSY:
        return _not_now(name, error.strerror)
    if cwd is not None and not cwd.is_dir():
        return PermanentError("no such folder", subject=str(cwd))
    # A folder of PATH that cannot be read refuses a program that is nowhere.
    found = "/" in str(argv[0]) or shutil.which(argv[0], mode=os.F_OK, path=environment.get("PATH"))
    if isinstance(error, FileNotFoundError) or (isinstance(error, PermissionError) and not found):
        return PermanentError("not installed", subject=name, advice=f"Install {name}, or put it on PATH")
    return PermanentError(f"cannot be started: {error.strerror}", subject=str(argv[0]))


def _not_now(name: str, why: object) -> TransientError:
    return TransientError(f"cannot be started now: {why}", subject=name, advice="Will retry")


def _read_lines(stream: IO[bytes], lines: list[str], on_line: Callable[[str], None] | None) -> None:
    with stream:
        for raw in stream:
            line = raw.decode(errors="replace").rstrip("\r\n")
            lines.append(line)
            if on_line:
                on_line(line)


def _read_all(stream: IO[bytes], parts: list[bytes]) -> None:
    with stream:
        parts.append(stream.read())


def _write_all(stream: IO[bytes], data: bytes) -> None:
    with contextlib.suppress(BrokenPipeError), stream:
        stream.write(data)


INTERRUPTED: ContextVar[Callable[[], bool]] = ContextVar("nightbridge_interrupted", default=lambda: False)
"""Tells whether what the calling thread works for has been interrupted: then `GUARD` lets no program of it live."""


class Guard:
    """The process groups that this process has started and that shall not outlive it."""

    def __init__(self) -> None:
        self._groups: dict[int, Callable[[], bool]] = {}
        self._lock = threading.Lock()
        self._helper: subprocess.Popen[bytes] | None = None

    @contextlib.contextmanager
    def over(self, process: Process) -> Iterator[None]:
        """Guard the process group that a process leads, until the end of the block."""
        self._note(process.pid)
        try:
            self.kill_interrupted()
            yield
        finally:
            self._note(-process.pid)

    def kill_interrupted(self) -> None:
        """End the guarded groups of what has been interrupted (`INTERRUPTED`), and no others."""
        with self._lock:
            _kill([group for group, interrupted in self._groups.items() if interrupted()])

    def _note(self, number: int) -> None:
        with self._lock:
            if number > 0:
                self._groups[number] = INTERRUPTED.get()
            else:
                self._groups.pop(-number, None)
            # A helper that was killed, or cannot be started now, is missed only if this process is killed as well.
            with contextlib.suppress(OSError):
                numbers = [number]
                if self._helper is None:
                    self._helper = _start_helper()
                    numbers = list(self._groups)
                assert self._helper.stdin is not None
                for one in numbers:
                    os.write(self._helper.stdin.fileno(), b"%d\n" % one)


def _start_helper() -> "subprocess.Popen[bytes]":
    return subprocess.Popen(
        own_program(__name__, python_options=["-S"]),
        # Ours may hold secrets, and this one outlives us.
        env={name: os.environ[name] for name in ("PATH", "LD_LIBRARY_PATH") if name in os.environ},
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def main(_arguments: Sequence[str]) -> int:
    """The helper: take in groups from stdin, one number a line, negative when it is over; at the end kill the rest."""
    groups: set[int] = set()
    for line in sys.stdin.buffer:
        if (number := int(line)) > 0:
            groups.add(number)
        else:
            groups.discard(-number)
    _kill(groups)
    return 0


def _kill(groups: Iterable[int]) -> None:
    for group in groups:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)


GUARD = Guard()
"""Process-wide: the groups that live now, each taken out at its end. What this process started ends with it."""


def own_program(module: str, arguments: Sequence[str] = (), *, python_options: Sequence[str] = ()) -> list[str]:
    """The command line that calls `main(arguments) -> int` of one of our modules with the Python that runs here.

    Isolated (`-I`): neither PYTHON* variables nor modules in the folder that it starts in can get in the way.
    """
    root = str(Path(__file__).resolve().parents[1])
    start = f"import sys; sys.path.append({root!r}); from {module} import main; sys.exit(main(sys.argv[1:]))"
    return [sys.executable, "-I", *python_options, "-c", start, *arguments]


SECONDS_TO_END = 9.0
"""How long a process may take to end after a signal."""


def end_after_signals() -> None:
    """Make sure that this process ends soon after the first SIGINT or SIGTERM that it handles.

    Only for a process that is all ours, and only in its main thread. Handlers that others set meanwhile, as Prefect
    does for a flow run, change nothing: Python writes the signal to our pipe before it calls any.
    """
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    threading.Thread(target=_end_after_signal, args=(reading,), name="end-after-signals", daemon=True).start()


def end_within(seconds: float, code: int) -> None:
    """End this process with an exit code after so many seconds, if it has not ended by then."""
    timer = threading.Timer(seconds, os._exit, args=(code,))
    timer.daemon = True
    timer.start()


def _end_after_signal(reading: int) -> None:
    while (number := os.read(reading, 1)[0]) not in (signal.SIGINT, signal.SIGTERM):
        pass
    end_within(SECONDS_TO_END, 128 + number)
