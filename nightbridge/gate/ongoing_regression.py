"""A suspicious result is run again before it is believed.

All runs of a night worse than the band: confirmed. Most of them not: the first was a single bad run, which is reported
and raises no alert. Most of them, but not all: unstable. Runs that disagree are repeated once more before that verdict.

Whether a metric is at a worse level than it once was, and since which night.

The changes of level that `changepoints` finds are walked from the oldest on. The level before the first is what the
test is held to, and a better level takes its place. While the last level is worse than that by more than the smallest
change that counts, the regression persists, however many nights old it is: it ends when the level is back, or when a
user decides about it.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from nightbridge.history.metrics import Metric

if TYPE_CHECKING:
    from nightbridge.history.changepoints import ChangePoint


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


# A night this many standard deviations on the good side of the worse level is taken to be back.
CERTAINLY_BACK = 3.0


class Standing(NamedTuple):
    """A level that is worse: the change that began it, and both levels in the metric's unit."""

    began: "ChangePoint"
    before: float
    after: float

    @property
    def change(self) -> float:
        """Relative, signed."""
        return (self.after - self.before) / abs(self.before) if self.before else 0.0


def standing_regression(metric: Metric, points: "Sequence[ChangePoint]", minimum_change: float) -> Standing | None:
    """The regression that the last level is, if it is one.

    Args:
        metric: Its direction counts.
        points: The changes of level, oldest first.
        minimum_change: The smallest relative change that counts.
    """
    if not points:
        return None
    held_to, began = points[0].before, None
    for point in points:
        change = (point.after - held_to) / abs(held_to) if held_to else 0.0
        if abs(change) >= minimum_change and metric.worse(change):
            began = began or point
        else:
            began = None
            if abs(change) >= minimum_change:
                held_to = point.after
    return Standing(began, held_to, points[-1].after) if began else None


def is_back(metric: Metric, standing: Standing, value: float, noise: float) -> bool:
    """Whether one night says that the worse level is over, before a new level is established."""
    gained = standing.after - value if metric.lower_is_better else value - standing.after
    half = abs(standing.after - standing.before) / 2
    return gained > max(half, CERTAINLY_BACK * noise * abs(standing.after))
