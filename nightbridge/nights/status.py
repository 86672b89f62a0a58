"""Where each run of a night is: its verdict, else what its files and the cluster report of its newest job.

Also nights as text for a terminal: a table of many, and the lines of one.
"""

import enum
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field

from nightbridge.errors import NightbridgeError, TransientError
from nightbridge.models import EXIT_CODES, JobState, JobStatus, Model, Verdict, VerdictStatus, utc_now
from nightbridge.nights.liveness import is_alive
from nightbridge.nights.records import Night, NightEnd, NightStart, NightTest, read_verdict, verdict_since
from nightbridge.numbers import format_value
from nightbridge.slurm.attempt_files import Submission, claiming_submission, read_waiting
from nightbridge.slurm.attempts import attempts_of, requested_seconds
from nightbridge.slurm.protocol import Cluster
from nightbridge.slurm.states import ACTIVE, TERMINAL, waiting_words
from nightbridge.store.object_store import ObjectStore
from nightbridge.store.parallel import in_parallel

if TYPE_CHECKING:
    from rich.table import Table

LOGS = "log*.out"
"""The logs of a job in its folder."""


class RunPhase(enum.StrEnum):
    """How far a run is."""

    NOT_STARTED = "not started"  # the workspace has no trace of it
    PREPARING = "preparing"  # an attempt is open, and no job of it is recorded
    WAITING = "waiting"  # its job is in the queue
    RUNNING = "running"
    ENDED = "ended"  # its job has ended, and it has no verdict yet
    UNKNOWN = "unknown"  # the cluster does not answer, or has never heard of the job
    DONE = "done"  # it has its verdict


class RunStatus(Model):
    """Where one run of a night is."""

    test_id: str
    run_key: str
    phase: RunPhase
    verdict: VerdictStatus | None = None
    job_id: int | None = None
    since: datetime | None = Field(None, description="When this phase began, where that is known.")
    reason: str = Field("", description="Slurm's reason or state, or why it is unknown.")
    steps: int | None = Field(None, description="Iterations that its log has, while it runs; then those it did.")
    steps_expected: int | None = None
    step_time: float | None = Field(None, description="Seconds: of the verdict, else the median of the last steps.")
    ends_at: datetime | None = Field(None, description="When it has done its last step, at the pace of the last ones.")
    limit_at: datetime | None = Field(None, description="When Slurm ends it, by the time limit it was submitted with.")

    def __str__(self) -> str:
        """What is most wanted comes first: a narrow terminal cuts the end off."""
        state = (self.verdict.value if self.verdict else self.phase.value).replace("_", " ")
        steps = "" if self.steps is None else f"{self.steps:,}"
        steps += f"/{self.steps_expected:,}" if steps and self.steps_expected is not None else ""
        parts = (
            f"{state} ({self.reason})" if self.reason.lower() not in ("", state) else state,
            f"job {self.job_id}" if self.job_id is not None else "",
            f"{steps} steps" if steps else "",
            self._end_in_words(),
            f"{format_value(self.step_time, 's')} a step" if self.step_time is not None else "",
            f"since {self.since:%Y-%m-%d %H:%M} UTC" if self.since and not self.verdict else "",
        )
        return ", ".join(filter(None, parts))

    def _end_in_words(self) -> str:
        if self.ends_at is None:
            return ""
        if self.limit_at is not None and self.limit_at < self.ends_at:
            return f"its time limit ends it {self.limit_at:%m-%d %H:%M} UTC, before its last step"
        return f"ends ~{self.ends_at:%m-%d %H:%M} UTC"


def run_statuses(
    start: NightStart, store: ObjectStore, open_cluster: Callable[[], Cluster], end: NightEnd | None = None
) -> tuple[RunStatus, ...]:
    """Where each run of a night is, in the night's order; the cluster gets one query at most.

    Args:
        start: The night's beginning.
        store: Where its verdicts are.
        open_cluster: Opens the cluster of its jobs; one that does not answer, or is not here, makes their runs
            `UNKNOWN`.
        end: How the night ended, where it did: the runs that died before their harvest have no other verdict.

    Raises:
        DamagedData: A stored verdict cannot be read.
    """
    in_short = {run.run_key: run for run in end.verdicts} if end and end.ended_at >= start.begun_at else {}

    def verdict_of(key: str) -> Verdict | None:
        run = in_short.get(key)
        return verdict_since(store, run, start.night) if run else read_verdict(store, key, start.night)

    keys = [test.run_key for test in start.tests]
    verdicts = dict(zip(keys, in_parallel(verdict_of, keys), strict=True))
    jobs = {key: _newest_job(key, start.workspace) for key, verdict in verdicts.items() if verdict is None}
    live = [job.job_id for job in jobs.values() if isinstance(job, Submission)]
    known, silence = _query(open_cluster, live)
    return tuple(
        _done(test, verdict)
        if (verdict := verdicts[test.run_key])
        else _under_way(test, start.workspace, jobs[test.run_key], known, silence)
        for test in start.tests
    )


def _newest_job(run_key: str, workspace: Path) -> Submission | datetime | None:
    """The newest attempt's job; when it was opened, where no job of it is recorded; None without an attempt."""
    attempts = attempts_of(run_key, workspace)
    if not attempts:
        return None
    return claiming_submission(attempts[-1].attempt_dir) or attempts[-1].opened_at


def _query(open_cluster: Callable[[], Cluster], job_ids: Sequence[int]) -> tuple[Mapping[int, JobStatus], str]:
    """What the cluster reports of the jobs, and why it reports nothing where it does not."""
    if not job_ids:
        return {}, ""
    try:
        return open_cluster().states(job_ids), ""
    except NightbridgeError as error:
        return {}, f"the cluster does not answer: {error}"


def _done(test: NightTest, verdict: Verdict) -> RunStatus:
    measured = verdict.metric("step_time")
    return RunStatus(
        test_id=test.test_id,
        run_key=test.run_key,
        phase=RunPhase.DONE,
        verdict=verdict.status,
        job_id=verdict.job_id,
        steps=verdict.steps,
        steps_expected=verdict.steps_expected,
        step_time=measured.value if measured else None,
    )


def _under_way(
    test: NightTest, workspace: Path, job: Submission | datetime | None, known: Mapping[int, JobStatus], silence: str
) -> RunStatus:
    named = {"test_id": test.test_id, "run_key": test.run_key}
    waiting = read_waiting(test.run_key, workspace)
    if job is None and waiting is None:
        return RunStatus(**named, phase=RunPhase.NOT_STARTED)
    if not isinstance(job, Submission):
        return RunStatus(**named, phase=RunPhase.PREPARING, since=job, reason=str(waiting or ""))
    status = known.get(job.job_id)
    if status is None:
        reason = silence or "the cluster does not know the job"
        return RunStatus(**named, phase=RunPhase.UNKNOWN, job_id=job.job_id, reason=reason)
    phase, since = _phase(status, job)
    reason = waiting_words(status) if phase is RunPhase.WAITING else status.state.value
    reason += f"; {waiting}" if waiting is not None else ""
    found = RunStatus(**named, phase=phase, job_id=job.job_id, since=since, reason=reason)
    if phase is not RunPhase.RUNNING:
        return found
    seconds = requested_seconds(attempts_of(test.run_key, workspace)[-1], job.script)
    limit_at = since + timedelta(seconds=seconds) if since and seconds else None
    return found.model_copy(update={**_progress(job), "limit_at": limit_at})


def _progress(job: Submission) -> dict[str, Any]:
    """What the newest log of a running job says; nothing of one that cannot be read, which its state survives."""
    from nightbridge.outputs.logs import progress_in_log

    logs = sorted(job.experiment_dir.glob(LOGS), key=lambda path: path.name)
    try:
        progress = progress_in_log(logs[-1]) if logs else None
    except OSError:
        return {}
    if progress is None:
        return {}
    left = progress.seconds_left
    return {
        "steps": progress.iteration,
        "steps_expected": progress.total,
        "step_time": progress.step_time,
        "ends_at": None if left is None else utc_now() + timedelta(seconds=left),
    }


def _phase(status: JobStatus, job: Submission) -> tuple[RunPhase, datetime | None]:
    if status.state in TERMINAL:
        return RunPhase.ENDED, status.ended_at
    if status.state in ACTIVE:
        return RunPhase.RUNNING, status.started_at
    if status.state is JobState.UNKNOWN:
        return RunPhase.UNKNOWN, None
    return RunPhase.WAITING, status.submitted_at or job.submitted_at


def nights_table(nights: Sequence[Night]) -> "Table":
    """One row for each night, in the given order; with the year of its begin where there are two."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for heading in ("night", "scenario", "began (UTC)", "ended", "verdict", "tests"):
        table.add_column(heading, no_wrap=heading in ("night", "began (UTC)"), overflow="fold")
    # Without the year: 80 columns leave room for the names of bad tests.
    began = "%m-%d %H:%M" if len({night.start.begun_at.year for night in nights}) < 2 else "%Y-%m-%d %H:%M"
    for night in nights:
        start, end = night.start, night.ended
        bad = ", ".join(verdict.test_id for verdict in end.verdicts if EXIT_CODES[verdict.status]) if end else ""
        count = len(start.tests) + len(start.invalid)
        table.add_row(
            *map(Text, (start.night, start.scenario, f"{start.begun_at:{began}}")),
            Text(f"{end.ended_at:%H:%M}" if end else "–"),
            Text(state_of(night), style="bold red" if end and end.exit_code else ""),
            Text(f"{count}: {bad}" if bad else str(count)),
        )
    return table


def night_lines(night: Night, runs: Sequence[RunStatus]) -> Iterator[str]:
    """A night in a few lines: what it is, then a line for each run."""
    start, end = night.start, night.end
    yield f"{start.scenario}, night {start.night} on {start.cluster}: {state_of(night)}"
    if start.late_by is not None and start.slot is not None:
        yield f"began {start.begun_at:%Y-%m-%d %H:%M} UTC, its slot was {start.slot:%Y-%m-%d %H:%M %z}"
    width = max((len(run.test_id) for run in runs), default=0)
    for run in runs:
        yield f"  {run.test_id:{width}}  {run}  {run.run_key}"
    for test_id in start.invalid:
        yield f"  {test_id:{width}}  invalid"
    if end and end.report:
        yield f"report: {end.report}"


def state_of(night: Night) -> str:
    """How a night ended, else whether its process still lives."""
    if night.ended:
        return night.ended.title.replace("_", " ")
    try:
        living = is_alive(night.start.workspace, night.start.flow_run)
    except TransientError:
        return "not ended; the workspace does not answer"
    return "running" if living else "not ended, and its process is gone"
