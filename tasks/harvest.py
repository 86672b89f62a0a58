"""Stage 5, harvest: the run's output goes to the store, the manifest last."""

import contextvars
import time

from prefect.logging import get_run_logger

from nightbridge.errors import TransientError
from nightbridge.harvest.harvesting import HarvestRequest, run_harvest
from nightbridge.harvest.node_harvest import harvest_on_node
from nightbridge.history.reading import series_of
from nightbridge.models import Checkout, Image, Job, LaunchPlan, RunRecord, RunSpec, Site
from nightbridge.repos.clone import verify_unchanged
from nightbridge.store.parallel import Progress
from nightbridge.tasks.context import raise_if_interrupted
from nightbridge.tasks.prefect_calls import ProgressArtifact
from nightbridge.tasks.site_access import node_runner, resolve_secrets, site_secrets, store_of
from nightbridge.tasks.stage import stage

LOG_INTERVAL, ARTIFACT_INTERVAL = 30.0, 5.0
"""Seconds between two lines of the log, and between two states of the artifact."""


class ShownProgress:
    """Shows each progress that it is called with in the log and as an artifact: not too often, and the last one always.

    Args:
        subject: What makes progress.
    """

    def __init__(self, subject: str) -> None:
        self._subject = subject
        self._log = get_run_logger()
        self._artifact = ProgressArtifact(f"the progress of the {subject}")
        self._log_due = time.monotonic() + LOG_INTERVAL
        self._artifact_due = 0.0

    def __call__(self, progress: Progress) -> None:
        """Show it, if it is time or the end; an interruption of the flow run ends the harvest here."""
        raise_if_interrupted()
        now = time.monotonic()
        ended = progress.files_done == progress.files_total
        if ended or now >= self._log_due:
            self._log.info("%s", progress)
            self._log_due = now + LOG_INTERVAL
        if ended or now >= self._artifact_due:
            self._artifact.show(progress.percent, f"{self._subject}: {progress}")
            self._artifact_due = time.monotonic() + ARTIFACT_INTERVAL


@stage("harvest", waits_for=(TransientError,))
def harvest(
    run: RunSpec, checkout: Checkout, image: Image, plan: LaunchPlan, jobs: tuple[Job, ...], site: Site
) -> RunRecord:
    """Measure the run and keep it, on this host or on a compute node.

    A store that is away, or whose credentials have expired, is waited for: the job is over and its output stays.
    """
    settings = site.store_settings
    request = HarvestRequest(
        run=run,
        checkout=checkout,
        image=image,
        plan=plan,
        jobs=jobs,
        store=settings,
        series=series_of(store_of(site), run, jobs[-1].cluster),
        tainted=tuple(verify_unchanged(checkout, jobs[-1].submitted_at)),
        load_with=site.harvest.load_with,
    )
    needed = resolve_secrets((*plan.secret_environment.values(), settings.access_key, settings.secret_key))
    secrets = site_secrets(site) | needed
    shown = ShownProgress(f"harvest of {run.run_key}")
    if site.harvest.on == "host":
        record = run_harvest(request, store_of(site), secrets.values(), shown)
    else:
        advice = 'Set on = "host" in [harvest], or harvest_on of the Harvest Store block'
        srun = node_runner(site, site.harvest.srun_args, "runs are to be harvested", advice)
        # Lines arrive in a thread of their own, which does not know by itself whose task run this is.
        here = contextvars.copy_context()
        record = harvest_on_node(
            request, store_of(site), secrets, srun, site.harvest.timeout, lambda progress: here.run(shown, progress)
        )
    for change in record.tainted:
        get_run_logger().warning("the code was changed since it was checked out: %s", change)
    get_run_logger().info("kept at %s/%s", record.store_url, record.prefix)
    return record
