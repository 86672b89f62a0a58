"""The row of a run in the history: what it was, what became of it, and what it measured; and rows as a table.

The table is for any tool: a row for each run, a column for each plain value of its history row. Columns have the names
that the values have in `HistoryRow` and `Summary`, and their types; a value that is not there is null. Pins are columns
of their commits. What has names of its own (facts, sweep points) is JSON. See docs/store.md.
"""

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from datetime import datetime
from functools import cache
from operator import attrgetter
from types import NoneType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args, get_origin

from pydantic import AwareDatetime, Field

from nightbridge.errors import InvalidInput
from nightbridge.launch.resources import resumed_from
from nightbridge.models import (
    GOLDEN,
    Arm,
    Model,
    Outcome,
    PinnedRepository,
    RunRecord,
    StoredModel,
    Summary,
    Verdict,
    VerdictStatus,
    night_order,
)
from nightbridge.models.metrics import METRIC_BY_NAME, Metric
from nightbridge.numbers import SMALLEST_SHOWN_CHANGE
from nightbridge.sbatch_options import SBATCH, split_options

if TYPE_CHECKING:
    import pyarrow as pa

TIME = "time"
"""The column of the harvest's time, as a timestamp in UTC: the one that charts go by."""

WARM_SHARE = 0.2
"""Of a loss curve, the share of steps at the start that says little."""

COMPLETE_OUTCOMES = frozenset({Outcome.SUCCEEDED, Outcome.TEARDOWN})

_MIN, _MAX = -(1 << 63), (1 << 63) - 1


class Pin(Model):
    """A commit that a run was pinned to, without the place of its checkout."""

    url: str
    ref: str = ""
    commit: str = Field(description="Full 40-character commit.")
    describe: str = Field("", description="`git describe --tags --always` of the commit.")
    subject: str = ""
    committed_at: datetime | None = None


class HistoryRow(StoredModel):
    """One run, as later nights and the report need it."""

    run_key: str
    scenario: str = ""
    night: str
    test_id: str
    series: str
    cluster: str
    attempt: int = Field(ge=1)
    sweep_point: dict[str, Any] = Field({})
    iteration: int = 1
    repeat: int = Field(0, description="0 for the night's own run; confirming re-runs and bisect points count up.")
    arm: Arm | None = Field(None, description="Of a control arm's pair, which run of it; None for any other run.")
    job_id: int | None = None
    nodes: str = Field("", description="Slurm's node expression, e.g. `node[1-2]`.")
    topology: dict[str, str] = Field(
        {}, description="What no series id has and only equals are compared in: nodes, tasks per node, GPU and so on."
    )
    outcome: Outcome | None = None
    outcome_reason: str = ""
    verdict: VerdictStatus | None = Field(None, description="None until the run is judged.")
    worse: dict[str, float] = Field(
        {}, description="By metric that regressed, its signed relative change; `golden` where golden values say so."
    )
    broken: tuple[str, ...] = Field((), description="Of these, those that broke a floor or ceiling, and `golden`.")
    moved: dict[str, float] = Field(
        {},
        description="By metric, how many times its level the cluster alone has moved it, by the control arms so far.",
    )
    gpu_hours: float | None = Field(None, description="GPUs times hours of all attempts; None where unknown.")
    resumed: bool = Field(False, description="Resumed where another run had ended, so it is never a baseline.")
    megatron_bridge: Pin
    nemo_run: Pin | None = Field(None, description="None for a workload without a launcher.")
    image: str | None = Field(None, description="Image reference; None without a container.")
    image_digest: str | None = None
    facts: dict[str, str] = Field({}, description="Driver, CUDA, NCCL, the image's release: as the job itself says.")
    summary: Summary
    store_url: str = ""
    prefix: str = Field("", description="Where the attempt's objects are, relative to the store.")
    harvested_at: AwareDatetime

    @property
    def order(self) -> str:
        """What the rows of several nights sort by."""
        return night_order(self.night, self.harvested_at)

    def is_before(self, other: "HistoryRow") -> bool:
        """Whether its night is an earlier one than another's, in time and by name.

        A night that is named by a word is after every date by its name, and what came later has no part in it.
        """
        return self.night < other.night and self.order < other.order

    @property
    def pins(self) -> dict[str, Pin]:
        """What its repositories were pinned to, by their names for people."""
        named = {"Megatron-Bridge": self.megatron_bridge, "NeMo-Run": self.nemo_run}
        return {name: pin for name, pin in named.items() if pin}


def row_of(record: RunRecord, verdict: Verdict | None) -> HistoryRow:
    """The history row of a run; None until it is judged."""
    job, worse = record.job, verdict.worse if verdict else {}
    return HistoryRow(
        run_key=record.spec.run_key,
        scenario=record.spec.scenario,
        night=record.spec.night,
        test_id=record.spec.test.id,
        series=record.series,
        cluster=job.cluster,
        attempt=job.attempt,
        sweep_point=record.spec.sweep_point,
        iteration=record.spec.iteration,
        repeat=record.spec.repeat,
        arm=record.spec.arm,
        job_id=job.job_id,
        nodes=job.status.nodes if job.status else "",
        topology=topology_of(record),
        outcome=job.outcome,
        outcome_reason=job.outcome_reason,
        verdict=verdict.status if verdict else None,
        worse=worse,
        broken=(
            *(item.metric for item in (verdict.comparisons if verdict else ()) if item.by_itself),
            *(name for name in worse if name == GOLDEN),
        ),
        moved=verdict.moved if verdict else {},
        gpu_hours=gpu_hours(record),
        resumed=bool(resumed_from(record.spec.test)),
        megatron_bridge=_pin_of(record.checkout.megatron_bridge),
        nemo_run=_pin_of(record.checkout.nemo_run) if record.checkout.nemo_run else None,
        image=record.image.reference,
        image_digest=record.image.digest,
        facts=record.facts,
        summary=record.summary,
        store_url=record.store_url,
        prefix=record.prefix,
        harvested_at=record.harvested_at,
    )


def gpu_hours(record: RunRecord) -> float | None:
    """GPUs times hours of all attempts of a run; of a workload without known GPUs each task counts as one."""
    plan = record.plan
    spans = [
        (job.status.ended_at - job.status.started_at).total_seconds() / 3600
        for job in record.jobs
        if job.status and job.status.started_at and job.status.ended_at
    ]
    return plan.nodes * plan.tasks_per_node * sum(spans) if spans else None


def topology_of(record: RunRecord) -> dict[str, str]:
    """What a run ran on, and the warm-up, which decides what its steady window is; without a GPU that no log names."""
    try:
        options, _rest = split_options(record.plan.sbatch_args, SBATCH)
    except InvalidInput:  # of another Slurm: then the constraint is not known
        options = {}
    known = {
        "nodes": record.plan.nodes,
        "tasks per node": record.plan.tasks_per_node,
        "GPU": record.facts.get("GPU"),
        "constraint": options.get("constraint", ""),
        "warm-up steps": record.spec.test.gate.warmup_steps,
    }
    return {name: str(value) for name, value in known.items() if value is not None}


def _pin_of(repository: PinnedRepository) -> Pin:
    return Pin.model_validate({name: getattr(repository, name) for name in Pin.model_fields})


# --- what a run measured ----------------------------------------------------------------------------------------------


def measured(metric: Metric, summary: Summary, field: str = "") -> float | None:
    """The value, where it is one: present, finite, and positive where nothing else makes sense.

    Args:
        metric: The metric.
        summary: What the run measured.
        field: Another field that measures the same; empty for the metric's own.
    """
    return measure_of(metric, field)(summary)


def measure_of(metric: Metric, field: str = "") -> Callable[[Summary], float | None]:
    """What takes the value of a metric out of a summary, as `measured` does: for whoever reads a history's."""
    read = curve_level if metric.name == "loss_curve" else attrgetter(field or metric.field)
    least = 0.0 if metric.must_be_positive else -math.inf

    def measure(summary: Summary) -> float | None:
        value: float | None = read(summary)
        return value if value is not None and least < value < math.inf else None

    return measure


def curve_level(summary: Summary) -> float | None:
    """How high a loss curve lies: the mean of its anchors after the first fifth of the steps; None without any."""
    losses = [loss for step, loss in summary.loss_anchors if step > WARM_SHARE * summary.steps_done]
    return sum(losses) / len(losses) if losses else None


def comparable_digest(summary: Summary) -> str:
    """The digest of a run's losses; empty where it says nothing beside another run's.

    So it is where some steps came from the log and some from TensorBoard, and where a restart computed steps again.
    """
    digest = summary.loss_digest or ""
    return digest if loss_source(digest) in ("tensorboard", "log") and len(summary.lives) <= 1 else ""


def other_losses(digest: str, summary: Summary) -> bool | None:
    """Whether a run computed other losses than those of a digest, bit for bit; None where that is unknown."""
    found = comparable_digest(summary)
    return found != digest if found and loss_source(found) == loss_source(digest) else None


def loss_source(digest: str) -> str:
    """Where the losses of a digest were read, `mixed` where from both; empty without any."""
    return digest.partition(":")[0]


def facts_of(metrics: Iterable[str]) -> set[str]:
    """What some metrics are about; one that another version measured is a fact of its own."""
    return {METRIC_BY_NAME[metric].fact if metric in METRIC_BY_NAME else metric for metric in metrics}


def good_for(row: HistoryRow, facts: Set[str]) -> HistoryRow:
    """A run as it counts for some facts: good where it regressed in others alone."""
    if row.verdict is not VerdictStatus.REGRESSED or not row.worse or facts & facts_of(row.worse):
        return row
    return row.model_copy(update={"worse": {}, "verdict": VerdictStatus.PASSED})


def hardly_moved(metric: str, change: float) -> bool:
    """Whether what regressed hardly moved: the loss curve of a deterministic test that computes something else."""
    return metric == "loss_curve" and abs(change) < SMALLEST_SHOWN_CHANGE


# --- rows as a table --------------------------------------------------------------------------------------------------


class _Column(NamedTuple):
    """Where the value of a column is in the JSON of a row, and its type."""

    path: tuple[str, ...]
    kind: type


@cache
def columns() -> Mapping[str, _Column]:
    """Every column but `TIME`, by name."""
    found = {name: _Column((name,), kind) for name, kind in _kinds(HistoryRow)}
    found |= {f"{pin}_commit": _Column((pin, "commit"), str) for pin in ("megatron_bridge", "nemo_run")}
    of_summary = {name: _Column(("summary", name), kind) for name, kind in _kinds(Summary)}
    return {name: column for name, column in (of_summary | found).items() if name != "schema_version"}


def _kinds(model: type[HistoryRow | Summary]) -> Iterator[tuple[str, type]]:
    """The fields of a model that are one plain value, or values by name."""
    for name, field in model.model_fields.items():
        choices = get_args(field.annotation)
        one = next(kind for kind in choices if kind is not NoneType) if NoneType in choices else field.annotation
        kind: Any = get_origin(one) or one
        if kind is Literal or (isinstance(kind, type) and issubclass(kind, str)):
            yield name, str
        elif isinstance(kind, type) and kind in (bool, int, float, dict):
            yield name, kind


def table_of(rows: Sequence[str], names: Sequence[str] | None = None) -> "pa.Table":
    """The table of rows.

    Args:
        rows: Each as JSON. What is no JSON, and a value of another type than its column, is null.
        names: The columns; all when left out, `TIME` first.

    """
    import pyarrow as pa

    documents = [_document(text) for text in rows]
    wanted = columns() if names is None else {name: columns()[name] for name in names}
    types = {bool: pa.bool_(), int: pa.int64(), float: pa.float64()}
    arrays = {
        name: pa.array([_value(row, column) for row in documents], types.get(column.kind, pa.string()))
        for name, column in wanted.items()
    }
    times = pa.array([_time(row) for row in documents], pa.timestamp("us", tz="UTC"))
    return pa.table({TIME: times, **arrays})


def _document(text: str) -> Mapping[str, Any]:
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return document if isinstance(document, dict) else {}


def _value(row: Mapping[str, Any], column: _Column) -> Any:
    value: Any = row
    for name in column.path:
        value = value.get(name) if isinstance(value, dict) else None
    if isinstance(value, bool) != (column.kind is bool) or (isinstance(value, int) and not _MIN <= value <= _MAX):
        return None
    if isinstance(value, int) and column.kind is float:
        return float(value)
    if not isinstance(value, column.kind):
        return None
    text = json.dumps(value) if isinstance(value, dict) else value
    return text.encode(errors="replace").decode() if isinstance(text, str) else value


def _time(row: Mapping[str, Any]) -> datetime | None:
    try:
        return datetime.fromisoformat(row["harvested_at"])
    except (KeyError, TypeError, ValueError):
        return None
