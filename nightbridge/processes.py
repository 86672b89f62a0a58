"""Child processes: run to their end or their time limit, never orphaned, their output line by line.

The guard: a small process beside this one that ends what this one has started, once this one is gone.

A process that is killed ends nothing itself, and its git or its launcher would go on for minutes. The guard reads the
process groups to end from a pipe, and at the pipe's end, which comes with the end of this process, it kills them.

Modules of this package as programs of their own. Standard library only: some of them must start quickly.

The end of a process in time, whatever of its threads holds it up.

Python ends only when all threads of its pools have ended, and what they do may take hours: an upload, a question to a
controller that is away. Everything of ours can be killed at any moment, so after a while it is.
"""

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from nightbridge.errors import PermanentError, TransientError

TAIL_LINES = 12


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
    umask: int = -1,
) -> Finished:
    """Run a program without a terminal.

    Args:
        argv: The program and its arguments.
        environment: Its whole environment.
        timeout: Seconds after which it and all its children are killed.
        cwd: Where it runs.
        on_line: Called with each line of its stderr as it comes.
        given: Its whole standard input, at most what a pipe holds (64 KiB).
        umask: The permissions that its files do not get; ours when -1.

    Raises:
        PermanentError: There is no such program.
        TransientError: It ran into the time limit.

    """
    name = Path(argv[0]).name
    try:
        # A session of its own: nothing can ask for a password on the terminal, and all children can be killed.
        process = subprocess.Popen(
            [str(part) for part in argv],
            env=dict(environment),
            cwd=cwd,
            stdin=subprocess.PIPE if given else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            umask=umask,
        )
    except FileNotFoundError as error:
        if cwd is not None and not cwd.is_dir():
            raise PermanentError("no such folder", thing=str(cwd)) from error
        raise PermanentError("not installed", thing=name, advice=f"Install {name}, or put it on PATH") from error
    assert process.stdout is not None
    assert process.stderr is not None
    lines: list[str] = []
    reader = threading.Thread(target=_read_lines, args=(process.stderr, lines, on_line), daemon=True)
    expired = threading.Event()

    def expire() -> None:
        expired.set()
        _kill_group(process)

    timer = threading.Timer(timeout, expire)
    timer.daemon = True
    with GUARD.over(process), process:
        try:
            timer.start()
            reader.start()
            if process.stdin is not None:
                with contextlib.suppress(BrokenPipeError):
                    process.stdin.write(given)
                    process.stdin.close()
            stdout = process.stdout.read()
            code = process.wait()
            reader.join()
        except BaseException:
            _kill_group(process)
            raise
        finally:
            timer.cancel()
    if expired.is_set():
        raise TransientError(f"{name} did not end within {timeout:.0f} s", advice="It was killed; will retry")
    return Finished(code=code, stdout=stdout, stderr="\n".join(lines))


def _read_lines(stream: IO[bytes], lines: list[str], on_line: Callable[[str], None] | None) -> None:
    with contextlib.suppress(ValueError):  # closed by the other thread after a kill
        for raw in stream:
            line = raw.decode(errors="replace").rstrip("\r\n")
            lines.append(line)
            if on_line:
                on_line(line)


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


class Guard:
    """The process groups that this process has started and that shall not outlive it."""

    def __init__(self) -> None:
        self._groups: set[int] = set()
        self._lock = threading.Lock()
        self._helper: subprocess.Popen[bytes] | None = None

    @contextlib.contextmanager
    def over(self, process: "subprocess.Popen[bytes] | subprocess.Popen[str]") -> Iterator[None]:
        """Guard the process group that a process leads, until the end of the block."""
        self._tell(process.pid)
        try:
            yield
        finally:
            self._tell(-process.pid)

    def kill_all(self) -> None:
        """End every guarded group now."""
        with self._lock:
            _kill(self._groups)

    def _tell(self, number: int) -> None:
        with self._lock:
            _note(self._groups, number)
            if self._helper is None:
                self._helper = _start()
            assert self._helper.stdin is not None
            # One that somebody has killed is missed only if this process is killed as well.
            with contextlib.suppress(OSError):
                os.write(self._helper.stdin.fileno(), b"%d\n" % number)


def main(_arguments: Sequence[str]) -> int:
    """The helper: take in groups from stdin, one number a line, negative when it is over; at the end kill the rest."""
    groups: set[int] = set()
    for line in sys.stdin.buffer:
        _note(groups, int(line))
    _kill(groups)
    return 0


def _note(groups: set[int], number: int) -> None:
    if number > 0:
        groups.add(number)
    else:
        groups.discard(-number)


def _kill(groups: set[int]) -> None:
    for group in groups:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)


def _start() -> "subprocess.Popen[bytes]":
    return subprocess.Popen(
        own_program(__name__, python_options=["-S"]),
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


GUARD = Guard()
"""This process's one guard: what it has started ends with it, whoever started it."""


def own_program(module: str, arguments: Sequence[str] = (), *, python_options: Sequence[str] = ()) -> list[str]:
    """The command line that calls `main(arguments) -> int` of one of our modules with the Python that runs here.

    Isolated (`-I`): neither PYTHON* variables nor modules in the folder that it starts in can get in the way.
    """
    root = str(Path(__file__).resolve().parents[1])
    start = f"import sys; sys.path.append({root!r}); from {module} import main; sys.exit(main(sys.argv[1:]))"
    return [sys.executable, "-I", *python_options, "-c", start, *arguments]


SECONDS_TO_END = 9.0
"""How long a process may take to end once it is told to."""


def end_after_signals() -> None:
    """Make sure that this process ends soon after the first SIGINT or SIGTERM that it handles.

    Only for a process that is all ours. Whoever else sets handlers meanwhile, as Prefect does for a flow run, changes
    nothing: Python tells this thread of a signal before it calls any. To be called in the main thread.
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
