"""Waiting for what another process or thread does."""

import time
from collections.abc import Callable

PATIENCE = 300.0
"""Seconds: the machine may be busy with other tests."""


def wait_until(happened: Callable[[], object], what: str = "", *, interval: float = 0.05) -> None:
    """Wait until something is true; fail with its name where it does not happen."""
    deadline = time.monotonic() + PATIENCE
    while not happened():
        assert time.monotonic() < deadline, f"waited too long for: {what or happened}"
        time.sleep(interval)
