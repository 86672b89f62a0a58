"""The result of a swept test: every point with its value and reward, the best first, and what was not run.

It is shown as a table for the terminal, one in Markdown, and a section of the night's page.

A point that did not do all its steps has no reward, whatever it measured until then. CloudAI gives such a point the
reward -1, which is more than any honest one where values count negative. Nor has one that is better than can be
believed, or that computes worse losses than it did: it would be the best for doing less than it should. One that is
only slower than it was has that in its reward.
"""

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from nightbridge.config.scenarios import scenario_toml
from nightbridge.history.rows import facts_of
from nightbridge.models import (
    GOLDEN,
    NO_VALUE,
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
from nightbridge.models.metrics import METRIC_BY_NAME, Metric
from nightbridge.numbers import format_count, format_value
from nightbridge.report.charts import ChosenPoint, choice_chart
from nightbridge.report.tables import STATUS_WORDS, format_choice, format_point, gravest_first, markdown_text
from nightbridge.rules import grid_of
from nightbridge.rules.sweep_points import skipped_parts

if TYPE_CHECKING:
    from rich.table import Table

BEST, SKIPPED = "★", "skipped"

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
    skipped = (*refused, *skipped_parts(test, grid_of(test, limits)))
    result = SweepResult(
        test_id=test.id,
        night=judged[0][0].night,
        metric=metric.name,
        unit=metric.unit,
        reward=reward,
        points=tuple(sorted(points, key=lambda point: math.inf if point.reward is None else -point.reward)),
        skipped=skipped,
        skipped_points=sum(part.points for part in skipped),
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
    found = [verdict.metric(metric) for verdict in verdicts if verdict.status not in NO_VALUE]
    measured = [one.value for one in found if one and one.value is not None]
    value = statistics.median(measured) if len(measured) == len(verdicts) else None
    unfit = next((verdict for verdict in verdicts if _is_incomparable(verdict, METRIC_BY_NAME[metric])), None)
    rewarded = None if value is None or unfit else REWARDS[reward](value)
    label = METRIC_BY_NAME[metric].label
    unrewarded = f"{label} was not measured" if value is None else f"{label} of {value:g} has no {reward} reward"
    reasons = (unfit or gravest).reasons
    return SweepPoint(
        point=point,
        run_keys=tuple(verdict.run_key for verdict in verdicts),
        status=gravest.status,
        value=value,
        reward=rewarded,
        reason="; ".join(reasons) or unrewarded if rewarded is None else "",
    )


def _is_incomparable(verdict: Verdict, metric: Metric) -> bool:
    """Whether what a run measured cannot be believed, or it computes worse than it did what is not compared here."""
    if verdict.status is VerdictStatus.REGRESSED:
        return bool(facts_of(verdict.worse) & {GOLDEN, "losses"} - {metric.fact})
    return verdict.status is VerdictStatus.SUSPICIOUS


class SweepRow(NamedTuple):
    """One line of every table: a point that was run, or a part of the sweep that was not."""

    point: str
    verdict: str
    value: str
    reward: str
    why: str
    is_best: bool


def best_line(result: SweepResult) -> str:
    """The best point in one sentence, and how many others there are."""
    counts = f"{format_count(len(result.points), 'point')} run, {result.skipped_points:,} skipped"
    if result.best is None:
        return f"no point of the sweep has a {METRIC_BY_NAME[result.metric].label} to compare ({counts})"
    value = format_value(result.best.value, result.unit)
    return f"best point: {format_point(result.best.point)}, {METRIC_BY_NAME[result.metric].label} {value} ({counts})"


def sweep_rows(result: SweepResult) -> tuple[SweepRow, ...]:
    """Every point, the best first, and then what was skipped: for each rule its first point, and the reason."""
    return (
        *(_point_row(point, point is result.best) for point in result.points),
        *(_skipped_row(part) for part in result.skipped),
    )


def sweep_table(result: SweepResult) -> "Table":
    """The points as a table for a terminal; `best_line` goes below it."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    table.add_column("point", overflow="fold")
    table.add_column("verdict", no_wrap=True)
    for heading in (_value_heading(result), f"reward\n{result.reward}"):
        table.add_column(heading.replace(", ", "\n"), justify="right", no_wrap=True)
    table.add_column("why", overflow="fold")
    for row in sweep_rows(result):
        style = "bold" if row.is_best else ""
        # Text of a file or a rule is Text, never rich's markup.
        table.add_row(*(Text(text, style) for text in (row.point, row.verdict, row.value, row.reward, row.why)))
    return table


def sweep_markdown(result: SweepResult) -> str:
    """The best point and the table of all of them, in Markdown."""
    header = ("point", "verdict", _value_heading(result), f"reward ({result.reward})", "why")
    lines = [header, ("---",) * len(header)]
    lines += [
        tuple(markdown_text(text) for text in (row.point, row.verdict, row.value, row.reward, row.why))
        for row in sweep_rows(result)
    ]
    table = "".join(f"| {' | '.join(line)} |\n" for line in lines)
    return f"**{markdown_text(result.test_id)}**: {markdown_text(best_line(result))}\n\n{table}"


def sweep_section(result: SweepResult) -> dict[str, object]:
    """What the page shows: the sentence, the table, and the metric over each axis that has several values."""
    return {
        "result": result,
        "headline": best_line(result),
        "value_heading": _value_heading(result),
        "rows": sweep_rows(result),
        "charts": sweep_charts(result),
    }


def sweep_charts(result: SweepResult) -> list[tuple[str, str]]:
    """Each axis that has several values, and the drawing of the metric over it."""
    measured = [point for point in result.points if point.value is not None and point.reward is not None]
    drawn = []
    for name in dict.fromkeys(name for point in measured for name in point.point):
        values = {format_choice(point.point[name]): point.point[name] for point in measured}
        # Numbers by size, then the texts.
        size = {text: float(value) if isinstance(value, int | float) else math.inf for text, value in values.items()}
        choices = sorted(values, key=lambda text: (size[text], text))
        if len(choices) < 2:
            continue
        points = [
            ChosenPoint(choices.index(format_choice(point.point[name])), point.value or 0.0, point is result.best)
            for point in measured
        ]
        label = name.rpartition(".")[2]
        drawn.append((label, choice_chart(points, choices, label, _value_heading(result))))
    return drawn


def _point_row(point: SweepPoint, is_best: bool) -> SweepRow:
    words = STATUS_WORDS[point.status]
    return SweepRow(
        point=f"{BEST} {format_point(point.point)}" if is_best else format_point(point.point),
        verdict=f"{words.symbol} {words.label}",
        value=format_value(point.value),
        reward=format_value(point.reward),
        why=point.reason,
        is_best=is_best,
    )


def _skipped_row(part: SkippedPart) -> SweepRow:
    where = format_point(part.point)
    return SweepRow(
        point=f"{where}, first of {part.points:,} points" if where and part.points > 1 else where or "all",
        verdict=SKIPPED,
        value="–",
        reward="–",
        why=f"{part.reason} [{part.rule}]" if part.rule else part.reason,
        is_best=False,
    )


def _value_heading(result: SweepResult) -> str:
    label = METRIC_BY_NAME[result.metric].label
    return f"{label}, {result.unit}" if result.unit else label
