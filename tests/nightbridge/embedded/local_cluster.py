"""What the tests of the embedded cluster share: a cluster in a folder of its own that leaves no process behind."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from nightbridge.embedded.jobs import all_jobs
from nightbridge.models import ClusterSettings, JobStatus
from nightbridge.slurm.local import LocalCluster
from nightbridge.slurm.states import TERMINAL
from tests.waiting import wait_until

KILL_WAIT = 1.0


def status(cluster: LocalCluster, job_id: int) -> JobStatus:
    return cluster.states([job_id])[job_id]


def wait_for_end(cluster: LocalCluster, job_id: int) -> JobStatus:
    wait_until(lambda: status(cluster, job_id).state in TERMINAL, f"the end of job {job_id}")
    return status(cluster, job_id)


def wait_for_state(cluster: LocalCluster, job_id: int, state: str) -> None:
    wait_until(lambda: status(cluster, job_id).state.value == state, f"job {job_id} to be {state}")


def wait_for_text(path: Path, text: str = "") -> str:
    """Wait until a file has a text (any, when none is named); return all of it."""
    wait_until(
        lambda: path.exists() and path.stat().st_size > 0 and text in path.read_text(), f"{text!r} in {path.name}"
    )
    return path.read_text()


def write_script(path: Path, body: str) -> Path:
    """A batch script as NeMo-Run leaves it: not executable."""
    path.write_text(f"#!/bin/bash\n{body}\n")
    return path


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def processes_of(root: Path) -> dict[int, str]:
    """Every running process that has to do with a cluster: its commands, runners, and what jobs started."""
    found = {}
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) != os.getpid() and is_running(int(name)):
            with contextlib.suppress(OSError):
                command = Path(f"/proc/{name}/cmdline").read_bytes()
                environment = Path(f"/proc/{name}/environ").read_bytes()
                if str(root).encode() in command + environment:
                    found[int(name)] = command.replace(b"\0", b" ").decode(errors="replace")
    return found


@contextlib.contextmanager
def local_cluster(folder: Path, *, slots: int = 2) -> Iterator[LocalCluster]:
    """A cluster whose jobs are cancelled at the end; a process that is left fails the test."""
    cluster = LocalCluster(ClusterSettings(name="here", slots=slots), folder / "cluster", kill_wait=KILL_WAIT)
    try:
        yield cluster
    finally:
        for job in all_jobs(cluster.root):
            if job.end is None:
                cluster.cancel(job.job_id)
        for job in all_jobs(cluster.root):
            wait_for_end(cluster, job.job_id)
        wait_until(lambda: not processes_of(cluster.root), f"no process: {processes_of(cluster.root)}")
