"""The dead are found and go on by themselves, the living are left alone: on a real server with real workers."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from datetime import datetime, tzinfo
from functools import partial, partialmethod
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterParentFlowRunId
from prefect.client.schemas.objects import FlowRun, State
from prefect.events import Event
from prefect.events.filters import EventFilter, EventNameFilter, EventResourceFilter
from prefect.settings import (
    PREFECT_API_URL,
    PREFECT_FLOWS_HEARTBEAT_FREQUENCY,
    PREFECT_LOGGING_TO_API_ENABLED,
    temporary_settings,
)
from prefect.states import (
    AwaitingRetry,
    Cancelled,
    Cancelling,
    Crashed,
    Failed,
    Pending,
    Running,
    Scheduled,
    Suspended,
)

from nightbridge.files import write_model
from nightbridge.flows.reaper import reaper
from nightbridge.locking import this_process
from nightbridge.models import GitRepo, RunSpec, Scenario, Site, TestDefinition, utc_now
from nightbridge.nights.liveness import alive, alive_path, last_sign
from nightbridge.nights.records import NightPlan, NightStart, read_end, write_plan
from nightbridge.slurm.attempt_files import open_attempt
from nightbridge.slurm.factory import open_cluster
from nightbridge.store.object_store import open_store
from nightbridge.tasks.night import PLAN_LABEL
from tests.nights.installation import descendants
from tests.real.prefect_harness import STRAIGHT, deploy
from tests.real.prefect_server import PrefectServer, start_prefect

SLEEPING_NIGHT = "tests/flows/sleeping_night.py:sleeping_night"
QUICK = {"silence": 2.0, "start_up": 0.0, "no_heartbeat": 3600.0, "second_look": 1.0, "last_word": 5.0}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PrefectServer]:
    """A server of its own: a worker would run what other tests leave scheduled."""
    started = start_prefect(tmp_path_factory.mktemp("reaper-server"))
    settings = {
        PREFECT_API_URL: started.api_url,
        PREFECT_FLOWS_HEARTBEAT_FREQUENCY: None,
        PREFECT_LOGGING_TO_API_ENABLED: False,
    }
    try:
        with temporary_settings(settings):
            started.make_pool("nightbridge")
            started.ask("POST", "work_pools/nightbridge/queues", {"name": "nights", "concurrency_limit": 1})
            for name, tags in (("one", ["nightbridge"]), ("two", ["nightbridge"]), ("others", [])):
                options: dict[str, Any] = {"work_queue_name": "nights", "tags": tags, "job_variables": STRAIGHT}
                deploy(started, name, SLEEPING_NIGHT, pool="nightbridge", **options)
            reaping = "nightbridge.flows.reaper.reaper"
            deploy(started, "reaper", reaping, pool="nightbridge", job_variables=STRAIGHT)
            yield started
    finally:
        started.stop()


@pytest.fixture
def client(server: PrefectServer) -> Iterator[SyncPrefectClient]:
    """What a test leaves unfinished would keep its place in the queue."""
    with get_client(sync_client=True) as made:
        yield made
        for run in made.read_flow_runs():
            if run.state and not run.state.is_final():
                made.set_flow_run_state(run.id, Cancelled(), force=True)


@contextmanager
def worker(server: PrefectServer, log: Path) -> Iterator["subprocess.Popen[bytes]"]:
    """A worker; afterwards it is gone with the flow processes that it has then."""
    environment = {**server.environment, "PREFECT_WORKER_QUERY_SECONDS": "1", "PREFECT_WORKER_PREFETCH_SECONDS": "0"}
    with log.open("ab") as output:
        process = subprocess.Popen(
            [Path(sys.executable).with_name("prefect"), "worker", "start", "--pool", "nightbridge"],
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        for pid in list(descendants(process.pid)):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()


def started(client: SyncPrefectClient, deployment: str, workspace: Path, seconds: float) -> UUID:
    found = client.read_deployment_by_name(f"nightly-regression/{deployment}")
    parameters = {"scenario": "sleeping.toml", "workspace": str(workspace), "seconds": seconds}
    return client.create_flow_run_from_deployment(found.id, parameters=parameters).id


def state_name(client: SyncPrefectClient, flow_run: UUID) -> str:
    state = client.read_flow_run(flow_run).state
    assert state is not None
    return str(state.name)


def state_names(client: SyncPrefectClient, flow_run: UUID) -> list[str]:
    states = sorted(client.read_flow_run_states(flow_run), key=lambda state: state.timestamp)
    return [str(state.name) for state in states]


def children(client: SyncPrefectClient, flow_run: UUID) -> list[FlowRun]:
    wanted = FlowRunFilter(parent_flow_run_id=FlowRunFilterParentFlowRunId(any_=[flow_run]))
    return client.read_flow_runs(flow_run_filter=wanted)


def eventually(happened: Callable[[], object], seconds: float = 300.0) -> None:
    deadline = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.5)


def process_of(workspace: Path, flow_run: UUID) -> int:
    eventually(lambda: last_sign(workspace, str(flow_run)))
    sign = last_sign(workspace, str(flow_run))
    assert sign is not None
    assert sign.holder is not None
    return sign.holder.pid


def at_work(client: SyncPrefectClient, workspace: Path) -> tuple[UUID, int]:
    """A night that a worker has begun, and its process."""
    night = started(client, "one", workspace, 600.0)
    process = process_of(workspace, night)
    eventually(lambda: children(client, night))
    return night, process


def made(client: SyncPrefectClient, workspace: Path, *states: State[Any], deployment: str = "one") -> UUID:
    """A flow run that no worker runs, in the last of these states."""
    found = client.read_deployment_by_name(f"nightly-regression/{deployment}")
    parameters = {"scenario": "sleeping.toml", "workspace": str(workspace), "seconds": 0.0}
    run = client.create_flow_run_from_deployment(found.id, parameters=parameters, state=Pending())
    for state in states:
        client.set_flow_run_state(run.id, state, force=True)
    return run.id


def emit_heartbeat(client: SyncPrefectClient, flow_run: UUID) -> None:
    event = Event(event="prefect.flow-run.heartbeat", resource={"prefect.resource.id": f"prefect.flow-run.{flow_run}"})
    client.request("POST", "/events", json=[event.model_dump(mode="json")])
    wanted = EventFilter(
        resource=EventResourceFilter(id=[f"prefect.flow-run.{flow_run}"]), event=EventNameFilter(name=[event.event])
    )
    eventually(lambda: client.read_events(filter=wanted, limit=1).total)


def sign_of_another_host(workspace: Path, flow_run: UUID, *, seconds_ago: float) -> None:
    path = alive_path(workspace, str(flow_run))
    write_model(path, this_process().model_copy(update={"host": "node7", "pid": 4711}))
    beat = time.time() - seconds_ago
    os.utime(path, (beat, beat))


def reap(**changes: float) -> None:
    """Run the reaper with no patience at all where none is asked for."""
    reaper(**{"silence": 2.0, "start_up": 0.0, "no_heartbeat": 0.0, "second_look": 0.1, "last_word": 0.0, **changes})


def test_a_living_night_is_left_alone_whatever_prefect_knows_of_it(client: SyncPrefectClient, tmp_path: Path) -> None:
    night = made(client, tmp_path, Running())

    with alive(tmp_path, str(night)):
        reap()

    assert state_name(client, night) == "Running"


def test_a_living_night_that_somebody_called_crashed_is_not_started_twice(
    client: SyncPrefectClient, tmp_path: Path
) -> None:
    night = made(client, tmp_path, Running(), Crashed())

    with alive(tmp_path, str(night)):
        reap()

    assert state_name(client, night) == "Crashed"


def test_a_night_of_a_host_that_fell_silent_crashed_and_goes_on(client: SyncPrefectClient, tmp_path: Path) -> None:
    night = made(client, tmp_path, Running())
    time.sleep(0.6)
    sign_of_another_host(tmp_path, night, seconds_ago=0.5)

    reap(silence=0.2)

    *_, crashed, resuming = sorted(client.read_flow_run_states(night), key=lambda state: state.timestamp)
    assert "The flow's process is gone: host node7, process 4711, last sign of life 2" in str(crashed.message)
    assert (crashed.name, resuming.name) == ("Crashed", "Resuming")
    assert resuming.message == "Its process was gone; it is resumed, 1 of at most 3 times"


def test_a_night_that_was_started_again_has_time_to_say_that_it_lives(
    client: SyncPrefectClient, tmp_path: Path
) -> None:
    night = made(client, tmp_path, Running())
    sign_of_another_host(tmp_path, night, seconds_ago=3600)

    reap(no_heartbeat=3600)

    assert state_name(client, night) == "Running"


def test_a_night_without_a_sign_is_judged_by_its_heartbeats(
    client: SyncPrefectClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    silent, beating = made(client, tmp_path, Running()), made(client, tmp_path, Running())
    between = utc_now()
    emit_heartbeat(client, beating)
    looked_at = utc_now()

    class Clock(datetime):
        """Stands still: how long a reaper takes to start counts for nothing."""

        @classmethod
        def now(cls, tz: tzinfo | None = None) -> Any:
            return looked_at.astimezone(tz)

    monkeypatch.setattr("nightbridge.flows.reaper.datetime", Clock)
    since_then = (looked_at - between).total_seconds()
    reap(no_heartbeat=since_then, second_look=0.0)
    assert state_name(client, silent) == "Running"
    reap(no_heartbeat=since_then, second_look=0.0)

    assert (state_name(client, silent), state_name(client, beating)) == ("Resuming", "Running")


def test_a_night_that_a_worker_took_and_never_started_is_taken_again(client: SyncPrefectClient, tmp_path: Path) -> None:
    night = made(client, tmp_path)

    reap(start_up=3600)
    assert state_name(client, night) == "Pending"
    reap()
    time.sleep(0.2)
    reap()
    assert state_name(client, night) == "Resuming"


def test_a_suspicion_that_only_heartbeats_can_clear_holds_nobody_up(client: SyncPrefectClient, tmp_path: Path) -> None:
    silent, crashed = made(client, tmp_path, Running()), made(client, tmp_path, Running(), Crashed())
    time.sleep(1.0)
    began = time.monotonic()

    reap(second_look=600.0)
    reap(second_look=600.0)

    assert (state_name(client, silent), state_name(client, crashed)) == ("Running", "Resuming")
    assert time.monotonic() - began < 60


def test_what_heartbeats_say_is_decided_before_the_second_look_makes_it_old(
    client: SyncPrefectClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    silent, lost = made(client, tmp_path, Running()), made(client, tmp_path, Running())
    reap()
    time.sleep(0.6)
    sign_of_another_host(tmp_path, lost, seconds_ago=0.5)
    states: list[str | None] = []
    sleep = time.sleep
    monkeypatch.setattr(
        time, "sleep", lambda seconds: states.append(state_name(client, silent)) if seconds == 0.1 else sleep(seconds)
    )

    reap(silence=0.2)

    assert states[0] == "Resuming"


def test_a_heartbeat_clears_a_suspicion(client: SyncPrefectClient, tmp_path: Path) -> None:
    night = made(client, tmp_path, Running())
    reap()
    emit_heartbeat(client, night)
    time.sleep(0.2)

    reap()

    assert state_name(client, night) == "Running"


def test_flow_runs_of_others_are_left_alone(client: SyncPrefectClient, tmp_path: Path) -> None:
    theirs = made(client, tmp_path, Running(), deployment="others")

    reap()

    assert state_name(client, theirs) == "Running"


@pytest.mark.parametrize(
    ("states", "goes_on"),
    [
        ((Running(), Crashed()), True),
        ((Running(), Failed()), False),
        ((Running(), Cancelling(), Cancelled()), False),
        ((Running(), Cancelling(), Cancelled(), AwaitingRetry(), Running(), Crashed()), True),
        ((Running(), *(Crashed(), Scheduled(name="Resuming"), Running()) * 2, Crashed()), True),
        ((Running(), *(Crashed(), Scheduled(name="Resuming"), Running()) * 3, Crashed()), False),
        ((Running(), *(Suspended(), Scheduled(name="Resuming"), Running()) * 3, Crashed()), True),
    ],
    ids=lambda given: "-".join(state.name for state in given) if isinstance(given, tuple) else str(given),
)
def test_a_night_goes_on_by_itself_after_crashes_only_and_three_times_at_most(
    client: SyncPrefectClient, tmp_path: Path, states: tuple[State[Any], ...], goes_on: bool
) -> None:
    night = made(client, tmp_path, *states)

    reap()

    assert state_name(client, night) == ("Resuming" if goes_on else states[-1].name)


def test_no_night_is_overlooked_behind_as_many_flow_runs_as_the_server_returns_at_once(
    client: SyncPrefectClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It returns 200; a day without a worker leaves more reapers that were cancelled."""
    crashed = [made(client, tmp_path, Running(), Crashed()) for _ in range(5)]
    dead = [made(client, tmp_path, Running()) for _ in range(5)]
    time.sleep(0.6)
    for night in dead:
        sign_of_another_host(tmp_path, night, seconds_ago=0.5)
    monkeypatch.setattr(SyncPrefectClient, "read_flow_runs", partialmethod(SyncPrefectClient.read_flow_runs, limit=2))

    reap(silence=0.2)

    assert {state_name(client, night) for night in (*crashed, *dead)} == {"Resuming"}


def test_what_was_cancelled_before_it_ran_has_no_jobs_to_look_for(
    client: SyncPrefectClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked_at: list[UUID] = []
    monkeypatch.setattr("nightbridge.flows.reaper.plan_of", lambda run: looked_at.append(run.id))
    never, begun = made(client, tmp_path, Cancelled()), made(client, tmp_path, Running(), Cancelled())

    reap()

    assert (never in looked_at, begun in looked_at) == (False, True)


def test_nights_that_two_workers_were_given_at_once_run_one_after_another(
    server: PrefectServer, client: SyncPrefectClient, tmp_path: Path
) -> None:
    # Prefect's server does that on PostgreSQL when workers ask within some milliseconds.
    nights = [started(client, name, tmp_path, 2.0) for name in ("one", "two")]
    command = [sys.executable, "-m", "prefect.engine"]
    processes = [subprocess.Popen([*command, str(night)], env=server.environment, cwd=tmp_path) for night in nights]

    assert [process.wait(120) for process in processes] == [0, 0]
    assert_one_after_another(tmp_path)


def assert_one_after_another(workspace: Path) -> None:
    lines = (workspace / "diary.txt").read_text().splitlines()
    assert len(lines) > 2
    assert [line.replace(" begins", " ends") for line in lines[::2]] == lines[1::2]


# --- cancelled without a process --------------------------------------------------------------------------------------


def test_a_night_that_is_cancelled_without_a_process_has_its_jobs_cancelled_each_time(
    client: SyncPrefectClient, tmp_path: Path
) -> None:
    night = made(client, tmp_path, Running())
    site = Site(workspace=tmp_path)
    repository = GitRepo(url="https://example.org/Run.git")
    test = TestDefinition(id="llama", name="llama", cmd_args={}, git_repos=(repository,), nemo_run_repo=repository)
    run = RunSpec(scenario="sleeping", night="2026-11-21", test=test)
    start = NightStart(
        night=run.night,
        scenario=run.scenario,
        cluster=site.cluster.name,
        workspace=tmp_path,
        begun_at=utc_now(),
        flow_run=str(night),
    )
    plan = NightPlan(start=start, scenario=Scenario(name="sleeping", tests=()), runs=(run,), site=site)
    client.update_flow_run_labels(night, labels={PLAN_LABEL: str(write_plan(plan))})
    cluster = open_cluster(site.cluster, site.workspace)
    attempt = open_attempt(tmp_path, run.run_key, site.cluster)
    script = attempt.attempt_dir / "job.sh"
    script.write_text("#!/bin/bash\n#SBATCH --output=/dev/null\nsleep 600\n")
    store = open_store(site.store_settings)
    ends = set()

    def is_cancelled(job: int) -> bool:
        reaper(**QUICK | {"last_word": 0.0})
        ends.add(read_end(store, run.night, run.scenario))
        return cluster.states([job])[job].state == "CANCELLED"

    # In between a person retried it: the record of the first time is an old one.
    ends_of_process: list[list[State[Any]]] = [[Suspended(), Cancelled()], [Cancelling(), Crashed()]]
    for states in ends_of_process:
        job = cluster.submit(attempt.name, script, [])
        for state in (Running(), *states):
            client.set_flow_run_state(night, state, force=True)
        eventually(partial(is_cancelled, job))
        assert is_cancelled(job)  # and recorded as done: not recorded again

    assert [end is not None and end.cancelled for end in ends] == [True, True]
    assert state_name(client, night) == "Cancelled"


def test_a_search_that_was_cancelled_while_slurm_did_not_answer_has_its_jobs_cancelled(
    client: SyncPrefectClient, tmp_path: Path
) -> None:
    search, site = made(client, tmp_path, Running(), Cancelled()), Site(workspace=tmp_path)
    note = tmp_path / "searches" / str(search) / "2026-11-21-bisect-aaaaaaaa"
    note.parent.mkdir(parents=True)
    note.touch()
    attempt = open_attempt(tmp_path, f"llama-{note.name}-0123456789", site.cluster)
    script = attempt.attempt_dir / "job.sh"
    script.write_text("#!/bin/bash\n#SBATCH --output=/dev/null\nsleep 600\n")
    cluster = open_cluster(site.cluster, site.workspace)
    job = cluster.submit(attempt.name, script, [])

    def is_cancelled() -> bool:
        reap()
        return cluster.states([job])[job].state == "CANCELLED"

    eventually(is_cancelled)
    assert not note.exists()


# --- two workers, of which one is killed ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def begun_workers() -> Iterator[tuple[ExitStack, list["subprocess.Popen[bytes]"]]]:
    with ExitStack() as stack:
        yield stack, []


@pytest.fixture
def workers(
    server: PrefectServer, tmp_path: Path, begun_workers: tuple[ExitStack, list["subprocess.Popen[bytes]"]]
) -> list["subprocess.Popen[bytes]"]:
    """Two workers, for the last tests of the file: they would run what the others make.

    They serve all of them; one that a test has killed is replaced, so that its second try has two as well.
    """
    stack, begun = begun_workers
    living = [each for each in begun if each.poll() is None]
    begun[:] = [*living, *(stack.enter_context(worker(server, tmp_path / f"{n}.log")) for n in range(2 - len(living)))]
    return begun


def test_nights_of_two_deployments_and_two_workers_run_one_after_another(
    workers: list["subprocess.Popen[bytes]"], client: SyncPrefectClient, tmp_path: Path
) -> None:
    nights = [started(client, name, tmp_path, 1.0) for name in ("one", "two")]
    eventually(lambda: all(state_name(client, night) == "Completed" for night in nights))

    assert_one_after_another(tmp_path)


def test_a_night_whose_worker_reported_the_crash_goes_on_once_the_report_is_complete(
    workers: list["subprocess.Popen[bytes]"], client: SyncPrefectClient, tmp_path: Path
) -> None:
    night, process = at_work(client, tmp_path)
    os.kill(process, signal.SIGKILL)
    eventually(lambda: state_name(client, night) == "Crashed")
    reaper(**{**QUICK, "last_word": 3600.0})
    assert state_name(client, night) == "Crashed"

    def goes_on() -> bool:
        reaper(**QUICK)
        return state_name(client, night) == "Completed"

    eventually(goes_on)

    names = state_names(client, night)
    assert names[names.index("Crashed") :].count("Resuming") >= 1
    assert {run.state_name for run in children(client, night)} == {"Crashed", "Completed"}


def test_a_night_whose_process_and_worker_were_killed_goes_on_with_another_worker(
    workers: list["subprocess.Popen[bytes]"], client: SyncPrefectClient, tmp_path: Path
) -> None:
    night, process = at_work(client, tmp_path)
    (its_own,) = (each for each in workers if process in descendants(each.pid))
    its_own.kill()
    os.kill(process, signal.SIGKILL)
    waiting = started(client, "two", tmp_path, 0.0)
    # The reaper has a queue of its own: the dead night takes the place that the waiting one needs.
    found = client.read_deployment_by_name("reaper/reaper")
    client.create_flow_run_from_deployment(found.id, parameters=QUICK)
    eventually(lambda: {state_name(client, run) for run in (night, waiting)} == {"Completed"})

    states = sorted(client.read_flow_run_states(night), key=lambda state: state.timestamp)
    crashed = next(state for state in states if state.name == "Crashed")
    assert f"process {process}, last sign of life" in str(crashed.message)
    assert states[states.index(crashed) + 1].name == "Resuming"
    assert sorted(str(run.state_name) for run in children(client, night)) == ["Completed", "Crashed"]
