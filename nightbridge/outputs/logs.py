"""The run's log lines to step records and markers, in one pass and constant memory.

A log holds the text of all ranks. Two ranks' texts can stand on one line, a launcher may put a prefix before a line,
colours may be switched on, and the file may end in the middle of a line. So nothing here is anchored to the start of a
line: each kind of text is searched for where it stands. Step times and losses are printed by the last rank, the
`Step Time` line by rank 0; the two are matched by order and by agreeing step times. The new lines of a growing log are
read in bounded pieces, however large, rotated or cut the file is.
"""

import itertools
import math
import os
import re
import statistics
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from pydantic import Field

from nightbridge.files import open_regular, unless_away
from nightbridge.models import Model
from nightbridge.models.metrics import METRICS, NUMBER
from nightbridge.numbers import real_number, whole_number
from nightbridge.outputs.failure_patterns import FLAKY_MARKERS
from nightbridge.outputs.log_errors import ErrorFinder
from nightbridge.outputs.reader_process import read_in_child

_BLOCK = 1 << 20
MAX_LINE_BYTES = 8 << 10
"""What is beyond them is cut: no line that is read has as many, and a job can write a line of a terabyte."""

_MARKERS = {
    "DUE TO TIME LIMIT": "timeout_marker",
    "found NaN in": "nan_marker",
    "[after training is done]": "training_done",
    "Heterogeneous MIMO training completed": "training_done",
}
"""Texts, and the field of `LogReading` that is true of a log that has one."""


class StepRecord(NamedTuple):
    """What the log says about one iteration. None: not printed, cut off, or (loss) not finite and so left out.

    `whole` is False for a line whose end is missing, so that what it lacks says nothing about the iteration.
    `matched` is True where `tflops_per_gpu` comes from a line of rank 0 that has no number of its iteration.
    `impossible` is a count as it was printed that is none, such as `inf`.
    """

    iteration: int
    total: int
    elapsed_ms: float | None = None
    tflops_per_gpu: float | None = None
    lm_loss: float | None = None
    grad_norm: float | None = None
    skipped_iterations: int = 0
    nan_iterations: int = 0
    learning_rate: float | None = None
    global_batch_size: float | None = None
    consumed_samples: float | None = None
    matched: bool = False
    impossible: str = ""
    whole: bool = True


class LogReading(Model):
    """Everything that a run's logs say, in the order of the lines. A restart may repeat iterations in `steps`."""

    steps: tuple[StepRecord, ...] = ()
    perf_lines: int = 0
    """`Step Time` lines of rank 0."""
    start_iteration: int | None = None
    values: dict[str, tuple[float, ...]] = Field({})
    """By metric, what the lines say by its log patterns, in its unit; only finite values."""
    saved_iterations: tuple[int, ...] = ()
    """Of the `successfully saved checkpoint` lines."""
    training_done: bool = False
    exit_iteration: int | None = None
    flaky_marker: str | None = None
    nan_marker: bool = False
    timeout_marker: bool = False
    last_error: str = ""
    own_error: str = ""
    """What the program of a rank says of itself, not of the machine (`ErrorFinder.own`)."""
    cut_lines: int = 0
    damage: tuple[str, ...] = ()

    @property
    def finished(self) -> bool:
        """Whether the training loop said that it ended by itself."""
        return self.training_done or self.exit_iteration is not None

    @property
    def last_iteration(self) -> int:
        """The highest iteration with a step line, 0 without any."""
        return max((step.iteration for step in self.steps), default=0)

    @property
    def iterations_seen(self) -> int:
        """Iterations that were certainly done, although the lines of the last rank, which number them, may be lost."""
        of_rank_0 = 0 if self.steps else (self.start_iteration or 0) + self.perf_lines
        return max(self.last_iteration, of_rank_0, *self.saved_iterations)


def latest_steps(steps: Iterable[StepRecord]) -> dict[int, StepRecord]:
    """One record per iteration, ascending, of those that no later record has done again: its step is no larger."""
    latest: dict[int, StepRecord] = {}
    for step in reversed(tuple(steps)):
        if not latest or step.iteration < next(reversed(latest)):
            latest[step.iteration] = step
    return dict(reversed(latest.items()))


# --- lines -----------------------------------------------------------------------------------------------------------

_ANSI = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[ -/]{0,4}[0-~])")


def raw_lines(stream: BinaryIO) -> Iterator[bytes]:
    """The lines of a log but for empty ones, of each at most one byte more than `MAX_LINE_BYTES`.

    Carriage returns end lines too.
    """
    rest = b""
    while block := stream.read(_BLOCK):
        first, *others = block.replace(b"\r", b"\n").split(b"\n")
        rest += first[: MAX_LINE_BYTES + 1 - len(rest)]
        if others:
            yield from (line[: MAX_LINE_BYTES + 1] for line in (rest, *others[:-1]) if line)
            rest = others[-1][: MAX_LINE_BYTES + 1]
    if rest:
        yield rest


def clean_line(line: bytes) -> str:
    """A line as text, without escape codes."""
    text = line.decode("utf-8", "replace")
    return _ANSI.sub("", text) if "\x1b" in text else text


# --- what the lines say ----------------------------------------------------------------------------------------------

# No pattern may look again at what it has looked at: each repetition is bounded, or ends where the next one begins.
_STEP = re.compile(r"\biteration\s{1,32}(\d{1,18})/\s{0,32}(\d{1,18})\s{0,32}\|", re.ASCII)
_PERF = re.compile(rf"Step Time : {NUMBER}s GPU utilization: {NUMBER}MODEL_TFLOP/s/GPU", re.IGNORECASE)
_SAVED = "successfully saved checkpoint from iteration"
_SAVED_WHERE = re.compile(r"\s{1,32}(\d{1,18}) to \S.*", re.ASCII)
_SAVED_END = re.compile(r" \[ t \d{1,6}/\d", re.ASCII)
_START = re.compile(r"Starting training loop at iteration (\d{1,18})", re.ASCII)
# The heterogeneous loop names the first iteration that it will do.
_HETERO = "Starting hetero MIMO training: "
_HETERO_START = re.compile(r"\biters=(\d{1,18})\.\.", re.ASCII)
_EXIT = re.compile(r"\[exiting program at iteration (\d{1,18})\]", re.ASCII)
_PATTERNS = tuple(
    (metric.name, known.text, re.compile(known.pattern, re.IGNORECASE), known.factor)
    for metric in METRICS
    for known in metric.log
)
"""Of each metric that the log prints, a text that its lines contain, its pattern, and the factor of the number."""

_STEP_FIELDS = {
    "elapsed time per iteration (ms)": "elapsed_ms",
    "throughput per GPU (TFLOP/s/GPU)": "tflops_per_gpu",
    "lm loss": "lm_loss",
    "grad norm": "grad_norm",
    "learning rate": "learning_rate",
    "global batch size": "global_batch_size",
    "consumed samples": "consumed_samples",
    "number of skipped iterations": "skipped_iterations",
    "number of nan iterations": "nan_iterations",
}
_COUNTS = ("skipped_iterations", "nan_iterations")


def parse_steps(text: str) -> list[StepRecord]:
    """The step records in one line of text: none, one, or several where ranks or restarts ran into each other.

    Only fields that are closed by `|` count: a cut number is no number, and neither is a count that is not whole. A
    skipped iteration prints a loss of zero, which is not a loss.
    """
    starts = list(_STEP.finditer(text))
    ends = itertools.chain((match.start() for match in starts[1:]), (len(text),))
    return [_step(match, text[match.end() : end]) for match, end in zip(starts, ends, strict=False)]


def _step(start: re.Match[str], text: str) -> StepRecord:
    values: dict[str, float | None] = {}
    counts: dict[str, int | None] = {}
    impossible = ""
    for field in text.split("|")[:-1]:
        label, _, value = field.partition(":")
        name = _STEP_FIELDS.get(label.strip())
        if name in _COUNTS:
            count, printed = whole_number(value), value.strip()
            counts.setdefault(name, count)
            # A number that is no count, such as `inf`, `-1` and thousands of digits; torn text says nothing.
            if count is None and not impossible and (real_number(printed) is not None or printed.isdigit()):
                impossible = printed[:20]
        elif name is not None:
            values.setdefault(name, real_number(value))
    skipped, nan = (counts.get(name) or 0 for name in _COUNTS)
    whole = "nan_iterations" in counts and None not in counts.values()
    if skipped and values.get("lm_loss") == 0.0:
        values["lm_loss"] = None
    done = {"skipped_iterations": skipped, "nan_iterations": nan, "whole": whole, "impossible": impossible}
    return StepRecord(int(start[1]), int(start[2]), **values, **done)  # type: ignore[arg-type]


# --- rank 0's and the last rank's lines ------------------------------------------------------------------------------


class Perf(NamedTuple):
    """A `Step Time` line of rank 0: seconds to two decimals, TFLOP/s per GPU to one."""

    seconds: float
    tflops_per_gpu: float


_LOOK_AHEAD = 8


def _agree(perf: Perf, step: StepRecord) -> bool:
    # Both are the same number, rounded to 10 ms and to 0.1 ms.
    return step.elapsed_ms is None or abs(perf.seconds - step.elapsed_ms / 1000) <= 0.0051


def match_perf(perfs: Sequence[Perf], steps: Sequence[StepRecord]) -> dict[int, Perf]:
    """Match rank 0's `Step Time` lines with the last rank's step lines: position in `steps` to its line.

    Both ranks pass a barrier in each interval, so the n-th line of one belongs to the n-th line of the other, whichever
    is printed first. Where the step times do not agree, a line was lost or doubled: the smaller number of lines that
    brings the two back together is left out. A line that agrees with nothing near is matched with nothing.
    """
    matched: dict[int, Perf] = {}
    left = deque(perfs)
    position = 0
    while left and position < len(steps):
        if _agree(left[0], steps[position]):
            matched[position] = left.popleft()
            position += 1
            continue
        lost_perfs = next((n for n in range(1, _LOOK_AHEAD) if n < len(left) and _agree(left[n], steps[position])), 0)
        ahead = steps[position : position + _LOOK_AHEAD]
        lost_steps = next((n for n in range(1, len(ahead)) if _agree(left[0], ahead[n])), 0)
        if lost_perfs and (not lost_steps or lost_perfs < lost_steps):
            for _ in range(lost_perfs):
                left.popleft()
        elif lost_steps and (not lost_perfs or lost_steps < lost_perfs):
            position += lost_steps
        else:
            left.popleft()
            position += 1
    return matched


# --- the whole log ---------------------------------------------------------------------------------------------------


class _Reader:
    """Collects what the lines of several logs say. `found` holds fields of `LogReading`."""

    def __init__(self) -> None:
        self.found: dict[str, Any] = {}
        self.cut_lines = 0
        self.steps: list[StepRecord] = []
        self.saved: list[int] = []
        self.values: dict[str, list[float]] = {}
        self.errors = ErrorFinder()
        self.impossible: list[str] = []
        self._file_steps: list[StepRecord] = []
        self._perfs: list[Perf] = []

    def see(self, raw: bytes) -> None:
        self.cut_lines += len(raw) > MAX_LINE_BYTES
        line = clean_line(raw[:MAX_LINE_BYTES])
        # A line is looked at closely only for texts that it contains: logs are long and mostly about other things.
        if "Step Time" in line:
            found = [(real_number(seconds), real_number(tflops)) for seconds, tflops in _PERF.findall(line)]
            self._perfs += [Perf(s, t) for s, t in found if s is not None and t is not None]
            self.found["perf_lines"] = self.found.get("perf_lines", 0) + len(found)
            line = _PERF.sub("", line)
        if "iteration" in line:
            self._see_iteration(line)
        if _HETERO in line and (starts := _HETERO_START.findall(line.partition(_HETERO)[2])):
            self._see_start(int(starts[-1]) - 1)
        for metric, text, pattern, factor in _PATTERNS:
            if text in line:
                numbers = [real_number(match[match.lastindex or 0]) for match in pattern.finditer(line)]
                finite = [number * factor for number in numbers if number is not None and math.isfinite(number)]
                self.values.setdefault(metric, []).extend(finite)
        self.found |= {field: True for text, field in _MARKERS.items() if text in line}
        if self.found.get("flaky_marker") is None:
            self.found["flaky_marker"] = next((marker for marker in FLAKY_MARKERS if marker in line), None)
        self.errors.see(line)

    def _see_iteration(self, line: str) -> None:
        if "|" in line:
            self._file_steps += parse_steps(line)
        for saved in line.split(_SAVED)[1:]:
            if (end := _SAVED_END.search(saved)) and (where := _SAVED_WHERE.fullmatch(saved, 0, end.start())):
                self.saved.append(int(where[1]))
        if match := _START.search(line):
            self._see_start(int(match[1]))
        if match := _EXIT.search(line):
            self.found["exit_iteration"] = int(match[1])

    def _see_start(self, iteration: int) -> None:
        # The first start counts: what a restart repeats was this run's work too.
        self.found.setdefault("start_iteration", iteration)
        self.found |= {"training_done": False, "exit_iteration": None}

    def end_file(self) -> None:
        """Finish one log: match its ranks, and drop a last line that a killed job did not print to its end."""
        self.impossible += [step.impossible for step in self._file_steps if step.impossible]
        if self._file_steps and not self._file_steps[-1].whole:
            self._file_steps.pop()
        perfs = match_perf(self._perfs, self._file_steps)
        for position, step in enumerate(self._file_steps):
            if step.tflops_per_gpu is None and position in perfs:
                step = step._replace(tflops_per_gpu=perfs[position].tflops_per_gpu, matched=True)
            self.steps.append(step)
        self._file_steps, self._perfs = [], []


def read_logs(paths: Sequence[Path]) -> LogReading:
    """Read logs, oldest first, as one. A log that cannot be read is named in `damage`; the others count."""
    reader = _Reader()
    damage: list[str] = []
    for path in paths:
        try:
            with open_regular(path) as stream:
                for line in raw_lines(stream):
                    reader.see(line)
        except OSError as error:
            unless_away(error, path)
            damage.append(f"{path.name}: cannot read the log: {error.strerror or error}")
        reader.end_file()
    if impossible := reader.impossible:
        damage.append(
            f"the log: {len(impossible)} steps with a count that is not a whole number, first `{impossible[0]}`"
        )
    return LogReading(
        steps=tuple(reader.steps),
        values={metric: tuple(values) for metric, values in reader.values.items()},
        saved_iterations=tuple(reader.saved),
        # It becomes the reason of a verdict, which is shown in terminals, too.
        last_error="".join(char if char.isprintable() else " " * char.isspace() for char in reader.errors.best),
        own_error=reader.errors.own,
        cut_lines=reader.cut_lines,
        damage=tuple(damage),
        **reader.found,
    )


MAX_BYTES = 256 << 10
"""Bytes read at one look, at the first one too: of a log of a gigabyte its end alone is read."""

_MAX_TAIL_BYTES = 64 << 10


class LogTail:
    """One log file, read on from where the last look ended.

    A file that is missing has no lines yet. One that became shorter, or is another file under the same name, was
    rotated and is read from its beginning. Of more than `MAX_BYTES` at one look the older part is left out.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: tuple[int, int] | None = None
        self._offset = 0
        self._rest = b""
        self._in_cut_line = False

    def new_lines(self) -> list[str]:
        """The lines that were finished since the last look, without colour codes; carriage returns end lines too.

        Raises:
            OSError: The file is there and cannot be read.
        """
        try:
            with open_regular(self.path, buffering=0) as stream:
                data = self._new_bytes(stream)
        except FileNotFoundError:
            return []
        lines = (self._rest + data).replace(b"\r", b"\n").split(b"\n")
        self._rest = lines.pop()
        if self._in_cut_line and lines:
            # Its beginning was left out, and a secret may have been cut in two there.
            del lines[0]
            self._in_cut_line = False
        if len(self._rest) > _MAX_TAIL_BYTES:
            self._rest, self._in_cut_line = b"", True
        return [clean_line(line[:MAX_LINE_BYTES]) for line in lines]

    def last_line(self) -> list[str]:
        """The line at the end that was never finished, once the writer has ended; none when there is no such line."""
        rest, self._rest = self._rest, b""
        return [clean_line(rest[:MAX_LINE_BYTES])] if rest and not self._in_cut_line else []

    def _new_bytes(self, stream: BinaryIO) -> bytes:
        found = os.fstat(stream.fileno())
        file, size = (found.st_dev, found.st_ino), found.st_size
        if file != self._file or size < self._offset:
            self._file, self._offset, self._rest, self._in_cut_line = file, 0, b"", False
        if size - self._offset > MAX_BYTES:
            self._offset, self._rest, self._in_cut_line = size - MAX_BYTES, b"", True
        stream.seek(self._offset)
        data = stream.read(MAX_BYTES)
        self._offset += len(data)
        return data


STEPS_OF_MEDIAN = 10
"""The last steps, whose median time is the step time of a training that runs."""
_LONGEST = timedelta(days=36525).total_seconds()


class TrainingProgress(Model):
    """How far a training has come."""

    iteration: int
    total: int
    step_time: float | None = None
    """Median of the last steps, seconds."""
    loss: float | None = None
    """The last one; NaN is one, too."""

    @property
    def percent(self) -> float:
        """The part that is done, 0 to 100."""
        return min(100.0, 100.0 * self.iteration / self.total) if self.total else 0.0

    @property
    def seconds_left(self) -> float | None:
        """What the other steps take if they take as long as the last ones; None where that is no time of a job."""
        left = math.nan if self.step_time is None else max(0, self.total - self.iteration) * self.step_time
        return left if 0 <= left < _LONGEST else None

    def __str__(self) -> str:
        text = f"iteration {self.iteration}/{self.total}"
        if self.loss is not None:
            text += f", loss {self.loss:.4g}"
        if self.step_time is None or self.seconds_left is None:
            return text
        left = timedelta(seconds=round(self.seconds_left))
        return f"{text}, {self.step_time:.3g} s a step, {left} left"


def progress_in_log(path: Path) -> TrainingProgress | None:
    """How far a training has come by the end of its log; None before its first step, and without a log.

    Raises:
        OSError: The log is there and cannot be read.
    """
    steps = [step for line in LogTail(path).new_lines() for step in parse_steps(line)]
    times = [step.elapsed_ms / 1000 for step in steps[-STEPS_OF_MEDIAN:] if step.elapsed_ms is not None]
    if not steps:
        return None
    median = statistics.median(times) if times else None
    return TrainingProgress(iteration=steps[-1].iteration, total=steps[-1].total, step_time=median)


class LogEnd(Model):
    """The error of a log, empty where it has none, and the lines at its end."""

    error: str
    lines: tuple[str, ...]


def end_of_log(path: Path) -> LogEnd:
    """Read the end of one log in a child.

    Raises:
        DamagedData: It cannot be read.
    """
    return read_in_child(_end_of_log, path, (path.parent,), subject=str(path))[0]


def _end_of_log(path: Path) -> tuple[LogEnd, bytes]:
    tail = LogTail(path)
    lines = (*tail.new_lines(), *tail.last_line())
    return LogEnd(error=read_logs([path]).last_error, lines=lines), b""
