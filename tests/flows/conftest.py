"""What tests of whole flows share."""

from collections.abc import Iterator

import pytest

from tests.real.prefect_harness import flows_of_this_process
from tests.real.prefect_server import PrefectServer


@pytest.fixture(scope="module")
def flows_here(prefect_server: PrefectServer) -> Iterator[None]:
    """Flows of this process talk to the session's Prefect server: one of a file's own is five seconds of a core."""
    with flows_of_this_process(prefect_server):
        yield
