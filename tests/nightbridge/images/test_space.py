"""Whether there is room is asked of each file system once, for all that is going to be written there."""

import errno
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from nightbridge.errors import PermanentError, TransientError
from nightbridge.images.image import pull_image
from nightbridge.images.references import parse_reference
from nightbridge.images.space import Need, check_folders, check_space
from nightbridge.models import GitRepo, ImageImport, RunSpec, Site, TestDefinition

NEMO = parse_reference("nvcr.io/nvidia/nemo:26.02.00")


def test_the_folder_what_it_needs_and_what_is_free_are_named(tmp_path: Path) -> None:
    folder = tmp_path / "not" / "there" / "yet"

    with pytest.raises(PermanentError) as caught:
        check_space([Need(folder=folder, size=10**18)], NEMO)

    found = re.search(
        r"too little space in (\S+): the import needs ([\d,]+) bytes, and ([\d,]+) are free", str(caught.value)
    )
    assert found is not None
    assert found[1] == str(folder)
    assert found[2] == "1,000,000,000,000,000,000"
    assert 0 < int(found[3].replace(",", "")) < shutil.disk_usage(tmp_path).total
    assert "ENROOT_TEMP_PATH" in str(caught.value)


def test_folders_of_one_file_system_share_its_space(tmp_path: Path) -> None:
    part = int(shutil.disk_usage(tmp_path).free * 0.7)
    cache, temp = Need(folder=tmp_path / "cache", size=part), Need(folder=tmp_path / "temp", size=part)

    check_space([cache], NEMO)
    check_space([temp], NEMO)
    with pytest.raises(PermanentError, match=r"cache and .*temp: the import needs"):
        check_space([cache, temp], NEMO)


@pytest.fixture
def spec() -> RunSpec:
    repo = GitRepo(url="https://git.example.org/x.git")
    cmd_args = {"container_image": str(NEMO)}
    test = TestDefinition(id="t", name="t", cmd_args=cmd_args, git_repos=(repo,), nemo_run_repo=repo)
    return RunSpec(scenario="s", night="2026-11-21", test=test)


@pytest.mark.parametrize("setting", ["cache", "temp"])
def test_a_folder_that_cannot_be_written_is_named_before_anything_is_imported(
    spec: RunSpec, setting: str, enroot: Any, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    folder = tmp_path / "file" / "in-it"
    site = Site(workspace=tmp_path / "workspace", image_import=ImageImport.model_validate({setting: folder}))

    with pytest.raises(PermanentError, match=f"{folder}: .* cannot be written: Not a directory.*ENROOT_CACHE_PATH"):
        pull_image(spec, site)

    assert enroot.calls("import") == []
    assert list(site.images_dir.iterdir()) == []


def test_an_images_folder_that_cannot_be_written_is_named(spec: RunSpec, enroot: Any, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    site = Site(workspace=tmp_path / "workspace", images=tmp_path / "file" / "images")

    with pytest.raises(PermanentError, match=r"file/images: cannot be written: Not a directory"):
        pull_image(spec, site)


def test_a_shared_file_system_that_is_away_for_a_moment_is_transient(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(*_: object) -> None:
        raise OSError(errno.ESTALE, "Stale file handle")

    monkeypatch.setattr("nightbridge.files.write_atomically", away)

    with pytest.raises(TransientError, match="cannot be written: Stale file handle"):
        check_folders(tmp_path, tmp_path, tmp_path, size=0, reference=NEMO)
