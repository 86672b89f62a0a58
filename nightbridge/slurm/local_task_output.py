"""Output of a step's tasks: from their pipes, in whole lines, into srun's log files."""

import contextlib
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from nightbridge.errors import PermanentError
from nightbridge.slurm.local_names import fill_pattern
from nightbridge.slurm.local_step import Step

CHUNK = 65536
"""Bytes that are read at once, and the longest line that is kept together."""
LONGEST_WAIT_FOR_A_LINE = 1.0
"""Seconds after which an unfinished line is handed on."""


@dataclass
class TaskLines:
    """A pipe from one task, handed on in whole lines."""

    source: int
    target: int
    label: bytes
    kept: bytearray = field(default_factory=bytearray)
    kept_since: float = 0.0

    def read(self) -> bool:
        """Hand on what has come; return whether the other end is closed."""
        try:
            chunk = os.read(self.source, CHUNK)
        except BlockingIOError:
            return False
        if not chunk:
            self.flush()
            return True
        self.kept += chunk
        self.kept_since = time.monotonic()
        end = self.kept.rfind(b"\n") + 1
        if end or len(self.kept) >= CHUNK:
            self._write(bytes(self.kept[: end or len(self.kept)]))
            del self.kept[: end or len(self.kept)]
        return False

    def flush(self) -> None:
        """Hand on an unfinished line."""
        if self.kept:
            self._write(bytes(self.kept))
            self.kept.clear()

    def flush_if_old(self) -> None:
        """Hand on an unfinished line that nobody finishes, such as a progress bar."""
        if self.kept and time.monotonic() - self.kept_since > LONGEST_WAIT_FOR_A_LINE:
            self.flush()

    def _write(self, data: bytes) -> None:
        if self.label:
            data = b"".join(self.label + line for line in data.splitlines(keepends=True))
        with contextlib.suppress(BrokenPipeError):  # nobody reads srun's own output any more
            while data:
                data = data[os.write(self.target, data) :]


class StepLogs:
    """The output files of a step, each opened once."""

    def __init__(self, step: Step) -> None:
        self.step = step
        self.opened: dict[str, int] = {}

    def open(self, pattern: str | None, standard: int, values: Mapping[str, object]) -> int:
        """The file that a pattern names for one task; srun's own output for no pattern."""
        if pattern is None or pattern == "all":
            return standard
        name = os.devnull if pattern == "none" else fill_pattern(pattern, values)
        if name not in self.opened:
            mode = 0 if self.step.append else os.O_TRUNC
            try:
                self.opened[name] = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_APPEND | mode, 0o666)
            except OSError as error:
                raise PermanentError(f"cannot open output file: {error.strerror}", thing=name) from error
        return self.opened[name]
