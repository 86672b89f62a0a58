"""The gate's inputs besides a run and its history, gathered from the store and from the site.

Golden values: `[gate] golden = "FILE.json"`. The rules are those of `goldens`, with the parameters of
`[gate.golden_rules]`. What makes a run fail and what makes it regressed differ: missing steps, missing metrics and
numbers that are not finite are a failure, like everywhere else in the gate; the others say that it is not as good as
the golden run.

A reference run: `[gate] reference = "RUN KEY or TEST ID"`. Two programs that should compute the same, such as one model
on two grids and on one, are run with the same seed and data, and their losses are laid over each other. The first
iteration has seen no update yet: what differs there is the model or the data. From the second on, the order of
additions differs, and a band says how far that may lead. Without the reference, or without an iteration of either, the
gate fails.
"""

import json
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any

from nightbridge.errors import DamagedData, PermanentError
from nightbridge.gate.decisions import Decision, as_of, is_accepted, is_left_out, passed_by_ended, read_decisions
from nightbridge.gate.determinism import compare_numerics, is_of_earlier_night
from nightbridge.gate.run_verdict import beside
from nightbridge.gate.suspects import changed_topology, requested_changes
from nightbridge.gate.tonight import Evidence, NightlyParity
from nightbridge.goldens.goldens import LOSS, compare_golden, golden_levels, read_golden_file, run_values
from nightbridge.goldens.parity import (
    MAX_CALIBRATION_RUNS,
    MIN_CALIBRATION_RUNS,
    ParityBands,
    calibrated,
    compare_curves,
    curve_of,
    follow,
)
from nightbridge.harvest.manifest import committed_attempts, load_record, load_scalars, read_scalars, run_key_of
from nightbridge.history.nightly_values import good_runs_before, repeats_of
from nightbridge.history.reading import find_series, is_good, read_history, read_recent
from nightbridge.history.rows import COMPLETE_OUTCOMES, HistoryRow, row_of
from nightbridge.models import Limits, MetricName, ReferenceResult, RunRecord, Verdict, VerdictStatus
from nightbridge.store.object_store import ObjectStore

Contract = Mapping[str, Mapping[MetricName, Limits]]

CanarySeries = dict[tuple[str, str, str, str], str]
"""The series of canaries that were found before; see `canary_rows`."""

DATA_RULES = frozenset({"metrics", "steps", "grad norm", "loss"})
"""Rules about whether the data are there and finite."""

SPEED_RULES = frozenset({"performance", "slow steps"})

GOLDEN_SAYS, REFERENCE_SAYS = "golden values, ", "reference "
"""How the reasons begin that golden values and a reference run give."""

MAX_SERIES = 20
"""Of a test, the series that are looked at for the one before; a sweep has one for each point."""


def gather_evidence(
    store: ObjectStore,
    record: RunRecord,
    contract: Contract | None = None,
    canary_series: CanarySeries | None = None,
    history: Sequence[HistoryRow] = (),
    judged: Verdict | None = None,
) -> Evidence:
    """Everything that a verdict on a run takes into account.

    Args:
        store: Where history and decisions are.
        record: The run.
        contract: The site's limits, by a pattern of test ids and by metric.
        canary_series: Shared by the runs of a night; see `canary_rows`.
        history: Rows of the run's series; the losses of its last good runs are read, and the canary's nights since.
        judged: The verdict of its own night, where a run that is held to golden values or a reference is judged again.

    Raises:
        InvalidInput: The test's golden file is missing or is none.
        DamagedData: A decision, a row of the canary's history, the golden file, or the reference run cannot be read.
    """
    cluster, test = record.job.cluster, record.spec.test
    own = row_of(record, None)
    decisions = as_of(own.order, read_decisions(store, cluster, record.series))
    good = comparable_losses(own, history, decisions)
    since = min((row.night for row in history), default="")
    return Evidence(
        contract=limits_for(test.id, contract or {}),
        canary=canary_rows(store, test.gate.canary, cluster, since, record.spec.night, canary_series)
        if test.gate.canary != test.id
        else (),
        decisions=decisions,
        golden=_said_before(judged)
        if judged
        else joined(golden_result(store, record), reference_result(store, record)),
        parity=nightly_parity(store, own, history, good),
        numerics=compare_numerics(own, history, good, test.gate.deterministic, partial(_losses, store)),
        split=changed_configuration(store, record, history),
    )


def limits_for(test_id: str, contract: Contract) -> dict[MetricName, Limits]:
    """The limits of one test; of several patterns that fit, the last one written counts for each metric."""
    found: dict[MetricName, Limits] = {}
    for pattern, limits in contract.items():
        if fnmatchcase(test_id, pattern):
            found |= limits
    return found


def canary_rows(
    store: ObjectStore,
    canary: str | None,
    cluster: str,
    since: str = "",
    night: str = "",
    known: CanarySeries | None = None,
) -> tuple[HistoryRow, ...]:
    """The canary's history on a cluster since a night; none where it has not run there.

    Finding its series lists the histories of all tests, so that is done once for all tests of the given night: `known`
    remembers the series that the canary ran in tonight, by store, cluster, canary and night.
    """
    if canary is None:
        return ()
    site = (store.url, cluster, canary, night)
    known = {} if known is None else known
    for series in [known[site]] if site in known else [found.series for found in find_series(store, canary, cluster)]:
        rows = read_history(store, cluster, series, since)
        if rows and rows[0].test_id == canary:
            if any(row.night == night for row in rows):
                known[site] = series
            return rows
    return ()


def changed_configuration(store: ObjectStore, record: RunRecord, history: Sequence[HistoryRow]) -> tuple[str, ...]:
    """Why a series begins, where its test has run before: which keys changed, and what the last good night had.

    No number is compared with another series: damage there is told, and no reason to lose the verdict.
    """
    own = row_of(record, None)
    if any(row.is_before(own) for row in history):
        return ()
    try:
        return _change_since(store, record, own)
    except DamagedData as error:
        return (f"what this configuration has changed is not known: {' '.join(str(error).split())}",)


def _change_since(store: ObjectStore, record: RunRecord, own: HistoryRow) -> tuple[str, ...]:
    for series in find_series(store, own.test_id, own.cluster)[:MAX_SERIES]:
        rows = read_recent(store, own.cluster, series.series, own.night)
        good = good_runs_before(own.night, [row for row in rows if row.is_before(own)])
        # Ids that differ only in what a slug leaves out are found together.
        is_same = good and (good[-1].test_id, good[-1].sweep_point) == (own.test_id, own.sweep_point)
        before = load_record(store, good[-1].prefix) if is_same else None
        if before and (changes := requested_changes(before, record)):
            named = ", ".join(f"{one.name} {one.before or 'unset'} → {one.after or 'unset'}" for one in changes)
            against = beside(good[-1], own)
            return (f"the configuration changed since {good[-1].night}, {named}: against that night {against}",)
    return ()


def golden_result(store: ObjectStore, record: RunRecord) -> ReferenceResult | None:
    """Check a stored run against its golden values; None for a test that names none.

    A run without scalars has no steps, and fails like one whose steps are missing.

    Raises:
        InvalidInput: The golden file is missing or is none.
        DamagedData: It is not whole.
    """
    gate = record.spec.test.gate
    if gate.golden is None:
        return None
    golden = read_golden_file(Path(gate.golden))
    values = run_values(load_scalars(store, record.prefix), record.summary, golden)
    found = compare_golden(values, golden, gate.golden_rules)
    failed = {fault.rule for fault in found}
    return ReferenceResult(
        whole=not failed & DATA_RULES,
        as_good=not failed - DATA_RULES,
        reasons=tuple(f"{GOLDEN_SAYS}{fault.rule}: {fault.message}" for fault in found),
        values=golden_levels(golden, record.summary),
        only_slower=bool(failed) and failed <= SPEED_RULES,
    )


def _said_before(verdict: Verdict) -> ReferenceResult:
    """What golden values and reference said of a run when it was judged: their files and runs may be others since."""
    reasons = tuple(reason for reason in verdict.reasons if reason.startswith((GOLDEN_SAYS, REFERENCE_SAYS)))
    of_speed = tuple(f"{GOLDEN_SAYS}{rule}: " for rule in SPEED_RULES)
    whole = not reasons or verdict.status is not VerdictStatus.FAILED
    return ReferenceResult(
        whole=whole,
        # Where the data are not whole, reasons may say no more than that.
        as_good=verdict.as_golden and not (whole and reasons),
        reasons=reasons,
        values={item.metric: item.golden for item in verdict.comparisons if item.golden is not None},
        run_key=verdict.reference_run,
        only_slower=bool(reasons) and all(reason.startswith(of_speed) for reason in reasons),
    )


def reference_result(store: ObjectStore, record: RunRecord) -> ReferenceResult | None:
    """Check a stored run against its reference; None for a test that names none.

    Raises:
        DamagedData: The scalars of one of the two are not what was committed.
    """
    gate = record.spec.test.gate
    if gate.reference is None:
        return None
    try:
        prefix = reference_prefix(store, record)
        theirs, own = read_scalars(store, prefix), read_scalars(store, record.prefix)
    except PermanentError as error:
        if isinstance(error, DamagedData):
            raise
        return ReferenceResult(whole=False, as_good=True, reasons=(f"{REFERENCE_SAYS}{gate.reference}: {error.what}",))
    found = follow(curve_of(theirs, LOSS), curve_of(own, LOSS), gate.reference_rules)
    run_key = run_key_of(prefix)
    return ReferenceResult(
        whole=found.is_complete,
        as_good=not found.beyond,
        reasons=tuple(f"{REFERENCE_SAYS}{run_key}: {fault}" for fault in found.faults),
        run_key=run_key,
    )


def comparable_losses(
    own: HistoryRow, history: Sequence[HistoryRow], decisions: Sequence[Decision]
) -> list[HistoryRow]:
    """The runs of earlier nights that a run's losses may be compared with, oldest first: one of each night."""
    good = [
        row
        for row in sorted(history, key=lambda row: (row.order, row.harvested_at))
        if is_of_earlier_night(row, own)
        and not row.repeat  # of an accepted night a control arm is what was before it
        and not row.resumed
        and not changed_topology(row, own)
        and (is_good(row) or is_accepted(decisions, "loss_curve", row.order))
        and not is_left_out(decisions, "loss_curve", row.order, row.verdict)
        and not passed_by_ended(decisions, "loss_curve", row.order)
    ]
    # What runs of one night have in common, or not, says little of how far nights are apart.
    return [*{row.night: row for row in good}.values()]


def nightly_parity(
    store: ObjectStore, own: HistoryRow, history: Sequence[HistoryRow], good: Sequence[HistoryRow]
) -> NightlyParity | None:
    """Lay the losses of tonight's runs over those of the last good nights; None where those are too few.

    The bands come from the good runs themselves. A curve that is not whole is left to the other checks. Where too few
    good nights are left because their losses cannot be read, that is the reason given, and no run is apart.

    Args:
        store: Where the curves are.
        own: Tonight's run.
        history: Rows of its series; its confirming re-runs are among them.
        good: As `comparable_losses` has them.
    """
    good = good[-MAX_CALIBRATION_RUNS:]
    curves = [_losses(store, row.prefix) for row in good]
    rows = (own, *repeats_of(own, history))
    known = calibrated(curves)
    if known is None:
        lost = sum(not curve and row.summary.final_loss is not None for row, curve in zip(good, curves, strict=True))
        reason = f"losses were not compared: those of {lost} of the last {len(good)} good runs cannot be read"
        return NightlyParity(len(rows), 0, reason) if lost and len(good) >= MIN_CALIBRATION_RUNS else None
    reference, bands = known
    runs = [_losses(store, row.prefix) for row in rows]
    found = [compare_curves(reference, curve, bands=bands) for curve in runs if curve.keys() == reference.keys()]
    apart = [curve for curve in found if curve.is_complete and curve.faults]
    if not found:
        return None
    first = "; ".join(apart[0].faults) if apart else ""
    return NightlyParity(
        runs=len(found),
        apart=len(apart),
        reason=f"loss curve does not follow the median of the last {len(good)} good runs: {first}" if apart else "",
        is_higher=any(
            (curve.mean or 0.0) >= 0 or (curve.tail or 0.0) > bands.tail or (curve.largest or 0.0) > bands.single_step
            for curve in apart
        ),
    )


def own_bands(store: ObjectStore, record: RunRecord) -> ParityBands | None:
    """The bands of the loss that the good nights before a run keep; None where too few of them can be read."""
    cluster, own = record.job.cluster, row_of(record, None)
    try:
        history = read_recent(store, cluster, record.series, own.night)
        decisions = as_of(own.order, read_decisions(store, cluster, record.series))
    except DamagedData:
        return None
    good = comparable_losses(own, history, decisions)[-MAX_CALIBRATION_RUNS:]
    known = calibrated([_losses(store, row.prefix) for row in good])
    return known[1] if known else None


def _losses(store: ObjectStore, prefix: str) -> dict[int, float]:
    """The losses of a stored run; none where they are gone or damaged: one night less to compare with."""
    try:
        scalars = load_scalars(store, prefix)
    except DamagedData:
        return {}
    return {} if scalars is None else curve_of(scalars, LOSS)


def reference_prefix(store: ObjectStore, record: RunRecord) -> str:
    """Where the reference of a run lies: the run of that key, else the newest whole run of that test until this night.

    Of a test that is swept it is one of the same point.

    Raises:
        PermanentError: The store has neither.
        DamagedData: The test's history cannot be read.
    """
    name = record.spec.test.gate.reference or ""
    if attempts := committed_attempts(store, name):
        return attempts[-1]
    cluster, own = record.job.cluster, row_of(record, None)
    points = {_point_of(own.sweep_point), _point_of({})}
    rows = [
        row
        for series in find_series(store, name, cluster)
        for row in read_history(store, cluster, series.series)
        if row.test_id == name and not row.repeat and (row.night == own.night or is_of_earlier_night(row, own))
        if row.outcome in COMPLETE_OUTCOMES and _point_of(row.sweep_point) in points
    ]
    if not rows:
        raise PermanentError(
            "no such run, and no complete run of such a test at this run's point, if any, up to this night",
            subject=name,
            advice="Name a stored run, or a test that has run on this cluster",
        )
    return max(rows, key=lambda row: (row.night == own.night, row.order, row.harvested_at)).prefix


def _point_of(point: Mapping[str, Any]) -> str:
    """A point of a sweep as text; a row that is read has lists where one of tonight may have tuples."""
    return json.dumps(point, sort_keys=True, default=str)


def joined(one: ReferenceResult | None, other: ReferenceResult | None) -> ReferenceResult | None:
    """What golden values and a reference say together: as good only where both are."""
    if one is None or other is None:
        return one or other
    return ReferenceResult(
        whole=one.whole and other.whole,
        as_good=one.as_good and other.as_good,
        reasons=(*one.reasons, *other.reasons),
        values={**other.values, **one.values},
        run_key=one.run_key or other.run_key,
        only_slower=all(each.as_good or each.only_slower for each in (one, other)),
    )
