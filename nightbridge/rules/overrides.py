"""What Megatron-Bridge accepts of `[extra_cmd_args]`: overrides of its configuration in Hydra's grammar."""

from collections.abc import Iterator

from nightbridge.launch.flags import version_of_ref
from nightbridge.rules.rule import RuleContext, rule

_CLASSES = "Megatron-Bridge: ConfigContainer and the classes that it leads to, of the pinned version"

_KEYS = {
    "train.train_iters": "max_steps",
    "train.global_batch_size": "gb",
    "train.micro_batch_size": "mb",
    "model.tensor_model_parallel_size": "tp",
    "model.pipeline_model_parallel_size": "pp",
    "model.context_parallel_size": "cp",
    "model.virtual_pipeline_model_parallel_size": "vp",
    "model.expert_model_parallel_size": "ep",
    "model.expert_tensor_parallel_size": "et",
    "model.seq_length": "seq_length",
    "model.num_layers": "num_layers",
    "model.hidden_size": "hidden_size",
    "model.cuda_graph_impl": "cuda_graph_impl",
    "checkpoint.save_interval": "save_interval",
    "checkpoint.load": "load_dir",
    "checkpoint.pretrained_checkpoint": "pretrained_checkpoint",
}
"""Fields that the launcher sets from its own flags, after the overrides, each with the key of `[cmd_args]`."""

_DURATIONS = ("train.train_iters", "train.train_samples")


def _overrides(run: RuleContext) -> Iterator[tuple[str, str, str | None]]:
    """Every override as it is written, its path, and its value; None for one that removes the key."""
    for key, value in run.test.extra_cmd_args.items():
        if not key.startswith("-"):  # a flag of a newer launcher
            yield key, key.lstrip("+~"), None if key.startswith("~") else value


def _problems(run: RuleContext) -> Iterator[str]:
    schema = run.config_schema if run.test.extra_cmd_args else None
    if schema is not None:
        for key, path, value in _overrides(run):
            if problem := schema.problem(path, value):
                yield f"extra_cmd_args: {key!r}: {problem}"


def _is_exact(run: RuleContext) -> bool:
    """Whether the classes are the pinned code's own, or of the release that the pin names."""
    return run.checkout is not None or version_of_ref(run.test.megatron_bridge.commit) is not None


@rule("override-known", _CLASSES, ("extra_cmd_args", "git_repos"))
def _known(run: RuleContext) -> Iterator[str]:
    """Hydra ends the job at a name that the configuration does not have, and training at a value of a wrong type."""
    if _is_exact(run):
        yield from _problems(run)


@rule("override-known-later", _CLASSES, ("extra_cmd_args", "git_repos"), "warning")
def _known_later(run: RuleContext) -> Iterator[str]:
    """Fields of a branch or commit are known once it has been fetched; until then, those of a recent main are."""
    if not _is_exact(run):
        yield from _problems(run)


@rule("override-twice", "Megatron-Bridge: scripts/performance/utils/overrides.py", ("extra_cmd_args", "cmd_args"))
def _twice(run: RuleContext) -> Iterator[str]:
    """The launcher lays its own flags over the overrides, and nightbridge plans by the flags."""
    for key, path, _ in _overrides(run):
        field = _KEYS.get(path.replace("model.transformer.", "model."))
        if path in _DURATIONS:
            yield f"extra_cmd_args: {key!r}: a run is watched for cmd_args.max_steps; write the number of steps there"
        elif field in run.args:
            yield f"extra_cmd_args: {key!r}: cmd_args.{field} overrides it; remove one of them"
