"""What is judged: tonight's run, the nights before it, and each metric's values without what the cluster explains."""

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from nightbridge.gate.control_arm import (
    ASKS_FOR_PAIRS,
    PROOF,
    UNKNOWN_SIGMAS,
    change_looked_for,
    pair_differences,
)
from nightbridge.gate.decisions import Decision, is_left_out
from nightbridge.gate.determinism import Numerics
from nightbridge.history.nightly_values import (
    NightRuns,
    adjusted,
    canary_values,
    night_value,
    night_values,
    run_value,
    values_of,
)
from nightbridge.history.rows import HistoryRow, measured
from nightbridge.models import GatePolicy, Limits, MetricName, RunRecord
from nightbridge.models.metrics import METRIC_BY_NAME, METRICS, Metric, is_step_times
from nightbridge.models.verdict import ReferenceResult
from nightbridge.numbers import format_count, format_percent, format_value

NEW_SHARE = 7
"""So many nights without a fast run are no longer the slow mode's usual share."""


class NightlyParity(NamedTuple):
    """How tonight's losses follow those of the last good nights: how many runs there are and how many do not.

    `reason`: how far the first of those is away, or why nobody knows; empty where all follow. `is_higher`: whether its
    loss is too high, also only at its end, or uneven, rather than too low throughout.
    """

    runs: int
    apart: int
    reason: str = ""
    is_higher: bool = True


class Evidence(NamedTuple):
    """What is known besides the run and its history.

    `contract`: what the cluster owes the test. `canary`: rows of the test whose pins never move, on the same cluster.
    `decisions`: users' decisions about the series. `golden`: what golden values say, where the test names some.
    `parity`: how the losses follow the last good nights', where there are enough of those. `numerics`: whether they are
    the same bit for bit, of a deterministic test. `split`: what started the series, and how it compares with the one
    before. `proof`: the log-likelihood ratio that proves a regression.
    """

    contract: Mapping[MetricName, Limits] = {}
    canary: Sequence[HistoryRow] = ()
    decisions: Sequence[Decision] = ()
    golden: ReferenceResult | None = None
    parity: NightlyParity | None = None
    numerics: Numerics | None = None
    split: tuple[str, ...] = ()
    proof: float = PROOF


@dataclass(frozen=True)
class Tonight:
    """The run that is judged and everything that it is compared with. `nights`: oldest first, tonight last.

    `control`: the last good point that runs beside it; None where there is none, or none is wanted.
    """

    record: RunRecord
    nights: tuple[NightRuns, ...]
    evidence: Evidence
    control: HistoryRow | None = None

    @property
    def gate(self) -> GatePolicy:
        """The test's policy."""
        return self.record.spec.test.gate

    def with_move(self, metric: str, moved: float) -> "Tonight":
        """The same with another place of a metric's good level."""
        last = self.nights[-1]
        own = last.own.model_copy(update={"moved": last.own.moved | {metric: moved}})
        return replace(self, nights=(*self.nights[:-1], replace(last, own=own)))

    @cached_property
    def past(self) -> tuple[NightRuns | None, ...]:
        """The nights before, None for one that counts for no metric whatever was decided."""
        return tuple(None if night.own.resumed else night for night in self.nights[:-1])

    @cached_property
    def _past_undecided(self) -> tuple[NightRuns | None, ...]:
        return self._past_decided("", ())

    def past_of(self, metric: str, decisions: Sequence[Decision]) -> tuple[NightRuns | None, ...]:
        """The same for one metric, by the decisions about it: most metrics have none, and then the same nights."""
        return self._past_decided(metric, decisions) if decisions else self._past_undecided

    def _past_decided(self, metric: str, decisions: Sequence[Decision]) -> tuple[NightRuns | None, ...]:
        return tuple(
            None if night is None or is_left_out(decisions, metric, night.own.order, night.own.verdict) else night
            for night in self.past
        )

    @cached_property
    def repeated(self) -> tuple[int, ...]:
        """Which of the nights before have more runs than their own, or count another."""
        return tuple(at for at, night in enumerate(self.nights[:-1]) if night.runs != (night.own,))

    @cached_property
    def nights_on(self) -> Counter[str]:
        """How many of the nights before ran on which nodes."""
        return Counter(night.own.nodes for night in self.nights[:-1])


@dataclass(frozen=True)
class MetricSeries:
    """A metric of tonight's run and of the nights before it; None for a night that does not count."""

    metric: Metric
    tonight: Tonight
    past: tuple[NightRuns | None, ...]

    @property
    def gate(self) -> GatePolicy:
        """The test's policy."""
        return self.tonight.gate

    @cached_property
    def canary(self) -> Sequence[float | None]:
        """Each night's value of the canary; none where it tells nothing of this metric."""
        if not self.metric.follows_cluster:
            return ()
        return canary_values(self.tonight.nights, self.tonight.evidence.canary, self.metric)

    @cached_property
    def _past_values(self) -> dict[str, list[float | None]]:
        return {}

    def past_values(self, field: str = "") -> list[float | None]:
        """Each past night's value, of the metric or of another field that measures the same."""
        field = field or self.metric.field
        if field not in self._past_values:
            self._past_values[field] = night_values(self.past, self.metric, field)
        return self._past_values[field]

    @cached_property
    def runs(self) -> list[float]:
        """What tonight's runs measured; that which is judged has no verdict yet, so whatever its own is."""
        own = measured(self.metric, self.tonight.record.summary)
        further = values_of(self.tonight.nights[-1].runs[1:], self.metric)
        return further if own is None else [own, *further]

    @cached_property
    def steady(self) -> list[float | None]:
        """The values of all nights, tonight's median last, without what the canary and the nodes explain."""
        return self.without_cluster([*self.past_values(), statistics.median(self.runs)])

    @cached_property
    def steadiest(self) -> tuple[str, Sequence[float | None]]:
        """The statistic of the metric that reveals a change soonest, and its values as `steady` has them."""
        from nightbridge.history.noise import steadiest

        choices = {self.metric.field: self.steady}
        for field in self.metric.statistics:
            own = night_value(self.tonight.nights[-1], self.metric, field)
            choices[field] = self.without_cluster([*self.past_values(field), own])
        chosen = steadiest(choices)
        return chosen, choices[chosen]

    def without_cluster(self, values: Sequence[float | None]) -> list[float | None]:
        """The values of all nights without what the canary and the nodes explain."""
        return adjusted(self.metric, values, self.tonight.nights, self.canary)

    def first_runs(self, field: str, steady: Sequence[float | None]) -> list[float | None]:
        """Each past night's first run alone, adjusted as the night's value of the field was."""
        values = self.past_values(field)
        # The value of most nights is their only run's.
        firsts = [level if value else value for value, level in zip(values, steady, strict=False)]
        for at in self.tonight.repeated:
            night = self.past[at]
            own = run_value(night.own, self.metric, field) if night else None
            firsts[at] = None if own is None else own * ratio(values[at], steady[at])
        return firsts

    def runs_before_decision(self, field: str) -> list[float]:
        """What the first runs of the good nights measured that decisions have left out; their noise still holds."""
        everything = MetricSeries(self.metric, self.tonight, self.tonight.past)
        steady = everything.without_cluster([*everything.past_values(field), None])
        firsts = zip(everything.first_runs(field, steady), self.tonight.past, self.past, strict=True)
        return [
            value
            for value, night, counted in firsts
            if value is not None and night is not None and night.is_good and counted is None
        ]

    def noise_of_runs(self) -> tuple[str, float, float]:
        """The statistic of the metric that pairs are compared by, its single runs' noise, and the change looked for."""
        from nightbridge.history.noise import noise_of_runs

        metric, gate = self.metric, self.gate
        field, values = self.steadiest
        every = zip(self.first_runs(field, values), self.past, strict=True)
        known = [value for value, night in every if value is not None and night and night.is_good]
        if len(known) < gate.cold_start:
            known = max(known, self.runs_before_decision(field), key=len)
        noise = noise_of_runs(known, metric.threshold(gate) / UNKNOWN_SIGMAS, gate.cold_start)
        is_known = len(known) >= gate.cold_start
        return field, noise, change_looked_for(metric, gate) if is_known else metric.threshold(gate)

    def pairs_say_as_step_time(self, width: float) -> bool:
        """Whether tonight's pairs say of the metric nothing but what they say of the step time.

        Each of them is out of the band, `width` wide, for the worse; their mean is what the step time makes of it.
        """
        metric, night = self.metric, self.tonight.nights[-1]
        own, steps = (pair_differences(night, one) for one in (metric, METRIC_BY_NAME[ASKS_FOR_PAIRS]))
        if not own or not steps or min(own) <= width:
            return False
        return is_step_times(metric.name, metric.sign * statistics.fmean(own), statistics.fmean(steps))


def slow_mode(tonight: Tonight, worse: Set[str], too_good: Set[str] = frozenset()) -> str:
    """Why a test has two speeds, whatever its code; empty where it has one, and where that does not explain tonight.

    It does not where something else is worse than speeds, by the metrics that are, a run is slower than the slow mode,
    or no run of a week is fast; nor, of what is too good to be believed, the other way round. What the canary and the
    nodes explain is taken out where the modes are looked for.
    """
    from nightbridge.history.noise import find_modes

    speeds = {"slow_steps", "tail_slowdown", *(metric.name for metric in METRICS if metric.follows_cluster)}
    if (worse | too_good) - speeds:
        return ""
    step_time = METRIC_BY_NAME["step_time"]
    own = tuple(None if night.own.resumed else night for night in tonight.nights)
    values = [run_value(night.own, step_time) if night else None for night in own]
    modes = find_modes(MetricSeries(step_time, tonight, own).without_cluster(values))
    if modes is None:
        return ""
    nights = [[measured(step_time, run.summary) or 0.0 for run in night.runs] for night in tonight.nights]
    is_slow = [value >= modes.edge for night in nights[-NEW_SHARE:] for value in night]
    width = step_time.threshold(tonight.gate)
    if worse and (all(is_slow) or min(nights[-1]) > modes.slow * (1 + width)):
        return ""
    if too_good and (not any(is_slow) or min(nights[-1]) < modes.fast * (1 - width)):
        return ""
    slow = sum(value >= modes.edge for value in nights[-1])
    return (
        f"{slow} of {format_count(len(nights[-1]), 'run')} in the slow mode, {format_value(modes.slow, 's')} against "
        f"{format_value(modes.fast, 's')}, as {format_percent(round(modes.share, 2))} of the last nights: no commit is "
        "to blame until that share changes"
    )


def ratio(raw: float | None, steady: float | None) -> float:
    """What a value has to be multiplied with to have the cluster and the nodes taken out."""
    return steady / raw if raw and steady is not None else 1.0
