"""What Megatron-Bridge's own check of a configuration accepts although the job then fails or misleads."""

import difflib
import json
import math
from collections.abc import Iterator, Mapping

from nightbridge.launch.config_container import SIZES, ConfigContainer
from nightbridge.rules.config_container_training import SCHEDULE
from nightbridge.rules.rule import rule

_UNCHECKED = "Megatron-Core: what validate() of training/config.py at 067f987d (main) lets through, found by running it"
_TYPES = "Megatron-Bridge: ConfigContainer of training/config.py, and what it leads to, at 067f987d (main)"
_PRECISION = "Megatron-Bridge: training/mixed_precision.py at 067f987d (main)"
_GRAPHS = "Megatron-Bridge: utils/cuda_graph.py, from 51885cf1 (v0.6.0) to 067f987d (main of August 2026)"

_CORE_GRAPHS = (
    "Megatron-Core: transformer/transformer_config.py and Megatron-LM: training/models/gpt.py at 2a75ac12 (main)"
)

_SWITCHES = (
    "Megatron-Core: transformer/transformer_config.py at 2a75ac12 (main), found by turning each switch of a dump over"
)
_QUANTISED = ("model.fp8", "model.fp4", "mixed_precision.fp8", "mixed_precision.fp4")

_SCALED = ("fp8_delayed_scaling", "mxfp8", "fp8_current_scaling", "fp8_subchannel_scaling")
_RECIPES = frozenset(
    {
        *("bf16_mixed", "fp16_mixed", "bf16_with_nvfp4_mixed", "nemotron_3_super_bf16_with_nvfp4_mixed"),
        *(f"{kind}_with_{scaled}_mixed" for kind in ("bf16", "fp16") for scaled in _SCALED),
        *(f"{model}_bf16_with_fp8_current_scaling_mixed" for model in ("nemotron_h", "nanov2")),
    }
)


@rule("container-train-batch", _UNCHECKED, ("train", *SIZES))
def _train_batch(c: ConfigContainer) -> Iterator[str]:
    """The micro-batch calculator fails on it, when training starts."""
    total = c.integer("train.global_batch_size")
    micro = c.integer("train.micro_batch_size")
    for name, size in (("global", total), ("micro", micro)):
        if size is None and c.integer(f"validation.eval_{name}_batch_size") is not None:
            yield f"train.{name}_batch_size is not set; write it"
    parallel = c.data_parallel_size
    if total and micro and parallel and total % (micro * parallel):
        yield (
            f"global_batch_size {total} is not a multiple of micro_batch_size {micro} * data parallel size {parallel} "
            f"= {micro * parallel}; use {max(total // (micro * parallel), 1) * micro * parallel}"
        )


@rule("container-layers", _UNCHECKED, ("model.num_layers", "model.pipeline_model_parallel_size"))
def _layers(c: ConfigContainer) -> Iterator[str]:
    """Megatron-Core fails on it, when the model is built."""
    layers, stages = c.integer("model.num_layers"), c.size("pipeline_model_parallel_size")
    virtual = c.size("virtual_pipeline_model_parallel_size")
    uneven = (
        "pipeline_model_parallel_layout",
        "num_layers_in_first_pipeline_stage",
        "num_layers_in_last_pipeline_stage",
    )
    counted = ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split")
    if layers is None or any(c.is_on(f"model.{name}") for name in (*uneven, *counted)):
        return
    if layers % (stages * virtual):
        yield f"model.num_layers {layers} is not a multiple of the pipeline's {stages * virtual} stages; write a layout"


@rule("container-heads", _UNCHECKED, ("model.num_attention_heads", "model.tensor_model_parallel_size"))
def _heads(c: ConfigContainer) -> Iterator[str]:
    """Tensor parallelism splits attention by heads."""
    tensor = c.size("tensor_model_parallel_size")
    for name in ("num_attention_heads", "num_query_groups"):
        heads = c.integer(f"model.{name}")
        if heads and heads % tensor and (name == "num_attention_heads" or tensor % heads):
            yield f"model.{name} {heads} is not a multiple of tensor_model_parallel_size {tensor}; change one"


@rule("container-experts", _UNCHECKED, ("model.num_moe_experts", "model.expert_model_parallel_size"))
def _experts(c: ConfigContainer) -> Iterator[str]:
    """Expert parallelism gives each rank the same whole number of experts."""
    experts, parallel = c.integer("model.num_moe_experts"), c.size("expert_model_parallel_size")
    if parallel > 1 and not experts:
        yield f"model.expert_model_parallel_size {parallel} needs a model with experts; write 1"
    elif experts and experts % parallel:
        yield f"model.num_moe_experts {experts} is not a multiple of expert_model_parallel_size {parallel}; change one"


@rule("container-pipeline-type", _UNCHECKED, ("model.pipeline_dtype", "model.pipeline_model_parallel_size"))
def _pipeline_type(c: ConfigContainer) -> Iterator[str]:
    """The stages of a pipeline cannot exchange activations of an unknown type."""
    # A recipe of mixed precision that is only named sets the type when the job starts.
    named = isinstance(c.value("mixed_precision"), str)
    known = named or c.dtype("model.pipeline_dtype") or c.dtype("mixed_precision.pipeline_dtype")
    if c.size("pipeline_model_parallel_size") > 1 and not known:
        yield "a pipeline needs the dtype of the tensors between its stages: write model.pipeline_dtype"


@rule("container-recompute", _UNCHECKED, ("model.recompute_granularity", "model.recompute_method"))
def _recompute(c: ConfigContainer) -> Iterator[str]:
    """Megatron-Core fails on it, when the model is built."""
    granularity, method = c.value("model.recompute_granularity"), c.value("model.recompute_method")
    layers = c.value("model.recompute_num_layers")
    if granularity is None:
        return
    if granularity not in ("full", "selective"):
        yield f"model.recompute_granularity {granularity!r} is neither full nor selective"
    if method not in (None, "block", "uniform"):
        yield f"model.recompute_method {method!r} is neither block nor uniform"
    if granularity == "full" and method is None:
        yield "model.recompute_granularity full needs model.recompute_method: block or uniform"
    if granularity == "full" and layers is None:
        yield "model.recompute_granularity full needs model.recompute_num_layers; write how many"
    if granularity == "selective" and layers is not None:
        yield "model.recompute_num_layers goes with recompute_granularity full only; remove it"


@rule("container-types", _TYPES, ("model", "train", "optimizer", "scheduler", "dataset"))
def _types(c: ConfigContainer) -> Iterator[str]:
    """A value of another type fails where it is first used, or trains something else."""
    yield from c.wrong_types()


@rule("container-precision-recipe", _PRECISION, ("mixed_precision",))
def _precision_recipe(c: ConfigContainer) -> Iterator[str]:
    """A recipe of mixed precision that is named is looked up when the job starts."""
    named = c.value("mixed_precision")
    if isinstance(named, str) and named.replace("-", "_") not in _RECIPES:
        near = difflib.get_close_matches(named, _RECIPES, n=1, cutoff=0.3)
        yield f"mixed_precision {named!r} is no recipe; use {', '.join(near or sorted(_RECIPES))}"


@rule("container-local-graphs", _GRAPHS, ("model.cuda_graph_impl", "model.cuda_graph_modules"))
def _local_graphs(c: ConfigContainer) -> Iterator[str]:
    """Megatron-Bridge captures layers with Transformer Engine only; its local graphs hold the full iteration."""
    is_local = c.value("model.cuda_graph_impl") == "local" and not c.captures_iteration
    if is_local and (c.captured_modules or _inference_scope(c) not in ("layer", "block")) and _is_nested(c):
        yield (
            'model.cuda_graph_impl "local" is for graphs of the full iteration; write "full_iteration", or '
            '"transformer_engine" for graphs of layers'
        )


@rule("container-inference-graphs", _CORE_GRAPHS, ("model.cuda_graph_impl", "model.inference_cuda_graph_scope"))
def _inference_graphs(c: ConfigContainer) -> Iterator[str]:
    """Only local graphs serve inference, by layer or by block."""
    scope, implementation = _inference_scope(c), c.value("model.cuda_graph_impl") or "none"
    if scope in ("layer", "block") and implementation != "local":
        yield (
            f"model.inference_cuda_graph_scope {scope} needs cuda_graph_impl local, not {implementation}; write none"
        )


def _inference_scope(c: ConfigContainer) -> str:
    """The scope of graphs for inference: a text, or the number of an enumeration as it is dumped."""
    number = c.value("model.inference_cuda_graph_scope._args_")
    if isinstance(number, list) and number in ([1], [2], [3]):
        return ("none", "layer", "block")[number[0] - 1]
    return str(c.value("model.inference_cuda_graph_scope"))


@rule("container-graph-rng", _CORE_GRAPHS, ("model.cuda_graph_impl", "model.use_te_rng_tracker"))
def _graph_rng(c: ConfigContainer) -> Iterator[str]:
    """A captured graph can draw random numbers only from Transformer Engine's tracker."""
    if c.captures_graphs and c.value("model.use_te_rng_tracker") is False:
        yield f"model.cuda_graph_impl {c.value('model.cuda_graph_impl')} needs model.use_te_rng_tracker = true"


def _is_nested(c: ConfigContainer) -> bool:
    """Whether the file is of v0.6.0 or newer."""
    return isinstance(c.value("model.transformer"), Mapping)


_NEEDS: Mapping[str, tuple[str, tuple[object, ...]]] = {
    "dataset.defer_npy_index_mmap": ("dataset.path_to_cache", ()),
    "dataset.fast_cache_load": ("dataset.path_to_cache", ()),
    "mixed_precision.fp16": ("mixed_precision.bf16", (False,)),
    "mixed_precision.fp4_param_gather": ("mixed_precision.fp4", ()),
    "mixed_precision.fp8_param_gather": ("mixed_precision.fp8", ()),
    "mixed_precision.reuse_grad_buf_for_mxfp8_param_ag": ("mixed_precision.fp8_param_gather", (True,)),
    "model.ep_overlap_early_attn_memory_release": ("model.overlap_moe_expert_parallel_comm", (True,)),
    "model.fine_grained_activation_offloading": ("model.offload_modules", ()),
    "model.inference_disable_triton_nvls_kernels": ("model.transformer_impl", ("inference_optimized",)),
    "model.inference_fuse_tp_communication": ("model.transformer_impl", ("inference_optimized",)),
    "model.moe_enable_deepep": ("model.moe_token_dispatcher_type", ("flex",)),
    "model.moe_pad_expert_input_to_capacity": ("model.moe_expert_capacity_factor", ()),
    "model.moe_paged_stash": ("model.moe_expert_rank_capacity_factor", ()),
    "model.moe_router_enable_expert_bias": ("model.moe_router_score_function", ("sigmoid", "sqrtsoftplus")),
    "model.moe_single_grouped_bias": ("model.moe_grouped_gemm", (True,)),
    "model.moe_single_grouped_weight": ("model.moe_grouped_gemm", (True,)),
    "model.overlap_p2p_comm_warmup_flush": ("model.overlap_p2p_comm", (True,)),
    "model.use_te_activation_func": ("model.bias_activation_fusion", (False,)),
}
"""Switches, and the field that each needs with its values; none for any that is set."""


@rule("container-switch-needs", _SWITCHES, (*_NEEDS, *(needed for needed, _ in _NEEDS.values())))
def _switch_needs(c: ConfigContainer) -> Iterator[str]:
    """A switch that is on without what it works on is an assertion, when the job starts."""
    if not _is_nested(c):
        return
    for switch, (needed, values) in _NEEDS.items():
        if c.value(switch) is not True:
            continue
        value = c.value(needed)
        if value not in values if values else value in (None, [], ""):
            shown = " or ".join(json.dumps(each) for each in values)
            yield f"{switch} needs {needed}{f' = {shown}' if values else ''}; it is {json.dumps(value)}"
    quantised = isinstance(c.value("mixed_precision"), str) or any(map(c.is_on, _QUANTISED))
    for switch in ("model.moe_router_padding_for_fp8", "model.moe_router_padding_for_quantization"):
        if c.is_on(switch) and not quantised:
            yield f"{switch} needs fp8 or fp4; switch it off, or name a recipe of mixed precision that has it"


@rule("container-captured", _UNCHECKED, ("model.cuda_graph_modules", "model.cuda_graph_impl"))
def _captured(c: ConfigContainer) -> Iterator[str]:
    """Megatron-Core fails on it, when graphs are captured."""
    if c.value("model.cuda_graph_impl") != "transformer_engine":
        return
    modules = set(c.captured_modules)
    if {"moe", "moe_router"} <= modules:
        yield "CUDA graphs of moe and of moe_router exclude each other; keep one"
    if "moe_preprocess" in modules and "moe_router" not in modules:
        yield "a CUDA graph of moe_preprocess needs moe_router beside it"
    if (found := sorted({"moe", "moe_router"} & modules)) and (c.integer("model.num_moe_experts") or 1) <= 1:
        yield f"a CUDA graph of {' and '.join(found)} needs a model with experts; remove it"


@rule(
    "container-sequence-parallel",
    _UNCHECKED,
    ("model.sequence_parallel", "model.tensor_model_parallel_size"),
    "warning",
)
def _sequence_parallel(c: ConfigContainer) -> Iterator[str]:
    """It silently does nothing, and a comparison would be of two equal runs."""
    if c.is_on("model.sequence_parallel") and c.size("tensor_model_parallel_size") == 1:
        yield "model.sequence_parallel does nothing with tensor_model_parallel_size 1; switch it off"


@rule("container-no-training", _UNCHECKED, ("train.train_iters",))
def _no_training(c: ConfigContainer) -> Iterator[str]:
    """The job succeeds without a step."""
    if c.integer("train.train_iters") == 0:
        yield "train.train_iters is 0: the run would end immediately; write a number of iterations"


_COUNTS = (
    *(*SIZES, "model.expert_model_parallel_size", "model.expert_tensor_parallel_size"),
    *("model.virtual_pipeline_model_parallel_size", "train.micro_batch_size", "train.global_batch_size"),
)
_RATES = ("optimizer.lr", "optimizer.min_lr")


@rule("container-positive", _UNCHECKED, (*_COUNTS, *_RATES))
def _positive(c: ConfigContainer) -> Iterator[str]:
    """The job divides by zero as it starts, or trains to losses that are no numbers."""
    for path in _COUNTS:
        count = c.integer(path)
        if count is not None and count < 1:
            yield f"{path} {count} must be at least 1; write one, or null where there is none"
    for path in _RATES:
        rate = c.number(path)
        if rate is not None and not math.isfinite(rate):
            yield f"{path} {rate} must be a finite number; write one"


@rule("container-intervals", _UNCHECKED, ("checkpoint.save_interval", "dataset.num_workers"))
def _intervals(c: ConfigContainer) -> Iterator[str]:
    """It fails at the first save, or in the first worker of the loader."""
    interval = c.integer("checkpoint.save_interval")
    if interval is not None and interval < 1:
        yield f"checkpoint.save_interval {interval} must be at least 1; write null to save none"
    workers = c.integer("dataset.num_workers")
    if workers is not None and workers < 0:
        yield f"dataset.num_workers {workers} must not be negative"


@rule("container-long-warmup", _UNCHECKED, SCHEDULE, "warning")
def _long_warmup(c: ConfigContainer) -> Iterator[str]:
    """Megatron-Bridge truncates the warm-up with a warning that is easily missed."""
    unit = "samples" if c.value("train.train_samples") is not None else "iters"
    warmup = c.integer(f"scheduler.lr_warmup_{unit}") or 0
    decay = (
        c.integer("scheduler.max_steps") or c.integer(f"scheduler.lr_decay_{unit}") or c.integer(f"train.train_{unit}")
    )
    if decay and warmup >= decay:
        yield f"the warm-up of {warmup} {unit} is as long as the decay of {decay}, and is truncated; shorten it"
