"""What automations are told of a night."""

from contextlib import ExitStack
from types import SimpleNamespace

import pytest
from prefect.events import Event

from nightbridge.flows import nightly
from nightbridge.models import NightReport, SiteChoice, Verdict, VerdictStatus
from nightbridge.tasks.events import MAX_LETTERS, night_event, send_report_events
from nightbridge.tasks.night import ChosenNight
from tests.builders import make_verdict

REPORT = "s3://bucket/nightly/reports/2026-11-21/nightly.html"


def verdict_of(test_id: str, status: VerdictStatus, *reasons: str) -> Verdict:
    return make_verdict(status, *reasons, test_id=test_id, job_id=4711)


def report_of(*verdicts: Verdict) -> NightReport:
    return NightReport(scenario="nightly", night="2026-11-21", verdicts=verdicts, report=REPORT)


class Sent:
    """What is sent of a night."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def of(self, *verdicts: Verdict) -> list[Event]:
        self.events.clear()
        send_report_events(report_of(*verdicts), "regressed", "dgx")
        return [event for event in self.events if event.event == "nightbridge.verdict"]


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> Sent:
    sent = Sent()
    monkeypatch.setattr("nightbridge.tasks.events.send_events", sent.events.extend)
    return sent


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
        "news": "",
        "since": "",
        "reasons": "step time regressed by +3.1 %\nsince Monday",
        "link": f"{REPORT}#qwen3-2026-11-21-0123456789",
        "kept_at": "s3://bucket/nightly/runs/qwen3/2026-11-21/qwen3-2026-11-21-0123456789/a1",
        "job_id": 4711,
    }


def test_what_only_still_stands_has_no_event_and_what_got_worse_has(sent: Sent) -> None:
    standing, worse = (
        make_verdict(VerdictStatus.REGRESSED, test_id=news, news=news, since="2026-11-14")
        for news in ("standing", "worse")
    )

    (event,) = sent.of(standing, worse)

    assert (event.resource["nightbridge.news"], event.payload["since"]) == ("worse", "2026-11-14")


def test_a_night_that_is_reported_again_sends_the_same_event_and_another_verdict_another(sent: Sent) -> None:
    regressed, passed = (verdict_of("qwen3", status) for status in (VerdictStatus.REGRESSED, VerdictStatus.PASSED))

    ids = [sent.of(verdict)[0].id for verdict in (regressed, regressed, passed)]

    assert ids[0] == ids[1] != ids[2]


def test_reasons_without_end_do_not_make_an_event_that_is_refused(sent: Sent) -> None:
    (event,) = sent.of(verdict_of("qwen3", VerdictStatus.INVALID, "x" * 3_000_000))

    assert len(event.payload["reasons"]) == MAX_LETTERS


def test_a_night_has_one_event_of_its_own_that_says_how_it_ended(sent: Sent) -> None:
    sent.of(verdict_of("llama3-8b", VerdictStatus.PASSED), verdict_of("qwen3", VerdictStatus.REGRESSED))

    (event,) = [event for event in sent.events if event.event == "nightbridge.night"]
    assert event.resource.id == "nightbridge.scenario.nightly"
    assert (event.resource["nightbridge.end"], event.resource["nightbridge.night"]) == ("regressed", "2026-11-21")
    assert event.payload["message"] == "qwen3: regressed"
    assert event.payload["report"] == REPORT


def test_the_same_end_is_the_same_event_and_another_end_another() -> None:
    ends = [night_event("nightly", "2026-11-21", end, cluster="dgx").id for end in ("passed", "passed", "cancelled")]

    assert ends[0] == ends[1] != ends[2]


def test_a_night_that_a_defect_ends_is_reported_without_the_text_of_its_error(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[Event] = []

    def fail(choice: SiteChoice) -> None:
        raise RuntimeError("hf_token=geheim")

    monkeypatch.setattr(nightly, "fix_night", lambda night: ChosenNight(night=night))
    monkeypatch.setattr(nightly, "load_site", fail)
    monkeypatch.setattr(nightly, "send_events", sent.extend)
    monkeypatch.setattr(nightly, "flow_run", SimpleNamespace(tags=["nightbridge", "cluster:hopper"]))

    with ExitStack() as process, pytest.raises(RuntimeError):
        nightly._new_plan(process, "conf/llama.toml", (), "n1", "last", SiteChoice())

    assert [(event.payload["scenario"], event.payload["end"]) for event in sent] == [("llama", "infrastructure")]
    assert sent[0].resource["nightbridge.cluster"] == "hopper"  # the automations of its cluster hear of it
    assert sent[0].payload["message"] == "internal error: RuntimeError; its flow run has the log"
