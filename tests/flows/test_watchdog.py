"""The watchdog as a deployment: a flow run that fails when a test has no verdict, on a real Prefect server."""

import json
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from nightbridge.flows.watchdog import watchdog
from nightbridge.models import NightReport, Site, Verdict, VerdictStatus, utc_now
from nightbridge.nights.records import NightStart, NightTest, record_end, record_start
from nightbridge.store.object_store import open_store
from tests.real.notify_servers import webhook_server
from tests.real.prefect_server import PrefectServer

ROOT = Path(__file__).parents[2]
RUN_KEY = "llama-2026-11-21-0123456789"


@pytest.fixture(scope="module")
def deployed(prefect_server: PrefectServer) -> PrefectServer:
    prefect_server.make_pool("nightbridge")
    prefect_server.prefect("--no-prompt", "deploy", "--name", "watchdog", cwd=ROOT)
    return prefect_server


@pytest.fixture
def site(tmp_path: Path) -> Site:
    """A site on which a night by schedule began an hour ago."""
    site = Site(workspace=tmp_path)
    begun = utc_now() - timedelta(hours=1)
    tests = (NightTest(test_id="llama", run_key=RUN_KEY),)
    start = NightStart(
        night="2026-11-21",
        scenario="practice",
        cluster="local",
        workspace=tmp_path,
        begun_at=begun,
        slot=begun,
        tests=tests,
    )
    record_start(open_store(site.store_settings), start)
    return site


def run_watchdog(server: PrefectServer, **parameters: Any) -> dict[str, Any]:
    """Run the deployment as a worker does, and return its flow run."""
    given = {"by": f"{utc_now():%H:%M}", "timezone": "UTC", **parameters}
    deployment = server.ask("GET", "deployments/name/watchdog/watchdog")["id"]
    flow_run = server.ask("POST", f"deployments/{deployment}/create_flow_run", {"parameters": given})["id"]
    done = subprocess.run(
        [sys.executable, "-m", "prefect.engine", flow_run],
        env=server.environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert "Traceback" not in done.stdout + done.stderr + server.log_of(flow_run)
    found: dict[str, Any] = server.ask("GET", f"flow_runs/{flow_run}")
    return found


def test_it_looks_every_morning_at_eight(deployed: PrefectServer) -> None:
    shown = deployed.ask("GET", "deployments/name/watchdog/watchdog")

    (schedule,) = shown["schedules"]
    assert (schedule["schedule"]["cron"], schedule["schedule"]["timezone"]) == ("0 8 * * *", "Europe/Berlin")
    assert shown["parameters"] == {"by": "08:00", "timezone": "Europe/Berlin"}
    assert shown["work_queue_name"] == "default"


def test_a_missing_verdict_fails_the_flow_run_and_is_told(deployed: PrefectServer, site: Site, tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    with webhook_server() as hook:
        file = tmp_path / "site.toml"
        # The password is nowhere, so the mail cannot be sent.
        file.write_text(
            f'workspace = "{tmp_path}"\n[notify]\nwebhook = "{hook.url}"\nsmtp_host = "127.0.0.1"\n'
            'smtp_user = "nightly"\nsmtp_password = "env:NOWHERE"\nmail_to = ["night@example.org"]\n'
        )
        flow_run = run_watchdog(deployed, system=str(file))

    assert (flow_run["state_type"], flow_run["state_name"]) == ("FAILED", "VerdictsMissing")
    assert "llama: crashed: nothing of it was begun, and the night's process is gone" in flow_run["state"]["message"]
    assert "not notified: NOWHERE: secret not found in env" in flow_run["state"]["message"]
    assert [missing["test_id"] for missing in json.loads(hook.received[0])["missing"]] == ["llama"]


@pytest.mark.usefixtures("flows_here")
def test_a_night_with_every_verdict_completes_it(prefect_server: PrefectServer, site: Site, tmp_path: Path) -> None:
    verdict = Verdict(run_key=RUN_KEY, test_id="llama", night="2026-11-21", status=VerdictStatus.REGRESSED)
    record_end(
        open_store(site.store_settings), NightReport(scenario="practice", night="2026-11-21", verdicts=(verdict,))
    )

    # In this process: what a worker starts takes seconds to import Prefect, and the other tests have it.
    state = watchdog(by=f"{utc_now():%H:%M}", timezone="UTC", workspace=str(tmp_path), return_state=True)

    flow_run = prefect_server.ask("GET", f"flow_runs/{state.state_details.flow_run_id}")
    assert (flow_run["state_type"], flow_run["state_name"]) == ("COMPLETED", "VerdictsThere")
    assert "bad verdicts: llama regressed" in flow_run["state"]["message"]


@pytest.mark.usefixtures("flows_here")
def test_what_it_cannot_read_is_invalid(prefect_server: PrefectServer) -> None:
    state = watchdog(by=f"{utc_now():%H:%M}", timezone="Berlin", return_state=True)

    flow_run = prefect_server.ask("GET", f"flow_runs/{state.state_details.flow_run_id}")
    assert (flow_run["state_type"], flow_run["state_name"]) == ("FAILED", "Invalid")
    assert "Berlin: no such time zone" in flow_run["state"]["message"]
    assert "Traceback" not in prefect_server.log_of(flow_run["id"])
