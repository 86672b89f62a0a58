"""A metric night by night, and the band that a night is compared with.

A night's value is the median of its runs with the night's own pins: confirming re-runs count, bisect points do not.
Runs that did not do all their steps have no value. The cluster's drift is taken out by the canary, a test whose pins
never move, where the test has one, and the level of the nodes that a night ran on by that of the others.

The band comes from the test's own history. `sigmas` times the noise between its nights (robust: the four fifths of the
differences between consecutive nights that are smallest, so that neither bad nodes nor changes of level count), but

* never less than `least_change`: a month of quiet nights proves little;
* while `sigmas` times the noise is more than the metric's threshold, the threshold;
* where even `TOO_NOISY` times the noise is more than the threshold, that: a threshold inside the noise only flakes,
  and its alerts would soon be ignored. Floors and ceilings and the test for changes of level still hold there.

Cold start: with fewer than `cold_start` good nights the band is the threshold, whatever those nights say; but after a
level was accepted, the noise is that of the nights before it.

One night's band finds what is large, at once. What is smaller than the band is found over several nights, by the test
for changes of level (`gate.metric_comparison`).
"""

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from nightbridge.errors import InvalidInput
from nightbridge.history.reading import is_good
from nightbridge.history.rows import COMPLETE_OUTCOMES, HistoryRow, measure_of, measured
from nightbridge.models import NO_VALUE, GatePolicy, Summary, VerdictStatus
from nightbridge.models.metrics import METRIC_BY_NAME, Metric
from nightbridge.numbers import format_count

# A run with one of these verdicts does not do what was requested, and that is its own fault.
BROKEN = frozenset({VerdictStatus.FAILED, VerdictStatus.SHORT, VerdictStatus.INVALID})


@dataclass(frozen=True)
class NightRuns:
    """The night's own run, all runs that count for its value, and the arms of its pairs."""

    own: HistoryRow
    runs: tuple[HistoryRow, ...]
    arms: tuple[HistoryRow, ...] = ()

    @cached_property
    def summaries(self) -> tuple[Summary, ...]:
        """What its runs measured, of those with numbers that stand for the test; each metric asks for them."""
        return tuple(run.summary for run in self.runs if _has_values(run))

    @cached_property
    def only(self) -> Summary | None:
        """The one of these, where there is one, as in most nights."""
        return self.summaries[0] if len(self.summaries) == 1 else None

    @cached_property
    def is_good(self) -> bool:
        """Whether its own run may make a baseline."""
        return is_good(self.own)


def nights_of(rows: Iterable[HistoryRow], iteration: int = 1) -> tuple[NightRuns, ...]:
    """The nights that have a run of their own, oldest first: of several, that of an iteration where there is one."""

    def place(row: HistoryRow) -> tuple[Any, ...]:
        return row.repeat, row.iteration != iteration, row.iteration, row.harvested_at

    by_night: dict[str, list[HistoryRow]] = {}
    for row in sorted(rows, key=place):
        by_night.setdefault(row.night, []).append(row)
    nights = []
    for runs in sorted(by_night.values(), key=lambda runs: runs[0].order):
        own = runs[0]
        if own.repeat == 0:
            same = (run for run in runs if pins_of(run) == pins_of(own) and _counts(run))
            nights.append(NightRuns(own, tuple(same), arms_of(own, runs)))
    return tuple(nights)


def rows_until(rows: Sequence[HistoryRow], night: str | None) -> tuple[HistoryRow, ...]:
    """The rows up to a night and of it; all where none is named.

    Raises:
        InvalidInput: The night has no row.
    """
    if night is None:
        return tuple(rows)
    if all(row.night != night for row in rows):
        last = ", ".join(dict.fromkeys(row.night for row in rows[-5:]))
        raise InvalidInput("no such night in the history", subject=night, advice=f"The last ones are {last or 'none'}")
    return up_to(rows, night)


def up_to(rows: Sequence[HistoryRow], night: str) -> tuple[HistoryRow, ...]:
    """The rows up to a night and of it, in their order, in which a night without a row stands where its name says."""
    last = max((row.order for row in rows if row.night == night), default=night)
    return tuple(row for row in rows if row.order <= last)


def good_runs_before(night: str, history: Sequence[HistoryRow]) -> tuple[HistoryRow, ...]:
    """The runs that may make a baseline for a night, oldest first."""
    good = (row for row in history if row.night < night and is_good(row) and not row.resumed)
    return tuple(sorted(good, key=lambda row: (row.order, row.harvested_at)))


def repeats_of(own: HistoryRow, history: Iterable[HistoryRow]) -> list[HistoryRow]:
    """The runs that confirm a night's own run, in their order; none of a run that is one of them itself."""
    repeats = [
        row
        for row in history
        if row.night == own.night
        and row.repeat > 0
        and _is_beside(own, row)
        and pins_of(row) == pins_of(own)
        and _counts(row)
    ]
    return sorted(repeats, key=lambda row: row.repeat)


def arms_of(own: HistoryRow, history: Iterable[HistoryRow]) -> tuple[HistoryRow, ...]:
    """The runs of a night's pairs, of both points, in their order."""
    arms = [row for row in history if row.arm and row.night == own.night and _is_beside(own, row)]
    return tuple(sorted(arms, key=lambda row: row.repeat))


def _counts(row: HistoryRow) -> bool:
    """Whether a run stands for its night's point: no control arm, and none on nodes that are suspect."""
    return row.arm is None or (row.arm.role == "new" and not row.arm.on_suspects)


def _is_beside(own: HistoryRow, row: HistoryRow) -> bool:
    return own.repeat == 0 and (row.scenario, row.iteration) == (own.scenario, own.iteration)


def pins_of(row: HistoryRow) -> tuple[str | None, ...]:
    """What the run was pinned to: the commits and the image."""
    return row.megatron_bridge.commit, row.nemo_run.commit if row.nemo_run else None, row.image_digest


def run_value(run: HistoryRow, metric: Metric, field: str = "") -> float | None:
    """What one run measured of a metric, or of another field that measures the same."""
    return measured(metric, run.summary, field) if _has_values(run) else None


def values_of(runs: Iterable[HistoryRow], metric: Metric) -> list[float]:
    """The same of each of some runs that measured it."""
    return [value for run in runs if (value := run_value(run, metric)) is not None]


def _has_values(run: HistoryRow) -> bool:
    return run.outcome in COMPLETE_OUTCOMES and run.verdict not in NO_VALUE


def night_value(night: NightRuns, metric: Metric, field: str = "") -> float | None:
    """The median of the night's runs that measured it."""
    return night_values([night], metric, field)[0]


def night_values(nights: Sequence[NightRuns | None], metric: Metric, field: str = "") -> list[float | None]:
    """The same of each night; None for one that does not count."""
    measure = measure_of(metric, field)
    return [
        measure(night.only) if night and night.only else _median(map(measure, night.summaries if night else ()))
        for night in nights
    ]


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def canary_values(nights: Sequence[NightRuns], canary: Sequence[HistoryRow], metric: Metric) -> list[float | None]:
    """The canary's value in each of the nights."""
    by_night = {night.own.night: night_value(night, metric) for night in nights_of(canary)}
    return [by_night.get(night.own.night) for night in nights]


def adjusted(
    metric: Metric, values: Sequence[float | None], nights: Sequence[NightRuns], canary: Sequence[float | None]
) -> list[float | None]:
    """The values without the cluster's drift and without the level of the nodes; as they are where neither is known.

    The drift is what control arms have shown, and what the canary shows.
    """
    values = [
        None if value is None else value / night.own.moved.get(metric.name, 1.0)
        for value, night in zip(values, nights, strict=False)
    ]
    if not metric.follows_cluster:
        return values
    from nightbridge.history.noise import remove_canary, remove_node_effects

    steady = remove_node_effects(
        remove_canary(values, canary) if canary else values, [night.own.nodes for night in nights]
    )
    return [None if math.isnan(value) else value for value in steady]


# Runs on each side of one that make its level with it, and how far a single one is off by chance, in its noise.
NEAR, BY_CHANCE = 3, 2.0

TOO_NOISY = 3.0
NOISE_NIGHTS = 28

NIGHTS_THAT_CONFIRM = 3
"""So many nights in a row confirm what no arm measures: as many as a night has runs with its pair."""

NIGHTS_BEFORE = 14
"""Good nights that they are compared with."""

AT_ONCE = METRIC_BY_NAME["teardown_time"].band
"""What is worse by more than this, relative, hangs: one night is enough, as of the time after the last step."""

MEDIAN_SHARE, EACH_SHARE = 0.7, 0.4
"""How much of the band the median of these nights is away, and each of them. A busy file system makes a single night
several times as long; that each of three is off by a little and most by more is seldom chance (`error_rate.py`)."""


class Band(NamedTuple):
    """What a night is compared with: a reference in the metric's unit, and how far from it is no news (a share)."""

    reference: float | None
    width: float
    nights: int
    noise: float

    def side(self, value: float) -> int:
        """1 above the band, -1 below it, 0 inside; a change of exactly the width is inside."""
        if self.reference is None:
            return 0
        difference = value - self.reference
        # Multiplied out, so that a reference of zero needs no case of its own: any step away from it counts.
        allowed = self.width * abs(self.reference)
        if math.isclose(abs(difference), allowed, rel_tol=1e-9) or abs(difference) < allowed:
            return 0
        return 1 if difference > 0 else -1


class Agreement(NamedTuple):
    """How many of a night's runs are worse than the band."""

    runs: int
    worse: int

    @property
    def is_split(self) -> bool:
        """Whether some of them are and some are not."""
        return 0 < self.worse < self.runs

    @property
    def is_worse(self) -> bool:
        """Whether most of them are."""
        return 2 * self.worse > self.runs

    def __str__(self) -> str:
        return f"{self.worse} of {format_count(self.runs, 'run')}"


def agreement_of(sides: Sequence[int]) -> Agreement:
    """Count the runs. `sides`: one per run, positive when it is worse than the band, else zero or negative."""
    return Agreement(len(sides), sum(side > 0 for side in sides))


def band_of(
    metric: Metric,
    gate: GatePolicy,
    good: Sequence[float],
    singles: Sequence[float | None],
    before: Sequence[float] = (),
) -> Band:
    """The band of a metric.

    Args:
        metric: The metric.
        gate: The test's policy.
        good: The values of the good nights, oldest first.
        singles: The same nights' first runs alone: what one run is compared with must have the noise of one run.
        before: First runs of good nights before an accepted level, whose noise it has as long as it is young.
    """
    # numpy is imported with the first band from history: commands that compare nothing do not pay for it.
    from nightbridge.history.noise import noise_of, tail_of

    threshold = metric.threshold(gate)
    reference = statistics.median(good[-gate.baseline_runs :]) if good else None
    is_young = len(good) < gate.cold_start
    if is_young and not (good and len(before) >= gate.cold_start):
        few = noise_of(singles) if len(good) > 2 else 0.0
        return Band(reference, max(threshold, gate.sigmas * few), len(good), math.nan)
    known = (before if is_young else singles)[-NOISE_NIGHTS:]
    # The level of a few nights is not known exactly either.
    sure = math.sqrt(1 + 1 / len(good)) if is_young else 1.0
    noise, tail = sure * noise_of(known), sure * tail_of(known, metric.sign)
    least = min(metric.least(gate.least_change), threshold)
    width = max(least, min(gate.sigmas * noise, max(threshold, TOO_NOISY * noise)), tail)
    return Band(reference, width, len(good), noise)


def strays_of(metric: Metric, band: Band, singles: Sequence[float | None]) -> float:
    """Share of good nights' first runs that are worse than the band, as if there were two more; 0 of an average."""
    if not metric.least_change:
        return 0.0
    known = [value for value in singles[-NOISE_NIGHTS:] if value is not None]
    worse = sum(metric.worse(band.side(value)) for value in known)
    return (1 + worse) / (2 + len(known))


class WorseNights(NamedTuple):
    """Nights in a row that are worse: the place of the first, their median, and that of the good nights before them."""

    first: int
    level: float
    reference: float

    @property
    def change(self) -> float:
        """Relative, signed."""
        return (self.level - self.reference) / abs(self.reference) if self.reference else 0.0


def worse_nights(
    metric: Metric,
    gate: GatePolicy,
    values: Sequence[float | None],
    good: Sequence[int],
    band_at: Callable[[Sequence[int]], Band],
) -> WorseNights | None:
    """The last nights, where they together are worse than the good ones before them; None where they are not.

    Their median is so by `MEDIAN_SHARE` of the band, by all of it while there is little history; each by `EACH_SHARE`;
    and the last one by all of it, or half as much as their median, so that a night that is back ends them.

    Args:
        metric: The metric.
        gate: The test's policy.
        values: One per night, oldest first, tonight's last.
        good: Places of the good nights, oldest first.
        band_at: The band of a single night by some good ones' places. While there are few, those that are in question
            themselves are none of them, and do not widen it.
    """
    last = [(at, value) for at, value in enumerate(values) if value is not None][-NIGHTS_THAT_CONFIRM:]
    if len(last) < NIGHTS_THAT_CONFIRM:
        return None
    places = [at for at in good if at < last[0][0]]
    before = [value for at in places[-NIGHTS_BEFORE:] if (value := values[at]) is not None]
    if not before:
        return None
    found = WorseNights(last[0][0], statistics.median(value for _at, value in last), statistics.median(before))
    least = min(metric.least(gate.least_change), metric.threshold(gate))
    share = MEDIAN_SHARE if len(before) >= gate.cold_start else 1.0
    band = band_at(good if len(good) >= gate.cold_start else places)
    far = band._replace(reference=found.reference, width=max(least, share * band.width))
    near = far._replace(width=EACH_SHARE * band.width)
    nearest = far._replace(width=min(band.width, abs(found.change) / 2))
    is_worse = far.side(found.level) == nearest.side(last[-1][1]) == metric.sign
    return found if is_worse and all(near.side(value) == metric.sign for _at, value in last) else None


def before_worse_nights(
    metric: Metric,
    gate: GatePolicy,
    values: Sequence[float | None],
    good: Sequence[int],
    worse: Mapping[int, float],
    band_at: Callable[[Sequence[int]], Band],
) -> tuple[list[int], int | None]:
    """The good nights but for those that later ones proved to be worse, and where what is worse until now begins.

    The first nights of a regression pass, since they prove nothing alone. Were they good for ever, a test with few
    nights before them would take them for its usual. A night that measured nothing neither begins nor ends one, and
    what a ceiling alone called worse is no level: a night within it is good again.

    Args:
        metric: The metric.
        gate: The test's policy.
        values: One per night, oldest first, tonight's last.
        good: Places of the good nights, oldest first.
        worse: By how much the metric is so, relative, in the nights whose verdict says it and no user has accepted, by
            their places.
        band_at: As of `worse_nights`.
    """
    kept, begin = list(good), None
    for at in (at for at, value in enumerate(values[:-1]) if value is not None):
        if at not in worse:
            begin = None
        elif begin is None:
            before = [place for place in kept if place < at]
            found = worse_nights(metric, gate, values[: at + 1], before, band_at)
            begin = found.first if found else at if abs(worse[at]) > AT_ONCE else None
            kept = [place for place in kept if begin is None or not begin <= place < at]
    return kept, begin


def fixed_band(metric: Metric, gate: GatePolicy, values: Sequence[float]) -> Band:
    """The band around runs chosen by a user: their median, and the metric's threshold."""
    return Band(statistics.median(values) if values else None, metric.threshold(gate), len(values), math.nan)


def times_worse(metric: Metric, runs: Sequence[HistoryRow], least: float) -> list[float]:
    """How much worse the level at each of some runs is than the best level among them, in multiples of what is no news.

    The level at a run is the median of the runs around it. What it measured itself counts, too, as far as that is no
    chance: the level hides that the first night's code was another. What is no news, or was not measured, is 1.0.

    Args:
        metric: What is measured; where the cluster has moved its level, that is taken out.
        runs: Oldest first.
        least: The smallest relative change that is news; the noise of single runs is, where that is more.
    """
    from nightbridge.history.noise import levels_around, night_noise

    measured_at = {at: value for at, run in enumerate(runs) if (value := run_value(run, metric)) is not None}
    known = [value / runs[at].moved.get(metric.name, 1.0) for at, value in measured_at.items()]
    levels = levels_around(known, NEAR)
    best = (min if metric.lower_is_better else max)(levels, default=0.0)
    times = [1.0] * len(runs)
    if len(known) < 2 or not best:
        return times
    noise = night_noise(known)
    for at, level, own in zip(measured_at, levels, known, strict=True):
        worse, own_worse = (metric.sign * (value - best) / abs(best) for value in (level, own))
        times[at] = max(1.0, max(worse, own_worse - BY_CHANCE * noise) / max(least, noise))
    return times
