"""The Prefect server that a flow talks to: the configured one, else one of this process's own.

Prefect's server for one process, where no other is configured.

Prefect's own way is a child process that outlives a parent that is killed, and that dies of a Ctrl-C in the terminal
before the flow run's last state has been reported. `EmbeddedServer` takes its place: it gets no signal of the
terminal, and it ends with this process, however that ends.
"""

import atexit
import os
import platform
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
from prefect.client.orchestration import get_client
from prefect.server.api.server import SubprocessASGIServer, subprocess_server_logger
from prefect.settings import (
    PREFECT_API_URL,
    PREFECT_SERVER_EPHEMERAL_ENABLED,
    PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS,
    get_current_settings,
    temporary_settings,
)

from nightbridge.errors import InvalidInput, TransientError

SERVER_START_SECONDS = 300
"""How long the server of this process may take to start: a busy machine needs more than the 20 s that Prefect waits."""


def reach_server() -> None:
    """Make sure that a Prefect server answers; further on its absence would look like a defect of ours.

    Raises:
        InvalidInput: None is configured, and the settings forbid one for this process.
        TransientError: It does not answer, or this process's own did not start.
    """
    url, setting = PREFECT_API_URL.value(), PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS
    if not url:
        _offer_own_server()
    try:
        with (
            temporary_settings({setting: max(SERVER_START_SECONDS, setting.value())}),
            get_client(sync_client=True) as client,
        ):
            problem = client.api_healthcheck()
    except RuntimeError as error:
        advice = "Run `prefect server start` and set PREFECT_API_URL to its address, or try again"
        raise TransientError(str(error), thing=platform.node(), advice=advice) from error
    if problem is not None:
        raise TransientError(
            "the Prefect server does not answer",
            thing=url or platform.node(),
            advice="Start it, or unset PREFECT_API_URL to go without",
        ) from problem


def _offer_own_server() -> None:
    """Let Prefect find a server of this process, which it starts when it needs one."""
    if not PREFECT_SERVER_EPHEMERAL_ENABLED.value():
        raise InvalidInput(
            "no Prefect server is configured, and PREFECT_SERVER_EPHEMERAL_ENABLED forbids one for this process",
            thing=platform.node(),
            advice="Set PREFECT_API_URL to the address of a server",
        )
    # Prefect's server is a second of imports, which a configured server elsewhere makes unnecessary.
    from nightbridge.flows.server import EmbeddedServer

    EmbeddedServer()


_SCRIPT = Path(__file__).with_name("server_process.py")
_LOOK_AGAIN = 0.1
_ENVIRONMENT = {
    "PREFECT_UI_ENABLED": "0",
    "PREFECT__SERVER_EPHEMERAL": "1",
    "PREFECT__SERVER_FINAL": "1",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "DO_NOT_TRACK": "1",
}


class EmbeddedServer(SubprocessASGIServer):
    """The server of one process.

    Prefect keeps one such object in a process and starts it where it needs an API and none is configured. The first
    one that is made is that object, so making one of these is enough; one that is already running stays.
    """

    def start(self, timeout: int | None = None) -> None:
        """Start the server and wait until it answers; nothing happens when it is running.

        Args:
            timeout: Seconds to wait; Prefect's setting when unset.

        Raises:
            RuntimeError: It did not answer in time, or ended. Prefect's own callers expect this type.
        """
        if self.running:
            return
        atexit.register(self.stop)
        try:
            self.server_process = self._run_uvicorn_command()
            subprocess_server_logger.info("Starting a Prefect server for this process on %s", self.address)
            self._wait_until_healthy(timeout or PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS.value())
        except BaseException:
            self.stop()
            raise
        self.running = True

    def _run_uvicorn_command(self) -> "subprocess.Popen[Any]":
        # Bound here: a port that was free when somebody looked may be another server's by now, which would answer, too.
        with socket.socket() as bound:
            bound.bind(("127.0.0.1", 0))
            self.port = bound.getsockname()[1]
            settings = get_current_settings().to_environment_variables(exclude_unset=True)
            return subprocess.Popen(
                [sys.executable, "-P", str(_SCRIPT), str(bound.fileno())],
                env={**os.environ, **settings, **_ENVIRONMENT},
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
