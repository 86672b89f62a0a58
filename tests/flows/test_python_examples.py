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


def test_a_script_runs_a_night_and_reads_what_is_stored(folder: Path) -> None:
    printed = output_of(SCRIPT, folder)

    assert re.search(r"llama-small +no_baseline +\d", printed)
    assert printed.rstrip().endswith("True")
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


def test_a_flow_of_ones_own_has_sweep_and_night_as_its_subflows(folder: Path) -> None:
    printed = output_of(OWN_FLOW, folder)

    assert re.search(r"\{'mb': [12]\}: \['\w+'\]", printed)
