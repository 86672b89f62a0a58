"""Watch: a job to its true end, then what became of it."""

import threading
from pathlib import Path

from prefect.logging import get_run_logger

from nightbridge.errors import StatusUnknown
from nightbridge.models import ClusterSettings, Job, JobStatus, LaunchPlan, Site
from nightbridge.outputs.experiment import evidence, read_run
from nightbridge.slurm.cluster import open_cluster
from nightbridge.slurm.ledger import record_ended
from nightbridge.slurm.outcome import classify
from nightbridge.slurm.watcher import Watcher
from tasks.interrupt import interrupt_stages, raise_if_interrupted
from tasks.stage import stage

# One watcher per cluster and process: all of a night's runs are asked about in one question.
_watchers: dict[tuple[ClusterSettings, Path], Watcher] = {}
_watchers_lock = threading.Lock()


def watcher_of(site: Site) -> Watcher:
    """The process's one watcher of this site's cluster, started when it is first needed."""
    key = (site.cluster, site.workspace)
    with _watchers_lock:
        if key not in _watchers:
            _watchers[key] = Watcher(open_cluster(site.cluster, site.workspace))
        return _watchers[key]


def stop_watching() -> None:
    """Stop all watchers of this process, and begin no further stage, so that its threads end. The jobs go on."""
    interrupt_stages()
    with _watchers_lock:
        for watcher in _watchers.values():
            watcher.stop()
        _watchers.clear()


@stage("watch")
def watch(job: Job, plan: LaunchPlan, site: Site) -> Job:
    """Follow the job until it has ended, and classify its end by Slurm's word and the run's own evidence."""
    log = get_run_logger()

    def tell(status: JobStatus) -> None:
        log.info("job %d is %s %s", job.job_id, status.state, status.reason)

    watcher = watcher_of(site)
    try:
        ended = watcher.follow(job, on_change=tell)
    except StatusUnknown:
        raise_if_interrupted()
        raise
    left = read_run(ended, plan.output_dir, plan.checkpoint_dir)
    ended = classify(ended, evidence(left, plan.max_steps))
    record_ended(ended)
    log.info("job %d: %s %s", job.job_id, ended.outcome, ended.outcome_reason)
    return ended
