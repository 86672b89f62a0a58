"""`nightbridge accept`: stores a user's decision about a run or a series, and withdraws it."""

import re
import statistics
from collections.abc import Sequence
from datetime import datetime
from typing import cast, get_args

from nightbridge.errors import InvalidInput
from nightbridge.gate.decisions import (
    Decision,
    DecisionKind,
    StoredDecision,
    Withdrawal,
    as_decided,
    as_of,
    in_force,
    list_decisions,
    read_decisions,
    record_decision,
    record_withdrawal,
)
from nightbridge.gate.evidence import Contract
from nightbridge.gate.stored_verdicts import Rejudged, judge_again
from nightbridge.gate.suspects import CommitsBetween, changed_topology
from nightbridge.gate.trend import trends
from nightbridge.harvest.manifest import last_attempt_prefix, load_record
from nightbridge.history.history_store import compact
from nightbridge.history.nightly_values import up_to
from nightbridge.history.reading import has_rows, read_history
from nightbridge.history.rows import HistoryRow
from nightbridge.models import GOOD_VERDICTS, MetricName, VerdictStatus, is_day, utc_now
from nightbridge.models.metrics import METRIC_BY_NAME
from nightbridge.store.object_store import ObjectStore

BAD = frozenset({VerdictStatus.REGRESSED, VerdictStatus.UNSTABLE})

START_IS_KNOWN_TO = 3
"""Nights by which the start of a change may be late."""

NIGHTS_BEFORE = 7
"""Nights that the level before a change is taken from."""

_SERIES = re.compile(r"[a-z0-9-]+-[0-9a-f]{12}")


def checked_kind(text: str) -> DecisionKind:
    """The kind of a decision from its name on the command line.

    Raises:
        InvalidInput: There is no such kind.
    """
    return cast(DecisionKind, _one_of(text, get_args(DecisionKind), "kind of decision"))


def checked_metrics(names: Sequence[str]) -> tuple[MetricName, ...]:
    """Metrics from their names on the command line.

    Raises:
        InvalidInput: There is no such metric.
    """
    return tuple(_one_of(name, tuple(METRIC_BY_NAME), "metric") for name in names)


def is_series(name: str) -> bool:
    """Whether a name has the form of a series."""
    return bool(_SERIES.fullmatch(name))


def accept(
    store: ObjectStore,
    target: str,
    kind: DecisionKind,
    *,
    who: str,
    why: str,
    metrics: Sequence[MetricName] = (),
    until: str = "",
    cluster: str = "local",
    when: datetime | None = None,
) -> Decision:
    """Decide about the level of a run, or of the last run of a series.

    The decision holds from the first night of that level: the latest of the changes that began what is worse now and
    is not decided about (the earliest, for what is fixed), else the first of the bad nights that end with the run.
    What is fixed is named by its last run; where it was acknowledged, by any since, and it ends where its level does.

    Args:
        store: Where history and decisions are.
        target: A run key or a series.
        kind: What is decided.
        who: Who decided it.
        why: For whoever reads the verdicts.
        metrics: The metrics that it is about; none for all.
        until: The last night that it holds for; empty for one without an end.
        cluster: Name of the cluster, for a series; a run knows its own.
        when: When it was decided; now when unset. One of that moment that is stored is returned: a try before this one,
            which got no answer, has made it.

    Raises:
        InvalidInput: There is no such run or series, who or why is missing, its end is no date or before its level
            begins, or there is nothing that could have been fixed.
        PermanentError: The run is not in the store.
        DamagedData: What is stored of it cannot be read.
    """
    # Nights are compared by their names: anything but a date would be after all of them, or before.
    if until and not is_day(until):
        raise InvalidInput("no night with a date", subject=until, advice="Write it as 2026-12-05, or leave --until out")
    cluster, series, last_night = _place_of(store, target, cluster)
    rows = read_history(store, cluster, series)
    rows = up_to(rows, last_night) if last_night else rows
    if not rows:
        raise InvalidInput(
            "no history", subject=f"{target} on {cluster}", advice="Check the name, --cluster and --store"
        )
    stored = read_decisions(store, cluster, series)
    if made := next((one for one in stored if one.when == when), None):
        return made
    decisions = as_of(rows[-1].order, stored)
    found = trends(_alike(rows, rows[-1]), decisions=decisions)
    named = (trend for trend in found if not metrics or trend.metric in metrics)
    orders = _orders_of(rows)
    begun = [orders[change.night] for trend in named if (change := trend.ongoing)]
    if kind == "fixed":
        since, last = _fault(rows, begun, decisions, metrics)
    else:
        since, last = _since(rows, begun, decisions), rows[-1].order
    decision = Decision(
        kind=kind,
        cluster=cluster,
        series=series,
        test_id=rows[-1].test_id,
        run_key=target if last_night else "",
        metrics=tuple(metrics),
        since=since,
        night=last,
        until=until,
        who=who,
        why=why,
        when=when or utc_now(),
    )
    if until and (kind == "fixed" or until < decision.since):
        advice = f"What is fixed has no end; name a night since {decision.since}, or leave --until out"
        raise InvalidInput("not a night that this decision can end with", subject=until, advice=advice)
    record_decision(store, decision)
    return decision


def withdraw(
    store: ObjectStore, target: str, withdrawal: Withdrawal, contract: Contract, commits_between: CommitsBetween
) -> tuple[StoredDecision, Rejudged]:
    """Withdraw a decision, and judge the nights since its level began again: those that it let pass are no baseline.

    The withdrawal is written first: killed at any moment, the same call finishes it.

    Args:
        store: Where history and decisions are.
        target: A decision's id, the run or the series that it was about.
        withdrawal: Who does it, why and when.
        contract: What the site owes each test.
        commits_between: Lists commits, for the suspects of what raises an alert again.

    Raises:
        InvalidInput: There is no such decision, or several, or who or why is missing.
        DamagedData: Something of it cannot be read.
    """
    stored = _chosen(target, list_decisions(store), store.url)
    record_withdrawal(store, stored, withdrawal)
    cluster, series, since = stored.decision.cluster, stored.decision.series, stored.decision.since
    rejudged = judge_again(store, cluster, series, since, contract, commits_between)
    compact(store, cluster, series)
    return stored, rejudged


def _chosen(target: str, known: Sequence[StoredDecision], where: str) -> StoredDecision:
    """The decision of this id, else the only one about a run, a series or a test that is not withdrawn."""
    for one in known:
        if one.id == target:
            return one
    about = [one for one in known if target in (one.decision.run_key, one.decision.series, one.decision.test_id)]
    found = [one for one in about if not one.withdrawn] or about[-1:]
    if len(found) == 1:
        return found[0]
    choices = "; ".join(f"{one.id} ({one.text})" for one in found)
    advice = f"Name one of: {choices}" if choices else "`nightbridge accept --list` shows all"
    raise InvalidInput(f"{len(found) or 'no'} decisions about it", subject=f"{target} in {where}", advice=advice)


def _one_of(text: str, known: Sequence[str], what: str) -> str:
    if text not in known:
        raise InvalidInput(f"no such {what}", subject=text, advice=f"Give one of {', '.join(known)}")
    return text


def _place_of(store: ObjectStore, target: str, cluster: str) -> tuple[str, str, str]:
    """Cluster, series, and the run's night; no night where a series was named."""
    if is_series(target) and has_rows(store, cluster, target):
        return cluster, target, ""
    record = load_record(store, last_attempt_prefix(store, target))
    if record is None:
        raise InvalidInput("no record of this run", subject=target, advice="Give a run key or a series")
    return record.job.cluster, record.series, record.spec.night


def _fault(
    rows: Sequence[HistoryRow],
    begun: Sequence[str],
    decisions: Sequence[Decision],
    metrics: Sequence[MetricName],
) -> tuple[str, str]:
    """The first and the last night of what was repaired. `begun`: first nights of the levels that are worse now."""
    own = _own_runs(rows)
    forced = {one for name in metrics or METRIC_BY_NAME for one in in_force(decisions, name)}
    known = [one for one in decisions if one in forced and one.kind == "acknowledged" and not one.ended]
    if known and not begun and own[-1].verdict not in BAD:
        return known[-1].since, _last_acknowledged(known[-1], rows, decisions) or own[-1].order
    if own[-1].verdict in GOOD_VERDICTS:
        advice = "Name the last run that was worse"
        raise InvalidInput("nothing is worse at this run that could be fixed", subject=own[-1].run_key, advice=advice)
    return min([*begun, _streak(own, decisions)]), own[-1].order


def _own_runs(rows: Sequence[HistoryRow]) -> list[HistoryRow]:
    """The nights' own runs: a verdict on a further run says nothing of its night."""
    return [row for row in rows if row.repeat == 0] or list(rows)


def _alike(rows: Sequence[HistoryRow], own: HistoryRow) -> list[HistoryRow]:
    """The rows that the gate compares with one: the level of another machine type is none that was left."""
    return [row for row in rows if not changed_topology(row, own)]


def _orders_of(rows: Sequence[HistoryRow]) -> dict[str, str]:
    """Each night's order: that of its first run."""
    return {row.night: row.order for row in reversed(rows)}


def _last_acknowledged(decision: Decision, rows: Sequence[HistoryRow], decisions: Sequence[Decision]) -> str:
    """The last night whose level is rather the acknowledged one than that before it; empty where no metric is worse.

    Verdicts do not tell: both levels pass. It is looked for on the machine type that the decision was about.
    """
    from nightbridge.history.changepoints import DEFAULT_POLICY

    last, largest = "", 0.0
    orders = _orders_of(rows)
    own = next((row for row in reversed(rows) if row.order <= decision.night), rows[-1])
    found = trends(_alike(rows, own), decisions=decisions)
    for trend in (trend for trend in found if decision.is_about(trend.metric)):
        metric = METRIC_BY_NAME[trend.metric]
        measured = zip(trend.nights, trend.values, strict=True)
        values = {orders[night]: value for night, value in measured if value is not None}
        before = [value for night, value in values.items() if night < decision.since][-NIGHTS_BEFORE:]
        known = [value for night, value in values.items() if decision.since <= night <= decision.night]
        if not before or not known:
            continue
        old, new = statistics.median(before), statistics.median(known)
        change = (new - old) / abs(old) if old else 0.0
        if metric.worse(change) and abs(change) >= max(largest, metric.least(DEFAULT_POLICY.minimum_change)):
            of_fault = (night for night, value in values.items() if abs(value - new) < abs(value - old))
            last, largest = max(night for night in of_fault if night >= decision.since), abs(change)
    return last


def _streak(rows: Sequence[HistoryRow], decisions: Sequence[Decision]) -> str:
    """The first of the nights at the end that are all bad, or all too good; the last one where it is neither.

    A level that was accepted before is not what is bad now, unless the last night has that level. `rows`: of the
    nights' own runs, oldest first.
    """
    if as_decided(rows[-1], decisions).verdict is rows[-1].verdict:
        rows = [as_decided(row, decisions) for row in rows]
    streak, last = rows[-1].order, rows[-1].verdict
    alike = frozenset({last}) if last is VerdictStatus.SUSPICIOUS else BAD
    for row in reversed(rows):
        if row.verdict not in alike:
            break
        streak = row.order
    return streak


def _since(rows: Sequence[HistoryRow], begun: Sequence[str], decisions: Sequence[Decision]) -> str:
    """The first night of the last row's level. `begun`: first nights of the levels that are worse now."""
    own = _own_runs(rows)
    streak = _streak(own, decisions)
    if own[-1].verdict is VerdictStatus.SUSPICIOUS or not begun:
        return streak
    nights, latest = sorted({row.order for row in rows}), max(begun)
    # The start of a change is known to a night or two; the first bad verdict is more exact.
    late = nights.index(latest) - nights.index(streak)
    return streak if 0 <= late <= START_IS_KNOWN_TO else latest
