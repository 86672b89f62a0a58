"""The names of nights and runs: the same everywhere and for ever."""

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from nightbridge.models import RunKey, make_run_key, slug

IDENTITY: dict[str, Any] = {
    "scenario": "nightly",
    "night": "2026-11-21",
    "test_id": "llama3 70B, FP8",
    "sweep_point": {"tp": 2, "mb": 1},
    "iteration": 1,
    "repeat": 0,
}


def test_a_run_key_is_the_same_for_ever() -> None:
    # Stored runs and jobs are found by it: whoever changes this loses all histories.
    assert make_run_key(**IDENTITY) == "llama3-70b-fp8-2026-11-21-57513fb7f1"


def test_the_order_in_which_a_sweep_point_is_written_does_not_matter() -> None:
    turned = {**IDENTITY, "sweep_point": {"mb": 1, "tp": 2}}

    assert make_run_key(**turned) == make_run_key(**IDENTITY)


@pytest.mark.parametrize(
    "change",
    [
        {"scenario": "weekly"},
        {"night": "2026-11-22"},
        {"test_id": "llama3 70B; FP8"},
        {"test_id": "LLAMA3 70B, FP8"},
        {"sweep_point": {}},
        {"sweep_point": {"tp": 2, "mb": 2}},
        {"sweep_point": {"tp": "2", "mb": 1}},
        {"sweep_point": {"tp": 2, "pp": 1}},
        {"iteration": 2},
        {"repeat": 1},
    ],
)
def test_whatever_makes_another_run_makes_another_key(change: dict[str, Any]) -> None:
    assert make_run_key(**{**IDENTITY, **change}) != make_run_key(**IDENTITY)


@given(
    test_id=st.text(max_size=200),
    night=st.from_regex(r"\A[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?\Z"),
    scenario=st.text(max_size=50),
)
def test_every_run_key_can_be_a_job_name_a_folder_and_an_object_key(test_id: str, night: str, scenario: str) -> None:
    key = make_run_key(scenario=scenario, night=night, test_id=test_id, sweep_point={}, iteration=1, repeat=0)

    assert TypeAdapter(RunKey).validate_python(key) == key
    assert len(key) <= 100
    assert re.fullmatch(rf"[a-z0-9]([a-z0-9-]*[a-z0-9])?-{night}-[0-9a-f]{{10}}", key)


@pytest.mark.parametrize(
    ("text", "made"),
    [
        ("Llama3 70B, FP8 (GB200)", "llama3-70b-fp8-gb200"),
        ("--a__b--", "a-b"),
        ("ünïcode", "n-code"),
        ("日本", "test"),
        ("", "test"),
    ],
)
def test_a_slug_is_lower_case_letters_digits_and_single_dashes(text: str, made: str) -> None:
    assert slug(text) == made


def test_a_slug_that_is_cut_does_not_end_in_a_dash() -> None:
    assert slug("abcd efgh", 5) == "abcd"
