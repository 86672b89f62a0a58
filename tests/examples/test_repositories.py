"""The practice repositories: the same commits everywhere, and regressions that are commits."""

import runpy
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from examples.practice.repositories import (
    BEHAVIOUR_FILE,
    SUBMODULE,
    TEMPLATE,
    Behaviour,
    PracticeRepositories,
    add_submodule,
    bump_submodule,
    commit_behaviour,
    commit_many,
    make_practice_repositories,
    move_main,
    read_behaviour,
)
from nightbridge.errors import InvalidInput, PermanentError


def shas_below(folder: Path) -> list[str]:
    return [commit.sha for commit in make_practice_repositories(folder).commits]


def test_commits_do_not_depend_on_the_persons_git(
    repositories: PracticeRepositories, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "home"
    home.mkdir()
    (home / ".gitconfig").write_text(
        "[user]\nname=Somebody\nemail=somebody@example.invalid\n"
        "[core]\nautocrlf=true\n[commit]\ngpgsign=true\n[init]\ndefaultBranch=trunk\n"
    )
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("GIT_DIR", "/nowhere")
    monkeypatch.setenv("GIT_AUTHOR_NAME", "Somebody Else")
    monkeypatch.setenv("GIT_COMMITTER_DATE", "2001-01-01T00:00:00Z")
    monkeypatch.setenv("GIT_DEFAULT_HASH", "sha256")
    monkeypatch.setenv("TZ", "Asia/Kolkata")

    assert shas_below(tmp_path / "again") == [commit.sha for commit in repositories.commits]


def test_the_repositories_are_sound_and_hold_what_the_template_holds(
    repositories: PracticeRepositories, checkout: Path
) -> None:
    for url in (repositories.bridge_url, repositories.run_url, repositories.megatron_lm_url):
        subprocess.run(["git", f"--git-dir={url}", "fsck", "--strict", "--no-dangling"], check=True)
    template = TEMPLATE / "bridge"
    expected = {path for path in template.rglob("*") if path.is_file() and "__pycache__" not in path.parts}
    for path in expected:
        assert (checkout / path.relative_to(template)).read_bytes() == path.read_bytes()


def test_making_them_again_keeps_later_commits(repositories: PracticeRepositories) -> None:
    folder = Path(repositories.bridge_url).parent
    slower = commit_behaviour(repositories, "Slow down", step_time_factor=1.2)

    again = make_practice_repositories(folder)

    assert again == repositories
    assert read_behaviour(again) == Behaviour(step_time_factor=1.2)
    assert read_behaviour(again, slower).step_time_factor == 1.2


def test_repositories_of_another_template_are_made_again(tmp_path: Path) -> None:
    repositories = make_practice_repositories(tmp_path)
    subprocess.run(
        ["git", f"--git-dir={repositories.bridge_url}", "config", "practice.edition", "an older one"], check=True
    )
    commit_behaviour(repositories, "Slow down", step_time_factor=1.2)

    make_practice_repositories(tmp_path)

    assert read_behaviour(repositories) == Behaviour()


def test_a_repository_of_somebody_else_is_left_alone(repositories: PracticeRepositories, tmp_path: Path) -> None:
    theirs = tmp_path / "Megatron-Bridge.git"
    shutil.copytree(repositories.run_url, theirs)
    subprocess.run(["git", f"--git-dir={theirs}", "config", "--unset", "practice.edition"], check=True)

    with pytest.raises(InvalidInput, match="no practice repository"):
        make_practice_repositories(tmp_path)

    assert (theirs / "HEAD").is_file()


def test_a_behaviour_is_one_commit_on_main(repositories: PracticeRepositories) -> None:
    begun = repositories.sha("main")

    sha = commit_behaviour(repositories, "Recompute less\n\nFaster, and larger.", memory_factor=1.3, crash_at=7)

    bridge = ["git", f"--git-dir={repositories.bridge_url}"]
    subject = subprocess.run([*bridge, "log", "-1", "--format=%H %P %s", "main"], capture_output=True, text=True)
    changed = subprocess.run([*bridge, "diff", "--name-only", begun, sha], capture_output=True, text=True)
    assert subject.stdout == f"{sha} {begun} Recompute less\n"
    assert changed.stdout.split() == [BEHAVIOUR_FILE]
    assert read_behaviour(repositories) == Behaviour(memory_factor=1.3, crash_at=7)


def test_a_behaviour_builds_on_the_one_before_it(repositories: PracticeRepositories) -> None:
    commit_behaviour(repositories, "Slow down", step_time_factor=1.2)
    commit_behaviour(repositories, "Grow", memory_factor=1.1)

    assert read_behaviour(repositories) == Behaviour(step_time_factor=1.2, memory_factor=1.1)


def test_the_same_behaviour_on_the_same_parent_is_the_same_commit(repositories: PracticeRepositories) -> None:
    first = commit_behaviour(repositories, "Slow down", step_time_factor=1.2)
    move_main(repositories, repositories.sha("main"))

    assert commit_behaviour(repositories, "Slow down", step_time_factor=1.2) == first


def test_main_moves_to_any_commit(repositories: PracticeRepositories) -> None:
    slower = commit_behaviour(repositories, "Slow down", step_time_factor=1.2)

    move_main(repositories, "v0.5.0")
    assert read_behaviour(repositories) == Behaviour(checkpoint_layout="0.18")

    move_main(repositories, slower)
    assert read_behaviour(repositories) == Behaviour(step_time_factor=1.2)

    with pytest.raises(PermanentError):
        move_main(repositories, "0123456789abcdef")


@pytest.mark.parametrize(
    ("behaviour", "told"),
    [
        ({"step_tim_factor": 1.2}, "step_tim_factor"),
        ({"crash_at": 0}, "crash_at"),
        ({"checkpoint_layout": "0.17"}, "checkpoint_layout"),
    ],
)
def test_an_unknown_behaviour_is_refused(
    repositories: PracticeRepositories, behaviour: dict[str, Any], told: str
) -> None:
    with pytest.raises(InvalidInput, match=told):
        commit_behaviour(repositories, "Misbehave", **behaviour)

    assert read_behaviour(repositories) == Behaviour()


def test_the_template_says_every_behaviour_with_its_default() -> None:
    written = yaml.safe_load((TEMPLATE / "bridge" / BEHAVIOUR_FILE).read_text())

    assert written == Behaviour().model_dump()


def test_the_run_repository_adds_a_version_to_the_released_nemo_run(
    repositories: PracticeRepositories, tmp_path: Path
) -> None:
    tree = tmp_path / "Run"
    subprocess.run(["git", "clone", "--quiet", "--branch=v0.11.1a1", repositories.run_url, str(tree)], check=True)

    assert 'dependencies = ["nemo-run==0.11.1"]' in (tree / "pyproject.toml").read_text()
    assert '"0.11.1a1"' in (tree / "src/nemo_run_practice/__init__.py").read_text()


def test_the_submodule_is_an_option_that_is_the_same_everywhere(
    repositories: PracticeRepositories, tmp_path: Path
) -> None:
    again = make_practice_repositories(tmp_path / "again")

    made = []
    for each in (repositories, again):
        added = add_submodule(each)
        core = commit_many(each, ["Core 1", "Core 2"], {1: {"step_time_factor": 1.1}}, workload="megatron_lm")
        made.append((added, core, bump_submodule(each, "Bump", core[1]), bump_submodule(each, "Back", core[0])))

    assert made[0] == made[1]
    assert make_practice_repositories(tmp_path / "again").commits == again.commits
    _, core, bump, _ = made[0]
    bridge = ["git", f"--git-dir={repositories.bridge_url}"]
    changed = subprocess.run(
        [*bridge, "diff", "--raw", "--no-abbrev", f"{bump}~1", bump], capture_output=True, text=True
    )
    assert changed.stdout.split()[:6] == [":160000", "160000", *changed.stdout.split()[2:3], core[1], "M", SUBMODULE]
    assert len(changed.stdout.splitlines()) == 1
    assert read_behaviour(repositories, workload="megatron_lm").step_time_factor == 1.1


def test_the_submodules_behaviour_counts_beside_the_bridges_and_so_does_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = TEMPLATE / "bridge_on_core/src/megatron/bridge/training/behaviour.py"
    module = runpy.run_path(str(path))
    own, core = tmp_path / "own.yaml", tmp_path / "core.yaml"
    own.write_text("{step_time_factor: 1.1, crash_at: 5}")
    core.write_text("{step_time_factor: 1.2, nan_at: 7}")

    plain = module["read_behaviour"](own, core)
    monkeypatch.setenv("PRACTICE_STEP_TIME_FACTOR", "2")
    slower = module["read_behaviour"](own, core)

    assert (plain.step_time_factor, plain.crash_at, plain.nan_at) == (pytest.approx(1.32), 5, 7)
    assert slower.step_time_factor == pytest.approx(2.64)
