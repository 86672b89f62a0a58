"""Reports of a sweep: a table for the terminal, one in Markdown, and what the night's page shows of it."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from nightbridge.history.metrics import (
    METRIC_BY_NAME,
    format_choice,
    format_count,
    format_point,
    format_value,
    markdown_text,
)
from nightbridge.models import SkippedPart, SweepPoint, SweepResult
from nightbridge.report.charts import ChosenPoint, choice_chart
from nightbridge.report.page import STATUS_WORDS

if TYPE_CHECKING:
    from rich.table import Table

BEST, SKIPPED = "★", "skipped"


class SweepRow(NamedTuple):
    """One line of every table: a point that was run, or a part of the sweep that was not."""

    point: str
    verdict: str
    value: str
    reward: str
    why: str
    is_best: bool


class SweepSection(NamedTuple):
    """One swept test on the page. `charts` holds an axis and its drawing."""

    anchor: str
    title: str
    headline: str
    value_heading: str
    reward_heading: str
    rows: tuple[SweepRow, ...]
    charts: tuple[tuple[str, str], ...]
    note: str
    configuration: str


def best_line(result: SweepResult) -> str:
    """The best point in one sentence, and how many others there are."""
    counts = f"{format_count(len(result.points), 'point')} run, {result.skipped_points:,} skipped"
    if result.best is None:
        return f"no point of the sweep has a {METRIC_BY_NAME[result.metric].label} to compare ({counts})"
    value = format_value(result.best.value, result.unit)
    return f"best point: {format_point(result.best.point)}, {METRIC_BY_NAME[result.metric].label} {value} ({counts})"


def sweep_rows(result: SweepResult) -> tuple[SweepRow, ...]:
    """Every point, the best first, and then every part that was skipped with its reason."""
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
        # What a file or a rule says is Text, never rich's markup.
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
    note = f"\n{markdown_text(result.note)}\n" if result.note else ""
    return f"**{markdown_text(result.test_id)}**: {markdown_text(best_line(result))}\n\n{table}{note}"


def sweep_section(result: SweepResult) -> SweepSection:
    """What the page shows: the sentence, the table, and the metric over each axis that has several values."""
    return SweepSection(
        anchor=f"sweep-{result.test_id}",
        title=result.test_id,
        headline=best_line(result),
        value_heading=_value_heading(result),
        reward_heading=f"reward, {result.reward}",
        rows=sweep_rows(result),
        charts=tuple(_charts(result)),
        note=result.note,
        configuration=result.configuration,
    )


def _charts(result: SweepResult) -> Sequence[tuple[str, str]]:
    measured = [point for point in result.points if point.value is not None and point.reward is not None]
    drawn = []
    for name in dict.fromkeys(name for point in measured for name in point.point):
        values = {format_choice(point.point[name]): point.point[name] for point in measured}
        choices = sorted(values.items(), key=_order)
        if len(choices) < 2:
            continue
        places = {text: place for place, (text, _value) in enumerate(choices)}
        points = [
            ChosenPoint(places[format_choice(point.point[name])], point.value or 0.0, point is result.best)
            for point in measured
        ]
        label = name.rpartition(".")[2]
        drawn.append((label, choice_chart(points, list(places), label, _value_heading(result))))
    return drawn


def _order(choice: tuple[str, object]) -> tuple[float, str]:
    """Numbers by size, then the texts."""
    text, value = choice
    return (float(value) if isinstance(value, int | float) else float("inf"), text)


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
    where = format_point(part.point) or "all"
    return SweepRow(
        point=where if part.points == 1 else f"{where} ({part.points:,} points)",
        verdict=SKIPPED,
        value="–",
        reward="–",
        why=f"{part.reason} [{part.rule}]" if part.rule else part.reason,
        is_best=False,
    )


def _value_heading(result: SweepResult) -> str:
    label = METRIC_BY_NAME[result.metric].label
    return f"{label}, {result.unit}" if result.unit else label
