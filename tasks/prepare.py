"""Before the first stage: everything that can be checked without a checkout, so that nothing is fetched in vain."""

from nightbridge.config.scenarios import sweeps_nodes
from nightbridge.errors import TransientError
from nightbridge.files import check_workspace
from nightbridge.models import ClusterLimits, RunSpec, Scenario, Site
from nightbridge.rules import check
from nightbridge.slurm.factory import open_cluster
from nightbridge.store.objects import open_store
from tasks.secrets import block_value
from tasks.stage import stage
from tasks.validate import refuse_errors


@stage("prepare", waits_for=(TransientError,))
def prepare(run: RunSpec, site: Site) -> None:
    """Check the run's configuration by every rule that needs no checkout, and its place."""
    _check_place(site)
    refuse_errors(run, check(run, open_cluster(site.cluster, site.workspace).limits()))


@stage("place", waits_for=(TransientError,))
def check_place(site: Site) -> None:
    """Check what every run of a night needs, and its report: that the workspace and the store can be written."""
    _check_place(site)


def node_limits(tests: Scenario, site: Site) -> ClusterLimits | None:
    """What the cluster says of itself, asked only where a test sweeps over its nodes: their GPUs follow from it.

    No stage: the runs of a night are made again after every restart.
    """
    return open_cluster(site.cluster, site.workspace).limits() if sweeps_nodes(tests) else None


def _check_place(site: Site) -> None:
    store = open_store(site.store_settings, block_value)
    check_workspace(site.workspace)
    store.check_writable()
