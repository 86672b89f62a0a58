"""What the launcher cannot do without."""

from collections.abc import Iterator

from nightbridge.launch.flags import V0_4_0
from nightbridge.launch.resources import DEFAULT_NUM_GPUS
from nightbridge.rules.context import Facts
from nightbridge.rules.rule import Rule, from_source

_REQUIRED = ("model_family_name", "model_recipe_name", "gpu_type")


def _required_fields(facts: Facts) -> Iterator[str]:
    """The launcher's argument parser requires these options and exits without them."""
    for field in _REQUIRED:
        if not facts.args.get(field):
            yield f"cmd_args.{field} is required: the launcher does not start without it; write it"


def _num_gpus(facts: Facts) -> Iterator[str]:
    """A number of GPUs that only the launcher knows makes two nights look comparable that are not."""
    if "num_gpus" not in facts.args:
        yield f"cmd_args.num_gpus is not written: {DEFAULT_NUM_GPUS} are used, as CloudAI does; write the number"


def _returns_early(facts: Facts) -> Iterator[str]:
    """With these switches the launcher returns, or waits for an answer, without submitting a job."""
    if facts.args.get("dryrun"):
        yield "cmd_args.dryrun = true submits no job; remove it, and use `nightbridge render` to see what would start"
    if facts.args.get("list_config_variants"):
        yield "cmd_args.list_config_variants = true prompts for input; remove it, and name one with config_variant"


def _steps(facts: Facts) -> Iterator[str]:
    """A library recipe trains for its own number of steps, usually days."""
    if facts.test.max_steps is None and facts.args.get("use_recipes"):
        yield "cmd_args.use_recipes = true needs max_steps: the library recipe would train to its own end; write it"


def _tokenizer(facts: Facts) -> Iterator[str]:
    """For these recipes the launcher wants a token on its command line, where every user of the host sees it."""
    names = (facts.args.get("model_family_name"), facts.args.get("model_recipe_name"))
    recipes = {("qwen3", "qwen3_30b_a3b"), ("qwen3", "qwen3_235b_a22b")}
    if names in recipes and facts.args.get("task", "pretrain") == "pretrain" and not facts.args.get("offline"):
        yield (
            f"the launcher refuses {names[1]} of family qwen3 without a token on its command line, where "
            "nightbridge puts none; write offline = true and fill the Hugging Face cache, or use family qwen"
        )


RULES = (
    *from_source(
        "Megatron-Bridge: scripts/performance/setup_experiment.py and its argument parser",
        Rule("required-fields", "error", tuple(f"cmd_args.{field}" for field in _REQUIRED), _required_fields),
        Rule("num-gpus-default", "warning", ("cmd_args.num_gpus",), _num_gpus),
        Rule("launcher-returns-early", "error", ("cmd_args.dryrun", "cmd_args.list_config_variants"), _returns_early),
        Rule("recipe-steps", "error", ("cmd_args.max_steps", "cmd_args.use_recipes"), _steps),
        Rule(
            "qwen3-tokenizer",
            "error",
            tuple(f"cmd_args.{field}" for field in ("model_family_name", "model_recipe_name", "task", "offline")),
            _tokenizer,
            first=V0_4_0,
        ),
    ),
)
