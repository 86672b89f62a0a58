"""`nightbridge bisect` of a failure: the commit with which the practice workload began to crash."""

import json
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from examples.practice.repositories import commit_many, make_practice_repositories
from tests.flows.practice_night import NIGHTBRIDGE, Entry, write_scenario, write_site
from tests.real.prefect_server import PrefectServer

pytestmark = pytest.mark.launcher

TEST = "crashing"
CRASHING, STEPS = 1, {"max_steps": 14, "save_interval": 14}
FAILED = 3
"""The exit code of `nightbridge run` for a test that failed."""


def test_the_commit_with_which_a_test_began_to_crash_is_named(
    tmp_path: Path, environments_dir: Path, prefect_server: PrefectServer
) -> None:
    site = write_site(tmp_path / "site.toml", workspace=tmp_path / "workspace", environments=environments_dir)
    repositories = make_practice_repositories(tmp_path / "practice")
    scenario = write_scenario(tmp_path / "conf", repositories, "one", Entry(id=TEST, cmd_args=STEPS))

    def said(*command: str | Path) -> "subprocess.CompletedProcess[str]":
        words = [NIGHTBRIDGE, *command, "--system", site]
        return subprocess.run(words, env=prefect_server.environment, capture_output=True, text=True, check=False)

    assert said("run", scenario, "--night", "n1").returncode == 0
    commits = commit_many(repositories, [f"Change {number}" for number in range(2)], {CRASHING: {"crash_at": 6}})
    assert said("run", scenario, "--night", "n2").returncode == FAILED

    searched = said("bisect", TEST, "--confidence", "0.9", "--json")

    assert searched.returncode == 0, searched.stderr
    result: Mapping[str, Any] = json.loads(searched.stdout)
    assert [culprit["commit"] for culprit in result["culprits"]] == [commits[CRASHING]]
    assert result["plan"]["metric"] == "failure"
