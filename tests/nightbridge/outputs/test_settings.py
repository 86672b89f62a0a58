from pathlib import Path
from typing import Any

import pytest
import yaml

from nightbridge.launch.launch_plan import ProfiledSteps
from nightbridge.models import GitRepo, RunSpec, TestDefinition
from nightbridge.outputs.measurements import RunSettings, read_settings

CONTAINER = """
_target_: megatron.bridge.training.config.ConfigContainer
train: {global_batch_size: 256}
model:
  transformer: {seq_length: 8192}
profiling:
  use_nsys_profiler: true
  use_pytorch_profiler: false
  profile_step_start: 30
  profile_step_end: 32
"""


@pytest.fixture
def spec() -> Any:
    def make(**cmd_args: Any) -> RunSpec:
        repo = GitRepo(url="https://github.com/NVIDIA-NeMo/Megatron-Bridge.git")
        test = TestDefinition(id="llama3_8b", name="x", cmd_args=cmd_args, git_repos=(repo,), nemo_run_repo=repo)
        return RunSpec(scenario="nightly", night="2026-11-20", test=test)

    return make


@pytest.fixture
def container(tmp_path: Path) -> Any:
    def write(text: str) -> Any:
        path = tmp_path / "ConfigContainer.yaml"
        path.write_text(text)
        return path

    return write


def test_without_a_dump_the_test_file_counts(spec: Any) -> None:
    assert read_settings(spec(num_gpus=64, gb=128, seq_length=4096), None) == RunSettings(
        num_gpus=64, global_batch_size=128, sequence_length=4096
    )


def test_what_the_run_dumped_counts_more(spec: Any, container: Any) -> None:
    settings = read_settings(spec(num_gpus=64, gb=128, seq_length=4096, pytorch_profiler=True), container(CONTAINER))
    assert settings == RunSettings(
        num_gpus=64,
        global_batch_size=256,
        sequence_length=8192,
        profiled=ProfiledSteps(first=31, last=33),
        dumped={"global batch size": 256, "sequence length": 8192},
    )


@pytest.mark.parametrize("text", ["model: [", "{}", "model: {}\ntrain: {}\nprofiling: 7\n"])
def test_what_a_broken_or_empty_dump_does_not_say_is_taken_from_the_test(spec: Any, container: Any, text: str) -> None:
    settings = read_settings(spec(gb=128, seq_length=4096), container(text))
    assert (settings.global_batch_size, settings.sequence_length) == (128, 4096)


@pytest.mark.parametrize(
    ("args", "first", "last"),
    [
        ({"enable_nsys": True}, 11, 12),
        ({"enable_nsys": True, "profiling_start_step": 20, "profiling_stop_step": 25}, 21, 26),
        ({"pytorch_profiler": True}, 9, 12),
        ({"pytorch_profiler": True, "profiling_start_step": 0, "profiling_stop_step": 2}, 1, 3),
    ],
)
def test_a_profiler_spoils_its_window_and_what_it_takes_to_start_and_stop(
    spec: Any, args: Any, first: Any, last: Any
) -> None:
    assert read_settings(spec(**args), None).profiled == ProfiledSteps(first=first, last=last)


@pytest.mark.parametrize(
    "args",
    [{}, {"profiling_start_step": 5}, {"enable_nsys": True, "profiling_start_step": 9, "profiling_stop_step": 9}],
)
def test_without_a_profiler_or_a_window_nothing_is_spoiled(spec: Any, args: Any) -> None:
    assert read_settings(spec(**args), None).profiled is None


LARGEST, LAST = {"largest learning rate": 3e-4}, {"last learning rate": 3e-5}


@pytest.mark.parametrize(
    ("schedule", "rates"),
    [
        ({"lr_decay_style": "cosine"}, LARGEST | LAST),
        ({"lr_decay_style": "linear", "lr_warmup_iters": 49}, LARGEST | LAST),
        ({"lr_decay_style": "constant"}, LARGEST),
        ({"lr_decay_style": "cosine", "lr_decay_iters": 51}, LARGEST),
        ({"lr_decay_style": "constant", "lr_warmup_iters": 50}, {}),
        ({"lr_decay_style": "constant", "lr_warmup_steps": 499}, LARGEST),
        ({"lr_decay_style": "constant", "lr_warmup_steps": 500, "lr_warmup_iters": 5}, {}),
        ({"lr_decay_style": "constant", "lr_warmup_fraction": 1.0}, {}),
        ({"lr_decay_style": "cosine", "lr_decay_iters": 500, "lr_warmup_fraction": 0.1}, {}),
    ],
    ids=lambda value: str(value),
)
def test_a_rate_that_the_run_does_not_reach_is_none_of_its_plan(
    spec: Any, container: Any, schedule: dict[str, object], rates: dict[str, float]
) -> None:
    table = {
        "_target_": "megatron.bridge.training.config.ConfigContainer",
        "train": {"train_iters": 50, "global_batch_size": 10},
        "model": {},
        "optimizer": {"lr": 3e-4, "min_lr": 3e-5},
        "scheduler": schedule,
    }

    dumped = read_settings(spec(), container(yaml.safe_dump(table))).dumped

    assert {name: value for name, value in dumped.items() if "rate" in name} == rates


@pytest.mark.parametrize(
    ("fields", "precision"),
    [
        ({"bf16": True, "fp8": "hybrid", "fp4": "e2m1"}, "fp4"),
        ({"bf16": True, "fp8": "hybrid", "fp4": None}, "fp8"),
        ({"bf16": True, "fp16": False}, "bf16"),
        ({"bf16": False, "fp16": True}, "fp16"),
        ({"bf16": False}, "fp32"),
        (None, None),
        ("bf16_mixed", None),
    ],
    ids=str,
)
def test_the_smallest_type_of_a_recipe_is_its_precision(
    spec: Any, container: Any, fields: object, precision: str | None
) -> None:
    table = {"_target_": "megatron.bridge.training.config.ConfigContainer", "model": {}, "mixed_precision": fields}

    settings = read_settings(spec(), container(yaml.safe_dump({**table, "train": {"global_batch_size": 10}})))

    assert settings.dumped == {"global batch size": 10} | ({"precision": precision} if precision else {})
