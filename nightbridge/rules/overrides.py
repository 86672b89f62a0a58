"""The overrides of `[extra_cmd_args]`, which reach the run as Hydra's `key=value`, and W&B's fields."""

import re
from collections.abc import Iterator

from nightbridge.launch.flags import V0_6_0
from nightbridge.rules.context import Facts
from nightbridge.rules.rule import Rule, from_source

_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_]*(?:\.[A-Za-z0-9_]+)*")
_TRANSFORMER = frozenset(
    {
        *("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"),
        *("virtual_pipeline_model_parallel_size", "expert_model_parallel_size", "expert_tensor_parallel_size"),
        *("num_layers", "hidden_size", "num_moe_experts", "sequence_parallel", "recompute_modules"),
    }
)


def _grammar(facts: Facts) -> Iterator[str]:
    """Hydra refuses other forms when the job starts."""
    for key, value in facts.test.extra_cmd_args.items():
        if key.startswith("-"):
            continue  # a flag of a newer launcher
        removes = key.startswith("~")
        if not _KEY.fullmatch(key.lstrip("+") if not removes else key[1:]) or key.startswith("+++"):
            yield f"extra_cmd_args: {key!r} is not an override; write a.b, +a.b or ~a.b"
        elif not value and not removes:
            yield f'extra_cmd_args: {key!r} has no value, which only ~{key} allows; write one, such as "null"'


def _appends(facts: Facts) -> Iterator[str]:
    """Hydra's + adds any key, and nothing reads one that is misspelt."""
    for key in facts.test.extra_cmd_args:
        if key.startswith("+"):
            yield f"extra_cmd_args: {key!r}: with a +, a misspelt key is silently dropped; check its name"


def _moved(facts: Facts) -> Iterator[str]:
    """Most recipes nest the transformer's fields one level deeper since v0.6.0."""
    for key in facts.test.extra_cmd_args:
        section, _, field = key.lstrip("+~").partition(".")
        if section == "model" and field in _TRANSFORMER:
            yield f"extra_cmd_args: {key!r} is model.transformer.{field} in most recipes of this version; check which"


def _wandb(facts: Facts) -> Iterator[str]:
    """Megatron-Bridge logs to W&B only where project and experiment are both named."""
    named = [field for field in ("wandb_project_name", "wandb_experiment_name") if facts.args.get(field)]
    if "WANDB_API_KEY" in facts.test.secrets and len(named) < 2:
        yield "a W&B key is given, and runs are logged only with both wandb_project_name and wandb_experiment_name"


_EXTRA = ("extra_cmd_args",)

RULES = (
    *from_source(
        "Hydra: the grammar of overrides",
        Rule("override-grammar", "error", _EXTRA, _grammar),
        Rule("override-appends", "warning", _EXTRA, _appends),
    ),
    *from_source(
        "Megatron-Bridge: recipes and logging",
        Rule("override-moved", "warning", _EXTRA, _moved, first=V0_6_0),
        Rule("wandb-together", "warning", ("cmd_args.wandb_project_name", "cmd_args.wandb_experiment_name"), _wandb),
    ),
)
