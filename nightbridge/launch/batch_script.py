"""A batch script for a program that torchrun starts on every node: srun, once per node, in the container if any.

Every word is quoted here, so whatever a test says arrives as it was written.
"""

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

RENDEZVOUS = "@RENDEZVOUS@"
"""Placeholder in a command for torchrun's options that only a node of the running job knows."""

_PORT = 29500
"""torchrun's own default; a job has its nodes for itself."""

_ON_NODE = (
    '--node-rank="$SLURM_NODEID"',
    '--master-addr="$NIGHTBRIDGE_FIRST_NODE"',
    f"--master-port={_PORT}",
)


@dataclass(frozen=True)
class Container:
    """Options of pyxis: a .sqsh and mounts as `HOST:CONTAINER[:flags]`."""

    image: str
    mounts: tuple[str, ...]


@dataclass(frozen=True)
class BatchScript:
    """Everything that the script says.

    Attributes:
        directives: sbatch's long options and their values.
        variables: Environment of the program.
        expanded: Names of variables whose values refer to variables of the job, as `${NAME}`.
        command: Words that each node runs, with `RENDEZVOUS` among them.
        container: None without one.
        log_prefix: The program's output goes to this and `<job id>_<restart count>.out`, as NeMo-Run's logs do.
        folder: Working directory of the program.
        made: Folders to make on the host before the program starts.

    """

    directives: tuple[tuple[str, str], ...]
    variables: Mapping[str, str]
    expanded: tuple[str, ...]
    command: tuple[str, ...]
    container: Container | None
    log_prefix: str
    folder: Path
    made: tuple[Path, ...]


def render(script: BatchScript) -> str:
    """Write the script."""
    lines = ["#!/bin/bash", *(f"#SBATCH --{option}={value}" for option, value in script.directives), ""]
    lines += ["set -euo pipefail", ""]
    lines += [_export(name, value, name in script.expanded) for name, value in sorted(script.variables.items())]
    lines += ['NIGHTBRIDGE_FIRST_NODE=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)']
    lines += ["export NIGHTBRIDGE_FIRST_NODE", ""]
    lines += [f"mkdir -p {shlex.join(str(folder) for folder in script.made)}", ""]
    log = f'{shlex.quote(script.log_prefix)}%j_"${{SLURM_RESTART_COUNT:-0}}".out'
    options = ["--ntasks-per-node=1", "--kill-on-bad-exit=1", f"--output={log}", *_container_options(script)]
    lines += ["srun \\", *(f"    {option} \\" for option in options)]
    lines += [f"    bash -c {shlex.quote(_on_each_node(script))}", ""]
    return "\n".join(lines)


def _export(name: str, value: str, expands: bool) -> str:
    return f'export {name}="{value}"' if expands else f"export {name}={shlex.quote(value)}"


def _container_options(script: BatchScript) -> list[str]:
    if script.container is None:
        return [f"--chdir={shlex.quote(str(script.folder))}"]
    return [
        f"--container-image={shlex.quote(script.container.image)}",
        f"--container-mounts={shlex.quote(','.join(script.container.mounts))}",
        f"--container-workdir={shlex.quote(str(script.folder))}",
        "--no-container-mount-home",
    ]


def _on_each_node(script: BatchScript) -> str:
    words = [piece for word in script.command for piece in (_ON_NODE if word == RENDEZVOUS else (shlex.quote(word),))]
    return " ".join(["exec", *words])
