"""Asking Slurm whether it would ever take a job (`sbatch --test-only`), before a launcher spends minutes on it."""

from collections.abc import Iterator

from nightbridge.errors import LaunchRefused
from nightbridge.models import LaunchPlan
from nightbridge.slurm.attempts import AttemptContext
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
