"""Dependencies between the tests of a scenario."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nightbridge import config
from nightbridge.errors import InvalidInput
from nightbridge.models import Dependency, Scenario

Loader = Callable[..., Scenario]

TEST = """
test_template_name = "MegatronBridge"
description = "d"
[[Tests.git_repos]]
url = "https://github.com/NVIDIA-NeMo/Megatron-Bridge.git"
commit = "v0.4.2"
[Tests.nemo_run_repo]
url = "https://github.com/NVIDIA-NeMo/Run.git"
commit = "v0.7.0"
[Tests.cmd_args]
gpu_type = "h100"
num_gpus = 8
container_image = "nvcr.io#nvidia/nemo:26.04"
model_family_name = "llama"
model_recipe_name = "llama3_8b"
"""


@pytest.fixture
def load(tmp_path: Path) -> Loader:
    def _load(*entries: Any) -> Scenario:
        text = 'name = "nightly"\n'
        for test_id, *dependencies in entries:
            text += f'[[Tests]]\nid = "{test_id}"\nname = "{test_id}"{TEST}'
            text += "".join(f'[[Tests.dependencies]]\ntype = "{kind}"\nid = "{of}"\n' for kind, of in dependencies)
        path = tmp_path / "scenario.toml"
        path.write_text(text)
        return config.load(path)

    return _load


def test_a_run_comes_after_every_run_that_it_depends_on(load: Loader) -> None:
    scenario = load(("fine", ("start_post_comp", "base")), ("other",), ("base",))

    runs = config.runs(scenario, "2026-11-21")

    assert [run.test.id for run in runs] == ["base", "fine", "other"]
    assert runs[0].after == ()
    (dependency,) = runs[1].after
    assert (dependency.type, dependency.id, dependency.run_keys) == ("start_post_comp", "base", (runs[0].run_key,))


def test_a_dependency_changes_no_run_key(load: Loader) -> None:
    alone, dependent = load(("a",), ("b",)), load(("a",), ("b", ("start_post_success", "a")))

    keys = [{run.run_key for run in config.runs(scenario, "n")} for scenario in (alone, dependent)]

    assert keys[0] == keys[1]


@pytest.mark.parametrize("kind", ["start_post_comp", "start_post_init", "start_post_success"])
def test_the_types_that_say_when_a_test_starts_are_kept(load: Loader, kind: str) -> None:
    scenario = load(("a",), ("b", (kind, "a")))
    assert scenario.tests[1].dependencies == (Dependency(type=kind, id="a"),)


def test_that_a_test_ends_because_of_another_one_is_not_offered_and_said(load: Loader) -> None:
    scenario = load(("a",), ("b", ("end_post_comp", "a")))
    assert scenario.tests[1].dependencies == ()
    assert any("a test never ends because another one has ended" in warning for warning in scenario.warnings)


def test_an_unknown_type_makes_the_test_invalid(load: Loader) -> None:
    scenario = load(("a",), ("b", ("start_before", "a")))
    assert [test.id for test in scenario.invalid] == ["b"]
    assert "dependencies[0].type" in scenario.invalid[0].violations[0]


@pytest.mark.parametrize(
    ("entries", "said"),
    [
        ([("a", ("start_post_comp", "bb")), ("b",)], "no test has the id 'bb'; did you mean 'b'?"),
        ([("a", ("start_post_comp", "a"))], "'a' waits for 'a'"),
        ([("a", ("start_post_comp", "b")), ("b", ("start_post_init", "a"))], "waits for 'a'"),
    ],
    ids=["unknown", "itself", "circle"],
)
def test_what_can_never_be_satisfied_is_a_fault_of_the_scenario(load: Loader, entries: Any, said: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        load(*entries)
    assert said in str(caught.value)


def test_dependencies_of_a_test_file_are_checked_as_those_of_an_entry(tmp_path: Path) -> None:
    text = TEST.replace("[Tests.", "[").replace("[[Tests.", "[[")
    for name, other in (("a", "B"), ("b", "A"), ("c", "nosuch")):
        dependency = f'[[dependencies]]\ntype = "start_post_comp"\nid = "{other}"\n'
        (tmp_path / f"{name}.toml").write_text(f'name = "{name}"{text}{dependency}')
    circle, unknown = tmp_path / "circle.scenario", tmp_path / "unknown.scenario"
    circle.write_text('name = "n"\n[[Tests]]\nid = "A"\ntest_name = "a"\n[[Tests]]\nid = "B"\ntest_name = "b"\n')
    unknown.write_text('name = "n"\n[[Tests]]\nid = "C"\ntest_name = "c"\n')

    with pytest.raises(InvalidInput, match=r"'A' waits for 'B' waits for 'A'|'B' waits for 'A' waits for 'B'"):
        config.load(circle)
    with pytest.raises(InvalidInput, match=r"unknown.scenario:2: .*no test has the id 'nosuch'"):
        config.load(unknown)
