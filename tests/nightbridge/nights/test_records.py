"""What is kept of a night, and read back by whoever asks later."""

from datetime import timedelta
from pathlib import Path

import pytest

from nightbridge.errors import DamagedData, InvalidInput
from nightbridge.models import (
    NightReport,
    Scenario,
    Site,
    StoreSettings,
    Verdict,
    VerdictStatus,
    utc_now,
)
from nightbridge.nights.records import (
    Night,
    NightEnd,
    NightPlan,
    NightStart,
    NightTest,
    find_nights,
    find_run,
    find_test,
    plan_path,
    read_end,
    read_plan,
    read_start,
    record_end,
    record_start,
    was_reported,
    write_plan,
)
from nightbridge.store.object_store import ObjectStore, open_store
from tests import builders

RUN_KEY = "llama-2026-11-21-0123456789"


@pytest.fixture
def store(tmp_path: Path) -> ObjectStore:
    return open_store(StoreSettings(url=f"file://{tmp_path}/store"))


def start_of(night: str, scenario: str = "nightly", workspace: Path = Path("/lustre/nb"), **more: object) -> NightStart:
    return NightStart(
        night=night,
        scenario=scenario,
        cluster="dgx",
        workspace=workspace,
        begun_at=utc_now(),
        flow_run="f1",
        tests=(NightTest(test_id="llama", run_key=RUN_KEY),),
        **more,
    )


def report_of(status: VerdictStatus, night: str = "2026-11-21", job_id: int = 7) -> NightReport:
    verdict = Verdict(run_key=RUN_KEY, test_id="llama", night=night, status=status, job_id=job_id)
    return NightReport(scenario="nightly", night=night, verdicts=(verdict,), report="file:///r.html")


def test_nights_are_found_the_newest_first_with_and_without_an_end(store: ObjectStore) -> None:
    for night in ("2026-11-20", "2026-11-21", "2026-11-21-1300"):
        record_start(store, start_of(night))
    record_end(store, report_of(VerdictStatus.REGRESSED))

    found = find_nights(store)

    assert [night.start.night for night in found] == ["2026-11-21-1300", "2026-11-21", "2026-11-20"]
    assert [night.end.title if night.end else None for night in found] == [None, "regressed", None]
    assert [night.start.night for night in find_nights(store, limit=1)] == ["2026-11-21-1300"]


def test_a_night_that_a_word_names_is_no_newer_than_when_it_was_written(store: ObjectStore) -> None:
    tomorrow = str((utc_now() + timedelta(days=1)).date())
    for night in ("2026-01-01", "live", tomorrow):
        record_start(store, start_of(night))

    assert [night.start.night for night in find_nights(store)] == [tomorrow, "live", "2026-01-01"]
    assert [night.start.night for night in find_nights(store, limit=1)] == [tomorrow]


def test_scenarios_of_one_night_are_kept_apart(store: ObjectStore) -> None:
    record_start(store, start_of("2026-11-21", "large"))
    record_start(store, start_of("2026-11-21", "small"))

    assert {night.start.scenario for night in find_nights(store, night="2026-11-21")} == {"large", "small"}


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (
            "Nightly regression of Megatron-Bridge on Hopper, bf16",
            "Nightly regression of Megatron-Bridge on Hopper, fp8",
        ),
        ("a b", "a-b"),
        ("Nightly", "nightly"),
    ],
)
def test_scenarios_of_much_the_same_name_are_kept_apart(store: ObjectStore, one: str, other: str) -> None:
    for scenario in (one, other):
        record_start(store, start_of("2026-11-21", scenario))
        record_end(store, report_of(VerdictStatus.PASSED).model_copy(update={"scenario": scenario}))

    found = find_nights(store)

    assert sorted(night.start.scenario for night in found) == sorted((one, other))
    assert all(night.end and night.end.scenario == night.start.scenario for night in found)


class TestANightThatWasRecordedBelowTheSlug:
    """As 0.1 did for any scenario."""

    NAME = "Nightly, H100"

    @pytest.fixture
    def recorded(self, store: ObjectStore) -> NightStart:
        start = start_of("2026-11-20", self.NAME)
        store.put("nights/2026-11-20/nightly-h100/begun.json", start.model_dump_json().encode())
        return start

    def end(self, store: ObjectStore, scenario: str) -> NightEnd:
        report = report_of(VerdictStatus.PASSED, night="2026-11-20")
        return record_end(store, report.model_copy(update={"scenario": scenario}))

    def test_is_found_and_goes_on_there(self, store: ObjectStore, recorded: NightStart) -> None:
        assert read_start(store, recorded.night, self.NAME) == recorded

        record_start(store, recorded)
        end = self.end(store, self.NAME)

        assert find_nights(store) == [Night(start=recorded, end=end)]
        assert read_end(store, recorded.night, self.NAME) == end

    def test_is_not_that_of_another_scenario(self, store: ObjectStore, recorded: NightStart) -> None:
        other = start_of(recorded.night, "nightly (h100)")

        assert read_start(store, recorded.night, "nightly-h100") is None
        assert read_start(store, other.night, other.scenario) is None

        record_start(store, other)
        assert {night.start.scenario for night in find_nights(store)} == {self.NAME, other.scenario}

    def test_has_not_the_end_of_another_scenario(self, store: ObjectStore, recorded: NightStart) -> None:
        foreign = report_of(VerdictStatus.PASSED, night=recorded.night).model_copy(update={"scenario": "nightly-h100"})
        record_end(store, foreign)

        assert find_nights(store) == [Night(start=recorded)]


def test_a_night_says_that_it_began_late_only_when_it_did() -> None:
    in_time, late = (start_of("n", slot=utc_now() - timedelta(minutes=minutes)) for minutes in (5, 90))

    assert in_time.late_by is None
    assert late.late_by is not None
    assert round(late.late_by.total_seconds() / 60) == 90
    assert start_of("n").late_by is None


def test_a_night_is_found_again_when_it_had_ended_with_these_very_jobs(store: ObjectStore) -> None:
    first = report_of(VerdictStatus.PASSED)
    assert not was_reported(read_end(store, first.night, first.scenario), first.verdicts)

    end = record_end(store, first)

    assert was_reported(end, first.verdicts)
    assert not was_reported(end, report_of(VerdictStatus.PASSED, job_id=8).verdicts)


def test_the_end_of_a_night_says_what_the_store_got_of_each_run(store: ObjectStore) -> None:
    report = report_of(VerdictStatus.PASSED)
    stored = report.verdicts[0].model_copy(update={"prefix": "runs/llama/n/key/a1"})
    for name in ("a1/summary.json", "a1/checkpoints/iter_1/x", "a10/of-another-attempt"):
        store.put(f"runs/llama/n/key/{name}", b"seven..")

    end = record_end(store, report.model_copy(update={"verdicts": (*report.verdicts, stored)}))

    assert [verdict.stored_bytes for verdict in end.verdicts] == [0, 14]


def test_a_cancelled_night_says_so_and_is_never_found_again(store: ObjectStore) -> None:
    end = record_end(store, report_of(VerdictStatus.CANCELLED), cancelled=True)

    assert end.title == "cancelled"
    assert not was_reported(end, report_of(VerdictStatus.CANCELLED).verdicts)


def test_the_plan_is_read_back_whole(tmp_path: Path) -> None:
    site = Site(workspace=tmp_path)
    plan = NightPlan(start=start_of("n", workspace=tmp_path), scenario=Scenario(name="s", tests=()), runs=(), site=site)

    path = write_plan(plan)

    assert path == plan_path(tmp_path, "f1")
    assert read_plan(path) == plan
    assert read_plan(plan_path(tmp_path, "f2")) is None


def test_a_newer_releases_record_is_read_without_what_this_one_does_not_know(store: ObjectStore) -> None:
    start = start_of("2026-11-21")
    newer = start.model_dump_json().replace('"schema_version":1', '"schema_version":2,"moon_phase":"full"', 1)
    store.put("nights/2026-11-21/nightly/begun.json", newer.encode())

    (night,) = find_nights(store)

    assert night.start.tests == start.tests


def test_a_damaged_record_is_named(store: ObjectStore) -> None:
    store.put("nights/2026-11-21/nightly/begun.json", b"{")

    with pytest.raises(DamagedData, match=r"begun.json: not the record of a night"):
        find_nights(store)


def test_a_night_that_is_run_again_by_hand_keeps_the_slot_of_the_schedule(store: ObjectStore) -> None:
    slot = utc_now()
    record_start(store, start_of("2026-11-21", slot=slot))

    record_start(store, start_of("2026-11-21"))

    (night,) = find_nights(store)
    assert night.start.slot == slot


# --- short names -----------------------------------------------------------------------------------------------------


def test_a_run_is_found_by_its_test_its_night_and_whether_it_was_good(store: ObjectStore) -> None:
    good, bad = VerdictStatus.PASSED, VerdictStatus.REGRESSED
    _, first = builders.store_night(store, "2026-11-20", {"a": good, "b": good})
    _, second = builders.store_night(store, "2026-11-21", {"a": bad, "b": good})
    _, third = builders.store_night(store, "2026-11-22", {"a": bad})

    wanted = {
        "a": third[0],
        "a@last": third[0],
        "last": third[0],
        "b": second[1],
        "a@2026-11-21": second[0],
        "a@last-good": first[0],
        "last-good": second[1],
    }

    assert {name: find_run(store, name) for name in wanted} == {name: run.run_key for name, run in wanted.items()}


def test_the_history_of_a_test_is_meant_whole_or_until_the_night_of_a_run(store: ObjectStore) -> None:
    good, bad = VerdictStatus.PASSED, VerdictStatus.REGRESSED
    builders.store_night(store, "2026-11-20", {"a": good})
    _, (second, _) = builders.store_night(store, "2026-11-21", {"a": bad, "b": bad})
    builders.store_night(store, "2026-11-22", {"a": bad})

    wanted = {
        "a": ("a", None),
        "a@2026-11-21": ("a", "2026-11-21"),
        second.run_key: ("a", "2026-11-21"),
        "a@last-good": ("a", "2026-11-20"),
        "last": ("a", "2026-11-22"),
    }

    assert {name: find_test(store, name) for name in wanted} == wanted
    with pytest.raises(InvalidInput, match=r"2 runs of this name\. Name one of: a .*, b "):
        find_test(store, "@2026-11-21")


def test_a_run_key_needs_no_night(store: ObjectStore) -> None:
    assert find_run(store, RUN_KEY) == RUN_KEY


def test_a_name_of_several_runs_lists_them_and_one_of_none_says_where_to_look(store: ObjectStore) -> None:
    _, runs = builders.store_night(store, "2026-11-22", {"a": VerdictStatus.PASSED, "b": VerdictStatus.PASSED})

    with pytest.raises(InvalidInput, match="2 runs of this name") as several:
        find_run(store, "last")
    with pytest.raises(InvalidInput, match="`nightbridge ls` lists the runs"):
        find_run(store, "c@2026-11-22")
    builders.store_night(store, "2026-11-23", {"llama-small": VerdictStatus.PASSED})
    with pytest.raises(InvalidInput, match=r"no runs of this name\. Name one of: llama-small"):
        find_run(store, "llama")

    assert all(run.run_key in str(several.value) for run in runs)


def test_a_night_without_a_baseline_is_not_called_passed(store: ObjectStore) -> None:
    builders.store_night(store, "2026-11-20", {"a": VerdictStatus.NO_BASELINE})
    builders.store_night(store, "2026-11-21", {"a": VerdictStatus.NO_BASELINE, "b": VerdictStatus.PASSED})
    builders.store_night(store, "2026-11-22", {"a": VerdictStatus.NO_BASELINE, "b": VerdictStatus.REGRESSED})

    titles = [night.end.title for night in find_nights(store) if night.end]

    assert titles == ["regressed", "passed", "no_baseline"]
