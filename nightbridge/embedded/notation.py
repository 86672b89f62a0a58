"""Slurm's notation on the embedded cluster: options of sbatch and srun, nodes, layouts of tasks, file name patterns.

It accepts every option that Slurm knows (sbatch(1), srun(1), Slurm 25.05). What cannot matter on one machine (accounts,
memory, GPUs, binding) is ignored; what would change the job's meaning and does not exist here is refused by name.
"""

import dataclasses
import itertools
import re
import time
from collections.abc import Iterable, Mapping, Sequence

from nightbridge.errors import InvalidInput
from nightbridge.sbatch_options import COMMON, COMMON_SHORT, SBATCH, OptionTable, parse_time_limit, takes

_NO_CONTAINERS = "the embedded cluster has no container runtime; run without a container, or on a Slurm with pyxis"
_NO_QUEUE_CONTROL = "the embedded cluster starts jobs in their order, as soon as a slot is free"
_REFUSED = {
    "begin": _NO_QUEUE_CONTROL,
    "clusters": "the embedded cluster is the only one here",
    "container": _NO_CONTAINERS,
    "container-id": _NO_CONTAINERS,
    "gid": "jobs run as the user who submits them",
    "hold": _NO_QUEUE_CONTROL,
    "input": "jobs and tasks of the embedded cluster have no input",
    "nodefile": "the embedded cluster names its own nodes",
    "signal": "the embedded cluster sends no signal before the time limit",
    "uid": "jobs run as the user who submits them",
}
# pyxis' own srun options. NVIDIA/pyxis, pyxis_srun(8).
_PYXIS = """
    container-image container-mounts container-workdir container-name container-save container-mount-home
    no-container-mount-home container-remap-root no-container-remap-root container-entrypoint
    no-container-entrypoint container-entrypoint-log container-writable container-readonly container-env
"""

EMBEDDED_SBATCH = dataclasses.replace(
    SBATCH,
    refused=_REFUSED
    | {
        "array": "the embedded cluster has no job arrays",
        "export-file": "the embedded cluster keeps environments out of files",
        "test-only": "the embedded cluster has no schedule",
        "wait": "the embedded cluster does not wait; see `nightbridge status`",
        "wrap": "the embedded cluster takes a script file",
    },
)

SRUN = OptionTable(
    command="srun",
    takes=COMMON
    | takes(
        values="accel-bind bcast-exclude cpu-bind epilog het-group jobid mpi prolog relative slurmd-debug task-epilog"
        " task-prolog threads tree-width wait",
        nothing="disable-status exact external-launcher interactive label multi-prog no-allocate overlap preserve-env"
        " pty stepmgr unbuffered whole",
        maybe="bcast compress immediate kill-on-bad-exit send-libs x11 " + _PYXIS,
    ),
    short={
        **COMMON_SHORT,
        "E": "preserve-env", "I": "immediate", "K": "kill-on-bad-exit", "T": "threads", "W": "wait",
        "X": "disable-status", "Z": "no-allocate", "l": "label", "r": "relative", "u": "unbuffered",
    },
    refused=_REFUSED
    | dict.fromkeys(_PYXIS.split(), _NO_CONTAINERS)
    | {
        "jobid": "a step belongs to the job that starts it",
        "multi-prog": "the embedded cluster runs one program in all tasks of a step",
        "pty": "the embedded cluster has no terminals",
        "relative": "name the nodes of a step with --nodelist",
    },
)  # fmt: skip

_DEPENDENCY = re.compile(r"(after|afterok|afterany)((?::\d+)+)")


def parse_time(text: str) -> float | None:
    """Seconds of `--time`; None for no limit. Unlike Slurm, seconds are not rounded up to minutes.

    Raises:
        InvalidInput: It is not a time limit.
    """
    if text.upper() in {"UNLIMITED", "INFINITE", "-1"}:
        return None
    seconds = parse_time_limit(text)
    if seconds is None:
        raise InvalidInput("invalid --time specification", subject=text, advice="For example 01:30:00")
    return seconds or None


def parse_count(text: str, option: str) -> int:
    """A number of nodes or tasks; of a range (`2-4`) the lower end.

    Raises:
        InvalidInput: It is not a number above zero.
    """
    number = text.partition("-")[0]
    if not number.isdigit() or int(number) < 1:
        raise InvalidInput(f"invalid number for --{option}", subject=text)
    return int(number)


def parse_dependencies(text: str) -> tuple[tuple[str, int], ...]:
    """Read the value of `--dependency`: `afterok:12:13,afterany:14`.

    Raises:
        InvalidInput: A type that the embedded cluster does not have, or alternatives (`?`).
    """
    found: list[tuple[str, int]] = []
    for part in text.split(","):
        if (match := _DEPENDENCY.fullmatch(part)) is None:
            raise InvalidInput("job dependency problem", subject=part, advice="Use afterok, afterany or after")
        found += [(match[1], int(number)) for number in match[2][1:].split(":")]
    return tuple(found)


def check_export(options: Mapping[str, str], command: str) -> None:
    """Check that jobs and steps are to get the whole environment.

    Raises:
        InvalidInput: `--export` names less or more of it.
    """
    if options.get("export", "ALL") != "ALL":
        reason = "jobs and steps of the embedded cluster get the whole environment"
        raise InvalidInput(f"--export={options['export']} is not possible here: {reason}", subject=command)


# --- nodes, tasks and file names --------------------------------------------------------------------------------------

_NAME = re.compile(r"(?:[^,\[\]]|\[[^\]]*\])+")
_PIECE = re.compile(r"\[[^\]]*\]|[^\[\]]+")
_PATTERN = re.compile(r"%([%A-Za-z])")


def simulated_nodes(count: int) -> list[str]:
    """The simulated nodes of a job of `count` nodes: node1, node2... All are this machine."""
    return [f"node{number}" for number in range(1, count + 1)]


def node_expression(nodes: Sequence[str]) -> str:
    """Nodes as Slurm abbreviates them: `node1`, `node[1-4]`; others than the first ones as `node2,node4`."""
    is_first = len(nodes) > 1 and list(nodes) == simulated_nodes(len(nodes))
    return f"node[1-{len(nodes)}]" if is_first else ",".join(nodes)


def hostnames(expression: str) -> list[str]:
    """The names in one of Slurm's node expressions: `node[1-2,05-06],login` has five, `rack[1-2]n[1-2]` four."""
    words = [_PIECE.findall(word) for word in _NAME.findall(expression)]
    return ["".join(name) for pieces in words for name in itertools.product(*map(_choices, pieces))]


def _choices(piece: str) -> list[str]:
    """What may stand at the place of a piece of a name: itself, or each of the numbers in its brackets."""
    if not piece.startswith("["):
        return [piece]
    found: list[str] = []
    for part in piece.strip("[]").split(","):
        first, _, last = part.partition("-")
        numbers = range(int(first), int(last) + 1) if first.isdigit() and last.isdigit() else ()
        found += [f"{number:0{len(first)}}" for number in numbers] or [f"[{part}]" if last else part]
    return found


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
    """Fill in a file name pattern (sbatch(1), "filename pattern"): `log-%x-%j.out`; an unknown letter stays as it is.

    Args:
        pattern: The name.
        values: By letter: j job id, x job name, u user, s step...
    """
    return _PATTERN.sub(lambda found: "%" if found[1] == "%" else str(values.get(found[1], found[0])), pattern)
