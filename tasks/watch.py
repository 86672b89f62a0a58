"""Watch: a job to its true end, then what became of it."""

import time
from collections.abc import Callable, Mapping

from prefect.logging import get_run_logger

from nightbridge.models import Job, JobState, JobStatus, LaunchPlan, SecretRef, Site
from nightbridge.outputs.experiment import evidence, read_run
from nightbridge.outputs.following import LOOK_INTERVAL, LogNews, RunFollower
from nightbridge.secrets import mask_text
from nightbridge.slurm.attempts import record_ended
from nightbridge.slurm.outcome import classify
from nightbridge.tasks.context import raise_if_interrupted, this_night
from nightbridge.tasks.progress import ProgressArtifact
from nightbridge.tasks.site import resolve_all
from nightbridge.tasks.stage import stage


class _Shown:
    """What the UI shows of a running job: its log in the run's log, its progress as an artifact of the task run.

    Nothing of it is needed: what goes wrong here is told once, and the job is watched on.
    """

    def __init__(self, job: Job, plan: LaunchPlan) -> None:
        self._log = get_run_logger()
        self._job = job
        self._troubles: set[str] = set()
        self._values: list[str] | None = None
        self._safely(lambda: self._look_up(plan.secret_environment))
        self._follower = RunFollower(job, self._values or (), output_dir=plan.output_dir, total=plan.max_steps)
        self._status: JobStatus | None = None
        self._artifact = ProgressArtifact()
        self._told = ""
        self._due = 0.0

    def change(self, status: JobStatus) -> None:
        """Take in a new state or reason of the job."""
        self._status = status
        self._log.info("job %d is %s %s", self._job.job_id, status.state, status.reason)
        self._due = 0.0

    def look(self) -> None:
        """Show what is new since the last look, if that was long enough ago."""
        if time.monotonic() >= self._due:
            self._safely(lambda: self._show(self._follower.look()))
            self._due = time.monotonic() + LOOK_INTERVAL

    def last_look(self, ended: Job) -> None:
        """Show the end of the log, and what became of the job."""
        self._status = ended.status
        self._safely(lambda: self._show(self._follower.last_look()))

    def masked(self, text: str) -> str:
        """A text of the run's, as it may be kept and told."""
        return mask_text(text, self._values or ())

    def _look_up(self, secrets: Mapping[str, SecretRef]) -> None:
        self._values = list(resolve_all(secrets).values())

    def _show(self, news: LogNews) -> None:
        # What could not be masked is not shown.
        if news.lines and self._values is not None:
            self._log.info("%s", news)
        for line in set(news.damage) - self._troubles:
            self._troubles.add(line)
            self._log.warning("%s", line)
        description = self._description(news)
        if description == self._told:
            return
        self._artifact.show(news.progress.percent if news.progress else 0.0, description)
        self._told = description

    def _description(self, news: LogNews) -> str:
        status = self._status
        said = f"job {self._job.job_id} is {status.state if status else JobState.UNKNOWN}"
        if status is not None and status.reason:
            said += f" ({status.reason})"
        return f"{said}: {news.progress}" if news.progress else said

    def _safely(self, show: Callable[[], None]) -> None:
        try:
            show()
        except Exception as error:
            if type(error).__name__ not in self._troubles:
                self._troubles.add(type(error).__name__)
                self._log.warning("the job's log or progress cannot be shown: %s", error)


@stage("watch")
def watch(job: Job, plan: LaunchPlan, site: Site) -> Job:
    """Follow the job until it has ended, and classify its end by Slurm's word and the run's own evidence."""
    log = get_run_logger()

    shown = _Shown(job, plan)

    def wait() -> None:
        raise_if_interrupted()
        shown.look()

    ended = this_night().watcher(site).follow(job, on_change=shown.change, on_wait=wait)
    shown.last_look(ended)
    left = read_run(ended, plan.output_dir, plan.checkpoint_dir)
    ended = classify(ended, evidence(left, plan.max_steps))
    ended = ended.model_copy(update={"outcome_reason": shown.masked(ended.outcome_reason)})
    record_ended(ended)
    log.info("job %d: %s %s", job.job_id, ended.outcome, ended.outcome_reason)
    return ended
