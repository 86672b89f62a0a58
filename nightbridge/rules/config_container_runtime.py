"""What a `ConfigContainer.yaml` trains with: precision, CUDA graphs, FSDP, checkpoints, groups and logging.

As in `config_container_training`, the rules follow Megatron-Bridge's own `validate()` and `finalize()`.
"""

from collections.abc import Iterator, Mapping

from nightbridge.launch.config_container import ConfigContainer
from nightbridge.rules.config_container_training import VALIDATE
from nightbridge.rules.rule import rule

_DISTRIBUTED_FORMATS = ("torch_dist", "fsdp_dtensor")
_EXPORT_SOURCES = ("checkpoint.hf_source_path", "model.hf_model_id", "tokenizer.tokenizer_model")
_NCCL_ALGORITHMS = ("Tree", "Ring", "CollnetDirect", "CollnetChain", "^NVLS")


# --- precision, graphs, optimiser ------------------------------------------------------------------------------------


def _fsdp(c: ConfigContainer) -> bool:
    return c.is_on("dist.use_megatron_fsdp") or c.is_on("ddp.use_megatron_fsdp")


@rule("container-precision", VALIDATE, ("model.bf16", "model.fp16", "optimizer"))
def _two_precisions(c: ConfigContainer) -> Iterator[str]:
    """A model computes in one half-precision type."""
    for section in ("model", "optimizer"):
        if c.is_on(f"{section}.bf16") and c.is_on(f"{section}.fp16"):
            yield f"{section}.bf16 and {section}.fp16 are both on; keep one"


@rule("container-aware-precision", VALIDATE, ("model.bf16", "model.fp16", "optimizer"))
def _aware_precision(c: ConfigContainer) -> Iterator[str]:
    """The precision-aware optimizer keeps its states in types that must match the model's."""
    if not c.is_on("optimizer.use_precision_aware_optimizer"):
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


@rule("container-mxfp8-gather", VALIDATE, ("mixed_precision",))
def _mxfp8_gather(c: ConfigContainer) -> Iterator[str]:
    """Gathering MXFP8 parameters reuses the gradient buffer."""
    gathers = c.is_on("mixed_precision.fp8_param_gather") and c.value("mixed_precision.fp8_recipe") == "mxfp8"
    if gathers and not _fsdp(c) and not c.is_on("mixed_precision.reuse_grad_buf_for_mxfp8_param_ag"):
        yield "mixed_precision.fp8_param_gather with mxfp8 needs reuse_grad_buf_for_mxfp8_param_ag = true"


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


@rule("container-offload", VALIDATE, ("model.cpu_offloading", "model.recompute_granularity"))
def _offload(c: ConfigContainer) -> Iterator[str]:
    """Activations are either kept on the host or computed again, within one pipeline stage."""
    if not c.is_on("model.cpu_offloading"):
        return
    if c.value("model.recompute_granularity") is not None:
        yield "model.cpu_offloading excludes model.recompute_granularity; remove one of them"
    if (c.number("model.pipeline_model_parallel_size") or 1) > 1:
        yield "model.cpu_offloading needs model.pipeline_model_parallel_size = 1"


@rule("container-graph-offload", VALIDATE, ("model.cpu_offloading", "model.cuda_graph_impl"))
def _graph_offload(c: ConfigContainer) -> Iterator[str]:
    """Transformer Engine's offloading and other graph implementations exclude each other."""
    if c.is_on("model.cpu_offloading") and c.captures_graphs:
        yield 'model.cpu_offloading excludes CUDA graphs; write model.cuda_graph_impl = "none" or switch it off'
    if (
        c.is_on("model.fine_grained_activation_offloading")
        and c.value("model.transformer_impl") != "transformer_engine"
    ):
        yield 'model.fine_grained_activation_offloading needs model.transformer_impl = "transformer_engine"'


@rule("container-quantised", VALIDATE, ("model.restore_modelopt_state", "checkpoint"))
def _quantised(c: ConfigContainer) -> Iterator[str]:
    """ModelOpt wraps the layers, which fused gradients and non-persistent checkpoints do not know."""
    if not c.is_on("model.restore_modelopt_state"):
        return
    if c.is_on("model.gradient_accumulation_fusion"):
        yield "model.restore_modelopt_state needs model.gradient_accumulation_fusion = false"
    if c.value("checkpoint.non_persistent_ckpt_type") is not None:
        yield "model.restore_modelopt_state excludes checkpoint.non_persistent_ckpt_type; remove it"


@rule("container-fsdp-choice", VALIDATE, ("dist",))
def _fsdp_choice(c: ConfigContainer) -> Iterator[str]:
    """Both shard the same parameters."""
    if c.is_on("dist.use_megatron_fsdp") and c.is_on("dist.use_torch_fsdp2"):
        yield "dist.use_megatron_fsdp and dist.use_torch_fsdp2 exclude each other; keep one"


@rule("container-fsdp", VALIDATE, ("dist", "ddp", "checkpoint", "env_vars"))
def _fsdp_first(c: ConfigContainer) -> Iterator[str]:
    """Megatron FSDP has a checkpoint format and communication settings of its own."""
    if not _fsdp(c) or c.integer("ddp.megatron_fsdp_version") == 2:
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
    if not _fsdp(c) or c.integer("ddp.megatron_fsdp_version") != 2:
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


# --- checkpoints, groups, logging ------------------------------------------------------------------------------------


@rule("container-checkpoint-format", VALIDATE, ("checkpoint", "dist", "ddp"))
def _checkpoint_format(c: ConfigContainer) -> Iterator[str]:
    """Each checkpoint format is written by one kind of sharding."""
    form = c.value("checkpoint.ckpt_format")
    used = c.value("checkpoint.save") is not None or c.value("checkpoint.load") is not None
    if used and form == "fsdp_dtensor" and (not _fsdp(c) or c.is_on("dist.use_torch_fsdp2")):
        yield "checkpoint.ckpt_format fsdp_dtensor needs ddp.use_megatron_fsdp = true; use torch_dist"
    distributed = c.is_on("optimizer.use_distributed_optimizer")
    if not c.is_on("dist.use_gloo_process_groups") and distributed and form not in _DISTRIBUTED_FORMATS:
        yield f"checkpoint.ckpt_format {form} needs dist.use_gloo_process_groups = true; use torch_dist"


@rule("container-async-save", VALIDATE, ("checkpoint",))
def _asynchronous(c: ConfigContainer) -> Iterator[str]:
    """Asynchronous saves are made by a persistent worker, for distributed formats only."""
    if not c.is_on("checkpoint.async_save"):
        return
    if c.value("checkpoint.ckpt_format") not in _DISTRIBUTED_FORMATS:
        yield "checkpoint.async_save needs ckpt_format torch_dist or fsdp_dtensor"
    if c.value("checkpoint.save") is None:
        yield "checkpoint.async_save needs checkpoint.save; write where to"
    if not c.is_on("checkpoint.use_persistent_ckpt_worker"):
        yield "checkpoint.async_save needs use_persistent_ckpt_worker = true"


@rule("container-checkpoint-loading", VALIDATE, ("checkpoint", "peft"))
def _checkpoint_loading(c: ConfigContainer) -> Iterator[str]:
    """Contradictory instructions about what is loaded from a checkpoint, and from where."""
    if c.is_on("checkpoint.load_main_params_from_ckpt") and c.is_on("checkpoint.load_optim"):
        yield "checkpoint.load_main_params_from_ckpt needs load_optim = false"
    if c.value("checkpoint.ckpt_step") is not None and c.value("checkpoint.load") is None:
        yield "checkpoint.ckpt_step needs checkpoint.load; write where from"
    memory = c.is_on("checkpoint.distrib_optim_fully_reshardable_mem_efficient")
    if c.is_on("checkpoint.dist_ckpt_optim_fully_reshardable") and memory:
        yield "checkpoint.dist_ckpt_optim_fully_reshardable excludes distrib_optim_fully_reshardable_mem_efficient"
    if c.value("peft") is not None and c.value("checkpoint.pretrained_checkpoint") is None:
        yield "peft needs checkpoint.pretrained_checkpoint; write it"


@rule("container-hf-export", VALIDATE, ("checkpoint",))
def _export(c: ConfigContainer) -> Iterator[str]:
    """The export needs the model's Hugging Face configuration and whole, global weights."""
    if not c.is_on("checkpoint.also_save_hf_checkpoint"):
        return
    if c.value("checkpoint.ckpt_format") == "fsdp_dtensor":
        yield "checkpoint.also_save_hf_checkpoint excludes ckpt_format fsdp_dtensor; use torch_dist"
    if not any(c.value(name) for name in _EXPORT_SOURCES):
        yield f"checkpoint.also_save_hf_checkpoint needs to know the model: write one of {', '.join(_EXPORT_SOURCES)}"
    if c.value("checkpoint.non_persistent_ckpt_type") == "local":
        yield "checkpoint.also_save_hf_checkpoint excludes local non-persistent checkpoints; use global ones"


@rule("container-process-groups", VALIDATE, ("dist",))
def _process_groups(c: ConfigContainer) -> Iterator[str]:
    """Gloo groups are made by the global registry that decentralised groups replace."""
    if c.is_on("dist.use_decentralized_pg") and c.is_on("dist.use_gloo_process_groups"):
        yield "dist.use_decentralized_pg excludes dist.use_gloo_process_groups; switch one off"


@rule("container-profilers", VALIDATE, ("profiling",))
def _profilers(c: ConfigContainer) -> Iterator[str]:
    """Two profilers slow each other down; a window that ends before it starts profiles nothing."""
    if c.value("profiling") is None:
        return
    if c.is_on("profiling.use_pytorch_profiler") and c.is_on("profiling.use_nsys_profiler"):
        yield "profiling.use_pytorch_profiler and use_nsys_profiler are both on; keep one"
    start, end = c.integer("profiling.profile_step_start") or 0, c.integer("profiling.profile_step_end") or 0
    if not 0 <= start <= end:
        yield (
            f"profiling from step {start} to {end} is not a valid window; "
            "write 0 <= profile_step_start <= profile_step_end"
        )


@rule("container-loggers", VALIDATE, ("logger",))
def _loggers(c: ConfigContainer) -> Iterator[str]:
    """The logging service files a run under a project and a name."""
    for name, needed in (("mlflow_experiment", "mlflow_run_name"), ("comet_project", "comet_experiment_name")):
        if c.value(f"logger.{name}") and not c.value(f"logger.{needed}"):
            yield f"logger.{name} needs logger.{needed}; write it"


@rule("container-stragglers", VALIDATE, ("nvrx_straggler",))
def _stragglers(c: ConfigContainer) -> Iterator[str]:
    """Straggler detection needs something to compare, and a threshold between 0 and 1."""
    if not c.is_on("nvrx_straggler.enabled"):
        return
    if not (c.is_on("nvrx_straggler.calc_relative_gpu_perf") or c.is_on("nvrx_straggler.calc_individual_gpu_perf")):
        yield "nvrx_straggler has nothing to compare; switch calc_relative_gpu_perf or calc_individual_gpu_perf on"
    interval = c.number("nvrx_straggler.report_time_interval")
    if interval is not None and interval <= 0:
        yield f"nvrx_straggler.report_time_interval {interval:g} must be positive"
    for name in ("gpu_relative_perf_threshold", "gpu_individual_perf_threshold"):
        threshold = c.number(f"nvrx_straggler.{name}")
        if threshold is not None and not 0 <= threshold <= 1:
            yield f"nvrx_straggler.{name} {threshold:g} is not a share; write 0 to 1"


@rule("container-data-switches", VALIDATE, ("dataset",))
def _data_switches(c: ConfigContainer) -> Iterator[str]:
    """The data set treats an unset switch as an error, since each choice changes the loss."""
    if c.kind("dataset") not in ("GPTDatasetConfig", "GPTFIMDatasetConfig", "MockGPTDatasetConfig"):
        return
    dataset = c.value("dataset")
    for name in ("reset_position_ids", "reset_attention_mask", "eod_mask_loss"):
        if isinstance(dataset, Mapping) and name in dataset and dataset[name] is None:
            yield f"dataset.{name} must be true or false"
