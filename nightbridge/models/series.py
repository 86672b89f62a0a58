"""Series: which runs are compared with each other.

Runs of one series differ in what a night is about (the pins) and in where things lie, and in nothing else. A changed
configuration starts a new series, so that a deliberate change is never mistaken for a regression.

What goes in: the cluster, the test's id, the sweep point, and the effective configuration, that is every argument,
environment variable and override that changes what is computed. What a run *reads* (data, tokenizer, checkpoint to
start from) is a part of that.

What stays out: pins (container image, commits, the repositories' URLs), where a run *writes* (checkpoints, logs,
caches), names that are only displayed (test name, description, W&B), how it is scheduled and kept (account, nodes, time
limit, retries, harvest policy, iterations), the gate's thresholds, and secrets.
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
    "container_image",
    "save_dir",
    "log_dir",
    "save_config_filepath",
    "nemo_home",
    "index_mapping_dir",
    "custom_mounts",
    "golden_values_path",
    "wandb_*",
    "hf_token",
    "account",
    "time_limit",
    "max_retries",
    "detach",
    "dryrun",
    "list_config_variants",
)

# Patterns of environment variables: caches, scratch folders, log files and W&B's names.
NOT_IN_ENVIRONMENT = (
    "HF_HOME",
    "NEMO_HOME",
    "TMPDIR",
    "NCCL_DEBUG_FILE",
    "WANDB_*",
    "*_CACHE",
    "*_CACHE_DIR",
    "*_CACHE_PATH",
    "*_LOG_DIR",
)

# Patterns of Megatron-Bridge's overrides, without Hydra's `+` and `++`.
NOT_IN_OVERRIDES = (
    "logger.*_dir",
    "logger.*_path",
    "logger.*_filepath",
    "logger.wandb_*",
    "logger.mlflow_*",
    "logger.comet_*",
    "checkpoint.save",
    "checkpoint.*_dir",
    "profiling.*_dir",
    "profiling.*_path",
)


def series_id(spec: RunSpec, cluster_name: str) -> str:
    """Name the series of a run: `<test slug>-<12 hex>`, the same on every machine.

    Numbers from two clusters are never compared, so the cluster's name is in the hash. Arguments that the launcher
    does not pass on (None, empty text, empty list) count as absent.
    """
    test = spec.test
    overrides = {name.lstrip("+"): value for name, value in test.extra_cmd_args.items()}
    identity = {
        "cluster": cluster_name,
        "test": test.id,
        "template": test.test_template_name,
        "sweep": spec.sweep_point,
        "arguments": _without(test.cmd_args, NOT_IN_ARGUMENTS),
        "environment": _without(test.extra_env_vars, NOT_IN_ENVIRONMENT),
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
