"""A metric's value in a run: when a number is a measurement at all, its limits, and how numbers are written."""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from operator import attrgetter
from typing import Any

from nightbridge.models import Limits, Outcome, Summary, TestDefinition
from nightbridge.models.metrics import Metric

WARM_SHARE = 0.2
"""Of a loss curve, the share of steps at the start that says little."""

COMPLETE_OUTCOMES = frozenset({Outcome.SUCCEEDED, Outcome.TEARDOWN})


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


def is_required(metric: Metric, test: TestDefinition, value: float | None, earlier: Sequence[float]) -> bool:
    """Whether a run must have a metric, or has it: once an earlier run measured it, later ones have to."""
    always = metric.always and (test.has_launcher or not metric.launcher_only)
    return always or metric.name in test.gate.required or value is not None or bool(earlier)


def curve_level(summary: Summary) -> float | None:
    """How high a loss curve lies: the mean of its anchors after the first fifth of the steps; None without any."""
    losses = [loss for step, loss in summary.loss_anchors if step > WARM_SHARE * summary.steps_done]
    return sum(losses) / len(losses) if losses else None


def comparable_digest(summary: Summary) -> str:
    """The digest of a run's losses; empty where it says nothing beside another run's.

    So it is where some steps came from the log and some from TensorBoard, and where a restart computed steps again.
    """
    digest = summary.loss_digest or ""
    return digest if _source(digest) in ("tensorboard", "log") and len(summary.lives) <= 1 else ""


def other_losses(digest: str, summary: Summary) -> bool | None:
    """Whether a run computed other losses than those of a digest, bit for bit; None where that is unknown."""
    found = comparable_digest(summary)
    return found != digest if found and _source(found) == _source(digest) else None


def _source(digest: str) -> str:
    return digest.partition(":")[0]


def hardly_moved(metric: str, change: float) -> bool:
    """Whether what regressed hardly moved: the loss curve of a deterministic test that computes something else."""
    return metric == "loss_curve" and abs(change) < SMALLEST_SHOWN_CHANGE


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


def format_count(count: int, noun: str) -> str:
    """A count with its noun, `1 run` or `12 runs`."""
    return f"{count:,} {noun}{'s' * (count != 1)}"


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
