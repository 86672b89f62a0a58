"""The embedded cluster's state: a folder for each job, every record a file that is written once.

    <root>/cluster.json           how many jobs run at once, how long a job may take to end
    <root>/bin/                   sbatch, srun, squeue... for PATH
    <root>/schedule.lock          locked while a job takes a slot
    <root>/jobs/<id>/             appears in one piece, by a rename, when the job is submitted
        job.json                  the request; never the environment, which may hold secrets
        runner.json               the process that runs the job; its time is the runner's last sign of life
        script                    the batch script as submitted
        started.json              it has a slot
        cancel.json               a request to end it
        ending                    why it is being ended, while its processes have time to do so
        end.json                  how it ended
        runner.log                the runner's own output
        steps/<n>/                one for each step

Any process can query: one that finds a runner dead without an end records NODE_FAIL, after killing what remains. A
runner on another host or in another container is dead when it has been silent for long; should it come back, it finds
its end recorded, and ends its job.
Standard library only, as everything that srun imports: it starts many times a night, and must start fast.
"""

import contextlib
import dataclasses
import fcntl
import json
import os
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from nightbridge.embedded.notation import node_expression, simulated_nodes
from nightbridge.embedded.process_tree import (
    ProcessIdentity,
    is_elsewhere,
    is_gone,
    kill_until_gone,
    processes_with_variable,
)
from nightbridge.files import create_exclusively, write_atomically

JOB_VARIABLE = "NIGHTBRIDGE_LOCAL_JOB"
"""Environment variable that marks every process of a job; its value is the job's folder."""

KILL_PATIENCE = 10.0
"""Seconds for which killing the rest of a job or step is tried. The kernel can hold a process that long."""

SILENCE_SECONDS = 180.0
"""A runner that cannot be seen, and has given no sign of life for so long, is dead."""

_Record = TypeVar("_Record", "LocalClusterConfig", "JobRequest", "JobEnd", ProcessIdentity)


@dataclass(frozen=True)
class LocalClusterConfig:
    """What runners and commands need to know of the cluster. `kill_wait`: seconds between SIGTERM and SIGKILL."""

    name: str = "local"
    slots: int = 2
    kill_wait: float = 5.0


@dataclass(frozen=True)
class JobRequest:
    """What was requested of sbatch. Times are seconds since the epoch, limits seconds, patterns not filled in."""

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
    dependencies: tuple[tuple[str, int], ...]
    hosts: tuple[str, ...] = ()


@dataclass(frozen=True)
class JobEnd:
    """How a job ended. Exit code and signal are the script's; None when it never ran or its end was not seen."""

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
    def root(self) -> Path:
        """The folder of its cluster."""
        return self.folder.parents[1]

    @property
    def state(self) -> str:
        """Slurm's name of its state."""
        if self.end is not None:
            return self.end.state
        if self.started_at is None:
            return "PENDING"
        return "COMPLETING" if self.is_ending else "RUNNING"

    @property
    def hosts(self) -> list[str]:
        """The names of its nodes; the first ones where its request names none."""
        return list(self.request.hosts) or simulated_nodes(self.request.nodes)

    @property
    def nodes(self) -> str:
        """The node expression of its nodes; empty before it has any."""
        return node_expression(self.hosts) if self.started_at is not None else ""


def job_dir(root: Path, job_id: int | str) -> Path:
    """A job's folder."""
    return root / "jobs" / str(job_id)


def path_with_shims(root: Path) -> str:
    """The PATH of this process with a cluster's commands first."""
    return os.pathsep.join((str(root / "bin"), os.environ.get("PATH", os.defpath)))


def write_record(path: Path, record: Any) -> bool:
    """Write a dataclass as JSON, once; return whether this call wrote it. A reader sees all of it or nothing."""
    return create_exclusively(path, json.dumps(dataclasses.asdict(record), indent=2).encode() + b"\n")


def read_record(path: Path) -> dict[str, Any] | None:
    """Read a record; None when it has not been written."""
    try:
        record = json.loads(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        return None
    assert isinstance(record, dict)
    return record


def _read_as(kind: type[_Record], record: dict[str, Any]) -> _Record:
    """A record without what only a newer release gives it."""
    known = {field.name for field in dataclasses.fields(kind)}
    return kind(**{name: value for name, value in record.items() if name in known})


def read_job(folder: Path) -> LocalJob | None:
    """Read a job's folder as it is; None when there is no such job."""
    request = read_record(folder / "job.json")
    runner = read_record(folder / "runner.json")
    if request is None or runner is None:
        return None
    # The end first: what comes before it in a job's life is then there for sure.
    end = read_record(folder / "end.json")
    is_ending = (folder / "ending").exists()
    started = read_record(folder / "started.json")
    request["dependencies"] = tuple((str(kind), int(number)) for kind, number in request["dependencies"])
    return LocalJob(
        job_id=int(folder.name),
        folder=folder,
        request=_read_as(JobRequest, request),
        runner=_read_as(ProcessIdentity, runner),
        end=_read_as(JobEnd, end) if end is not None else None,
        is_ending=is_ending,
        started_at=float(started["at"]) if started is not None else None,
    )


def inspect(folder: Path) -> LocalJob | None:
    """Read a job, and record NODE_FAIL if its runner died without recording an end; None when there is no such job."""
    job = read_job(folder)
    if job is None or job.end is not None or not (is_gone(job.runner) or _is_silent(job)):
        return job
    # The runner may have recorded the end and exited between the two looks.
    if not (folder / "end.json").exists():
        _record_node_failure(job)
    return read_job(folder)


def _is_silent(job: LocalJob) -> bool:
    """Whether a runner that cannot be seen here has given no sign of life for long, by the file system's own clock."""
    if not is_elsewhere(job.runner) or not job.runner.process_table:  # those without one gave no signs
        return False
    clock = job.root / "schedule.lock"
    clock.touch()
    return clock.stat().st_mtime - (job.folder / "runner.json").stat().st_mtime > SILENCE_SECONDS


def _record_node_failure(job: LocalJob) -> None:
    # First the kill: once the failure is known, the next attempt may start in the same place. Without this process: the
    # job itself may query, through one of the commands.
    def remaining() -> set[int]:
        # The runner names the folder as the kernel does: a workspace may be reached through a link.
        return processes_with_variable(JOB_VARIABLE, str(job.folder.resolve())) - {os.getpid()}

    is_killed = kill_until_gone(remaining, patience=KILL_PATIENCE)
    reason = "the runner died" if is_killed else "the runner died; processes remain"
    write_record(job.folder / "end.json", JobEnd(state="NODE_FAIL", ended_at=time.time(), reason=reason))


def job_ids(root: Path) -> list[int]:
    """The ids of every job there ever was, oldest first."""
    try:
        names = os.listdir(root / "jobs")
    except FileNotFoundError:
        return []
    return sorted(int(name) for name in names if name.isdigit())


def all_jobs(root: Path, *, known: Collection[int] = ()) -> Iterator[LocalJob]:
    """Inspect every job except those `known`, oldest first."""
    for job_id in job_ids(root):
        if job_id not in known and (job := inspect(job_dir(root, job_id))) is not None:
            yield job


def ended_ids(root: Path) -> set[int]:
    """The ids of the jobs whose end is recorded. Of these a year has thousands: each costs one stat."""
    return {job_id for job_id in job_ids(root) if (job_dir(root, job_id) / "end.json").exists()}


def request_cancel(job: LocalJob, by: str) -> None:
    """Request a job's end from its runner. Only the first request counts."""
    create_exclusively(job.folder / "cancel.json", json.dumps({"by": by, "at": time.time()}).encode() + b"\n")


def dependency_state(job: LocalJob) -> str:
    """Whether a job's dependencies let it start: `ready`, `waiting`, or `never`."""
    states = {_one_dependency(job.root, kind, number) for kind, number in job.request.dependencies}
    return next((state for state in ("never", "waiting") if state in states), "ready")


def _one_dependency(root: Path, kind: str, number: int) -> str:
    other = inspect(job_dir(root, number))
    if other is None:  # its folder was removed: how it ended is unknown
        return "never" if kind == "afterok" else "ready"
    if kind == "after" and other.started_at is not None:
        return "ready"
    if other.end is None:
        return "waiting"
    return "never" if kind == "afterok" and other.end.state != "COMPLETED" else "ready"


def reason(job: LocalJob) -> str:
    """Why a job waits, or how it ended, in squeue's words; empty for neither."""
    if job.end is not None:
        return job.end.reason
    if job.started_at is not None:
        return ""
    return {"waiting": "Dependency", "never": "DependencyNeverSatisfied"}.get(dependency_state(job), "Resources")


def read_cluster_config(root: Path) -> LocalClusterConfig:
    """The cluster's configuration; the defaults before it was first opened."""
    return _read_as(LocalClusterConfig, read_record(root / "cluster.json") or {})


def write_config(root: Path, config: LocalClusterConfig) -> None:
    """Set the cluster's configuration; the last one counts, for waiting jobs too."""
    if read_record(root / "cluster.json") != dataclasses.asdict(config):
        write_atomically(root / "cluster.json", json.dumps(dataclasses.asdict(config), indent=2).encode() + b"\n")


@contextlib.contextmanager
def schedule_lock(root: Path) -> Iterator[None]:
    """Hold the lock under which a job takes a slot. The kernel releases it with its holder's death."""
    with (root / "schedule.lock").open("ab") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        yield
