"""The environment that Slurm's commands and the launcher get: the caller's, without what would steer or leak."""

import os
from collections.abc import Mapping

# Slurm's own commands read these as options (sbatch(1), "INPUT ENVIRONMENT VARIABLES"), and a caller that is itself a
# job has dozens of them. SLURM_CONF alone says which cluster is meant.
_SLURM_PREFIXES = (
    "SLURM_",
    "SLURMD_",
    "SBATCH_",
    "SALLOC_",
    "SRUN_",
    "SQUEUE_",
    "SACCT_",
    "SINFO_",
    "SCANCEL_",
    "SCONTROL_",
)
_SLURM_KEPT = frozenset({"SLURM_CONF"})

# sbatch hands its environment on to the job. These belong to the process that runs the pipeline: where its Prefect and
# its store are, with what keys, and which Python it is.
_OWN_PREFIXES = ("PREFECT_", "AWS_", "NIGHTBRIDGE_")
_OWN_NAMES = frozenset({"PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "VIRTUAL_ENV_PROMPT", "__PYVENV_LAUNCHER__"})

# What the submit stage adds for the launcher alone, and the shim takes away again before it submits. (Not
# PYTHONDONTWRITEBYTECODE: a job that has the checkout mounted must not write into it either.)
LAUNCHER_ONLY = frozenset({"NIGHTBRIDGE_ATTEMPT", "COLUMNS"})


def without_slurm(environ: Mapping[str, str]) -> dict[str, str]:
    """`environ` without the variables that Slurm's commands would take for options; SLURM_CONF stays."""
    return {
        name: value for name, value in environ.items() if name in _SLURM_KEPT or not name.startswith(_SLURM_PREFIXES)
    }


def launcher_base(environ: Mapping[str, str]) -> dict[str, str]:
    """`environ` without Slurm's variables and without what belongs to the pipeline's own process."""
    return {
        name: value
        for name, value in without_slurm(environ).items()
        if name not in _OWN_NAMES and not name.startswith(_OWN_PREFIXES)
    }


def without_folder(path: str, folder: str) -> str:
    """A PATH without one of its folders."""
    return os.pathsep.join(part for part in path.split(os.pathsep) if part.rstrip("/") != folder.rstrip("/"))
