"""A Prefect server for what a test module does in this process: run flows, and make deployments."""

import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from prefect import flow
from prefect.logging.handlers import APILogWorker
from prefect.settings import PREFECT_API_URL, PREFECT_FLOWS_HEARTBEAT_FREQUENCY, temporary_settings

from tests.real.prefect_server import PrefectServer

ROOT = Path(__file__).parents[2]

STRAIGHT = {"command": shlex.join([sys.executable, "-m", "prefect.engine"])}
"""Job variables of a deployment whose flow runs a worker starts at once.

Without a command each of them has two processes before it that prepare its workspace, and each imports Prefect.
"""


@contextmanager
def flows_of_this_process(server: PrefectServer) -> Iterator[None]:
    """Flows and tasks of this process talk to a server, and send no heartbeats."""
    with temporary_settings({PREFECT_API_URL: server.api_url, PREFECT_FLOWS_HEARTBEAT_FREQUENCY: None}):
        yield
        APILogWorker.drain_all(timeout=60)


def deploy(server: PrefectServer, name: str, entrypoint: str, *, pool: str, **options: Any) -> None:
    """Deploy a flow of this checkout as `prefect deploy` does, which takes seconds of a core to start."""
    with temporary_settings({PREFECT_API_URL: server.api_url}):
        source: Any = flow.from_source(source=str(ROOT), entrypoint=entrypoint)
        source.deploy(name, work_pool_name=pool, print_next_steps=False, ignore_warnings=True, **options)
