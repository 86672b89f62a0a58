"""The gate: a run against the last good runs of its series, and the verdict.

It fails closed. Upstream's gate passes a run with 20 of 50 steps, without a single loss, or without a throughput,
because a missing number becomes NaN and every test of it reads "fail if greater". Here a run is asked for what it
must have first, and only a run that has all of it is compared:

1. The job's outcome (`OUTCOME_FAULTS`). All steps done and then a failure in teardown is compared, and says so.
2. The run's own data: every step done, every step finite, every metric measured, no damaged file.
3. Each metric against the median of the last good runs, with its direction: beyond the threshold in the bad direction
   is a regression, in the good direction an improvement, which never fails. One regression outweighs improvements.

What makes the baseline: the last `gate.baseline_runs` runs of the same series from strictly earlier nights (night ids
sort by time) whose verdict was passed, improved or no baseline, and whose job did all its steps. A regressed run never
gets there by itself, so a slow-down is reported every night until it is repaired or accepted. Confirming re-runs and
bisect points (`repeat`) are no part of it.
"""

import math
import statistics
from collections.abc import Sequence
from typing import Literal, NamedTuple

from nightbridge.errors import InvalidInput, NightbridgeError
from nightbridge.models import (
    Comparison,
    GatePolicy,
    InvalidTest,
    Outcome,
    RunRecord,
    RunSpec,
    Summary,
    Verdict,
    VerdictStatus,
    make_run_key,
)
from nightbridge.regression.history import HistoryRow
from nightbridge.regression.wording import format_change, format_percent, format_value


class Metric(NamedTuple):
    """One number of a run that is gated. `attribute` is its field in `Summary`, `threshold` in `GatePolicy`."""

    name: str
    label: str
    unit: str
    lower_is_better: bool
    attribute: str
    threshold: str
    must_be_positive: bool


# Megatron-Bridge prints MODEL_TFLOP as 0 when it cannot count it: such a zero is no measurement. A loss may be zero.
METRICS = (
    Metric("step_time", "step time", "s", True, "step_time", "step_time", True),
    Metric("tflops_per_gpu", "throughput", "TFLOP/s/GPU", False, "tflops_per_gpu", "tflops_per_gpu", True),
    Metric("peak_memory", "peak memory", "GB", True, "peak_memory", "peak_memory", True),
    Metric("final_loss", "final loss", "", True, "final_loss", "final_loss", False),
)

METRIC_BY_NAME = {metric.name: metric for metric in METRICS}

# The verdict on a run whose job ended like this, whatever it measured. None: its numbers decide.
OUTCOME_FAULTS: dict[Outcome | None, VerdictStatus | None] = {
    Outcome.SUCCEEDED: None,
    Outcome.TEARDOWN: None,
    Outcome.SHORT: VerdictStatus.SHORT,
    Outcome.TIMEOUT: VerdictStatus.FAILED,
    Outcome.OUT_OF_MEMORY: VerdictStatus.FAILED,
    Outcome.PROGRAM_ERROR: VerdictStatus.FAILED,
    Outcome.CANCELLED: VerdictStatus.CANCELLED,
    Outcome.INFRASTRUCTURE: VerdictStatus.INFRASTRUCTURE,
    Outcome.NEVER_STARTED: VerdictStatus.INFRASTRUCTURE,
    None: VerdictStatus.INFRASTRUCTURE,
}

OUTCOME_WORDS: dict[Outcome | None, str] = {
    Outcome.SUCCEEDED: "the job succeeded",
    Outcome.TEARDOWN: "all steps done, then the job failed in teardown",
    Outcome.SHORT: "the job ended before its last step",
    Outcome.TIMEOUT: "the job ran into its time limit",
    Outcome.OUT_OF_MEMORY: "the job ran out of memory",
    Outcome.PROGRAM_ERROR: "the program failed",
    Outcome.CANCELLED: "the job was cancelled",
    Outcome.INFRASTRUCTURE: "the cluster failed, not the program",
    Outcome.NEVER_STARTED: "the job never started",
    None: "nobody could say what became of the job",
}

GOOD_VERDICTS = frozenset({VerdictStatus.PASSED, VerdictStatus.IMPROVED, VerdictStatus.NO_BASELINE})
COMPLETE_OUTCOMES = frozenset({Outcome.SUCCEEDED, Outcome.TEARDOWN})

ComparisonStatus = Literal["passed", "improved", "regressed", "missing", "no_baseline"]

# What the comparisons make of a run that has no fault of its own: the first that any of them has.
COMPARED: tuple[tuple[ComparisonStatus, VerdictStatus], ...] = (
    ("missing", VerdictStatus.FAILED),
    ("regressed", VerdictStatus.REGRESSED),
    ("no_baseline", VerdictStatus.NO_BASELINE),
    ("improved", VerdictStatus.IMPROVED),
    ("passed", VerdictStatus.PASSED),
)


def good_runs_before(night: str, history: Sequence[HistoryRow]) -> tuple[HistoryRow, ...]:
    """The runs that may make a baseline for a night, oldest first."""
    good = (
        row
        for row in history
        if row.night < night and row.repeat == 0 and row.verdict in GOOD_VERDICTS and row.outcome in COMPLETE_OUTCOMES
    )
    return tuple(sorted(good, key=lambda row: (row.night, row.harvested_at)))


def compare(record: RunRecord, history: Sequence[HistoryRow]) -> Verdict:
    """Judge a run by its own evidence, and then by the history of its series.

    Args:
        record: The harvested run.
        history: Rows of the run's series in any order; the run itself and later nights may be among them.
    """
    baseline = good_runs_before(record.spec.night, history)[-record.spec.test.gate.baseline_runs :]
    return compare_with(record, baseline)


def compare_with(record: RunRecord, baseline: Sequence[HistoryRow]) -> Verdict:
    """Judge a run by its own evidence, and then by the median of the given runs, whatever became of those.

    Args:
        record: The harvested run.
        baseline: What it is compared with; of another series too, when a person asks for it.
    """
    gate = record.spec.test.gate
    comparisons = tuple(_compare_metric(metric, record.summary, baseline, gate) for metric in METRICS)

    outcome_fault = OUTCOME_FAULTS[record.job.outcome]
    short = _missing_steps(record, baseline)
    wrong = _wrong_data(record.summary)
    if outcome_fault:
        # Metrics that a failed run has not measured are no news.
        status, reasons = outcome_fault, (_outcome_reason(record), *short, *wrong)
    elif wrong:
        status, reasons = VerdictStatus.FAILED, (*wrong, *short)
    elif short:
        status, reasons = VerdictStatus.SHORT, short
    else:
        status = _status_of(comparisons)
        reasons = _comparison_reasons(comparisons, len(baseline))
    if record.job.outcome is Outcome.TEARDOWN:
        reasons = (*reasons, _outcome_reason(record))
    reasons = (*reasons, *_taint_reasons(record))

    return Verdict(
        run_key=record.spec.run_key,
        test_id=record.spec.test.id,
        night=record.spec.night,
        status=status,
        reasons=reasons,
        comparisons=comparisons,
        baseline_runs=tuple(row.run_key for row in baseline),
        job_id=record.job.job_id,
        store_url=record.store_url,
        prefix=record.prefix,
        series=record.series,
    )


def verdict_for_error(spec: RunSpec, error: BaseException, series: str = "") -> Verdict:
    """The verdict on a run that died in a stage: nothing was measured, so nothing is said about the code.

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
    return Verdict(
        run_key=run_key,
        test_id=test.id,
        night=night,
        status=VerdictStatus.INVALID,
        reasons=test.violations,
    )


def measured(metric: Metric, summary: Summary) -> float | None:
    """The value, where it is one: present, finite, and positive where nothing else makes sense."""
    value: float | None = getattr(summary, metric.attribute)
    if value is None or not math.isfinite(value) or (metric.must_be_positive and value <= 0):
        return None
    return value


def _compare_metric(metric: Metric, summary: Summary, baseline: Sequence[HistoryRow], gate: GatePolicy) -> Comparison:
    threshold: float = getattr(gate, metric.threshold)
    value = measured(metric, summary)
    earlier = [known for row in baseline if (known := measured(metric, row.summary)) is not None]
    reference = statistics.median(earlier) if earlier else None
    change = None if value is None or not reference else (value - reference) / abs(reference)
    return Comparison(
        metric=metric.name,
        unit=metric.unit,
        lower_is_better=metric.lower_is_better,
        value=value,
        baseline=reference,
        change=change,
        threshold=threshold,
        status=_comparison_status(value, reference, threshold, metric.lower_is_better),
    )


def _comparison_status(
    value: float | None, reference: float | None, threshold: float, lower_is_better: bool
) -> ComparisonStatus:
    if value is None:
        return "missing"
    if reference is None:
        return "no_baseline"
    # Multiplied out, so that a baseline of zero needs no case of its own: any step away from it counts.
    worse = value - reference if lower_is_better else reference - value
    allowed = threshold * abs(reference)
    # A change of exactly the threshold passes, also where the last bit of the division says otherwise.
    if math.isclose(abs(worse), allowed, rel_tol=1e-9) or abs(worse) < allowed:
        return "passed"
    return "regressed" if worse > 0 else "improved"


def _status_of(comparisons: Sequence[Comparison]) -> VerdictStatus:
    seen = {comparison.status for comparison in comparisons}
    return next(verdict for status, verdict in COMPARED if status in seen)


def _missing_steps(record: RunRecord, baseline: Sequence[HistoryRow]) -> tuple[str, ...]:
    """Why the run is short. The number of steps is what anybody asked for, else what earlier runs did."""
    done = record.summary.steps_done
    asked = (record.summary.steps_expected, record.plan.max_steps, record.spec.max_steps)
    expected = max((steps for steps in asked if steps is not None), default=None)
    if expected is None:
        expected = max((row.summary.steps_done for row in baseline), default=1)
    return (f"{done} of {expected} steps done",) if done < expected else ()


def _wrong_data(summary: Summary) -> tuple[str, ...]:
    """What is wrong with what the run measured, apart from its length."""
    steps = summary.non_finite_steps
    non_finite = (f"{steps} step{'s' * (steps != 1)} without a finite loss or gradient norm",) if steps else ()
    return non_finite + tuple(f"damaged data: {damage}" for damage in summary.damage)


def _outcome_reason(record: RunRecord) -> str:
    words = OUTCOME_WORDS[record.job.outcome]
    return f"{words}: {record.job.outcome_reason}" if record.job.outcome_reason else words


def _comparison_reasons(comparisons: Sequence[Comparison], runs: int) -> tuple[str, ...]:
    """One line per metric that is news, the gravest first."""
    order = [status for status, _verdict in COMPARED]
    news = sorted(
        (comparison for comparison in comparisons if comparison.status in ("missing", "regressed", "improved")),
        key=lambda comparison: order.index(comparison.status),
    )
    reasons = tuple(_comparison_reason(comparison, runs) for comparison in news)
    unknown = [METRIC_BY_NAME[item.metric].label for item in comparisons if item.status == "no_baseline"]
    if len(unknown) == len(comparisons):
        return (*reasons, "no good earlier run of this configuration to compare with")
    return (*reasons, *(f"no good earlier run has measured {label}" for label in unknown))


def _comparison_reason(comparison: Comparison, runs: int) -> str:
    metric = METRIC_BY_NAME[comparison.metric]
    if comparison.status == "missing":
        return f"{metric.label} was not measured, or is not a {'positive ' * metric.must_be_positive}finite number"
    value, reference = (format_value(number, comparison.unit) for number in (comparison.value, comparison.baseline))
    change = format_change(comparison.change) or "away from zero"
    good_runs = "the last good run" if runs == 1 else f"the median of the last {runs} good runs"
    return (
        f"{metric.label} {comparison.status} by {change}: {value} against {reference}, {good_runs} "
        f"(limit {format_percent(comparison.threshold)})"
    )


def _taint_reasons(record: RunRecord) -> tuple[str, ...]:
    if not record.tainted:
        return ()
    first, *others = record.tainted
    more = f", and {len(others)} more" if others else ""
    return (f"nobody knows which code ran: it was changed since it was checked out ({first}{more})",)


def _error_reasons(error: BaseException) -> tuple[str, ...]:
    if isinstance(error, NightbridgeError):
        return tuple(line.strip() for line in str(error).splitlines() if line.strip())
    # Only the first line: the rest of a foreign message (a validation error's input, a command's output) is
    # for the log, and may hold what must not be in a report.
    first_line = next(iter(str(error).splitlines()), "")
    return (f"internal error, {type(error).__name__}: {first_line}"[:300].rstrip(": "),)
