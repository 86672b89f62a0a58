"""The helper process that asks pyslurm: started when it is first needed, killed when it is late, started again.

pyslurm is never imported here. It can end its process from C, and it holds the interpreter's lock for 10 to 20 seconds
while slurmctld is away, which would stop everything else in ours.
"""

import contextlib
import json
import os
import selectors
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from nightbridge.errors import NightbridgeError, PermanentError, StatusUnknown

START_TIMEOUT = 60.0
"""Seconds until the helper must have imported pyslurm; a shared file system can be slow."""

_HELPER = Path(__file__).with_name("pyslurm_helper.py")
_KILL_WAIT = 10.0
_REMEMBERED = 2000


class PyslurmFault(NightbridgeError):
    """What pyslurm raised.

    Args:
        what: Slurm's own text for it, or the exception.
        thing: The library.
        advice: None is known here; who asked knows.
        errno: Slurm's error number; None for what is no answer of Slurm, such as a wrong type.

    """

    def __init__(self, what: str, *, thing: str = "pyslurm", advice: str = "", errno: int | None = None) -> None:
        super().__init__(what, thing=thing, advice=advice)
        self.errno = errno


def helper_command(python: Path | None = None) -> tuple[str, ...]:
    """The helper's command line, run by the Python that has pyslurm; this one when unset.

    Isolated: neither PYTHONPATH nor the current folder can put another module in its way.
    """
    return (str(python or sys.executable), "-I", str(_HELPER))


class PyslurmProcess:
    """One helper. Callers of several threads wait for each other.

    Args:
        command: How it is started, see `helper_command`.
        environment: Its whole environment.

    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self._command = tuple(command)
        self._environment = dict(environment)
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._said: IO[bytes] | None = None
        self._unread = b""
        self._questions = 0
        self._version = ""

    @property
    def version(self) -> str:
        """The version of pyslurm; the helper is started for it.

        Raises:
            PermanentError: pyslurm cannot be used here, with the reason.

        """
        with self._lock:
            self._ensure_started()
            return self._version

    def call(self, name: str, timeout: float, /, **arguments: Any) -> Any:
        """Ask one question.

        Raises:
            PyslurmFault: pyslurm raised something.
            StatusUnknown: No answer in time, or the helper ended; what was asked for may have happened.
            PermanentError: pyslurm cannot be used here.

        """
        with self._lock:
            self._ensure_started()
            self._questions += 1
            number = self._questions
            self._send({"id": number, "call": name, "arguments": arguments}, timeout)
            answer = self._receive(timeout)
        error = answer.get("error")
        if error is not None:
            raise PyslurmFault(error["message"], errno=error["errno"] if error["kind"] == "rpc" else None)
        return answer["result"]

    def close(self) -> None:
        """End the helper; the next question starts another one."""
        with self._lock:
            self._kill()

    def _ensure_started(self) -> None:
        if self._process is not None and self._process.poll() is None:
            return
        self._kill()
        self._said = tempfile.TemporaryFile()  # noqa: SIM115 (closed with the helper)
        try:
            self._process = subprocess.Popen(
                self._command,
                env=self._environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._said,
                # Ctrl-C is for us: the helper ends when we do, which it notices at the end of its questions.
                start_new_session=True,
            )
        except OSError as error:
            raise PermanentError(
                f"cannot be started: {error.strerror}",
                thing=self._command[0],
                advice="Correct the cluster's pyslurm_python",
            ) from error
        try:
            first = self._receive(START_TIMEOUT)
        except StatusUnknown as error:
            raise PermanentError(f"pyslurm cannot be used here: {error.what}", thing=self._command[0]) from error
        if "ready" not in first:
            self._kill()
            raise PermanentError(f"pyslurm cannot be used here: {first['error']['message']}", thing=self._command[0])
        self._version = first["ready"]["pyslurm"]

    def _send(self, question: Mapping[str, Any], timeout: float) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        # Written in a thread: a helper that does not read would hold us up for ever at a full pipe.
        writer = threading.Thread(
            target=_write, args=(self._process.stdin, json.dumps(question).encode() + b"\n"), daemon=True
        )
        writer.start()
        writer.join(timeout)

    def _receive(self, timeout: float) -> dict[str, Any]:
        process = self._process
        assert process is not None
        assert process.stdout is not None
        end = time.monotonic() + timeout
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            while b"\n" not in self._unread:
                if not selector.select(max(end - time.monotonic(), 0)):
                    self._kill()
                    raise StatusUnknown(f"pyslurm did not answer in {timeout:.0f} s", advice="It is asked again")
                if not (part := os.read(process.stdout.fileno(), 1 << 16)):
                    last_words = self._last_words()
                    self._kill()
                    raise StatusUnknown(f"pyslurm's process ended: {last_words}", advice="It is started again")
                self._unread += part
        line, _, self._unread = self._unread.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _last_words(self) -> str:
        assert self._said is not None
        length = self._said.seek(0, os.SEEK_END)
        self._said.seek(max(0, length - _REMEMBERED))
        lines = self._said.read().decode(errors="replace").strip().splitlines()
        return lines[-1].strip() if lines else "it said nothing"

    def _kill(self) -> None:
        process, self._process, self._unread = self._process, None, b""
        if process is not None:
            process.kill()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    with contextlib.suppress(OSError):
                        pipe.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=_KILL_WAIT)
        if self._said is not None:
            self._said.close()
            self._said = None


def _write(pipe: IO[bytes], data: bytes) -> None:
    # An end of the helper shows when its answer is read.
    with contextlib.suppress(OSError, ValueError):
        pipe.write(data)
        pipe.flush()
