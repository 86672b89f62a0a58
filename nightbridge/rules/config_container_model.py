"""How a `ConfigContainer.yaml` builds its model: layers among a pipeline's stages, attention, experts and switches.

The rules follow Megatron-Core's own assertions, which end the job when the model is built or first runs. Those that
all of its releases have say so in their source; one that newer ones alone have looks at newer files alone.
"""

import json
import re
from collections.abc import Iterator, Mapping

from nightbridge.launch.config_container import SIZES, ConfigContainer
from nightbridge.rules.config_container_compute import QUANTISED, UNCHECKED
from nightbridge.rules.rule import rule

_LAYOUT = (
    "Megatron-Core: transformer/pipeline_parallel_layer_layout.py, from b0cc2706 (v0.3.0) to 2a75ac12 (main), the same"
)
_ROUTING = (
    "Megatron-Core: transformer/transformer_config.py and transformer/moe/moe_layer.py, from b0cc2706 (v0.3.0) to "
    "2a75ac12 (main of August 2026)"
)
_SWITCHES = (
    "Megatron-Core: transformer/transformer_config.py at 2a75ac12 (main), found by turning each switch of a dump over"
)
_GROUPS = "Megatron-Core: initialize_model_parallel() of parallel_state.py, from b0cc2706 (v0.3.0) to 2a75ac12 (main)"
_OVERLAP = "Megatron-Bridge: CommOverlapConfig in training/comm_overlap.py, from 21b02e0c (v0.3.0) to 067f987d (main)"

# --- layers among the stages of a pipeline ----------------------------------------------------------------------------

_LETTERS = {"E": "embedding", "t": "decoder", "m": "mtp", "L": "loss"}
_REPEATED = (re.compile(r"\(([^)]+)\)\*(\d+)"), re.compile(r"(.)\*(\d+)"))
_MAX_LETTERS = 100_000


def _unrolled(match: re.Match[str]) -> str:
    count = int(match[2]) if len(match[2]) < len(str(_MAX_LETTERS)) else _MAX_LETTERS
    if count * len(match[1]) >= _MAX_LETTERS:
        raise ValueError(f"repeats {match[1]!r} {match[2]} times; write the number of layers")
    return match[1] * count


def _stages_of(layout: object) -> list[list[str]] | None:
    """The layers of each stage; None for what is neither a text nor a list of lists of texts.

    Raises:
        ValueError: A letter or a name is no layer, or there are more layers than any model has.
    """
    if isinstance(layout, str):
        text = layout.replace(",", "")
        for pattern in _REPEATED:
            text = pattern.sub(_unrolled, text)
        if unknown := [letter for letter in text if letter not in "|" and letter not in _LETTERS]:
            raise ValueError(
                f"has {unknown[0]!r}, which is not a layer; write E, t, m, L, | and repetitions as (tt|)*3"
            )
        return [[_LETTERS[letter] for letter in stage] for stage in text.split("|")]
    if not isinstance(layout, list) or not all(isinstance(stage, list) for stage in layout):
        return None
    if not all(isinstance(layer, str) for stage in layout for layer in stage):
        return None
    stages = [[layer.strip().lower() for layer in stage] for stage in layout]
    if unknown := [layer for stage in stages for layer in stage if layer not in _LETTERS.values()]:
        raise ValueError(f"has {unknown[0]!r}, which is not a layer; write {', '.join(_LETTERS.values())}")
    return stages


def layout_problem(
    layout: object, pipeline: int | None, virtual: int | None, layers: int | None, predicted: int | None
) -> str | None:
    """What Megatron-Core refuses of a layout of a pipeline's layers, without its subject; None where it takes it.

    Args:
        layout: A text such as `Et|(tt|)*30L`, or a list of the names of each stage's layers.
        pipeline: Ranks of the pipeline; None where they are not known.
        virtual: Stages of each rank; None where the layout decides, or where they are not known.
        layers: Layers of the decoder; None where they are not known.
        predicted: Layers of multi-token prediction; None where they are not known.
    """
    try:
        stages = _stages_of(layout)
    except ValueError as error:
        return str(error)
    if stages is None:
        return None
    found = [layer for stage in stages for layer in stage]
    count = len(stages)
    if pipeline and count % pipeline:
        return f"has {count} stages, which {pipeline} ranks of the pipeline do not divide; change one of them"
    if pipeline and virtual and virtual * pipeline != count:
        return f"has {count} stages, not {pipeline} * {virtual} of a virtual pipeline; change one of them"
    if found[:1] != ["embedding"] or found[-1:] != ["loss"] or found.count("embedding") + found.count("loss") != 2:
        return "must begin with the embedding (E), end with the loss (L), and have each once"
    if layers and found.count("decoder") != layers:
        return f"has {found.count('decoder')} decoder layers (t), not the model's {layers}; change one of them"
    if predicted is not None and found.count("mtp") != predicted:
        return f"has {found.count('mtp')} layers of multi-token prediction (m), not the model's {predicted}; change one"
    return _misplaced(stages, found, pipeline)


def _misplaced(stages: list[list[str]], found: list[str], pipeline: int | None) -> str | None:
    """What is wrong with where a layout has multi-token prediction."""
    if "mtp" not in found:
        return None
    if "decoder" in found[found.index("mtp") :]:
        return "has decoder layers (t) behind multi-token prediction (m); put it behind all of them"
    holders = [number for number, stage in enumerate(stages) if "mtp" in stage]
    if pipeline and (len(holders) > 1 or holders[0] < len(stages) - pipeline):
        return "must have multi-token prediction (m) in one stage, the last one of its rank; move it there"
    return None


_COUNTED = ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split")
_ENDS = ("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage")
_LAYERS = (*(f"model.{name}" for name in ("num_layers", *_COUNTED, *_ENDS)), "model.pipeline_model_parallel_size")


@rule(
    "container-layout",
    _LAYOUT,
    (
        *("model.pipeline_model_parallel_layout", "model.virtual_pipeline_model_parallel_size"),
        *("model.mtp_num_layers", *_LAYERS),
    ),
)
def layout_agrees(c: ConfigContainer) -> Iterator[str]:
    """A layout says where every layer is, so sizes must agree with it, and nothing else may place layers."""
    layout = c.value("model.pipeline_model_parallel_layout")
    if layout is None:
        return
    others = [f"model.{name}" for name in _ENDS if c.value(f"model.{name}") is not None]
    others += [f"model.{name}" for name in _COUNTED if c.is_on(f"model.{name}")]
    if others:
        yield f"model.pipeline_model_parallel_layout excludes {' and '.join(others)}; keep one kind"
    problem = layout_problem(
        layout,
        c.size("pipeline_model_parallel_size"),
        c.integer("model.virtual_pipeline_model_parallel_size"),
        c.integer("model.num_layers"),
        c.integer("model.mtp_num_layers") or 0,
    )
    if problem:
        yield f"model.pipeline_model_parallel_layout {problem}"


@rule("container-layers", UNCHECKED, _LAYERS)
def _layers(c: ConfigContainer) -> Iterator[str]:
    """Megatron-Core fails on it, when the model is built, or builds another one."""
    layers, stages = c.integer("model.num_layers"), c.size("pipeline_model_parallel_size")
    virtual = c.size("virtual_pipeline_model_parallel_size")
    ends = {f"model.{name}": count for name in _ENDS if (count := c.integer(f"model.{name}")) is not None}
    counted = [f"model.{name}" for name in _COUNTED if c.is_on(f"model.{name}")]
    if not layers or c.value("model.pipeline_model_parallel_layout") is not None:
        return
    if ends and counted:
        yield f"{' and '.join((*ends, *counted))} exclude each other; keep one kind"
        return
    if empty := [f"{name} {count}" for name, count in ends.items() if count < 1]:
        yield f"{' and '.join(empty)} must be at least 1; write null where the stage is as large as the others"
        return
    if len(ends) > stages == 1:
        if (last := ends[f"model.{_ENDS[1]}"]) != layers:
            yield f"{' and '.join(ends)} of one stage build {last} layers, not model.num_layers {layers}; remove them"
        return
    for name, count in ends.items():
        if count % virtual:
            yield f"{name} {count} is not a multiple of virtual_pipeline_model_parallel_size {virtual}; change one"
    spread, parts = layers - sum(ends.values()) + len(counted), (stages - len(ends)) * virtual
    less = "".join(f" - {name} {count}" for name, count in ends.items())
    if parts >= 0 and spread < (parts > 0):
        yield f"model.num_layers {layers}{less} leaves {spread} layers for {parts} stages between; lower the ends"
    elif parts >= 0 and (spread % parts if parts else spread):
        more = "".join(f" + 1 for {name}" for name in counted)
        where = f"{parts} stages between" if ends else f"{parts} stages"
        yield f"model.num_layers {layers}{less}{more} is not a multiple of the pipeline's {where}; write a layout"


@rule(
    "container-virtual-pipeline",
    "Megatron-Core: parallel_state.py, from b0cc2706 (v0.3.0) to 2a75ac12 (main); Megatron-Bridge: hybrid_provider.py",
    ("model.virtual_pipeline_model_parallel_size", "model.pipeline_model_parallel_size", "dist.use_decentralized_pg"),
)
def _virtual_pipeline(c: ConfigContainer) -> Iterator[str]:
    """A virtual pipeline interleaves the stages of a pipeline, which one stage and hybrid models have not."""
    virtual = c.integer("model.virtual_pipeline_model_parallel_size")
    if virtual is None:
        return
    if c.size("pipeline_model_parallel_size") == 1 and not c.is_on("dist.use_decentralized_pg"):
        yield f"model.virtual_pipeline_model_parallel_size {virtual} needs pipeline_model_parallel_size > 1; write null"
    elif c.kind("model") in ("HybridModelProvider", "MambaModelProvider"):
        yield f"model.virtual_pipeline_model_parallel_size {virtual} is not for models of Mamba's layers; write null"


@rule("container-pipeline-type", UNCHECKED, ("model.pipeline_dtype", "model.pipeline_model_parallel_size"))
def _pipeline_type(c: ConfigContainer) -> Iterator[str]:
    """The stages of a pipeline cannot exchange activations of an unknown type."""
    # A recipe of mixed precision that is only named sets the type when the job starts.
    named = isinstance(c.value("mixed_precision"), str)
    known = named or c.dtype("model.pipeline_dtype") or c.dtype("mixed_precision.pipeline_dtype")
    if c.size("pipeline_model_parallel_size") > 1 and not known:
        yield "a pipeline needs the dtype of the tensors between its stages: write model.pipeline_dtype"


_LINEAR = ("gated_delta_net", "gdn", "gdn2")

# --- attention and experts --------------------------------------------------------------------------------------------


@rule(
    "container-heads",
    UNCHECKED,
    (
        *("model.num_attention_heads", "model.tensor_model_parallel_size", "model.experimental_attention_variant"),
        *("model.linear_num_key_heads", "model.linear_num_value_heads", "model.context_parallel_size"),
    ),
)
def _heads(c: ConfigContainer) -> Iterator[str]:
    """Tensor parallelism splits attention by heads."""
    tensor = c.size("tensor_model_parallel_size")
    for name in ("num_attention_heads", "num_query_groups"):
        heads = c.integer(f"model.{name}")
        if heads and heads % tensor and (name == "num_attention_heads" or tensor % heads):
            yield f"model.{name} {heads} is not a multiple of tensor_model_parallel_size {tensor}; change one"
    if c.value("model.experimental_attention_variant") not in _LINEAR:
        return
    context, is_split = c.size("context_parallel_size"), c.is_since_0_5
    if context > 1 and not is_split:
        yield f"linear attention needs model.context_parallel_size 1 before v0.5.0, not {context}"
    size = tensor * (context if is_split else 1)
    for name in ("linear_num_key_heads", "linear_num_value_heads"):
        if (heads := c.integer(f"model.{name}")) and heads % size:
            yield f"model.{name} {heads} is not a multiple of TP * CP = {size}; change one"


@rule("container-experts", UNCHECKED, ("model.num_moe_experts", "model.expert_model_parallel_size"))
def _experts(c: ConfigContainer) -> Iterator[str]:
    """Expert parallelism gives each rank the same whole number of experts."""
    experts, parallel = c.integer("model.num_moe_experts"), c.size("expert_model_parallel_size")
    if parallel > 1 and not experts:
        yield f"model.expert_model_parallel_size {parallel} needs a model with experts; write 1"
    elif experts and experts % parallel:
        yield f"model.num_moe_experts {experts} is not a multiple of expert_model_parallel_size {parallel}; change one"


_INSTANCES = "ddp.num_distributed_optimizer_instances"


@rule(
    "container-expert-groups",
    _GROUPS,
    (*SIZES, "model.expert_model_parallel_size", "model.expert_tensor_parallel_size", _INSTANCES),
)
def _expert_groups(c: ConfigContainer) -> Iterator[str]:
    """Experts are laid over the same GPUs by sizes of their own, and instances of the optimizer over the replicas."""
    tensor, parallel = c.size("tensor_model_parallel_size"), c.size("expert_model_parallel_size")
    stages, instances = c.size("pipeline_model_parallel_size"), c.integer(_INSTANCES) or 1
    if not c.world_size or min(tensor, parallel, stages, instances) < 1 or c.world_size % c.model_parallel_size:
        return
    # Without a size of its own, which a dump does not tell, experts have that of tonight's tensor parallelism.
    written = c.integer("model.expert_tensor_parallel_size") or tensor
    blocks = {size: size * parallel * stages for size in sorted({written, tensor}) if size > 0}
    if all(c.world_size % block for block in blocks.values()):
        size, block = next(iter(blocks.items()))
        yield (
            f"{c.world_size} GPUs are not a multiple of expert_tensor_parallel_size {size} * "
            f"expert_model_parallel_size {parallel} * pipeline_model_parallel_size {stages} = {block}; change one"
        )
        return
    replicas = c.world_size // (tensor * stages)
    experts = [c.world_size // block for block in blocks.values() if c.world_size % block == 0]
    if replicas % instances or all(count % instances for count in experts):
        what = f"{min(experts)} replicas of the experts" if replicas % instances == 0 else f"DP * CP = {replicas}"
        yield f"{_INSTANCES} {instances} does not divide {what}; change one of them"


_EXPERT_FIELDS = (
    *("model.num_moe_experts", "model.sequence_parallel", "model.tensor_model_parallel_size", "model.add_bias_linear"),
    *("model.expert_tensor_parallel_size", "model.moe_token_dispatcher_type", "model.moe_enable_deepep"),
    *("model.moe_flex_dispatcher_backend", "model.moe_shared_expert_overlap", "model.variable_seq_lengths"),
    *("model.moe_pad_expert_input_to_capacity", "model.moe_expert_rank_capacity_factor", "model.moe_latent_size"),
    *("model.use_transformer_engine_op_fuser", "model.bias_dropout_fusion"),
)


@rule("container-expert-layer", _ROUTING, _EXPERT_FIELDS)
def _expert_layer(c: ConfigContainer) -> Iterator[str]:
    """The layer of experts goes with some ways of splitting and of exchanging tokens only; one fails at step one."""
    if not c.integer("model.num_moe_experts"):
        return
    tensor, expert_tensor = c.size("tensor_model_parallel_size"), c.size("expert_tensor_parallel_size")
    if tensor > 1 and c.value("model.sequence_parallel") is False:
        yield f"experts with tensor_model_parallel_size {tensor} need model.sequence_parallel = true to train"
    if c.is_on("model.add_bias_linear") and expert_tensor > 1:
        yield f"model.add_bias_linear with experts needs expert_tensor_parallel_size 1, not {expert_tensor}"
    kind, backend = c.value("model.moe_token_dispatcher_type"), c.value("model.moe_flex_dispatcher_backend")
    deepep = c.is_on("model.moe_enable_deepep") or backend == "deepep"
    broken = {
        "model.moe_enable_deepep excludes moe_flex_dispatcher_backend hybridep; keep one": (
            c.is_on("model.moe_enable_deepep") and backend == "hybridep"
        ),
        "model.moe_pad_expert_input_to_capacity excludes deepep; use alltoall or hybridep": (
            kind == "flex" and deepep and c.is_on("model.moe_pad_expert_input_to_capacity")
        ),
        "model.moe_shared_expert_overlap needs moe_token_dispatcher_type alltoall or flex, not allgather": (
            kind == "allgather"
            and c.is_on("model.moe_shared_expert_overlap")
            and c.value("model.moe_shared_expert_intermediate_size") is not None
        ),
        "model.variable_seq_lengths needs moe_token_dispatcher_type alltoall or flex, not allgather": (
            kind == "allgather" and c.is_on("model.variable_seq_lengths")
        ),
        "model.moe_router_padding_for_quantization needs moe_token_dispatcher_type alltoall or flex, not allgather": (
            kind == "allgather"
            and (c.is_on("model.moe_router_padding_for_quantization") or c.is_on("model.moe_router_padding_for_fp8"))
        ),
        "model.moe_shared_expert_overlap excludes moe_latent_size; switch it off": (
            c.is_on("model.moe_latent_size")
            and c.is_on("model.moe_shared_expert_overlap")
            and c.value("model.moe_shared_expert_intermediate_size") is not None
        ),
        "model.add_bias_linear with grouped experts needs bias_dropout_fusion = false": (
            c.is_on("model.add_bias_linear")
            and c.is_on("model.bias_dropout_fusion")
            and c.is_on("model.moe_grouped_gemm")
            and c.value("model.transformer_impl") == "transformer_engine"
        ),
        "model.moe_flex_dispatcher_backend ncclep needs moe_token_dispatcher_type flex": (
            backend == "ncclep" and kind not in ("flex", None) and c.is_since_0_6
        ),
    }
    if c.value("model.moe_expert_rank_capacity_factor") is not None:
        broken |= {
            "model.moe_expert_rank_capacity_factor needs moe_flex_dispatcher_backend hybridep": (
                deepep or backend not in ("hybridep", "ncclep", None)
            ),
            "model.moe_expert_rank_capacity_factor needs use_transformer_engine_op_fuser = true": (
                backend == "hybridep" and c.value("model.use_transformer_engine_op_fuser") is False
            ),
        }
    yield from (message for message, is_broken in broken.items() if is_broken)


_BALANCED_WITH_CAPACITY = ("aux_loss", "seq_aux_loss", "global_aux_loss", "none")


@rule(
    "container-routing",
    _ROUTING,
    (
        *("model.moe_router_topk", "model.num_moe_experts", "model.moe_router_score_function"),
        *("model.moe_router_pre_softmax", "model.moe_router_load_balancing_type", "model.moe_aux_loss_coeff"),
        *("model.moe_router_group_topk", "model.moe_router_num_groups", "model.moe_expert_capacity_factor"),
    ),
)
def _routing(c: ConfigContainer) -> Iterator[str]:
    """The router picks experts for each token, among all of them or among groups, and balances them by losses."""
    experts, chosen = c.integer("model.num_moe_experts"), c.integer("model.moe_router_topk")
    balancing, coefficients = c.value("model.moe_router_load_balancing_type"), c.value("model.moe_aux_loss_coeff")
    is_constant = chosen == 1 and c.value("model.moe_router_score_function") == "softmax"
    if is_constant and not c.is_on("model.moe_router_pre_softmax") and balancing != "sinkhorn":
        yield "model.moe_router_topk 1 needs model.moe_router_pre_softmax = true: a softmax of one has no gradient"
    if experts and chosen and chosen > experts:
        yield f"model.moe_router_topk {chosen} is more than the {experts} experts; lower it"
    groups, limit = c.integer("model.moe_router_num_groups"), c.integer("model.moe_router_group_topk")
    if limit and not groups:
        yield f"model.moe_router_group_topk {limit} needs model.moe_router_num_groups; write it"
    elif limit and groups and limit > groups:
        yield f"model.moe_router_group_topk {limit} is more than moe_router_num_groups {groups}; lower it"
    elif limit and groups and experts and experts % groups:
        yield f"model.num_moe_experts {experts} is not a multiple of moe_router_num_groups {groups}; change one"
    if balancing == "sinkhorn" and coefficients not in (0, None):
        yield f"model.moe_router_load_balancing_type sinkhorn needs model.moe_aux_loss_coeff 0, not {coefficients}"
    if isinstance(balancing, list) and not (isinstance(coefficients, list) and len(coefficients) == len(balancing)):
        yield f"model.moe_aux_loss_coeff must be a list of {len(balancing)}, as moe_router_load_balancing_type is"
    kinds = {*c.names("model.moe_router_load_balancing_type")} - {*_BALANCED_WITH_CAPACITY}
    if c.value("model.moe_expert_capacity_factor") is not None and kinds:
        yield (
            f"model.moe_expert_capacity_factor excludes moe_router_load_balancing_type {', '.join(sorted(kinds))}; "
            f"use {', '.join(_BALANCED_WITH_CAPACITY)}"
        )


@rule("container-overlap", _OVERLAP, ("comm_overlap", "model"))
def _overlap(c: ConfigContainer) -> Iterator[str]:
    """The overlap hides the all-to-all of one micro batch behind the compute of another one."""
    overlaps = c.is_on("comm_overlap.overlap_moe_expert_parallel_comm")
    if c.is_on("comm_overlap.delay_wgrad_compute") and not (
        overlaps or c.is_on("model.overlap_moe_expert_parallel_comm")
    ):
        yield "comm_overlap.delay_wgrad_compute needs comm_overlap.overlap_moe_expert_parallel_comm = true"
    # v0.3 does not look at the modules, and its dumps lack this field.
    is_newer = c.value("model.mtp_use_repeated_layer") is not None
    if is_newer and c.is_on("comm_overlap.delay_wgrad_compute"):
        yield from _delayed_gradients(c)
    if not overlaps:
        return
    staged = c.size("pipeline_model_parallel_size") > 1
    broken = {
        "model.expert_model_parallel_size > 1": c.size("expert_model_parallel_size") == 1,
        "a virtual pipeline": staged and c.value("model.virtual_pipeline_model_parallel_size") is None,
        "no recomputed layers": any(c.is_on(f"model.recompute_{name}") for name in ("method", "num_layers")),
        "no moe in model.recompute_modules": is_newer and "moe" in c.names("model.recompute_modules"),
        "model.moe_shared_expert_overlap = false": c.is_on("model.moe_shared_expert_overlap"),
        "at most one layer of multi-token prediction": (c.integer("model.mtp_num_layers") or 0) > 1,
        'model.moe_token_dispatcher_type "alltoall" or "flex"': c.value("model.moe_token_dispatcher_type")
        not in ("alltoall", "flex", None),
    }
    for need, is_broken in broken.items():
        if is_broken:
            yield f"comm_overlap.overlap_moe_expert_parallel_comm needs {need}"


def _delayed_gradients(c: ConfigContainer) -> Iterator[str]:
    """What of the weights' gradients that are computed later a CUDA graph cannot hold."""
    modules = {*c.captured_modules}
    routes = "moe_router" in modules and c.value("model.moe_shared_expert_intermediate_size") is not None
    if "attn" not in modules and (not routes or c.is_on("model.moe_shared_expert_overlap")):
        return
    if c.value("model.gradient_accumulation_fusion") is False:
        yield "comm_overlap.delay_wgrad_compute with CUDA graphs needs model.gradient_accumulation_fusion = true"
    biases = [name for name in ("model.add_bias_linear", "model.add_qkv_bias") if c.is_on(name)]
    if "attn" in modules and biases:
        yield f"comm_overlap.delay_wgrad_compute excludes a CUDA graph of attn with {' and '.join(biases)}; change one"


# --- switches that need others ----------------------------------------------------------------------------------------


_NEEDS: Mapping[str, tuple[str, tuple[object, ...]]] = {
    "dataset.defer_npy_index_mmap": ("dataset.path_to_cache", ()),
    "dataset.fast_cache_load": ("dataset.path_to_cache", ()),
    "mixed_precision.fp16": ("mixed_precision.bf16", (False,)),
    "mixed_precision.fp4_param_gather": ("mixed_precision.fp4", ()),
    "mixed_precision.fp8_param_gather": ("mixed_precision.fp8", ()),
    "mixed_precision.reuse_grad_buf_for_mxfp8_param_ag": ("mixed_precision.fp8_param_gather", (True,)),
    "comm_overlap.defer_embedding_wgrad_compute": ("model.gradient_accumulation_fusion", (True,)),
    "model.ep_overlap_early_attn_memory_release": ("model.overlap_moe_expert_parallel_comm", (True,)),
    "model.fine_grained_activation_offloading": ("model.offload_modules", ()),
    "model.inference_disable_triton_nvls_kernels": ("model.transformer_impl", ("inference_optimized",)),
    "model.inference_fuse_tp_communication": ("model.transformer_impl", ("inference_optimized",)),
    "model.moe_enable_deepep": ("model.moe_token_dispatcher_type", ("flex",)),
    "model.moe_pad_expert_input_to_capacity": ("model.moe_expert_capacity_factor", ()),
    "model.moe_paged_stash": ("model.moe_expert_rank_capacity_factor", ()),
    "model.moe_apply_probs_on_input": ("model.moe_router_topk", (1,)),
    "model.moe_router_enable_expert_bias": ("model.moe_router_score_function", ("sigmoid", "sqrtsoftplus")),
    "model.moe_single_grouped_bias": ("model.moe_grouped_gemm", (True,)),
    "model.moe_single_grouped_weight": ("model.moe_grouped_gemm", (True,)),
    "model.overlap_p2p_comm_warmup_flush": ("model.overlap_p2p_comm", (True,)),
    "model.use_te_activation_func": ("model.bias_activation_fusion", (False,)),
}
"""Switches, and the field that each needs with its values; none for any that is set."""

_NEEDED_ALWAYS = frozenset(
    {
        "comm_overlap.defer_embedding_wgrad_compute",
        "mixed_precision.fp8_param_gather",
        "model.fine_grained_activation_offloading",
        "model.moe_apply_probs_on_input",
        "model.moe_enable_deepep",
        "model.moe_pad_expert_input_to_capacity",
        "model.moe_router_enable_expert_bias",
        "model.use_te_activation_func",
    }
)
"""Those that every release since v0.3.0 asserts, and so of whatever file."""


@rule("container-switch-needs", _SWITCHES, (*_NEEDS, *(needed for needed, _ in _NEEDS.values())))
def _switch_needs(c: ConfigContainer) -> Iterator[str]:
    """A switch that is on without what it works on is an assertion, when the job starts."""
    is_newer = c.is_since_0_6
    if c.is_on("comm_overlap.defer_embedding_wgrad_compute") and c.size("pipeline_model_parallel_size") == 1:
        yield "comm_overlap.defer_embedding_wgrad_compute needs model.pipeline_model_parallel_size > 1; switch it off"
    for switch, (needed, values) in _NEEDS.items():
        if c.value(switch) is not True or not (is_newer or switch in _NEEDED_ALWAYS):
            continue
        value = c.value(needed)
        if value not in values if values else value in (None, [], ""):
            shown = " or ".join(json.dumps(each) for each in values)
            yield f"{switch} needs {needed}{f' = {shown}' if values else ''}; it is {json.dumps(value)}"
    quantised = isinstance(c.value("mixed_precision"), str) or any(map(c.is_on, QUANTISED))
    for switch in ("model.moe_router_padding_for_fp8", "model.moe_router_padding_for_quantization"):
        if is_newer and c.is_on(switch) and not quantised:
            yield f"{switch} needs fp8 or fp4; switch it off, or name a recipe of mixed precision that has it"
