"""Opening the cluster that the settings describe: the embedded one, or Slurm by its commands or by pyslurm."""

import functools
import logging
from collections.abc import Callable, Mapping
from pathlib import Path

from nightbridge.errors import NightbridgeError
from nightbridge.models import ClusterKind, ClusterSettings, Site
from nightbridge.slurm.command_line import CommandLineCluster
from nightbridge.slurm.local import LocalCluster
from nightbridge.slurm.protocol import Cluster
from nightbridge.slurm.pyslurm_cluster import PyslurmCluster

log = logging.getLogger(__name__)


def open_cluster(settings: ClusterSettings, workspace: Path) -> Cluster:
    """Open the cluster that the settings describe."""
    return OPENERS[settings.kind](settings, workspace)


def cluster_of(site: Site) -> Cluster:
    """Open a site's cluster."""
    return open_cluster(site.cluster, site.workspace)


@functools.lru_cache(maxsize=16)
def pyslurm_works(settings_json: str) -> bool:
    """Whether pyslurm works with this Slurm. Process-wide: tried, and logged, once for each cluster's settings."""
    settings = ClusterSettings.model_validate_json(settings_json)
    try:
        log.info("%s: using pyslurm %s", settings.name, PyslurmCluster(settings).version())
    except NightbridgeError as error:
        log.info("%s: using Slurm's commands: %s", settings.name, error.happened)
        return False
    return True


OPENERS: Mapping[ClusterKind, Callable[[ClusterSettings, Path], Cluster]] = {
    "local": lambda settings, workspace: LocalCluster(settings, settings.root or workspace / "cluster"),
    "slurm": lambda settings, _: CommandLineCluster(settings),
    "pyslurm": lambda settings, _: PyslurmCluster(settings),
    "auto": lambda settings, _: (
        PyslurmCluster(settings) if pyslurm_works(settings.model_dump_json()) else CommandLineCluster(settings)
    ),
}
"""How each kind of `ClusterSettings.kind` is opened."""
