"""The values of each iteration, from TensorBoard where it has them and from the log where it has not.

TensorBoard is preferred because the log rounds (step time to 0.1 ms, TFLOP/s to 0.1). The log fills what TensorBoard
lacks, such as the tail that a killed job never flushed, and checks what both have. A value that TensorBoard has is
never replaced, not even a NaN.
"""

import itertools
import math
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np

from nightbridge.models import Life
from nightbridge.models.metrics import METRIC_BY_NAME, METRICS, Metric, Reduction
from nightbridge.outputs.event_files import last_samples, read_event_files, scalar_table
from nightbridge.outputs.logs import MAX_LINE_BYTES, LogReading, StepRecord, latest_steps, read_logs

if TYPE_CHECKING:
    import pandas as pd

LOG_FILE = "log"
"""The `file` of a row of the scalar table that comes from the log."""


class StepColumn(NamedTuple):
    """One value per iteration: TensorBoard's tag, the log's field and its factor, and how far the log is rounded."""

    tag: str
    field: str
    factor: float
    rounding: float


STEP_COLUMNS: dict[str, StepColumn] = {
    "step_time": StepColumn(METRIC_BY_NAME["step_time"].tag, "elapsed_ms", 1e-3, 6e-5),
    "tflops_per_gpu": StepColumn(METRIC_BY_NAME["tflops_per_gpu"].tag, "tflops_per_gpu", 1.0, 0.06),
    "loss": StepColumn(METRIC_BY_NAME["final_loss"].tag, "lm_loss", 1.0, 0.0),
    "grad_norm": StepColumn(METRIC_BY_NAME["grad_norm"].tag, "grad_norm", 1.0, 6e-4),
}
"""Columns of `Curves.steps`: step time in seconds, TFLOP/s per GPU, lm loss, gradient norm."""

_OTHER_STEP_TAGS = ("learning-rate", "batch-size")
_RELATIVE_TOLERANCE = 1e-4


@dataclass(frozen=True)
class Curves:
    """Everything that was recorded about a run's iterations.

    `steps`: one row per recorded iteration (the index, ascending), one float column per entry of `STEP_COLUMNS`, NaN
    where there is no value or the value is not a number. `table`: the scalar table of `event_files`, with the log's
    values (file `log`, no wall time) where TensorBoard has none. `notes` says where that is so; `damage` is what is
    wrong with the files, or between them. `lives`: the oldest first; more than one where the run was restarted.
    `samples`: the last iteration of which TensorBoard has the samples up to it, and those.
    """

    steps: "pd.DataFrame"
    table: "pd.DataFrame"
    log: LogReading
    source: Literal["tensorboard", "log", "none"]
    damage: tuple[str, ...]
    notes: tuple[str, ...]
    start: int
    lives: tuple[Life, ...] = ()
    samples: tuple[int, int] | None = None

    def rows_of(self, tag: str) -> "pd.DataFrame":
        """The rows of the table that count of a tag, those of iterations, in their order."""
        table = self.table
        return table[(table["tag"] == tag) & ~table["superseded"] & (table["step"] > 0)].sort_values("step")

    @property
    def last_recorded(self) -> int:
        """The last iteration that was recorded, 0 without any."""
        return int(self.steps.index[-1]) if len(self.steps) else 0

    @property
    def steps_done(self) -> int:
        """The last iteration that was done, 0 without any record.

        Those after the last record of a longer interval were done where the log reports the end of training.
        """
        last, log = self.last_recorded, self.log
        end = log.steps[-1].total if log.steps and log.training_done and log.exit_iteration is None else last
        return end if last < end < last + logging_interval(self.steps.index.tolist()) else last

    def interval_of(self, name: str) -> int:
        """Iterations from one value of a column to the next: 1 where it follows no interval, and the rest was lost."""
        recorded = self.steps.index[self.steps[name].notna() & (self.steps.index > self.start + 1)]
        interval = logging_interval(recorded.tolist())
        return 1 if (recorded % interval).any() else interval

    def due(self, name: str, steps: "pd.DataFrame") -> "pd.Series[float]":
        """The values of a column at those of the rows at which the run has to record it.

        Losses follow TensorBoard's interval, and times the log's, which may be a longer one.
        """
        return steps.loc[steps.index % self.interval_of(name) == 0, name]

    @property
    def missing_steps(self) -> int:
        """Iterations up to the last one that should have been recorded and were not."""
        interval = logging_interval(self.steps.index.tolist())
        recorded = sum(1 for step in self.steps.index if step > self.start and step % interval == 0)
        return max(self.steps_done // interval - self.start // interval - recorded, 0)

    @property
    def non_finite_steps(self) -> int:
        """Iterations whose loss, or gradient norm where the run records it, is missing or not finite.

        Those that the log counts as skipped are left out: they have no gradient norm, and `gate.skipped_iterations`
        limits them.
        """
        finite = np.isfinite(self.steps["loss"])
        if (self.table["tag"] == STEP_COLUMNS["grad_norm"].tag).any():
            finite &= np.isfinite(self.steps["grad_norm"])
        bad = self.steps.index[~finite]
        return len(bad) - self._skipped_among(bad) + self.missing_steps

    def _skipped_among(self, iterations: "pd.Index[int]") -> int:
        """How many of them are among those that a record of the log counts as skipped since the one before it."""
        records = latest_steps(self.log.steps).values()
        before = (self.start, *(record.iteration for record in records))
        return sum(
            min(record.skipped_iterations, int(((earlier < iterations) & (iterations <= record.iteration)).sum()))
            for earlier, record in zip(before, records, strict=False)
            if record.skipped_iterations
        )


def logging_interval(iterations: Sequence[int]) -> int:
    """Iterations from one record to the next: the commonest distance (the smallest of equals), 1 when unknown."""
    distances = Counter(later - earlier for earlier, later in itertools.pairwise(iterations))
    return min(distances, key=lambda distance: (-distances[distance], distance), default=1)


def read_curves(event_files: Sequence[Path], logs: Sequence[Path]) -> Curves:
    """Read event files (any order) and logs (oldest first) into one set of curves. Damage is noted, never raised."""
    import pandas as pd

    files, damage = read_event_files(event_files)
    table, samples = with_usual_tags(scalar_table(files)), last_samples(files)
    log = read_logs(logs)
    records = latest_steps(step for step in log.steps if 0 < step.iteration <= step.total)
    current = table[~table["superseded"] & (table["step"] > 0)]
    step_tags = {column.tag for column in STEP_COLUMNS.values()} | set(_OTHER_STEP_TAGS)
    recorded = set(current.loc[current["tag"].isin(step_tags), "step"]) | set(records)
    steps = pd.DataFrame(index=pd.Index(sorted(recorded), dtype="int64", name="step"))
    # A life whose events were never flushed is in the log alone.
    lives_by_log = _lives(pd.DataFrame(_life_rows(log.steps), columns=_LIFE_COLUMNS))
    lives = max(_lives_of(table), lives_by_log, key=len)
    notes: list[str] = [_restarts(lives)] if len(lives) > 1 else []
    disagreements: list[str] = []
    filled: list[pd.DataFrame] = []
    from_events = 0
    compare_loss = logging_interval(list(records)) == 1  # else the log prints means over the interval
    if log.cut_lines:
        notes.append(f"{log.cut_lines} lines of the log are longer than {MAX_LINE_BYTES} bytes; the rest was not read")
    for name, column in STEP_COLUMNS.items():
        board = current.loc[current["tag"] == column.tag].set_index("step")["value"]
        logged = _log_values(records, column)
        extra = logged[~logged.index.isin(board.index)]
        from_events += len(board)
        if len(event_files) and len(extra):
            notes.append(
                f"TensorBoard lacks `{column.tag}` at {len(extra)} of {len(logged)} iterations, the first is"
                f" {extra.index[0]}; the log's values are used"
            )
        if name != "loss" or compare_loss:
            # Where two nodes' text tore a line of rank 0, the next one that agrees in step time may be a neighbour's:
            # good enough to fill a hole, no evidence of damage.
            certain = [column.field != "tflops_per_gpu" or not records[step].matched for step in logged.index]
            disagreements += _disagreement(column, board, logged[certain])
        steps[name] = pd.concat([board, extra]).reindex(steps.index).astype("float64")
        filled.append(_rows(column.tag, extra))
    recorded_rows = [rows for rows in (table, *filled) if len(rows)]
    return Curves(
        steps=steps,
        table=pd.concat(recorded_rows, ignore_index=True) if recorded_rows else table,
        log=log,
        source="tensorboard" if from_events else "log" if records else "none",
        damage=(*damage, *log.damage, *disagreements),
        notes=tuple(notes),
        start=log.start_iteration or 0,
        lives=lives,
        samples=samples,
    )


_LIFE_COLUMNS = ("step", "value", "file", "session")
_MAX_LIVES = 100
"""The last ones are kept: a log of a million steps that go up and down is no million restarts."""


def _lives_of(table: "pd.DataFrame") -> tuple[Life, ...]:
    """The lives of a run by its event files; none where they have no iterations."""
    for tag in (STEP_COLUMNS["step_time"].tag, STEP_COLUMNS["loss"].tag):
        rows = table.loc[(table["tag"] == tag) & (table["step"] > 0), list(_LIFE_COLUMNS)]
        if len(rows):
            return _lives(rows if tag == STEP_COLUMNS["step_time"].tag else rows.assign(value=math.nan))
    return ()


def _life_rows(records: Sequence[StepRecord]) -> list[tuple[int, float, str, int]]:
    """The rows of a log's iterations. A line that a launcher wrote twice is one iteration, and no restart."""
    factor = STEP_COLUMNS["step_time"].factor
    printed = (record._replace(tflops_per_gpu=None, matched=False) for record in records)
    return [
        (record.iteration, math.nan if record.elapsed_ms is None else record.elapsed_ms * factor, LOG_FILE, 0)
        for record, _same in itertools.groupby(printed)
        if 0 < record.iteration <= record.total
    ]


def _lives(rows: "pd.DataFrame") -> tuple[Life, ...]:
    """Split iterations, in the order of writing, where a file or session begins, or the step does not grow."""
    if not len(rows):
        return ()
    steps, values, files = (rows[name].to_numpy() for name in ("step", "value", "file"))
    begins = (np.diff(steps) <= 0) | (files[1:] != files[:-1]) | (np.diff(rows["session"].to_numpy()) > 0)
    edges = [0, *(np.flatnonzero(begins) + 1).tolist(), len(steps)][-_MAX_LIVES - 1 :]
    spans = [(slice(first, end), values[first:end]) for first, end in itertools.pairwise(edges)]
    timed = [(span, times[np.isfinite(times)]) for span, times in spans]
    return tuple(
        Life(
            first_step=int(steps[span][0]),
            last_step=int(steps[span][-1]),
            median_step_time=float(np.median(times)) if len(times) else None,
        )
        for span, times in timed
    )


def _restarts(lives: Sequence[Life]) -> str:
    """The note on a run that was restarted."""
    redone = sum(max(before.last_step - after.first_step + 1, 0) for before, after in itertools.pairwise(lives))
    spans = ", ".join(
        f"{life.first_step} to {life.last_step}"
        + ("" if life.median_step_time is None else f" at {life.median_step_time:.4g} s")
        for life in lives
    )
    times = "once" if len(lives) == 2 else f"{len(lives) - 1} times"
    return f"restarted {times}: iterations {spans}; {redone} were done again or thrown away"


def _log_values(records: dict[int, StepRecord], column: StepColumn) -> "pd.Series[float]":
    import pandas as pd

    values = {
        iteration: value * column.factor
        for iteration, record in records.items()
        if (value := getattr(record, column.field)) is not None
    }
    return pd.Series(values, dtype="float64", index=pd.Index(list(values), dtype="int64"))


def _disagreement(column: StepColumn, board: "pd.Series[float]", logged: "pd.Series[float]") -> list[str]:
    """The message for an iteration on which TensorBoard and the log disagree."""
    common = board.index.intersection(logged.index)
    different = [
        step
        for step, one, other in zip(common, board[common], logged[common], strict=True)
        if math.isfinite(one)
        and math.isfinite(other)
        and abs(one - other) > column.rounding + _RELATIVE_TOLERANCE * abs(one)
    ]
    if not different:
        return []
    step = different[0]
    return [
        f"TensorBoard and the log disagree on `{column.tag}` at {len(different)} of {len(common)} iterations, first at"
        f" {step}: {board[step]:g} and {logged[step]:g}"
    ]


def _rows(tag: str, values: "pd.Series[float]") -> "pd.DataFrame":
    import pandas as pd

    return pd.DataFrame(
        {
            "tag": pd.Series([tag] * len(values), dtype="str"),
            "step": values.index,
            "wall_time": math.nan,
            "value": values.to_numpy(),
            "file": pd.Series([LOG_FILE] * len(values), dtype="str"),
            "superseded": False,
            "session": 0,
        }
    )


def value_of(metric: Metric, curves: Curves, steady: "pd.DataFrame") -> float | None:
    """The value of a metric that says how its steps become one number: TensorBoard's, else the log's.

    None where nothing was recorded, or where TensorBoard recorded a value that is not finite.

    A median is taken of the steady window, the largest of all steps.
    """
    recorded = curves.rows_of(metric.tag)
    if metric.reduce == "median":
        recorded = recorded[recorded["step"].isin(steady.index)]
    values: Sequence[float] = recorded["value"].tolist() or curves.log.values.get(metric.name, ())
    if metric.reduce is None or not len(values) or not np.isfinite(values).all():
        return None
    return float(_REDUCTIONS[metric.reduce](values))


_REDUCTIONS: dict[Reduction, Callable[[Sequence[float]], float]] = {"median": statistics.median, "max": max}


def with_usual_tags(table: "pd.DataFrame") -> "pd.DataFrame":
    """Add the values under Megatron-Bridge's tags to a scalar table that has them under other programs' only.

    What the program wrote stays in the table as well. A tag that it wrote itself is never added to.
    """
    import pandas as pd

    present = set(table["tag"].unique())
    added = [
        rows.assign(tag=metric.tag, value=rows["value"] * factor)
        for metric in METRICS
        for other, factor in metric.other_tags
        if other in present and metric.tag not in present
        for rows in [table[table["tag"] == other]]
    ]
    return pd.concat([table, *added], ignore_index=True) if added else table
