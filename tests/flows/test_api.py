"""The flow API: what it offers, and what it refuses before anything is started."""

import inspect
import pkgutil
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from prefect.settings import (
    PREFECT_API_URL,
    PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS,
    temporary_settings,
)

import nightbridge
from nightbridge import flows
from nightbridge.attribution.attribution_result import AttributionResult
from nightbridge.bisect.result import BisectResult
from nightbridge.errors import InvalidInput, TransientError
from nightbridge.flows import nightly_regression, run_pipeline
from nightbridge.flows.trial import tried_run
from nightbridge.gate.paired_trial import ProposedChange, Trial
from nightbridge.goldens.parity import Parity
from nightbridge.models import NightReport, SweepResult, Verdict
from nightbridge.report.queries import TestHistory, Verification

REPOSITORIES = """
[[git_repos]]
url = "/nowhere/Megatron-Bridge.git"

[nemo_run_repo]
url = "/nowhere/Run.git"
"""
TEST = """name = "{name}"
test_template_name = "MegatronBridge"

[cmd_args]
gpu_type = "h100"
model_family_name = "llama"
model_recipe_name = "llama_small"
container_image = "none"
num_gpus = {num_gpus}
gpus_per_node = 2
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty current folder, so that a default workspace would be seen."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write_test(name: str, num_gpus: int = 2) -> Path:
    path = Path(f"{name}.toml")
    path.write_text(TEST.format(name=name, num_gpus=num_gpus) + REPOSITORIES)
    return path


def write_scenario(*tests: str) -> Path:
    path = Path("nightly.toml")
    entries = [f'[[Tests]]\nid = "{test}"\ntest_name = "{test}"\n' for test in tests]
    path.write_text("\n".join(['name = "nightly"\n', *entries]))
    return path


RETURNED = {
    "attribute_regression": AttributionResult,
    "bisect_regression": BisectResult,
    "check_parity": Parity,
    "compare_runs": Verdict,
    "nightly_regression": NightReport,
    "read_history": TestHistory,
    "run_pipeline": Verdict,
    "run_sweep": SweepResult,
    "try_change": Trial,
    "verify_run": Verification,
}


def test_the_public_api_is_these_functions_each_with_a_twin_that_is_awaited() -> None:
    assert nightbridge.__all__ == flows.__all__ == sorted([*RETURNED, *(f"a{name}" for name in RETURNED)])
    for name, returned in RETURNED.items():
        assert inspect.signature(getattr(flows, name)).return_annotation is returned
        assert inspect.iscoroutinefunction(getattr(flows, f"a{name}"))


def test_no_public_name_is_that_of_a_submodule() -> None:
    submodules = {module.name for package in (nightbridge, flows) for module in pkgutil.iter_modules(package.__path__)}

    assert submodules & {*RETURNED, *flows.__all__} == set()


@pytest.mark.parametrize("call", [nightly_regression, run_pipeline])
def test_a_file_that_is_not_there_is_refused(folder: Path, call: Callable[..., object]) -> None:
    with pytest.raises(InvalidInput, match=r"nowhere\.toml: no such file"):
        call("nowhere.toml")

    assert list(folder.iterdir()) == []


@pytest.fixture
def _no_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """Asking for a Prefect server, which takes seconds to start, is a failure."""
    monkeypatch.setattr(
        "nightbridge.flows.server.get_client", lambda **_: pytest.fail("a Prefect server was asked for")
    )


@pytest.mark.usefixtures("_no_server")
@pytest.mark.parametrize("call", [nightly_regression, run_pipeline])
def test_a_night_id_that_cannot_be_one_is_refused(folder: Path, call: Callable[..., object]) -> None:
    file = write_test("good")

    with pytest.raises(InvalidInput, match="21/11: not a night id"):
        call(file, night="21/11")

    assert [path.name for path in folder.iterdir()] == ["good.toml"]


@pytest.mark.usefixtures("_no_server")
@pytest.mark.parametrize("call", [nightly_regression, run_pipeline])
def test_a_site_file_that_is_not_there_is_refused(folder: Path, call: Callable[..., object]) -> None:
    file = write_test("good")

    with pytest.raises(InvalidInput, match=r"site\.toml: no such file"):
        call(file, system="site.toml")

    assert [path.name for path in folder.iterdir()] == ["good.toml"]


@pytest.mark.parametrize("call", [nightly_regression, run_pipeline])
def test_a_scenario_in_which_nothing_can_run_tells_every_violation(folder: Path, call: Callable[..., object]) -> None:
    write_test("none", num_gpus=0)
    write_test("less", num_gpus=-2)

    with pytest.raises(InvalidInput, match="no test of it can run") as refused:
        call(write_scenario("none", "less"))

    assert [re.match(r"(\w+)\.toml:\d+: \1: ", str(told)) is not None for told in refused.value.violations] == [
        True,
        True,
    ]
    assert not (folder / ".nightbridge").exists()


@pytest.mark.parametrize(("test_id", "told"), [(None, "holds 2 runs"), ("three", "three has no runs")])
def test_a_trial_of_a_file_with_several_tests_names_them(folder: Path, test_id: str | None, told: str) -> None:
    write_test("one")
    write_test("two")

    with pytest.raises(
        InvalidInput, match=rf"{told}, not one\. Name one of its tests, and none that is a sweep: one, two"
    ):
        tried_run(str(write_scenario("one", "two")), test_id)


@pytest.mark.parametrize("num_gpus", [2, 0])
def test_one_pipeline_takes_one_run(folder: Path, num_gpus: int) -> None:
    write_test("one")
    write_test("two", num_gpus)

    with pytest.raises(InvalidInput, match=r"holds 2 runs, not one\. Name the file of one test"):
        run_pipeline(write_scenario("one", "two"))

    assert not (folder / ".nightbridge").exists()


def test_a_pull_request_can_be_tried_by_its_number(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nightbridge.flows.api._returned", lambda flow, choice, file, change, **_: change)

    tried = nightbridge.try_change(write_test("one"), bridge=1234)

    assert tried == ProposedChange(bridge="1234")  # type: ignore[comparison-overlap]  # the flow's first argument


def test_a_trial_without_a_pair_is_refused(folder: Path) -> None:
    with pytest.raises(InvalidInput, match="most_pairs=0: not a number of pairs"):
        nightbridge.try_change(write_test("one"), bridge="main", most_pairs=0)
    assert not (folder / ".nightbridge").exists()


@pytest.fixture
def _no_server_of_others() -> Iterator[None]:
    from prefect.server.api.server import SubprocessASGIServer  # seconds of imports, which every worker would have

    SubprocessASGIServer().stop()  # there is one for the whole process
    yield
    SubprocessASGIServer().stop()


@pytest.mark.usefixtures("_no_server_of_others")
def test_a_server_of_prefects_own_that_does_not_start_is_said(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nightbridge.flows.server.SERVER_START_SECONDS", 0)
    file = write_test("one")

    with (
        temporary_settings({PREFECT_API_URL: None, PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS: 1}),
        pytest.raises(TransientError, match=r"own server did not start within 1 s.*prefect server start"),
    ):
        run_pipeline(file)

    assert [path.name for path in folder.iterdir()] == ["one.toml"]


def test_a_program_that_imports_us_keeps_prefects_log_of_its_own_flows() -> None:
    """What keeps a traceback from the log of our errors is on Prefect's loggers only while a flow of ours runs."""
    code = (
        "import logging\n"
        "from nightbridge.flows import api, final_states\n"
        "loggers = [logging.getLogger(f'prefect.{name}') for name in ('task_runs', 'flow_runs', 'engine')]\n"
        "ours = lambda: [filter for logger in loggers for filter in logger.filters if 'nightbridge' in type(filter).__module__]\n"
        "before = len(ours())\n"
        "with final_states.plain_errors():\n"
        "    within = len(ours())\n"
        "print(before, within, len(ours()))"
    )

    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=True)

    assert ended.stdout == "0 3 0\n"
