from pathlib import Path
from typing import Any

import pytest

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
