"""Change points: when a metric's level shifted, by how much, and how certain that is.

One value per night goes in, oldest first; nothing is assumed about its unit. Four steps, each for a fault that nightly
series really have:

1. What is known to move the value without the code is taken out (`noise`), by whoever calls this.
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
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from pydantic import Field

from nightbridge.history.noise import Array, median, row_medians, windows_around
from nightbridge.models import Model

# Median absolute deviation to standard deviation, for Gaussian noise.
MAD_TO_SIGMA = 1.4826

# A candidate is kept for the merge when one split alone is this significant: a change that is masked by a second one,
# such as a slow-down that was repaired, becomes significant only once both are known.
CANDIDATE_P_VALUE = 1e-3

# Twice the drop of the log-likelihood that leaves 95 % of the start nights inside (chi-squared, one degree of freedom).
START_RANGE = 3.84

# Fewest nights whose correlation can be estimated, and the correlation that is no chance, times the root of the nights.
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
    raw = np.array(values, dtype=np.float64)
    nights = np.flatnonzero(np.isfinite(raw))
    known = raw[nights]
    level = median(np.abs(known)) if known.size else 0.0
    if known.size < 2 * policy.minimum_nights or level == 0.0:
        return ()
    series = winsorise(known, policy) / level
    if (memory := _memory(series, policy)) != policy.memory:
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
    centre = row_medians(windows_around(values, half))
    sigma = MAD_TO_SIGMA * median(np.abs(values - centre))
    # The neighbourhood's median follows the noise a little, so deviations from it are smaller than the noise.
    sigma *= 1.0 + 1.0 / (2 * half + 1)
    width = policy.winsor_sigmas * max(sigma, policy.noise_floor * median(np.abs(values)))
    return np.clip(values, centre - width, centre + width)


def _memory(series: Array, policy: ChangePointPolicy) -> float:
    """How much less certain a level is than so many independent nights would make it: nights that follow each other.

    A drift moves two nights by twice as much as one, as memory does: what is memory is there without the drift, too.
    """
    if series.size < LEAST_FOR_MEMORY:
        return 1.0
    near, far = series[1:] - series[:-1], series[2:] - series[:-2]
    drift = row_medians(windows_around(near, 2 * policy.neighbourhood))
    return min(_memory_of(near, far), _memory_of(near - drift, far - drift[1:] - drift[:-1]))


def _memory_of(near: Array, far: Array) -> float:
    """The same from the differences over one night and over two, of which a change of level moves one and two.

    Without memory they are alike. A correlation that so many nights may show by chance is none.
    """
    near, far = np.abs(near), np.abs(far)
    most = 2 * max(median(near), median(far))
    squares = float(np.mean(np.minimum(near, most) ** 2))
    correlation = float(np.mean(np.minimum(far, most) ** 2)) / squares - 1 if squares else 0.0
    if correlation < CHANCE_OF_MEMORY / math.sqrt(near.size):
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
    left = np.arange(least, size - least + 1)
    between = sums * sums * (size / (left * (size - left)))
    within = np.maximum(float(apart @ apart) - between, 0.0) / (size - 2)
    statistics: Array = np.sqrt(between / np.maximum(within, policy.noise_floor**2))
    return statistics


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


def t_test_p_value(statistic: float, degrees: float) -> float:
    """Two-sided p-value of Student's t. Without scipy: it alone is larger than all that nightbridge imports."""
    if not math.isfinite(statistic):
        return 0.0 if math.isinf(statistic) else 1.0
    return _incomplete_beta(degrees / 2, 0.5, degrees / (degrees + statistic * statistic))


def _incomplete_beta(a: float, b: float, x: float) -> float:
    """The regularised incomplete beta function, by its continued fraction (modified Lentz)."""
    if x <= 0.0 or x >= 1.0:
        return min(max(x, 0.0), 1.0)
    if x > (a + 1) / (a + b + 2):
        return 1.0 - _incomplete_beta(b, a, 1.0 - x)
    front = math.exp(math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)) / a
    tiny = 1e-300
    c, d = 1.0, 1.0 / (1.0 - (a + b) * x / (a + 1) or tiny)
    result = d
    for m in range(1, 300):
        for numerator in (
            m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m)),
            -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1)),
        ):
            d = 1.0 / (1.0 + numerator * d or tiny)
            c = 1.0 + numerator / c or tiny
            result *= c * d
        if abs(c * d - 1.0) < 1e-14:
            break
    return front * result
