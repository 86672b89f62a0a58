"""The configuration of a run: the recipe, then overrides, then flags, which have the last word."""

from pathlib import Path

import yaml
from megatron.bridge.perf_recipes import load_recipe
from megatron.bridge.training.measurements import read_declaration

# Flag to the places that it sets.
FLAGS = {
    "max_steps": ("train.train_iters", "scheduler.lr_decay_iters"),
    "global_batch_size": ("train.global_batch_size",),
    "micro_batch_size": ("train.micro_batch_size",),
    "seq_length": ("model.seq_length", "dataset.seq_length"),
    "hidden_size": ("model.hidden_size",),
    "num_layers": ("model.num_layers",),
    "num_moe_experts": ("model.num_moe_experts",),
    "pipeline_model_parallel_layout": ("model.pipeline_model_parallel_layout",),
    "tensor_model_parallel_size": ("model.tensor_model_parallel_size",),
    "pipeline_model_parallel_size": ("model.pipeline_model_parallel_size",),
    "context_parallel_size": ("model.context_parallel_size",),
    "expert_model_parallel_size": ("model.expert_model_parallel_size",),
    "expert_tensor_parallel_size": ("model.expert_tensor_parallel_size",),
    "cuda_graph_impl": ("model.cuda_graph_impl",),
    "cuda_graph_scope": ("model.cuda_graph_scope",),
    "recompute_num_layers": ("model.recompute_num_layers",),
    "recompute_modules": ("model.recompute_modules",),
    "lr": ("optimizer.lr",),
    "min_lr": ("optimizer.min_lr",),
    "warmup_iters": ("scheduler.lr_warmup_iters",),
    "distributed_timeout_minutes": ("dist.distributed_timeout_minutes",),
    "save_dir": ("checkpoint.save",),
    "load_dir": ("checkpoint.load",),
    "pretrained_checkpoint": ("checkpoint.pretrained_checkpoint",),
    "save_interval": ("checkpoint.save_interval",),
    "most_recent_k": ("checkpoint.most_recent_k",),
    "tokenizer_type": ("tokenizer.tokenizer_type",),
    "tokenizer_model": ("tokenizer.tokenizer_model",),
    "vocab_size": ("tokenizer.vocab_size",),
    "wandb_project_name": ("logger.wandb_project",),
    "wandb_entity_name": ("logger.wandb_entity",),
    "wandb_experiment_name": ("logger.wandb_exp_name",),
}


def build_config(args, overrides, *, world_size, job_dir):
    """Build the whole configuration as nested tables.

    Raises:
        ValueError: There is no such recipe, an override names nothing, or the sizes do not divide.

    """
    dtype = args.compute_dtype.replace("_", "")
    config = load_recipe(args.model_recipe_name, args.task, args.num_gpus, args.gpu, dtype)
    declared = read_declaration()["recipes"][args.model_recipe_name]
    config["model"] = {
        "recipe": args.model_recipe_name,
        "num_layers": declared["layers"],
        "hidden_size": declared["hidden_size"],
        "num_attention_heads": declared["attention_heads"],
        "kv_channels": declared["hidden_size"] // declared["attention_heads"],
        "num_moe_experts": declared.get("experts"),
        **config["model"],
    }
    for override in overrides:
        apply_override(config, override)
    for flag, places in FLAGS.items():
        value = getattr(args, flag)
        for place in places if value is not None else ():
            _set(config, place, value)
    config["env_vars"]["PRACTICE_GPU"] = args.gpu
    _decide_saving(config, job_dir)
    _check_sizes(config, world_size)
    return config


def apply_override(config, override):
    """Apply one `a.b=c`, `+a.b=c` (may be new) or `~a.b` (remove).

    Raises:
        ValueError: It is none of these, or names a key that does not exist and has no `+`.

    """
    name, equals, value = override.partition("=")
    key = name.lstrip("+~")
    if name.startswith("~"):
        table, last = _find(config, key, override)
        table.pop(last, None)
    elif not equals or name.startswith("-"):
        raise ValueError(f"not an override: {override!r}")
    else:
        table, last = _find(config, key, override)
        if last not in table and not name.startswith("+"):
            raise ValueError(f"could not override {key!r}: there is no such key; write +{key} to add it")
        table[last] = yaml.safe_load(value)


def _find(config, key, override):
    *parents, last = key.split(".")
    table = config
    for parent in parents:
        table = table.get(parent) if isinstance(table, dict) else None
    if not isinstance(table, dict):
        raise ValueError(f"could not apply {override!r}: {'.'.join(parents)} is no table")
    return table, last


def _set(config, place, value):
    table, last = _find(config, place, place)
    table[last] = value


def _decide_saving(config, job_dir):
    """An interval without a folder saves in the job's folder; a folder without an interval saves at the end."""
    checkpoint = config["checkpoint"]
    if checkpoint["save_interval"] and not checkpoint["save"]:
        checkpoint["save"] = str(job_dir / "checkpoints")
    if checkpoint["save"] and not checkpoint["save_interval"]:
        checkpoint["save_interval"] = config["train"]["train_iters"]


def data_parallel_size(config, world_size):
    """How many copies of the model train side by side.

    Raises:
        ValueError: The GPUs do not divide into whole copies.

    """
    model = config["model"]
    copy = model["tensor_model_parallel_size"] * model["pipeline_model_parallel_size"] * model["context_parallel_size"]
    if world_size % copy:
        raise ValueError(f"{world_size} GPUs do not divide into copies of {copy} (TP x PP x CP)")
    return world_size // copy


def _check_sizes(config, world_size):
    train = config["train"]
    step = train["micro_batch_size"] * data_parallel_size(config, world_size)
    if train["global_batch_size"] % step:
        raise ValueError(
            f"global batch size {train['global_batch_size']} is not a multiple of {step} "
            "(micro batch size x data parallel size)"
        )


def write_config(config, path):
    """Write the configuration as YAML, making the folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(config, sort_keys=False), encoding="utf-8")


def as_path(text):
    """A folder of the configuration, or None."""
    return Path(text) if text else None
