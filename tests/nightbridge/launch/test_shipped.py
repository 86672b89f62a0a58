"""The configurations that NVIDIA ships: read from its source, and accepted but for those that its own code refuses."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from nightbridge.launch.shipped import shipped_configurations
from nightbridge.models import HarvestPolicy
from nightbridge.rules import check_test, errors_of
from tests.builders import make_test

DATA = Path(__file__).parents[2] / "data" / "shipped"
COUNTS = {
    "v0.3.0": 244,
    "v0.3.1": 281,
    "v0.4.0": 371,
    "v0.4.2": 373,
    "v0.5.0": 429,
    "v0.5.1": 430,
    "v0.6.0": 422,
    "main": 432,
}
"""Each file names the repository and the commit that it was read from."""

REFUSED_BY_MEGATRON = {
    # The layout of 256 or 1024 GPUs under the name of 64 or 128: EP x PP is more than there are GPUs.
    *(f"deepseek_v3_pretrain_64gpu_h100_{dtype}_config" for dtype in ("bf16", "fp8cs")),
    *(f"deepseek_v3_pretrain_128gpu_vr200_{dtype}_config" for dtype in ("bf16", "fp8cs", "fp8mx", "nvfp4")),
    *(f"qwen3_235b_a22b_pretrain_64gpu_gb200_{dtype}_config" for dtype in ("fp8cs", "fp8mx", "nvfp4")),
    *(f"qwen3_235b_a22b_pretrain_64gpu_gb300_{dtype}_config" for dtype in ("bf16", "fp8cs", "fp8mx", "nvfp4")),
    # 192 samples for 128 data-parallel replicas.
    *(f"nemotronh_56b_pretrain_256gpu_{gpu}_bf16_config" for gpu in ("b200", "gb300")),
}
NO_WORD_OF_THE_LAUNCHER = {"qwen3_30b_a3b_pretrain_16gpu_h100_fp8ds_config"}
"""Its parser has no dtype fp8_ds, so the recipe cannot be named."""


def shipped(version: str) -> dict[str, dict[str, Any]]:
    with gzip.open(DATA / f"{version}.json.gz") as file:
        configurations: dict[str, dict[str, Any]] = json.load(file)["configurations"]
    return configurations


@pytest.mark.parametrize("version", COUNTS)
def test_what_a_release_ships_is_valid_unless_its_own_code_refuses_it(version: str) -> None:
    configurations = shipped(version)
    refused = {}
    for name, args in configurations.items():
        test = make_test(args, version=version, harvest=HarvestPolicy(checkpoint="none"))
        if found := errors_of(check_test(test)):
            refused[name] = {violation.rule for violation in found}

    assert len(configurations) == COUNTS[version]
    known = REFUSED_BY_MEGATRON & configurations.keys()
    assert {name for name, rules in refused.items() if rules != {"choice"}} == known
    assert {name for name, rules in refused.items() if rules == {"choice"}} == (
        NO_WORD_OF_THE_LAUNCHER & configurations.keys()
    )
    assert bool(known) is (version in ("v0.6.0", "main"))


# --- reading a checkout -----------------------------------------------------------------------------------------------

PRESETS = """
BASE_TINY_CONFIG = WorkloadBaseConfig(num_gpus=8, global_batch_size=128, peft=None)
_TINY = replace(BASE_TINY_CONFIG, tensor_model_parallel_size=2)
TINY_1B_PRETRAIN_CONFIG_H100_FP8_CS_V1 = replace(_TINY, cuda_graph_impl="full_iteration", recompute_modules=["mlp"])
TINY_1B_SFT_CONFIG_H100 = _TINY
TINY_1B_LORA_CONFIG_H100_BF16 = replace(UNKNOWN, tensor_model_parallel_size=2)
"""
RECIPE = """
def tiny_1b_pretrain_16gpu_gb200_bf16_config():
    cfg = tiny_1b_config()
    cfg.model.tensor_model_parallel_size = 4
    cfg.train.global_batch_size = _computed()
    return cfg


def tiny_1b_pretrain_8gpu_gb200_fp8mx_large_config():
    cfg = tiny_1b_pretrain_16gpu_gb200_bf16_config()
    cfg.model.pipeline_model_parallel_size = 2
    return cfg
"""


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True)
    path.write_text(text)


def test_presets_and_recipes_are_read_as_a_test_would_write_them(tmp_path: Path) -> None:
    write(tmp_path / "scripts/performance/configs/tiny/tiny_workload_base_configs.py", PRESETS)
    write(tmp_path / "src/megatron/bridge/perf_recipes/tiny/gb200/tiny.py", RECIPE)

    read = {each.name: (each.place.rpartition("/")[2], each.cmd_args) for each in shipped_configurations(tmp_path)}

    named = {"model_family_name": "tiny", "model_recipe_name": "tiny_1b"}
    preset = {**named, "gpu_type": "h100", "num_gpus": 8, "gb": 128, "tp": 2}
    recipe = {**named, "gpu_type": "gb200", "task": "pretrain", "tp": 4}
    graph = {"cuda_graph_impl": "local", "cuda_graph_scope": "full_iteration", "recompute_modules": ["mlp"]}
    assert read == {
        "TINY_1B_PRETRAIN_CONFIG_H100_FP8_CS_V1": (
            "tiny_workload_base_configs.py:4",
            {**preset, "task": "pretrain", "compute_dtype": "fp8_cs", **graph},
        ),
        "TINY_1B_SFT_CONFIG_H100": (
            "tiny_workload_base_configs.py:5",
            {**preset, "task": "sft", "compute_dtype": "bf16"},
        ),
        "tiny_1b_pretrain_16gpu_gb200_bf16_config": (
            "tiny.py:2",
            {**recipe, "compute_dtype": "bf16", "num_gpus": 16},
        ),
        "tiny_1b_pretrain_8gpu_gb200_fp8mx_large_config": (
            "tiny.py:9",
            {**recipe, "compute_dtype": "fp8_mx", "num_gpus": 8, "pp": 2, "config_variant": "large"},
        ),
    }
