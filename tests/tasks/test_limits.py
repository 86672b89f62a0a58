"""How many jobs of ours a cluster has at once."""

import contextlib
import contextvars
import logging
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import pytest
from httpx import ConnectError, HTTPStatusError, Request, Response
from prefect import flow
from prefect.client.orchestration import SyncPrefectClient, get_client

from nightbridge.errors import PermanentError
from nightbridge.models import ClusterSettings, LaunchPlan, Site
from nightbridge.tasks import limits
from nightbridge.tasks.context import shared_night
from nightbridge.tasks.limits import job_slots, limits_of
from tests.builders import make_plan, record_submission
from tests.waiting import wait_until

pytestmark = pytest.mark.usefixtures("flows_here")


def plan(folder: Path, run_key: str) -> LaunchPlan:
    attempt_dir = folder / run_key / "a1"
    attempt_dir.mkdir(parents=True)
    return make_plan(run_key, attempt_dir)


def with_job(planned: LaunchPlan) -> LaunchPlan:
    """The plan of an attempt whose job is in Slurm already."""
    record_submission(planned.attempt_dir, "a", 1, cluster="c")
    return planned


def second_job(folder: Path, site: Site, entered: list[str]) -> threading.Thread:
    """A thread, not started yet, of another job of this flow run, which says so once it has its slots."""

    def take() -> None:
        with job_slots(plan(folder, "second"), site):
            entered.append("second")

    return threading.Thread(target=contextvars.copy_context().run, args=(take,))


@pytest.fixture
def leases(monkeypatch: pytest.MonkeyPatch) -> list[UUID]:
    """Filled with the leases that Prefect's server gives, in their order."""
    ask, given = SyncPrefectClient.increment_concurrency_slots_with_lease, list[UUID]()

    def remember(*args: Any, **parameters: Any) -> Response:
        answer = ask(*args, **parameters)
        given.append(UUID(answer.json()["lease_id"]))
        return answer

    monkeypatch.setattr(SyncPrefectClient, "increment_concurrency_slots_with_lease", remember)
    return given


def taken(name: str) -> int:
    with get_client(sync_client=True) as client:
        return client.read_global_concurrency_limit_by_name(name).active_slots


def test_a_limit_is_for_a_cluster_or_for_an_account_on_it() -> None:
    cluster = ClusterSettings(name="Hopper/1", account="llm-perf", max_jobs=4, max_jobs_per_account=2)
    assert limits_of(cluster) == {"nightbridge-hopper-1": 4, "nightbridge-hopper-1-llm-perf": 2}
    assert limits_of(ClusterSettings()) == {}


def test_one_slot_is_held_by_one_job_at_a_time_and_none_is_left_taken(tmp_path: Path) -> None:
    site = Site(workspace=tmp_path, cluster=ClusterSettings(name="one", max_jobs=1))
    inside: list[int] = []
    seen: list[int] = []

    def hold(number: int) -> None:
        with job_slots(plan(tmp_path, f"run-{number}"), site):
            inside.append(number)
            time.sleep(0.5)
            seen.append(len(inside))
            inside.remove(number)

    @flow
    def several() -> None:
        threads = [threading.Thread(target=contextvars.copy_context().run, args=(hold, number)) for number in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        with pytest.raises(ZeroDivisionError), job_slots(plan(tmp_path, "fails"), site):
            raise ZeroDivisionError

    several()

    assert seen == [1, 1, 1]
    wait_until(lambda: taken("nightbridge-one") == 0)


def test_a_slot_that_a_busy_server_grants_late_is_not_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site = Site(workspace=tmp_path, cluster=ClusterSettings(name="late", max_jobs=1))
    ask, began = SyncPrefectClient.increment_concurrency_slots_with_lease, time.monotonic()

    def answer_late(*args: Any, **parameters: Any) -> Response:
        answer = ask(*args, **parameters)
        time.sleep(6)
        return answer

    def wait_no_longer() -> None:
        assert time.monotonic() - began < 60, "the slot that was granted is nobody's"

    monkeypatch.setattr(SyncPrefectClient, "increment_concurrency_slots_with_lease", answer_late)
    monkeypatch.setattr(limits, "raise_if_interrupted", wait_no_longer)

    @flow
    def one() -> None:
        with job_slots(plan(tmp_path, "late"), site):
            assert taken("nightbridge-late") == 1

    one()

    wait_until(lambda: taken("nightbridge-late") == 0)


def test_a_limit_that_somebody_deleted_is_no_licence(tmp_path: Path) -> None:
    cluster = ClusterSettings(name="gone", max_jobs=5, max_jobs_per_account=5)
    site = Site(workspace=tmp_path, cluster=cluster)

    @flow
    def one() -> None:
        with job_slots(plan(tmp_path, "before"), site):
            pass
        with get_client(sync_client=True) as client:
            client.delete_global_concurrency_limit_by_name("nightbridge-gone-no-account")
        with pytest.raises(PermanentError, match="nightbridge-gone-no-account"), job_slots(plan(tmp_path, "b"), site):
            raise AssertionError("a slot of a limit that is gone")

    with shared_night():
        one()


def test_why_there_is_no_slot_is_logged_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    request = Request("POST", "http://p")
    refusal = "422: Slots requested is greater than the limit"
    refused = HTTPStatusError(refusal, request=request, response=Response(422))
    taken = HTTPStatusError("423", request=request, response=Response(423))
    answers = iter([refused, refused, taken, taken, refused])

    def slot(client: SyncPrefectClient, name: str) -> contextlib.AbstractContextManager[None]:
        for answer in answers:
            raise answer
        return contextlib.nullcontext()

    monkeypatch.setattr(limits, "_slot", slot)
    monkeypatch.setattr(limits, "_LOOK_AGAIN", 0.0)
    monkeypatch.setattr(limits, "get_run_logger", lambda: logging.getLogger("nightbridge"))

    with contextlib.ExitStack() as slots, caplog.at_level("INFO", "nightbridge"):
        client = slots.enter_context(get_client(sync_client=True))
        limits._take(client, ["nightbridge-hopper"], slots, lambda: None)

    assert [line.rpartition("hopper: ")[2] for line in caplog.messages] == [refusal, "all are taken", refusal]


def test_a_job_that_is_found_again_is_watched_before_its_slot_is_free(tmp_path: Path) -> None:
    site = Site(workspace=tmp_path, cluster=ClusterSettings(name="found", max_jobs=1))
    while_taken: list[int] = []

    @flow
    def one() -> None:
        with job_slots(plan(tmp_path, "other"), site), job_slots(with_job(plan(tmp_path, "found")), site):
            while_taken.append(taken("nightbridge-found"))
        with job_slots(with_job(plan(tmp_path, "again")), site):
            wait_until(lambda: taken("nightbridge-found") == 1)

    one()

    assert while_taken == [1]
    wait_until(lambda: taken("nightbridge-found") == 0)


def test_a_run_that_waits_for_a_slot_shows_no_error(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    site = Site(workspace=tmp_path, cluster=ClusterSettings(name="quiet", max_jobs=1))
    own_terminal = logging.getLogger("prefect._internal")  # what it logs goes to stderr, past the others

    @flow
    def two() -> None:
        thread = second_job(tmp_path, site, [])
        with job_slots(plan(tmp_path, "first"), site):
            thread.start()
            time.sleep(3)
        thread.join()

    own_terminal.addHandler(caplog.handler)
    try:
        two()
    finally:
        own_terminal.removeHandler(caplog.handler)

    assert [line for line in caplog.messages if "all are taken" in line]
    assert not [line for line in caplog.records if line.levelno >= logging.WARNING]


def test_a_slot_is_renewed_however_long_the_server_was_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site = Site(workspace=tmp_path, cluster=ClusterSettings(name="away", max_jobs=1))
    renew, failures, renewed = SyncPrefectClient.renew_concurrency_lease, iter(range(4)), threading.Event()

    def answer_the_fifth(*args: Any, **parameters: Any) -> Response:
        if next(failures, None) is not None:
            raise ConnectError("Connection refused")
        answer = renew(*args, **parameters)
        renewed.set()
        return answer

    monkeypatch.setattr(SyncPrefectClient, "renew_concurrency_lease", answer_the_fifth)
    monkeypatch.setattr(limits, "RENEWAL_SECONDS", 0.1, raising=False)
    monkeypatch.setattr(limits, "_RENEW_AGAIN", 0.2, raising=False)

    @flow
    def one() -> None:
        with job_slots(plan(tmp_path, "long"), site):
            assert renewed.wait(30), "nobody renews the lease any more"

    one()

    wait_until(lambda: taken("nightbridge-away") == 0)


def test_a_slot_whose_lease_the_server_has_ended_is_taken_again(
    tmp_path: Path, leases: list[UUID], monkeypatch: pytest.MonkeyPatch
) -> None:
    site = Site(workspace=tmp_path, cluster=ClusterSettings(name="ended", max_jobs=1))
    monkeypatch.setattr(limits, "RENEWAL_SECONDS", 0.5, raising=False)
    monkeypatch.setattr(limits._Lease, "is_over", lambda _: True)

    @flow
    def one() -> None:
        with job_slots(plan(tmp_path, "long"), site):
            with get_client(sync_client=True) as client:
                client.release_concurrency_slots_with_lease(leases[0])
            wait_until(lambda: len(leases) == 2)
            assert taken("nightbridge-ended") == 1

    one()

    wait_until(lambda: taken("nightbridge-ended") == 0)


def test_nobody_takes_the_slot_of_a_job_whose_lease_ended_while_the_server_was_away(
    tmp_path: Path, leases: list[UUID], monkeypatch: pytest.MonkeyPatch
) -> None:
    site = Site(workspace=tmp_path, cluster=ClusterSettings(name="outage", max_jobs=1))
    away = threading.Event()
    entered: list[str] = []
    renew = SyncPrefectClient.renew_concurrency_lease

    def renew_unless_away(*args: Any, **parameters: Any) -> Response:
        if away.is_set():
            raise ConnectError("Connection refused")
        return renew(*args, **parameters)

    monkeypatch.setattr(SyncPrefectClient, "renew_concurrency_lease", renew_unless_away)
    monkeypatch.setattr(limits, "RENEWAL_SECONDS", 0.2)
    monkeypatch.setattr(limits, "_RENEW_AGAIN", 0.5)
    monkeypatch.setattr(limits._Lease, "is_over", lambda _: bool(leases))

    @flow
    def two() -> None:
        thread = second_job(tmp_path, site, entered)
        with job_slots(plan(tmp_path, "first"), site):
            away.set()
            time.sleep(2)
            with get_client(sync_client=True) as client:
                client.release_concurrency_slots_with_lease(leases[0])  # as the server does that comes back
            thread.start()
            time.sleep(4)
            away.clear()
            time.sleep(4)
            entered.append("first ends")
        thread.join()

    two()

    assert entered == ["first ends", "second"]
    wait_until(lambda: taken("nightbridge-outage") == 0)


def test_one_that_waits_for_a_slot_of_one_limit_does_not_take_one_of_the_other_each_second(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = ClusterSettings(name="both", account="a", max_jobs=2, max_jobs_per_account=1)
    site = Site(workspace=tmp_path, cluster=cluster)
    asked: list[str] = []
    in_vain: list[int] = []
    ask = SyncPrefectClient.increment_concurrency_slots_with_lease

    def count(client: SyncPrefectClient, names: list[str], *parameters: Any) -> Response:
        asked.extend(names)
        return ask(client, names, *parameters)

    monkeypatch.setattr(SyncPrefectClient, "increment_concurrency_slots_with_lease", count)

    @flow
    def two() -> None:
        thread = second_job(tmp_path, site, [])
        with job_slots(plan(tmp_path, "first"), site):
            asked.clear()
            thread.start()
            wait_until(lambda: asked.count("nightbridge-both-a") > 3)
            in_vain.append(asked.count("nightbridge-both"))
        thread.join()

    two()

    assert in_vain == [1]
    wait_until(lambda: taken("nightbridge-both") == taken("nightbridge-both-a") == 0)


def test_nobody_takes_the_slot_of_a_job_whose_lease_ended_before_a_renewal_of_it_was_tried(
    tmp_path: Path, leases: list[UUID], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    # A computer that was suspended, or a server that is back between two renewals.
    site = Site(workspace=tmp_path, cluster=ClusterSettings(name="asleep", max_jobs=1))
    asleep = 0.0
    entered: list[str] = []
    clock = time.time

    monkeypatch.setattr(limits, "RENEWAL_SECONDS", 6.0)
    monkeypatch.setattr(limits, "time", SimpleNamespace(time=lambda: clock() + asleep, sleep=time.sleep))

    @flow
    def two() -> None:
        nonlocal asleep
        thread = second_job(tmp_path, site, entered)
        with job_slots(plan(tmp_path, "first"), site):
            with get_client(sync_client=True) as client:
                client.release_concurrency_slots_with_lease(leases[0])  # as the server does
            asleep = limits.LEASE_SECONDS
            thread.start()
            wait_until(lambda: len(leases) == 2)
            time.sleep(1)
            entered.append("first ends")
        thread.join()

    two()

    assert entered == ["first ends", "second"]
    assert "the lease of another job's slot is renewed first" in caplog.text
    wait_until(lambda: taken("nightbridge-asleep") == 0)


@pytest.mark.parametrize("renewed", [True, False], ids=["renewed after it", "ended before"])
def test_a_slot_that_the_server_has_forgotten_is_counted_until_its_job_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, renewed: bool
) -> None:
    name = f"forgot-{renewed}".lower()
    site = Site(workspace=tmp_path, cluster=ClusterSettings(name=name, max_jobs=3))
    gone = threading.Event()

    def forget(*_: Any, **__: Any) -> Response:
        request = Request("POST", "http://prefect/renew")
        gone.set()
        raise HTTPStatusError("410 Gone", request=request, response=Response(410, request=request))

    monkeypatch.setattr(SyncPrefectClient, "renew_concurrency_lease", forget)
    monkeypatch.setattr(SyncPrefectClient, "release_concurrency_slots_with_lease", lambda *_: None)  # 204
    monkeypatch.setattr(limits, "RENEWAL_SECONDS", 0.2 if renewed else 60.0)

    @flow
    def one() -> None:
        with job_slots(plan(tmp_path, "long"), site):
            assert gone.wait(5) is renewed
            time.sleep(0.5)
            assert taken(f"nightbridge-{name}") == 1

    one()

    wait_until(lambda: taken(f"nightbridge-{name}") == 0)
