"""Where a run writes, and the flags that make it write there: a performance recipe alone writes nothing."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nightbridge.models import Image, RunSpec

JOB_FOLDER = "/nemo_run"
"""Where NeMo-Run mounts the job's folder in its container."""

RECIPE_STEPS = 50
"""Steps of every flat performance recipe, where the test does not say."""

_LOGGING: Mapping[str, str] = {
    "logger.log_timers_to_tensorboard": "true",
    "logger.log_throughput_to_tensorboard": "true",
    "logger.log_memory_to_tensorboard": "true",
}


def output_dir(image: Image, attempt_dir: Path) -> Path | None:
    """The host folder that a run without a container writes to; None in a container, where it is the job's folder."""
    return attempt_dir / "output" if image.kind == "none" else None


def overrides(spec: RunSpec, folder: Path | None) -> dict[str, str]:
    """The Hydra overrides: TensorBoard switched on, unless the test says otherwise, then the test's own."""
    written = spec.test.extra_cmd_args
    taken = {key.lstrip("+~") for key in written}
    added = {"logger.tensorboard_dir": f"{folder or JOB_FOLDER}/tb_logs", **_LOGGING}
    return {key: value for key, value in added.items() if key not in taken} | dict(written)


def output_arguments(spec: RunSpec, folder: Path | None, attempt_name: str) -> dict[str, Any]:
    """The fields of the launcher that say where and when the run writes; they replace the test's own.

    A folder that the test names gets the attempt appended: the checkpoints of last night would be resumed else.
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
