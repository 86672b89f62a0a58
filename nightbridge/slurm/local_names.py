"""Names of the embedded cluster's simulated nodes, Slurm's node expressions, and its file name patterns."""

import itertools
import re
from collections.abc import Iterable, Mapping

_BRACKETS = re.compile(r"\[([^\]]*)\]")
_PATTERN = re.compile(r"%(\d*)([%A-Za-z])")


def node_names(count: int) -> list[str]:
    """The simulated nodes of a job of `count` nodes: node1, node2... All are this machine."""
    return [f"node{number}" for number in range(1, count + 1)]


def node_expression(count: int) -> str:
    """The same nodes as Slurm abbreviates them: `node1`, `node[1-4]`."""
    return "node1" if count == 1 else f"node[1-{count}]"


def spread_evenly(tasks: int, nodes: int) -> list[int]:
    """Tasks of each node when they are spread as evenly as they can be, the first nodes having one more."""
    return [tasks // nodes + (node < tasks % nodes) for node in range(nodes)]


def tasks_expression(counts: Iterable[int]) -> str:
    """Tasks of each node as Slurm abbreviates them: `2(x3),1`."""
    runs = [(count, len(list(same))) for count, same in itertools.groupby(counts)]
    return ",".join(f"{count}(x{length})" if length > 1 else str(count) for count, length in runs)


def expand_expression(expression: str) -> list[str]:
    """Expand a node expression: `node[1-3,5],login` to node1, node2, node3, node5, login. Leading zeros are kept.

    Raises:
        ValueError: It is not a node expression.

    """
    # A comma inside brackets separates numbers, outside it separates names.
    parts = re.split(r",(?![^\[]*\])", expression.strip())
    return [name for part in parts if part for name in _expand_name(part)]


def _expand_name(part: str) -> list[str]:
    pieces = _BRACKETS.split(part)
    if any("[" in fixed or "]" in fixed for fixed in pieces[::2]):
        raise ValueError(f"not a node expression: {part}")
    # split() returns fixed text and bracket contents in turn.
    choices = [[piece] if index % 2 == 0 else _expand_numbers(piece) for index, piece in enumerate(pieces)]
    return ["".join(choice) for choice in itertools.product(*choices)]


def _expand_numbers(ranges: str) -> list[str]:
    numbers: list[str] = []
    for item in ranges.split(","):
        first, _, last = item.partition("-")
        last = last or first
        if not (first.isdigit() and last.isdigit()):
            raise ValueError(f"not a range of nodes: [{ranges}]")
        numbers += [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
    return numbers


def fill_pattern(pattern: str, values: Mapping[str, object]) -> str:
    """Fill in a file name pattern (sbatch(1), "filename pattern"): `log-%x-%4t.out`; an unknown letter stays as it is.

    Args:
        pattern: The name. `%4t` pads a number with zeros to four digits.
        values: By letter: j job id, x job name, t task, n node, N node name, u user, s step...

    """

    def value(found: re.Match[str]) -> str:
        width, letter = found[1], found[2]
        if letter == "%":
            return "%"
        if letter not in values:
            return found[0]
        text = str(values[letter])
        return text.zfill(int(width)) if width and text.isdigit() else text

    return _PATTERN.sub(value, pattern)
