"""What a person does to a running night in Prefect's UI: cancel it, suspend it, resume it."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from examples.practice.repositories import PracticeRepositories, commit_behaviour
from nightbridge.blocks import load_site
from nightbridge.embedded.jobs import all_jobs
from nightbridge.models import ClusterSettings, SiteChoice
from nightbridge.nights.records import find_nights
from nightbridge.slurm.local import LocalCluster
from nightbridge.tasks.site_access import store_of
from tests.conftest import BUCKET
from tests.flows.practice_night import NIGHTBRIDGE, Entry, set_remote, write_scenario, write_site
from tests.real.prefect_harness import deploy
from tests.real.prefect_server import PrefectServer
from tests.real.s3_proxy import LOST, Answer, Request, proxy_to
from tests.real.s3_servers import S3Server

pytestmark = pytest.mark.launcher

ROOT = Path(__file__).parents[2]
POOL = "person-pool"
PATIENCE = 300.0


@dataclass
class Night:
    """A night of two tests that a worker runs, seen and steered through Prefect's API as the UI does it."""

    folder: Path
    server: PrefectServer
    flow_run: str = ""
    begun: datetime = field(default_factory=lambda: datetime.now(UTC))

    @property
    def workspace(self) -> Path:
        return self.folder / "workspace"

    @property
    def cluster(self) -> LocalCluster:
        return LocalCluster(ClusterSettings(), self.workspace / "cluster")

    def ask(self, path: str, **document: Any) -> Any:
        return self.server.ask("POST", path, document)

    def look(self, path: str) -> Any:
        return self.server.ask("GET", path)

    def start(self) -> None:
        """Start it by hand, as a Quick run does."""
        given = {"scenario": str(self.folder / "conf/two.toml"), "system": str(self.folder / "site.toml")}
        deployment = self.look("deployments/name/nightly-regression/person")["id"]
        path = f"deployments/{deployment}/create_flow_run"
        self.flow_run = self.ask(path, parameters={**given, "night": "n1"})["id"]

    def start_by_hand(self, *program: str | Path) -> "subprocess.Popen[str]":
        """Start it without a worker, as a person does in a terminal; wait until the first of its two jobs runs."""
        process = subprocess.Popen(
            program, env=self.server.environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        self.wait_until(lambda: process.poll() is not None or self.jobs() == ["RUNNING"])
        own = {"name": {"any_": ["two by-hand"]}, "start_time": {"after_": self.begun.isoformat()}}
        self.wait_until(lambda: process.poll() is not None or self.ask("flow_runs/filter", flow_runs=own))
        (found,) = self.ask("flow_runs/filter", flow_runs=own)
        self.flow_run = found["id"]
        return process

    def set_state(self, kind: str) -> None:
        self.ask(f"flow_runs/{self.flow_run}/set_state", state={"type": kind})

    def suspend(self) -> None:
        """Suspend it as the UI's Pause does."""
        until = datetime.now(UTC) + timedelta(hours=1)
        details = {"pause_reschedule": True, "pause_timeout": until.isoformat()}
        state = {"type": "PAUSED", "name": "Suspended", "state_details": details}
        self.ask(f"flow_runs/{self.flow_run}/set_state", state=state, force=True)

    def state(self) -> str:
        return str(self.look(f"flow_runs/{self.flow_run}")["state"]["name"])

    def subflows(self) -> dict[str, str]:
        """The states of the runs' flow runs, by name."""
        found = self.ask("flow_runs/filter", flow_runs={"parent_flow_run_id": {"any_": [self.flow_run]}})
        return {flow_run["name"]: flow_run["state"]["name"] for flow_run in found}

    def jobs(self) -> list[str]:
        jobs = [job.job_id for job in all_jobs(self.cluster.root)]
        return [str(status.state) for status in self.cluster.states(jobs).values()]

    def processes(self) -> list[str]:
        """The processes of this night's flow run, and what they have started."""
        return [str(pid) for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if self._is_ours(pid)]

    def _is_ours(self, pid: int) -> bool:
        try:
            words = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        except OSError:
            return False
        ours = f"PREFECT__FLOW_RUN_ID={self.flow_run}".encode() in words
        return ours and not any(word.startswith(b"SLURM_JOB_ID=") for word in words)

    def wait_until(self, true: Callable[[], object], seconds: float = PATIENCE) -> float:
        """Wait until something is true; return the seconds that it took."""
        begun = time.monotonic()
        while not true():
            if time.monotonic() > begun + seconds:
                pytest.fail(f"it did not happen in time: {self.state()} {self.subflows()} {self.jobs()}")
            time.sleep(0.4)  # a look costs the server, or whoever reads all of /proc, a hundredth of a second
        return time.monotonic() - begun


@pytest.fixture(scope="module")
def worker(
    prefect_server: PrefectServer, ministack: S3Server, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[PrefectServer]:
    """A server with the night's deployment and a worker that polls often."""
    prefect_server.make_pool(POOL)
    deploy(prefect_server, "person", "nightbridge.flows.nightly.nightly", pool=POOL)
    log = tmp_path_factory.mktemp("worker") / "worker.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [Path(sys.executable).with_name("prefect"), "worker", "start", "--pool", POOL],
            env={**prefect_server.environment, "PREFECT_WORKER_QUERY_SECONDS": "1", "NIGHTBRIDGE_RETRY_DELAY": "60"},
            cwd=ROOT,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    yield prefect_server
    os.killpg(process.pid, signal.SIGTERM)
    process.wait(60)
    print(log.read_text()[-20000:])


@pytest.fixture
def prepared(
    prefect_server: PrefectServer, repositories: PracticeRepositories, environments_dir: Path, tmp_path: Path
) -> Iterator[Night]:
    """A night that nobody has started yet."""
    commit_behaviour(repositories, "Take long for each step", slow_wall=2.0)
    entries = (Entry(id="dense"), Entry(id="experts", sample="deepseek_small"))
    write_scenario(tmp_path / "conf", repositories, "two", *entries)
    write_site(tmp_path / "site.toml", workspace=tmp_path / "workspace", environments=environments_dir)
    made = Night(tmp_path, prefect_server)
    yield made
    for job in all_jobs(made.cluster.root):
        made.cluster.cancel(job.job_id)


@pytest.fixture
def night(worker: PrefectServer, prepared: Night) -> Iterator[Night]:
    """A night for the worker; it is cancelled at the end."""
    yield prepared
    prepared.set_state("CANCELLING")


# tests/nights/test_faults.py cancels and suspends nights in every stage; here are those that hang in one.


def test_a_night_whose_git_server_says_nothing_is_suspended_resumed_and_cancelled(
    night: Night, silent_remote: str
) -> None:
    set_remote(night.folder / "conf", silent_remote)
    night.start()
    night.wait_until(lambda: list(night.subflows().values()) == ["Running", "Running"])

    night.suspend()

    seconds = night.wait_until(lambda: not night.processes())
    print(f"no process after {seconds:.1f} s")
    assert {night.state(), *night.subflows().values()} == {"Suspended"}

    night.ask(f"flow_runs/{night.flow_run}/resume")

    night.wait_until(lambda: list(night.subflows().values()) == ["Running", "Running"])

    night.set_state("CANCELLING")

    wait_until_cancelled(night, "clone")
    assert night.jobs() == []


def wait_until_cancelled(night: Night, moment: str) -> None:
    runs = night.wait_until(lambda: set(night.subflows().values()) == {"Cancelled"})
    seconds = runs + night.wait_until(lambda: night.state() == "Cancelled")
    print(f"{moment}: runs Cancelled after {runs:.1f} s, the night after {seconds:.1f} s")
    night.wait_until(lambda: not night.processes(), 10)
    assert set(night.subflows().values()) == {"Cancelled"}


@pytest.mark.s3
def test_a_harvest_that_hears_nothing_is_left_behind_by_a_cancellation(
    night: Night, ministack: S3Server, repositories: PracticeRepositories, environments_dir: Path
) -> None:
    commit_behaviour(repositories, "Take no time", slow_wall=0.0)
    held, released = threading.Event(), threading.Event()

    def hold(request: Request) -> Answer | None:
        if request.method != "PUT" or "-n1-" not in request.path:  # what the night says of itself passes
            return None
        held.set()
        released.wait(PATIENCE)
        return LOST

    with proxy_to(ministack.endpoint_url) as proxy:
        proxy.before = hold
        store = ministack.store_settings(BUCKET, night.folder.name, endpoint_url=proxy.endpoint_url)
        workspace = night.workspace
        write_site(night.folder / "site.toml", workspace=workspace, environments=environments_dir, store=store)
        night.start()
        night.wait_until(held.is_set)

        night.set_state("CANCELLING")

        wait_until_cancelled(night, "harvest")
        released.set()


def test_a_terminated_night_is_crashed_and_its_jobs_go_on(night: Night) -> None:
    night.start()
    night.wait_until(lambda: night.jobs() == ["RUNNING", "RUNNING"])

    for pid in night.processes():
        os.kill(int(pid), signal.SIGTERM)

    seconds = night.wait_until(lambda: {*night.subflows().values(), night.state()} == {"Crashed"})
    print(f"terminated: Crashed after {seconds:.1f} s")
    night.wait_until(lambda: not night.processes(), 10)
    assert night.jobs() == ["RUNNING", "RUNNING"]


# --- nights that no worker runs ---------------------------------------------------------------------------------------

IN_A_SCRIPT = """
import asyncio, sys
from prefect import flow
from nightbridge.errors import NightbridgeError
from nightbridge.flows import anightly_regression, nightly_regression

scenario, site, door = sys.argv[1:]
named = {"night": "by-hand", "system": site}
try:
    if door == "script":
        nightly_regression(scenario, **named)
    elif door == "subflow":
        flow(name="people's own")(lambda: nightly_regression(scenario, **named))()
    else:
        asyncio.run(anightly_regression(scenario, **named))
except NightbridgeError as error:
    print(type(error).__name__, error)
print("the script goes on")
"""


@pytest.mark.parametrize("door", ["command", "script", "awaited", "subflow"])
def test_a_night_by_hand_that_is_cancelled_in_the_ui_submits_nothing_more(
    prepared: Night, environments_dir: Path, door: str
) -> None:
    site, scenario = prepared.folder / "site.toml", prepared.folder / "conf/two.toml"
    cluster = {"name": f"by-hand-{door}", "max_jobs": 1}  # the second run waits for the first one's slot
    write_site(site, workspace=prepared.workspace, environments=environments_dir, cluster=cluster)
    command: list[str | Path] = [NIGHTBRIDGE, "run", scenario, "--system", site, "--night", "by-hand"]
    in_python: list[str | Path] = [sys.executable, "-c", IN_A_SCRIPT, scenario, site, door]
    process = prepared.start_by_hand(*(command if door == "command" else in_python))

    if door == "subflow":
        named = {"name": {"any_": ["people's own"]}}
        (own,) = prepared.ask("flow_runs/filter", flows=named, flow_runs={"state": {"type": {"any_": ["RUNNING"]}}})
        prepared.ask(f"flow_runs/{own['id']}/set_state", state={"type": "CANCELLING"})
    else:
        prepared.set_state("CANCELLING")

    try:
        output, _ = process.communicate(timeout=90)
    finally:
        process.kill()
    assert prepared.jobs() == ["CANCELLED"], output
    assert {prepared.state(), *prepared.subflows().values()} == {"Cancelled"}
    # Prefect shows where an error ended a flow of people's own.
    assert ("Traceback" in output) == (door == "subflow")
    if door == "command":
        assert process.returncode == 3
        assert "a person cancelled it in Prefect" in output
    else:
        assert process.returncode == 0
        assert "RunCancelled" in output
        assert output.endswith("the script goes on\n")
    (found,) = find_nights(store_of(load_site(SiteChoice(system=str(site)))), night="by-hand")
    assert found.end is not None
    assert found.end.cancelled
