"""Node names, the layout of tasks on nodes, and file name patterns, as Slurm writes them."""

import itertools
import re
import time
from collections.abc import Iterable, Mapping, Sequence

_GROUP = re.compile(r"([^,\[\]]+)(?:\[([^\]]*)\]([^,\[\]]*))?")
_PATTERN = re.compile(r"%(\d*)([%A-Za-z])")


def node_names(count: int) -> list[str]:
    """The simulated nodes of a job of `count` nodes: node1, node2... All are this machine."""
    return [f"node{number}" for number in range(1, count + 1)]


def node_expression(nodes: Sequence[str]) -> str:
    """Nodes as Slurm abbreviates them: `node1`, `node[1-4]`; others than the first ones as `node2,node4`."""
    is_first = len(nodes) > 1 and list(nodes) == node_names(len(nodes))
    return f"node[1-{len(nodes)}]" if is_first else ",".join(nodes)


def hostnames(expression: str) -> list[str]:
    """The names in one of Slurm's node expressions: `node[1-2,05-06],login` has five."""
    names: list[str] = []
    for prefix, ranges, suffix in _GROUP.findall(expression):
        for part in ranges.split(","):
            first, _, last = part.partition("-")
            numbers = range(int(first), int(last) + 1) if first.isdigit() and last.isdigit() else ()
            names += [f"{prefix}{number:0{len(first)}}{suffix}" for number in numbers] or [prefix + part + suffix]
    return [name for name in names if name]


def spread_evenly(tasks: int, nodes: int) -> list[int]:
    """Tasks of each node when they are spread as evenly as possible, the first nodes having one more."""
    return [tasks // nodes + (node < tasks % nodes) for node in range(nodes)]


def tasks_expression(counts: Iterable[int]) -> str:
    """Tasks of each node as Slurm abbreviates them: `2(x3),1`."""
    runs = [(count, len(list(same))) for count, same in itertools.groupby(counts)]
    return ",".join(f"{count}(x{length})" if length > 1 else str(count) for count, length in runs)


def task_layout(counts: Sequence[int]) -> list[tuple[int, int]]:
    """Node and local number of every task, filled node by node (srun's block distribution)."""
    return [(node, local) for node, count in enumerate(counts) for local in range(count)]


def layout_variables(nodes: Sequence[str], counts: Sequence[int], task: int) -> dict[str, object]:
    """Slurm's variables for a script or a task: its position among `counts` tasks on each of `nodes`."""
    node, local = task_layout(counts)[task]
    return {
        "SLURMD_NODENAME": nodes[node], "SLURM_NODEID": node, "SLURM_LOCALID": local, "SLURM_PROCID": task,
        "SLURM_NNODES": len(nodes), "SLURM_NODELIST": node_expression(nodes),
        "SLURM_NPROCS": sum(counts), "SLURM_NTASKS": sum(counts), "SLURM_TASKS_PER_NODE": tasks_expression(counts),
    }  # fmt: skip


def farewell(what: str, state: str) -> bytes:
    """The line that Slurm writes to a log that it ends; users and tools look for `DUE TO TIME LIMIT`."""
    why = {"TIMEOUT": " DUE TO TIME LIMIT", "NODE_FAIL": " DUE TO NODE FAILURE"}.get(state, "")
    return f"slurmstepd: error: *** {what} CANCELLED AT {time.strftime('%Y-%m-%dT%H:%M:%S')}{why} ***\n".encode()


def fill_pattern(pattern: str, values: Mapping[str, object]) -> str:
    """Fill in a file name pattern (sbatch(1), "filename pattern"): `log-%x-%4t.out`; an unknown letter stays as it is.

    Args:
        pattern: The name. `%4t` pads a number with zeros to four digits.
        values: By letter: j job id, x job name, t task, n node, N node name, u user, s step...
    """

    def value(found: re.Match[str]) -> str:
        text = str(values.get(found[2], "%" if found[2] == "%" else found[0]))
        return text.zfill(int(found[1] or 0)) if text.isdigit() else text

    return _PATTERN.sub(value, pattern)
