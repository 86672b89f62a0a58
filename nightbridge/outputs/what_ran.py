"""What really ran: world size, batches, schedule and precision, by who says it; and CloudAI's report of it.

A run tells of itself three times, and the three are not the same evidence: its dumped `ConfigContainer.yaml` is what it
was going to do, its log and TensorBoard what it did. The gate compares them with each other and with the plan.

CloudAI's `training_report.json` has how a run was configured, each of its steps, and statistics over the steady ones.
Names of fields, tags and paths are those of CloudAI's report_generator/training at 743c6faa. A step that lacks a value
which is not optional is left out, as there.
"""

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from nightbridge.launch.config_container import ConfigContainer
from nightbridge.models import Summary, TestDefinition
from nightbridge.outputs.curves import Curves
from nightbridge.outputs.logs import latest_steps

if TYPE_CHECKING:
    import pandas as pd

Scalar = float | str

BATCH_SIZE_TAG = "batch-size"
WORLD_SIZE_TAG = "world-size"
_RATE_TAG = "learning-rate"


def dumped(container: ConfigContainer) -> dict[str, float | str]:
    """What a run dumped of what it was going to do, by the names of `Summary.ran`."""
    copies = container.integer("comm_overlap.data_parallel_size")
    found = {
        "world size": copies * container.model_parallel_size if copies else None,
        "global batch size": container.integer("train.global_batch_size"),
        "micro batch size": container.integer("train.micro_batch_size"),
        "sequence length": container.integer("model.seq_length"),
        "sequence length of the data": container.integer("dataset.seq_length"),
        "tensor parallel size": container.integer("model.tensor_model_parallel_size"),
        "pipeline parallel size": container.integer("model.pipeline_model_parallel_size"),
        "context parallel size": container.integer("model.context_parallel_size"),
        "iterations": container.integer("train.train_iters"),
        "precision": _precision(container),
        "gradient clipping": container.number("optimizer.clip_grad"),
        **_scheduled_rates(container),
    }
    return {name: value for name, value in found.items() if value is not None}


def _precision(container: ConfigContainer) -> str | None:
    """The smallest type that matrices are multiplied in; None where the dump does not say any."""
    if not isinstance(container.value("mixed_precision"), Mapping):
        return None
    names = (("fp4", "fp4"), ("fp8", "fp8"), ("bf16", "bf16"), ("fp16", "fp16"))
    return next((name for field, name in names if container.is_on(f"mixed_precision.{field}")), "fp32")


def _scheduled_rates(container: ConfigContainer) -> dict[str, float | str | None]:
    """The largest learning rate, where the warm-up ends within the run, and the last one, where the decay does."""
    samples, rate = container.decay_samples, container.number("optimizer.lr")
    iterations, batch = container.integer("train.train_iters"), container.integer("train.global_batch_size")
    if not (samples and rate and iterations and batch):
        return {}
    warm_up = (
        container.integer("scheduler.lr_warmup_steps") or (container.integer("scheduler.lr_warmup_iters") or 0) * batch
    )
    fraction = container.number("scheduler.lr_warmup_fraction")
    style, done = container.value("scheduler.lr_decay_style"), iterations * batch
    decays = style in ("cosine", "linear") and done >= samples
    return {
        "largest learning rate": rate if max(warm_up, (fraction or 0) * samples) < done else None,
        "last learning rate": container.number("optimizer.min_lr") if decays else None,
    }


def model_flops(container: ConfigContainer) -> float | None:
    """Six operations for each weight and token of a dense transformer; attention itself comes on top."""
    sparse = ("num_moe_experts", "multi_latent_attention", "is_hybrid_model", "heterogeneous_block_specs")
    fields = ("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "seq_length", "vocab_size")
    found = [container.integer(f"model.{field}") for field in fields]
    batch = container.integer("train.global_batch_size")
    if (
        not all(found)
        or not batch
        or container.value("peft")
        or any(container.is_on(f"model.{name}") for name in sparse)
    ):
        return None
    layers, hidden, inner, heads, sequence, vocabulary = (float(value or 0) for value in found)
    channels = container.integer("model.kv_channels") or hidden / heads
    groups = container.integer("model.num_query_groups") or heads
    attention = 2 * hidden * channels * (heads + groups)
    weights = layers * (attention + (2 + container.is_on("model.gated_linear_unit")) * hidden * inner)
    return 6 * (weights + vocabulary * hidden) * batch * sequence


def what_ran(curves: Curves, planned: Mapping[str, Scalar]) -> dict[str, dict[str, float | str]]:
    """What really ran, by quantity and source (`Summary.ran`): the run's own dump, its log, and TensorBoard."""
    records = latest_steps(curves.log.steps)
    steps = list(records.values())
    # One of the two may end earlier: a torn line, events that were never flushed. The other is then held to the plan.
    by_log = (steps[-1].iteration if steps else 0, None)
    at, samples = max(curves.samples or (0, None), by_log, key=lambda found: found[0])
    reported: dict[str, dict[str, float | None]] = {
        "the log": {
            "iterations": steps[-1].total if steps else None,
            "global batch size": steps[-1].global_batch_size if steps else None,
            "consumed samples": records[at].consumed_samples if at in records else None,
            **_rates([step.learning_rate for step in steps if step.learning_rate is not None]),
        },
        "TensorBoard": {
            "world size": _last(curves, WORLD_SIZE_TAG),
            "global batch size": _last(curves, BATCH_SIZE_TAG),
            "consumed samples": None if samples is None else float(samples),
            **(_rates(_values(curves, _RATE_TAG)) if _is_whole(curves) else {}),
        },
    }
    ran: dict[str, dict[str, float | str]] = {name: {"its configuration": value} for name, value in planned.items()}
    for source, values in reported.items():
        for name, value in values.items():
            if value is not None:
                ran.setdefault(name, {})[source] = value
    batches = ({step.global_batch_size for step in steps} | set(_values(curves, BATCH_SIZE_TAG))) - {None}
    batch = next(iter(batches), None)
    if "consumed samples" in ran and len(batches) == 1 and batch and not curves.start:
        ran["consumed samples"]["iterations and batch"] = at * batch
    # JSON has no number for an infinite limit of gradients, and for a rate that is none.
    return {
        name: {
            source: value if isinstance(value, str) or math.isfinite(value) else str(value)
            for source, value in of.items()
        }
        for name, of in ran.items()
    }


def _is_whole(curves: Curves) -> bool:
    """Whether TensorBoard's curves go to the end: a killed job's last events were never flushed."""
    table = curves.table
    steps = table.loc[(table["tag"] == _RATE_TAG) & ~table["superseded"], "step"]
    return bool(len(steps)) and int(steps.max()) == curves.last_recorded


def _rates(rates: Sequence[float]) -> dict[str, float | None]:
    return {"largest learning rate": max(rates), "last learning rate": rates[-1]} if rates else {}


def _values(curves: Curves, tag: str) -> list[float]:
    """Of a tag, the values of all iterations, in their order."""
    values: list[float] = curves.rows_of(tag)["value"].tolist()
    return values


def _last(curves: Curves, tag: str) -> float | None:
    return next(iter(_values(curves, tag)[-1:]), None)


# --- CloudAI's training_report.json -----------------------------------------------------------------------------------

_STEP: dict[str, tuple[str, float]] = {
    "step_time_sec": ("iteration-time", 1),
    "loss": ("lm loss", 1),
    "memory_reserved_bytes": ("memory/mem-reserved-gigabytes", 1e9),
    "memory_allocated_bytes": ("memory/mem-allocated-gigabytes", 1e9),
    "tflops_per_gpu": ("throughput/tflops/device", 1),
}
"""Fields of a step: TensorBoard's tag, and the factor to the field's unit."""

_OPTIONAL = "tflops_per_gpu"

_CONFIG = {
    "micro_batch_size": "train.micro_batch_size",
    "global_batch_size": "train.global_batch_size",
    "seq_length": "model.seq_length",
    **{f"{kind}_parallel_size": f"model.{kind}_model_parallel_size" for kind in ("tensor", "pipeline", "expert")},
    "context_parallel_size": "model.context_parallel_size",
    "virtual_pipeline_parallel_size": "model.virtual_pipeline_model_parallel_size",
    "num_experts": "model.num_moe_experts",
    **{
        field: f"model.{field}"
        for field in (
            *("sequence_parallel", "num_layers", "hidden_size", "num_attention_heads", "num_query_groups"),
            *("ffn_hidden_size", "kv_channels", "normalization", "position_embedding_type"),
            *("moe_router_topk", "moe_ffn_hidden_size", "moe_grouped_gemm"),
        )
    },
}
"""Fields of the configuration: where `ConfigContainer.yaml` has them."""


def training_report(
    table: "pd.DataFrame", summary: Summary, container: ConfigContainer, test: TestDefinition, gpus: int, nodes: int
) -> dict[str, Any]:
    """Make the report of a scalar table (`event_files.COLUMNS`) and of what the run dumped.

    The statistics are over the steady window of its summary.
    """
    steps, args = _steps(table), test.cmd_args
    start, stop = args.get("profiling_start_step"), args.get("profiling_stop_step")
    profiled = range(0)
    if args.get("enable_nsys") and start is not None and stop is not None:
        profiled = range(start, stop + test.gate.post_profiling_steps + 1)
    first = summary.steady_first_step or 0
    steady = [step for step in steps if step["iteration"] >= first and step["iteration"] not in profiled]
    sized = ConfigContainer(container.path, container.table, gpus)
    return {
        "config": {
            **{field: container.value(path) for field, path in _CONFIG.items()},
            "data_parallel_size": sized.data_parallel_size,
            "model_name": args.get("model_recipe_name", ""),
            "world_size": gpus,
            "num_nodes": nodes,
            "profiling_enabled": bool(args.get("enable_nsys")),
            "profiling_start_step": start,
            "profiling_stop_step": stop,
            "exclude_start_steps": test.gate.warmup_steps,
            "exclude_post_profiling_steps": test.gate.post_profiling_steps,
            "test_template_name": test.test_template_name,
        },
        "steps": steps,
        "aggregation": {field: _statistics([step[field] for step in steady if field in step]) for field in _STEP},
    }


def _steps(table: "pd.DataFrame") -> list[dict[str, Any]]:
    """The steps that have every value which is not optional, in order; of a value written twice the later one."""
    kept = table[~table["superseded"]]
    values: dict[str, pd.Series[float]] = {
        field: kept[kept["tag"] == tag].groupby("step")["value"].last() * scale for field, (tag, scale) in _STEP.items()
    }
    complete = set.intersection(*(set(column.index) for field, column in values.items() if field != _OPTIONAL))
    return [
        {"iteration": int(step)}
        | {field: float(column[step]) for field, column in values.items() if step in column.index}
        for step in sorted(complete)
    ]


def _statistics(values: list[float]) -> dict[str, float] | None:
    """Mean, extremes, population deviation, and the percentiles 99 and 95; None without values."""
    if not values:
        return None
    return {
        "mean": float(np.mean(values)),
        "min": min(values),
        "max": max(values),
        "std": float(np.std(values)),
        "t99": float(np.percentile(values, 99)),
        "t95": float(np.percentile(values, 95)),
    }
