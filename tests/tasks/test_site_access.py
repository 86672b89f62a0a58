"""Private repositories are read with the site's login by every stage that reads one, from a real git server."""

from pathlib import Path
from types import ModuleType

import pytest

from examples.practice.repositories import PracticeRepositories, commit_behaviour
from nightbridge.errors import PermanentError
from nightbridge.models import SecretRef, Site
from nightbridge.tasks import bisect, compare
from tests.real.git_server import served_over_http


@pytest.mark.parametrize("stage", [bisect, compare])
def test_the_commits_of_a_range_are_fetched_with_the_sites_login(
    repositories: PracticeRepositories, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: ModuleType
) -> None:
    good = repositories.sha("main")
    bad = commit_behaviour(repositories, "Slower", slow_wall=0.1)
    monkeypatch.setenv("GIT_LOGINS", "machine 127.0.0.1 login reader password planted-token")
    private = Site(workspace=tmp_path / "workspace", git_credentials=SecretRef(source="env", name="GIT_LOGINS"))
    folder = Path(repositories.bridge_url)

    with served_over_http(folder.parent, ("reader", "planted-token")) as server:
        url = f"{server.url}/{folder.name}"
        with pytest.raises(PermanentError, match="refused our credentials"):
            stage.commits_between(private.model_copy(update={"git_credentials": None}), url, good, bad)
        found = stage.commits_between(private, url, good, bad)

    assert [commit.commit for commit in found] == [bad]
