"""The commits between two pins, from a real mirror."""

from pathlib import Path

import pytest

from examples.practice.repositories import PracticeRepositories, commit_behaviour, move_main
from nightbridge.errors import InvalidInput
from nightbridge.repos.commits import commits_in_range
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
