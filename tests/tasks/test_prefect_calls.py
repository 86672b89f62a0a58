"""Prefect mirrors what the domain decides: what it only shows never fails, what a night needs is waited for."""

import asyncio
import json
import logging
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar

import pytest
from prefect.client.orchestration import get_client
from prefect.concurrency.asyncio import ConcurrencySlotAcquisitionError
from prefect.concurrency.sync import concurrency
from prefect.server.schemas.schedules import CronSchedule
from prefect.settings import PREFECT_API_URL, PREFECT_CLIENT_MAX_RETRIES, temporary_settings

from nightbridge.errors import PermanentError
from nightbridge.models import Verdict, VerdictStatus
from nightbridge.tasks.events import verdict_event
from nightbridge.tasks.prefect_calls import PrefectAway, away_is_transient, insist, send_events, show


class Api(BaseHTTPRequestHandler):
    """An API that answers with the statuses that the test lined up, then 204."""

    answers: ClassVar[list[int]] = []
    bodies: ClassVar[list[Any]] = []

    def do_GET(self) -> None:
        self.send_error(404)  # no CSRF tokens here, as with Prefect's default

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        status = self.answers.pop(0) if self.answers else 204
        if status == 204:
            self.bodies.append(json.loads(body))
        self.send_response(status)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *arguments: object) -> None:
        pass


@pytest.fixture(scope="module")
def listening() -> Iterator[None]:
    """One server for all, as each change of Prefect's settings takes a tenth of a second of a core."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Api)
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}/api"
    with temporary_settings({PREFECT_API_URL: url, PREFECT_CLIENT_MAX_RETRIES: 0}):
        yield
    server.shutdown()
    server.server_close()


@pytest.fixture
def api(listening: None, monkeypatch: pytest.MonkeyPatch) -> type[Api]:
    monkeypatch.setenv("NIGHTBRIDGE_RETRY_DELAY", "0.05")
    Api.answers, Api.bodies = [], []
    return Api


def ask() -> None:
    with get_client(sync_client=True) as client:
        client.request("POST", "/artifacts/", json={})


def an_event() -> Any:
    run_key = "qwen3-2026-11-21-0123456789"
    verdict = Verdict(run_key=run_key, test_id="qwen3", night="2026-11-21", status=VerdictStatus.PASSED)
    return verdict_event("nightly", "2026-11-21", verdict, "file:///report.html", "dgx")


@pytest.mark.parametrize("status", [404, 422, 429, 500, 503])
def test_what_cannot_be_shown_is_logged_and_nothing_more(
    api: type[Api], caplog: pytest.LogCaptureFixture, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nightbridge.tasks.prefect_calls.SHOW_RETRIES", 0)
    api.answers = [status]

    with caplog.at_level(logging.WARNING):
        assert not show("the verdicts", ask)

    assert "Prefect does not show the verdicts: " in caplog.text
    assert str(status) in caplog.text


def test_what_can_be_shown_is_shown(api: type[Api]) -> None:
    assert show("the verdicts", ask)


def test_events_are_sent_again_until_the_server_has_taken_them(api: type[Api]) -> None:
    api.answers = [503, 429, 500, 502]
    event = an_event()

    send_events([event])

    ((sent,),) = api.bodies
    assert (sent["id"], sent["event"]) == (str(event.id), "nightbridge.verdict")


@pytest.mark.parametrize("status", [500, 503])
def test_no_answer_about_the_limits_of_a_task_runs_tags_is_an_outage(api: type[Api], status: int) -> None:
    api.answers = [status]

    with pytest.raises(PrefectAway, match=str(status)), away_is_transient("the flow run"):
        _wait_at_limits_of_tags(f"tag:test:qwen3-{status}")


def test_a_refused_request_for_the_limits_of_tags_is_none(api: type[Api]) -> None:
    api.answers = [422]

    with pytest.raises(ConcurrencySlotAcquisitionError, match="422"), away_is_transient("the flow run"):
        _wait_at_limits_of_tags("tag:test:qwen3-422")


def _wait_at_limits_of_tags(*names: str) -> None:
    """What Prefect does before it begins a task run."""
    with concurrency([*names]):
        pass


def test_a_server_that_refuses_connections_is_waited_for_as_long_as_the_patience_lasts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("NIGHTBRIDGE_RETRY_DELAY", "0.001")
    with (
        temporary_settings({PREFECT_API_URL: "http://127.0.0.1:9/api", PREFECT_CLIENT_MAX_RETRIES: 0}),
        pytest.raises(PrefectAway, match="Prefect's server does not answer"),
    ):
        insist("an answer", ask)


@pytest.mark.parametrize("status", [401, 403])
def test_a_server_that_wants_a_login_is_said_with_where_it_is_set(api: type[Api], status: int) -> None:
    api.answers = [status, 204]

    with pytest.raises(
        PermanentError, match=f"an answer: Prefect's server answered {status}. Set PREFECT_API_AUTH_STRING"
    ):
        insist("an answer", ask)

    assert api.answers == [204]


def test_an_answer_that_will_not_change_is_not_asked_for_again(api: type[Api]) -> None:
    api.answers = [404, 204]

    with pytest.raises(Exception, match="404"):
        insist("an answer", ask)

    assert api.answers == [204]


def test_the_installed_packages_make_the_dates_of_a_schedule() -> None:
    """Prefect's server only logs what goes wrong there: it looks healthy and schedules nothing."""
    schedule = CronSchedule(cron="0 1 * * *", timezone="Europe/Berlin")

    assert [date.hour for date in asyncio.run(schedule.get_dates(2))] == [1, 1]
