"""Events, which automations react to: one `nightbridge.verdict` for each verdict of a night that has its report."""

from collections.abc import Iterable
from uuid import NAMESPACE_URL, uuid5

from prefect.events import emit_event

from nightbridge.models import Verdict, slug

VERDICT_EVENT = "nightbridge.verdict"

MOST_LETTERS = 2000
"""Of the reasons in an event; the report has all of them. An event of more than 1.5 MB is refused by Prefect."""


def emit_verdicts(scenario: str, night: str, verdicts: Iterable[Verdict], report: str, cluster: str) -> None:
    """Tell Prefect each verdict of a night.

    An automation is triggered by the event's name and by the labels of its resource, such as
    `nightbridge.verdict = regressed`; what it sends on is in the payload. A night that is reported again with the same
    verdict sends the same event again, which Prefect keeps once.

    Args:
        scenario: The scenario's name.
        night: Night id.
        verdicts: The final ones, after every confirming re-run.
        report: Where the night's report is.
        cluster: Name of the cluster.
    """
    for verdict in verdicts:
        emit_event(
            event=VERDICT_EVENT,
            id=uuid5(NAMESPACE_URL, f"{VERDICT_EVENT}/{verdict.run_key}/{verdict.prefix}/{verdict.status.value}"),
            # One resource for each test, whatever the night: automations may ask for "three times in a week".
            resource={
                "prefect.resource.id": f"nightbridge.test.{slug(verdict.test_id)}",
                "prefect.resource.name": verdict.test_id,
                "nightbridge.verdict": verdict.status.value,
                "nightbridge.scenario": scenario,
                "nightbridge.cluster": cluster,
            },
            payload={
                "verdict": verdict.status.value,
                "exit_code": verdict.exit_code,
                "test_id": verdict.test_id,
                "run_key": verdict.run_key,
                "night": night,
                "scenario": scenario,
                "cluster": cluster,
                "reasons": "\n".join(verdict.reasons)[:MOST_LETTERS],
                "link": f"{report}#{verdict.run_key}",
                "kept_at": f"{verdict.store_url}/{verdict.prefix}" if verdict.prefix else "",
                "job_id": verdict.job_id,
            },
        )
