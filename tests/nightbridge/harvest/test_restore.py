"""Verify and fetch: every object of the manifest is there and whole, or it is said which is not."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest

from nightbridge.errors import DamagedData, InvalidInput, PermanentError, TransientError
from nightbridge.harvest.manifest import read_manifest
from nightbridge.harvest.restore import fetch_run, verify_run
from nightbridge.models import StoreSettings
from nightbridge.store.checksum import FileSource
from nightbridge.store.factory import open_store
from nightbridge.store.protocol import ObjectStore
from tests.nightbridge.harvest.left_run import LeftRun, make_run
from tests.real.s3_proxy import proxy_to
from tests.real.s3_servers import S3Server


@pytest.fixture
def left(tmp_path: Path) -> LeftRun:
    return make_run(tmp_path / "workspace", shard_size=50_000)


@pytest.fixture
def directory(tmp_path: Path) -> ObjectStore:
    return open_store(StoreSettings(url=f"file://{tmp_path}/store"))


def files_below(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_fetched_run_is_the_stored_one_byte_for_byte(store: ObjectStore, left: LeftRun, tmp_path: Path) -> None:
    prefix = left.harvest(store).prefix
    manifest = fetch_run(store, prefix, tmp_path / "back")
    fetched = files_below(tmp_path / "back")
    assert set(fetched) == {"manifest.json", *(file.path for file in manifest.files)}
    assert all(data == store.get(f"{prefix}/{path}") for path, data in fetched.items())


def test_fetching_again_keeps_what_is_whole_and_repairs_the_rest(
    directory: ObjectStore, left: LeftRun, tmp_path: Path
) -> None:
    prefix = left.harvest(directory).prefix
    fetch_run(directory, prefix, tmp_path / "back")
    before = files_below(tmp_path / "back")
    kept = (tmp_path / "back/metrics.parquet").stat().st_ino
    (tmp_path / "back/summary.json").write_text("{}")

    fetch_run(directory, prefix, tmp_path / "back")

    assert files_below(tmp_path / "back") == before
    assert (tmp_path / "back/metrics.parquet").stat().st_ino == kept


def test_a_run_that_was_never_committed_is_not_fetched(store: ObjectStore, tmp_path: Path) -> None:
    store.put("runs/x/a1/record.json", b"{}")
    with pytest.raises(PermanentError, match="no committed run under this prefix"):
        fetch_run(store, "runs/x/a1", tmp_path / "back")
    assert verify_run(store, "runs/x/a1") == ["manifest.json: missing; this run was never committed"]
    assert not (tmp_path / "back").exists()


def test_an_object_that_was_replaced_is_found_by_its_checksum(
    store: ObjectStore, left: LeftRun, tmp_path: Path
) -> None:
    prefix = left.harvest(store).prefix
    path = "checkpoints/iter_0000040/__1_0.distcp"
    store.put(f"{prefix}/{path}", b"z" * 50_000)
    store.put(f"{prefix}/summary.json", b"{}")

    problems = verify_run(store, prefix)

    assert [problem.split(": ")[0] for problem in problems] == [path, "summary.json"]
    assert "sha256" in problems[0]
    assert "2 bytes, expected" in problems[1]
    with pytest.raises(DamagedData, match="differs from the manifest"):
        fetch_run(store, prefix, tmp_path / "back")
    assert not (tmp_path / "back/manifest.json").exists()


def test_an_object_that_was_sent_in_parts_and_replaced_is_found(store: ObjectStore, tmp_path: Path) -> None:
    large = make_run(tmp_path / "large", shard_size=3 << 20)
    prefix = large.harvest(store).prefix
    path = "checkpoints/iter_0000040/__0_0.distcp"
    (tmp_path / "other").write_bytes(b"z" * (9 << 20))
    assert verify_run(store, prefix) == []

    store.put_file(f"{prefix}/{path}", FileSource(tmp_path / "other"))

    assert [problem.split(": ")[0] for problem in verify_run(store, prefix)] == [path]
    with pytest.raises(DamagedData, match="differs from the manifest"):
        fetch_run(store, prefix, tmp_path / "back")


@pytest.mark.s3
@pytest.mark.parametrize("name", ["__0_0.distcp", "__1_0.distcp"], ids=["sent in parts", "sent at once"])
def test_a_download_that_breaks_off_is_transient_and_fetching_again_goes_on(
    ceph: S3Server, settings_of: Callable[[str], StoreSettings], tmp_path: Path, name: str
) -> None:
    settings = settings_of("ceph")
    prefix = make_run(tmp_path / "large", shard_size=3 << 20).harvest(open_store(settings)).prefix
    with proxy_to(ceph.endpoint_url) as proxy:
        behind = open_store(settings.model_copy(update={"endpoint_url": proxy.endpoint_url}))
        proxy.cut = lambda request: 2 << 20 if request.path.endswith(f"iter_0000040/{name}") else None
        with pytest.raises(TransientError, match="the connection was lost"):
            fetch_run(behind, prefix, tmp_path / "back")
        assert not list((tmp_path / "back").rglob(f"*{name}*"))
        there = {path.name for path in (tmp_path / "back").rglob("*.distcp")}
        proxy.cut = lambda _: None
        proxy.requests.clear()

        fetch_run(behind, prefix, tmp_path / "back")

        again = {request.path.rpartition("/")[2] for request in proxy.requests}
    assert there
    assert there.isdisjoint(again)
    shard = f"checkpoints/iter_0000040/{name}"
    assert (tmp_path / "back" / shard).read_bytes() == open_store(settings).get(f"{prefix}/{shard}")


@pytest.mark.s3
def test_bytes_that_are_damaged_on_their_way_back_are_never_kept(
    ceph: S3Server, settings_of: Callable[[str], StoreSettings], tmp_path: Path
) -> None:
    settings = settings_of("ceph")
    prefix = make_run(tmp_path / "large", shard_size=3 << 20).harvest(open_store(settings)).prefix
    with proxy_to(ceph.endpoint_url) as proxy:
        behind = open_store(settings.model_copy(update={"endpoint_url": proxy.endpoint_url}))
        proxy.change = lambda request, body: body[:-1] + b"?" if request.path.endswith(".distcp") else body
        with pytest.raises(DamagedData):
            fetch_run(behind, prefix, tmp_path / "back")
    assert not list((tmp_path / "back").rglob("*distcp*"))
    assert not (tmp_path / "back/manifest.json").exists()


@pytest.mark.s3
def test_a_run_that_was_copied_from_a_bucket_to_a_folder_is_checked_there(
    settings_of: Callable[[str], StoreSettings], directory: ObjectStore, tmp_path: Path
) -> None:
    bucket = open_store(settings_of("ceph"))
    prefix = make_run(tmp_path / "large", shard_size=3 << 20).harvest(bucket).prefix
    for found in bucket.list(prefix):
        directory.put(found.key, bucket.get(found.key) or b"")
    assert verify_run(directory, prefix) == []

    key = f"{prefix}/checkpoints/iter_0000040/__0_0.distcp"
    data = bytearray(directory.get(key) or b"")
    data[-1] ^= 1
    directory.put(key, bytes(data))

    assert [problem.split(": ")[0] for problem in verify_run(directory, prefix)] == [key.removeprefix(f"{prefix}/")]


def test_a_manifest_cannot_write_outside_the_destination(directory: ObjectStore, left: LeftRun, tmp_path: Path) -> None:
    prefix = left.harvest(directory).prefix
    manifest = read_manifest(directory, prefix)
    assert manifest is not None
    evil = manifest.model_copy(update={"files": (dataclasses.replace(manifest.files[0], path="../../evil"),)})
    directory.put(f"{prefix}/manifest.json", evil.model_dump_json().encode())
    with pytest.raises(InvalidInput, match="not a usable object key"):
        fetch_run(directory, prefix, tmp_path / "deep/back")
    assert not (tmp_path / "evil").exists()


def test_what_is_no_manifest_is_damage(directory: ObjectStore) -> None:
    directory.put("runs/x/a1/manifest.json", b"not json")
    with pytest.raises(DamagedData, match="not a manifest"):
        read_manifest(directory, "runs/x/a1")
