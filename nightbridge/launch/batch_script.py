"""A batch script for a program that torchrun starts on every node: srun, once per node, in the container if any.

Every word is quoted here, so whatever a test says arrives as it was written.
"""

import shlex
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

RENDEZVOUS = "@RENDEZVOUS@"
"""Placeholder in a command for torchrun's options that only a node of the running job knows."""

_PORT = 29500
"""torchrun's own default; a job has its nodes for itself."""

_ON_NODE = ('--node-rank="$SLURM_NODEID"', '--master-addr="$NIGHTBRIDGE_FIRST_NODE"', f"--master-port={_PORT}")


def render(
    *,
    directives: Iterable[tuple[str, str]],
    variables: Mapping[str, str],
    expanded: Collection[str],
    srun_options: Iterable[str],
    command: Iterable[str],
    log_prefix: str,
    output: Path,
) -> str:
    """Write the script.

    Args:
        directives: sbatch's long options and their values.
        variables: Environment of the program.
        expanded: Names of variables whose values refer to variables of the job, as `${NAME}`.
        srun_options: Options of srun as a shell reads them: the container, or the working directory without one.
        command: Words that each node runs, with `RENDEZVOUS` among them.
        log_prefix: The program's output goes to this and `<job id>_<restart count>.out`, as NeMo-Run's logs do.
        output: Directory to make on the host before the program starts.

    """
    log = f'{shlex.quote(log_prefix)}%j_"${{SLURM_RESTART_COUNT:-0}}".out'
    options = ["--ntasks-per-node=1", "--kill-on-bad-exit=1", f"--output={log}", *srun_options]
    return "\n".join(
        [
            "#!/bin/bash",
            *(f"#SBATCH --{option}={value}" for option, value in directives),
            "",
            "set -euo pipefail",
            "",
            *(_export(name, value, name in expanded) for name, value in sorted(variables.items())),
            'NIGHTBRIDGE_FIRST_NODE=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
            "export NIGHTBRIDGE_FIRST_NODE",
            "",
            f"mkdir -p {shlex.quote(str(output))}",
            "",
            "srun \\",
            *(f"    {option} \\" for option in options),
            f"    bash -c {shlex.quote(_on_each_node(command))}",
            "",
        ]
    )


def _export(name: str, value: str, expands: bool) -> str:
    return f'export {name}="{value}"' if expands else f"export {name}={shlex.quote(value)}"


def _on_each_node(command: Iterable[str]) -> str:
    words = [piece for word in command for piece in (_ON_NODE if word == RENDEZVOUS else (shlex.quote(word),))]
    return " ".join(["exec", *words])
