"""How a `ConfigContainer.yaml` computes: parallelism, FSDP, precision, CUDA graphs, recomputation, offloading.

The rules follow Megatron-Bridge's own `validate()` and `finalize()`, which raise when the job starts, and find what
that check lets through although the job then fails or misleads. A rule's source says which. Left out is what needs the
cluster's files, its GPUs or its packages.
"""

import difflib
import json
import math
from collections.abc import Iterator, Mapping
from typing import Any

from nightbridge.launch.config_container import SIZES, ConfigContainer
from nightbridge.rules.rule import rule

VALIDATE = "Megatron-Bridge: ConfigContainer.validate() and finalize() in training/config.py at 067f987d (main)"
UNCHECKED = "Megatron-Core: what validate() of training/config.py at 067f987d (main) lets through, found by running it"
_PRECISION = "Megatron-Bridge: training/mixed_precision.py at 067f987d (main)"
_GRAPHS = "Megatron-Bridge: utils/cuda_graph.py, from 51885cf1 (v0.6.0) to 067f987d (main of August 2026)"
_CORE_GRAPHS = (
    "Megatron-Core: transformer/transformer_config.py and Megatron-LM: training/models/gpt.py at 2a75ac12 (main)"
)
_OPTIMIZER = "Megatron-Core: optimizer/optimizer_config.py, from b0cc2706 (v0.3.0) to 2a75ac12 (main of August 2026)"
_SCALING = "Megatron-Core: transformer/transformer_config.py, from b0cc2706 (v0.3.0) to 2a75ac12 (main of August 2026)"


# --- sizes and parallelism --------------------------------------------------------------------------------------------


@rule("container-world-size", VALIDATE, SIZES)
def _world_divides(c: ConfigContainer) -> Iterator[str]:
    """Training and evaluation both divide the GPUs into model-parallel groups."""
    size = c.model_parallel_size
    if c.world_size is not None and c.world_size % size:
        yield f"{c.world_size} GPUs are not a multiple of TP * PP * CP = {size}; change one of them"
    context = c.integer("dist.eval_context_parallel_size")
    if c.world_size is None or not context or context < 0:
        return
    size = size // c.size("context_parallel_size") * context
    if c.world_size % size:
        yield f"{c.world_size} GPUs are not a multiple of TP * PP * eval_context_parallel_size = {size}; change one"


@rule(
    "container-sequence-parallel", UNCHECKED, ("model.sequence_parallel", "model.tensor_model_parallel_size"), "warning"
)
def _sequence_parallel(c: ConfigContainer) -> Iterator[str]:
    """It silently does nothing, and a comparison would be of two equal runs."""
    if c.is_on("model.sequence_parallel") and c.size("tensor_model_parallel_size") == 1:
        yield "model.sequence_parallel does nothing with tensor_model_parallel_size 1; switch it off"


_COUNTS = (
    *(*SIZES, "model.expert_model_parallel_size", "model.expert_tensor_parallel_size"),
    *("model.virtual_pipeline_model_parallel_size", "train.micro_batch_size", "train.global_batch_size"),
)
RATES = ("optimizer.lr", "optimizer.min_lr")


@rule("container-positive", UNCHECKED, (*_COUNTS, *RATES))
def _positive(c: ConfigContainer) -> Iterator[str]:
    """The job divides by zero as it starts, or trains to losses that are no numbers."""
    for path in _COUNTS:
        count = c.integer(path)
        if count is not None and count < 1:
            yield f"{path} {count} must be at least 1; write one, or null where there is none"
    for path in RATES:
        rate = c.number(path)
        if rate is not None and not math.isfinite(rate):
            yield f"{path} {rate} must be a finite number; write one"


@rule("container-process-groups", VALIDATE, ("dist",))
def _process_groups(c: ConfigContainer) -> Iterator[str]:
    """Gloo groups are made by the global registry that decentralised groups replace."""
    if c.is_on("dist.use_decentralized_pg") and c.is_on("dist.use_gloo_process_groups"):
        yield "dist.use_decentralized_pg excludes dist.use_gloo_process_groups; switch one off"


# --- FSDP -------------------------------------------------------------------------------------------------------------


def uses_fsdp(c: ConfigContainer) -> bool:
    """Whether Megatron FSDP shards the model."""
    return c.is_on("dist.use_megatron_fsdp") or c.is_on("ddp.use_megatron_fsdp")


@rule("container-fsdp-choice", VALIDATE, ("dist",))
def _fsdp_choice(c: ConfigContainer) -> Iterator[str]:
    """Both shard the same parameters."""
    if c.is_on("dist.use_megatron_fsdp") and c.is_on("dist.use_torch_fsdp2"):
        yield "dist.use_megatron_fsdp and dist.use_torch_fsdp2 exclude each other; keep one"


@rule("container-fsdp", VALIDATE, ("dist", "ddp", "checkpoint", "env_vars"))
def _fsdp_first(c: ConfigContainer) -> Iterator[str]:
    """Megatron FSDP has a checkpoint format and communication settings of its own."""
    if not uses_fsdp(c) or c.integer("ddp.megatron_fsdp_version") == 2:
        return
    saves = c.value("checkpoint.save") is not None or c.value("checkpoint.load") is not None
    if saves and c.value("checkpoint.ckpt_format") != "fsdp_dtensor":
        yield 'Megatron FSDP saves and loads with checkpoint.ckpt_format = "fsdp_dtensor" only'
    if str(c.value("env_vars.CUDA_DEVICE_MAX_CONNECTIONS")) == "1":
        yield "Megatron FSDP needs CUDA_DEVICE_MAX_CONNECTIONS other than 1; remove it from env_vars"
    if c.is_on("ddp.fsdp_manual_registration") and not c.is_on("ddp.nccl_ub"):
        yield "ddp.fsdp_manual_registration needs ddp.nccl_ub = true"
    if c.is_on("dist.use_tp_pp_dp_mapping"):
        yield "Megatron FSDP excludes dist.use_tp_pp_dp_mapping; switch it off"
    hashed = c.value("train.check_weight_hash_across_dp_replicas_interval") is not None
    if hashed and c.value("ddp.data_parallel_sharding_strategy") == "optim_grads_params":
        yield "train.check_weight_hash_across_dp_replicas_interval excludes the sharding optim_grads_params; remove it"
    version = c.integer("ddp.megatron_fsdp_version")
    if version is not None and version != 1:
        yield f"ddp.megatron_fsdp_version {version} is neither 1 nor 2; write one of them"


@rule("container-fsdp-2", VALIDATE, ("dist", "ddp", "checkpoint", "model", "optimizer"))
def _fsdp_second(c: ConfigContainer) -> Iterator[str]:
    """The second version of Megatron FSDP shards data-parallel bf16 training only."""
    if not uses_fsdp(c) or c.integer("ddp.megatron_fsdp_version") != 2:
        return
    sizes = (*("tensor_model_parallel_size", "pipeline_model_parallel_size"), "context_parallel_size")
    broken = {
        "model.bf16 = true and no fp16": not c.is_on("model.bf16") or c.is_on("model.fp16"),
        "optimizer.bf16 = true and no fp16": not c.is_on("optimizer.bf16") or c.is_on("optimizer.fp16"),
        "model.params_dtype of bfloat16": c.dtype("model.params_dtype") not in ("", "bfloat16"),
        "parallel sizes of 1": any(c.size(name) > 1 for name in (*sizes, "expert_model_parallel_size")),
        "a dense model": c.is_on("model.num_moe_experts"),
        "no virtual pipeline": c.is_on("model.virtual_pipeline_model_parallel_size"),
        "no checkpoints": any(
            c.value(f"checkpoint.{name}") is not None for name in ("save", "load", "pretrained_checkpoint")
        ),
        "no gradient clipping (optimizer.clip_grad = 0)": (c.number("optimizer.clip_grad") or 0) > 0,
        "no precision-aware optimiser": c.is_on("optimizer.use_precision_aware_optimizer"),
        "no CPU offloading": c.is_on("model.cpu_offloading") or c.is_on("optimizer.optimizer_cpu_offload"),
        "no layer-wise distributed optimiser": c.is_on("optimizer.use_layer_wise_distributed_optimizer"),
        "no CUDA graph of the optimiser": c.is_on("optimizer.optimizer_cuda_graph"),
        "no loss scaling (optimizer.loss_scale = null)": c.value("optimizer.loss_scale") is not None,
        "rng.data_parallel_random_init = false": c.is_on("rng.data_parallel_random_init"),
        "ddp.num_distributed_optimizer_instances 1": (c.integer("ddp.num_distributed_optimizer_instances") or 1) != 1,
        "ddp.outer_dp_sharding_strategy no_shard": c.value("ddp.outer_dp_sharding_strategy") not in (None, "no_shard"),
        "model.calculate_per_token_loss = false": c.is_on("model.calculate_per_token_loss"),
        "no fp8 and no fp4": any(
            c.is_on(name) for name in ("model.fp8", "model.fp4", "ddp.fp8_param_gather", "ddp.fp4_param_gather")
        ),
        "no CUDA graphs": c.captures_graphs or c.is_on("ddp.megatron_fsdp_cuda_graph_mode"),
        "dist.use_tp_pp_dp_mapping = false": c.is_on("dist.use_tp_pp_dp_mapping"),
    }
    yield from (f"Megatron FSDP version 2 needs {need}" for need, is_broken in broken.items() if is_broken)


# --- precision --------------------------------------------------------------------------------------------------------
_NCCL_ALGORITHMS = ("Tree", "Ring", "CollnetDirect", "CollnetChain", "^NVLS")
QUANTISED = ("model.fp8", "model.fp4", "mixed_precision.fp8", "mixed_precision.fp4")
_SCALED = ("fp8_delayed_scaling", "mxfp8", "fp8_current_scaling", "fp8_subchannel_scaling")
_RECIPES = frozenset(
    {
        *("bf16_mixed", "fp16_mixed", "bf16_with_nvfp4_mixed", "nemotron_3_super_bf16_with_nvfp4_mixed"),
        *(f"{kind}_with_{scaled}_mixed" for kind in ("bf16", "fp16") for scaled in _SCALED),
        *(f"{model}_bf16_with_fp8_current_scaling_mixed" for model in ("nemotron_h", "nanov2")),
    }
)


@rule("container-precision", VALIDATE, ("model.bf16", "model.fp16", "optimizer"))
def _two_precisions(c: ConfigContainer) -> Iterator[str]:
    """A model computes in one half-precision type."""
    for section in ("model", "optimizer"):
        if c.is_on(f"{section}.bf16") and c.is_on(f"{section}.fp16"):
            yield f"{section}.bf16 and {section}.fp16 are both on; keep one"


@rule("container-aware-precision", VALIDATE, ("model.bf16", "model.fp16", "optimizer"))
def _aware_precision(c: ConfigContainer) -> Iterator[str]:
    """The precision-aware optimizer keeps its states in types that must match the model's."""
    # A recipe of mixed precision sets the types of both.
    if not c.is_on("optimizer.use_precision_aware_optimizer") or c.is_on("mixed_precision"):
        return
    ours = [kind for kind in ("bf16", "fp16") if c.is_on(f"model.{kind}")]
    theirs = [kind for kind in ("bf16", "fp16") if c.is_on(f"optimizer.{kind}")]
    for kind in ours:
        if kind not in theirs:
            yield f"optimizer.use_precision_aware_optimizer with model.{kind} needs optimizer.{kind} = true"
    if not ours and theirs:
        yield (
            f"optimizer.use_precision_aware_optimizer with a model in fp32 needs optimizer.{theirs[0]} = false; "
            f"or write model.{theirs[0]} = true"
        )


_STATES = tuple(f"optimizer.{name}_dtype" for name in ("main_grads", "main_params", "exp_avg", "exp_avg_sq"))


@rule("container-optimizer-states", _OPTIMIZER, ("optimizer",))
def _optimizer_states(c: ConfigContainer) -> Iterator[str]:
    """Only Adam's distributed, precision-aware form keeps its states in other types than fp32."""
    if c.is_on("optimizer.use_precision_aware_optimizer"):
        if (kind := c.value("optimizer.optimizer")) not in ("adam", None):
            yield f'optimizer.use_precision_aware_optimizer needs optimizer.optimizer = "adam", not {kind}'
        if c.value("optimizer.use_distributed_optimizer") is False:
            yield "optimizer.use_precision_aware_optimizer needs optimizer.use_distributed_optimizer = true"
        return
    for path in _STATES:
        if c.dtype(path) not in ("", "float32", "float", "fp32"):
            yield f"{path} {c.dtype(path)} needs optimizer.use_precision_aware_optimizer = true; write it, or float32"


def _mixed(c: ConfigContainer, name: str) -> Any:
    """A setting of precision: the recipe of mixed precision lays its own over the model's when the job starts."""
    recipe = c.value("mixed_precision")
    return recipe[name] if isinstance(recipe, Mapping) and name in recipe else c.value(f"model.{name}")


@rule("container-scaling", _SCALING, ("mixed_precision", "model"))
def _scaling(c: ConfigContainer) -> Iterator[str]:
    """One narrow type at a time, and scales that are known only after a step go with few other settings."""
    if isinstance(c.value("mixed_precision"), str) or not _mixed(c, "fp8"):
        return
    if _mixed(c, "fp4"):
        yield "fp8 and fp4 exclude each other; write null for one of them"
    delayed, ends = _mixed(c, "fp8_recipe") == "delayed", _mixed(c, "first_last_layers_bf16")
    if delayed and ends:
        yield "fp8_recipe delayed excludes first_last_layers_bf16; switch it off, or use another fp8_recipe"
    most = (c.integer("model.num_layers") or 0) // c.size("pipeline_model_parallel_size")
    for name in ("num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16"):
        count = _mixed(c, name)
        if ends and most and isinstance(count, int) and not 0 <= count <= most:
            yield f"{name} {count} must be 0 to {most}, the layers of a pipeline stage"
    again = {"moe_act", "layernorm"}.intersection(c.names("model.recompute_modules"))
    if delayed and again and c.value("model.recompute_granularity") == "selective":
        yield f"fp8_recipe delayed excludes recomputing {' and '.join(sorted(again))}; remove it from recompute_modules"


@rule("container-mxfp8-gather", VALIDATE, ("mixed_precision",))
def _mxfp8_gather(c: ConfigContainer) -> Iterator[str]:
    """Gathering MXFP8 parameters reuses the gradient buffer."""
    gathers = c.is_on("mixed_precision.fp8_param_gather") and c.value("mixed_precision.fp8_recipe") == "mxfp8"
    if gathers and not uses_fsdp(c) and not c.is_on("mixed_precision.reuse_grad_buf_for_mxfp8_param_ag"):
        yield "mixed_precision.fp8_param_gather with mxfp8 needs reuse_grad_buf_for_mxfp8_param_ag = true"


@rule("container-precision-recipe", _PRECISION, ("mixed_precision",))
def _precision_recipe(c: ConfigContainer) -> Iterator[str]:
    """A recipe of mixed precision that is named is looked up when the job starts."""
    named = c.value("mixed_precision")
    if isinstance(named, str) and named.replace("-", "_") not in _RECIPES:
        near = difflib.get_close_matches(named, _RECIPES, n=1, cutoff=0.3)
        yield f"mixed_precision {named!r} is not a recipe; use {', '.join(near or sorted(_RECIPES))}"


@rule("container-deterministic", VALIDATE, ("model.deterministic_mode", "env_vars.NCCL_ALGO"))
def _deterministic(c: ConfigContainer) -> Iterator[str]:
    """These kernels and NCCL algorithms sum in an order that varies between runs."""
    if not c.is_on("model.deterministic_mode"):
        return
    if c.is_on("model.cross_entropy_loss_fusion"):
        yield "model.deterministic_mode needs model.cross_entropy_loss_fusion = false"
    algorithm = c.value("env_vars.NCCL_ALGO")
    if str(algorithm) not in _NCCL_ALGORITHMS:
        given = "not set" if algorithm is None else repr(algorithm)
        yield f"model.deterministic_mode needs env_vars.NCCL_ALGO of {', '.join(_NCCL_ALGORITHMS)}; it is {given}"


@rule("container-quantised", VALIDATE, ("model.restore_modelopt_state", "checkpoint"))
def _quantised(c: ConfigContainer) -> Iterator[str]:
    """ModelOpt wraps the layers, which fused gradients and non-persistent checkpoints do not know."""
    if not c.is_on("model.restore_modelopt_state"):
        return
    if c.is_on("model.gradient_accumulation_fusion"):
        yield "model.restore_modelopt_state needs model.gradient_accumulation_fusion = false"
    if c.value("checkpoint.non_persistent_ckpt_type") is not None:
        yield "model.restore_modelopt_state excludes checkpoint.non_persistent_ckpt_type; remove it"


# --- CUDA graphs, recomputation and offloading ------------------------------------------------------------------------


@rule("container-graph-nan-check", VALIDATE, ("model.cuda_graph_impl", "rerun_state_machine"))
def _graph_nan_check(c: ConfigContainer) -> Iterator[str]:
    """The check reads the loss on the host at every step, which a captured iteration forbids."""
    if c.captures_iteration and c.is_on("rerun_state_machine.check_for_nan_in_loss"):
        yield "a full_iteration CUDA graph needs rerun_state_machine.check_for_nan_in_loss = false"


@rule("container-graph-recompute", VALIDATE, ("model.recompute_granularity", "model.cuda_graph_impl"))
def _graph_recompute(c: ConfigContainer) -> Iterator[str]:
    """What recomputes whole layers runs outside of a graph of parts of a layer."""
    if c.captures_graphs and not c.captures_iteration and c.value("model.recompute_granularity") == "full":
        yield (
            "model.recompute_granularity full goes with a full_iteration CUDA graph only; write selective, or "
            'model.cuda_graph_impl = "none"'
        )


_RECOMPUTED_WITH: Mapping[str, tuple[str, bool]] = {
    "mla_up_proj": ("model.multi_latent_attention", True),
    "moe_act": ("model.moe_grouped_gemm", True),
    "shared_experts": ("model.moe_shared_expert_overlap", False),
}


@rule(
    "container-recompute",
    UNCHECKED,
    ("model.recompute_granularity", "model.recompute_method", "model.recompute_modules"),
)
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
    modules = {*c.names("model.recompute_modules")} if granularity == "selective" else set[str]()
    if c.value("model.moe_shared_expert_intermediate_size") is None:
        modules -= {"shared_experts"}  # a model without them has none to overlap
    for module, (needed, value) in _RECOMPUTED_WITH.items():
        if module in modules and c.value(needed) is not None and c.is_on(needed) is not value:
            yield f"model.recompute_modules {module} needs {needed} = {json.dumps(value)}"


@rule("container-offload", VALIDATE, ("model.cpu_offloading", "model.recompute_granularity"))
def _offload(c: ConfigContainer) -> Iterator[str]:
    """Activations are either kept on the host or computed again, within one pipeline stage."""
    if not c.is_on("model.cpu_offloading"):
        return
    if c.value("model.recompute_granularity") is not None:
        yield "model.cpu_offloading excludes model.recompute_granularity; remove one of them"
    if (c.number("model.pipeline_model_parallel_size") or 1) > 1:
        yield "model.cpu_offloading needs model.pipeline_model_parallel_size = 1"
    offloaded, layers = c.integer("model.cpu_offloading_num_layers"), c.integer("model.num_layers")
    if offloaded is not None and layers and not 0 <= offloaded < layers:
        yield f"model.cpu_offloading_num_layers {offloaded} must be less than model.num_layers {layers}"


@rule(
    "container-graph-offload",
    f"{VALIDATE}; Megatron-Core: transformer/transformer_config.py, from d0b3b775 (v0.5.0) to 2a75ac12 (main)",
    (
        *("model.cpu_offloading", "model.cuda_graph_impl", "model.cuda_graph_modules", "model.cuda_graph_warmup_steps"),
        *("model.fine_grained_activation_offloading", "model.fine_grained_offloading_max_inflight_offloads"),
    ),
)
def _graph_offload(c: ConfigContainer) -> Iterator[str]:
    """Transformer Engine's offloading and other graph implementations exclude each other."""
    is_held = c.captures_iteration and c.is_since_0_5
    if c.is_on("model.cpu_offloading") and c.captures_graphs and not is_held:
        what = "CUDA graphs of layers" if c.is_since_0_5 else "CUDA graphs"
        yield f'model.cpu_offloading excludes {what}; write model.cuda_graph_impl = "none" or switch it off'
    if (
        c.is_on("model.fine_grained_activation_offloading")
        and c.value("model.transformer_impl") != "transformer_engine"
    ):
        yield 'model.fine_grained_activation_offloading needs model.transformer_impl = "transformer_engine"'
    if not (c.is_on("model.fine_grained_activation_offloading") and c.captures_graphs and c.is_since_0_5):
        return
    if "moe" in c.captured_modules:
        yield "model.fine_grained_activation_offloading excludes a CUDA graph of moe; switch one off"
    if (steps := c.integer("model.cuda_graph_warmup_steps")) is not None and steps < 1:
        yield f"offloading with CUDA graphs needs model.cuda_graph_warmup_steps of at least 1, not {steps}"
    most = c.value("model.fine_grained_offloading_max_inflight_offloads")
    if c.captures_iteration and (most is None or (isinstance(most, int) and most < 0)):
        yield (
            "offloading within a full_iteration CUDA graph needs model.fine_grained_offloading_max_inflight_offloads "
            f"of at least 0; it is {json.dumps(most)}"
        )


_OFFLOADED = (
    "core_attn",
    "attn_proj",
    "expert_fc1",
    "fused_group_mlp",
    "moe_act",
    "attn_norm",
    "mlp_norm",
    "qkv_linear",
)


@rule("container-offload-modules", _SCALING, ("model.fine_grained_activation_offloading", "model.offload_modules"))
def _offload_modules(c: ConfigContainer) -> Iterator[str]:
    """Activations of modules wait on the host, which offloads no whole layers beside them."""
    if not c.is_on("model.fine_grained_activation_offloading"):
        return
    modules = {*c.names("model.offload_modules")}
    if c.is_on("model.cpu_offloading"):
        yield "model.fine_grained_activation_offloading excludes model.cpu_offloading; switch one off"
    if "attn_proj" in modules and "core_attn" not in modules:
        yield "model.offload_modules attn_proj needs core_attn, whose output it takes; add it"
    for module in sorted(modules.difference(_OFFLOADED)):
        # A branch of Megatron-LM may offload more, but hardly what is nearly a name of these.
        if near := difflib.get_close_matches(module, _OFFLOADED, n=1, cutoff=0.85):
            yield f"model.offload_modules {module!r} is not a module to offload; use {near[0]}"
    inside = sorted(modules & {"moe_act", "expert_fc1", "fused_group_mlp"})
    recomputed = c.value("model.recompute_granularity") == "selective" and "moe" in c.names("model.recompute_modules")
    if c.is_since_0_6 and inside and recomputed:
        yield f"model.offload_modules {', '.join(inside)} are inside moe, which recompute_modules has; remove one"
    if "fused_group_mlp" in modules:
        if c.value("model.use_transformer_engine_op_fuser") is False:
            yield "model.offload_modules fused_group_mlp needs model.use_transformer_engine_op_fuser = true"
        if parts := sorted(modules & {"expert_fc1", "moe_act"}):
            yield f"model.offload_modules fused_group_mlp contains {', '.join(parts)}; remove one"
    if c.is_on("model.moe_paged_stash") and inside:
        yield f"model.moe_paged_stash keeps {', '.join(inside)} already; remove it from model.offload_modules"


@rule("container-local-graphs", _GRAPHS, ("model.cuda_graph_impl", "model.cuda_graph_modules"))
def _local_graphs(c: ConfigContainer) -> Iterator[str]:
    """Megatron-Bridge captures layers with Transformer Engine only; its local graphs hold the full iteration."""
    is_local = c.value("model.cuda_graph_impl") == "local" and not c.captures_iteration
    if is_local and (c.captured_modules or _inference_scope(c) not in ("layer", "block")) and c.is_since_0_6:
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
    implementation = c.value("model.cuda_graph_impl")
    # These build their model without GPT's check, and NVIDIA's own recipes of them capture without the tracker.
    is_unchecked = implementation == "transformer_engine" and c.kind("model").startswith(("Qwen3VL", "Qwen35VL"))
    if c.captures_graphs and not is_unchecked and c.value("model.use_te_rng_tracker") is False:
        yield f"model.cuda_graph_impl {implementation} needs model.use_te_rng_tracker = true"


_LAYER_PARTS = frozenset({"attn", "mlp", "moe", "moe_router", "moe_preprocess", "mamba"})


@rule(
    "container-captured",
    UNCHECKED,
    (
        *("model.cuda_graph_modules", "model.cuda_graph_impl", "model.moe_layer_freq"),
        *("model.moe_expert_capacity_factor", "model.moe_pad_expert_input_to_capacity", "model.recompute_modules"),
    ),
)
def _captured(c: ConfigContainer) -> Iterator[str]:
    """Megatron-Core fails on it, when graphs are captured."""
    modules, implementation = set(c.captured_modules), c.value("model.cuda_graph_impl")
    if implementation == "full_iteration" and (parts := sorted(modules & _LAYER_PARTS)):
        yield f"a full_iteration CUDA graph holds {', '.join(parts)} already; write model.cuda_graph_modules = []"
    if implementation != "transformer_engine":
        return
    if {"moe", "moe_router"} <= modules:
        yield "CUDA graphs of moe and of moe_router exclude each other; keep one"
    recomputes = c.value("model.recompute_granularity") == "selective"
    if "moe_router" in modules and recomputes and "moe" in c.names("model.recompute_modules"):
        yield "model.recompute_modules moe would recompute the captured moe_router; remove one of them"
    if "moe_preprocess" in modules and "moe_router" not in modules:
        yield "a CUDA graph of moe_preprocess needs moe_router beside it"
    if (found := sorted({"moe", "moe_router"} & modules)) and (c.integer("model.num_moe_experts") or 1) <= 1:
        yield f"a CUDA graph of {' and '.join(found)} needs a model with experts; remove it"
    if (c.integer("model.num_moe_experts") or 1) <= 1:
        return
    layers, capacity = c.value("model.moe_layer_freq"), c.number("model.moe_expert_capacity_factor")
    if "mlp" in modules and (layers == 1 or (isinstance(layers, list) and 0 not in layers)):
        yield "a CUDA graph of mlp needs dense layers, and all of this model's have experts; remove it"
    if capacity is not None and c.is_on("model.moe_pad_expert_input_to_capacity"):
        return
    if "moe" in modules:
        yield "a CUDA graph of moe needs moe_expert_capacity_factor and moe_pad_expert_input_to_capacity; capture parts"
    synchronises = (capacity is not None and capacity >= 0) or c.is_on("model.moe_router_padding_for_fp8")
    if "moe_preprocess" in modules and synchronises and c.value("model.moe_token_dispatcher_type") == "alltoall":
        yield (
            "a CUDA graph of moe_preprocess excludes moe_expert_capacity_factor without padding to it, and "
            "moe_router_padding_for_fp8, with moe_token_dispatcher_type alltoall; remove one"
        )
