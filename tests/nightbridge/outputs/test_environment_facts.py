"""What a job says about the machines and the image, in the formats of Slurm's neighbours and NVIDIA's images."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from nightbridge.outputs.experiment import read_facts, read_run
from tests.nightbridge.outputs.builders import RunFolder

LOG = """\
=============
== PyTorch ==
=============

NVIDIA Release 25.09 (build 204519324)
PyTorch Version 2.9.0a0+50eac811a6
NOTE: CUDA Forward Compatibility mode ENABLED.
  Using CUDA 13.0 driver version 580.82.07 with kernel driver version 550.54.15.
node1:4242:4242 [0] NCCL INFO NCCL version 2.27.7+cuda13.0
"""


@pytest.fixture
def facts(run_folder: RunFolder) -> Any:
    return lambda *pinned: read_facts(read_run(run_folder.job, None), run_folder.job, pinned)


def test_the_log_tells_driver_nccl_and_the_images_release(
    run_folder: RunFolder, facts: Callable[..., dict[str, str]]
) -> None:
    run_folder.log(LOG)

    assert facts() == {
        "driver": "550.54.15",
        "NCCL": "2.27.7",
        "CUDA of NCCL": "13.0",
        "image release": "25.09",
        "PyTorch": "2.9.0a0+50eac811a6",
    }


def test_nvidia_smi_in_a_prologue_tells_the_driver(run_folder: RunFolder, facts: Callable[..., dict[str, str]]) -> None:
    run_folder.log("| NVIDIA-SMI 550.54.15    Driver Version: 550.54.15    CUDA Version: 12.4     |\n")

    assert facts() == {"driver": "550.54.15", "CUDA of the driver": "12.4"}


def test_of_a_dumped_environment_only_versions_are_taken(
    run_folder: RunFolder, facts: Callable[..., dict[str, str]]
) -> None:
    run_folder.log(LOG)
    dump = run_folder.job_dir / f"env_{run_folder.job.job_id}.log"
    dump.write_text("HF_TOKEN=hf_secret\nCUDA_VERSION=13.0.1.012\nNCCL_VERSION=2.27.6\nCUDA_DRIVER_VERSION=580.82.07\n")

    found = facts()

    assert (found["CUDA"], found["driver that CUDA brings"]) == ("13.0.1.012", "580.82.07")
    assert found["NCCL"] == "2.27.6"  # the environment counts before the log
    assert not any("hf_secret" in value for value in found.values())


def test_commits_inside_the_image_are_facts_and_pinned_ones_are_not(
    run_folder: RunFolder, facts: Callable[..., dict[str, str]]
) -> None:
    status = [{"name": "Megatron-LM", "sha": "c" * 40}, {"name": "Megatron-Bridge", "sha": "a" * 40}, {"name": "TE"}]
    folder = run_folder.job_dir / "configs"
    folder.mkdir(parents=True)
    (folder / "repo_status.json").write_text(json.dumps(status))

    assert facts("a" * 40) == {"Megatron-LM in the image": "c" * 12}


@pytest.mark.parametrize(
    "text", ["", "{", '{"name": 1}', "[1, null]", "[" * 100_000, '[{"sha": "refs/heads/m\\u0000"}]']
)
def test_a_status_that_is_none_says_nothing(
    run_folder: RunFolder, facts: Callable[..., dict[str, str]], text: str
) -> None:
    folder = run_folder.job_dir / "configs"
    folder.mkdir(parents=True)
    (folder / "repo_status.json").write_text(text)

    assert facts() == {}
