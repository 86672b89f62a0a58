"""Night ids: the schedule's own slot, a new one by hand, and nothing that no path can hold."""

from datetime import UTC, datetime
from zoneinfo import ZoneInfo

import pytest

from nightbridge.errors import InvalidInput
from nightbridge.nights.records import checked_night, new_night, night_of_slot

BERLIN = ZoneInfo("Europe/Berlin")


def at(*when: int, fold: int = 0) -> datetime:
    return datetime(*when, tzinfo=BERLIN, fold=fold)  # type: ignore[misc, arg-type]


def test_the_first_slot_of_a_day_has_the_date_and_each_further_one_its_time_as_well() -> None:
    day = [at(2026, 11, 21, 1), at(2026, 11, 21, 13), at(2026, 11, 21, 18, 30)]

    assert [night_of_slot(slot, day) for slot in day] == ["2026-11-21", "2026-11-21-1300", "2026-11-21-1830"]


def test_the_date_is_that_of_the_slots_own_zone() -> None:
    slot = datetime(2026, 11, 20, 23, 30, tzinfo=UTC)

    assert night_of_slot(slot, [slot]) == "2026-11-20"
    assert night_of_slot(slot.astimezone(BERLIN), [slot.astimezone(BERLIN)]) == "2026-11-21"


def test_a_local_time_that_comes_twice_makes_two_nights() -> None:
    day = [at(2027, 10, 31, 1), at(2027, 10, 31, 2, 30), at(2027, 10, 31, 2, 30, fold=1)]

    assert [night_of_slot(slot, day) for slot in day] == ["2027-10-31", "2027-10-31-0230", "2027-10-31-0230-2"]
    assert all(checked_night(night_of_slot(slot, day)) for slot in day)


def test_a_night_by_hand_sorts_after_the_scheduled_one_of_its_day_and_before_the_next() -> None:
    started = datetime(2026, 11, 21, 9, 5, 7, tzinfo=UTC)

    assert checked_night(new_night(started)) == new_night(started)
    assert "2026-11-21" < new_night(started) == "2026-11-21-090507" < "2026-11-22"


@pytest.mark.parametrize("text", ["2026-11-21", "2026-11-21-031500", "a", "7", "try-2", "a" * 40])
def test_what_can_be_a_night_id(text: str) -> None:
    assert checked_night(text) == text


@pytest.mark.parametrize("text", ["", "-a", "a-", "A", "a b", "a/b", "..", "a\n", "ä", "a_b", "a" * 41])
def test_what_cannot_be_a_night_id(text: str) -> None:
    with pytest.raises(InvalidInput, match=r"not a night id.*2026-11-21"):
        checked_night(text)
