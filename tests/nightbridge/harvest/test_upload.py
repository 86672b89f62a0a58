"""What a run may leave that is odd: empty, huge, numerous, oddly named. All of it arrives, in bounded memory."""

import errno
import gzip
import os
import random
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from nightbridge.harvest.upload import Unit, Uploaded, upload
from nightbridge.models import StoreSettings
from nightbridge.store.checksum import FileSource
from nightbridge.store.object_store import ObjectInfo, ObjectStore, open_store
from tests.nightbridge.outputs.builders import EventFileBuilder

ROOT = Path(__file__).parents[3]
NAMES = ["with space", "größe ✓", "a+b&c=d?e#f%20g", "~!@$()[]{};,'\"\\", ".hidden", "x" * 200]


def send(store: ObjectStore, folder: Path, *units: Unit) -> Uploaded:
    (folder / "scratch").mkdir(exist_ok=True)
    return upload(store, "runs/a1", units, ["hf_a_secret"], folder / "scratch")


@pytest.mark.parametrize("size", [1000, 9 << 20])
def test_odd_names_come_back_as_they_were(store: ObjectStore, tmp_path: Path, size: int) -> None:
    content = {name: random.Random(name).randbytes(size) for name in NAMES}
    for name, data in content.items():
        (tmp_path / name).write_bytes(data)
    sent = send(store, tmp_path, *(Unit.of(tmp_path / name, f"checkpoints/{name}", "checkpoint") for name in NAMES))
    assert sent.left_out == ()
    assert {key.key.removeprefix("runs/a1/checkpoints/") for key in store.list("runs")} == set(NAMES)
    assert all(store.get(f"runs/a1/checkpoints/{name}") == data for name, data in content.items())
    assert send(
        store, tmp_path, *(Unit.of(tmp_path / name, f"checkpoints/{name}", "checkpoint") for name in NAMES)
    ) == (sent)


@pytest.mark.parametrize("length", [993, 980])
def test_a_path_too_long_for_a_key_of_the_store_leaves_its_unit_out_and_no_other(
    store: ObjectStore, tmp_path: Path, length: int
) -> None:
    """The run's prefix is part of the key, and of S3's the store's own, too."""
    (tmp_path / "a").write_bytes(b"weights")
    path = "/".join(["checkpoints", *["x" * 200] * 4]).ljust(length - 150, "y") + "/" + "z" * 149
    sent = send(
        store, tmp_path, Unit.of(tmp_path / "a", path, "checkpoint"), Unit.of(tmp_path / "a", "b", "checkpoint")
    )
    fits = length == 980 and not store.url.startswith("s3")
    assert [file.path for file in sent.files] == ["b", *[path] * fits]
    assert ["longer than 10" in left_out.reason for left_out in sent.left_out] == [True] * (not fits)


@pytest.mark.parametrize("kind", ["log", "checkpoint"])
def test_an_empty_file_is_a_file(store: ObjectStore, tmp_path: Path, kind: str) -> None:
    (tmp_path / "empty").touch()
    unit = Unit.of(tmp_path / "empty", "empty", kind)  # type: ignore[arg-type]
    first, again = send(store, tmp_path, unit), send(store, tmp_path, unit)
    assert [(file.path, file.size) for file in first.files] == [("empty", 0)]
    assert again == first
    assert store.get("runs/a1/empty") == b""


def test_a_time_that_64_bits_with_a_sign_do_not_hold_is_a_time(store: ObjectStore, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"weights")
    os.utime(tmp_path / "file", ns=(10**19, 10**19))
    sent = send(store, tmp_path, Unit.of(tmp_path / "file", "file", "checkpoint"))
    assert [(file.path, file.size) for file in sent.files] == [("file", 7)]


SHAPED = b"token " + b"hf_" + b"AbCdEfGhIjKlMnOpQrStUvWxYz01234567"


def test_what_has_a_secrets_shape_is_masked_in_text_and_counted(store: ObjectStore, tmp_path: Path) -> None:
    (tmp_path / "log").write_bytes(SHAPED + b"\n" + SHAPED)
    assert send(store, tmp_path, Unit.of(tmp_path / "log", "log", "log")).masks == 2
    assert store.get("runs/a1/log") == b"token ********\ntoken ********"


@pytest.mark.parametrize("kind", ["checkpoint", "tensorboard", "other"])
def test_a_token_fails_the_binary_that_holds_it_and_a_word_named_as_a_secret_does_not(
    store: ObjectStore, tmp_path: Path, kind: str
) -> None:
    named = b"api_key: 0123456789abcdef0123456789abcdef01234567"
    for name, data in (("token", SHAPED), ("named", named)):
        (tmp_path / name).write_bytes(data)
    units = [Unit.of(tmp_path / name, name, kind) for name in ("token", "named")]  # type: ignore[arg-type]
    sent = send(store, tmp_path, *units)
    assert [(each.path, "contains a secret" in each.reason) for each in sent.left_out] == [("token", True)]
    assert store.get("runs/a1/named") == named


@pytest.mark.parametrize("kind", ["checkpoint", "tensorboard", "other"])
def test_a_known_secret_fails_the_binary_that_holds_it_and_no_other(
    store: ObjectStore, tmp_path: Path, kind: str
) -> None:
    (tmp_path / "bad").write_bytes(b"\0hf_a_secret\0")
    (tmp_path / "good").write_bytes(b"\0")
    units = [Unit.of(tmp_path / name, name, kind) for name in ("bad", "good")]  # type: ignore[arg-type]
    sent = send(store, tmp_path, *units)
    assert [(each.path, "secret" in each.reason) for each in sent.left_out] == [("bad", True)]
    assert [file.path for file in sent.files] == ["good"]
    assert store.get("runs/a1/bad") is None


def test_a_secret_in_a_packed_trace_leaves_it_out_and_a_trace_without_one_is_stored(
    store: ObjectStore, tmp_path: Path
) -> None:
    words = random.Random(3).randbytes(300_000).hex().encode()
    for name, middle in (("bad.pt.trace.json.gz", b"hf_a_secret"), ("good.pt.trace.json.gz", b"nothing")):
        (tmp_path / name).write_bytes(gzip.compress(words + middle + words))
    units = [Unit.of(path, path.name, "other") for path in sorted(tmp_path.glob("*.gz"))]
    sent = send(store, tmp_path, *units)
    assert [(each.path, "secret" in each.reason) for each in sent.left_out] == [("bad.pt.trace.json.gz", True)]
    assert [file.path for file in sent.files] == ["good.pt.trace.json.gz"]


def test_a_hole_in_a_log_takes_neither_room_nor_time(store: ObjectStore, tmp_path: Path) -> None:
    """Somebody cut the log while its writer went on where it was: that costs the writer nothing."""
    log = tmp_path / "log"
    with log.open("wb") as stream:
        stream.write(b"first line\n")
        stream.seek(1 << 40)
        stream.write(b"last line, token hf_a_secret\n")
    sent = send(store, tmp_path, Unit.of(log, "log", "log"))
    assert (sent.masks, sent.left_out) == (1, ())
    lines = (store.get("runs/a1/log") or b"").replace(b"\0", b"").splitlines()
    assert lines == [
        b"first line",
        b"",
        b"[%d bytes were never written here]" % ((1 << 40) - (1 << 20)),
        b"last line, token ********",
    ]


def test_a_small_hole_in_a_log_is_read(store: ObjectStore, tmp_path: Path) -> None:
    """Some file systems have told of holes where there was data."""
    log = tmp_path / "log"
    with log.open("wb") as stream:
        stream.write(b"first line\n")
        stream.seek(3 << 20)
        stream.write(b"last line\n")
    send(store, tmp_path, Unit.of(log, "log", "log"))
    assert store.get("runs/a1/log") == log.read_bytes()


@pytest.mark.parametrize(
    ("written", "size", "stored"),
    [(4096, 1 << 40, False), (80 << 20, 150 << 20, True), (4096, 60 << 20, True)],
    ids=["a terabyte", "less than half", "a small one"],
)
def test_a_profile_that_is_mostly_a_hole_is_not_sent(tmp_path: Path, written: int, size: int, stored: bool) -> None:
    store = open_store(StoreSettings(url=f"file://{tmp_path}/store"))
    profile = tmp_path / "report.nsys-rep"
    with profile.open("wb") as stream:
        stream.write(b"x" * written)
        stream.truncate(size)
    sent = send(store, tmp_path, Unit.of(profile, "profiles/report.nsys-rep", "other"))
    assert [each.reason for each in sent.left_out] == (
        [] if stored else [f"{size - written} of its {size} bytes were never written"]
    )
    assert [file.size for file in sent.files] == ([size] if stored else [])


def test_a_profile_is_sent_where_the_file_system_cannot_tell_of_holes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seek = os.lseek

    def without_holes(descriptor: int, at: int, whence: int) -> int:
        if whence in (os.SEEK_HOLE, os.SEEK_DATA):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return seek(descriptor, at, whence)

    profile = tmp_path / "report.nsys-rep"
    profile.write_bytes(b"x" * 4096)
    monkeypatch.setattr(os, "lseek", without_holes)
    store = open_store(StoreSettings(url=f"file://{tmp_path}/store"))
    assert send(store, tmp_path, Unit.of(profile, "profiles/report.nsys-rep", "other")).left_out == ()


class GrowingFile:
    """A store before which an event file grows: a writer adds to it while it is sent."""

    def __init__(self, store: ObjectStore, path: Path, more: bytes) -> None:
        self._store, self._path, self._more = store, path, more

    def put_file(self, key: str, source: FileSource) -> ObjectInfo:
        if source.path == self._path:
            with self._path.open("ab") as stream:
                stream.write(self._more)
        return self._store.put_file(key, source)

    def __getattr__(self, name: str) -> object:
        return getattr(self._store, name)


@pytest.fixture
def events(tmp_path: Path) -> Path:
    builder = EventFileBuilder(tmp_path / "events.out.tfevents.1760000000.node1")
    for step in range(1, 101):
        builder.scalar("lm loss", step, 3.0 / step)
    return builder.write()


def test_of_a_growing_event_file_the_whole_records_are_stored_and_the_rest_is_said(
    store: ObjectStore, tmp_path: Path, events: Path
) -> None:
    whole, torn = events.read_bytes(), events.read_bytes()[24:60]
    unit = Unit.of(events, "tensorboard/events", "tensorboard")
    sent = send(GrowingFile(store, events, torn), tmp_path, unit)  # type: ignore[arg-type]
    assert store.get("runs/a1/tensorboard/events") == whole
    assert [(file.path, file.size) for file in sent.files] == [("tensorboard/events", len(whole))]
    (left_out,) = sent.left_out
    assert left_out.reason.startswith(f"still growing; the whole records in its first {len(whole)} bytes")
    assert list((tmp_path / "scratch").iterdir()) == []
    # The next harvest, by when the writer has ended, finds the file as it is.
    assert send(store, tmp_path, unit).left_out == ()
    assert store.get("runs/a1/tensorboard/events") == whole + torn


def test_of_a_huge_event_file_with_a_hole_the_whole_records_are_stored(
    store: ObjectStore, tmp_path: Path, events: Path
) -> None:
    whole = events.read_bytes()
    os.truncate(events, 1 << 40)

    sent = send(store, tmp_path, Unit.of(events, "tensorboard/events", "tensorboard"))

    assert store.get("runs/a1/tensorboard/events") == whole
    (left_out,) = sent.left_out
    assert left_out.reason.startswith(f"damaged; the whole records in its first {len(whole)} bytes")


@pytest.mark.parametrize(
    ("kind", "more", "reason"),
    [
        ("checkpoint", b"more", "modified while it was read"),
        ("tensorboard", b"\0hf_a_secret\0", "still growing"),
    ],
)
def test_what_grows_and_is_no_event_file_is_left_out_and_a_secret_is_never_in_what_is_kept(
    store: ObjectStore, tmp_path: Path, events: Path, kind: str, more: bytes, reason: str
) -> None:
    unit = Unit.of(events, "file", kind)  # type: ignore[arg-type]
    sent = send(GrowingFile(store, events, more), tmp_path, unit)  # type: ignore[arg-type]
    assert [each.reason.startswith(reason) for each in sent.left_out] == [True]
    assert b"hf_a_secret" not in (store.get("runs/a1/file") or b"")


def test_a_growing_event_file_with_a_secret_in_a_whole_record_is_left_out(store: ObjectStore, tmp_path: Path) -> None:
    events = EventFileBuilder(tmp_path / "events").scalar("hf_a_secret", 1, 1.0).write()
    sent = send(GrowingFile(store, events, b"x"), tmp_path, Unit.of(events, "file", "tensorboard"))  # type: ignore[arg-type]
    assert ["contains a secret" in each.reason for each in sent.left_out] == [True]
    assert store.get("runs/a1/file") is None


def test_masked_copies_take_room_only_while_they_are_sent(store: ObjectStore, tmp_path: Path) -> None:
    for number in range(30):
        (tmp_path / f"log-{number}").write_bytes(b"token hf_a_secret\n" * number)
    sent = send(store, tmp_path, *(Unit.of(tmp_path / f"log-{n}", f"log-{n}", "log") for n in range(30)))
    assert sent.masks == sum(range(30))
    assert list((tmp_path / "scratch").iterdir()) == []


UPLOADS = r"""
import re, sys
from pathlib import Path
from nightbridge.models import StoreSettings
from nightbridge.store.object_store import open_store
from nightbridge.harvest.upload import LocalFile, Unit, upload

def peak():
    return int(re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())[1])

store, folder = open_store(StoreSettings.model_validate_json(sys.argv[1])), Path(sys.argv[2])
shards = sorted(folder.glob("shard*"))
files = tuple(LocalFile(str(path), f"checkpoints/iter_0000050/{path.name}", "checkpoint") for path in shards)
(folder / "scratch").mkdir()
store.put("first", b"")
before = peak()
unit = Unit(path="checkpoints/iter_0000050", files=files)
sent = upload(store, "runs/a1", [unit], ["hf_not_in_there"], folder / "scratch")
assert len(sent.files) == len(files), sent.left_out
print(peak() - before, peak())
"""


def peak_of_upload(settings: StoreSettings, folder: Path) -> tuple[int, int]:
    """KiB that an upload of the folder's shards takes in a process of its own: what it adds, and in all."""
    command = [sys.executable, "-c", UPLOADS, settings.model_dump_json(), str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    added, whole = re.findall(r"\d+", done.stdout)
    return int(added), int(whole)


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["directory", pytest.param("ceph", marks=pytest.mark.s3)])
def test_one_huge_file_and_its_holes_take_little_memory(
    settings_of: Callable[[str], StoreSettings], tmp_path: Path, kind: str
) -> None:
    with (tmp_path / "shard").open("wb") as stream:
        stream.truncate(600 << 20)
    _, whole = peak_of_upload(settings_of(kind), tmp_path)
    assert whole < 200 * 1024


@pytest.mark.s3
def test_many_large_files_at_once_stay_in_bounded_memory(
    settings_of: Callable[[str], StoreSettings], tmp_path: Path
) -> None:
    for number in range(12):
        with (tmp_path / f"shard {number}").open("wb") as stream:
            stream.truncate(32 << 20)
    _, whole = peak_of_upload(settings_of("ceph"), tmp_path)
    assert whole < 200 * 1024


@pytest.mark.thorough
def test_memory_grows_only_with_the_account_of_many_small_files(
    settings_of: Callable[[str], StoreSettings], tmp_path: Path
) -> None:
    for number in range(10_000):
        (tmp_path / f"shard-{number}").write_bytes(b"%04096d" % number)
    added, _ = peak_of_upload(settings_of("directory"), tmp_path)
    assert added < 10_000 * 2 + 16 * 1024
    assert sum(1 for _ in open_store(settings_of("directory")).list("runs")) == 10_000
