"""The embedded cluster's state: a folder for each job, every fact a file that is written once.

    <root>/cluster.json           how many jobs run at once, how long a job may take to end
    <root>/bin/                   sbatch, srun, squeue... for PATH
    <root>/schedule.lock          locked while a job takes a slot
    <root>/jobs/<id>/             appears in one piece, by a rename, when the job is submitted
        job.json                  what was asked; never the environment, which may hold secrets
        runner.json               the process that runs the job
        script                    the batch script as submitted
        started.json              it has a slot
        session.json              the session of its processes
        cancel.json               somebody wants it to end
        ending                    why it is being ended, while its processes have time to do so
        end.json                  how it ended
        runner.log                what the runner itself had to say
        steps/<n>/srun.json       the srun process of a step

Any process can ask: whoever finds a runner dead without an end records NODE_FAIL, after it has killed what was left.
Standard library only, as everything that srun imports: it starts many times a night, and must start fast.
"""

import contextlib
import dataclasses
import fcntl
import json
import os
import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nightbridge.errors import PermanentError
from nightbridge.files import create_exclusively, write_atomically
from nightbridge.slurm.local_names import node_expression
from nightbridge.slurm.local_processes import (
    ProcessIdentity,
    is_gone,
    kill_until_gone,
    processes_with_variable,
    session_members,
)

ROOT_VARIABLE = "NIGHTBRIDGE_LOCAL_CLUSTER"
"""Environment variable that tells the commands where the cluster's state is."""
JOB_VARIABLE = "NIGHTBRIDGE_LOCAL_JOB"
"""Environment variable that marks every process of a job; its value is the job's folder."""

KILL_PATIENCE = 10.0
"""Seconds for which killing what is left of a job is tried. A process in the kernel's hands can take that long."""


@dataclass(frozen=True)
class LocalClusterConfig:
    """What runners and commands need to know of the cluster. `kill_wait`: seconds between SIGTERM and SIGKILL."""

    name: str = "local"
    slots: int = 2
    kill_wait: float = 5.0


@dataclass(frozen=True)
class JobRequest:
    """What was asked of sbatch. Times are seconds since the epoch, limits seconds, patterns not filled in."""

    name: str
    user: str
    uid: int
    submitted_at: float
    submit_dir: str
    directory: str
    output: str
    error: str | None
    append: bool
    nodes: int
    tasks: int
    tasks_per_node: int
    time_limit: float | None
    partition: str
    account: str
    signal: str
    dependencies: tuple[tuple[str, int], ...]
    arguments: tuple[str, ...]


@dataclass(frozen=True)
class JobEnd:
    """How a job ended. Exit code and signal are the script's; None when it never ran or nobody saw its end."""

    state: str
    ended_at: float
    exit_code: int | None = None
    signal: int | None = None
    reason: str = ""
    cancelled_by: str = ""


@dataclass(frozen=True)
class LocalJob:
    """One job as its folder shows it."""

    job_id: int
    folder: Path
    request: JobRequest
    runner: ProcessIdentity
    end: JobEnd | None
    is_ending: bool
    started_at: float | None

    @property
    def state(self) -> str:
        """Slurm's name of its state."""
        if self.end is not None:
            return self.end.state
        if self.started_at is None:
            return "PENDING"
        return "COMPLETING" if self.is_ending else "RUNNING"

    @property
    def nodes(self) -> str:
        """The node expression of its nodes; empty before it has any."""
        return node_expression(self.request.nodes) if self.started_at is not None else ""


# --- one job ---------------------------------------------------------------------------------------------------------


def jobs_dir(root: Path) -> Path:
    """Where the jobs' folders are."""
    return root / "jobs"


def job_dir(root: Path, job_id: int) -> Path:
    """A job's folder."""
    return jobs_dir(root) / str(job_id)


def write_fact(path: Path, fact: Any) -> bool:
    """Write a dataclass as JSON, once; return whether this call wrote it. Parts of it are never seen."""
    return create_exclusively(path, json.dumps(dataclasses.asdict(fact), indent=2).encode() + b"\n")


def read_fact(path: Path) -> dict[str, Any] | None:
    """Read a fact; None when it has not been written."""
    try:
        fact = json.loads(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        return None
    assert isinstance(fact, dict)
    return fact


def read_identity(path: Path) -> ProcessIdentity | None:
    """Read the process that a file names; None when there is no such file."""
    fact = read_fact(path)
    return ProcessIdentity(**fact) if fact is not None else None


def read_job(folder: Path) -> LocalJob | None:
    """Read a job's folder as it is; None when there is no such job."""
    asked = read_fact(folder / "job.json")
    runner = read_identity(folder / "runner.json")
    if asked is None or runner is None:
        return None
    # The end first: what comes before it in a job's life is then there for sure.
    end = read_fact(folder / "end.json")
    is_ending = (folder / "ending").exists()
    started = read_fact(folder / "started.json")
    dependencies = tuple((str(kind), int(number)) for kind, number in asked.pop("dependencies"))
    return LocalJob(
        job_id=int(folder.name),
        folder=folder,
        request=JobRequest(**asked | {"dependencies": dependencies, "arguments": tuple(asked["arguments"])}),
        runner=runner,
        end=JobEnd(**end) if end is not None else None,
        is_ending=is_ending,
        started_at=float(started["at"]) if started is not None else None,
    )


def look_at(folder: Path) -> LocalJob | None:
    """Read a job, and record NODE_FAIL if its runner died without recording an end; None when there is no such job."""
    job = read_job(folder)
    if job is None or job.end is not None or not is_gone(job.runner):
        return job
    # The runner may have recorded the end and exited between the two looks.
    if not (folder / "end.json").exists():
        _record_node_failure(job)
    return read_job(folder)


def _record_node_failure(job: LocalJob) -> None:
    # First the kill: once the failure is known, somebody may start the next attempt in the same place.
    session = read_identity(job.folder / "session.json")

    def left() -> set[int]:
        members = session_members(session) if session is not None else set()
        members |= processes_with_variable(JOB_VARIABLE, str(job.folder))
        return members - {os.getpid()}  # the job itself may ask, through one of the commands

    reason = "the runner died" if kill_until_gone(left, patience=KILL_PATIENCE) else "the runner died; processes remain"
    write_fact(job.folder / "end.json", JobEnd(state="NODE_FAIL", ended_at=time.time(), reason=reason))


# --- all jobs --------------------------------------------------------------------------------------------------------


def job_ids(root: Path) -> list[int]:
    """The ids of every job there ever was, oldest first."""
    try:
        names = os.listdir(jobs_dir(root))
    except FileNotFoundError:
        return []
    return sorted(int(name) for name in names if name.isdigit())


def all_jobs(root: Path, *, known: Collection[int] = ()) -> Iterator[LocalJob]:
    """Look at every job except those `known`, oldest first."""
    for job_id in job_ids(root):
        if job_id not in known and (job := look_at(job_dir(root, job_id))) is not None:
            yield job


def ended_ids(root: Path) -> set[int]:
    """The ids of the jobs whose end is recorded. Of these a year has thousands: each costs one stat."""
    return {job_id for job_id in job_ids(root) if (job_dir(root, job_id) / "end.json").exists()}


def live_jobs(root: Path) -> Iterator[LocalJob]:
    """Look at every job that has not ended, oldest first."""
    return (job for job in all_jobs(root, known=ended_ids(root)) if job.end is None)


def request_cancel(job: LocalJob, by: str) -> None:
    """Ask a job's runner to end it. Only the first request counts."""
    create_exclusively(job.folder / "cancel.json", json.dumps({"by": by, "at": time.time()}).encode() + b"\n")


def cancel_requested_by(folder: Path) -> str | None:
    """Who wants the job to end; None when nobody does."""
    fact = read_fact(folder / "cancel.json")
    return str(fact["by"]) if fact is not None else None


def dependency_state(root: Path, job: LocalJob) -> str:
    """Whether a job's dependencies let it start: `ready`, `waiting`, or `never`."""
    states = {_one_dependency(root, job, kind, number) for kind, number in job.request.dependencies}
    return next((state for state in ("never", "waiting") if state in states), "ready")


def _one_dependency(root: Path, job: LocalJob, kind: str, number: int) -> str:
    if kind == "singleton":
        return "waiting" if any(_is_rival(other, job) for other in live_jobs(root)) else "ready"
    other = look_at(job_dir(root, number))
    if other is None:  # its folder was removed: nobody can say any more how it ended
        return "ready" if kind in {"after", "afterany"} else "never"
    if kind == "after" and other.started_at is not None:
        return "ready"
    if other.end is None:
        return "waiting"
    succeeded = other.end.state == "COMPLETED"
    return "ready" if {"afterok": succeeded, "afternotok": not succeeded}.get(kind, True) else "never"


def _is_rival(other: LocalJob, job: LocalJob) -> bool:
    same = (other.request.name, other.request.uid) == (job.request.name, job.request.uid)
    return same and other.job_id < job.job_id


def pending_reason(root: Path, job: LocalJob) -> str:
    """Why a job waits, in squeue's words."""
    reasons = {"waiting": "Dependency", "never": "DependencyNeverSatisfied"}
    return reasons.get(dependency_state(root, job), "Resources")


# --- the cluster -----------------------------------------------------------------------------------------------------


def read_config(root: Path) -> LocalClusterConfig:
    """The cluster's configuration; the defaults before anybody has opened it."""
    fact = read_fact(root / "cluster.json")
    return LocalClusterConfig(**fact) if fact is not None else LocalClusterConfig()


def write_config(root: Path, config: LocalClusterConfig) -> None:
    """Set the cluster's configuration; the last one counts, for waiting jobs too."""
    if read_fact(root / "cluster.json") != dataclasses.asdict(config):
        write_atomically(root / "cluster.json", json.dumps(dataclasses.asdict(config), indent=2).encode() + b"\n")


def root_of(environment: Mapping[str, str]) -> Path:
    """Where the environment says that the cluster is.

    Raises:
        PermanentError: It does not say.

    """
    value = environment.get(ROOT_VARIABLE, "")
    if not value:
        raise PermanentError(
            "no cluster", thing=ROOT_VARIABLE, advice="Use the variables that LocalCluster.launch_environment() returns"
        )
    return Path(value)


@contextlib.contextmanager
def schedule_lock(root: Path) -> Iterator[None]:
    """Hold the lock under which a job takes a slot. The kernel releases it with its holder's death."""
    with (root / "schedule.lock").open("ab") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        yield
