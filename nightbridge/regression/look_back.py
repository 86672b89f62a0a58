"""How far a verdict looks back: which runs are good, and where the rows begin that count."""

from collections.abc import Sequence
from typing import Protocol

from nightbridge.regression.metrics import COMPLETE_OUTCOMES, GOOD_VERDICTS

LOOK_BACK = 100
"""Nights up to the last good one that are looked at: later ones of a standing regression come on top."""


class Judged(Protocol):
    """What of a run's row says whether it may be compared with."""

    @property
    def night(self) -> str:
        """Night id."""

    @property
    def repeat(self) -> int:
        """0 for the night's own run."""

    @property
    def verdict(self) -> str | None:
        """The verdict on it, None while there is none."""

    @property
    def outcome(self) -> str | None:
        """What became of its job."""


def is_good(row: Judged) -> bool:
    """Whether a run may make a baseline: a night's own, complete, and not worse than those before it."""
    return row.repeat == 0 and row.verdict in GOOD_VERDICTS and row.outcome in COMPLETE_OUTCOMES


def first_that_counts(past: Sequence[Judged]) -> int:
    """The place of the first row that a verdict takes into account: `LOOK_BACK` nights end with the last good run.

    Args:
        past: The rows of earlier nights, oldest first. Each night has one, and may have several, so that as many rows
            hold at least as many nights as are wanted.
    """
    last_good = next((place for place in range(len(past) - 1, -1, -1) if is_good(past[place])), len(past) - 1)
    nights: set[str] = set()
    for place in range(last_good, -1, -1):
        nights.add(past[place].night)
        if len(nights) > LOOK_BACK:
            return place + 1
    return 0
