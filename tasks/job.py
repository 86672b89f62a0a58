"""Stage 4, submit: exactly one Slurm job per attempt; then watch: that job to its true end, and what became of it.

Dependencies: a run whose job waits for another one's needs that job's id first.
"""

import contextlib
import time
from collections.abc import Callable, Sequence
from functools import partial

from prefect.logging import get_run_logger

from nightbridge.errors import LaunchRefused, NightbridgeError, StatusUnknown, TransientError
from nightbridge.masking import mask_text
from nightbridge.models import Job, JobState, JobStatus, LaunchPlan, RunSpec, Site
from nightbridge.outputs.following import LOOK_INTERVAL, LogNews, RunFollower
from nightbridge.outputs.run_evidence import RunToRead, evidence_of
from nightbridge.slurm.attempt_files import (
    newest_intent,
    note_waiting,
    read_attempt,
    read_ended,
    read_submission,
    record_ended,
)
from nightbridge.slurm.attempts import (
    NotSubmittedYet,
    dependency_options,
    lacked_a_dependency,
    may_try_again,
    unrecorded_ends,
)
from nightbridge.slurm.factory import cluster_of
from nightbridge.slurm.outcome import classify_job
from nightbridge.slurm.protocol import JobNotAccepted
from nightbridge.slurm.states import BY_EXIT_FILE, LOST, QUEUED_AGAIN, WAITING, live_jobs, waiting_words
from nightbridge.slurm.submission import submit_attempt
from nightbridge.tasks.context import raise_if_interrupted, this_night, wait_out
from nightbridge.tasks.limits import job_slots
from nightbridge.tasks.prefect_calls import PrefectAway, ProgressArtifact
from nightbridge.tasks.site_access import resolve_all, secret_variables, site_secrets
from nightbridge.tasks.stage import first_delay, stage

_LOOK_AGAIN = 2.0
"""Seconds between two looks at whether another run has submitted its job."""

_NOT_MASKED = "not shown, as it may quote secrets that could not be looked up"
"""Stands for a text that could not be masked."""

_WAITING_LOG_INTERVAL = 1800.0
"""Seconds between two lines of the log about a job that is still waiting."""


@stage("submit", waits_for=(JobNotAccepted, StatusUnknown, PrefectAway))
def submit(run: RunSpec, plan: LaunchPlan, site: Site) -> Job:
    """Submit the attempt through the upstream launcher, or find the job that it already has.

    A controller that is away and a limit that is reached are waited for, hours if it must be. What the run depends on
    may end meanwhile, and Slurm forget it: each try looks anew.

    Raises:
        NotSubmittedYet: A job that it depends on failed for the cluster's reasons, and another one will take its place.
        LaunchRefused: A test that had to end well has not, or Slurm refused the job for good.
    """
    job = submit_attempt(
        plan,
        read_attempt(plan.attempt_dir),
        cluster_of(site),
        resolve_all(plan.secret_environment),
        dependencies=lambda: _dependencies(run, site),
        withheld=secret_variables(site),
    )
    get_run_logger().info("job %d on %s is %s", job.job_id, job.cluster, job.name)
    return job


def _dependencies(run: RunSpec, site: Site) -> tuple[str, ...]:
    """The options with which a job is submitted for the jobs that it depends on.

    Raises:
        JobNotAccepted: One of them is over, and how it ended is not recorded yet: Slurm might start this job anyway.
    """
    may_submit = this_night().may_submit
    if over := unrecorded_ends(run, site.workspace, may_submit, cluster_of(site)):
        what = f"it depends on job {', '.join(map(str, over))}, whose end is still to be recorded"
        raise JobNotAccepted(what, subject=run.test.id, advice="Will retry")
    return dependency_options(run, site.workspace, may_submit)


def wait_for_dependencies(run: RunSpec, plan: LaunchPlan, site: Site) -> None:
    """Wait until the jobs that this run depends on are in Slurm, or over: before a slot is taken that they may need.

    Raises:
        LaunchRefused: A test that had to end well has not.
    """
    if not run.after or read_submission(plan.attempt_dir) is not None:
        return  # nothing to wait for, or its own job is in Slurm
    night, logged = this_night(), set[str]()
    while True:
        try:
            options = dependency_options(run, site.workspace, night.may_submit)
        except NotSubmittedYet as waiting_for:
            if str(waiting_for) not in logged:
                get_run_logger().info("waiting until %s has submitted its job", waiting_for)
            logged.add(str(waiting_for))
        except LaunchRefused:
            if newest_intent(plan.attempt_dir):
                return  # it may have a job, that nothing has recorded: the submission looks it up first
            raise
        else:
            get_run_logger().info("depends on: %s", " ".join(options) or "nothing that has not ended")
            return
        raise_if_interrupted()
        night.wait_for_a_run(_LOOK_AGAIN)


class _JobDisplay:
    """What the UI shows of a running job: its log in the run's log, its progress as an artifact of the task run.

    Nothing of it is needed: what goes wrong here is logged once, and the job is watched on.
    """

    def __init__(self, job: Job, plan: LaunchPlan, site: Site) -> None:
        self._log = get_run_logger()
        self._job = job
        self._troubles: set[type] = set()
        self._values: list[str] | None = None
        self._look_up = partial(self._safely, lambda: self._take_secrets(plan, site))
        self._look_up()
        self._follower = RunFollower(job, self._values or (), output_dir=plan.output_dir, total=plan.max_steps)
        self._status: JobStatus | None = None
        self._artifact = ProgressArtifact("the job's progress")
        self._shown = ""
        self._due = 0.0
        self._say_again = 0.0

    def change(self, status: JobStatus) -> None:
        """Take in a new state or reason of the job."""
        self._status = status
        self._log_status(status)
        self._due = 0.0

    def _log_status(self, status: JobStatus) -> None:
        self._log.info("job %d is %s", self._job.job_id, state_of(status))
        self._say_again = time.monotonic() + _WAITING_LOG_INTERVAL

    def wait(self) -> None:
        """Show what is new since the last look, if that was long enough ago; an interruption ends the wait."""
        raise_if_interrupted()
        if self._status and self._status.state in WAITING and time.monotonic() >= self._say_again:
            self._log_status(self._status)
        if time.monotonic() >= self._due:
            self._safely(lambda: self._show(self._follower.look()))
            self._due = time.monotonic() + LOOK_INTERVAL

    def end(self, ended: Job) -> None:
        """Show the end of the log, and what became of the job."""
        self._status = ended.status
        self._safely(lambda: self._show(self._follower.look(ended=True)))

    def masked(self, text: str) -> str:
        """A text of the run's, as it may be kept and shown: nothing of it where its secrets cannot be looked up."""
        if self._values is None:
            self._look_up()
        return _NOT_MASKED if self._values is None else mask_text(text, self._values)

    def _take_secrets(self, plan: LaunchPlan, site: Site) -> None:
        self._values = [*resolve_all(plan.secret_environment).values(), *site_secrets(site).values()]

    def _show(self, news: LogNews) -> None:
        # What could not be masked is not shown.
        if news.lines and self._values is not None:
            self._log.info("%s", news)
        status = self._status
        description = f"job {self._job.job_id} is {state_of(status) if status else JobState.UNKNOWN}"
        description += f": {news.progress}" if news.progress else ""
        if description != self._shown:
            self._artifact.show(news.progress.percent if news.progress else 0.0, description)
            self._shown = description

    def _safely(self, show: Callable[[], None]) -> None:
        try:
            show()
        except Exception as error:
            if type(error) not in self._troubles:
                self._troubles.add(type(error))
                self._log.warning("the job's log or progress cannot be shown: %s", error)


def state_of(status: JobStatus) -> str:
    """A job's state with its reason; of one in the queue also since when it waits, and what helps."""
    waits = status.state in WAITING
    since = f" since {status.submitted_at:%Y-%m-%d %H:%M} UTC" if waits and status.submitted_at else ""
    reason = waiting_words(status) if waits else status.reason
    return f"{status.state}{since}{f' ({reason})' if reason else ''}"


@stage("watch")
def watch(job: Job, plan: LaunchPlan, site: Site) -> Job:
    """Follow the job until it has ended, and classify its end by Slurm's state and the run's own evidence.

    An end that is recorded stands where Slurm has forgotten the job: as a lost one it would be submitted again, and its
    exit file alone tells no cancellation and no time limit.
    """
    display = _JobDisplay(job, plan, site)
    ended = this_night().watcher(site).follow(job, on_change=display.change, on_wait=display.wait)
    display.end(ended)
    is_forgotten = ended.status is not None and ended.status.reason.startswith((f"{LOST}:", BY_EXIT_FILE))
    if is_forgotten and (known := read_ended(job.attempt_dir)):
        get_run_logger().info("job %d: Slurm has forgotten it; it ended as %s", known.job_id, known.outcome)
        return known
    run = RunToRead(jobs=(ended,), plan=plan)
    # A file system that ended the job may be away for as long as a store: without the evidence its end is a guess.
    note = partial(note_waiting, plan.run_key, site.workspace)
    evidence = wait_out(lambda: evidence_of(run), (TransientError,), first_delay=first_delay(), note=note)
    ended = classify_job(ended, evidence)
    ended = ended.model_copy(update={"outcome_reason": display.masked(ended.outcome_reason)})
    record_ended(ended)
    if ended.status is not None and ended.status.reason.startswith(QUEUED_AGAIN):
        _leave_queue(ended, site)
    get_run_logger().info("job %d ended as %s: %s", job.job_id, ended.outcome, ended.outcome_reason)
    return ended


def _leave_queue(ended: Job, site: Site) -> None:
    """Cancel a job that has ended and is in the queue again: at best it would start, and end at once."""
    cluster = cluster_of(site)
    try:
        if ended.job_id in live_jobs(ended.name, cluster.find(ended.name), cluster.states):
            cluster.cancel(ended.job_id)
    except NightbridgeError as error:
        get_run_logger().warning("job %d has ended, and stays in the queue: %s", ended.job_id, error)


def submit_and_watch(run: RunSpec, plan: LaunchPlan, site: Site) -> Job:
    """Submit once the jobs that it depends on are in Slurm and the site has a slot for it; watch it to its end."""
    while True:
        wait_for_dependencies(run, plan, site)
        # One of them that failed while the slot was waited for needs a slot for its next attempt.
        with contextlib.suppress(NotSubmittedYet), job_slots(plan, site):
            return watch(submit(run, plan, site), plan, site)


def needs_another_job(run: RunSpec, jobs: Sequence[Job], site: Site) -> bool:
    """Whether a run whose jobs have ended is tried again.

    Its newest job failed for the cluster's reasons; or it never started because one that it depends on did so, and
    another attempt takes that one's place. Each of these not more often than the site allows.
    """
    if not lacked_a_dependency(jobs[-1]):
        return may_try_again(jobs, site.cluster)
    return sum(map(lacked_a_dependency, jobs)) < site.cluster.max_attempts and _can_still_start(run, site)


def _can_still_start(run: RunSpec, site: Site) -> bool:
    """Whether what a run depends on may still end well, as far as it is recorded: the submission looks again."""
    try:
        dependency_options(run, site.workspace, this_night().may_submit)
    except NotSubmittedYet:
        return True
    except LaunchRefused:
        return False
    return True
