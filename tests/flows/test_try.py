"""`nightbridge try` on the practice workload: a slow pull request beside `main`."""

import json
from collections import Counter
from pathlib import Path

import pytest

from examples.practice.git_writer import git
from examples.practice.repositories import commit_behaviour, make_practice_repositories, move_main
from tests.flows.practice_night import Entry, nightbridge, nightbridge_here, write_scenario, write_site
from tests.real.prefect_server import PrefectServer

pytestmark = [pytest.mark.launcher, pytest.mark.usefixtures("flows_here")]

FEW_STEPS = {"max_steps": 14, "save_interval": 14}
REGRESSED = 1


def test_a_pull_request_that_is_slow_is_refused_with_a_comment_and_tried_anew_once_it_is_pushed_again(
    tmp_path: Path, environments_dir: Path, prefect_server: PrefectServer, capfd: pytest.CaptureFixture[str]
) -> None:
    site = write_site(tmp_path / "site.toml", workspace=tmp_path / "workspace", environments=environments_dir)
    repositories = make_practice_repositories(tmp_path / "practice")
    main = repositories.sha("main")

    def push(subject: str, factor: float) -> str:
        commit = commit_behaviour(repositories, subject, step_time_factor=factor)
        git(repositories.folder("bridge"), "update-ref", "refs/pull/7/head", commit)
        move_main(repositories, main)
        return commit

    slow = push("Synchronise more", 1.2)
    file = write_scenario(tmp_path / "conf", repositories, "one", Entry(id="tried", cmd_args=FEW_STEPS))
    comment = tmp_path / "comment.md"
    command: list[str | Path] = ["try", file, "--bridge", "#7", "--system", site, "--markdown", comment]

    first = nightbridge(*command, "--json", environment=prefect_server.environment)
    again = nightbridge_here(capfd, *command)

    assert (first.returncode, again.returncode) == (REGRESSED, REGRESSED), first.stderr
    trial = json.loads(first.stdout)
    assert trial["answer"] == "worse"
    assert Counter(arm["commit"] for arm in trial["arms"]) == {
        main: len(trial["arms"]) // 2,
        slow: len(trial["arms"]) // 2,
    }
    assert [arm["arm"]["role"] for arm in trial["arms"]][:4] == ["new", "control", "control", "new"]
    assert comment.read_text() == f"{again.stdout.rstrip()}\n"
    assert "### nightbridge: `tried` regresses\n\nTried: Megatron-Bridge #7, beside" in comment.read_text()
    jobs = list((tmp_path / "workspace" / "runs").glob("tried-*-try-*/a*"))
    assert len(jobs) == len(trial["arms"]), "asked again it costs nothing"

    # The same day: what is at the pull request's head now has not been tried.
    pushed = push("Synchronise no more", 1.0)
    anew = nightbridge_here(capfd, *command, "--most-pairs", "1", "--json")

    assert [arm["commit"] for arm in json.loads(anew.stdout)["arms"]] == [pushed, main]


def test_a_branch_that_was_never_pushed_is_no_change_that_fails(
    tmp_path: Path, environments_dir: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    site = write_site(tmp_path / "site.toml", workspace=tmp_path / "workspace", environments=environments_dir)
    repositories = make_practice_repositories(tmp_path / "practice")
    file = write_scenario(tmp_path / "conf", repositories, "one", Entry(id="tried", cmd_args=FEW_STEPS))
    comment = tmp_path / "comment.md"

    told = nightbridge_here(capfd, "try", file, "--bridge", "typo", "--system", site, "--markdown", comment)

    assert (told.returncode, told.stdout) == (2, "")
    assert told.stderr.count("has no such branch, tag or commit") == 1
    assert not comment.exists()
    assert not (tmp_path / "workspace" / "runs").exists()
