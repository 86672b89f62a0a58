"""Child processes: run to their end or their time limit, never orphaned, their output line by line."""

import contextlib
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from nightbridge.errors import PermanentError, TransientError
from nightbridge.guard import GUARD

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
