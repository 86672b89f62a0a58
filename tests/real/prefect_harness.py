"""A Prefect server for the flows that a test module runs in this process."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from prefect.logging.handlers import APILogWorker
from prefect.settings import PREFECT_API_URL, PREFECT_FLOWS_HEARTBEAT_FREQUENCY, temporary_settings

from tests.real.prefect_server import PrefectServer, start_prefect


@contextmanager
def flows_of_this_process(server: PrefectServer) -> Iterator[None]:
    """Flows and tasks of this process talk to a server, and send no heartbeats."""
    with temporary_settings({PREFECT_API_URL: server.api_url, PREFECT_FLOWS_HEARTBEAT_FREQUENCY: None}):
        yield
        APILogWorker.drain_all(timeout=60)


@contextmanager
def prefect_in_this_process() -> Iterator[None]:
    """The same with a server of their own and an empty database."""
    with tempfile.TemporaryDirectory(prefix="nightbridge-prefect-") as folder:
        server = start_prefect(Path(folder))
        try:
            with flows_of_this_process(server):
                yield
        finally:
            server.stop()
