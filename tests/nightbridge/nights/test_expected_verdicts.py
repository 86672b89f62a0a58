"""Which nights are due: from the slots of the days before, by scenario, in the person's own zone."""

from collections.abc import Sequence
from datetime import UTC, datetime, time, timedelta, timezone
from pathlib import Path
from zoneinfo import ZoneInfo

import pytest

from nightbridge.models import StoreSettings
from nightbridge.nights.expected_verdicts import (
    DueNight,
    Expected,
    Morning,
    due_nights,
    morning_of,
    recent_nights,
)
from nightbridge.nights.records import Night, NightStart, NightTest, record_start
from nightbridge.store.object_store import ObjectStore, open_store

BERLIN = ZoneInfo("Europe/Berlin")
EIGHT = datetime(2026, 11, 22, 8, tzinfo=BERLIN)
MORNING = Morning(EIGHT, BERLIN)


def at(day: int, hour: int, minute: int = 0) -> datetime:
    return datetime(2026, 11, day, hour, minute, tzinfo=BERLIN)


def night(
    slot: datetime | None,
    *,
    begun: datetime | None = None,
    scenario: str = "practice",
    tests: Sequence[str] = ("llama",),
    deployment: str = "nightly",
) -> Night:
    moment = begun or slot
    assert moment is not None
    return Night(
        start=NightStart(
            night=f"{moment:%Y-%m-%d-%H%M}",
            scenario=scenario,
            cluster="here",
            workspace=Path("/w"),
            begun_at=moment,
            slot=slot,
            deployment=deployment,
            tests=tuple(NightTest(test_id=test, run_key=f"{test}-key") for test in tests),
        )
    )


def by_hand(begun: datetime, *tests: str) -> Night:
    return night(None, begun=begun, tests=tests or ("llama",))


def due(*nights: Night, days: int = 7, expected: dict[str, Expected] | None = None) -> list[DueNight]:
    return due_nights(nights, MORNING, days, expected)


def shown(found: Sequence[DueNight]) -> list[str]:
    """Ids of those that began, `missing HH:MM` for those that did not."""
    return [
        one.night.start.night if one.night else f"missing {MORNING.clock(one.slot) if one.slot else 'any'}"
        for one in found
    ]


class TestMorning:
    @pytest.mark.parametrize(
        ("now", "expected"),
        [
            (at(22, 8), at(22, 8)),
            (at(22, 23, 59), at(22, 8)),
            (at(22, 7), at(21, 8)),
            # A scheduler's clock may be ahead of this machine's.
            (at(22, 7, 56), at(22, 8)),
            (at(22, 7, 54), at(21, 8)),
        ],
    )
    def test_is_the_newest_whose_hour_has_come(self, now: datetime, expected: datetime) -> None:
        assert morning_of(time(8), BERLIN, now.astimezone(UTC)).deadline == expected

    def test_is_that_of_the_named_zone(self) -> None:
        now = datetime(2026, 11, 22, 0, tzinfo=UTC)

        assert morning_of(time(8), ZoneInfo("Asia/Tokyo"), now).deadline == datetime(2026, 11, 21, 23, tzinfo=UTC)

    def test_without_a_zone_it_is_this_machines_own(self) -> None:
        now = datetime(2026, 11, 22, 12, tzinfo=UTC)
        local = now.astimezone()

        found = morning_of(time(local.hour, local.minute), None, now).deadline

        assert found == now

    def test_days_before_are_days_of_the_calendar(self) -> None:
        after = morning_of(time(8), BERLIN, datetime(2027, 3, 28, 8, tzinfo=BERLIN))  # clocks were set forward at 2

        assert after.days_before(1) == datetime(2027, 3, 27, 8, tzinfo=BERLIN)
        assert (after.deadline.astimezone(UTC) - after.days_before(1).astimezone(UTC)) == timedelta(hours=23)

    def test_times_of_another_day_are_shown_with_their_date(self) -> None:
        assert MORNING.clock(at(22, 2, 10).astimezone(UTC)) == "02:10"
        assert MORNING.clock(at(21, 23, 5)) == "2026-11-21 23:05"


class TestDue:
    def test_a_night_that_began_is_due_itself(self) -> None:
        assert shown(due(night(at(21, 1)), night(at(22, 1)))) == ["2026-11-22-0100"]

    def test_a_slot_of_the_day_before_is_expected_again(self) -> None:
        (missing,) = due(night(at(21, 1), tests=("llama", "vlm")))

        assert (missing.night, missing.slot, missing.tests) == (None, at(22, 1), ("llama", "vlm"))
        assert missing.deployment == "nightly"

    def test_a_slot_of_some_days_ago_is_expected_still_and_then_no_more(self) -> None:
        assert shown(due(night(at(17, 1)))) == ["missing 01:00"]
        assert shown(due(night(at(14, 1)))) == []

    def test_each_slot_of_a_day_is_expected(self) -> None:
        before = [night(at(20, 13)), night(at(21, 1)), night(at(21, 5))]

        assert shown(due(*before)) == ["missing 2026-11-21 13:00", "missing 01:00", "missing 05:00"]
        assert shown(due(*before, night(at(22, 5)))) == ["2026-11-22-0500", "missing 2026-11-21 13:00", "missing 01:00"]

    def test_a_slot_that_is_missed_every_day_is_expected_every_day(self) -> None:
        nights = [night(at(19, 1)), night(at(19, 5)), night(at(20, 5)), night(at(21, 5)), night(at(22, 5))]

        assert shown(due(*nights)) == ["2026-11-22-0500", "missing 01:00"]

    def test_a_night_at_a_new_time_is_the_one_of_a_changed_schedule(self) -> None:
        assert shown(due(night(at(21, 3)), night(at(22, 1)))) == ["2026-11-22-0100"]
        assert shown(due(night(at(19, 3)), night(at(20, 3)), night(at(21, 1)), night(at(22, 1)))) == ["2026-11-22-0100"]

    def test_an_evening_slot_belongs_to_the_next_morning(self) -> None:
        assert shown(due(night(at(20, 22)))) == ["missing 2026-11-21 22:00"]
        assert shown(due(night(at(20, 22)), night(at(21, 22)))) == ["2026-11-21-2200"]

    def test_a_scenario_whose_first_slot_comes_after_the_deadline_had_nothing_due(self) -> None:
        assert due(night(at(22, 22))) == []
        assert shown(due(night(at(22, 22)), night(at(21, 2)))) == ["missing 02:00"]

    def test_a_slot_is_at_the_same_local_time_after_clocks_were_set(self) -> None:
        morning = morning_of(time(8), BERLIN, datetime(2027, 3, 28, 8, tzinfo=BERLIN))

        (missing,) = due_nights([night(datetime(2027, 3, 27, 4, tzinfo=BERLIN))], morning, 7, None)

        assert missing.slot == datetime(2027, 3, 28, 4, tzinfo=BERLIN)

    @pytest.mark.parametrize(
        "slot",
        [
            datetime(2027, 10, 31, 2, 30, tzinfo=timezone(timedelta(hours=2))),  # comes twice
            datetime(
                2027, 3, 28, 1, 30, tzinfo=timezone(timedelta(hours=1))
            ),  # Prefect's for 2:30, which does not come
        ],
    )
    def test_when_clocks_are_set_in_a_slot_its_night_is_there_and_another_slot_is_missed(self, slot: datetime) -> None:
        day = datetime(slot.year, slot.month, slot.day, tzinfo=BERLIN)
        night_before = night(day - timedelta(days=1) + timedelta(hours=2, minutes=30))
        afternoon = night(day - timedelta(days=2) + timedelta(hours=13), tests=("vlm",))

        there, missing = due_nights(
            [afternoon, night_before, night(slot)], Morning(day + timedelta(hours=8), BERLIN), 7, None
        )

        assert (there.night, there.tests) == (night(slot), ())
        assert (missing.slot, missing.tests) == (day - timedelta(hours=11), ("vlm",))

    @pytest.mark.parametrize("other", ["sweep", "Practice"])
    def test_scenarios_do_not_stand_in_for_each_other(self, other: str) -> None:
        nights = [night(at(21, 1)), night(at(21, 2), scenario=other), night(at(22, 1))]

        assert {one.scenario: one.night is None for one in due(*nights)} == {"practice": False, other: True}


class TestTwoDeploymentsInOneSlot:
    BEFORE = (night(at(21, 1)), night(at(21, 1), tests=("vlm",), deployment="nightly-vlm"))

    @pytest.mark.parametrize("begun", BEFORE)
    def test_one_whose_night_did_not_begin_is_missed_with_its_own_tests(self, begun: Night) -> None:
        (other,) = [each.start for each in self.BEFORE if each != begun]

        tonight = night(at(22, 1), tests=begun.start.test_ids, deployment=begun.start.deployment)
        there, missing = due(*self.BEFORE, tonight)

        assert (there.night, there.tests) == (tonight, ())
        assert (missing.slot, missing.tests, missing.deployment) == (at(22, 1), other.test_ids, other.deployment)

    @pytest.mark.parametrize("tests", ["llama", "vlm"])
    def test_one_is_missed_in_an_hour_that_comes_twice(self, tests: str) -> None:
        before = [night(datetime(2027, 10, 30, 2, tzinfo=BERLIN), tests=(test,)) for test in ("llama", "vlm")]
        begun = night(datetime(2027, 10, 31, 2, tzinfo=timezone(timedelta(hours=2))), tests=(tests,))

        found = due_nights([*before, begun], Morning(datetime(2027, 10, 31, 8, tzinfo=BERLIN), BERLIN), 7, None)

        assert [one.tests for one in found] == [(), tuple({"llama", "vlm"} - {tests})]

    def test_both_are_missed_with_their_own_tests(self) -> None:
        assert sorted((one.deployment, one.tests) for one in due(*self.BEFORE)) == [
            ("nightly", ("llama",)),
            ("nightly-vlm", ("vlm",)),
        ]

    def test_both_are_there(self) -> None:
        tonight = (night(at(22, 1)), night(at(22, 1), tests=("vlm",), deployment="nightly-vlm"))

        assert [(one.night, one.tests) for one in due(*self.BEFORE, *tonight)] == [(each, ()) for each in tonight]

    def test_one_that_has_the_tests_of_both_now_is_enough(self) -> None:
        tonight = night(at(22, 1), tests=("llama", "vlm"))

        assert [one.night for one in due(*self.BEFORE, tonight)] == [tonight]

    def test_a_night_by_hand_stands_in_for_the_one_that_has_its_tests(self) -> None:
        assert shown(due(*self.BEFORE, night(at(22, 1)), by_hand(at(22, 6), "vlm"))) == [
            "2026-11-22-0100",
            "2026-11-22-0600",
        ]

    def test_each_test_of_a_named_scenario_is_missed_once(self) -> None:
        expected = {"practice": Expected(file="p.toml", tests=("llama", "vlm"))}

        assert [one.tests for one in due(*self.BEFORE, expected=expected)] == [("llama", "vlm")]
        assert [one.tests for one in due(*self.BEFORE, night(at(22, 1)), expected=expected)] == [("vlm",)]


class TestNightsByHand:
    def test_stand_in_for_a_slot_that_they_began_after(self) -> None:
        assert shown(due(night(at(21, 1)), by_hand(at(22, 6)))) == ["2026-11-22-0600"]

    def test_stand_in_for_it_when_they_began_after_the_deadline(self) -> None:
        assert shown(due(night(at(21, 1)), by_hand(at(22, 8, 20)))) == ["2026-11-22-0820"]

    def test_of_the_day_before_do_not(self) -> None:
        assert shown(due(night(at(21, 1)), by_hand(at(21, 14)))) == ["missing 01:00"]

    def test_beside_a_scheduled_night_are_not_due(self) -> None:
        assert shown(due(night(at(21, 1)), night(at(22, 1)), by_hand(at(22, 6)))) == ["2026-11-22-0100"]

    def test_of_some_tests_leave_the_slot_due_for_the_others(self) -> None:
        stand_in, rest = due(night(at(21, 1), tests=("llama", "vlm", "moe")), by_hand(at(22, 7), "vlm"))

        assert shown([stand_in, rest]) == ["2026-11-22-0700", "missing 01:00"]
        assert (stand_in.tests, rest.tests, rest.deployment) == ((), ("llama", "moe"), "nightly")

    def test_stand_in_together_for_a_slot_whose_tests_they_have_among_them(self) -> None:
        last = night(at(21, 1), tests=("llama", "vlm"))
        nights = [by_hand(at(22, 6), "vlm"), by_hand(at(22, 7), "another"), by_hand(at(22, 7, 30), "llama")]

        assert shown(due(last, *nights)) == ["2026-11-22-0600", "2026-11-22-0730"]

    def test_of_the_days_before_do_not_say_which_tests_are_expected(self) -> None:
        nights = [night(at(21, 1), tests=("llama", "vlm")), by_hand(at(21, 7), "vlm")]

        (missing,) = due(*nights)

        assert missing.tests == ("llama", "vlm")

    def test_stand_in_for_a_slot_with_the_tests_that_it_had_not_those_of_another_slot(self) -> None:
        before = [night(at(20, 22), tests=("llama",)), night(at(21, 2), tests=("vlm",))]
        later = night(at(22, 2), tests=("vlm",))

        assert shown(due(*before, later, by_hand(at(21, 23), "llama"))) == ["2026-11-21-2300", "2026-11-22-0200"]
        assert [one.tests for one in due(*before, later) if one.night is None] == [("llama",)]

    def test_alone_make_nothing_expected(self) -> None:
        assert due(by_hand(at(21, 1)), by_hand(at(22, 1))) == []


class TestNamedScenarios:
    TESTS = ("llama", "broken")
    EXPECTED: dict[str, Expected] = {"practice": Expected(file="p.toml", tests=TESTS)}  # noqa: RUF012

    def test_are_due_whatever_the_store_says(self) -> None:
        (missing,) = due(expected=self.EXPECTED)

        assert (missing.night, missing.slot, missing.tests, missing.file) == (None, None, ("llama", "broken"), "p.toml")

    def test_are_the_only_ones(self) -> None:
        nights = [night(at(21, 2), scenario="sweep"), night(at(22, 1))]

        assert shown(due(*nights, expected=self.EXPECTED)) == ["2026-11-22-0100"]

    def test_are_due_by_the_nights_by_hand_of_the_day_where_no_slot_is_known(self) -> None:
        nights = [by_hand(at(21, 12), *self.TESTS), by_hand(at(22, 2), *self.TESTS), by_hand(at(20, 1), *self.TESTS)]

        assert shown(due(*nights, expected=self.EXPECTED)) == ["2026-11-21-1200", "2026-11-22-0200"]
        assert shown(due(nights[2], expected=self.EXPECTED)) == ["missing any"]

    def test_are_due_by_earlier_nights_too_where_the_newest_by_hand_is_of_some_tests(self) -> None:
        whole, some = by_hand(at(22, 1), *self.TESTS), by_hand(at(22, 7), "llama")

        (rest,) = [one for one in due(some, expected=self.EXPECTED) if one.night is None]

        assert rest.tests == ("broken",)
        assert shown(due(whole, some, expected=self.EXPECTED)) == ["2026-11-22-0100", "2026-11-22-0700"]

    def test_are_due_with_every_test_of_the_file(self) -> None:
        (begun,) = due(night(at(22, 1)), expected=self.EXPECTED)
        (whole,) = due(night(at(22, 1), tests=self.TESTS), expected=self.EXPECTED)

        assert (begun.tests, whole.tests) == (("broken",), ())

    def test_are_due_with_the_tests_that_no_slot_of_the_day_had(self) -> None:
        nights = [night(at(21, 22), tests=("llama",)), night(at(22, 1), tests=("broken",))]

        assert [one.tests for one in due(*nights, expected=self.EXPECTED)] == [(), ()]

    def test_are_due_with_a_test_that_was_run_by_hand_since(self) -> None:
        nights = due(night(at(22, 1)), by_hand(at(22, 7), "broken"), expected=self.EXPECTED)

        assert [(one.night is not None, one.tests) for one in nights] == [(True, ()), (True, ())]

    def test_are_expected_after_more_days_than_the_store_says(self) -> None:
        assert shown(due(night(at(1, 1)), expected=self.EXPECTED)) == ["missing any"]


class TestRecentNights:
    @pytest.fixture
    def store(self, tmp_path: Path) -> ObjectStore:
        return open_store(StoreSettings(url=f"file://{tmp_path}"))

    def test_are_those_recorded_lately(self, store: ObjectStore) -> None:
        record_start(store, night(at(21, 1)).start)
        now = datetime.now(UTC)

        found, damaged = recent_nights(store, now - timedelta(days=8))
        none, _ = recent_nights(store, now + timedelta(days=1))

        assert [one.start.night for one in found] == ["2026-11-21-0100"]
        assert (none, damaged) == ([], [])

    def test_of_earlier_versions_are_among_them(self, store: ObjectStore) -> None:
        recorded = night(at(21, 1), scenario="Nightly, H100").start
        store.put(f"nights/{recorded.night}/nightly-h100/begun.json", recorded.model_dump_json().encode())

        found, _ = recent_nights(store, datetime.now(UTC) - timedelta(days=8))

        assert [one.start.scenario for one in found] == ["Nightly, H100"]

    def test_a_damaged_record_is_told_and_the_others_are_read(self, store: ObjectStore) -> None:
        record_start(store, night(at(21, 1)).start)
        store.put("nights/2026-11-22/practice/begun.json", b"{")

        found, damaged = recent_nights(store, datetime.now(UTC) - timedelta(days=8))

        assert len(found) == 1
        assert "2026-11-22/practice/begun.json: not the record of a night" in damaged[0]


def test_nights_that_are_read_back_have_the_slots_of_the_zone_they_are_asked_in(tmp_path: Path) -> None:
    store = open_store(StoreSettings(url=f"file://{tmp_path}"))
    today = datetime.now(BERLIN).date()
    yesterday = datetime.combine(today - timedelta(days=1), time(1), BERLIN)
    record_start(store, night(yesterday).start)
    morning = morning_of(time(8), BERLIN, datetime.combine(today, time(8), BERLIN))

    nights, _ = recent_nights(store, morning.days_before(8))
    (missing,) = due_nights(nights, morning, 7, None)

    assert missing.slot == datetime.combine(today, time(1), BERLIN)
