"""Series: which runs are compared with each other.

Runs of one series differ in what a night is about (the pins) and in where things lie, and in nothing else. A changed
configuration starts a new series, so that a deliberate change is never mistaken for a regression.

What goes in: the cluster, the test's id, the sweep point, and the effective configuration, that is every argument,
environment variable and override that changes what is computed. What a run *reads* (data, tokenizer, checkpoint to
start from) is a part of that.

What stays out: pins (container image, commits, the repositories' URLs), where a run *writes* (checkpoints, logs,
caches), names that are only displayed (test name, description, W&B), how it is scheduled and kept (account, nodes, time
limit, retries, harvest policy, iterations), the gate's thresholds, what is only logged, and secrets. Nodes and tasks
per node are the topology of a run (`history.rows`).

One configuration has one id, however it is written: the launcher gets the same words for `50` and `"50"`, for a switch
that is off and for none, and for a default and nothing.
"""

import hashlib
import json
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

from nightbridge.models.base import slug
from nightbridge.models.scenario import RunSpec

# Patterns of `[cmd_args]`: the launcher's flags, without dashes.
NOT_IN_ARGUMENTS = (
    *("container_image", "gpus_per_node", "wandb_*", "hf_token", "list_config_variants"),
    *("save_dir", "log_dir", "save_config_filepath", "nemo_home", "index_mapping_dir", "custom_mounts"),
    *("golden_values_path", "account", "time_limit", "max_retries", "detach", "dryrun"),
)

# Patterns of environment variables: caches, scratch folders, log files and W&B's names.
NOT_IN_ENVIRONMENT = (
    *("HF_HOME", "NEMO_HOME", "TMPDIR", "NCCL_DEBUG_FILE", "WANDB_*"),
    *("*_CACHE", "*_CACHE_DIR", "*_CACHE_PATH", "*_LOG_DIR"),
)

# Up to 0.2 every variable that is named like a secret was one, a switch or a number as well.
_NAMED_LIKE_SECRETS = tuple(
    f"{before}{name}"
    for name in ("TOKEN", "KEY", "SECRET", "PASSWORD", "PASSWD", "CREDENTIAL", "CREDENTIALS")
    for before in ("", "*_")
)

ONLY_LOGGED = ("NCCL_DEBUG", "NCCL_DEBUG_SUBSYS", "TORCH_CPP_LOG_LEVEL", "TORCH_SHOW_CPP_STACKTRACES")

# Patterns of Megatron-Bridge's overrides, without Hydra's `+` and `++`.
NOT_IN_OVERRIDES = (
    *("logger.*_dir", "logger.*_path", "logger.*_filepath", "logger.wandb_*", "logger.mlflow_*", "logger.comet_*"),
    *("checkpoint.save", "checkpoint.*_dir", "profiling.*_dir", "profiling.*_path"),
)

DEFAULTS: Mapping[str, Any] = {
    "task": "pretrain",
    "domain": "llm",
    "data": "mock",
    "compute_dtype": "bf16",
    "pytorch_profiler": False,
    "enable_pct_binding": True,
}
"""What the launcher takes where a test writes nothing (Megatron-Bridge v0.3 to v0.6, `argument_parser.py`)."""

DEFAULT_NUM_GPUS = 8
"""CloudAI's default where a test sets none."""

SWITCHES = frozenset(
    {"deterministic", "dryrun", "dump_env", "enable_nsys", "export_nsys_sqlite", "head_only", "is_long_convergence_run"}
    | {"list_config_variants", "offline", "packed_sequence", "profiling_gpu_metrics", "use_recipes"}
)
"""Arguments that are passed on only where they are on."""


def series_id(spec: RunSpec, cluster_name: str) -> str:
    """Name the series of a run: `<test slug>-<12 hex>`, the same on every machine.

    Numbers from two clusters are never compared, so the cluster's name is in the hash. Arguments that the launcher
    does not pass on (None, empty text, empty list) count as absent.
    """
    arguments = {name: _plain(value) for name, value in spec.test.cmd_args.items()}
    given = {
        name: value
        for name, value in arguments.items()
        if value != DEFAULTS.get(name) and not (name in SWITCHES and value is False)
    }
    if spec.test.has_launcher:
        given.setdefault("num_gpus", DEFAULT_NUM_GPUS)
    return _named(spec, cluster_name, _without(given, NOT_IN_ARGUMENTS), (*NOT_IN_ENVIRONMENT, *ONLY_LOGGED))


def former_series_id(spec: RunSpec, cluster_name: str) -> str:
    """The name that the series of a run had up to 0.2, where it depended on how the configuration was written."""
    left_out = tuple(name for name in NOT_IN_ARGUMENTS if name != "gpus_per_node")
    return _named(
        spec, cluster_name, _without(spec.test.cmd_args, left_out), (*NOT_IN_ENVIRONMENT, *_NAMED_LIKE_SECRETS)
    )


def _plain(value: Any) -> Any:
    """A value that is written as text as the number or the truth value that it says."""
    if value in ("true", "false"):
        return value == "true"
    return number_in(value) if isinstance(value, str) else value


def number_in(text: str) -> int | float | str:
    """The number that a text says, else the text."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _named(spec: RunSpec, cluster_name: str, arguments: Mapping[str, Any], not_in_environment: tuple[str, ...]) -> str:
    test = spec.test
    overrides = {name.lstrip("+"): value for name, value in test.extra_cmd_args.items()}
    identity = {
        "cluster": cluster_name,
        "test": test.id,
        "template": test.test_template_name,
        "sweep": spec.sweep_point,
        "arguments": arguments,
        "environment": _without(test.extra_env_vars, not_in_environment),
        "overrides": _without(overrides, NOT_IN_OVERRIDES),
    }
    # TOML knows dates, JSON does not: `default=str` gives them one spelling.
    text = json.dumps(identity, sort_keys=True, separators=(",", ":"), default=str)
    return f"{slug(test.id)}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"


def _without(values: Mapping[str, Any], patterns: tuple[str, ...]) -> dict[str, Any]:
    return {
        name: value
        for name, value in values.items()
        if value not in (None, "", [], ()) and not any(fnmatchcase(name, pattern) for pattern in patterns)
    }
