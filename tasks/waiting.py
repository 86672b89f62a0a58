"""Waiting for what may be away for hours: a store, its credentials, a cluster that takes no jobs at the moment.

Nobody gains by giving up: the job is there or may still come, and what it left is on disk. Prefect's own retries would
wait in a sleep that no interrupt ends, and show only how often they tried.
"""

import time
from collections.abc import Callable
from typing import TypeVar

from nightbridge.errors import TransientError
from tasks.interrupt import raise_if_interrupted
from tasks.logs import run_log

R = TypeVar("R")

PATIENCE = 720
"""How long is waited, in first delays: two hours of 10 seconds each. Each of a stage's retries waits as long again."""
LONGEST_DELAY = 30
"""The longest time between two tries, in first delays: five minutes."""

_WAKE_UP = 1.0


def wait_out(
    call: Callable[[], R], errors: tuple[type[TransientError], ...], *, first_delay: float, patience: float = PATIENCE
) -> R:
    """Call until no such error is raised; what is waited for stands in the run's log.

    Args:
        call: What is tried.
        errors: What is waited for; anything else is raised at once.
        first_delay: Seconds before the second try; each further delay is twice as long, up to `LONGEST_DELAY` times.
        patience: How many first delays in all.

    Raises:
        TransientError: The last one, after the patience.
        KeyboardInterrupt: The process is ending; or what else ends the flow run (see `interrupt`).

    """
    over = time.monotonic() + patience * first_delay
    delay, told = first_delay, ""
    while True:
        try:
            return call()
        except errors as error:
            if time.monotonic() + delay > over:
                raise
            # One that stays is said once, and not for every try of a night.
            if str(error) != told:
                run_log().warning("waiting, and trying again: %s", error)
            told = str(error)
        except Exception:
            # What an interruption has broken off, such as a program that was killed, failed for no other reason.
            raise_if_interrupted()
            raise
        _sleep(delay)
        delay = min(2 * delay, LONGEST_DELAY * first_delay)


def _sleep(seconds: float) -> None:
    """Sleep, awake enough for an interrupt."""
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        raise_if_interrupted()
        time.sleep(min(left, _WAKE_UP))
    raise_if_interrupted()
