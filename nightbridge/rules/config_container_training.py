"""What a `ConfigContainer.yaml` trains on, for how long, and what it writes: batches, data, schedule, checkpoints.

As in `config_container_compute`, the rules are those of Megatron-Bridge's own check, and for what it lets through.
"""

import math
from collections.abc import Iterator, Mapping

from nightbridge.launch.config_container import SIZES, ConfigContainer
from nightbridge.rules.config_container_compute import RATES, UNCHECKED, VALIDATE, uses_fsdp
from nightbridge.rules.rule import rule

_TYPES = "Megatron-Bridge: ConfigContainer of training/config.py, and what it leads to, at 067f987d (main)"
SCHEDULER = "Megatron-Core: optimizer_param_scheduler.py, from b0cc2706 (v0.3.0) to 2a75ac12 (main of August 2026)"
SCHEDULES = "Megatron-Core: pipeline_parallel/schedules.py, from b0cc2706 (v0.3.0) to 2a75ac12 (main of August 2026)"
SCHEDULE = ("train.train_iters", "train.train_samples", "scheduler")


@rule("container-types", _TYPES, ("model", "train", "optimizer", "scheduler", "dataset"))
def _types(c: ConfigContainer) -> Iterator[str]:
    """A value of another type fails where it is first used, or trains something else."""
    yield from c.wrong_types()


# --- batches ----------------------------------------------------------------------------------------------------------


@rule("container-train-batch", UNCHECKED, ("train", *SIZES))
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


_GROUP = "model.microbatch_group_size_per_vp_stage"


@rule("container-interleaved-batch", SCHEDULES, ("train", *SIZES, "model.virtual_pipeline_model_parallel_size", _GROUP))
def _interleaved_batch(c: ConfigContainer) -> Iterator[str]:
    """A virtual pipeline takes micro batches in groups of its stages, and its first step fails where some are left."""
    total, micro = c.integer("train.global_batch_size"), c.integer("train.micro_batch_size")
    parallel, stages = c.data_parallel_size, c.size("pipeline_model_parallel_size")
    if min(stages, c.size("virtual_pipeline_model_parallel_size")) < 2 or c.is_on("train.rampup_batch_size"):
        return
    if not (total and micro and parallel) or total % (micro * parallel):
        return
    count = total // (micro * parallel)
    # A dump has the group that its own stages made; those of tonight make another one.
    groups = {stages, c.integer(_GROUP) or stages}
    if all(group < stages or group > count or 0 < count % group < stages for group in groups):
        yield (
            f"global_batch_size {total} is {count} micro batches of each replica, not a multiple of "
            f"pipeline_model_parallel_size {stages} as a virtual pipeline needs; use a multiple of "
            f"{micro * parallel * stages}"
        )


@rule("container-eval-batch", VALIDATE, ("validation", "train.global_batch_size", *SIZES))
def _eval_batch(c: ConfigContainer) -> Iterator[str]:
    """Every data-parallel replica evaluates the same whole number of micro batches."""
    total = c.integer("validation.eval_global_batch_size") or c.integer("train.global_batch_size")
    micro = c.integer("validation.eval_micro_batch_size") or c.integer("train.micro_batch_size")
    parallel, context = c.data_parallel_size, c.integer("dist.eval_context_parallel_size")
    if parallel is not None and context:
        world = c.world_size or parallel * c.model_parallel_size
        parallel = world // (c.model_parallel_size // c.size("context_parallel_size") * context)
    if total is None or micro is None:
        what = "global_batch_size" if total is None else "micro_batch_size"
        yield f"train.{what} is not set, and validation.eval_{what} is not either; write one"
    elif parallel and micro > 0 and total % (micro * parallel):
        yield (
            f"eval_global_batch_size {total} is not a multiple of eval_micro_batch_size {micro} * data parallel size "
            f"{parallel} = {micro * parallel}; change one of them"
        )


# --- how long it trains -----------------------------------------------------------------------------------------------


@rule("container-duration", VALIDATE, ("train",))
def _one_duration(c: ConfigContainer) -> Iterator[str]:
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


@rule("container-no-training", UNCHECKED, ("train.train_iters",))
def _no_training(c: ConfigContainer) -> Iterator[str]:
    """The job succeeds without a step."""
    if c.integer("train.train_iters") == 0:
        yield "train.train_iters is 0: the run would end immediately; write a number of iterations"


@rule("container-epochs", VALIDATE, ("train.num_epochs", "dataset"))
def _epochs(c: ConfigContainer) -> Iterator[str]:
    """Epochs are counted for finite fine-tuning data sets only."""
    if c.value("train.num_epochs") is None:
        return
    if c.kind("dataset") != "GPTSFTDatasetConfig":
        yield f"train.num_epochs is for GPTSFTDatasetConfig, not for {c.kind('dataset')}; write train_iters"
    if c.value("dataset.dataloader_type") != "batch":
        yield 'train.num_epochs needs dataset.dataloader_type = "batch"'


# --- datasets and packing ---------------------------------------------------------------------------------------------
_SFT = frozenset({"GPTSFTDatasetConfig", "DirectHFSFTDatasetConfig", "EnergonDatasetConfig", "MockVLMSFTDatasetConfig"})
_COLLATED = _SFT - {"GPTSFTDatasetConfig"}


@rule("container-packing", VALIDATE, ("dataset", "train.micro_batch_size"))
def _packing(c: ConfigContainer) -> Iterator[str]:
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


@rule("container-padded-packing", VALIDATE, ("dataset", "model.cuda_graph_impl"))
def _padded_packing(c: ConfigContainer) -> Iterator[str]:
    """A captured graph needs inputs of one shape, so packed sequences must be padded to it."""
    if c.value("dataset.offline_packing_specs") is None:
        return
    padded = c.is_on("dataset.pad_to_max_length") or c.is_on("dataset.dataset_kwargs.pad_to_max_length")
    lengths = c.is_on("dataset.offline_packing_specs.pad_cu_seqlens")
    if lengths and not padded:
        yield "offline_packing_specs.pad_cu_seqlens needs dataset.pad_to_max_length = true"
    modules = c.captured_modules
    per_layer = c.value("model.cuda_graph_impl") == "transformer_engine"
    whole = c.captures_iteration
    if (whole or per_layer) and not padded:
        yield "CUDA graphs with offline packing need dataset.pad_to_max_length = true"
    if (whole or (per_layer and (not modules or "attn" in modules))) and not lengths:
        yield "CUDA graphs of packed attention need offline_packing_specs.pad_cu_seqlens = true"


@rule("container-energon", VALIDATE, ("dataset", "train", "model", "ddp"))
def _energon(c: ConfigContainer) -> Iterator[str]:
    """Energon packs sequences in the loader, which the rest of the configuration must match."""
    if c.kind("dataset") != "EnergonDatasetConfig":
        return
    micro, evaluated = c.integer("train.micro_batch_size"), c.integer("validation.eval_micro_batch_size")
    loaded, written = c.integer("dataset.micro_batch_size"), c.value("dataset.micro_batch_size")
    if loaded != micro:
        yield f"dataset.micro_batch_size {written} and train.micro_batch_size {micro} differ; write the same"
    if evaluated is not None and c.is_on("dataset.do_validation") and evaluated != loaded:
        yield f"dataset.micro_batch_size {written} and eval_micro_batch_size {evaluated} differ; write the same"
    if c.value("dataset.packing_buffer_size") is None:
        return
    broken = {
        f"train.micro_batch_size 1, not {micro}": micro != 1,
        "model.calculate_per_token_loss = true": not c.is_on("model.calculate_per_token_loss"),
        "ddp.average_in_collective = false": c.is_on("ddp.average_in_collective"),
        "no multi-token prediction": c.is_on("model.mtp_num_layers"),
        "no CUDA graphs": c.captures_graphs or c.value("model.vision_cuda_graph_impl") not in (None, "none"),
        "no model.dist_train": c.is_on("model.dist_train.use_dist_train"),
        "pipeline_model_parallel_size 1": c.size("pipeline_model_parallel_size") > 1,
    }
    yield from (f"Energon's own packing needs {need}" for need, is_broken in broken.items() if is_broken)


@rule("container-collate-padding", VALIDATE, ("dataset.seq_length", *SIZES))
def _collate_padding(c: ConfigContainer) -> Iterator[str]:
    """Batches are padded to this multiple, so that every rank gets equal parts."""
    length = c.integer("dataset.seq_length")
    if c.kind("dataset") not in _COLLATED or not length:
        return
    contexts = {c.size("context_parallel_size"), c.integer("dist.eval_context_parallel_size") or 1}
    tensor = c.size("tensor_model_parallel_size") if c.is_on("model.sequence_parallel") else 1
    parts = [2 * size if size > 1 else 1 for size in contexts]
    multiple = math.lcm(*parts, *(size * tensor for size in contexts if tensor > 1))
    if length % multiple:
        yield f"dataset.seq_length {length} is not a multiple of {multiple}, which context and sequence parallel need"


@rule("container-data-switches", VALIDATE, ("dataset",))
def _data_switches(c: ConfigContainer) -> Iterator[str]:
    """The data set treats an unset switch as an error, since each choice changes the loss."""
    if c.kind("dataset") not in ("GPTDatasetConfig", "GPTFIMDatasetConfig", "MockGPTDatasetConfig"):
        return
    dataset = c.value("dataset")
    for name in ("reset_position_ids", "reset_attention_mask", "eod_mask_loss"):
        if isinstance(dataset, Mapping) and name in dataset and dataset[name] is None:
            yield f"dataset.{name} must be true or false"


# --- sequences and context parallelism --------------------------------------------------------------------------------


@rule("container-sequence-length", VALIDATE, ("model.seq_length", "dataset.seq_length"))
def _sequence_lengths(c: ConfigContainer) -> Iterator[str]:
    """The model would be built for other sequences than the data set yields."""
    model, data = c.integer("model.seq_length"), c.integer("dataset.seq_length")
    if c.kind("dataset") in {*_SFT, "GPTDatasetConfig"} and model != data:
        yield f"model.seq_length {model} and dataset.seq_length {data} differ; write the same"


@rule("container-context-length", VALIDATE, ("model.seq_length", "model.context_parallel_size"))
def _context_length(c: ConfigContainer) -> Iterator[str]:
    """Context parallelism cuts a sequence into two pieces for each rank, to balance causal attention."""
    context, length = c.size("context_parallel_size"), c.integer("model.seq_length")
    if context > 1 and length and length % (2 * context):
        yield f"model.seq_length {length} is not a multiple of 2 * context_parallel_size = {2 * context}; change one"


@rule("container-context-communication", VALIDATE, ("model.cp_comm_type", "model.context_parallel_size"))
def _context_communication(c: ConfigContainer) -> Iterator[str]:
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


@rule("container-context-loss", VALIDATE, ("model.calculate_per_token_loss", "ddp"))
def _context_loss(c: ConfigContainer) -> Iterator[str]:
    """Ranks see different numbers of tokens, and an average of averages weighs them wrongly."""
    averages, is_per_token = c.is_on("ddp.average_in_collective"), c.is_on("model.calculate_per_token_loss")
    if c.size("context_parallel_size") <= 1 or c.kind("dataset") not in _SFT:
        if averages and is_per_token and not (uses_fsdp(c) or c.is_on("dist.use_torch_fsdp2")):
            yield "model.calculate_per_token_loss needs ddp.average_in_collective = false"
        return
    if not is_per_token:
        yield "fine-tuning with context_parallel_size > 1 needs model.calculate_per_token_loss = true"
    if averages:
        yield "fine-tuning with context_parallel_size > 1 needs ddp.average_in_collective = false"


# --- the learning-rate schedule ---------------------------------------------------------------------------------------


def _written(c: ConfigContainer, *names: str) -> list[str]:
    """Those of the scheduler's fields that are written; a warm-up of none is not."""
    values = {name: c.value(f"scheduler.{name}") for name in names}
    return [name for name, value in values.items() if (value if "warmup" in name else value is not None)]


@rule("container-learning-rate", SCHEDULER, (*RATES, "scheduler.lr_warmup_init"))
def _learning_rate(c: ConfigContainer) -> Iterator[str]:
    """The learning rate falls from one to the other, and the scheduler asserts both as the job starts."""
    highest, lowest = c.number("optimizer.lr"), c.number("optimizer.min_lr")
    for path, rate in zip(RATES, (highest, lowest), strict=True):
        if rate is not None and rate < 0:
            yield f"{path} {rate} must not be negative"
    if highest is not None and lowest is not None and 0 <= highest < lowest:
        yield f"optimizer.min_lr {lowest} is more than optimizer.lr {highest}; change one"
    first = c.number("scheduler.lr_warmup_init")
    if highest is not None and first is not None and first > highest >= 0:
        yield f"scheduler.lr_warmup_init {first} is more than optimizer.lr {highest}; change one"


@rule("container-schedule-mode", VALIDATE, SCHEDULE)
def _schedule_mode(c: ConfigContainer) -> Iterator[str]:
    """A schedule counts iterations or samples, as training does."""
    mode, warmup = "iterations", "lr_warmup_iters"
    foreign = ["lr_decay_samples", "lr_warmup_samples"]
    if c.value("train.train_samples") is not None:
        mode, warmup = "samples", "lr_warmup_samples"
        foreign = ["max_steps", "lr_decay_iters", "lr_warmup_iters"]
    for name in _written(c, *foreign):
        yield f"scheduler.{name} does not go with training by {mode}; remove it"
    if c.value("scheduler.lr_warmup_fraction") is not None and _written(c, warmup):
        yield f"scheduler.lr_warmup_fraction and {warmup} are both set; keep one"


@rule("container-schedule-mixed", VALIDATE, ("scheduler",))
def _schedule_mixed(c: ConfigContainer) -> Iterator[str]:
    """A schedule counts iterations or samples, not both."""
    iterations, samples = (
        _written(c, f"lr_decay_{unit}", f"lr_wsd_decay_{unit}", f"lr_warmup_{unit}") for unit in ("iters", "samples")
    )
    if iterations and samples:
        yield f"scheduler counts iterations and samples: {', '.join(iterations + samples)}; keep those of one kind"
    scheduler = c.value("scheduler")
    for name in ("lr_warmup_iters", "lr_warmup_samples"):
        if isinstance(scheduler, Mapping) and scheduler.get(name, 0) is None:
            yield f"scheduler.{name} must be a number; write 0 for no warm-up"


@rule("container-weight-decay", VALIDATE, ("scheduler",))
def _weight_decay(c: ConfigContainer) -> Iterator[str]:
    """The scheduler raises the weight decay from a start to an end and cannot lower it."""
    start, end = c.number("scheduler.start_weight_decay"), c.number("scheduler.end_weight_decay")
    if start is None:
        return
    if start < 0:
        yield f"scheduler.start_weight_decay {start:g} must not be negative"
    if end is None or end < start:
        shown = "not set" if end is None else f"{end:g}"
        yield f"scheduler.end_weight_decay is {shown}, and start_weight_decay is {start:g}; it may only grow"
    elif start != end and c.value("scheduler.weight_decay_incr_style") == "constant":
        yield (
            f"scheduler.weight_decay_incr_style constant excludes start_weight_decay {start:g} and end_weight_decay "
            f"{end:g}; write linear or cosine, or the same"
        )


@rule("container-schedule-length", VALIDATE, SCHEDULE)
def _schedule_length(c: ConfigContainer) -> Iterator[str]:
    """A schedule that ends before training, or has no length, leaves the last steps without a learning rate."""
    longest, iterations = c.integer("scheduler.max_steps"), c.integer("train.train_iters")
    if longest is not None and longest <= 0:
        yield f"scheduler.max_steps {longest} must be positive"
    elif longest is not None and iterations is not None and longest < iterations:
        yield f"scheduler.max_steps {longest} is less than train.train_iters {iterations}; raise it"
    lengths = ("scheduler.lr_decay_samples", "scheduler.lr_decay_iters", "train.train_iters")
    name, decay = next(((name, length) for name in lengths if (length := c.integer(name)) is not None), ("", 1))
    if longest is None and iterations != 0 and decay <= 0:
        yield f"{name} {decay}: the learning rate needs at least one step to decay"


@rule("container-long-warmup", UNCHECKED, SCHEDULE, "warning")
def _long_warmup(c: ConfigContainer) -> Iterator[str]:
    """Megatron-Bridge truncates the warm-up with a warning that is easily missed."""
    unit = "samples" if c.value("train.train_samples") is not None else "iters"
    warmup = c.integer(f"scheduler.lr_warmup_{unit}") or 0
    decay = (
        c.integer("scheduler.max_steps") or c.integer(f"scheduler.lr_decay_{unit}") or c.integer(f"train.train_{unit}")
    )
    if decay and warmup >= decay:
        yield f"the warm-up of {warmup} {unit} is as long as the decay of {decay}, and is truncated; shorten it"


@rule("container-schedule-override", VALIDATE, ("scheduler",))
def _schedule_override(c: ConfigContainer) -> Iterator[str]:
    """The scheduler's state comes from the configuration or from the checkpoint."""
    if c.is_on("scheduler.override_opt_param_scheduler") and c.is_on("scheduler.use_checkpoint_opt_param_scheduler"):
        yield "scheduler takes its values from the checkpoint and overrides them; switch one off"


# --- checkpoints ------------------------------------------------------------------------------------------------------
_DISTRIBUTED_FORMATS = ("torch_dist", "fsdp_dtensor")
_EXPORT_SOURCES = ("checkpoint.hf_source_path", "model.hf_model_id", "tokenizer.tokenizer_model")


@rule("container-checkpoint-format", VALIDATE, ("checkpoint", "dist", "ddp"))
def _checkpoint_format(c: ConfigContainer) -> Iterator[str]:
    """Each checkpoint format is written by one kind of sharding."""
    form = c.value("checkpoint.ckpt_format")
    used = c.value("checkpoint.save") is not None or c.value("checkpoint.load") is not None
    if used and form == "fsdp_dtensor" and (not uses_fsdp(c) or c.is_on("dist.use_torch_fsdp2")):
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


@rule("container-seed", UNCHECKED, ("rng.seed",))
def _seed(c: ConfigContainer) -> Iterator[str]:
    """The job asserts a positive one before it seeds its random numbers."""
    seed = c.integer("rng.seed")
    if seed is not None and seed < 1:
        yield f"rng.seed {seed} must be at least 1"


@rule("container-intervals", UNCHECKED, ("checkpoint.save_interval", "dataset.num_workers"))
def _intervals(c: ConfigContainer) -> Iterator[str]:
    """It fails at the first save, or in the first worker of the loader."""
    interval = c.integer("checkpoint.save_interval")
    if interval is not None and interval < 1:
        yield f"checkpoint.save_interval {interval} must be at least 1; write null to save none"
    workers = c.integer("dataset.num_workers")
    if workers is not None and workers < 0:
        yield f"dataset.num_workers {workers} must not be negative"


# --- profiles and logs ------------------------------------------------------------------------------------------------


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
