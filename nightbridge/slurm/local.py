"""The embedded cluster as a `Cluster`: a stand-in for Slurm on one machine."""

import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from nightbridge.embedded import jobs
from nightbridge.embedded.sbatch import submit, user_name, write_shims
from nightbridge.errors import LaunchRefused, PermanentError
from nightbridge.files import write_errors
from nightbridge.models import ClusterLimits, ClusterSettings, JobState, JobStatus
from nightbridge.slurm.protocol import Lookup
from nightbridge.slurm.states import time_of

PRETENDED_GPUS_PER_NODE = 2
"""Two ranks a node are enough to tell the first from the last, and as many as a laptop runs at once."""

_write_errors = partial(
    write_errors, what="the embedded cluster's folder", advice="Choose a workspace that can be written"
)


class LocalCluster:
    """A `Cluster` on this machine. It pretends to have as many nodes as a job requests; all of them are this machine.

    All state is in files under `root` (see `jobs`), so that any process can query, and a job outlives its
    submitter. Opening it writes nothing; the folder appears with the first job.

    `kill_wait`: seconds between SIGTERM and SIGKILL when a job is cancelled or has used its time.
    """

    description = "the embedded cluster of this machine"
    accounting_horizon = 0.0
    """A job is found from the moment it is registered."""

    def __init__(self, settings: ClusterSettings, root: Path, *, kill_wait: float = 5.0) -> None:
        self.settings = settings
        self.root = root.absolute()
        self.config = jobs.LocalClusterConfig(name=settings.name, slots=settings.slots, kill_wait=kill_wait)

    def submit(self, name: str, script: Path, options: Sequence[str]) -> int:
        """Submit `script` as `name`; the job is registered for good, and found by its name, before this returns."""
        with _write_errors(self.root):
            jobs.write_config(self.root, self.config)
            words = [*options, f"--job-name={name}"]
            return submit(self.root, script, words, environment=os.environ, directory=Path.cwd())

    def test_only(self, name: str, options: Sequence[str]) -> LaunchRefused | None:
        """None: a job that it refuses is refused at once, and it accepts every size."""
        return None

    def find(self, name: str) -> Lookup:
        """Find every job of this user and name; always complete."""
        with _write_errors(self.root):
            mine = [job for job in jobs.all_jobs(self.root) if job.request.uid == os.getuid()]
            return Lookup(jobs=tuple(_status(job) for job in mine if job.request.name == name), complete=True)

    def states(self, job_ids: Sequence[int]) -> dict[int, JobStatus]:
        """The status of each of these jobs that exists."""
        with _write_errors(self.root):
            found = (jobs.inspect(jobs.job_dir(self.root, job_id)) for job_id in job_ids)
            return {job.job_id: _status(job) for job in found if job is not None}

    def cancel(self, job_id: int) -> None:
        """Request from the job's runner to end it, with everything it started. Returns at once; see the job's state."""
        with _write_errors(self.root):
            job = jobs.inspect(jobs.job_dir(self.root, job_id))
            if job is None:
                raise PermanentError("no such job", subject=f"job {job_id}")
            if job.end is None:
                jobs.request_cancel(job, user_name())

    def limits(self) -> ClusterLimits:
        """No limit on nodes or time is known; containers only where the settings name an srun of the user's own."""
        return ClusterLimits(
            partitions=(self.settings.partition or "local",),
            configured_gpus_per_node=self.settings.gpus_per_node,
            gpus_per_node=self.settings.gpus_per_node or PRETENDED_GPUS_PER_NODE,
            has_pyxis=self.settings.containers == "pyxis",
        )

    def available_slots(self, nodes: int) -> int:
        """The slots, whatever the size: all nodes are this machine."""
        return self.settings.slots

    def script_of(self, job_id: int) -> Path | None:
        """None: its jobs are those of one workspace."""
        return None

    def configured(self, key: str) -> str | None:
        """None: it has no slurm.conf."""
        return None

    def launch_environment(self) -> dict[str, str]:
        """PATH with this cluster's commands first."""
        with _write_errors(self.root):
            jobs.write_config(self.root, self.config)
            write_shims(self.root)
        return {"PATH": jobs.path_with_shims(self.root)}


def _status(job: jobs.LocalJob) -> JobStatus:
    end = job.end
    return JobStatus(
        job_id=job.job_id,
        name=job.request.name,
        state=JobState(job.state),
        reason=jobs.reason(job),
        exit_code=end.exit_code if end is not None else None,
        signal=end.signal if end is not None else None,
        submitted_at=time_of(job.request.submitted_at),
        started_at=time_of(job.started_at),
        ended_at=time_of(end.ended_at) if end is not None else None,
        nodes=job.nodes,
        cancelled_by=end.cancelled_by if end is not None else "",
    )
