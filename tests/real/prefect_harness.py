"""Prefect's own test server for the flows that a test module runs in this process."""

from collections.abc import Iterator
from contextlib import contextmanager

from prefect.settings import PREFECT_FLOWS_HEARTBEAT_FREQUENCY, temporary_settings
from prefect.testing.utilities import prefect_test_harness


@contextmanager
def prefect_in_this_process() -> Iterator[None]:
    """A server with an empty database for flows and tasks of this process, which send no heartbeats."""
    with (
        prefect_test_harness(server_startup_timeout=900),
        temporary_settings({PREFECT_FLOWS_HEARTBEAT_FREQUENCY: None}),
    ):
        yield
