"""The one interface to a cluster; `factory` opens an implementation of it."""

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from nightbridge.errors import LaunchRefused, TransientError
from nightbridge.models import ClusterLimits, ClusterSettings, JobStatus, Model


class JobNotAccepted(TransientError):
    """The cluster accepts no job now, and none exists: a submit limit, a partition that is down.

    Every other `TransientError` of `submit` leaves open whether there is a job.
    """


class Lookup(Model):
    """The jobs of one name. `complete` only when every source (squeue and sacct) answered: an empty, incomplete
    lookup does not mean that there is no job.
    """

    jobs: tuple[JobStatus, ...] = ()
    complete: bool
    queue_answered: bool = False
    """Whether squeue did, be accounting silent or not."""
    queued: frozenset[int] = frozenset()
    """The ids that squeue listed."""
    others: tuple[JobStatus, ...] = ()
    """Not among `jobs`: those that another workspace has submitted (`attempt_files.own_jobs`)."""


class Cluster(Protocol):
    """A cluster as the rest of nightbridge uses it.

    Every method raises `TransientError` when the cluster does not answer, and `LaunchRefused` or another
    `PermanentError` when it refuses for good.
    """

    settings: ClusterSettings

    @property
    def description(self) -> str:
        """How the cluster is reached, for messages."""

    @property
    def accounting_horizon(self) -> float:
        """Seconds after an intent to submit during which a lookup that finds nothing proves nothing."""

    def submit(self, name: str, script: Path, options: Sequence[str]) -> int:
        """Submit `script` under the job name `name` with further sbatch options; return the numeric job id.

        The job gets this process's environment, without SLURM_* and SBATCH_* variables.

        Raises:
            StatusUnknown: The cluster did not answer in time, or was lost meanwhile; the job may exist.
            JobNotAccepted: It accepts no job now.
            LaunchRefused: It never accepts this job, with the advice that fits.
        """

    def test_only(self, name: str, options: Sequence[str]) -> LaunchRefused | None:
        """Why a job with these sbatch options would be refused for good; None where it would not, or that is unknown.

        No job is made.
        """

    def find(self, name: str) -> Lookup:
        """Find every job of this user and this exact name, live or ended, however old."""

    def states(self, job_ids: Sequence[int]) -> dict[int, JobStatus]:
        """The status of many jobs with one query per source. A job that no source knows (yet) is not in the answer.

        Raises:
            StatusUnknown: No source answered.
        """

    def cancel(self, job_id: int) -> None:
        """Cancel a job; a job that has already ended is no error.

        Raises:
            TransientError: The cluster did not answer.
            PermanentError: There is no such job, or it is another user's.
        """

    def limits(self) -> ClusterLimits:
        """What the cluster allows."""

    def available_slots(self, nodes: int) -> int:
        """Jobs of so many nodes that would start now; at least 1, also where the cluster does not answer."""

    def script_of(self, job_id: int) -> Path | None:
        """The script that a job was submitted with; None where that is not known."""

    def configured(self, key: str) -> str | None:
        """The value of a key of the cluster's own configuration; None without one, or where it does not answer."""

    def launch_environment(self) -> dict[str, str]:
        """Variables that a launcher needs to reach this cluster; squeue, sacct, srun, scontrol are on its PATH."""
