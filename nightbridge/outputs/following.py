"""A job while it runs: what is new in its log, and how far the training has come by its log and its event files.

The writer buffers, so a file may end in the middle of a record at any moment: such a tail is read again at the next
look. Once the writer has ended, it is what `event_files.read_event_file` calls it.
"""

import contextlib
import os
import statistics
from collections.abc import Iterable
from pathlib import Path

from nightbridge.errors import DamagedData
from nightbridge.files import RefusedFile, open_regular
from nightbridge.masking import mask_text
from nightbridge.models import Job, Model
from nightbridge.models.metrics import METRIC_BY_NAME
from nightbridge.outputs.event_decoder import Columns, RecordsEnd, Row
from nightbridge.outputs.event_files import file_time, find_event_files, read_on
from nightbridge.outputs.experiment import EVENT_FOLDER, logs_so_far
from nightbridge.outputs.logs import STEPS_OF_MEDIAN, LogTail, TrainingProgress, parse_steps
from nightbridge.outputs.reader_process import ReaderDied, call_shared

LOOK_INTERVAL = 10.0
"""Seconds between two looks at a job's log."""
MAX_LINES = 20
"""Lines that one look shows, the last ones; what else is new is counted. With `LOOK_INTERVAL` that is two a second."""

_MAX_LINE_LENGTH = 500


class LogNews(Model):
    """What one look found."""

    lines: tuple[str, ...] = ()
    """The last new lines, secrets masked, when a `RunFollower` returns it."""
    left_out: int = 0
    """New lines that are not among them."""
    source: Path | None = None
    """The log that they stand in."""
    progress: TrainingProgress | None = None
    """How far the run has come by its logs and event files; None before its first step."""

    def __str__(self) -> str:
        more = f"... {self.left_out} more lines in {self.source}\n" if self.left_out else ""
        return more + "\n".join(self.lines)


class FollowedJob(Model):
    """A job to follow. `total`: iterations of the whole run, where they are known before a log says them."""

    job: Job
    output_dir: Path | None = None
    """The host folder that a run without a container writes to, as in `read_run`."""
    total: int | None = None
    ended: bool = False


class RunFollower:
    """Follows the logs and the event files of one job, also those that appear later, as after a restart.

    They are read in a child, one for all jobs below one folder; secrets are masked here, where they are known. A job
    over whose files a child has died is followed no more. `output_dir` and `total` are those of `FollowedJob`; no line
    shows one of the `secrets`, nor what has a secret's shape.
    """

    def __init__(
        self, job: Job, secrets: Iterable[str], *, output_dir: Path | None = None, total: int | None = None
    ) -> None:
        self._followed = FollowedJob(job=job, output_dir=output_dir, total=total)
        # A value of several lines is met line by line.
        self._secrets = tuple({part for value in secrets for part in (value, *value.splitlines())})
        self._died = False
        folders = (job.experiment_dir, *(() if output_dir is None else (output_dir,)))
        # `<workspace>/runs`, and what lies elsewhere
        runs = job.attempt_dir.parents[1]
        self._roots = (runs, *(folder for folder in folders if not folder.is_relative_to(runs)))

    def look(self, *, ended: bool = False) -> LogNews:
        """Read what is new, and of a job that has ended a last line that has no line end.

        Raises:
            DamagedData: A log or an event file is there and cannot be read.
        """
        if self._died:
            return LogNews()
        followed = self._followed.model_copy(update={"ended": ended})
        try:
            news = call_shared(_follow, followed, self._roots)
        except ReaderDied as death:
            self._died = True
            what = f"not followed any more: {death.reason} at {death.path or 'no file'}"
            raise DamagedData(what, subject=followed.job.name) from death
        # Masked before it is cut, and as one text: half of a secret is one, too.
        lines = mask_text("\n".join(news.lines), self._secrets).split("\n") if news.lines else []
        return news.model_copy(update={"lines": tuple(line[:_MAX_LINE_LENGTH].rstrip() for line in lines)})


_followers: dict[str, "_Follower"] = {}
"""In a child: those of the jobs that it follows, by their names."""


def _follow(followed: FollowedJob) -> tuple[LogNews, bytes]:
    name = f"{followed.job.name} {followed.job.job_id}"
    follower = _followers.setdefault(name, _Follower(followed))
    if followed.ended:
        del _followers[name]
    return follower.look(ended=followed.ended), b""


class _Follower:
    """What a child knows of a job that it follows. Its lines are not masked."""

    def __init__(self, followed: FollowedJob) -> None:
        job, output_dir, total = followed.job, followed.output_dir, followed.total
        self._job = job
        self._tails: dict[Path, LogTail] = {}
        folders = (job.experiment_dir, output_dir)
        self._events = EventTail(*(folder / EVENT_FOLDER for folder in folders if folder is not None))
        self._total = total
        self._logged = self._recorded = 0
        self._step_times: dict[int, float] = {}
        self._losses: dict[int, float] = {}
        step_time = METRIC_BY_NAME["step_time"]
        self._of_tag = {
            METRIC_BY_NAME["final_loss"].tag: (self._losses, 1.0),
            **{tag: (self._step_times, factor) for tag, factor in ((step_time.tag, 1.0), *step_time.other_tags)},
        }

    def look(self, *, ended: bool) -> LogNews:
        """Read what is new, and of a job that has ended a last line that has no line end."""
        for path in logs_so_far(self._job):
            self._tails.setdefault(path, LogTail(path))
        self._see_events()
        found = [(path, tail.new_lines()) for path, tail in self._tails.items()]
        if ended:
            found += [(path, tail.last_line()) for path, tail in self._tails.items()]
        lines = [line for _, new in found for line in new if line.strip("\0 \t")]
        for line in lines:
            self._see(line)
        shown = lines[-MAX_LINES:]
        return LogNews(
            lines=tuple(shown),
            left_out=len(lines) - len(shown),
            source=next((path for path, new in reversed(found) if new), None),
            progress=self._progress(),
        )

    def _see(self, line: str) -> None:
        if "iteration" not in line:
            return
        for step in parse_steps(line):
            if step.iteration < self._logged:
                # A restart: what was logged after the checkpoint that it began from is void.
                self._recorded = 0
                self._step_times.clear()
                self._losses.clear()
            self._logged, self._total = step.iteration, step.total
            if step.elapsed_ms is not None:
                self._note(self._step_times, step.iteration, step.elapsed_ms / 1000)
            if step.lm_loss is not None:
                self._note(self._losses, step.iteration, step.lm_loss)

    def _see_events(self) -> None:
        """Take in new rows of the event files. A step that is in both the log and the event files is one step."""
        for row in self._events.new_rows():
            if row.tag in self._of_tag:
                values, factor = self._of_tag[row.tag]
                self._recorded = row.step
                self._note(values, row.step, row.value * factor)

    @staticmethod
    def _note(values: dict[int, float], iteration: int, value: float) -> None:
        """Keep the values of the last iterations: event files lag behind the log by what is not flushed yet."""
        values[iteration] = value
        for early in sorted(values)[:-STEPS_OF_MEDIAN]:
            del values[early]

    def _progress(self) -> TrainingProgress | None:
        iteration = max(self._logged, self._recorded)
        if not iteration or self._total is None:
            return None
        return TrainingProgress(
            iteration=iteration,
            total=self._total,
            step_time=statistics.median(self._step_times.values()) if self._step_times else None,
            loss=self._losses[max(self._losses)] if self._losses else None,
        )


class EventTail:
    """All event files of some folders, each read on from the last record that was whole.

    A restart of the job adds another one, and a look finds it. A writer makes each of its files once, and only adds to
    it. What is wrong behind the last whole record is the harvest's to say.
    """

    def __init__(self, *folders: Path) -> None:
        self._folders = folders
        self._columns: dict[Path, Columns] = {}
        self._offsets: dict[Path, int] = {}

    def new_rows(self) -> list[Row]:
        """The scalars of the records that were finished since the last look, tags as written, the older file first.

        A missing folder has nothing yet.

        Raises:
            OSError: A file is there and cannot be read.
        """
        for path in (path for folder in self._folders for path in find_event_files(folder)):
            self._columns.setdefault(path, Columns())
        for path, columns in self._columns.items():
            with contextlib.suppress(RecordsEnd, FileNotFoundError, RefusedFile), open_regular(path) as stream:
                for offset in read_on(stream, os.fstat(stream.fileno()).st_size, columns, self._offsets.get(path, 0)):
                    self._offsets[path] = offset
        oldest_first = sorted(self._columns, key=lambda path: (file_time(path), path.name))
        return [row for path in oldest_first for row in self._columns[path].take()]
