"""The commits between two pins, from a real mirror."""

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from examples.practice.repositories import PracticeRepositories, commit_behaviour, move_main
from nightbridge.errors import InvalidInput
from nightbridge.models import Site, Successor
from nightbridge.repos.commits import (
    commit_named,
    commits_between,
    commits_in_range,
    known_commits_between,
    open_bumps,
)
from nightbridge.repos.mirrors import Mirror


@pytest.fixture
def mirror(repositories: PracticeRepositories, tmp_path: Path) -> Mirror:
    return Mirror(repositories.bridge_url, tmp_path, timeout=60)


def test_the_range_begins_after_the_good_commit_and_ends_with_the_bad_one(
    repositories: PracticeRepositories, mirror: Mirror
) -> None:
    good = repositories.sha("main")
    commits = [commit_behaviour(repositories, f"Change | {number}", slow_wall=number / 100) for number in (1, 2, 3)]
    mirror.resolve("main")

    found = commits_in_range(mirror, good, commits[-1])

    assert [one.commit for one in found] == commits
    assert [one.subject for one in found] == ["Change | 1", "Change | 2", "Change | 3"]
    assert found[0].author == "Practice"
    assert found[0].authored_at < found[1].authored_at
    assert found[0].authored_at.tzinfo is not None


def test_a_range_across_a_rewritten_branch_is_refused(repositories: PracticeRepositories, mirror: Mirror) -> None:
    lost = commit_behaviour(repositories, "Is taken back", slow_wall=0.5)
    mirror.resolve("main")
    move_main(repositories, repositories.sha("main"))
    new = commit_behaviour(repositories, "Comes instead", slow_wall=0.6)
    mirror.resolve("main")

    with pytest.raises(InvalidInput, match="not an ancestor"):
        commits_in_range(mirror, lost, new)


def test_a_commit_that_the_mirror_lacks_is_named(repositories: PracticeRepositories, mirror: Mirror) -> None:
    mirror.resolve("main")

    with pytest.raises(InvalidInput, match="0123456789ab"):
        commits_in_range(mirror, "0123456789ab" + "0" * 28, repositories.sha("main"))


# --- submodules ------------------------------------------------------------------------------------------------------

CORE = "3rdparty/Megatron-LM"


@pytest.fixture
def family(origin: Any, make_origin: Callable[[str], Any]) -> tuple[Any, Any]:
    """A repository and its submodule, by a relative address."""
    core = make_origin("Megatron-LM")
    core.commit("Core 0", {"core.py": "0"})
    origin.git("submodule", "--quiet", "add", "../Megatron-LM", CORE)
    origin.commit("Add the core", {})
    return origin, core


def bump(origin: Any, commit: str, files: dict[str, str]) -> str:
    """Commit another pin of the submodule, with these files."""
    folder = origin.path / CORE
    command = ["git", "-C", str(folder), "-c", "protocol.file.allow=always"]
    subprocess.run([*command, "fetch", "--quiet", "origin", commit], check=True)
    subprocess.run([*command, "checkout", "--quiet", commit], check=True)
    made: str = origin.commit("Bump", files)
    return made


def test_a_bump_is_opened_and_one_that_does_more_is_told_apart(family: tuple[Any, Any], workspace: Path) -> None:
    origin, core = family
    site, good = Site(workspace=workspace), origin.git("rev-parse", "HEAD")
    inner = [core.commit(f"Core {number}", {"core.py": str(number)}) for number in (1, 2, 3)]
    bumps = [bump(origin, inner[1], {".main.commit": inner[1]}), bump(origin, inner[2], {"README.md": "adapted"})]
    plain = origin.commit("Plain", {"README.md": "four"})

    closed = commits_between(site, origin.url, good, plain)
    opened = [open_bumps(site, origin.url, commit) for commit in closed]

    assert [one.commit for one in opened] == [*bumps, plain]
    assert [one.only_bumps for one in opened] == [True, False, False]
    assert [[one.commit for bump in commit.bumps for one in bump.commits] for commit in opened] == [
        inner[:2],
        inner[2:],
        [],
    ]
    first = opened[0].bumps[0]
    assert str(first) == f"bump of 2 commits of {CORE} {first.before[:12]}..{inner[1][:12]}"
    # Without a test that checks it out, nobody clones a submodule only to list what is in it.
    assert "no test of this workspace checks it out" in closed[0].bumps[0].note
    assert commits_between(site, origin.url, good, plain) == tuple(opened)
    assert known_commits_between(site, origin.url, good, plain) == tuple(opened)


def test_a_bump_to_another_branch_has_both_sides(family: tuple[Any, Any], workspace: Path) -> None:
    origin, core = family
    site = Site(workspace=workspace)
    base = core.git("rev-parse", "HEAD")
    old = [core.commit(f"Old {number}", {"core.py": f"old {number}"}) for number in (1, 2)]
    core.git("checkout", "--quiet", "-b", "next", base)
    new = core.commit("New", {"core.py": "new"})
    good, bad = bump(origin, old[1], {}), bump(origin, new, {})
    back = bump(origin, base, {})

    (over,) = (open_bumps(site, origin.url, one) for one in commits_between(site, origin.url, good, bad))
    (down,) = (open_bumps(site, origin.url, one) for one in commits_between(site, origin.url, bad, back))

    (found,) = over.bumps
    assert (found.base, [one.commit for one in found.reverted]) == (base, old)
    assert [one.commit for one in found.commits] == [new]
    assert str(found).endswith(", 2 of them reverted")
    assert (down.bumps[0].base, down.bumps[0].commits) == (base, ())
    assert [one.commit for one in down.bumps[0].reverted] == [new]


def test_a_bump_that_cannot_be_listed_says_why(family: tuple[Any, Any], workspace: Path) -> None:
    origin, core = family
    good = origin.git("rev-parse", "HEAD")
    core.git("checkout", "--quiet", "--orphan", "rewritten")
    rewritten = core.commit("Rewritten", {"core.py": "0"})
    bad = bump(origin, rewritten, {})
    lost = Site(workspace=workspace / "lost")

    (unrelated,) = commits_between(Site(workspace=workspace), origin.url, good, bad)
    unrelated = open_bumps(Site(workspace=workspace), origin.url, unrelated)
    (closed,) = commits_between(lost, origin.url, good, bad)
    core.path.rename(core.path.with_name("gone"))
    gone = open_bumps(lost, origin.url, closed)

    assert "no common ancestor" in unrelated.bumps[0].note
    assert "no such repository" in gone.bumps[0].note


def test_a_bump_beside_a_broken_gitmodules_hides_no_other_commit(family: tuple[Any, Any], workspace: Path) -> None:
    origin, core = family
    site, good = Site(workspace=workspace), origin.git("rev-parse", "HEAD")
    sound = (origin.path / ".gitmodules").read_text()
    first, second = (core.commit(f"Core {number}", {"core.py": str(number)}) for number in (1, 2))
    bump(origin, first, {".gitmodules": f"<<<<<<< HEAD\n{sound}"})
    bad = bump(origin, second, {".gitmodules": sound})

    opened = [open_bumps(site, origin.url, commit) for commit in commits_between(site, origin.url, good, bad)]

    assert [each.bumps[0].note for each in opened] == ["it has no address in .gitmodules", ""]


def test_a_merge_that_brings_a_bump_moves_the_submodule_and_so_does_one_that_merged_the_good_commit(
    family: tuple[Any, Any], workspace: Path
) -> None:
    origin, core = family
    site, start = Site(workspace=workspace), origin.git("rev-parse", "HEAD")
    pinned, inner = core.git("rev-parse", "HEAD"), core.commit("Core 1", {"core.py": "1"})
    origin.git("checkout", "--quiet", "-b", "side")
    side = bump(origin, inner, {})
    origin.git("checkout", "--quiet", "main")
    origin.git("submodule", "--quiet", "update")
    origin.commit("Main goes on", {"README.md": "main"})
    origin.git("merge", "--quiet", "--no-ff", "--no-edit", "side")
    merge = origin.git("rev-parse", "HEAD")

    by_main = commits_between(site, origin.url, start, merge)
    by_side = commits_between(site, origin.url, side, merge)

    assert [[bump.after for bump in commit.bumps] for commit in by_main] == [[], [inner]]
    assert by_main[1].only_bumps
    # Main did not have the bump yet: after the merged commit, its own one is a step back.
    assert [[bump.after for bump in commit.bumps] for commit in by_side] == [[pinned], [inner]]
    assert [commit.only_bumps for commit in by_side] == [False, True]


# --- a repository that moved -----------------------------------------------------------------------------------------


def test_a_range_goes_on_in_the_repository_that_the_old_one_was_folded_into(
    origin: Any, make_origin: Callable[[str], Any], workspace: Path
) -> None:
    new = make_origin("Megatron-LM")
    new.commit("Core", {"core.py": "0"})
    good, *old = [origin.commit(f"Old {number}", {"README.md": f"old {number}"}) for number in range(3)]
    came = new.commit("Fold the bridge in", {"bridge/README.md": "old 2"})
    new.commit("Core only", {"core.py": "1"})
    touched = new.commit("Bridge", {"bridge/README.md": "new"})
    bad = new.commit("Core only again", {"core.py": "2"})
    folded = Successor(url=new.url, commit=came, folder="bridge")
    site = Site(workspace=workspace, successors={origin.url: folded})

    found = commits_between(site, new.url, good, bad)
    anywhere = site.model_copy(update={"successors": {origin.url: folded.model_copy(update={"folder": ""})}})

    assert [one.commit for one in found] == [*old, came, touched]
    assert [one.url for one in found] == [str(origin.path)] * 2 + [""] * 2
    assert [one.subject for one in commits_between(anywhere, new.url, good, bad)][-2:] == ["Bridge", "Core only again"]
    assert [one.commit for one in commits_between(site, new.url, came, touched)][-1] == touched
    with pytest.raises(InvalidInput):
        commits_between(Site(workspace=workspace), new.url, good, bad)


def test_an_end_is_named_by_what_its_name_means_now_in_the_repository_or_the_one_before_it(
    origin: Any, make_origin: Callable[[str], Any], workspace: Path
) -> None:
    new = make_origin("Megatron-LM")
    first = new.commit("Core", {"core.py": "0"})
    second = new.commit("Fold the bridge in", {"bridge/README.md": "old 2"})
    site = Site(workspace=workspace, successors={origin.url: Successor(url=new.url, commit=second)})

    assert [commit_named(site, new.url, name) for name in ("main", first[:10])] == [second, first]
    assert commit_named(site, new.url, "v1.0") == origin.git("rev-parse", "v1.0^{commit}")
    with pytest.raises(InvalidInput, match="no such branch, tag or commit"):
        commit_named(Site(workspace=workspace), new.url, "v1.0")
