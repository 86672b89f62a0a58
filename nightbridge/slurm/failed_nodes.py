"""Nodes that failed under an earlier attempt of a run are left out of the next one."""

import re
from collections.abc import Sequence

from nightbridge.models import ClusterLimits, Job, JobState, LaunchPlan, Outcome

# Slurm took these jobs away from nodes that are well.
_NOT_THE_NODES = frozenset({JobState.PREEMPTED, JobState.REVOKED, JobState.UNKNOWN})
# What srun and slurmstepd write when they lose one node of several.
_NODE_FAILURE = re.compile(r"[Nn]ode failure on ([\w.-]+)")
_GROUP = re.compile(r"([^,\[\]]+)(?:\[([^\]]*)\]([^,\[\]]*))?")


def failed_nodes(jobs: Sequence[Job]) -> tuple[str, ...]:
    """The nodes on which attempts failed for infrastructure reasons, in order; those that a single node explains.

    Of a job on many nodes only the one that its log names is known to have failed: to leave out all of them would cost
    more than it helps.
    """
    found: dict[str, None] = {}
    for job in jobs:
        if job.outcome is not Outcome.INFRASTRUCTURE or job.status is None or job.status.state in _NOT_THE_NODES:
            continue
        named = _NODE_FAILURE.findall(job.outcome_reason)
        nodes = hostnames(job.status.nodes)
        found.update(dict.fromkeys(named or (nodes if len(nodes) == 1 else ())))
    return tuple(found)


def without_failed_nodes(plan: LaunchPlan, jobs: Sequence[Job], limits: ClusterLimits) -> LaunchPlan:
    """The plan with `--exclude` for the nodes that failed before, where the cluster has enough others.

    Args:
        plan: The plan of the next attempt.
        jobs: The ended jobs of the run's earlier attempts.
        limits: How many nodes a job can have; unknown is enough.

    """
    failed = failed_nodes(jobs)
    if not failed or (limits.max_nodes is not None and limits.max_nodes - len(failed) < plan.nodes):
        return plan
    return plan.model_copy(update={"sbatch_args": (*plan.sbatch_args, f"--exclude={','.join(failed)}")})


def merged_options(options: Sequence[str]) -> tuple[str, ...]:
    """Options of sbatch, each once. Of one that is given twice sbatch takes the last; lists of nodes to exclude add up.

    Nothing is excluded beside a list of nodes to run on: a node in both would be an error.
    """
    kept = [option for option in dict.fromkeys(options) if not option.startswith("--exclude=")]
    excluded = [option.removeprefix("--exclude=") for option in options if option.startswith("--exclude=")]
    if excluded and not any(option.startswith(("--nodelist=", "-w")) for option in kept):
        kept.append(f"--exclude={','.join(dict.fromkeys(excluded))}")
    return tuple(kept)


def hostnames(expression: str) -> tuple[str, ...]:
    """The names in Slurm's node expression: `node[1-2,05-06],login` has five."""
    names: list[str] = []
    for prefix, ranges, suffix in _GROUP.findall(expression):
        names += [f"{prefix}{number}{suffix}" for number in _numbers(ranges)] if ranges else [prefix + suffix]
    return tuple(name for name in names if name)


def _numbers(ranges: str) -> list[str]:
    found: list[str] = []
    for part in ranges.split(","):
        first, _, last = part.partition("-")
        if last.isdigit() and first.isdigit():
            found += [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
        else:
            found.append(part)
    return found
