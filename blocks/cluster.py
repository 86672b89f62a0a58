"""Slurm Cluster: how to reach a cluster and under which account to run there."""

from pathlib import Path
from typing import Any

from pydantic import Field, HttpUrl, model_validator

from nightbridge.blocks.base import SettingsBlock
from nightbridge.models import ClusterKind, ClusterSettings, ContainerSupport
from nightbridge.slurm.factory import open_cluster
from nightbridge.slurm.protocol import Cluster


class SlurmCluster(ClusterSettings, SettingsBlock):
    """A Slurm cluster, or this machine as the embedded one.

    Example:
        ```python
        from nightbridge.blocks import SlurmCluster

        limits = SlurmCluster.load("BLOCK_NAME").open().limits()
        ```
    """

    _block_type_name = "Slurm Cluster"
    _block_type_slug = "nightbridge-slurm-cluster"
    _documentation_url = HttpUrl("https://slurm.schedmd.com/sbatch.html")
    _description = "How to reach a Slurm cluster, and under which account, partition and QOS to run there."

    kind: ClusterKind = Field("slurm", description=str(ClusterSettings.model_fields["kind"].description))
    name: str = Field("slurm", description="The cluster's name in histories and reports.")
    containers: ContainerSupport = Field("pyxis", description="How jobs can run in containers here.")

    @model_validator(mode="before")
    @classmethod
    def _read_former_name(cls, values: Any) -> Any:
        """Read a block that was saved when `name` was called `cluster_name`."""
        if not isinstance(values, dict) or "cluster_name" not in values:
            return values
        kept = {field: value for field, value in values.items() if field != "cluster_name"}
        return {"name": values["cluster_name"], **kept} if values["cluster_name"] else kept

    def settings(self) -> ClusterSettings:
        """Build the settings that the domain works with."""
        return self.build(ClusterSettings)

    def open(self, workspace: str | Path = ".nightbridge") -> Cluster:
        """Open the cluster.

        Args:
            workspace: Folder that the compute nodes see under the same path; the embedded cluster keeps its jobs there.
        """
        return open_cluster(self.settings(), Path(workspace).absolute())
