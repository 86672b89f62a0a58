"""CloudAI's `training_report.json`: how a run was configured, each of its steps, and statistics over the steady ones.

Names of fields, tags and paths are those of CloudAI's report_generator/training at 743c6faa. A step that lacks a value
which is not optional is left out, as there.
"""

from typing import TYPE_CHECKING, Any

import numpy as np

from nightbridge.launch.config_container import ConfigContainer
from nightbridge.models import Summary, TestDefinition

if TYPE_CHECKING:
    import pandas as pd

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
