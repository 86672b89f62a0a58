"""The clone stage gives every run of a night the same two commits and the launcher's environment."""

import os
import shutil
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from nightbridge.errors import InvalidInput, PermanentError
from nightbridge.models import Checkout, GitRepo, LauncherEnvironment, PinnedRepository, RunSpec, Site, TestDefinition
from nightbridge.repos.checkouts import check_out
from nightbridge.repos.clone import current_commits, make_checkout, make_code, verify_unchanged
from nightbridge.repos.mirrors import Mirror

THIN_RUN = """
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"
[project]
name = "thin-run"
version = "1.0"
[tool.hatch.build.targets.wheel]
packages = ["thin_run"]
"""


@pytest.fixture
def run_origin(make_origin: Callable[[str], Any], request: pytest.FixtureRequest) -> Any:
    made = make_origin("Run")
    made.commit(request.node.name, {"pyproject.toml": THIN_RUN, "thin_run/__init__.py": "import nemo_run\n"})
    return made


BEFORE = datetime(2026, 11, 21, tzinfo=UTC)
"""Before anything of these tests was made."""


def run_spec(
    origin: Any, run_origin: Any, *, night: str = "2026-11-21", commit: str = "main", test: str = "a"
) -> RunSpec:
    return RunSpec(
        scenario="nightly",
        night=night,
        test=TestDefinition(
            id=test,
            name=test,
            cmd_args={"container_image": "none"},
            git_repos=(GitRepo(url=origin.url, commit=commit, mount_as="/opt/Megatron-Bridge"),),
            nemo_run_repo=GitRepo(url=run_origin.url, commit="main"),
        ),
    )


@pytest.mark.launcher
def test_all_runs_of_a_night_share_commits_trees_and_environment(
    origin: Any, run_origin: Any, workspace: Path, environments_dir: Path
) -> None:
    site = Site(workspace=workspace, environments=environments_dir)

    first = make_checkout(run_spec(origin, run_origin), site)
    assert first.environment is not None
    try:
        moved = origin.commit("Third", {"README.md": "three\n"})
        same_night = make_checkout(run_spec(origin, run_origin, test="b"), site)
        next_night = make_checkout(run_spec(origin, run_origin, night="2026-11-22"), site)
    finally:
        shutil.rmtree(first.environment.python.parent.parent)

    assert same_night == first
    assert first.megatron_bridge.commit != moved == next_night.megatron_bridge.commit
    assert next_night.environment == first.environment
    assert first.environment.nemo_run_version == "0.11.1"
    assert verify_unchanged(first, BEFORE) == []
    assert Checkout.model_validate_json(first.model_dump_json()) == first


def test_an_unknown_commit_is_said_before_anything_is_installed(origin: Any, run_origin: Any, workspace: Path) -> None:
    site = Site(workspace=workspace)

    with pytest.raises(InvalidInput, match=r"v1\.1 of .*Megatron-Bridge.*nearest is v1\.0"):
        make_checkout(run_spec(origin, run_origin, commit="v1.1"), site)

    assert not site.environments_dir.exists()
    assert not (workspace / "checkouts").exists()


@pytest.mark.launcher
def test_the_environment_is_installed_from_the_sites_wheels_alone(
    origin: Any, run_origin: Any, workspace: Path, tmp_path: Path
) -> None:
    empty = tmp_path / "wheels"
    empty.mkdir()
    site = Site(workspace=workspace, wheels=empty)

    with pytest.raises(PermanentError, match=r"pip could not install it .*No matching distribution"):
        make_checkout(run_spec(origin, run_origin), site)

    assert list(site.environments_dir.iterdir()) == []


def test_what_a_run_changed_in_a_tree_is_said(origin: Any, run_origin: Any, workspace: Path, tmp_path: Path) -> None:
    trees = [main_of(repository, workspace) for repository in (origin, run_origin)]
    environment = LauncherEnvironment(python=tmp_path / "python", digest="0")
    checkout = Checkout(megatron_bridge=trees[0], nemo_run=trees[1], environment=environment)
    assert verify_unchanged(checkout, BEFORE) == []

    (trees[0].path / "scripts" / "run.sh").unlink()
    shutil.rmtree(trees[1].path)

    bridge, run = verify_unchanged(checkout, BEFORE)
    assert bridge == f"{origin.path}: deleted: scripts/run.sh"
    assert run.startswith(f"{run_origin.path}: not a complete git checkout")


def main_of(origin: Any, workspace: Path) -> PinnedRepository:
    mirror = Mirror(origin.url, workspace, timeout=60)
    return check_out(mirror, "main", mirror.resolve("main"), workspace)


def test_a_tree_that_another_run_found_changed_and_made_again_is_said_to_those_who_had_begun(
    origin: Any, workspace: Path
) -> None:
    checkout = Checkout(megatron_bridge=main_of(origin, workspace))
    began = datetime.now(UTC)
    (checkout.megatron_bridge.path / "new.py").touch()
    os.utime(checkout.megatron_bridge.path, (0, 0))

    main_of(origin, workspace)  # as the next run of the night does

    (said,) = verify_unchanged(checkout, began)
    assert said.startswith(f"{origin.path}: found modified at 20")
    assert verify_unchanged(checkout, datetime.now(UTC)) == []


@pytest.mark.launcher
def test_the_next_night_knows_which_commits_came_since(
    origin: Any, run_origin: Any, workspace: Path, environments_dir: Path
) -> None:
    site = Site(workspace=workspace, environments=environments_dir)
    first = make_checkout(run_spec(origin, run_origin, night="2026-11-21"), site)
    assert first.environment is not None
    assert first.nemo_run is not None
    try:
        origin.commit("Third", {"README.md": "three\n"})
        second = make_checkout(run_spec(origin, run_origin, night="2026-11-22"), site)
    finally:
        shutil.rmtree(first.environment.python.parents[1])

    assert first.megatron_bridge.commits_since == ()
    assert second.megatron_bridge.previous == first.megatron_bridge.commit
    (line,) = second.megatron_bridge.commits_since
    assert line.endswith(" Third")
    assert second.nemo_run is not None
    assert (second.nemo_run.previous, second.nemo_run.commits_since) == (first.nemo_run.commit, ())


def with_core(origin: Any, make_origin: Callable[[str], Any]) -> Any:
    """`origin` with the submodule `core`; return it, with a branch `next` that is one commit further."""
    core = make_origin("core")
    core.commit("Pinned", {"core.py": "1"})
    origin.git("submodule", "--quiet", "add", "../core", "core")
    origin.commit("Add core", {})
    core.git("checkout", "--quiet", "-b", "next")
    core.commit("Next", {"core.py": "2"})
    return core


def code_of(origin: Any, **changes: Any) -> TestDefinition:
    test = run_spec(origin, origin).test
    repo = test.git_repos[0].model_copy(update={"init_submodules": True, **changes})
    return test.model_copy(update={"git_repos": (repo,)})


def test_a_submodule_is_at_the_ref_that_a_test_names_the_same_all_night(
    origin: Any, make_origin: Callable[[str], Any], workspace: Path
) -> None:
    core = with_core(origin, make_origin)
    site, test = Site(workspace=workspace), code_of(origin, submodules={"core": "next"})

    pinned = make_code(code_of(origin), site, "n1").megatron_bridge
    first = make_code(test, site, "n1").megatron_bridge
    core.commit("Later", {"core.py": "3"})
    same = make_code(test, site, "n1").megatron_bridge
    later = make_code(test, site, "n2").megatron_bridge

    assert [(one.path / "core" / "core.py").read_text() for one in (pinned, first, same, later)] == ["1", "2", "2", "3"]
    assert first == same
    assert verify_unchanged(Checkout(megatron_bridge=first), BEFORE) == []


def test_what_a_ref_means_at_this_moment_is_not_pinned(
    origin: Any, make_origin: Callable[[str], Any], workspace: Path
) -> None:
    core = with_core(origin, make_origin)
    site, repo = Site(workspace=workspace), code_of(origin, submodules={"core": "next"}).megatron_bridge

    first = current_commits(repo, site)
    again = current_commits(repo, site)
    pushed = {".": origin.commit("Later", {"README.md": "later"}), "core": core.commit("Later", {"core.py": "3"})}

    assert first == again
    assert set(first.values()).isdisjoint(pushed.values())
    assert current_commits(repo, site) == pushed
    assert not (workspace / "nights").exists()


def test_a_submodule_at_a_ref_has_to_be_checked_out(
    origin: Any, make_origin: Callable[[str], Any], workspace: Path
) -> None:
    with_core(origin, make_origin)
    test = code_of(origin, submodules={"core": "next"}, init_submodules=False)

    with pytest.raises(InvalidInput, match=r"named but not checked out.*init_submodules = true"):
        make_code(test, Site(workspace=workspace), "n1")
