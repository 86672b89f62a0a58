"""`nightbridge bisect` of a failure, and of a deterministic test's losses: the commit since which the practice workload
crashes, or computes something else.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from examples.practice.repositories import Workload, commit_many, install_torchrun, make_practice_repositories
from nightbridge.flows import nightly_regression
from tests.flows.practice_night import WIDE, Entry, nightbridge_here, write_scenario, write_site

pytestmark = [pytest.mark.launcher, pytest.mark.usefixtures("flows_here")]

TEST = "bisected"
CULPRIT = 1
CRASHING = Entry(id=TEST, cmd_args={"max_steps": 14, "save_interval": 14})
DETERMINISTIC = Entry(
    id=TEST,
    sample="vlm_small",
    cmd_args={"train_samples": 160, "save_interval": 10},
    gate=WIDE | {"deterministic": True, "pairs": 0},
)
"""What an iteration of it sees depends on its seed and number alone."""


@pytest.mark.parametrize(
    ("entry", "workload", "behaviour", "exit_code", "asked"),
    [
        pytest.param(CRASHING, "bridge", {"crash_at": 6}, 3, "failure", id="crash"),
        pytest.param(DETERMINISTIC, "megatron_lm", {"loss_offset": 1e-6}, 1, "losses", id="other losses"),
    ],
)
def test_the_commit_with_which_a_test_began_to_fail_is_named(
    entry: Entry,
    workload: Workload,
    behaviour: Mapping[str, Any],
    exit_code: int,
    asked: str,
    tmp_path: Path,
    environments_dir: Path,
    launcher_python: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    site = write_site(tmp_path / "site.toml", workspace=tmp_path / "workspace", environments=environments_dir)
    repositories = make_practice_repositories(tmp_path / "practice")
    install_torchrun(tmp_path / "practice", launcher_python)
    scenario = write_scenario(tmp_path / "conf", repositories, "one", entry)

    assert nightly_regression(scenario, night="n1", system=str(site)).exit_code == 0
    commits = commit_many(repositories, ["Tidy", "Break it"], {CULPRIT: behaviour}, workload)
    assert nightly_regression(scenario, night="n2", system=str(site)).exit_code == exit_code

    searched = nightbridge_here(capfd, "bisect", TEST, "--system", site, "--confidence", "0.9", "--json")

    assert searched.returncode == 0, searched.stderr
    result: Mapping[str, Any] = json.loads(searched.stdout)
    assert [culprit["commit"] for culprit in result["culprits"]] == [commits[CULPRIT]]
    assert result["plan"]["metric"] == asked
