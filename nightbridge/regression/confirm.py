"""A suspicious result is run again before it is believed.

All runs of a night worse than the band: confirmed. Most of them not: the first was a single bad run, which is reported
and raises no alert. Most of them, but not all: unstable. Runs that disagree are repeated once more before that verdict.
"""

from collections.abc import Sequence
from typing import NamedTuple


class Agreement(NamedTuple):
    """How many of a night's runs are worse than the band."""

    runs: int
    worse: int

    @property
    def is_split(self) -> bool:
        """Whether some of them are and some are not."""
        return 0 < self.worse < self.runs


def agreement_of(places: Sequence[int]) -> Agreement:
    """Count the runs.

    Args:
        places: One per run: positive when it is worse than the band, else zero or negative.
    """
    return Agreement(len(places), sum(place > 0 for place in places))


def reruns_wanted(agreement: Agreement, confirm: int) -> int:
    """How many runs besides its own a night should have.

    Args:
        agreement: Of the runs that it has.
        confirm: The policy: how many a suspicious result is given, and how many more when they disagree.
    """
    if not agreement.worse:
        return 0
    undecided = agreement.is_split and 2 * agreement.worse > agreement.runs > confirm
    return 2 * confirm if undecided else confirm
