"""Parallel sizes and batch sizes against the number of GPUs. An unwritten size is the recipe's and unknown."""

import math
from collections.abc import Iterator, Mapping

from nightbridge.rules.rule import PARALLEL, RuleContext, cmd_args, rule

_MEGATRON_CORE = "Megatron-Core: parallel_state.py and TransformerConfig"

_POSITIVE = (
    *("num_gpus", "gpus_per_node", "tp", "pp", "cp", "vp", "ep", "et", "mb", "gb", "seq_length", "max_steps"),
    *("hidden_size", "num_layers", "num_moe_experts", "save_interval", "vocab_size"),
)


@rule("sizes-positive", _MEGATRON_CORE, cmd_args(*_POSITIVE), alone=True)
def _positive(run: RuleContext) -> Iterator[str]:
    """Sizes and counts below one fail in Megatron-Core, most of them as a division by zero."""
    for field in _POSITIVE:
        value = run.args.get(field)
        if isinstance(value, int) and value < 1:
            yield f"cmd_args.{field} = {value} must be at least 1; remove it to leave it to the recipe"


def _shown(sizes: Mapping[str, int]) -> str:
    return " * ".join(f"{field} {size}" for field, size in sizes.items())


@rule("gpus-divide", _MEGATRON_CORE, cmd_args("num_gpus tp pp cp"))
def _gpus_divide(run: RuleContext) -> Iterator[str]:
    """Every GPU belongs to exactly one model-parallel group, so the groups must fill the GPUs."""
    sizes = run.parallel_sizes
    product = math.prod(sizes.values())
    if run.gpus > 0 and run.gpus % product:
        near = sorted({max(run.gpus // product, 1) * product, (run.gpus // product + 1) * product})
        yield (
            f"num_gpus {run.gpus} is not a multiple of {_shown(sizes)} = {product}; "
            f"use {' or '.join(map(str, near))} GPUs, or other sizes"
        )


@rule("expert-gpus-divide", _MEGATRON_CORE, cmd_args("num_gpus et ep pp"))
def _expert_sizes_divide(run: RuleContext) -> Iterator[str]:
    """Experts are laid over the same GPUs by sizes of their own, which must fill them as well."""
    sizes = {field: size for field in ("et", "ep", "pp") if (size := run.integer(field)) is not None}
    product = math.prod(sizes.values())
    # Whatever the recipe's other sizes are, those that are written must divide the GPUs together.
    if "ep" in sizes and run.gpus > 0 and run.gpus % product:
        yield f"num_gpus {run.gpus} is not a multiple of {_shown(sizes)} = {product}; change one of them"


@rule(
    "batch-divides",
    _MEGATRON_CORE,
    cmd_args("gb mb num_gpus tp pp cp use_megatron_fsdp num_distributed_optimizer_instances"),
)
def _batch_divides(run: RuleContext) -> Iterator[str]:
    """Each data-parallel replica takes the same whole number of micro batches in a step."""
    micro, total, sizes = run.integer("mb"), run.integer("gb"), run.parallel_sizes
    if micro is None or total is None:
        return
    product = math.prod(sizes.values())
    if len(sizes) == len(PARALLEL) and run.gpus > 0 and run.gpus % product == 0:
        parallel = run.gpus // product
        reason = f"mb {micro} * data parallel size {parallel} (num_gpus {run.gpus} / ({_shown(sizes)}))"
    else:
        parallel, reason = 1, f"mb {micro}"
    instances = run.integer("num_distributed_optimizer_instances") or 1
    if instances > 1 and run.args.get("use_megatron_fsdp"):
        parallel, reason = parallel * instances, f"{reason} * num_distributed_optimizer_instances {instances}"
    unit = micro * parallel
    if total % unit:
        lower = f"{total // unit * unit} or " if total > unit else ""
        yield f"gb {total} is not a multiple of {reason} = {unit}; use {lower}{(total // unit + 1) * unit}"


@rule("fsdp-sizes", _MEGATRON_CORE, cmd_args("use_megatron_fsdp pp cp vp"))
def _fsdp_sizes(run: RuleContext) -> Iterator[str]:
    """Megatron FSDP shards over the data-parallel group alone and supports no pipeline or context parallelism."""
    if not run.args.get("use_megatron_fsdp"):
        return
    larger = {field: size for field in ("pp", "cp", "vp") if (size := run.integer(field)) is not None and size > 1}
    if larger:
        yield f"use_megatron_fsdp needs pp, cp and vp of 1, not {_shown(larger)}; change them or switch it off"


@rule("optimizer-instances", _MEGATRON_CORE, cmd_args("num_distributed_optimizer_instances use_megatron_fsdp"))
def _optimizer_instances(run: RuleContext) -> Iterator[str]:
    """Several instances of the distributed optimizer exist only under Megatron FSDP's hybrid sharding."""
    instances = run.integer("num_distributed_optimizer_instances")
    if instances and instances > 1 and not run.args.get("use_megatron_fsdp"):
        yield f"num_distributed_optimizer_instances {instances} needs use_megatron_fsdp = true; write it, or remove it"


@rule("virtual-pipeline", _MEGATRON_CORE, cmd_args("vp pp"))
def _virtual_pipeline(run: RuleContext) -> Iterator[str]:
    """A virtual pipeline interleaves the stages of a pipeline; with one stage there is nothing to interleave."""
    virtual = run.integer("vp") if run.args.get("vp") != "None" else None
    if virtual and virtual > 1 and run.integer("pp") == 1:
        yield f"vp {virtual} splits the stages of a pipeline, and pp 1 is none; use vp = 1 or pp > 1"


@rule("layers-divide", _MEGATRON_CORE, cmd_args("num_layers pp vp pipeline_model_parallel_layout"))
def _layers_divide(run: RuleContext) -> Iterator[str]:
    """Without a layout every pipeline stage gets the same whole number of layers."""
    layers, stages = run.integer("num_layers"), run.integer("pp")
    if layers is None or stages is None or run.args.get("pipeline_model_parallel_layout"):
        return
    virtual = run.integer("vp") or 1
    if layers % (stages * virtual):
        split = f"pp {stages}" + (f" * vp {virtual}" if virtual > 1 else "")
        yield (
            f"num_layers {layers} is not a multiple of {split} = {stages * virtual}; "
            "change one of them or write pipeline_model_parallel_layout"
        )
