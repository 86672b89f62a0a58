"""A site is opened with its secrets, and refused where it lost what its deployment was made with."""

from contextlib import nullcontext
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from uuid import uuid4

import pytest
from prefect.client.schemas.objects import FlowRun
from prefect.settings import PREFECT_RESULTS_DEFAULT_STORAGE_BLOCK, temporary_settings

from examples.practice.repositories import PracticeRepositories, commit_behaviour
from nightbridge.errors import InvalidInput, PermanentError
from nightbridge.models import ClusterSettings, SecretRef, Site, StoreSettings
from nightbridge.tasks import bisect, compare, site_access
from nightbridge.tasks.site_access import check_as_deployed
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


HOPPER = ClusterSettings(kind="slurm", name="hopper")
S3 = StoreSettings(url="s3://nightly/llm")


@pytest.mark.parametrize(
    ("site", "picked", "said"),
    [
        ({"store": S3}, "hopper", "no Slurm Cluster block, and its deployment is for the cluster hopper"),
        (
            {"cluster": HOPPER},
            "hopper",
            "no Harvest Store block, and its deployment keeps everything in s3://nightly/llm",
        ),
        ({"cluster": HOPPER, "store": S3}, "hopper", ""),
        ({}, "another", ""),  # picked in the form
    ],
    ids=["cluster gone", "store gone", "as deployed", "another site"],
)
def test_a_site_block_that_has_lost_its_cluster_or_its_store_is_refused(
    site: dict[str, Any], picked: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = FlowRun(flow_id=uuid4(), deployment_id=uuid4(), parameters={"scenario": "a.toml", "system": picked})
    client = SimpleNamespace(
        read_deployment=lambda _: SimpleNamespace(
            parameters={"system": "hopper"}, tags=["nightbridge", "cluster:hopper"]
        ),
        read_block_document_by_name=lambda name, kind: SimpleNamespace(data={"url": f"s3://nightly/{name}"}),
    )
    monkeypatch.setattr(site_access, "this_flow_run", lambda: run)
    monkeypatch.setattr(site_access, "on_server", lambda call: lambda: call(client))

    results = temporary_settings({PREFECT_RESULTS_DEFAULT_STORAGE_BLOCK: "nightbridge-harvest-store/llm"})
    with results, pytest.raises(InvalidInput, match=said) if said else nullcontext():
        check_as_deployed(Site(workspace=tmp_path, **site))
