"""The embedded cluster: runs batch scripts on this machine, unchanged, behind the same interface as Slurm."""

import errno
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

from nightbridge.errors import LaunchRefused, PermanentError, StatusUnknown, TransientError
from nightbridge.models import ClusterLimits, ClusterSettings, JobState, JobStatus
from nightbridge.slurm.local_jobs import (
    ROOT_VARIABLE,
    LocalClusterConfig,
    LocalJob,
    all_jobs,
    job_dir,
    look_at,
    request_cancel,
    write_config,
)
from nightbridge.slurm.local_listings import reason
from nightbridge.slurm.local_shims import shims_dir, write_shims
from nightbridge.slurm.local_submit import submit, user_name
from nightbridge.slurm.protocol import Lookup

_PERMANENT = frozenset({errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.ENAMETOOLONG, errno.ELOOP})


PRETENDED_GPUS_PER_NODE = 2
"""Two ranks a node are enough to tell the first from the last, and as many as a laptop runs at once."""


class LocalCluster:
    """A `Cluster` on this machine. It pretends to have as many nodes as a job asks for; all of them are this machine.

    All state is in files under `root` (see `local_jobs`), so that any process can ask, and a job outlives whoever
    submitted it. Opening it writes nothing; the folder appears with the first job.

    Args:
        settings: Name, and how many jobs run at once.
        root: The cluster's folder.
        kill_wait: Seconds between SIGTERM and SIGKILL when a job is cancelled or has used its time.

    """

    def __init__(self, settings: ClusterSettings, root: Path, *, kill_wait: float = 5.0) -> None:
        self.settings = settings
        self.root = root.absolute()
        self.config = LocalClusterConfig(name=settings.name, slots=settings.slots, kill_wait=kill_wait)

    @property
    def accounting_horizon(self) -> float:
        """None: a job is found from the moment it is registered."""
        return 0.0

    def submit(self, name: str, script: Path, options: Sequence[str]) -> int:
        """Submit `script` as `name`; the job is registered for good, and found by its name, before this returns.

        Raises:
            LaunchRefused: It is no batch script, or an option is refused.
            TransientError: It could not be registered now.

        """
        with _clear_errors(TransientError, str(self.root)):
            write_config(self.root, self.config)
            return submit(
                self.root,
                script,
                [*options, f"--job-name={name}"],
                environment=os.environ,
                directory=Path.cwd(),
            )

    def trial(self, name: str, options: Sequence[str]) -> LaunchRefused | None:
        """None: what it refuses it refuses at once, and it takes every size."""
        return None

    def find(self, name: str) -> Lookup:
        """Find every job of this user and name; always complete."""
        with _clear_errors(StatusUnknown, str(self.root)):
            found = [
                self._status(job)
                for job in all_jobs(self.root)
                if job.request.name == name and job.request.uid == os.getuid()
            ]
        return Lookup(jobs=tuple(found), complete=True)

    def states(self, job_ids: Sequence[int]) -> dict[int, JobStatus]:
        """The status of each of these jobs that exists."""
        with _clear_errors(StatusUnknown, str(self.root)):
            jobs = (look_at(job_dir(self.root, job_id)) for job_id in job_ids)
            return {job.job_id: self._status(job) for job in jobs if job is not None}

    def cancel(self, job_id: int) -> None:
        """Ask the job's runner to end it, with everything it started. Returns at once; the state tells when it is done.

        Raises:
            PermanentError: There is no such job.

        """
        with _clear_errors(TransientError, str(self.root)):
            job = look_at(job_dir(self.root, job_id))
            if job is None:
                raise PermanentError("no such job", thing=f"job {job_id}")
            if job.end is None:
                request_cancel(job, user_name())

    def limits(self) -> ClusterLimits:
        """No limit on nodes or time is known, and no containers."""
        return ClusterLimits(
            partitions=(self.settings.partition or "local",),
            configured_gpus_per_node=self.settings.gpus_per_node,
            gpus_per_node=self.settings.gpus_per_node or PRETENDED_GPUS_PER_NODE,
            has_pyxis=False,
        )

    def launch_environment(self) -> dict[str, str]:
        """PATH with this cluster's sbatch, srun, squeue, sacct, scancel, scontrol and sinfo first, and where it is."""
        with _clear_errors(TransientError, str(self.root)):
            write_config(self.root, self.config)
            write_shims(self.root)
        path = os.pathsep.join((str(shims_dir(self.root)), os.environ.get("PATH", os.defpath)))
        return {"PATH": path, ROOT_VARIABLE: str(self.root)}

    def _status(self, job: LocalJob) -> JobStatus:
        end = job.end
        why = reason(self.root, job)
        return JobStatus(
            job_id=job.job_id,
            name=job.request.name,
            state=JobState(job.state),
            reason="" if why == "None" else why,
            exit_code=end.exit_code if end is not None else None,
            signal=end.signal if end is not None else None,
            submitted_at=_utc(job.request.submitted_at),
            started_at=_utc(job.started_at),
            ended_at=_utc(end.ended_at) if end is not None else None,
            nodes=job.nodes,
            cancelled_by=end.cancelled_by if end is not None else "",
        )


def _utc(seconds: float | None) -> datetime | None:
    return datetime.fromtimestamp(seconds, UTC) if seconds is not None else None


@contextmanager
def _clear_errors(transient: Callable[..., TransientError], thing: str) -> Iterator[None]:
    """Turn what the file system says into our errors."""
    try:
        yield
    except OSError as error:
        what = f"cannot use the embedded cluster's folder: {error.strerror}"
        if error.errno in _PERMANENT:
            raise PermanentError(what, thing=thing, advice="Choose a workspace that can be written") from error
        raise transient(what, thing=thing, advice="It is tried again") from error
