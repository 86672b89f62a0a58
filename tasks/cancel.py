"""Cancel: what a person's cancellation of a flow run does to its Slurm jobs.

Plain functions, no tasks: Prefect calls cancellation hooks outside of any run.
"""

import logging

from nightbridge.models import NightReport, RunSpec, Site, Verdict, VerdictStatus
from nightbridge.nights.records import NightPlan, read_end, record_end
from nightbridge.slurm.attempts import cancel_jobs
from nightbridge.slurm.factory import open_cluster
from nightbridge.store.factory import open_store
from nightbridge.tasks.compare import stored_verdict
from nightbridge.tasks.secrets import block_value

log = logging.getLogger(__name__)


def cancel_run(run: RunSpec, site: Site) -> None:
    """Cancel every live job of the run."""
    cancelled = cancel_jobs(run.run_key, site.workspace, open_cluster(site.cluster, site.workspace))
    log.warning("%s: cancelled %s", run.run_key, ", ".join(map(str, cancelled)) or "nothing, no job was live")


def cancel_night(plan: NightPlan) -> None:
    """Cancel every live job of a night: those of its own runs and of their confirming re-runs."""
    cluster = open_cluster(plan.site.cluster, plan.site.workspace)
    cancelled = [
        job_id
        for run in plan.runs
        for number in range(2 * run.test.gate.confirm + 1)
        for job_id in cancel_jobs(run.model_copy(update={"repeat": number}).run_key, plan.site.workspace, cluster)
    ]
    log.warning("night %s: cancelled %s", plan.start.night, ", ".join(map(str, cancelled)) or "no job, none was live")


def record_cancelled(plan: NightPlan) -> None:
    """Record that a person ended the night, with the verdicts that it had by then."""
    verdicts = tuple(stored_verdict(run, plan.site) or _cancelled(run) for run in plan.runs)
    night_report = NightReport(scenario=plan.start.scenario, night=plan.start.night, verdicts=verdicts)
    record_end(open_store(plan.site.store_settings, block_value), night_report, cancelled=True)


def is_recorded(plan: NightPlan) -> bool:
    """Whether it is recorded that a person ended this night, after its jobs were cancelled."""
    end = read_end(open_store(plan.site.store_settings, block_value), plan.start.night, plan.start.scenario)
    return end is not None and end.cancelled and end.ended_at >= plan.start.begun_at


def _cancelled(run: RunSpec) -> Verdict:
    reasons = ("the night was cancelled",)
    status = VerdictStatus.CANCELLED
    return Verdict(run_key=run.run_key, test_id=run.test.id, night=run.night, status=status, reasons=reasons)
