"""Asking Slurm whether it would ever take a job (`sbatch --test-only`), before a launcher spends minutes on it.

How many more jobs a cluster can start at once: for work that may be spread, but need not wait in a queue.
"""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from nightbridge.errors import LaunchRefused
from nightbridge.models import ClusterSettings, LaunchPlan
from nightbridge.processes import run
from nightbridge.slurm.attempt_files import AttemptContext
from nightbridge.slurm.environment import without_slurm
from nightbridge.slurm.protocol import Cluster


def check(plan: LaunchPlan, context: AttemptContext, cluster: Cluster) -> None:
    """Raise what sbatch would refuse for good: the size, the time or the place of a job.

    What may pass, and what no one has heard of, is left to the submission itself. A dependency is left out: it says
    when the job starts, not whether it may. What the launcher adds by itself is not known yet, so sbatch may still
    refuse the job.

    Raises:
        LaunchRefused: sbatch would refuse it; the launcher was not started.

    """
    refusal = cluster.test_only(context.name, tuple(_options(plan, context)))
    if refusal is not None:
        raise LaunchRefused(
            f"{refusal.what}; the launcher was not started", thing=refusal.thing, advice=refusal.advice
        ) from refusal


def _options(plan: LaunchPlan, context: AttemptContext) -> Iterator[str]:
    yield f"--nodes={plan.nodes}"
    yield f"--ntasks-per-node={plan.tasks_per_node}"
    if plan.time_limit_seconds is not None:
        yield f"--time={-(-plan.time_limit_seconds // 60)}"
    place = {"partition": context.cluster.partition, "account": context.cluster.account}
    yield from (f"--{option}={value}" for option, value in place.items() if value)
    given = (*context.sbatch_options, *plan.sbatch_args)
    yield from (option for option in given if not option.startswith("--dependency"))


TIMEOUT = 30.0


def available_slots(settings: ClusterSettings, nodes: int) -> int:
    """Jobs of so many nodes that would start now; at least 1, also where the cluster does not say.

    On Slurm the idle nodes of the partition are counted (sinfo); on this machine the slots.
    """
    if settings.kind == "local":
        return settings.slots
    program = settings.bin_dir / "sinfo" if settings.bin_dir else shutil.which("sinfo")
    if program is None or not Path(program).exists():
        return 1
    environment = dict(without_slurm(os.environ))
    if settings.slurm_conf:
        environment["SLURM_CONF"] = str(settings.slurm_conf)
    partition = (f"--partition={settings.partition}",) if settings.partition else ()
    said = run(
        [program, "--noheader", "--states=idle", "--format=%D", *partition], environment=environment, timeout=TIMEOUT
    )
    idle = sum(int(word) for word in _text(said.stdout).split() if word.isdigit())
    return max(1, idle // max(nodes, 1))


def _text(output: bytes) -> str:
    return output.decode(errors="replace")
