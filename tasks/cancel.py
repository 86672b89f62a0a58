"""Cancel: what a person's cancellation of a flow run does to its Slurm jobs.

Plain functions, no tasks: Prefect calls cancellation hooks outside of any run, in another process.
"""

import logging
from collections.abc import Iterable, Iterator
from typing import Literal

from nightbridge.gate.control import most_pairs
from nightbridge.models import NightReport, RunSpec, Site, Verdict, VerdictStatus, slug
from nightbridge.nights.records import NightPlan, read_end, record_end
from nightbridge.slurm.attempts import attempts_of, cancel_jobs, read_ended
from nightbridge.slurm.factory import cluster_of
from nightbridge.tasks.compare import stored_verdict
from nightbridge.tasks.site import store_of

log = logging.getLogger(__name__)


def cancel_runs(subject: str, run_keys: Iterable[str], site: Site) -> None:
    """Cancel every live job of these runs, whatever their attempt.

    Args:
        subject: What is cancelled, for the log.
        run_keys: The runs; one that never started has no job.
        site: Where they run.
    """
    cluster = cluster_of(site)
    cancelled = [job_id for run_key in run_keys for job_id in cancel_jobs(run_key, site.workspace, cluster)]
    log.warning("%s: cancelled %s", subject, ", ".join(map(str, cancelled)) or "nothing, no running job")


_SEARCHES = {"bisect": "bisect", "attribute": "attribution", "try": "trials"}


def cancel_search(
    kind: Literal["bisect", "attribute", "try"], test_id: str, site: Site, search_id: str | None = None
) -> None:
    """Cancel the jobs of a test's searches of a kind, or of one of them; found by the names of their folders."""
    wanted = f"*-{search_id}-*" if search_id else f"{slug(test_id)}-*-{kind}-*"
    names = sorted(folder.name for folder in (site.workspace / "runs").glob(wanted))
    unfinished = [
        name
        for name in names
        if not all(read_ended(attempt.attempt_dir) for attempt in attempts_of(name, site.workspace))
    ]
    cancel_runs(f"{_SEARCHES[kind]} of {test_id}", unfinished, site)


def cancel_night(plan: NightPlan) -> None:
    """Cancel every live job of a night."""
    cancel_runs(f"night {plan.start.night}", _run_keys_of(plan), plan.site)


def _run_keys_of(plan: NightPlan) -> Iterator[str]:
    """The keys of every run that a night may have started: its own, and the pairs or re-runs that confirm them."""
    for run in plan.runs:
        for number in range(2 * (most_pairs(run.test.gate) + 1) + 1):  # one pair more may try suspect nodes
            yield run.model_copy(update={"repeat": number}).run_key


def record_cancelled(plan: NightPlan) -> None:
    """Record that a person ended the night, with the verdicts that it had by then."""
    verdicts = tuple(stored_verdict(run, plan.site) or _cancelled(run) for run in plan.runs)
    night_report = NightReport(scenario=plan.start.scenario, night=plan.start.night, verdicts=verdicts)
    record_end(store_of(plan.site), night_report, cancelled=True)


def is_recorded(plan: NightPlan) -> bool:
    """Whether it is recorded that a person ended this night, after its jobs were cancelled."""
    end = read_end(store_of(plan.site), plan.start.night, plan.start.scenario)
    return end is not None and end.cancelled and end.ended_at >= plan.start.begun_at


def _cancelled(run: RunSpec) -> Verdict:
    return Verdict(
        run_key=run.run_key,
        test_id=run.test.id,
        night=run.night,
        status=VerdictStatus.CANCELLED,
        reasons=("the night was cancelled",),
    )
