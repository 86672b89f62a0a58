"""The container stage: one verified file per digest, or the declared absence of a container; and the images between two."""

import json
import os
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest

from nightbridge.errors import DamagedData, InvalidInput, PermanentError, TransientError
from nightbridge.images.enroot import find_enroot, scratch_dir, unfinished
from nightbridge.images.image import current_image, pull_image, sha256_of, versions_between, workspace_refs
from nightbridge.images.registry import ImageReference
from nightbridge.models import Image, Site
from tests.builders import make_image_spec

NEMO = "nvcr.io/nvidia/nemo:26.02.00"
HEX = "ab" * 32
NOBODY = 65534


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(workspace=tmp_path / "workspace")


def test_none_is_the_declared_absence_of_a_container(site: Site) -> None:
    assert pull_image(make_image_spec("none"), site) == Image(kind="none")
    assert not site.workspace.exists()


def test_no_image_at_all_is_invalid_input(site: Site) -> None:
    with pytest.raises(InvalidInput, match=r"no container_image.*cmd_args"):
        pull_image(make_image_spec(None), site)


# --- a file ----------------------------------------------------------------------------------------------------------


def test_a_local_image_is_used_where_it_lies(site: Site, tmp_path: Path, tiny_image: bytes) -> None:
    path = tmp_path / "nemo.sqsh"
    path.write_bytes(tiny_image)

    image = pull_image(make_image_spec(str(path)), site)

    checksum = sha256_of(path)
    assert image == Image(
        kind="sqsh", reference=str(path), path=path, digest=f"sha256:{checksum}", sha256=checksum, size=244
    )


def test_a_relative_path_is_one_too(
    site: Site, tmp_path: Path, tiny_image: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "nemo.img").write_bytes(tiny_image)
    monkeypatch.chdir(tmp_path)

    assert pull_image(make_image_spec("nemo.img"), site).path == tmp_path / "nemo.img"
    assert pull_image(make_image_spec("./nemo.img"), site).path == tmp_path / "nemo.img"


def test_a_local_image_is_read_again_only_when_it_changed(site: Site, tmp_path: Path, tiny_image: bytes) -> None:
    path = tmp_path / "nemo.sqsh"
    path.write_bytes(tiny_image)
    first = pull_image(make_image_spec(str(path)), site)
    sidecar = next((site.workspace / "images" / "local").glob("*.json"))
    written = sidecar.stat().st_mtime_ns

    assert pull_image(make_image_spec(str(path)), site) == first
    assert sidecar.stat().st_mtime_ns == written
    path.write_bytes(tiny_image + b"\0")
    assert pull_image(make_image_spec(str(path)), site).sha256 == sha256_of(path) != first.sha256


def test_an_image_of_another_date_is_read_once_more_and_not_by_each_run(
    site: Site, tmp_path: Path, tiny_image: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "nemo.sqsh"
    path.write_bytes(tiny_image)
    first = pull_image(make_image_spec(str(path)), site)
    read: list[Path] = []

    def reading(path: Path) -> str:
        read.append(path)
        return sha256_of(path)

    monkeypatch.setattr("nightbridge.images.image.sha256_of", reading)

    os.utime(path, (1000, 1000))
    assert [pull_image(make_image_spec(str(path)), site) for _ in range(3)] == [first] * 3

    assert read == [path]


def test_a_local_file_that_is_missing_or_no_image_is_refused(site: Site, tmp_path: Path) -> None:
    (tmp_path / "text.sqsh").write_text("hello")

    with pytest.raises(InvalidInput, match=r"missing\.sqsh: no such image file"):
        pull_image(make_image_spec(str(tmp_path / "missing.sqsh")), site)
    with pytest.raises(InvalidInput, match=r"~no-such-user/nemo\.sqsh: no such image file"):
        pull_image(make_image_spec("~no-such-user/nemo.sqsh"), site)
    with pytest.raises(InvalidInput, match=r"long\.sqsh: no such image file"):
        pull_image(make_image_spec(str(tmp_path / f"{'long' * 99}.sqsh")), site)
    with pytest.raises(DamagedData, match=r"text\.sqsh: not a complete squashfs image"):
        pull_image(make_image_spec(str(tmp_path / "text.sqsh")), site)


def test_a_local_file_that_this_user_may_not_read_is_named(site: Site, tmp_path: Path, tiny_image: bytes) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can become another user; every other test runs without root here")
    (tmp_path / "nemo.sqsh").write_bytes(tiny_image)
    (tmp_path / "nemo.sqsh").chmod(0o600)
    for parent in (tmp_path, *list(tmp_path.parents)[:3]):
        parent.chmod(parent.stat().st_mode | 0o011)
    site.workspace.mkdir()
    os.chown(site.workspace, NOBODY, NOBODY)

    os.seteuid(NOBODY)
    try:
        with pytest.raises(DamagedData, match=r"nemo\.sqsh: cannot be read: Permission denied"):
            pull_image(make_image_spec(str(tmp_path / "nemo.sqsh")), site)
    finally:
        os.seteuid(0)


# --- a reference -----------------------------------------------------------------------------------------------------


def test_a_reference_is_imported_by_its_digest(site: Site, enroot: Any, tiny_image: bytes) -> None:
    image = pull_image(make_image_spec("nvcr.io#nvidia/nemo:26.02.00"), site)

    assert image.path == site.images_dir / f"{HEX}.sqsh"
    assert image.path.read_bytes() == tiny_image
    assert image.digest == f"sha256:{HEX}"
    assert image.reference == f"{NEMO}@sha256:{HEX}"
    (call,) = enroot.calls("import")
    assert call.endswith(f" docker://nvcr.io#nvidia/nemo@sha256:{HEX}")
    sidecar = json.loads(image.path.with_suffix(".json").read_text())
    assert (sidecar["digest"], sidecar["sha256"], sidecar["size"]) == (image.digest, image.sha256, 244)
    assert sidecar["tool"] == "enroot 4.1.2"


@pytest.mark.parametrize("gpu_type", ["gb200", "GB300", "vr200"])
def test_nodes_of_another_processor_than_this_host_get_an_image_of_their_own(
    site: Site, enroot: Any, gpu_type: str
) -> None:
    here = pull_image(make_image_spec(NEMO, gpu_type="h100"), site)

    there = pull_image(make_image_spec(NEMO, gpu_type=gpu_type), site)

    assert here.path == site.images_dir / f"{HEX}.sqsh"
    assert there.path == site.images_dir / f"{HEX}-aarch64.sqsh"
    assert there.digest == here.digest
    assert [call.split()[1] for call in enroot.calls("import")] == ["--output", "--arch"]
    # enroot's digest is that of the image for one processor, where there are several.
    assert [call.split()[1:3] for call in enroot.calls("digest")][1] == ["--arch", "aarch64"]
    assert pull_image(make_image_spec(NEMO, gpu_type=gpu_type), site) == there
    assert len(enroot.calls("import")) == 2


def test_an_image_that_is_for_another_processor_only_is_refused(site: Site, enroot: Any) -> None:
    enroot.fail_once("arch")

    with pytest.raises(InvalidInput, match=r"the image is for amd64, and the nodes of this GPU type are arm64"):
        pull_image(make_image_spec(NEMO, gpu_type="gb200"), site)

    assert not list(site.images_dir.glob("*.sqsh"))


def test_it_is_imported_once_and_later_needs_no_enroot(site: Site, enroot: Any) -> None:
    first = pull_image(make_image_spec(NEMO), site)
    enroot.program.unlink()

    assert pull_image(make_image_spec(NEMO), site) == first


def test_a_folder_of_images_outside_the_workspace_knows_who_uses_it(site: Site, enroot: Any, tmp_path: Path) -> None:
    shared = tmp_path / "shared"

    for name in ("a", "b", "a"):
        pull_image(make_image_spec(NEMO), Site(workspace=tmp_path / name, images=shared))
    pull_image(make_image_spec(NEMO), site)

    assert len(enroot.calls("import")) == 2
    assert workspace_refs(shared) == {tmp_path / "a", tmp_path / "b"}
    assert workspace_refs(site.images_dir) == set()


def test_a_folder_of_images_is_shared_by_users(site: Site, enroot: Any, tmp_path: Path, tiny_image: bytes) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can become another user; every other test runs without root here")
    images = tmp_path / "shared"
    images.mkdir()
    images.chmod(0o2777)
    (tmp_path / "nemo.sqsh").write_bytes(tiny_image)
    first = pull_image(make_image_spec(NEMO), site.model_copy(update={"images": images}))
    pull_image(make_image_spec(str(tmp_path / "nemo.sqsh")), site.model_copy(update={"images": images}))
    (sidecar,) = images.glob("[!.]*.json")
    for parent in (tmp_path, *list(tmp_path.parents)[:3]):
        parent.chmod(parent.stat().st_mode | 0o011)
    theirs = Site(workspace=tmp_path / "theirs", images=images)
    theirs.workspace.mkdir()
    os.chown(theirs.workspace, NOBODY, NOBODY)

    os.seteuid(NOBODY)
    try:
        second = pull_image(make_image_spec(NEMO), theirs)
        local = pull_image(make_image_spec(str(tmp_path / "nemo.sqsh")), theirs)
    finally:
        os.seteuid(0)

    assert second == first
    assert local.path == tmp_path / "nemo.sqsh"

    sidecar.chmod(0o600)
    os.seteuid(NOBODY)
    try:
        with pytest.raises(PermanentError, match=r"imported by another user and cannot be read.*chmod g\+r"):
            pull_image(make_image_spec(NEMO), theirs)
    finally:
        os.seteuid(0)


def test_a_moved_tag_is_seen_the_next_night_and_not_within_one(site: Site, enroot: Any) -> None:
    pull_image(make_image_spec(NEMO), site)
    enroot.set_digest("sha256:" + "cd" * 32)

    assert pull_image(make_image_spec(NEMO), site).digest == f"sha256:{HEX}"
    assert pull_image(make_image_spec(NEMO, night="2026-11-22"), site).digest == "sha256:" + "cd" * 32
    assert len(enroot.calls("import")) == 2


def test_what_a_tag_or_a_file_means_at_this_moment(site: Site, enroot: Any, tmp_path: Path, tiny_image: bytes) -> None:
    path = tmp_path / "mine.sqsh"

    def look() -> list[str]:
        path.write_bytes(tiny_image)
        written = (NEMO, str(path), f"nvcr.io/nvidia/nemo@sha256:{HEX}", "none")
        return [current_image(make_image_spec(each), lambda: find_enroot(site.image_import)) for each in written]

    before = look()
    enroot.set_digest("sha256:" + "cd" * 32)
    after = look()

    assert before[0] == f"sha256:{HEX}"
    assert [one != other for one, other in zip(before, after, strict=True)] == [True, True, False, False]
    assert not site.workspace.exists()


def test_what_a_tag_means_is_asked_for_the_processor_of_the_nodes(site: Site, enroot: Any) -> None:
    """Of one for aarch64 alone, a login node with another processor would be told that there is none."""
    current_image(make_image_spec(NEMO, gpu_type="gb200"), lambda: find_enroot(site.image_import))

    (call,) = enroot.calls("digest")
    assert call.startswith("digest --arch aarch64 ")


def test_many_who_ask_at_once_make_one_import(site: Site, enroot: Any) -> None:
    enroot.fail_once("slow")
    found: list[Image] = []
    threads = [threading.Thread(target=lambda: found.append(pull_image(make_image_spec(NEMO), site))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert len(found) == 8
    assert len(set(found)) == 1
    assert len(enroot.calls("import")) == len(enroot.calls("digest")) == 1


@pytest.mark.parametrize("fault", ["cut", "nothing", "killed", "429"])
def test_a_failed_import_leaves_no_image_and_the_next_one_makes_it(site: Site, enroot: Any, fault: str) -> None:
    enroot.fail_once(fault)
    with pytest.raises(TransientError):
        pull_image(make_image_spec(NEMO), site)
    assert list(site.images_dir.iterdir()) == []

    assert pull_image(make_image_spec(NEMO), site).size == 244


def test_a_partial_file_under_the_final_name_is_never_used(site: Site, enroot: Any, tiny_image: bytes) -> None:
    site.images_dir.mkdir(parents=True)
    partial = site.images_dir / f"{HEX}.sqsh"
    partial.write_bytes(tiny_image[:200])

    image = pull_image(make_image_spec(NEMO), site)

    assert image.path == partial
    assert partial.read_bytes() == tiny_image


def test_an_image_that_was_cut_or_overwritten_is_imported_again(site: Site, enroot: Any, tiny_image: bytes) -> None:
    for damaged in (tiny_image[:100], b"x" * len(tiny_image)):
        path = pull_image(make_image_spec(NEMO), site).path
        assert path is not None
        path.write_bytes(damaged)

        pull_image(make_image_spec(NEMO), site)

        assert path.read_bytes() == tiny_image


def test_enroot_3_imports_by_digest_too(
    site: Site, enroot: Any, demo_image: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    enroot.set_version("3.5.0")
    monkeypatch.setenv("ENROOT_ALLOW_HTTP", "y")
    name = f"{demo_image.registry.host}/{demo_image.name}"

    image = pull_image(make_image_spec(f"{name}:1"), site)

    (call,) = enroot.calls("import")
    assert call.endswith(f" docker://{demo_image.registry.host}#{demo_image.name}:{demo_image.digest}")
    assert image.digest == demo_image.digest


def test_a_sidecar_that_was_never_finished_is_removed_by_the_next_import(site: Site, enroot: Any) -> None:
    site.images_dir.mkdir(parents=True)
    (site.images_dir / f".{HEX}.json.0123.tmp").write_text("{")

    pull_image(make_image_spec(NEMO), site)

    assert sorted(path.name for path in site.images_dir.iterdir()) == [f"{HEX}.json", f"{HEX}.sqsh"]


def test_what_a_killed_import_left_elsewhere_is_removed_by_the_next_one(
    site: Site, enroot: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = tmp_path / "work"
    monkeypatch.setenv("ENROOT_TEMP_PATH", str(work))
    with unfinished(site.images_dir, HEX) as output, scratch_dir(output, work) as folder:
        for left in (output.parent, folder):
            shutil.copytree(left, tmp_path / "left" / left.relative_to(tmp_path))
    shutil.copytree(tmp_path / "left", tmp_path, dirs_exist_ok=True)
    assert len(list(work.iterdir())) == len(list(site.images_dir.iterdir())) == 1
    (work / "somebody-else").mkdir()

    pull_image(make_image_spec(NEMO), site)

    assert [path.name for path in work.iterdir()] == ["somebody-else"]
    assert sorted(path.name for path in site.images_dir.iterdir()) == [f"{HEX}.json", f"{HEX}.sqsh"]


def test_without_enroot_a_reference_gets_advice_and_leaves_nothing(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))

    with pytest.raises(PermanentError, match="enroot is not installed here"):
        pull_image(make_image_spec(NEMO), site)

    assert not site.images_dir.exists()


TAGS = ("26.02", "26.10", "26.04", "26.04.rc1", "latest", "nightly-20261120-4f1c2ab", "nightly-20261121-90ab12c",
        "nightly-20261123-8e7d6c5")  # fmt: skip


def listed(reference: ImageReference) -> tuple[str, ...]:
    assert (reference.registry, reference.name) == ("nvcr.io", "nvidia/nemo")
    return TAGS


def no_list(reference: ImageReference) -> tuple[str, ...]:
    raise AssertionError(f"the registry was asked for {reference}")


def test_tags_that_differ_in_numbers_are_in_the_order_of_these_numbers_and_other_tags_are_no_versions() -> None:
    bad = f"nvcr.io#nvidia/nemo:26.10@sha256:{'b' * 64}"

    found = versions_between(f"nvcr.io#nvidia/nemo:26.02@sha256:{'a' * 64}", bad, listed)

    assert found == ("nvcr.io/nvidia/nemo:26.04", bad)


def test_a_commit_in_a_tag_is_no_number_of_it() -> None:
    good, bad = (f"nvcr.io/nvidia/nemo:{TAGS[at]}" for at in (5, 7))

    assert versions_between(good, bad, listed) == (f"nvcr.io/nvidia/nemo:{TAGS[6]}", bad)


@pytest.mark.parametrize(
    ("good", "bad"),
    [
        (f"nvcr.io/nvidia/nemo:dev@sha256:{'a' * 64}", f"nvcr.io/nvidia/nemo:dev2@sha256:{'b' * 64}"),
        ("nvcr.io/nvidia/nemo:26.02", "nvcr.io/nvidia/other:26.04"),
        ("nvcr.io/nvidia/nemo:26.02", "/images/nemo.sqsh"),
        (f"nvcr.io/nvidia/nemo@sha256:{'a' * 64}", "nvcr.io/nvidia/nemo:26.04"),
        ("none", "nvcr.io/nvidia/nemo:26.04"),
        ("/other/nemo-1.sqsh", "/images/nemo-3.sqsh"),
    ],
)
def test_images_of_two_kinds_have_none_between_them(good: str, bad: str) -> None:
    assert versions_between(good, bad, no_list) == (bad,)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    names = ("nemo-26.10", "nemo-26.02", "nemo-26.04", "mine", "base")
    for age, name in enumerate(names):
        (tmp_path / f"{name}.sqsh").touch()
        os.utime(tmp_path / f"{name}.sqsh", (1000 + age, 1000 + age))
    return tmp_path


def test_files_are_in_the_order_of_the_numbers_in_their_names(folder: Path) -> None:
    good, bad = (str(folder / f"nemo-26.{month}.sqsh") for month in ("02", "10"))

    assert versions_between(good, bad, no_list) == (str(folder / "nemo-26.04.sqsh"), bad)


def test_files_whose_names_say_nothing_are_in_the_order_of_their_dates(folder: Path) -> None:
    good, bad = (str(folder / f"{name}.sqsh") for name in ("nemo-26.02", "base"))

    assert versions_between(good, bad, no_list) == (str(folder / "nemo-26.04.sqsh"), str(folder / "mine.sqsh"), bad)


@pytest.mark.parametrize("gone", ["nemo-26.02", "base"])
def test_of_a_file_that_is_not_there_any_more_nobody_knows_what_lies_between(folder: Path, gone: str) -> None:
    good, bad = (str(folder / f"{name}.sqsh") for name in ("nemo-26.02", "base"))
    (folder / f"{gone}.sqsh").unlink()

    assert versions_between(good, bad, no_list) == (bad,)
