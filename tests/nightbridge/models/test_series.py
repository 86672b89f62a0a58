"""Which runs are compared with each other."""

from collections.abc import Callable
from datetime import date
from typing import Any

import pytest

from nightbridge.launch.flags import FLAGS
from nightbridge.models import GatePolicy, GitRepo, HarvestPolicy, RunSpec, SecretRef
from nightbridge.models.series import SWITCHES, series_id

ARGUMENTS = {"model_recipe_name": "llama3_8b", "num_gpus": 8, "max_steps": 50}


def test_name_is_the_slug_and_twelve_hex(make_spec: Callable[..., RunSpec]) -> None:
    name = series_id(make_spec(test_id="Llama3 8B/FP8"), "dgx")

    assert name.startswith("llama3-8b-fp8-")
    assert len(name.removeprefix("llama3-8b-fp8-")) == 12


def test_is_the_same_on_every_machine(make_spec: Callable[..., RunSpec]) -> None:
    # A changed value here means that every history in every store starts anew: do not change it lightly.
    assert series_id(make_spec(), "dgx") == "llama3-8b-841b57002a41"


@pytest.mark.parametrize(
    "change",
    [
        {"night": "2026-11-11"},
        {"repeat": 2},
        {"cmd_args": ARGUMENTS | {"container_image": "nvcr.io/nvidia/nemo:26.10"}},
        {"cmd_args": ARGUMENTS | {"save_dir": "/scratch/tonight"}},
        {"cmd_args": ARGUMENTS | {"log_dir": "/scratch/logs", "nemo_home": "/scratch/nemo"}},
        {"cmd_args": ARGUMENTS | {"wandb_project_name": "p", "wandb_experiment_name": "e", "wandb_save_dir": "/w"}},
        {"cmd_args": ARGUMENTS | {"time_limit": "01:00:00", "account": "research"}},
        {"cmd_args": ARGUMENTS | {"recompute_modules": [], "tokenizer_type": ""}},
        {"cmd_args": ARGUMENTS | {"max_steps": "50"}},
        {"cmd_args": {name: value for name, value in ARGUMENTS.items() if name != "num_gpus"}},
        {"cmd_args": ARGUMENTS | {"gpus_per_node": 8, "enable_nsys": False, "deterministic": "false"}},
        {"cmd_args": ARGUMENTS | {"task": "pretrain", "domain": "llm", "compute_dtype": "bf16", "data": "mock"}},
        {"extra_env_vars": {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "ALL"}},
        {"git_repos": (GitRepo(url="https://example.org/fork/Megatron-Bridge.git", commit="f" * 40),)},
        {"nemo_run_repo": GitRepo(url="https://github.com/NVIDIA-NeMo/Run.git", commit="v0.11.1")},
        {"description": "another text", "time_limit": "00:20:00", "iterations": 3},
        {"extra_env_vars": {"TRITON_CACHE_DIR": "/scratch/triton", "WANDB_NAME": "tonight", "HF_HOME": "/hf"}},
        {"extra_cmd_args": {"logger.tensorboard_dir": "/nemo_run/tb", "checkpoint.save": "/ckpt"}},
        {"extra_cmd_args": {"++logger.wandb_exp_name": "tonight"}},
        {"sbatch_args": ("--nodelist=node[1-2]",)},
        {"cmd_args": ARGUMENTS | {"custom_mounts": ["/data:/data"]}},
        {"extra_container_mounts": ("/data:/data",)},
        {"gate": GatePolicy(step_time=0.02), "harvest": HarvestPolicy(checkpoint="all")},
        {"secrets": {"HF_TOKEN": SecretRef(source="env", name="HF_TOKEN")}},
    ],
    ids=lambda change: "+".join(change),
)
def test_pins_paths_names_and_scheduling_stay_in_the_series(
    make_spec: Callable[..., RunSpec], change: dict[str, Any]
) -> None:
    assert series_id(make_spec(**change), "dgx") == series_id(make_spec(), "dgx")


@pytest.mark.parametrize(
    "change",
    [
        {"test_id": "llama3-8b-fp8"},
        {"sweep_point": {"cmd_args.tensor_model_parallel_size": 2}},
        {"cmd_args": ARGUMENTS | {"num_gpus": 16}},
        {"cmd_args": ARGUMENTS | {"max_steps": 100}},
        {"cmd_args": ARGUMENTS | {"dataset_paths": ["/data/c4"]}},
        {"cmd_args": ARGUMENTS | {"pretrained_checkpoint": "/ckpt/base"}},
        {"cmd_args": ARGUMENTS | {"enable_vboost": False}},
        {"cmd_args": ARGUMENTS | {"compute_dtype": "fp8_mx"}},
        {"cmd_args": ARGUMENTS | {"deterministic": True}},
        {"cmd_args": ARGUMENTS | {"release": date(2026, 11, 1)}},
        {"extra_env_vars": {"NCCL_ALGO": "Ring"}},
        {"extra_cmd_args": {"model.num_layers": "4"}},
        {"extra_cmd_args": {"logger.log_throughput_to_tensorboard": "true"}},
        {"extra_cmd_args": {"checkpoint.save_interval": "10"}},
    ],
    ids=lambda change: "+".join(change),
)
def test_what_changes_the_computation_starts_a_new_series(
    make_spec: Callable[..., RunSpec], change: dict[str, Any]
) -> None:
    assert series_id(make_spec(**change), "dgx") != series_id(make_spec(), "dgx")


def test_the_switches_are_those_of_the_flag_table() -> None:
    assert {flag.field for flag in FLAGS if flag.format == "presence"} == SWITCHES


def test_clusters_have_series_of_their_own(make_spec: Callable[..., RunSpec]) -> None:
    assert series_id(make_spec(), "dgx") != series_id(make_spec(), "local")


def test_order_of_keys_and_hydra_prefixes_do_not_matter(make_spec: Callable[..., RunSpec]) -> None:
    one = make_spec(cmd_args=ARGUMENTS, extra_cmd_args={"a.b": "1", "c.d": "2"})
    other = make_spec(cmd_args=dict(reversed(ARGUMENTS.items())), extra_cmd_args={"++c.d": "2", "+a.b": "1"})

    assert series_id(one, "dgx") == series_id(other, "dgx")


def test_survives_the_journey_through_json(make_spec: Callable[..., RunSpec]) -> None:
    spec = make_spec(cmd_args=ARGUMENTS | {"lr": 3.0e-4, "profiling_ranks": (0, 4)})

    assert series_id(RunSpec.model_validate_json(spec.model_dump_json()), "dgx") == series_id(spec, "dgx")
