"""Change points: when a metric's level shifted, by how much, and how certain that is.

One value per night goes in, oldest first; nothing is assumed about its unit. Four steps, each for a fault that nightly
series really have:

1. What is known to move the value without the code is taken out: `remove_canary` takes out the cluster's own drift,
   measured by a test whose pins never move; `remove_node_effects` takes out the level of the nodes that a night ran on.
2. Winsorising (`winsorise`, a Hampel filter): a night on a bad node counts as slow, but not as ten slow nights. Without
   this, three such nights in a hundred give several false alarms a year, whatever the test that follows.
3. Candidates from the top down: the night that splits a window best, by the t statistic, then the best within each
   part, as E-divisive does with another statistic.
4. Merging from the bottom up: a candidate that is not significant, too small, too young, or carried by a single night
   is dropped, the weakest first, and the levels around it become one.

The significance is that of one t-test although many splits are tried, which is why the default asks for 1e-5 and not
for 1e-3. `benchmarks/detection.py` measures what that means: false alarms a year, and nights until a change is found.
"""

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from nightbridge.errors import InvalidInput
from nightbridge.history.student import t_test_p_value
from nightbridge.models import Model

Array = NDArray[np.float64]

# Median absolute deviation to standard deviation, for Gaussian noise.
MAD_TO_SIGMA = 1.4826

# The share of Gaussian noise within this many standard deviations is 80 %.
GAUSSIAN_80 = 1.2816

# A candidate is kept for the merge when one split alone is this significant: a change that is masked by a second one,
# such as a slow-down that was repaired, becomes significant only once both are known.
CANDIDATE_P_VALUE = 1e-3

# Twice the drop of the log-likelihood that leaves 95 % of the start nights inside (chi-squared, one degree of freedom).
START_RANGE = 3.84

# Fewest nights whose correlation can be told, and the correlation that is no chance, times the root of the nights.
LEAST_FOR_MEMORY = 16
CHANCE_OF_MEMORY = 2.5
HIDDEN_MEMORY = 1.4


class ChangePointPolicy(Model):
    """When a difference between nights is a change. Shares are relative to the level before."""

    p_value: float = Field(1e-5, gt=0, lt=1, description="Largest p-value of the t-test between two levels.")
    minimum_change: float = Field(0.015, gt=0, description="Smallest change that is reported.")
    minimum_nights: int = Field(3, ge=2, description="Nights that a level must have lasted.")
    without_one_p_value: float = Field(
        2e-3, gt=0, le=1, description="Largest p-value when the most deviating night of the shorter level is left out."
    )
    window: int = Field(100, ge=20, description="Nights that are looked at together, on each side of a change.")
    neighbourhood: int = Field(7, ge=2, description="Nights on each side whose median a night is winsorised to.")
    winsor_sigmas: float = Field(3.5, gt=0, description="How far a night may be from that median.")
    memory: float = Field(
        1.0, ge=1, description="Standard deviation of a level's mean, over that where nights are independent."
    )
    noise_floor: float = Field(
        0.005, gt=0, description="Least standard deviation that is assumed: a quiet history proves little."
    )


DEFAULT_POLICY = ChangePointPolicy()


class ChangePoint(Model):
    """A new level. Night indexes count the values that were given, missing ones included, from 0."""

    index: int = Field(description="The first night of the new level.")
    earliest: int = Field(description="First night with which the new level may have begun (95 %).")
    latest: int = Field(description="Last such night.")
    before: float = Field(description="Median of the level before, in the metric's unit.")
    after: float = Field(description="Median of the new level.")
    change: float = Field(description="(after - before) / |before|, signed, of the winsorised means.")
    p_value: float = Field(description="Of the t-test between the two levels.")

    @property
    def confidence(self) -> float:
        """One minus the p-value."""
        return 1.0 - self.p_value


class _Boundary(NamedTuple):
    """A candidate between two segments, and what the tests say about it."""

    at: int
    change: float
    p_value: float
    without_one: float
    nights: int


def find_change_points(
    values: Sequence[float | None], policy: ChangePointPolicy = DEFAULT_POLICY
) -> tuple[ChangePoint, ...]:
    """All changes of level, oldest first.

    Args:
        values: One value per night, oldest first. None, NaN and infinity are nights without a value.
        policy: What counts as a change.
    """
    raw = _as_array(values)
    nights = np.flatnonzero(np.isfinite(raw))
    known = raw[nights]
    level = _median(np.abs(known)) if known.size else 0.0
    if known.size < 2 * policy.minimum_nights or level == 0.0:
        return ()
    series = winsorise(known, policy) / level
    if (memory := _memory(series)) != policy.memory:
        policy = policy.model_copy(update={"memory": memory})
    boundaries = _merge(series, _candidates(series, policy), policy)
    edges = [0, *(boundary.at for boundary in boundaries), known.size]
    points = []
    for number, boundary in enumerate(boundaries):
        start, end = _around(edges, number + 1, policy)
        earliest, latest = _start_range(series[start:end], boundary.at - start, policy)
        points.append(
            ChangePoint(
                index=int(nights[boundary.at]),
                earliest=int(nights[start + earliest]),
                latest=int(nights[start + latest]),
                before=float(np.median(known[start : boundary.at])),
                after=float(np.median(known[boundary.at : end])),
                change=boundary.change,
                p_value=boundary.p_value,
            )
        )
    return tuple(points)


def winsorise(values: Array, policy: ChangePointPolicy = DEFAULT_POLICY) -> Array:
    """Pull every night to within `winsor_sigmas` of the median of the nights around it.

    The width is one for the whole series, from the median deviation of all nights, so that a new level which is younger
    than half the neighbourhood shrinks but does not vanish.
    """
    half = policy.neighbourhood
    padded = np.concatenate([np.full(half, np.nan), values, np.full(half, np.nan)])
    centre = _row_medians(padded[_windows(values.size, 2 * half + 1)])
    sigma = MAD_TO_SIGMA * _median(np.abs(values - centre))
    # The neighbourhood's median follows the noise a little, so deviations from it are smaller than the noise.
    sigma *= 1.0 + 1.0 / (2 * half + 1)
    width = policy.winsor_sigmas * max(sigma, policy.noise_floor * _median(np.abs(values)))
    return np.clip(values, centre - width, centre + width)


def remove_canary(values: Sequence[float | None], canary: Sequence[float | None]) -> list[float]:
    """Take the cluster's drift out of a metric, as measured in the same nights by a test whose pins never move.

    The canary's relative deviation from its median is taken off, times the share of it that the metric follows (least
    squares, between 0 and 1): a metric that has nothing to do with the canary is left alone. A night without a canary
    takes the canary of the nights around it.

    Raises:
        InvalidInput: The two differ in length, or a value is not positive: only ratios can be compared.
    """
    raw, control = _as_array(values), _as_array(canary)
    if raw.size != control.size:
        raise InvalidInput(f"{control.size} canary nights for {raw.size} nights", thing="canary")
    known, measured = np.isfinite(raw), np.isfinite(control)
    if (raw[known] <= 0).any() or (control[measured] <= 0).any():
        raise InvalidInput("a canary needs positive values", thing="canary", advice="Leave it out for this metric")
    if measured.sum() < 2 or known.sum() < 2:
        return _as_list(raw)
    at = np.arange(raw.size)
    drift = np.log(np.interp(at, at[measured], control[measured]))
    drift -= np.median(drift)
    metric = np.log(raw, where=known, out=np.full(raw.size, np.nan))
    both = known & measured
    share = _share_followed(metric[both], drift[both])
    return _as_list(np.exp(metric - share * drift))


def remove_node_effects(
    values: Sequence[float | None],
    nodes: Sequence[str],
    policy: ChangePointPolicy = DEFAULT_POLICY,
    least_nights: int = 4,
) -> list[float]:
    """Bring all nights to the level of the node set that most of them ran on.

    The effect of a node set is the median of its nights' ratios to the reference nights around each of them. Only
    nights with reference nights on both sides count, at least `least_nights` of them: nodes that changed for good
    together with the code are indistinguishable from it, and show as a change.

    Args:
        values: One value per night, oldest first.
        nodes: The nodes of each night, any text that is equal for equal sets.
        policy: Its neighbourhood says how many reference nights are taken on each side.
        least_nights: Nights that a node set needs before its effect is believed.

    Raises:
        InvalidInput: The two differ in length.
    """
    raw = _as_array(values)
    if raw.size != len(nodes):
        raise InvalidInput(f"nodes of {len(nodes)} nights for {raw.size} nights", thing="nodes")
    known = np.isfinite(raw)
    set_of_night = _numbered(tuple(nodes))
    counts = np.bincount(set_of_night[known])
    adjusted = raw.copy()
    if np.count_nonzero(counts) < 2:
        return _as_list(adjusted)
    reference = int(np.argmax(counts))
    anchors = np.flatnonzero(known & (set_of_night == reference))
    for other in np.flatnonzero(counts >= least_nights):
        if other == reference:
            continue
        own = np.flatnonzero(known & (set_of_night == other))
        ratios = _ratios(raw, own, anchors, policy)
        if ratios.size >= least_nights:
            adjusted[own] = raw[own] / _median(ratios)
    return _as_list(adjusted)


@lru_cache(maxsize=16)
def _numbered(nodes: tuple[str, ...]) -> NDArray[np.intp]:
    """The number of each night's node set, by their names; every metric of a night asks for the same."""
    _sets, set_of_night = np.unique(np.asarray(nodes, dtype=str), return_inverse=True)
    return set_of_night


def night_noise(values: Sequence[float | None]) -> float:
    """How much a value moves from night to night without a reason, as a relative standard deviation.

    Taken from the differences between consecutive nights, of which a change of level moves only one: the four fifths
    of them that are smallest. NaN with fewer than two nights.
    """
    known = _finite(values)
    level = _median(np.abs(known)) if known.size else 0.0
    if known.size < 2 or level == 0.0:
        return math.nan
    return _quantile(np.abs(known[1:] - known[:-1]), 0.8) / (GAUSSIAN_80 * math.sqrt(2) * level)


def steadiest(statistics: Mapping[str, Sequence[float | None]], nights: int = 60) -> str:
    """The statistic of a metric that reveals a change soonest: the one with the least noise over the last nights.

    A run whose steps are sometimes slow has a median that jumps between two levels while its fastest steps stay where
    they are; slower code moves both. On equal terms, the first one named is taken.

    Args:
        statistics: Several statistics of the same nights, such as median and 5th percentile of the step times.
        nights: How many of the last nights are looked at.
    """
    if len(statistics) == 1:
        return next(iter(statistics))
    noise = {name: night_noise(values[-nights:]) for name, values in statistics.items()}
    return min(noise, key=lambda name: math.inf if math.isnan(noise[name]) else noise[name])


def _as_array(values: Sequence[float | None]) -> Array:
    # None becomes NaN.
    array = np.array(values, dtype=np.float64)
    array[~np.isfinite(array)] = np.nan
    return array


def _as_list(values: Array) -> list[float]:
    listed: list[float] = values.tolist()
    return listed


def _finite(values: Sequence[float | None]) -> Array:
    array = np.array(values, dtype=np.float64)
    return array[np.isfinite(array)]


def _median(values: Array) -> float:
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


def _row_medians(rows: Array) -> Array:
    """Medians that skip NaN, without the cost of `nanmedian`: sorting puts NaN last."""
    ordered = np.sort(rows, axis=1)
    counts = np.count_nonzero(~np.isnan(rows), axis=1)
    at = np.arange(rows.shape[0])
    medians: Array = (ordered[at, (counts - 1) // 2] + ordered[at, counts // 2]) / 2
    return medians


@lru_cache(maxsize=256)
def _windows(count: int, width: int) -> NDArray[np.intp]:
    """The places of so many overlapping windows. numpy's view of them takes longer than a copy."""
    places: NDArray[np.intp] = np.arange(count)[:, np.newaxis] + np.arange(width)
    return places


def _ratios(raw: Array, nights: NDArray[np.intp], anchors: NDArray[np.intp], policy: ChangePointPolicy) -> Array:
    """Nights' values over the median of the reference nights around each; without those that have none on one side."""
    near = policy.neighbourhood // 2
    position = np.searchsorted(anchors, nights)
    inside = (position > 0) & (position < anchors.size)
    padded = np.concatenate([np.full(near, np.nan), raw[anchors], np.full(near, np.nan)])
    levels = _row_medians(padded[position[inside, np.newaxis] + np.arange(2 * near)])
    ratios: Array = raw[nights[inside]][levels != 0] / levels[levels != 0]
    return ratios


def _share_followed(metric: Array, drift: Array) -> float:
    """The slope of the metric on the drift, in [0, 1], with both winsorised so that a bad night does not decide it."""
    x, y = (np.clip(part, *np.quantile(part, [0.02, 0.98])) for part in (drift, metric))
    spread = float(np.var(x))
    if spread == 0.0:
        return 0.0
    return min(1.0, max(0.0, float(np.mean((x - x.mean()) * (y - y.mean()))) / spread))


def _memory(series: Array) -> float:
    """How much less certain a level is than so many independent nights would make it: nights that follow each other.

    From the differences over one night and over two, of which a change of level moves one and two: without memory
    they are alike. A correlation that so many nights may show by chance is none.
    """
    if series.size < LEAST_FOR_MEMORY:
        return 1.0
    near, far = (np.abs(series[lag:] - series[:-lag]) for lag in (1, 2))
    most = 2 * max(_median(near), _median(far))
    squares = float(np.mean(np.minimum(near, most) ** 2))
    correlation = float(np.mean(np.minimum(far, most) ** 2)) / squares - 1 if squares else 0.0
    if correlation < CHANCE_OF_MEMORY / math.sqrt(series.size):
        return 1.0
    # Each night's own noise hides a part of it.
    correlation = min(HIDDEN_MEMORY * correlation, 0.9)
    return math.sqrt((1 + correlation) / (1 - correlation))


def _candidates(series: Array, policy: ChangePointPolicy) -> list[int]:
    """Best splits of overlapping windows, from the top down."""
    found: set[int] = set()
    step = policy.window // 2
    starts = range(0, max(1, series.size - step), step)
    parts = [(start, min(start + policy.window, series.size)) for start in starts]
    while parts:
        start, end = parts.pop()
        split = _best_split(series[start:end], policy)
        if split is None:
            continue
        at, p_value = split
        if p_value <= CANDIDATE_P_VALUE:
            found.add(start + at)
            parts += [(start, start + at), (start + at, end)]
    return sorted(found)


def _best_split(part: Array, policy: ChangePointPolicy) -> tuple[int, float] | None:
    """The split with the greatest t statistic, and its p-value; None where the part is too short."""
    if part.size < 2 * policy.minimum_nights:
        return None
    statistics = _split_statistics(part, policy)
    best = int(np.argmax(statistics))
    return best + policy.minimum_nights, t_test_p_value(float(statistics[best]), part.size - 2)


def _split_statistics(part: Array, policy: ChangePointPolicy) -> Array:
    """|t| of all splits that leave `minimum_nights` on both sides."""
    size, least = part.size, policy.minimum_nights
    apart = part - part.mean()
    # With the mean taken off, the sum on the right is minus the sum on the left.
    sums = apart.cumsum()[least - 1 : size - least]
    between = sums * sums * _split_weights(size, least)
    within = np.maximum(float(apart @ apart) - between, 0.0) / (size - 2)
    statistics: Array = np.sqrt(between / np.maximum(within, policy.noise_floor**2))
    return statistics


@lru_cache(maxsize=1024)
def _split_weights(size: int, least: int) -> Array:
    """What the squared sum of one side is multiplied with, for all splits that leave so many nights on both."""
    left = np.arange(least, size - least + 1)
    weights: Array = size / (left * (size - left))
    return weights


def _merge(series: Array, candidates: Sequence[int], policy: ChangePointPolicy) -> list[_Boundary]:
    """Drop the weakest candidate until all that are left are changes, each moved to its best night on the way."""
    kept = list(candidates)
    while kept:
        edges = [0, *kept, series.size]
        boundaries = [_judge(series, edges, number, policy) for number in range(1, len(edges) - 1)]
        failing = [boundary for boundary in boundaries if not _is_change(boundary, policy)]
        if not failing:
            return boundaries
        weakest = max(failing, key=lambda boundary: (boundary.nights < policy.minimum_nights, boundary.p_value))
        kept.remove(weakest.at)
        kept = _relocated(series, kept, policy)
    return []


def _relocated(series: Array, kept: Sequence[int], policy: ChangePointPolicy) -> list[int]:
    """Each boundary at the best split between its neighbours, now that one of them may be gone."""
    edges = [0, *kept, series.size]
    for number in range(1, len(edges) - 1):
        start, end = _around(edges, number, policy)
        split = _best_split(series[start:end], policy)
        if split:
            edges[number] = start + split[0]
    return sorted(set(edges[1:-1]))


def _around(edges: Sequence[int], number: int, policy: ChangePointPolicy) -> tuple[int, int]:
    """The nights on both sides of an edge that belong to its two levels, at most a window each."""
    at = edges[number]
    return max(edges[number - 1], at - policy.window), min(edges[number + 1], at + policy.window)


def _judge(series: Array, edges: Sequence[int], number: int, policy: ChangePointPolicy) -> _Boundary:
    start, end = _around(edges, number, policy)
    at = edges[number]
    before, after = series[start:at], series[at:end]
    level = float(before.mean())
    difference = float(after.mean()) - level
    shorter, longer = (before, after) if before.size < after.size else (after, before)
    # The night farthest from the other level: a change must stand without it.
    without = np.delete(shorter, int(np.argmax(np.abs(shorter - longer.mean()))))
    return _Boundary(
        at=at,
        change=difference / abs(level) if level else math.copysign(math.inf, difference),
        p_value=_p_value(before, after, policy),
        without_one=_p_value(longer, without, policy),
        nights=shorter.size,
    )


def _p_value(left: Array, right: Array, policy: ChangePointPolicy) -> float:
    degrees = left.size + right.size - 2
    if not left.size or not right.size or degrees < 1:
        return 1.0
    squares = float(np.sum((left - left.mean()) ** 2) + np.sum((right - right.mean()) ** 2))
    sigma = max(policy.memory * math.sqrt(squares / degrees), policy.noise_floor)
    statistic = float(right.mean() - left.mean()) / (sigma * math.sqrt(1 / left.size + 1 / right.size))
    return t_test_p_value(statistic, degrees)


def _is_change(boundary: _Boundary, policy: ChangePointPolicy) -> bool:
    return (
        boundary.nights >= policy.minimum_nights
        and abs(boundary.change) >= policy.minimum_change
        and boundary.p_value <= policy.p_value
        and boundary.without_one <= policy.without_one_p_value
    )


def _start_range(part: Array, at: int, policy: ChangePointPolicy) -> tuple[int, int]:
    """First and last split that the data cannot distinguish from the best one."""
    statistics = _split_statistics(part, policy)
    likelihood = (part.size / 2) * np.log1p(statistics**2 / (part.size - 2))
    position = at - policy.minimum_nights
    possible = np.flatnonzero(2 * (likelihood[position] - likelihood) <= START_RANGE)
    first, last = int(possible.min()), int(possible.max())
    return min(at, first + policy.minimum_nights), max(at, last + policy.minimum_nights)
