"""Asking Slurm whether it would take a job, before minutes of a launcher are spent on it (`sbatch --test-only`)."""

from collections.abc import Iterator

from nightbridge.errors import LaunchRefused, PermanentError, TransientError
from nightbridge.models import LaunchPlan
from nightbridge.slurm.attempts import AttemptContext
from nightbridge.slurm.cluster import Cluster
from nightbridge.slurm.command_line import CommandLineCluster

# sbatch's answer to a question about a job that would have to wait for its nodes; the queue is where it waits.
_WOULD_WAIT = ("Required node not available", "Requested nodes are busy", "Required partition not available")


def try_options(plan: LaunchPlan, context: AttemptContext, cluster: Cluster) -> None:
    """Ask whether Slurm would take a job of this size, time and place.

    The embedded cluster takes every job, and is not asked. A dependency is left out: it says when the job starts, not
    whether it may. What the launcher adds by itself is not known yet, so sbatch may still refuse the job.

    Raises:
        LaunchRefused: Slurm would refuse it for good.
        TransientError: Slurm takes no jobs at the moment, or did not answer. No job exists.

    """
    if cluster.settings.kind == "local":
        return
    asked = CommandLineCluster(cluster.settings)
    error = asked.refusal_of_trial(context.name, tuple(_options(plan, context)))
    if error is None or any(text in error.what for text in _WOULD_WAIT):
        return
    if isinstance(error, PermanentError):
        raise LaunchRefused(f"{error.what}; the launcher was not started", thing=error.thing, advice=error.advice)
    raise TransientError(error.what, thing=error.thing, advice="It is asked again") from error


def _options(plan: LaunchPlan, context: AttemptContext) -> Iterator[str]:
    yield f"--nodes={plan.nodes}"
    yield f"--ntasks-per-node={plan.tasks_per_node}"
    if plan.time_limit_seconds is not None:
        yield f"--time={-(-plan.time_limit_seconds // 60)}"
    place = {"partition": context.cluster.partition, "account": context.cluster.account}
    yield from (f"--{option}={value}" for option, value in place.items() if value)
    given = (*context.sbatch_options, *plan.sbatch_args)
    yield from (option for option in given if not option.startswith("--dependency"))
