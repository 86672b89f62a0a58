"""What automations are told of a night."""

from collections.abc import Iterator

import pytest
from prefect.events import Event
from prefect.events.clients import AssertingEventsClient
from prefect.events.worker import EventsWorker
from prefect.settings import PREFECT_API_URL, temporary_settings

from nightbridge.models import Verdict, VerdictStatus
from tasks.events import MOST_LETTERS, emit_verdicts

REPORT = "s3://bucket/nightly/reports/2026-11-21/nightly.html"


def verdict_of(test_id: str, status: VerdictStatus, *reasons: str) -> Verdict:
    run_key = f"{test_id}-2026-11-21-0123456789"
    return Verdict(
        run_key=run_key,
        test_id=test_id,
        night="2026-11-21",
        status=status,
        reasons=reasons,
        job_id=4711,
        store_url="s3://bucket/nightly",
        prefix=f"runs/{test_id}/2026-11-21/{run_key}/a1",
    )


class Sent:
    """Runs the worker that sends events, and what it sent."""

    def of(self, *verdicts: Verdict) -> list[Event]:
        emit_verdicts("nightly", "2026-11-21", verdicts, REPORT, "dgx")
        EventsWorker.instance().drain()
        client = AssertingEventsClient.last
        return [] if client is None else client.pop_events()


@pytest.fixture
def sent() -> Iterator[Sent]:
    AssertingEventsClient.reset()
    EventsWorker.set_client_override(AssertingEventsClient)
    # No server is asked for anything; without an address the worker would start one.
    with temporary_settings({PREFECT_API_URL: "http://127.0.0.1:9/api"}):
        yield Sent()
    EventsWorker._client_override = None
    AssertingEventsClient.reset()


def test_each_verdict_of_a_night_is_one_event(sent: Sent) -> None:
    events = sent.of(verdict_of("llama3-8b", VerdictStatus.PASSED), verdict_of("qwen3", VerdictStatus.REGRESSED))

    assert [event.event for event in events] == ["nightbridge.verdict"] * 2
    assert [event.resource.id for event in events] == ["nightbridge.test.llama3-8b", "nightbridge.test.qwen3"]
    assert [event.resource["nightbridge.verdict"] for event in events] == ["passed", "regressed"]


def test_the_payload_says_what_a_message_needs(sent: Sent) -> None:
    (event,) = sent.of(verdict_of("qwen3", VerdictStatus.REGRESSED, "step time regressed by +3.1 %", "since Monday"))

    assert event.payload == {
        "verdict": "regressed",
        "exit_code": 1,
        "test_id": "qwen3",
        "run_key": "qwen3-2026-11-21-0123456789",
        "night": "2026-11-21",
        "scenario": "nightly",
        "cluster": "dgx",
        "reasons": "step time regressed by +3.1 %\nsince Monday",
        "link": f"{REPORT}#qwen3-2026-11-21-0123456789",
        "kept_at": "s3://bucket/nightly/runs/qwen3/2026-11-21/qwen3-2026-11-21-0123456789/a1",
        "job_id": 4711,
    }


def test_a_night_that_is_reported_again_sends_the_same_event_and_another_verdict_another(sent: Sent) -> None:
    regressed, passed = (verdict_of("qwen3", status) for status in (VerdictStatus.REGRESSED, VerdictStatus.PASSED))

    ids = [sent.of(verdict)[0].id for verdict in (regressed, regressed, passed)]

    assert ids[0] == ids[1] != ids[2]


def test_reasons_without_end_do_not_make_an_event_that_is_refused(sent: Sent) -> None:
    (event,) = sent.of(verdict_of("qwen3", VerdictStatus.INVALID, "x" * 3_000_000))

    assert len(event.payload["reasons"]) == MOST_LETTERS
