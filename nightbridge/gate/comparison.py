"""One metric of a run against its history.

The night's runs are compared with the band of the last good ones, with floors and ceilings, and with all of the
history: `changepoints` finds the changes of level. Those are walked from the oldest on. The level before the first is
what the test is held to, and a better level takes its place. While the last level is worse than that by more than the
smallest change that counts, the regression persists, however many nights old it is: it ends when the level is back, or
when a user decides about it.

A suspicious result is run again before it is believed. All runs of a night worse than the band: confirmed. Most of
them not: the first was a single bad run, which is reported and raises no alert. Most of them, but not all: unstable.
Runs that disagree are repeated once more before that verdict.
"""

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

from nightbridge.gate.decisions import Decision, in_force, is_accepted, is_left_out, passed_by_ended
from nightbridge.gate.nodes import MIN_NIGHTS
from nightbridge.history.metrics import beyond_limits, format_change, format_percent, format_value, measured
from nightbridge.history.nightly_values import (
    Band,
    Night,
    adjusted,
    band_of,
    canary_values,
    night_value,
    run_value,
)
from nightbridge.history.reading import is_good
from nightbridge.history.rows import HistoryRow
from nightbridge.models import Comparison, ComparisonStatus, GatePolicy, Limits, MetricName, RunRecord, TestDefinition
from nightbridge.models.metrics import METRIC_BY_NAME, Metric

if TYPE_CHECKING:
    from nightbridge.history.changepoints import ChangePoint
    from nightbridge.history.modes import Modes

CHANGED_WORDS: dict[ComparisonStatus, str] = {
    "regressed": "regressed",
    "improved": "improved",
    "suspicious": "is better than can be believed, not a baseline until it is accepted,",
}

UNKNOWN_NODES = 0.08
"""By how much nodes may be apart that too few nights ran on, where all the others ran on known ones."""

CERTAINLY_BACK = 3.0
"""A night this many standard deviations on the good side of the worse level is taken to be back."""


class ReferenceResult(NamedTuple):
    """What golden values or a reference run say: whether the data are whole, whether they are as good, and why not.

    `values`: what the golden run measured, by metric and in its unit. `run_key`: that of the stored run that was used.
    """

    whole: bool
    as_good: bool
    reasons: tuple[str, ...] = ()
    values: Mapping[MetricName, float] = {}
    run_key: str | None = None


class NightlyParity(NamedTuple):
    """How tonight's losses follow those of the last good nights: how many runs there are and how many do not.

    `reason`: how far the first of those is away; empty where all follow. `is_higher`: whether its loss is too high, or
    uneven, rather than too low throughout.
    """

    runs: int
    apart: int
    reason: str = ""
    is_higher: bool = True


class Evidence(NamedTuple):
    """What is known besides the run and its history.

    `contract`: what the cluster owes the test. `canary`: rows of the test whose pins never move, on the same cluster.
    `decisions`: users' decisions about the series. `golden`: what golden values say, where the test names some.
    `parity`: how the losses follow the last good nights', where there are enough of those. `split`: what started the
    series, and how it compares with the one before.
    """

    contract: Mapping[MetricName, Limits] = {}
    canary: Sequence[HistoryRow] = ()
    decisions: Sequence[Decision] = ()
    golden: ReferenceResult | None = None
    parity: NightlyParity | None = None
    split: tuple[str, ...] = ()


class Tonight(NamedTuple):
    """The run that is judged and everything that it is compared with. `nights`: oldest first, tonight last."""

    record: RunRecord
    nights: tuple[Night, ...]
    evidence: Evidence

    @property
    def gate(self) -> GatePolicy:
        """The test's policy."""
        return self.record.spec.test.gate


class Agreement(NamedTuple):
    """How many of a night's runs are worse than the band."""

    runs: int
    worse: int

    @property
    def is_split(self) -> bool:
        """Whether some of them are and some are not."""
        return 0 < self.worse < self.runs


class MetricResult(NamedTuple):
    """The gate's result for one metric: its comparison, the reason, and how many further runs are wanted."""

    comparison: Comparison
    reason: str = ""
    agreement: Agreement | None = None
    reruns: int = 0


class OngoingRegression(NamedTuple):
    """A level that is worse: the change that began it, and both levels in the metric's unit."""

    began: "ChangePoint"
    before: float
    after: float

    @property
    def change(self) -> float:
        """Relative, signed."""
        return (self.after - self.before) / abs(self.before) if self.before else 0.0


def agreement_of(sides: Sequence[int]) -> Agreement:
    """Count the runs.

    Args:
        sides: One per run: positive when it is worse than the band, else zero or negative.
    """
    return Agreement(len(sides), sum(side > 0 for side in sides))


def reruns_wanted(agreement: Agreement, confirm: int) -> int:
    """How many runs besides its own a night should have.

    Args:
        agreement: Of the runs that it has.
        confirm: The policy: how many a suspicious result is given, and how many more when they disagree.
    """
    if not agreement.worse:
        return 0
    undecided = agreement.is_split and 2 * agreement.worse > agreement.runs > confirm
    return 2 * confirm if undecided else confirm


def ongoing_regression(
    metric: Metric, points: "Sequence[ChangePoint]", minimum_change: float
) -> OngoingRegression | None:
    """The regression that the last level is, if it is one.

    Args:
        metric: Its direction counts.
        points: The changes of level, oldest first.
        minimum_change: The smallest relative change that counts.
    """
    if not points:
        return None
    held_to, began = points[0].before, None
    for point in points:
        change = (point.after - held_to) / abs(held_to) if held_to else 0.0
        if abs(change) >= minimum_change and metric.worse(change):
            began = began or point
        else:
            began = None
            if abs(change) >= minimum_change:
                held_to = point.after
    return OngoingRegression(began, held_to, points[-1].after) if began else None


def is_back(metric: Metric, ongoing: OngoingRegression, value: float, noise: float) -> bool:
    """Whether one night says that the worse level is over, before a new level is established."""
    gained = ongoing.after - value if metric.lower_is_better else value - ongoing.after
    half = abs(ongoing.after - ongoing.before) / 2
    return gained > max(half, CERTAINLY_BACK * noise * abs(ongoing.after))


def is_required(metric: Metric, test: TestDefinition, value: float | None, earlier: Sequence[float]) -> bool:
    """Whether a run must have a metric, or has it: once an earlier run measured it, later ones have to."""
    always = metric.always and (test.has_launcher or not metric.launcher_only)
    return always or metric.name in test.gate.required or value is not None or bool(earlier)


def compare_metric(metric: Metric, tonight: Tonight) -> MetricResult | None:
    """Compare one metric of the run with its history; None where the metric is none of this test's."""
    decisions = in_force(tonight.evidence.decisions, metric.name)
    past = tuple(
        None if night.own.resumed or is_left_out(decisions, metric.name, night.own.night, night.own.verdict) else night
        for night in tonight.nights[:-1]
    )
    series = _Series(metric, tonight, past)
    values = series.past_values()
    known = [value for value in values if value is not None]
    own = measured(metric, tonight.record.summary)
    if not is_required(metric, tonight.record.spec.test, own, known):
        return None
    if own is None:
        return compare_with_band(
            metric, None, Band(known[-1] if known else None, metric.threshold(series.gate), 0, 0.0), 0
        )
    runs = [value for run in tonight.nights[-1].runs if (value := _tonights_value(run, metric)) is not None] or [own]
    steady = series.without_cluster([*values, statistics.median(runs)])
    good = [
        index
        for index, night in enumerate(past)
        if night is not None
        and steady[index] is not None
        and (is_good(night.own) or is_accepted(decisions, metric.name, night.own.night))
        and not passed_by_ended(decisions, metric.name, night.own.night)
    ]
    singles = series.first_runs(values, steady)
    band = band_of(
        metric,
        series.gate,
        [value for index in good if (value := steady[index]) is not None],
        [singles[index] for index in good],
    )
    result = _compare_runs(series, runs, _ratio(statistics.median(runs), steady[-1]), band)
    result = _with_parity(_with_limits(result, series, runs), series)
    return _with_ongoing(result, series, steady, band)


def modes_of(tonight: Tonight) -> "Modes | None":
    """The two speeds that the test's runs fall into, without what the canary and the nodes explain; None for one."""
    from nightbridge.history.modes import find_modes

    metric = METRIC_BY_NAME["step_time"]
    nights = tuple(None if night.own.resumed else night for night in tonight.nights)
    series = _Series(metric, tonight, nights)
    return find_modes(series.without_cluster([run_value(night.own, metric) if night else None for night in nights]))


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


@dataclass(frozen=True)
class _Series:
    """A metric of tonight's run and of the nights before it; None for a night that does not count."""

    metric: Metric
    tonight: Tonight
    past: tuple[Night | None, ...]

    @property
    def gate(self) -> GatePolicy:
        return self.tonight.gate

    @cached_property
    def canary(self) -> Sequence[float | None]:
        if not self.metric.follows_cluster:
            return ()
        return canary_values(self.tonight.nights, self.tonight.evidence.canary, self.metric)

    def past_values(self, field: str = "") -> list[float | None]:
        return [None if night is None else night_value(night, self.metric, field) for night in self.past]

    def without_cluster(self, values: Sequence[float | None]) -> list[float | None]:
        """The values of all nights without what the canary and the nodes explain."""
        return adjusted(self.metric, values, self.tonight.nights, self.canary)

    def first_runs(
        self, values: Sequence[float | None], steady: Sequence[float | None], field: str = ""
    ) -> list[float | None]:
        """Each past night's first run alone, adjusted as the night's value was."""
        return [
            None if night is None else _times(run_value(night.own, self.metric, field), _ratio(value, adjusted_value))
            for night, value, adjusted_value in zip(self.past, values, steady, strict=False)
        ]


def _tonights_value(run: HistoryRow, metric: Metric) -> float | None:
    # The run that is judged has no verdict yet; its outcome is the verdict's business.
    return measured(metric, run.summary) if run.repeat == 0 else run_value(run, metric)


def _status(metric: Metric, value: float | None, band: Band) -> ComparisonStatus:
    if value is None:
        return "missing"
    if band.reference is None:
        return "no_baseline"
    side = band.side(value)
    if not side:
        return "passed"
    if (side > 0) == metric.lower_is_better:
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


def _compare_runs(series: _Series, runs: Sequence[float], explained: float, band: Band) -> MetricResult:
    """Compare tonight's runs with the band: what they have in common counts."""
    metric, gate, median = series.metric, series.gate, statistics.median(runs)
    band = band._replace(width=max(band.width, _unproven(series, runs, band)))
    result = compare_with_band(metric, median * explained, band, min(band.nights, gate.baseline_runs))
    comparison = result.comparison.model_copy(update={"value": median})
    agreement = agreement_of([band.side(value * explained) * (1 if metric.lower_is_better else -1) for value in runs])
    reason, counted = result.reason, f"in {agreement.worse} of {agreement.runs} runs"
    if comparison.status == "regressed" and metric.least_change and agreement.is_split:
        # A few slow steps are in some runs and not in others: only what all runs of a night have is the code's.
        comparison = comparison.model_copy(update={"status": "passed"})
    if comparison.status == "regressed":
        reason += f", {counted}" if len(runs) > 1 else ""
    elif agreement.worse:
        first = format_value(runs[0], metric.unit)
        reason = f"{metric.label} was out of its band {counted} of this night, the first at {first}: no regression"
    return MetricResult(comparison, reason, agreement, reruns_wanted(agreement, gate.confirm))


def _unproven(series: _Series, runs: Sequence[float], band: Band) -> float:
    """How far a night may be away that history says too little about: as its own runs are apart, or as nodes may be."""
    first_nights = series.gate.cold_start
    spread = (max(runs) - min(runs)) / abs(min(runs)) if band.nights < first_nights and min(runs) else 0.0
    nodes = Counter(night.own.nodes for night in series.tonight.nights[:-1])
    tonights, usual = nodes[series.tonight.nights[-1].own.nodes], max(nodes.values(), default=0)
    is_unknown = series.metric.follows_cluster and tonights < MIN_NIGHTS <= usual
    return max(spread, UNKNOWN_NODES * is_unknown)


def _with_limits(result: MetricResult, series: _Series, runs: Sequence[float]) -> MetricResult:
    """The same, a regression where tonight's median breaks a floor or ceiling."""
    metric, tonight, value = series.metric, series.tonight, statistics.median(runs)
    for whose, limits in (
        ("the test's", series.gate.limits.get(metric.name)),
        (f"what {tonight.record.job.cluster} owes it", tonight.evidence.contract.get(metric.name)),
    ):
        if limits and (broken := beyond_limits(metric, value, limits)):
            agreement = agreement_of([bool(beyond_limits(metric, run, limits)) for run in runs])
            return MetricResult(
                result.comparison.model_copy(update={"status": "regressed"}),
                f"{broken}, {whose}: {format_value(value, metric.unit)}",
                agreement,
                reruns_wanted(agreement, series.gate.confirm),
            )
    return result


def _with_parity(result: MetricResult, series: _Series) -> MetricResult:
    """The same, of the loss curve by what all of its iterations say, of which a few anchors see little."""
    parity = series.tonight.evidence.parity
    if series.metric.name != "loss_curve" or parity is None or result.comparison.status in ("regressed", "suspicious"):
        return result
    agreement = Agreement(parity.runs, parity.apart)
    worse = 2 * parity.apart > parity.runs
    if not worse or not parity.is_higher:
        return result._replace(reason=parity.reason or result.reason, agreement=agreement)
    counted = f", in {parity.apart} of {parity.runs} runs" if parity.runs > 1 else ""
    return MetricResult(
        result.comparison.model_copy(update={"status": "regressed"}),
        f"{parity.reason}{counted}",
        agreement,
        reruns_wanted(agreement, series.gate.confirm),
    )


def _with_ongoing(result: MetricResult, series: _Series, steady: Sequence[float | None], band: Band) -> MetricResult:
    """The same, a regression where the nights together say that the level is worse; and the runs that are wanted."""
    metric, tonight = series.metric, series.tonight
    if tonight.record.spec.repeat or result.comparison.status == "suspicious":
        return result._replace(reruns=0)
    field, values = _steadiest(series, steady)
    ongoing = _ongoing(metric, values, tonight.gate, band.width if metric.least_change else 0.0)
    value = steady[-1]
    if ongoing is None or value is None or is_back(metric, ongoing, value, band.noise or 0.0):
        return result._replace(reruns=max(result.reruns, _reruns_for_noise(series, field, values)))
    if field != metric.field:
        # The level was found in another statistic; the numbers that users know are those of the metric itself.
        begin = ongoing.began.index
        before, after = ([known for known in part if known is not None] for part in (steady[:begin], steady[begin:]))
        ongoing = ongoing._replace(
            before=statistics.median(before or [ongoing.before]), after=statistics.median(after or [ongoing.after])
        )
    night = tonight.nights[ongoing.began.index].own.night
    latest = tonight.nights[ongoing.began.latest].own.night
    since = f"since {night}" + (f" (at the latest {latest})" if latest != night else "")
    comparison = result.comparison.model_copy(
        update={"status": "regressed", "baseline": ongoing.before, "change": ongoing.change}
    )
    reason = (
        f"{metric.label} regressed by {format_change(ongoing.change)} {since}: "
        f"{format_value(ongoing.after, metric.unit)} against {format_value(ongoing.before, metric.unit)} before "
        f"(p = {ongoing.began.p_value:.0e})"
    )
    return MetricResult(comparison, reason)


def _steadiest(series: _Series, steady: Sequence[float | None]) -> tuple[str, Sequence[float | None]]:
    """The statistic of the metric that reveals a change soonest, without canary and nodes, and which it is."""
    from nightbridge.history.changepoints import steadiest

    metric = series.metric
    choices = {metric.field: steady}
    for field in metric.statistics:
        own = night_value(series.tonight.nights[-1], metric, field)
        choices[field] = series.without_cluster([*series.past_values(field), own])
    chosen = steadiest(choices)
    return chosen, choices[chosen]


def _ongoing(
    metric: Metric, values: Sequence[float | None], gate: GatePolicy, strays: float
) -> OngoingRegression | None:
    """The worse level, if there is one. `strays`: what single nights do by chance, in metrics that are no averages."""
    if sum(value is not None for value in values) < gate.cold_start:
        return None
    from nightbridge.history.changepoints import ChangePointPolicy, find_change_points

    least = max(metric.least(gate.minimum_change), strays)
    policy = ChangePointPolicy(p_value=gate.p_value, minimum_change=least)
    return ongoing_regression(metric, find_change_points(values, policy), least)


def _reruns_for_noise(series: _Series, field: str, steady: Sequence[float | None]) -> int:
    """Further runs that the test for changes of level wants: of a night far from the others, and of a noisy test.

    Both are computed from the statistic that the test for changes of level looks at, `field` of the summary.
    """
    metric, tonight = series.metric, series.tonight
    if metric.name != "step_time" or not series.gate.confirm:
        return 0
    from nightbridge.history.changepoints import reruns_needed

    own = measured(metric._replace(field=field), tonight.record.summary)
    first = _times(own, _ratio(night_value(tonight.nights[-1], metric, field), steady[-1]))
    return reruns_needed(
        float("nan") if first is None else first,
        steady[:-1],
        series.first_runs(series.past_values(field), steady, field),
        usual=series.gate.confirm,
        most=3 * series.gate.confirm,
    )


def _ratio(raw: float | None, steady: float | None) -> float:
    """What a value has to be multiplied with to have the cluster and the nodes taken out."""
    return steady / raw if raw and steady is not None else 1.0


def _times(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor
