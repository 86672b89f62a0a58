"""The metrics that are measured and gated: one row each, from which everything else about a metric follows.

A row declares the metric's name in `[gate]`, how it is shown, which direction is worse, its default band, and where its
value is read: a TensorBoard tag, log patterns, and how the values of the steps become one number. `outputs` measures
by the row, `gate` compares by it, `report` shows it. A row needs two typed fields: `Summary.<field>`, where the value
is stored, and `GatePolicy.<name>`, the key of its band in TOML.
"""

import math
from typing import TYPE_CHECKING, Literal, NamedTuple

NUMBER = r"([-+]?(?:\d[\d.]*(?:e[-+]?\d+)?|nan|inf))"
"""A number in a log, in a pattern that ignores case."""

Reduction = Literal["median", "max"]
"""What becomes of the values of a run's steps: of the steady window the median, or of all of them the largest."""


class LogPattern(NamedTuple):
    """How a metric stands in a log line. Only lines that contain `text` are searched.

    `pattern` is searched without regard to case; its last group that takes part holds the number, which is multiplied
    by `factor`.
    """

    text: str
    pattern: str
    factor: float = 1.0


class Metric(NamedTuple):
    """One number of a run that is gated. `field` is its field in `Summary`, its own name where a row has none.

    `band`: its default band. `always`: every run must have it, and every table has a column for it; another one must be
    there once an earlier run had it, or where the test needs it. `launcher_only`: only runs of Megatron-Bridge's
    launcher always have it. `follows_cluster`: the cluster's speed moves it, so that canary and nodes may explain a
    change. `least_change`: the smallest relative change that is worth reporting, where that is more than the policy's;
    `finest`: the same where it is less, of a metric with next to no noise. `too_good`: from which relative improvement
    on it is more likely that something is wrong. `fact`: what it is about; what several metrics say of one fact has one
    cause. `own_run_only`: control arms do not have it, nor a night's own run where Slurm tells too little: no pair is
    asked for it, and it may be missing. `statistics`: other fields of `Summary` that measure the same.

    `tag` is Megatron-Bridge's name in TensorBoard, `other_tags` those of other programs, each with its factor.
    TensorBoard counts before the log. Without `reduce` the value has a rule of its own in `outputs.measurements`.
    """

    name: str
    label: str
    unit: str = ""
    field: str = ""
    band: float = 0.05
    lower_is_better: bool = True
    must_be_positive: bool = True
    always: bool = False
    launcher_only: bool = False
    follows_cluster: bool = False
    least_change: float = 0.0
    finest: float | None = None
    too_good: float = math.inf
    fact: str = "speed"
    own_run_only: bool = False
    statistics: tuple[str, ...] = ()
    tag: str = ""
    other_tags: tuple[tuple[str, float], ...] = ()
    log: tuple[LogPattern, ...] = ()
    reduce: Reduction | None = None

    def threshold(self, gate: object) -> float:
        """The widest band that a `GatePolicy` gives it where history is steady."""
        value: float = getattr(gate, self.name)
        return value

    def least(self, policy: float) -> float:
        """The smallest relative change that is worth reporting, given the policy's for all metrics."""
        return min(policy, self.finest) if self.finest is not None else max(policy, self.least_change)

    @property
    def heading(self) -> str:
        """Its name and unit above a column of a terminal's table: a word a line, the numbers need the 80 columns."""
        return "\n".join([*self.label.split(), self.unit.replace("/GPU", "\n/GPU")]).rstrip()

    @property
    def sign(self) -> Literal[1, -1]:
        """What a change is multiplied with to be positive for the worse."""
        return 1 if self.lower_is_better else -1

    def worse(self, change: float) -> bool:
        """Whether a change with this sign is for the worse."""
        return self.sign * change > 0


_GIGABYTES_OF_A_MEBIBYTE = 2**20 / 1e9


def _memory_patterns(what: str, short: str) -> tuple[LogPattern, ...]:
    """How logs say what the allocator has `allocated` or `reserved` at most; `short`: Megatron-LM's word for it."""
    return (
        LogPattern(f"mem-max-{what}", rf"\bmem-max-{what}-gigabytes: {NUMBER}"),
        # Megatron-LM's own: of each rank that reports in mebibytes, and in one line after the first iterations.
        LogPattern(f"max_{short}_MB", rf"\bmax_{short}_MB={NUMBER}", _GIGABYTES_OF_A_MEBIBYTE),
        LogPattern(f"max {what}", rf"memory \(MB\) \|.{{0,200}}?\bmax {what}: {NUMBER}", _GIGABYTES_OF_A_MEBIBYTE),
    )


# Megatron-Bridge prints MODEL_TFLOP as 0 when it cannot count it: such a zero is no measurement. A loss may be zero.
_ROWS = (
    Metric(
        "step_time",
        label="step time",
        unit="s",
        always=True,
        follows_cluster=True,
        too_good=0.2,
        statistics=("step_time_p05", "step_time_midmean"),
        tag="iteration-time",
        other_tags=(("iteration-time-ms", 1e-3),),  # the heterogeneous loop of examples/mimo
    ),
    Metric(
        "tflops_per_gpu",
        label="throughput",
        unit="TFLOP/s/GPU",
        lower_is_better=False,
        always=True,
        launcher_only=True,
        follows_cluster=True,
        too_good=0.25,
        tag="throughput/tflops/device",
        other_tags=(("throughput", 1.0),),
    ),
    Metric(
        "peak_memory",
        label="peak memory",
        unit="GB",
        always=True,
        launcher_only=True,
        finest=0.005,
        too_good=0.2,
        fact="memory",
        tag="memory/mem-max-allocated-gigabytes",
        other_tags=(("mem-max-allocated-bytes", 1e-9),),
        log=_memory_patterns("allocated", "alloc"),
        reduce="max",
    ),
    # What the allocator holds for tensors that come and go, which fragmentation makes more of; its blocks depend on the
    # order of what is freed, so that a small change says nothing.
    Metric(
        "reserved_memory",
        label="reserved memory",
        unit="GB",
        band=0.1,
        least_change=0.05,
        fact="memory",
        tag="memory/mem-max-reserved-gigabytes",
        other_tags=(("mem-reserved-bytes", 1e-9),),
        log=_memory_patterns("reserved", "reserved"),
        reduce="max",
    ),
    Metric(
        "final_loss",
        label="final loss",
        must_be_positive=False,
        always=True,
        finest=0.005,
        too_good=0.1,
        fact="losses",
        tag="lm loss",
    ),
    Metric(
        "tokens_per_gpu",
        label="tokens per second",
        unit="tokens/s/GPU",
        field="tokens_per_second_per_gpu",
        lower_is_better=False,
        follows_cluster=True,
        too_good=0.25,
    ),
    Metric("startup_time", label="start-up time", unit="s", band=0.5, least_change=0.2, fact="start-up"),
    # A busy file system makes a last save several times as long; what hangs takes longer still (`error_rate.py`).
    Metric(
        "teardown_time",
        label="time after the last step",
        unit="s",
        band=7.0,
        least_change=7.0,
        fact="teardown",
        own_run_only=True,
    ),
    Metric(
        "checkpoint_time",
        label="checkpoint time",
        unit="s",
        band=0.5,
        least_change=0.2,
        fact="checkpoints",
        log=(
            # Megatron-LM's timers, with `timing_log_option` minmax or max, milliseconds: the slowest rank's.
            LogPattern(
                "save-checkpoint",
                rf"\bsave-checkpoint(?:-non-persistent)? \.*: (?:\({NUMBER}, {NUMBER}\)|{NUMBER})",
                1e-3,
            ),
        ),
        reduce="median",
    ),
    Metric(
        "loss_curve",
        label="loss curve",
        field="loss_anchors",
        must_be_positive=False,
        finest=0.005,
        too_good=0.1,
        fact="losses",
    ),
    Metric(
        "grad_norm",
        label="largest grad norm",
        field="grad_norm_max",
        band=0.5,
        must_be_positive=False,
        least_change=0.1,
        too_good=0.95,  # no more than noise and a spike in some nights explain
        fact="losses",
        tag="grad-norm",
    ),
    # The median step sees neither some slow steps, nor what happens between steps, nor how a run begins and ends.
    # Their widest bands let about 1 % of single real runs through, before any re-run (`benchmarks/distribution.py`).
    Metric(
        "wall_step_time", label="mean wall time of a step", unit="s", band=0.2, follows_cluster=True, least_change=0.03
    ),
    Metric("slow_steps", label="95th percentile over median of the step times", band=1.0, least_change=0.15),
    Metric("tail_slowdown", label="slowness of the last steps", band=0.3, least_change=0.12),
    Metric("warmup_step_time", label="mean step time of the warm-up", unit="s", band=0.5, least_change=0.25),
    Metric("first_step_time", label="first step", unit="s", band=2.0, least_change=0.5),
)

METRICS = tuple(row._replace(field=row.field or row.name) for row in _ROWS)
METRIC_BY_NAME: dict[str, Metric] = {metric.name: metric for metric in METRICS}


def label_of(name: str) -> str:
    """What a metric is called in reports; one that only a newer release measures is called by its name."""
    return METRIC_BY_NAME[name].label if name in METRIC_BY_NAME else name.replace("_", " ")


COLUMNS = tuple(metric for metric in METRICS if metric.always)
"""The metrics that every table shows; the others are named where they are news."""

INVERSES = frozenset({"tflops_per_gpu", "tokens_per_gpu"})
"""Metrics that are a constant over the step time, as long as the configuration stays."""

SAME_FACT = 0.01
"""So close to what the step time's change makes of them, relative, metrics of it say the same fact."""


def is_step_times(name: str, change: float, step_time: float) -> bool:
    """Whether a change says of the steps what the step time's says, with another number; both relative, signed."""
    of_steps = 1 + change if name in INVERSES else 1 / (1 + change)
    return name in {*INVERSES, "wall_step_time"} and abs(of_steps * (1 + step_time) - 1) < SAME_FACT


if TYPE_CHECKING:
    MetricName = str
else:
    MetricName = Literal[tuple(METRIC_BY_NAME)]
"""The name of a metric in `[gate]`, checked where a model is read."""
