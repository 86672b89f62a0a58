"""What Megatron-Bridge's own check of a configuration accepts although the job then fails or misleads."""

from collections.abc import Iterator

from nightbridge.launch.config_container import SIZES, ConfigContainer
from nightbridge.rules.config_container_training import SCHEDULE
from nightbridge.rules.rule import rule

_UNCHECKED = "Megatron-Core: found by running what validate() lets through"


@rule("container-train-batch", _UNCHECKED, ("train", *SIZES))
def _train_batch(c: ConfigContainer) -> Iterator[str]:
    """The micro-batch calculator fails on it, when training starts."""
    total = c.integer("train.global_batch_size")
    micro = c.integer("train.micro_batch_size")
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


@rule("container-sequence-parallel", _UNCHECKED, ("model.sequence_parallel", "model.tensor_model_parallel_size"))
def _sequence_parallel(c: ConfigContainer) -> Iterator[str]:
    """It silently does nothing, and a comparison would be of two equal runs."""
    if c.is_on("model.sequence_parallel") and c.size("tensor_model_parallel_size") == 1:
        yield "model.sequence_parallel does nothing with tensor_model_parallel_size 1; switch it off"


@rule("container-no-training", _UNCHECKED, ("train.train_iters",))
def _no_training(c: ConfigContainer) -> Iterator[str]:
    """The job succeeds without a step."""
    if c.integer("train.train_iters") == 0:
        yield "train.train_iters is 0: the run would end immediately; write a number of iterations"


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
