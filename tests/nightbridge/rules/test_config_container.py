"""ConfigContainers: Megatron-Bridge's own checks, what they miss, and what follows from the values."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nightbridge.launch.config_container import (
    ConfigContainer,
    read_container,
)
from nightbridge.rules import check_container
from nightbridge.rules.checking import CONTAINER_RULES

REAL = Path(__file__).parents[4] / "shared" / "data" / "ConfigContainer_llama3_8b_8gpu_h100_bf16.yaml"
CONFIG = "megatron.bridge.training.config"

SOUND = {
    "_target_": f"{CONFIG}.ConfigContainer",
    "model.seq_length": 4096,
    "model.transformer.tensor_model_parallel_size": 2,
    "model.transformer.pipeline_model_parallel_size": 1,
    "model.transformer.context_parallel_size": 1,
    "model.transformer.num_layers": 32,
    "model.transformer.num_attention_heads": 32,
    "model.transformer.num_query_groups": 8,
    "model.transformer.bf16": True,
    "model.transformer.transformer_impl": "transformer_engine",
    "train.train_iters": 50,
    "train.global_batch_size": 128,
    "train.micro_batch_size": 1,
    "scheduler.lr_decay_iters": 50,
    "scheduler.lr_warmup_iters": 10,
    "scheduler.lr_warmup_samples": 0,
    "dataset._target_": f"{CONFIG}.GPTDatasetConfig",
    "dataset.seq_length": 4096,
    "dataset.num_workers": 8,
    "dist.use_gloo_process_groups": True,
    "optimizer.use_distributed_optimizer": True,
    "checkpoint.ckpt_format": "torch_dist",
    "checkpoint.save_interval": 500,
    "checkpoint.use_persistent_ckpt_worker": True,
    "checkpoint.load_optim": True,
    "logger.log_interval": 1,
    "profiling.profile_step_start": 10,
    "profiling.profile_step_end": 12,
}


def make(changes: dict[str, Any] | None = None, path: str = "ConfigContainer.yaml") -> ConfigContainer:
    table: dict[str, Any] = {}
    for name, value in {**SOUND, **(changes or {})}.items():
        *parents, last = name.split(".")
        section = table
        for parent in parents:
            section = section.setdefault(parent, {})
        section[last] = value
    return ConfigContainer(Path(path), table)


def data(kind: str, **fields: Any) -> dict[str, Any]:
    return {"dataset._target_": f"{CONFIG}.{kind}", **{f"dataset.{name}": value for name, value in fields.items()}}


def broken(changes: dict[str, Any], world_size: int | None = 8) -> dict[str, str]:
    return {violation.rule: violation.message for violation in check_container(make(changes), world_size)}


def test_a_sound_configuration_breaks_no_rule() -> None:
    assert check_container(make(), 8) == ()


TE = {"model.cuda_graph_impl": "transformer_engine", "model.use_te_rng_tracker": True}
FSDP = {"ddp.use_megatron_fsdp": True}
PACKED = {"dataset.enable_offline_packing": True, "dataset.offline_packing_specs": {"packed_sequence_size": 4096}}
AWARE = {"optimizer.use_precision_aware_optimizer": True}
STRAGGLERS = {"nvrx_straggler.enabled": True, "nvrx_straggler.calc_relative_gpu_perf": True}
STAGES = {"model.transformer.pipeline_model_parallel_size": 4}
ONE_STAGE = {"model.transformer.pipeline_model_parallel_size": 1}
COUNTED, FIRST = "model.account_for_loss_in_pipeline_split", "model.num_layers_in_first_pipeline_stage"
SELECTIVE = {"model.recompute_granularity": "selective"}
SHARED = {**SELECTIVE, "model.recompute_modules": ["shared_experts"], "model.moe_shared_expert_overlap": True}
DELAYS = {"comm_overlap.delay_wgrad_compute": True}
OVERLAP = {"comm_overlap.overlap_moe_expert_parallel_comm": True}
MOE_AGAIN, V4 = {"model.recompute_modules": ["moe"]}, "model.mtp_use_repeated_layer"
FUSED = "model.gradient_accumulation_fusion"
DELAYED_GRAPHS = {**DELAYS, **OVERLAP, **TE, "model.expert_model_parallel_size": 2, V4: False}
DELAYED_ATTENTION = {**DELAYED_GRAPHS, "model.cuda_graph_modules": ["attn"]}
DELAYED_ROUTER = {
    **DELAYED_GRAPHS,
    "model.cuda_graph_modules": ["moe_router"],
    "model.moe_shared_expert_intermediate_size": 512,
}
CONTEXT = {"model.transformer.context_parallel_size": 2}
LAYOUT, LAST = "model.pipeline_model_parallel_layout", "model.num_layers_in_last_pipeline_stage"
EXPERTS = {"model.num_moe_experts": 8, "model.sequence_parallel": True}
FLEX, PADDED = {"model.moe_token_dispatcher_type": "flex"}, {"model.moe_pad_expert_input_to_capacity": True}
ONE = {"model.moe_router_topk": 1, "model.moe_router_score_function": "softmax"}
GROUPS, GROUP_LIMIT = "model.moe_router_num_groups", "model.moe_router_group_topk"
BALANCING, CAPACITY = "model.moe_router_load_balancing_type", "model.moe_expert_capacity_factor"
DELAYED = {"mixed_precision.fp8": "hybrid", "mixed_precision.fp8_recipe": "delayed"}
OFFLOADS = {"model.fine_grained_activation_offloading": True}
V5, WHOLE = {"model.moe_paged_stash": False}, {**TE, "model.cuda_graph_impl": "full_iteration"}
VIRTUAL = {**STAGES, "model.virtual_pipeline_model_parallel_size": 2, "train.global_batch_size": 130}
INFLIGHT, GROUP = "model.fine_grained_offloading_max_inflight_offloads", "model.microbatch_group_size_per_vp_stage"
LINEAR = {"model.experimental_attention_variant": "gated_delta_net", "model.linear_num_key_heads": 3}
TOKENS = {"model.calculate_per_token_loss": True, "ddp.average_in_collective": True}
RANKED, BACKEND = {**EXPERTS, "model.moe_expert_rank_capacity_factor": 1.5}, "model.moe_flex_dispatcher_backend"
BIASED = {**EXPERTS, "model.add_bias_linear": True, "model.bias_dropout_fusion": True, "model.moe_grouped_gemm": True}
LATENT = {"model.moe_latent_size": 512, "model.moe_shared_expert_overlap": True}
ETP, INSTANCES = "model.expert_tensor_parallel_size", "num_distributed_optimizer_instances"
DEFERS = {"comm_overlap.defer_embedding_wgrad_compute": True}


ENUM = {"_args_": [1], "_call_": True, "_target_": "megatron.core.transformer.enums.CudaGraphModule"}


def captured(*modules: str, **model: Any) -> dict[str, Any]:
    # As Megatron-Bridge dumps the members of an enumeration.
    named = [{**ENUM, "_name_": module} for module in modules]
    fields = {"cuda_graph_modules": named, "num_moe_experts": 8, "moe_layer_freq": 1, **model}
    return {**TE, **{f"model.{name}": value for name, value in fields.items()}}


BREAKS: list[tuple[str, dict[str, Any], str]] = [
    ("container-world-size", {"model.transformer.tensor_model_parallel_size": 16}, "8 GPUs are not a multiple"),
    (
        "container-expert-groups",
        {**EXPERTS, **STAGES, "model.expert_model_parallel_size": 4, ETP: 1},
        "8 GPUs are not a multiple of expert_tensor_parallel_size 1 * expert_model_parallel_size 4 * "
        "pipeline_model_parallel_size 4 = 16; change one",
    ),
    ("container-expert-groups", {f"ddp.{INSTANCES}": 3}, "num_distributed_optimizer_instances 3 does not divide DP"),
    (
        "container-expert-groups",
        {**EXPERTS, "model.expert_model_parallel_size": 8, ETP: 1, f"ddp.{INSTANCES}": 2},
        "num_distributed_optimizer_instances 2 does not divide 1 replicas of the experts",
    ),
    ("container-positive", {"model.transformer.pipeline_model_parallel_size": 0}, "size 0 must be at least 1"),
    ("container-positive", {"train.micro_batch_size": 0}, "train.micro_batch_size 0 must be at least 1"),
    ("container-positive", {"optimizer.lr": float("nan")}, "optimizer.lr nan must be a finite number"),
    ("container-learning-rate", {"optimizer.lr": -1.0}, "optimizer.lr -1.0 must not be negative"),
    ("container-learning-rate", {"optimizer.min_lr": -1e-5}, "optimizer.min_lr -1e-05 must not be negative"),
    ("container-learning-rate", {"optimizer.lr": 1e-4, "optimizer.min_lr": 1e-3}, "0.001 is more than optimizer.lr"),
    ("container-types", {"model.transformer.num_layers": "abc"}, "a whole number or null, not 'abc'"),
    ("container-types", {"optimizer.lr": [1, 2]}, "optimizer.lr is a number or null, not [1, 2]"),
    ("container-precision-recipe", {"mixed_precision": "bf16-mixd"}, "'bf16-mixd' is not a recipe; use bf16_mixed"),
    ("container-local-graphs", {"model.transformer.cuda_graph_impl": "local"}, 'write "full_iteration"'),
    (
        "container-inference-graphs",
        {"model.inference_cuda_graph_scope": "block"},
        "block needs cuda_graph_impl local, not none",
    ),
    (
        "container-inference-graphs",
        {**TE, "model.inference_cuda_graph_scope._args_": [2]},
        "layer needs cuda_graph_impl local, not transformer_engine",
    ),
    ("container-graph-rng", {**TE, "model.use_te_rng_tracker": False}, "needs model.use_te_rng_tracker = true"),
    ("container-layers", {**STAGES, COUNTED: True}, "32 + 1 for model.account_for_loss_in_pipeline_split is not a"),
    ("container-layers", {**STAGES, FIRST: 6}, "num_layers 32 - model.num_layers_in_first_pipeline_stage 6 is not a"),
    ("container-layers", {**STAGES, FIRST: 6}, "the pipeline's 3 stages between; write a layout"),
    ("container-layers", {**STAGES, FIRST: 32}, f"32 - {FIRST} 32 leaves 0 layers for 3 stages between; lower the"),
    ("container-layers", {**STAGES, FIRST: 40}, f"32 - {FIRST} 40 leaves -8 layers for 3 stages between"),
    ("container-layers", {**STAGES, FIRST: -2}, f"{FIRST} -2 must be at least 1; write null where the stage"),
    ("container-layers", {**STAGES, FIRST: 0, LAST: 8}, f"{FIRST} 0 must be at least 1"),
    ("container-layers", {FIRST: 20, LAST: 12}, "of one stage build 12 layers, not model.num_layers 32; remove them"),
    ("container-layout", {**STAGES, LAYOUT: "Et*8|t*8|t*8L"}, "3 stages, which 4 ranks of the pipeline do not divide"),
    ("container-layout", {**STAGES, LAYOUT: "Et*8|(t*8|)*2t*7L"}, "31 decoder layers (t), not the model's 32"),
    ("container-layout", {**STAGES, LAYOUT: "Et*8|(t*8|)*2t*8mL"}, "1 layers of multi-token prediction (m), not the"),
    (
        "container-layout",
        {**STAGES, LAYOUT: "t*8|(t*8|)*2t*8L"},
        "must begin with the embedding (E), end with the loss",
    ),
    ("container-layout", {**STAGES, LAYOUT: "Et*8|(t*8|)*2t*8L", FIRST: 8}, f"layout excludes {FIRST}; keep one kind"),
    ("container-layout", {LAYOUT: "Et*32x|L"}, "'x', which is not a layer; write E, t, m, L, | and repetitions"),
    ("container-layout", {LAYOUT: "Et*999999999999L"}, "repeats 't' 999999999999 times; write the number of layers"),
    (
        "container-layout",
        {LAYOUT: [["embedding", "decodr"], ["loss"]]},
        "'decodr', which is not a layer; write embedding",
    ),
    (
        "container-layout",
        {**STAGES, LAYOUT: "Et*8|t*8|t*8|t*8L", "model.virtual_pipeline_model_parallel_size": 2},
        "has 4 stages, not 4 * 2 of a virtual pipeline",
    ),
    (
        "container-layout",
        {**STAGES, LAYOUT: "Et*8|t*8|mt*8|t*8L", "model.mtp_num_layers": 1},
        "decoder layers (t) behind multi-token prediction (m)",
    ),
    (
        "container-layout",
        {**STAGES, LAYOUT: "Et*16|t*16||m||||L", "model.mtp_num_layers": 1},
        "in one stage, the last one of its rank; move it there",
    ),
    ("container-expert-layer", {**EXPERTS, "model.sequence_parallel": False}, "need model.sequence_parallel = true"),
    (
        "container-expert-layer",
        {**EXPERTS, "model.add_bias_linear": True, "model.expert_tensor_parallel_size": 2},
        "add_bias_linear with experts needs expert_tensor_parallel_size 1, not 2",
    ),
    (
        "container-expert-layer",
        {**EXPERTS, **FLEX, "model.moe_enable_deepep": True, "model.moe_flex_dispatcher_backend": "hybridep"},
        "excludes moe_flex_dispatcher_backend hybridep",
    ),
    (
        "container-expert-layer",
        {**EXPERTS, **FLEX, **PADDED, "model.moe_flex_dispatcher_backend": "deepep"},
        "moe_pad_expert_input_to_capacity excludes deepep",
    ),
    (
        "container-expert-layer",
        {**EXPERTS, "model.moe_token_dispatcher_type": "allgather", "model.variable_seq_lengths": True},
        "variable_seq_lengths needs moe_token_dispatcher_type alltoall or flex",
    ),
    ("container-routing", ONE, "topk 1 needs model.moe_router_pre_softmax = true"),
    ("container-routing", {**EXPERTS, "model.moe_router_topk": 9}, "moe_router_topk 9 is more than the 8 experts"),
    ("container-routing", {**EXPERTS, GROUP_LIMIT: 2}, "group_topk 2 needs model.moe_router_num_groups"),
    ("container-routing", {**EXPERTS, GROUP_LIMIT: 4, GROUPS: 2}, "group_topk 4 is more than moe_router_num_groups 2"),
    ("container-routing", {**EXPERTS, GROUP_LIMIT: 2, GROUPS: 3}, "8 is not a multiple of moe_router_num_groups 3"),
    (
        "container-routing",
        {BALANCING: ["aux_loss", "seq_aux_loss"], "model.moe_aux_loss_coeff": 0.01},
        "moe_aux_loss_coeff must be a list of 2",
    ),
    ("container-routing", {CAPACITY: 1.0, BALANCING: "sinkhorn"}, "excludes moe_router_load_balancing_type sinkhorn"),
    ("container-optimizer-states", {**AWARE, "optimizer.optimizer": "sgd"}, '= "adam", not sgd'),
    ("container-optimizer-states", {**AWARE, "optimizer.use_distributed_optimizer": False}, "distributed_optimizer ="),
    (
        "container-optimizer-states",
        {"optimizer.exp_avg_dtype": {"_target_": "torch.bfloat16"}},
        "exp_avg_dtype bfloat16 needs optimizer.use_precision_aware_optimizer = true",
    ),
    ("container-scaling", {**DELAYED, "mixed_precision.fp4": "e2m1"}, "fp8 and fp4 exclude each other"),
    (
        "container-scaling",
        {**DELAYED, "mixed_precision.first_last_layers_bf16": True},
        "delayed excludes first_last_layers_bf16",
    ),
    (
        "container-scaling",
        {
            "model.fp8": "hybrid",
            "model.first_last_layers_bf16": True,
            **STAGES,
            "model.num_layers_at_start_in_bf16": 9,
        },
        "num_layers_at_start_in_bf16 9 must be 0 to 8, the layers of a pipeline stage",
    ),
    (
        "container-scaling",
        {**DELAYED, **SELECTIVE, "model.recompute_modules": ["layernorm", "moe_act"]},
        "delayed excludes recomputing layernorm and moe_act",
    ),
    ("container-offload-modules", {**OFFLOADS, "model.cpu_offloading": True}, "excludes model.cpu_offloading"),
    ("container-offload-modules", {**OFFLOADS, "model.offload_modules": ["attn_proj"]}, "attn_proj needs core_attn"),
    ("container-offload-modules", {**OFFLOADS, "model.offload_modules": ["moe_acts"]}, "'moe_acts' is not a module"),
    (
        "container-offload-modules",
        {**OFFLOADS, **SELECTIVE, **MOE_AGAIN, "model.offload_modules": ["expert_fc1"]},
        "expert_fc1 are inside moe, which recompute_modules has",
    ),
    ("container-layers", {**STAGES, FIRST: 8, COUNTED: True}, "exclude each other; keep one kind"),
    (
        "container-layers",
        {**STAGES, FIRST: 5, "model.virtual_pipeline_model_parallel_size": 3},
        f"{FIRST} 5 is not a multiple of virtual_pipeline_model_parallel_size 3",
    ),
    (
        "container-recompute",
        {**SELECTIVE, "model.recompute_modules": ["mla_up_proj"], "model.multi_latent_attention": False},
        "mla_up_proj needs model.multi_latent_attention = true",
    ),
    (
        "container-recompute",
        {**SHARED, "model.moe_shared_expert_intermediate_size": 2048},
        "shared_experts needs model.moe_shared_expert_overlap = false",
    ),
    (
        "container-offload",
        {"model.cpu_offloading": True, "model.cpu_offloading_num_layers": 32},
        "cpu_offloading_num_layers 32 must be less than model.num_layers 32",
    ),
    ("container-overlap", DELAYS, "delay_wgrad_compute needs comm_overlap.overlap_moe_expert_parallel_comm = true"),
    (
        "container-overlap",
        {**DELAYED_ATTENTION, FUSED: False},
        "with CUDA graphs needs model.gradient_accumulation_fus",
    ),
    (
        "container-overlap",
        {**DELAYED_ROUTER, FUSED: False},
        "with CUDA graphs needs model.gradient_accumulation_fusion",
    ),
    ("container-overlap", {**DELAYED_ATTENTION, "model.add_qkv_bias": True}, "graph of attn with model.add_qkv_bias"),
    ("container-overlap", OVERLAP, "needs model.expert_model_parallel_size > 1"),
    ("container-overlap", {**OVERLAP, **STAGES}, "needs a virtual pipeline"),
    ("container-overlap", {**OVERLAP, "model.recompute_num_layers": 1}, "needs no recomputed layers"),
    ("container-overlap", {**OVERLAP, **MOE_AGAIN, V4: False}, "needs no moe in model.recompute_modules"),
    ("container-overlap", {**OVERLAP, "model.moe_shared_expert_overlap": True}, "moe_shared_expert_overlap = false"),
    ("container-overlap", {**OVERLAP, "model.mtp_num_layers": 2}, "at most one layer of multi-token prediction"),
    ("container-overlap", {**OVERLAP, "model.moe_token_dispatcher_type": "allgather"}, '"alltoall" or "flex"'),
    ("container-captured", {**TE, "model.cuda_graph_modules": ["moe_router"]}, "moe_router needs a model with experts"),
    (
        "container-captured",
        {**WHOLE, "model.cuda_graph_modules": ["attn"]},
        "holds attn already; write model.cuda_graph_modules = []",
    ),
    (
        "container-captured",
        captured("attn", "moe_router", recompute_granularity="selective", recompute_modules=["moe"]),
        "recompute the captured moe_router; remove one",
    ),
    ("container-captured", captured("mlp"), "mlp needs dense layers, and all of this model's have experts"),
    ("container-captured", captured("moe"), "moe needs moe_expert_capacity_factor and moe_pad_expert_input_to"),
    (
        "container-captured",
        captured("moe_router", "moe_preprocess", moe_expert_capacity_factor=1.0, moe_token_dispatcher_type="alltoall"),
        "moe_preprocess excludes moe_expert_capacity_factor without padding",
    ),
    ("container-graph-offload", {**V5, **OFFLOADS, **captured("moe")}, "offloading excludes a CUDA graph of moe"),
    (
        "container-graph-offload",
        {**V5, **OFFLOADS, **TE, "model.cuda_graph_warmup_steps": 0},
        "model.cuda_graph_warmup_steps of at least 1, not 0",
    ),
    ("container-graph-offload", {**V5, **OFFLOADS, **WHOLE}, f"needs {INFLIGHT} of at least 0; it is null"),
    ("container-graph-offload", {**V5, **OFFLOADS, **WHOLE, INFLIGHT: -1}, "of at least 0; it is -1"),
    (
        "container-offload-modules",
        {**OFFLOADS, "model.offload_modules": ["fused_group_mlp"], "model.use_transformer_engine_op_fuser": False},
        "fused_group_mlp needs model.use_transformer_engine_op_fuser = true",
    ),
    (
        "container-offload-modules",
        {**OFFLOADS, "model.offload_modules": ["fused_group_mlp", "moe_act"]},
        "fused_group_mlp contains moe_act; remove one",
    ),
    (
        "container-offload-modules",
        {**OFFLOADS, "model.offload_modules": ["moe_act"], "model.moe_paged_stash": True},
        "model.moe_paged_stash keeps moe_act already",
    ),
    ("container-interleaved-batch", VIRTUAL, "130 is 130 micro batches of each replica, not a multiple of"),
    ("container-interleaved-batch", {**VIRTUAL, GROUP: 8}, "4 as a virtual pipeline needs; use a multiple of 4"),
    (
        "container-virtual-pipeline",
        {**VIRTUAL, **ONE_STAGE},
        "size 2 needs pipeline_model_parallel_size > 1; write null",
    ),
    (
        "container-virtual-pipeline",
        {**VIRTUAL, "model._target_": "megatron.bridge.models.hybrid.hybrid_provider.HybridModelProvider"},
        "is not for models of Mamba's layers; write null",
    ),
    ("container-heads", LINEAR, "model.linear_num_key_heads 3 is not a multiple of TP * CP = 2; change one"),
    (
        "container-heads",
        {**LINEAR, **V5, **CONTEXT, "model.linear_num_key_heads": 2},
        "2 is not a multiple of TP * CP = 4",
    ),
    ("container-heads", {**LINEAR, **CONTEXT}, "needs model.context_parallel_size 1 before v0.5.0, not 2"),
    ("container-context-loss", TOKENS, "calculate_per_token_loss needs ddp.average_in_collective = false"),
    (
        "container-learning-rate",
        {"optimizer.lr": 1e-4, "scheduler.lr_warmup_init": 1e-3},
        "lr_warmup_init 0.001 is more than optimizer.lr 0.0001",
    ),
    (
        "container-weight-decay",
        {
            "scheduler.weight_decay_incr_style": "constant",
            "scheduler.start_weight_decay": 0.1,
            "scheduler.end_weight_decay": 0.2,
        },
        "constant excludes start_weight_decay 0.1 and end_weight_decay 0.2; write linear or cosine",
    ),
    ("container-seed", {"rng.seed": 0}, "rng.seed 0 must be at least 1"),
    ("container-expert-layer", {**RANKED, BACKEND: "deepep"}, "needs moe_flex_dispatcher_backend hybridep"),
    (
        "container-expert-layer",
        {**RANKED, BACKEND: "hybridep", "model.use_transformer_engine_op_fuser": False},
        "moe_expert_rank_capacity_factor needs use_transformer_engine_op_fuser = true",
    ),
    (
        "container-expert-layer",
        {**EXPERTS, BACKEND: "ncclep", "model.moe_token_dispatcher_type": "alltoall"},
        "ncclep needs moe_token_dispatcher_type flex",
    ),
    (
        "container-expert-layer",
        {
            **EXPERTS,
            "model.moe_token_dispatcher_type": "allgather",
            "model.moe_router_padding_for_quantization": True,
        },
        "padding_for_quantization needs moe_token_dispatcher_type alltoall or flex, not allgather",
    ),
    (
        "container-expert-layer",
        {**EXPERTS, **LATENT, "model.moe_shared_expert_intermediate_size": 2048},
        "moe_shared_expert_overlap excludes moe_latent_size",
    ),
    ("container-expert-layer", BIASED, "with grouped experts needs bias_dropout_fusion = false"),
    ("container-routing", {BALANCING: "sinkhorn", "model.moe_aux_loss_coeff": 0.01}, "moe_aux_loss_coeff 0, not 0.01"),
    ("container-switch-needs", DEFERS, "defer_embedding_wgrad_compute needs model.pipeline_model_parallel_size > 1"),
    (
        "container-switch-needs",
        {**DEFERS, **STAGES, "model.gradient_accumulation_fusion": False},
        "needs model.gradient_accumulation_fusion = true; it is false",
    ),
    (
        "container-switch-needs",
        {"model.moe_apply_probs_on_input": True, "model.moe_router_topk": 2},
        "moe_apply_probs_on_input needs model.moe_router_topk = 1; it is 2",
    ),
    (
        "container-switch-needs",
        {"model.transformer.moe_paged_stash": True},
        "model.moe_paged_stash needs model.moe_expert_rank_capacity_factor; it is null",
    ),
    (
        "container-switch-needs",
        {"model.transformer.moe_enable_deepep": True, "model.transformer.moe_token_dispatcher_type": "alltoall"},
        'needs model.moe_token_dispatcher_type = "flex"; it is "alltoall"',
    ),
    ("container-switch-needs", {"model.transformer.moe_router_padding_for_fp8": True}, "needs fp8 or fp4"),
    ("container-schedule-mixed", {"scheduler.lr_warmup_iters": None}, "lr_warmup_iters must be a number"),
    (
        "container-train-batch",
        {"train.global_batch_size": None, "validation.eval_global_batch_size": 128},
        "train.global_batch_size is not set",
    ),
    ("container-schedule-length", {"scheduler.lr_decay_iters": 0}, "lr_decay_iters 0: the learning rate needs"),
    ("container-deterministic", {"model.deterministic_mode": True}, "it is not set"),
    ("container-eval-batch", {"validation.eval_global_batch_size": 130}, "130 is not a multiple of"),
    ("container-eval-batch", {"train.global_batch_size": None}, "train.global_batch_size is not set"),
    (
        "container-eval-batch",
        {"dist.eval_context_parallel_size": 4, "validation.eval_micro_batch_size": 3},
        "size 1 = 3",
    ),
    ("container-duration", {"train.train_iters": None}, "none of train.train_iters"),
    ("container-duration", {"train.train_samples": 9999}, "more than one of"),
    ("container-duration", {"train.train_samples": -1, "train.train_iters": None}, "must be positive"),
    ("container-duration", {"train.num_epochs": 1, "train.rampup_batch_size": [8]}, "rampup_batch_size"),
    ("container-epochs", {"train.num_epochs": 2}, "is for GPTSFTDatasetConfig"),
    ("container-packing", {**PACKED, "dataset.enable_in_batch_packing": True}, "exclude each other"),
    ("container-packing", {"dataset.enable_offline_packing": True}, "needs offline_packing_specs"),
    ("container-packing", {"dataset.offline_packing_specs": {}}, "need enable_offline_packing"),
    ("container-packing", {**PACKED, "train.micro_batch_size": 2}, "micro_batch_size 1, not 2"),
    ("container-packing", {"dataset.enable_in_batch_packing": True}, "micro_batch_size > 1"),
    ("container-padded-packing", {**PACKED, **TE}, "need dataset.pad_to_max_length"),
    ("container-padded-packing", {**PACKED, **TE, "dataset.pad_to_max_length": True}, "pad_cu_seqlens = true"),
    ("container-energon", data("EnergonDatasetConfig", micro_batch_size=2), "dataset.micro_batch_size 2"),
    (
        "container-energon",
        data("EnergonDatasetConfig", micro_batch_size=1, packing_buffer_size=64),
        "calculate_per_token_loss",
    ),
    (
        "container-collate-padding",
        {**data("DirectHFSFTDatasetConfig", seq_length=4095), "model.transformer.sequence_parallel": True},
        "not a multiple of 2",
    ),
    ("container-sequence-length", {"dataset.seq_length": 8192}, "4096 and dataset.seq_length 8192"),
    ("container-context-length", {**CONTEXT, "model.seq_length": 4098, "dataset.seq_length": 4098}, "= 4"),
    ("container-context-loss", {**CONTEXT, **data("GPTSFTDatasetConfig")}, "calculate_per_token_loss = true"),
    ("container-context-communication", {**CONTEXT, "model.cp_comm_type": ["p2p"]}, "1 entries for 32 layers"),
    ("container-context-communication", {**CONTEXT, "model.cp_comm_type": "a2a+p2p"}, "trains something else"),
    ("container-context-communication", {"model.hierarchical_context_parallel_sizes": [2, 2]}, "to 4, not to 1"),
    ("container-schedule-mode", {"scheduler.lr_decay_samples": 10}, "does not go with training by iterations"),
    ("container-schedule-mode", {"train.train_samples": 6400}, "lr_decay_iters does not go with training by samples"),
    ("container-schedule-mode", {"scheduler.lr_warmup_fraction": 0.1}, "both set"),
    ("container-schedule-length", {"scheduler.max_steps": 10}, "10 is less than train.train_iters 50"),
    ("container-schedule-length", {"scheduler.max_steps": 0}, "must be positive"),
    ("container-schedule-length", {"scheduler.lr_decay_iters": -5}, "lr_decay_iters -5: the learning rate needs"),
    (
        "container-schedule-override",
        {"scheduler.override_opt_param_scheduler": True, "scheduler.use_checkpoint_opt_param_scheduler": True},
        "switch one off",
    ),
    ("container-precision", {"model.transformer.fp16": True}, "model.bf16 and model.fp16"),
    (
        "container-mxfp8-gather",
        {"mixed_precision.fp8_param_gather": True, "mixed_precision.fp8_recipe": "mxfp8"},
        "reuse_grad_buf_for_mxfp8_param_ag",
    ),
    ("container-deterministic", {"model.deterministic_mode": True, "env_vars.NCCL_ALGO": "NVLS"}, "it is 'NVLS'"),
    (
        "container-graph-nan-check",
        {"model.cuda_graph_impl": "full_iteration", "rerun_state_machine.check_for_nan_in_loss": True},
        "check_for_nan_in_loss = false",
    ),
    (
        "container-graph-recompute",
        {**TE, "model.recompute_granularity": "full"},
        "goes with a full_iteration CUDA graph only",
    ),
    (
        "container-offload",
        {"model.cpu_offloading": True, "model.recompute_granularity": "selective"},
        "excludes model.recompute_granularity",
    ),
    (
        "container-offload",
        {"model.cpu_offloading": True, "model.transformer.pipeline_model_parallel_size": 2},
        "needs model.pipeline_model_parallel_size = 1",
    ),
    ("container-graph-offload", {**TE, "model.cpu_offloading": True}, "excludes CUDA graphs"),
    ("container-graph-offload", {**WHOLE, "model.cpu_offloading": True}, "excludes CUDA graphs"),  # before v0.5.0
    ("container-graph-offload", {**V5, **TE, "model.cpu_offloading": True}, "excludes CUDA graphs of layers; write"),
    (
        "container-quantised",
        {"model.restore_modelopt_state": True, "model.gradient_accumulation_fusion": True},
        "gradient_accumulation_fusion = false",
    ),
    ("container-fsdp-choice", {"dist.use_megatron_fsdp": True, "dist.use_torch_fsdp2": True}, "keep one"),
    ("container-fsdp", {**FSDP, "checkpoint.save": "/c"}, "fsdp_dtensor"),
    ("container-fsdp", {**FSDP, "env_vars.CUDA_DEVICE_MAX_CONNECTIONS": 1}, "other than 1"),
    ("container-fsdp-2", {**FSDP, "ddp.megatron_fsdp_version": 2}, "parallel sizes of 1"),
    ("container-fsdp-2", {**FSDP, "ddp.megatron_fsdp_version": 2, "optimizer.clip_grad": 1.0}, "clip_grad = 0"),
    (
        "container-checkpoint-format",
        {"checkpoint.save": "/c", "checkpoint.ckpt_format": "fsdp_dtensor"},
        "use torch_dist",
    ),
    (
        "container-checkpoint-format",
        {"dist.use_gloo_process_groups": False, "checkpoint.ckpt_format": "torch"},
        "use_gloo_process_groups = true",
    ),
    ("container-async-save", {"checkpoint.async_save": True}, "needs checkpoint.save"),
    ("container-checkpoint-loading", {"checkpoint.load_main_params_from_ckpt": True}, "load_optim = false"),
    ("container-checkpoint-loading", {"checkpoint.ckpt_step": 5}, "needs checkpoint.load"),
    ("container-checkpoint-loading", {"peft": {"dim": 8}}, "pretrained_checkpoint"),
    (
        "container-hf-export",
        {"checkpoint.also_save_hf_checkpoint": True, "checkpoint.non_persistent_ckpt_type": "local"},
        "use global ones",
    ),
    ("container-process-groups", {"dist.use_decentralized_pg": True}, "switch one off"),
    ("container-profilers", {"profiling.use_pytorch_profiler": True, "profiling.use_nsys_profiler": True}, "keep one"),
    ("container-profilers", {"profiling.profile_step_end": 5}, "10 to 5 is not a valid window"),
    ("container-loggers", {"logger.comet_project": "p"}, "needs logger.comet_experiment_name"),
    ("container-world-size", {"dist.eval_context_parallel_size": 3}, "eval_context_parallel_size = 6"),
    ("container-duration", {"train.num_epochs": 0}, "num_epochs 0 must be positive"),
    (
        "container-energon",
        {**data("EnergonDatasetConfig", micro_batch_size=1, do_validation=True), "validation.eval_micro_batch_size": 2},
        " and eval_micro_batch_size 2 differ",
    ),
    (
        "container-energon",
        {
            **data("EnergonDatasetConfig", micro_batch_size=1, packing_buffer_size=64),
            "model.dist_train.use_dist_train": True,
        },
        "no model.dist_train",
    ),
    (
        "container-energon",
        {
            **data("EnergonDatasetConfig", micro_batch_size=1, packing_buffer_size=64),
            "model.vision_cuda_graph_impl": "local",
        },
        "no CUDA graphs",
    ),
    (
        "container-padded-packing",
        {**PACKED, **TE, "dataset.pad_to_max_length": True, "model.cuda_graph_scope": ["attn"]},
        "pad_cu_seqlens = true",
    ),
    ("container-context-communication", {**CONTEXT, "model.cp_comm_type": 3}, "must be a text"),
    (
        "container-schedule-mixed",
        {"scheduler.lr_wsd_decay_samples": 10},
        "lr_decay_iters, lr_warmup_iters, lr_wsd_decay_samples",
    ),
    (
        "container-weight-decay",
        {"scheduler.start_weight_decay": -0.1, "scheduler.end_weight_decay": 0.1},
        "-0.1 must not be negative",
    ),
    (
        "container-weight-decay",
        {"scheduler.start_weight_decay": 0.2, "scheduler.end_weight_decay": 0.1},
        "may only grow",
    ),
    ("container-aware-precision", {**AWARE}, "with model.bf16 needs optimizer.bf16 = true"),
    (
        "container-aware-precision",
        {**AWARE, "model.transformer.bf16": False, "model.transformer.fp16": True},
        "with model.fp16 needs optimizer.fp16 = true",
    ),
    (
        "container-aware-precision",
        {**AWARE, "model.transformer.bf16": False, "optimizer.bf16": True},
        "model in fp32 needs optimizer.bf16 = false",
    ),
    ("container-fsdp", {**FSDP, "ddp.megatron_fsdp_version": 3}, "3 is neither 1 nor 2"),
    (
        "container-fsdp",
        {
            **FSDP,
            "ddp.data_parallel_sharding_strategy": "optim_grads_params",
            "train.check_weight_hash_across_dp_replicas_interval": 10,
        },
        "excludes the sharding",
    ),
    *(
        ("container-fsdp-2", {**FSDP, "ddp.megatron_fsdp_version": 2, **changes}, need)
        for changes, need in (
            ({"optimizer.bf16": False}, "optimizer.bf16 = true and no fp16"),
            ({"model.transformer.params_dtype": {"_target_": "torch.float32"}}, "params_dtype of bfloat16"),
            ({"optimizer.loss_scale": 1.0}, "loss_scale = null"),
            ({"rng.data_parallel_random_init": True}, "data_parallel_random_init = false"),
            ({"ddp.num_distributed_optimizer_instances": 2}, "instances 1"),
            ({"ddp.outer_dp_sharding_strategy": "optim"}, "no_shard"),
            ({"optimizer.use_layer_wise_distributed_optimizer": True}, "no layer-wise"),
            ({"optimizer.optimizer_cuda_graph": True}, "no CUDA graph of the optimiser"),
            ({"ddp.fp8_param_gather": True}, "no fp8 and no fp4"),
            ({"ddp.megatron_fsdp_cuda_graph_mode": True}, "no CUDA graphs"),
        )
    ),
    (
        "container-checkpoint-format",
        {**FSDP, "checkpoint.save": "/c", "checkpoint.ckpt_format": "fsdp_dtensor", "dist.use_torch_fsdp2": True},
        "use torch_dist",
    ),
    ("container-hf-export", {"checkpoint.also_save_hf_checkpoint": True}, "write one of checkpoint.hf_source_path"),
    ("container-stragglers", {"nvrx_straggler.enabled": True}, "has nothing to compare"),
    (
        "container-stragglers",
        {**STRAGGLERS, "nvrx_straggler.report_time_interval": 0.0},
        "report_time_interval 0 must be positive",
    ),
    ("container-stragglers", {**STRAGGLERS, "nvrx_straggler.gpu_relative_perf_threshold": 70}, "70 is not a share"),
    ("container-data-switches", {"dataset.reset_position_ids": None}, "reset_position_ids must be true or false"),
    ("container-pipeline-type", {"model.transformer.pipeline_model_parallel_size": 2}, "write model.pipeline_dtype"),
    (
        "container-recompute",
        {"model.recompute_granularity": "full", "model.recompute_num_layers": 1},
        "needs model.recompute_method",
    ),
    (
        "container-recompute",
        {"model.recompute_granularity": "full", "model.recompute_method": "block"},
        "needs model.recompute_num_layers",
    ),
    ("container-recompute", {"model.recompute_granularity": "most"}, "neither full nor selective"),
    (
        "container-recompute",
        {"model.recompute_granularity": "full", "model.recompute_method": "all"},
        "neither block nor uniform",
    ),
    (
        "container-recompute",
        {"model.recompute_granularity": "selective", "model.recompute_num_layers": 1},
        "goes with recompute_granularity full only",
    ),
    ("container-captured", {**TE, "model.cuda_graph_modules": ["moe", "moe_router"]}, "exclude each other"),
    ("container-captured", {**TE, "model.cuda_graph_scope": ["moe_preprocess"]}, "needs moe_router"),
    ("container-train-batch", {"train.global_batch_size": 126, "validation.eval_global_batch_size": 128}, "use 124"),
    ("container-layers", {"model.transformer.pipeline_model_parallel_size": 3}, "the pipeline's 3 stages"),
    ("container-heads", {"model.transformer.num_attention_heads": 31}, "31 is not a multiple"),
    ("container-experts", {"model.expert_model_parallel_size": 2}, "needs a model with experts"),
    ("container-experts", {"model.expert_model_parallel_size": 8, "model.num_moe_experts": 12}, "12 is not a multiple"),
    (
        "container-sequence-parallel",
        {"model.sequence_parallel": True, "model.transformer.tensor_model_parallel_size": 1},
        "does nothing",
    ),
    ("container-no-training", {"train.train_iters": 0}, "would end immediately"),
    ("container-intervals", {"checkpoint.save_interval": 0}, "save_interval 0 must be at least 1"),
    ("container-intervals", {"dataset.num_workers": -1}, "num_workers -1"),
    ("container-long-warmup", {"scheduler.lr_warmup_iters": 50}, "is truncated"),
]


@pytest.mark.parametrize(("rule", "changes", "expected"), BREAKS)
def test_what_breaks_a_rule_is_reported_with_the_values_or_the_way_out(
    rule: str, changes: dict[str, Any], expected: str
) -> None:
    found = [violation for violation in check_container(make(changes), 8) if violation.rule == rule]

    assert any(expected in violation.message for violation in found)


def test_every_rule_is_broken_by_some_configuration_here() -> None:
    assert {rule.id for rule in CONTAINER_RULES} == {rule for rule, *_ in BREAKS}


@pytest.mark.parametrize(
    ("rule", "changes"),
    [
        ("container-eval-batch", {"train.global_batch_size": None, "validation.eval_global_batch_size": 128}),
        ("container-duration", {"train.train_samples": 6400}),
        ("container-epochs", {"train.num_epochs": 2, **data("GPTSFTDatasetConfig", dataloader_type="batch")}),
        ("container-packing", {"dataset.enable_in_batch_packing": True, "train.micro_batch_size": 2}),
        ("container-padded-packing", PACKED),
        ("container-sequence-length", data("SomeProvider", seq_length=1)),
        ("container-context-loss", CONTEXT),
        ("container-schedule-length", {"scheduler.max_steps": 100}),
        ("container-fsdp", {**FSDP, "checkpoint.save": "/c", "checkpoint.ckpt_format": "fsdp_dtensor"}),
        ("container-layers", {"model.transformer.pipeline_model_parallel_size": 3, "model.pipeline_model_parallel_layout": "Et|tL"}),
        ("container-layers", {**STAGES, "model.transformer.num_layers": 31, COUNTED: True}),
        ("container-layers", {**STAGES, FIRST: 5, "model.num_layers_in_last_pipeline_stage": 7}),
        ("container-layers", {FIRST: 5, LAST: 32}),
        ("container-layout", {**STAGES, LAYOUT: "Et*8|(t*8|)*2,t*8mL", "model.mtp_num_layers": 1}),
        ("container-layout", {**STAGES, LAYOUT: "Et*8||(t*8|)*3|m|L", "model.mtp_num_layers": 1}),
        ("container-layout", {LAYOUT: [["Embedding", *[" decoder"] * 32, "loss"]]}),
        ("container-layout", {LAYOUT: {"_target_": "PipelineParallelLayerLayout"}}),
        ("container-expert-layer", {**EXPERTS, "model.add_bias_linear": True}),
        ("container-expert-layer", {"model.sequence_parallel": False}),
        ("container-expert-layer", {**EXPERTS, **FLEX, **PADDED, "model.moe_flex_dispatcher_backend": "hybridep"}),
        ("container-routing", {**ONE, "model.moe_router_pre_softmax": True}),
        ("container-routing", {**ONE, BALANCING: "sinkhorn"}),
        ("container-routing", {**EXPERTS, GROUPS: 3, CAPACITY: -1.0, BALANCING: ["aux_loss"], "model.moe_aux_loss_coeff": [0.1]}),
        ("container-optimizer-states", {**AWARE, "optimizer.exp_avg_dtype": {"_target_": "torch.bfloat16"}}),
        ("container-scaling", {**DELAYED, "mixed_precision.fp8": None, "mixed_precision.first_last_layers_bf16": True}),
        ("container-scaling", {"mixed_precision": "bf16_with_fp8_delayed_scaling_mixed", "model.fp8": "hybrid", "model.fp4": "e2m1"}),
        ("container-offload-modules", {**OFFLOADS, "model.offload_modules": ["core_attn", "attn_proj", "dense_mlp"]}),
        ("container-overlap", {**OVERLAP, **STAGES, "model.expert_model_parallel_size": 2, "model.virtual_pipeline_model_parallel_size": 2}),
        ("container-recompute", {**SELECTIVE, "model.recompute_modules": ["mla_up_proj"], "model.multi_latent_attention": True}),
        ("container-overlap", {**OVERLAP, **MOE_AGAIN, "model.expert_model_parallel_size": 2}),
        ("container-overlap", {**DELAYS, **OVERLAP, "model.expert_model_parallel_size": 2}),
        ("container-overlap", {**DELAYED_ATTENTION, FUSED: True}),
        ("container-overlap", {**DELAYED_ATTENTION, FUSED: False, V4: None}),
        ("container-overlap", {**DELAYED_ROUTER, FUSED: False, "model.moe_shared_expert_intermediate_size": None}),
        ("container-overlap", {**DELAYED_ROUTER, FUSED: True, "model.add_bias_linear": True}),
        ("container-overlap", {**DELAYS, "model.transformer.overlap_moe_expert_parallel_comm": True}),
        ("container-recompute", SHARED),
        ("container-heads", {"model.transformer.tensor_model_parallel_size": 16}),
        ("container-expert-groups", {**EXPERTS, "model.expert_model_parallel_size": 4}),
        ("container-expert-groups", {**EXPERTS, "model.expert_model_parallel_size": 8, ETP: 1}),
        ("container-expert-groups", {**EXPERTS, "model.expert_model_parallel_size": 4, ETP: 4}),
        ("container-expert-groups", {f"ddp.{INSTANCES}": 4}),
        ("container-schedule-mixed", {"scheduler.lr_decay_samples": None}),
        ("container-weight-decay", {"scheduler.start_weight_decay": 0.1, "scheduler.end_weight_decay": 0.1}),
        ("container-aware-precision", {**AWARE, "optimizer.bf16": True}),
        ("container-aware-precision", {**AWARE, "mixed_precision": "bf16_mixed"}),
        ("container-hf-export", {"checkpoint.also_save_hf_checkpoint": True, "model.hf_model_id": "meta-llama/x"}),
        ("container-graph-rng", {**TE, "model.use_te_rng_tracker": False, "model._target_": "qwen_vl.Qwen3VLMoEModelProvider"}),
        ("container-stragglers", {**STRAGGLERS, "nvrx_straggler.gpu_relative_perf_threshold": 0.7}),
        ("container-pipeline-type", {"model.transformer.pipeline_model_parallel_size": 2, "mixed_precision": "bf16_mixed"}),
        ("container-pipeline-type", {"model.transformer.pipeline_model_parallel_size": 2, "model.pipeline_dtype": {"_target_": "torch.bfloat16"}}),
        ("container-recompute", {"model.recompute_granularity": "selective"}),
        (
            "container-captured",
            {
                **TE,
                "model.cuda_graph_modules": ["moe_router", "moe_preprocess"],
                "model.transformer.num_moe_experts": 8,
            },
        ),
        (
            "container-switch-needs",
            {
                "model.transformer.moe_enable_deepep": True,
                "model.transformer.moe_token_dispatcher_type": "flex",
                "model.transformer.moe_router_padding_for_fp8": True,
                "mixed_precision": "bf16_with_mxfp8_mixed",
            },
        ),
        ("container-inference-graphs", {"model.inference_cuda_graph_scope._args_": [1]}),
        ("container-intervals", {"checkpoint.save_interval": None}),
        ("container-seed", {"rng.seed": 1}),
        ("container-captured", captured("mlp", moe_layer_freq=[0, 1])),
        ("container-captured", captured("moe_router", recompute_granularity=None, recompute_modules=["moe"])),
        ("container-captured", captured("moe_router", recompute_granularity="selective", recompute_modules=["mlp"])),
        ("container-captured", {**WHOLE, "model.cuda_graph_modules": []}),
        ("container-captured", {**WHOLE, "model.cuda_graph_impl": "none", "model.cuda_graph_modules": ["attn"]}),
        ("container-captured", captured("moe", moe_expert_capacity_factor=1.0, moe_pad_expert_input_to_capacity=True)),
        ("container-captured", captured("moe_router", "moe_preprocess", moe_token_dispatcher_type="alltoall")),
        (
            "container-captured",
            captured("moe_router", "moe_preprocess", moe_expert_capacity_factor=-1.0, moe_token_dispatcher_type="alltoall"),
        ),
        ("container-graph-offload", {**OFFLOADS, **WHOLE}),  # before v0.5.0
        ("container-graph-offload", {**V5, **WHOLE, "model.cpu_offloading": True}),
        ("container-graph-offload", {**V5, **OFFLOADS, **WHOLE, INFLIGHT: 0}),
        ("container-graph-offload", {**V5, **OFFLOADS, **TE, "model.cuda_graph_warmup_steps": 3}),
        ("container-offload-modules", {**OFFLOADS, "model.offload_modules": ["core_attn"], "model.moe_paged_stash": True}),
        ("container-virtual-pipeline", VIRTUAL),
        ("container-virtual-pipeline", {**VIRTUAL, **ONE_STAGE, "dist.use_decentralized_pg": True}),
        ("container-heads", {**LINEAR, **V5, **CONTEXT, "model.linear_num_key_heads": 4}),
        ("container-heads", {**LINEAR, "model.experimental_attention_variant": "dsa"}),
        ("container-context-loss", {**TOKENS, "ddp.average_in_collective": False}),
        ("container-context-loss", {**TOKENS, **FSDP}),
        ("container-learning-rate", {"optimizer.lr": 1e-4, "scheduler.lr_warmup_init": 1e-4}),
        (
            "container-weight-decay",
            {
                "scheduler.weight_decay_incr_style": "linear",
                "scheduler.start_weight_decay": 0.1,
                "scheduler.end_weight_decay": 0.2,
            },
        ),
        ("container-expert-layer", {**RANKED, BACKEND: "hybridep", "model.use_transformer_engine_op_fuser": True}),
        ("container-expert-layer", {**RANKED, BACKEND: "ncclep", **FLEX}),
        ("container-expert-layer", {**EXPERTS, **LATENT}),
        ("container-expert-layer", {**BIASED, "model.bias_dropout_fusion": False}),
        ("container-routing", {BALANCING: "sinkhorn", "model.moe_aux_loss_coeff": 0.0}),
        ("container-switch-needs", {**DEFERS, **STAGES, "model.gradient_accumulation_fusion": True}),
    ],
)  # fmt: skip
def test_what_a_rule_does_not_forbid_passes(rule: str, changes: dict[str, Any]) -> None:
    assert rule not in broken(changes, None)


# --- what follows from the values ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "gpus"),
    [
        ({"train.global_batch_size": 136}, 16),
        ({"train.global_batch_size": 132, GROUP: 6}, 16),  # 66 micro batches in 11 groups
        ({"model.virtual_pipeline_model_parallel_size": 1}, 16),
        ({"train.rampup_batch_size": [8, 8, 100]}, 16),
        ({"train.global_batch_size": 131}, 16),  # another rule's
        ({}, None),
    ],
)
def test_whole_groups_of_micro_batches_interleave(changes: dict[str, Any], gpus: int | None) -> None:
    assert "container-interleaved-batch" in broken(VIRTUAL, 16)
    assert "container-interleaved-batch" not in broken({**VIRTUAL, **changes}, gpus)


def test_a_switch_that_every_release_asserts_is_looked_at_in_older_files_too() -> None:
    """Models that are built by a provider are dumped as before v0.6.0, by whatever release."""
    table = {"moe_router_enable_expert_bias": True, "moe_router_score_function": "softmax", "moe_paged_stash": True}
    dumped = ConfigContainer(Path("ConfigContainer.yaml"), {"model": table, "train": {}})

    (found,) = (found.message for found in check_container(dumped) if found.rule == "container-switch-needs")

    assert found.startswith("model.moe_router_enable_expert_bias needs model.moe_router_score_function")


def test_the_data_parallel_size_comes_from_the_gpus_else_from_the_file() -> None:
    assert replace(make(), world_size=8).data_parallel_size == 4
    assert make({"comm_overlap.data_parallel_size": 2}).data_parallel_size == 2
    assert make().data_parallel_size is None


@pytest.mark.parametrize(
    ("changes", "samples"),
    [
        ({}, 6400),
        ({"scheduler.max_steps": 100}, 12800),
        ({"scheduler.lr_decay_iters": None}, 6400),
        ({"train.train_samples": 1000}, 1000),
        ({"train.train_samples": 1000, "scheduler.lr_decay_samples": 900}, 900),
        ({"train.train_iters": None}, None),
    ],
)
def test_the_learning_rate_decays_over_samples(changes: dict[str, Any], samples: int | None) -> None:
    assert make(changes).decay_samples == samples


# --- a real one ------------------------------------------------------------------------------------------------------


@pytest.fixture
def real() -> ConfigContainer:
    if not REAL.exists():
        pytest.skip(f"the real ConfigContainer is not beside this repository: {REAL}")
    return read_container(REAL)


@pytest.mark.parametrize("gpus", [None, 8])
def test_a_real_configuration_is_valid_and_its_recorded_values_are_computed(real: Any, gpus: int) -> None:
    assert check_container(real, gpus) == ()
    assert replace(real, world_size=8).data_parallel_size == real.value("comm_overlap.data_parallel_size") == 4
    assert real.decay_samples == real.value("scheduler.lr_decay_steps")


@pytest.mark.parametrize("section", ["model", "train", "scheduler"])
@pytest.mark.parametrize("value", [5, None, [1]])
def test_a_value_in_the_place_of_a_section_is_refused_as_such(section: str, value: Any) -> None:
    sound = make()
    found = check_container(replace(sound, table={**sound.table, section: value}))

    assert value is None or f"{section} is a table of" in {each.rule: each.message for each in found}["container-types"]


VALUES = st.one_of(
    *(st.none(), st.booleans(), st.integers(-4, 64), st.integers(), st.floats(), st.text(max_size=4)),
    *(st.lists(st.integers(-2, 4) | st.text(max_size=2), max_size=3), st.just({}), st.just({"x": 1})),
)
PATHS = sorted({path for _, changes, _ in BREAKS for path in changes} | set(SOUND))


@pytest.mark.thorough
@given(st.dictionaries(st.sampled_from(PATHS), VALUES, max_size=6), st.sampled_from([None, 1, 8, 24]))
@settings(max_examples=400, deadline=None)
def test_no_values_make_anything_but_violations(changes: dict[str, Any], gpus: int) -> None:
    table = {path: value for path, value in changes.items() if not any(other.startswith(f"{path}.") for other in PATHS)}

    for violation in check_container(make(table), gpus):
        assert violation.message
