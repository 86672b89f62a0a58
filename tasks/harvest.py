"""Stage 5, harvest: what the run left goes to the store, the manifest last."""

import contextvars
import functools
from collections.abc import Callable, Mapping

from prefect.logging import get_run_logger

from nightbridge.errors import InvalidInput, TransientError
from nightbridge.harvest.on_node import harvest_on_node
from nightbridge.harvest.request import HarvestRequest, run_harvest
from nightbridge.models import (
    Checkout,
    Image,
    Job,
    LaunchPlan,
    RunRecord,
    RunSpec,
    SecretRef,
    Site,
)
from nightbridge.repos.clone import verify_unchanged
from nightbridge.secrets import resolve_secret
from nightbridge.slurm.node_command import run_on_node
from nightbridge.store.factory import open_store
from nightbridge.store.transfers import Progress
from nightbridge.tasks.progress import ShownProgress
from nightbridge.tasks.secrets import block_value
from nightbridge.tasks.stage import stage


@stage("harvest", waits_for=(TransientError,))
def harvest(
    run: RunSpec, checkout: Checkout, image: Image, plan: LaunchPlan, jobs: tuple[Job, ...], site: Site
) -> RunRecord:
    """Measure the run and keep it, from here or from where the site wants it.

    A store that is away, or whose credentials have expired, is waited for: the job is over and what it left stays.
    """
    request = HarvestRequest(
        run=run,
        checkout=checkout,
        image=image,
        plan=plan,
        jobs=jobs,
        store=site.store_settings,
        tainted=tuple(verify_unchanged(checkout, jobs[-1].submitted_at)),
    )
    references = (*plan.secret_environment.values(), site.store_settings.access_key, site.store_settings.secret_key)
    secrets = {found: resolve_secret(found, block_value) for found in references if found}
    record = _HARVESTS[site.harvest.on](request, secrets, site, ShownProgress(f"harvest of {run.run_key}"))
    for change in record.tainted:
        get_run_logger().warning("the code was changed since it was checked out: %s", change)
    get_run_logger().info("kept at %s/%s", record.store_url, record.prefix)
    return record


def _on_this_host(
    request: HarvestRequest, secrets: Mapping[SecretRef, str], site: Site, shown: Callable[[Progress], None]
) -> RunRecord:
    return run_harvest(request, open_store(site.store_settings, block_value), secrets.values(), shown)


def _on_a_node(
    request: HarvestRequest, secrets: Mapping[SecretRef, str], site: Site, shown: Callable[[Progress], None]
) -> RunRecord:
    if site.cluster.kind == "local":
        raise InvalidInput(
            "runs are to be harvested on a compute node, and this cluster has no Slurm",
            thing=site.cluster.name,
            advice='Set on = "host" in [harvest], or harvest_on of the Harvest Store block',
        )
    srun = functools.partial(run_on_node, site.cluster, options=site.harvest.srun_args)
    # Lines arrive in a thread of their own, which does not know by itself whose task run this is.
    here = contextvars.copy_context()
    return harvest_on_node(
        request,
        open_store(site.store_settings, block_value),
        secrets,
        srun,
        site.harvest.timeout,
        lambda progress: here.run(shown, progress),
    )


_HARVESTS: Mapping[str, Callable[..., RunRecord]] = {"host": _on_this_host, "node": _on_a_node}
