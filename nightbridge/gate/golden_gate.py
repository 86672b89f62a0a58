"""A stored run against the golden values that its test names: `[gate] golden = "FILE.json"`.

The rules are those of `goldens`, with the parameters of `[gate.golden_rules]`. What makes a run fail and what makes it
regressed differ: missing steps, missing metrics and numbers that are not finite are a failure, like everywhere else in
the gate; the others say that it is not as good as the golden run.
"""

import io
import math
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from nightbridge.gate.gate import GoldenAnswer
from nightbridge.goldens.goldens import (
    ITERATION_TIME,
    LOSS,
    STEP_TIME,
    UTILISATION,
    GoldenValues,
    compare_golden,
    golden_of_steps,
    read_golden_file,
)
from nightbridge.harvest.manifest import METRICS
from nightbridge.models import MetricName, RunRecord, Summary
from nightbridge.store.protocol import ObjectStore

if TYPE_CHECKING:
    import pandas as pd

DATA_RULES = frozenset({"metrics", "steps", "grad norm", "loss"})
"""Rules about whether the data are there and finite."""

# Tag of TensorBoard, and what it is multiplied with, by Megatron-Bridge's name in golden files.
BRIDGE_TAGS: Mapping[str, tuple[str, float]] = {
    "lm loss": ("lm loss", 1.0),
    "elapsed time per iteration (ms)": ("iteration-time", 1e3),
    "GPU utilization": ("throughput/tflops/device", 1.0),
    "grad norm": ("grad-norm", 1.0),
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


def golden_answer(store: ObjectStore, record: RunRecord) -> GoldenAnswer | None:
    """What golden values say about a stored run; None for a test that names none.

    A run without scalars has no steps, and fails like one whose steps are missing.

    Raises:
        InvalidInput: The golden file is missing or is none.
        DamagedData: It is not whole.
    """
    gate = record.spec.test.gate
    if gate.golden is None:
        return None
    golden = read_golden_file(Path(gate.golden))
    data = store.get(f"{record.prefix}/{METRICS}")
    found = compare_golden(run_values(data, record.summary, golden), golden, gate.golden_rules)
    failed = {check.rule for check in found.failures}
    return GoldenAnswer(
        whole=not failed & DATA_RULES,
        as_good=not failed - DATA_RULES,
        reasons=tuple(f"golden values, {check.rule}: {check.message}" for check in found.failures),
        values=golden_levels(golden, record.summary),
    )


def golden_levels(golden: GoldenValues, summary: Summary) -> dict[MetricName, float]:
    """What a golden run measured, as the gate's metrics: medians over the steps of the run's steady window.

    Args:
        golden: The golden values.
        summary: Of the run that they came with.
    """
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


def run_values(parquet: bytes | None, summary: Summary, golden: GoldenValues) -> GoldenValues:
    """What a run measured, in the golden file's own names.

    Args:
        parquet: The run's scalars; None where it has none.
        summary: Its peak memory is taken where the scalars have none.
        golden: Its format says the names.
    """
    curves = _curves(parquet)
    if golden.format == "megatron-lm":
        metrics = {name: curves.get(name, {}) for name in {*golden.metrics, "grad norm"}}
        metrics["grad norm"] = curves.get("grad-norm", {})
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


def _curves(parquet: bytes | None) -> dict[str, dict[int, float]]:
    """By tag, the value of each step; the last where one was recorded again."""
    if parquet is None:
        return {}
    import pandas as pd

    table = pd.read_parquet(io.BytesIO(parquet), columns=["tag", "step", "value", "superseded"])
    return _by_tag(table[~table["superseded"] & (table["step"] > 0)])


def _by_tag(table: "pd.DataFrame") -> dict[str, dict[int, float]]:
    return {
        str(tag): dict(zip(rows["step"].astype(int).tolist(), rows["value"].astype(float).tolist(), strict=True))
        for tag, rows in table.groupby("tag")
    }
