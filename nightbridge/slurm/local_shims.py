"""Slurm's commands for the embedded cluster's PATH, and how its processes start Python."""

import shlex
from collections.abc import Sequence
from pathlib import Path

from nightbridge.files import write_atomically
from nightbridge.own_programs import own_program

COMMANDS = ("sbatch", "srun", "scontrol", "squeue", "sacct", "scancel", "sinfo")


def python_command(module: str, arguments: Sequence[str] = ()) -> list[str]:
    """The command line that calls `main(arguments)` of one of our modules.

    Without `site` (`-S`): the environment's packages are not needed, and looking for them takes time.
    """
    return own_program(module, arguments, python_options=("-S",))


def shims_dir(root: Path) -> Path:
    """The folder that comes first on the PATH of jobs and launchers."""
    return root / "bin"


def write_shims(root: Path) -> None:
    """Write the commands as tiny shell scripts that start this Python; nothing is done where they are there already."""
    for command in COMMANDS:
        words = python_command("nightbridge.slurm.local_commands", [command])
        text = f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n'
        path = shims_dir(root) / command
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            write_atomically(path, text.encode())
        if path.stat().st_mode & 0o111 != 0o111:
            path.chmod(0o755)
