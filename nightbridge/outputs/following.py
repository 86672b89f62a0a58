"""A job's log while it runs: what it says anew, and how far the training has come."""

import statistics
from collections import deque
from collections.abc import Iterable, Sequence
from datetime import timedelta
from pathlib import Path

from nightbridge.models import Job, Model
from nightbridge.outputs.experiment import logs_so_far
from nightbridge.outputs.logs import parse_steps
from nightbridge.outputs.tail import LogTail
from nightbridge.secrets import mask_secrets

LOOK_INTERVAL = 10.0
"""Seconds between two looks at a job's log."""
MOST_LINES = 20
"""Lines that one look shows, the last ones; what else is new is counted. With `LOOK_INTERVAL` that is two a second."""

_LONGEST_SHOWN = 500
_STEPS_OF_MEDIAN = 10


class Progress(Model):
    """How far a training has come."""

    iteration: int
    total: int
    step_time: float | None = None
    """Median of the last steps, seconds."""

    @property
    def percent(self) -> float:
        """The part that is done, 0 to 100."""
        return min(100.0, 100.0 * self.iteration / self.total) if self.total else 0.0

    @property
    def seconds_left(self) -> float | None:
        """What the other steps take if they take as long as the last ones."""
        return None if self.step_time is None else max(0, self.total - self.iteration) * self.step_time

    def __str__(self) -> str:
        said = f"iteration {self.iteration}/{self.total}"
        if self.step_time is None or self.seconds_left is None:
            return said
        left = timedelta(seconds=round(self.seconds_left))
        return f"{said}, {self.step_time:.3g} s a step, {left} left"


class LogNews(Model):
    """What one look found."""

    lines: tuple[str, ...] = ()
    """The last new lines, secrets masked."""
    left_out: int = 0
    """New lines that are not among them."""
    source: Path | None = None
    """The log that they stand in."""
    progress: Progress | None = None
    """How far the run has come as far as any log has said; None before its first step."""

    def __str__(self) -> str:
        more = f"... {self.left_out} more lines in {self.source}\n" if self.left_out else ""
        return more + "\n".join(self.lines)


class RunFollower:
    """Follows the logs of one job. Logs that appear later, as after a restart, are followed from when they are there.

    Args:
        job: The job.
        secrets: Values that no line may show.

    """

    def __init__(self, job: Job, secrets: Iterable[str]) -> None:
        self._job = job
        # A value of several lines is met line by line.
        self._secrets = tuple({part for value in secrets for part in (value, *value.splitlines())})
        self._tails: dict[Path, LogTail] = {}
        self._step_times: deque[float] = deque(maxlen=_STEPS_OF_MEDIAN)
        self._progress: Progress | None = None

    def look(self) -> LogNews:
        """Read what is new.

        Raises:
            OSError: A log is there and cannot be read.

        """
        for path in logs_so_far(self._job):
            self._tails.setdefault(path, LogTail(path))
        return self._news([(tail.path, tail.new_lines()) for tail in self._tails.values()])

    def last_look(self) -> LogNews:
        """Read what is new after the job's end, with a last line that has no line end.

        Raises:
            OSError: A log is there and cannot be read.

        """
        news = self.look()
        rest = self._news([(tail.path, tail.last_line()) for tail in self._tails.values()])
        shown = (*news.lines, *rest.lines)
        return LogNews(
            lines=shown[-MOST_LINES:],
            left_out=news.left_out + rest.left_out + max(0, len(shown) - MOST_LINES),
            source=rest.source or news.source,
            progress=rest.progress,
        )

    def _news(self, found: Sequence[tuple[Path, list[str]]]) -> LogNews:
        lines = [line for _, new in found for line in new if line.strip("\0 \t")]
        for line in lines:
            self._see(line)
        shown = lines[-MOST_LINES:]
        return LogNews(
            # Masked before it is cut: half of a secret is one, too.
            lines=tuple(mask_secrets(line, self._secrets)[:_LONGEST_SHOWN].rstrip() for line in shown),
            left_out=len(lines) - len(shown),
            source=next((path for path, new in reversed(found) if new), None),
            progress=self._progress,
        )

    def _see(self, line: str) -> None:
        if "iteration" not in line:
            return
        for step in parse_steps(line):
            if step.elapsed_ms is not None:
                self._step_times.append(step.elapsed_ms / 1000)
            time = statistics.median(self._step_times) if self._step_times else None
            self._progress = Progress(iteration=step.iteration, total=step.total, step_time=time)
