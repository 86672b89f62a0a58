"""The guard: a small process beside this one that ends what this one has started, once this one is gone.

A process that is killed ends nothing itself, and its git or its launcher would go on for minutes. The guard reads the
process groups to end from a pipe, and at the pipe's end, which comes with the end of this process, it kills them.
"""

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence

from nightbridge.own_programs import own_program


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
