"""srun of the embedded cluster: the tasks of all simulated nodes, side by side on this machine.

Each task is a session of its own. Its output passes through srun line by line, so that lines of different tasks never
mix, however the tasks buffer.
"""

import contextlib
import os
import select
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping

from nightbridge.errors import InvalidInput
from nightbridge.slurm.local_options import SRUN, exported, split_options
from nightbridge.slurm.local_processes import (
    kill_until_gone,
    peek_status,
    running_processes,
    signal_group,
    start_session,
)
from nightbridge.slurm.local_step import Step, make_step, task_environment
from nightbridge.slurm.local_task_output import CHUNK, StepLogs, TaskLines

USAGE = """Usage: srun [OPTIONS...] executable [args...]
The embedded cluster's srun. It runs the tasks of all simulated nodes on this machine, and no containers.
"""

_KILL_PATIENCE = 10.0
_LOOK_INTERVAL = 0.1
_FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
_ENDING = frozenset({signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT})


def main(arguments: list[str]) -> int:
    """Run a step; return the highest exit code of its tasks, where a killed one counts as 128 + signal."""
    options, argv = split_options(arguments, SRUN)
    if "help" in options:
        sys.stdout.write(USAGE)
        return 0
    if not argv:
        raise InvalidInput("no command to run", thing="srun")
    step = make_step(options, argv, os.environ)
    environment = exported(os.environ, options.get("export", ""))
    return _StepRun(step, environment).to_its_end()


class _StepRun:
    """A running step: its tasks, their pipes, and why it is being ended, if it is."""

    def __init__(self, step: Step, environment: Mapping[str, str]) -> None:
        self.step = step
        self.environment = environment
        self.logs = StepLogs(step)
        self.pipes: dict[int, TaskLines] = {}
        self.errors: set[int] = set()
        self.running: dict[int, int] = {}  # pid -> task
        self.sessions: set[int] = set()  # of all tasks, ended ones too
        self.task_node: dict[int, str] = {}
        self.codes: list[int] = []
        self.kill_at: float | None = None
        self.first_exit_at: float | None = None
        self.pending_signals: list[int] = []

    def to_its_end(self) -> int:
        """Start all tasks, hand on output and signals, until every task has ended; return the step's exit code."""
        with _wake_up_pipe(self.pending_signals.append) as wake_up:
            try:
                self._start_tasks()
                while self.running:
                    self._hand_on_output(wake_up)
                    self._hand_on_signals()
                    self._collect()
                    self._watch_clock()
            finally:
                self._end_everything()
        return max(self.codes)

    def _start_tasks(self) -> None:
        stdin = 0 if sum(self.step.tasks_by_node) == 1 else os.open(os.devnull, os.O_RDONLY)
        for task, node, local in self.step.places:
            self._start_task(task, node, local, stdin)

    def _start_task(self, task: int, node: int, local: int, stdin: int) -> None:
        step = self.step
        request = step.job.request
        values: dict[str, object] = {
            "j": step.job.job_id,
            "A": step.job.job_id,
            "J": step.name,
            "s": step.number,
            "t": task,
            "n": node,
            "N": step.nodes[node],
            "u": request.user,
            "x": request.name,
        }
        stdout_target = self.logs.open(step.output, 1, values)
        # Without --error, errors go where the output goes (srun(1)).
        stderr_target = stdout_target if step.output and not step.error else self.logs.open(step.error, 2, values)
        label = f"{task}: ".encode() if step.label else b""
        stdout = self._new_pipe(stdout_target, label)
        stderr = stdout if stderr_target == stdout_target else self._new_pipe(stderr_target, label)
        self.errors.add(stderr_target)
        pid = start_session(
            step.argv,
            environment=task_environment(step, self.environment, task, node, local),
            directory=step.directory,
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            signal_at_parents_death=signal.SIGKILL,
        )
        for descriptor in {stdout, stderr}:
            os.close(descriptor)
        self.running[pid] = task
        self.sessions.add(pid)
        self.task_node[task] = step.nodes[node]

    def _new_pipe(self, target: int, label: bytes) -> int:
        reading, writing = os.pipe()
        os.set_blocking(reading, False)
        self.pipes[reading] = TaskLines(reading, target, label)
        return writing

    def _hand_on_output(self, wake_up: int) -> None:
        waits = any(lines.kept for lines in self.pipes.values()) or self._deadline() is not None
        timeout = _LOOK_INTERVAL if waits else None
        readable, _, _ = select.select([wake_up, *self.pipes], [], [], timeout)
        for descriptor in readable:
            if descriptor == wake_up:
                with contextlib.suppress(BlockingIOError):
                    os.read(wake_up, CHUNK)
            elif self.pipes[descriptor].read():
                del self.pipes[descriptor]
                os.close(descriptor)
        for lines in self.pipes.values():
            lines.flush_if_old()

    def _hand_on_signals(self) -> None:
        while self.pending_signals:
            number = self.pending_signals.pop(0)
            for pid in self.running:
                signal_group(pid, number)
            if number in _ENDING and self.kill_at is None:
                self.kill_at = time.monotonic() + self.step.kill_wait
                self._tell_tasks_logs()

    def _collect(self) -> None:
        for pid, task in list(self.running.items()):
            if (ended := peek_status(pid)) is None:
                continue
            del self.running[pid]
            code, number = ended
            self.codes.append(128 + number if number else code)
            self.first_exit_at = self.first_exit_at or time.monotonic()
            if code or number:
                self._report(task, code, number)
                if self.step.kill_on_bad_exit and self.running:
                    self._terminate("Terminating")

    def _report(self, task: int, code: int, number: int) -> None:
        how = signal.strsignal(number) if number else f"Exited with exit code {code}"
        sys.stderr.write(f"srun: error: {self.task_node[task]}: task {task}: {how}\n")
        sys.stderr.flush()

    def _terminate(self, what: str) -> None:
        """Begin to end all tasks that are left: SIGTERM now, SIGKILL when patience is over."""
        if self.kill_at is not None:
            return
        sys.stderr.write(f"srun: {what} StepId={self.step.name}\n")
        sys.stderr.flush()
        self.kill_at = time.monotonic() + self.step.kill_wait
        self._tell_tasks_logs()
        for pid in self.running:
            for number in (signal.SIGCONT, signal.SIGTERM):
                signal_group(pid, number)

    def _tell_tasks_logs(self) -> None:
        """Leave in the tasks' logs the line that Slurm leaves there; people and tools look for it."""
        ending = self.step.job.folder / "ending"
        why = " DUE TO TIME LIMIT" if ending.exists() and ending.read_text() == "TIMEOUT" else ""
        now = time.strftime("%Y-%m-%dT%H:%M:%S")
        line = f"slurmstepd: error: *** STEP {self.step.name} ON {self.step.nodes[0]} CANCELLED AT {now}{why} ***\n"
        for target in self.errors:
            with contextlib.suppress(BrokenPipeError):
                os.write(target, line.encode())

    def _deadline(self) -> float | None:
        if self.kill_at is not None:
            return self.kill_at
        if self.step.wait is not None and self.first_exit_at is not None:
            return self.first_exit_at + self.step.wait
        return None

    def _watch_clock(self) -> None:
        deadline = self._deadline()
        if deadline is None or time.monotonic() < deadline:
            return
        if self.kill_at is None:
            self._terminate("First task exited a while ago; terminating")
            return
        for pid in self.running:
            signal_group(pid, signal.SIGKILL)

    def _end_everything(self) -> None:
        """Kill what the tasks left running in their sessions, then hand on the last output."""
        kill_until_gone(self._what_is_left, patience=_KILL_PATIENCE)
        for descriptor, lines in self.pipes.items():
            while select.select([descriptor], [], [], 0)[0] and not lines.read():
                pass
            lines.flush()
            os.close(descriptor)
        self.pipes.clear()

    def _what_is_left(self) -> set[int]:
        return {entry.pid for entry in running_processes().values() if entry.session in self.sessions}


@contextlib.contextmanager
def _wake_up_pipe(on_signal: Callable[[int], None]) -> Iterator[int]:
    """A descriptor that becomes readable with every signal; those to hand on are told to `on_signal`."""
    reading, writing = os.pipe()
    for descriptor in (reading, writing):
        os.set_blocking(descriptor, False)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    for number in _FORWARDED:
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, lambda number, _: on_signal(number))
    try:
        yield reading
    finally:
        signal.set_wakeup_fd(-1)
        os.close(reading)
        os.close(writing)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
