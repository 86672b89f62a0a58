"""The nightly deployment, on a real Prefect server."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.real.prefect_server import PrefectServer

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def deployed(prefect_server: PrefectServer) -> PrefectServer:
    prefect_server.prefect("work-pool", "create", "nightbridge", "--type", "process", "--overwrite")
    prefect_server.prefect("--no-prompt", "deploy", "--all", cwd=ROOT)
    return prefect_server


def test_a_cron_deployment_really_gets_scheduled_runs(deployed: PrefectServer) -> None:
    # With SQLAlchemy 2.1 Prefect's server looks healthy and schedules nothing at all.
    deadline = time.monotonic() + 600
    runs: list[object] = []
    while not runs and time.monotonic() < deadline:
        runs = json.loads(deployed.prefect("flow-run", "ls", "--state-type", "SCHEDULED", "-o", "json"))
        time.sleep(1)

    assert runs, "no scheduled run within ten minutes"


def test_the_deployment_runs_one_night_at_a_time_and_queues_the_next(deployed: PrefectServer) -> None:
    shown = json.loads(deployed.prefect("deployment", "inspect", "nightly-regression/nightly", "-o", "json"))

    assert shown["concurrency_options"]["collision_strategy"] == "ENQUEUE"
    assert shown["global_concurrency_limit"]["limit"] == 1
    assert shown["schedules"][0]["schedule"]["cron"] == "0 1 * * *"
    assert shown["schedules"][0]["schedule"]["timezone"] == shown["parameters"]["timezone"]


def test_a_night_asked_for_twice_is_one_flow_run(deployed: PrefectServer) -> None:
    printed = [
        subprocess.run(
            [sys.executable, "-m", "flows.deploy", "night", "2026-11-21"],
            env=deployed.environment,
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for _ in range(2)
    ]

    assert "night 2026-11-21: flow run" in printed[0]
    assert printed[0] == printed[1]


def test_a_night_that_ends_badly_is_told_in_its_log_without_a_traceback(deployed: PrefectServer) -> None:
    started = deployed.prefect("deployment", "run", "nightly-regression/nightly", "-p", "scenario=nowhere.toml")
    flow_run = started.split("UUID: ")[1].split()[0]

    executed = subprocess.run(
        [Path(sys.executable).with_name("prefect"), "flow-run", "execute", flow_run],
        env=deployed.environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    log = deployed.prefect("flow-run", "logs", flow_run)

    assert "nowhere.toml: no such file. Check the path" in log
    assert "Traceback" not in log + executed.stdout + executed.stderr


def test_the_zombie_automation_is_made_once_and_updated_after(deployed: PrefectServer) -> None:
    for _ in range(2):
        subprocess.run(
            [sys.executable, "-m", "flows.deploy", "automation"], env=deployed.environment, cwd=ROOT, check=True
        )

    (automation,) = json.loads(deployed.prefect("automation", "inspect", "--json", "--name", AUTOMATION_NAME))
    assert automation["actions"][0]["state"] == "CRASHED"


AUTOMATION_NAME = "nightbridge: crash flow runs without a heartbeat"
