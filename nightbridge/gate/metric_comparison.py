"""One metric of a run against its history.

The night's runs are compared with the band of the last good ones, with floors and ceilings, and with all of the
history: `changepoints` finds the changes of level. Those are walked from the oldest on. The level before the first is
what the test is held to, and a better level takes its place. While the last level is worse than that by more than the
smallest change that counts, the regression persists, however many nights old it is: it ends when the level is back, or
when a user decides about it.

A suspicious result is proven before it is believed: the last good point runs beside tonight's on the same nodes, and
the difference decides (`control`). Without such a point, or with `control = "off"`, tonight's runs are repeated. All of
a night worse than the band: confirmed. Most of them not: the first was a single bad run, which is reported and raises
no alert. Most of them, but not all: unstable. Runs that disagree are repeated once more before that verdict.

What no arm measures, such as the time of a checkpoint that is saved once at the end, no further run confirms: there the
nights before do (`_with_nights_before`).
"""

import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from nightbridge.gate.control_arm import (
    ASKS_FOR_PAIRS,
    Seen,
    moved_back,
    rerun_reason,
    ruling_of,
    said,
)
from nightbridge.gate.decisions import in_force, is_accepted, passed_by_ended
from nightbridge.gate.nodes import MIN_NIGHTS
from nightbridge.gate.tonight import MetricSeries, Tonight, ratio
from nightbridge.gate.trend import NewLevel, first_night, is_back, lasting_improvement, ongoing_regression, was_left
from nightbridge.history.nightly_values import (
    AT_ONCE,
    NIGHTS_THAT_CONFIRM,
    Agreement,
    Band,
    WorseNights,
    agreement_of,
    band_of,
    before_worse_nights,
    fixed_band,
    strays_of,
    worse_nights,
)
from nightbridge.history.rows import measured
from nightbridge.models import Comparison, ComparisonStatus, GatePolicy, Limits, RunSpec, TestDefinition, VerdictStatus
from nightbridge.models.metrics import METRIC_BY_NAME, Metric
from nightbridge.numbers import format_change, format_count, format_percent, format_value

if TYPE_CHECKING:
    from nightbridge.history.changepoints import ChangePoint

CHANGED_WORDS: dict[ComparisonStatus, str] = {
    "regressed": "regressed",
    "improved": "improved",
    "suspicious": "is better than can be believed, not a baseline until it is accepted,",
}

UNKNOWN_NODES = 0.08
"""By how much nodes may be apart that too few nights ran on, where all the others ran on known ones."""


class MetricResult(NamedTuple):
    """The gate's result for one metric: its comparison, the reason, and how many further runs are wanted.

    `moved`: how many times its good level the cluster alone has it now; None where tonight says nothing of that.
    `absolute`: what is wrong by itself, such as a ceiling, whatever the last good point does. `why_rerun`: why further
    runs are wanted, where that is not the reason. `proven`: what proves it, where that is not the night's own runs.
    `by_pairs`: whether its pairs prove it.
    """

    comparison: Comparison
    reason: str = ""
    agreement: Agreement | None = None
    reruns: int = 0
    moved: float | None = None
    absolute: bool = False
    why_rerun: str = ""
    proven: str = ""
    by_pairs: bool = False

    @property
    def certainty(self) -> str:
        """How sure it is: the runs or pairs that say so, or the p-value; empty where nothing of it is known."""
        return self.proven or str(self.agreement or "")


def reruns_wanted(agreement: Agreement, gate: GatePolicy) -> int:
    """How many runs besides its own a night should have.

    Args:
        agreement: Of the runs that it has.
        gate: How many pairs a suspicious result is given, as many more when they disagree, and how many at most.
    """
    confirm = 2 * gate.pairs
    if not agreement.worse:
        return 0
    undecided = agreement.is_split and agreement.is_worse and agreement.runs > confirm
    wanted = 2 * confirm if undecided else confirm
    return wanted if gate.max_runs is None else min(wanted, gate.max_runs)


def is_required(metric: Metric, run: RunSpec, value: float | None, earlier: Sequence[float]) -> bool:
    """Whether a run must have a metric, or has it: once an earlier run measured it, later ones have to.

    So it is with one that its test limits: a ceiling for what is not measured would let everything pass. A further run
    that saves no checkpoint, as an arm or a bisect point, takes no time for one, and another one at its end.
    """
    test = run.test
    if value is not None or (metric.always and (test.has_launcher or not metric.launcher_only)):
        return True
    if (metric.fact == "checkpoints" or metric.own_run_only) and run.repeat and test.harvest.checkpoint == "none":
        return False
    return metric.name in {*test.gate.required, *test.gate.limits} or (bool(earlier) and not metric.own_run_only)


def arms_have(metric: Metric, test: TestDefinition) -> bool:
    """Whether the arms of a pair measure a metric: they save checkpoints only where the test itself says how often."""
    overridden = {name.lstrip("+") for name in test.extra_cmd_args}
    saves = bool(test.cmd_args.get("save_interval")) or "checkpoint.save_interval" in overridden
    return not metric.own_run_only and (saves or metric.fact != "checkpoints")


def compare_metric(metric: Metric, tonight: Tonight) -> MetricResult | None:
    """Compare one metric of the run with its history; None where the metric is none of this test's."""
    decisions = in_force(tonight.evidence.decisions, metric.name)
    past = tonight.past_of(metric.name, decisions)
    series = MetricSeries(metric, tonight, past)
    known = [value for value in series.past_values() if value is not None]
    own = measured(metric, tonight.record.summary)
    if not is_required(metric, tonight.record.spec, own, known):
        return None
    if own is None:
        lacking = compare_with_band(metric, None, fixed_band(metric, series.gate, known[-1:]), 0)
        return lacking._replace(reason=lacking.reason + _clocks_apart(metric, tonight))
    steady = series.steady
    counted = [(index, night) for index, night in enumerate(past) if night is not None and steady[index] is not None]
    accepted = {index for index, night in counted if is_accepted(decisions, metric.name, night.own.order)}
    good = [
        index
        for index, night in counted
        if (night.is_good or index in accepted)
        and not (decisions and passed_by_ended(decisions, metric.name, night.own.order))
    ]
    singles = series.first_runs(metric.field, steady)

    def band_at(places: Sequence[int]) -> Band:
        return band_of(
            metric,
            series.gate,
            [value for index in places if (value := steady[index]) is not None],
            [singles[index] for index in places],
            series.runs_before_decision(metric.field) if decisions and len(places) < series.gate.cold_start else (),
        )

    no_arm_has_it = tonight.control is not None and not arms_have(metric, tonight.record.spec.test)
    by_nights, begin = no_arm_has_it and not metric.own_run_only, None
    if by_nights:
        said_worse = ((index, night.own.worse.get(metric.name)) for index, night in counted if index not in accepted)
        worse = {index: by for index, by in said_worse if by is not None}
        good, begin = before_worse_nights(metric, series.gate, steady, good, worse, band_at)
    band = band_at(good)
    explained = ratio(statistics.median(series.runs), steady[-1])
    alone = _compare_runs(series, explained, band)
    if by_nights:
        alone = _with_nights_before(alone, series, worse_nights(metric, series.gate, steady, good, band_at), begin)
    back = None if alone.comparison.change is None else moved_back(metric, tonight.nights, alone.comparison.change)
    if back is not None:
        found = compare_metric(metric, tonight.with_move(metric.name, back))
        return found and found._replace(moved=back if found.moved is None else found.moved)
    result = _with_ongoing(_with_parity(_with_limits(alone, series), series), series, band)
    result = _with_numerics(result, series)
    if no_arm_has_it:
        return result._replace(reruns=0)
    if result.absolute or alone.comparison.change is None or result.comparison.status == "suspicious":
        return result
    excess = metric.sign * alone.comparison.change
    strays = strays_of(metric, band, [singles[index] for index in good])
    return _with_control(result, series, explained, excess, strays)


def _clocks_apart(metric: Metric, tonight: Tonight) -> str:
    """Why a run has a start-up time that is none: two clocks measure it, Slurm's and the node's."""
    elapsed = tonight.record.summary.startup_time
    if metric.name != "startup_time" or elapsed is None or elapsed > 0:
        return ""
    return (
        f": the first iteration began {format_value(abs(elapsed), 's')} before the job did; is the node's clock behind "
        "Slurm's, or was the job requeued?"
    )


def compare_with_band(metric: Metric, value: float | None, band: Band, runs: int, name: str = "") -> MetricResult:
    """Compare one value with a band around the median of so many runs, or of a run by name, and give the reason."""
    reference = band.reference
    comparison = Comparison(
        metric=metric.name,
        unit=metric.unit,
        lower_is_better=metric.lower_is_better,
        value=value,
        baseline=reference,
        change=None if value is None or not reference else (value - reference) / abs(reference),
        threshold=band.width,
        status=_status(metric, value, band),
    )
    return MetricResult(comparison, _reason(metric, comparison, runs, name))


def _status(metric: Metric, value: float | None, band: Band) -> ComparisonStatus:
    if value is None:
        return "missing"
    if band.reference is None:
        return "no_baseline"
    side = band.side(value)
    if not side:
        return "passed"
    if metric.worse(side):
        return "regressed"
    return "suspicious" if band._replace(width=max(band.width, metric.too_good)).side(value) else "improved"


def _reason(metric: Metric, comparison: Comparison, runs: int, name: str = "") -> str:
    if comparison.status == "missing":
        return f"{metric.label} was not measured, or is not a {'positive ' * metric.must_be_positive}finite number"
    if comparison.status not in CHANGED_WORDS:
        return ""
    value, reference = (format_value(number, comparison.unit) for number in (comparison.value, comparison.baseline))
    change = format_change(comparison.change) or "away from zero"
    limit = metric.too_good if comparison.status == "suspicious" else comparison.threshold
    good_runs = name or ("the last good run" if runs == 1 else f"the median of the last {runs} good runs")
    return (
        f"{metric.label} {CHANGED_WORDS[comparison.status]} by {change}: {value} against {reference}, {good_runs} "
        f"(limit {format_percent(limit)})"
    )


def _compare_runs(series: MetricSeries, explained: float, band: Band) -> MetricResult:
    """Compare tonight's runs with the band: what they have in common counts."""
    metric, gate, runs, median = series.metric, series.gate, series.runs, statistics.median(series.runs)
    band = band._replace(width=max(band.width, _unproven(series, band)))
    result = compare_with_band(metric, median * explained, band, min(band.nights, gate.baseline_runs))
    comparison = result.comparison.model_copy(update={"value": median})
    agreement = agreement_of([metric.sign * band.side(value * explained) for value in runs])
    reason, counted = result.reason, f"in {agreement}"
    if comparison.status == "regressed" and metric.least_change and agreement.is_split:
        # A few slow steps are in some runs and not in others: only what all runs of a night have is the code's.
        comparison = comparison.model_copy(update={"status": "passed"})
    if comparison.status == "regressed":
        reason += f", {counted}" if len(runs) > 1 else ""
    elif agreement.worse:
        first = format_value(runs[0], metric.unit)
        reason = f"{metric.label} was out of its band {counted} of this night, the first at {first}: no regression"
    return MetricResult(comparison, reason, agreement, reruns_wanted(agreement, gate))


def _with_nights_before(
    result: MetricResult, series: MetricSeries, lasting: WorseNights | None, begin: int | None
) -> MetricResult:
    """The same, a regression where the nights before confirm it, where last night's stands, or far beyond chance.

    Args:
        result: What tonight's runs say.
        series: The metric's.
        lasting: The last nights, where they together are worse.
        begin: The place of the first of the nights that are worse until last night's; None where that is not.
    """
    metric, comparison, nights = series.metric, result.comparison, series.tonight.nights
    excess = metric.sign * (comparison.change or 0.0)
    changes = [night.own.worse[metric.name] for night in nights[:-1] if metric.name in night.own.worse]
    stands = begin is not None and (comparison.status == "regressed" or excess >= abs(changes[-1]) / 2)
    first = lasting.first if lasting and begin is None else begin
    if first is not None and (lasting or stands):
        since = nights[first].own.night
        reason = result.reason or f"{metric.label} is worse as last night, {format_change(comparison.change)}"
        worse = comparison.model_copy(update={"status": "regressed", "since": since})
        if lasting:
            worse = worse.model_copy(update={"baseline": lasting.reference, "change": lasting.change})
            level, reference = (format_value(one, metric.unit) for one in (lasting.level, lasting.reference))
            reason = f"{metric.label} regressed by {format_change(lasting.change)} since {since}: {level} against "
            reason += f"{reference} before, the median of {NIGHTS_THAT_CONFIRM} nights"
        return MetricResult(worse, reason, proven=format_count(NIGHTS_THAT_CONFIRM, "night"))
    if comparison.status != "regressed" or excess > AT_ONCE:
        return result
    reason = f"{metric.label} was out of its band in this night, at {format_value(series.runs[0], metric.unit)}"
    return result._replace(
        comparison=comparison.model_copy(update={"status": "passed"}),
        reason=f"{reason}: no regression, unless {NIGHTS_THAT_CONFIRM} nights in a row are worse",
    )


def _unproven(series: MetricSeries, band: Band) -> float:
    """How far a night may be away that history says too little about: as its own runs are apart, or as nodes may be."""
    first_nights, runs = series.gate.cold_start, series.runs
    spread = (max(runs) - min(runs)) / abs(min(runs)) if band.nights < first_nights and min(runs) else 0.0
    nodes = series.tonight.nights_on
    tonights, usual = nodes[series.tonight.nights[-1].own.nodes], max(nodes.values(), default=0)
    is_unknown = series.metric.follows_cluster and tonights < MIN_NIGHTS <= usual
    return max(spread, UNKNOWN_NODES * is_unknown)


def beyond_limits(metric: Metric, value: float, limits: Limits) -> str:
    """What a value breaks of its floor and ceiling, in words; empty when it keeps them. NaN keeps none."""
    if limits.min is not None and not value >= limits.min:
        return f"{metric.label} is below its floor of {limits.min:g} {metric.unit}".rstrip()
    if limits.max is not None and not value <= limits.max:
        return f"{metric.label} is above its ceiling of {limits.max:g} {metric.unit}".rstrip()
    return ""


def _with_limits(result: MetricResult, series: MetricSeries) -> MetricResult:
    """The same, a regression where tonight's median breaks a floor or ceiling."""
    metric, tonight, runs, value = series.metric, series.tonight, series.runs, statistics.median(series.runs)
    for whose, limits in (
        ("the test's", series.gate.limits.get(metric.name)),
        (f"what {tonight.record.job.cluster} owes it", tonight.evidence.contract.get(metric.name)),
    ):
        if limits and (broken := beyond_limits(metric, value, limits)):
            agreement = agreement_of([bool(beyond_limits(metric, run, limits)) for run in runs])
            reason = f"{broken}, {whose}: {format_value(value, metric.unit)}"
            worse = _worse_by_itself(result, series, reason, agreement)
            return worse._replace(comparison=worse.comparison.model_copy(update={"by_itself": True}))
    return result


def _worse_by_itself(result: MetricResult, series: MetricSeries, reason: str, agreement: Agreement) -> MetricResult:
    """The same, a regression whatever the last good point does; one that is new until further runs say so, too."""
    comparison = result.comparison.model_copy(update={"status": "regressed"})
    metric, tonight = series.metric, series.tonight
    stands = any(
        metric.name in night.own.worse
        and night.own.verdict is VerdictStatus.REGRESSED
        and not is_accepted(tonight.evidence.decisions, metric.name, night.own.order)
        for night in tonight.nights[-2:-1]
    )
    reruns = 0 if stands else reruns_wanted(agreement, series.gate)
    return MetricResult(comparison, reason, agreement, reruns, absolute=True)


def _with_parity(result: MetricResult, series: MetricSeries) -> MetricResult:
    """The same, of the loss curve by what all of its iterations say, of which a few anchors see little."""
    parity = series.tonight.evidence.parity
    if series.metric.name != "loss_curve" or parity is None or result.comparison.status in ("regressed", "suspicious"):
        return result
    agreement = Agreement(parity.runs, parity.apart)
    if not agreement.is_worse or not parity.is_higher:
        return result._replace(reason=parity.reason or result.reason, agreement=agreement)
    counted = f", in {parity.apart} of {parity.runs} runs" if parity.runs > 1 else ""
    return _worse_by_itself(result, series, f"{parity.reason}{counted}", agreement)


def _with_numerics(result: MetricResult, series: MetricSeries) -> MetricResult:
    """The same, of the loss curve a regression where a deterministic test computes something else, however close."""
    found, tonight = series.tonight.evidence.numerics, series.tonight
    if series.metric.name != "loss_curve" or found is None or result.comparison.status == "suspicious":
        return result
    reason = "; ".join(filter(None, (result.reason, found.reason)))
    if not found.is_worse or result.comparison.status == "regressed":
        return result._replace(reason=reason)
    worse = _worse_by_itself(result, series, reason, found.agreement)
    return worse._replace(reruns=0) if found.stands or tonight.record.spec.repeat else worse


def _with_ongoing(result: MetricResult, series: MetricSeries, band: Band) -> MetricResult:
    """The same, a regression where the nights together say that the level is worse; and the runs that are wanted."""
    metric, tonight = series.metric, series.tonight
    if tonight.record.spec.repeat or result.comparison.status == "suspicious":
        return result._replace(reruns=0)
    steady, (field, values) = series.steady, series.steadiest
    points, least = _levels(metric, values, tonight.gate, band.width if metric.least_change else 0.0)
    ongoing, value = ongoing_regression(metric, points, least), steady[-1]
    is_over = ongoing is None or value is None or is_back(metric, ongoing, value, band.noise or 0.0)
    # One good night may be an accident: what the band does not see is bad again where the level is.
    is_new = ongoing is not None and (result.comparison.status == "regressed" or not ongoing.holds(values[-1]))
    if ongoing is None or is_over or (is_new and was_left(metric, ongoing, tonight.nights, values)):
        return _with_improvement(result, series, lasting_improvement(metric, points, least))
    is_regressed = result.comparison.status == "regressed" and not result.proven
    if is_regressed and ongoing.is_exceeded(metric, values[-1], band.width):
        return result  # which the level that stands would hide, for as many nights as another one takes to be found
    begin = first_night(ongoing.began, tonight.nights, values)
    if field != metric.field:
        # The level was found in another statistic; users know the metric itself. Before that there may be a third one.
        old = [own for own, at in zip(steady[:begin], values, strict=False) if own and not ongoing.holds(at)]
        new = [own for own in steady[begin:] if own is not None]
        before, after = statistics.median(old or [ongoing.before]), statistics.median(new or [ongoing.after])
        ongoing = ongoing._replace(before=before, after=after)
    night = tonight.nights[begin].own.night
    latest = tonight.nights[max(begin, ongoing.began.latest)].own.night
    since = f"since {night}" + (f" (at the latest {latest})" if latest != night else "")
    update = {"status": "regressed", "baseline": ongoing.before, "change": ongoing.change}
    if all(result.comparison.since != one.own.night for one in tonight.nights[: begin + 1]):
        update["since"] = ""  # the level began before
    comparison = result.comparison.model_copy(update=update)
    reason = _level_reason(metric, ongoing, "regressed", since)
    return MetricResult(comparison, reason, proven=f"p = {ongoing.began.p_value:.0e}")


def _level_reason(metric: Metric, level: NewLevel, became: str, since: str) -> str:
    after, before = (format_value(value, metric.unit) for value in (level.after, level.before))
    return (
        f"{metric.label} {became} by {format_change(level.change)} {since}: {after} against {before} before "
        f"(p = {level.began.p_value:.0e})"
    )


def _with_improvement(result: MetricResult, series: MetricSeries, better: NewLevel | None) -> MetricResult:
    """The same, an improvement where the nights together say that the level is better, and none was reported so."""
    metric, nights = series.metric, series.tonight.nights
    if better is None or result.comparison.status != "passed":
        return result
    if any(night.own.verdict is VerdictStatus.IMPROVED for night in nights[better.began.earliest : -1]):
        return result
    update = {"status": "improved", "baseline": better.before, "change": better.change}
    reason = _level_reason(metric, better, "improved", f"since {nights[better.began.index].own.night}")
    return result._replace(comparison=result.comparison.model_copy(update=update), reason=reason)


def _levels(
    metric: Metric, values: Sequence[float | None], gate: GatePolicy, strays: float
) -> "tuple[Sequence[ChangePoint], float]":
    """The changes of level, and the smallest that counts. `strays`: what nights do by chance, of what is no average."""
    least = max(metric.least(gate.minimum_change), strays)
    if sum(value is not None for value in values) < gate.cold_start:
        return (), least
    from nightbridge.history.changepoints import ChangePointPolicy, find_change_points

    return find_change_points(values, ChangePointPolicy(p_value=gate.p_value, minimum_change=least)), least


def _with_control(
    result: MetricResult, series: MetricSeries, explained: float, excess: float, strays: float
) -> MetricResult:
    """The same, as the pairs of the last good point and tonight's say it.

    Args:
        result: What tonight's runs and history say.
        series: The metric's.
        explained: What takes the cluster out of a value of tonight.
        excess: How far tonight is from its reference, relative, positive for worse.
        strays: Share of the good runs out of the band, of a metric that is no average.
    """
    metric, tonight, comparison = series.metric, series.tonight, result.comparison
    if tonight.control is None:
        return result
    last = tonight.nights[-2].own
    accepted = is_accepted(tonight.evidence.decisions, metric.name, last.order)
    regressed, stood = comparison.status == "regressed", 0.0 if accepted else abs(last.worse.get(metric.name, 0.0))
    if not (regressed or stood or metric.name == ASKS_FOR_PAIRS or any(night.arms for night in tonight.nights)):
        return result._replace(reruns=0)  # no pair is about it, and none is wanted: its noise need not be known
    field, noise, change = series.noise_of_runs()
    seen = Seen(
        regressed=regressed,
        excess=excess,
        stood=stood,
        noise=noise,
        change=change,
        field=field,
        explained=explained,
        reference=comparison.baseline or 0.0,
        width=comparison.threshold,
        strays=strays,
        needed=tonight.evidence.proof,
        as_step_time=series.pairs_say_as_step_time(comparison.threshold) and _is_step_time_proven(tonight),
    )
    ruling = ruling_of(metric, series.gate, tonight.nights, seen)
    worse = comparison.model_copy(update={"status": "regressed"})
    if ruling.kind == "stands":
        reason = result.reason or f"{metric.label} is worse as last night, {format_change(metric.sign * excess)}"
        return MetricResult(worse, reason, proven=result.certainty)
    if ruling.kind == "unpaired":
        away = format_change(metric.sign * excess)
        reason = f"{metric.label} {away}, where the cluster had moved: no pair with both arms says that it is better"
        # What stands is what was proven: tonight's distance would tell the next night of another regression.
        return MetricResult(worse.model_copy(update={"change": last.worse[metric.name]}), reason)
    if ruling.kind == "ask":
        why = rerun_reason(metric, ruling, seen)
        asked = result._replace(reruns=2 * ruling.pairs, why_rerun=why)
        return asked._replace(comparison=worse, reason=result.reason or why) if seen.stood else asked
    if ruling.kind == "quiet":
        return result._replace(reruns=0)
    if ruling.kind == "alone":
        alone = "; not confirmed beside the last good point: no pair has it from both arms"
        return result._replace(reason=result.reason + alone * (regressed and bool(tonight.nights[-1].arms)))
    beside = {"value": ruling.new, "baseline": ruling.control, "change": metric.sign * ruling.proof.difference}
    status = "regressed" if ruling.kind == "worse" else "passed" if seen.regressed else comparison.status
    comparison = comparison.model_copy(update={**beside, "status": status})
    reason = said(metric, tonight.control.night, ruling, seen)
    return MetricResult(
        comparison, reason, moved=ruling.moved, proven=str(ruling.proof), by_pairs=ruling.kind == "worse"
    )


def _is_step_time_proven(tonight: Tonight) -> bool:
    """Whether tonight's pairs prove that the step time is worse."""
    step_time = compare_metric(METRIC_BY_NAME[ASKS_FOR_PAIRS], tonight)
    return step_time is not None and step_time.by_pairs
