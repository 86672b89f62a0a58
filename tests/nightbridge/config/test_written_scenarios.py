"""A scenario that is read, written and read again is the same scenario."""

import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from nightbridge import config
from nightbridge.config.documents import parse_document, toml_value
from nightbridge.config.scenarios import scenario_of, scenario_toml
from nightbridge.errors import InvalidInput
from nightbridge.models import Scenario
from tests.nightbridge.config.test_any_input import ENOUGH, FIELDS, PLAUSIBLE, TABLES, VALUES, document_of

ROOT = Path(__file__).parents[3]
SAMPLES = sorted(path for folder in ("examples", "practice") for path in (ROOT / "conf" / folder).rglob("*.toml"))
TESTS = [path for path in SAMPLES if "test_template_name" in path.read_text() or "[[Tests]]" in path.read_text()]

CMD_ARGS = {"model_family_name": "llama", "model_recipe_name": "llama3_8b", "gpu_type": "h100"}
BASE = {**ENOUGH, "cmd_args": CMD_ARGS}


def without_places(scenario: Scenario) -> Scenario:
    """What a scenario says, whatever files it came from and whatever was warned about."""
    tests = tuple(test.model_copy(update={"source": "", "lines": {}}) for test in scenario.tests)
    return scenario.model_copy(update={"source": "", "tests": tests, "invalid": (), "findings": ()})


def read_again(scenario: Scenario) -> Scenario:
    again = scenario_of(parse_document(scenario_toml(scenario), Path("written.toml")))
    assert again.invalid == ()
    return without_places(again)


def of(table: dict[str, Any]) -> Scenario:
    return scenario_of(parse_document(document_of(table), Path("t.toml")))


@pytest.mark.parametrize("path", TESTS, ids=lambda path: str(path.relative_to(ROOT / "conf")))
def test_every_sample_is_the_same_after_it_was_written(path: Path) -> None:
    scenario = config.load(path)

    assert scenario.tests
    assert read_again(scenario) == without_places(scenario)


@pytest.mark.parametrize(
    "fields",
    [
        {"extra_env_vars": {"A": "1", "B": ["x", "y"], "HF_TOKEN": "env:MY_TOKEN", "WANDB_API_KEY": "block:wandb"}},
        {"extra_env_vars": {"HF_TOKEN": "hf_written_here"}},
        {"extra_srun_args": "--comment 'two words' --exclusive", "nodes": ["n-[1-2]"], "exclude_nodes": ["n9"]},
        {"num_nodes": [1, 2]},
        {"sweep": {"method": "random", "points": 3, "seed": 7, "metric": "peak_memory", "reward": "negative"}},
        {"cmd_args": {**CMD_ARGS, "tp": [1, 2], "cuda_graph_scope": [["attn"], ["moe_router"]]}},
        {"cmd_args": {**CMD_ARGS, "cuda_graph_scope": ["attn", "mlp"]}},
        {"cmd_args": {**CMD_ARGS, "cuda_graph_scope": ["attn", "mlp"]}, "sweep": {"fields": ["cuda_graph_scope"]}},
        {"cmd_args": {**CMD_ARGS, "gb": [8, 16], "mb": [1, 2]}, "env_params": {"gb": {"weights": [0.25, 0.75]}, "mb": {}}, "agent": "bo", "agent_steps": 4},
        {"cmd_args": {**CMD_ARGS, "lr": 3e-4, "min_lr": 1e16, "warmup_iters": "10", "profiling_ranks": "0,4"}},
        {"harvest": {"checkpoint": "every 5"}, "gate": {"limits": {"step_time": {"max": 1.5}}, "required": ["grad_norm"], "golden_rules": {"grad_norm": "if measured"}}},
        {"training_report": {"exclude_start_steps": 3}, "iterations": 2, "compat": "cloudai", "time_limit": "30m"},
        {"extra_cmd_args": {"model.x": "[0,3]", "~model.y": "", "quoted \"key\"\t": "\x7f\\"}},
        {"description": "two\nlines, \"quotes\", \u00e9 and \U0001f600", "extra_container_mounts": ["/a:/b:ro"]},
    ],
)  # fmt: skip
def test_what_a_test_says_is_kept(fields: Any) -> None:
    scenario = of({**BASE, **fields})

    assert scenario.invalid == ()
    assert read_again(scenario) == without_places(scenario)


def test_a_scenario_keeps_its_tests_their_order_and_what_they_wait_for() -> None:
    canary = {
        **BASE,
        "canary": True,
        "git_repos": [
            {
                "url": "https://x/Megatron-Bridge",
                "commit": "a" * 40,
                "mount_as": "/opt/Megatron-Bridge",
                "launcher": "a/b.py",
            }
        ],
    }
    second = {**BASE, "dependencies": [{"type": "start_post_success", "id": "z"}]}
    scenario = of({"name": "s", "Tests": [{**canary, "id": "z"}, {**second, "id": "a"}]})

    assert [test.id for test in scenario.tests] == ["z", "a"]
    assert scenario.tests[1].gate.canary == "z"
    assert read_again(scenario) == without_places(scenario)


def test_a_test_without_arguments_keeps_its_empty_table() -> None:
    scenario = of({**ENOUGH, "cmd_args": {}})

    assert read_again(scenario) == without_places(scenario)


def test_a_token_that_stands_in_a_file_is_written_as_its_place() -> None:
    text = scenario_toml(of({**BASE, "cmd_args": {**CMD_ARGS, "hf_token": "hf_verysecret"}}))

    assert "hf_verysecret" not in text
    assert f'HF_TOKEN = "toml:{Path("t.toml").absolute()}#cmd_args.hf_token"' in text


@pytest.mark.thorough
@settings(max_examples=150, deadline=None)
@given(TABLES)
@example({**BASE, "extra_env_vars": {"A": "toml:x#y"}})
def test_any_test_that_is_read_is_the_same_after_it_was_written(table: dict[str, Any]) -> None:
    check(table)


@pytest.mark.thorough
@settings(max_examples=100, deadline=None)
@given(PLAUSIBLE, st.dictionaries(FIELDS, VALUES, max_size=2), st.dictionaries(FIELDS, VALUES, max_size=2))
def test_any_scenario_that_is_read_is_the_same_after_it_was_written(
    arguments: dict[str, Any], first: dict[str, Any], second: dict[str, Any]
) -> None:
    entries = [
        {**ENOUGH, **fields, "cmd_args": arguments, "id": name} for name, fields in (("a", first), ("b", second))
    ]
    check({"name": "s", "Tests": entries})


def check(table: dict[str, Any]) -> None:
    try:
        scenario = of(table)
    except InvalidInput:
        return
    kept = Scenario.model_validate_json(without_places(scenario).model_dump_json())
    if scenario.tests and kept == without_places(scenario):  # a limit of NaN is equal to nothing
        assert read_again(scenario) == without_places(scenario)


@given(st.recursive(
    st.integers() | st.booleans() | st.text() | st.floats(allow_nan=False),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
))  # fmt: skip
def test_any_value_is_the_same_in_toml(value: Any) -> None:
    assert tomllib.loads(f"value = {toml_value(value)}\n") == {"value": value}
