"""The Slurm executor of NeMo-Run for a practice run."""

import os

import nemo_run as run
from nemo_run.config import get_nemorun_home
from nemo_run.core.execution.launcher import SlurmTemplate

# NeMo-Run renders an inline template as HTML unless told that a value is safe: quotes would become entities.
_TASK = """
set -euo pipefail
{% for command in commands %}{{ command | safe }}
{% endfor %}exec {{ command | safe }}
"""

# Options that only a Slurm with pyxis and pmix knows.
_CONTAINER_SRUN_ARGS = ["--mpi=pmix", "--no-container-mount-home", "--container-writable"]


def slurm_executor(args, *, nodes, tasks_per_node, container_image, mounts, env_vars):
    """Build the executor; without a container nothing is asked of Slurm that a plain one refuses."""
    in_container = container_image is not None
    return run.SlurmExecutor(
        account=args.account,
        partition=args.partition,
        tunnel=run.LocalTunnel(job_dir=os.path.join(get_nemorun_home(), "experiments")),
        nodes=nodes,
        ntasks_per_node=tasks_per_node,
        gres=args.gres,
        container_image=container_image,
        container_mounts=mounts if in_container else [],
        container_env=sorted(env_vars) if in_container else None,
        env_vars=env_vars | nemo_run_variables(),
        srun_args=[*args.custom_srun_args, *(_CONTAINER_SRUN_ARGS if in_container else ())],
        time=args.time_limit,
        mem="0",
        exclusive=True,
        packager=run.GitArchivePackager(include_submodules=False) if args.packager == "git" else run.Packager(),
        # A block of nodes on one NVLink domain; sbatch knows the option since Slurm 23.11 only.
        segment=nodes if in_container and tasks_per_node == 4 else None,
        launcher=SlurmTemplate(
            template_inline=_TASK,
            template_vars={"commands": [" ".join(words) for words in args.custom_bash_cmds or ()]},
        ),
        additional_parameters=args.additional_slurm_params,
    )


def nemo_run_variables():
    """What the pinned NeMo-Run gives every job; nothing from one that names no variables."""
    try:
        from nemo_run_practice import VARIABLES
    except ImportError:
        return {}
    return VARIABLES
