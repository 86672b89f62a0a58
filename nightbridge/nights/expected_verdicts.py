"""Which nights should have their verdicts by a time of the morning, and the causes for which a test may have none.

A scenario's slots of the last days are the ones to expect, since a night that never began has left nothing behind.
Each is expected again at the same time of the next day: where a schedule leaves days out, the watchdog is to run on the
mornings after its nights.
"""

import enum
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from datetime import date, datetime, time, timedelta, timezone
from functools import partial
from typing import NamedTuple
from zoneinfo import ZoneInfo

from nightbridge.errors import DamagedData
from nightbridge.models import Model
from nightbridge.nights.records import Night, read_night
from nightbridge.store.object_store import ObjectStore


class MissingCause(enum.StrEnum):
    """Why there is no verdict. Of several things that keep a night from beginning the first one here is named."""

    CRASHED = "crashed"
    SCHEDULE_OFF = "schedule_off"
    WORKER_AWAY = "worker_away"
    LATE = "late"  # Prefect knows the flow run, and it has not begun
    SERVER_AWAY = "server_away"  # Prefect's
    NOT_STARTED = "not_started"
    WAITING = "waiting"  # in Slurm's queue
    RUNNING = "running"  # in Slurm
    IN_PROGRESS = "in_progress"  # the night's process is at work: before the job, or after it
    UNKNOWN = "unknown"  # Slurm does not answer, or the workspace cannot be seen


EARLY = timedelta(minutes=5)
"""Who asks so shortly before the hour means this morning: clocks of schedulers and hosts are not the same."""

_BEGUN = re.compile(r"(nights/[^/]+/[^/]+)/begun\.json")


class Expected(Model):
    """A scenario that a person named, so that a night of it is due whatever the store has."""

    file: str
    tests: tuple[str, ...]


class DueNight(Model):
    """A night that should have its verdicts; what one that has not begun lacks is taken from earlier nights.

    `tests` are the expected ones that no night has: all of a night that has not begun, those of the person's file that
    one which has begun is without.
    """

    scenario: str
    night: Night | None
    slot: datetime | None = None
    tests: tuple[str, ...] = ()
    deployment: str = ""
    file: str = ""


class Morning(NamedTuple):
    """The day of nights that ends with a deadline, in the person's zone: the machine's own where `zone` is None."""

    deadline: datetime
    zone: ZoneInfo | None

    def clock(self, moment: datetime) -> str:
        """A time for people: `02:10`, with its date where that is not the morning's."""
        local = moment.astimezone(self.zone)
        return f"{local:%H:%M}" if local.date() == self.deadline.date() else f"{local:%Y-%m-%d %H:%M}"

    def days_before(self, days: int) -> datetime:
        """The same time of day, so many days earlier."""
        return at(self.deadline.date() - timedelta(days=days), self.deadline.time(), self.zone)


def at(day: date, clock: time, zone: ZoneInfo | None) -> datetime:
    """A local time of a day."""
    moment = datetime.combine(day, clock, zone)
    return moment if zone else moment.astimezone()


def morning_of(by: time, zone: ZoneInfo | None, now: datetime) -> Morning:
    """The newest morning whose hour has come: today's, else yesterday's."""
    today = now.astimezone(zone).date()
    deadline = at(today, by, zone)
    return Morning(deadline if deadline <= now + EARLY else at(today - timedelta(days=1), by, zone), zone)


def recent_nights(store: ObjectStore, since: datetime) -> tuple[list[Night], list[str]]:
    """The nights whose beginning was recorded after a time, and the records that cannot be read.

    Raises:
        TransientError: The store does not answer.
        PermanentError: The store cannot be read.
    """
    found = [
        match[1]
        for item in store.list("nights/")
        if (match := _BEGUN.fullmatch(item.key)) and (item.modified is None or item.modified >= since)
    ]
    nights: list[Night] = []
    damaged: list[str] = []
    for folder in found:
        try:
            if night := read_night(store, folder):
                nights.append(night)
        except DamagedData as error:
            damaged.append(str(error))
    return nights, damaged


def due_nights(
    nights: Sequence[Night], morning: Morning, days: int, expected: Mapping[str, Expected] | None
) -> list[DueNight]:
    """The nights that should have their verdicts by the deadline, by scenario and slot.

    Args:
        nights: What the store has.
        morning: Until when; what belongs to the 24 hours before counts.
        days: How far back the slots of nights count as expected again.
        expected: By their names, the scenarios to look at; None for every one that had a scheduled night in those days:
            one whose first slot came after the deadline had nothing due by then.
    """
    since = morning.days_before(days)
    scheduled = [night for night in nights if night.start.slot and since < night.start.slot <= morning.deadline]
    scenarios = {night.start.scenario for night in scheduled} if expected is None else expected
    return [
        due
        for scenario in sorted(scenarios)
        for due in _due_of(
            scenario,
            [night for night in nights if night.start.scenario == scenario],
            morning,
            days,
            expected[scenario] if expected else None,
        )
    ]


def _due_of(
    scenario: str, nights: Sequence[Night], morning: Morning, days: int, named: Expected | None
) -> list[DueNight]:
    """The due nights of one scenario: the scheduled ones that began, and one for each slot without a night.

    Nights by hand stand in for what is missing of a slot that they began after, each for its own tests. With no slot at
    all to go by, as where something else than Prefect starts the nights, those of the day are due.
    """
    begun = sorted(
        (night for night in nights if night.start.slot and _is_of_day(morning, 0, night.start.slot)), key=_moment
    )
    by_hand = [night for night in nights if not night.start.slot and morning.days_before(1) < night.start.begun_at]
    slots = _expected_slots(nights, morning, days)
    of_file = named.tests if named else ()
    # Two schedules may share the tests of a file.
    in_none = _lacking(begun, of_file) if begun else ()
    stand_ins = _stand_ins(by_hand, begun[0].start.slot, in_none) if in_none else []
    lacking = {begun[-1].start.night: _lacking(stand_ins, in_none)} if begun else {}
    missing: list[DueNight] = []
    # Two deployments may be due in one slot, each with tests of its own.
    covered: dict[datetime | None, set[str]] = defaultdict(set)
    for night in begun:
        covered[night.start.slot].update(night.start.test_ids, of_file)
    unmet = _without_night(slots, [night.start.slot for night in begun if night.start.slot])
    for slot in unmet if begun or slots else [None]:
        last = _last_before(nights, morning, slot, covered[slot])
        tests = tuple(test for test in of_file or (last.start.test_ids if last else ()) if test not in covered[slot])
        if covered[slot] and not tests:
            continue
        covered[slot].update(tests)
        found = _stand_ins(by_hand, slot, tests)
        stand_ins += (night for night in found if night not in stand_ins)
        if (rest := _lacking(found, tests)) or not found:
            deployment, file = last.start.deployment if last else "", named.file if named else ""
            missing.append(
                DueNight(scenario=scenario, night=None, slot=slot, tests=rest, deployment=deployment, file=file)
            )
    there = sorted((*begun, *stand_ins), key=_moment)
    return [
        *(DueNight(scenario=scenario, night=night, tests=lacking.get(night.start.night, ())) for night in there),
        *missing,
    ]


def _stand_ins(by_hand: Iterable[Night], slot: datetime | None, expected: Sequence[str]) -> list[Night]:
    """The nights by hand that began after a slot and have expected tests."""
    since = (night for night in by_hand if slot is None or night.start.begun_at >= slot)
    return [night for night in since if not expected or not set(expected).isdisjoint(night.start.test_ids)]


def _lacking(nights: Iterable[Night], expected: Iterable[str]) -> tuple[str, ...]:
    """The expected tests that none of the nights has."""
    there = {test for night in nights for test in night.start.test_ids}
    return tuple(test for test in expected if test not in there)


def _last_before(
    nights: Iterable[Night], morning: Morning, slot: datetime | None, covered: AbstractSet[str]
) -> Night | None:
    """The newest night of the days before, if possible of the slot's own time: another schedule may have other tests.

    Of several in one slot it is one that has none of the tests covered already. Else scheduled if possible: one by hand
    may be of a few tests.
    """
    clock = slot.astimezone(morning.zone).time() if slot else None

    def preference(night: Night) -> tuple[bool, bool, bool, datetime]:
        own, is_new = night.start.slot, covered.isdisjoint(night.start.test_ids)
        return own is not None, own is not None and own.astimezone(morning.zone).time() == clock, is_new, _moment(night)

    earlier = [night for night in nights if _moment(night) <= morning.days_before(1)]
    return max(earlier, key=preference, default=None)


def _expected_slots(nights: Iterable[Night], morning: Morning, days: int) -> list[datetime]:
    """The slots of the newest of those days that had the most, at the same times of this one.

    The most, since a slot that is missed every day would be expected only once otherwise. Each has its offset alone:
    with its zone, a time in the hour that clocks are set in equals none that was read back.
    """
    slots = sorted(night.start.slot for night in nights if night.start.slot)
    by_day = [(number, list(filter(partial(_is_of_day, morning, number), slots))) for number in range(1, days + 1)]
    number, fullest = max(by_day, key=lambda day: len(day[1]))
    local = (slot.astimezone(morning.zone) for slot in fullest)
    expected = (at(slot.date() + timedelta(days=number), slot.time(), morning.zone) for slot in local)
    return [slot.replace(tzinfo=timezone(slot.utcoffset() or timedelta())) for slot in expected]


def _without_night(expected: Sequence[datetime], begun: Sequence[datetime]) -> list[datetime]:
    """The expected slots without a night, each as often as nights of it are missing.

    A night at another time is that of the nearest slot, since its schedule was changed or clocks were set.
    """
    unmet = [*(Counter(expected) - Counter(begun)).elements()]
    for moved in begun:
        if moved not in expected and unmet:
            unmet.remove(min(unmet, key=lambda slot: abs(slot - moved)))
    return unmet


def _moment(night: Night) -> datetime:
    return night.start.slot or night.start.begun_at


def _is_of_day(morning: Morning, number: int, moment: datetime) -> bool:
    """Whether a time belongs to the 24 hours that ended so many days before the deadline."""
    return morning.days_before(number + 1) < moment <= morning.days_before(number)
