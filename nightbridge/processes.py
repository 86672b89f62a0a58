"""Programs of others: run to their end or their time limit, never left behind, their output line by line."""

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, NamedTuple

from nightbridge.errors import PermanentError, TransientError
from nightbridge.guard import GUARD
from nightbridge.models import Model

TAIL_LINES = 12


class Finished(Model):
    """How a program ended. `code` is negative for a signal, as in `subprocess`."""

    code: int
    stdout: bytes
    stderr: str

    @property
    def tail(self) -> str:
        """The last lines of stderr in one line, for a message."""
        lines = [line.strip() for line in self.stderr.splitlines() if line.strip()]
        return " | ".join(lines[-TAIL_LINES:])


class Stalled(TransientError):
    """A program was alive and got nowhere; it was killed."""


class Progress(NamedTuple):
    """What shows that a program gets on: a number that changes at least every `patience` seconds."""

    measure: Callable[[], int]
    patience: float


def run(
    argv: Sequence[str | Path],
    *,
    environment: Mapping[str, str],
    timeout: float,
    cwd: Path | None = None,
    on_line: Callable[[str], None] | None = None,
    given: bytes = b"",
    progress: Progress | None = None,
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
        progress: When it counts as stuck, and is killed with its children.
        umask: The permissions that its files do not get; ours when -1.

    Raises:
        PermanentError: There is no such program.
        Stalled: It got nowhere for too long.
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
    ended, stalled = threading.Event(), threading.Event()
    watcher = threading.Thread(target=_watch, args=(process, progress, ended, stalled), daemon=True)
    with GUARD.over(process), process:
        try:
            timer.start()
            reader.start()
            if progress:
                watcher.start()
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
            ended.set()
    if stalled.is_set() and progress:
        raise Stalled(f"{name} got nowhere for {progress.patience:.0f} s", advice="It was killed and is tried again")
    if expired.is_set():
        raise TransientError(f"{name} did not end within {timeout:.0f} s", advice="It was killed and is tried again")
    return Finished(code=code, stdout=stdout, stderr="\n".join(lines))


def _watch(
    process: "subprocess.Popen[bytes]", progress: Progress | None, ended: threading.Event, stalled: threading.Event
) -> None:
    """Kill a program whose measure has not changed for as long as there is patience."""
    assert progress is not None
    last, changed_at = progress.measure(), time.monotonic()
    while not ended.wait(min(1.0, progress.patience / 4)):
        now = progress.measure()
        if now != last:
            last, changed_at = now, time.monotonic()
        elif time.monotonic() - changed_at > progress.patience:
            stalled.set()
            _kill_group(process)
            return


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
