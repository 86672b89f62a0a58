"""The directory store where it differs from S3: what a disk can answer, and what a killed writer leaves."""

import contextlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from nightbridge.errors import PermanentError, TransientError
from nightbridge.models import StoreSettings
from nightbridge.store.checksum import sha256_hex
from nightbridge.store.directory import INCOMING, LEFTOVER_AGE, DirectoryStore

ROOT = Path(__file__).parents[3]


@pytest.fixture
def store(tmp_path: Path) -> DirectoryStore:
    return DirectoryStore(StoreSettings(url=f"file://{tmp_path}/store"))


def test_a_file_in_place_of_the_directory_is_named(tmp_path: Path) -> None:
    (tmp_path / "store").write_text("in the way")
    store = DirectoryStore(StoreSettings(url=f"file://{tmp_path}/store"))
    with pytest.raises(PermanentError, match=rf"{tmp_path}/store.*is a file, not a directory.*Remove that file"):
        store.check_writable()


def test_a_directory_in_place_of_an_object_is_named(store: DirectoryStore) -> None:
    store.put("a/b", b"x")
    with pytest.raises(PermanentError, match="is a directory instead of an object"):
        store.put("a", b"y")


def test_a_name_too_long_for_the_disk_is_permanent(store: DirectoryStore) -> None:
    with pytest.raises(PermanentError, match="name too long"):
        store.put("x" * 300, b"")


def test_a_directory_without_rights_is_named(tmp_path: Path) -> None:
    store = DirectoryStore(StoreSettings(url=f"file://{tmp_path}/store"))
    tmp_path.chmod(0o500)
    with as_somebody_else(), pytest.raises(PermanentError, match=r"permission denied.*Give this user write access"):
        store.check_writable()


def test_a_folder_of_a_run_that_is_called_as_that_of_uploads_is_listed(store: DirectoryStore) -> None:
    key = f"runs/llama/n1/llama-n1-0123456789/a1/checkpoints/{INCOMING}/shard"
    store.put(key, b"x")
    store.put(f"{INCOMING}/upload", b"x")

    assert [found.key for found in store.list("")] == [key]


@contextlib.contextmanager
def as_somebody_else() -> Iterator[None]:
    """Without root's right to write everywhere."""
    user = os.geteuid()
    os.seteuid(user or 65534)
    yield
    os.seteuid(user)


def in_a_mount(options: str, code: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run Python in a mount namespace of its own, with a small tmpfs on `folder`."""
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        pytest.skip("a mount namespace needs root and unshare")
    script = f"mount -t tmpfs -o {options} tmpfs {folder} && exec {sys.executable} -c '{code}'"
    return subprocess.run(
        ["unshare", "--mount", "sh", "-c", script], cwd=ROOT, capture_output=True, text=True, check=False
    )


PUT = """
import sys
from nightbridge.models import StoreSettings
from nightbridge.store.object_store import open_store
store = open_store(StoreSettings(url="file://FOLDER"))
try:
    store.put("small", b"x" * SIZE)
except Exception as error:
    print(type(error).__name__, error)
print(sorted(found.key for found in store.list("")))
"""


@pytest.mark.parametrize(
    ("options", "size", "message"),
    [
        ("size=64k", 1 << 20, "no space left on the device. Free space"),
        ("size=64k,ro", 10, "read-only file system. Mount it writable"),
    ],
)
def test_a_full_or_read_only_disk_is_permanent_and_leaves_nothing(
    tmp_path: Path, options: str, size: int, message: str
) -> None:
    code = PUT.replace("FOLDER", str(tmp_path)).replace("SIZE", str(size))
    done = in_a_mount(options, code, tmp_path)
    if "mount" in done.stderr:
        pytest.skip(f"no mounts here: {done.stderr.strip()}")
    what, listing = done.stdout.splitlines()
    assert what.startswith("PermanentError ")
    assert message in what
    assert str(tmp_path) in what
    assert listing == "[]"


def test_an_answer_that_may_pass_is_transient(store: DirectoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def stale(*_: object) -> bytes:
        raise OSError(116, "Stale file handle")

    monkeypatch.setattr(Path, "read_bytes", stale)
    with pytest.raises(TransientError, match="Stale file handle"):
        store.get("a")


def test_stat_tells_the_truth_about_the_bytes_on_disk(store: DirectoryStore) -> None:
    store.put("a", b"sound")
    (store.root / "a").write_bytes(b"rotten")
    found = store.stat("a")
    assert found is not None
    assert found.sha256 == sha256_hex(b"rotten")


def test_files_that_a_killed_writer_left_are_no_objects_and_go_away_in_time(store: DirectoryStore) -> None:
    store.put("runs/a", b"x")
    (store.root / INCOMING).mkdir()
    dead, living = store.root / INCOMING / "dead", store.root / INCOMING / "living"
    dead.touch()
    living.touch()
    os.utime(dead, (0, time.time() - LEFTOVER_AGE - 10))
    (store.root / "runs" / f".a.{'0' * 32}.tmp").write_bytes(b"half")

    store.check_writable()

    assert [found.key for found in store.list("")] == ["runs/a"]
    assert (dead.exists(), living.exists()) == (False, True)


def test_hidden_files_of_a_checkpoint_are_objects_as_any_other(store: DirectoryStore) -> None:
    store.put("c/.metadata", b"x")
    assert [found.key for found in store.list("c")] == ["c/.metadata"]


def test_the_url_of_a_key_is_a_path_a_person_can_open(store: DirectoryStore) -> None:
    store.put("reports/n/index.html", b"<p>")
    assert Path(store.url_of("reports/n/index.html").removeprefix("file://")).read_bytes() == b"<p>"
