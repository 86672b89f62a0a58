"""One test's trend on a terminal: its nights as a table or as CSV, when its level shifted, and what changed then."""

import itertools
import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING

from nightbridge.gate.trend import Trend
from nightbridge.history.nightly_values import NightRuns, nights_of, values_of
from nightbridge.history.rows import HistoryRow, hardly_moved
from nightbridge.models import VerdictStatus
from nightbridge.models.metrics import COLUMNS, METRIC_BY_NAME
from nightbridge.numbers import format_change, format_count, format_value

if TYPE_CHECKING:
    from rich.table import Table

MAX_NIGHTS_SHOWN = 28
MAX_COMMITS_SHOWN = 20


def trend_table(found: Sequence[Trend], rows: Sequence[HistoryRow], since: str = "") -> "Table":
    """The last nights, or those since one, as a table for a terminal, the latest last; `trend_lines` go below it."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    table.add_column("night", no_wrap=True)
    table.add_column("verdict", no_wrap=True)
    shown = [trend for trend in found if any(trend.metric == metric.name for metric in COLUMNS)]
    for trend in shown:
        table.add_column(METRIC_BY_NAME[trend.metric].heading, justify="right", no_wrap=True)
    table.add_column("commit", no_wrap=True)
    shown_nights = [(index, night) for index, night in enumerate(nights_of(rows)) if night.own.order >= since]
    for index, night in shown_nights if since else shown_nights[-MAX_NIGHTS_SHOWN:]:
        cells = []
        for trend in shown:
            begins = any(change.night == night.own.night for change in trend.changes)
            cells.append(Text(f"{'◆ ' * begins}{format_value(trend.values[index])}"))
        verdict = night.own.verdict.value.replace("_", " ") if night.own.verdict else "–"
        table.add_row(Text(night.own.night), Text(verdict), *cells, Text(night.own.megatron_bridge.commit[:10]))
    return table


def history_cells(found: Sequence[Trend], rows: Sequence[HistoryRow], since: str = "") -> list[list[object]]:
    """The nights of a series as a table for other programs, names first; every metric in its own unit."""
    pinned: list[object] = ["night", "verdict", "run_key", "commit", "nodes"]
    cells = [[*pinned, *(trend.metric for trend in found), "runs", "control_step_time"]]
    for at, night in enumerate(nights_of(rows)):
        own = night.own
        if own.order >= since:
            run = [own.night, own.verdict, own.run_key, own.megatron_bridge.commit, own.nodes]
            control = _control_step_time(night)
            cells.append([*run, *(trend.values[at] for trend in found), len(night.runs), control])
    return cells


def _control_step_time(night: NightRuns) -> float | None:
    """What the last good point took beside it."""
    controls = (row for row in night.arms if row.arm and row.arm.role == "control" and not row.arm.on_suspects)
    values = values_of(controls, METRIC_BY_NAME["step_time"])
    return statistics.median(values) if values else None


def trend_lines(found: Sequence[Trend]) -> tuple[str, ...]:
    """One line per change, oldest first, and below each what was pinned differently, commits where they are known."""
    lines: list[str] = []
    changes = [(METRIC_BY_NAME[trend.metric], change) for trend in found for change in trend.changes]
    for metric, change in sorted(changes, key=lambda each: each[1].night):
        since = f"since {change.night}"
        if change.latest_night != change.night:
            since += f" (at the latest {change.latest_night})"
        lines.append(
            f"{metric.label} {'worse' if change.worse else 'better'} by {format_change(change.change)} {since}: "
            f"{format_value(change.before, metric.unit)} before, {format_value(change.after, metric.unit)} after"
        )
        for suspect in change.suspects:
            lines.append(f"  {suspect.name}: {suspect.before} → {suspect.after}")
            for one in suspect.listed[:MAX_COMMITS_SHOWN]:
                who = f"{one.commit.author}, {one.commit.authored_at:%Y-%m-%d}"
                lines.append(f"    {one.commit.commit[:10]} {one.text} ({who})")
            more = len(suspect.listed) - MAX_COMMITS_SHOWN
            lines += [f"    and {more} older ones"] if more > 0 else []
            lines += [f"    {suspect.note}"] if suspect.note else []
        if not change.suspects:
            lines.append("  no pinned version changed: check the cluster")
        if change.decision:
            lines.append(f"  {change.decision.text}")
    return tuple(lines)


def standing_lines(rows: Sequence[HistoryRow], found: Sequence[Trend]) -> tuple[str, ...]:
    """That the last nights are regressed and since when, where they are too few for a change of level to be certain."""
    nights = [night.own for night in nights_of(rows)]
    bad = list(itertools.takewhile(lambda row: row.verdict is VerdictStatus.REGRESSED, reversed(nights)))
    if not bad or any(change.worse for trend in found for change in trend.changes):
        return ()
    moved = ", ".join(
        f"{METRIC_BY_NAME[name].label} {'not the same' if hardly_moved(name, change) else format_change(change)}"
        for name, change in bad[0].worse.items()
        if name in METRIC_BY_NAME
    )
    nights_text = format_count(len(bad), "night")
    return (f"regressed since {bad[-1].night}, {nights_text} by their verdicts: {moved}".rstrip(": "),)
