"""The options that the embedded cluster accepts of sbatch and srun (sbatch(1), srun(1), Slurm 25.05).

It accepts every option that Slurm knows. What cannot matter on one machine (accounts, memory, GPUs, binding) is
ignored; what would change the job's meaning and does not exist here is refused by name.
"""

import dataclasses
import re
from collections.abc import Mapping

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
        raise InvalidInput("invalid --time specification", thing=text, advice="For example 01:30:00")
    return seconds or None


def parse_count(text: str, option: str) -> int:
    """A number of nodes or tasks; of a range (`2-4`) the lower end.

    Raises:
        InvalidInput: It is not a number above zero.
    """
    number = text.partition("-")[0]
    if not number.isdigit() or int(number) < 1:
        raise InvalidInput(f"invalid number for --{option}", thing=text)
    return int(number)


def parse_dependencies(text: str) -> tuple[tuple[str, int], ...]:
    """Read the value of `--dependency`: `afterok:12:13,afterany:14`.

    Raises:
        InvalidInput: A type that the embedded cluster does not have, or alternatives (`?`).
    """
    found: list[tuple[str, int]] = []
    for part in text.split(","):
        if (match := _DEPENDENCY.fullmatch(part)) is None:
            raise InvalidInput("job dependency problem", thing=part, advice="Use afterok, afterany or after")
        found += [(match[1], int(number)) for number in match[2][1:].split(":")]
    return tuple(found)


def exported(environment: Mapping[str, str], export: str) -> dict[str, str]:
    """What `--export` lets through: ALL, NONE, `ALL,NAME=value`, or a list of names. Slurm's own variables always."""
    items = [item for item in export.split(",") if item]
    everything = not items or "ALL" in items
    kept = {name: value for name, value in environment.items() if everything or _always_exported(name)}
    for item in items:
        name, equals, value = item.partition("=")
        if equals:
            kept[name] = value
        elif name in environment:
            kept[name] = environment[name]
    return kept


def _always_exported(name: str) -> bool:
    return name.startswith(("SLURM_", "NIGHTBRIDGE_LOCAL_")) or name in {"PATH", "HOME", "USER", "SHELL"}
