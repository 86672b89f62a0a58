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
from dataclasses import dataclass
from pathlib import Path

from nightbridge.embedded import notation, process_tree
from nightbridge.embedded.jobs import JOB_VARIABLE, KILL_PATIENCE, LocalJob, read_config, read_job
from nightbridge.errors import InvalidInput, PermanentError
from nightbridge.sbatch_options import split_options

_POLL_INTERVAL = 0.1
_LONGEST_LINE = 65536
"""Bytes of a line that are kept together."""
_DRAIN_SECONDS = 2.0
"""How long to wait for the last output, once every task has ended: a process that left its session may hold a pipe."""
_ENDING = frozenset({signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT})
_FORWARDED = _ENDING | {signal.SIGUSR1, signal.SIGUSR2}


@dataclass(frozen=True)
class Step:
    """What one srun runs: its program, and on which nodes how many tasks."""

    job: LocalJob
    number: int
    argv: tuple[str, ...]
    nodes: tuple[str, ...]
    tasks_by_node: tuple[int, ...]
    directory: str
    environment: Mapping[str, str]
    options: Mapping[str, str]
    kill_on_bad_exit: bool
    wait: float
    kill_wait: float

    @property
    def name(self) -> str:
        """Slurm's name of the step: `12.0`."""
        return f"{self.job.job_id}.{self.number}"

    @property
    def layout(self) -> list[tuple[int, int]]:
        """Node and local number of every task."""
        return notation.task_layout(self.tasks_by_node)

    def file_name(self, option: str, task: int) -> str | None:
        """The file that `--output` or `--error` names for a task; None for srun's own output."""
        # Without --error, errors go where the output goes (srun(1)).
        pattern = self.options.get(option, self.options.get("output"))
        if pattern in (None, "all", "none"):
            return os.devnull if pattern == "none" else None
        node = self.layout[task][0]
        job, name = self.job.job_id, self.job.request.name
        letters = {"j": job, "A": job, "J": self.name, "s": self.number, "t": task, "n": node, "x": name}
        return notation.fill_pattern(pattern, letters | {"N": self.nodes[node], "u": self.job.request.user})

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


def make_step(options: Mapping[str, str], argv: Sequence[str], environment: Mapping[str, str]) -> Step:
    """Turn srun's options into a step, and give it the job's next number.

    `options` are by long name; `environment` is srun's own, which names the job.

    Raises:
        InvalidInput: An option is wrong, or requests more than the job has.
        PermanentError: This is not inside a job.
    """
    job = read_job(Path(environment[JOB_VARIABLE])) if JOB_VARIABLE in environment else None
    if job is None:
        raise PermanentError("not inside a job", subject="srun", advice="Start steps from batch scripts")
    nodes = _choose_nodes(options, job)
    counts = [count for count in _spread_tasks(options, len(nodes), environment) if count]
    directory, wait = options.get("chdir") or os.getcwd(), options.get("wait", "0")
    if not os.path.isdir(directory):
        raise InvalidInput("no such folder for --chdir", subject=directory)
    if not wait.isdigit():
        raise InvalidInput("invalid number of seconds for --wait", subject=wait)
    return Step(
        job=job,
        number=_claim_number(job),
        argv=tuple(argv),
        nodes=tuple(nodes[: len(counts)]),
        tasks_by_node=tuple(counts),
        directory=directory,
        environment=notation.exported(environment, options.get("export", "")),
        options=options,
        kill_on_bad_exit=options.get("kill-on-bad-exit", "0") not in {"0", "no"},
        wait=float(wait),
        kill_wait=read_config(job.root).kill_wait,
    )


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


def main(arguments: list[str]) -> int:
    """Run a step; return the highest exit code of its tasks, where a killed one counts as 128 + signal."""
    options, argv = split_options(arguments, notation.SRUN)
    if not argv:
        raise InvalidInput("no command to run", subject="srun")
    return _StepRun(make_step(options, argv, os.environ)).to_its_end()


class _StepRun:
    """A running step: its tasks, their output, and why it is being ended, if it is."""

    def __init__(self, step: Step) -> None:
        self.step = step
        self.files: dict[str, int] = {}
        self.errors: set[int] = set()  # where the tasks' errors go
        self.pipes: list[tuple[int, int, bytes]] = []  # from a task, to a file, with a label
        self.running: dict[int, int] = {}  # pid -> task
        self.sessions: set[int] = set()  # of all tasks, ended ones too
        self.codes: list[int] = []
        self.kill_at: float | None = None
        self.first_exit_at: float | None = None
        self.writing = threading.Lock()

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
        step, null = self.step, os.open(os.devnull, os.O_RDONLY)
        for task in range(len(step.layout)):
            output, error = self._open("output", task, 1), self._open("error", task, 2)
            self.errors.add(error)
            stdout = self._new_pipe(output, task)
            stderr = stdout if output == error else self._new_pipe(error, task)
            streams = (0 if len(step.layout) == 1 else null, stdout, stderr)
            pid = process_tree.start_session(step.argv, step.task_environment(task), step.directory, streams)
            for descriptor in {stdout, stderr}:
                os.close(descriptor)
            self.running[pid] = task
            self.sessions.add(pid)

    def _open(self, option: str, task: int, standard: int) -> int:
        """The file that an option names for a task, shared by all tasks that name it; srun's own output without."""
        if (name := self.step.file_name(option, task)) is None:
            return standard
        if name not in self.files:
            mode = 0 if self.step.options.get("open-mode", "truncate").startswith("a") else os.O_TRUNC
            try:
                self.files[name] = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_APPEND | mode, 0o666)
            except OSError as error:
                raise PermanentError(f"cannot open output file: {error.strerror}", subject=name) from error
        return self.files[name]

    def _new_pipe(self, target: int, task: int) -> int:
        reading, writing = os.pipe()
        self.pipes.append((reading, target, f"{task}: ".encode() if "label" in self.step.options else b""))
        return writing

    def _copy_output(self, reading: int, target: int, label: bytes) -> None:
        """Copy a task's output in whole lines. A target that fails is reported once; the task must not block."""
        writable = True
        with open(reading, "rb") as pipe:
            for line in iter(lambda: pipe.readline(_LONGEST_LINE), b""):
                try:
                    if writable:
                        self._write(target, label + line)
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
                self._say(f"srun: error: {self.step.nodes[self.step.layout[task][0]]}: task {task}: {how}\n")
                if self.step.kill_on_bad_exit and self.running:
                    self._terminate("Terminating")

    def _terminate(self, what: str) -> None:
        """Begin to end all remaining tasks: SIGTERM now, SIGKILL when patience is over."""
        if self.kill_at is not None:
            return
        self._say(f"srun: {what} StepId={self.step.name}\n")
        self._begin_end()
        for pid in self.running:
            for number in (signal.SIGCONT, signal.SIGTERM):
                process_tree.signal_group(pid, number)

    def _begin_end(self) -> None:
        """Start the clock, and leave in the tasks' logs the line that Slurm leaves there."""
        self.kill_at = time.monotonic() + self.step.kill_wait
        ending = self.step.job.folder / "ending"
        line = notation.farewell(
            f"STEP {self.step.name} ON {self.step.nodes[0]}", ending.read_text() if ending.exists() else ""
        )
        for target in self.errors:
            with contextlib.suppress(OSError):
                self._write(target, line)

    def _watch_clock(self) -> None:
        now, step = time.monotonic(), self.step
        if self.kill_at is not None and now >= self.kill_at:
            for pid in self.running:
                process_tree.signal_group(pid, signal.SIGKILL)
        elif step.wait and self.first_exit_at is not None and now >= self.first_exit_at + step.wait:
            self._terminate("First task exited a while ago; terminating")
