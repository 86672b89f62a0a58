"""Which night a scheduled flow run belongs to, by the schedules of its deployment, and when it was last retried."""

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import uuid4
from zoneinfo import ZoneInfo

import pytest
from prefect.client.schemas.objects import DeploymentSchedule, FlowRun, State, StateType
from prefect.client.schemas.schedules import CronSchedule

from nightbridge.errors import InvalidInput
from nightbridge.models import (
    NightReport,
    Scenario,
    Site,
    Verdict,
    VerdictStatus,
)
from nightbridge.nights.records import NightStart, NightTest, checked_night, read_start, record_end, record_start
from nightbridge.store.directory import DirectoryStore
from nightbridge.store.object_store import open_store
from nightbridge.tasks import night as nights
from nightbridge.tasks.night import (
    ChosenNight,
    NightSkipped,
    check_catch_up,
    keep_start,
    night_of_schedule,
    retried_at,
    zone_of,
)
from tests.builders import make_spec

BERLIN = "Europe/Berlin"


def night(slot: datetime, *others: datetime, zone: str = BERLIN, now: datetime | None = None) -> ChosenNight:
    """The night of a slot, beside the other flow runs of its deployment since that day began."""
    return night_of_schedule(slot.astimezone(ZoneInfo(zone)), now or slot, [slot, *others])


@pytest.mark.parametrize(
    ("slot", "expected"),
    [
        (datetime(2026, 11, 21, 0, 0, tzinfo=UTC), "2026-11-21"),  # 01:00 in Berlin
        # Both days of the year on which the clocks are changed, and the days after them.
        (datetime(2027, 3, 28, 0, 0, tzinfo=UTC), "2027-03-28"),
        (datetime(2027, 3, 28, 23, 0, tzinfo=UTC), "2027-03-29"),
        (datetime(2027, 10, 30, 23, 0, tzinfo=UTC), "2027-10-31"),
        (datetime(2027, 11, 1, 0, 0, tzinfo=UTC), "2027-11-01"),
    ],
)
def test_a_nightly_schedule_gives_each_night_its_own_date(slot: datetime, expected: str) -> None:
    assert night(slot).night == expected


def test_further_slots_of_a_day_have_their_time_in_the_id() -> None:
    one, other = (datetime(2026, 11, 21, hour, tzinfo=UTC) for hour in (0, 12))

    assert (night(one, other).night, night(other, one).night) == ("2026-11-21", "2026-11-21-1300")


def test_a_slot_every_minute_gives_each_minute_a_night() -> None:
    minutes = [datetime(2026, 11, 20, 23, 0, tzinfo=UTC) + timedelta(minutes=number) for number in range(3)]

    nights = [night(slot, *minutes).night for slot in minutes]

    assert nights == ["2026-11-21", "2026-11-21-0001", "2026-11-21-0002"]
    assert all(checked_night(found) for found in nights)


def test_a_slot_counts_in_the_zone_of_its_schedule_or_of_those_that_replaced_it() -> None:
    own, other = (
        DeploymentSchedule(id=uuid4(), schedule=CronSchedule(cron="0 1 * * *", timezone=zone), active=True)
        for zone in ("America/New_York", BERLIN)
    )
    made_by = FlowRun.model_validate({"flow_id": uuid4(), "created_by": {"id": own.id, "type": "SCHEDULE"}})

    assert [zone_of(made_by, given).key for given in ([other, own], [other], [])] == ["America/New_York", BERLIN, "UTC"]


# --- what the store has under a night's id ----------------------------------------------------------------------------


NIGHTLY = Scenario(name="nightly", tests=())


def begun(site: Site, night: str, slot: datetime | None, cluster: str = "local", **fields: Any) -> None:
    start = NightStart(
        night=night,
        scenario="nightly",
        cluster=cluster,
        workspace=site.workspace,
        begun_at=datetime.now(UTC),
        slot=slot,
        **fields,
    )
    record_start(open_store(site.store_settings), start)


def own_night(chosen: ChosenNight, scenario: Scenario, site: Site) -> ChosenNight:
    return nights.own_night(chosen, scenario, site)[0]


def test_a_slot_of_another_deployment_or_of_a_schedule_that_was_moved_is_a_night_of_its_own(tmp_path: Path) -> None:
    """Each of two deployments knows its own flow runs only: for both theirs is the first slot of the day."""
    site = Site(workspace=tmp_path)
    one, other = (night(datetime(2026, 11, 21, hour, tzinfo=UTC)) for hour in (0, 12))
    begun(site, one.night, one.slot)

    again, second = (own_night(chosen, NIGHTLY, site) for chosen in (one, other))

    assert (again.night, second.night) == ("2026-11-21", "2026-11-21-1300")
    begun(site, second.night, second.slot)
    assert own_night(other, NIGHTLY, site) == second  # as where its flow run is started once more
    in_new_york = night(datetime(2026, 11, 21, 18, tzinfo=UTC), zone="America/New_York")
    assert own_night(in_new_york, NIGHTLY, site).night == "2026-11-21-1300-2"
    assert own_night(other, Scenario(name="another", tests=()), site) == other


@pytest.mark.parametrize(
    ("of_record", "tests", "expected"),
    [
        ("others", ("llama",), "2026-11-21-0100"),
        ("ours", ("llama",), "2026-11-21"),  # its tests were changed since: refused where it would forget some
        ("others", ("llama", "deepseek"), "2026-11-21"),  # deepseek would run twice for this slot
        ("", ("llama",), "2026-11-21"),
    ],
)
def test_deployments_that_are_due_together_with_tests_of_their_own_have_nights_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, of_record: str, tests: tuple[str, ...], expected: str
) -> None:
    monkeypatch.setenv("PREFECT__RUNTIME__DEPLOYMENT__NAME", "ours")
    site, chosen = Site(workspace=tmp_path), night(datetime(2026, 11, 21, tzinfo=UTC))
    recorded = (NightTest(test_id="deepseek", run_key="deepseek-2026-11-21"),)
    begun(site, chosen.night, chosen.slot, tests=recorded, deployment=of_record)
    wanted = Scenario(name=NIGHTLY.name, tests=tuple(make_spec(test_id=test).test for test in tests))

    assert own_night(chosen, wanted, site).night == expected


def test_a_night_by_hand_goes_on_with_the_night_whose_id_it_was_given(tmp_path: Path) -> None:
    site, chosen = Site(workspace=tmp_path), ChosenNight(night="2026-11-21")
    begun(site, chosen.night, datetime(2026, 11, 21, tzinfo=UTC))
    assert own_night(chosen, NIGHTLY, site) == chosen


@pytest.mark.parametrize("slot", [None, datetime(2026, 11, 21, tzinfo=UTC)])
def test_a_night_of_another_cluster_in_the_same_store_is_refused_before_anything_runs(
    tmp_path: Path, slot: datetime | None
) -> None:
    site = Site(workspace=tmp_path)
    begun(site, "2026-11-21", slot, cluster="ada")
    with pytest.raises(InvalidInput, match=r"the store has this night already, of cluster ada.*store of its own"):
        own_night(ChosenNight(night="2026-11-21", slot=slot), NIGHTLY, site)


# --- nights that have ended ------------------------------------------------------------------------------------------


def ended_night(site: Site, *, job_id: int | None) -> NightStart:
    """A night of one run, with its end in the store and nothing in the workspace."""
    store, tests = open_store(site.store_settings), (NightTest(test_id="llama", run_key="llama-2026-11-21"),)
    begun(site, "2026-11-21", None, tests=tests)
    verdict = Verdict(
        test_id="llama",
        run_key=tests[0].run_key,
        night="2026-11-21",
        status=VerdictStatus.PASSED,
        job_id=job_id,
    )
    report = NightReport(scenario="nightly", night="2026-11-21", verdicts=(verdict,), report="report.html")
    record_end(store, report)
    start = read_start(store, "2026-11-21", "nightly")
    assert start is not None
    return start


def test_a_night_that_has_ended_is_not_started_again_without_its_runs(tmp_path: Path) -> None:
    """Nothing else here tells that their jobs were submitted, once accounting has forgotten them."""
    site = Site(workspace=tmp_path)
    start = ended_night(site, job_id=7)

    refused = "nightly, night 2026-11-21: this night has ended.* llama-2026-11-21 would be submitted again"
    with pytest.raises(InvalidInput, match=refused):
        keep_start.fn(start, site)


@pytest.mark.parametrize("job_id", [7, None], ids=["its-run-is-there", "it-had-no-job"])
def test_a_night_that_has_ended_is_started_again_where_nothing_is_lost(tmp_path: Path, job_id: int | None) -> None:
    site = Site(workspace=tmp_path)
    start = ended_night(site, job_id=job_id)
    if job_id is not None:
        (tmp_path / "runs" / "llama-2026-11-21").mkdir(parents=True)

    keep_start.fn(start, site)


def test_of_two_deployments_that_chose_one_id_at_the_same_moment_one_has_it_and_the_other_is_refused(
    tmp_path: Path,
) -> None:
    """Two workers that ask a server on PostgreSQL together are each given a night: neither sees the other's."""
    site, slot = Site(workspace=tmp_path), datetime(2026, 11, 21, tzinfo=UTC)
    first, second = (
        NightStart(
            night="2026-11-21",
            scenario="nightly",
            cluster="local",
            workspace=tmp_path,
            begun_at=slot,
            slot=slot,
            deployment=name,
            tests=(NightTest(test_id=name, run_key=f"{name}-2026-11-21"),),
        )
        for name in ("llama", "vlm")
    )

    keep_start.fn(first, site)
    with pytest.raises(InvalidInput, match=r"night has become that of the slot at .* llama.* run the deployment vlm"):
        keep_start.fn(second, site)

    keep_start.fn(first, site)  # as a restart does
    assert read_start(open_store(site.store_settings), "2026-11-21", "nightly") == first


def test_the_first_start_of_a_night_writes_its_record_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site, written = Site(workspace=tmp_path), list[str]()
    begun_at = datetime(2026, 11, 21, tzinfo=UTC)
    start = NightStart(night="n1", scenario="nightly", cluster="local", workspace=tmp_path, begun_at=begun_at, tests=())
    put = DirectoryStore.put

    def noted(to: DirectoryStore, key: str, data: bytes) -> None:
        written.append(key)
        put(to, key, data)

    monkeypatch.setattr(DirectoryStore, "put", noted)
    for _ in ("first", "restart"):
        keep_start.fn(start, site)
    assert (written, read_start(open_store(site.store_settings), "n1", "nightly")) == ([], start)

    later = start.model_copy(update={"flow_run": "another"})
    keep_start.fn(later, site)
    assert read_start(open_store(site.store_settings), "n1", "nightly") == later


# --- nights that could not begin in time -----------------------------------------------------------------------------

FRIDAY = datetime(2026, 11, 20, 0, tzinfo=UTC)
MONDAY_MORNING = datetime(2026, 11, 23, 7, tzinfo=UTC)


def test_of_a_missed_weekend_only_the_last_night_is_run() -> None:
    slots = [FRIDAY.replace(day=day) for day in (21, 22, 23)]

    due = [night(slot, *slots, now=MONDAY_MORNING) for slot in slots]

    assert [chosen.later_slot_due for chosen in due] == [True, True, False]
    for chosen in due[:2]:
        with pytest.raises(NightSkipped, match="a later night is due as well"):
            check_catch_up(chosen, "last")
    check_catch_up(due[2], "last")
    for chosen in due:
        check_catch_up(chosen, "all")
        with pytest.raises(NightSkipped, match="missed nights are not run"):
            check_catch_up(chosen, "none")


def test_a_night_in_time_is_run_by_every_policy() -> None:
    chosen = night(datetime.now(UTC).replace(second=0, microsecond=0), now=datetime.now(UTC))
    for policy in ("last", "all", "none"):
        check_catch_up(chosen, policy)


def test_a_night_by_hand_is_never_let_go() -> None:
    for policy in ("last", "all", "none"):
        check_catch_up(ChosenNight(night="by-hand"), policy)


# --- a person's retry -------------------------------------------------------------------------------------------------

FIRST = "Scheduled Late Pending Running"


def history(names: str) -> list[State]:
    begun = datetime(2026, 11, 22, tzinfo=UTC)
    types = {"Late": "SCHEDULED", "AwaitingRetry": "SCHEDULED", "Resuming": "SCHEDULED", "Suspended": "PAUSED"}
    types |= {"AwaitingConcurrencySlot": "SCHEDULED", "Submitting": "PENDING", "Passed": "COMPLETED"}
    return [
        State(type=StateType(types.get(name, name.upper())), name=name, timestamp=begun + timedelta(seconds=number))
        for number, name in enumerate(names.split())
    ]


@pytest.mark.parametrize(
    "names",
    [
        f"{FIRST} Crashed [AwaitingRetry] Pending Running",
        f"{FIRST} Failed [AwaitingRetry] Late AwaitingConcurrencySlot Pending Submitting Running",
        f"{FIRST} Cancelled [AwaitingRetry] Pending Running",
        f"{FIRST} Passed [AwaitingRetry] Pending Running",
        f"{FIRST} Passed AwaitingRetry Pending Running Failed [AwaitingRetry] Pending Running",
        f"{FIRST} Crashed Resuming Pending Running Failed [AwaitingRetry] Pending Running",
        f"{FIRST} Suspended Resuming Pending Running Crashed [AwaitingRetry] Pending Running",
        # It stands when the flow run is resumed after it, or could not even start.
        f"{FIRST} Failed [AwaitingRetry] Pending Running Suspended Resuming Pending Running",
        f"{FIRST} Failed [AwaitingRetry] Pending Running Crashed Resuming Pending Running",
        f"{FIRST} Failed [AwaitingRetry] Pending Crashed Resuming Pending Running",
        "Pending Running Failed [Running]",
    ],
)
def test_a_retry_is_what_starts_a_flow_run_again_that_had_ended(names: str) -> None:
    states = history(names.replace("[", "").replace("]", ""))
    (number,) = [number for number, name in enumerate(names.split()) if name.startswith("[")]

    assert retried_at(states) == retried_at(states[::-1]) == states[number].timestamp


@pytest.mark.parametrize(
    "names",
    [
        "Running",
        FIRST,
        f"{FIRST} Suspended Resuming Pending Running",
        f"{FIRST} AwaitingRetry Pending Running",
        f"{FIRST} Crashed Resuming Late Pending Running",
        f"{FIRST} Crashed Cancelling Cancelled",
    ],
)
def test_a_start_that_nobody_has_asked_for_is_no_retry(names: str) -> None:
    assert retried_at(history(names)) is None
