"""What moves a metric from night to night without the code: the cluster's drift, its nodes, chance, and two speeds.

`remove_canary` takes out the cluster's own drift, measured by a test whose pins never move; `remove_node_effects` takes
out the level of the nodes that a night ran on. What is left is noise (`noise_of`), unless `find_modes` tells that the
runs of a test fall into two speeds whatever the code, so that a slow night says nothing of it.
"""

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Places = NDArray[np.intp]

NEAR = 3
"""Reference nights on each side of one that ran on other nodes."""

LEAST_NIGHTS = 4
"""Nights that a node set needs before its effect is believed."""

STEADY_NIGHTS = 60
"""The last nights whose noise says which statistic of a metric is the steadiest."""

WEEK = 7
"""Nights whose median is the level before or after a night."""

CHANGE_SIGMAS = 5.0
"""Where the level changes, the weeks around are apart by more than so many times the noise. Of nights that follow each
other (AR(1), 0.7) 98 % of the noise are left so."""

# The share of Gaussian noise within this many standard deviations is 80 %.
GAUSSIAN_80 = 1.2816

# Of the deviations of single nights from the nights before them: the share that tells the noise, and what that share of
# Gaussian noise reaches (the level of seven nights is not known exactly either).
USUAL, USUAL_SIGMAS = 0.7, 1.15
# Of those from the nights around them: the share that is no accident, two being some always, and what is beyond it.
TAIL, BEYOND_TAIL = 0.9, 1.25
FEW = 8
"""So many deviations tell something."""

OF_RUNS = 28, 90
"""Of single runs the noise of so many last ones is taken, whichever is more."""

MODE_NIGHTS, MIN_MODE_NIGHTS, RECENT = 100, 28, 15
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


def remove_canary(values: Sequence[float | None], canary: Sequence[float | None]) -> list[float]:
    """Take the cluster's drift out of a metric, as measured in the same nights by a test whose pins never move.

    The canary's relative deviation from its median is taken off, times the share of it that the metric follows (least
    squares, between 0 and 1): a metric that has nothing to do with the canary is left alone. A night without a canary
    takes the canary of the nights around it. All values are positive: only ratios can be compared.
    """
    raw, control = np.array(values, dtype=np.float64), np.array(canary, dtype=np.float64)
    known, measured = np.isfinite(raw), np.isfinite(control)
    both = known & measured
    if both.sum() < 2:
        return _as_list(raw)
    at = np.arange(raw.size)
    drift = np.log(np.interp(at, at[measured], control[measured]))
    drift -= np.median(drift)
    metric = np.log(raw, where=known, out=np.full(raw.size, np.nan))
    # Winsorised, so that a bad night does not decide the share.
    x, y = (np.clip(part, *np.quantile(part, [0.02, 0.98])) for part in (drift[both], metric[both]))
    spread = float(np.var(x))
    share = min(1.0, max(0.0, float(np.mean((x - x.mean()) * (y - y.mean()))) / spread)) if spread else 0.0
    return _as_list(np.exp(metric - share * drift))


def remove_node_effects(values: Sequence[float | None], nodes: Sequence[str]) -> list[float]:
    """Bring all nights to the level of the node set that most of them ran on.

    The effect of a node set is the median of its nights' ratios to the reference nights around each of them. Only
    nights with reference nights on both sides count, at least `LEAST_NIGHTS` of them: nodes that changed for good
    together with the code are indistinguishable from it, and show as a change.

    Args:
        values: One positive value per night, oldest first.
        nodes: The nodes of each night, any text that is equal for equal sets.
    """
    raw = np.array(values, dtype=np.float64)
    known = np.isfinite(raw)
    _sets, set_of_night = np.unique(np.asarray(nodes, dtype=str), return_inverse=True)
    counts = np.bincount(set_of_night[known])
    adjusted = raw.copy()
    if np.count_nonzero(counts) < 2:
        return _as_list(adjusted)
    reference = int(np.argmax(counts))
    anchors = np.flatnonzero(known & (set_of_night == reference))
    around = padded(raw[anchors], NEAR)
    for other in np.flatnonzero(counts >= LEAST_NIGHTS):
        if other == reference:
            continue
        own = np.flatnonzero(known & (set_of_night == other))
        position = np.searchsorted(anchors, own)
        inside = (position > 0) & (position < anchors.size)
        if inside.sum() >= LEAST_NIGHTS:
            levels = row_medians(around[position[inside, np.newaxis] + np.arange(2 * NEAR)])
            adjusted[own] = raw[own] / median(raw[own[inside]] / levels)
    return _as_list(adjusted)


def night_noise(values: Sequence[float | None]) -> float:
    """How much a value moves from night to night without a reason, as a relative standard deviation.

    Taken from the differences between consecutive nights, of which a change of level moves only one: the four fifths
    of them that are smallest. NaN with fewer than two nights.
    """
    known = _finite(values)
    level = median(np.abs(known)) if known.size else 0.0
    if known.size < 2 or level == 0.0:
        return math.nan
    return _quantile(np.abs(known[1:] - known[:-1]), 0.8) / (GAUSSIAN_80 * math.sqrt(2) * level)


def strays(values: Sequence[float | None], noise: float) -> list[float]:
    """How far each night is from the median of the week before it, relative, without a sign; the fourth is the first.

    Nights that follow each other, as on a cluster that drifts, are farther from those before them than consecutive
    nights differ. So are the first nights of a new level, which are no noise: those may be near the week after them.
    The level changes where the weeks around a night are apart, and most of that lies between it and the night before.

    Args:
        values: One per night, oldest first.
        noise: By how much consecutive nights differ, as `night_noise` has it.
    """
    known = _finite(values)
    weeks = row_medians(padded(known, WEEK)[_windows(known.size + WEEK + 1, WEEK)])
    before, after = weeks[: known.size], weeks[WEEK + 1 :]
    with np.errstate(divide="ignore", invalid="ignore"):  # a level of zero has no ratios
        distances, apart = (np.abs(place / before - 1) for place in (known, after))
        for at in np.flatnonzero(apart > CHANGE_SIGMAS * noise):
            if abs(known[at] - known[at - 1]) > abs(after[at] - before[at]) / 2:
                # So long the week before has more nights of the old level than of the new one.
                first = slice(at, at + WEEK // 2 + 1)
                distances[first] = np.fmin(distances[first], np.abs(known[first] / after[first] - 1))
    distances = distances[3:]
    found: list[float] = distances[np.isfinite(distances)].tolist()
    return found


def levels_around(values: Sequence[float], near: int) -> list[float]:
    """The median of each value and so many on each side."""
    return _as_list(row_medians(windows_around(np.array(values, dtype=np.float64), near)))


def noise_of(values: Sequence[float | None]) -> float:
    """The relative standard deviation of single nights; 0 where they are too few to tell."""
    noise = night_noise(values)
    if math.isnan(noise):
        return 0.0
    apart = sorted(strays(values, noise))
    return noise if len(apart) < FEW else max(noise, apart[int(USUAL * len(apart))] / USUAL_SIGMAS)


def noise_of_runs(values: Sequence[float], usual: float, enough: int) -> float:
    """The same of single runs, of which a month may be quieter by chance than they are.

    Args:
        values: What they measured, oldest first.
        usual: What is usual: of fewer runs than `enough` the noise is at least that, and twice that at most.
        enough: So many runs tell their own noise.
    """
    noise = max(noise_of(values[-nights:]) for nights in OF_RUNS)
    return noise if len(values) >= enough else min(max(noise, usual), 2 * usual)


def tail_of(values: Sequence[float | None], worse: int) -> float:
    """How far single nights stray that are no rare accident, relative; 0 where they are too few to tell.

    That is from the median of each and four nights on each side, from the fourth one on. `worse` is 1 where more is
    worse, else -1.
    """
    known = _finite(values)
    levels = row_medians(windows_around(known, 4)[3:])
    apart: list[float] = np.sort(worse * (known[3:][levels != 0] / levels[levels != 0] - 1)).tolist()
    return BEYOND_TAIL * apart[min(int(TAIL * len(apart)), len(apart) - 3)] if len(apart) >= FEW else 0.0


def steadiest(choices: Mapping[str, Sequence[float | None]]) -> str:
    """The statistic of a metric that reveals a change soonest: the one with the least noise over the last nights.

    A run whose steps are sometimes slow has a median that jumps between two levels while its fastest steps stay where
    they are; slower code moves both. On equal terms, the first one named is taken.

    Args:
        choices: Several statistics of the same nights, such as median and 5th percentile of the step times.
    """
    noise = {name: night_noise(values[-STEADY_NIGHTS:]) for name, values in choices.items()}
    return min(noise, key=lambda name: math.inf if math.isnan(noise[name]) else noise[name])


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
    turns. `values`: of each night's first run, oldest first, tonight last.
    """
    known = [value for value in values if value is not None][-MODE_NIGHTS:]
    if len(known) < MIN_MODE_NIGHTS:
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
    values = np.array(ordered) - statistics.fmean(ordered)  # so that the squares do not cancel each other out
    sizes, sums = np.arange(1, len(values)), np.cumsum(values)[:-1]
    between = sums**2 * (1 / sizes + 1 / sizes[::-1])  # the sum of the right part is minus that of the left one
    return MIN_OF_MODE + int(np.argmax(between[MIN_OF_MODE - 1 : len(values) - MIN_OF_MODE]))


# --- arrays of nights ------------------------------------------------------------------------------------------------


def _as_list(values: Array) -> list[float]:
    listed: list[float] = values.tolist()
    return listed


def _finite(values: Sequence[float | None]) -> Array:
    array = np.array(values, dtype=np.float64)
    return array[np.isfinite(array)]


def median(values: Array) -> float:
    """The median of finite values. numpy's own takes several times as long on a hundred nights."""
    ordered, half = values.copy(), values.size // 2
    ordered.sort()
    return float(ordered[half] if values.size % 2 else (ordered[half - 1] + ordered[half]) / 2)


def _quantile(values: Array, share: float) -> float:
    """A quantile of finite values, linear between neighbours, as numpy's."""
    ordered = np.sort(values)
    position = share * (values.size - 1)
    below = int(position)
    above = min(below + 1, values.size - 1)
    return float(ordered[below] + (position - below) * (ordered[above] - ordered[below]))


def padded(values: Array, near: int) -> Array:
    """The same with so many NaN before and after."""
    room = np.full(values.size + 2 * near, np.nan)
    room[near : near + values.size] = values
    return room


def windows_around(values: Array, near: int) -> Array:
    """A row for each value, of it and so many on each side; NaN where there are none."""
    return padded(values, near)[_windows(values.size, 2 * near + 1)]


@lru_cache(maxsize=256)
def _windows(count: int, width: int) -> Places:
    """The places of so many overlapping windows. numpy's view of them, and its `pad`, take longer than a copy."""
    places: Places = np.arange(count)[:, np.newaxis] + np.arange(width)
    return places


def row_medians(rows: Array) -> Array:
    """Medians that skip NaN, without the cost of `nanmedian`: sorting puts NaN last."""
    ordered = np.sort(rows, axis=1)
    counts = (rows == rows).sum(axis=1)  # only NaN is not itself
    at = np.arange(rows.shape[0])
    medians: Array = (ordered[at, (counts - 1) // 2] + ordered[at, counts // 2]) / 2
    return medians
