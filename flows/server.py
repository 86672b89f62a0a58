"""The Prefect server that a flow talks to: the configured one, else one of this process's own."""

import platform

from prefect.client.orchestration import get_client
from prefect.settings import (
    PREFECT_API_URL,
    PREFECT_HOME,
    PREFECT_SERVER_EPHEMERAL_ENABLED,
    PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS,
    temporary_settings,
)

from nightbridge.config.sites import no_block, plain_site
from nightbridge.errors import InvalidInput, TransientError
from nightbridge.files import check_writable
from nightbridge.models import SiteChoice

SERVER_START_SECONDS = 300
"""How long the server of this process may take to start: a busy machine needs more than the 20 s that Prefect waits."""


def reach_server() -> None:
    """Make sure that a Prefect server answers; further on its absence would look like a defect of ours.

    Raises:
        InvalidInput: None is configured, and the settings forbid one for this process.
        PermanentError: Prefect's folder, in which it keeps results too, cannot be written.
        TransientError: It does not answer, or this process's own did not start.
    """
    advice = "Set PREFECT_HOME, or HOME, to a folder that can be written"
    check_writable(PREFECT_HOME.value(), what="Prefect's folder", advice=advice)
    url, setting = PREFECT_API_URL.value(), PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS
    if not url:
        if not PREFECT_SERVER_EPHEMERAL_ENABLED.value():
            what = "no Prefect server is configured, and PREFECT_SERVER_EPHEMERAL_ENABLED forbids one for this process"
            raise InvalidInput(what, subject=platform.node(), advice="Set PREFECT_API_URL to the address of a server")
        # Prefect's server is a second of imports, which a configured server elsewhere makes unnecessary.
        from nightbridge.flows.embedded_server import EmbeddedServer

        EmbeddedServer()  # Prefect finds it, and starts it when it needs one
    try:
        with (
            temporary_settings({setting: max(SERVER_START_SECONDS, setting.value())}),
            get_client(sync_client=True) as client,
        ):
            problem = client.api_healthcheck()
    except RuntimeError as error:
        advice = (
            "Try again; where its database is damaged, or a newer Prefect's, set PREFECT_HOME to another folder; or run"
            " `prefect server start` and set PREFECT_API_URL to its address"
        )
        raise TransientError(str(error), subject=platform.node(), advice=advice) from error
    if problem is not None:
        what = "the Prefect server does not answer"
        advice = "Start it, or unset PREFECT_API_URL to go without"
        raise TransientError(what, subject=url or platform.node(), advice=advice) from problem


def reach_blocks(choice: SiteChoice) -> None:
    """Make sure that a Prefect server answers, where a choice names what can only be a block of it.

    Raises:
        InvalidInput: None is configured: one of this process's own would take a minute to start, and hold no blocks.
        TransientError: It does not answer.
    """
    if plain_site(choice) is not None:
        return
    if not PREFECT_API_URL.value():
        raise no_block(choice)
    reach_server()
