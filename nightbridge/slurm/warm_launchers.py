"""Launchers that are forked from a warm process of their environment; see `launcher_forks`, its other end.

There is one warm process for each environment of a launcher (its Python and its variables, without secrets), started
when it is first needed. It ends when this process does, however that ends: at the end of its standard input.
"""

import json
import logging
import os
import socket
import subprocess
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, NamedTuple

from nightbridge.slurm import launcher_forks

log = logging.getLogger(__name__)

PACKAGE = "nemo_run"
"""What the warm process imports."""

WARM_SECONDS = 300.0
"""How long to wait for a fork, while a slow file system gives the warm process its modules."""


class _Environment(NamedTuple):
    python: str
    variables: frozenset[tuple[str, str]]


class _Warm(NamedTuple):
    process: "subprocess.Popen[bytes]"
    control: socket.socket


class ForkedLauncher:
    """A launcher in a fork: what `processes.run` needs of a process. Its output is one pipe."""

    stdin: IO[bytes] | None = None
    stdout: IO[bytes] | None
    stderr: IO[bytes] | None = None

    def __init__(self, connection: socket.socket, pid: int, stdout: IO[bytes]) -> None:
        self._connection = connection
        self._code: int | None = None
        self.pid = pid
        self.stdout = stdout

    def wait(self) -> int:
        """Its exit code, as `subprocess` has it; -9 also when nobody is left to tell."""
        if self._code is None:
            self._code = int(_line(self._connection) or "-9")
            self._connection.close()
        return self._code


class WarmLaunchers:
    """The warm processes of this process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._warm: dict[_Environment, _Warm] = {}

    def start(
        self, argv: Sequence[str], environment: Mapping[str, str], own: Mapping[str, str], *, cwd: Path
    ) -> ForkedLauncher | None:
        """Start a launcher in a session of its own, in a fork of its environment's warm process.

        Args:
            argv: The environment's Python, a file for it, and that file's arguments.
            environment: What all launchers of that environment share.
            own: This one's own variables, the secret ones among them.
            cwd: Where it runs.

        Returns:
            None when there is no warm process, or it has died: nothing has been started then.
        """
        request = {"argv": list(argv[1:]), "environment": {**environment, **own}, "cwd": str(cwd)}
        ours, theirs = socket.socketpair()
        reading, writing = os.pipe()
        output = os.fdopen(reading, "rb")
        try:
            try:
                self._send(_Environment(argv[0], frozenset(environment.items())), [theirs.fileno(), writing])
            finally:
                theirs.close()
                os.close(writing)
            ours.settimeout(WARM_SECONDS)
            if number := _line(ours):
                # Until it has this, the fork has started nothing.
                ours.sendall(json.dumps(request).encode() + b"\n")
                ours.settimeout(None)
                return ForkedLauncher(ours, int(number), output)
        except OSError as error:
            log.info("the warm process of %s did not answer (%s): starting the launcher without it", argv[0], error)
        output.close()
        ours.close()
        return None

    def _send(self, key: _Environment, descriptors: Sequence[int]) -> None:
        """Have a fork made that gets these.

        Raises:
            OSError: There is no warm process, and none can be made.
        """
        with self._lock:
            if warm := self._warm.get(key):
                try:
                    socket.send_fds(warm.control, [b"c"], descriptors)
                except OSError:
                    if warm.process.wait() > 0:
                        raise  # it cannot import, or may not fork: nor can the next one
                    warm.control.close()
                else:
                    return
            warm = self._warm[key] = _started(key)
            socket.send_fds(warm.control, [b"c"], descriptors)


def _started(key: _Environment) -> _Warm:
    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(
            [key.python, launcher_forks.__file__, PACKAGE],
            env=dict(key.variables),
            cwd="/",
            stdin=theirs.fileno(),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
    return _Warm(process, ours)


def _line(connection: socket.socket) -> str:
    """The next line without its end; nothing when the other end has gone."""
    text = b""
    while not text.endswith(b"\n"):
        piece = connection.recv(1)
        if not piece:
            return ""
        text += piece
    return text.decode().strip()


WARM_LAUNCHERS = WarmLaunchers()
"""Process-wide."""
