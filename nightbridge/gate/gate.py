"""The gate: a run against the last good runs of its series, and the verdict.

It fails closed. Upstream's gate passes a run with 20 of 50 steps, without a single loss, or without a throughput,
because a missing number becomes NaN and every test of it reads "fail if greater". Here a run is checked for what it
must have first, and only a run that has all of it is compared:

1. The job's outcome (`OUTCOME_FAULTS`). All steps done and then a failure in teardown is compared, and says so.
2. The run's own data: every step done, every step finite, every metric measured, no damaged file.
3. Each metric, with its direction, against floors and ceilings (the test's own, and what the cluster owes it), against
   the band of the last good runs (`bands`), and against all of its history (`standing`: a level that is worse). Beyond
   in the bad direction is a regression, in the good direction an improvement, which never fails. One regression
   outweighs improvements. What the cluster's canary and the nodes explain is taken out first (`nightly_values`).
4. Golden values, where the test names some.

What one night alone says is suspicious until it was run again (`confirm`): the verdict names how many runs it wants.

What makes the baseline: the last `gate.baseline_runs` runs of the same series from strictly earlier nights (night ids
sort by time) whose verdict was passed, improved or no baseline, and whose job did all its steps. A regressed run never
gets there by itself, so a slow-down is reported every night until it is repaired or accepted (`decisions`). Confirming
re-runs and bisect points (`repeat`) are no part of it, nor is a run that resumed where another one had ended.
"""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, NamedTuple

from nightbridge.errors import InvalidInput, NightbridgeError
from nightbridge.gate.decisions import Decision, in_force, is_accepted, is_left_out
from nightbridge.gate.nodes import suspects_among
from nightbridge.gate.ongoing_regression import (
    Agreement,
    Standing,
    agreement_of,
    is_back,
    reruns_wanted,
    standing_regression,
)
from nightbridge.history.metrics import COMPLETE_OUTCOMES as COMPLETE_OUTCOMES
from nightbridge.history.metrics import (
    GATED,
    beyond_limits,
    format_change,
    format_count,
    format_percent,
    format_value,
    measured,
)
from nightbridge.history.metrics import GOOD_VERDICTS as GOOD_VERDICTS
from nightbridge.history.metrics import METRIC_BY_NAME as METRIC_BY_NAME
from nightbridge.history.metrics import METRICS as METRICS
from nightbridge.history.metrics import Metric as Metric
from nightbridge.history.nightly_values import (
    OTHER_STATISTICS,
    Band,
    Night,
    adjusted,
    band_of,
    canary_values,
    fixed_band,
    night_value,
    nights_of,
    pins_of,
    run_value,
)
from nightbridge.history.reading import first_that_counts, is_good
from nightbridge.history.rows import HistoryRow, row_of
from nightbridge.launch.run_outputs import resumed_from
from nightbridge.models import (
    Comparison,
    GatePolicy,
    InvalidTest,
    Limits,
    MetricName,
    Outcome,
    RunRecord,
    RunSpec,
    Summary,
    TestDefinition,
    Verdict,
    VerdictStatus,
    make_run_key,
)

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
    None: "the state of the job is unknown",
}

BY_LAUNCHER_ALONE: frozenset[MetricName] = frozenset({"tflops_per_gpu", "peak_memory"})
"""What every run of Megatron-Bridge's launcher measures, and other programs may not; once they did, they have to."""

ComparisonStatus = Literal["passed", "improved", "regressed", "missing", "no_baseline"]

# What the comparisons make of a run that has no fault of its own: the first that any of them has.
COMPARED: tuple[tuple[ComparisonStatus, VerdictStatus], ...] = (
    ("missing", VerdictStatus.FAILED),
    ("regressed", VerdictStatus.REGRESSED),
    ("no_baseline", VerdictStatus.NO_BASELINE),
    ("improved", VerdictStatus.IMPROVED),
    ("passed", VerdictStatus.PASSED),
)


class Evidence(NamedTuple):
    """What is known besides the run and its history.

    `contract`: what the cluster owes the test. `canary`: rows of the test whose pins never move, on the same cluster.
    `decisions`: users' decisions about the series. `golden`: what golden values say, where the test names some.
    """

    contract: Mapping[MetricName, Limits] = {}
    canary: Sequence[HistoryRow] = ()
    decisions: Sequence[Decision] = ()
    golden: "GoldenAnswer | None" = None


class GoldenAnswer(NamedTuple):
    """What the rules of golden values say: whether the data are whole, whether they are as good, and why not.

    `values`: what the golden run measured, by metric and in its unit. `run_key`: that of the stored run that was used.
    """

    whole: bool
    as_good: bool
    reasons: tuple[str, ...] = ()
    values: Mapping[MetricName, float] = {}
    run_key: str | None = None


class Finding(NamedTuple):
    """What the gate found about one metric: its comparison, the sentence about it, and how far it can be relied on."""

    comparison: Comparison
    reason: str = ""
    agreement: Agreement | None = None
    reruns: int = 0


class _Tonight(NamedTuple):
    """The run that is judged and everything that it is compared with."""

    record: RunRecord
    nights: tuple[Night, ...]  # past nights, oldest first, and tonight last
    evidence: Evidence

    @property
    def gate(self) -> GatePolicy:
        return self.record.spec.test.gate


def good_runs_before(night: str, history: Sequence[HistoryRow]) -> tuple[HistoryRow, ...]:
    """The runs that may make a baseline for a night, oldest first."""
    good = (row for row in history if row.night < night and is_good(row) and not row.resumed)
    return tuple(sorted(good, key=lambda row: (row.night, row.harvested_at)))


def compare(record: RunRecord, history: Sequence[HistoryRow], evidence: Evidence | None = None) -> Verdict:
    """Judge a run by its own evidence, and then by the history of its series.

    Args:
        record: The harvested run.
        history: Rows of the run's series in any order; the run itself, its confirming re-runs, which are taken into
            account, and later nights may be among them.
        evidence: What else is known; None for nothing.
    """
    tonight = _Tonight(record, _nights(record, history), evidence or Evidence())
    findings = tuple(finding for metric in GATED if (finding := _examine(metric, tonight)))
    baseline = good_runs_before(record.spec.night, [night.own for night in tonight.nights[:-1]])
    return _verdict(record, baseline[-tonight.gate.baseline_runs :], findings, tonight)


def compare_with(record: RunRecord, baseline: Sequence[HistoryRow]) -> Verdict:
    """Judge a run by its own evidence, and then by the median of the given runs, whatever became of those.

    Args:
        record: The harvested run.
        baseline: What it is compared with; of another series too, at a user's request.
    """
    gate = record.spec.test.gate
    findings = []
    for metric in GATED:
        values = [value for row in baseline if (value := measured(metric, row.summary)) is not None]
        value = measured(metric, record.summary)
        if _is_asked(metric, record.spec.test, value, values):
            findings.append(_by_band(metric, value, fixed_band(metric, gate, values), len(values)))
    return _verdict(record, baseline, tuple(findings), None)


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


# --- the nights ------------------------------------------------------------------------------------------------------


def _nights(record: RunRecord, history: Sequence[HistoryRow]) -> tuple[Night, ...]:
    """The nights that count, oldest first, tonight last: its own run, and its confirming re-runs."""
    own = row_of(record, None)
    past = sorted((row for row in history if row.night < own.night), key=lambda row: (row.night, row.harvested_at))
    return (*nights_of(past[first_that_counts(past) :]), Night(own, (own, *repeats_of(own, history))))


def repeats_of(own: HistoryRow, history: Iterable[HistoryRow]) -> list[HistoryRow]:
    """The runs that confirm a night's own run, in their order; none of a run that is one of them itself."""
    repeats = [
        row
        for row in history
        if row.night == own.night
        and row.repeat > own.repeat == 0
        and (row.scenario, row.iteration) == (own.scenario, own.iteration)
        and pins_of(row) == pins_of(own)
    ]
    return sorted(repeats, key=lambda row: row.repeat)


# --- one metric ------------------------------------------------------------------------------------------------------


def _is_asked(metric: Metric, test: TestDefinition, value: float | None, earlier: Sequence[float]) -> bool:
    """Whether a run must have a metric, or has it."""
    always = metric.always and (test.has_launcher or metric.name not in BY_LAUNCHER_ALONE)
    return always or metric.name in test.gate.required or value is not None or bool(earlier)


def _examine(metric: Metric, tonight: _Tonight) -> Finding | None:
    """What is to say about one metric; None where it is none of this test's."""
    nights, decisions = tonight.nights, in_force(tonight.evidence.decisions, metric.name)
    past = [
        None if night.own.resumed or is_left_out(decisions, metric.name, night.own.night) else night
        for night in nights[:-1]
    ]
    values = [None if night is None else night_value(night, metric) for night in past]
    own = measured(metric, tonight.record.summary)
    if not _is_asked(metric, tonight.record.spec.test, own, [value for value in values if value is not None]):
        return None
    if own is None:
        return _by_band(metric, None, Band(_last(values), metric.threshold(tonight.gate), 0, 0.0), 0)
    runs = [value for run in nights[-1].runs if (value := _tonights_value(run, metric)) is not None] or [own]
    canary = canary_values(nights, tonight.evidence.canary, metric) if metric.follows_cluster else ()
    steady = adjusted(metric, [*values, statistics.median(runs)], nights, canary)
    explained = _ratio(statistics.median(runs), steady[-1])
    good = [
        place
        for place, night in enumerate(past)
        if night is not None
        and steady[place] is not None
        and (is_good(night.own) or is_accepted(decisions, metric.name, night.own.night))
    ]
    singles = [None if night is None else run_value(night.own, metric) for night in past]
    single = [_times(singles[place], _ratio(values[place], steady[place])) for place in good]
    band = band_of(metric, tonight.gate, [value for place in good if (value := steady[place]) is not None], single)
    finding = _by_runs(metric, runs, explained, band, tonight.gate)
    finding = _with_limits(finding, metric, runs, tonight)
    return _with_standing(finding, metric, tonight, past, steady, canary, band)


def _tonights_value(run: HistoryRow, metric: Metric) -> float | None:
    # The run that is judged has no verdict yet; its outcome is the verdict's business.
    return measured(metric, run.summary) if run.repeat == 0 else run_value(run, metric)


def _by_runs(metric: Metric, runs: Sequence[float], explained: float, band: Band, gate: GatePolicy) -> Finding:
    """Tonight's runs against the band: what they have in common counts."""
    finding = _by_band(metric, statistics.median(runs) * explained, band, min(band.nights, gate.baseline_runs))
    shown = finding.comparison.model_copy(update={"value": statistics.median(runs)})
    places = [band.place(value * explained) * (1 if metric.lower_is_better else -1) for value in runs]
    agreement = agreement_of(places)
    if shown.status == "regressed" and len(runs) > 1:
        finding = finding._replace(reason=f"{finding.reason}, in {agreement.worse} of {agreement.runs} runs")
    if shown.status != "regressed" and agreement.worse:
        finding = finding._replace(
            reason=f"{metric.label} was out of its band in {agreement.worse} of {agreement.runs} runs of this night, "
            f"the first at {format_value(runs[0], metric.unit)}: no regression"
        )
    return finding._replace(comparison=shown, agreement=agreement, reruns=reruns_wanted(agreement, gate.confirm))


def _by_band(metric: Metric, value: float | None, band: Band, runs: int) -> Finding:
    """One value against a band, with the sentence about it."""
    status = _comparison_status(metric, value, band)
    reference = band.reference
    change = None if value is None or not reference else (value - reference) / abs(reference)
    comparison = Comparison(
        metric=metric.name,
        unit=metric.unit,
        lower_is_better=metric.lower_is_better,
        value=value,
        baseline=reference,
        change=change,
        threshold=band.width,
        status=status,
    )
    return Finding(comparison, _comparison_reason(metric, comparison, runs))


def _comparison_status(metric: Metric, value: float | None, band: Band) -> ComparisonStatus:
    if value is None:
        return "missing"
    if band.reference is None:
        return "no_baseline"
    place = band.place(value)
    if not place:
        return "passed"
    return "regressed" if (place > 0) == metric.lower_is_better else "improved"


def _comparison_reason(metric: Metric, comparison: Comparison, runs: int) -> str:
    if comparison.status == "missing":
        return f"{metric.label} was not measured, or is not a {'positive ' * metric.must_be_positive}finite number"
    if comparison.status not in ("regressed", "improved"):
        return ""
    value, reference = (format_value(number, comparison.unit) for number in (comparison.value, comparison.baseline))
    change = format_change(comparison.change) or "away from zero"
    good_runs = "the last good run" if runs == 1 else f"the median of the last {runs} good runs"
    return (
        f"{metric.label} {comparison.status} by {change}: {value} against {reference}, {good_runs} "
        f"(limit {format_percent(comparison.threshold)})"
    )


def _with_limits(finding: Finding, metric: Metric, runs: Sequence[float], tonight: _Tonight) -> Finding:
    """The same, a regression where tonight's median breaks a floor or ceiling."""
    value = statistics.median(runs)
    for whose, limits in (
        ("the test's", tonight.gate.limits.get(metric.name)),
        (f"what {tonight.record.job.cluster} owes it", tonight.evidence.contract.get(metric.name)),
    ):
        broken = beyond_limits(metric, value, limits) if limits else ""
        if limits and broken:
            worse = [1 if beyond_limits(metric, run, limits) else 0 for run in runs]
            agreement = agreement_of(worse)
            return Finding(
                finding.comparison.model_copy(update={"status": "regressed"}),
                f"{broken}, {whose}: {format_value(value, metric.unit)}",
                agreement,
                reruns_wanted(agreement, tonight.gate.confirm),
            )
    return finding


def _with_standing(
    finding: Finding,
    metric: Metric,
    tonight: _Tonight,
    past: Sequence[Night | None],
    steady: Sequence[float | None],
    canary: Sequence[float | None],
    band: Band,
) -> Finding:
    """The same, a regression where the nights together say that the level is worse; and the runs that are wanted."""
    if tonight.record.spec.repeat:
        return finding._replace(reruns=0)
    statistic, series = _steadiest(metric, tonight, past, steady, canary)
    standing = _standing(metric, series, tonight.gate)
    value = steady[-1]
    if standing is None or value is None or is_back(metric, standing, steady[-1] or 0.0, band.noise or 0.0):
        return finding._replace(reruns=max(finding.reruns, _for_noise(metric, statistic, tonight, past, series)))
    if statistic != metric.attribute:
        # The level was found in another statistic; the numbers that users know are those of the metric itself.
        levels = _levels(steady, standing)
        standing = standing._replace(before=levels[0], after=levels[1])
    night = tonight.nights[standing.began.index].own.night
    latest = tonight.nights[standing.began.latest].own.night
    since = f"since {night}" + (f" (at the latest {latest})" if latest != night else "")
    comparison = finding.comparison.model_copy(
        update={"status": "regressed", "baseline": standing.before, "change": standing.change}
    )
    reason = (
        f"{metric.label} regressed by {format_change(standing.change)} {since}: "
        f"{format_value(standing.after, metric.unit)} against {format_value(standing.before, metric.unit)} before "
        f"(p = {standing.began.p_value:.0e})"
    )
    return Finding(comparison, reason)


def _steadiest(
    metric: Metric,
    tonight: _Tonight,
    past: Sequence[Night | None],
    steady: Sequence[float | None],
    canary: Sequence[float | None],
) -> tuple[str, Sequence[float | None]]:
    """The statistic of the metric that reveals a change soonest, without canary and nodes, and which it is."""
    from nightbridge.history.changepoints import steadiest

    choices = {metric.attribute: steady}
    for field in OTHER_STATISTICS.get(metric.name, ()):
        values = [None if night is None else night_value(night, metric, field) for night in (*past, tonight.nights[-1])]
        choices[field] = adjusted(metric, values, tonight.nights, canary)
    chosen = steadiest(choices)
    return chosen, choices[chosen]


def _standing(metric: Metric, series: Sequence[float | None], gate: GatePolicy) -> Standing | None:
    if sum(value is not None for value in series) < gate.cold_start:
        return None
    from nightbridge.history.changepoints import ChangePointPolicy, find_change_points

    least = max(gate.minimum_change, metric.least_change)
    policy = ChangePointPolicy(p_value=gate.p_value, minimum_change=least)
    return standing_regression(metric, find_change_points(series, policy), least)


def _levels(steady: Sequence[float | None], standing: Standing) -> tuple[float, float]:
    """Medians before and after, of the metric itself."""
    before = [value for value in steady[: standing.began.index] if value is not None]
    after = [value for value in steady[standing.began.index :] if value is not None]
    return statistics.median(before or [standing.before]), statistics.median(after or [standing.after])


def _for_noise(
    metric: Metric, field: str, tonight: _Tonight, past: Sequence[Night | None], steady: Sequence[float | None]
) -> int:
    """Further runs that the test for changes of level wants: of a night far from the others, and of a noisy test.

    Both are computed from the statistic that the test for changes of level looks at, `field` of the summary.
    """
    if metric.name != "step_time" or not tonight.gate.confirm:
        return 0
    from nightbridge.history.changepoints import reruns_needed

    own = measured(metric._replace(attribute=field), tonight.record.summary)
    median = night_value(tonight.nights[-1], metric, field)
    explained = _ratio(median, steady[-1])
    singles = [
        None
        if night is None
        else _times(run_value(night.own, metric, field), _ratio(night_value(night, metric, field), value))
        for night, value in zip(past, steady[:-1], strict=True)
    ]
    first = _times(own, explained)
    return reruns_needed(
        float("nan") if first is None else first,
        steady[:-1],
        singles,
        usual=tonight.gate.confirm,
        most=3 * tonight.gate.confirm,
    )


def _ratio(raw: float | None, steady: float | None) -> float:
    """What a value has to be multiplied with to have the cluster and the nodes taken out."""
    return steady / raw if raw and steady is not None else 1.0


def _times(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor


def _last(values: Sequence[float | None]) -> float | None:
    return next((value for value in reversed(values) if value is not None), None)


# --- the verdict -----------------------------------------------------------------------------------------------------


def _verdict(
    record: RunRecord, baseline: Sequence[HistoryRow], findings: Sequence[Finding], tonight: _Tonight | None
) -> Verdict:
    outcome_fault = OUTCOME_FAULTS[record.job.outcome]
    short = _missing_steps(record, baseline)
    wrong = _wrong_data(record.summary)
    reruns = 0
    suspects: tuple[str, ...] = ()
    if outcome_fault:
        # Metrics that a failed run has not measured are no news.
        status, reasons = outcome_fault, (_outcome_reason(record), *short, *wrong)
    elif wrong:
        status, reasons = VerdictStatus.FAILED, (*wrong, *short)
    elif short:
        status, reasons = VerdictStatus.SHORT, short
    else:
        golden = tonight.evidence.golden if tonight else None
        status = _status_of(findings, golden)
        reasons = _comparison_reasons(findings) + (golden.reasons if golden else ())
        if tonight:
            reruns = max((finding.reruns for finding in findings), default=0)
            suspects, said = suspects_among(tonight.nights[:-1], tonight.nights[-1]) if reruns else ((), ())
            reasons = (*reasons, *said, *_decided(tonight))
    if record.job.outcome is Outcome.TEARDOWN:
        reasons = (*reasons, _outcome_reason(record))
    reasons = (*reasons, *_resume_reasons(record), *_taint_reasons(record))

    return Verdict(
        run_key=record.spec.run_key,
        test_id=record.spec.test.id,
        night=record.spec.night,
        status=status,
        reasons=reasons,
        comparisons=tuple(_beside_golden(finding.comparison, tonight) for finding in findings),
        baseline_runs=tuple(row.run_key for row in baseline),
        reference_run=tonight.evidence.golden.run_key if tonight and tonight.evidence.golden else None,
        job_id=record.job.job_id,
        store_url=record.store_url,
        prefix=record.prefix,
        series=record.series,
        reruns=reruns,
        suspect_nodes=suspects,
    )


def _status_of(findings: Sequence[Finding], golden: GoldenAnswer | None) -> VerdictStatus:
    seen = {finding.comparison.status for finding in findings if _decides(finding)}
    if golden and not golden.whole:
        seen.add("missing")
    if golden and not golden.as_good:
        seen.add("regressed")
    if golden and seen == {"no_baseline"}:
        return VerdictStatus.PASSED
    status = next(verdict for word, verdict in COMPARED if word in seen)
    if status is VerdictStatus.REGRESSED and not (golden and not golden.as_good):
        regressed = [finding for finding in findings if finding.comparison.status == "regressed"]
        if all(finding.agreement and finding.agreement.is_split for finding in regressed):
            return VerdictStatus.UNSTABLE
    return status


def _beside_golden(comparison: Comparison, tonight: _Tonight | None) -> Comparison:
    """The same with what the golden run measured."""
    answer = tonight.evidence.golden if tonight else None
    values = {str(name): value for name, value in answer.values.items()} if answer else {}
    golden = values.get(comparison.metric)
    return comparison if golden is None else comparison.model_copy(update={"golden": golden})


def _decides(finding: Finding) -> bool:
    """Whether a finding has a part in the verdict: a metric that no run had before is measured, and no more."""
    return METRIC_BY_NAME[finding.comparison.metric].always or finding.comparison.status != "no_baseline"


def _missing_steps(record: RunRecord, baseline: Sequence[HistoryRow]) -> tuple[str, ...]:
    """Why the run is short. The number of steps is the requested one, else that of earlier runs."""
    done = record.summary.steps_done
    requested = (record.summary.steps_expected, record.plan.max_steps, record.spec.max_steps)
    expected = max((steps for steps in requested if steps is not None), default=None)
    if expected is None:
        expected = max((row.summary.steps_done for row in baseline), default=1)
    return (f"{done} of {expected} steps done",) if done < expected else ()


def _wrong_data(summary: Summary) -> tuple[str, ...]:
    """What is wrong with what the run measured, apart from its length."""
    steps = summary.non_finite_steps
    non_finite = (f"{format_count(steps, 'step')} without a finite loss or gradient norm",) if steps else ()
    return non_finite + tuple(f"damaged data: {damage}" for damage in summary.damage)


def _outcome_reason(record: RunRecord) -> str:
    words = OUTCOME_WORDS[record.job.outcome]
    return f"{words}: {record.job.outcome_reason}" if record.job.outcome_reason else words


def _comparison_reasons(findings: Sequence[Finding]) -> tuple[str, ...]:
    """One line per metric that is news, the gravest first."""
    order = [status for status, _verdict in COMPARED]
    news = sorted(
        (finding for finding in findings if finding.reason), key=lambda finding: order.index(finding.comparison.status)
    )
    reasons = tuple(finding.reason for finding in news)
    required = [finding.comparison for finding in findings if METRIC_BY_NAME[finding.comparison.metric].always]
    unknown = [METRIC_BY_NAME[item.metric].label for item in required if item.status == "no_baseline"]
    if unknown and len(unknown) == len(required):
        return (*reasons, "no earlier good run of this configuration to compare with")
    return (*reasons, *(f"no earlier good run measured {label}" for label in unknown))


def _decided(tonight: _Tonight) -> tuple[str, ...]:
    """Users' decisions about the present levels."""
    night = tonight.record.spec.night
    forced = {
        decision.text: decision
        for metric in GATED
        for decision in in_force(tonight.evidence.decisions, metric.name)
        if decision.since <= night
    }
    return tuple(text for text, _decision in sorted(forced.items(), key=lambda item: item[1].when))


def _resume_reasons(record: RunRecord) -> tuple[str, ...]:
    path = resumed_from(record.spec.test)
    return (f"the run resumed from {path}, where another one ended; it is not used as a baseline",) if path else ()


def _taint_reasons(record: RunRecord) -> tuple[str, ...]:
    if not record.tainted:
        return ()
    first, *others = record.tainted
    more = f", and {len(others)} more" if others else ""
    return (f"the checkout was modified; the tested code is unknown ({first}{more})",)


def _error_reasons(error: BaseException) -> tuple[str, ...]:
    if isinstance(error, NightbridgeError):
        return tuple(line.strip() for line in str(error).splitlines() if line.strip())
    # Only the first line: the rest of a foreign message (a validation error's input, a command's output) is
    # for the log, and may hold what must not be in a report.
    first_line = next(iter(str(error).splitlines()), "")
    return (f"internal error, {type(error).__name__}: {first_line}"[:300].rstrip(": "),)
