"""Submodules are checked out at the commits that the tree pins, when they are asked for."""

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nightbridge.errors import InvalidInput
from nightbridge.repos.checkouts import absolute_submodule_url, check_out, find_changes
from nightbridge.repos.mirrors import Mirror

TIMEOUT = 60.0


@pytest.fixture(scope="module")
def first_family(first_origin: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What `family` is a copy of, but for `deep`, whose address is absolute."""
    origin = first_origin.copied(tmp_path_factory.mktemp("family") / "of")
    deep = origin.beside("deep")
    deep.commit("Deep", {"deep.txt": "deep\n"})
    lm = origin.beside("Megatron-LM")
    lm.commit("Core", {"core.py": "x = 1\n"})
    lm.git("submodule", "--quiet", "add", str(deep.path), "third/deep")
    lm.commit("Add deep", {})
    origin.git("submodule", "--quiet", "add", "--name", "lm", "../Megatron-LM", "3rdparty/Megatron-LM")
    origin.commit("Add Megatron-LM", {})
    lm.commit("Moved on", {"core.py": "x = 2\n"})
    return origin


@pytest.fixture
def family(first_family: Any, tmp_path: Path) -> Any:
    """`origin` with the submodule Megatron-LM by a relative address, which has a submodule of its own."""
    return first_family.copied(tmp_path / "origin")


@pytest.fixture
def mirror(family: Any, workspace: Path) -> Mirror:
    return Mirror(family.url, workspace, timeout=TIMEOUT)


def test_they_are_at_their_pinned_commits_and_theirs_too(mirror: Mirror, workspace: Path) -> None:
    commit = mirror.resolve("main")

    made = check_out(mirror, "main", commit, workspace, with_submodules=True)

    assert made.path.name == f"{commit}+submodules"
    assert (made.path / "3rdparty" / "Megatron-LM" / "core.py").read_text() == "x = 1\n"
    assert (made.path / "3rdparty" / "Megatron-LM" / "third" / "deep" / "deep.txt").read_text() == "deep\n"
    assert find_changes(made.path, commit) == []
    listing = subprocess.run(
        ["git", "-C", str(made.path), "submodule", "foreach", "--recursive", "--quiet", "echo $sm_path"],
        check=True, capture_output=True, text=True,
    ).stdout  # fmt: skip
    assert listing.split() == ["3rdparty/Megatron-LM", "third/deep"]


def test_each_has_a_mirror_of_its_own(mirror: Mirror, workspace: Path) -> None:
    check_out(mirror, "main", mirror.resolve("main"), workspace, with_submodules=True)

    names = {path.name.rsplit("-", 1)[0] for path in (workspace / "repos").glob("*.git")}
    assert names == {"Megatron-Bridge", "Megatron-LM", "deep"}


def test_without_them_their_folder_is_empty_in_a_tree_of_its_own(mirror: Mirror, workspace: Path) -> None:
    commit = mirror.resolve("main")
    check_out(mirror, "main", commit, workspace, with_submodules=True)

    made = check_out(mirror, "main", commit, workspace)

    assert made.path.name == commit
    assert list(made.submodules) == ["3rdparty/Megatron-LM"]
    assert len(made.submodules["3rdparty/Megatron-LM"]) == 40
    assert list((made.path / "3rdparty" / "Megatron-LM").iterdir()) == []
    assert find_changes(made.path, commit) == []


def test_a_change_inside_one_is_found_out(mirror: Mirror, workspace: Path) -> None:
    commit = mirror.resolve("main")
    made = check_out(mirror, "main", commit, workspace, with_submodules=True)
    inner = made.path / "3rdparty" / "Megatron-LM"
    (inner / "third" / "deep" / "new.txt").write_text("")

    assert find_changes(made.path, commit) == ["3rdparty/Megatron-LM: third/deep: added: new.txt"]


def test_a_pinned_commit_without_an_address_is_left_out(family: Any, mirror: Mirror, workspace: Path) -> None:
    stray = family.git("rev-parse", "HEAD")
    family.git("update-index", "--add", "--cacheinfo", f"160000,{stray},stray")
    family.git("commit", "--quiet", "--message", "Stray")

    made = check_out(mirror, "main", mirror.resolve("main"), workspace, with_submodules=True)

    assert list((made.path / "stray").iterdir()) == []
    assert (made.path / "3rdparty" / "Megatron-LM" / "core.py").read_text() == "x = 1\n"
    assert find_changes(made.path, made.commit) == []


def _lose_repository(inner: Path) -> None:
    shutil.rmtree(inner / ".git")


def _empty(inner: Path) -> None:
    shutil.rmtree(inner)
    inner.mkdir()


@pytest.mark.parametrize("change", [_lose_repository, _empty, shutil.rmtree])
def test_one_that_lost_its_files_or_its_repository_is_found_out_and_made_again(
    mirror: Mirror, workspace: Path, change: Callable[[Path], None]
) -> None:
    commit = mirror.resolve("main")
    made = check_out(mirror, "main", commit, workspace, with_submodules=True)
    change(made.path / "3rdparty" / "Megatron-LM")

    assert "3rdparty/Megatron-LM: not a complete git checkout" in "; ".join(find_changes(made.path, commit))
    again = check_out(mirror, "main", commit, workspace, with_submodules=True)

    assert find_changes(again.path, commit) == []
    assert (again.path / "3rdparty" / "Megatron-LM" / "core.py").read_text() == "x = 1\n"


def _write_file(inner: Path) -> None:
    (inner / "core.py").write_text("x = 2\n")


def _check_out_by_hand(inner: Path) -> None:
    command = ["git", "-c", "protocol.file.allow=always", "submodule", "--quiet", "update", "--init"]
    subprocess.run(command, cwd=inner.parents[1], check=True, capture_output=True)


@pytest.mark.parametrize("change", [_write_file, _check_out_by_hand])
def test_files_added_to_the_folder_of_one_that_is_not_checked_out_are_found(
    mirror: Mirror, workspace: Path, change: Callable[[Path], None]
) -> None:
    commit = mirror.resolve("main")
    made = check_out(mirror, "main", commit, workspace)

    change(made.path / "3rdparty" / "Megatron-LM")

    assert find_changes(made.path, commit) == ["added: 3rdparty/Megatron-LM"]


def test_one_that_is_not_there_is_named(family: Any, mirror: Mirror, workspace: Path) -> None:
    lm = family.path.with_name("Megatron-LM")
    lm.rename(lm.with_name("gone"))

    with pytest.raises(InvalidInput, match=r"Megatron-LM.*no such repository"):
        check_out(mirror, "main", mirror.resolve("main"), workspace, with_submodules=True)

    left = [path.name for path in (workspace / "checkouts" / "Megatron-Bridge").iterdir()]
    assert left == []


def _newest_core(family: Any) -> str:
    return _revision(family.path.with_name("Megatron-LM"), "HEAD")


def test_one_can_be_at_another_commit_than_the_tree_pins(family: Any, mirror: Mirror, workspace: Path) -> None:
    commit, core = mirror.resolve("main"), _newest_core(family)
    pinned = check_out(mirror, "main", commit, workspace, with_submodules=True)

    moved = {"3rdparty/Megatron-LM": core}
    made = check_out(mirror, "main", commit, workspace, with_submodules=True, moved=moved)

    assert made.path != pinned.path
    assert made.path.name.startswith(f"{commit}+submodules-")
    assert made.commit == commit
    assert made.submodules == moved
    assert (made.path / "3rdparty" / "Megatron-LM" / "core.py").read_text() == "x = 2\n"
    assert (made.path / "3rdparty" / "Megatron-LM" / "third" / "deep" / "deep.txt").read_text() == "deep\n"
    assert find_changes(made.path, commit) == find_changes(pinned.path, commit) == []
    assert check_out(mirror, "main", commit, workspace, with_submodules=True, moved=moved).path == made.path


def test_one_moved_to_where_the_tree_pins_it_is_the_same_checkout(mirror: Mirror, workspace: Path) -> None:
    commit = mirror.resolve("main")
    pinned = check_out(mirror, "main", commit, workspace, with_submodules=True)

    again = check_out(mirror, "main", commit, workspace, with_submodules=True, moved=pinned.submodules)

    assert again.path == pinned.path


def test_a_moved_one_that_is_moved_again_is_found_out_and_made_again(
    family: Any, mirror: Mirror, workspace: Path
) -> None:
    commit, moved = mirror.resolve("main"), {"3rdparty/Megatron-LM": _newest_core(family)}
    made = check_out(mirror, "main", commit, workspace, with_submodules=True, moved=moved)
    inner = made.path / "3rdparty" / "Megatron-LM"

    subprocess.run(["git", "checkout", "--quiet", "--force", "HEAD~1"], cwd=inner, check=True)
    assert find_changes(made.path, commit) == [
        "changed: 3rdparty/Megatron-LM",
        f"3rdparty/Megatron-LM: it is at commit {_revision(inner, 'HEAD')}",
    ]
    subprocess.run(["git", "reset", "--quiet"], cwd=made.path, check=True)
    assert "other submodules are staged than those it was made with" in find_changes(made.path, commit)
    again = check_out(mirror, "main", commit, workspace, with_submodules=True, moved=moved)

    assert find_changes(again.path, commit) == []
    assert (again.path / "3rdparty" / "Megatron-LM" / "core.py").read_text() == "x = 2\n"


def _revision(folder: Path, name: str) -> str:
    command = ["git", "-C", str(folder), "rev-parse", name]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def test_a_moved_folder_that_is_no_submodule_is_named(mirror: Mirror, workspace: Path) -> None:
    with pytest.raises(InvalidInput, match=r"3rdparty/LM is not a submodule.*3rdparty/Megatron-LM"):
        check_out(
            mirror, "main", mirror.resolve("main"), workspace, with_submodules=True, moved={"3rdparty/LM": "a" * 40}
        )


@pytest.mark.parametrize(
    ("url", "parent", "absolute"),
    [
        ("https://x.org/lm.git", "https://github.com/a/b.git", "https://x.org/lm.git"),
        ("../lm.git", "https://github.com/a/b.git", "https://github.com/a/lm.git"),
        ("../../c/lm.git", "https://github.com/a/b.git/", "https://github.com/c/lm.git"),
        ("../lm.git", "git@github.com:b.git", "git@github.com:lm.git"),
        ("../../c/lm.git", "git@github.com:a/b.git", "git@github.com:c/lm.git"),
        ("./lm", "/srv/git/b", "/srv/git/b/lm"),
    ],
)
def test_a_relative_address_is_relative_to_the_parents(url: str, parent: str, absolute: str) -> None:
    assert absolute_submodule_url(url, parent) == absolute
