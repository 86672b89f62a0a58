"""What enroot's exit codes and messages mean, beside the table of failures; what it is told, never shown, and where it works."""

import contextlib
import errno
import hashlib
import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nightbridge.errors import InvalidInput, PermanentError, TransientError
from nightbridge.files import remove_tree
from nightbridge.images.enroot import Enroot, find_enroot
from nightbridge.images.image import pull_image
from nightbridge.images.registry import ImageReference, parse_reference
from nightbridge.models import ImageImport, RunSpec, Site
from tests.builders import make_image_spec
from tests.real.registry import DEMO_CONFIG, demo_layers, write_layout

NEMO = parse_reference("nvcr.io/nvidia/nemo:26.02.00")


@pytest.fixture(params=["scripted", "real"])
def any_enroot(request: pytest.FixtureRequest) -> Enroot:
    """The scripted enroot, then the real one."""
    request.getfixturevalue("real_enroot" if request.param == "real" else "enroot")
    return find_enroot()


def test_a_reference_that_enroot_cannot_read_is_invalid_input(any_enroot: Enroot, tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="cannot read this reference"):
        any_enroot.import_image(ImageReference(name="not an image"), tmp_path / "image.sqsh")


def test_a_registry_that_does_not_answer_is_transient_and_leaves_nothing(any_enroot: Enroot, tmp_path: Path) -> None:
    with pytest.raises(TransientError, match="unreachable"):
        any_enroot.import_image(ImageReference(registry="127.0.0.1:1", name="x"), tmp_path / "image.sqsh")

    assert not (tmp_path / "image.sqsh").exists()


@pytest.mark.parametrize(
    "fault",
    ["curl-7", "curl-18", "curl-22", "curl-28", "silent-7", "silent-22", "checksum", "exists", "concurrent"],
)  # fmt: skip
def test_what_may_pass_is_transient_and_leaves_nothing(enroot: Any, tmp_path: Path, fault: str) -> None:
    enroot.fail_once(fault)
    output = tmp_path / "image.sqsh"

    with pytest.raises(TransientError, match=r"^nvcr\.io/nvidia/nemo:26\.02\.00: "):
        find_enroot().import_image(NEMO, output)

    assert not output.exists()
    find_enroot().import_image(NEMO, output)
    assert output.exists()


@pytest.mark.parametrize(
    ("fault", "kind", "advice"),
    [
        ("401", PermanentError, r"machine nvcr\.io login \$oauthtoken password"),
        ("404", InvalidInput, "Check name and tag"),
        ("no-tool", PermanentError, "Install the named program"),
        ("silent-3", PermanentError, "failed with code 3"),
    ],
)
def test_what_the_user_must_change_is_permanent_and_has_advice(
    enroot: Any, tmp_path: Path, fault: str, kind: type[PermanentError], advice: str
) -> None:
    enroot.fail_once(fault)

    with pytest.raises(kind, match=advice):
        find_enroot().import_image(NEMO, tmp_path / "image.sqsh")

    assert not (tmp_path / "image.sqsh").exists()


def test_a_digest_is_queried_and_its_refusals_are_understood(enroot: Any) -> None:
    assert find_enroot().digest(NEMO) == "sha256:" + "ab" * 32
    enroot.fail_once("404", "digest")
    with pytest.raises(InvalidInput, match="no such image"):
        find_enroot().digest(NEMO)


def test_enroot_3_knows_no_digest_and_the_registry_is_queried(
    enroot: Any, demo_image: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    enroot.set_version("3.5.0")
    monkeypatch.setenv("ENROOT_ALLOW_HTTP", "y")
    reference = parse_reference(f"{demo_image.registry.host}/{demo_image.name}:1")

    assert find_enroot().digest(reference) == demo_image.digest
    assert enroot.calls("digest") == []


@pytest.mark.registry
@pytest.mark.usefixtures("real_enroot")
def test_of_several_images_the_one_for_the_nodes_is_imported(demo_image: Any, tmp_path: Path) -> None:
    other = write_layout(tmp_path / "arm64", demo_layers()[:1], DEMO_CONFIG, "arm64")
    demo_image.registry.push_for({"amd64": demo_image.layout, "arm64": other}, demo_image.name, "several")
    site = Site(workspace=tmp_path / "workspace")
    several, of_one = (f"{demo_image.registry.host}/{demo_image.name}:{tag}" for tag in ("several", "1"))

    here, there = (pull_image(make_image_spec(several, gpu_type=gpu), site) for gpu in ("h100", "gb200"))

    assert here.digest
    assert there.digest
    assert here.digest != there.digest
    assert here.path == site.images_dir / f"{here.digest[7:]}.sqsh"
    assert there.path == site.images_dir / f"{there.digest[7:]}-aarch64.sqsh"
    assert here.sha256 != there.sha256
    with pytest.raises(InvalidInput, match="the image is for amd64, and the nodes of this GPU type are arm64"):
        pull_image(make_image_spec(of_one, gpu_type="gb200"), site)


def test_transfers_have_a_time_limit_and_retries_unless_the_site_sets_others(
    enroot: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ENROOT_TRANSFER_RETRIES", "9")

    find_enroot().import_image(NEMO, tmp_path / "image.sqsh")

    assert int(enroot.environment()["ENROOT_TRANSFER_TIMEOUT"]) > 0
    assert enroot.environment()["ENROOT_TRANSFER_RETRIES"] == "9"


def test_its_folders_are_those_of_the_site(enroot: Any, tmp_path: Path) -> None:
    settings = ImageImport(cache=tmp_path / "cache", temp=tmp_path / "temp")

    find_enroot(settings).import_image(NEMO, tmp_path / "image.sqsh")

    assert enroot.environment()["ENROOT_CACHE_PATH"] == str(tmp_path / "cache")
    assert Path(enroot.environment()["ENROOT_TEMP_PATH"]).parent == tmp_path / "temp"
    assert list((tmp_path / "temp").iterdir()) == []


def test_what_the_site_has_in_enroot_conf_holds_unless_set_for_nightbridge(
    enroot: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its administrator has put images on a disk with room, and raised time limits; a home may be read-only."""
    for name in ("ENROOT_CACHE_PATH", "ENROOT_TEMP_PATH"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    raid = tmp_path / "raid"
    enroot.configure(
        ENROOT_TEMP_PATH=raid / "temp",
        ENROOT_CACHE_PATH=raid / "cache",
        ENROOT_TRANSFER_TIMEOUT=7200,
        ENROOT_TRANSFER_RETRIES=0,
    )

    find_enroot().import_image(NEMO, tmp_path / "image.sqsh")

    said = enroot.environment()
    assert Path(said["ENROOT_TEMP_PATH"]).parent == raid / "temp"
    assert said["ENROOT_CACHE_PATH"] == str(raid / "cache")
    assert said["ENROOT_TRANSFER_TIMEOUT"] == "7200"
    assert said["ENROOT_TRANSFER_RETRIES"] == "3"  # zero is enroot's own default

    monkeypatch.setenv("ENROOT_TEMP_PATH", str(tmp_path / "mine"))
    find_enroot().import_image(NEMO, tmp_path / "again.sqsh")
    assert Path(enroot.environment()["ENROOT_TEMP_PATH"]).parent == tmp_path / "mine"


def test_a_temporary_folder_that_this_machine_lacks_is_not_enroots_either(
    enroot: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Profiles name a disk of the compute nodes; whoever has no setting of enroot's is given the system's folder."""
    monkeypatch.delenv("ENROOT_TEMP_PATH", raising=False)
    (tmp_path / "file").touch()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "file" / "scratch"))
    enroot.configure(ENROOT_TEMP_PATH="${TMPDIR:-/tmp}")

    find_enroot().import_image(NEMO, tmp_path / "image.sqsh")

    assert Path(enroot.environment()["ENROOT_TEMP_PATH"]).parent == Path(tempfile.gettempdir())


def test_credentials_reach_it_and_leave_no_trace(enroot: Any, tmp_path: Path) -> None:
    lines = "machine nvcr.io login $oauthtoken password planted-token\n"

    importer = find_enroot(ImageImport(), lines)
    importer.digest(NEMO)
    importer.import_image(NEMO, tmp_path / "image.sqsh")

    assert enroot.login() == hashlib.sha256(lines.encode()).hexdigest()
    assert "planted-token" not in repr(importer)
    assert "planted-token" not in importer.model_dump_json()
    assert not Path(enroot.environment()["ENROOT_CONFIG_PATH"]).exists()
    written = [path for path in tmp_path.rglob("*") if path.is_file() and b"planted-token" in path.read_bytes()]
    assert written == []


def test_a_machine_without_enroot_gets_advice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))

    with pytest.raises(PermanentError, match=r"enroot is not installed here.*\.sqsh file or to .none."):
        find_enroot()


def test_an_enroot_that_does_not_work_is_named(enroot: Any) -> None:
    enroot.program.write_text("#!/bin/sh\necho broken >&2\nexit 1\n")
    os.chmod(enroot.program, 0o755)

    with pytest.raises(PermanentError, match="cannot read enroot's version: broken"):
        find_enroot()


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
        Enroot(program=tmp_path, version="4").import_image(NEMO, tmp_path / "image.sqsh")


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
