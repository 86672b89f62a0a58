"""What a search for a cause looks at: a test's rows, and what became worse in them since which night.

That is a metric, a failure, or the losses of a deterministic test, between a good and a bad night.
"""

import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from pydantic import Field

from nightbridge.bisect.search import BisectPolicy, Failure, Levels
from nightbridge.errors import InvalidInput
from nightbridge.gate.decisions import Decision, as_decided, as_of, is_left_out, read_decisions
from nightbridge.gate.suspects import changed_topology
from nightbridge.gate.trend import Trend, failure_signature, newest_facts, trends
from nightbridge.history.nightly_values import BROKEN, night_value, nights_of, rows_until
from nightbridge.history.reading import find_series, read_history
from nightbridge.history.rows import (
    COMPLETE_OUTCOMES,
    HistoryRow,
    comparable_digest,
    facts_of,
    good_for,
    hardly_moved,
    measured,
    other_losses,
)
from nightbridge.models import GOLDEN, GOOD_VERDICTS, Model, NightId, Verdict, VerdictStatus
from nightbridge.models.metrics import COLUMNS, METRIC_BY_NAME, Metric
from nightbridge.nights.records import like_test
from nightbridge.numbers import format_percent
from nightbridge.store.object_store import ObjectStore

VerdictOf = Callable[[HistoryRow], Verdict | None]
"""A run's row to its verdict; None where it has none."""

FAILURE = "failure"
"""What is searched instead of a metric where a run fails."""

LOSSES = "losses"
"""What is searched instead of a metric where a deterministic test computes something else."""

NOISE_FLOOR = 0.003
"""Least noise between runs that is assumed, relative: a quiet history proves little."""

NOISE_NIGHTS = 60
"""Nights on each side of the change that the noise is taken from."""

SEE_HISTORY = "See `nightbridge history`"


class SearchRequest(Model):
    """What to find the cause of. What is left out is found in the test's history."""

    metric: str | None = Field(
        None,
        description="Which metric, `failure`, or `losses`; what the latest night has when unset, else what became "
        "worse last.",
    )
    run_key: str | None = Field(
        None,
        description="The run that became worse, of a sweep its point; one that is bad in the latest night when unset.",
    )
    until: NightId | None = Field(None, description="The night up to which history is read; the latest when unset.")
    confidence: float = Field(0.99, gt=0.5, lt=1, description="Probability at which the cause is named.")
    most_runs: int = Field(100, ge=1, description="Runs after which the search ends undecided.")
    at_once: int | None = Field(None, ge=1, description="Runs at once; as many as the cluster has room for when unset.")

    @property
    def policy(self) -> BisectPolicy:
        """When a cause is certain enough."""
        return BisectPolicy(confidence=self.confidence, most_runs=self.most_runs)


class SearchTarget(Model):
    """What a search answers: what became worse in a series, and how sure the answer has to be."""

    test_id: str
    cluster: str
    series: str
    metric: str = Field(description="Name of a gated metric, `failure`, or `losses`.")
    statistic: str = Field(description="Field of the summary that it is; empty for a failure.")
    unit: str
    since: str
    levels: Levels | Failure
    policy: BisectPolicy


class Shift(NamedTuple):
    """What became worse between two nights: a metric, or a run that fails, or computes other losses, since."""

    metric: str
    label: str
    statistic: str
    unit: str
    since: str
    good: HistoryRow
    bad: HistoryRow
    levels: Levels | Failure

    def target_fields(self, policy: BisectPolicy) -> dict[str, Any]:
        """The fields of `SearchTarget`, for a search by that policy."""
        of_shift = {name: getattr(self, name) for name in ("metric", "statistic", "unit", "since", "levels")}
        of_run = {name: getattr(self.bad, name) for name in ("test_id", "cluster", "series")}
        return {**of_run, **of_shift, "policy": policy}


def rows_of_test(store: ObjectStore, test_id: str, cluster: str) -> list[HistoryRow]:
    """Every run of a test in all of its series, oldest first."""
    found = [row for one in find_series(store, test_id, cluster) for row in read_history(store, cluster, one.series)]
    return sorted((row for row in found if row.test_id == test_id), key=lambda row: (row.order, row.harvested_at))


def find_rows(store: ObjectStore, test_id: str, cluster: str, request: SearchRequest) -> tuple[HistoryRow, ...]:
    """The runs of a test in all of its series until the night that is searched, oldest first; of a sweep, of one point.

    That is the point of the run that the request names, else one that is bad in the latest night; and of a night in
    which several scenarios ran the test, its scenario's. A changed configuration starts a new series, and may be the
    cause.

    Raises:
        InvalidInput: The store has no history of the test, or not that run or night of it.
    """
    rows = rows_of_test(store, test_id, cluster)
    if not rows:
        raise InvalidInput(
            "no history of this test", subject=f"{test_id} in {store.url}", advice=like_test(store, test_id)
        )
    return searched_rows(rows, request)


def searched_rows(rows: Sequence[HistoryRow], request: SearchRequest) -> tuple[HistoryRow, ...]:
    """Of every run of a test those that a request is about, as `find_rows` has them.

    Raises:
        InvalidInput: The run or night that is named is not among them, or no night's own run is.
    """
    named = next((row for row in rows if row.run_key == request.run_key), None)
    if request.run_key and named is None:
        raise InvalidInput(
            "no such run in the history", subject=request.run_key, advice="Name another run, or the test"
        )
    known = rows_until(rows, request.until or (named.night if named else None))
    nights = nights_of(row for row in known if named is None or row.sweep_point == named.sweep_point)
    if not nights:
        advice = f"Its history has further runs alone; rebuild it: nightbridge history {known[0].test_id} --rebuild"
        raise InvalidInput("no night's own run", subject=known[0].run_key, advice=advice)
    if (chosen := named) is None:
        # Of a sweep, or of several scenarios, one that regressed or broke, where one did.
        latest = nights[-1].own
        points = (row for row in known if row.night == latest.night and not row.repeat)
        chosen = next((row for row in points if row.verdict in (VerdictStatus.REGRESSED, *BROKEN)), latest)
    of_point = [row for row in known if row.sweep_point == chosen.sweep_point]
    # In a night that two scenarios have run it in, only one run is the night's own.
    beside = {row.night for row in of_point if row.scenario == chosen.scenario}
    own = [row for row in of_point if row.scenario == chosen.scenario or row.night not in beside]
    # So it is of several iterations: the first one that is there.
    repeated = {row.night for row in own if row.iteration == chosen.iteration}
    return tuple(row for row in own if row.iteration >= chosen.iteration or row.night not in repeated)


def decisions_of(store: ObjectStore, rows: Sequence[HistoryRow]) -> tuple[Decision, ...]:
    """Users' decisions about the series of the last night, as they stood then."""
    last = nights_of(rows)[-1].own
    return as_of(last.order, read_decisions(store, last.cluster, last.series))


def failure_of(verdict: Verdict) -> str | None:
    """The signature of a failed run: its verdict and the first reason; None for a run that did not fail.

    It is what two runs that broke in the same way have in common, without what differs by chance.
    """
    if verdict.status not in BROKEN:
        return None
    reason = verdict.reasons[0] if verdict.reasons else ""
    return f"{verdict.status}: {failure_signature(reason)}"


def metric_named(name: str) -> Metric:
    """The gated metric of a name.

    Raises:
        InvalidInput: There is none.
    """
    if name not in METRIC_BY_NAME:
        raise InvalidInput("no such metric", subject=name, advice=f"Use one of {', '.join(METRIC_BY_NAME)}")
    return METRIC_BY_NAME[name]


def find_shift(rows: Sequence[HistoryRow], metric: str | None = None, decisions: Sequence[Decision] = ()) -> Shift:
    """The change that began what is worse now; where nothing is, the latest for the worse.

    It is a change point of the history, else what the gate called a regression.

    Args:
        rows: The rows of one test, of all its series.
        metric: The metric; None for any.
        decisions: Users' decisions about the series: an accepted level is not what is worse now.

    Raises:
        InvalidInput: There is none, or no such metric.
    """
    if metric is not None:
        metric_named(metric)
    worse_now = _regressed_in(rows, metric, decisions)
    # What another configuration or other nodes had is no level that the latest night has left.
    latest = nights_of(rows)[-1].own if worse_now else None
    counted = [row for row in rows if _is_comparable(row, latest)] if latest else rows
    searched = _trends_of(counted, metric, decisions)
    changes = [each.ongoing for each in searched if each.ongoing and (not worse_now or each.metric in worse_now)]
    if not changes and worse_now.isdisjoint(each.metric for each in searched):
        # What became worse last may have been repaired since.
        if latest:
            counted, searched = rows, _trends_of(rows, metric, decisions)
        changes = [change for each in searched for change in each.changes if change.worse]
    if not changes:
        return _regressed_shift(rows, metric, decisions)
    change = max(changes, key=lambda change: (change.night, abs(change.change), change.metric))
    nights = {night.own.night: night.own for night in nights_of(counted)}
    good, bad = nights[change.last_night_before], nights[change.latest_night]
    found = metric_named(change.metric)._replace(field=change.statistic)
    return _metric_shift(counted, found, change.night, good, bad, change.before, change.after)


def _trends_of(rows: Sequence[HistoryRow], metric: str | None, decisions: Sequence[Decision]) -> list[Trend]:
    return [trend for trend in trends(rows, decisions) if metric in (None, trend.metric)]


def _is_comparable(row: HistoryRow, own: HistoryRow) -> bool:
    """Whether the gate compares a run with that of a row: both of one series, and of one topology."""
    return row.series == own.series and not changed_topology(row, own)


def find_failure(rows: Sequence[HistoryRow], verdict_of: VerdictOf) -> Shift:
    """The failure of the latest night, between the last night that did not fail and the first that failed alike.

    Raises:
        InvalidInput: The latest night did not fail, or none before it ran to its end.
    """
    nights = [night.own for night in nights_of(rows)]
    failure = _failure(nights[-1], verdict_of) if nights else None
    if failure is None:
        raise InvalidInput("the latest night did not fail", subject=rows[0].test_id if rows else "history")
    ended = [night.outcome in COMPLETE_OUTCOMES and night.verdict not in BROKEN for night in nights]
    if not any(ended):
        raise InvalidInput(
            "no earlier night ran to its end", subject=nights[-1].test_id, advice="Name a good commit with --good"
        )
    good = max(index for index, whole in enumerate(ended) if whole)
    bad = next(night for night in nights[good + 1 :] if _failure(night, verdict_of) == failure)
    levels = Failure(signature=failure)
    return Shift(FAILURE, f"failure ({failure})", "", "", bad.night, nights[good], bad, levels)


def find_other_losses(rows: Sequence[HistoryRow], decisions: Sequence[Decision] = ()) -> Shift:
    """Between the last good, or accepted, night of a deterministic test and the first one after it with other losses.

    Raises:
        InvalidInput: There is none.
    """
    undecided = [night.own for night in nights_of(rows)]
    nights = [as_decided(night, decisions) for night in undecided]
    if nights[-1].verdict in GOOD_VERDICTS:  # what the last night has was accepted, and is searched all the same
        nights = undecided
    good = next((night for night in reversed(nights) if night.verdict in GOOD_VERDICTS), nights[0])
    later = [night for night in nights if night.order > good.order]
    if not later:
        raise InvalidInput("the latest night has no other losses", subject=good.test_id, advice=SEE_HISTORY)
    digest = comparable_digest(good.summary)
    bad = next((night for night in later if other_losses(digest, night.summary)), nights[-1])
    return _losses_shift(good, bad)


def _losses_shift(good: HistoryRow, bad: HistoryRow) -> Shift:
    digest = comparable_digest(good.summary)
    if not other_losses(digest, bad.summary):
        advice = f"{SEE_HISTORY}; losses from a log and from TensorBoard cannot be compared"
        raise InvalidInput(f"not known to have other losses than {good.night}", subject=bad.run_key, advice=advice)
    levels = Failure(signature="other losses", digest=digest)
    return Shift(LOSSES, levels.question, "", "", bad.night, good, bad, levels)


def _hardly_moved(row: HistoryRow) -> bool:
    """Whether nothing else regressed than the losses of a deterministic test."""
    moved = [(name, change) for name, change in row.worse.items() if name != GOLDEN]
    return bool(moved) and all(hardly_moved(name, change) for name, change in moved)


def requested_shift(
    rows: Sequence[HistoryRow], verdict_of: VerdictOf, metric: str | None, decisions: Sequence[Decision] = ()
) -> Shift:
    """What is searched: what is named; else the failure of the latest night, its other losses, or a metric."""
    latest = [night.own for night in nights_of(rows)[-1:]]
    if metric == FAILURE or (metric is None and any(night.verdict in BROKEN for night in latest)):
        return find_failure(rows, verdict_of)
    if metric == LOSSES or (metric is None and any(map(_hardly_moved, latest))):
        return find_other_losses(rows, decisions)
    return find_shift(rows, metric, decisions)


def _failure(row: HistoryRow, verdict_of: VerdictOf) -> str | None:
    """How a run failed; None where it did not."""
    verdict = verdict_of(row) if row.verdict in BROKEN else None
    return failure_of(verdict) if verdict else None


def _regressed_in(rows: Sequence[HistoryRow], metric: str | None, decisions: Sequence[Decision]) -> frozenset[str]:
    """The metrics that the latest night regressed in, where none is named the newest; any where its verdict names none.

    What it is worse in since that night has another cause than what was worse before.
    """
    nights = [as_decided(night.own, decisions) for night in nights_of(rows)]
    if not nights or nights[-1].verdict is not VerdictStatus.REGRESSED:
        return frozenset()
    worse = [name for name in nights[-1].worse if name in METRIC_BY_NAME]
    names = worse or METRIC_BY_NAME
    facts = facts_of(names) if metric else newest_facts(names, nights[:-1])
    found = frozenset(name for name in names if facts_of([name]) <= facts)
    return found if worse else found | nights[-1].worse.keys()  # golden values


def _regressed_shift(rows: Sequence[HistoryRow], metric: str | None, decisions: Sequence[Decision]) -> Shift:
    """Between the last good, or accepted, night and the first regressed one after it.

    A night that regressed in something else than what is searched is as good as any.
    """
    undecided = [night.own for night in nights_of(rows)]
    nights = [as_decided(night, decisions) for night in undecided]
    last = max((at for at, night in enumerate(undecided) if night.verdict is VerdictStatus.REGRESSED), default=0)
    if undecided and nights[last].verdict is not VerdictStatus.REGRESSED:
        # What became worse last was accepted, and is searched all the same.
        nights, decisions = undecided, ()
    wanted = {metric} if metric else _regressed_in(rows, metric, decisions)
    searched = [good_for(night, facts_of(wanted)) for night in nights] if wanted else nights
    # A user may name what has not regressed.
    nights = searched if any(night.verdict is VerdictStatus.REGRESSED for night in searched) else nights
    own = next((night for night in reversed(nights) if night.verdict is VerdictStatus.REGRESSED), None)
    # Where none like it was good, as of a new configuration that breaks a limit, it is what all others had.
    alike = [night for night in nights if own and _is_comparable(night, own)]
    nights = alike if _last_good(alike) is not None else nights
    if (good := _last_good(nights)) is None:
        raise InvalidInput("nothing became worse", subject=rows[0].test_id if rows else "history", advice=SEE_HISTORY)
    bad = next(at for at in range(good, len(nights)) if nights[at].verdict is VerdictStatus.REGRESSED)
    facts = facts_of(wanted)
    worse = {name: change for name, change in nights[bad].worse.items() if not wanted or facts_of([name]) <= facts}
    begun = nights[bad].model_copy(update={"worse": worse})
    return moved_shift(rows, nights, good, begun, metric, decisions)


def _last_good(nights: Sequence[HistoryRow]) -> int | None:
    """The index of the last good night before the last one that regressed; None where there is none."""
    last = max((at for at, night in enumerate(nights) if night.verdict is VerdictStatus.REGRESSED), default=0)
    return max((at for at, night in enumerate(nights[:last]) if night.verdict in GOOD_VERDICTS), default=None)


def moved_shift(
    rows: Sequence[HistoryRow],
    nights: Sequence[HistoryRow],
    last_good: int,
    bad: HistoryRow,
    metric: str | None,
    decisions: Sequence[Decision] = (),
) -> Shift:
    """What moved furthest for the worse from a good night, by its index, to a bad one (InvalidInput: nothing did).

    Of the metrics that regressed in the bad night where it has some, those of every table first. What users left out,
    such as the nights before an accepted level, is no part of the good level, nor is what another configuration had.
    """
    last = nights[last_good]
    if metric == LOSSES or (metric is None and _hardly_moved(bad)):
        return _losses_shift(last, bad)
    of_level = (night for night in nights[: last_good + 1] if _is_comparable(night, last))
    good = [night for night in of_level if night.verdict in (last.verdict, "passed")][-7:]
    of_levels = [row for row in rows if _is_comparable(row, last) or _is_comparable(row, bad)]
    moved = []
    regressed = [each for each in METRIC_BY_NAME.values() if each.name in bad.worse]
    of_tables = [each for each in COLUMNS if each in regressed]
    for one in of_tables or regressed or COLUMNS if metric is None else (metric_named(metric),):
        known = [row for row in good if not is_left_out(decisions, one.name, row.order)] or good
        earlier = [value for row in known if (value := measured(one, row.summary)) is not None]
        now = measured(one, bad.summary)
        if earlier and now is not None and (level := statistics.median(earlier)):
            change = (now - level) / abs(level)
            counted = [row for row in of_levels if not is_left_out(decisions, one.name, row.order)]
            shift = _metric_shift(counted, one, bad.night, last, bad, level, now)
            moved.append((one.sign * change, shift))
    worse = [each for each in moved if each[0] > 0]
    if not worse:
        raise InvalidInput("no metric became worse", subject=bad.run_key, advice="Name one with --metric")
    beyond = [each for each in worse if each[1].metric in bad.worse or _is_beyond_noise(each[1].levels)]
    if not beyond:
        # Each run of a search would tell next to nothing: it would make all that it may, and end undecided.
        change, shift = max(worse, key=lambda item: item[0])
        raise InvalidInput(
            f"{shift.label} is worse by {format_percent(change)}, no more than single runs scatter",
            subject=bad.run_key,
            advice=f"{SEE_HISTORY}, and name what became worse",
        )
    return max(beyond, key=lambda item: item[0])[1]


def _is_beyond_noise(levels: Levels | Failure) -> bool:
    return isinstance(levels, Failure) or abs(levels.bad - levels.good) > levels.noise


def _metric_shift(
    rows: Sequence[HistoryRow],
    metric: Metric,
    since: str,
    good: HistoryRow,
    bad: HistoryRow,
    before: float,
    after: float,
) -> Shift:
    levels = Levels(good=before, bad=after, noise=_noise(rows, metric, since, before, after))
    return Shift(metric.name, metric.label, metric.field, metric.unit, since, good, bad, levels)


def _noise(rows: Sequence[HistoryRow], metric: Metric, since: str, good: float, bad: float) -> float:
    """Standard deviation of single runs around their level, robust, in the metric's unit."""
    values = [
        (night.own.night, value) for night in nights_of(rows) if (value := night_value(night, metric)) is not None
    ]
    before = [abs(value - good) for night, value in values if night < since][-NOISE_NIGHTS:]
    after = [abs(value - bad) for night, value in values if night >= since][:NOISE_NIGHTS]
    deviations = before + after
    found = 1.4826 * statistics.median(deviations) if len(deviations) >= 5 else 0.0
    # Few nights around their own median look quieter than they are.
    found *= math.sqrt(1 + 4 / max(len(deviations), 1))
    return max(found, NOISE_FLOOR * abs(good))
