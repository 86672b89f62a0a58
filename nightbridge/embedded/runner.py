"""The process that runs one job of the embedded cluster, from its registration to its recorded end.

`sbatch.submit` starts it with the job's environment as its own. It leaves the submitter's session, and adopts
every orphan of the job, so that nothing a job starts can leave its tree.
"""

import contextlib
import dataclasses
import json
import os
import shutil
import signal
import time
from pathlib import Path

from nightbridge.embedded import jobs, notation, process_tree
from nightbridge.errors import NightbridgeError
from nightbridge.files import write_atomically

POLL_INTERVAL = 0.1
"""Seconds between two looks at the queue, the time limit, and requests to end the job."""

_BEAT_SECONDS = 15.0
"""From one sign of life to the next, for those who cannot see this process."""

_STOP_SIGNALS = frozenset({signal.SIGTERM, signal.SIGINT, signal.SIGHUP})
_AWAITED = _STOP_SIGNALS | {signal.SIGCHLD}
_UNWRITTEN = (OSError, NightbridgeError)
"""What writing meets on a disk that is full, often of the job's own checkpoints: it decides about no job."""


def main(arguments: list[str]) -> int:
    """Run the job of a folder: the whole life of the runner."""
    os.chdir(arguments[0])
    if os.fork():
        os._exit(0)  # the submitter waits for this one only
    os.setsid()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # a submitter that ignores its children hands that down
    signal.pthread_sigmask(signal.SIG_SETMASK, _AWAITED)
    process_tree.adopt_orphans()
    folder = _wait_for_registration()
    if folder is None:
        return 0
    job = jobs.read_job(folder)
    assert job is not None
    try:
        _record_end(job, _wait_for_turn(job) or _JobRun(job, jobs.read_cluster_config(job.root)).to_its_end())
    except BaseException:  # shown in runner.log; what it was makes no difference to the job's processes
        _kill_tree(job)
        raise
    return 0


def _wait_for_registration() -> Path | None:
    """Record this process, wait until the submitter has registered the job or died; return the job's folder, if any."""
    me = process_tree.identify(os.getpid())
    assert me is not None
    jobs.write_record(Path("runner.json").absolute(), me)
    os.write(1, b"ready\n")
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 1)
    os.read(0, 1)  # the submitter never writes: it closes, or dies
    os.dup2(null, 0)
    os.close(null)
    # The kernel knows what the folder is called now.
    folder = Path(os.getcwd())
    if folder.name.isdigit():
        return folder
    shutil.rmtree(folder, ignore_errors=True)
    return None


def _wait_for_turn(job: jobs.LocalJob) -> jobs.JobEnd | None:
    """Wait for the job's dependencies and a slot, and take it; return the end of a job that gets none."""
    # Not ahead of itself: a file server may report as failed that it has the slot, and have written it.
    ended = jobs.ended_ids(job.root) | {job.job_id}
    caught, place, look_at = None, 0, 0.0
    while (end := _interruption(job, caught)) is None:
        if time.monotonic() >= look_at:
            with contextlib.suppress(*_UNWRITTEN), jobs.schedule_lock(job.root):
                place = _place_in_queue(job, ended)
                if place == 0 and jobs.dependency_state(job) == "ready":
                    write_atomically(job.folder / "started.json", json.dumps({"at": time.time()}).encode() + b"\n")
                    return None
            # Each look reads the records of every job: the farther back this one is, the rarer it looks.
            look_at = time.monotonic() + POLL_INTERVAL * (place - 1)
        caught = signal.sigtimedwait(_STOP_SIGNALS, POLL_INTERVAL)
    return end


def _record_end(job: jobs.LocalJob, end: jobs.JobEnd) -> None:
    """Record the job's end as soon as the disk takes it; a runner that is gone before is a failure of the node."""
    caught = None
    while caught is None:
        _give_sign_of_life(job)
        with contextlib.suppress(*_UNWRITTEN):
            if _is_registered(job):
                jobs.write_record(job.folder / "end.json", end)
            return
        caught = signal.sigtimedwait(_STOP_SIGNALS, POLL_INTERVAL)


def _is_registered(job: jobs.LocalJob) -> bool:
    """Whether the job's folder is still there. A job whose folder was removed ends without a trace."""
    return (job.folder / "job.json").exists()


def _interruption(job: jobs.LocalJob, caught: signal.struct_siginfo | None) -> jobs.JobEnd | None:
    """How a job ends that is stopped from outside; None while it is not."""
    _give_sign_of_life(job)
    if caught is not None and caught.si_signo in _STOP_SIGNALS:
        return jobs.JobEnd("NODE_FAIL", time.time(), reason="the runner was stopped")
    if (job.folder / "end.json").exists():
        return jobs.JobEnd("NODE_FAIL", time.time(), reason="the runner was silent for too long")
    if not _is_registered(job):
        return jobs.JobEnd("CANCELLED", time.time(), reason="its folder was removed")
    if (request := jobs.read_record(job.folder / "cancel.json")) is not None:
        return jobs.JobEnd("CANCELLED", time.time(), cancelled_by=request["by"])
    return None


def _give_sign_of_life(job: jobs.LocalJob) -> None:
    path = job.folder / "runner.json"
    with contextlib.suppress(OSError):  # the file system is away for a moment, or the job's folder was removed
        # The file server's clock may be ahead of this host's.
        if abs(time.time() - path.stat().st_mtime) > _BEAT_SECONDS:
            os.utime(path)


def _place_in_queue(job: jobs.LocalJob, ended: set[int]) -> int:
    """How many jobs have to end before a slot is free after every older job that could start has got one.

    `ended`, which names the job itself as well, is kept between calls.
    """
    ahead = 0
    for other in jobs.all_jobs(job.root, known=ended):
        if other.end is not None:
            ended.add(other.job_id)
        elif other.started_at is not None or (other.job_id < job.job_id and jobs.dependency_state(other) == "ready"):
            ahead += 1
    return max(0, ahead + 1 - jobs.read_cluster_config(job.root).slots)


class _JobRun:
    """A job that has its slot: its script, its logs, and the clock."""

    def __init__(self, job: jobs.LocalJob, config: jobs.LocalClusterConfig) -> None:
        self.job = job
        self.config = config
        self.began = time.monotonic()
        self.script_pid = 0
        self.script_end: process_tree.ChildEnd | None = None
        self.stop: jobs.JobEnd | None = None  # before the script ends by itself
        self.kill_at = 0.0
        self.stderr = -1

    def to_its_end(self) -> jobs.JobEnd:
        """Run the script until it, or the job, has ended and no process is left."""
        try:
            self._start_script()
        except OSError as error:
            reason = f"cannot open the job's output or folder: {error.strerror}: {error.filename}"
            return jobs.JobEnd(state="FAILED", ended_at=time.time(), exit_code=1, signal=0, reason=reason)
        while not self._is_over():
            caught = signal.sigtimedwait(_AWAITED, POLL_INTERVAL)
            self._collect()
            if self.stop is None and self.script_end is None:
                self._watch(caught)
        self._collect()
        _kill_tree(self.job)
        self._collect()
        return self._end()

    def _is_over(self) -> bool:
        if self.stop is None:
            return self.script_end is not None
        if time.monotonic() > self.kill_at:
            return True
        # On cancel and time limit, what the script started may use the same grace, for instance for a checkpoint.
        return self.script_end is not None and not _tree(self.job)

    def _start_script(self) -> None:
        request, script = self.job.request, self.job.folder / "script"
        environment = job_environment(self.job, self.config)
        os.chdir(request.directory)
        stdout = _open_log(self.job, request.output)
        self.stderr = _open_log(self.job, request.error) if request.error else os.dup(stdout)
        stdin = os.open(os.devnull, os.O_RDONLY)
        # The interpreter is named to the kernel: executing the file itself fails on file systems mounted noexec.
        argv = [*_interpreter(script), str(script)]
        self.script_pid = process_tree.start_session(argv, environment, request.directory, (stdin, stdout, self.stderr))
        os.close(stdin)
        os.close(stdout)

    def _collect(self) -> None:
        while (child := process_tree.collect_child()) is not None:
            if child.pid == self.script_pid:
                self.script_end = child

    def _watch(self, caught: signal.struct_siginfo | None) -> None:
        """Look for a reason to end the job, and begin to."""
        limit = self.job.request.time_limit
        self.stop = _interruption(self.job, caught)
        if self.stop is None and limit is not None and time.monotonic() - self.began >= limit:
            self.stop = jobs.JobEnd("TIMEOUT", time.time(), reason="TimeLimit")
        if self.stop is None:
            return
        self.kill_at = time.monotonic() + self.config.kill_wait
        with contextlib.suppress(*_UNWRITTEN):
            if _is_registered(self.job):
                write_atomically(self.job.folder / "ending", self.stop.state.encode())
        with contextlib.suppress(OSError):
            os.write(self.stderr, notation.farewell(f"JOB {self.job.job_id} ON node1", self.stop.state))
        for number in (signal.SIGCONT, signal.SIGTERM):
            process_tree.signal_group(self.script_pid, number)

    def _end(self) -> jobs.JobEnd:
        script = self.script_end
        code, number = (script.code, script.signal) if script is not None else (None, None)
        if self.stop is not None:
            return dataclasses.replace(self.stop, ended_at=time.time(), exit_code=code, signal=number)
        failure = "NonZeroExitCode" if code else "RaisedSignal" if number else ""
        return jobs.JobEnd("FAILED" if failure else "COMPLETED", time.time(), code, number, failure)


def _tree(job: jobs.LocalJob) -> set[int]:
    """Every process of the job. A job that this one submitted has a runner of its own, and is not of it."""
    live = set(jobs.job_ids(job.root)) - jobs.ended_ids(job.root) - {job.job_id}
    found = (jobs.read_job(jobs.job_dir(job.root, job_id)) for job_id in live)
    # One of another host or container may have the number of a process of this job.
    others = {other.runner.pid for other in found if other and process_tree.identify(other.runner.pid) == other.runner}
    return process_tree.descendants(os.getpid(), without=others)


def _kill_tree(job: jobs.LocalJob) -> None:
    process_tree.kill_until_gone(lambda: _tree(job), patience=jobs.KILL_PATIENCE)


def _interpreter(script: Path) -> list[str]:
    """Interpreter and its one optional argument from the first line, as execve(2) reads it."""
    with script.open("rb") as stream:
        words = stream.readline().decode(errors="surrogateescape")[2:].split(maxsplit=1)
    return [word.strip() for word in words] or ["/bin/sh"]


def _open_log(job: jobs.LocalJob, pattern: str) -> int:
    """Open an output file of the job, relative to its folder. Always appending: the runner writes there as well."""
    request = job.request
    values = {"j": job.job_id, "A": job.job_id, "J": job.job_id, "x": request.name, "u": request.user}
    name = notation.fill_pattern(pattern, values | {"N": "node1", "n": 0, "t": 0, "s": "batch"})
    mode = 0 if request.append else os.O_TRUNC
    return os.open(Path(request.directory) / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND | mode, 0o666)


def job_environment(job: jobs.LocalJob, config: jobs.LocalClusterConfig) -> dict[str, str]:
    """The script's environment: the submitter's, and what Slurm adds (sbatch(1), "OUTPUT ENVIRONMENT")."""
    request = job.request
    nodes, counts = job.hosts, notation.spread_evenly(request.tasks, request.nodes)
    added: dict[str, object] = notation.layout_variables(nodes, counts, task=0) | {
        "SLURM_CLUSTER_NAME": config.name, "SLURM_CPUS_ON_NODE": os.cpu_count() or 1,
        "SLURM_JOBID": job.job_id, "SLURM_JOB_ID": job.job_id, "SLURM_JOB_NAME": request.name,
        "SLURM_JOB_ACCOUNT": request.account, "SLURM_JOB_PARTITION": request.partition, "SLURM_JOB_QOS": "normal",
        "SLURM_JOB_UID": request.uid, "SLURM_JOB_USER": request.user,
        "SLURM_JOB_NODELIST": notation.node_expression(nodes), "SLURM_JOB_NUM_NODES": request.nodes,
        "SLURM_NTASKS_PER_NODE": request.tasks_per_node,
        "SLURM_SUBMIT_DIR": request.submit_dir, "SLURM_SUBMIT_HOST": os.uname().nodename,
        jobs.JOB_VARIABLE: job.folder, "PATH": jobs.path_with_shims(job.root),
    }  # fmt: skip
    return dict(os.environ) | {name: str(value) for name, value in added.items()}
