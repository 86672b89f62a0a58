"""Whether a run writes checkpoints that are too large for a night, and whether it starts from another run's."""

from collections.abc import Iterator

from nightbridge.launch.run_outputs import (
    bytes_per_parameter,
    parameters_of,
    resumed_from,
    trains_adapters,
)
from nightbridge.models import HarvestPolicy
from nightbridge.rules.context import Facts
from nightbridge.rules.rule import Rule, from_source

_CHOICES = 'write harvest.checkpoint = "none", or in harvest.max_checkpoint_bytes how large it may be'
_DEFAULT_LIMIT = HarvestPolicy().max_checkpoint_bytes


def _size(facts: Facts) -> Iterator[str]:
    """A checkpoint with optimiser state is 14 bytes or more for each parameter, and every night stores one."""
    harvest, recipe = facts.test.harvest, facts.args.get("model_recipe_name")
    if harvest.checkpoint == "none" or trains_adapters(facts.test):
        return
    parameters, each, limit = parameters_of(facts.test), bytes_per_parameter(facts.test), harvest.max_checkpoint_bytes
    if parameters is None:
        if limit == _DEFAULT_LIMIT:
            yield f"cannot tell the size of a checkpoint of {recipe} from this configuration; {_CHOICES}"
    elif (size := parameters * each) > limit:
        yield (
            f"a checkpoint of {recipe} takes about {size / 1e9:,.0f} GB ({parameters / 1e9:g} billion parameters of "
            f"{each} bytes with the optimiser's state), more than harvest.max_checkpoint_bytes, "
            f"{limit / 1e9:,.0f} GB; {_CHOICES}"
        )


def _interval(facts: Facts) -> Iterator[str]:
    """A policy for several checkpoints means nothing where only one is written."""
    kept = facts.test.harvest.checkpoint
    if kept not in ("none", "last") and not facts.args.get("save_interval"):
        yield (
            f"harvest.checkpoint is {kept!r}, and without save_interval the run saves once, at its end; "
            "write cmd_args.save_interval"
        )


def resumes(facts: Facts) -> Iterator[str]:
    """A run that resumes from a checkpoint trains other steps than one that starts from scratch; it is no baseline."""
    if path := resumed_from(facts.test):
        yield (
            f"the run resumes from {path}, where another one ended, so it cannot be a baseline; "
            "remove cmd_args.load_dir, or the override checkpoint.load, for a run that starts from scratch"
        )


RULES = (
    *from_source(
        "nightbridge: what a night stores and compares",
        Rule(
            "checkpoint-size",
            "warning",
            (
                *("cmd_args.model_recipe_name", "cmd_args.task", "cmd_args.optimizer_type", "cmd_args.hidden_size"),
                *("cmd_args.num_layers", "cmd_args.num_moe_experts", "cmd_args.first_k_dense_replace"),
            ),
            _size,
        ),
        Rule("checkpoint-interval", "warning", ("cmd_args.save_interval",), _interval),
        Rule("resumes", "warning", ("cmd_args.load_dir", "extra_cmd_args"), resumes),
    ),
)
