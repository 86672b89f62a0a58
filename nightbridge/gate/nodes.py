"""Distinguishes flaky nodes from slow commits: what the nodes that a night ran on have to do with its numbers."""

import statistics
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from nightbridge.embedded.notation import hostnames
from nightbridge.history.nightly_values import NightRuns, night_values, pins_of, run_value
from nightbridge.history.reading import is_good
from nightbridge.models import Model, RunSpec
from nightbridge.models.metrics import METRIC_BY_NAME, Metric

# Nights with a node, and without it, that its effect takes.
MIN_NIGHTS = 4
MAX_P_VALUE = 1e-3
MIN_EFFECT = 0.01

SLOW_NODE = 0.03
"""A run this much slower than the night's pairs on other nodes is worth a pair on its own nodes."""

HELD_NIGHTS = 30
"""Nights for which nodes are taken to have the levels that they had."""

ABOUT_NODES = ("--nodelist=", "-w", "--exclude=", "-x")
"""How options of sbatch begin that say on which nodes a job runs."""


def on_nodes(run: RunSpec, nodes: str) -> RunSpec:
    """The same run on these nodes, as Slurm writes them, whatever its test says of nodes; as it is without any."""
    if not nodes:
        return run
    kept = (option for option in run.test.sbatch_args if not option.startswith(ABOUT_NODES))
    test = run.test.model_copy(update={"sbatch_args": (*kept, f"--nodelist={nodes}")})
    return run.model_copy(update={"test": test})


class NodeEffect(Model):
    """What a metric does when a node takes part, against the nights without it."""

    node: str
    nights: int
    change: float
    p_value: float


@lru_cache(maxsize=1024)  # a night asks for the same few of each night of the history
def node_names(expression: str) -> tuple[str, ...]:
    """The names in Slurm's node expression, as `hostnames` has them."""
    return tuple(hostnames(expression))


def node_effects(nights: Sequence[NightRuns], metric: Metric) -> tuple[NodeEffect, ...]:
    """The nodes with which a metric is another, the worst first.

    Each night's value is compared with the median of the nights around it, so that changes of the code, which move all
    nodes alike, do not count. Welch's t-test, and at least `MIN_NIGHTS` nights with and without the node.
    """
    values = night_values(nights, metric)
    known = [(node_names(night.own.nodes), value) for night, value in zip(nights, values, strict=True) if value]
    ratios = [value / _around(known, index) - 1 for index, (_nodes, value) in enumerate(known)]
    found = []
    for node in sorted({node for names, _value in known for node in names}):
        with_it = [ratio for (names, _value), ratio in zip(known, ratios, strict=True) if node in names]
        without = [ratio for (names, _value), ratio in zip(known, ratios, strict=True) if node not in names]
        if min(len(with_it), len(without)) < MIN_NIGHTS:
            continue
        change = statistics.median(with_it) - statistics.median(without)
        if not metric.worse(change) or abs(change) < MIN_EFFECT:
            continue
        if (p_value := _welch(with_it, without)) <= MAX_P_VALUE:
            found.append(NodeEffect(node=node, nights=len(with_it), change=change, p_value=p_value))
    return tuple(sorted(found, key=lambda effect: effect.p_value))


def unchanged_since(past: Sequence[NightRuns], tonight: NightRuns) -> str:
    """The last good night, where it had the same pins as tonight; empty otherwise."""
    good = next((night.own for night in reversed(past) if is_good(night.own)), None)
    return good.night if good and pins_of(good) == pins_of(tonight.own) else ""


def levels_held(past: Sequence[NightRuns], nodes: str) -> dict[str, float]:
    """Where the cluster has the levels, as multiples: as the same nodes had them in the last weeks, else as last night.

    Nodes that are slower by themselves move the levels of their own nights only. `past` is oldest first.
    """
    same = [night for night in past[-HELD_NIGHTS:] if night.own.nodes == nodes]
    return (same or past)[-1].own.moved if past else {}


def suspects_among(
    past: Sequence[NightRuns], tonight: NightRuns, unchanged_since: str = ""
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The nodes that may explain why tonight is suspicious, and the reasons.

    A node is suspect when the history says that it is slow, and when nothing that is pinned has changed since the last
    good night (`unchanged_since`): then the code cannot be why. None is named where the history knows too few other
    nodes to run on.
    """
    metric = METRIC_BY_NAME["step_time"]
    tonights = node_names(tonight.own.nodes)
    slow = [effect for effect in node_effects(past[-100:], metric) if effect.node in tonights]
    reasons = [
        f"{effect.node} is a slow node: {effect.change:+.1%} {metric.label} in the {effect.nights} nights that had it"
        for effect in slow
    ]
    suspects = {effect.node for effect in slow}
    if unchanged_since and not suspects:
        suspects |= set(tonights)
        reasons.append(
            f"no pinned version changed since {unchanged_since}, the last good night: check the nodes, not the code"
        )
    others = {node for night in past for node in node_names(night.own.nodes)} - suspects
    # A run that may not have its nodes, on a cluster without others, would wait indefinitely.
    return tuple(sorted(suspects)) if len(others) >= len(tonights) else (), tuple(reasons)


class Placement(NamedTuple):
    """Where a night's pairs run: the first on none of `avoid`, the last wanted one `on` some nodes.

    `reruns`: runs of the night that are wanted. `slow`: nodes that both points were slow on, and `reason` says so.
    """

    reruns: int
    avoid: tuple[str, ...] = ()
    on: tuple[str, ...] = ()
    slow: tuple[str, ...] = ()
    reason: str = ""


def place_pairs(
    past: Sequence[NightRuns], tonight: NightRuns, reruns: int, suspects: tuple[str, ...], most: int | None = None
) -> Placement:
    """Keep the first pair from the nodes that may be slow, and try those once it is clean.

    Args:
        past: The nights before.
        tonight: With the arms that it has.
        reruns: Runs of the night that are wanted.
        suspects: Nodes that are suspect already; without any, all that tonight's run had.
        most: Runs of the night at most; None for no such limit.
    """
    own = node_names(tonight.own.nodes)
    others = {node for night in past for node in node_names(night.own.nodes)} - set(own)
    avoid = suspects or (own if len(others) >= len(own) > 0 else ())
    started = max((row.repeat for row in tonight.arms), default=0)
    if reruns > started or not avoid:
        return Placement(reruns, avoid)
    metric = METRIC_BY_NAME["step_time"]
    clean, tried = (
        [
            (set(node_names(row.nodes)), value)
            for row in tonight.arms
            if row.arm and row.arm.on_suspects == is_tried and (value := run_value(row, metric)) is not None
        ]
        for is_tried in (False, True)
    )
    elsewhere = [value for nodes, value in clean if not nodes & set(avoid)]
    value = run_value(tonight.own, metric)
    if value is None or len(elsewhere) < 2 or value / statistics.median(elsewhere) - 1 < SLOW_NODE:
        return Placement(reruns)
    if not tried:
        on_suspects = any(row.arm and row.arm.on_suspects for row in tonight.arms)
        is_over = on_suspects or (most is not None and started + 2 > most)
        return Placement(reruns if is_over else started + 2, on=avoid)
    least = min(value for _nodes, value in tried) / statistics.median(elsewhere) - 1
    if len(tried) < 2 or least < SLOW_NODE / 2:
        return Placement(reruns)
    fine = {node for nodes, _value in clean for node in nodes}
    slow = tuple(sorted(set.intersection(*(nodes for nodes, _value in tried)) - fine))
    reason = f"{' or '.join(slow)} is slow: {metric.label} {least:+.1%} with both points, and not on other nodes"
    return Placement(reruns, slow=slow, reason=reason if slow else "")


def _around(known: Sequence[tuple[tuple[str, ...], float]], index: int, near: int = 5) -> float:
    others = [known[at][1] for at in range(max(0, index - near), min(len(known), index + near + 1)) if at != index]
    return statistics.median(others) if others else known[index][1]


def _welch(left: Sequence[float], right: Sequence[float]) -> float:
    from nightbridge.history.changepoints import t_test_p_value

    parts = [statistics.variance(part) / len(part) for part in (left, right)]
    spread = sum(parts)
    if not spread:  # their medians are apart, and so are their means
        return 0.0
    degrees = spread**2 / sum(part**2 / (len(side) - 1) for part, side in zip(parts, (left, right), strict=True))
    return t_test_p_value((statistics.fmean(left) - statistics.fmean(right)) / spread**0.5, degrees)
