"""Distinguishes flaky nodes from slow commits: what the nodes that a night ran on have to do with its numbers."""

import re
import statistics
from collections.abc import Sequence

from nightbridge.history.nightly_values import Night, night_value, pins_of, run_value
from nightbridge.history.reading import is_good
from nightbridge.models import Model
from nightbridge.models.metrics import METRIC_BY_NAME, Metric

# Nights with a node, and without it, that its effect takes.
MIN_NIGHTS = 4
MAX_P_VALUE = 1e-3
MIN_EFFECT = 0.01

_BRACKETS = re.compile(r"\[([^\]]*)\]")


class NodeEffect(Model):
    """What a metric does when a node takes part, against the nights without it."""

    node: str
    nights: int
    change: float
    p_value: float


def node_names(expression: str) -> tuple[str, ...]:
    """Expand Slurm's node expression: `node[1-3,5],login` is node1, node2, node3, node5, login.

    What is no such expression is one name: it is only compared with others.
    """
    names: list[str] = []
    for part in re.split(r",(?![^\[]*\])", expression.strip()):
        match = _BRACKETS.search(part)
        if match is None:
            names += [part] if part else []
            continue
        head, tail = part[: match.start()], part[match.end() :]
        for piece in match[1].split(","):
            first, _, last = piece.partition("-")
            if not first.isdigit() or not (last or first).isdigit():
                return (expression,)
            for number in range(int(first), int(last or first) + 1):
                names += node_names(f"{head}{str(number).zfill(len(first))}{tail}")
    return tuple(names)


def node_effects(nights: Sequence[Night], metric: Metric) -> tuple[NodeEffect, ...]:
    """The nodes with which a metric is another, the worst first.

    Each night's value is compared with the median of the nights around it, so that changes of the code, which move all
    nodes alike, do not count. Welch's t-test, and at least `MIN_NIGHTS` nights with and without the node.
    """
    values = [night_value(night, metric) for night in nights]
    known = [(node_names(night.own.nodes), value) for night, value in zip(nights, values, strict=True) if value]
    ratios = [value / _around(known, index) - 1 for index, (_nodes, value) in enumerate(known)]
    found = []
    for node in sorted({node for names, _value in known for node in names}):
        with_it = [ratio for (names, _value), ratio in zip(known, ratios, strict=True) if node in names]
        without = [ratio for (names, _value), ratio in zip(known, ratios, strict=True) if node not in names]
        if min(len(with_it), len(without)) < MIN_NIGHTS:
            continue
        change = statistics.median(with_it) - statistics.median(without)
        p_value = _welch(with_it, without)
        if metric.worse(change) and abs(change) >= MIN_EFFECT and p_value <= MAX_P_VALUE:
            found.append(NodeEffect(node=node, nights=len(with_it), change=change, p_value=p_value))
    return tuple(sorted(found, key=lambda effect: effect.p_value))


def unchanged_since(past: Sequence[Night], tonight: Night) -> str:
    """The last good night, where it had the same pins as tonight; empty otherwise."""
    good = next((night.own for night in reversed(past) if is_good(night.own)), None)
    return good.night if good and pins_of(good) == pins_of(tonight.own) else ""


def suspects_among(
    past: Sequence[Night], tonight: Night, unchanged_since: str = ""
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The nodes that may explain why tonight is suspicious, and the reasons.

    A node is suspect when the history says that it is slow, when only the worse of tonight's runs had it, and when
    nothing that is pinned has changed since the last good night (`unchanged_since`): then the code cannot be why. None
    is named where the history knows too few other nodes to run on.
    """
    metric = METRIC_BY_NAME["step_time"]
    tonights = node_names(tonight.own.nodes)
    slow = [effect for effect in node_effects(past[-100:], metric) if effect.node in tonights]
    reasons = [
        f"{effect.node} is a slow node: {effect.change:+.1%} {metric.label} in the {effect.nights} nights that had it"
        for effect in slow
    ]
    suspects = {effect.node for effect in slow}
    split = _only_in_worse(tonight, metric)
    if split:
        suspects |= set(split)
        reasons.append(f"only the slow runs of this night had {', '.join(split)}")
    if unchanged_since and not suspects:
        suspects |= set(tonights)
        reasons.append(
            f"no pinned version changed since {unchanged_since}, the last good night: check the nodes, not the code"
        )
    others = {node for night in past for node in node_names(night.own.nodes)} - suspects
    # A run that may not have its nodes, on a cluster without others, would wait indefinitely.
    return tuple(sorted(suspects)) if len(others) >= len(tonights) else (), tuple(reasons)


def _only_in_worse(tonight: Night, metric: Metric) -> tuple[str, ...]:
    """Nodes that all of tonight's slower half had and none of the others, where the runs differ by much."""
    runs = [(run, value) for run in tonight.runs if (value := run_value(run, metric)) is not None]
    if len(runs) < 2:
        return ()
    values = [value for _run, value in runs]
    middle = (min(values) + max(values)) / 2
    if max(values) / min(values) - 1 < 2 * MIN_EFFECT:
        return ()
    worse = [set(node_names(run.nodes)) for run, value in runs if value > middle]
    better = [set(node_names(run.nodes)) for run, value in runs if value <= middle]
    fine = {node for nodes in better for node in nodes}
    return tuple(sorted(set.intersection(*worse) - fine))


def _around(known: Sequence[tuple[tuple[str, ...], float]], index: int, near: int = 5) -> float:
    others = [known[at][1] for at in range(max(0, index - near), min(len(known), index + near + 1)) if at != index]
    return statistics.median(others) if others else known[index][1]


def _welch(left: Sequence[float], right: Sequence[float]) -> float:
    from nightbridge.history.student import t_test_p_value

    parts = [statistics.variance(part) / len(part) for part in (left, right)]
    spread = sum(parts)
    difference = statistics.fmean(left) - statistics.fmean(right)
    if not spread:
        return 0.0 if difference else 1.0
    degrees = spread**2 / sum(part**2 / (len(side) - 1) for part, side in zip(parts, (left, right), strict=True))
    return t_test_p_value(difference / spread**0.5, degrees)
