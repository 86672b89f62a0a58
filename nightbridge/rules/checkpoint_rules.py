"""Checkpoints: whether what a test saves and stores has room, and whether it starts from another run's."""

from collections.abc import Iterator

from nightbridge.launch.resources import oversized_checkpoint, parameters_of, resumed_from, trains_adapters
from nightbridge.models import HarvestPolicy
from nightbridge.rules.rule import RuleContext, cmd_args, rule

_NIGHTS = "nightbridge: what a night stores and compares"

_SIZE_FIELDS = cmd_args(
    "model_recipe_name task optimizer_type hidden_size num_layers num_moe_experts first_k_dense_replace"
)


@rule("checkpoint-size", _NIGHTS, (*_SIZE_FIELDS, "harvest"))
def _size(run: RuleContext) -> Iterator[str]:
    """A checkpoint with optimiser state is 14 bytes or more for each parameter, and every night stores one."""
    if run.test.harvest.checkpoint != "none" and (size := oversized_checkpoint(run.test)):
        yield f'{size}; write harvest.checkpoint = "none", or a larger max_checkpoint_bytes'


@rule("checkpoint-size-unknown", _NIGHTS, (*_SIZE_FIELDS, "harvest"), "warning")
def _size_unknown(run: RuleContext) -> Iterator[str]:
    """A checkpoint whose size nobody has estimated may fill the file system of the cluster."""
    harvest = run.test.harvest
    is_written = harvest.checkpoint == "none" or harvest.max_checkpoint_bytes != HarvestPolicy().max_checkpoint_bytes
    if not is_written and not trains_adapters(run.test) and parameters_of(run.test) is None:
        yield (
            f"cannot tell the size of a checkpoint of {run.args.get('model_recipe_name')} from this configuration; "
            'write harvest.checkpoint = "none", or in harvest.max_checkpoint_bytes how large it may be'
        )


@rule("checkpoint-interval", _NIGHTS, cmd_args("save_interval"), "warning")
def _interval(run: RuleContext) -> Iterator[str]:
    """A policy for several checkpoints means nothing where only one is written."""
    kept = run.test.harvest.checkpoint
    if kept not in ("none", "last") and not run.args.get("save_interval"):
        yield (
            f"harvest.checkpoint is {kept!r}, and without save_interval the run saves once, at its end; "
            "write cmd_args.save_interval"
        )


@rule("resumes", _NIGHTS, (*cmd_args("load_dir"), "extra_cmd_args"), "warning")
def resumes(run: RuleContext) -> Iterator[str]:
    """A run that resumes from a checkpoint trains other steps than one that starts from scratch; it is no baseline."""
    if path := resumed_from(run.test):
        yield (
            f"the run resumes from {path}, where another one ended, so it cannot be a baseline; "
            "remove cmd_args.load_dir, or the override checkpoint.load, for a run that starts from scratch"
        )
