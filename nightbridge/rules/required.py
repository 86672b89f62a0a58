"""What the launcher cannot do without."""

from collections.abc import Iterator, Mapping

from nightbridge.launch.flags import V0_4_0
from nightbridge.models.series import DEFAULT_NUM_GPUS
from nightbridge.rules.rule import RuleContext, cmd_args, rule

_SUBMISSION = "Megatron-Bridge: setup_experiment.py and argument_parser.py of scripts/performance at 067f987d (main)"

_REQUIRED = ("model_family_name", "model_recipe_name", "gpu_type")


@rule("required-fields", _SUBMISSION, cmd_args(*_REQUIRED))
def _required_fields(run: RuleContext) -> Iterator[str]:
    """The launcher's argument parser requires these options and exits without them."""
    for field in _REQUIRED:
        if not run.args.get(field):
            yield f"cmd_args.{field} is required: the launcher does not start without it; write it"


@rule("num-gpus-default", _SUBMISSION, cmd_args("num_gpus"), "warning")
def _num_gpus(run: RuleContext) -> Iterator[str]:
    """A number of GPUs that only the launcher knows makes two nights look comparable that are not."""
    if "num_gpus" not in run.args:
        yield f"cmd_args.num_gpus is not written: {DEFAULT_NUM_GPUS} are used, as CloudAI does; write the number"


@rule("launcher-returns-early", _SUBMISSION, cmd_args("dryrun list_config_variants"))
def _returns_early(run: RuleContext) -> Iterator[str]:
    """With these switches the launcher returns, or waits for an answer, without submitting a job."""
    if run.args.get("dryrun"):
        yield "cmd_args.dryrun = true submits no job; remove it, and use `nightbridge render` to see what would start"
    if run.args.get("list_config_variants"):
        yield "cmd_args.list_config_variants = true prompts for input; remove it, and name one with config_variant"


@rule("recipe-steps", _SUBMISSION, cmd_args("max_steps use_recipes"))
def _steps(run: RuleContext) -> Iterator[str]:
    """A library recipe trains for its own number of steps, usually days."""
    if run.test.max_steps is None and run.args.get("use_recipes"):
        yield "cmd_args.use_recipes = true needs max_steps: the library recipe would train to its own end; write it"


_NEEDED: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "data": {
        "rp2": ("dataset_paths", "index_mapping_dir"),
        "c4": ("c4_root",),
        "squad": ("dataset_root",),
        "squad_packed": ("dataset_root",),
    },
    "tokenizer_type": {"HuggingFaceTokenizer": ("tokenizer_model",), "SentencePieceTokenizer": ("tokenizer_model",)},
}
"""Keys that a value of another key cannot do without, the same in every release."""

_OVERRIDES = "Megatron-Bridge: scripts/performance/utils/overrides.py at 067f987d (main)"


@rule(
    "data-needs", _OVERRIDES, cmd_args(*_NEEDED, "dataset_paths index_mapping_dir c4_root dataset_root tokenizer_model")
)
def _data_needs(run: RuleContext) -> Iterator[str]:
    """The job ends with an error as soon as it starts, after the wait in the queue."""
    for field, values in _NEEDED.items():
        for needed in values.get(str(run.args.get(field)), ()):
            if not run.args.get(needed):
                yield f"cmd_args.{field} = {run.args[field]!r} needs cmd_args.{needed}; write it"


@rule("qwen3-tokenizer", _SUBMISSION, cmd_args("model_family_name model_recipe_name task offline"), first=V0_4_0)
def _tokenizer(run: RuleContext) -> Iterator[str]:
    """For these recipes the launcher wants a token on its command line, where every user of the host sees it."""
    names = (run.args.get("model_family_name"), run.args.get("model_recipe_name"))
    recipes = {("qwen3", "qwen3_30b_a3b"), ("qwen3", "qwen3_235b_a22b")}
    if names in recipes and run.args.get("task", "pretrain") == "pretrain" and not run.args.get("offline"):
        yield (
            f"the launcher refuses {names[1]} of family qwen3 without a token on its command line, where "
            "nightbridge puts none; write offline = true and fill the Hugging Face cache, or use family qwen"
        )
