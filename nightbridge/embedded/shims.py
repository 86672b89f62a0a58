"""Slurm's commands for the embedded cluster's PATH, and how its processes start Python."""

import os
import shlex
from collections.abc import Sequence
from pathlib import Path

from nightbridge.files import write_atomically
from nightbridge.own_programs import own_program

_SERVED = ("sbatch", "srun", "scontrol", "squeue", "sacct")
# These name the alternative: a real Slurm's, later on the PATH, would act on other jobs of that number.
_REFUSED = ("salloc", "sattach", "sbcast", "scancel", "sinfo", "sstat")


def python_command(module: str, arguments: Sequence[str] = ()) -> list[str]:
    """The command line that calls `main(arguments)` of one of our modules.

    Without `site` (`-S`): the environment's packages are not needed, and looking for them takes time.
    """
    return own_program(module, arguments, python_options=("-S",))


def path_with_shims(root: Path) -> str:
    """The PATH of this process with a cluster's commands first."""
    return os.pathsep.join((str(root / "bin"), os.environ.get("PATH", os.defpath)))


def write_shims(root: Path) -> None:
    """Write the commands as small shell scripts that start this Python, where they are not there yet."""
    for command in (*_SERVED, *_REFUSED):
        words = python_command("nightbridge.embedded.commands", [str(root), command])
        text = f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n'
        path = root / "bin" / command
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            write_atomically(path, text.encode())
        if path.stat().st_mode & 0o111 != 0o111:
            path.chmod(0o755)
