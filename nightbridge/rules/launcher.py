"""What the pinned launcher, its recipe and its configuration need and accept, and whether what a run saves has room.

Recipes are found by reading the pinned code: importing it would need torch and a GPU.
"""

import re
from collections.abc import Iterator
from difflib import get_close_matches
from functools import lru_cache
from pathlib import Path

from nightbridge.launch.config_schema import ConfigSchema, unreadable
from nightbridge.launch.flags import SPELLINGS, text_of
from nightbridge.launch.launch_plan import WANDB, unknown_flags, unsafe_values, wandb_text, wrong_choices
from nightbridge.launch.parser_source import launcher_of
from nightbridge.launch.resources import oversized_checkpoint, parameters_of, resumed_from, trains_adapters
from nightbridge.launch.shipped import pinned_recipes, released_recipes
from nightbridge.launch.versions import RELEASES, V0_6_0, Version, is_release, version_of_ref
from nightbridge.models import HarvestPolicy
from nightbridge.models.series import DEFAULTS
from nightbridge.rules.cloudai import DEEPSEEK_STAGES
from nightbridge.rules.megatron_core import EXPERTS
from nightbridge.rules.required import has_performance_recipe, is_given
from nightbridge.rules.rule import (
    SIZE_OVERRIDES,
    UPSTREAM,
    RuleContext,
    cmd_args,
    is_local,
    overrides_of,
    pinned_schema,
    rule,
)

# --- checkpoints ------------------------------------------------------------------------------------------------------

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


# --- flags and recipes ------------------------------------------------------------------------------------------------

_PARSER = "Megatron-Bridge: scripts/performance/argument_parser.py at the pinned commit"


@rule("flag-exists", _PARSER, ("cmd_args", "git_repos"), alone=True)
def _flag_exists(run: RuleContext) -> Iterator[str]:
    """The launcher's parser exits on an option that its version does not have."""
    return unknown_flags(run.test, run.known)


_ELSEWHERE = {
    "account": "is the site's; write it in its file or block",
    "partition": "is the site's; write it in its file or block",
    "time_limit": "is the test's time_limit; write it there",
    "custom_mounts": "is the test's extra_container_mounts; write it there",
    **dict.fromkeys(("detach", "packager"), "is decided by nightbridge, which watches the job; remove it"),
    **dict.fromkeys(("dryrun", "list_config_variants"), "ends the launcher before it submits a job; remove it"),
}
"""What to do about a flag, by its field, that is not written as a key of `[cmd_args]`."""

_OTHERS = {
    **dict.fromkeys(("-h", "--help"), _ELSEWHERE["dryrun"]),
    **dict.fromkeys(("-l", "--log_dir"), "would have the launcher write past the attempt's own folder; remove it"),
}


@rule("flag-decided", _PARSER, ("extra_cmd_args", "git_repos"))
def _flag_decided(run: RuleContext) -> Iterator[str]:
    """A flag given twice has its last value, and the run is planned, checked and compared by the first."""
    for option in dict.fromkeys(key.partition("=")[0] for key in run.test.extra_cmd_args if key.startswith("-")):
        flag = SPELLINGS.get(option)
        if flag is not None and flag.format != "pairs":  # these add up
            value = f' = "env:{flag.secret}"' if flag.secret else ""
            as_key = f"is decided by [cmd_args]; write it there, as {flag.field}{value}"
            yield f"extra_cmd_args: {option!r} {_ELSEWHERE.get(flag.field, as_key)}"
        elif option in _OTHERS:
            yield f"extra_cmd_args: {option!r} {_OTHERS[option]}"


@rule("choice", _PARSER, ("cmd_args", "git_repos"), alone=True)
def _choice(run: RuleContext) -> Iterator[str]:
    """The launcher's parser exits on a value that is not among an option's choices."""
    return wrong_choices(run.test, run.known)


@rule("version-unknown", _PARSER, ("git_repos",), "warning")
def _version_unknown(run: RuleContext) -> Iterator[str]:
    """Flags differ between releases; those of a branch or commit are known once it has been fetched."""
    ref = run.test.megatron_bridge.commit
    version = version_of_ref(ref)
    if is_local(run.test.megatron_bridge.url):
        return
    if run.checkout is None and version is None:
        yield f"git_repos: {ref!r} names no version, so the newest flags are assumed until the code has been fetched"
    elif run.checkout is None and UPSTREAM.search(run.test.megatron_bridge.url) and version not in RELEASES:
        known = ", ".join(map(str, RELEASES))
        yield f"git_repos: {ref!r} is none of the releases known to this version: {known}; check it with --pinned"


@rule(
    "launch-safe",
    "NeMo-Run: core/execution/templates/slurm.sh.j2 at 9339e127",
    ("cmd_args", "extra_cmd_args", "extra_env_vars", "extra_container_mounts", "git_repos"),
    alone=True,
)
def _launch_safe(run: RuleContext) -> Iterator[str]:
    """The batch script quotes arguments in a way that some characters do not survive."""
    return unsafe_values(run.test, run.version)


_HYDRA = "Hydra 1.3: the grammar of overrides"
_RECIPES_AND_LOGGING = "Megatron-Bridge: recipes/ and training/config.py at 067f987d (main)"

_TRANSFORMER = frozenset(
    {
        *("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"),
        *("virtual_pipeline_model_parallel_size", "expert_model_parallel_size", "expert_tensor_parallel_size"),
        *("num_layers", "hidden_size", "num_moe_experts", "sequence_parallel", "recompute_modules"),
    }
)


@rule("override-grammar", _HYDRA, ("extra_cmd_args",))
def _grammar(run: RuleContext) -> Iterator[str]:
    """Hydra refuses other forms when the job starts."""
    for key, _, value in overrides_of(run.test):
        if not re.fullmatch(r"(?:\+{0,2}|~)[A-Za-z_][A-Za-z0-9_]*(?:\.[A-Za-z0-9_]+)*", key):
            yield f"extra_cmd_args: {key!r} is not an override; write a.b, +a.b or ~a.b"
        elif value == "":
            yield f'extra_cmd_args: {key!r} has no value, which only ~{key} allows; write one, such as "null"'
        elif value is not None and (odd := unreadable(value)):
            yield f"extra_cmd_args: {key!r}: Hydra cannot read {value!r}, for {odd!r} in it; write a list as [a,b]"


@rule("override-moved", _RECIPES_AND_LOGGING, ("extra_cmd_args",), "warning", first=V0_6_0)
def _moved(run: RuleContext) -> Iterator[str]:
    """Most recipes nest the transformer's fields one level deeper since v0.6.0."""
    for key in run.test.extra_cmd_args:
        section, _, field = key.lstrip("+~").partition(".")
        if section == "model" and field in _TRANSFORMER:
            yield f"extra_cmd_args: {key!r} is model.transformer.{field} in most recipes of this version; check which"


@rule("wandb-together", _RECIPES_AND_LOGGING, cmd_args(*WANDB, "use_recipes"), "warning")
def _wandb(run: RuleContext) -> Iterator[str]:
    """Megatron-Bridge logs to W&B only where project and experiment are both named."""
    named = [field for field in ("wandb_project_name", "wandb_experiment_name") if run.args.get(field)]
    if "WANDB_API_KEY" in run.test.secrets and len(named) < 2:
        yield "a W&B key is given, and runs are logged only with both wandb_project_name and wandb_experiment_name"
    for field in WANDB if "WANDB_API_KEY" in run.test.secrets and not run.args.get("use_recipes") else ():
        name = str(run.args.get(field) or "")
        if name and wandb_text(name) is None:
            odd = unreadable(name)
            what = f"has {odd!r}, which Hydra cannot read" if odd else f"= {name!r} is not text to Hydra"
            yield f"cmd_args.{field} {what}, so no run is logged to W&B; write another name"


@rule(
    "dispatcher-gpu",
    "Megatron-Bridge: training/flex_dispatcher_backend.py, from 21b02e0c (v0.3.0) to 067f987d (main)",
    cmd_args("moe_flex_dispatcher_backend gpu_type"),
    "warning",
)
def _dispatcher(run: RuleContext) -> Iterator[str]:
    """On other GPUs the job logs a warning and trains with another dispatcher than the test names."""
    backend, gpu = run.args.get("moe_flex_dispatcher_backend"), str(run.args.get("gpu_type")).lower()
    if backend == "deepep" and gpu in ("gb200", "gb300"):
        yield f"moe_flex_dispatcher_backend deepep is ignored on {gpu}, with a warning in the job's log; use hybridep"


_NARROW = "Transformer Engine: check_recipe_support() in pytorch/quantization.py at 001597e9 (main)"


@rule("precision-gpu", _NARROW, (*cmd_args("gpu_type"), "extra_cmd_args"), "warning")
def _precision_gpu(run: RuleContext) -> Iterator[str]:
    """Below compute capability 10.0 Transformer Engine refuses these types, in the first forward pass of the job."""
    # A warning, for the launcher chooses a recipe by the type, and starts it on whatever GPUs the nodes have.
    for key, path, value in overrides_of(run.test) if str(run.args.get("gpu_type")).lower() == "h100" else ():
        if path == "mixed_precision" and value and re.search("mxfp8|nvfp4", value):
            yield f"extra_cmd_args: {key!r}: no H100 has mxfp8 or nvfp4; use fp8 or bf16, unless the nodes are newer"


_PERF_RECIPES = "Megatron-Bridge: src/megatron/bridge/perf_recipes at the pinned commit"
_GPUS = re.compile(r"_(\d+)gpu_")
_FIELDS = cmd_args(
    "model_recipe_name task num_gpus gpu_type compute_dtype config_variant use_recipes list_config_variants"
)


@lru_cache(maxsize=16)
def perf_recipe_names(root: Path) -> tuple[str, ...]:
    """The names of all flat performance recipes, one function each, of a Megatron-Bridge; old ones have none."""
    files = sorted((root / "src/megatron/bridge/perf_recipes").rglob("*.py"))
    texts = (path.read_text(encoding="utf-8", errors="replace") for path in files)
    return tuple(name for text in texts for name in re.findall(r"(?m)^def ([a-zA-Z0-9_]+_config)\(", text))


def _wanted(run: RuleContext) -> tuple[str, str, tuple[str, ...]] | None:
    """The name that the launcher will look for, the same without its number of GPUs, and all names there are."""
    recipe, gpu = run.args.get("model_recipe_name"), run.args.get("gpu_type")
    if run.checkout is None or run.args.get("use_recipes") or not recipe or not gpu:
        return None
    names = perf_recipe_names(run.checkout.megatron_bridge.path / launcher_of(run.test).parent.parent.parent)
    if not names:
        return None
    dtype = str(run.args.get("compute_dtype") or DEFAULTS["compute_dtype"]).lower().replace("_", "")
    variant = str(run.args.get("config_variant") or "").lower()
    # Labels of older versions select the canonical recipe.
    tail = "_config" if variant in ("", "v1", "v2") else f"_{variant}_config"
    before, after = f"{recipe}_{run.args.get('task') or DEFAULTS['task']}", f"{str(gpu).lower()}_{dtype}{tail}"
    return f"{before}_{run.gpus}gpu_{after}", f"{before}_{after}", names


_OVERRIDES_PY = "Megatron-Bridge: scripts/performance/utils/overrides.py, from 21b02e0c (v0.3.0) to 067f987d (main)"
_DENSE_FIRST = frozenset({"deepseek_v3", "kimi_k2"})
"""Those of them whose models list which of their layers are dense; no release has such a list of the others."""


@rule(
    "layers-counted",
    _OVERRIDES_PY,
    (*cmd_args("num_layers first_k_dense_replace model_recipe_name use_recipes"), "git_repos"),
)
def _layers_counted(run: RuleContext) -> Iterator[str]:
    """The launcher counts the dense layers in a list that only some models have, and fails without one."""
    args, recipe = run.args, str(run.args.get("model_recipe_name"))
    if not args.get("num_layers") or args.get("first_k_dense_replace") is not None or not has_performance_recipe(run):
        return
    if recipe in EXPERTS.keys() - _DENSE_FIRST:
        moved = "model.transformer.num_layers" if run.version >= V0_6_0 else "model.num_layers"
        yield f"num_layers: the launcher fails with it for {recipe}; write the override {moved} instead"


@rule(
    "graph-scope-needed",
    _OVERRIDES_PY,
    (*cmd_args("cuda_graph_impl cuda_graph_scope use_recipes"), "git_repos"),
    last=Version(0, 4, 1),
)
def _graph_scope_needed(run: RuleContext) -> Iterator[str]:
    """The launcher goes through the scopes that are given to it, and fails where there are none."""
    is_captured = run.graph_implementation == "transformer_engine" and not run.graph_scopes
    if is_captured and has_performance_recipe(run):
        yield "cuda_graph_impl transformer_engine needs a cuda_graph_scope before v0.4.2; write one, such as attn"


_RACKS = ("gb200", "gb300", "vr200", "r100")
_HYBRIDEP = frozenset({*_DENSE_FIRST, "qwen3_30b_a3b", "qwen3_235b_a22b", "qwen3_next_80b_a3b"})
"""Those whose every performance recipe for racks of GB200 and newer exchanges tokens by HybridEP, as of v0.6.0."""


@rule(
    "hybridep-domain",
    "Megatron-Bridge: scripts/performance/utils/overrides.py, from 51885cf1 (v0.6.0) to 067f987d (main of August 2026)",
    (*cmd_args("ep gpu_type model_recipe_name use_recipes"), "git_repos"),
    first=V0_6_0,
)
def _hybridep_domain(run: RuleContext) -> Iterator[str]:
    """HybridEP exchanges tokens within an NVLink domain, and the launcher refuses more ranks than it has."""
    parallel, gpu = run.integer("ep"), str(run.args.get("gpu_type")).lower()
    is_hybrid = run.args.get("model_recipe_name") in _HYBRIDEP and has_performance_recipe(run)
    if is_hybrid and parallel and parallel > 72 and gpu in _RACKS:
        yield f"ep {parallel} is more than the 72 GPUs of an NVLink domain of {gpu}, which HybridEP needs; lower it"


@rule(
    "tokendrop-dispatcher",
    "Megatron-Bridge: training/utils/moe_token_drop.py, from 51885cf1 (v0.6.0) to 067f987d (main of August 2026)",
    (*cmd_args("use_tokendrop gpu_type model_recipe_name use_recipes"), "extra_cmd_args", "git_repos"),
    first=V0_6_0,
)
def _tokendrop_dispatcher(run: RuleContext) -> Iterator[str]:
    """The launcher asserts another dispatcher than HybridEP's before it looks at the flag that changes it."""
    is_hybrid = run.args.get("model_recipe_name") in _HYBRIDEP and str(run.args.get("gpu_type")).lower() in _RACKS
    is_changed = any(path.endswith(".moe_token_dispatcher_type") for _, path, _ in overrides_of(run.test))
    if run.args.get("use_tokendrop") is not None and is_hybrid and has_performance_recipe(run) and not is_changed:
        yield (
            "use_tokendrop, true or false, fails where the recipe exchanges tokens by HybridEP; remove it, or write "
            "the overrides moe_token_dispatcher_type = alltoall and moe_flex_dispatcher_backend = null"
        )


# DeepSeek-V3 ships with layouts of its own for these, beside those that the recipe can make.
_SHIPPED_STAGES = frozenset({(2, 8), (8, 4)})


@rule(
    "deepseek-layout",
    "Megatron-Bridge: recipes/deepseek/deepseek_v3.py at 067f987d (main)",
    cmd_args("model_recipe_name pipeline_model_parallel_layout pp vp"),
)
def _deepseek_layout(run: RuleContext) -> Iterator[str]:
    """61 layers divide into few pipelines, and the recipe refuses all others."""
    args = run.args
    if args.get("model_recipe_name") != "deepseek_v3" or args.get("pipeline_model_parallel_layout"):
        return
    stages, virtual = run.integer("pp"), 1 if args.get("vp") == "None" else run.integer("vp")
    known = DEEPSEEK_STAGES | _SHIPPED_STAGES
    if stages is not None and virtual is not None and (stages, virtual) not in known:
        shown = ", ".join(f"{pp} and {vp}" for pp, vp in sorted(known))
        yield (
            f"pp {stages} with vp {virtual}: DeepSeek-V3's recipe has no layout of its layers for that; "
            f"write pipeline_model_parallel_layout, or use pp and vp of {shown}"
        )


@rule("recipe-known", _PERF_RECIPES, (*_FIELDS, *cmd_args("model_family_name"), "git_repos"))
def _recipe_known(run: RuleContext) -> Iterator[str]:
    """The launcher imports the family's recipes by name, and takes tokenizer and CPU binding by family as well."""
    pin = run.test.megatron_bridge
    if run.checkout is not None:
        recipes = pinned_recipes(run.checkout.megatron_bridge.path)
    else:
        recipes = released_recipes(run.version) if UPSTREAM.search(pin.url) and is_release(pin.commit) else {}
    family, recipe = str(run.args.get("model_family_name")), str(run.args.get("model_recipe_name"))
    if not recipes or run.args.get("use_recipes") or recipe in recipes.get(family, ()):
        return
    owners = [name for name, recipes_of in recipes.items() if recipe in recipes_of]
    if owners:
        yield f"model_recipe_name {recipe!r} belongs to model_family_name {owners[0]!r}, not to {family!r}; write that"
    elif family not in recipes:
        near = get_close_matches(family, recipes, n=1) or sorted(recipes)
        yield f"{pin.commit} has no performance recipes of model_family_name {family!r}; use {', '.join(near)}"
    elif _wanted(run) is None:
        near = get_close_matches(recipe, recipes[family], n=1) or sorted(recipes[family])
        yield f"{pin.commit} has no model_recipe_name {recipe!r} in family {family}; use {', '.join(near)}"


@rule("recipe-exists", _PERF_RECIPES, _FIELDS, needs="checkout")
def _exists(run: RuleContext) -> Iterator[str]:
    """The launcher looks the recipe up by name when the job starts, after the wait in the queue."""
    _, any_size, names = _wanted(run) or ("", "", ())
    sizeless = {_GPUS.sub("_", name) for name in names}
    if sizeless and any_size not in sizeless:
        near = get_close_matches(any_size, sorted(sizeless), n=3)
        hint = f"; there are {', '.join(near)}" if near else ""
        yield (
            f"the pinned code has no performance recipe {any_size} for any number of GPUs{hint}; "
            "change model_recipe_name, task, gpu_type, compute_dtype or config_variant"
        )


@rule("recipe-gpus", _PERF_RECIPES, _FIELDS, "warning", needs="checkout")
def _for_these_gpus(run: RuleContext) -> Iterator[str]:
    """A recipe tuned for another number of GPUs runs with sizes that were chosen for that number."""
    exact, any_size, names = _wanted(run) or ("", "", ())
    others = () if exact in names else names
    sizes = sorted(int(gpus[1]) for name in others if _GPUS.sub("_", name) == any_size and (gpus := _GPUS.search(name)))
    if sizes:
        yield (
            f"the pinned code has this recipe for {', '.join(map(str, sizes))} GPUs, not for {run.gpus}: "
            "another one is used with its global batch size scaled; write gb to set it yourself"
        )


# --- overrides of the configuration, in Hydra's grammar ---------------------------------------------------------------

_CLASSES = "Megatron-Bridge: ConfigContainer of training/config.py, and what it leads to, at the pinned commit"

SET_BY_FLAGS = {
    "train.train_iters": "max_steps",
    **SIZE_OVERRIDES,
    "model.seq_length": "seq_length",
    "model.hidden_size": "hidden_size",
    "model.cuda_graph_impl": "cuda_graph_impl",
    "checkpoint.save_interval": "save_interval",
    "checkpoint.load": "load_dir",
    "checkpoint.pretrained_checkpoint": "pretrained_checkpoint",
}
"""Fields that the launcher sets from its own flags, after the overrides, each with the key of `[cmd_args]`."""


def _override_problems(run: RuleContext, schema: ConfigSchema | None) -> Iterator[str]:
    if schema is not None:
        for key, path, value in overrides_of(run.test):
            if problem := schema.problem(path, value):
                yield f"extra_cmd_args: {key!r}: {problem}"


@rule("override-known", _CLASSES, ("extra_cmd_args", "git_repos"))
def _known(run: RuleContext) -> Iterator[str]:
    """Hydra ends the job at a name that the configuration does not have, and training at a value of a wrong type."""
    # By the classes of the release that the pin names, or by the pinned code's own as far as they are there.
    if not run.test.extra_cmd_args:
        return
    if is_release(run.test.megatron_bridge.commit):
        yield from _override_problems(run, run.config_schema)
    elif run.checkout is not None:
        yield from _override_problems(run, pinned_schema(run.checkout.megatron_bridge.path))


@rule("override-known-later", _CLASSES, ("extra_cmd_args", "git_repos"), "warning")
def _known_later(run: RuleContext) -> Iterator[str]:
    """Fields of a branch or commit are known once it has been fetched; until then, those of a release or main are.

    Megatron-LM's are, too, while the submodule is the image's own (`init_submodules = false`).
    """
    if run.test.extra_cmd_args:
        certain = set(_known.check(run))
        yield from (said for said in _override_problems(run, run.config_schema) if said not in certain)


_SET_BY_FURTHER_FLAGS = {
    "checkpoint.most_recent_k": "most_recent_k",
    "model.cpu_offloading_num_layers": "activation_offload_layers",
    "model.cuda_graph_modules": "cuda_graph_scope",
    "model.cuda_graph_scope": "cuda_graph_scope",
    "model.moe_flex_dispatcher_backend": "moe_flex_dispatcher_backend",
    "model.num_moe_experts": "num_moe_experts",
    "model.pipeline_model_parallel_layout": "pipeline_model_parallel_layout",
    "model.recompute_modules": "recompute_modules",
    "model.recompute_num_layers": "recompute_num_layers",
    "tokenizer.tokenizer_model": "tokenizer_model",
    "tokenizer.tokenizer_type": "tokenizer_type",
}
"""The same of a performance recipe alone."""

_SAVING = {"checkpoint.save": "save_dir", "checkpoint.save_interval": "save_interval"}
"""Fields that are set wherever a run saves, each with the key of `[cmd_args]`."""

_OVERRIDING = "Megatron-Bridge: scripts/performance/utils/overrides.py at 067f987d (main)"


@rule("override-twice", _OVERRIDING, ("extra_cmd_args", "cmd_args", "harvest", "git_repos"))
def _twice(run: RuleContext) -> Iterator[str]:
    """The launcher lays its own flags over the overrides, and nightbridge plans by the flags."""
    if not run.test.extra_cmd_args:
        return
    performance = has_performance_recipe(run)
    saves = run.test.harvest.checkpoint != "none" or any(is_given(run.args.get(key)) for key in _SAVING.values())
    for key, path, value in overrides_of(run.test):
        path = path.replace("model.transformer.", "model.")
        field = SET_BY_FLAGS.get(path)
        if path in ("train.train_iters", "train.train_samples"):
            yield f"extra_cmd_args: {key!r}: a run is watched for cmd_args.max_steps; write the number of steps there"
        elif path in _SAVING and saves and performance:
            yield f"extra_cmd_args: {key!r}: a flag of a run that saves overrides it; write cmd_args.{_SAVING[path]}"
        elif path == "model.seq_length" and run.version < V0_6_0:
            length = run.args.get("seq_length")
            if is_given(length) and value != text_of(length):
                yield f"extra_cmd_args: {key!r}: cmd_args.seq_length sets the data's to {length}; write the same"
        elif field in run.args:
            yield f"extra_cmd_args: {key!r}: cmd_args.{field} overrides it; remove one of them"
        elif performance and is_given(run.args.get(other := _SET_BY_FURTHER_FLAGS.get(path, ""))):
            yield f"extra_cmd_args: {key!r}: cmd_args.{other} overrides it; remove one of them"
