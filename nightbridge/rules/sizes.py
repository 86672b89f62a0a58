"""Parallel sizes and batch sizes against the number of GPUs. An unwritten size is the recipe's and unknown."""

import math
from collections.abc import Iterator, Mapping

from nightbridge.rules.context import PARALLEL, Facts
from nightbridge.rules.rule import Rule, from_source

_POSITIVE = (
    *("num_gpus", "gpus_per_node", "tp", "pp", "cp", "vp", "ep", "et", "mb", "gb", "seq_length", "max_steps"),
    *("hidden_size", "num_layers", "num_moe_experts", "save_interval", "vocab_size"),
)


def _positive(facts: Facts) -> Iterator[str]:
    """Sizes and counts below one fail in Megatron-Core, most of them as a division by zero."""
    for field in _POSITIVE:
        value = facts.args.get(field)
        if isinstance(value, int) and value < 1:
            yield f"cmd_args.{field} = {value} must be at least 1; remove it to leave it to the recipe"


def _shown(sizes: Mapping[str, int]) -> str:
    return " * ".join(f"{field} {size}" for field, size in sizes.items())


def _gpus_divide(facts: Facts) -> Iterator[str]:
    """Every GPU belongs to exactly one model-parallel group, so the groups must fill the GPUs."""
    sizes = facts.parallel_sizes
    product = math.prod(sizes.values())
    if facts.gpus > 0 and facts.gpus % product:
        yield (
            f"num_gpus {facts.gpus} is not a multiple of {_shown(sizes)} = {product}; "
            f"use {facts.gpus // product * product or product} or {(facts.gpus // product + 1) * product} GPUs, "
            "or other sizes"
        )


def _expert_sizes_divide(facts: Facts) -> Iterator[str]:
    """Experts are laid over the same GPUs by sizes of their own, which must fill them as well."""
    sizes = {field: size for field in ("et", "ep", "pp") if (size := facts.integer(field)) is not None}
    product = math.prod(sizes.values())
    # Whatever the recipe's other sizes are, those that are written must divide the GPUs together.
    if "ep" in sizes and facts.gpus > 0 and facts.gpus % product:
        yield f"num_gpus {facts.gpus} is not a multiple of {_shown(sizes)} = {product}; change one of them"


def _batch_divides(facts: Facts) -> Iterator[str]:
    """Each data-parallel replica takes the same whole number of micro batches in a step."""
    micro, total, sizes = facts.integer("mb"), facts.integer("gb"), facts.parallel_sizes
    if micro is None or total is None:
        return
    product = math.prod(sizes.values())
    if len(sizes) == len(PARALLEL) and facts.gpus > 0 and facts.gpus % product == 0:
        parallel = facts.gpus // product
        reason = f"mb {micro} * data parallel size {parallel} (num_gpus {facts.gpus} / ({_shown(sizes)}))"
    else:
        parallel, reason = 1, f"mb {micro}"
    instances = facts.integer("num_distributed_optimizer_instances") or 1
    if instances > 1 and facts.args.get("use_megatron_fsdp"):
        parallel, reason = parallel * instances, f"{reason} * num_distributed_optimizer_instances {instances}"
    unit = micro * parallel
    if total % unit:
        lower = f"{total // unit * unit} or " if total > unit else ""
        yield f"gb {total} is not a multiple of {reason} = {unit}; use {lower}{(total // unit + 1) * unit}"


def _fsdp_sizes(facts: Facts) -> Iterator[str]:
    """Megatron FSDP shards over the data-parallel group alone and supports no pipeline or context parallelism."""
    if not facts.args.get("use_megatron_fsdp"):
        return
    larger = {field: size for field in ("pp", "cp", "vp") if (size := facts.integer(field)) is not None and size > 1}
    if larger:
        yield f"use_megatron_fsdp needs pp, cp and vp of 1, not {_shown(larger)}; change them or switch it off"


def _optimizer_instances(facts: Facts) -> Iterator[str]:
    """Several instances of the distributed optimizer exist only under Megatron FSDP's hybrid sharding."""
    instances = facts.integer("num_distributed_optimizer_instances")
    if instances and instances > 1 and not facts.args.get("use_megatron_fsdp"):
        yield f"num_distributed_optimizer_instances {instances} needs use_megatron_fsdp = true; write it, or remove it"


def _virtual_pipeline(facts: Facts) -> Iterator[str]:
    """A virtual pipeline interleaves the stages of a pipeline; with one stage there is nothing to interleave."""
    virtual = facts.integer("vp") if facts.args.get("vp") != "None" else None
    if virtual and virtual > 1 and facts.integer("pp") == 1:
        yield f"vp {virtual} splits the stages of a pipeline, and pp 1 is none; use vp = 1 or pp > 1"


def _layers_divide(facts: Facts) -> Iterator[str]:
    """Without a layout every pipeline stage gets the same whole number of layers."""
    layers, stages = facts.integer("num_layers"), facts.integer("pp")
    if layers is None or stages is None or facts.args.get("pipeline_model_parallel_layout"):
        return
    virtual = facts.integer("vp") or 1
    if layers % (stages * virtual):
        split = f"pp {stages}" + (f" * vp {virtual}" if virtual > 1 else "")
        yield (
            f"num_layers {layers} is not a multiple of {split} = {stages * virtual}; "
            "change one of them or write pipeline_model_parallel_layout"
        )


RULES = (
    *from_source(
        "Megatron-Core: parallel_state.py and TransformerConfig",
        Rule("sizes-positive", "error", tuple(f"cmd_args.{field}" for field in _POSITIVE), _positive, alone=True),
        Rule("gpus-divide", "error", ("cmd_args.num_gpus", "cmd_args.tp", "cmd_args.pp", "cmd_args.cp"), _gpus_divide),
        Rule(
            "expert-gpus-divide",
            "error",
            ("cmd_args.num_gpus", "cmd_args.et", "cmd_args.ep", "cmd_args.pp"),
            _expert_sizes_divide,
        ),
        Rule(
            "batch-divides",
            "error",
            tuple(
                f"cmd_args.{field}"
                for field in (
                    *("gb", "mb", "num_gpus", "tp", "pp", "cp"),
                    *("use_megatron_fsdp", "num_distributed_optimizer_instances"),
                )
            ),
            _batch_divides,
        ),
        Rule(
            "fsdp-sizes",
            "error",
            ("cmd_args.use_megatron_fsdp", "cmd_args.pp", "cmd_args.cp", "cmd_args.vp"),
            _fsdp_sizes,
        ),
        Rule(
            "optimizer-instances",
            "error",
            ("cmd_args.num_distributed_optimizer_instances", "cmd_args.use_megatron_fsdp"),
            _optimizer_instances,
        ),
        Rule("virtual-pipeline", "error", ("cmd_args.vp", "cmd_args.pp"), _virtual_pipeline),
        Rule(
            "layers-divide",
            "error",
            ("cmd_args.num_layers", "cmd_args.pp", "cmd_args.vp", "cmd_args.pipeline_model_parallel_layout"),
            _layers_divide,
        ),
    ),
)
