"""Trends: the change points of a series' metrics, and what was pinned on both sides of each.

A night's value is the median of its runs with the night's own pins: confirming re-runs count, bisect points do not.
Runs that did not do all their steps have no value. Each time metric has two statistics, the median of its steps and
their 5th percentile; changes are looked for in the steadier one.
"""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from pydantic import Field

from nightbridge.models import Model, VerdictStatus
from nightbridge.regression.gate import COMPLETE_OUTCOMES, METRICS, Metric, measured
from nightbridge.regression.history import HistoryRow
from nightbridge.regression.wording import format_change, format_value

if TYPE_CHECKING:
    from rich.table import Table

    from nightbridge.regression.changepoints import ChangePointPolicy

# A run with one of these verdicts has no numbers that stand for the test.
NO_VALUE = frozenset({VerdictStatus.FAILED, VerdictStatus.SHORT, VerdictStatus.CANCELLED, VerdictStatus.INFRASTRUCTURE})

# By metric, the other fields of `Summary` that measure the same.
OTHER_STATISTICS: Mapping[str, tuple[str, ...]] = {"step_time": ("step_time_p05",)}

MOST_NIGHTS_SHOWN = 28


class Suspects(Model):
    """One pinned thing that is not the same before and after a change: commits, image or nodes."""

    name: str
    before: str = Field(description="Of the last night before the change may have begun.")
    after: str = Field(description="Of the last night with which it may have begun.")
    url: str = Field("", description="The repository, where it is one.")


class Change(Model):
    """A metric has another level since a night."""

    metric: str
    statistic: str = Field(description="The field of `Summary` in which it was found.")
    night: str = Field(description="First night of the new level.")
    last_night_before: str = Field(description="The last night that certainly (95 %) had the old level.")
    latest_night: str = Field(description="The last night with which the new level may have begun (95 %).")
    before: float = Field(description="Median of the statistic before, in the metric's unit.")
    after: float
    change: float = Field(description="Relative, signed.")
    worse: bool
    p_value: float
    suspects: tuple[Suspects, ...] = Field((), description="What is pinned differently on both sides.")


class Trend(Model):
    """One metric of a series: its nights and its changes, oldest first."""

    metric: str
    unit: str
    nights: tuple[str, ...]
    values: tuple[float | None, ...] = Field(description="One per night; None where nothing was measured.")
    changes: tuple[Change, ...]


class Night(NamedTuple):
    """The night's own run, and all runs with the same pins."""

    own: HistoryRow
    runs: tuple[HistoryRow, ...]


def trends(rows: Sequence[HistoryRow], policy: "ChangePointPolicy | None" = None) -> tuple[Trend, ...]:
    """What each gated metric of a series did, night by night.

    Args:
        rows: The rows of one series, in any order.
        policy: When a difference is a change.
    """
    nights = nights_of(rows)
    return tuple(_trend(metric, nights, policy) for metric in METRICS)


def nights_of(rows: Iterable[HistoryRow]) -> tuple[Night, ...]:
    """The nights that have a run of their own, oldest first."""
    by_night: dict[str, list[HistoryRow]] = {}
    for row in sorted(rows, key=lambda row: (row.night, row.repeat, row.iteration, row.harvested_at)):
        by_night.setdefault(row.night, []).append(row)
    nights = []
    for runs in by_night.values():
        own = runs[0]
        if own.repeat == 0:
            nights.append(Night(own, tuple(run for run in runs if _pins(run) == _pins(own))))
    return tuple(nights)


def trend_table(found: Sequence[Trend], rows: Sequence[HistoryRow]) -> "Table":
    """The last nights as a table for a terminal, the latest last; `trend_lines` go below it."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    table.add_column("night", no_wrap=True)
    table.add_column("verdict", no_wrap=True)
    for trend in found:
        # One word a line, as in the table of verdicts: the numbers need the width of 80 columns.
        heading = [*trend.metric.split("_"), trend.unit.replace("/GPU", "\n/GPU")]
        table.add_column("\n".join(heading).rstrip(), justify="right", no_wrap=True)
    table.add_column("commit", no_wrap=True)
    for place, night in list(enumerate(nights_of(rows)))[-MOST_NIGHTS_SHOWN:]:
        cells = []
        for trend in found:
            begins = any(change.night == night.own.night for change in trend.changes)
            cells.append(Text(f"{'◆ ' * begins}{format_value(trend.values[place])}"))
        verdict = night.own.verdict.value.replace("_", " ") if night.own.verdict else "–"
        table.add_row(Text(night.own.night), Text(verdict), *cells, Text(night.own.megatron_bridge.commit[:10]))
    return table


def trend_lines(found: Sequence[Trend]) -> tuple[str, ...]:
    """One line per change, oldest first, and below each what was pinned differently."""
    labels = {metric.name: metric for metric in METRICS}
    lines: list[str] = []
    for change in sorted((change for trend in found for change in trend.changes), key=lambda change: change.night):
        metric = labels[change.metric]
        since = f"since {change.night}"
        if change.latest_night != change.night:
            since += f" (at the latest {change.latest_night})"
        lines.append(
            f"{metric.label} {'worse' if change.worse else 'better'} by {format_change(change.change)} {since}: "
            f"{format_value(change.before, metric.unit)} before, {format_value(change.after, metric.unit)} after"
        )
        lines += [f"  {suspect.name}: {suspect.before} → {suspect.after}" for suspect in change.suspects]
        if not change.suspects:
            lines.append("  nothing that is pinned has changed: look at the cluster")
    return tuple(lines)


def _trend(metric: Metric, nights: Sequence[Night], policy: "ChangePointPolicy | None") -> Trend:
    # numpy is imported with the first trend: commands that need none do not pay for it.
    from nightbridge.regression.changepoints import DEFAULT_POLICY, find_change_points, steadiest

    fields = (metric.attribute, *OTHER_STATISTICS.get(metric.name, ()))
    series = {field: [_value(night, metric, field) for night in nights] for field in fields}
    statistic = steadiest(series)
    points = find_change_points(series[statistic], policy or DEFAULT_POLICY)
    changes = []
    for point in points:
        last_before, latest = nights[max(0, point.earliest - 1)], nights[point.latest]
        changes.append(
            Change(
                metric=metric.name,
                statistic=statistic,
                night=nights[point.index].own.night,
                last_night_before=last_before.own.night,
                latest_night=latest.own.night,
                before=point.before,
                after=point.after,
                change=point.change,
                worse=(point.change > 0) == metric.lower_is_better,
                p_value=point.p_value,
                suspects=_suspects(last_before.own, latest.own),
            )
        )
    return Trend(
        metric=metric.name,
        unit=metric.unit,
        nights=tuple(night.own.night for night in nights),
        values=tuple(series[metric.attribute]),
        changes=tuple(changes),
    )


def _value(night: Night, metric: Metric, field: str) -> float | None:
    """The median of the night's runs that measured the field."""
    values = [
        value
        for run in night.runs
        if run.outcome in COMPLETE_OUTCOMES
        and run.verdict not in NO_VALUE
        and (value := measured(metric._replace(attribute=field), run.summary)) is not None
    ]
    return statistics.median(values) if values else None


def _pins(row: HistoryRow) -> tuple[str, str, str | None]:
    return row.megatron_bridge.commit, row.nemo_run.commit, row.image_digest


def _suspects(before: HistoryRow, after: HistoryRow) -> tuple[Suspects, ...]:
    pairs = (
        ("Megatron-Bridge", before.megatron_bridge.commit, after.megatron_bridge.commit, after.megatron_bridge.url),
        ("NeMo-Run", before.nemo_run.commit, after.nemo_run.commit, after.nemo_run.url),
        ("Image", before.image_digest or before.image or "–", after.image_digest or after.image or "–", ""),
        ("Nodes", before.nodes or "–", after.nodes or "–", ""),
    )
    return tuple(Suspects(name=name, before=old, after=new, url=url) for name, old, new, url in pairs if old != new)
