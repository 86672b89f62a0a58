"""Opening the cluster that the settings describe: the embedded one, or Slurm by its commands or by pyslurm."""

import functools
import logging
from pathlib import Path

from nightbridge.models import ClusterSettings
from nightbridge.slurm.command_line import CommandLineCluster
from nightbridge.slurm.local import LocalCluster
from nightbridge.slurm.protocol import Cluster
from nightbridge.slurm.pyslurm_cluster import PyslurmCluster, helper_of, trouble_with_pyslurm

log = logging.getLogger(__name__)


def open_cluster(settings: ClusterSettings, workspace: Path) -> Cluster:
    """Open the cluster that the settings describe."""
    if settings.kind == "local":
        return LocalCluster(settings, settings.root or workspace / "cluster")
    if settings.kind == "slurm" or (settings.kind == "auto" and not _pyslurm_works(settings.model_dump_json())):
        return CommandLineCluster(settings)
    return PyslurmCluster(settings)


@functools.cache
def _pyslurm_works(settings_json: str) -> bool:
    """Whether pyslurm works with this Slurm; tried, and logged, once in a process."""
    settings = ClusterSettings.model_validate_json(settings_json)
    trouble = trouble_with_pyslurm(settings)
    if trouble is None:
        log.info("%s: using pyslurm %s", settings.name, helper_of(settings).version)
    else:
        log.info("%s: using Slurm's commands: %s", settings.name, trouble)
    return trouble is None
