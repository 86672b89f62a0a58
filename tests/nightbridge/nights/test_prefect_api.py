"""Why a night has not begun, asked of a real Prefect server; and of none."""

import json
import socket
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from tenacity import retry, retry_if_exception_type, stop_after_attempt, wait_fixed

from nightbridge.nights.expected_verdicts import MissingCause
from nightbridge.nights.prefect_api import (
    FLOW,
    PrefectServer,
    WhyNot,
    configured_server,
    why_not_begun,
)
from tests.real.prefect_server import PrefectServer as RealServer
from tests.real.s3_servers import make_certificate
from tests.real.slurm_daemons import free_ports

SLOT = datetime.now(UTC).replace(microsecond=0) - timedelta(hours=7)
BY = SLOT + timedelta(hours=7)


class Deployed:
    """A deployment of the nightly flow in a work pool of its own, made as Prefect's clients make it."""

    def __init__(self, api_url: str) -> None:
        self.api_url = api_url
        self.name = f"nightly-{uuid.uuid4().hex[:8]}"
        self.pool = f"pool-{self.name}"
        self.call("/work_pools/", {"name": self.pool, "type": "process"})
        flow = self.call("/flows/", {"name": FLOW})
        self.id = self.call(
            "/deployments/",
            {
                "name": self.name,
                "flow_id": flow["id"],
                "work_pool_name": self.pool,
                "parameters": {"scenario": f"conf/{self.name}.toml"},
                "schedules": [{"schedule": {"cron": "0 1 1 1 *", "timezone": "UTC"}, "active": True}],
            },
        )["id"]

    # On a busy machine SQLite is locked for longer than Prefect's server waits for it, and the answer is a 503.
    @retry(retry=retry_if_exception_type(urllib.error.HTTPError), stop=stop_after_attempt(5), wait=wait_fixed(1))
    def call(self, path: str, body: Mapping[str, Any], method: str = "POST") -> Any:
        request = urllib.request.Request(
            f"{self.api_url}{path}",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
            method=method,
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            text = answer.read()
        return json.loads(text) if text else None

    def worker(self) -> None:
        """A worker says that it lives."""
        self.call(f"/work_pools/{self.pool}/workers/heartbeat", {"name": "w", "heartbeat_interval_seconds": 300})

    def flow_run(self, state: str, name: str, message: str = "", due: datetime = SLOT) -> None:
        """A flow run that was due and has come so far."""
        scheduled = {"type": "SCHEDULED", "state_details": {"scheduled_time": due.isoformat()}}
        run = self.call(f"/deployments/{self.id}/create_flow_run", {"name": "mauve-owl", "state": scheduled})
        wanted: dict[str, Any] = {"type": state, "name": name, "message": message}
        if state == "SCHEDULED":
            wanted["state_details"] = scheduled["state_details"]
        self.call(f"/flow_runs/{run['id']}/set_state", {"state": wanted, "force": True})

    def why(self, deployment: str | None = None, file: str = "") -> WhyNot:
        server = PrefectServer(self.api_url)
        name = self.name if deployment is None else deployment
        return why_not_begun(server, name, file, (SLOT, BY), lambda moment: f"{moment.astimezone(UTC):%H:%M}")


@pytest.fixture
def deployed(prefect_server: RealServer) -> Deployed:
    return Deployed(prefect_server.api_url)


def test_a_worker_that_is_away_leaves_a_flow_run_late(deployed: Deployed) -> None:
    deployed.flow_run("SCHEDULED", "Late")

    found = deployed.why()

    assert found.cause is MissingCause.WORKER_AWAY
    assert f"worker away: no worker of the work pool {deployed.pool} is online, none has ever been" in found.words
    assert f"its flow run mauve-owl is due since {SLOT:%H:%M}, and Late" in found.words


def test_a_worker_that_was_there_is_away_since_its_last_heartbeat(deployed: Deployed) -> None:
    deployed.call(f"/work_pools/{deployed.pool}/workers/heartbeat", {"name": "w", "heartbeat_interval_seconds": 1})
    heard = datetime.now(UTC)
    workers = f"/work_pools/{deployed.pool}/workers/filter"
    while deployed.call(workers, {})[0]["status"] == "ONLINE":  # Prefect's server looks every 15 seconds
        time.sleep(0.5)

    found = deployed.why()

    assert found.cause is MissingCause.WORKER_AWAY
    assert f"the last heartbeat was at {heard:%H:%M}" in found.words


def test_a_flow_run_may_be_late_though_a_worker_is_there(deployed: Deployed) -> None:
    deployed.worker()
    deployed.flow_run("SCHEDULED", "AwaitingConcurrencySlot")

    found = deployed.why()

    assert found.cause is MissingCause.LATE
    assert found.words == f"its flow run mauve-owl is due since {SLOT:%H:%M}, and AwaitingConcurrencySlot"


def pause(deployed: Deployed) -> str:
    deployed.call(f"/deployments/{deployed.id}/pause_deployment", {})
    return f"schedule off: the deployment {deployed.name} is paused"


def switch_off(deployed: Deployed) -> str:
    (schedule,) = deployed.call("/deployments/filter", {"deployments": {"id": {"any_": [deployed.id]}}})[0]["schedules"]
    deployed.call(f"/deployments/{deployed.id}/schedules/{schedule['id']}", {"active": False}, "PATCH")
    return f"schedule off: the deployment {deployed.name} has no active schedule"


def pause_pool(deployed: Deployed) -> str:
    deployed.call(f"/work_pools/{deployed.pool}", {"is_paused": True}, "PATCH")
    return f"the work pool {deployed.pool} is paused"


def pause_queue(deployed: Deployed) -> str:
    deployed.call(f"/work_pools/{deployed.pool}/queues/default", {"is_paused": True}, "PATCH")
    return "the work queue default is paused"


@pytest.mark.parametrize("by", [pause, switch_off, pause_pool, pause_queue])
def test_a_schedule_can_be_off_in_four_places(deployed: Deployed, by: Callable[[Deployed], str]) -> None:
    deployed.worker()

    words = by(deployed)
    found = deployed.why()

    assert found.cause is MissingCause.SCHEDULE_OFF
    assert words in found.words
    assert f"no flow run of the deployment {deployed.name} was scheduled for it" in found.words


@pytest.mark.parametrize(
    ("state", "name"),
    [("FAILED", "Invalid"), ("CRASHED", "Crashed"), ("CANCELLED", "Cancelled"), ("COMPLETED", "Skipped")],
)
def test_a_flow_run_that_ended_before_it_began_the_night_tells_why(deployed: Deployed, state: str, name: str) -> None:
    deployed.worker()
    deployed.flow_run(state, name, "nightly.toml: no such file.\nCheck the path")

    found = deployed.why()

    assert found.cause is MissingCause.CRASHED
    assert f"its flow run mauve-owl ended {name} at " in found.words
    assert found.words.endswith(": nightly.toml: no such file. Check the path")


def test_a_flow_run_of_another_night_says_nothing_of_this_one(deployed: Deployed) -> None:
    deployed.worker()
    deployed.flow_run("FAILED", "Failed", due=SLOT - timedelta(days=1))

    assert deployed.why().words == f"no flow run of the deployment {deployed.name} was scheduled for it"


def test_a_deployment_is_found_by_the_file_of_its_scenario(deployed: Deployed) -> None:
    assert deployed.name in deployed.why("", f"/elsewhere/{deployed.name}.toml").words


def test_a_deployment_that_is_gone_is_said(deployed: Deployed) -> None:
    assert deployed.why("gone") == WhyNot(
        cause=MissingCause.NOT_STARTED, words="the Prefect server has no deployment for gone"
    )


class TestWithoutAnAnswer:
    def test_a_server_that_is_away_is_the_reason(self) -> None:
        port = free_ports(1)[0]

        found = why_not_begun(PrefectServer(f"http://127.0.0.1:{port}/api"), "nightly", "", (SLOT, BY), str)

        assert found.cause is MissingCause.SERVER_AWAY
        assert found.words.startswith(f"the Prefect server 127.0.0.1:{port} does not answer: ")
        assert "refused" in found.words

    def test_a_server_that_is_silent_is_not_waited_for(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as silent:
            url = f"http://user:planted@127.0.0.1:{silent.getsockname()[1]}/api"
            began = time.monotonic()
            found = why_not_begun(PrefectServer(url), "nightly", "", (SLOT, BY), str)

        assert found.cause is MissingCause.SERVER_AWAY
        assert "planted" not in found.words
        assert time.monotonic() - began < 30

    def test_something_else_at_its_address_is_no_server(self, prefect_server: RealServer) -> None:
        server = PrefectServer(prefect_server.api_url.removesuffix("/api"))

        assert why_not_begun(server, "nightly", "", (SLOT, BY), str).cause is MissingCause.SERVER_AWAY


class TestConfiguredServer:
    @pytest.fixture
    def home(self, tmp_path: Path) -> Path:
        (tmp_path / "profiles.toml").write_text(
            'active = "work"\n[profiles.work]\nPREFECT_API_URL = "http://work:4200/api"\n'
            '[profiles.other]\nPREFECT_API_URL = "https://other/api"\nPREFECT_API_AUTH_STRING = "u:p"\n[profiles.none]\n'
        )
        return tmp_path

    def host(self, **environment: str) -> str | None:
        server = configured_server(environment)
        return server.host if server else None

    def test_is_the_one_of_the_environment(self, home: Path) -> None:
        assert self.host(PREFECT_API_URL="http://here:4200/api", PREFECT_HOME=str(home)) == "here:4200"

    def test_else_of_the_active_profile(self, home: Path) -> None:
        assert self.host(PREFECT_HOME=str(home)) == "work:4200"
        assert self.host(PREFECT_HOME=str(home), PREFECT_PROFILE="other") == "other"

    def test_is_none_without_either(self, home: Path, tmp_path: Path) -> None:
        assert self.host(PREFECT_HOME=str(tmp_path / "empty")) is None
        assert self.host(PREFECT_HOME=str(home), PREFECT_PROFILE="none") is None
        assert self.host(PREFECT_HOME=str(home), PREFECT_PROFILE="gone") is None

    def test_gets_the_login_that_prefects_clients_send(self) -> None:
        with one_request() as (url, received):
            server = configured_server({"PREFECT_API_URL": url, "PREFECT_API_AUTH_STRING": "user:planted"})
            assert server is not None
            why_not_begun(server, "nightly", "", (SLOT, BY), str)

        assert received == ["Basic dXNlcjpwbGFudGVk"]

    @pytest.mark.parametrize("setting", ["", "PREFECT_API_SSL_CERT_FILE"])
    def test_is_trusted_as_by_prefects_clients(self, setting: str, tmp_path: Path) -> None:
        certificate, key = make_certificate(tmp_path)
        given = {setting: str(certificate)} if setting else {}
        with one_request(certificate, key) as (url, received):
            server = configured_server({"PREFECT_API_URL": url, **given})
            assert server is not None
            found = why_not_begun(server, "nightly", "", (SLOT, BY), str)

        assert received == [None] * bool(setting)
        assert ("CERTIFICATE_VERIFY_FAILED" in found.words) is not bool(setting)


@contextmanager
def one_request(*certificate: Path) -> Iterator[tuple[str, list[str | None]]]:
    """A web server that keeps what it was sent to log in with; over TLS where it has a certificate and a key."""
    import ssl
    import threading
    from http.server import BaseHTTPRequestHandler, HTTPServer

    received: list[str | None] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            received.append(self.headers["Authorization"])
            self.send_error(401)

        def log_message(self, *arguments: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    if certificate:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate[0], certificate[1])
        server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.handle_request, daemon=True)
    thread.start()
    yield f"http{'s' * bool(certificate)}://127.0.0.1:{server.server_port}/api", received
    thread.join(30)
    server.server_close()
