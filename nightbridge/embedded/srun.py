"""srun of the embedded cluster: the tasks of all simulated nodes, side by side on this machine.

Each task is a session of its own. Its output passes through srun line by line, so that lines of different tasks never
mix, however the tasks buffer.
"""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from nightbridge.embedded import notation, process_tree
from nightbridge.embedded.jobs import JOB_VARIABLE, KILL_PATIENCE, LocalJob, read_cluster_config, read_job
from nightbridge.errors import InvalidInput, PermanentError
from nightbridge.sbatch_options import split_options

_POLL_INTERVAL = 0.1
_LONGEST_LINE = 65536
"""Bytes of a line that are kept together."""
_DRAIN_SECONDS = 2.0
"""How long to wait for the last output, once every task has ended: a process that left its session may hold a pipe."""
_ENDING = frozenset({signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT})
_FORWARDED = _ENDING | {signal.SIGUSR1, signal.SIGUSR2}


def main(arguments: list[str]) -> int:
    """Run a step; return the highest exit code of its tasks, where a killed one counts as 128 + signal.

    Raises:
        InvalidInput: An option is wrong, or requests more than the job has.
        PermanentError: This is not inside a job.
    """
    options, argv = split_options(arguments, notation.SRUN)
    notation.check_export(options, "srun")
    if not argv:
        raise InvalidInput("no command to run", subject="srun")
    job = read_job(Path(os.environ[JOB_VARIABLE])) if JOB_VARIABLE in os.environ else None
    if job is None:
        raise PermanentError("not inside a job", subject="srun", advice="Start steps from batch scripts")
    return _Step(job, options, argv, os.environ).to_its_end()


class _Step:
    """What one srun runs: its program, on which nodes how many tasks, their output, and why it is ended, if it is.

    It gets the job's next number. `options` are srun's by their long names; `environment` is srun's own.
    """

    def __init__(
        self, job: LocalJob, options: Mapping[str, str], argv: Sequence[str], environment: Mapping[str, str]
    ) -> None:
        nodes = _choose_nodes(options, job)
        counts = [count for count in _spread_tasks(options, len(nodes), environment) if count]
        directory, wait = options.get("chdir") or os.getcwd(), options.get("wait", "0")
        if not os.path.isdir(directory):
            raise InvalidInput("no such folder for --chdir", subject=directory)
        if not wait.isdigit():
            raise InvalidInput("invalid number of seconds for --wait", subject=wait)
        self.job = job
        self.number = _claim_number(job)
        self.name = f"{job.job_id}.{self.number}"  # Slurm's
        self.argv = argv
        self.options = options
        self.nodes, self.tasks_by_node = nodes[: len(counts)], counts
        self.layout = notation.task_layout(counts)  # node and local number of every task
        self.directory = directory
        self.environment = environment
        self.kill_on_bad_exit = options.get("kill-on-bad-exit", "0") not in {"0", "no"}
        self.wait = float(wait)
        self.kill_wait = read_cluster_config(job.root).kill_wait
        self.error = 2  # where the tasks' errors go
        self.pipes: list[tuple[int, int]] = []  # from a task, to a file
        self.running: dict[int, int] = {}  # pid -> task
        self.sessions: set[int] = set()  # of all tasks, ended ones too
        self.codes: list[int] = []
        self.kill_at: float | None = None
        self.first_exit_at: float | None = None
        self.writing = threading.Lock()

    def task_environment(self, task: int) -> dict[str, str]:
        """One task's environment: srun's, and Slurm's additions (srun(1), "OUTPUT ENVIRONMENT VARIABLES")."""
        nodes, counts, layout = self.nodes, self.tasks_by_node, self.layout
        added: dict[str, object] = notation.layout_variables(nodes, counts, task) | {
            "SLURM_GTIDS": ",".join(str(other) for other, place in enumerate(layout) if place[0] == layout[task][0]),
            "SLURM_JOB_ID": self.job.job_id, "SLURM_STEPID": self.number, "SLURM_STEP_ID": self.number,
            "SLURM_STEP_NODELIST": notation.node_expression(nodes), "SLURM_STEP_NUM_NODES": len(nodes),
            "SLURM_STEP_NUM_TASKS": len(layout), "SLURM_STEP_TASKS_PER_NODE": notation.tasks_expression(counts),
            "SLURM_LAUNCH_NODE_IPADDR": "127.0.0.1", "SLURM_SUBMIT_DIR": os.getcwd(),
        }  # fmt: skip
        return dict(self.environment) | {name: str(value) for name, value in added.items()}

    def to_its_end(self) -> int:
        """Start all tasks, forward output and signals, until every task has ended; return the step's exit code."""
        awaited = {number for number in _FORWARDED if signal.getsignal(number) != signal.SIG_IGN} | {signal.SIGCHLD}
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_BLOCK, awaited)
        try:
            self._start_tasks()
            # Threads only now: what forks must have one thread.
            readers = [threading.Thread(target=self._copy_output, args=pipe, daemon=True) for pipe in self.pipes]
            for reader in readers:
                reader.start()
            while self.running:
                caught = signal.sigtimedwait(awaited, _POLL_INTERVAL)
                if caught is not None and caught.si_signo != signal.SIGCHLD:
                    self._forward(caught.si_signo)
                self._collect()
                self._watch_clock()
        finally:
            # What the tasks left running in their sessions.
            process_tree.kill_until_gone(self._members, patience=KILL_PATIENCE)
        drained_at = time.monotonic() + _DRAIN_SECONDS
        for reader in readers:
            reader.join(max(0.0, drained_at - time.monotonic()))
        return max(self.codes)

    def _members(self) -> set[int]:
        return {entry.pid for entry in process_tree.running_processes().values() if entry.session in self.sessions}

    def _start_tasks(self) -> None:
        null = os.open(os.devnull, os.O_RDONLY)
        to_output = self.options.get("output")
        # Without --error, errors go where the output goes (srun(1)).
        to_error = self.options.get("error", to_output)
        output = self._open(to_output, 1)
        self.error = output if to_error is not None and to_error == to_output else self._open(to_error, 2)
        for task in range(len(self.layout)):
            stdout = self._new_pipe(output)
            stderr = stdout if output == self.error else self._new_pipe(self.error)
            streams = (0 if len(self.layout) == 1 else null, stdout, stderr)
            pid = process_tree.start_session(self.argv, self.task_environment(task), self.directory, streams)
            for descriptor in {stdout, stderr}:
                os.close(descriptor)
            self.running[pid] = task
            self.sessions.add(pid)

    def _open(self, pattern: str | None, standard: int) -> int:
        """The file that an option names, which all tasks share; srun's own output without."""
        if pattern is None:
            return standard
        request = self.job.request
        letters = {"A": self.job.job_id, "j": self.job.job_id, "J": self.name, "s": self.number}
        name = notation.fill_pattern(pattern, letters | {"u": request.user, "x": request.name})
        try:
            return os.open(name, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_TRUNC, 0o666)
        except OSError as error:
            raise PermanentError(f"cannot open output file: {error.strerror}", subject=name) from error

    def _new_pipe(self, target: int) -> int:
        reading, writing = os.pipe()
        self.pipes.append((reading, target))
        return writing

    def _copy_output(self, reading: int, target: int) -> None:
        """Copy a task's output in whole lines. A target that fails is reported once; the task must not block."""
        writable = True
        with open(reading, "rb") as pipe:
            for line in iter(lambda: pipe.readline(_LONGEST_LINE), b""):
                try:
                    if writable:
                        self._write(target, line)
                except OSError as error:
                    writable = False
                    self._say(f"srun: error: cannot write the output of a task: {error.strerror}\n")

    def _write(self, target: int, data: bytes) -> None:
        with self.writing:
            while data:
                data = data[os.write(target, data) :]

    def _say(self, text: str) -> None:
        with contextlib.suppress(OSError):
            self._write(2, text.encode())

    def _forward(self, number: int) -> None:
        for pid in self.running:
            process_tree.signal_group(pid, number)
        if number in _ENDING and self.kill_at is None:
            self._begin_end()

    def _collect(self) -> None:
        for pid, task in list(self.running.items()):
            if (ended := process_tree.ended_child(pid)) is None:
                continue
            del self.running[pid]
            _, code, number = ended
            self.codes.append(128 + number if number else code)
            self.first_exit_at = self.first_exit_at or time.monotonic()
            if code or number:
                how = signal.strsignal(number) if number else f"Exited with exit code {code}"
                self._say(f"srun: error: {self.nodes[self.layout[task][0]]}: task {task}: {how}\n")
                if self.kill_on_bad_exit and self.running:
                    self._terminate("Terminating")

    def _terminate(self, what: str) -> None:
        """Begin to end all remaining tasks: SIGTERM now, SIGKILL when patience is over."""
        if self.kill_at is not None:
            return
        self._say(f"srun: {what} StepId={self.name}\n")
        self._begin_end()
        for pid in self.running:
            for number in (signal.SIGCONT, signal.SIGTERM):
                process_tree.signal_group(pid, number)

    def _begin_end(self) -> None:
        """Start the clock, and leave in the tasks' log the line that Slurm leaves there."""
        self.kill_at = time.monotonic() + self.kill_wait
        ending = self.job.folder / "ending"
        line = notation.farewell(f"STEP {self.name} ON {self.nodes[0]}", ending.read_text() if ending.exists() else "")
        with contextlib.suppress(OSError):
            self._write(self.error, line)

    def _watch_clock(self) -> None:
        now = time.monotonic()
        if self.kill_at is not None and now >= self.kill_at:
            for pid in self.running:
                process_tree.signal_group(pid, signal.SIGKILL)
        elif self.wait and self.first_exit_at is not None and now >= self.first_exit_at + self.wait:
            self._terminate("First task exited a while ago; terminating")


def _choose_nodes(options: Mapping[str, str], job: LocalJob) -> list[str]:
    """The named nodes, or the first ones of the job."""
    chosen = of_job = job.hosts
    if "nodelist" in options:
        chosen = notation.hostnames(options["nodelist"])
        if not set(chosen) <= set(of_job):
            raise InvalidInput("requested nodes are not in this job", subject=options["nodelist"])
    count = notation.parse_count(options["nodes"], "nodes") if "nodes" in options else len(chosen)
    if count > len(chosen):
        raise InvalidInput("more nodes than the job has or --nodelist names", subject=f"--nodes={count}")
    return chosen[:count]


def _spread_tasks(options: Mapping[str, str], nodes: int, environment: Mapping[str, str]) -> list[int]:
    """Tasks of each node: --ntasks, else --ntasks-per-node, else the job's."""
    value = options.get("ntasks-per-node") or environment.get("SLURM_NTASKS_PER_NODE", "1")
    limit = notation.parse_count(value, "ntasks-per-node")
    if "ntasks" not in options:
        return [limit] * nodes
    tasks = notation.parse_count(options["ntasks"], "ntasks")
    if "ntasks-per-node" in options and tasks > limit * nodes:
        raise InvalidInput("more tasks than the nodes may have", subject=f"--ntasks={tasks}")
    return notation.spread_evenly(tasks, nodes)


def _claim_number(job: LocalJob) -> int:
    """Take the job's next step number; mkdir gives each to one srun only."""
    steps = job.folder / "steps"
    steps.mkdir(exist_ok=True)
    number = len(os.listdir(steps))
    while True:
        try:
            (steps / str(number)).mkdir()
            return number
        except FileExistsError:
            number += 1
