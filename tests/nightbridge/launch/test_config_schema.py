"""Overrides against the configuration classes of each release, and of a checkout."""

import difflib
import random
from pathlib import Path

import pytest

from nightbridge.launch.config_schema import ConfigSchema, nearest_path, released_schema
from nightbridge.launch.config_source import read_schema
from nightbridge.launch.versions import HEAD, Version

RELEASES = [Version(0, 3), Version(0, 3, 1), Version(0, 4), Version(0, 4, 2), Version(0, 5), Version(0, 6), HEAD]

BRIDGE = """
from __future__ import annotations
from dataclasses import dataclass, field
from typing import Literal, Optional, Union
import torch
from megatron.core.optimizer import OptimizerConfig as MCoreOptimizerConfig
from megatron.bridge.models import GPTModelProvider
from other_package import Unread
from .comm import CommOverlapConfig

@dataclass
class OptimizerConfig(MCoreOptimizerConfig):
    def finalize(self): ...

@dataclass(kw_only=True)
class LoggerConfig:
    log_interval: int = 100
    level: Literal["info", "debug"] = "info"
    tags: Optional[list[str]] = None
    dtype: "torch.dtype" = torch.float32

@dataclass
class FaultToleranceConfig(Unread):
    enable: bool = False

@dataclass
class ConfigContainer:
    model: GPTModelProvider
    optimizer: OptimizerConfig
    logger: LoggerConfig
    ft: Optional[FaultToleranceConfig] = None
    comm_overlap: CommOverlapConfig | None = None
    mixed_precision: Optional[Union[str, LoggerConfig]] = None
    env_vars: dict[str, str] = field(default_factory=dict)
    _private: int = 0
"""
FILES = {
    "src/megatron/bridge/training/config.py": BRIDGE,
    "src/megatron/bridge/training/comm.py": "from dataclasses import dataclass\n@dataclass\nclass CommOverlapConfig:\n"
    "    tp_comm_overlap: bool\n    depth: int = None\n",
    "src/megatron/bridge/models/__init__.py": "from .gpt import *\n",
    "src/megatron/bridge/models/gpt.py": "from dataclasses import dataclass\nfrom megatron.core.backends import Attn\n"
    "@dataclass\nclass GPTModelProvider:\n    num_layers: int = 2\n    backend: Attn = Attn.auto\n",
    "src/megatron/bridge/models/llama.py": "from dataclasses import dataclass\n"
    "from megatron.bridge.models import GPTModelProvider\n"
    "@dataclass\nclass LlamaModelProvider(GPTModelProvider):\n    rotary_base: float = 1e4\n",
    "3rdparty/Megatron-LM/megatron/core/backends.py": "import enum\nfrom enum import Enum\nclass Attn(Enum):\n"
    "    flash = 1\n    auto = 2\n",
    "3rdparty/Megatron-LM/megatron/core/optimizer/__init__.py": "from .config import OptimizerConfig\n",
    "3rdparty/Megatron-LM/megatron/core/optimizer/config.py": "from dataclasses import dataclass\n@dataclass\n"
    "class OptimizerConfig:\n    lr: float | None = None\n",
}


@pytest.fixture(scope="module")
def schema(tmp_path_factory: pytest.TempPathFactory) -> ConfigSchema:
    checkout = tmp_path_factory.mktemp("checkout")
    for name, text in FILES.items():
        (checkout / name).parent.mkdir(parents=True, exist_ok=True)
        (checkout / name).write_text(text)
    found = read_schema(checkout)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("optimizer.lr", "3e-4"),
        ("optimizer.lr", "null"),
        ("model.rotary_base", "500000"),
        ("model.backend", "flash"),
        ("logger.level", "debug"),
        ("logger.tags", "[a,b]"),
        ("logger.dtype", "torch.bfloat16"),
        ("mixed_precision", "bf16_mixed"),
        ("mixed_precision.log_interval", "5"),
        ("comm_overlap.depth", "null"),
        ("ft.enable", "True"),
        ("ft.field_of_the_other_package", "1"),
        ("env_vars.NCCL_DEBUG", "INFO"),
        ("logger.log_interval", None),
    ],
)
def test_what_the_classes_have_is_accepted(schema: ConfigSchema, path: str, value: str | None) -> None:
    assert schema.problem(path, value) is None


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("optimiser.lr", "1", "the configuration has no field optimiser; did you mean optimizer.lr?"),
        ("logger.log_intervall", "1", "did you mean logger.log_interval?"),
        ("model.rotary_bas", "1", "did you mean model.rotary_base?"),
        ("logger.log_interval.x", "1", None),
        ("_private", "1", "no field _private"),
        ("optimizer.lr", "three", "optimizer.lr is a number or null, not 'three'"),
        ("optimizer.lr", "'3'", "a number"),
        ("optimizer.lr", "[1]", "a number"),
        ("logger.log_interval", "1.5", "a whole number"),
        ("logger.log_interval", "1" * 5000, "a whole number"),
        ("logger.level", "loud", "'info' or 'debug'"),
        ("logger.dtype", "bf17", "a torch dtype"),
        ("model.backend", "flush", "flash or auto"),
        ("model.num_layers", "null", "a whole number"),
        ("comm_overlap.tp_comm_overlap", "maybe", "true or false"),
        ("comm_overlap", "7", "a table of CommOverlapConfig"),
    ],
)
def test_what_they_do_not_have_is_refused(schema: ConfigSchema, path: str, value: str, message: str | None) -> None:
    found = schema.problem(path, value)
    assert (found is None) if message is None else (message in str(found))


def test_shipped_classes_stand_for_those_of_a_submodule_that_was_not_fetched(tmp_path: Path) -> None:
    for name, text in FILES.items():
        if not name.startswith("3rdparty"):
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text)

    own, with_others = read_schema(tmp_path), read_schema(tmp_path, HEAD)

    assert own is not None
    assert with_others is not None
    for path, value in (("optimizer.lrr", "1"), ("optimizer.lr", "three")):
        assert own.problem(path, value) is None  # nothing is guessed
        assert "optimizer.lr" in str(with_others.problem(path, value))
    assert with_others.problem("optimizer.adam_beta2", "0.95") is None
    assert with_others.problem("logger.tagss", "1") == own.problem("logger.tagss", "1") is not None


def test_a_checkout_without_a_configuration_has_no_schema(tmp_path: Path) -> None:
    assert read_schema(tmp_path) is None


def test_a_file_that_is_not_python_leaves_its_classes_open(tmp_path: Path) -> None:
    for name, text in {**FILES, "3rdparty/Megatron-LM/megatron/core/optimizer/config.py": "class ("}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    schema = read_schema(tmp_path)
    assert schema is not None
    assert schema.problem("optimizer.anything", "1") is None
    assert schema.problem("logger.anything", "1") is not None


@pytest.mark.parametrize("version", RELEASES, ids=str)
def test_the_mistakes_of_the_review_are_found_in_every_release(version: Version) -> None:
    schema = released_schema(version)
    for path, value, hint in [
        ("logger.tensorbord_dir", "x", "logger.tensorboard_dir"),
        ("train.train_iterz", "5", "train.train_iters"),
        ("modle.num_layers", "4", "model.num_layers"),
        ("optimizer.lr", "three", "a number"),
        ("checkpoint.async_save", "maybe", "true or false"),
        ("ddp", "5", "a table of DistributedDataParallelConfig"),
    ]:
        assert hint in str(schema.problem(path, value))


def test_a_version_between_releases_has_the_classes_of_the_one_before() -> None:
    assert released_schema(Version(0, 4, 1)).commit == released_schema(Version(0, 4)).commit
    assert released_schema(Version(0, 1)).commit == released_schema(Version(0, 3)).commit
    assert released_schema(HEAD).commit != released_schema(Version(0, 6)).commit


@pytest.mark.thorough
def test_misspelt_fields_are_found_with_the_right_suggestion() -> None:
    """One letter is doubled, dropped or replaced in each of 200 fields drawn from all sections."""
    schema, draw = released_schema(HEAD), random.Random(221123)
    paths = sorted(path for path in schema.paths if path.count(".") == 1 and len(path.split(".")[1]) > 4)
    right = 0
    for path in draw.sample(paths, 200):
        start, place = path.index(".") + 1, draw.randrange(path.index(".") + 2, len(path))
        wrong = draw.choice(
            [
                path[:place] + path[place:][0] + path[place:],
                path[:place] + path[place + 1 :],
                path[:place] + "z" + path[place + 1 :],
            ]
        )
        if wrong[start:] == path[start:] or wrong in schema.paths:
            right += 1
            continue
        found = schema.problem(wrong, "1")
        assert found is not None, wrong
        right += f"did you mean {path}?" in found
    assert right >= 190


def test_the_nearest_name_is_the_one_that_difflib_finds() -> None:
    schema, draw = released_schema(HEAD), random.Random(7)

    for path in draw.sample(schema.paths, 30):
        place = draw.randrange(len(path))
        misspelt = path[:place] + draw.choice(("", "x", path[place] * 2)) + path[place + draw.randrange(3) :]
        near = difflib.get_close_matches(misspelt, schema.paths, n=1, cutoff=0.7)

        assert nearest_path(misspelt, schema.paths) == near


def test_the_literal_defaults_of_sections_whose_class_is_certain_are_read(schema: ConfigSchema) -> None:
    assert schema.defaults == {
        "optimizer": {"lr": None},
        "logger": {"log_interval": 100, "level": "info", "tags": None},
        "ft": {"enable": False},
        "comm_overlap": {"depth": None},
        "mixed_precision": {"log_interval": 100, "level": "info", "tags": None},
    }
