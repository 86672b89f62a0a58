"""What the launcher cannot do without, what it takes and the job refuses, or nothing reads, and what a night lacks."""

import re
from collections.abc import Iterator, Mapping
from difflib import get_close_matches

from nightbridge.launch.flags import items_of
from nightbridge.launch.launch_plan import RECIPE_STEPS, profiled_steps, profiling_window
from nightbridge.launch.versions import V0_4_0, V0_5_0, V0_6_0, Version, is_release
from nightbridge.models.series import DEFAULT_NUM_GPUS, DEFAULTS
from nightbridge.rules.config_container_training import SCHEDULER
from nightbridge.rules.rule import OLDEST, PERFORMANCE_ONLY, RuleContext, cmd_args, is_local, overrides_of, rule

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


MEGATRON_CORE = "Megatron-Core: transformer_config.py, from b0cc2706 (v0.3.0) to 2a75ac12 (main of August 2026)"
_RECIPES = "Megatron-Bridge: scripts/performance/run_recipe.py, from 21b02e0c (v0.3.0) to 067f987d (main)"
_DIFFUSION = ("flux", "wan")
"""Families whose library recipes keep their own data set, whatever the flags say."""


@rule("data-recipes", _RECIPES, (*cmd_args("data use_recipes model_family_name"), "git_repos"))
def _data_recipes(run: RuleContext) -> Iterator[str]:
    """The launcher takes C4 for every recipe, and the job of a library recipe ends with an unknown data set."""
    is_read = run.args.get("model_family_name") not in _DIFFUSION and has_nvidias_launcher(run)
    if run.args.get("use_recipes") and run.args.get("data") == "c4" and is_read:
        yield "cmd_args.data = 'c4' is for performance recipes; remove use_recipes, or use mock, rp2 or squad"


_SCRIPTS = (
    "Megatron-Bridge: run_script.py, run_recipe.py and utils/overrides.py of scripts/performance, "
    "from 21b02e0c (v0.3.0) to 067f987d (main of August 2026)"
)

_LIBRARY_ONLY: Mapping[str, str] = {
    "lr": "optimizer.lr",
    "min_lr": "optimizer.min_lr",
    "warmup_iters": "scheduler.lr_warmup_iters",
    "distributed_timeout_minutes": "dist.distributed_timeout_minutes",
    "diffusion_dataset_path": "dataset.path",
}
"""Keys that are read with `use_recipes` alone, each with the override that does the same without it."""

_NEVER_READ: Mapping[str, Version] = {
    **dict.fromkeys(("dataset_name", "packed_sequence"), OLDEST),
    "optimizer_type": V0_6_0,
}
"""Keys that nothing reads from this version on."""

_SOMETIMES_READ = _LIBRARY_ONLY.keys() | PERFORMANCE_ONLY.keys() | _NEVER_READ.keys()


def is_given(value: object) -> bool:
    """Whether a value of `[cmd_args]` sets anything: a switch that is off, and an empty text or list, do not."""
    return value is not None and value is not False and value not in ("", [])


def has_nvidias_launcher(run: RuleContext) -> bool:
    """Whether it is NVIDIA's own scripts that read the flags, as far as a test tells."""
    repository = run.test.megatron_bridge
    return repository.launcher is None and not is_local(repository.url)


def has_performance_recipe(run: RuleContext) -> bool:
    """Whether it is NVIDIA's scripts of performance recipes that lay their flags over the recipe."""
    return not run.args.get("use_recipes") and has_nvidias_launcher(run)


@rule("flag-unread", _SCRIPTS, ("cmd_args", "extra_cmd_args", "git_repos"), "warning")
def _unread(run: RuleContext) -> Iterator[str]:
    """The launcher's parser takes every option, and the recipe's own value trains where nothing reads one."""
    if not has_nvidias_launcher(run):
        return
    args, library = run.args, bool(run.args.get("use_recipes"))
    for field in [name for name in args if name in _SOMETIMES_READ]:
        if not is_given(args[field]) or args[field] == DEFAULTS.get(field):
            continue
        if field in _NEVER_READ and run.version >= _NEVER_READ[field]:
            yield f"cmd_args.{field} has no effect: nothing in this version of Megatron-Bridge reads it; remove it"
        elif field in _LIBRARY_ONLY and not library:
            yield (
                f"cmd_args.{field} has no effect without use_recipes, so the recipe's own value trains; "
                f"write the override {_LIBRARY_ONLY[field]} in its place"
            )
        elif not run.reads(field):
            yield f"cmd_args.{field} has no effect with use_recipes, so the recipe's own value trains; remove it"
    if library and run.version < V0_5_0 and run.test.extra_cmd_args:
        yield "extra_cmd_args has no effect with use_recipes before v0.5.0, which drops all overrides; pin a newer one"
    length = args.get("seq_length")
    if length and not library and run.version < V0_6_0:
        overrides = {key.lstrip("+"): value for key, value in run.test.extra_cmd_args.items()}
        if overrides.get("model.seq_length") != str(length):
            yield (
                f"cmd_args.seq_length = {length} changes the data alone before v0.6.0, and the job ends where the "
                f'model\'s is another; write the override model.seq_length = "{length}" beside it'
            )


@rule("learning-rate", SCHEDULER, (*cmd_args("lr min_lr use_recipes"), "extra_cmd_args"))
def _learning_rate(run: RuleContext) -> Iterator[str]:
    """The learning rate falls from one to the other, and the scheduler asserts both as the job starts."""
    # Only the recipes of the library are given these; of nothing and zero each keeps its own. An override comes last.
    if not run.args.get("use_recipes"):
        return
    if any(path in ("optimizer.lr", "optimizer.min_lr") for _, path, _ in overrides_of(run.test)):
        return
    rates = {field: float(rate) for field in ("lr", "min_lr") if (rate := run.args.get(field))}
    for field, rate in rates.items():
        if rate < 0:
            yield f"cmd_args.{field} = {rate:g} must not be negative"
    if len(rates) == 2 and 0 < rates["lr"] < rates["min_lr"]:
        yield f"min_lr {rates['min_lr']:g} is more than lr {rates['lr']:g}; change one"


_RECOMPUTED = ("core_attn", "moe_act", "layernorm", "mla_up_proj", "mlp", "moe", "shared_experts", "gdn_norm_out")
_RECOMPUTED_ON_BRANCHES = ("mhc", "gdn", "gdp_in_proj", "gdp_qkv")
"""What Megatron-LM's branches main and dev recompute beyond the releases."""


@rule("recompute-known", MEGATRON_CORE, (*cmd_args("recompute_modules use_recipes"), "git_repos"))
def _recompute_known(run: RuleContext) -> Iterator[str]:
    """Megatron-Core asserts the names of the modules as the job starts; the launcher takes every text."""
    pin = run.test.megatron_bridge
    # By the pin: of a checkout only the oldest release is known that has the launcher's flags. What is no release, or
    # has another Megatron-LM, may know more names, such as moe_expert, but hardly one that is nearly a release's.
    is_as_released = is_release(pin.commit) and not pin.submodules and len(run.test.git_repos) < 2
    for module in items_of(run.value("recompute_modules") or ()):
        near = get_close_matches(module.lower(), _RECOMPUTED, n=1, cutoff=0.85)
        if module not in (*_RECOMPUTED, *_RECOMPUTED_ON_BRANCHES) and (near or is_as_released):
            yield f"recompute_modules {module!r} is not a module to recompute; use {', '.join(near or _RECOMPUTED)}"


TIMES = (
    "nightbridge: the steady window of outputs; Megatron-Bridge: training_log() of training/utils/train_utils.py, from "
    "21b02e0c (v0.3.0) to 067f987d (main of August 2026)"
)


@rule("steps-timed", TIMES, (*cmd_args("max_steps use_recipes"), "extra_cmd_args", "git_repos"))
def _steps_timed(run: RuleContext) -> Iterator[str]:
    """A step time is the mean of an interval, and a night of one mean fails for the steps without."""
    if run.args.get("use_recipes") and run.version < V0_5_0:  # which drops all overrides
        return
    for key, path, value in overrides_of(run.test):
        if path == "logger.log_interval" and value is not None and re.fullmatch(r"-?[0-9]{1,18}", value.strip()):
            yield from untimed_steps(run, f"extra_cmd_args: {key!r}", int(value))


_PROFILING = "Megatron-Bridge: ProfilingConfig in training/config.py at 067f987d (main)"


@rule("one-profiler", _PROFILING, cmd_args("enable_nsys pytorch_profiler"))
def _one_profiler(run: RuleContext) -> Iterator[str]:
    """Two profilers slow each other down, and the launcher passes only one of them on."""
    if run.args.get("enable_nsys") and run.args.get("pytorch_profiler"):
        yield "enable_nsys and pytorch_profiler are both on, and the launcher takes one of them; switch one off"


@rule(
    "profiling-window",
    _PROFILING,
    cmd_args("profiling_start_step profiling_stop_step max_steps enable_nsys pytorch_profiler"),
)
def _window(run: RuleContext) -> Iterator[str]:
    """A window outside the run profiles nothing and ends without a message."""
    if not (run.args.get("enable_nsys") or run.args.get("pytorch_profiler")):
        return
    start, stop = profiling_window(run.args)
    steps = run.test.max_steps or RECIPE_STEPS
    if not 0 <= start < stop <= steps:
        yield (
            f"the profiling window {start} to {stop} is not inside the run's {steps} steps; "
            "choose 0 <= profiling_start_step < profiling_stop_step <= max_steps"
        )


_PROFILED = (
    "nightbridge: the steady window of outputs; Megatron-Bridge: handle_profiling_step() of training/profiling.py at "
    "067f987d (main of August 2026)"
)


@rule(
    "steps-unprofiled",
    _PROFILED,
    (*cmd_args("profiling_start_step profiling_stop_step max_steps enable_nsys pytorch_profiler load_dir"), "gate"),
    "warning",
)
def _steps_unprofiled(run: RuleContext) -> Iterator[str]:
    """A profiler slows the steps of its window, which no statistic uses; a night without any other step fails."""
    profiled, gate, steps = profiled_steps(run.args), run.test.gate, run.test.max_steps or RECIPE_STEPS
    if profiled is None or run.args.get("load_dir"):  # of a run that resumes the first step is not known
        return
    warmup = gate.warmup_of(steps)
    if profiled.first <= warmup + 1 and profiled.last + gate.post_profiling_steps >= steps:
        yield (
            f"a profiler slows every step after the warm-up of {warmup}, so every night would fail for missing step "
            f"times; leave some of the {steps} steps out of its window, or profile in a run beside the nights"
        )


def untimed_steps(run: RuleContext, name: str, interval: int) -> Iterator[str]:
    """What is wrong with an interval of the log, in steps, that is written under this name."""
    steps = run.test.max_steps or RECIPE_STEPS
    if interval < 1:
        yield f"{name} = {interval} must be at least 1: the job fails in its first step; remove it"
    elif interval > 1 and steps > 2 and steps // interval < 2:
        yield (
            f"{name} = {interval} logs {'one time' if interval <= steps else 'no time'} in {steps} steps, so every "
            f"night would fail for missing step times; write at most {steps // 2}, best 1"
        )
