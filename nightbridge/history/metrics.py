"""What is gated: each metric's name, unit and direction, and when a number is a measurement at all.

Number formats: on the page, in tables, and in reasons.
"""

import math
import re
from collections.abc import Mapping
from datetime import timedelta
from typing import Any, NamedTuple

from nightbridge.models import GatePolicy, Limits, MetricName, Outcome, Summary, VerdictStatus

WARM_SHARE = 0.2
"""Of a loss curve, the share of steps at the start that says little."""

GOOD_VERDICTS = frozenset({VerdictStatus.PASSED, VerdictStatus.IMPROVED, VerdictStatus.NO_BASELINE})
COMPLETE_OUTCOMES = frozenset({Outcome.SUCCEEDED, Outcome.TEARDOWN})


class Metric(NamedTuple):
    """One number of a run that is gated. `attribute` is its field in `Summary`.

    `always`: every run must have it; another one must be there once an earlier run had it, or where the test needs
    it. `follows_cluster`: the cluster's speed moves it, so that canary and nodes may explain a change.
    `least_change`: the smallest relative change that is worth reporting, where that is more than the policy's.
    """

    name: MetricName
    label: str
    unit: str
    lower_is_better: bool
    attribute: str
    must_be_positive: bool
    always: bool = True
    follows_cluster: bool = False
    least_change: float = 0.0

    def threshold(self, gate: GatePolicy) -> float:
        """The widest band that the policy gives it where history is steady."""
        value: float = getattr(gate, self.name)
        return value

    @property
    def heading(self) -> str:
        """Its name and unit above a column of a terminal's table: a word a line, the numbers need the 80 columns."""
        return "\n".join([*self.label.split(), self.unit.replace("/GPU", "\n/GPU")]).rstrip()

    def worse(self, change: float) -> bool:
        """Whether a change with this sign is for the worse."""
        return change > 0 if self.lower_is_better else change < 0


# Megatron-Bridge prints MODEL_TFLOP as 0 when it cannot count it: such a zero is no measurement. A loss may be zero.
METRICS = (
    Metric("step_time", "step time", "s", True, "step_time", True, follows_cluster=True),
    Metric("tflops_per_gpu", "throughput", "TFLOP/s/GPU", False, "tflops_per_gpu", True, follows_cluster=True),
    Metric("peak_memory", "peak memory", "GB", True, "peak_memory", True),
    Metric("final_loss", "final loss", "", True, "final_loss", False),
)
"""Those that every table shows."""

MORE_METRICS = (
    Metric(
        "tokens_per_gpu",
        "tokens per second",
        "tokens/s/GPU",
        False,
        "tokens_per_second_per_gpu",
        True,
        always=False,
        follows_cluster=True,
    ),
    Metric("startup_time", "start-up time", "s", True, "startup_time", True, always=False, least_change=0.2),
    Metric("checkpoint_time", "checkpoint time", "s", True, "checkpoint_time", True, always=False, least_change=0.2),
    Metric("loss_curve", "loss curve", "", True, "loss_anchors", False, always=False),
    Metric("grad_norm", "largest grad norm", "", True, "grad_norm_max", False, always=False, least_change=0.1),
    # A median over all steps does not see what slows the last ones alone.
    Metric("tail_slowdown", "slowness of the last steps", "", True, "tail_slowdown", True, False, least_change=0.4),
)
"""Those that are gated besides, and named where they are news."""

GATED = (*METRICS, *MORE_METRICS)
METRIC_BY_NAME: dict[str, Metric] = {metric.name: metric for metric in GATED}


def measured(metric: Metric, summary: Summary) -> float | None:
    """The value, where it is one: present, finite, and positive where nothing else makes sense."""
    value: float | None
    value = curve_level(summary) if metric.name == "loss_curve" else getattr(summary, metric.attribute)
    if value is None or not math.isfinite(value) or (metric.must_be_positive and value <= 0):
        return None
    return value


def curve_level(summary: Summary) -> float | None:
    """How high a loss curve lies: the mean of its anchors after the first fifth of the steps; None without any."""
    losses = [loss for step, loss in summary.loss_anchors if step > WARM_SHARE * summary.steps_done]
    return sum(losses) / len(losses) if losses else None


def beyond_limits(metric: Metric, value: float, limits: Limits) -> str:
    """What a value breaks of its floor and ceiling, in words; empty when it keeps them. NaN keeps none."""
    if limits.min is not None and not value >= limits.min:
        return f"{metric.label} is below its floor of {limits.min:g} {metric.unit}".rstrip()
    if limits.max is not None and not value <= limits.max:
        return f"{metric.label} is above its ceiling of {limits.max:g} {metric.unit}".rstrip()
    return ""


# Below this a change is rounding, and a sign in front of it would only mislead.
SMALLEST_SHOWN_CHANGE = 0.0005


def format_percent(share: float) -> str:
    """A share as a percentage, `5 %` or `2.5 %`."""
    return f"{share * 100:.3g} %"


def format_change(change: float | None) -> str:
    """A signed relative change, `+8.1 %`; empty where there is none."""
    if change is None:
        return ""
    if abs(change) < SMALLEST_SHOWN_CHANGE:
        return "±0.0 %"
    return f"{'+' if change > 0 else '−'}{abs(change) * 100:,.1f} %"


def format_value(value: float | None, unit: str = "") -> str:
    """A value with four significant digits and its unit; a dash where there is none."""
    if value is None:
        return "–"
    number = f"{value:,.0f}" if abs(value) >= 1000 else f"{value:#.4g}".rstrip(".")
    return f"{number} {unit}".rstrip()


def format_count(count: int, thing: str) -> str:
    """So many of a thing, `1 run` or `12 runs`."""
    return f"{count:,} {thing}{'s' * (count != 1)}"


def format_point(point: Mapping[str, Any]) -> str:
    """A point of a sweep, `tp = 2, cuda_graph_scope = attn mlp`; variables without the name of their table."""
    return ", ".join(f"{name.rpartition('.')[2]} = {format_choice(value)}" for name, value in point.items())


def format_choice(value: object) -> str:
    """One value of a sweep's axis, as its file has it; a list as its items, with spaces between them."""
    if isinstance(value, list | tuple):
        return " ".join(format_choice(item) for item in value)
    return str(value).lower() if isinstance(value, bool) else str(value)


def markdown_text(text: str) -> str:
    """A text from outside in one line of Markdown, in which none of its characters has a meaning."""
    return re.sub(r"([\\`*_{}\[\]<>|#])", r"\\\1", " ".join(text.split()))


def format_duration(duration: timedelta) -> str:
    """A duration in words: `8 h 12 min`, `45 min`, `30 s`."""
    seconds = round(duration.total_seconds())
    if seconds < 60:
        return f"{seconds} s"
    hours, minutes = divmod(seconds // 60, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min"
