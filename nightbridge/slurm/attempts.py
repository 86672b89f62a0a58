"""A run's attempts: which one to work on, which have ended and how, and whether another may be opened.

Crashes and transient errors stay in the attempt: whoever comes back goes on with it. Only a terminal infrastructure
outcome, or a person, opens the next one.

Nodes that failed under an earlier attempt of a run are left out of the next one.
"""

import enum
import logging
import re
from collections.abc import Sequence
from pathlib import Path

from nightbridge.files import read_model, write_model
from nightbridge.models import ClusterLimits, Job, JobState, JobStatus, LaunchPlan, Outcome, RunSpec, Site
from nightbridge.slurm.attempt_files import (
    ATTEMPT_FILE,
    AttemptContext,
    current_attempt,
    open_attempt,
    read_attempt,
)
from nightbridge.slurm.protocol import Cluster
from nightbridge.slurm.states import TERMINAL

log = logging.getLogger(__name__)

ENDED_FILE = "ended.json"
GOOD_OUTCOMES = (Outcome.SUCCEEDED, Outcome.TEARDOWN)


def attempts_of(run_key: str, workspace: Path) -> tuple[AttemptContext, ...]:
    """Every recorded attempt of a run, oldest first.

    A folder without a record is none: its opener died in between, and nothing was submitted from it.

    Raises:
        DamagedData: A record cannot be read.

    """
    records = (workspace.absolute() / "runs" / run_key).glob(f"a[0-9]*/{ATTEMPT_FILE}")
    return tuple(sorted((read_attempt(record.parent) for record in records), key=lambda attempt: attempt.attempt))


def record_ended(job: Job) -> None:
    """Record what became of an attempt's job, beside the attempt."""
    write_model(job.attempt_dir / ENDED_FILE, job)


def read_ended(attempt_dir: Path) -> Job | None:
    """What became of an attempt's job; None while it lives, or while nobody has looked.

    Raises:
        DamagedData: The record cannot be read.

    """
    return read_model(
        attempt_dir / ENDED_FILE, Job, what="cannot be read", advice="Remove it; the job is looked up again"
    )


def ended_jobs(run: RunSpec, site: Site) -> tuple[Job, ...]:
    """The ended jobs of a run's attempts, oldest first."""
    jobs = (read_ended(attempt.attempt_dir) for attempt in attempts_of(run.run_key, site.workspace))
    return tuple(job for job in jobs if job is not None)


class AttemptChoice(enum.StrEnum):
    """Which attempt a run goes on with."""

    CURRENT = "current"  # the newest, or the first of a new run
    AFTER_FAILURE = "after_failure"  # a new one if the newest ended badly: what a retry in the UI asks for
    NEW = "new"  # a new one however the newest ended: what --new-attempt asks for


def choose_attempt(choice: AttemptChoice, run: RunSpec, site: Site) -> AttemptContext:
    """Return the attempt to go on with, opened and recorded.

    While the newest attempt has not ended it is that one, whatever was chosen: one job is enough.
    """
    newest = current_attempt(site.workspace, run.run_key, site.cluster)
    ended = read_ended(newest.attempt_dir)
    if choice is AttemptChoice.CURRENT:
        return newest
    if ended is None:
        log.info("%s has not ended: going on with it; for another attempt cancel it first", newest.name)
        return newest
    if choice is AttemptChoice.AFTER_FAILURE and ended.outcome in GOOD_OUTCOMES:
        return newest
    return next_attempt(run, site)


def next_attempt(run: RunSpec, site: Site) -> AttemptContext:
    """Open the next attempt."""
    return open_attempt(site.workspace, run.run_key, site.cluster)


def may_try_again(run: RunSpec, site: Site) -> bool:
    """Whether the newest attempt failed for the cluster's reasons, and not too often before."""
    jobs = ended_jobs(run, site)
    failures = sum(job.outcome is Outcome.INFRASTRUCTURE for job in jobs)
    return bool(jobs) and jobs[-1].outcome is Outcome.INFRASTRUCTURE and failures < site.cluster.max_attempts


def jobs_of(attempt: AttemptContext, cluster: Cluster) -> tuple[JobStatus, ...]:
    """The jobs of an attempt's name that the cluster knows; by name, so that no record of ours is needed."""
    return cluster.find(attempt.name).jobs


def cancel_jobs(run_key: str, workspace: Path, cluster: Cluster) -> tuple[int, ...]:
    """Cancel every live job of a run and return their ids."""
    live = [
        status.job_id
        for attempt in attempts_of(run_key, workspace)
        for status in jobs_of(attempt, cluster)
        if status.state not in TERMINAL
    ]
    for job_id in live:
        cluster.cancel(job_id)
    return tuple(live)


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
