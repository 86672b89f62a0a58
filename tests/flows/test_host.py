"""A host as it is: a night by a person with hardly any files, locale or home, beside a second process on the same night.

Clocks that jump and disks that fill up have nights of their own in `tests/nights/test_clock_and_disk.py`.
"""

import json
import os
import resource
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import pytest

from examples.practice.repositories import PracticeRepositories
from tests.flows.practice_night import NIGHTBRIDGE, Entry, write_scenario, write_site
from tests.real.prefect_server import PrefectServer, make_home

pytestmark = pytest.mark.launcher

POOR = {
    "HOME": "/proc/nowhere",
    "LANG": "C",
    "LC_ALL": "C",
    # Python itself would make up for such a locale.
    "PYTHONUTF8": "0",
    "PYTHONCOERCECLOCALE": "0",
}
FILES = 64


def start(
    arguments: list[str | Path],
    folder: Path,
    environment: Mapping[str, str],
    before: Callable[[], object] | None = None,
) -> "subprocess.Popen[str]":
    folder.mkdir()
    return subprocess.Popen(
        [NIGHTBRIDGE, *arguments],
        env={**os.environ, **environment},
        stdout=(folder / "stdout").open("w"),
        stderr=(folder / "stderr").open("w"),
        text=True,
        preexec_fn=before,
    )


def test_a_poor_host_a_stop_and_a_second_process_on_the_same_night_change_nothing(
    repositories: PracticeRepositories,
    environments_dir: Path,
    launcher_python: Path,
    prefect_server: PrefectServer,
    tmp_path: Path,
) -> None:
    scenario = write_scenario(
        tmp_path / "conf", repositories, "twice", Entry(id="größe", cmd_args={"max_steps": 20, "save_interval": 10})
    )
    site = write_site(tmp_path / "site.toml", workspace=tmp_path / "workspace", environments=environments_dir)
    arguments: list[str | Path] = ["run", scenario, "--system", site, "--night", "2026-11-21", "--json"]

    make_home(tmp_path / "prefect")
    few_files = partial(resource.setrlimit, resource.RLIMIT_NOFILE, (FILES, FILES))
    poor = start(arguments, tmp_path / "poor", POOR | {"PREFECT_HOME": str(tmp_path / "prefect")}, few_files)
    other = start(arguments, tmp_path / "other", prefect_server.environment)
    deadline = time.monotonic() + 300
    while not [*tmp_path.glob("workspace/runs/*/a1/claim")]:
        assert time.monotonic() < deadline, "no job has begun"
        assert poor.poll() is None, (tmp_path / "poor/stderr").read_text()[-3000:]
        time.sleep(0.05)
    poor.send_signal(signal.SIGSTOP)
    time.sleep(5)
    poor.send_signal(signal.SIGCONT)

    for process, name in ((poor, "poor"), (other, "other")):
        assert process.wait(600) == 0, (tmp_path / name / "stderr").read_text()[-3000:]
    verdicts = [json.loads((tmp_path / name / "stdout").read_text())["verdicts"] for name in ("poor", "other")]
    assert [verdict["status"] for (verdict,) in verdicts] == ["no_baseline", "no_baseline"]
    assert verdicts[0][0]["run_key"] == verdicts[1][0]["run_key"]
    for name in ("submission.json", "claim", "exit_code"):
        assert len([*tmp_path.glob(f"workspace/runs/*/a*/{name}")]) == 1
    assert len([*tmp_path.glob("workspace/store/runs/**/manifest.json")]) == 1
    assert len([*tmp_path.glob("workspace/cluster/jobs/*")]) == 1, [*tmp_path.glob("workspace/cluster/*")]
