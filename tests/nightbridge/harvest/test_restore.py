"""Verify and fetch: every object of the manifest is there and whole, or it is said which is not."""

import dataclasses
import errno
import fcntl
import hashlib
import os
import random
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from nightbridge.errors import DamagedData, InvalidInput, PermanentError, TransientError
from nightbridge.harvest.manifest import foreign_objects, read_manifest
from nightbridge.harvest.restore import INCOMPLETE, Product, fetch_run, verify_content, verify_run
from nightbridge.models import CheckpointState, StoreSettings
from nightbridge.outputs.checkpoints import TRACKERS, find_checkpoints
from nightbridge.store.checksum import PART_SIZE, FileSource, sha256_of_file
from nightbridge.store.object_store import ObjectStore, open_store
from nightbridge.store.s3 import S3Store
from tests.builders import torch_files
from tests.nightbridge.harvest.left_run import LeftRun, make_run
from tests.nightbridge.outputs.test_torch_check import TORCH_PYTHON
from tests.real.s3_proxy import Answer, Request, proxy_to
from tests.real.s3_servers import S3Server

ROOT = Path(__file__).parents[3]
MIB = 1 << 20


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


def test_a_run_of_very_many_files_is_fetched_again(
    directory: ObjectStore, left: LeftRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nightbridge.files.MODEL_LIMIT", 1000)
    prefix = left.harvest(directory).prefix
    fetch_run(directory, prefix, tmp_path / "back")
    (tmp_path / "back/summary.json").unlink()

    assert fetch_run(directory, prefix, tmp_path / "back").prefix == prefix


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
    store.put(f"{prefix}/{path}", b"z" * len(store.get(f"{prefix}/{path}") or b""))
    store.put(f"{prefix}/summary.json", b"{}")

    problems = verify_run(store, prefix)

    assert [problem.split(": ")[0] for problem in problems] == [path, "summary.json"]
    assert "sha256" in problems[0]
    assert "2 bytes, expected" in problems[1]
    with pytest.raises(DamagedData, match="differs from the manifest"):
        fetch_run(store, prefix, tmp_path / "back")
    assert not (tmp_path / "back/manifest.json").exists()


def test_an_object_that_was_sent_in_parts_and_replaced_is_found(store: ObjectStore, tmp_path: Path) -> None:
    large = make_run(tmp_path / "large", rest=1000)
    prefix = large.harvest(store).prefix
    path = "checkpoints/iter_0000040/__0_0.distcp"
    (tmp_path / "other").write_bytes(b"z" * (9 << 20))
    assert verify_run(store, prefix) == []

    store.delete(f"{prefix}/{path}")
    store.put_file(f"{prefix}/{path}", FileSource(tmp_path / "other"))

    assert [problem.split(": ")[0] for problem in verify_run(store, prefix)] == [path]
    with pytest.raises(DamagedData, match="differs from the manifest"):
        fetch_run(store, prefix, tmp_path / "back")


@pytest.mark.parametrize("path", ["checkpoints/iter_0000040/__1_0.distcp", "summary.json"])
@pytest.mark.parametrize("change", [lambda data: data + b"tail", lambda data: data[:-5], lambda data: None])
def test_an_object_that_is_longer_or_shorter_or_gone_is_neither_verified_nor_fetched(
    store: ObjectStore, left: LeftRun, tmp_path: Path, path: str, change: Callable[[bytes], bytes | None]
) -> None:
    prefix = left.harvest(store).prefix
    data = store.get(f"{prefix}/{path}") or b""
    store.delete(f"{prefix}/{path}")
    changed = change(data)
    if changed is not None:
        store.put(f"{prefix}/{path}", changed)
    what = "missing" if changed is None else f"differs from the manifest: {len(changed)} bytes, expected {len(data)}"

    assert verify_content(store, prefix) == [f"{path}: {what}"]
    assert [problem.split(": ")[0] for problem in verify_run(store, prefix)] == [path]
    with pytest.raises(DamagedData, match=rf"{path}: {what}\. It was "):
        fetch_run(store, prefix, tmp_path / "back")
    assert (tmp_path / "back" / INCOMPLETE).exists()


def large_run(settings: StoreSettings, folder: Path) -> str:
    """The prefix of a harvested run: one shard of three parts, others of one."""
    return make_run(folder / "large", shard_size=6 << 20, rest=300_000).harvest(open_store(settings)).prefix


SHARD = "checkpoints/iter_0000040/__0_0.distcp"


@pytest.mark.s3
def test_a_body_cut_on_every_third_read_ends_no_fetch(
    ceph: S3Server, settings_of: Callable[[str], StoreSettings], tmp_path: Path
) -> None:
    settings = settings_of("ceph")
    prefix = large_run(settings, tmp_path)
    with proxy_to(ceph.endpoint_url) as proxy:
        behind = open_store(settings.model_copy(update={"endpoint_url": proxy.endpoint_url}))
        cuts = random.Random(17)
        proxy.cut = lambda _: cuts.randrange(300_000) if proxy.count("GET") % 3 == 0 else None

        fetch_run(behind, prefix, tmp_path / "back")

    for path, data in files_below(tmp_path / "back").items():
        assert data == open_store(settings).get(f"{prefix}/{path}"), path


@pytest.mark.s3
def test_a_part_that_is_damaged_on_its_way_once_is_read_again_and_no_other(
    ceph: S3Server, settings_of: Callable[[str], StoreSettings], tmp_path: Path
) -> None:
    settings = settings_of("ceph")
    prefix = large_run(settings, tmp_path)
    damaged: list[str] = []

    def flip(request: Request, body: bytes) -> bytes:
        if request.path.endswith(SHARD) and not damaged:
            damaged.append(request.headers["range"])
            return body[:PART_SIZE] + bytes([body[PART_SIZE] ^ 1]) + body[PART_SIZE + 1 :]
        return body

    with proxy_to(ceph.endpoint_url) as proxy:
        proxy.change = flip
        fetch_run(
            open_store(settings.model_copy(update={"endpoint_url": proxy.endpoint_url})), prefix, tmp_path / "back"
        )
        ranges = [request.headers["range"] for request in proxy.requests if request.path.endswith(SHARD)]

    assert len(damaged) == 1
    assert ranges == [*damaged, f"bytes={PART_SIZE}-{2 * PART_SIZE - 1}"]
    assert (tmp_path / "back" / SHARD).read_bytes() == open_store(settings).get(f"{prefix}/{SHARD}")


@pytest.mark.s3
def test_bytes_that_are_damaged_on_their_way_back_every_time_are_never_kept(
    ceph: S3Server, settings_of: Callable[[str], StoreSettings], tmp_path: Path
) -> None:
    settings = settings_of("ceph")
    prefix = large_run(settings, tmp_path)
    with proxy_to(ceph.endpoint_url) as proxy:
        behind = open_store(settings.model_copy(update={"endpoint_url": proxy.endpoint_url}))
        proxy.change = lambda request, body: body[:-1] + b"?" if request.path.endswith(".distcp") else body
        with pytest.raises(DamagedData, match="differs from the manifest"):
            fetch_run(behind, prefix, tmp_path / "back")
        assert verify_run(behind, prefix) == []
        assert {problem.split(": ")[0].rpartition(".")[2] for problem in verify_content(behind, prefix)} == {"distcp"}
    assert not [path for kind in ("*.distcp", "*.part") for path in (tmp_path / "back").rglob(kind)]
    assert not (tmp_path / "back/manifest.json").exists()


def test_a_fetch_of_a_damaged_run_is_marked_until_one_of_a_whole_run_has_ended(
    directory: ObjectStore, left: LeftRun, tmp_path: Path
) -> None:
    prefix = left.harvest(directory).prefix
    key = next(item.key for item in directory.list(f"{prefix}/logs/"))
    whole = directory.get(key) or b""
    directory.put(key, b"?" + whole[1:])

    with pytest.raises(DamagedData):
        fetch_run(directory, prefix, tmp_path / "back")
    assert "is not wholly here" in (tmp_path / "back" / INCOMPLETE).read_text()

    directory.put(key, whole)
    fetch_run(directory, prefix, tmp_path / "back")
    assert not (tmp_path / "back" / INCOMPLETE).exists()


FETCHING = """
import sys
from pathlib import Path
from nightbridge.harvest.restore import fetch_run
from nightbridge.models import StoreSettings
from nightbridge.store.object_store import open_store
fetch_run(open_store(StoreSettings.model_validate_json(sys.argv[1])), sys.argv[2], Path(sys.argv[3]))
"""


@pytest.mark.s3
def test_a_fetch_that_was_killed_goes_on_with_the_parts_it_had(
    ceph: S3Server, settings_of: Callable[[str], StoreSettings], tmp_path: Path
) -> None:
    settings = settings_of("ceph")
    prefix = large_run(settings, tmp_path)
    over, name = threading.Event(), hashlib.sha256(b"__0_0.distcp").hexdigest()[:32]
    with proxy_to(ceph.endpoint_url) as proxy:
        behind = settings.model_copy(update={"endpoint_url": proxy.endpoint_url})
        proxy.cut = lambda request: 17 * MIB if request.path.endswith(SHARD) else None

        def stall(request: Request) -> Answer | None:
            if request.path.endswith(SHARD) and request.headers.get("range", "").startswith(f"bytes={17 * MIB}-"):
                over.wait(60)
            return None

        proxy.before = stall
        command = [sys.executable, "-c", FETCHING, behind.model_dump_json(), prefix, str(tmp_path / "back")]
        with subprocess.Popen(command, cwd=ROOT) as process:
            (partial,) = wait_for(lambda: list((tmp_path / "back").glob(f"checkpoints/*/.{name}.*.part")))
            wait_for(lambda: partial.stat().st_size >= 2 * PART_SIZE)
            assert not over.is_set()
            process.kill()
        over.set()
        proxy.before = proxy.cut = lambda _: None
        proxy.requests.clear()

        fetch_run(open_store(behind), prefix, tmp_path / "back")

        again = [request.headers["range"] for request in proxy.requests if request.path.endswith(SHARD)]
    assert len(again) == 1
    assert again[0].startswith(f"bytes={2 * PART_SIZE}-")
    assert (tmp_path / "back" / SHARD).read_bytes() == open_store(settings).get(f"{prefix}/{SHARD}")
    assert not list((tmp_path / "back").rglob("*.part"))


def wait_for(condition: Callable[[], Any], seconds: float = 60) -> Any:
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return found


@pytest.mark.parametrize(
    ("only", "folder"), [("checkpoint", "checkpoints"), ("tensorboard", "tensorboard"), ("logs", "logs")]
)
def test_one_product_is_restored_straight_into_a_folder(
    directory: ObjectStore, left: LeftRun, tmp_path: Path, only: Product, folder: str
) -> None:
    prefix = left.harvest(directory).prefix
    fetch_run(directory, prefix, tmp_path / "all")
    fetch_run(directory, prefix, tmp_path / "load", only=only)
    assert files_below(tmp_path / "load") == files_below(tmp_path / "all" / folder)


def of_night(left: LeftRun, night: str) -> LeftRun:
    return dataclasses.replace(left, spec=left.spec.model_copy(update={"night": night}))


@pytest.mark.parametrize("only", [None, "checkpoint", "logs"])
@pytest.mark.parametrize("earlier", [None, "checkpoint", "logs"])
def test_a_folder_with_another_run_in_it_is_left_as_it_is(
    directory: ObjectStore, left: LeftRun, tmp_path: Path, earlier: Product | None, only: Product | None
) -> None:
    """A training that loads from there takes what the tracker names, or the newest: that of either run."""
    fetch_run(directory, left.harvest(directory).prefix, tmp_path / "load", only=earlier)
    (left.job_dir / "log-account.exp_4711_0.out").rename(left.job_dir / "log-account.exp_4712_0.out")
    logs, checkpoints = (left.job_dir / "log-account.exp_4712_0.out",), left.output.checkpoints[:1]
    output = left.output.model_copy(update={"logs": logs, "checkpoints": checkpoints})
    other = of_night(dataclasses.replace(left, output=output), "2026-05-05").harvest(directory).prefix
    before = files_below(tmp_path / "load")

    with pytest.raises(InvalidInput, match=r"load: .* is not of runs/.*2026-05-05.*Name an empty folder"):
        fetch_run(directory, other, tmp_path / "load", only=only)

    assert files_below(tmp_path / "load") == before


def test_products_of_one_run_may_share_a_folder(directory: ObjectStore, left: LeftRun, tmp_path: Path) -> None:
    prefix = left.harvest(directory).prefix
    products: tuple[Product | None, ...] = ("checkpoint", None, "logs", "checkpoint", "tensorboard", None)
    for only in products:
        fetch_run(directory, prefix, tmp_path / "load", only=only)
    assert (tmp_path / "load/manifest.json").exists()
    assert not (tmp_path / "load" / INCOMPLETE).exists()


def test_a_run_that_is_half_restored_keeps_its_mark_until_it_is_whole(
    directory: ObjectStore, left: LeftRun, tmp_path: Path
) -> None:
    """It was whole, and was fetched again because a file of it was lost, and that fetch did not end well either."""
    prefix = left.harvest(directory).prefix
    other = of_night(left, "2026-05-05").harvest(directory).prefix
    fetch_run(directory, prefix, tmp_path / "back")
    (tmp_path / "back" / SHARD).unlink()
    shard = directory.get(f"{prefix}/{SHARD}") or b""
    directory.put(f"{prefix}/{SHARD}", b"?" + shard[1:])
    with pytest.raises(DamagedData):
        fetch_run(directory, prefix, tmp_path / "back")
    half = files_below(tmp_path / "back")
    assert "manifest.json" not in half

    fetches: tuple[tuple[str, Product | None], ...] = ((prefix, "logs"), (other, "logs"), (other, None))
    for one, only in fetches:
        with pytest.raises(InvalidInput, match=f"another fetch into it has not ended: .*{prefix} is not wholly here"):
            fetch_run(directory, one, tmp_path / "back", only=only)
    assert files_below(tmp_path / "back") == half

    directory.put(f"{prefix}/{SHARD}", shard)
    fetch_run(directory, prefix, tmp_path / "back")
    assert (tmp_path / "back/manifest.json").exists()
    assert not (tmp_path / "back" / INCOMPLETE).exists()


def test_what_a_fetch_that_was_killed_has_left_is_no_other_runs(
    directory: ObjectStore, left: LeftRun, tmp_path: Path
) -> None:
    prefix = left.harvest(directory).prefix
    (tmp_path / "disk").mkdir()
    (tmp_path / "back").mkdir()
    (tmp_path / "back/checkpoints").symlink_to(tmp_path / "disk")
    (tmp_path / "disk/iter_0000040").mkdir()
    for name in ("back/.manifest.json.0123.tmp", "disk/iter_0000040/.__0_0.distcp.0123.part"):
        (tmp_path / name).write_bytes(b"begun")

    fetch_run(directory, prefix, tmp_path / "back")

    assert (tmp_path / "disk/iter_0000040/__0_0.distcp").exists()
    (tmp_path / "disk/iter_0000050").mkdir()
    (tmp_path / "disk/iter_0000050/.metadata").write_bytes(b"of another run")
    with pytest.raises(InvalidInput, match=r"'checkpoints/iter_0000050/\.metadata' in it is not of "):
        fetch_run(directory, prefix, tmp_path / "back")


def left_in(left: LeftRun, save_dir: Path, *, damaged: bool = False) -> LeftRun:
    """The run with its checkpoints in another folder; the newest, which is tracked, may be damaged."""
    if save_dir != left.job_dir / "checkpoints":
        save_dir.parent.mkdir(parents=True, exist_ok=True)
        (left.job_dir / "checkpoints").rename(save_dir)
    loader = save_dir / "energon/iter_0000020"
    loader.mkdir(parents=True)
    (loader / "train_dataloader_dprank000.pt").write_bytes(torch_files.torch_save({"at": 20}))
    (save_dir / "iter_0000020/train_state.pt").write_bytes(torch_files.torch_save({"step": 20}, "train_state"))
    found = [each.model_copy(update={"path": save_dir / each.path.name}) for each in left.output.checkpoints]
    if damaged:
        found[1] = found[1].model_copy(update={"state": CheckpointState.DAMAGED})
    output = left.output.model_copy(update={"checkpoints": tuple(found)})
    return dataclasses.replace(left, output=output).with_sizes_of_now()


def test_a_training_finds_an_older_checkpoint_that_was_stored_in_place_of_the_newest(
    directory: ObjectStore, left: LeftRun, tmp_path: Path
) -> None:
    prefix = left_in(left, left.job_dir / "checkpoints", damaged=True).harvest(directory).prefix
    fetch_run(directory, prefix, tmp_path / "all")
    fetch_run(directory, prefix, tmp_path / "load", only="checkpoint")
    fetch_run(directory, prefix, tmp_path / "load", only="checkpoint")

    for folder in (tmp_path / "all/checkpoints", tmp_path / "load"):
        assert {path.name for path in folder.iterdir()} == {"energon", "iter_0000020", *TRACKERS}
        assert (folder / "latest_checkpointed_iteration.txt").read_text() == "20"
        state = (folder / "iter_0000020/train_state.pt").read_bytes()
        assert (folder / "latest_train_state.pt").read_bytes() == state
    assert not [path for path in (tmp_path / "all").rglob("*latest*") if path.parent.name != "checkpoints"]


def test_a_training_finds_the_checkpoint_before_a_save_that_was_killed_as_it_copied_its_training_state(
    directory: ObjectStore, left: LeftRun, tmp_path: Path
) -> None:
    save_dir = left.job_dir / "checkpoints"
    state, later = (torch_files.torch_save({"step": step}, "train_state") for step in (40, 60))
    (save_dir / "iter_0000040/train_state.pt").write_bytes(state)
    (save_dir / "iter_0000060/train_state.pt").write_bytes(later)
    (save_dir / "latest_train_state.pt").write_bytes(later)
    prefix = left.with_sizes_of_now().harvest(directory).prefix

    for _ in range(2):
        fetch_run(directory, prefix, tmp_path / "load", only="checkpoint")

    assert (tmp_path / "load/latest_train_state.pt").read_bytes() == state
    assert (tmp_path / "load/latest_checkpointed_iteration.txt").read_text() == "40"


@pytest.mark.parametrize("damaged", [False, True])
@pytest.mark.parametrize("where", ["a1", "saved"])
def test_checkpoints_of_a_save_dir_of_ones_own_are_restored_straight_into_the_folder(
    directory: ObjectStore, left: LeftRun, tmp_path: Path, where: str, damaged: bool
) -> None:
    save_dirs = {"a1": tmp_path / f"lustre/{left.spec.run_key}/a1", "saved": left.job_dir / "saved"}
    prefix = left_in(left, save_dirs[where], damaged=damaged).harvest(directory).prefix

    fetch_run(directory, prefix, tmp_path / "load", only="checkpoint")
    fetch_run(directory, prefix, tmp_path / "load", only="checkpoint")

    stored = {"energon", "iter_0000020"} if damaged else {"iter_0000040"}
    assert {path.name for path in (tmp_path / "load").iterdir()} == {*stored, *TRACKERS}
    fetch_run(directory, prefix, tmp_path / "load")
    (folder,) = (tmp_path / "load/checkpoints").iterdir()
    assert {path.name for path in folder.iterdir()} == {*stored, *TRACKERS}


def test_checkpoints_of_two_folders_are_restored_into_two(
    directory: ObjectStore, left: LeftRun, tmp_path: Path
) -> None:
    shutil.copytree(left.job_dir / "checkpoints", tmp_path / "second")
    second = (
        each.model_copy(update={"path": tmp_path / "second" / each.path.name}) for each in left.output.checkpoints
    )
    found = (*left.output.checkpoints, *second)
    both = dataclasses.replace(left, output=left.output.model_copy(update={"checkpoints": found}))
    prefix = both.harvest(directory).prefix

    fetch_run(directory, prefix, tmp_path / "load", only="checkpoint")

    names = {"iter_0000040", *TRACKERS}
    assert {path.name for path in (tmp_path / "load").iterdir()} == {*names, "second"}
    assert {path.name for path in (tmp_path / "load/second").iterdir()} == names


def test_checkpoints_of_two_folders_of_one_name_are_both_stored_and_restored(
    directory: ObjectStore, left: LeftRun, tmp_path: Path
) -> None:
    save_dir = tmp_path / f"lustre/{left.spec.run_key}/a1"
    found = []
    for part in ("actor", "critic"):
        shutil.copytree(left.job_dir / "checkpoints", save_dir / part / "ckpt")
        (save_dir / part / "ckpt/iter_0000040/tokenizer/part").write_text(part)
        found += [
            each.model_copy(update={"path": save_dir / part / "ckpt" / each.path.name})
            for each in left.output.checkpoints
        ]
    output = left.output.model_copy(update={"checkpoints": tuple(found)})
    record = dataclasses.replace(left, output=output).with_sizes_of_now().harvest(directory)

    states = [each.state for each in record.checkpoints if each.iteration == 40]
    assert CheckpointState.DAMAGED not in states
    fetch_run(directory, record.prefix, tmp_path / "load")
    # Neither key has the attempt's number: a test that loads the checkpoint names a folder that stays.
    parts = {
        part: tmp_path / f"load/checkpoints/{part}/ckpt/iter_0000040/tokenizer/part" for part in ("actor", "critic")
    }
    assert {part: path.read_text() for part, path in parts.items()} == {"actor": "actor", "critic": "critic"}


def test_of_two_checkpoints_with_one_key_the_stored_one_is_not_called_damaged(
    directory: ObjectStore, left: LeftRun
) -> None:
    shutil.copytree(left.job_dir / "checkpoints", left.job_dir / "checkpoints/ckpt")
    shutil.copytree(left.job_dir / "checkpoints/ckpt", left.job_dir / "ckpt")
    found = (
        each.model_copy(update={"path": left.job_dir / folder / each.path.name})
        for folder in ("checkpoints/ckpt", "ckpt")
        for each in left.output.checkpoints
    )
    output = left.output.model_copy(update={"checkpoints": tuple(found)})
    record = dataclasses.replace(left, output=output).harvest(directory)

    first, second = (each for each in record.checkpoints if each.iteration == 40)
    assert (first.path.parent.parent.name, first.state) == ("checkpoints", CheckpointState.VERIFIED)
    assert (second.state, "has the same key as" in second.reason) == (CheckpointState.DAMAGED, True)


def test_a_product_that_the_run_has_not_is_said(directory: ObjectStore, left: LeftRun, tmp_path: Path) -> None:
    prefix = left.harvest(directory).prefix
    manifest = read_manifest(directory, prefix)
    assert manifest is not None
    bare = tuple(file for file in manifest.files if file.kind != "checkpoint")
    directory.put(f"{prefix}/manifest.json", manifest.model_copy(update={"files": bare}).model_dump_json().encode())
    with pytest.raises(PermanentError, match="no stored checkpoint"):
        fetch_run(directory, prefix, tmp_path / "load", only="checkpoint")


def test_two_fetches_into_one_folder_do_not_mix(directory: ObjectStore, left: LeftRun, tmp_path: Path) -> None:
    prefix = left.harvest(directory).prefix
    manifest = fetch_run(directory, prefix, tmp_path / "back")
    file = next(file for file in manifest.files if file.path.endswith("summary.json"))
    (tmp_path / "back" / file.path).unlink()
    name = hashlib.sha256(b"summary.json").hexdigest()[:32]
    with (tmp_path / "back" / f".{name}.{file.sha256[:32]}.part").open("wb") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        with pytest.raises(TransientError, match="another fetch is restoring it"):
            fetch_run(directory, prefix, tmp_path / "back")


@pytest.mark.parametrize("begun_again", [False, True])
def test_a_file_that_another_fetch_ends_while_it_is_opened_is_left_as_it_is(
    begun_again: bool, directory: ObjectStore, left: LeftRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is verified and has its name by then: what is written to it now would be checked too late.

    What a third fetch has begun by then would get the name half written.
    """
    prefix, back = left.harvest(directory).prefix, tmp_path / "back"
    flock, first = fcntl.flock, iter([True])

    def ended_before(descriptor: int, how: int) -> None:
        if next(first, False):
            partial = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
            partial.rename(tmp_path / "ended")
            if begun_again:
                partial.touch()
        flock(descriptor, how)

    monkeypatch.setattr(fcntl, "flock", ended_before)
    with pytest.raises(TransientError, match="another fetch is restoring it"):
        fetch_run(directory, prefix, back)
    assert (tmp_path / "ended").read_bytes() == b""
    fetch_run(directory, prefix, back)


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_takes_a_run_as_any_other(
    directory: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """As Lustre mounted without `flock`, or NFS without lockd."""

    def without_locks(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    prefix, back = make_run(tmp_path / "w", rest=1000).harvest(directory).prefix, tmp_path / "back"
    monkeypatch.setattr(fcntl, "flock", without_locks)
    manifest = fetch_run(directory, prefix, back)
    found = {path.relative_to(back).as_posix(): path for path in back.rglob("*") if path.is_file()}
    assert set(found) == {"manifest.json", *(file.path for file in manifest.files)}
    assert {sha256_of_file(found[file.path], file.part_size) == file.sha256 for file in manifest.files} == {True}


def test_files_of_one_content_whose_long_names_begin_alike_do_not_stand_in_each_others_way(
    directory: ObjectStore, left: LeftRun, tmp_path: Path
) -> None:
    """As the empty logs of the nodes of a job with a long name."""
    prefix = left.harvest(directory).prefix
    manifest = read_manifest(directory, prefix)
    assert manifest is not None
    summary = next(file for file in manifest.files if file.path == "summary.json")
    alike = tuple(dataclasses.replace(summary, path=f"logs/{'n' * 150}{number}") for number in range(2))
    for file in alike:
        directory.put(f"{prefix}/{file.path}", directory.get(f"{prefix}/summary.json") or b"")
    longer = manifest.model_copy(update={"files": (*manifest.files, *alike)})
    directory.put(f"{prefix}/manifest.json", longer.model_dump_json().encode())
    beside = threading.Barrier(2)

    class BothAtOnce:
        def __getattr__(self, name: str) -> Any:
            return getattr(directory, name)

        def read(self, key: str, start: int, length: int) -> Iterator[memoryview]:
            if "nnn" in key:
                beside.wait(10)
            return directory.read(key, start, length)

    fetch_run(BothAtOnce(), prefix, tmp_path / "back")

    assert all((tmp_path / "back" / file.path).stat().st_size == file.size for file in alike)


def test_objects_that_do_not_belong_to_the_run_are_listed(directory: ObjectStore, left: LeftRun) -> None:
    prefix = left.harvest(directory).prefix
    directory.put(f"{prefix}/checkpoints/stranger", b"?")
    manifest = read_manifest(directory, prefix)
    assert manifest is not None
    assert foreign_objects(directory, manifest) == ["checkpoints/stranger"]
    assert verify_run(directory, prefix) == []


@pytest.mark.s3
def test_a_byte_flipped_beside_a_kept_checksum_is_found_by_the_servers_etag(
    ceph: S3Server, settings_of: Callable[[str], StoreSettings], left: LeftRun
) -> None:
    store = open_store(settings_of("ceph"))
    assert isinstance(store, S3Store)
    prefix = left.harvest(store).prefix
    key = f"{store.prefix}{prefix}/checkpoints/iter_0000040/__1_0.distcp"
    client = ceph.client()
    found = client.get_object(Bucket=store.bucket, Key=key)
    data = bytearray(found["Body"].read())
    data[100] ^= 1
    client.put_object(Bucket=store.bucket, Key=key, Body=bytes(data), Metadata=found["Metadata"])

    (problem,) = verify_run(store, prefix)
    assert "__1_0.distcp: ETag" in problem
    (problem,) = verify_content(store, prefix)
    assert "__1_0.distcp: differs from the manifest" in problem


def test_a_run_stored_before_parts_had_digests_is_restored(
    directory: ObjectStore, left: LeftRun, tmp_path: Path
) -> None:
    large = make_run(tmp_path / "large", rest=1000)
    prefix = large.harvest(directory).prefix
    manifest = read_manifest(directory, prefix)
    assert manifest is not None
    older = tuple(dataclasses.replace(file, part_digests="") for file in manifest.files)
    directory.put(f"{prefix}/manifest.json", manifest.model_copy(update={"files": older}).model_dump_json().encode())
    fetch_run(directory, prefix, tmp_path / "back")
    assert (tmp_path / "back" / SHARD).read_bytes() == directory.get(f"{prefix}/{SHARD}")

    data = bytearray(directory.get(f"{prefix}/{SHARD}") or b"")
    data[PART_SIZE + 1] ^= 1
    directory.put(f"{prefix}/{SHARD}", bytes(data))
    with pytest.raises(DamagedData, match="differs from the manifest"):
        fetch_run(directory, prefix, tmp_path / "other")
    assert not [path for kind in ("*__0_0*", "*.part") for path in (tmp_path / "other").rglob(kind)]


@pytest.mark.s3
def test_a_run_that_was_copied_from_a_bucket_to_a_folder_is_checked_there(
    settings_of: Callable[[str], StoreSettings], directory: ObjectStore, tmp_path: Path
) -> None:
    bucket = open_store(settings_of("ceph"))
    prefix = make_run(tmp_path / "large", rest=1000).harvest(bucket).prefix
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


def test_the_copy_of_an_attempt_is_not_fetched_as_that_attempt(
    directory: ObjectStore, left: LeftRun, tmp_path: Path
) -> None:
    prefix = left.harvest(directory).prefix
    copy = f"{prefix[:-1]}2"
    for found in directory.list(prefix):
        directory.put(found.key.replace(prefix, copy), directory.get(found.key) or b"")

    assert verify_run(directory, copy) == [f"manifest.json: belongs to {prefix}"]
    with pytest.raises(DamagedData, match=f"{copy}: its manifest.json belongs to {prefix}"):
        fetch_run(directory, copy, tmp_path / "back")
    assert not (tmp_path / "back").exists()


def test_what_is_no_manifest_is_damage(directory: ObjectStore) -> None:
    directory.put("runs/x/a1/manifest.json", b"not json")
    with pytest.raises(DamagedData, match="not a manifest"):
        read_manifest(directory, "runs/x/a1")


SAVE_AS_BRIDGE = """
import pathlib, shutil, sys, torch, torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
folder, reference = pathlib.Path(sys.argv[1]) / "iter_0000040", sys.argv[2]
folder.mkdir(parents=True)
state = {
    "model.decoder.weight": torch.randn(1024, 1024),
    "model.decoder.bias": torch.randn(333).bfloat16(),
    "model.decoder.scale": torch.rand(64).to(torch.float8_e4m3fn),
    "optimizer.step": torch.tensor(40),
    "optimizer.empty": torch.zeros(0, 3),
}
planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
dcp.save(state, checkpoint_id=folder, planner=planner, no_dist=True)
torch.save(state, reference)
torch.save({"iteration": 40}, folder / "common.pt")
(folder / "metadata.json").write_text('{"sharded_backend": "torch_dist", "sharded_backend_version": 1}')
torch.save({"step": torch.tensor(40)}, folder / "train_state.pt")
shutil.copy(folder / "train_state.pt", folder.parent / "latest_train_state.pt")
(folder.parent / "latest_checkpointed_iteration.txt").write_text("40")
(folder / "run_config.yaml").write_text("checkpoint:\\n  ckpt_format: torch_dist\\n")
"""
LOAD_AS_BRIDGE = """
import pathlib, sys, torch, torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
saved, reference = pathlib.Path(sys.argv[1]), torch.load(sys.argv[2])
folder = saved / f"iter_{int((saved / 'latest_checkpointed_iteration.txt').read_text()):07d}"
loaded = {name: torch.zeros_like(tensor) for name, tensor in reference.items()}
planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
dcp.load(loaded, checkpoint_id=folder, planner=planner, no_dist=True)
as_bytes = lambda tensor: tensor.contiguous().reshape(-1).view(torch.uint8)
assert all(torch.equal(as_bytes(loaded[name]), as_bytes(reference[name])) for name in reference)
assert torch.load(saved / "latest_train_state.pt")["step"] == 40
"""


@pytest.mark.s3
@pytest.mark.skipif(not TORCH_PYTHON, reason="set NIGHTBRIDGE_TORCH_PYTHON to an interpreter with torch")
def test_torch_loads_from_a_fetched_checkpoint_every_number_that_it_had_saved(
    settings_of: Callable[[str], StoreSettings], left: LeftRun, tmp_path: Path
) -> None:
    save_dir, reference = left.job_dir / "checkpoints", str(tmp_path / "reference")
    shutil.rmtree(save_dir)
    subprocess.run([TORCH_PYTHON, "-c", SAVE_AS_BRIDGE, str(save_dir), reference], check=True)
    output = left.output.model_copy(update={"checkpoints": find_checkpoints(save_dir)})
    store = open_store(settings_of("ceph"))

    record = dataclasses.replace(left, output=output).harvest(store)
    fetch_run(store, record.prefix, tmp_path / "load", only="checkpoint")

    assert [each.state for each in record.checkpoints] == [CheckpointState.VERIFIED]
    subprocess.run([TORCH_PYTHON, "-c", LOAD_AS_BRIDGE, str(tmp_path / "load"), reference], check=True)
