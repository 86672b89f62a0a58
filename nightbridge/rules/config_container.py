"""The rules of a `ConfigContainer.yaml`: those of Megatron-Bridge's own `validate()` and `finalize()`.

`RULES` holds what the configuration's own check raises at the start of the job; what it lets through stands in
`container_missed`. Left out is what needs the cluster's files, its GPUs or its packages.
"""

import math
from collections.abc import Iterator, Mapping

from nightbridge.launch.config_container import (
    Container,
    data_parallel_size,
    model_parallel_size,
    scheduler_steps,
)
from nightbridge.rules.config_container_extra import MISSED
from nightbridge.rules.container_rule import (
    SCHEDULE,
    SIZES,
    ContainerFacts,
    ContainerRule,
    captured_modules,
    dtype_of,
    of,
)
from nightbridge.rules.rule import Violation

_SFT = frozenset({"GPTSFTDatasetConfig", "DirectHFSFTDatasetConfig", "EnergonDatasetConfig", "MockVLMSFTDatasetConfig"})
_COLLATED = _SFT - {"GPTSFTDatasetConfig"}
_DISTRIBUTED_FORMATS = ("torch_dist", "fsdp_dtensor")
_EXPORT_SOURCES = ("checkpoint.hf_source_path", "model.hf_model_id", "tokenizer.tokenizer_model")
_NCCL_ALGORITHMS = ("Tree", "Ring", "CollnetDirect", "CollnetChain", "^NVLS")


def check_container(container: Container, world_size: int | None = None) -> tuple[Violation, ...]:
    """Return every rule that a ConfigContainer breaks.

    Args:
        container: The configuration.
        world_size: GPUs of the run; without it, the data parallel size that the file records is taken.

    """
    facts = ContainerFacts(container, world_size)
    return tuple(
        Violation(rule=rule.id, severity=rule.severity, fields=rule.fields, message=message)
        for rule in (*RULES, *MISSED)
        for message in rule.check(facts)
    )


# --- sizes and batches -----------------------------------------------------------------------------------------------


def _world_divides(facts: ContainerFacts) -> Iterator[str]:
    """Training and evaluation both divide the GPUs into model-parallel groups."""
    size = model_parallel_size(facts.container)
    if facts.world_size is not None and facts.world_size % size:
        yield f"{facts.world_size} GPUs are not a multiple of TP * PP * CP = {size}; change one of them"
    context = facts.container.integer("dist.eval_context_parallel_size")
    if facts.world_size is None or not context or context < 0:
        return
    size = size // facts.container.size("context_parallel_size") * context
    if facts.world_size % size:
        yield f"{facts.world_size} GPUs are not a multiple of TP * PP * eval_context_parallel_size = {size}; change one"


def _eval_batch(facts: ContainerFacts) -> Iterator[str]:
    """Every data-parallel replica evaluates the same whole number of micro batches."""
    container = facts.container
    total = container.integer("validation.eval_global_batch_size") or container.integer("train.global_batch_size")
    micro = container.integer("validation.eval_micro_batch_size") or container.integer("train.micro_batch_size")
    parallel = _eval_data_parallel(facts)
    if total is None or micro is None:
        what = "global_batch_size" if total is None else "micro_batch_size"
        yield f"train.{what} is not set, and validation.eval_{what} is not either; write one"
    elif parallel and micro > 0 and total % (micro * parallel):
        yield (
            f"eval_global_batch_size {total} is not a multiple of eval_micro_batch_size {micro} * data parallel size "
            f"{parallel} = {micro * parallel}; change one of them"
        )


def _eval_data_parallel(facts: ContainerFacts) -> int | None:
    parallel = data_parallel_size(facts.container, facts.world_size)
    context = facts.container.integer("dist.eval_context_parallel_size")
    if parallel is None or not context:
        return parallel
    world = facts.world_size or parallel * model_parallel_size(facts.container)
    return world // (model_parallel_size(facts.container) // facts.container.size("context_parallel_size") * context)


def _context_length(c: Container) -> Iterator[str]:
    """Context parallelism cuts a sequence into two pieces for each rank, to balance causal attention."""
    context, length = c.size("context_parallel_size"), c.integer("model.seq_length")
    if context > 1 and length and length % (2 * context):
        yield f"model.seq_length {length} is not a multiple of 2 * context_parallel_size = {2 * context}; change one"


def _context_loss(c: Container) -> Iterator[str]:
    """Ranks see different numbers of tokens, and an average of averages weighs them wrongly."""
    if c.size("context_parallel_size") <= 1 or c.kind("dataset") not in _SFT:
        return
    if not c.is_on("model.calculate_per_token_loss"):
        yield "fine-tuning with context_parallel_size > 1 needs model.calculate_per_token_loss = true"
    if c.is_on("ddp.average_in_collective"):
        yield "fine-tuning with context_parallel_size > 1 needs ddp.average_in_collective = false"


def _context_communication(c: Container) -> Iterator[str]:
    """Communication is chosen for each layer, and a hierarchy must cover the ranks exactly."""
    kinds, sizes = c.value("model.cp_comm_type"), c.value("model.hierarchical_context_parallel_sizes")
    context, layers = c.size("context_parallel_size"), c.integer("model.num_layers")
    if context > 1 and isinstance(kinds, list) and len(kinds) != layers:
        yield f"model.cp_comm_type has {len(kinds)} entries for {layers} layers; write one for each, or one text"
    if context > 1 and kinds is not None and not isinstance(kinds, list | str):
        yield f"model.cp_comm_type {kinds!r} must be a text, or a list of one for each layer"
    named = kinds if isinstance(kinds, list) else [kinds or "p2p"]
    if any("a2a+p2p" in str(kind) for kind in named) and sizes is None:
        yield (
            "model.cp_comm_type a2a+p2p without hierarchical_context_parallel_sizes turns context parallelism off: "
            "fast, and trains something else; write the sizes"
        )
    numbers = isinstance(sizes, list) and all(isinstance(size, int) for size in sizes)
    if sizes is not None and not numbers:
        yield f"hierarchical_context_parallel_sizes {sizes} must be a list of whole numbers"
    elif sizes is not None and math.prod(sizes) != context:
        yield f"hierarchical_context_parallel_sizes {sizes} multiply to {math.prod(sizes)}, not to {context}; fix them"


def _sequence_lengths(c: Container) -> Iterator[str]:
    """The model would be built for other sequences than the data set yields."""
    model, data = c.integer("model.seq_length"), c.integer("dataset.seq_length")
    if c.kind("dataset") in {*_SFT, "GPTDatasetConfig"} and model != data:
        yield f"model.seq_length {model} and dataset.seq_length {data} differ; write the same"


def _collate_padding(c: Container) -> Iterator[str]:
    """Batches are padded to this multiple, so that every rank gets equal parts."""
    length = c.integer("dataset.seq_length")
    if c.kind("dataset") not in _COLLATED or not length:
        return
    contexts = {c.size("context_parallel_size"), c.integer("dist.eval_context_parallel_size") or 1}
    tensor = c.size("tensor_model_parallel_size") if c.is_on("model.sequence_parallel") else 1
    multiple = math.lcm(*(2 * size if size > 1 else 1 for size in contexts), *(size * tensor for size in contexts))
    if tensor == 1:
        multiple = math.lcm(*(2 * size if size > 1 else 1 for size in contexts))
    if length % multiple:
        yield f"dataset.seq_length {length} is not a multiple of {multiple}, which context and sequence parallel need"


# --- how long it trains ----------------------------------------------------------------------------------------------


def _one_duration(c: Container) -> Iterator[str]:
    """Training has exactly one end: iterations, samples or epochs."""
    iterations, samples = c.integer("train.train_iters"), c.integer("train.train_samples")
    epochs, batch = c.value("train.num_epochs"), c.integer("train.global_batch_size")
    if iterations is None and samples is None and epochs is None:
        yield "none of train.train_iters, train_samples and num_epochs is set; write one"
    if samples is not None and (epochs is not None or (iterations and batch and iterations != samples // batch)):
        yield "more than one of train.train_iters, train_samples and num_epochs is set; keep one"
    if (samples is not None or epochs is not None) and batch is None:
        yield "train_samples and num_epochs need train.global_batch_size; write it"
    if (samples is not None or epochs is not None) and c.value("train.rampup_batch_size") is not None:
        yield "train.rampup_batch_size goes with train_iters only; remove it"
    if samples is not None and samples <= 0:
        yield f"train.train_samples {samples} must be positive"
    number = c.number("train.num_epochs")
    if number is not None and number <= 0:
        yield f"train.num_epochs {number:g} must be positive"


def _epochs(c: Container) -> Iterator[str]:
    """Epochs are counted for finite fine-tuning data sets only."""
    if c.value("train.num_epochs") is None:
        return
    if c.kind("dataset") != "GPTSFTDatasetConfig":
        yield f"train.num_epochs is for GPTSFTDatasetConfig, not for {c.kind('dataset')}; write train_iters"
    if c.value("dataset.dataloader_type") != "batch":
        yield 'train.num_epochs needs dataset.dataloader_type = "batch"'


def _schedule_mode(c: Container) -> Iterator[str]:
    """A schedule counts iterations or samples, as training does."""
    by_samples = c.value("train.train_samples") is not None
    foreign: Mapping[str, bool] = (
        {
            "max_steps": c.value("scheduler.max_steps") is not None,
            "lr_decay_iters": c.value("scheduler.lr_decay_iters") is not None,
            "lr_warmup_iters": c.is_on("scheduler.lr_warmup_iters"),
        }
        if by_samples
        else {
            "lr_decay_samples": c.value("scheduler.lr_decay_samples") is not None,
            "lr_warmup_samples": c.is_on("scheduler.lr_warmup_samples"),
        }
    )
    mode = "samples" if by_samples else "iterations"
    for name, written in foreign.items():
        if written:
            yield f"scheduler.{name} does not go with training by {mode}; remove it"
    warmup = "lr_warmup_samples" if by_samples else "lr_warmup_iters"
    if c.value("scheduler.lr_warmup_fraction") is not None and c.is_on(f"scheduler.{warmup}"):
        yield f"scheduler.lr_warmup_fraction and {warmup} are both set; keep one"


def _schedule_mixed(c: Container) -> Iterator[str]:
    """A schedule counts iterations or samples, not both."""
    iterations, samples = (_counted_in(c, unit) for unit in ("iters", "samples"))
    if iterations and samples:
        yield f"scheduler counts iterations and samples: {', '.join(iterations + samples)}; keep those of one kind"


def _counted_in(c: Container, unit: str) -> list[str]:
    """The scheduler's fields that count in a unit and are written; a warm-up of none is not."""
    names = [
        f"{what}_{unit}" for what in ("lr_decay", "lr_wsd_decay") if c.value(f"scheduler.{what}_{unit}") is not None
    ]
    return names + [f"lr_warmup_{unit}"] * c.is_on(f"scheduler.lr_warmup_{unit}")


def _weight_decay(c: Container) -> Iterator[str]:
    """The scheduler raises the weight decay from a start to an end and cannot lower it."""
    start, end = c.number("scheduler.start_weight_decay"), c.number("scheduler.end_weight_decay")
    if start is None:
        return
    if start < 0:
        yield f"scheduler.start_weight_decay {start:g} must not be negative"
    if end is None or end < start:
        shown = "not set" if end is None else f"{end:g}"
        yield f"scheduler.end_weight_decay is {shown}, and start_weight_decay is {start:g}; it may only grow"


def _schedule_length(c: Container) -> Iterator[str]:
    """A schedule that ends before training, or has no length, leaves the last steps without a learning rate."""
    longest, iterations = c.integer("scheduler.max_steps"), c.integer("train.train_iters")
    if longest is not None and longest <= 0:
        yield f"scheduler.max_steps {longest} must be positive"
    elif longest is not None and iterations is not None and longest < iterations:
        yield f"scheduler.max_steps {longest} is less than train.train_iters {iterations}; raise it"
    steps = scheduler_steps(c)
    if iterations != 0 and steps is not None and steps.lr_decay_steps <= 0:
        yield f"the learning rate decays over {steps.lr_decay_steps} samples; it needs at least one"


def _schedule_override(c: Container) -> Iterator[str]:
    """The scheduler's state comes from the configuration or from the checkpoint."""
    if c.is_on("scheduler.override_opt_param_scheduler") and c.is_on("scheduler.use_checkpoint_opt_param_scheduler"):
        yield "scheduler takes its values from the checkpoint and overrides them; switch one off"


# --- datasets and packing --------------------------------------------------------------------------------------------


def _packing(c: Container) -> Iterator[str]:
    """Offline and in-batch packing exclude each other, and each needs its own micro batch."""
    offline, in_batch = c.is_on("dataset.enable_offline_packing"), c.is_on("dataset.enable_in_batch_packing")
    specs, micro = c.value("dataset.offline_packing_specs"), c.integer("train.micro_batch_size") or 1
    if offline and in_batch:
        yield "dataset.enable_offline_packing and enable_in_batch_packing exclude each other; keep one"
    if offline and specs is None:
        yield "dataset.enable_offline_packing needs offline_packing_specs; write them"
    if specs is not None and not offline:
        yield "dataset.offline_packing_specs need enable_offline_packing = true"
    if offline and micro > 1:
        yield f"offline packing needs train.micro_batch_size 1, not {micro}; multiply the packed length instead"
    if in_batch and micro == 1:
        yield "in-batch packing needs train.micro_batch_size > 1: it packs the sequences of one micro-batch"
    size = c.integer("dataset.offline_packing_specs.packed_sequence_size")
    if offline and size is not None and size <= 0:
        yield f"dataset.offline_packing_specs.packed_sequence_size {size} must be positive"


def _padded_packing(c: Container) -> Iterator[str]:
    """A captured graph needs inputs of one shape, so packed sequences must be padded to it."""
    if c.value("dataset.offline_packing_specs") is None:
        return
    padded = c.is_on("dataset.pad_to_max_length") or c.is_on("dataset.dataset_kwargs.pad_to_max_length")
    lengths = c.is_on("dataset.offline_packing_specs.pad_cu_seqlens")
    if lengths and not padded:
        yield "offline_packing_specs.pad_cu_seqlens needs dataset.pad_to_max_length = true"
    modules = captured_modules(c)
    per_layer = c.value("model.cuda_graph_impl") == "transformer_engine"
    whole = _captures_iteration(c)
    if (whole or per_layer) and not padded:
        yield "CUDA graphs with offline packing need dataset.pad_to_max_length = true"
    if (whole or (per_layer and (not modules or "attn" in modules))) and not lengths:
        yield "CUDA graphs of packed attention need offline_packing_specs.pad_cu_seqlens = true"


def _energon(c: Container) -> Iterator[str]:
    """Energon packs sequences in the loader, which the rest of the configuration must match."""
    if c.kind("dataset") != "EnergonDatasetConfig":
        return
    micro = c.integer("train.micro_batch_size")
    if c.integer("dataset.micro_batch_size") != micro:
        written = c.value("dataset.micro_batch_size")
        yield f"dataset.micro_batch_size {written} and train.micro_batch_size {micro} differ; write the same"
    evaluated = c.integer("validation.eval_micro_batch_size")
    if (
        evaluated is not None
        and c.is_on("dataset.do_validation")
        and evaluated != c.integer("dataset.micro_batch_size")
    ):
        written = c.value("dataset.micro_batch_size")
        yield f"dataset.micro_batch_size {written} and eval_micro_batch_size {evaluated} differ; write the same"
    if c.value("dataset.packing_buffer_size") is None:
        return
    broken = {
        f"train.micro_batch_size 1, not {micro}": micro != 1,
        "model.calculate_per_token_loss = true": not c.is_on("model.calculate_per_token_loss"),
        "ddp.average_in_collective = false": c.is_on("ddp.average_in_collective"),
        "no multi-token prediction": c.is_on("model.mtp_num_layers"),
        "no CUDA graphs": _captures(c) or c.value("model.vision_cuda_graph_impl") not in (None, "none"),
        "no model.dist_train": c.is_on("model.dist_train.use_dist_train"),
        "pipeline_model_parallel_size 1": c.size("pipeline_model_parallel_size") > 1,
    }
    for need, is_broken in broken.items():
        if is_broken:
            yield f"Energon's own packing needs {need}"


# --- precision, graphs, optimiser ------------------------------------------------------------------------------------


def _captures(c: Container) -> bool:
    return c.value("model.cuda_graph_impl") not in (None, "none")


def _captures_iteration(c: Container) -> bool:
    return c.value("model.cuda_graph_impl") == "full_iteration" or "full_iteration" in c.names("model.cuda_graph_scope")


def _fsdp(c: Container) -> bool:
    return c.is_on("dist.use_megatron_fsdp") or c.is_on("ddp.use_megatron_fsdp")


def _two_precisions(c: Container) -> Iterator[str]:
    """A model computes in one half-precision type."""
    for section in ("model", "optimizer"):
        if c.is_on(f"{section}.bf16") and c.is_on(f"{section}.fp16"):
            yield f"{section}.bf16 and {section}.fp16 are both on; keep one"


def _aware_precision(c: Container) -> Iterator[str]:
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


def _mxfp8_gather(c: Container) -> Iterator[str]:
    """Gathering MXFP8 parameters reuses the gradient buffer."""
    gathers = c.is_on("mixed_precision.fp8_param_gather") and c.value("mixed_precision.fp8_recipe") == "mxfp8"
    if gathers and not _fsdp(c) and not c.is_on("mixed_precision.reuse_grad_buf_for_mxfp8_param_ag"):
        yield "mixed_precision.fp8_param_gather with mxfp8 needs reuse_grad_buf_for_mxfp8_param_ag = true"


def _deterministic(c: Container) -> Iterator[str]:
    """These kernels and NCCL algorithms sum in an order that varies between runs."""
    if not c.is_on("model.deterministic_mode"):
        return
    if c.is_on("model.cross_entropy_loss_fusion"):
        yield "model.deterministic_mode needs model.cross_entropy_loss_fusion = false"
    algorithm = c.value("env_vars.NCCL_ALGO")
    if algorithm is not None and str(algorithm) not in _NCCL_ALGORITHMS:
        yield f"model.deterministic_mode needs NCCL_ALGO to be one of {', '.join(_NCCL_ALGORITHMS)}, not {algorithm}"


def _graph_nan_check(c: Container) -> Iterator[str]:
    """The check reads the loss on the host at every step, which a captured iteration forbids."""
    if _captures_iteration(c) and c.is_on("rerun_state_machine.check_for_nan_in_loss"):
        yield "a full_iteration CUDA graph needs rerun_state_machine.check_for_nan_in_loss = false"


def _graph_offload(c: Container) -> Iterator[str]:
    """Transformer Engine's offloading and other graph implementations exclude each other."""
    if c.is_on("model.cpu_offloading") and _captures(c):
        yield 'model.cpu_offloading excludes CUDA graphs; write model.cuda_graph_impl = "none" or switch it off'
    if (
        c.is_on("model.fine_grained_activation_offloading")
        and c.value("model.transformer_impl") != "transformer_engine"
    ):
        yield 'model.fine_grained_activation_offloading needs model.transformer_impl = "transformer_engine"'


def _quantised(c: Container) -> Iterator[str]:
    """ModelOpt wraps the layers, which fused gradients and non-persistent checkpoints do not know."""
    if not c.is_on("model.restore_modelopt_state"):
        return
    if c.is_on("model.gradient_accumulation_fusion"):
        yield "model.restore_modelopt_state needs model.gradient_accumulation_fusion = false"
    if c.value("checkpoint.non_persistent_ckpt_type") is not None:
        yield "model.restore_modelopt_state excludes checkpoint.non_persistent_ckpt_type; remove it"


def _fsdp_choice(c: Container) -> Iterator[str]:
    """Both shard the same parameters."""
    if c.is_on("dist.use_megatron_fsdp") and c.is_on("dist.use_torch_fsdp2"):
        yield "dist.use_megatron_fsdp and dist.use_torch_fsdp2 exclude each other; keep one"


def _fsdp_first(c: Container) -> Iterator[str]:
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


def _fsdp_second(c: Container) -> Iterator[str]:
    """The second version of Megatron FSDP shards data-parallel bf16 training only, so far."""
    if not _fsdp(c) or c.integer("ddp.megatron_fsdp_version") != 2:
        return
    sizes = (*("tensor_model_parallel_size", "pipeline_model_parallel_size"), "context_parallel_size")
    broken = {
        "model.bf16 = true and no fp16": not c.is_on("model.bf16") or c.is_on("model.fp16"),
        "optimizer.bf16 = true and no fp16": not c.is_on("optimizer.bf16") or c.is_on("optimizer.fp16"),
        "model.params_dtype of bfloat16": dtype_of(c, "model.params_dtype") not in ("", "bfloat16"),
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
        "no CUDA graphs": _captures(c) or c.is_on("ddp.megatron_fsdp_cuda_graph_mode"),
        "dist.use_tp_pp_dp_mapping = false": c.is_on("dist.use_tp_pp_dp_mapping"),
    }
    for need, is_broken in broken.items():
        if is_broken:
            yield f"Megatron FSDP version 2 needs {need}"


# --- checkpoints, groups, logging ------------------------------------------------------------------------------------


def _checkpoint_format(c: Container) -> Iterator[str]:
    """Each checkpoint format is written by one kind of sharding."""
    form = c.value("checkpoint.ckpt_format")
    used = c.value("checkpoint.save") is not None or c.value("checkpoint.load") is not None
    if used and form == "fsdp_dtensor" and (not _fsdp(c) or c.is_on("dist.use_torch_fsdp2")):
        yield "checkpoint.ckpt_format fsdp_dtensor needs ddp.use_megatron_fsdp = true; use torch_dist"
    distributed = c.is_on("optimizer.use_distributed_optimizer")
    if not c.is_on("dist.use_gloo_process_groups") and distributed and form not in _DISTRIBUTED_FORMATS:
        yield f"checkpoint.ckpt_format {form} needs dist.use_gloo_process_groups = true; use torch_dist"


def _asynchronous(c: Container) -> Iterator[str]:
    """Asynchronous saves are made by a persistent worker, for distributed formats only."""
    if not c.is_on("checkpoint.async_save"):
        return
    if c.value("checkpoint.ckpt_format") not in _DISTRIBUTED_FORMATS:
        yield "checkpoint.async_save needs ckpt_format torch_dist or fsdp_dtensor"
    if c.value("checkpoint.save") is None:
        yield "checkpoint.async_save needs checkpoint.save; write where to"
    if not c.is_on("checkpoint.use_persistent_ckpt_worker"):
        yield "checkpoint.async_save needs use_persistent_ckpt_worker = true"


def _checkpoint_loading(c: Container) -> Iterator[str]:
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


def _export(c: Container) -> Iterator[str]:
    """The export needs the model's Hugging Face configuration and whole, global weights."""
    if not c.is_on("checkpoint.also_save_hf_checkpoint"):
        return
    if c.value("checkpoint.ckpt_format") == "fsdp_dtensor":
        yield "checkpoint.also_save_hf_checkpoint excludes ckpt_format fsdp_dtensor; use torch_dist"
    if not any(c.value(name) for name in _EXPORT_SOURCES):
        yield f"checkpoint.also_save_hf_checkpoint needs to know the model: write one of {', '.join(_EXPORT_SOURCES)}"
    if c.value("checkpoint.non_persistent_ckpt_type") == "local":
        yield "checkpoint.also_save_hf_checkpoint excludes local non-persistent checkpoints; use global ones"


def _process_groups(c: Container) -> Iterator[str]:
    """Gloo groups are made by the global registry that decentralised groups replace."""
    if c.is_on("dist.use_decentralized_pg") and c.is_on("dist.use_gloo_process_groups"):
        yield "dist.use_decentralized_pg excludes dist.use_gloo_process_groups; switch one off"


def _profilers(c: Container) -> Iterator[str]:
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


def _loggers(c: Container) -> Iterator[str]:
    """The logging service files a run under a project and a name."""
    for name, needed in (("mlflow_experiment", "mlflow_run_name"), ("comet_project", "comet_experiment_name")):
        if c.value(f"logger.{name}") and not c.value(f"logger.{needed}"):
            yield f"logger.{name} needs logger.{needed}; write it"


def _stragglers(c: Container) -> Iterator[str]:
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


def _data_switches(c: Container) -> Iterator[str]:
    """The data set treats an unset switch as an error, since each choice changes the loss."""
    if c.kind("dataset") not in ("GPTDatasetConfig", "GPTFIMDatasetConfig", "MockGPTDatasetConfig"):
        return
    dataset = c.value("dataset")
    for name in ("reset_position_ids", "reset_attention_mask", "eod_mask_loss"):
        if isinstance(dataset, Mapping) and name in dataset and dataset[name] is None:
            yield f"dataset.{name} must be true or false"


RULES: tuple[ContainerRule, ...] = (
    ContainerRule("container-world-size", SIZES, _world_divides),
    ContainerRule("container-eval-batch", ("validation", "train.global_batch_size", *SIZES), _eval_batch),
    ContainerRule("container-duration", ("train",), of(_one_duration)),
    ContainerRule("container-epochs", ("train.num_epochs", "dataset"), of(_epochs)),
    ContainerRule("container-packing", ("dataset", "train.micro_batch_size"), of(_packing)),
    ContainerRule("container-padded-packing", ("dataset", "model.cuda_graph_impl"), of(_padded_packing)),
    ContainerRule("container-energon", ("dataset", "train", "model", "ddp"), of(_energon)),
    ContainerRule("container-collate-padding", ("dataset.seq_length", *SIZES), of(_collate_padding)),
    ContainerRule("container-sequence-length", ("model.seq_length", "dataset.seq_length"), of(_sequence_lengths)),
    ContainerRule("container-context-length", ("model.seq_length", SIZES[2]), of(_context_length)),
    ContainerRule("container-context-loss", ("model.calculate_per_token_loss", "ddp"), of(_context_loss)),
    ContainerRule("container-context-communication", ("model.cp_comm_type", SIZES[2]), of(_context_communication)),
    ContainerRule("container-schedule-mode", SCHEDULE, of(_schedule_mode)),
    ContainerRule("container-schedule-mixed", ("scheduler",), of(_schedule_mixed)),
    ContainerRule("container-weight-decay", ("scheduler",), of(_weight_decay)),
    ContainerRule("container-schedule-length", SCHEDULE, of(_schedule_length)),
    ContainerRule("container-schedule-override", ("scheduler",), of(_schedule_override)),
    ContainerRule("container-precision", ("model.bf16", "model.fp16", "optimizer"), of(_two_precisions)),
    ContainerRule("container-aware-precision", ("model.bf16", "model.fp16", "optimizer"), of(_aware_precision)),
    ContainerRule("container-mxfp8-gather", ("mixed_precision",), of(_mxfp8_gather)),
    ContainerRule("container-deterministic", ("model.deterministic_mode", "env_vars.NCCL_ALGO"), of(_deterministic)),
    ContainerRule("container-graph-nan-check", ("model.cuda_graph_impl", "rerun_state_machine"), of(_graph_nan_check)),
    ContainerRule("container-graph-offload", ("model.cpu_offloading", "model.cuda_graph_impl"), of(_graph_offload)),
    ContainerRule("container-quantised", ("model.restore_modelopt_state", "checkpoint"), of(_quantised)),
    ContainerRule("container-fsdp-choice", ("dist",), of(_fsdp_choice)),
    ContainerRule("container-fsdp", ("dist", "ddp", "checkpoint", "env_vars"), of(_fsdp_first)),
    ContainerRule("container-fsdp-2", ("dist", "ddp", "checkpoint", "model", "optimizer"), of(_fsdp_second)),
    ContainerRule("container-checkpoint-format", ("checkpoint", "dist", "ddp"), of(_checkpoint_format)),
    ContainerRule("container-async-save", ("checkpoint",), of(_asynchronous)),
    ContainerRule("container-checkpoint-loading", ("checkpoint", "peft"), of(_checkpoint_loading)),
    ContainerRule("container-hf-export", ("checkpoint",), of(_export)),
    ContainerRule("container-process-groups", ("dist",), of(_process_groups)),
    ContainerRule("container-profilers", ("profiling",), of(_profilers)),
    ContainerRule("container-loggers", ("logger",), of(_loggers)),
    ContainerRule("container-stragglers", ("nvrx_straggler",), of(_stragglers)),
    ContainerRule("container-data-switches", ("dataset",), of(_data_switches)),
)
"""What Megatron-Bridge's own check raises when the job starts."""
