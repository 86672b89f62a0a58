"""Cancel: what a person's cancellation of a flow run does to its Slurm jobs.

Plain functions, no tasks: Prefect calls cancellation hooks outside of any run, in another process.
"""

import logging
from collections.abc import Iterable
from datetime import datetime
from pathlib import Path
from typing import Literal

from nightbridge.errors import DamagedData
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

    Raises:
        StatusUnknown: A job may live on. What could be cancelled is.
    """
    cancelled = cancel_jobs(run_keys, site.workspace, cluster_of(site))
    log.warning("%s: cancelled %s", subject, ", ".join(str(job_id) for _, job_id in cancelled.jobs) or "no job")
    cancelled.check(subject)


_SEARCHES = {"bisect": "bisect", "attribute": "attribution", "try": "trials"}


def cancel_search(
    kind: Literal["bisect", "attribute", "try"], test_id: str, site: Site, search_id: str | None = None
) -> None:
    """Cancel the jobs of a test's searches of a kind, or of one of them; found by the names of their folders.

    Raises:
        StatusUnknown: A job may live on. What could be cancelled is.
    """
    wanted = f"*-{search_id}-*" if search_id else f"{slug(test_id)}-*-{kind}-*"
    names = sorted(folder.name for folder in (site.workspace / "runs").glob(wanted))
    unfinished = [name for name in names if not _is_over(name, site.workspace)]
    cancel_runs(f"{_SEARCHES[kind]} of {test_id}", unfinished, site)


def _is_over(run_key: str, workspace: Path) -> bool:
    """Whether every attempt of a run has its end on record; a record that cannot be read is none."""
    try:
        return all(read_ended(attempt.attempt_dir) for attempt in attempts_of(run_key, workspace))
    except (DamagedData, OSError):
        return False


def cancel_night(plan: NightPlan) -> None:
    """Cancel every live job of a night.

    Raises:
        StatusUnknown: A job may live on. What could be cancelled is.
    """
    cancel_runs(f"night {plan.start.night}", plan.run_keys(), plan.site)


def record_cancelled(plan: NightPlan) -> None:
    """Record that a person ended the night, with the verdicts that it had by then."""
    verdicts = tuple(stored_verdict(run, plan.site) or _cancelled(run) for run in plan.runs)
    night_report = NightReport(scenario=plan.start.scenario, night=plan.start.night, verdicts=verdicts)
    record_end(store_of(plan.site), night_report, cancelled=True)


def is_recorded(plan: NightPlan, since: datetime) -> bool:
    """Whether it is recorded that a person ended this night, after its jobs were cancelled.

    Args:
        plan: The night.
        since: When it was last started. An earlier record is of a cancellation after which it went on.
    """
    end = read_end(store_of(plan.site), plan.start.night, plan.start.scenario)
    return end is not None and end.cancelled and end.ended_at >= since


def _cancelled(run: RunSpec) -> Verdict:
    return Verdict(
        run_key=run.run_key,
        test_id=run.test.id,
        night=run.night,
        status=VerdictStatus.CANCELLED,
        reasons=("the night was cancelled",),
    )
