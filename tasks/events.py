"""Events, which automations react to.

One `nightbridge.verdict` for each verdict of a night that has its report, unless it only still stands. One
`nightbridge.night` for each end of a night: with a report, invalid, for want of infrastructure, cancelled or skipped.
One `nightbridge.news` for each message that people get of a night's news.
"""

from collections.abc import Iterable, Mapping, Sequence
from uuid import NAMESPACE_URL, uuid5

from prefect.events import Event, Resource

from nightbridge.models import NightReport, Verdict, slug
from nightbridge.report.tables import gravest_first
from nightbridge.tasks.prefect_calls import send_events, written_events

VERDICT_EVENT = "nightbridge.verdict"
NIGHT_EVENT = "nightbridge.night"
NEWS_EVENT = "nightbridge.news"

MAX_LETTERS = 2000
"""Of the reasons in an event; the report has all of them. An event of more than 1.5 MB is refused by Prefect."""

MAX_NOTICES = 10
"""News of a night that have a message each; more are one message. Chats take about one a second, and people few."""

MAX_REASONED, MAX_NAMED = 3, 20
"""Tests of one kind of news that a message about many shows with their reason, and by name."""

MAX_REASON_LETTERS, MAX_NEWS_LETTERS = 200, 3500
"""Of a reason, and of what is said before the link, in a message about many: Teams drops one of more than 28 kB."""


def verdict_event(scenario: str, night: str, verdict: Verdict, report: str, cluster: str) -> Event:
    """The event of one verdict.

    An automation is triggered by the event's name and by the labels of its resource, such as
    `nightbridge.verdict = regressed`; what it sends on is in the payload. A night that is reported again with the same
    verdict sends the same event again, which Prefect keeps once.

    Args:
        scenario: The scenario's name.
        night: Night id.
        verdict: The final one, after every confirming re-run.
        report: Where the night's report is.
        cluster: Name of the cluster.
    """
    # One resource for each test, whatever the night: automations may ask for "three times in a week".
    labels = {"verdict": verdict.status.value, "scenario": scenario, "cluster": cluster, "news": verdict.news}
    return _event(
        VERDICT_EVENT,
        _identity(verdict),
        resource=("test", verdict.test_id, labels),
        payload={
            **labels,
            "since": verdict.since,
            "exit_code": verdict.exit_code,
            "test_id": verdict.test_id,
            "run_key": verdict.run_key,
            "night": night,
            "reasons": "\n".join(verdict.reasons)[:MAX_LETTERS],
            "link": f"{report}#{verdict.run_key}",
            "kept_at": f"{verdict.store_url}/{verdict.prefix}" if verdict.prefix else "",
            "job_id": verdict.job_id,
        },
    )


def news_events(report: NightReport, news: Sequence[Verdict], cluster: str) -> list[Event]:
    """What people are told: a message for each verdict that is news, or one for all where they are many.

    An automation sends `subject` and `text` of the payload. The same news are the same events.

    Args:
        report: The night's report, which the messages lead to.
        news: The verdicts that are news and that nobody has been told of.
        cluster: Name of the cluster.
    """
    if len(news) > MAX_NOTICES:
        return [_news_event(report, news, cluster, *_digest(report, news, cluster))]
    return [_news_event(report, [verdict], cluster, *_notice(report, verdict, cluster)) for verdict in news]


def _news_event(report: NightReport, told: Sequence[Verdict], cluster: str, subject: str, text: str) -> Event:
    return _event(
        NEWS_EVENT,
        f"{cluster}/{report.scenario}/{report.night}/{' '.join(sorted(map(_identity, told)))}",
        resource=("scenario", report.scenario, {"night": report.night, "cluster": cluster}),
        payload={
            "scenario": report.scenario,
            "night": report.night,
            "cluster": cluster,
            "count": len(told),
            "subject": subject,
            "text": text,
            "report": report.report,
        },
    )


def _notice(report: NightReport, verdict: Verdict, cluster: str) -> tuple[str, str]:
    """Subject and text of the message about one verdict."""
    reasons = "\n".join(verdict.reasons)[:MAX_LETTERS]
    return f"{verdict.test_id}: {verdict.status} ({verdict.news})", (
        f"night {report.night} on {cluster}, since {verdict.since or 'now'}\n"
        f"{reasons}\n{report.report}#{verdict.run_key}"
    )


def _digest(report: NightReport, news: Iterable[Verdict], cluster: str) -> tuple[str, str]:
    """Subject and text of the message about many verdicts: by kind, the gravest first, with the first ones' reasons."""
    kinds: dict[str, list[Verdict]] = {}
    for verdict in gravest_first(news):
        kinds.setdefault(f"{verdict.status} ({verdict.news})", []).append(verdict)
    counted = ", ".join(f"{len(found)} {kind}" for kind, found in kinds.items())
    lines = [line for kind, found in kinds.items() for line in _kind_lines(kind, found)]
    text = "\n".join((f"night {report.night} on {cluster}", *lines))
    if len(text) > MAX_NEWS_LETTERS:
        text = f"{text[:MAX_NEWS_LETTERS]}..."
    return f"{report.scenario}: {counted}", f"{text}\n{report.report}"


def _kind_lines(kind: str, found: Sequence[Verdict]) -> list[str]:
    tests = list({verdict.test_id: verdict for verdict in found}.values())  # a sweep is one test
    reasoned, named, more = tests[:MAX_REASONED], tests[MAX_REASONED:MAX_NAMED], len(tests[MAX_NAMED:])
    reasons = (" ".join(" ".join(verdict.reasons[:1]).split())[:MAX_REASON_LETTERS] for verdict in reasoned)
    shown = [": ".join(filter(None, (verdict.test_id, why))) for verdict, why in zip(reasoned, reasons, strict=True)]
    if named:
        names = ", ".join(verdict.test_id for verdict in named)
        shown.append(f"{names} and {more} more" if more else names)
    return [f"{len(found)} {kind}:", *(f"- {line}" for line in shown)]


def _identity(verdict: Verdict) -> str:
    return f"{verdict.run_key}/{verdict.prefix}/{verdict.status.value}"


def night_event(
    scenario: str, night: str, end: str, *, cluster: str = "", message: str = "", report: str = ""
) -> Event:
    """The event of a night's end; the same end reported again is the same event.

    Args:
        scenario: The scenario's name.
        night: Night id.
        end: `passed`, the gravest verdict, `invalid`, `infrastructure`, `cancelled` or `skipped`.
        cluster: Name of the cluster; empty where it was not known yet.
        message: What a person should read first.
        report: Where the night's report is; empty without one.
    """
    labels = {"night": night, "end": end, "cluster": cluster}
    return _event(
        NIGHT_EVENT,
        f"{cluster}/{scenario}/{night}/{end}",
        resource=("scenario", scenario, labels),
        payload={**labels, "scenario": scenario, "message": message[:MAX_LETTERS], "report": report},
    )


def _event(
    name: str, identity: str, *, resource: tuple[str, str, Mapping[str, str]], payload: dict[str, object]
) -> Event:
    """An event of a resource (kind, name, labels); the same identity makes the same event, which Prefect keeps once."""
    kind, title, labels = resource
    return Event(
        event=name,
        id=uuid5(NAMESPACE_URL, f"{name}/{identity}"),
        resource=Resource(
            {
                "prefect.resource.id": f"nightbridge.{kind}.{slug(title)}",
                "prefect.resource.name": title,
                **{f"nightbridge.{label}": value for label, value in labels.items()},
            }
        ),
        payload=payload,
    )


def send_report_events(report: NightReport, end: str, cluster: str) -> None:
    """Send an event for each verdict of a night that has its report, for what people are told, and for its end.

    What stands as it stood the night before is no news: an alarm that repeats every night is soon ignored. Neither is
    a verdict that the server has from an earlier start of the night: Prefect keeps an event once, but half an hour
    later, or after its server was started again, it hands the same one to the automations as if it were new.
    """
    bad = ", ".join(f"{verdict.test_id}: {verdict.status}" for verdict in report.verdicts if verdict.exit_code)
    events = {
        event.id: (event, verdict)
        for verdict in report.verdicts
        if verdict.news != "standing"
        for event in [verdict_event(report.scenario, report.night, verdict, report.report, cluster)]
    }
    known = written_events([*events])
    fresh = [both for key, both in events.items() if key not in known]
    news = [verdict for _event, verdict in fresh if verdict.news]
    of_the_night = night_event(report.scenario, report.night, end, cluster=cluster, message=bad, report=report.report)
    # The server writes them in this order: a verdict that it has was told.
    send_events([*news_events(report, news, cluster), *(event for event, _verdict in fresh), of_the_night])
