"""The launcher's flags, one row each: the field of `[cmd_args]`, the flag, how it is written, and since when it exists.

The rows are in the order in which CloudAI writes them, so that an argv can be compared with one of theirs, but for two
lists. Rows whose source is `site` are filled in by nightbridge and are no keys of `[cmd_args]`. Versions were read from
the argument parsers of every Megatron-Bridge release; for one commit its own parser decides (`parser_source.py`).
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

from nightbridge.launch.versions import V0_3_0, V0_3_1, V0_4_0, V0_4_2, V0_5_0, V0_6_0, Version

FlagKind = Literal["text", "integer", "number", "boolean", "texts", "integers", "integer_or_none", "text_or_none"]
FlagFormat = Literal[
    "value", "true_false", "presence", "comma", "space", "pairs", "virtual_pipeline", "escaped", "unsent"
]
Choices = tuple[str, ...] | None
KnownFlags = Mapping[str, Choices]
"""Every option string of one parser, long and short, with the values it allows (None: any)."""

LAUNCHER_TIME_LIMIT = "00:30:00"
"""The launcher's time limit when it is given none, in every version."""


@dataclass(frozen=True, slots=True)
class Flag:
    """One row of the table.

    Attributes:
        field: Key in `[cmd_args]`, or nightbridge's own name for a site value.
        option: The flag as it is written; empty for a field that no launcher takes.
        kind: What the field's value must be.
        format: How flag and value are written, a key of `FORMATS`.
        first: First version that has the flag.
        source: Where the value comes from: a test, or nightbridge for the site.
        secret: Environment variable that carries the value instead of the flag; such a flag is never written.
    """

    field: str
    option: str
    kind: FlagKind = "text"
    format: FlagFormat = "value"
    first: Version = V0_3_0
    source: Literal["test", "site"] = "test"
    secret: str | None = None


FLAGS: tuple[Flag, ...] = (
    Flag("account", "-a", source="site"),
    Flag("partition", "-p", source="site"),
    Flag("gpu_type", "-g"),
    Flag("time_limit", "-t", source="site"),
    Flag("container_image", "-i"),
    Flag("compute_dtype", "-c"),
    Flag("optimizer_type", "--optimizer_type", first=V0_3_1),
    Flag("task", "--task"),
    Flag("hf_token", "-hf", secret="HF_TOKEN"),
    Flag("offline", "--offline", "boolean", "presence", first=V0_4_0),
    Flag("nemo_home", "-nh"),
    Flag("wandb_key", "-wdk", secret="WANDB_API_KEY"),
    Flag("wandb_project_name", "-wdp"),
    Flag("wandb_entity_name", "-wde"),
    Flag("wandb_experiment_name", "-wdj"),
    Flag("wandb_save_dir", "-wds"),
    Flag("max_retries", "--max_retries", "integer"),
    Flag("dryrun", "-d", "boolean", "presence"),
    Flag("num_gpus", "-ng", "integer"),
    Flag("gpus_per_node", "-gn", "integer"),
    Flag("custom_mounts", "-cm", "texts", "comma", source="site"),
    Flag("env", "-E", "texts", "pairs", first=V0_4_0, source="site"),
    Flag("custom_bash_cmds", "-cb", "texts", "pairs", source="site"),
    Flag("domain", "--domain"),
    Flag("use_recipes", "--use_recipes", "boolean", "presence"),
    Flag("enable_vboost", "-vb", "boolean", "true_false"),
    Flag("lock_gpu_freq", "-lgc", "integer", first=V0_4_2),
    Flag("peak_mem_clk", "-lmc", "integer", first=V0_6_0),
    Flag("model_family_name", "-m"),
    Flag("model_recipe_name", "-mr"),
    Flag("hidden_size", "--hidden_size", "integer"),
    Flag("num_layers", "--num_layers", "integer"),
    Flag("num_moe_experts", "--num_moe_experts", "integer", first=V0_6_0),
    Flag("pipeline_model_parallel_layout", "--pipeline_model_parallel_layout", format="escaped"),
    Flag("first_k_dense_replace", "--first_k_dense_replace", "integer"),
    Flag("enable_nsys", "-en", "boolean", "presence"),
    Flag("export_nsys_sqlite", "--export_nsys_sqlite", "boolean", "presence", first=V0_5_0),
    Flag("use_tokendrop", "--use_tokendrop", "boolean", "true_false"),
    Flag("use_megatron_fsdp", "--use_megatron_fsdp", "boolean", "true_false"),
    Flag("nccl_ub", "--nccl_ub", "boolean", "true_false"),
    Flag("cuda_graph_impl", "--cuda_graph_impl"),
    Flag("cuda_graph_scope", "--cuda_graph_scope", "texts", "comma"),
    Flag("deterministic", "--deterministic", "boolean", "presence", first=V0_5_0),
    Flag("tp", "-tp", "integer"),
    Flag("pp", "-pp", "integer"),
    Flag("cp", "-cp", "integer"),
    Flag("vp", "-vp", "integer_or_none", "virtual_pipeline"),
    Flag("ep", "-ep", "integer"),
    Flag("et", "-et", "integer"),
    Flag("mb", "-mb", "integer"),
    Flag("gb", "-gb", "integer"),
    Flag("seq_length", "-sl", "integer"),
    Flag("distributed_timeout_minutes", "--distributed_timeout_minutes", "integer", first=V0_5_0),
    Flag("moe_a2a_overlap", "--moe_a2a_overlap", "boolean", "true_false"),
    Flag("moe_flex_dispatcher_backend", "--moe_flex_dispatcher_backend", "text_or_none", first=V0_4_0),
    Flag("max_steps", "-ms", "integer"),
    Flag("recompute_num_layers", "-rl", "integer"),
    Flag("activation_offload_layers", "-ol", "integer"),
    Flag("recompute_modules", "--recompute_modules", "texts", "comma"),
    # Before a flag that every run has: a list in words of its own goes on up to the next flag, overrides included.
    Flag("c4_train_shards", "--c4_train_shards", "integers", "space", first=V0_5_0),
    Flag("dataset_paths", "--dataset_paths", "texts", "space"),
    Flag("detach", "--detach", "boolean", "true_false", source="site"),
    Flag("packager", "--packager", first=V0_4_0, source="site"),
    Flag("enable_pct_binding", "--enable_pct_binding", "boolean", "true_false", first=V0_4_2),
    Flag("lr", "--lr", "number"),
    Flag("min_lr", "--min_lr", "number"),
    Flag("warmup_iters", "--warmup_iters", "integer"),
    Flag("pretrained_checkpoint", "--pretrained_checkpoint"),
    Flag("save_dir", "--save_dir"),
    Flag("load_dir", "--load_dir"),
    Flag("save_interval", "--save_interval", "integer"),
    Flag("most_recent_k", "--most_recent_k", "integer"),
    Flag("save_config_filepath", "--save_config_filepath"),
    Flag("data", "--data"),
    Flag("c4_root", "--c4_root", first=V0_5_0),
    Flag("dataset_root", "--dataset_root"),
    Flag("index_mapping_dir", "--index_mapping_dir"),
    Flag("dataset_name", "--dataset_name"),
    Flag("diffusion_dataset_path", "--diffusion_dataset_path", first=V0_5_0),
    Flag("packed_sequence", "--packed_sequence", "boolean", "presence"),
    Flag("head_only", "--head_only", "boolean", "presence"),
    Flag("tokenizer_type", "--tokenizer_type"),
    Flag("tokenizer_model", "--tokenizer_model"),
    Flag("vocab_size", "--vocab_size", "integer"),
    Flag("pytorch_profiler", "-pyp", "boolean", "true_false"),
    Flag("profiling_start_step", "--profiling_start_step", "integer"),
    Flag("profiling_stop_step", "--profiling_stop_step", "integer"),
    Flag("record_memory_history", "-mh", "boolean", "true_false"),
    Flag("profiling_gpu_metrics", "--profiling_gpu_metrics", "boolean", "presence"),
    Flag("profiling_ranks", "--profiling_ranks", "integers", "comma"),
    Flag("nsys_trace", "--nsys_trace", "texts", "comma"),
    Flag("nsys_extra_args", "--nsys_extra_args", "texts", "comma"),
    Flag("gres", "--gres"),
    Flag("custom_srun_args", "-cs", "texts", "comma"),
    Flag("additional_slurm_params", "--additional_slurm_params"),
    Flag("dump_env", "--dump_env", "boolean", "presence", first=V0_4_0),
    Flag("is_long_convergence_run", "--is_long_convergence_run", "boolean", "presence"),
    Flag("preempt_time", "--preempt_time", "integer", first=V0_6_0),
    Flag("config_variant", "-cv"),
    Flag("list_config_variants", "--list_config_variants", "boolean", "presence"),
    Flag("num_distributed_optimizer_instances", "", "integer", "unsent"),
)

MEGATRON_NAMES: Mapping[str, str] = {
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "cp": "context_parallel_size",
    "vp": "virtual_pipeline_model_parallel_size",
    "ep": "expert_model_parallel_size",
    "et": "expert_tensor_parallel_size",
    "mb": "micro_batch_size",
    "gb": "global_batch_size",
}
"""Sizes, with what the fields of Megatron's configurations and the launcher's long options call them."""

_LONG = {"gpu_type": "gpu", **MEGATRON_NAMES}
"""Long names of options that are not those of their fields."""

SPELLINGS: Mapping[str, Flag] = {
    option: flag for flag in FLAGS if flag.option for option in (flag.option, f"--{_LONG.get(flag.field, flag.field)}")
}
"""Every flag by its short and its long name; the same in all releases that have it."""

TEST_FLAGS: Mapping[str, Flag] = {flag.field: flag for flag in FLAGS if flag.source == "test"}
"""The keys of `[cmd_args]`."""

_WAITING_ONLY = (
    *("retry_on_testing_failure", "golden_values_path", "timing_threshold", "skip_first_percent_time"),
    *("eval_time_start_step", "eval_time_end_step", "correlation_threshold", "high_loss_tolerance"),
    *("medium_loss_tolerance", "low_loss_tolerance", "final_loss_tolerance", "max_outlier_ratio"),
    *("outlier_threshold", "skip_first_percent_loss", "memory_threshold"),
)

NO_EFFECT: Mapping[str, str] = {
    "fp8_recipe": "has no flag in any launcher since v0.3; compute_dtype names the recipe (fp8_cs, fp8_mx, fp8_sc)",
    "log_dir": "is not passed on: every attempt has a directory of its own, and the logs are harvested from it",
    "detach": "is not passed on: the launcher always returns after submitting, and nightbridge watches the job",
    **dict.fromkeys(
        _WAITING_ONLY, "is read by a launcher that waits for the job; nightbridge's own gate is the [gate] table"
    ),
}
"""Keys of `[cmd_args]` that are accepted and do nothing here, with the reason."""


# --- values that a flag allows, per version --------------------------------------------------------------------------

CHOICES: Mapping[str, tuple[tuple[Version, tuple[str, ...]], ...]] = {
    "gpu_type": (
        (V0_3_0, ("h100", "b200", "gb200", "gb300", "b300")),
        (V0_4_0, ("h100", "b200", "b300", "gb200", "gb300", "vr200", "r100")),
    ),
    "compute_dtype": ((V0_3_0, ("bf16", "fp8_cs", "fp8_mx", "fp8_sc", "nvfp4")),),
    "optimizer_type": ((V0_3_1, ("adam", "muon")),),
    "task": ((V0_3_0, ("pretrain", "sft", "lora")), (V0_6_0, ("pretrain", "sft", "peft"))),
    "domain": (
        (V0_3_0, ("llm", "vlm")),
        (V0_4_0, ("llm", "vlm", "qwen3vl")),
        (V0_4_2, ("llm", "vlm", "qwen3vl", "diffusion")),
    ),
    "data": (
        (V0_3_0, ("mock", "rp2", "squad", "squad_packed")),
        (V0_5_0, ("mock", "rp2", "squad", "squad_packed", "c4")),
    ),
    "tokenizer_type": ((V0_3_0, ("NullTokenizer", "HuggingFaceTokenizer", "SentencePieceTokenizer")),),
    "cuda_graph_impl": ((V0_3_0, ("none", "local", "transformer_engine")),),
    "cuda_graph_scope": ((V0_3_0, ("full_iteration", "attn", "mlp", "moe", "moe_router", "moe_preprocess", "mamba")),),
    "moe_flex_dispatcher_backend": ((V0_4_0, ("deepep", "hybridep", "None")),),
}
"""Field to the values it allows from a version on, oldest first."""

GPUS_PER_NODE: Mapping[str, int] = {"h100": 8, "b200": 8, "b300": 8, "gb200": 4, "gb300": 4, "vr200": 4, "r100": 1}
"""What the launcher assumes of a node from v0.4 on; v0.3 assumes eight whatever the GPU."""


def choices_of(field: str, version: Version) -> Choices:
    """The values that `field` allows in that version; None for any."""
    allowed: Choices = None
    for first, values in CHOICES.get(field, ()):
        if first <= version:
            allowed = values
    return allowed


def known_in(version: Version) -> dict[str, Choices]:
    """The flags of a version as this table has them, for when there is no checkout to read."""
    return {flag.option: choices_of(flag.field, version) for flag in FLAGS if flag.option and flag.first <= version}


# --- how a flag and its value are written ----------------------------------------------------------------------------


def text_of(value: object) -> str:
    """A value as the launcher's parser reads it."""
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value)


def items_of(value: object) -> tuple[str, ...]:
    """The items of a list, or of a text that separates them by commas; brackets and quotes around it are dropped."""
    if isinstance(value, str):
        return tuple(item.strip(" '\"") for item in value.strip().strip("[]").split(",") if item.strip(" '\""))
    if isinstance(value, Sequence):
        return tuple(text_of(item) for item in value)
    return (text_of(value),)


def words_of(flag: Flag, value: object) -> tuple[str, ...]:
    """The single words that a field's value consists of."""
    return items_of(value) if flag.kind in ("texts", "integers") else (text_of(value),)


def _value(option: str, value: Any) -> tuple[str, ...]:
    text = text_of(value)
    # argparse takes a separate word that starts with a dash for a flag, unless it is a number.
    if text.startswith("-") and not text[1:].replace(".", "", 1).isdigit():
        return (f"{option}={text}",)
    return (option, text) if text else ()


FORMATS: Mapping[FlagFormat, Callable[[str, Any], tuple[str, ...]]] = {
    "value": _value,
    "true_false": _value,
    "presence": lambda option, value: (option,) if value else (),
    "comma": lambda option, value: _value(option, ",".join(items_of(value))),
    "space": lambda option, value: (option, *items) if (items := items_of(value)) else (),
    "pairs": lambda option, value: tuple(word for item in value for word in (option, item)),
    # One virtual stage is no virtual pipeline, and the parser spells that None.
    "virtual_pipeline": lambda option, value: (option, "None" if value in (1, "None") else text_of(value)),
    # Such as Et*4|(t*4|)*14tmL, which only the job reads.
    "escaped": lambda option, value: _value(option, escaped(text_of(value))),
    "unsent": lambda option, value: (),
}


def written(flag: Flag, value: Any) -> tuple[str, ...]:
    """The words of an argv for one flag; none for an empty value, a switch that is off, and every secret."""
    return () if flag.secret else FORMATS[flag.format](flag.option, value)


_SAFE = re.compile(r"[A-Za-z0-9_@%+=:,./\[\]~#-]*")
_HOME = re.compile(r"(?:^|[=:])~")
_CARRIED = re.compile(r"[;|()!*?{}~#]")
_VARIABLE = re.compile(r"\$\{[A-Za-z_][A-Za-z0-9_]*\}")
_VARIABLE_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")

_REASONS = (
    (frozenset(" \t\r\n"), "white space, which the batch script would split into two words"),
    (frozenset("\"'<>&"), "a quote or one of <>&, which would arrive HTML-escaped"),
    (frozenset(";|()`\\!"), "a shell character, which the batch script would execute"),
    (frozenset("*?{}"), "a shell pattern, which the batch script would expand"),
    (frozenset("$"), "$, which the batch script would expand"),
)


@lru_cache(maxsize=4096)
def why_unsafe(text: str) -> str | None:
    """Return why a word cannot be passed to the launcher; None when it can."""
    if text.startswith("#"):
        return "begins with #: the batch script would drop the rest of the line"
    if _HOME.search(text):
        return "begins with ~, or has it behind = or :, which the batch script would expand; write the full path"
    if _SAFE.fullmatch(text):
        return None
    for characters, reason in _REASONS:
        if characters & set(text):
            return f"contains {reason}"
    return (
        f"contains {next(character for character in text if not _SAFE.fullmatch(character))!r}, which is not passed on"
    )


def escaped(text: str) -> str:
    """A word for the job as the launcher must be given it: the job's shell takes the backslashes away."""
    return _CARRIED.sub(r"\\\g<0>", text)


def why_unsafe_escaped(text: str) -> str | None:
    """Return why a word cannot be passed on even with backslashes; None when it can."""
    return why_unsafe(_CARRIED.sub("", text))


def why_unsafe_variable(name: str, value: str) -> str | None:
    """Return why an environment variable cannot be passed on; `${NAME}` in a value is expanded in the job."""
    if not _VARIABLE_NAME.fullmatch(name):
        return "is not the name of an environment variable"
    return why_unsafe(f"{name}={without_variables(value)}")


def without_variables(value: str) -> str:
    """A variable's value without what the job has yet to fill in."""
    return _VARIABLE.sub("", value)


def expands(value: str) -> bool:
    """Whether a variable's value refers to another variable of the job."""
    return bool(_VARIABLE.search(value))
