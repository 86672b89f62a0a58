"""Cancel: what a person's cancellation of a flow run does to its Slurm job."""

import logging

from nightbridge.models import RunSpec, Site
from nightbridge.slurm.cluster import open_cluster
from nightbridge.slurm.ledger import cancel_jobs

log = logging.getLogger(__name__)


def cancel_run(run: RunSpec, site: Site) -> None:
    """Cancel every live job of the run.

    A plain function, not a task: Prefect calls cancellation hooks outside of any run.
    """
    cancelled = cancel_jobs(run.run_key, site.workspace, open_cluster(site.cluster, site.workspace))
    log.warning("%s: cancelled %s", run.run_key, ", ".join(map(str, cancelled)) or "nothing, no job was live")
