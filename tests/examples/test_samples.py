"""The sample tests in `conf/practice` run as they are, once the practice repositories are made."""

import re
import sys
from pathlib import Path

import pytest

from examples.practice.repositories import TEMPLATE, install_torchrun, make_practice_repositories
from nightbridge.config.scenarios import load
from nightbridge.models import TestDefinition

CONF = Path(__file__).parents[2] / "conf" / "practice"


@pytest.fixture(scope="module")
def tests() -> tuple[TestDefinition, ...]:
    scenario = load(CONF / "nightly.toml")
    assert scenario.invalid == ()
    return scenario.tests


def test_the_night_has_both_tests(tests: tuple[TestDefinition, ...]) -> None:
    assert [test.id for test in tests] == ["llama-small", "deepseek-small"]


def test_their_addresses_are_where_the_repositories_are_made(
    tests: tuple[TestDefinition, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    made = make_practice_repositories(Path(".nightbridge/practice"))

    for test in tests:
        assert Path(test.megatron_bridge.url).absolute() == Path(made.bridge_url)
        assert Path(test.nemo_run_repo.url).absolute() == Path(made.run_url)


def test_the_test_of_two_grids_names_its_repository_and_its_torchrun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (test,) = load(CONF / "vlm_small.toml").tests
    monkeypatch.chdir(tmp_path)
    made = make_practice_repositories(Path(".nightbridge/practice"))

    assert Path(test.megatron_bridge.url).absolute() == Path(made.megatron_lm_url)
    assert install_torchrun(Path(".nightbridge/practice"), Path(sys.executable)) == (
        Path(test.cmd_args["torchrun"]).absolute()
    )


def test_their_recipes_exist(tests: tuple[TestDefinition, ...]) -> None:
    sources = (TEMPLATE / "bridge/src/megatron/bridge/perf_recipes").rglob("*.py")
    recipes = {name for path in sources for name in re.findall(r"^def (\w+_config)\(", path.read_text(), re.MULTILINE)}

    for test in tests:
        arguments = test.cmd_args
        dtype = arguments["compute_dtype"].replace("_", "")
        size = f"{arguments['num_gpus']}gpu_{arguments['gpu_type']}_{dtype}"
        assert f"{arguments['model_recipe_name']}_pretrain_{size}_config" in recipes
