"""Cancelling a night in the Prefect UI: in the worker's process, by name, the Slurm jobs end."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from nightbridge.models import ClusterSettings
from nightbridge.practice.repositories import PracticeRepositories, commit_behaviour
from nightbridge.slurm.local import LocalCluster
from tests.flows.practice_night import Entry, write_scenario, write_site
from tests.real.prefect_server import PrefectServer

ROOT = Path(__file__).parents[2]
POOL = "cancel-pool"


@pytest.fixture
def worker(prefect_server: PrefectServer) -> Iterator[PrefectServer]:
    """A server with a worker that polls often."""
    prefect_server.prefect("work-pool", "create", POOL, "--type", "process", "--overwrite")
    process = subprocess.Popen(
        [Path(sys.executable).with_name("prefect"), "worker", "start", "--pool", POOL],
        env={**prefect_server.environment, "PREFECT_WORKER_QUERY_SECONDS": "1"},
        cwd=ROOT,
        start_new_session=True,
    )
    yield prefect_server
    os.killpg(process.pid, signal.SIGTERM)
    process.wait(60)


@pytest.mark.launcher
def test_cancelling_the_flow_run_cancels_its_jobs(
    worker: PrefectServer, repositories: PracticeRepositories, environments_dir: Path, tmp_path: Path
) -> None:
    commit_behaviour(repositories, "Wait for every rank", slow_wall=5.0)
    entries = (Entry(id="dense"), Entry(id="experts", sample="deepseek_small"))
    scenario = write_scenario(tmp_path / "conf", repositories, "two", *entries)
    site = write_site(tmp_path / "site.toml", workspace=tmp_path / "workspace", environments=environments_dir)
    deploy = ["--no-prompt", "deploy", "flows/nightly.py:nightly", "--name", "cancel", "--pool", POOL]
    worker.prefect(*deploy, cwd=ROOT)
    parameters = [f"{name}={value}" for name, value in (("scenario", scenario), ("system", site), ("night", "n1"))]
    started = worker.prefect(
        "deployment", "run", "nightly-regression/cancel", *(word for pair in parameters for word in ("-p", pair))
    )
    flow_run = started.split("UUID: ")[1].split()[0]
    cluster = LocalCluster(ClusterSettings(), tmp_path / "workspace" / "cluster")
    wait_until(lambda: set(states(cluster)) == {"RUNNING"} and len(states(cluster)) == 2, 600)

    worker.prefect("flow-run", "cancel", flow_run)

    wait_until(lambda: states(cluster) == ["CANCELLED", "CANCELLED"], 600)
    wait_until(lambda: state_of(worker, flow_run) == "CANCELLED", 600)


def states(cluster: LocalCluster) -> list[str]:
    return [str(status.state) for status in cluster.states([1, 2]).values()]


def state_of(server: PrefectServer, flow_run: str) -> str:
    return json.loads(server.prefect("flow-run", "inspect", flow_run, "-o", "json"))["state"]["type"]


def wait_until(true: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.5)
