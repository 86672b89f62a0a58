"""What Megatron-Bridge's own check of a configuration lets through: the job fails on the cluster, or misleads there."""

from collections.abc import Iterator
from dataclasses import replace

from nightbridge.launch.config_container import Container, data_parallel_size
from nightbridge.rules.container_rule import (
    SCHEDULE,
    SIZES,
    ContainerFacts,
    ContainerRule,
    captured_modules,
    dtype_of,
    of,
)


def _train_batch(facts: ContainerFacts) -> Iterator[str]:
    """The micro-batch calculator fails on it, when training starts."""
    total = facts.container.integer("train.global_batch_size")
    micro = facts.container.integer("train.micro_batch_size")
    parallel = data_parallel_size(facts.container, facts.world_size)
    if total and micro and parallel and total % (micro * parallel):
        yield (
            f"global_batch_size {total} is not a multiple of micro_batch_size {micro} * data parallel size {parallel} "
            f"= {micro * parallel}; use {max(total // (micro * parallel), 1) * micro * parallel}"
        )


def _layers(c: Container) -> Iterator[str]:
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


def _heads(c: Container) -> Iterator[str]:
    """Tensor parallelism splits attention by heads."""
    tensor = c.size("tensor_model_parallel_size")
    for name in ("num_attention_heads", "num_query_groups"):
        heads = c.integer(f"model.{name}")
        if heads and heads % tensor and (name == "num_attention_heads" or tensor % heads):
            yield f"model.{name} {heads} is not a multiple of tensor_model_parallel_size {tensor}; change one"


def _experts(c: Container) -> Iterator[str]:
    """Expert parallelism gives each rank the same whole number of experts."""
    experts, parallel = c.integer("model.num_moe_experts"), c.size("expert_model_parallel_size")
    if parallel > 1 and not experts:
        yield f"model.expert_model_parallel_size {parallel} needs a model with experts; write 1"
    elif experts and experts % parallel:
        yield f"model.num_moe_experts {experts} is not a multiple of expert_model_parallel_size {parallel}; change one"


def _pipeline_type(c: Container) -> Iterator[str]:
    """The stages of a pipeline cannot exchange activations of an unknown type."""
    # A recipe of mixed precision that is only named sets the type when the job starts.
    named = isinstance(c.value("mixed_precision"), str)
    known = named or dtype_of(c, "model.pipeline_dtype") or dtype_of(c, "mixed_precision.pipeline_dtype")
    if c.size("pipeline_model_parallel_size") > 1 and not known:
        yield "a pipeline needs the dtype of the tensors between its stages: write model.pipeline_dtype"


def _recompute(c: Container) -> Iterator[str]:
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


def _captured(c: Container) -> Iterator[str]:
    """Megatron-Core fails on it, when graphs are captured."""
    if c.value("model.cuda_graph_impl") != "transformer_engine":
        return
    modules = set(captured_modules(c))
    if {"moe", "moe_router"} <= modules:
        yield "CUDA graphs of moe and of moe_router exclude each other; keep one"
    if "moe_preprocess" in modules and "moe_router" not in modules:
        yield "a CUDA graph of moe_preprocess needs moe_router beside it"


def _sequence_parallel(c: Container) -> Iterator[str]:
    """It silently does nothing, and a comparison would be of two equal runs."""
    if c.is_on("model.sequence_parallel") and c.size("tensor_model_parallel_size") == 1:
        yield "model.sequence_parallel does nothing with tensor_model_parallel_size 1; switch it off"


def _no_training(c: Container) -> Iterator[str]:
    """The job succeeds without a step."""
    if c.integer("train.train_iters") == 0:
        yield "train.train_iters is 0: the run would end immediately; write a number of iterations"


def _intervals(c: Container) -> Iterator[str]:
    """It fails at the first save, or in the first worker of the loader."""
    interval = c.integer("checkpoint.save_interval")
    if interval is not None and interval < 1:
        yield f"checkpoint.save_interval {interval} must be at least 1; write null to save none"
    workers = c.integer("dataset.num_workers")
    if workers is not None and workers < 0:
        yield f"dataset.num_workers {workers} must not be negative"


def _long_warmup(c: Container) -> Iterator[str]:
    """Megatron-Bridge truncates the warm-up with a warning that is easily missed."""
    unit = "samples" if c.value("train.train_samples") is not None else "iters"
    warmup = c.integer(f"scheduler.lr_warmup_{unit}") or 0
    decay = (
        c.integer("scheduler.max_steps") or c.integer(f"scheduler.lr_decay_{unit}") or c.integer(f"train.train_{unit}")
    )
    if decay and warmup >= decay:
        yield f"the warm-up of {warmup} {unit} is as long as the decay of {decay}, and is truncated; shorten it"


_SOURCE = "Megatron-Core: found by running what validate() lets through"

MISSED: tuple[ContainerRule, ...] = tuple(
    replace(rule, source=_SOURCE)
    for rule in (
        ContainerRule("container-train-batch", ("train", *SIZES), _train_batch),
        ContainerRule("container-layers", ("model.num_layers", SIZES[1]), of(_layers)),
        ContainerRule("container-heads", ("model.num_attention_heads", SIZES[0]), of(_heads)),
        ContainerRule("container-experts", ("model.num_moe_experts", "model.expert_model_parallel_size"), of(_experts)),
        ContainerRule("container-pipeline-type", ("model.pipeline_dtype", SIZES[1]), of(_pipeline_type)),
        ContainerRule("container-recompute", ("model.recompute_granularity", "model.recompute_method"), of(_recompute)),
        ContainerRule("container-captured", ("model.cuda_graph_modules", "model.cuda_graph_impl"), of(_captured)),
        ContainerRule("container-sequence-parallel", ("model.sequence_parallel", SIZES[0]), of(_sequence_parallel)),
        ContainerRule("container-no-training", ("train.train_iters",), of(_no_training)),
        ContainerRule("container-intervals", ("checkpoint.save_interval", "dataset.num_workers"), of(_intervals)),
        ContainerRule("container-long-warmup", SCHEDULE, of(_long_warmup), "warning"),
    )
)
"""What Megatron-Bridge's `validate()` lets through, and fails or misleads only on the cluster."""
