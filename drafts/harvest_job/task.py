"""Stage 5, harvest: what the run left goes to the store, the manifest last."""

from collections.abc import Iterable

from prefect.logging import get_run_logger

from nightbridge.models import Checkout, Image, Job, LaunchPlan, RunRecord, RunSpec, SecretRef, Site
from nightbridge.repos.clone import verify_unchanged
from nightbridge.slurm.ledger import record_ended
from nightbridge.store.harvest import load_record
from nightbridge.store.job import HarvestOrder, carry_out, for_a_job, harvested, submit_harvest
from nightbridge.store.objects import open_store
from tasks.progress import ShownProgress
from tasks.secrets import block_value, resolve_all
from tasks.stage import stage
from tasks.watch import watcher_of


@stage("harvest")
def harvest(
    run: RunSpec, checkout: Checkout, image: Image, plan: LaunchPlan, jobs: tuple[Job, ...], site: Site
) -> RunRecord:
    """Measure the run and keep it: here, or where the site says so in a job of the cluster."""
    log = get_run_logger()
    order = HarvestOrder(
        run=run,
        checkout=checkout,
        image=image,
        plan=plan,
        jobs=jobs,
        store=site.store_settings,
        tainted=tuple(verify_unchanged(checkout)),
    )
    references = (*plan.secret_environment.values(), *_store_keys(site))
    if site.harvest.where == "job":
        record = _by_job(order, references, site)
    else:
        values = resolve_all({str(number): found for number, found in enumerate(references)}).values()
        store = open_store(site.store_settings, block_value)
        record = carry_out(order, store, values, ShownProgress(f"harvest of {run.run_key}"))
    for change in record.tainted:
        log.warning("the code was changed since it was checked out: %s", change)
    log.info("kept at %s/%s", record.store_url, record.prefix)
    return record


def _by_job(order: HarvestOrder, references: Iterable[SecretRef], site: Site) -> RunRecord:
    store = open_store(site.store_settings, block_value)
    if record := load_record(store, order.prefix):
        return record
    order, variables = for_a_job(order, references)
    job = submit_harvest(order, site, resolve_all(variables))
    get_run_logger().info("job %d on %s harvests as %s", job.job_id, job.cluster, job.name)
    ended = watcher_of(site).follow(job)
    record_ended(ended)
    return harvested(order, ended, store)


def _store_keys(site: Site) -> tuple[SecretRef, ...]:
    settings = site.store_settings
    return tuple(key for key in (settings.access_key, settings.secret_key) if key)
