"""Modes: whether the runs of a test fall into two speeds whatever the code, so that a slow night says nothing of it."""

import itertools
import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

NIGHTS, MIN_NIGHTS, RECENT = 100, 28, 15
"""Nights that are looked at, at least so many; both modes must be among the recent ones."""

MAX_SPREAD = 0.25
"""Of the slow mode, as a share of the distance, where that is more than three times the fast one's: no bad nodes."""

MIN_OF_MODE = 8
"""Nights of each mode: fewer are accidents. Bad nodes in 3 % of a hundred nights are as many once in eighty times."""

MIN_DISTANCE = 0.015
"""How far apart modes are at least, relative."""

VALLEY_SIGMAS, VALLEY_WIDTH = 2.6, 0.4
"""Between two modes nights are rarer than around either, unlike in the tail of skewed noise: by how many standard
deviations of the count, in so wide a part of the distance. Every night looks again, at almost the same nights."""


class Modes(NamedTuple):
    """Two speeds of one test: their levels in the metric's unit, and the slow one's share of the nights."""

    fast: float
    slow: float
    share: float

    @property
    def edge(self) -> float:
        """From here on a run is in the slow mode."""
        return (self.fast + self.slow) / 2


def find_modes(values: Sequence[float | None]) -> Modes | None:
    """The two modes of a lower-is-better metric, or None where its nights have one.

    The nights are split where that leaves the least spread within both parts. A change of level is none: modes take
    turns.

    Args:
        values: Of each night's first run, oldest first, tonight last.
    """
    known = [value for value in values if value is not None][-NIGHTS:]
    if len(known) < MIN_NIGHTS:
        return None
    ordered = sorted(known)
    at = _best_split(ordered)
    fast, slow = ordered[:at], ordered[at:]
    modes = Modes(statistics.median(fast), statistics.median(slow), len(slow) / len(known))
    distance = modes.slow - modes.fast
    around_fast, valley, around_slow = (_around(at, known, distance) for at in (modes.fast, modes.edge, modes.slow))
    lower = min(around_fast, around_slow)
    is_slow = [value >= slow[0] for value in known]
    switches = sum(one != other for one, other in itertools.pairwise(is_slow))
    by_chance = 2 * len(slow) * len(fast) / len(known)
    if (
        distance < MIN_DISTANCE * modes.fast
        or lower - valley < VALLEY_SIGMAS * math.sqrt(lower + valley)
        or statistics.pstdev(slow) > max(3 * statistics.pstdev(fast), MAX_SPREAD * distance)
        or switches < by_chance / 2
        or not 0 < sum(is_slow[-RECENT:]) < RECENT
    ):
        return None
    return modes


def _around(place: float, values: Sequence[float], distance: float) -> int:
    """How many values are around one, in a part of the distance between the modes."""
    return sum(abs(value - place) <= VALLEY_WIDTH / 2 * distance for value in values)


def _best_split(ordered: Sequence[float]) -> int:
    """Where two parts have the least spread within them, by running sums of all splits at once."""
    import numpy as np

    values = np.array(ordered) - statistics.fmean(ordered)  # so that the squares do not cancel each other out
    sizes, sums = np.arange(1, len(values)), np.cumsum(values)[:-1]
    between = sums**2 * (1 / sizes + 1 / sizes[::-1])  # the sum of the right part is minus that of the left one
    return MIN_OF_MODE + int(np.argmax(between[MIN_OF_MODE - 1 : len(values) - MIN_OF_MODE]))
