"""No text makes anything but a scenario or a clear error."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nightbridge.config.documents import parse_document
from nightbridge.config.scenarios import runs, scenario_of
from nightbridge.config.schema import IGNORED, TestTable
from nightbridge.errors import InvalidInput
from nightbridge.launch.flags import NO_EFFECT, TEST_FLAGS
from nightbridge.models import Scenario
from nightbridge.rules import check_scenario

pytestmark = pytest.mark.thorough

PATH = Path("any.toml")


def outcome(text: str) -> Scenario | None:
    try:
        scenario = scenario_of(parse_document(text, PATH))
    except InvalidInput:
        return None
    assert isinstance(scenario, Scenario)
    assert scenario == Scenario.model_validate_json(scenario.model_dump_json())
    for test in scenario.invalid:
        assert test.violations
    return check_scenario(scenario)


@given(st.text())
def test_any_text_gives_a_scenario_or_a_clear_error(text: str) -> None:
    outcome(text)


VALUES = st.recursive(
    st.one_of(
        st.integers(),
        st.floats(),
        st.booleans(),
        st.text(max_size=8),
        st.sampled_from(["MegatronBridge", "none", "30m", "a;b", "env:", "block:x", "2026-01-01"]),
    ),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
FIELDS = st.sampled_from([*TestTable.model_fields, *IGNORED, "Tests", "id", "unknown"])
ARGUMENTS = st.sampled_from(
    [*TEST_FLAGS, *NO_EFFECT, "model_name", "model_size", "time_limit", "custom_mounts", "oops"]
)
ENOUGH = {
    "name": "t",
    "test_template_name": "MegatronBridge",
    "git_repos": [{"url": "https://example.org/Megatron-Bridge.git", "commit": "v0.4.2"}],
}
SIZES = st.integers(-1, 16)
PLAUSIBLE = st.fixed_dictionaries(
    {
        "model_family_name": st.just("llama"),
        "model_recipe_name": st.sampled_from(["llama3_8b", "a b"]),
        "gpu_type": st.just("h100"),
        "container_image": st.sampled_from(["none", "nvcr.io#nvidia/nemo:26.04"]),
    },
    optional={
        "num_gpus": SIZES,
        "gpus_per_node": SIZES,
        "tp": SIZES,
        "pp": SIZES,
        "mb": SIZES,
        "gb": SIZES,
        "vp": SIZES | st.just("None"),
        "max_steps": SIZES,
        "save_dir": st.text(max_size=6),
        "hf_token": st.text(max_size=6),
        "profiling_ranks": st.sampled_from(["0,4", "x", "0,,1"]) | st.lists(SIZES, max_size=2),
        "pytorch_profiler": st.booleans(),
        "profiling_start_step": SIZES,
    },
)
TABLES = st.builds(
    lambda fields, arguments, valid: {**(ENOUGH if valid else {}), **fields, "cmd_args": arguments},
    st.dictionaries(FIELDS, VALUES, max_size=4) | st.just({}),
    st.dictionaries(ARGUMENTS, VALUES, max_size=6) | PLAUSIBLE,
    st.booleans(),
)


def quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def toml_of(value: Any) -> str:
    """The table as TOML; every value inline."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{quoted(key)} = {toml_of(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(toml_of, value)) + "]"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return quoted(value)
    return str(value)


def document_of(table: dict[str, Any]) -> str:
    return "\n".join(f"{quoted(key)} = {toml_of(value)}" for key, value in table.items())


@settings(max_examples=300, deadline=None)
@given(TABLES)
def test_any_table_with_our_keys_gives_a_scenario_or_a_clear_error(table: dict[str, Any]) -> None:
    scenario = outcome(document_of(table))

    if scenario is not None:
        for run in runs(scenario, "2026-11-21"):
            assert run.run_key


@settings(max_examples=100, deadline=None)
@given(TABLES, st.dictionaries(FIELDS, VALUES, max_size=3))
def test_any_scenario_entry_gives_a_scenario_or_a_clear_error(table: dict[str, Any], entry: dict[str, Any]) -> None:
    entry = {"id": "a", **table, **entry}
    outcome(document_of({"name": "s", "Tests": [entry, {"id": "b", "test_name": "nowhere"}]}))
