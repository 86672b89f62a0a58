"""Night ids: the scheduled date where the schedule lives, a new one by hand, and nothing that no path can hold."""

from datetime import UTC, datetime

import pytest

from nightbridge.errors import InvalidInput
from nightbridge.nights import checked_night, new_night, night_of


@pytest.mark.parametrize(
    ("scheduled", "timezone", "night"),
    [
        (datetime(2026, 11, 20, 23, 30, tzinfo=UTC), "UTC", "2026-11-20"),
        (datetime(2026, 11, 20, 23, 30, tzinfo=UTC), "Europe/Berlin", "2026-11-21"),
        (datetime(2026, 11, 21, 1, 0, tzinfo=UTC), "America/Los_Angeles", "2026-11-20"),
        # 02:30 does not exist on the one day and comes twice on the other.
        (datetime(2026, 3, 29, 1, 30, tzinfo=UTC), "Europe/Berlin", "2026-03-29"),
        (datetime(2026, 10, 25, 0, 30, tzinfo=UTC), "Europe/Berlin", "2026-10-25"),
        (datetime(2026, 10, 25, 1, 30, tzinfo=UTC), "Europe/Berlin", "2026-10-25"),
    ],
)
def test_a_scheduled_night_is_the_date_in_the_deployments_time_zone(
    scheduled: datetime, timezone: str, night: str
) -> None:
    assert night_of(scheduled, timezone) == night
    assert checked_night(night) == night


@pytest.mark.parametrize("timezone", ["Mars/Olympus", "", "Europe", "/etc/localtime", "../UTC", "x" * 300])
def test_a_time_zone_that_does_not_exist_is_named(timezone: str) -> None:
    with pytest.raises(InvalidInput, match="no such time zone") as refused:
        night_of(datetime(2026, 11, 20, tzinfo=UTC), timezone)

    assert refused.value.thing == timezone


def test_a_night_by_hand_sorts_after_the_scheduled_one_of_its_day_and_before_the_next() -> None:
    before = night_of(datetime.now(UTC), "UTC")
    night = new_night()

    assert checked_night(night) == night
    assert before <= night
    assert night < f"{night[:8]}{int(night[8:10]) + 1:02d}"


@pytest.mark.parametrize("text", ["2026-11-21", "2026-11-21-031500", "a", "7", "try-2", "a" * 40])
def test_what_can_be_a_night_id(text: str) -> None:
    assert checked_night(text) == text


@pytest.mark.parametrize("text", ["", "-a", "a-", "A", "a b", "a/b", "..", "a\n", "ä", "a_b", "a" * 41])
def test_what_cannot_be_a_night_id(text: str) -> None:
    with pytest.raises(InvalidInput, match=r"not a night id.*2026-11-21"):
        checked_night(text)
