"""Where an image is imported, and what is refused before that."""

from pathlib import Path
from types import SimpleNamespace
from typing import get_args

import pytest

from nightbridge.errors import InvalidInput
from nightbridge.images.node_import import NodeImporter
from nightbridge.models import ClusterLimits, ClusterSettings, ImageImport, Site
from nightbridge.slurm.attempt_files import declare_intent, open_attempt
from nightbridge.tasks.prepare import _importer, container, prepare
from tests.builders import make_spec, record_submission
from tests.nightbridge.images.conftest import TINY_IMAGE

KINDS = get_args(ClusterSettings.model_fields["kind"].annotation)


def site_of(kind: str, folder: Path) -> Site:
    return Site(
        workspace=folder,
        cluster=ClusterSettings.model_validate({"kind": kind}),
        image_import=ImageImport(on="node"),
    )


@pytest.mark.parametrize("kind", sorted(set(KINDS) - {"local"}))
def test_every_kind_of_slurm_has_nodes_to_import_on(kind: str, tmp_path: Path) -> None:
    assert isinstance(_importer(site_of(kind, tmp_path)), NodeImporter)


def test_this_machine_alone_has_none(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r'this cluster has no Slurm.*on = "host"'):
        _importer(site_of("local", tmp_path))


def test_a_workspace_whose_path_the_launcher_would_alter_is_refused_before_anything_is_fetched(tmp_path: Path) -> None:
    site = Site(workspace=tmp_path / "my repo")

    with pytest.raises(InvalidInput, match="my repo: its path contains white space"):
        prepare.fn(make_spec(), site)

    assert list(tmp_path.iterdir()) == []


def test_a_run_whose_job_is_in_slurm_is_not_refused_when_the_cluster_has_changed(tmp_path: Path) -> None:
    site, run = Site(workspace=tmp_path), make_spec(cmd_args={"container_image": "/images/nemo.sqsh", "max_steps": 5})
    attempt = open_attempt(tmp_path, run.run_key, site.cluster)
    with pytest.raises(InvalidInput, match="rule"):
        prepare.fn(run, site)

    intent = declare_intent(attempt.attempt_dir, tmp_path / "job.sh", tmp_path, after=0)
    assert prepare.fn(run, site).partitions
    assert intent is not None
    intent.unlink()
    record_submission(attempt.attempt_dir, attempt.name, 1)
    assert prepare.fn(run, site).partitions

    open_attempt(tmp_path, run.run_key, site.cluster, 2)
    with pytest.raises(InvalidInput, match="rule"):
        prepare.fn(run, site)


def test_a_run_whose_job_is_in_slurm_goes_on_when_its_image_file_was_removed(tmp_path: Path) -> None:
    file = tmp_path / "nemo.sqsh"
    file.write_bytes(TINY_IMAGE)
    site, run = Site(workspace=tmp_path), make_spec(cmd_args={"container_image": str(file), "max_steps": 5})
    image = container.fn(run, site)
    file.unlink()
    with pytest.raises(InvalidInput, match=r"nemo\.sqsh: no such image file\. Check container_image"):
        container.fn(run, site)

    attempt = open_attempt(tmp_path, run.run_key, site.cluster)
    record_submission(attempt.attempt_dir, attempt.name, 1)
    assert container.fn(run, site) == image

    open_attempt(tmp_path, run.run_key, site.cluster, 2)
    with pytest.raises(InvalidInput, match="no such image file"):
        container.fn(run, site)


def test_a_run_whose_partition_is_gone_goes_on_with_its_job_and_is_refused_without_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = ClusterLimits(partition="h100", partitions=("h200", "b200"))
    monkeypatch.setattr("nightbridge.tasks.prepare.cluster_of", lambda site: SimpleNamespace(limits=lambda: gone))
    site, run = Site(workspace=tmp_path), make_spec(cmd_args={"max_steps": 5})
    attempt = open_attempt(tmp_path, run.run_key, site.cluster)

    with pytest.raises(InvalidInput) as refused:
        prepare.fn(run, site)
    assert "the cluster has no partition 'h100'; name h200 or b200 in the site" in str(refused.value)

    record_submission(attempt.attempt_dir, attempt.name, 1)
    assert prepare.fn(run, site) == gone
