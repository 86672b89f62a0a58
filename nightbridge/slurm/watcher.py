"""Watching jobs to their true end: one query for all of them per interval, and unknown is not failed.

The watcher also cancels a job that three policies end: a pending reason that never clears, and `max_pending` and
`max_runtime` of the cluster's settings (`states.due_cancellation`).
"""

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import NamedTuple

from nightbridge.errors import DamagedData, NightbridgeError, PermanentError, StatusUnknown, TransientError
from nightbridge.models import Job, JobState, JobStatus, utc_now
from nightbridge.slurm.attempt_files import (
    CannotKnow,
    check_can_know,
    ended_by_itself,
    exit_code_written_at,
    in_its_folder,
    read_attempt,
    read_claim,
    read_exit_code,
    record_cancellation,
)
from nightbridge.slurm.outcome import end_of_script
from nightbridge.slurm.protocol import Cluster, Lookup
from nightbridge.slurm.script import ALREADY_CLAIMED
from nightbridge.slurm.states import (
    BY_EXIT_FILE,
    LOST,
    TERMINAL,
    WAITING,
    due_cancellation,
    submitted_alike,
    waits_for_another,
    without_false_cancellation,
)

log = logging.getLogger(__name__)

SHORTEST_INTERVAL = 1.0
"""Seconds between two queries just after a change, and once the exit file exists."""
_WAKE_UP = 1.0
_AGE_PER_INTERVAL = 8.0
_LOOKS_PER_INTERVAL = 4
"""Looks at the exit files in a site's interval, and queries while a job ends, where that is shorter than usual."""
_ENDING = frozenset({JobState.COMPLETING, JobState.CONFIGURING, JobState.SIGNALING, JobState.STAGE_OUT})


class Graces(NamedTuple):
    """How long a watcher waits before it concludes something, in seconds."""

    silent: float = 60.0
    """That Slurm may know nothing of a job whose exit file is there, before the file alone ends it."""
    detail: float = 90.0
    """After a terminal state, for what accounting learns later: the exit code, and who cancelled it. slurmdbd can be a
    minute behind."""
    hopeless: float = 120.0
    """For which a job may be pending for a reason that never clears before it is cancelled."""
    lost: float = 1800.0
    """Without any report of a job, after which it is lost, as when slurmctld lost its state: squeue and sacct both
    answer, and neither has a live job or an end of it, now and half as long ago. A slurmdbd that was away gets from
    slurmctld only some time after its return what it has missed."""
    unanswered: float = 12 * 3600.0
    """For which squeue alone may answer, and not know a job, before watching it ends with an error."""


DEFAULT_GRACES = Graces()


_Key = tuple[str, int]
"""Which job is watched. Its id alone would not do: after slurmctld lost its state another job gets it."""


class _Watched:
    """What is known about one job. Touched only under the watcher's lock."""

    def __init__(self, job: Job, now: float) -> None:
        self.job = job
        self.followers = 0
        self.status: JobStatus | None = None
        self.depended_at = _depends_since(job)
        """When it was last seen to wait for another job's end; it may have done so until it was watched."""
        self.changed_at = now
        self.first_nodes = ""
        """Those of the start that came before its place in the queue now."""
        self.is_done = False
        """Whether its script had ended by itself, when Slurm last called it waiting or over: no start follows."""
        self.ended_at: float | None = None
        self.exit_code: int | None = None
        self.exit_code_at: float | None = None
        self.outdated: int | None = None
        """When the exit file was written that was there as Slurm last called it waiting: that of before a requeue."""
        self.silent_since: datetime | None = None
        self.unknown_since: datetime | None = None
        """Since when both sources have answered, and neither has known it."""
        self.gone_since: datetime | None = None
        """Since when squeue alone has answered, and has not known it."""
        self.lost = False
        self.error: NightbridgeError | None = None

    def report(self, status: JobStatus, now: float) -> None:
        """Take in a status. Accounting can forget who cancelled a job, and call lost what slurmctld has cancelled."""
        known = self.status
        if known is not None and status.state is JobState.CANCELLED and not status.cancelled_by:
            by_slurm = known.state is JobState.CANCELLED and status.reason.startswith(f"{LOST}:")
            status = known if known.cancelled_by or by_slurm else status
        if self.status is None or (status.state, status.reason) != (self.status.state, self.status.reason):
            self.changed_at = now
        with contextlib.suppress(OSError):  # the file system is away
            if status.state in WAITING | TERMINAL:
                self.is_done = ended_by_itself(self.job.attempt_dir, self.job.job_id)
            if status.state in WAITING:
                self.first_nodes = (known.nodes if known else "") or self.first_nodes
                self.outdated = None if self.is_done else exit_code_written_at(self.job.attempt_dir)
        self.status = status
        if waits_for_another(status):
            self.depended_at = utc_now()
        if status.state is JobState.UNKNOWN:
            # An unknown state does not keep the exit file from ending the job.
            self.silence()
        else:
            self.silent_since = self.unknown_since = self.gone_since = None
        self.ended_at = (self.ended_at or now) if status.state in TERMINAL else None

    def silence(self) -> bool:
        """Take in that no source reported it; whether that is new."""
        if self.silent_since is not None:
            return False
        self.silent_since = utc_now()
        return True

    def is_due_for_lookup(self, grace: float) -> bool:
        """Whether to look it up by its name: one half of the grace after the last report, and once more after that."""
        since = self.unknown_since or self.silent_since
        return since is not None and self.exit_code is None and (utc_now() - since).total_seconds() >= grace / 2

    def look_up(self, lookup: Lookup, *, known: bool) -> None:
        """Take in who has answered to a lookup, and whether anybody knows it."""
        unknown = lookup.complete and not known
        gone = lookup.queue_answered and not lookup.complete and not known
        self.lost = unknown and self.unknown_since is not None
        self.unknown_since = (self.unknown_since or utc_now()) if unknown else None
        self.gone_since = (self.gone_since or utc_now()) if gone else None

    def give_up(self, grace: float) -> None:
        """End the watch of a job that squeue alone has not known for so long. Its end stays open: no job follows."""
        if self.gone_since is None or (utc_now() - self.gone_since).total_seconds() < grace:
            return
        self.error = PermanentError(
            f"squeue has not known job {self.job.job_id} since {self.gone_since:%Y-%m-%d %H:%M} UTC, and sacct has not "
            "answered: how it ended is unknown",
            subject=self.job.name,
            advice=f"Start the night again once `sacct -j {self.job.job_id}` answers: this job is looked up first",
        )

    def ended(self, status: JobStatus) -> Job:
        """The job with its end: its script's, where Slurm has put it back into its queue after that."""
        if self.is_done and self.exit_code is not None:
            status = end_of_script(self.job, status, self.exit_code, self.first_nodes)
        return self.job.model_copy(update={"status": status, "exit_file_code": self.exit_code})

    def look_for_exit_code(self, now: float) -> bool:
        """Look for this job's exit file; whether it has just appeared."""
        try:
            code = read_exit_code(self.job.attempt_dir)
            # One that another job of the attempt left is not ours, and one of before a requeue is no end.
            waits = self.status is not None and self.status.state in WAITING
            requeued = waits and exit_code_written_at(self.job.attempt_dir) == self.outdated
            if code is not None and (requeued or read_claim(self.job.attempt_dir) not in (None, self.job.job_id)):
                code = None
        except OSError:  # the file system is away: what is known of the file stands
            return False
        appeared = code is not None and self.exit_code is None
        if code is None:
            self.exit_code_at = None
        elif self.exit_code_at is None:
            self.exit_code_at = now
        self.exit_code = code
        return appeared

    def interval(self, now: float, longest: float) -> float:
        """Seconds until the next query for it: short after a change, longer the longer nothing happens."""
        state = self.status.state if self.status is not None else None
        if state in _ENDING or state in TERMINAL or self.exit_code is not None:
            return min(SHORTEST_INTERVAL, longest / _LOOKS_PER_INTERVAL)
        return min(longest, max(SHORTEST_INTERVAL, (now - self.changed_at) / _AGE_PER_INTERVAL))


class Watcher:
    """Follows any number of jobs of one cluster; one per process. `follow` may be called from many threads."""

    def __init__(self, cluster: Cluster, graces: Graces = DEFAULT_GRACES) -> None:
        self._cluster = cluster
        self._longest = cluster.settings.poll_interval
        self._graces = graces
        self._watched: dict[_Key, _Watched] = {}
        self._changed = threading.Condition()
        self._stopped = False
        self._thread: threading.Thread | None = None
        self._failures = 0
        self._answered = False

    def follow(
        self, job: Job, on_change: Callable[[JobStatus], None] | None = None, on_wait: Callable[[], None] | None = None
    ) -> Job:
        """Block until the job has ended; return it with `status` and `exit_file_code`.

        A terminal state from Slurm ends a job; so does its exit file when Slurm knows nothing of it for a while, and so
        does Slurm's certain ignorance of it (state UNKNOWN, reason `lost: ...`). What the cluster's policies end is
        cancelled. A job that ended because another job of its attempt had claimed the folder hands over to that one.

        Args:
            job: The job, as submitted or as found again after a crash.
            on_change: Called in this thread with each new state, reason or place in the queue.
            on_wait: Called in this thread about once a second, until the job has ended.

        Raises:
            StatusUnknown: The watcher was stopped.
            PermanentError: squeue alone has answered for long, and does not know the job: its end stays open.
            NightbridgeError: The cluster refused the first query for good. One that has answered before is tried again.
        """
        ended = self._follow_one(job, on_change, on_wait)
        claimed = ended.status is not None and ended.status.exit_code == ALREADY_CLAIMED
        holder = read_claim(ended.attempt_dir) if claimed else None
        if holder is None or holder == ended.job_id:
            return ended
        log.warning("job %d ended: job %d has claimed %s; following that one", job.job_id, holder, job.name)
        return in_its_folder(self._follow_one(job.model_copy(update={"job_id": holder}), on_change, on_wait))

    def stop(self) -> None:
        """Stop. Whoever follows a job gets `StatusUnknown`; the jobs keep running."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
            thread = self._thread
        if thread is not None:
            thread.join(timeout=30)

    def _follow_one(
        self, job: Job, on_change: Callable[[JobStatus], None] | None, on_wait: Callable[[], None] | None
    ) -> Job:
        watched = self._register(job)
        reported: tuple[JobState, str, int | None] | None = None
        try:
            while True:
                with self._changed:
                    if self._stopped:
                        raise StatusUnknown("watching was stopped", subject=job.name, advice="The job keeps running")
                    self._start()
                    if watched.error is not None:
                        raise watched.error
                    status, ended = watched.status, self._end_of(watched)
                if status is not None and (status.state, status.reason, status.queue_position) != reported:
                    reported = (status.state, status.reason, status.queue_position)
                    if on_change is not None:
                        on_change(status)
                if ended is not None:
                    return ended
                if on_wait is not None:
                    on_wait()
                with self._changed:
                    # At least once a second, so that an interrupt or a termination signal gets through.
                    self._changed.wait(_WAKE_UP)
        finally:
            with self._changed:
                watched.followers -= 1
                if watched.followers == 0:
                    del self._watched[_key_of(job)]

    def _register(self, job: Job) -> _Watched:
        with self._changed:
            watched = self._watched.setdefault(_key_of(job), _Watched(job, time.monotonic()))
            watched.followers += 1
            self._changed.notify_all()
            return watched

    def _start(self) -> None:
        """Start the thread that queries, unless it runs; where none can be started now, the next call tries again."""
        if self._thread is not None and self._thread.is_alive():
            return
        thread = threading.Thread(target=self._run, name="nightbridge-watcher", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            log.warning("jobs are not queried yet: %s", error)
        else:
            self._thread = thread

    def _run(self) -> None:
        """Query, publish, sleep; until no job is followed. No error ends it: every job would be waited for in vain."""
        while True:
            with self._changed:
                if self._stopped or not self._watched:
                    self._thread = None
                    return
                jobs = [watched.job for watched in self._watched.values()]
            try:
                self._query(jobs)
                self._look_for_lost()
                self._enforce_policies()
            except Exception:
                log.exception("error while watching %d jobs, continuing", len(jobs))
            self._sleep()

    def _query(self, jobs: Sequence[Job]) -> None:
        try:
            rows = self._cluster.states(sorted({job.job_id for job in jobs}))
            answer = {
                _key_of(job): self._own(job, status) for job in jobs if (status := rows.get(job.job_id)) is not None
            }
        except Exception as error:
            # What has worked before may work again: a package of Slurm's that is being upgraded has no squeue.
            (self._unknown if self._answered or isinstance(error, TransientError) else self._refused)(jobs, error)
            return
        self._answered, self._failures = True, 0
        self._publish(jobs, answer)

    def _unknown(self, jobs: Sequence[Job], error: Exception) -> None:
        """Take in that a query was not answered, which says nothing about any job."""
        self._failures += 1
        with self._changed:
            for watched in self._watched.values():
                # What comes back after an outage has to catch up first.
                watched.unknown_since = watched.gone_since = None
        self._publish(jobs, {})
        silent = (watched.silent_since for watched in self._watched.copy().values() if watched.silent_since)
        since = min(silent, default=None)
        trace = None if isinstance(error, NightbridgeError) else error
        log.warning("status of %d jobs unknown since %s: %s", len(jobs), since, error, exc_info=trace)

    def _refused(self, jobs: Sequence[Job], error: Exception) -> None:
        """Tell whoever follows a job that the cluster cannot be queried."""
        log.error("querying %d jobs failed", len(jobs), exc_info=error)
        refusal = NightbridgeError(f"{type(error).__name__}: {error}", subject="watcher")
        with self._changed:
            for job in jobs:
                if watched := self._watched.get(_key_of(job)):
                    watched.error = error if isinstance(error, NightbridgeError) else refusal
            self._changed.notify_all()

    def _own(self, job: Job, status: JobStatus) -> JobStatus | None:
        """The status, unless it is another job's: ids are used again after slurmctld lost its state.

        One of another name is ours, and renamed, where it was submitted at the very time at which Slurm says that ours
        was, or with our script.
        """
        with self._changed:
            watched = self._watched.get(_key_of(job))
            known = watched.status if watched else None
        if status.name in ("", job.name) or (known is not None and submitted_alike(known, status)):
            return status
        if self._cluster.script_of(job.job_id) == job.script:
            return status.model_copy(update={"name": job.name})
        found = self._cluster.find(job.name).jobs
        # Slurm gave the id away, so ours is not running, whatever accounting still reports.
        ours = next((one for one in found if one.job_id == job.job_id and one.state in TERMINAL), None)
        return None if ours is None else without_false_cancellation(ours)

    def _look_for_lost(self) -> None:
        """Find the jobs among the silent ones that Slurm has lost."""
        if self._failures:
            return
        with self._changed:
            due = [watched for watched in self._watched.values() if watched.is_due_for_lookup(self._graces.lost)]
        for watched in due:
            job = watched.job
            try:
                lookup = self._cluster.find(job.name)
                status = self._cluster.states([job.job_id]).get(job.job_id)
                known = status is not None and self._own(job, status) is not None
                if lookup.complete and not known:
                    check_can_know(job.attempt_dir, self._cluster)
            except CannotKnow as error:
                with self._changed:
                    watched.error = error
                    self._changed.notify_all()
                continue
            except (NightbridgeError, OSError) as error:
                log.warning("job %d (%s) cannot be looked up: %s", job.job_id, job.name, error)
                continue
            with self._changed:
                watched.look_up(lookup, known=known)
                watched.give_up(self._graces.unanswered)
                self._changed.notify_all()

    def _enforce_policies(self) -> None:
        """Cancel the jobs that a policy ends. One that could not be cancelled is retried after the next query."""
        now = time.monotonic()
        with self._changed:
            reported = [
                (watched.job, watched.status, watched.depended_at, now - watched.changed_at)
                for watched in self._watched.values()
                if watched.status is not None and watched.silent_since is None
            ]
        for job, status, depended_at, seconds in reported:
            cancellation = due_cancellation(
                status,
                self._cluster.settings,
                queued_since=depended_at or status.submitted_at,
                reason_seconds=seconds,
                grace=self._graces.hopeless,
                now=utc_now(),
            )
            if cancellation is None:
                continue
            try:
                record_cancellation(job.attempt_dir, cancellation)
                self._cluster.cancel(job.job_id)
            except (TransientError, PermanentError, OSError) as error:
                log.warning("job %d (%s) cannot be cancelled: %s", job.job_id, job.name, error)
            else:
                log.warning(
                    "job %d (%s) was cancelled: %s. %s", job.job_id, job.name, cancellation.reason, cancellation.advice
                )

    def _publish(self, jobs: Sequence[Job], answer: Mapping[_Key, JobStatus | None]) -> None:
        now = time.monotonic()
        with self._changed:
            for job in jobs:
                watched = self._watched.get(_key_of(job))
                if watched is None:
                    continue
                if status := answer.get(_key_of(job)):
                    watched.report(status, now)
                elif watched.silence() and not self._failures:
                    log.warning("job %d (%s): unknown to squeue, and sacct has no end of it", job.job_id, job.name)
                watched.look_for_exit_code(now)
            self._changed.notify_all()

    def _sleep(self) -> None:
        """Wait until the next query is due, a job is new, or an exit file appears."""
        queried_at = time.monotonic()
        with self._changed:
            known = set(self._watched)
            while not self._stopped and self._watched and set(self._watched) <= known:
                now = time.monotonic()
                left = queried_at + self._interval(now) - now
                if left <= 0:
                    return
                self._changed.wait(min(left, _WAKE_UP, self._longest / _LOOKS_PER_INTERVAL))
                now = time.monotonic()
                appeared = [watched.look_for_exit_code(now) for watched in self._watched.values()]
                if any(appeared):
                    return

    def _interval(self, now: float) -> float:
        if self._failures:
            return min(self._longest * 4, SHORTEST_INTERVAL * 2.0 ** min(self._failures, 10))
        return min(watched.interval(now, self._longest) for watched in self._watched.values())

    def _end_of(self, watched: _Watched) -> Job | None:
        """The ended job, None while it has not ended."""
        now = time.monotonic()
        status = watched.status
        if status is not None and status.state in TERMINAL and watched.ended_at is not None:
            # What never started has no exit code to wait for.
            known = not status.started_at or watched.exit_code is not None or status.exit_code is not None
            anonymous = status.state is JobState.CANCELLED and not status.cancelled_by
            if (known and not anonymous) or now - watched.ended_at >= self._graces.detail:
                return watched.ended(status)
            return None
        if watched.lost and watched.silent_since is not None:
            lost = _without_slurm(watched, JobState.UNKNOWN, f"{LOST}: unknown to Slurm")
            return watched.job.model_copy(update={"status": lost})
        code = watched.exit_code
        if code is None or watched.exit_code_at is None or now - watched.exit_code_at < self._graces.silent:
            return None
        if status is not None and watched.silent_since is None:
            is_over = watched.is_done and status.state in WAITING and now - watched.changed_at >= self._graces.silent
            return watched.ended(status) if is_over else None
        if watched.silent_since is None or (utc_now() - watched.silent_since).total_seconds() < self._graces.silent:
            return None
        state = JobState.FAILED if code else JobState.COMPLETED
        status = _without_slurm(watched, state, BY_EXIT_FILE, exit_code=code, signal=0)
        return watched.job.model_copy(update={"status": status, "exit_file_code": code})


def _key_of(job: Job) -> _Key:
    return job.name, job.job_id


def _depends_since(job: Job) -> datetime | None:
    """The time now for a job that was submitted to wait for another one: who watched it before has seen until when."""
    with contextlib.suppress(DamagedData, OSError):
        if any(option.startswith("--dependency") for option in read_attempt(job.attempt_dir).sbatch_options):
            return utc_now()
    return None


def _without_slurm(watched: _Watched, state: JobState, reason: str, **fields: int) -> JobStatus:
    """A status that Slurm did not report, with the nodes and times that it last did."""
    known = watched.status or JobStatus(job_id=watched.job.job_id, name=watched.job.name, state=JobState.UNKNOWN)
    since = f"{watched.silent_since:%Y-%m-%d %H:%M:%S} UTC"
    return known.model_copy(update={"state": state, "reason": f"{reason} since {since}", **fields})
