"""What automations are told of a night."""

from contextlib import ExitStack
from types import SimpleNamespace
from uuid import UUID

import pytest
from prefect.events import Event

from nightbridge.flows import nightly
from nightbridge.models import NightReport, SiteChoice, Verdict, VerdictStatus
from nightbridge.tasks.events import MAX_LETTERS, MAX_NEWS_LETTERS, MAX_NOTICES, night_event, send_report_events
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
        self.kept: set[UUID] = set()
        """What the server has from earlier."""

    def of(self, *verdicts: Verdict, name: str = "nightbridge.verdict") -> list[Event]:
        self.events.clear()
        send_report_events(report_of(*verdicts), "regressed", "dgx")
        return [event for event in self.events if event.event == name]

    def messages(self, *verdicts: Verdict) -> list[tuple[str, str]]:
        """Subject and text of each message that people get."""
        found = self.of(*verdicts, name="nightbridge.news")
        return [(event.payload["subject"], event.payload["text"]) for event in found]

    def keep(self) -> None:
        """The server writes down what was sent."""
        self.kept |= {event.id for event in self.events}


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> Sent:
    sent = Sent()
    monkeypatch.setattr("nightbridge.tasks.events.send_events", sent.events.extend)
    monkeypatch.setattr("nightbridge.tasks.events.written_events", sent.kept.intersection)
    return sent


def news_of(count: int, status: VerdictStatus, news: str, *reasons: str, first: str = "t") -> list[Verdict]:
    return [make_verdict(status, *reasons, test_id=f"{first}{number:03}", news=news) for number in range(count)]


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


def test_few_news_are_a_message_each_with_their_reasons(sent: Sent) -> None:
    worse = make_verdict(VerdictStatus.REGRESSED, "+3 %", "since Monday", test_id="a", news="worse", since="2026-11-14")
    over = make_verdict(VerdictStatus.PASSED, "good again", test_id="b", news="over")
    quiet = [make_verdict(VerdictStatus.PASSED, test_id="c"), make_verdict(VerdictStatus.FAILED, news="standing")]

    assert sent.messages(worse, over, *quiet) == [
        (
            "a: regressed (worse)",
            f"night 2026-11-21 on dgx, since 2026-11-14\n+3 %\nsince Monday\n{REPORT}#a-2026-11-21-0123456789",
        ),
        ("b: passed (over)", f"night 2026-11-21 on dgx, since now\ngood again\n{REPORT}#b-2026-11-21-0123456789"),
    ]
    assert len(sent.messages(*news_of(MAX_NOTICES, VerdictStatus.FAILED, "new"))) == MAX_NOTICES


def test_many_news_are_one_message_that_begins_with_the_gravest(sent: Sent) -> None:
    away = news_of(297, VerdictStatus.INFRASTRUCTURE, "new", "the store is away", "try again")
    worse = make_verdict(VerdictStatus.REGRESSED, "step time +9 %", test_id="z-last", news="worse")
    over = news_of(2, VerdictStatus.PASSED, "over", first="o")

    ((subject, text),) = sent.messages(*over, *away, worse)

    assert subject == "nightly: 1 regressed (worse), 297 infrastructure (new), 2 passed (over)"
    names = ", ".join(f"t{number:03}" for number in range(3, 20))
    assert text.splitlines() == [
        "night 2026-11-21 on dgx",
        "1 regressed (worse):",
        "- z-last: step time +9 %",
        "297 infrastructure (new):",
        "- t000: the store is away",
        "- t001: the store is away",
        "- t002: the store is away",
        f"- {names} and 277 more",
        "2 passed (over):",
        "- o000",
        "- o001",
        REPORT,
    ]
    assert len(sent.of(*over, *away, worse)) == 300


def test_a_sweep_is_named_once_in_a_message_about_many_news(sent: Sent) -> None:
    points = [
        make_verdict(VerdictStatus.FAILED, "died", test_id="sweep", run_key=f"p{number}", news="new")
        for number in range(MAX_NOTICES + 1)
    ]

    ((subject, text),) = sent.messages(*points)

    assert subject == "nightly: 11 failed (new)"
    assert text.splitlines()[1:-1] == ["11 failed (new):", "- sweep: died"]


def test_a_message_about_many_news_fits_into_a_chat_and_keeps_its_link(sent: Sent) -> None:
    statuses = [status for status in VerdictStatus if status is not VerdictStatus.REGRESSED]
    long = [news for status in statuses for news in news_of(40, status, "new", "x" * 500, first="n" * 90)]

    ((_subject, text),) = sent.messages(*long, make_verdict(VerdictStatus.REGRESSED, test_id="one", news="new"))

    assert len(text) < MAX_NEWS_LETTERS + 200
    assert text.splitlines()[1:3] == ["1 regressed (new):", "- one"]
    assert text.splitlines()[-1] == REPORT


def test_a_night_that_is_started_again_tells_only_what_nobody_was_told(sent: Sent) -> None:
    told = news_of(12, VerdictStatus.FAILED, "new")
    assert len(sent.messages(*told)) == 1
    sent.keep()

    assert sent.messages(*told) == []
    assert sent.of(*told) == []
    assert [event.event for event in sent.events] == ["nightbridge.night"]

    mended = [make_verdict(VerdictStatus.PASSED, "mended", test_id="t000", news="over"), *told[1:]]
    assert [subject for subject, _ in sent.messages(*mended)] == ["t000: passed (over)"]


def test_the_same_news_are_the_same_message(sent: Sent) -> None:
    many = news_of(12, VerdictStatus.FAILED, "new")

    first, again, fewer = (sent.of(*news, name="nightbridge.news")[0].id for news in (many, many[::-1], many[1:]))

    assert first == again != fewer


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
