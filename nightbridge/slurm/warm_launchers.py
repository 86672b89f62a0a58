"""Launchers that are forked from a warm process of their environment, and that process: a program of its Python.

NeMo-Run's dependencies take seconds of processor time to import, NeMo-Run itself hundredths. So each environment of a
launcher (its Python and its variables, without secrets) has one process, started when it is first needed. It has
imported both and dropped NeMo-Run again: each fork imports it anew, since it reads its environment as it is imported
(where its `.slurm_jobs` lies, for one). It ends when the one that started it does, however that ends: at the end of its
standard input.

A connection and a pipe for output come through standard input, for each submission. A fork sends its process id, gets
its command line, environment and folder, and becomes the launcher: `__main__`, to the interpreter's own end. What is
secret is thus known to that fork alone. Its parent, a fork without a task, sends its exit code.

Standard library only, and no module of ours: the launcher's Python does not have it.
"""

import contextlib
import gc
import importlib
import json
import logging
import os
import runpy
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, NamedTuple

log = logging.getLogger(__name__)

PACKAGE = "nemo_run"
"""What the warm process imports."""

WARM_SECONDS = 300.0
"""How long to wait for a fork, while a slow file system gives the warm process its modules."""

IDLE_SECONDS = 300.0
"""A warm process that nobody needed for so long ends; the next submission starts another."""


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
        self._warm: dict[tuple[str, frozenset[tuple[str, str]]], _Warm] = {}

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
                self._send(argv[0], environment, [theirs.fileno(), writing])
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

    def _send(self, python: str, environment: Mapping[str, str], descriptors: Sequence[int]) -> None:
        """Have a fork made that gets these.

        Raises:
            OSError: There is no warm process, and none can be made.
        """
        key = (python, frozenset(environment.items()))
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
            warm = self._warm[key] = _started(python, environment)
            socket.send_fds(warm.control, [b"c"], descriptors)


def _started(python: str, environment: Mapping[str, str]) -> _Warm:
    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(
            [python, __file__, PACKAGE],
            env=dict(environment),
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


# --- the warm process ----------------------------------------------------------------------------------------------


def main(package: str) -> None:
    """Serve until standard input ends; returns in a fork, which is to run the launcher, with its command line set."""
    control = socket.socket(fileno=0)
    importlib.import_module(package)
    for name in [name for name in sys.modules if name.partition(".")[0] == package]:
        del sys.modules[name]
    if len(os.listdir("/proc/self/task")) > 1:
        os._exit(1)  # threads do not survive a fork
    gc.freeze()
    control.settimeout(IDLE_SECONDS)
    with contextlib.suppress(TimeoutError):
        while descriptors := socket.recv_fds(control, 1, 2)[1]:
            if os.fork() == 0:
                control.detach()
                _submit(*descriptors)
                return
            for descriptor in descriptors:
                os.close(descriptor)
            with contextlib.suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass  # those that have ended by now
    os._exit(0)


def _submit(connected: int, output: int) -> None:
    """Fork the process of a submission, in which this returns; tell how it ended."""
    connection = socket.socket(fileno=connected)
    launcher = os.fork()
    if launcher:
        for descriptor in (0, output):
            os.close(descriptor)
        code = os.waitstatus_to_exitcode(os.waitpid(launcher, 0)[1])
        with contextlib.suppress(OSError):
            connection.sendall(b"%d\n" % code)
        os._exit(0)
    os.setsid()
    with connection, connection.makefile("rb") as lines:
        connection.sendall(b"%d\n" % os.getpid())
        line = lines.readline()
    if not line:
        os._exit(1)  # its caller has gone
    request = json.loads(line)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (output, 1), (output, 2)):
        os.dup2(source, target)
    for descriptor in (nothing, output):
        os.close(descriptor)
    os.chdir(request["cwd"])
    os.environ.update(request["environment"])
    sys.argv = request["argv"]
    if "numpy" in sys.modules:  # Python's own generator is seeded anew in each fork
        sys.modules["numpy"].random.seed()


if __name__ == "__main__":
    main(sys.argv[1])
    sys.path[0] = os.path.dirname(os.path.realpath(sys.argv[0]))
    runpy.run_path(sys.argv[0], run_name="__main__")
