"""One night as the watchdog sees it: which verdicts are there, which are missing, and why."""

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import cast

from pydantic import Field

from nightbridge.errors import NightbridgeError, StatusUnknown, TransientError
from nightbridge.models import JobStatus, Model, Site, VerdictStatus
from nightbridge.nights.due import Cause, DueNight, Morning
from nightbridge.nights.liveness import is_alive
from nightbridge.nights.prefect_api import PrefectServer, why_not_begun
from nightbridge.nights.records import NightEnd, NightStart, plan_path, read_plan
from nightbridge.nights.status import RunPhase, RunStatus, run_statuses
from nightbridge.slurm.attempt_files import read_refusal
from nightbridge.slurm.attempts import attempts_of, jobs_of
from nightbridge.slurm.factory import open_cluster
from nightbridge.slurm.protocol import Cluster
from nightbridge.store.protocol import ObjectStore


class MissingVerdict(Model):
    """A run that has no verdict; a whole test where its night has not begun."""

    scenario: str
    night: str = Field(description="Id of the night; empty where it has not begun.")
    test_id: str
    run_key: str = ""
    cause: Cause
    why: str
    since: datetime | None = None
    job_id: int | None = None


class GivenVerdict(Model):
    """A verdict that is there."""

    test_id: str
    status: VerdictStatus


class WatchedNight(Model):
    """A night that should have its verdicts."""

    scenario: str
    night: str = Field(description="Its id; empty where it has not begun.")
    title: str
    verdicts: tuple[GivenVerdict, ...] = ()
    missing: tuple[MissingVerdict, ...] = ()
    no_report: str = Field("", description="Why a night that has every verdict has no report, where it has none.")
    report: str = ""

    @property
    def is_complete(self) -> bool:
        """Whether every verdict is there, and the report that tells people of them."""
        return not (self.missing or self.no_report)


class Watcher:
    """Looks at one night after the other; `troubles` is what it could not look at.

    Args:
        site: Where the nights are.
        store: Its store.
        server: Prefect's server, asked why a night has not begun; None for not at all.
        morning: Until when verdicts should be there.
    """

    def __init__(self, site: Site, store: ObjectStore, server: PrefectServer | None, morning: Morning) -> None:
        self._site = site
        self._store = store
        self._server = server
        self._morning = morning
        self.troubles: list[str] = []

    def watched(self, due: DueNight) -> WatchedNight:
        """What is there of a night, and what is missing."""
        if due.night is None:
            return self._not_begun(due)
        start, end = due.night.start, due.night.end
        return self._under_way(start) if end is None or end.ended_at < start.begun_at else _ended(start, end)

    # --- a night that has left nothing

    def _not_begun(self, due: DueNight) -> WatchedNight:
        when = f"of {self._local(due.slot)}" if due.slot else f"before {self._local(self._morning.deadline)}"
        title = f"{due.scenario}, the night {when}"
        cause, why = self._why_not_begun(due)
        missing = (
            MissingVerdict(scenario=due.scenario, night="", test_id=test, cause=cause, why=why, since=due.slot)
            for test in due.tests
        )
        return WatchedNight(
            scenario=due.scenario, night="", title=title, missing=tuple(missing), no_report="" if due.tests else why
        )

    def _local(self, moment: datetime) -> str:
        return f"{moment.astimezone(self._morning.zone):%Y-%m-%d %H:%M}"

    def _why_not_begun(self, due: DueNight) -> tuple[Cause, str]:
        if self._server is None or not (due.deployment or due.file):
            return Cause.NOT_STARTED, "not started"
        since = due.slot or self._morning.days_before(1)
        found = why_not_begun(
            self._server, due.deployment, due.file, (since, self._morning.deadline), self._morning.clock
        )
        return found.cause, f"not started: {found.words}"

    # --- a night that has begun, and has no report yet

    def _under_way(self, start: NightStart) -> WatchedNight:
        alive = self._is_alive(start)
        runs = self._runs(start)
        verdicts = [
            *(GivenVerdict(test_id=run.test_id, status=run.verdict) for run in runs if run.verdict is not None),
            *(GivenVerdict(test_id=test, status=VerdictStatus.INVALID) for test in start.invalid),
        ]
        missing = tuple(self._missing(start, run, alive) for run in runs if run.verdict is None)
        report = "it is being written" if alive else _PROCESS[alive]
        return WatchedNight(
            scenario=start.scenario,
            night=start.night,
            title=_title(start),
            verdicts=tuple(verdicts),
            missing=missing,
            no_report="" if missing else f"every verdict is stored, and there is no report: {report}",
        )

    def _is_alive(self, start: NightStart) -> bool | None:
        """Whether the night's process lives; None where nobody can say."""
        if not start.workspace.is_dir():
            return None
        try:
            return bool(is_alive(start.workspace, start.flow_run))
        except TransientError as error:
            self.troubles.append(str(error))
            return None

    def _runs(self, start: NightStart) -> Sequence[RunStatus]:
        """Where each run is; what cannot be looked at is unknown, with the reason."""
        try:
            return run_statuses(start, self._store, cast(Cluster, _Asked(lambda: self._cluster_of(start))))
        except (NightbridgeError, ValueError) as error:
            self.troubles.append(f"{_title(start)}: {error}")
            return [
                RunStatus(test_id=test.test_id, run_key=test.run_key, phase=RunPhase.UNKNOWN, reason="see below")
                for test in start.tests
            ]

    def _cluster_of(self, start: NightStart) -> Cluster:
        """The cluster that the night's jobs are on: the site's, else the one that the night was planned for."""
        settings = self._site.cluster
        if settings.name != start.cluster:
            plan = read_plan(plan_path(start.workspace, start.flow_run))
            settings = plan.site.cluster if plan else settings
        return open_cluster(settings, start.workspace)

    def _missing(self, start: NightStart, run: RunStatus, alive: bool | None) -> MissingVerdict:
        if run.job_id is None and not start.workspace.is_dir():
            cause, words = Cause.UNKNOWN, "unknown: {workspace} cannot be seen from this machine"
        else:
            cause, words = _WORDS[run.phase, bool(alive)]
            cause = Cause.UNKNOWN if cause is Cause.CRASHED and alive is None else cause
        return MissingVerdict(
            scenario=start.scenario,
            night=start.night,
            test_id=run.test_id,
            run_key=run.run_key,
            cause=cause,
            why=words.format(
                since=f" since {self._morning.clock(run.since)}" if run.since else "",
                at=f" at {self._morning.clock(run.since)}" if run.since else "",
                job=run.job_id,
                reason=run.reason or "no reason is given",
                cause=cause.value,
                workspace=start.workspace,
                process=_PROCESS[alive],
                also=self._also(start, run) if run.phase is RunPhase.PREPARING else "",
            ),
            since=run.since,
            job_id=run.job_id,
        )

    def _also(self, start: NightStart, run: RunStatus) -> str:
        """What is to say of an attempt without a recorded job: it was refused, or was submitted and not recorded."""
        try:
            attempt = attempts_of(run.run_key, start.workspace)[-1]
            refusal = read_refusal(attempt.attempt_dir, since=attempt.opened_at)
            if refusal is not None:
                return f"; {refusal.error()}"
            jobs = jobs_of(attempt, self._cluster_of(start))
        except NightbridgeError as error:
            return f"; {error}"
        return "".join(f"; Slurm has job {job.job_id} of its name, {job.state.value}" for job in jobs)


class _Asked:
    """A cluster of which every refusal is silence: the watchdog's machine may have no Slurm at all."""

    def __init__(self, open_it: Callable[[], Cluster]) -> None:
        self._open = open_it

    def states(self, job_ids: Sequence[int]) -> dict[int, JobStatus]:
        """As `Cluster.states`."""
        try:
            return self._open().states(job_ids)
        except NightbridgeError as error:
            raise StatusUnknown(error.what, thing=error.thing, advice=error.advice) from error


_PROCESS: Mapping[bool | None, str] = {
    True: "",
    False: "the night's process is gone",
    None: "nobody can say whether the night's process lives",
}

_WORDS: Mapping[tuple[RunPhase, bool], tuple[Cause, str]] = {
    (RunPhase.NOT_STARTED, True): (Cause.IN_PROGRESS, "in progress: it has no job yet"),
    (RunPhase.NOT_STARTED, False): (Cause.CRASHED, "{cause}: nothing of it was begun, and {process}"),
    (RunPhase.PREPARING, True): (Cause.IN_PROGRESS, "in progress{since}: it has no job yet{also}"),
    (RunPhase.PREPARING, False): (Cause.CRASHED, "{cause}: no job of it is recorded, and {process}{also}"),
    (RunPhase.WAITING, True): (Cause.WAITING, "waiting{since} ({reason}), job {job}"),
    (RunPhase.WAITING, False): (Cause.WAITING, "waiting{since} ({reason}), job {job}; {process}"),
    (RunPhase.RUNNING, True): (Cause.RUNNING, "running{since}, job {job}"),
    (RunPhase.RUNNING, False): (Cause.RUNNING, "running{since}, job {job}; {process}"),
    (RunPhase.ENDED, True): (Cause.IN_PROGRESS, "in progress: job {job} ended{at} ({reason}) and is being judged"),
    (RunPhase.ENDED, False): (Cause.CRASHED, "{cause}: job {job} ended{at} ({reason}), and {process}"),
    (RunPhase.UNKNOWN, True): (Cause.UNKNOWN, "unknown: {reason}"),
    (RunPhase.UNKNOWN, False): (Cause.UNKNOWN, "unknown: {reason}; {process}"),
}
"""Cause and words, by how far the run is and whether the night's process is known to live."""


def _ended(start: NightStart, end: NightEnd) -> WatchedNight:
    """A night that has its report; a run that it says nothing of has no verdict all the same."""
    given = {verdict.run_key for verdict in end.verdicts}
    missing = (
        MissingVerdict(
            scenario=start.scenario,
            night=start.night,
            test_id=test.test_id,
            run_key=test.run_key,
            cause=Cause.CRASHED,
            why="the night ended without it",
        )
        for test in start.tests
        if test.run_key not in given
    )
    return WatchedNight(
        scenario=start.scenario,
        night=start.night,
        title=_title(start),
        verdicts=tuple(GivenVerdict(test_id=one.test_id, status=one.status) for one in end.verdicts),
        missing=tuple(missing),
        report=end.report,
    )


def _title(start: NightStart) -> str:
    return f"{start.scenario}, night {start.night}"
