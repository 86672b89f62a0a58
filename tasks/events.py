"""Events, which automations react to.

One `nightbridge.verdict` for each verdict of a night that has its report, unless it only still stands. One
`nightbridge.night` for each end of a night: with a report, invalid, for want of infrastructure, cancelled or skipped.
"""

from collections.abc import Mapping
from uuid import NAMESPACE_URL, uuid5

from prefect.events import Event, Resource

from nightbridge.models import NightReport, Verdict, slug
from nightbridge.tasks.prefect_calls import send_events

VERDICT_EVENT = "nightbridge.verdict"
NIGHT_EVENT = "nightbridge.night"

MAX_LETTERS = 2000
"""Of the reasons in an event; the report has all of them. An event of more than 1.5 MB is refused by Prefect."""


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
        f"{verdict.run_key}/{verdict.prefix}/{verdict.status.value}",
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
    """Send an event for each verdict of a night that has its report, and for how the night ended.

    What stands as it stood the night before is no news: an alarm that repeats every night is soon ignored.
    """
    bad = ", ".join(f"{verdict.test_id}: {verdict.status}" for verdict in report.verdicts if verdict.exit_code)
    events = [
        verdict_event(report.scenario, report.night, verdict, report.report, cluster)
        for verdict in report.verdicts
        if verdict.news != "standing"
    ]
    of_the_night = night_event(report.scenario, report.night, end, cluster=cluster, message=bad, report=report.report)
    send_events([*events, of_the_night])
