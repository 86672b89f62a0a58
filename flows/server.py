"""The Prefect server that a flow talks to: the configured one, else one of this process's own."""

import platform

from prefect.client.orchestration import get_client
from prefect.settings import (
    PREFECT_API_URL,
    PREFECT_SERVER_EPHEMERAL_ENABLED,
    PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS,
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
    from nightbridge.flows.embedded_server import EmbeddedServer

    EmbeddedServer()
