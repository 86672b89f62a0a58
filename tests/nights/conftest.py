"""An installation that the faults of a file share, and nights in it."""

import os
import random
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import date, datetime, time, timedelta
from pathlib import Path
from time import monotonic, sleep
from typing import Any, TypeVar
from zoneinfo import ZoneInfo

import pytest

from examples.practice.repositories import (
    PracticeRepositories,
    commit_behaviour,
    install_torchrun,
    make_practice_repositories,
)
from tests.conftest import need
from tests.flows.conftest import flows_here as flows_here
from tests.flows.practice_night import WIDE, Entry, write_scenario, write_site
from tests.nights.installation import SHIPPED_CRON, Installation, Worker, clone, wait_for
from tests.nights.night import STAGES, Night, log_sizes, start_night
from tests.real.fake_clock import FakeClock, faketime_missing_reason
from tests.real.postgres import Postgres, postgres_missing_reason, start_postgres
from tests.real.prefect_proxy import PrefectProxy, no_fault, proxy_to
from tests.real.prefect_server import PrefectServer, make_database

SEED = int(os.environ.get("NIGHTBRIDGE_FAULT_SEED") or secrets.randbelow(10**6))
"""Says in which stage each fault comes: another one each time, unless it is given."""

EVERY_STAGE = os.environ.get("NIGHTBRIDGE_EVERY_STAGE") == "1"
"""Whether each fault is tried in every stage, as `make soak` does."""

QUICK = {
    "NIGHTBRIDGE_RETRY_DELAY": "0.2",
    "PREFECT_WORKER_QUERY_SECONDS": "3",
    "PREFECT_WORKER_PREFETCH_SECONDS": "1",
}
"""Delays that are for outages of minutes and hours, as long as the outages here."""

SHARP_EYES = {"silence": 5, "start_up": 60, "no_heartbeat": 60, "second_look": 1, "last_word": 5}
"""The reaper's seconds, for tests that wait for it."""

REAP_EVERY = 30.0
"""Seconds from one look of the reaper to the next, which are five minutes in the shipped schedule; each is a flow run."""

REAPER_TAG = "reaper of a test"

SLOT, ZONE = time(1), ZoneInfo("Europe/Berlin")
"""Of the schedule that is shipped."""

ENTRIES = (
    Entry(id="dense", cmd_args={"max_steps": 20, "save_interval": 10}, gate=WIDE),
    Entry(id="grids", sample="vlm_small", cmd_args={"train_samples": 160, "save_interval": 10}, gate=WIDE),
)
"""The tests of a night: one goes through NeMo-Run's launcher, one does without."""

PLAIN = ENTRIES if EVERY_STAGE else (ENTRIES[1], ENTRIES[1].model_copy(update={"id": "others"}))
"""The same where server, database or clock fail, which the launcher, most of a night's work, knows nothing of."""


Fault = TypeVar("Fault", bound=Callable[..., object])


def in_any_stage(*stages: str) -> pytest.MarkDecorator:
    """Run a test of a fault once, in one of these stages (default: of all), or in each of them."""
    chosen = stages or tuple(STAGES)
    return pytest.mark.parametrize("stage", chosen if EVERY_STAGE else ["/".join(chosen)], indirect=True)


def in_one_night(faults: Sequence[Fault]) -> list[Sequence[Fault]]:
    """Parameters of a test: all faults together, or each one alone, as `make soak` has them."""
    return [(fault,) for fault in faults] if EVERY_STAGE else [faults]


def names(faults: Sequence[Callable[..., object]]) -> str:
    return "-".join(fault.__name__ for fault in faults)


@pytest.fixture
def stage(request: pytest.FixtureRequest) -> str:
    """The stage in which the fault comes."""
    stages = request.param.split("/")
    chosen = random.Random(f"{SEED} {request.node.originalname}").choice(stages)
    print(f"NIGHTBRIDGE_FAULT_SEED={SEED}: {request.node.originalname} comes in the stage {chosen}")
    return str(chosen)


@dataclass
class Rig:
    """An installation, its workers, and everything that can be taken from under them."""

    installed: Installation
    proxy: PrefectProxy
    workloads: PracticeRepositories
    environments: Path
    postgres: Postgres | None = None
    workers: list[Worker] = field(default_factory=list)
    reaped_at: float = 0.0

    @property
    def server(self) -> PrefectServer:
        return self.installed.server

    def start_worker(self) -> Worker:
        self.workers.append(self.installed.start_worker())
        return self.workers[-1]

    def reap(self) -> None:
        """Let the reaper look, as its schedule does every five minutes; it may take its own time to be sure.

        Whether one is running already is left to its deployment's limit: one that died with its host stays Running.
        """
        if monotonic() - self.reaped_at < REAP_EVERY:
            return
        deployment = self.server.ask("GET", "deployments/name/reaper/reaper")
        asked = {"parameters": SHARP_EYES, "tags": [REAPER_TAG]}
        self.server.ask("POST", f"deployments/{deployment['id']}/create_flow_run", asked)
        self.reaped_at = monotonic()

    def reapers(self, **filters: Any) -> list[dict[str, Any]]:
        """The flow runs of the reaper that tests have asked for."""
        return self.installed.flow_runs("reaper", tags={"all_": [REAPER_TAG]}, **filters)

    def wait_for_reapers(self) -> None:
        """Wait until none of them looks any more."""
        unended = {"type": {"any_": ["SCHEDULED", "PENDING", "RUNNING"]}}
        wait_for("end of the reaper", lambda: not self.reapers(state=unended))

    def pause_schedules(self, *deployments: str) -> None:
        """Leave these deployments to the tests.

        A reaper that its schedule starts just when its worker is killed keeps the reaper's one slot for five minutes.
        """
        for deployment in self.server.ask("POST", "deployments/filter", {}):
            for schedule in deployment["schedules"] if deployment["name"] in deployments else ():
                path = f"deployments/{deployment['id']}/schedules/{schedule['id']}"
                self.server.ask("PATCH", path, {"active": False})

    def stop(self) -> None:
        for worker in self.workers:
            worker.stop()

    def mend(self) -> None:
        """Whatever a test has broken is whole again, and one worker runs."""
        self.proxy.fault, self.proxy.delay = no_fault, 0.0
        if self.postgres and not self.postgres.process:
            self.postgres.start()
        if not self.server.answers():
            self.server.start()
        running = [worker for worker in self.workers if worker.process.poll() is None]
        for spare in running[1:]:
            spare.stop()
        self.workers = running[:1]
        if not self.workers:
            self.start_worker()


@pytest.fixture(scope="module")
def whole_rig(tmp_path_factory: pytest.TempPathFactory, environments_dir: Path, launcher_python: Path) -> Iterator[Rig]:
    """The shipped deployments, on PostgreSQL where it can be had, whose clients reach the server through a proxy."""
    folder = tmp_path_factory.mktemp("rig")
    postgres = None if postgres_missing_reason() else start_postgres()
    server = PrefectServer(folder / "server", database_url=make_database(postgres) if postgres else None)
    try:
        server.start()
        with proxy_to(server.api_url) as proxy:
            rig = make_rig(folder, server, proxy, environments_dir, launcher_python, {})
            rig.pause_schedules("nightly", "reaper", "watchdog")
            rig.postgres = postgres
            yield rig
            rig.stop()
    finally:
        server.stop()
        if postgres:
            postgres.remove()


def make_rig(
    folder: Path, server: PrefectServer, proxy: PrefectProxy, environments: Path, python: Path, settings: dict[str, str]
) -> Rig:
    """Install and deploy; the practice jobs run for some seconds."""
    copy = clone(folder / "nightbridge", environments, cron=SHIPPED_CRON)
    installed = Installation(copy, server, {**QUICK, "PREFECT_API_URL": proxy.api_url, **settings})
    practice = installed.workspace / "practice"
    install_torchrun(practice, python)
    workloads = make_practice_repositories(practice)
    commit_behaviour(workloads, "Wait for every rank", slow_wall=0.15)
    commit_behaviour(workloads, "Wait for every rank", workload="megatron_lm", slow_wall=0.15)
    installed.make("deploy")
    rig = Rig(installed, proxy, workloads, environments)
    installed.go_straight("reaper/reaper")  # one after another in every night that goes on by itself
    return rig


@dataclass
class ClockRig(Rig):
    """A rig on SQLite whose server and workers go by a clock that the test sets; the shipped schedule starts its nights."""

    clock: FakeClock = field(kw_only=True)
    tests: tuple[str, ...] = field(kw_only=True)

    def go_to(self, time: datetime) -> None:
        """Set the clock, and wait until everybody goes by it."""
        self.clock.set(time)
        sleep(1.5)

    def next_night(self, day: date) -> Night:
        """Go to some seconds before the schedule's slot of a day, and return the night that it starts."""
        log_from = log_sizes(self.installed)
        slot = datetime.combine(day, SLOT, ZONE)
        self.go_to(max(self.clock.now(), slot - timedelta(hours=1)))
        self.wait_for_slot(slot)
        self.go_to(slot - timedelta(seconds=3))
        return self.night_of(slot.date(), log_from)

    def wait_for_slot(self, slot: datetime) -> None:
        """Wait for its flow run: Prefect makes none for slots that are over when it comes to look."""
        wait_for(f"slot {slot}", lambda: any(is_at(run, slot) for run in self.installed.flow_runs("nightly")))

    def night_of(self, day: date, log_from: Mapping[Path, int]) -> Night:
        """The night that the schedule has started on a day, once it has."""
        slot = datetime.combine(day, SLOT, ZONE)
        runs = wait_for(
            f"flow run of {slot}", lambda: [run for run in self.installed.scheduled_runs() if is_at(run, slot)]
        )
        return Night(self.installed, self.installed.workspace, day.isoformat(), self.tests, runs[0]["id"], log_from)


def is_at(run: dict[str, Any], slot: datetime) -> bool:
    """Whether a flow run is that of a slot."""
    return datetime.fromisoformat(run["expected_start_time"]) == slot


def start_clock_rig(
    folder: Path,
    disk: Path,
    first_day: date,
    entries: Sequence[Entry],
    environments: Path,
    python: Path,
    stack: ExitStack,
) -> ClockRig:
    """Start server and worker on the evening before a day."""
    need(faketime_missing_reason())
    clock = FakeClock(folder / "clock")
    clock.set(datetime.combine(first_day, SLOT, ZONE) - timedelta(hours=5))
    quick = {
        "PREFECT_SERVER_SERVICES_SCHEDULER_LOOP_SECONDS": "2",
        # Each one over which the clock jumps takes seconds to be skipped.
        "PREFECT_SERVER_SERVICES_SCHEDULER_MIN_RUNS": "2",
        "PREFECT_SERVER_DATABASE_TIMEOUT": "3",
    }
    server = PrefectServer(disk / "server", {**clock.environment, **quick})
    stack.callback(server.stop)
    server.start()
    proxy = stack.enter_context(proxy_to(server.api_url))
    made = make_rig(folder, server, proxy, environments, python, dict(clock.environment))
    rig = ClockRig(**vars(made), clock=clock, tests=tuple(entry.id for entry in entries))
    stack.callback(rig.stop)
    # The others' slots of a day would come all at once with each jump of the clock.
    rig.pause_schedules("reaper", "watchdog")
    # The deployment's own scenario file, with the tests of a short night.
    write_scenario(rig.installed.folder / "conf/practice", rig.workloads, "nightly", *entries)
    rig.start_worker()
    return rig


@pytest.fixture
def rig(whole_rig: Rig) -> Rig:
    """The rig with nothing broken."""
    whole_rig.mend()
    return whole_rig


@pytest.fixture
def begin(rig: Rig, tmp_path: Path) -> Iterator[Callable[..., Night]]:
    """Starts a night in the test's own workspace; what the test leaves is ended after it."""
    begun: list[Night] = []

    def start(
        night: str | None = None, entries: Sequence[Entry] = ENTRIES, job_variables: Mapping[str, Any] = {}
    ) -> Night:
        scenario = write_scenario(tmp_path / "conf", rig.workloads, "faults", *entries)
        site = write_site(tmp_path / "site.toml", workspace=tmp_path / "workspace", environments=rig.environments)
        chosen = night or f"n{secrets.token_hex(3)}"
        tests = [entry.id for entry in entries]
        begun.append(
            start_night(
                rig.installed,
                tmp_path / "workspace",
                chosen,
                tests,
                scenario=scenario,
                site=site,
                job_variables=job_variables,
            )
        )
        return begun[-1]

    yield start
    rig.mend()
    for night in begun:
        night.abandon()
