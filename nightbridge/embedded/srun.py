"""srun of the embedded cluster: the tasks of all simulated nodes, side by side on this machine.

Each task is a session of its own. Its output passes through srun line by line, so that lines of different tasks never
mix, however the tasks buffer.
"""

import contextlib
import os
import signal
import threading
import time

from nightbridge.embedded import processes
from nightbridge.embedded.jobs import KILL_PATIENCE
from nightbridge.embedded.names import farewell
from nightbridge.embedded.options import SRUN
from nightbridge.embedded.sbatch_options import split_options
from nightbridge.embedded.step import Step, make_step
from nightbridge.errors import InvalidInput, PermanentError

_POLL_INTERVAL = 0.1
_LONGEST_LINE = 65536
"""Bytes of a line that are kept together."""
_DRAIN_SECONDS = 2.0
"""How long to wait for the last output, once every task has ended: a process that left its session may hold a pipe."""
_ENDING = frozenset({signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT})
_FORWARDED = _ENDING | {signal.SIGUSR1, signal.SIGUSR2}


def main(arguments: list[str]) -> int:
    """Run a step; return the highest exit code of its tasks, where a killed one counts as 128 + signal."""
    options, argv = split_options(arguments, SRUN)
    if not argv:
        raise InvalidInput("no command to run", thing="srun")
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
        """Start all tasks, hand on output and signals, until every task has ended; return the step's exit code."""
        awaited = {number for number in _FORWARDED if signal.getsignal(number) != signal.SIG_IGN} | {signal.SIGCHLD}
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_BLOCK, awaited)
        try:
            self._start_tasks()
            # Threads only now: what forks must have one thread.
            readers = [threading.Thread(target=self._hand_on, args=pipe, daemon=True) for pipe in self.pipes]
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
            processes.kill_until_gone(self._members, patience=KILL_PATIENCE)
        drained_at = time.monotonic() + _DRAIN_SECONDS
        for reader in readers:
            reader.join(max(0.0, drained_at - time.monotonic()))
        return max(self.codes)

    def _members(self) -> set[int]:
        return {entry.pid for entry in processes.running_processes().values() if entry.session in self.sessions}

    def _start_tasks(self) -> None:
        step, null = self.step, os.open(os.devnull, os.O_RDONLY)
        for task in range(len(step.places)):
            output, error = self._open("output", task, 1), self._open("error", task, 2)
            self.errors.add(error)
            stdout = self._new_pipe(output, task)
            stderr = stdout if output == error else self._new_pipe(error, task)
            streams = (0 if len(step.places) == 1 else null, stdout, stderr)
            pid = processes.start_session(step.argv, step.task_environment(task), step.directory, streams)
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
                raise PermanentError(f"cannot open output file: {error.strerror}", thing=name) from error
        return self.files[name]

    def _new_pipe(self, target: int, task: int) -> int:
        reading, writing = os.pipe()
        self.pipes.append((reading, target, f"{task}: ".encode() if "label" in self.step.options else b""))
        return writing

    def _hand_on(self, reading: int, target: int, label: bytes) -> None:
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
            processes.signal_group(pid, number)
        if number in _ENDING and self.kill_at is None:
            self._begin_end()

    def _collect(self) -> None:
        for pid, task in list(self.running.items()):
            if (ended := processes.ended_child(pid)) is None:
                continue
            del self.running[pid]
            _, code, number = ended
            self.codes.append(128 + number if number else code)
            self.first_exit_at = self.first_exit_at or time.monotonic()
            if code or number:
                how = signal.strsignal(number) if number else f"Exited with exit code {code}"
                self._say(f"srun: error: {self.step.nodes[self.step.places[task][0]]}: task {task}: {how}\n")
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
                processes.signal_group(pid, number)

    def _begin_end(self) -> None:
        """Start the clock, and leave in the tasks' logs the line that Slurm leaves there."""
        self.kill_at = time.monotonic() + self.step.kill_wait
        ending = self.step.job.folder / "ending"
        line = farewell(f"STEP {self.step.name} ON {self.step.nodes[0]}", ending.read_text() if ending.exists() else "")
        for target in self.errors:
            with contextlib.suppress(OSError):
                self._write(target, line)

    def _watch_clock(self) -> None:
        now, step = time.monotonic(), self.step
        if self.kill_at is not None and now >= self.kill_at:
            for pid in self.running:
                processes.signal_group(pid, signal.SIGKILL)
        elif step.wait and self.first_exit_at is not None and now >= self.first_exit_at + step.wait:
            self._terminate("First task exited a while ago; terminating")
