"""The verdict: a run against the last good runs of its series.

It fails closed. Upstream's gate passes a run with 20 of 50 steps, without a single loss, or without a throughput,
because a missing number becomes NaN and every test of it reads "fail if greater". Here a run is checked for what it
must have first, and only a run that has all of it is compared:

1. The job's outcome (`OUTCOMES`). All steps done and then a failure in teardown is compared, and says so.
2. The run's own data: every step done, every step finite, every metric measured, no damaged file and no damaged
   checkpoint; and plausible: what was planned ran, and nothing impossible was measured (`plausibility`).
3. Each metric, with its direction, against floors and ceilings (the test's own, and what the cluster owes it), against
   the band of the last good runs (`nightly_values`), and against all of its history (a level that is worse), which is
   all done in `metric_comparison`. Beyond in the bad direction is a regression, in the good direction an improvement;
   one that is too good to be believed is suspicious, and no night's baseline until a user accepts it. One regression
   outweighs improvements. What the cluster's canary and the nodes explain is taken out first.
4. Golden values, where the test names some.

What one night alone says is suspicious until it was run again: the verdict names how many runs it wants. Where one of
these breaks, the night is unstable at best, whatever its own run did.

What makes the baseline: the last `gate.baseline_runs` runs of the same series from strictly earlier nights (night ids
sort by time) whose verdict was good (`GOOD_VERDICTS`), and whose job did all its steps. A regressed run never
gets there by itself, so a slow-down is reported every night until it is repaired or accepted (`decisions`). Confirming
re-runs and bisect points (`repeat`) are no part of it, nor is a run that resumed where another one had ended.
"""

from collections.abc import Iterator, Sequence

from nightbridge.errors import InvalidInput, NightbridgeError
from nightbridge.gate.control_arm import control_point, pairs_of
from nightbridge.gate.decisions import Decision, in_force, level_start
from nightbridge.gate.determinism import with_unknown
from nightbridge.gate.metric_comparison import MetricResult, compare_metric, compare_with_band, is_required
from nightbridge.gate.nodes import Placement, levels_held, place_pairs, suspects_among, unchanged_since
from nightbridge.gate.plausibility import (
    damaged_checkpoints,
    implausible,
    logs_otherwise,
    missing_checkpoints,
    missing_steps,
    ran_otherwise,
    wrong_data,
)
from nightbridge.gate.suspects import changed_topology, shared_series
from nightbridge.gate.tonight import Evidence, Tonight, slow_mode
from nightbridge.gate.trend import standing
from nightbridge.history.nightly_values import (
    BROKEN,
    NightRuns,
    arms_of,
    fixed_band,
    good_runs_before,
    nights_of,
    repeats_of,
)
from nightbridge.history.reading import first_that_counts
from nightbridge.history.rows import HistoryRow, gpu_hours, measured, row_of
from nightbridge.launch.resources import resumed_from
from nightbridge.models import (
    EXIT_CODES,
    GOLDEN,
    NO_VALUE,
    Comparison,
    ComparisonStatus,
    ControlArm,
    InvalidTest,
    Job,
    Outcome,
    ReferenceResult,
    RunRecord,
    RunSpec,
    Verdict,
    VerdictStatus,
    make_run_key,
    night_order,
)
from nightbridge.models.base import WordTable
from nightbridge.models.metrics import COLUMNS, INVERSES, METRIC_BY_NAME, METRICS, is_step_times
from nightbridge.numbers import format_change, format_count, format_percent, format_value

# The verdict on a run whose job ended like this, whatever it measured, and how that is said. None: its numbers decide.
OUTCOMES: WordTable[Outcome | None, tuple[VerdictStatus | None, str]] = WordTable(
    {
        Outcome.SUCCEEDED: (None, "the job succeeded"),
        Outcome.TEARDOWN: (None, "all steps done, then the job failed in teardown"),
        Outcome.SHORT: (VerdictStatus.SHORT, "the job ended before its last step"),
        Outcome.TIMEOUT: (VerdictStatus.FAILED, "the job ran into its time limit"),
        Outcome.OUT_OF_MEMORY: (VerdictStatus.FAILED, "the job ran out of memory"),
        Outcome.PROGRAM_ERROR: (VerdictStatus.FAILED, "the program failed"),
        Outcome.CANCELLED: (VerdictStatus.CANCELLED, "the job was cancelled"),
        Outcome.INFRASTRUCTURE: (VerdictStatus.INFRASTRUCTURE, "the cluster failed, not the program"),
        Outcome.NEVER_STARTED: (VerdictStatus.INFRASTRUCTURE, "the job never started"),
        None: (VerdictStatus.INFRASTRUCTURE, "the state of the job is unknown"),
    },
    of_newer=lambda _: OUTCOMES[None],
)

# What the comparisons make of a run that has no fault of its own: the first that any of them has.
COMPARED: tuple[tuple[ComparisonStatus, VerdictStatus], ...] = (
    ("missing", VerdictStatus.FAILED),
    ("regressed", VerdictStatus.REGRESSED),
    ("suspicious", VerdictStatus.SUSPICIOUS),
    ("no_baseline", VerdictStatus.NO_BASELINE),
    ("improved", VerdictStatus.IMPROVED),
    ("passed", VerdictStatus.PASSED),
)

BAD_COMPARISONS: dict[VerdictStatus, ComparisonStatus] = {
    VerdictStatus.REGRESSED: "regressed",
    VerdictStatus.UNSTABLE: "regressed",
    VerdictStatus.SUSPICIOUS: "suspicious",
}
"""The comparisons that make a verdict bad."""


def compare(record: RunRecord, history: Sequence[HistoryRow], evidence: Evidence | None = None) -> Verdict:
    """Judge a run by its own evidence, and then by the history of its series.

    Args:
        record: The harvested run.
        history: Rows of the run's series in any order; the run itself, its confirming re-runs, which are taken into
            account, and later nights may be among them.
        evidence: What else is known; None for nothing.
    """
    nights, evidence, gate = _nights(record, history), evidence or Evidence(), record.spec.test.gate
    # Further runs of a night are judged alone.
    is_paired = gate.pairs and gate.control != "off" and not record.spec.repeat
    control = control_point(nights[:-1], evidence.decisions) if is_paired else None
    tonight = Tonight(record, nights, evidence, control)
    results = tuple(result for metric in METRICS if (result := compare_metric(metric, tonight)))
    baseline = good_runs_before(record.spec.night, [night.own for night in tonight.nights[:-1]])
    verdict = _verdict(record, baseline[-gate.baseline_runs :], results, tonight)
    verdict = _with_broken_runs(verdict, tonight.nights[-1].runs[1:])
    if len(baseline) < gate.cold_start:
        other = _other_topology(tonight.nights[-1].own, history)
        verdict = _with_few_nights(verdict, len(baseline), tonight)
        verdict = verdict.model_copy(update={"reasons": (*verdict.reasons, *other, *evidence.split)})
    verdict = with_unknown(verdict, evidence.numerics)
    verdict = verdict.model_copy(update=standing(verdict, tonight.nights, evidence.decisions)._asdict())
    is_compared = verdict.status not in NO_VALUE and (verdict.exit_code or verdict.news)
    shared = shared_series(tonight.nights[-1].own, history) if is_compared else ()
    return verdict.model_copy(update={"reasons": (*verdict.reasons, *shared)})


def compare_with(record: RunRecord, baseline: Sequence[HistoryRow]) -> Verdict:
    """Judge a run by its own evidence, and then by the median of the given runs, whatever became of those.

    They may be of another series, too, at a user's request.
    """
    gate = record.spec.test.gate
    results = []
    for metric in METRICS:
        values = [value for row in baseline if (value := measured(metric, row.summary)) is not None]
        value = measured(metric, record.summary)
        if is_required(metric, record.spec, value, values):
            name = baseline[0].run_key if len(baseline) == 1 else ""
            results.append(compare_with_band(metric, value, fixed_band(metric, gate, values), len(values), name))
    return _verdict(record, baseline, tuple(results), None)


def verdict_for_error(spec: RunSpec, error: BaseException, series: str = "") -> Verdict:
    """The verdict on a run that died in a stage: nothing was measured, so the code was not tested.

    Args:
        spec: The run.
        error: What it died of.
        series: The run's series, where the caller knows it: the report then shows the test's history all the same.
    """
    invalid = isinstance(error, InvalidInput)
    return Verdict(
        run_key=spec.run_key,
        test_id=spec.test.id,
        night=spec.night,
        status=VerdictStatus.INVALID if invalid else VerdictStatus.INFRASTRUCTURE,
        reasons=_error_reasons(error),
        series=series,
    )


def verdict_for_invalid(test: InvalidTest, scenario: str, night: str) -> Verdict:
    """The verdict on a test that was never started, because of what is written in its file."""
    run_key = make_run_key(scenario=scenario, night=night, test_id=test.id, sweep_point={}, iteration=1, repeat=0)
    return Verdict(run_key=run_key, test_id=test.id, night=night, status=VerdictStatus.INVALID, reasons=test.violations)


def _nights(record: RunRecord, history: Sequence[HistoryRow]) -> tuple[NightRuns, ...]:
    """The nights that count, oldest first, tonight last: its own run, and its confirming re-runs."""
    own = row_of(record, None)
    comparable = (row for row in history if row.is_before(own) and not changed_topology(row, own))
    past = sorted(comparable, key=lambda row: (row.night, row.harvested_at))
    nights = nights_of(past[first_that_counts(past) :], own.iteration)
    # Where the cluster has the levels holds until a control arm says otherwise.
    own = own.model_copy(update={"moved": levels_held(nights, own.nodes)})
    return (*nights, NightRuns(own, (own, *repeats_of(own, history)), arms_of(own, history)))


def _verdict(
    record: RunRecord, baseline: Sequence[HistoryRow], results: Sequence[MetricResult], tonight: Tonight | None
) -> Verdict:
    outcome_fault, _words = OUTCOMES[record.job.outcome]
    short = missing_steps(record, baseline)
    wrong = (*wrong_data(record.summary), *damaged_checkpoints(record))
    reruns, why = 0, ""
    suspects: tuple[str, ...] = ()
    control: ControlArm | None = None
    golden = tonight.evidence.golden if tonight else None
    if outcome_fault:
        # Metrics that a failed run has not measured are no news.
        status, reasons = outcome_fault, (_outcome_reason(record.job), *short, *wrong)
    elif wrong:
        status, reasons = VerdictStatus.FAILED, (*wrong, *short)
    elif short:
        status, reasons = VerdictStatus.SHORT, short
    elif strange := implausible(record):
        status, reasons = VerdictStatus.FAILED, strange
    else:
        status = _status_of(results, golden)
        decisions = tonight.evidence.decisions if tonight else ()
        night = night_order(record.spec.night, record.harvested_at)
        reasons = _comparison_reasons(results) + _without_baseline(results, night, decisions)
        reasons += _slow_steps(record, results) + (golden.reasons if golden else ())
        worse = {result.comparison.metric for result in results if result.comparison.status == "regressed"}
        worse |= {GOLDEN} if golden and not (golden.as_good or golden.only_slower) else set()
        is_too_good = status is VerdictStatus.SUSPICIOUS
        too_good = {one.comparison.metric for one in results if is_too_good and one.comparison.status == "suspicious"}
        is_compared = status not in (VerdictStatus.FAILED, VerdictStatus.NO_BASELINE)
        if tonight and is_compared and (modes := slow_mode(tonight, worse, too_good)):
            status, reasons = VerdictStatus.UNSTABLE, (modes, *reasons)
        if tonight:
            # Whatever further runs say, one that lacks something has failed.
            wanting = () if status is VerdictStatus.FAILED else results
            wanted = max(wanting, key=lambda result: result.reruns, default=None)
            reruns, why = (wanted.reruns, wanted.why_rerun or wanted.reason) if wanted else (0, "")
            past, own = tonight.nights[:-1], tonight.nights[-1]
            same = unchanged_since(past, own) if EXIT_CODES[status] else ""
            suspects, node_reasons = suspects_among(past, own, same) if reruns else ((), ())
            if tonight.control:
                placed = place_pairs(past, own, reruns, suspects, tonight.gate.max_runs)
                if placed.reruns > reruns:
                    why = f"whether {', '.join(placed.on)} are slow: both points run there"
                reruns, suspects = placed.reruns, placed.avoid if placed.reruns else ()
                control = _control_arm(tonight.control, own, placed) if reruns or own.arms else None
                node_reasons = (*node_reasons, *([placed.reason] if placed.reason else ()))
            logs, ran = (
                [said] if baseline and (said := otherwise(baseline[-1], record.summary)) else []
                for otherwise in (logs_otherwise, ran_otherwise)
            )
            reasons = (*logs, *reasons, *node_reasons, *ran, *_not_known(results, tonight), *_decided(tonight))
    if record.job.outcome is Outcome.TEARDOWN:
        reasons = (*reasons, _outcome_reason(record.job))
    missing = () if outcome_fault or short else missing_checkpoints(record)
    reasons = (*reasons, *missing, *_unlike_others(record))

    further = _further_runs(tonight.nights[-1]) if tonight else {}
    return Verdict(
        run_key=record.spec.run_key,
        test_id=record.spec.test.id,
        night=record.spec.night,
        status=status,
        reasons=reasons,
        comparisons=tuple(_beside_golden(result.comparison, golden) for result in results),
        baseline_runs=tuple(row.run_key for row in baseline),
        reference_run=golden.run_key if golden else None,
        # What golden values say of speed is the fact that a slower metric has already.
        as_golden=golden is None or golden.as_good or (golden.only_slower and _is_slower(results)),
        job_id=record.job.job_id,
        store_url=record.store_url,
        prefix=record.prefix,
        series=record.series,
        reruns=reruns,
        rerun_reason=why if reruns > len(further) else "",
        further_runs=len(further),
        repeat=record.spec.repeat,
        suspect_nodes=suspects,
        control=control,
        certainty=_certainty(status, results),
        moved=_moved(results, tonight),
        steps=record.summary.steps_done,
        steps_expected=record.summary.steps_expected,
        gpu_hours=gpu_hours(record) or 0.0,
        confirmation_gpu_hours=sum(further.values()),
    )


def _is_slower(results: Sequence[MetricResult]) -> bool:
    """Whether a metric of speed regressed."""
    regressed = (METRIC_BY_NAME[one.comparison.metric] for one in results if one.comparison.status == "regressed")
    return any(metric.fact == "speed" for metric in regressed)


def _with_few_nights(verdict: Verdict, nights: int, tonight: Tonight) -> Verdict:
    """The same; a pass that rests on too few good nights, and on no golden values either, says how little it knows.

    So does an improvement: one that lasts is reported when enough nights have it.
    """
    if verdict.status not in (VerdictStatus.PASSED, VerdictStatus.IMPROVED) or tonight.evidence.golden:
        return verdict
    speed = verdict.metric("step_time")
    wide = f": up to {format_percent(speed.threshold)} in step time is within the band" if speed else ""
    reason = f"{nights} of the {tonight.gate.cold_start} good nights from which a test's own noise is known{wide}"
    update = {"status": VerdictStatus.INSUFFICIENT_DATA, "reasons": (*verdict.reasons, reason)}
    return verdict.model_copy(update=update)


def _with_broken_runs(verdict: Verdict, further: Sequence[HistoryRow]) -> Verdict:
    """The same; no pass where a further run of the same pins broke, which the run itself did not."""
    broken = [run for run in further if run.verdict in BROKEN]
    if not broken or verdict.status in NO_VALUE:
        return verdict
    first, runs = broken[0], format_count(len(further), "further run")
    is_outcome = OUTCOMES[first.outcome][0] is not None
    why = _outcome_reason(first) if is_outcome else "; ".join(wrong_data(first.summary))
    reason = f"{len(broken)} of {runs} of the same pins broke, {first.run_key} {first.verdict}: {why}".rstrip(": ")
    status = verdict.status if EXIT_CODES[verdict.status] else VerdictStatus.UNSTABLE
    return verdict.model_copy(update={"status": status, "reasons": (reason, *verdict.reasons)})


def _certainty(status: VerdictStatus, results: Sequence[MetricResult]) -> str:
    """How sure a verdict is that the numbers alone make bad, by the first metric that does."""
    return next((found.certainty for found in results if found.comparison.status == BAD_COMPARISONS.get(status)), "")


def _control_arm(point: HistoryRow, tonight: NightRuns, placed: Placement) -> ControlArm:
    return ControlArm(
        run_key=point.run_key,
        night=point.night,
        prefix=point.prefix,
        pairs=len(pairs_of(tonight)),
        on_nodes=placed.on,
        slow_nodes=placed.slow,
    )


def _further_runs(tonight: NightRuns) -> dict[str, float]:
    """GPU-hours of a night's further runs, by run key."""
    return {run.run_key: run.gpu_hours or 0.0 for run in (*tonight.runs, *tonight.arms) if run.repeat}


def _moved(results: Sequence[MetricResult], tonight: Tonight | None) -> dict[str, float]:
    """Where the cluster has the good levels from tonight on, by metric, as multiples."""
    held = tonight.nights[-1].own.moved if tonight else {}
    return held | {result.comparison.metric: result.moved for result in results if result.moved is not None}


def _status_of(results: Sequence[MetricResult], golden: ReferenceResult | None) -> VerdictStatus:
    # A metric that no run had before is measured, and no more.
    seen = {
        result.comparison.status
        for result in results
        if METRIC_BY_NAME[result.comparison.metric].always or result.comparison.status != "no_baseline"
    }
    if golden and not golden.whole:
        seen.add("missing")
    if golden and not golden.as_good:
        seen.add("regressed")
    if golden and seen == {"no_baseline"}:
        return VerdictStatus.PASSED
    status = next(verdict for word, verdict in COMPARED if word in seen)
    if status is VerdictStatus.REGRESSED and not (golden and not golden.as_good):
        regressed = [result for result in results if result.comparison.status == "regressed"]
        if all(result.agreement and result.agreement.is_split for result in regressed):
            return VerdictStatus.UNSTABLE
    return status


def _beside_golden(comparison: Comparison, golden: ReferenceResult | None) -> Comparison:
    """The same with what the golden run measured."""
    values = {str(name): value for name, value in golden.values.items()} if golden else {}
    own = values.get(comparison.metric)
    return comparison if own is None else comparison.model_copy(update={"golden": own})


def _outcome_reason(ended: Job | HistoryRow) -> str:
    _fault, words = OUTCOMES[ended.outcome]
    return f"{words}: {ended.outcome_reason}" if ended.outcome_reason else words


def _comparison_reasons(results: Sequence[MetricResult]) -> tuple[str, ...]:
    """One line per metric that is news, the gravest first."""
    order = [status for status, _verdict in COMPARED]
    news = sorted(
        (result for result in results if result.reason), key=lambda result: order.index(result.comparison.status)
    )
    step_time = next((result.comparison for result in news if result.comparison.metric == "step_time"), None)
    # What says with another number what the step time's says.
    same = {
        own.metric: own.change
        for own in (result.comparison for result in news)
        if step_time
        and own.metric in INVERSES
        and own.status == step_time.status
        and is_step_times(own.metric, own.change or 0.0, step_time.change or 0.0)
    }
    also = "".join(f"; {METRIC_BY_NAME[name].label} {format_change(change)}" for name, change in same.items())
    return tuple(
        # Of a move of the cluster the reason gives the control's, and not what the arms are apart.
        result.reason + also * (result.comparison.metric == "step_time" and result.comparison.status != "passed")
        for result in news
        if result.comparison.metric not in same
    )


def _without_baseline(results: Sequence[MetricResult], night: str, decisions: Sequence[Decision]) -> tuple[str, ...]:
    """Why metrics that every run must have are compared with nothing."""
    required = [result.comparison for result in results if METRIC_BY_NAME[result.comparison.metric].always]
    unknown = [item.metric for item in required if item.status == "no_baseline"]
    begun = [name for name in unknown if level_start(decisions, name) == night]
    if unknown and begun == unknown and len(unknown) == len(required):
        return ("the accepted level begins with this night: no earlier run of it to compare with",)
    if unknown and not begun and len(unknown) == len(required):
        return ("no earlier good run of this configuration to compare with",)
    return tuple(
        f"the accepted level of {METRIC_BY_NAME[name].label} begins with this night: no earlier run of it"
        if name in begun
        else f"no earlier good run measured {METRIC_BY_NAME[name].label}"
        for name in unknown
    )


def beside(before: HistoryRow, after: HistoryRow) -> str:
    """What a run measured against one that it is not judged by: `step time +4.0 %, peak memory −1.2 %`."""
    pairs = ((metric, measured(metric, before.summary), measured(metric, after.summary)) for metric in COLUMNS)
    return ", ".join(
        f"{metric.label} {format_change((new - old) / abs(old))}"
        for metric, old, new in pairs
        if old and new is not None
    )


def _other_topology(own: HistoryRow, history: Sequence[HistoryRow]) -> tuple[str, ...]:
    """Why the nights before do not count, and what the last good one of them had, as information."""
    good = good_runs_before(own.night, history)
    if not good or not (changed := changed_topology(good[-1], own)):
        return ()
    return (
        f"another topology than {good[-1].night}, {', '.join(changed)}: a baseline of its own; against that night "
        f"{beside(good[-1], own)}",
    )


def _slow_steps(record: RunRecord, results: Sequence[MetricResult]) -> tuple[str, ...]:
    """Which steps were slow, where not all were and that is news."""
    worse = {result.comparison.metric for result in results if result.comparison.status == "regressed"}
    if not record.summary.slow_pattern or not worse & {"wall_step_time", "slow_steps", "tail_slowdown"}:
        return ()
    return (f"{record.summary.slow_pattern}: garbage collection, data loading, checkpoints, or a slow node?",)


def _not_known(results: Sequence[MetricResult], tonight: Tonight) -> tuple[str, ...]:
    """What the cluster owes the test and nobody measured: no fault, since a pattern names tests that cannot, too."""
    compared = {result.comparison.metric for result in results}
    unknown = [METRIC_BY_NAME[name].label for name in tonight.evidence.contract if name not in compared]
    cluster = tonight.record.job.cluster
    return (f"what {cluster} owes it was not measured: {', '.join(unknown)}",) if unknown else ()


def _decided(tonight: Tonight) -> tuple[str, ...]:
    """Users' decisions about the present levels."""
    night = tonight.nights[-1].own.order
    forced = {
        decision.text: decision
        for metric in METRICS
        for decision in in_force(tonight.evidence.decisions, metric.name)
        if decision.since <= night
    }
    return tuple(text for text, _decision in sorted(forced.items(), key=lambda item: item[1].when))


def _unlike_others(record: RunRecord) -> Iterator[str]:
    """What a run had that others have not, whatever it measured."""
    path = resumed_from(record.spec.test)
    if path and record.summary.start_step:  # else it did not: see `plausibility`
        yield f"the run resumed from {path}, where another one ended; it is not used as a baseline"
    elapsed = record.summary.teardown_time
    if elapsed is not None and elapsed < 0:
        ahead = format_value(abs(elapsed), "s")
        yield f"the last iteration ended {ahead} after the job did: is the node's clock ahead of Slurm's?"
    if record.tainted:
        first, *others = record.tainted
        more = f", and {len(others)} more" if others else ""
        yield f"the checkout was modified; the tested code is unknown ({first}{more})"


def _error_reasons(error: BaseException) -> tuple[str, ...]:
    if isinstance(error, NightbridgeError):
        return tuple(line.strip() for line in str(error).splitlines() if line.strip())
    # Only the first line: the rest of a foreign message (a validation error's input, a command's output) is
    # for the log, and may hold what must not be in a report.
    first_line = next(iter(str(error).splitlines()), "")
    return (f"internal error, {type(error).__name__}: {first_line}"[:300].rstrip(": "),)
