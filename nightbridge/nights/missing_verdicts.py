"""The watchdog: which test has no verdict by a time of the morning, and why.

It reads the store and queries Slurm. It needs no Prefect server, and asks one that is configured only why a night has
not begun. A bad verdict raises no alert here: the night itself reports it. A verdict that is missing does.
"""

import platform
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, time
from functools import partial
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

from pydantic import Field

from nightbridge import config
from nightbridge.errors import InvalidInput, NightbridgeError, TransientError
from nightbridge.models import EXIT_CODES, Model, Site, VerdictStatus, utc_now
from nightbridge.nights.expected_verdicts import (
    DueNight,
    Expected,
    MissingCause,
    Morning,
    due_nights,
    morning_of,
    recent_nights,
)
from nightbridge.nights.liveness import is_alive
from nightbridge.nights.prefect_api import PrefectServer, why_not_begun
from nightbridge.nights.records import NightEnd, NightStart, NightTest, plan_path, read_plan
from nightbridge.nights.status import RunPhase, RunStatus, run_statuses
from nightbridge.notify import Notice
from nightbridge.numbers import format_count
from nightbridge.slurm.factory import open_cluster
from nightbridge.slurm.protocol import Cluster
from nightbridge.store.object_store import ObjectStore

EXIT_MISSING, EXIT_INVALID = 4, 2
DAYS = 7
MAX_DAYS = 36_500
"""The calendar has a first year."""


class VerdictsMissing(NightbridgeError):
    """Verdicts are missing, or whether they are is unknown."""


class MissingVerdict(Model):
    """A run that has no verdict; a whole test where its night has not begun."""

    scenario: str
    night: str = Field(description="Id of the night; empty where it has not begun.")
    test_id: str
    run_key: str = ""
    cause: MissingCause
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
        """Whether every verdict is there, and the report of them."""
        return not (self.missing or self.no_report)


class WatchSettings(Model):
    """What the watchdog is to look for."""

    by: time
    zone: ZoneInfo | None = Field(None, description="The zone of `by`; this machine's own when None.")
    files: tuple[Path, ...] = Field((), description="Scenarios that are expected whatever the store has.")
    days: int = Field(DAYS, ge=1, le=MAX_DAYS, description="How far back nights in the store count as expected again.")


class Watch(Model):
    """What the watchdog has seen."""

    by: datetime
    nights: tuple[WatchedNight, ...] = ()
    troubles: tuple[str, ...] = Field((), description="What it could not look at.")
    invalid: tuple[str, ...] = Field((), description="What the user named and cannot be read.")

    @property
    def missing(self) -> tuple[MissingVerdict, ...]:
        """Every verdict that is missing."""
        return tuple(missing for night in self.nights for missing in night.missing)

    @property
    def exit_code(self) -> int:
        """0 when every verdict is there, 4 when one is missing or that is unknown, 2 for unreadable files alone."""
        if self.troubles or not all(night.is_complete for night in self.nights):
            return EXIT_MISSING
        return EXIT_INVALID if self.invalid else 0


def watch_settings(
    by: str, *, timezone: str | None = None, files: Iterable[Path] = (), days: int = DAYS
) -> WatchSettings:
    """Read what a person asks.

    Args:
        by: Local time of day, `08:00`.
        timezone: Its zone, `Europe/Berlin`; this machine's own when None.
        files: Scenario files.
        days: As in `WatchSettings`.

    Raises:
        InvalidInput: The time or the zone cannot be read, or there is no day to look at.
    """
    if not 1 <= days <= MAX_DAYS:
        advice = f"Give 1 to {MAX_DAYS:,}, as 7"
        raise InvalidInput("not a number of days to look back", subject=str(days), advice=advice)
    try:
        clock = datetime.strptime(by, "%H:%M").time()
    except ValueError as error:
        raise InvalidInput("not a time of day", subject=by, advice="Write hours and minutes, as 08:00") from error
    try:
        zone = ZoneInfo(timezone) if timezone else None
    except (ValueError, OSError, KeyError) as error:
        raise InvalidInput("no such time zone", subject=str(timezone), advice="Write it as Europe/Berlin") from error
    return WatchSettings(by=clock, zone=zone, files=tuple(files), days=days)


def look(
    settings: WatchSettings,
    site: Site,
    open_store: Callable[[], ObjectStore],
    server: PrefectServer | None = None,
    *,
    now: datetime | None = None,
) -> Watch:
    """Look which test has no verdict, and why.

    What goes wrong on the way is part of the result, and not raised: a verdict that cannot be read is missing, too.

    Args:
        settings: Until when, and of which scenarios.
        site: The workspace and the cluster.
        open_store: Opens the store.
        server: Prefect's server, queried for why a night has not begun; None for not at all.
        now: The time; the machine's when None.
    """
    morning = morning_of(settings.by, settings.zone, now or utc_now())
    expected, invalid = _named(settings.files)
    try:
        store = open_store()
        nights, troubles = recent_nights(store, morning.days_before(settings.days + 1))
        inspector = _Inspector(site, store, server, morning)
        due = due_nights(nights, morning, settings.days, expected if settings.files else None)
        seen = tuple(inspector.inspect(one) for one in due)
    except InvalidInput as error:
        return Watch(by=morning.deadline, invalid=(*invalid, str(error)))
    except NightbridgeError as error:
        return Watch(by=morning.deadline, troubles=(f"the store cannot be read: {error}",), invalid=tuple(invalid))
    is_new = any(night.start.slot and night.start.slot > morning.deadline for night in nights)
    if not (due or invalid or is_new):
        advice = "Check --store and --workspace, or name the scenario files"
        troubles.append(f"{store.url}: no night was scheduled in the last {settings.days} days. {advice}")
    known = tuple(dict.fromkeys((*troubles, *inspector.troubles)))
    return Watch(by=morning.deadline, nights=seen, troubles=known, invalid=tuple(invalid))


def _named(files: Sequence[Path]) -> tuple[dict[str, Expected], list[str]]:
    """The scenarios that a person named, and what of them cannot be read."""
    expected: dict[str, Expected] = {}
    invalid: list[str] = []
    for file in files:
        try:
            scenario = config.load(file)
        except InvalidInput as error:
            invalid.append(str(error))
        else:
            expected[scenario.name] = Expected(file=str(file), tests=scenario.test_ids)
    return expected, invalid


# --- one night -------------------------------------------------------------------------------------------------------


_PROCESS: Mapping[bool | None, str] = {
    True: "",
    False: "the night's process is gone",
    None: "whether the night's process is alive is unknown",
}

_WORDS: Mapping[tuple[RunPhase, bool], tuple[MissingCause, str]] = {
    (RunPhase.NOT_STARTED, True): (MissingCause.IN_PROGRESS, "in progress: it has no job yet"),
    (RunPhase.NOT_STARTED, False): (MissingCause.CRASHED, "{cause}: nothing of it was begun, and {process}"),
    (RunPhase.PREPARING, True): (MissingCause.IN_PROGRESS, "in progress{since}: it has no job yet{also}"),
    (RunPhase.PREPARING, False): (MissingCause.CRASHED, "{cause}: no job of it is recorded, and {process}{also}"),
    (RunPhase.WAITING, True): (MissingCause.WAITING, "waiting{since} ({reason}), job {job}"),
    (RunPhase.WAITING, False): (MissingCause.WAITING, "waiting{since} ({reason}), job {job}; {process}"),
    (RunPhase.RUNNING, True): (MissingCause.RUNNING, "running{since}, job {job}"),
    (RunPhase.RUNNING, False): (MissingCause.RUNNING, "running{since}, job {job}; {process}"),
    (RunPhase.ENDED, True): (
        MissingCause.IN_PROGRESS,
        "in progress: job {job} ended{at} ({reason}) and is being judged",
    ),
    (RunPhase.ENDED, False): (MissingCause.CRASHED, "{cause}: job {job} ended{at} ({reason}), and {process}"),
    (RunPhase.UNKNOWN, True): (MissingCause.UNKNOWN, "unknown: {reason}"),
    (RunPhase.UNKNOWN, False): (MissingCause.UNKNOWN, "unknown: {reason}; {process}"),
}
"""Cause and words, by how far the run is and whether the night's process is known to live."""


@dataclass
class _Inspector:
    """Inspects one night after the other; `troubles` is what it could not read.

    `server` is queried for why a night has not begun, and `morning` is until when verdicts should be there.
    """

    site: Site
    store: ObjectStore
    server: PrefectServer | None
    morning: Morning
    troubles: list[str] = field(default_factory=list)

    def inspect(self, due: DueNight) -> WatchedNight:
        """What is there of a night, and what is missing."""
        if due.night is None:
            return self._not_begun(due)
        start, end = due.night.start, due.night.ended
        seen = _ended(start, end) if end else self._under_way(start)
        named = {
            "scenario": start.scenario,
            "night": start.night,
            "cause": MissingCause.NOT_STARTED,
            "since": start.slot,
        }
        why = "not started: the night was begun without it"
        lacking = (MissingVerdict(test_id=test, why=why, **named) for test in due.tests)
        return seen.model_copy(update={"missing": (*seen.missing, *lacking)})

    # --- a night that has left nothing

    def _not_begun(self, due: DueNight) -> WatchedNight:
        moment = due.slot or self.morning.deadline
        title = (
            f"{due.scenario}, the night {'of' if due.slot else 'before'} "
            f"{moment.astimezone(self.morning.zone):%Y-%m-%d %H:%M}"
        )
        cause, why = MissingCause.NOT_STARTED, "not started"
        if self.server is not None and (due.deployment or due.file):
            between = (due.slot or self.morning.days_before(1), self.morning.deadline)
            found = why_not_begun(self.server, due.deployment, due.file, between, self.morning.clock)
            cause, why = found.cause, f"not started: {found.words}"
        missing = tuple(
            MissingVerdict(scenario=due.scenario, night="", test_id=test, cause=cause, why=why, since=due.slot)
            for test in due.tests
        )
        return WatchedNight(
            scenario=due.scenario, night="", title=title, missing=missing, no_report="" if due.tests else why
        )

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
        """Whether the night's process lives; None where that is unknown."""
        if not start.workspace.is_dir():
            return None
        try:
            return bool(is_alive(start.workspace, start.flow_run))
        except TransientError as error:
            self.troubles.append(str(error))
            return None

    def _runs(self, start: NightStart) -> Sequence[RunStatus]:
        """Where each run is; a run that cannot be read is unknown, with the reason."""
        try:
            return run_statuses(start, self.store, partial(self._cluster_of, start))
        except (NightbridgeError, ValueError) as error:
            self.troubles.append(f"{_title(start)}: {error}")
            return [
                RunStatus(test_id=test.test_id, run_key=test.run_key, phase=RunPhase.UNKNOWN, reason="see below")
                for test in start.tests
            ]

    def _cluster_of(self, start: NightStart) -> Cluster:
        """The cluster that the night's jobs are on: the site's, else the one that the night was planned for."""
        settings = self.site.cluster
        if settings.name != start.cluster:
            plan = read_plan(plan_path(start.workspace, start.flow_run))
            settings = plan.site.cluster if plan else settings
        return open_cluster(settings, start.workspace)

    def _missing(self, start: NightStart, run: RunStatus, alive: bool | None) -> MissingVerdict:
        if run.job_id is None and not start.workspace.is_dir():
            cause, words = MissingCause.UNKNOWN, "unknown: {workspace} cannot be seen from this machine"
        else:
            cause, words = _WORDS[run.phase, bool(alive)]
            cause = MissingCause.UNKNOWN if cause is MissingCause.CRASHED and alive is None else cause
        clock = self.morning.clock(run.since) if run.since else ""
        why = words.format(
            since=f" since {clock}" if clock else "",
            at=f" at {clock}" if clock else "",
            job=run.job_id,
            reason=run.reason or "no reason is given",
            cause=cause.value,
            workspace=start.workspace,
            process=_PROCESS[alive],
            also=f", {run.reason}" if run.reason else "",
        )
        return MissingVerdict(**_named_run(start, run), cause=cause, why=why, since=run.since, job_id=run.job_id)


def _ended(start: NightStart, end: NightEnd) -> WatchedNight:
    """A night that has its report; a run that is not in it has no verdict all the same."""
    given = {verdict.run_key for verdict in end.verdicts}
    return WatchedNight(
        scenario=start.scenario,
        night=start.night,
        title=_title(start),
        verdicts=tuple(GivenVerdict(test_id=one.test_id, status=one.status) for one in end.verdicts),
        missing=tuple(
            MissingVerdict(**_named_run(start, test), cause=MissingCause.CRASHED, why="the night ended without it")
            for test in start.tests
            if test.run_key not in given
        ),
        report=end.report,
    )


def _named_run(start: NightStart, run: RunStatus | NightTest) -> dict[str, Any]:
    """What names a run in a `MissingVerdict`."""
    return {"scenario": start.scenario, "night": start.night, "test_id": run.test_id, "run_key": run.run_key}


def _title(start: NightStart) -> str:
    return f"{start.scenario}, night {start.night}"


# --- in words --------------------------------------------------------------------------------------------------------


def watch_lines(watch: Watch) -> Iterator[str]:
    """What the watchdog has seen, for people: a paragraph for each night, then what it could not look at."""
    for night in watch.nights:
        yield from _night_lines(night)
    yield from watch.troubles
    yield from watch.invalid


def notice_of(watch: Watch) -> Notice:
    """The notification: one for everything that is missing."""
    nights = [night for night in watch.nights if not night.is_complete]
    return Notice(
        subject=f"nightbridge: {summary(watch)}",
        text="\n".join((f"Verdicts due by {watch.by:%Y-%m-%d %H:%M %Z}: {summary(watch)}", "", *watch_lines(watch))),
        facts={
            "night": ", ".join(dict.fromkeys(night.night or night.title for night in nights)),
            "missing": [missing.model_dump(mode="json") for missing in watch.missing],
            "troubles": [*watch.troubles, *watch.invalid],
        },
    )


def trial_notice() -> Notice:
    """What is sent to see that it arrives."""
    host = platform.node()
    return Notice(
        subject=f"nightbridge: test of the watchdog on {host}",
        text=f"The watchdog on {host} can reach you. No verdict is missing because of this message.",
        facts={"night": "", "missing": [], "troubles": []},
    )


def summary(watch: Watch) -> str:
    """What the watchdog has seen, in one line."""
    if not watch.exit_code:
        return "every verdict is there"
    said = []
    if watch.missing:
        where = ", ".join(dict.fromkeys(night.title for night in watch.nights if night.missing))
        said.append(f"{format_count(len(watch.missing), 'verdict')} missing: {where}")
    said += [f"no report: {night.title}" for night in watch.nights if night.no_report]
    if watch.troubles or watch.invalid:
        said.append("not everything could be looked at")
    return "; ".join(said)


def _night_lines(night: WatchedNight) -> Iterator[str]:
    verdicts = format_count(len(night.verdicts) + len(night.missing), "verdict")
    missing = f"{len(night.missing)} of {verdicts} missing" if night.missing else verdicts
    yield f"{night.title}: {missing}"
    why = defaultdict(list)
    for one in night.missing:
        why[one.why].append(one.test_id)
    yield from (f"  {', '.join(dict.fromkeys(ids))}: {words}" for words, ids in why.items())
    if night.no_report:
        yield f"  {night.no_report}"
    bad = [f"{one.test_id} {one.status.value.replace('_', ' ')}" for one in night.verdicts if EXIT_CODES[one.status]]
    if bad:
        yield f"  bad verdicts: {', '.join(bad)}"
    if night.report:
        yield f"  report: {night.report}"
