"""Prefect's server for one process, where no other is configured.

Prefect's own way is a child process that outlives a parent that is killed, and that dies of a Ctrl-C in the terminal
before the flow run's last state has been reported. `EmbeddedServer` takes its place: it gets no signal of the
terminal, and it ends with this process, however that ends.
"""

import atexit
import os
import re
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import httpx
from prefect.server.api.server import SubprocessASGIServer, subprocess_server_logger
from prefect.settings import PREFECT_HOME, PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS, get_current_settings

from nightbridge.locking import lease

_SCRIPT = Path(__file__).with_name("server_process.py")
_LOOK_AGAIN = 0.1
_NO_KEY = -1
# No secret of the site or of a test, whatever its variable is called.
_KEPT_VARIABLES = re.compile(r"PATH|HOME|USER|TMPDIR|TZ|LANG|LD_LIBRARY_PATH|(?:LC|XDG|PREFECT)_\w+")
_ENVIRONMENT = {
    "PREFECT_UI_ENABLED": "0",
    # It is asked for no blocks, and who saves one brings its type: to look for new types is a quarter of its start. The
    # second one keeps a server that is to have them from believing that they are in its database.
    "PREFECT_API_BLOCKS_REGISTER_ON_START": "false",
    "PREFECT_MEMOIZE_BLOCK_AUTO_REGISTRATION": "false",
    "PREFECT__SERVER_EPHEMERAL": "1",
    "PREFECT__SERVER_FINAL": "1",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "DO_NOT_TRACK": "1",
}


# The logger is Prefect's own: start and end of a server are no news.
subprocess_server_logger.addFilter(lambda record: "temporary server" not in record.getMessage())


class EmbeddedServer(SubprocessASGIServer):
    """The server of one process.

    Prefect keeps one such object in a process and starts it where it needs an API and none is configured. The first
    one that is made is that object, so making one of these is enough; one that is already running stays.
    """

    _process_ends = False
    _starting = threading.Lock()
    """Held while it is started: threads that call their first flow at the same moment would each start one."""

    def start(self, timeout: int | None = None) -> None:
        """Start the server and wait until it answers; nothing happens when it is running.

        Args:
            timeout: Seconds to wait; Prefect's setting when unset.

        Raises:
            RuntimeError: It did not answer in time, or ended, or this process ends. Prefect's own callers expect this
                type.
            TransientError: Another process was starting one all the time.
        """
        with self._starting:
            if self._process_ends:
                raise RuntimeError("the process is ending")
            if not self.running:
                self._start(timeout)

    def _start(self, timeout: int | None) -> None:
        atexit.register(self._stop_for_good)
        seconds = timeout or PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS.value()
        # Of two servers that make a new database at once, or bring an old one up to date, one ends.
        with lease(PREFECT_HOME.value() / "nightbridge-server.lease", timeout=seconds):
            try:
                self.server_process = self._run_uvicorn_command()
                self._wait_until_healthy(seconds)
            except BaseException:
                self.stop()
                raise
        self.running = True

    def _stop_for_good(self) -> None:
        """Stop it, and stay the object that Prefect keeps.

        A thread that is left behind would have Prefect make another one, of its own kind, which outlives this process.
        """
        self._process_ends = True
        self._instance_key = _NO_KEY  # under which `stop` finds nothing to forget
        self.stop()

    def _run_uvicorn_command(self) -> "subprocess.Popen[Any]":
        # Bound here: a port that was free when somebody looked may be another server's by now, which would answer, too.
        with socket.socket() as bound:
            bound.bind(("127.0.0.1", 0))
            self.port = bound.getsockname()[1]
            kept = {name: value for name, value in os.environ.items() if _KEPT_VARIABLES.fullmatch(name)}
            settings = get_current_settings().to_environment_variables(exclude_unset=True)
            return subprocess.Popen(
                [sys.executable, "-P", str(_SCRIPT), str(bound.fileno())],
                env={**kept, **settings, **_ENVIRONMENT},
                stdin=subprocess.PIPE,
                pass_fds=[bound.fileno()],
                start_new_session=True,
            )

    def _wait_until_healthy(self, seconds: float) -> None:
        assert self.server_process is not None
        deadline = time.monotonic() + seconds
        with httpx.Client(trust_env=False) as client:
            while time.monotonic() < deadline:
                if (code := self.server_process.poll()) is not None:
                    raise RuntimeError(f"Prefect's own server ended with code {code} while it was starting")
                try:
                    if client.get(f"{self.api_url}/health").is_success:
                        return
                except httpx.TransportError:
                    pass
                time.sleep(_LOOK_AGAIN)
        raise RuntimeError(f"Prefect's own server did not start within {seconds:g} s")
