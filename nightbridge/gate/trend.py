"""Trends: the change points of a series' metrics, and what was pinned on both sides of each.

The nights' values are those of `nightly_values`, without what control arms and nodes explain where changes are
searched. Of a metric with several statistics, such as the median of the step times and their 5th percentile, the
steadiest one is taken. Users' decisions about a change (`decisions`) are shown with it.

The nights before also tell what of a verdict is news: a fault that stands since a week is none, its end is. And the
night in which a verdict says "regressed" need not be the one in which it began: a small change is sure only after some
nights. Where the history has a change point that began the present level of a metric that regressed, its range of start
nights counts; else the last good run and the first bad one after it, of those that show it together the first
(`suspect_nights`).
"""

import itertools
import math
import re
import statistics
from collections.abc import Iterable, Sequence, Set
from typing import TYPE_CHECKING, NamedTuple

from pydantic import Field

from nightbridge.gate.decisions import Decision, as_decided, decision_on, is_accepted, level_start
from nightbridge.gate.suspects import ChangedPin, CommitsBetween, changed_pins, changed_topology, with_commits
from nightbridge.history.nightly_values import (
    BROKEN,
    NightRuns,
    adjusted,
    good_runs_before,
    night_values,
    nights_of,
    up_to,
)
from nightbridge.history.rows import COMPLETE_OUTCOMES, HistoryRow, facts_of, good_for
from nightbridge.models import EXIT_CODES, GOLDEN, MetricName, Model, News, Verdict, VerdictStatus
from nightbridge.models.metrics import METRIC_BY_NAME, METRICS, Metric

if TYPE_CHECKING:
    from nightbridge.history.changepoints import ChangePoint

CERTAINLY_BACK = 3.0
"""A night this many standard deviations on the good side of the worse level is taken to be back."""

NIGHTS_BACK = 3
"""The last good nights whose median says whether a level was left."""

WITHOUT_RESULT = frozenset({VerdictStatus.CANCELLED, VerdictStatus.INFRASTRUCTURE, VerdictStatus.INVALID, None})
"""Nights with these verdicts say nothing about the test: what stood before them stands after them."""

MODES_TAKE_TURNS = 15
"""A test that was unstable in so many nights is so still: a fast night in between says nothing else."""

SPEEDS = frozenset({METRIC_BY_NAME["step_time"].fact})
"""What two speeds of a test are about."""

LONGEST = 200
"""Characters of a failure's signature: what comes after them is detail."""

# What is another in each run: addresses, numbers of ranks, nodes, steps and bytes; folders and what is in quotes stay
# as long as they hold none of these, for a missing module or file is known by its name.
_BY_CHANCE = re.compile(r"0x[0-9a-f]+|\b[0-9a-f]{12,}\b|\d+(?:[.:,]\d+)*", re.IGNORECASE)
_FOLDERS = re.compile(r"(?:/[\w.@#+-]+)+/")


class LevelChange(Model):
    """A night at which a metric's level shifted."""

    metric: str
    statistic: str = Field(description="The field of `Summary` in which it was found.")
    night: str = Field(description="First night of the new level.")
    last_night_before: str = Field(description="The last night that certainly (95 %) had the old level.")
    latest_night: str = Field(description="The last night with which the new level may have begun (95 %).")
    before: float = Field(description="Median of the statistic before, in the metric's unit.")
    after: float
    change: float = Field(description="Relative, signed.")
    worse: bool
    p_value: float
    suspects: tuple[ChangedPin, ...] = Field((), description="What is pinned differently on both sides.")
    decision: Decision | None = Field(None, description="A user's decision about it, which silences the alert.")


class Trend(Model):
    """One metric of a series: its nights and its changes, oldest first."""

    metric: MetricName
    unit: str
    nights: tuple[str, ...]
    values: tuple[float | None, ...] = Field(description="One per night; None where nothing was measured.")
    changes: tuple[LevelChange, ...]
    left: bool = Field(False, description="Whether the last level was left by good nights: what is bad now is new.")

    @property
    def ongoing(self) -> LevelChange | None:
        """The change that began the level of the last night, where that is worse and no decision is about it.

        One that was repaired, or that is a baseline since, is no cause of what is worse tonight.
        """
        from nightbridge.history.changepoints import DEFAULT_POLICY

        if self.left:
            return None
        metric = METRIC_BY_NAME[self.metric]
        decided = max((at for at, change in enumerate(self.changes) if change.decision), default=-1)
        later = self.changes[decided + 1 :]
        levels = [(change.before, change.after) for change in later]
        at, _held_to = _worse_since(metric, levels, metric.least(DEFAULT_POLICY.minimum_change))
        return None if at is None else later[at]


class NewLevel(NamedTuple):
    """A level that is worse or better: the change that began it, and both levels in the metric's unit."""

    began: "ChangePoint"
    before: float
    after: float

    @property
    def change(self) -> float:
        """Relative, signed."""
        return (self.after - self.before) / abs(self.before) if self.before else 0.0

    def holds(self, value: float | None) -> bool:
        """Whether a night has this level rather than that before it."""
        return value is not None and abs(value - self.after) < abs(value - self.before)

    def is_exceeded(self, metric: Metric, value: float | None, width: float) -> bool:
        """Whether a night is worse than the level by more than the relative width of a band."""
        return value is not None and metric.sign * (value - self.after) > width * abs(self.after)


def ongoing_regression(metric: Metric, points: "Sequence[ChangePoint]", minimum_change: float) -> NewLevel | None:
    """The regression that the last level is, if it is one.

    `points` are oldest first; `minimum_change` is the smallest relative change that counts.
    """
    at, held_to = _worse_since(metric, [(point.before, point.after) for point in points], minimum_change)
    return None if at is None else NewLevel(points[at], held_to, points[-1].after)


def _worse_since(
    metric: Metric, levels: Sequence[tuple[float, float]], minimum_change: float
) -> tuple[int | None, float]:
    """Which change began the worse level that the last one is, None where it is not; and the level that is held to.

    `levels`: those before and after each change, oldest first.
    """
    held_to, began = levels[0][0] if levels else 0.0, None
    for at, (_before, after) in enumerate(levels):
        change = (after - held_to) / abs(held_to) if held_to else 0.0
        if abs(change) >= minimum_change and metric.worse(change):
            began = at if began is None else began
        else:
            began = None
            if abs(change) >= minimum_change:
                held_to = after
    return began, held_to


def lasting_improvement(metric: Metric, points: "Sequence[ChangePoint]", minimum_change: float) -> NewLevel | None:
    """The better level that the last one is, if it is one. Args as of `ongoing_regression`."""
    if not points:
        return None
    last = points[-1]
    found = NewLevel(last, last.before, last.after)
    better = abs(found.change) >= minimum_change and not metric.worse(found.change)
    return found if better else None


def is_back(metric: Metric, ongoing: NewLevel, value: float, noise: float) -> bool:
    """Whether one night says that the worse level is over, before a new level is established."""
    gained = metric.sign * (ongoing.after - value)
    half = abs(ongoing.after - ongoing.before) / 2
    return gained > max(half, CERTAINLY_BACK * noise * abs(ongoing.after))


def was_left(metric: Metric, level: NewLevel, nights: Sequence[NightRuns], values: Sequence[float | None]) -> bool:
    """Whether good nights have left a worse level: it was repaired, and what is bad now began after them.

    A new level takes some nights to be found, so that the repair may not be a change yet.

    Args:
        metric: The metric.
        level: That all its values together say to be the present one.
        nights: Oldest first; one that is not judged yet is no good one.
        values: One for each night.
    """
    from nightbridge.history.noise import night_noise

    last_good = max((at for at, night in enumerate(nights) if night.is_good), default=-1)
    since = zip(nights[: last_good + 1], values, strict=False)
    later = itertools.islice(since, level.began.latest + 1, None)
    back = [value for night, value in later if value is not None and night.is_good][-NIGHTS_BACK:]
    return bool(back) and is_back(metric, level, statistics.median(back), night_noise(values) / math.sqrt(len(back)))


class Standing(NamedTuple):
    """What is news about tonight, and the first night of what stands; empty where nothing does."""

    news: News
    since: str


def failure_signature(reason: str) -> str:
    """What two runs that broke in the same way have in common of why, without what differs by chance."""
    return _BY_CHANCE.sub("#", _FOLDERS.sub("", reason))[:LONGEST]


def newest_facts(worse: Iterable[str], before: Sequence[HistoryRow]) -> set[str]:
    """What metrics that are worse tonight are about: of them what the last night was not worse in, where it regressed.

    `before`: the nights before, oldest first.
    """
    last = next((row for row in reversed(before) if row.verdict not in WITHOUT_RESULT), None)
    known = facts_of(last.worse) if last and last.verdict is VerdictStatus.REGRESSED else set()
    return facts_of(worse) - known or facts_of(worse)


def standing(verdict: Verdict, nights: Sequence[NightRuns], decisions: Sequence[Decision] = ()) -> Standing:
    """Whether it is new, worse, better or over, or stands.

    Args:
        verdict: Tonight's.
        nights: Oldest first and judged, tonight itself last.
        decisions: Users': what is bad beside an accepted level is new.
    """
    before_tonight = (_same_run(night, nights[-1].own) for night in nights[:-1])
    judged = [row for row in before_tonight if row.verdict not in WITHOUT_RESULT]
    before = judged[-1].verdict if judged else None
    if not EXIT_CODES[verdict.status]:
        if before and EXIT_CODES[before]:
            return Standing("over", "")
        better = verdict.status is VerdictStatus.IMPROVED and before is not VerdictStatus.IMPROVED
        return Standing("better" if better else "", "")
    regressed = verdict.status is VerdictStatus.REGRESSED
    facts = facts_of(verdict.worse)
    judged = [as_decided(row, decisions) for row in judged]
    judged = [good_for(row, facts) for row in judged] if regressed and facts else judged
    if verdict.status is VerdictStatus.UNSTABLE:
        unstable = [row for row in judged[-MODES_TAKE_TURNS:] if row.verdict is verdict.status]
        # Two speeds take turns, also for golden values; that runs disagree in something else is another matter.
        known = SPEEDS | {GOLDEN} | facts_of(name for row in unstable for name in row.worse)
        stands = unstable and facts <= known
        return Standing("standing", unstable[0].night) if stands else Standing("new", verdict.night)
    own = _fault(nights[-1].own.model_copy(update={"verdict": verdict.status}))
    same = list(itertools.takewhile(lambda row: _fault(row) == own, reversed(judged)))
    if verdict.status in WITHOUT_RESULT or not same:
        return Standing("new", verdict.night)
    # Up to 0.2 a row named nothing where golden values alone said that it is worse.
    last = judged[-1].worse or {GOLDEN: 0.0}
    thresholds = {item.metric: item.threshold for item in verdict.comparisons}
    worse = regressed and any(
        name not in last or abs(change) > abs(last[name]) + thresholds.get(name, 0.0)
        for name, change in verdict.worse.items()
    )
    return Standing("worse" if worse else "standing", same[-1].night)


def _same_run(night: NightRuns, own: HistoryRow) -> HistoryRow:
    """Of the runs that a test has each night the one of the same number; the night's own where it had fewer."""
    same = (run for run in night.runs if run.repeat == 0 and run.iteration == own.iteration)
    return next(same, night.own)


def _fault(row: HistoryRow) -> tuple[object, ...]:
    """What a night has in common with those on which the same is wrong: of a broken run also how it broke."""
    if row.verdict not in BROKEN:
        return (row.verdict,)
    if row.outcome not in COMPLETE_OUTCOMES:
        return (row.verdict, row.outcome, failure_signature(row.outcome_reason))
    return (row.verdict, bool(row.summary.non_finite_steps), *map(failure_signature, row.summary.damage[:1]))


def trends(rows: Sequence[HistoryRow], decisions: Sequence[Decision] = ()) -> tuple[Trend, ...]:
    """What each gated metric of a series did, night by night: those that every table shows first, then those measured.

    `rows` are in any order.
    """
    nights = nights_of(rows)
    found = tuple(_trend(metric, nights, decisions) for metric in METRICS)
    return tuple(
        trend
        for trend in found
        if METRIC_BY_NAME[trend.metric].always or any(value is not None for value in trend.values)
    )


def _trend(metric: Metric, nights: Sequence[NightRuns], decisions: Sequence[Decision]) -> Trend:
    # numpy is imported with the first trend: commands that need none do not pay for it.
    from nightbridge.history.changepoints import DEFAULT_POLICY, find_change_points
    from nightbridge.history.noise import steadiest

    fields = (metric.field, *metric.statistics)
    raw = {field: night_values(nights, metric, field) for field in fields}
    believed = [
        night.own.verdict is not VerdictStatus.SUSPICIOUS or is_accepted(decisions, metric.name, night.own.order)
        for night in nights
    ]
    series = {
        field: adjusted(metric, [v if good else None for v, good in zip(values, believed, strict=True)], nights, ())
        for field, values in raw.items()
    }
    statistic = steadiest(series)
    least = metric.least(DEFAULT_POLICY.minimum_change)
    points = find_change_points(series[statistic], DEFAULT_POLICY.model_copy(update={"minimum_change": least}))
    changes = []
    for point in points:
        before, first = _start_of(metric, point, nights, series[statistic], decisions)
        last_before, begin, latest = nights[before], nights[first].own.night, nights[max(first, point.latest)]
        changes.append(
            LevelChange(
                metric=metric.name,
                statistic=statistic,
                night=begin,
                last_night_before=last_before.own.night,
                latest_night=latest.own.night,
                before=point.before,
                after=point.after,
                change=point.change,
                worse=metric.worse(point.change),
                p_value=point.p_value,
                suspects=changed_pins(last_before.own, latest.own),
                decision=decision_on(decisions, metric.name, last_before.own.order, nights[first].own.order),
            )
        )
    decided = max((at for at, change in enumerate(changes) if change.decision), default=-1)
    level = ongoing_regression(metric, points[decided + 1 :], least)
    return Trend(
        metric=metric.name,
        unit=metric.unit,
        nights=tuple(night.own.night for night in nights),
        values=tuple(raw[metric.field]),
        changes=tuple(changes),
        left=level is not None and was_left(metric, level, nights, series[statistic]),
    )


def _start_of(
    metric: Metric,
    point: "ChangePoint",
    nights: Sequence[NightRuns],
    values: Sequence[float | None],
    decisions: Sequence[Decision],
) -> tuple[int, int]:
    """The last night that certainly had the old level, and the first one of the new.

    While a level is young its first nights are taken for accidents, and it seems to begin a night or two later. None
    that regressed is before it, and none since a level was accepted.
    """
    certain = at = max(0, point.earliest - 1)
    accepted = level_start(decisions, metric.name)
    while at and metric.worse(point.change):
        own, value = nights[at].own, values[at]
        if metric.name not in own.worse and not (accepted and own.order >= accepted):
            break
        if value is None or abs(value - point.after) > abs(value - point.before):
            break
        at -= 1
    return at, first_night(point, nights, values) if at == certain else at + 1


def first_night(point: "ChangePoint", nights: Sequence[NightRuns], values: Sequence[float | None]) -> int:
    """Which night a new level begins with: in the youngest that is found, good nights at the old level are not its own.

    A level has some nights at least, so that one that is younger seems to begin before itself.
    """
    from nightbridge.history.changepoints import DEFAULT_POLICY

    first = point.index
    if sum(value is not None for value in values[first:]) > DEFAULT_POLICY.minimum_nights:
        return first
    while first + 1 < len(nights):
        value = values[first]
        if not nights[first].is_good or value is None or abs(value - point.before) >= abs(value - point.after):
            break
        first += 1
    return first


def suspect_nights(
    verdict: Verdict, rows: Sequence[HistoryRow], decisions: Sequence[Decision] = ()
) -> tuple[HistoryRow, HistoryRow] | None:
    """The last run that was certainly good, or accepted, and the last one with which the change may have begun."""
    until = [row for row in up_to(rows, verdict.night) if row.night <= verdict.night]
    nights = [as_decided(night.own, decisions) for night in nights_of(until)]
    if not nights or nights[-1].night != verdict.night:
        return None
    regressed = set(verdict.worse)
    if verdict.status is VerdictStatus.REGRESSED and regressed:
        # What is worse since tonight has another cause than what was worse before.
        facts = newest_facts(regressed, nights[:-1])
        regressed = {metric for metric in regressed if facts_of([metric]) <= facts}
        nights = [good_for(night, facts) for night in nights]
    since = {item.metric: item.since for item in verdict.comparisons if item.metric in regressed and item.since}
    change = _change(verdict, regressed - since.keys(), until, decisions)
    if change is not None:
        by_night = {row.night: row for row in nights}
        return by_night[change.last_night_before], by_night[change.latest_night]
    begun = min(since.values(), default="")
    good = good_runs_before(begun or verdict.night, nights)
    if not good:
        return None
    after = (row for row in nights if row.night > good[-1].night)
    return good[-1], next((row for row in after if row.verdict is verdict.status or row.night == begun), nights[-1])


def trends_with_commits(found: Sequence[Trend], commits_between: CommitsBetween) -> tuple[Trend, ...]:
    """The trends with the commits that lie between the two pins of each change, newest first."""

    def named(change: LevelChange) -> LevelChange:
        suspects = (with_commits(pin, pin.url, commits_between) if pin.url else pin for pin in change.suspects)
        return change.model_copy(update={"suspects": tuple(suspects)})

    return tuple(trend.model_copy(update={"changes": tuple(map(named, trend.changes))}) for trend in found)


def _change(
    verdict: Verdict, regressed: Set[str], until: Sequence[HistoryRow], decisions: Sequence[Decision]
) -> LevelChange | None:
    """The change that the verdict is about: of those that began the present levels of what regressed, the surest.

    `until`: the rows up to its night.
    """
    if verdict.status is not VerdictStatus.REGRESSED:
        return None
    own = next((row for row in until if row.run_key == verdict.run_key), until[-1])
    known = [row for row in until if not changed_topology(row, own)]
    began = [
        trend.ongoing for trend in trends(known, decisions=decisions) if trend.metric in regressed and trend.ongoing
    ]
    return min(began, key=lambda change: change.p_value, default=None)
