"""The examples for Python users, run as they stand: a script, a notebook, a flow of one's own."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from examples.practice.repositories import install_torchrun, make_practice_repositories
from tests.flows.practice_night import Entry, write_scenario, write_site
from tests.real.prefect_server import PrefectServer

pytestmark = pytest.mark.launcher

ROOT = Path(__file__).parents[2]
SHORT = {"train_samples": 80, "save_interval": 10}
SCRIPT, OWN_FLOW, STORED = re.findall(r"```python\n(.*?)```", (ROOT / "docs/how-to/python.md").read_text(), re.DOTALL)


@pytest.fixture(scope="module")
def folder(
    tmp_path_factory: pytest.TempPathFactory,
    environments_dir: Path,
    launcher_python: Path,
    prefect_server: PrefectServer,
) -> Iterator[Path]:
    """A folder as a user has one: scenarios, a site file, and a Prefect server that is configured."""
    folder = tmp_path_factory.mktemp("python")
    repositories = make_practice_repositories(folder / "practice")
    install_torchrun(folder / "practice", launcher_python)
    conf = folder / "conf/practice"
    write_scenario(conf, repositories, "nightly", Entry(id="llama-small", sample="vlm_small", cmd_args=SHORT))
    write_scenario(conf, repositories, "sweep", Entry(id="tuned", sample="vlm_small", cmd_args={**SHORT, "mb": [1, 2]}))
    # The sample alone, which a notebook runs, is as short.
    sample = (conf / "vlm_small.toml").read_text()
    (conf / "vlm_small.toml").write_text(re.sub(r"train_samples = 320.*", "train_samples = 80", sample))
    write_site(folder / "site.toml", workspace=folder / "workspace", environments=environments_dir)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PREFECT_API_URL", prefect_server.api_url)
        patch.setenv("PYTHONPATH", str(ROOT))
        yield folder


def output_of(code: str, folder: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, env=os.environ, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.fixture(scope="module")
def printed_by_script(folder: Path) -> str:
    return output_of(SCRIPT, folder)


def test_a_script_runs_a_night_and_reads_what_is_stored(folder: Path, printed_by_script: str) -> None:
    assert re.search(r"llama-small +no_baseline +\d", printed_by_script)
    assert printed_by_script.rstrip().endswith("True")
    assert output_of(STORED, folder).split()[-1] == "True"


def test_a_notebook_runs_a_night_and_reads_its_history(folder: Path) -> None:
    notebook = nbformat.read(ROOT / "examples/python/morning.ipynb", as_version=4)  # type: ignore[no-untyped-call]

    NotebookClient(notebook, timeout=300, resources={"metadata": {"path": folder}}).execute()

    verdicts, status, history, parity = (
        cell.outputs[-1].data["text/plain"] for cell in notebook.cells if cell.cell_type == "code" and cell.outputs
    )
    assert "llama-small" in verdicts
    assert status.strip("'") in {"no_baseline", "insufficient_data"}
    assert "2026-11-21" in history
    assert parity in {"True", "False"}


@pytest.fixture(scope="module")
def printed_by_own_flow(folder: Path) -> str:
    return output_of(OWN_FLOW, folder)


def test_a_flow_of_ones_own_has_sweep_and_night_as_its_subflows(printed_by_own_flow: str) -> None:
    assert re.search(r"\{'mb': [12]\}: \['\w+'\]", printed_by_own_flow)


EVERYWHERE = """
import asyncio

from prefect import flow

import nightbridge
from nightbridge.errors import InvalidInput

def first(test):
    return nightbridge.read_history(test, system="site.toml").to_dataframe().iloc[0]

RUN = first("llama-small")
KEY, NIGHT = RUN["run_key"], {"night": RUN["night"]}
CALLS = {
    "nightly_regression": (["conf/practice/nightly.toml"], NIGHT),
    "run_pipeline": (["conf/practice/nightly.toml"], NIGHT),
    "run_sweep": (["conf/practice/sweep.toml"], {"night": first("tuned")["night"]}),
    "bisect_regression": (["llama-small"], {}),
    "attribute_regression": (["llama-small"], {}),
    "try_change": (["conf/practice/vlm_small.toml"], {}),
    "compare_runs": ([KEY], {}),
    "read_history": (["llama-small"], {}),
    "check_parity": ([KEY, KEY], {}),
    "verify_run": ([KEY], {}),
}

def called(name, given, named):
    try:
        return type(getattr(nightbridge, name)(*given, **named, system="site.toml")).__name__
    except InvalidInput as error:
        return str(error)

async def awaited(name, given, named):
    try:
        return type(await getattr(nightbridge, f"a{name}")(*given, **named, system="site.toml")).__name__
    except InvalidInput as error:
        return str(error)

async def cell():
    for name, call in CALLS.items():
        print("in a loop", name, called(name, *call), sep="; ")

@flow
def of_ones_own():
    for name, call in CALLS.items():
        print("in a flow", name, called(name, *call), sep="; ")

@flow
async def async_of_ones_own():
    for name, call in CALLS.items():
        print("awaited", name, await awaited(name, *call), sep="; ")

asyncio.run(cell())
of_ones_own()
asyncio.run(async_of_ones_own())
"""
"""A night and a sweep that are stored, and found again by whoever names them. Nothing is worse or to be tried."""

RETURNED = {
    "nightly_regression": "NightReport",
    "run_pipeline": "Verdict",
    "run_sweep": "SweepResult",
    "bisect_regression": "nothing became worse",
    "attribute_regression": "nothing became worse",
    "try_change": "nothing to try",
    "compare_runs": "Verdict",
    "read_history": "TestHistory",
    "check_parity": "Parity",
    "verify_run": "Verification",
}


@pytest.mark.parametrize("place", ["in a loop", "in a flow", "awaited"])
def test_every_function_returns_its_answer_where_a_loop_runs_and_in_another_flow(place: str, everywhere: str) -> None:
    lines = [line.split("; ") for line in everywhere.splitlines()]
    found = {name: answer for where, name, answer, *_ in (line for line in lines if line[0] == place)}

    assert found.keys() == RETURNED.keys()
    assert {name: answer for name, answer in found.items() if RETURNED[name] not in answer} == {}


@pytest.fixture(scope="module")
def everywhere(folder: Path, printed_by_script: str, printed_by_own_flow: str) -> str:
    assert "llama-small" in printed_by_script  # it has a history
    assert "mb" in printed_by_own_flow  # so has the sweep
    return output_of(EVERYWHERE, folder)
