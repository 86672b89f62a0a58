"""A folder that an import cannot write in is named before anything is fetched."""

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nightbridge.errors import PermanentError, TransientError
from nightbridge.images.enroot import check_folders, remove_tree
from nightbridge.images.image import pull_image
from nightbridge.models import ImageImport, RunSpec, Site
from tests.builders import make_image_spec

NOBODY = 65534


@pytest.fixture
def spec() -> RunSpec:
    return make_image_spec("nvcr.io/nvidia/nemo:26.02.00")


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
        check_folders(tmp_path, tmp_path)


@contextlib.contextmanager
def another_user(folder: Path) -> Iterator[None]:
    """Go on as a user without root's rights, to whom everything in a folder belongs; nothing where we have none."""
    if os.geteuid() != 0:
        yield
        return
    for parent in (folder, *list(folder.parents)[:3]):
        parent.chmod(parent.stat().st_mode | 0o011)
    for path in (folder, *folder.rglob("*")):
        os.lchown(path, NOBODY, NOBODY)
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)


def test_what_an_image_closes_to_its_owner_is_removed_and_its_links_are_not_followed(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir(mode=0o500)
    closed = tmp_path / "rootfs" / "closed"
    (closed / "inner").mkdir(parents=True)
    (closed / "inner" / "file").touch()
    (tmp_path / "rootfs" / "link").symlink_to(outside)
    (closed / "inner").chmod(0o000)
    closed.chmod(0o000)

    with another_user(tmp_path):
        remove_tree(tmp_path / "rootfs")

    assert not (tmp_path / "rootfs").exists()
    assert stat.S_IMODE(outside.stat().st_mode) == 0o500
