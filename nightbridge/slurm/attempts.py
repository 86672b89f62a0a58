"""A run's attempts: which one to work on, how the earlier ones ended, and what that means for the next job.

Crashes and transient errors stay in the attempt: a flow that starts again resumes it. Only a terminal infrastructure
outcome, or a person, opens the next one, whose job leaves out the nodes that failed before. Also here: dependencies
between the runs of a night as dependencies between Slurm jobs.
"""

import contextlib
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import NamedTuple

from pydantic import Field

from nightbridge.embedded.notation import hostnames
from nightbridge.errors import InvalidInput, LaunchRefused, NightbridgeError, StatusUnknown
from nightbridge.models import (
    ClusterLimits,
    ClusterSettings,
    Job,
    JobState,
    LaunchPlan,
    Model,
    Outcome,
    RunDependency,
    RunSpec,
    Site,
    utc_now,
)
from nightbridge.sbatch_options import (
    NOT_ONE_JOB,
    OWN_OPTIONS,
    SBATCH,
    option_names,
    parse_time_limit,
    script_options,
    split_options,
)
from nightbridge.slurm.attempt_files import (
    ATTEMPT_FILE,
    ENDED_FILE,
    AttemptContext,
    Submission,
    attempt_numbers,
    check_can_know,
    claiming_submission,
    current_attempt,
    open_attempt,
    own_jobs,
    read_attempt,
    read_cancellation,
    read_ended,
    read_intents,
)
from nightbridge.slurm.protocol import Cluster, Lookup
from nightbridge.slurm.script import read_script
from nightbridge.slurm.states import TERMINAL, live_jobs
from nightbridge.store.parallel import in_parallel

log = logging.getLogger(__name__)

GOOD_OUTCOMES = (Outcome.SUCCEEDED, Outcome.TEARDOWN)


def attempts_of(run_key: str, workspace: Path) -> tuple[AttemptContext, ...]:
    """Every recorded attempt of a run, oldest first.

    A folder without a record is none: its opener died in between, and nothing was submitted from it.

    Raises:
        DamagedData: A record cannot be read.
    """
    run_dir = workspace.absolute() / "runs" / run_key
    folders = (run_dir / f"a{number}" for number in attempt_numbers(run_dir))
    return tuple(read_attempt(folder) for folder in folders if (folder / ATTEMPT_FILE).exists())


def ended_jobs(run: RunSpec, site: Site) -> tuple[Job, ...]:
    """The ended jobs of a run's attempts, oldest first."""
    jobs = (read_ended(attempt.attempt_dir) for attempt in attempts_of(run.run_key, site.workspace))
    return tuple(job for job in jobs if job is not None)


class AttemptRequest(Model):
    """When a person requested new attempts of the runs that had ended by then; without any request nothing is opened.

    It is never used up: what ends later answers it. So every try and every restart may repeat it, and none forgets it.
    """

    new: datetime | None = Field(None, description="However the newest attempt had ended: `--new-attempt`.")
    after_failure: datetime | None = Field(None, description="Where it had ended badly: `--retry`, or Retry in the UI.")

    def is_later_than(self, attempt: AttemptContext) -> bool:
        """Whether anything was requested after this attempt had been opened."""
        return any(at is not None and attempt.opened_at < at for at in (self.new, self.after_failure))

    def is_open_for(self, attempt: AttemptContext) -> bool:
        """Whether a new attempt was requested after this one, a run's newest, had ended."""
        ended = read_ended(attempt.attempt_dir)
        if ended is None:
            return False
        # The times are of this host or Prefect's, and of the file server. Clocks that differ by seconds are no harm:
        # the end is recorded before harvest and verdict, and a new attempt's job takes longer than that to end.
        recorded_at = datetime.fromtimestamp((attempt.attempt_dir / ENDED_FILE).stat().st_mtime, UTC)
        after_failure = None if ended.outcome in GOOD_OUTCOMES else self.after_failure
        return any(at is not None and recorded_at < at for at in (self.new, after_failure))


NO_REQUEST = AttemptRequest()
"""The newest attempt is worked on, however it ended."""


def choose_attempt(request: AttemptRequest, run: RunSpec, site: Site) -> AttemptContext:
    """Return the attempt to work on, opened and recorded.

    While the newest attempt has not ended it is that one, whatever was requested: one job is enough.
    """
    newest = current_attempt(site.workspace, run.run_key, site.cluster)
    if request.is_open_for(newest):
        return next_attempt(run, site, after=newest.attempt)
    if request.is_later_than(newest) and read_ended(newest.attempt_dir) is None:
        log.info("%s is still running, resuming it; cancel it to start a new attempt", newest.name)
    return newest


def next_attempt(run: RunSpec, site: Site, *, after: int) -> AttemptContext:
    """Open the attempt that follows one, or go on with it where another process has opened it."""
    return open_attempt(site.workspace, run.run_key, site.cluster, after + 1)


def may_try_again(jobs: Sequence[Job], settings: ClusterSettings) -> bool:
    """Whether the newest of a run's ended jobs failed for the cluster's reasons, and not too often before."""
    failures = sum(job.outcome is Outcome.INFRASTRUCTURE for job in jobs)
    return bool(jobs) and jobs[-1].outcome is Outcome.INFRASTRUCTURE and failures < settings.max_attempts


_MAX_SHOWN = 3
"""Doubts that a message shows; the others are counted."""


class CancelledJobs(NamedTuple):
    """The jobs that a cancellation has reached, and why others may live on."""

    jobs: tuple[tuple[str, int], ...]
    """Run key and id of each job."""
    doubts: tuple[str, ...]
    """What failed or was not answered, for each attempt; none when it is known that no job of the runs lives on."""

    def check(self, subject: str) -> None:
        """Raise where a job may live on.

        Raises:
            StatusUnknown: One may.
        """
        if self.doubts:
            shown = [*self.doubts[:_MAX_SHOWN]]
            shown += [f"and {len(self.doubts) - _MAX_SHOWN} more"] if len(self.doubts) > _MAX_SHOWN else []
            raise StatusUnknown(
                f"not every job is known to be cancelled: {'; '.join(shown)}", subject=subject, advice="Cancel it again"
            )


def cancel_jobs(run_keys: Iterable[str], workspace: Path, cluster: Cluster) -> CancelledJobs:
    """Cancel every live job of these runs, whatever their attempt; what fails for one job spares no other.

    Several at once: a Slurm that does not answer takes a minute each to say so, and a person waits.
    """
    found = in_parallel(partial(_cancel_run, workspace=workspace.absolute(), cluster=cluster), list(run_keys))
    return CancelledJobs(
        jobs=tuple(job for run in found for job in run.jobs),
        doubts=tuple(doubt for run in found for doubt in run.doubts),
    )


def _cancel_run(run_key: str, workspace: Path, cluster: Cluster) -> CancelledJobs:
    jobs: list[tuple[str, int]] = []
    doubts: list[str] = []
    with _noted(doubts, run_key):
        # By their folders: a record that is damaged or missing must not keep a job alive.
        for attempt_dir in sorted((workspace / "runs" / run_key).glob("a[1-9]*")):
            name = f"{run_key}-{attempt_dir.name}"
            with _noted(doubts, name):
                lookup = own_jobs(attempt_dir, cluster)
                for job in (job for job in lookup.others if job.state not in TERMINAL):
                    log.warning("job %d has the name %s, and is another workspace's: left alone", job.job_id, name)
                for job_id in live_jobs(name, lookup, cluster.states):
                    with _noted(doubts, name):
                        cluster.cancel(job_id)
                        jobs.append((run_key, job_id))
                _check_certain(lookup, attempt_dir, cluster)
    return CancelledJobs(tuple(jobs), tuple(doubts))


@contextlib.contextmanager
def _noted(doubts: list[str], name: str) -> Iterator[None]:
    try:
        yield
    except (NightbridgeError, OSError) as error:
        doubts.append(f"{name}: {error.happened if isinstance(error, NightbridgeError) else error}")


def _check_certain(lookup: Lookup, attempt_dir: Path, cluster: Cluster) -> None:
    """Raise where the attempt may have a job that the lookup does not show."""
    if not lookup.complete:
        raise StatusUnknown("squeue or sacct did not answer")
    if lookup.jobs:
        return
    check_can_know(attempt_dir, cluster)
    for intent in read_intents(attempt_dir):
        age = (utc_now() - intent.at).total_seconds()
        if age < cluster.accounting_horizon:
            raise StatusUnknown(f"{intent.host} may have submitted it {age:.0f} s ago")


# Slurm took these jobs away from nodes that are well.
_NOT_THE_NODES = frozenset({JobState.PREEMPTED, JobState.REVOKED, JobState.UNKNOWN})
# What srun and slurmstepd write when they lose one node of several.
_NODE_FAILURE = re.compile(r"(?:[Nn]ode failure|prolog failed) on ([\w.-]+)")


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
    """The plan with `--exclude` for the nodes that failed before, unless the cluster has too few others."""
    failed = failed_nodes(jobs)
    if not failed or (limits.max_nodes is not None and limits.max_nodes - len(failed) < plan.nodes):
        return plan
    return plan.model_copy(update={"sbatch_args": (*plan.sbatch_args, f"--exclude={','.join(failed)}")})


def fitting_options(options: Sequence[str], script: str) -> list[str]:
    """Options for sbatch, with one `--exclude` that fits what they and the script's #SBATCH lines say of nodes.

    Of an option that is given twice sbatch takes the last, and an option replaces the script's own: lists of nodes to
    exclude are joined here, and so is what the job waits for. A node that is both required and excluded would be
    refused. Of the options that nightbridge decides itself none is left; one with a value, the job's name, is
    overridden.

    Raises:
        LaunchRefused: With them the attempt has no job, several, or one that is not found (`NOT_ONE_JOB`).
    """
    others = [option for option in options if not _is_own_switch(option)]
    kept = _with_one_dependency([option for option in others if not option.startswith("--exclude=")], script)
    given = _named_options([*_script_words(script), *kept])
    for name in NOT_ONE_JOB.keys() & given.keys():
        what, advice = NOT_ONE_JOB[name]
        raise LaunchRefused(
            f"an option of the launcher, its script, the test or the site {what}",
            subject=f"--{name}={given[name]}".removesuffix("="),
            advice=advice[:1].upper() + advice[1:],
        )
    failed = [_listed(option.removeprefix("--exclude=")) for option in others if option.startswith("--exclude=")]
    required = hostnames(_listed(given.get("nodelist", "")))
    excluded = dict.fromkeys(hostnames(",".join([*failed, _listed(given.get("exclude", ""))])))
    fitting = [node for node in excluded if node not in required]
    return [*kept, f"--exclude={','.join(fitting)}"] if failed and fitting else kept


def requested_seconds(attempt: AttemptContext, script: Path) -> int | None:
    """The time limit that a job was submitted with: of the attempt's options, else of its script; None without one."""
    try:
        text = read_script(script)
    except LaunchRefused:
        return None
    given = _named_options([*_script_words(text), *attempt.sbatch_options])
    return parse_time_limit(given.get("time", ""))


def _with_one_dependency(options: Sequence[str], script: str) -> list[str]:
    """Options with all that the job waits for, by its script as well, in one of them: sbatch takes the last alone."""
    others = [option for option in options if option_names(option) != {"dependency"}]
    if len(others) == len(options):
        return others
    in_options = [_named_options([option])["dependency"] for option in options if option not in others]
    in_script = _named_options(_script_words(script)).get("dependency", "")
    waits = dict.fromkeys(filter(None, (in_script, *in_options)))
    return [*others, f"--dependency={','.join(waits)}"]


def _listed(nodes: str) -> str:
    """A list of nodes for sbatch, which may be a file of them: read here, for it cannot be joined with other nodes."""
    if not nodes.startswith("/"):
        return nodes
    try:
        lines = Path(nodes).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        return nodes  # sbatch refuses it in its own words
    return ",".join(filter(None, (line.partition("#")[0].strip() for line in lines)))


def _is_own_switch(option: str) -> bool:
    names = option_names(option)
    return bool(names) and names <= OWN_OPTIONS and not any(SBATCH.takes[name] == "value" for name in names)


def _script_words(script: str) -> list[str]:
    try:
        return script_options(script)
    except ValueError:
        return []  # sbatch refuses it in its own words


def _named_options(words: Sequence[str]) -> dict[str, str]:
    """Options with their values, besides those of plugins, whose form is not known."""
    try:
        return split_options(words, SBATCH)[0]
    except InvalidInput:
        named: dict[str, str] = {}
        for word, after in zip(words, [*words[1:], ""], strict=True):
            with contextlib.suppress(InvalidInput):
                named |= split_options([word, "" if after.startswith("-") else after], SBATCH)[0]
        return named


SLURM_TYPES: Mapping[str, str] = {
    "start_post_comp": "afterany",
    "start_post_init": "after",
    "start_post_success": "afterok",
}
"""CloudAI's types of dependency, and ours, as types of sbatch's `--dependency`. An `afterok` that can never be
satisfied leaves the job pending as DependencyNeverSatisfied, which ends the wait for it."""


_NEVER_SATISFIED = "DependencyNeverSatisfied"
"""Slurm's reason of a job that waits for the success of one that has failed, whoever ends that wait."""


def lacked_a_dependency(job: Job) -> bool:
    """Whether an ended job never started because one that it depends on had failed."""
    cancellation = read_cancellation(job.attempt_dir)
    said = (job.status.reason if job.status else "", cancellation.reason if cancellation else "")
    return job.outcome is Outcome.NEVER_STARTED and any(_NEVER_SATISFIED in reason for reason in said)


def unrecorded_ends(
    run: RunSpec, workspace: Path, is_active: Callable[[str], bool], cluster: Cluster
) -> tuple[int, ...]:
    """The jobs that a run depends on and that are over for Slurm, while their ends are still to be recorded.

    Slurm forgets a job some minutes after its end, and nothing waits for one that it has forgotten, however that ended:
    "job is gone, dependency lifted" (job_scheduler.c of Slurm 22.05 to 26.05).

    Raises:
        StatusUnknown: Slurm did not answer.
        CannotKnow: The job is in another cluster, or another user's.
        LaunchRefused: A job that had to end well is over, and the run that it belongs to failed before it recorded how.
    """
    over: list[int] = []
    for dependency, run_key in ((each, run_key) for each in run.after for run_key in each.run_keys):
        # Checked before the records are read: what is recorded in between is seen there.
        is_watched = is_active(run_key)
        submission, ended = _newest_job(run_key, workspace)
        if submission is None or ended is not None:
            continue
        status = cluster.states([submission.job_id]).get(submission.job_id)
        if status is None or status.name not in ("", submission.name):
            check_can_know(attempts_of(run_key, workspace)[-1].attempt_dir, cluster)
            # Another job got the id after slurmctld lost its state, unless the site has named ours otherwise.
            is_ours = status is not None and cluster.script_of(submission.job_id) == submission.script
            status = status if is_ours else None
        if status is not None and status.state not in TERMINAL:
            continue
        if is_watched:
            over.append(submission.job_id)
        else:
            _check_end(run, dependency, f"failed before it recorded how job {submission.job_id} ended")
    return tuple(over)


class NotSubmittedYet(Exception):
    """A job that another one depends on is still to be submitted, by the run of this key."""


def dependency_options(run: RunSpec, workspace: Path, is_active: Callable[[str], bool]) -> tuple[str, ...]:
    """The sbatch option that makes a run's job wait for the jobs that it depends on; none when all have ended.

    What has ended is judged here and not by Slurm, which forgets a job some minutes after its end.

    `is_active` is whether a run of this night, by its key, may still submit a job.

    Raises:
        NotSubmittedYet: Try again when the run that it names has submitted its job, or is over.
        LaunchRefused: A test that had to end well has not.
    """
    wishes = [
        f"{SLURM_TYPES[dependency.type]}:{job_id}"
        for dependency in run.after
        for job_id in _jobs_to_wait_for(run, dependency, workspace, is_active)
    ]
    return (f"--dependency={','.join(dict.fromkeys(wishes))}",) if wishes else ()


def _jobs_to_wait_for(
    run: RunSpec, dependency: RunDependency, workspace: Path, is_active: Callable[[str], bool]
) -> Iterator[int]:
    if not dependency.run_keys:
        _check_end(run, dependency, "cannot run")
    for run_key in dependency.run_keys:
        # Checked before the records are read: what is submitted in between is seen there.
        may_submit = is_active(run_key)
        submission, ended = _newest_job(run_key, workspace)
        again = may_submit and ended and (ended.outcome is Outcome.INFRASTRUCTURE or lacked_a_dependency(ended))
        if ended is not None and not again:
            _check_end(run, dependency, f"ended as {ended.outcome}", good=ended.outcome in GOOD_OUTCOMES)
        elif ended is None and submission is not None:
            yield submission.job_id
        elif may_submit:
            raise NotSubmittedYet(run_key)
        else:
            _check_end(run, dependency, "never had a job")


def _newest_job(run_key: str, workspace: Path) -> tuple[Submission | None, Job | None]:
    attempts = attempts_of(run_key, workspace)
    if not attempts:
        return None, None
    return claiming_submission(attempts[-1].attempt_dir), read_ended(attempts[-1].attempt_dir)


def _check_end(run: RunSpec, dependency: RunDependency, what: str, *, good: bool = False) -> None:
    if dependency.type == "start_post_success" and not good:
        raise LaunchRefused(
            f"it starts only after {dependency.id!r} has ended well, and that {what}",
            subject=run.test.id,
            advice=f"Fix {dependency.id!r}, or depend on its end alone (start_post_comp)",
        )
