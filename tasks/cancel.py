"""Cancel: what a person's cancellation of a flow run does to its Slurm jobs.

Plain functions, no tasks: Prefect calls cancellation hooks outside of any run, in another process; those of a subflow
also in that subflow's own thread.
"""

import contextlib
import logging
from collections.abc import Iterable
from contextvars import copy_context
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

from prefect.client.schemas.objects import FlowRun, State
from prefect.flows import Flow

from nightbridge.blocks import site_of
from nightbridge.errors import DamagedData
from nightbridge.files import create_exclusively, open_workspace
from nightbridge.models import NightReport, RunSpec, Site, Verdict, VerdictStatus
from nightbridge.nights.records import NightPlan, read_end, read_start, record_end, record_start
from nightbridge.processes import INTERRUPTED
from nightbridge.slurm.attempts import cancel_jobs
from nightbridge.slurm.factory import cluster_of
from nightbridge.tasks.compare import stored_verdict
from nightbridge.tasks.context import this_flow_run
from nightbridge.tasks.site_access import store_of
from nightbridge.tasks.stage import patiently

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
    # In a subflow's thread programs are ended, for what it worked on is over; these are not its own.
    here = copy_context()
    here.run(INTERRUPTED.set, lambda: False)
    cancelled = here.run(lambda: cancel_jobs(run_keys, site.workspace, cluster_of(site)))
    log.warning("%s: cancelled %s", subject, ", ".join(str(job_id) for _, job_id in cancelled.jobs) or "no job")
    cancelled.check(subject)


_SEARCHES = "searches"


def note_search(search_id: str, site: Site) -> None:
    """Note in the workspace that this flow run works on a search: a cancellation finds its jobs by that.

    Raises:
        NightbridgeError: The workspace cannot be written.
    """
    flow_run = this_flow_run()
    if flow_run is not None:
        patiently(partial(_note, site.workspace, site.workspace / _SEARCHES / str(flow_run.id) / search_id))


def _note(workspace: Path, note: Path) -> None:
    open_workspace(workspace)
    if not create_exclusively(note, b""):
        note.touch()  # which flow run began a search last counts


def noted_searches(flow_run: FlowRun, site: Site) -> list[Path]:
    """The notes of the searches that a flow run works on; those of a cancelled one go once its jobs are cancelled."""
    return sorted((site.workspace / _SEARCHES / str(flow_run.id)).glob("[a-z0-9]*"))


def cancel_searches(flow_run: FlowRun, site: Site) -> None:
    """Cancel the jobs of the searches that a flow run works on: bisects, attributions with their descents, trials.

    Their ids are in the names of the runs' folders. Other searches of the same test are other people's, and so is one
    that another flow run has taken up since.

    Raises:
        StatusUnknown: A job may live on. What could be cancelled is.
    """
    notes = noted_searches(flow_run, site)
    own = [note for note in notes if not _is_taken_up(note)]
    names = [folder.name for note in own for folder in (site.workspace / "runs").glob(f"*-{note.name}-*")]
    subject = ", ".join(note.name for note in notes) or f"searches of {flow_run.name}"
    cancel_runs(subject, sorted(names), site)
    for note in notes:
        note.unlink(missing_ok=True)


def cancel_hook(flow: Flow[..., Any], flow_run: FlowRun, state: State[Any]) -> None:
    """Cancel the jobs of a cancelled search. Prefect also runs this in another process, so they are found by name."""
    cancel_searches(flow_run, site_of(**flow_run.parameters))


def _is_taken_up(note: Path) -> bool:
    """Whether another flow run has begun to work on the search of a note later."""
    every = sorted((each.stat().st_mtime_ns, each) for each in note.parents[1].glob(f"*/{note.name}"))
    return bool(every) and every[-1][1] != note


def cancel_night(plan: NightPlan) -> None:
    """Cancel every live job of a night.

    Raises:
        StatusUnknown: A job may live on. What could be cancelled is.
    """
    cancel_runs(f"night {plan.start.night}", plan.run_keys(), plan.site)


def record_cancelled(plan: NightPlan) -> None:
    """Record that a person ended the night, with its verdicts by then; and that it began, where nothing says so yet."""
    store, start = store_of(plan.site), plan.start
    with contextlib.suppress(DamagedData):  # what cannot be read says that it began, too
        if read_start(store, start.night, start.scenario) is None:
            record_start(store, start)
    verdicts = tuple(stored_verdict(run, plan.site) or _cancelled(run) for run in plan.runs)
    night_report = NightReport(scenario=start.scenario, night=start.night, verdicts=verdicts)
    record_end(store, night_report, cancelled=True)


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
