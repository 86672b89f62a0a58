"""The watchdog: which test has no verdict by a time of the morning, and why.

It reads the store and asks Slurm. It needs no Prefect server, and asks one that is configured only why a night has not
begun. A bad verdict is no alarm of its own: others tell it. A verdict that is not there is.
"""

import platform
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import datetime, time
from pathlib import Path
from zoneinfo import ZoneInfo

from pydantic import Field

from nightbridge import config
from nightbridge.errors import InvalidInput, NightbridgeError
from nightbridge.history.metrics import format_count
from nightbridge.models import EXIT_CODES, Model, Site, utc_now
from nightbridge.nights.due import Expected, due_nights, morning_of, recent_nights
from nightbridge.nights.prefect_api import PrefectServer
from nightbridge.nights.watched import MissingVerdict, WatchedNight, Watcher
from nightbridge.notify import Notice
from nightbridge.store.protocol import ObjectStore

EXIT_MISSING, EXIT_INVALID = 4, 2
DAYS = 7


class VerdictsMissing(NightbridgeError):
    """Verdicts are missing, or nobody can say."""


class Question(Model):
    """What the watchdog is asked."""

    by: time
    zone: ZoneInfo | None = Field(None, description="The zone of `by`; this machine's own when None.")
    files: tuple[Path, ...] = Field((), description="Scenarios that are expected whatever the store says.")
    days: int = Field(DAYS, ge=1, description="How far back nights in the store say which ones to expect.")


class Watch(Model):
    """What the watchdog has seen."""

    by: datetime
    nights: tuple[WatchedNight, ...] = ()
    troubles: tuple[str, ...] = Field((), description="What it could not look at.")
    invalid: tuple[str, ...] = Field((), description="What the person named and cannot be read.")

    @property
    def missing(self) -> tuple[MissingVerdict, ...]:
        """Every verdict that is missing."""
        return tuple(missing for night in self.nights for missing in night.missing)

    @property
    def exit_code(self) -> int:
        """0 when every verdict is there, 4 when one is missing or nobody can say, 2 for what cannot be read alone."""
        if self.troubles or not all(night.is_complete for night in self.nights):
            return EXIT_MISSING
        return EXIT_INVALID if self.invalid else 0


def question(by: str, *, timezone: str | None = None, files: Iterable[Path] = (), days: int = DAYS) -> Question:
    """Read what a person asks.

    Args:
        by: Local time of day, `08:00`.
        timezone: Its zone, `Europe/Berlin`; this machine's own when None.
        files: Scenario files.
        days: As in `Question`.

    Raises:
        InvalidInput: The time or the zone cannot be read.
    """
    try:
        clock = datetime.strptime(by, "%H:%M").time()
    except ValueError as error:
        raise InvalidInput("not a time of day", thing=by, advice="Write hours and minutes, as 08:00") from error
    try:
        zone = ZoneInfo(timezone) if timezone else None
    except (ValueError, OSError, KeyError) as error:
        raise InvalidInput("no such time zone", thing=str(timezone), advice="Write it as Europe/Berlin") from error
    return Question(by=clock, zone=zone, files=tuple(files), days=days)


def look(
    asked: Question,
    site: Site,
    open_store: Callable[[], ObjectStore],
    server: PrefectServer | None = None,
    *,
    now: datetime | None = None,
) -> Watch:
    """Look which test has no verdict, and why.

    What goes wrong on the way is a part of what was seen, and not raised: who cannot look has seen no verdict either.

    Args:
        asked: Until when, and of which scenarios.
        site: The workspace and the cluster.
        open_store: Opens the store.
        server: Prefect's server, asked why a night has not begun; None for not at all.
        now: The time; the machine's when None.
    """
    morning = morning_of(asked.by, asked.zone, now or utc_now())
    expected, invalid = _named(asked.files)
    try:
        store = open_store()
        nights, troubles = recent_nights(store, morning.days_before(asked.days + 1))
        watcher = Watcher(site, store, server, morning)
        due = due_nights(nights, morning, asked.days, expected if asked.files else None)
        seen = tuple(watcher.watched(one) for one in due)
    except InvalidInput as error:
        return Watch(by=morning.deadline, invalid=(*invalid, str(error)))
    except NightbridgeError as error:
        return Watch(by=morning.deadline, troubles=(f"the store cannot be read: {error}",), invalid=tuple(invalid))
    if not (due or invalid):
        advice = "Check --store and --workspace, or name the scenario files"
        troubles.append(f"{store.url}: no night was scheduled in the last {asked.days} days. {advice}")
    told = tuple(dict.fromkeys((*troubles, *watcher.troubles)))
    return Watch(by=morning.deadline, nights=seen, troubles=told, invalid=tuple(invalid))


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
            tests = (*(test.id for test in scenario.tests), *(test.id for test in scenario.invalid))
            expected[scenario.name] = Expected(file=str(file), tests=tests)
    return expected, invalid


# --- in words --------------------------------------------------------------------------------------------------------


def watch_lines(watch: Watch) -> Iterator[str]:
    """What the watchdog has seen, for people: a paragraph for each night, then what it could not look at."""
    for night in watch.nights:
        yield from _night_lines(night)
    yield from watch.troubles
    yield from watch.invalid


def notice_of(watch: Watch) -> Notice:
    """The alarm: one for everything that is missing."""
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
        where = ", ".join(night.title for night in watch.nights if night.missing)
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
