"""A metric night by night, with what moves it without the code taken out.

A night's value is the median of its runs with the night's own pins: confirming re-runs count, bisect points do not.
Runs that did not do all their steps have no value. The cluster's drift is taken out by the canary, a test whose pins
never move, where the test has one, and the level of the nodes that a night ran on by that of the others.
"""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from nightbridge.errors import InvalidInput
from nightbridge.models import VerdictStatus
from nightbridge.regression.history import HistoryRow
from nightbridge.regression.metrics import COMPLETE_OUTCOMES, Metric, measured

# A run with one of these verdicts has no numbers that stand for the test.
NO_VALUE = frozenset({VerdictStatus.FAILED, VerdictStatus.SHORT, VerdictStatus.CANCELLED, VerdictStatus.INFRASTRUCTURE})

# By metric, the other fields of `Summary` that measure the same.
OTHER_STATISTICS: Mapping[str, tuple[str, ...]] = {"step_time": ("step_time_p05", "step_time_midmean")}


class Night(NamedTuple):
    """The night's own run, and all runs with the same pins."""

    own: HistoryRow
    runs: tuple[HistoryRow, ...]


def nights_of(rows: Iterable[HistoryRow]) -> tuple[Night, ...]:
    """The nights that have a run of their own, oldest first."""
    by_night: dict[str, list[HistoryRow]] = {}
    for row in sorted(rows, key=lambda row: (row.night, row.repeat, row.iteration, row.harvested_at)):
        by_night.setdefault(row.night, []).append(row)
    nights = []
    for runs in by_night.values():
        own = runs[0]
        if own.repeat == 0:
            nights.append(Night(own, tuple(run for run in runs if pins_of(run) == pins_of(own))))
    return tuple(nights)


def pins_of(row: HistoryRow) -> tuple[str | None, ...]:
    """What the run was pinned to: the commits and the image."""
    return row.megatron_bridge.commit, row.nemo_run.commit if row.nemo_run else None, row.image_digest


def run_value(run: HistoryRow, metric: Metric, field: str = "") -> float | None:
    """What one run measured of a metric, or of another field that measures the same."""
    if run.outcome not in COMPLETE_OUTCOMES or run.verdict in NO_VALUE:
        return None
    return measured(metric._replace(attribute=field) if field else metric, run.summary)


def night_value(night: Night, metric: Metric, field: str = "") -> float | None:
    """The median of the night's runs that measured it."""
    values = [value for run in night.runs if (value := run_value(run, metric, field)) is not None]
    return statistics.median(values) if values else None


def canary_values(nights: Sequence[Night], canary: Sequence[HistoryRow], metric: Metric) -> list[float | None]:
    """The canary's value in each of the nights."""
    by_night = {night.own.night: night_value(night, metric) for night in nights_of(canary)}
    return [by_night.get(night.own.night) for night in nights]


def adjusted(
    metric: Metric, values: Sequence[float | None], nights: Sequence[Night], canary: Sequence[float | None]
) -> list[float | None]:
    """The values without the cluster's drift and without the level of the nodes; as they are where neither is known."""
    if not metric.follows_cluster or sum(value is not None for value in values) < 2:
        return list(values)
    from nightbridge.regression.changepoints import remove_canary, remove_node_effects

    steady: Sequence[float | None] = values
    try:
        if any(value is not None for value in canary):
            steady = remove_canary(steady, canary)
    except InvalidInput:
        return list(values)  # no ratios can be taken of it
    nodes = [night.own.nodes for night in nights]
    if len(set(nodes)) > 1:
        steady = remove_node_effects(steady, nodes)
    return [None if value is None or value != value else value for value in steady]
