"""What became of a swept test: every point with its value and reward, the best first, and what was not run.

A point that did not do all its steps has no reward, whatever it measured until then. CloudAI gives such a point the
reward -1, which is more than any honest one where values count negative.
"""

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from nightbridge.config.toml_writer import scenario_toml
from nightbridge.history.metrics import METRIC_BY_NAME
from nightbridge.history.nightly_values import NO_VALUE
from nightbridge.models import (
    ClusterLimits,
    MetricName,
    RewardKind,
    RunSpec,
    Scenario,
    SkippedPart,
    SweepPoint,
    SweepPolicy,
    SweepResult,
    TestDefinition,
    Verdict,
    VerdictStatus,
)
from nightbridge.report.page import gravest_first
from nightbridge.rules import grid_of
from nightbridge.rules.sweeps import skipped_parts

REWARDS: Mapping[RewardKind, Callable[[float], float | None]] = {
    "inverse": lambda value: 1 / value if value else None,
    "negative": lambda value: -value,
    "identity": lambda value: value,
}
"""CloudAI's rewards; zero has no inverse."""


def reward_kind(metric: MetricName, requested: RewardKind | None) -> RewardKind:
    """The reward that a test requests, else the one under which a better value of the metric is more.

    Where less is better it is CloudAI's default, the inverse, for what is always positive; a loss may be anything.
    """
    known = METRIC_BY_NAME[metric]
    if requested is not None:
        return requested
    if not known.lower_is_better:
        return "identity"
    return "inverse" if known.must_be_positive else "negative"


def sweep_results(
    scenario: Scenario, runs: Iterable[RunSpec], verdicts: Iterable[Verdict], limits: ClusterLimits | None = None
) -> tuple[SweepResult, ...]:
    """What became of each swept test of a night.

    Args:
        scenario: The scenario whose tests were run.
        runs: The night's own runs, confirming ones not among them.
        verdicts: Their verdicts, and others.
        limits: The cluster, as far as it had a part in which points were run.

    """
    by_key = {verdict.run_key: verdict for verdict in verdicts}
    by_test: dict[str, list[tuple[RunSpec, Verdict]]] = {}
    for run in runs:
        if run.run_key in by_key:
            by_test.setdefault(run.test.id, []).append((run, by_key[run.run_key]))
    swept = (test for test in scenario.tests if test.axes or test.drawn)
    return tuple(_result(test, judged, limits) for test in swept if (judged := by_test.get(test.id)))


def _result(
    test: TestDefinition, judged: Sequence[tuple[RunSpec, Verdict]], limits: ClusterLimits | None
) -> SweepResult:
    metric = METRIC_BY_NAME[test.sweep.metric]
    reward = reward_kind(metric.name, test.sweep.reward)
    points: list[SweepPoint] = []
    refused: list[SkippedPart] = []
    for point, verdicts in _by_point(judged):
        gravest = gravest_first(verdicts)[0]
        if gravest.status is VerdictStatus.INVALID:
            refused.append(SkippedPart(point=point, points=1, rule="", reason="; ".join(gravest.reasons)))
        else:
            points.append(_swept_point(point, verdicts, gravest, metric.name, reward))
    skipped = skipped_parts(test, grid_of(test, limits))
    result = SweepResult(
        test_id=test.id,
        night=judged[0][0].night,
        metric=metric.name,
        unit=metric.unit,
        reward=reward,
        points=tuple(sorted(points, key=lambda point: math.inf if point.reward is None else -point.reward)),
        skipped=(*refused, *skipped.parts),
        skipped_points=len(refused) + skipped.points,
        note=skipped.note,
    )
    if result.best is None:
        return result
    ran = next(run.test for run, _ in judged if run.sweep_point == result.best.point)
    best = ran.model_copy(update={"dependencies": (), "sweep": SweepPolicy()})
    alone = Scenario(name=f"{test.id} best", tests=(best,))
    return result.model_copy(update={"configuration": scenario_toml(alone)})


def _by_point(judged: Sequence[tuple[RunSpec, Verdict]]) -> list[tuple[dict[str, Any], list[Verdict]]]:
    """The verdicts of each point, in the order in which the points were written."""
    found: dict[str, tuple[dict[str, Any], list[Verdict]]] = {}
    for run, verdict in judged:
        found.setdefault(repr(run.sweep_point), (run.sweep_point, []))[1].append(verdict)
    return list(found.values())


def _swept_point(
    point: dict[str, Any], verdicts: Sequence[Verdict], gravest: Verdict, metric: MetricName, reward: RewardKind
) -> SweepPoint:
    values = [_value(verdict, metric) for verdict in verdicts]
    measured = [value for value in values if value is not None]
    value = statistics.median(measured) if len(measured) == len(values) else None
    rewarded = None if value is None else REWARDS[reward](value)
    label = METRIC_BY_NAME[metric].label
    unrewarded = f"{label} was not measured" if value is None else f"{label} of {value:g} has no {reward} reward"
    return SweepPoint(
        point=point,
        run_keys=tuple(verdict.run_key for verdict in verdicts),
        status=gravest.status,
        value=value,
        reward=rewarded,
        reason="; ".join(gravest.reasons) or unrewarded if rewarded is None else "",
    )


def _value(verdict: Verdict, metric: MetricName) -> float | None:
    if verdict.status in NO_VALUE:
        return None
    return next((item.value for item in verdict.comparisons if item.metric == metric), None)
