"""Stage 5, harvest: what the run left goes to the store, the manifest last."""

from pathlib import Path

from prefect.logging import get_run_logger

from nightbridge.models import Checkout, Image, Job, LaunchPlan, RunRecord, RunSpec, SecretRef, Site
from nightbridge.outputs.experiment import read_run
from nightbridge.outputs.measurements import measure
from nightbridge.outputs.settings import read_settings
from nightbridge.repos.clone import verify_unchanged
from nightbridge.store.harvest import harvest as harvest_run
from nightbridge.store.objects import open_store
from tasks.progress import ShownProgress
from tasks.secrets import block_value, resolve_all
from tasks.stage import stage


def _store_secrets(site: Site) -> dict[str, SecretRef]:
    settings = site.store_settings
    references = {"access key": settings.access_key, "secret key": settings.secret_key}
    return {name: reference for name, reference in references.items() if reference}


def _output_dir_of(earlier: Job, plan: LaunchPlan) -> Path | None:
    """Where an earlier attempt wrote: the place in its own folder that the last one's plan has in its."""
    if plan.output_dir is None or not plan.output_dir.is_relative_to(plan.attempt_dir):
        return None
    return earlier.attempt_dir / plan.output_dir.relative_to(plan.attempt_dir)


@stage("harvest")
def harvest(
    run: RunSpec, checkout: Checkout, image: Image, plan: LaunchPlan, jobs: tuple[Job, ...], site: Site
) -> RunRecord:
    """Measure the run and keep it."""
    left = read_run(jobs[-1], plan.output_dir, plan.checkpoint_dir)
    settings = read_settings(run, left.config_container)
    summary, metrics = measure(left, run.test.gate, plan.max_steps, settings, jobs[-1])
    tainted = verify_unchanged(checkout)
    record = harvest_run(
        run,
        checkout,
        image,
        plan,
        jobs,
        output=left,
        summary=summary,
        metrics=metrics,
        store=open_store(site.store_settings, block_value),
        secrets=resolve_all({**plan.secret_environment, **_store_secrets(site)}).values(),
        on_progress=ShownProgress(f"harvest of {run.run_key}"),
        tainted=tainted,
        earlier=[read_run(job, _output_dir_of(job, plan)) for job in jobs[:-1]],
    )
    for change in record.tainted:
        get_run_logger().warning("the code was changed since it was checked out: %s", change)
    get_run_logger().info("kept at %s/%s", record.store_url, record.prefix)
    return record
