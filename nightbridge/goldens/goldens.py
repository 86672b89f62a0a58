"""Golden values: reading and writing upstream's files, and upstream's comparison made to fail closed.

Two formats:

* Megatron-Bridge: an object per step, `{"0": {"lm loss": ..., "GPU utilization": ...}, ..., "alloc": ..., "max_alloc":
  ..., "max_reserved": ...}`, perhaps once wrapped in `baseline` (preferred) or `current`. The key is the iteration
  minus one; here steps are iterations, counted from 1.
* Megatron-LM: an object per metric, `{"lm loss": {"start_step": 1, "end_step": 50, "step_interval": 5, "values": {"1":
  ..., "5": ...}}}`, where `"nan"` is a step that the golden run has not recorded.

The rules and their defaults are those of Megatron-Bridge's `evaluate.py`, with four differences, each because the
original passes broken runs: values are paired by step number; what is missing or not finite fails; being faster or
smaller never fails; and throughput is looked at over the whole run as well, not only over its last third.
"""

import json
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from nightbridge.errors import DamagedData, InvalidInput
from nightbridge.files import read_regular
from nightbridge.goldens.parity import Array, curve_of, relative
from nightbridge.models import GOLDEN_LIMIT, GoldenPolicy, MetricName, Model, Summary
from nightbridge.numbers import format_percent

if TYPE_CHECKING:
    import pandas as pd

Format = Literal["megatron-bridge", "megatron-lm"]

LOSS, GRAD_NORM = "lm loss", "grad norm"
STEP_TIME, UTILISATION, ITERATION_TIME = "elapsed time per iteration (ms)", "GPU utilization", "iteration-time"
BRIDGE_MEMORY = ("alloc", "max_alloc", "max_reserved")
MEGATRON_LM_MEMORY = ("mem-allocated-bytes", "mem-max-allocated-bytes")


class GoldenValues(Model):
    """What a run measured, per iteration (from 1), as a golden file holds it. All values are finite or left out."""

    format: Format
    metrics: dict[str, dict[int, float]] = Field(description="Values by iteration, by the file's name of the metric.")
    not_recorded: dict[str, tuple[int, ...]] = Field({}, description="Iterations that the file has without a value.")
    memory: dict[str, float] = Field({}, description="`alloc` and the like in GB, Megatron-LM's in bytes.")


DEFAULT_POLICY = GoldenPolicy()


class GoldenFault(NamedTuple):
    """A rule that a run does not pass, and why."""

    rule: str
    message: str


# Whether less of it is better. The first that the golden file has is gated.
SPEEDS = {UTILISATION: False, ITERATION_TIME: True}


# --- files -----------------------------------------------------------------------------------------------------------


def read_golden_file(path: Path) -> GoldenValues:
    """Read a golden file of either format.

    Raises:
        InvalidInput: There is no such file, or it holds something else than training metrics.
        DamagedData: It is not whole: no JSON, or steps that it declares are missing.
    """
    try:
        data = read_regular(path.resolve(), limit=GOLDEN_LIMIT)
    except OSError as error:
        raise InvalidInput(f"cannot be read ({error.strerror})", subject=str(path)) from error
    return read_golden(data, str(path))


def read_golden(data: bytes | str, subject: str = "golden values") -> GoldenValues:
    """Read golden values of either format; `subject` is what errors call them.

    Raises:
        InvalidInput: They are something else than training metrics.
        DamagedData: They are not whole: no JSON, or declared steps are missing.
    """
    try:
        text = data.decode() if isinstance(data, bytes) else data
        content = json.loads(text, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise DamagedData(f"not JSON ({error})", subject=subject, advice="Record the golden values again") from error
    if not isinstance(content, dict) or not content:
        raise InvalidInput("not an object with values", subject=subject)
    if any(isinstance(value, dict) and "values" in value for value in content.values()):
        return _read_megatron_lm(content, subject)
    inner = next((content[name] for name in ("baseline", "current") if isinstance(content.get(name), dict)), content)
    return _read_bridge(inner, subject)


def write_golden(values: GoldenValues) -> str:
    """What a run measured as a file of Megatron-Bridge's; reading it gives the same values."""
    iterations = sorted({iteration for known in values.metrics.values() for iteration in known})
    steps = {
        str(iteration - 1): {name: known[iteration] for name, known in values.metrics.items() if iteration in known}
        for iteration in iterations
    }
    return json.dumps({**steps, **values.memory}, indent=2) + "\n"


def golden_of_steps(
    metrics: Mapping[str, Mapping[int, float | None]], memory: Mapping[str, float | None]
) -> GoldenValues:
    """Megatron-Bridge's golden values of a run's own measurements.

    Args:
        metrics: By the file's names (`lm loss`, `elapsed time per iteration (ms)`, `GPU utilization`, `grad norm`), the
            value of each iteration, from 1. None, NaN and infinity become iterations without a value.
        memory: `alloc`, `max_alloc` and `max_reserved` in GB, as far as known.
    """
    sizes = {name: size for name, size in memory.items() if size is not None and math.isfinite(size)}
    return GoldenValues(format="megatron-bridge", **_recorded(metrics), memory=sizes)


def _recorded(values: Mapping[str, Mapping[int, Any]]) -> dict[str, Any]:
    """The values of each metric by iteration, and the iterations without one, as fields of `GoldenValues`."""
    metrics = {
        name: {step: number for step, value in of_steps.items() if (number := _number(value)) is not None}
        for name, of_steps in values.items()
    }
    gaps = {name: tuple(sorted(of_steps.keys() - metrics[name].keys())) for name, of_steps in values.items()}
    return {"metrics": metrics, "not_recorded": {name: steps for name, steps in gaps.items() if steps}}


def _unique(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object in which no key occurs twice: of two values, none can be trusted."""
    content = dict(pairs)
    if len(content) < len(pairs):
        raise ValueError("a key occurs twice")
    return content


def _number(value: Any) -> float | None:
    """A finite number, or None: for `"nan"`, NaN, infinity, null, what is no number or too large for one."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:
        return None


def _is_value(value: Any) -> bool:
    """Whether it is a number, or one of the spellings of none."""
    if isinstance(value, str):
        return value.lower() == "nan"
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool))


def _read_bridge(content: Mapping[str, Any], subject: str) -> GoldenValues:
    steps = {int(key): value for key, value in content.items() if key.isdecimal()}
    if not steps or not all(isinstance(value, dict) for value in steps.values()):
        raise InvalidInput("contains no steps", subject=subject, advice="Give golden values of Megatron-Bridge or -LM")
    strange = sorted({name for step in steps.values() for name, value in step.items() if not _is_value(value)})
    if strange:
        raise InvalidInput(f"{strange[0]!r} is not a number: these are not training metrics", subject=subject)
    names = sorted({name for step in steps.values() for name in step})
    values = {name: {key + 1: steps[key].get(name) for key in sorted(steps)} for name in names}
    memory = {name: size for name in BRIDGE_MEMORY if (size := _number(content.get(name))) is not None}
    return GoldenValues(format="megatron-bridge", **_recorded(values), memory=memory)


def _read_megatron_lm(content: Mapping[str, Any], subject: str) -> GoldenValues:
    # Some files have averages besides.
    whole = {name: series for name, series in content.items() if isinstance(series, dict) and "values" in series}
    fields = _recorded({name: _steps_of(series, f"{subject}: {name}") for name, series in whole.items()})
    memory = {name: max(fields["metrics"][name].values()) for name in MEGATRON_LM_MEMORY if fields["metrics"].get(name)}
    return GoldenValues(format="megatron-lm", **fields, memory=memory)


def _steps_of(series: Mapping[str, Any], subject: str) -> dict[int, Any]:
    """The values of a metric by step; every step that the file declares must be there."""
    try:
        first, last, interval = (int(series[name]) for name in ("start_step", "end_step", "step_interval"))
        listed = series["values"]
        if isinstance(listed, list):
            # An older form without step numbers; there the last step is not a part of it.
            declared = range(first, last, interval)
            ways = [declared]
            values = dict(zip(declared, listed, strict=True))
        else:
            declared = range(first, last + 1, interval)
            # Two ways to count: from the first step on, or the first step and then the multiples of the interval.
            ways = [declared, range(max(0, (first // interval + 1) * interval), last + 1, interval)]
            values = {int(step): value for step, value in listed.items()}
        steps, count = sorted(values), len(declared)
    except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise DamagedData(f"not the values of its steps ({error})", subject=subject) from error
    # Lengths first: a file of one value may declare more steps than there is memory for.
    if not any(len(way) <= len(steps) and steps == sorted({first, *way}) for way in ways):
        raise DamagedData(
            f"declares {count} steps from {first} to {last} and has {len(steps)}",
            subject=subject,
            advice="Record the golden values again",
        )
    if not all(_is_value(value) for value in values.values()):
        raise DamagedData("has a value that is not a number", subject=subject)
    return dict(sorted(values.items()))


# --- comparison ------------------------------------------------------------------------------------------------------


def compare_golden(
    run: GoldenValues, golden: GoldenValues, policy: GoldenPolicy = DEFAULT_POLICY
) -> tuple[GoldenFault, ...]:
    """Check a run, `grad norm` among its metrics, by all rules against golden values; one that cannot be checked fails.

    Returns:
        The rules that it does not pass.
    """
    rules = (_check_metrics, _check_steps, _check_grad_norm, _check_loss, _check_speed, _check_memory)
    return tuple(fault for check in rules for fault in check(run, golden, policy))


def _check_metrics(run: GoldenValues, golden: GoldenValues, policy: GoldenPolicy) -> Iterator[GoldenFault]:
    """Every metric of the golden values is measured, and golden values have what the rules need."""
    needed = policy.required_metrics or (LOSS,)
    faults = [f"the golden values have no {name}" for name in needed if not golden.metrics.get(name)]
    if golden.format == "megatron-bridge":  # Megatron-LM's say "nan" where they have recorded nothing
        gaps = {name: golden.not_recorded[name] for name in needed if name in golden.not_recorded}
        faults += [
            f"the golden values have no finite {name} at {len(steps)} steps, first {steps[0]}"
            for name, steps in gaps.items()
        ]
    faults += [f"the run has no {name}" for name in (*golden.metrics, *needed) if not run.metrics.get(name)]
    yield from _joined("metrics", faults)


def _check_steps(run: GoldenValues, golden: GoldenValues, _policy: GoldenPolicy) -> Iterator[GoldenFault]:
    """Every step that the golden values have was measured, and nothing that was measured is not finite."""
    faults = []
    for name, expected in golden.metrics.items():
        measured = run.metrics.get(name, {})
        missing = sorted(expected.keys() - measured.keys())
        if missing:
            faults.append(f"{name}: {len(missing)} of {len(expected)} steps missing or not finite, first {missing[0]}")
    for name, steps in run.not_recorded.items():
        # Where the golden run has not recorded a value either, the expected one is unknown.
        unexpected = sorted(set(steps) - set(golden.not_recorded.get(name, ())))
        if unexpected:
            faults.append(f"{name}: no finite value at {len(unexpected)} steps, first {unexpected[0]}")
    yield from _joined("steps", faults)


def _check_grad_norm(run: GoldenValues, golden: GoldenValues, policy: GoldenPolicy) -> Iterator[GoldenFault]:
    measured, broken = run.metrics.get(GRAD_NORM, {}), run.not_recorded.get(GRAD_NORM, ())
    faults = [f"not finite at {len(broken)} steps, first {broken[0]}"] if broken else []
    needed = golden.format == "megatron-bridge" and policy.grad_norm == "required"
    missing = golden.metrics.get(LOSS, {}).keys() - measured.keys()
    if needed and missing:
        faults.append(f"missing at {len(missing)} steps, first {min(missing)}")
    yield from _joined("grad norm", faults)


def _paired(run: GoldenValues, golden: GoldenValues, name: str) -> tuple[list[int], Array, Array]:
    """The steps that the golden values have of a metric, and both values; NaN where the run has none."""
    expected, measured = golden.metrics.get(name, {}), run.metrics.get(name, {})
    steps = sorted(expected)
    current = np.array([measured.get(step, math.nan) for step in steps], dtype=np.float64)
    return steps, current, np.array([expected[step] for step in steps], dtype=np.float64)


def _check_loss(run: GoldenValues, golden: GoldenValues, policy: GoldenPolicy) -> Iterator[GoldenFault]:
    _, current, expected = _paired(run, golden, LOSS)
    skip = int(policy.skip_first_percent_loss * expected.size)
    current, expected = current[skip:], expected[skip:]
    if expected.size < 2:
        yield GoldenFault("loss", "fewer than two losses to compare")
        return
    apart = np.abs(relative(current, expected))
    tolerance = np.select(
        [expected > 2.0, expected > 0.5],
        [policy.high_loss_tolerance, policy.medium_loss_tolerance],
        policy.low_loss_tolerance,
    )
    residual = current - expected
    outlying = ~(np.abs(residual - residual.mean()) <= 3 * residual.std())
    correlation, least = _correlation(current, expected), policy.correlation_threshold
    if not correlation >= least:
        yield GoldenFault("loss correlation", f"{correlation:.4f} (at least {least:g})")
    beyond, outliers = float(np.mean(~(apart <= tolerance))), float(np.mean(outlying))
    yield from _beyond("point-wise loss", beyond, policy.max_outlier_ratio, "of the steps beyond")
    yield from _beyond("final loss", float(apart[-1]), policy.final_loss_tolerance, "from the golden loss")
    yield from _beyond("loss outliers", outliers, policy.max_outlier_ratio, "of the steps beyond 3 sigma")


def _correlation(current: Array, expected: Array) -> float:
    """Pearson's correlation; of curves that do not move, 1 where they are equal, else NaN, which no rule passes."""
    if np.array_equal(current, expected):
        return 1.0
    if not current.std() > 0 or not expected.std() > 0:
        return math.nan
    return float(np.corrcoef(current, expected)[0, 1])


def _check_speed(run: GoldenValues, golden: GoldenValues, policy: GoldenPolicy) -> Iterator[GoldenFault]:
    """The mean of the evaluated steps, and how many steps of the whole run were slow."""
    name = next((name for name in SPEEDS if golden.metrics.get(name)), None)
    if name is None:
        yield GoldenFault("performance", "the golden values have no throughput")
        return
    steps, current, expected = _paired(run, golden, name)
    chosen, lower = _evaluated(steps, policy), SPEEDS[name]
    reference = float(np.mean(expected[chosen])) if chosen.any() else math.nan
    worse = _worse(float(np.mean(current[chosen])) if chosen.any() else math.nan, reference, lower)
    warm = np.arange(len(steps)) >= policy.warmup_share * len(steps)
    usual = float(np.median(expected[warm])) if warm.any() else math.nan
    # Some tests are slow at many of their steps, the golden run too.
    slow, usually = (_slow_share(values[warm], usual, lower, policy) for values in (current, expected))
    yield from _beyond("performance", worse, policy.timing_threshold, f"worse in {name}")
    yield from _beyond("slow steps", slow - usually, policy.max_slow_ratio, f"more of the steps slow in {name}")


def _slow_share(values: Array, usual: float, lower_is_better: bool, policy: GoldenPolicy) -> float:
    """The share of the steps that are slower than usual by more than the threshold, or not measured."""
    slow = [not _worse(value, usual, lower_is_better) <= policy.timing_threshold for value in values.tolist()]
    return float(np.mean(slow)) if slow else math.nan


def _evaluated(steps: Sequence[int], policy: GoldenPolicy) -> NDArray[np.bool_]:
    """Which steps make the mean throughput."""
    first = policy.eval_time_start_step
    if first is None:
        start = max(1, int(policy.skip_first_percent_time * len(steps)))
        first = steps[start] if start < len(steps) else steps[-1]
    last = steps[-1] if policy.eval_time_end_step is None else policy.eval_time_end_step
    return np.array([first <= step <= last for step in steps])


def _worse(value: float, reference: float, lower_is_better: bool) -> float:
    """How much worse, relative to the reference; negative where better, NaN where unknown."""
    if not reference > 0:
        return math.nan
    change = (value - reference) / reference
    return change if lower_is_better else -change


def _check_memory(run: GoldenValues, golden: GoldenValues, policy: GoldenPolicy) -> Iterator[GoldenFault]:
    names = tuple(golden.memory) if policy.required_memory is None else policy.required_memory
    if not names and policy.required_memory is None:
        yield GoldenFault("memory", "the golden values have no memory")
    for name in names:
        own, expected = (values.memory.get(name, math.nan) for values in (run, golden))
        yield from _beyond(
            f"memory {name}", _worse(own, expected, lower_is_better=True), policy.memory_threshold, "more"
        )


def _beyond(rule: str, value: float, limit: float, what: str) -> Iterator[GoldenFault]:
    """Being within passes; what is not a number is not within. The limit itself is, also after rounding."""
    if not (value <= limit or math.isclose(value, limit, rel_tol=1e-9)):
        amount = "unknown" if math.isnan(value) else f"{format_percent(value)} {what}"
        yield GoldenFault(rule, f"{amount} (limit {format_percent(limit)})")


def _joined(rule: str, faults: Sequence[str]) -> Iterator[GoldenFault]:
    if faults:
        yield GoldenFault(rule, "; ".join(dict.fromkeys(faults)))


# --- a run's own values by a golden file's names, and a golden run's by the gate's -----------------------------------

# Tag of TensorBoard, and what it is multiplied with, by Megatron-Bridge's name in golden files.
BRIDGE_TAGS: Mapping[str, tuple[str, float]] = {
    LOSS: ("lm loss", 1.0),
    STEP_TIME: ("iteration-time", 1e3),
    UTILISATION: ("throughput/tflops/device", 1.0),
    GRAD_NORM: ("grad-norm", 1.0),
}

# The first value counts, as upstream reads it; of `max_reserved` the largest.
BRIDGE_MEMORY_TAGS: Mapping[str, str] = {
    "alloc": "memory/mem-allocated-gigabytes",
    "max_alloc": "memory/mem-max-allocated-gigabytes",
    "max_reserved": "memory/mem-max-reserved-gigabytes",
}

# The gate's metric, the golden file's name of it, and what makes the gate's unit of its value.
GOLDEN_SPEEDS: tuple[tuple[MetricName, str, float], ...] = (
    ("step_time", STEP_TIME, 1e-3),
    ("step_time", ITERATION_TIME, 1.0),
    ("tflops_per_gpu", UTILISATION, 1.0),
)

GOLDEN_MEMORY = (("max_alloc", 1.0), ("mem-max-allocated-bytes", 1e-9))


def golden_levels(golden: GoldenValues, summary: Summary) -> dict[MetricName, float]:
    """What a golden run measured, as the gate's metrics: medians over the steps of a run's steady window."""
    first, last = summary.steady_first_step or 1, summary.steady_last_step or summary.steps_done
    levels: dict[MetricName, float] = {}
    for metric, name, factor in GOLDEN_SPEEDS:
        steady = [value for step, value in golden.metrics.get(name, {}).items() if first <= step <= last]
        if steady:
            levels[metric] = statistics.median(steady) * factor
    for name, factor in GOLDEN_MEMORY:
        if name in golden.memory:
            levels["peak_memory"] = golden.memory[name] * factor
    final = golden.metrics.get(LOSS, {}).get(summary.steps_done)
    return levels if final is None else {**levels, "final_loss": final}


def run_values(scalars: "pd.DataFrame | None", summary: Summary, golden: GoldenValues) -> GoldenValues:
    """What a run measured, in the golden file's own names.

    Args:
        scalars: The run's scalars; None where it has none.
        summary: Its peak memory is taken where the scalars have none.
        golden: Its format says the names.
    """
    curves = _curves(scalars)
    if golden.format == "megatron-lm":
        metrics = {name: curves.get(name, {}) for name in golden.metrics}
        metrics[GRAD_NORM] = curves.get("grad-norm", {})
        values = golden_of_steps({name: curve for name, curve in metrics.items() if curve}, {})
        peaks = {name: max(known.values()) for name in golden.memory if (known := values.metrics.get(name))}
        return values.model_copy(update={"format": "megatron-lm", "memory": peaks})
    named = {
        name: {step: value * factor for step, value in curves[tag].items()}
        for name, (tag, factor) in BRIDGE_TAGS.items()
        if tag in curves
    }
    return golden_of_steps(named, _memory(curves, summary))


def _memory(curves: Mapping[str, Mapping[int, float]], summary: Summary) -> dict[str, float | None]:
    sizes: dict[str, float | None] = {"max_alloc": summary.peak_memory}
    for name, tag in BRIDGE_MEMORY_TAGS.items():
        known = [value for _step, value in sorted(curves.get(tag, {}).items()) if math.isfinite(value)]
        if known:
            sizes[name] = max(known) if name == "max_reserved" else known[0]
    return sizes


def _curves(scalars: "pd.DataFrame | None") -> dict[str, dict[int, float]]:
    """By tag, the value of each step; the last where one was recorded again."""
    if scalars is None:
        return {}
    iterations = scalars[scalars["step"] > 0]
    return {str(tag): curve_of(iterations, str(tag)) for tag in iterations["tag"].unique()}
