"""The JSON Schema for editors: takes what `validate` takes, and marks what it does not know."""

import json
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from nightbridge.config.schema import editor_schema

CONF = Path(__file__).parents[3] / "conf"
TESTS = [
    path for path in sorted(CONF.rglob("*.toml")) if any(key in path.read_text() for key in ("[[Tests]]", "[cmd_args]"))
]
SAMPLE = tomllib.loads((CONF / "examples" / "llama3_8b.toml").read_text())


@cache
def schema() -> dict[str, Any]:
    """Made when the first test needs it: each worker collects these tests, and one runs them."""
    return editor_schema()


def problems(table: dict[str, Any]) -> list[str]:
    checker = jsonschema.Draft202012Validator(schema())
    return [error.message for error in checker.iter_errors(table)]


def distinct(part: Any, keyword: str = "") -> Any:
    """A schema with one of all properties that are alike, as 2,600 options of Megatron-Bridge are."""
    if isinstance(part, list):
        return [distinct(each) for each in part]
    if not isinstance(part, dict):
        return part
    names = {json.dumps(value): name for name, value in part.items()}.values() if keyword == "properties" else part
    return {name: distinct(part[name], name) for name in names}


def test_it_is_a_json_schema() -> None:
    jsonschema.Draft202012Validator.check_schema(distinct(schema()))


@pytest.mark.parametrize("path", TESTS, ids=lambda path: path.name)
def test_every_sample_fits(path: Path) -> None:
    assert problems(tomllib.loads(path.read_text())) == []


@pytest.mark.parametrize(
    "change",
    [
        {"gaet": {}},
        {"gate": {"step_tim": 0.05}},
        {"iterations": "three"},
        {"cmd_args": {**SAMPLE["cmd_args"], "tpp": 2}},
        {"cmd_args": {**SAMPLE["cmd_args"], "compute_dtype": "fp9"}},
    ],
)
def test_what_validate_refuses_does_not_fit(change: dict[str, Any]) -> None:
    assert problems({**SAMPLE, **change}) != []


def test_sweeps_fit_and_overrides_are_completed() -> None:
    assert (
        problems({**SAMPLE, "cmd_args": {**SAMPLE["cmd_args"], "tp": [1, 2], "compute_dtype": ["bf16", "fp8_cs"]}})
        == []
    )
    assert {"train.train_iters", "model.transformer.num_layers"} <= schema()["else"]["properties"]["extra_cmd_args"][
        "properties"
    ].keys()
