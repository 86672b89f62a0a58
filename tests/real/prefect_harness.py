"""A Prefect server for the flows that a test module runs in this process."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from prefect.logging.handlers import APILogWorker
from prefect.settings import PREFECT_API_URL, PREFECT_FLOWS_HEARTBEAT_FREQUENCY, temporary_settings

from tests.real.prefect_server import start_prefect


@contextmanager
def prefect_in_this_process() -> Iterator[None]:
    """A server with an empty database for flows and tasks of this process, which send no heartbeats."""
    with tempfile.TemporaryDirectory(prefix="nightbridge-prefect-") as folder:
        server = start_prefect(Path(folder))
        try:
            with temporary_settings({PREFECT_API_URL: server.api_url, PREFECT_FLOWS_HEARTBEAT_FREQUENCY: None}):
                yield
                APILogWorker.drain_all(timeout=60)
        finally:
            server.stop()
