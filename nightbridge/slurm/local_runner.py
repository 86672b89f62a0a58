"""The process that runs one job of the embedded cluster, from its registration to its recorded end.

It is started by `local_submit` with the job's environment as its own, leaves the submitter's session, and adopts every
orphan of the job, so that nothing a job starts can leave its tree.
"""

import contextlib
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from nightbridge.files import write_atomically
from nightbridge.slurm.local_jobs import (
    JOB_VARIABLE,
    KILL_PATIENCE,
    ROOT_VARIABLE,
    JobEnd,
    LocalClusterConfig,
    LocalJob,
    all_jobs,
    cancel_requested_by,
    dependency_state,
    ended_ids,
    live_jobs,
    read_config,
    read_identity,
    read_job,
    schedule_lock,
    write_fact,
)
from nightbridge.slurm.local_names import fill_pattern, node_expression, spread_evenly, tasks_expression
from nightbridge.slurm.local_options import EarlySignal, parse_early_signal
from nightbridge.slurm.local_processes import (
    adopt_orphans,
    collect_children,
    descendants,
    identify,
    kill_until_gone,
    send_signal,
    signal_group,
    split_wait_status,
    start_session,
)
from nightbridge.slurm.local_shims import shims_dir

POLL_INTERVAL = 0.1
"""Seconds between two looks at the queue, the time limit, and whether somebody wants the job to end."""

_STOP_SIGNALS = frozenset({signal.SIGTERM, signal.SIGINT, signal.SIGHUP})
_AWAITED = _STOP_SIGNALS | {signal.SIGCHLD}


def main(arguments: list[str]) -> int:
    """Run the job of a folder: the whole life of the runner."""
    os.chdir(arguments[0])
    if os.fork():
        os._exit(0)  # the submitter waits for this one only
    os.setsid()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # a submitter that ignores its children hands that down
    signal.pthread_sigmask(signal.SIG_SETMASK, _AWAITED)
    adopt_orphans()
    folder = _wait_for_registration()
    if folder is None:
        return 0
    job = read_job(folder)
    assert job is not None
    with _nothing_left_behind(job):
        _run(job)
    return 0


def _wait_for_registration() -> Path | None:
    """Say who runs the job, wait until the submitter has registered it or died; return the job's folder, if any."""
    me = identify(os.getpid())
    assert me is not None
    write_fact(Path("runner.json").absolute(), me)
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


@contextlib.contextmanager
def _nothing_left_behind(job: LocalJob) -> Iterator[None]:
    """Whatever becomes of the runner: end the job's processes, then let the error show in runner.log."""
    try:
        yield
    except BaseException:
        _kill_tree(job)
        raise


def _root(job: LocalJob) -> Path:
    return job.folder.parents[1]


def _run(job: LocalJob) -> None:
    if (end := _wait_for_turn(job)) is None:
        end = _JobRun(job, read_config(_root(job))).to_its_end()
    if _is_registered(job):
        write_fact(job.folder / "end.json", end)


def _is_registered(job: LocalJob) -> bool:
    """Whether the job's folder is still there. A job whose folder somebody removed ends without a trace."""
    return (job.folder / "job.json").exists()


# --- waiting for a slot ----------------------------------------------------------------------------------------------


def _wait_for_turn(job: LocalJob) -> JobEnd | None:
    """Wait for the job's dependencies and a slot, and take it; return the end of a job that gets none."""
    ended = ended_ids(_root(job))
    while True:
        if not _is_registered(job):
            return JobEnd(state="CANCELLED", ended_at=time.time(), reason="its folder was removed")
        if (by := cancel_requested_by(job.folder)) is not None:
            return JobEnd(state="CANCELLED", ended_at=time.time(), cancelled_by=by)
        with schedule_lock(_root(job)):
            if _is_its_turn(job, ended):
                _write_json(job.folder / "started.json", {"at": time.time()})
                return None
        if signal.sigtimedwait(_STOP_SIGNALS, POLL_INTERVAL) is not None:
            return JobEnd(state="NODE_FAIL", ended_at=time.time(), reason="the runner was told to stop")


def _is_its_turn(job: LocalJob, ended: set[int]) -> bool:
    """Whether a slot is free after every older job that could start has got one. `ended` is kept between calls."""
    root = _root(job)
    ahead = 0
    for other in all_jobs(root, known=ended):
        if other.end is not None:
            ended.add(other.job_id)
        elif other.started_at is not None or _goes_before(other, job):
            ahead += 1
    return ahead < read_config(root).slots and dependency_state(root, job) == "ready"


def _goes_before(other: LocalJob, job: LocalJob) -> bool:
    return other.job_id < job.job_id and dependency_state(_root(job), other) == "ready"


def _write_json(path: Path, fact: dict[str, object]) -> None:
    write_atomically(path, json.dumps(fact).encode() + b"\n")


# --- running ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Stop:
    """Why a job is ended before it ends by itself, and when patience is over (monotonic clock)."""

    state: str
    kill_at: float
    reason: str = ""
    by: str = ""


class _JobRun:
    """A job that has its slot: its script, its logs, and the clock."""

    def __init__(self, job: LocalJob, config: LocalClusterConfig) -> None:
        self.job = job
        self.config = config
        self.began = time.monotonic()
        self.script_pid = 0
        self.script_status: int | None = None
        self.stop: _Stop | None = None
        self.early_signal: EarlySignal | None = parse_early_signal(job.request.signal) if job.request.signal else None
        self.stderr = -1

    def to_its_end(self) -> JobEnd:
        """Run the script until it, or the job, has ended and no process is left."""
        try:
            self._start_script()
        except OSError as error:
            reason = f"cannot open the job's output or folder: {error.strerror}: {error.filename}"
            return JobEnd(state="FAILED", ended_at=time.time(), exit_code=1, signal=0, reason=reason)
        while not self._is_over():
            caught = signal.sigtimedwait(_AWAITED, POLL_INTERVAL)
            self._collect()
            if self.stop is None and self.script_status is None:
                self._watch(told_to_stop=caught is not None and caught.si_signo in _STOP_SIGNALS)
        self._collect()
        _kill_tree(self.job)
        self._collect()
        return self._end()

    def _is_over(self) -> bool:
        if self.stop is None:
            return self.script_status is not None
        if time.monotonic() > self.stop.kill_at:
            return True
        # On cancel and time limit, what the script started may use the same grace, for instance for a checkpoint.
        return self.script_status is not None and not _tree(self.job)

    def _start_script(self) -> None:
        request, folder = self.job.request, self.job.folder
        environment = job_environment(self.job, self.config)
        os.chdir(request.directory)
        stdout = _open_log(self.job, request.output)
        self.stderr = _open_log(self.job, request.error) if request.error else os.dup(stdout)
        stdin = os.open(os.devnull, os.O_RDONLY)
        script = folder / "script"
        # The interpreter is named to the kernel: executing the file itself fails on file systems mounted noexec.
        argv = [*_interpreter(script), str(script), *request.arguments]
        self.script_pid = start_session(
            argv,
            environment=environment,
            directory=request.directory,
            stdin=stdin,
            stdout=stdout,
            stderr=self.stderr,
            signal_at_parents_death=signal.SIGKILL,
        )
        session = identify(self.script_pid)
        assert session is not None  # it is our child: not collected, it is at least a zombie
        write_fact(folder / "session.json", session)
        os.close(stdin)
        os.close(stdout)

    def _collect(self) -> None:
        ended = collect_children()
        if self.script_pid in ended:
            self.script_status = ended[self.script_pid]

    def _watch(self, *, told_to_stop: bool) -> None:
        """Look for reasons to end the job, and for the signal that it wants before its time limit."""
        limit = self.job.request.time_limit
        elapsed = time.monotonic() - self.began
        if told_to_stop:
            self._begin_stop("NODE_FAIL", reason="the runner was told to stop")
        elif not _is_registered(self.job):
            self._begin_stop("CANCELLED", reason="its folder was removed")
        elif (by := cancel_requested_by(self.job.folder)) is not None:
            self._begin_stop("CANCELLED", by=by)
        elif limit is not None and elapsed >= limit:
            self._begin_stop("TIMEOUT", reason="TimeLimit")
        elif limit is not None and self.early_signal and elapsed >= limit - self.early_signal.seconds_before:
            self._send_early_signal(self.early_signal)
            self.early_signal = None

    def _begin_stop(self, state: str, *, reason: str = "", by: str = "") -> None:
        self.stop = _Stop(state, time.monotonic() + self.config.kill_wait, reason, by)
        if _is_registered(self.job):
            write_atomically(self.job.folder / "ending", state.encode())
        os.write(self.stderr, _farewell(f"JOB {self.job.job_id}", state))
        for number in (signal.SIGCONT, signal.SIGTERM):
            signal_group(self.script_pid, number)

    def _send_early_signal(self, wish: EarlySignal) -> None:
        if wish.to_script:
            send_signal(self.script_pid, wish.number)
            return
        mine = _tree(self.job)
        for path in (self.job.folder / "steps").glob("*/srun.json"):
            srun = read_identity(path)
            if srun is not None and srun.pid in mine:
                send_signal(srun.pid, wish.number)  # srun hands it on to its tasks

    def _end(self) -> JobEnd:
        status = self.script_status
        code, number = split_wait_status(status) if status is not None else (None, None)
        if self.stop is not None:
            return JobEnd(
                state=self.stop.state,
                ended_at=time.time(),
                exit_code=code,
                signal=number,
                reason=self.stop.reason,
                cancelled_by=self.stop.by,
            )
        state = "COMPLETED" if status == 0 else "FAILED"
        reason = "" if status == 0 else "NonZeroExitCode" if code else "RaisedSignal"
        return JobEnd(state=state, ended_at=time.time(), exit_code=code, signal=number, reason=reason)


def _farewell(what: str, state: str) -> bytes:
    """The line that Slurm leaves in the log; people and tools look for `DUE TO TIME LIMIT`."""
    why = {"TIMEOUT": " DUE TO TIME LIMIT", "NODE_FAIL": " DUE TO NODE FAILURE"}.get(state, "")
    now = time.strftime("%Y-%m-%dT%H:%M:%S")
    return f"slurmstepd: error: *** {what} ON node1 CANCELLED AT {now}{why} ***\n".encode()


def _tree(job: LocalJob) -> set[int]:
    """Every process of the job. A job that this one submitted has a runner of its own, and is not of it."""
    others = {other.runner.pid for other in live_jobs(_root(job)) if other.job_id != job.job_id}
    return descendants(os.getpid(), without=others)


def _kill_tree(job: LocalJob) -> None:
    kill_until_gone(lambda: _tree(job), patience=KILL_PATIENCE)


def _interpreter(script: Path) -> list[str]:
    """Interpreter and its one optional argument from the first line, as execve(2) reads it."""
    with script.open("rb") as stream:
        words = stream.readline().decode(errors="surrogateescape")[2:].split(maxsplit=1)
    return [word.strip() for word in words] or ["/bin/sh"]


def _open_log(job: LocalJob, pattern: str) -> int:
    """Open an output file of the job, relative to its folder. Always appending: the runner writes there as well."""
    request = job.request
    values = {"j": job.job_id, "A": job.job_id, "J": job.job_id, "x": request.name, "u": request.user}
    name = fill_pattern(pattern, values | {"N": "node1", "n": 0, "t": 0, "s": "batch"})
    mode = 0 if request.append else os.O_TRUNC
    return os.open(Path(request.directory) / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND | mode, 0o666)


def job_environment(job: LocalJob, config: LocalClusterConfig) -> dict[str, str]:
    """The script's environment: the submitter's, and what Slurm tells a job (sbatch(1), "OUTPUT ENVIRONMENT")."""
    request, root = job.request, _root(job)
    nodes = node_expression(request.nodes)
    told: dict[str, object] = {
        "SLURM_CLUSTER_NAME": config.name,
        "SLURM_CPUS_ON_NODE": os.cpu_count() or 1,
        "SLURM_JOBID": job.job_id,
        "SLURM_JOB_ACCOUNT": request.account,
        "SLURM_JOB_ID": job.job_id,
        "SLURM_JOB_NAME": request.name,
        "SLURM_JOB_NODELIST": nodes,
        "SLURM_JOB_NUM_NODES": request.nodes,
        "SLURM_JOB_PARTITION": request.partition,
        "SLURM_JOB_QOS": "normal",
        "SLURM_JOB_UID": request.uid,
        "SLURM_JOB_USER": request.user,
        "SLURM_LOCALID": 0,
        "SLURM_NNODES": request.nodes,
        "SLURM_NODEID": 0,
        "SLURM_NODELIST": nodes,
        "SLURM_NPROCS": request.tasks,
        "SLURM_NTASKS": request.tasks,
        "SLURM_NTASKS_PER_NODE": request.tasks_per_node,
        "SLURM_PROCID": 0,
        "SLURM_SUBMIT_DIR": request.submit_dir,
        "SLURM_SUBMIT_HOST": os.uname().nodename,
        "SLURM_TASKS_PER_NODE": tasks_expression(spread_evenly(request.tasks, request.nodes)),
        "SLURMD_NODENAME": "node1",
        ROOT_VARIABLE: root,
        JOB_VARIABLE: job.folder,
        "PATH": os.pathsep.join((str(shims_dir(root)), os.environ.get("PATH", os.defpath))),
    }
    return dict(os.environ) | {name: str(value) for name, value in told.items()}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
