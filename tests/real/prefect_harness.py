"""A Prefect server for the flows that a test module runs in this process."""

from collections.abc import Iterator
from contextlib import contextmanager

from prefect.logging.handlers import APILogWorker
from prefect.settings import PREFECT_API_URL, PREFECT_FLOWS_HEARTBEAT_FREQUENCY, temporary_settings

from tests.real.prefect_server import PrefectServer


@contextmanager
def flows_of_this_process(server: PrefectServer) -> Iterator[None]:
    """Flows and tasks of this process talk to a server, and send no heartbeats."""
    with temporary_settings({PREFECT_API_URL: server.api_url, PREFECT_FLOWS_HEARTBEAT_FREQUENCY: None}):
        yield
        APILogWorker.drain_all(timeout=60)
