"""Slurm Cluster: how to reach a cluster and under which account to run there."""

from pathlib import Path
from typing import Literal

from prefect.blocks.core import Block
from pydantic import Field

from nightbridge.models import ClusterKind, ClusterSettings


class SlurmCluster(Block):
    """A Slurm cluster, or this machine as the embedded one.

    Example:
        ```python
        from nightbridge.blocks import SlurmCluster

        settings = SlurmCluster.load("BLOCK_NAME").settings()
        ```
    """

    _block_type_name = "Slurm Cluster"
    _block_type_slug = "nightbridge-slurm-cluster"
    _description = "How to reach a Slurm cluster, and under which account, partition and QOS to run there."

    kind: ClusterKind = Field(
        "slurm",
        description="Slurm's command-line tools, pyslurm, pyslurm where it works (auto), or jobs on this machine.",
    )
    cluster_name: str = Field("slurm", description="The cluster's name in histories and reports.")
    partition: str | None = Field(None, description="Partition to submit to; the site's default when empty.")
    account: str | None = Field(None, description="Slurm account to charge.")
    qos: str | None = Field(None, description="Quality of service to ask for.")
    reservation: str | None = Field(None, description="Reservation to run in.")
    gpus_per_node: int | None = Field(None, description="GPUs of one node; the launcher's default when empty.")
    extra_sbatch_args: list[str] = Field([], description="Further sbatch options, each as --name=value.")
    bin_dir: str | None = Field(None, description="Folder of sbatch, squeue and sacct; found on PATH when empty.")
    slurm_conf: str | None = Field(None, description="The slurm.conf to use; the system's when empty.")
    containers: Literal["pyxis", "none"] = Field("pyxis", description="How jobs run in containers on this cluster.")
    pyslurm_python: str | None = Field(None, description="The Python that has pyslurm; this one when empty.")
    max_jobs: int | None = Field(None, description="Jobs of ours that the cluster has at once; any when empty.")
    max_jobs_per_account: int | None = Field(
        None, description="Jobs of ours that one account has there at once; any when empty."
    )
    max_attempts: int = Field(
        3, description="Attempts of a run that the cluster itself may fail before it is given up."
    )
    slots: int = Field(2, description="Embedded cluster only: how many jobs run at once.")
    accounting_horizon: float = Field(120.0, description="Seconds for which an intent to submit forbids another one.")
    poll_interval: float = Field(15.0, description="Longest interval between two questions to Slurm, in seconds.")
    segment: int | None = Field(None, description="Nodes that must lie close together; the site's default when empty.")
    exclusive: bool = Field(False, description="Ask for whole nodes where the launcher does not.")
    max_pending: float | None = Field(
        None, description="Seconds after which a waiting job is cancelled; never when empty."
    )
    max_runtime: float | None = Field(
        None, description="Seconds after which a running job is cancelled; never when empty."
    )

    def settings(self) -> ClusterSettings:
        """Build the settings that the domain works with."""
        return ClusterSettings(
            kind=self.kind,
            name=self.cluster_name,
            partition=self.partition,
            account=self.account,
            qos=self.qos,
            reservation=self.reservation,
            gpus_per_node=self.gpus_per_node,
            extra_sbatch_args=tuple(self.extra_sbatch_args),
            bin_dir=Path(self.bin_dir) if self.bin_dir else None,
            slurm_conf=Path(self.slurm_conf) if self.slurm_conf else None,
            containers=self.containers,
            pyslurm_python=Path(self.pyslurm_python) if self.pyslurm_python else None,
            max_jobs=self.max_jobs,
            max_jobs_per_account=self.max_jobs_per_account,
            max_attempts=self.max_attempts,
            slots=self.slots,
            accounting_horizon=self.accounting_horizon,
            poll_interval=self.poll_interval,
            segment=self.segment,
            exclusive=self.exclusive,
            max_pending=self.max_pending,
            max_runtime=self.max_runtime,
        )
