"""Where a run writes, and the flags that make it write there: a performance recipe alone writes nothing.

Also what is known of checkpoints before the run: their size, and whether it resumes from one.
"""

import re
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from nightbridge.models import Image, RunSpec, TestDefinition

JOB_FOLDER = "/nemo_run"
"""Where NeMo-Run mounts the job's directory in its container."""

RECIPE_STEPS = 50
"""Steps of every flat performance recipe, unless the test sets them."""

_LOGGING: Mapping[str, str] = {
    "logger.log_timers_to_tensorboard": "true",
    "logger.log_throughput_to_tensorboard": "true",
    "logger.log_memory_to_tensorboard": "true",
}


def output_dir(image: Image, attempt_dir: Path) -> Path | None:
    """The host directory that a run without a container writes to; None in a container, which has the job's."""
    return attempt_dir / "output" if image.kind == "none" else None


def overrides(spec: RunSpec, folder: Path | None) -> dict[str, str]:
    """The Hydra overrides: TensorBoard switched on unless the test switches it off, then the test's own."""
    written = spec.test.extra_cmd_args
    taken = {key.lstrip("+~") for key in written}
    added = {"logger.tensorboard_dir": f"{folder or JOB_FOLDER}/tb_logs", **_LOGGING}
    return {key: value for key, value in added.items() if key not in taken} | dict(written)


def output_arguments(spec: RunSpec, folder: Path | None, attempt_name: str) -> dict[str, Any]:
    """The fields of the launcher that decide where and when the run writes; they replace the test's own.

    A directory that the test names gets the attempt appended, so that no earlier run's checkpoint is resumed.
    """
    written = spec.test.cmd_args
    fields: dict[str, Any] = {}
    for field in ("save_dir", "wandb_save_dir"):
        if written.get(field):
            fields[field] = f"{str(written[field]).rstrip('/')}/{attempt_name}"
    if not written.get("save_config_filepath"):
        fields["save_config_filepath"] = f"{folder or JOB_FOLDER}/configs/ConfigContainer.yaml"
    if spec.test.harvest.checkpoint != "none" and not written.get("save_interval"):
        fields["save_interval"] = spec.max_steps or RECIPE_STEPS
    saves = "save_interval" in fields or bool(written.get("save_interval"))
    if saves and folder is not None and "save_dir" not in fields:
        fields["save_dir"] = f"{folder}/checkpoints"
    return fields


_WEIGHT_BYTES = 2
_MAIN_WEIGHT_BYTES = 4
_MOMENTS: Mapping[str, int] = {"adam": 2, "muon": 1}
_MOMENT_BYTES = 4

_NAMED: Mapping[str, float] = {
    "deepseek_v3": 671e9,
    "deepseek_v2": 236e9,
    "deepseek_v2_lite": 15.7e9,
    "kimi_k2": 1.04e12,
    "nemotron_3_nano": 31.6e9,
    "nemotron_3_super": 124e9,
}
"""Parameters of recipes whose names do not contain them."""

_COUNT = re.compile(r"(?:^|_)(\d{1,6}(?:[.p]\d{1,6})?)([bmt])(?=_|$)")
_UNITS: Mapping[str, float] = {"m": 1e6, "b": 1e9, "t": 1e12}
_RESHAPING = ("hidden_size", "num_layers", "num_moe_experts", "first_k_dense_replace")
_LOAD, _FINETUNE = "checkpoint.load", "checkpoint.finetune"
_ADAPTERS = frozenset({"lora", "peft"})


def resumed_from(test: TestDefinition) -> str:
    """The checkpoint that a test resumes from; empty for a run that starts from scratch.

    With `finetune` only the weights are loaded: iterations and optimiser start from scratch, so this is not a resume.
    """
    written = {key.lstrip("+"): value for key, value in test.extra_cmd_args.items()}
    anew = written.get(_FINETUNE, "").strip().lower() == "true"
    if not test.has_launcher:  # its program has a flag for it
        anew = anew or bool(test.cmd_args.get("finetune"))
    return "" if anew else str(test.cmd_args.get("load_dir") or written.get(_LOAD, "").replace("null", ""))


def trains_adapters(test: TestDefinition) -> bool:
    """Whether only adapters are trained and kept, which are small whatever the model is."""
    return test.cmd_args.get("task") in _ADAPTERS


def parameters_of(test: TestDefinition) -> float | None:
    """The model's parameters, by the recipe's name; None where the name has none or the test changes the model."""
    if any(test.cmd_args.get(field) for field in _RESHAPING):
        return None
    return _parameters_named(str(test.cmd_args.get("model_recipe_name", "")).lower())


@lru_cache(maxsize=256)
def _parameters_named(recipe: str) -> float | None:
    if recipe in _NAMED:
        return _NAMED[recipe]
    found = _COUNT.search(recipe)
    return float(found[1].replace("p", ".")) * _UNITS[found[2]] if found else None


def bytes_per_parameter(test: TestDefinition) -> int:
    """Bytes of a parameter in a checkpoint: its bf16 value, the optimiser's fp32 value, and the optimiser's moments."""
    moments = _MOMENTS.get(str(test.cmd_args.get("optimizer_type")), max(_MOMENTS.values()))
    return _WEIGHT_BYTES + _MAIN_WEIGHT_BYTES + moments * _MOMENT_BYTES


def oversized_checkpoint(test: TestDefinition) -> str | None:
    """How large a test's checkpoint is likely to be, where that is beyond its limit; None elsewhere."""
    parameters, limit = parameters_of(test), test.harvest.max_checkpoint_bytes
    if trains_adapters(test) or parameters is None or (size := parameters * bytes_per_parameter(test)) <= limit:
        return None
    return (
        f"a checkpoint of {test.cmd_args.get('model_recipe_name')} takes about {size / 1e9:,.0f} GB "
        f"({parameters / 1e9:g} billion parameters of {bytes_per_parameter(test)} bytes with the optimiser's state), "
        f"more than harvest.max_checkpoint_bytes, {limit / 1e9:,.0f} GB"
    )
