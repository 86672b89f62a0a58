"""`bisect`, `attribute` and `try`."""

import subprocess
import sys
from pathlib import Path

import pytest

from nightbridge.history.history_store import put_row
from nightbridge.models import StoreSettings, VerdictStatus, utc_now
from nightbridge.nights.records import NightStart, NightTest, record_start
from nightbridge.store.directory import DirectoryStore
from tests.builders import make_row, make_summary
from tests.nightbridge.cli.conftest import Program

TRIAL = """
import sys
from nightbridge.cli import causes, main

def logged(choice, name):
    print("nightbridge.flows.api" in sys.modules)  # Prefect's handlers come with it, and are what is redirected
    sys.exit()

causes.logged = logged
main.run(["try", "test.toml", "--bridge", "main"])
"""


@pytest.mark.thorough  # a process that imports Prefect
def test_what_a_trial_logs_goes_to_the_file_that_it_names(tmp_path: Path) -> None:
    ended = subprocess.run([sys.executable, "-c", TRIAL], cwd=tmp_path, capture_output=True, text=True, check=False)

    assert ended.stdout == "True\n", ended.stderr


@pytest.mark.parametrize("command", ["bisect", "attribute"])
def test_a_search_that_names_a_run_of_a_sweep_is_about_its_point(
    nightbridge: Program, tmp_path: Path, command: str
) -> None:
    store = DirectoryStore(StoreSettings(url=f"file://{tmp_path}/store"))
    rows = [
        row.model_copy(update={"cluster": "local", "series": f"llama3-8b-{tp:012x}"})
        for tp, slow in ((1, 1.0), (2, 1.2))
        for night, step_time in (("2026-11-08", 1.0), ("2026-11-09", slow))
        for row in [make_row(make_summary((step_time,) * 50), night, sweep_point={"cmd_args.tp": tp})]
    ]
    rows = [*rows[:-1], rows[-1].model_copy(update={"verdict": VerdictStatus.REGRESSED, "worse": {"step_time": 0.2}})]
    for row in rows:
        put_row(store, row)
    tests = tuple(NightTest(test_id=row.test_id, run_key=row.run_key) for row in (rows[1], rows[3]))
    begun = {"scenario": "practice", "cluster": "local", "workspace": tmp_path, "begun_at": utc_now()}
    record_start(store, NightStart.model_validate({"night": "2026-11-09", "tests": tests, **begun}))
    options = ("--store", store.url, "--workspace", str(tmp_path / "ws"), "--yes")

    good, bad = (nightbridge(command, row.run_key, *options)[2] for row in (rows[1], rows[3]))

    assert "nothing became worse" in good
    assert ("no commit changed with it" if command == "bisect" else "the run is not stored any more") in bad
