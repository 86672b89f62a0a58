"""Files appear whole or not at all, and only one of many creates one."""

import errno
import multiprocessing
import os
import pwd
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from nightbridge.errors import DamagedData, PermanentError, TransientError
from nightbridge.files import (
    check_workspace,
    create_exclusively,
    read_model,
    write_atomically,
    write_model,
)
from nightbridge.models import GitRepo

MIB = 1 << 20


def test_a_quota_is_named_with_the_path_and_whose_it_may_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "runs" / "a1" / "intent.json"

    def full(descriptor: int) -> None:
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    monkeypatch.setattr(os, "fsync", full)
    user = pwd.getpwuid(os.geteuid()).pw_name

    with pytest.raises(TransientError) as error:
        create_exclusively(path, b"{}")

    assert error.value.thing == str(path)
    assert f"the disk quota of {user} is used up ({path.parent} belongs to {user}" in error.value.what
    assert list(path.parent.iterdir()) == []


def test_a_reader_never_sees_a_part_of_a_file_that_is_written_again_and_again(tmp_path: Path) -> None:
    path = tmp_path / "file"
    whole = {bytes([digit]) * MIB for digit in b"0123456789"}
    write_atomically(path, b"0" * MIB)
    seen: set[bytes] = set()
    stop = threading.Event()

    def read() -> None:
        while not stop.is_set():
            seen.add(path.read_bytes())

    reader = threading.Thread(target=read)
    reader.start()
    for content in sorted(whole) * 2:
        write_atomically(path, content)
    stop.set()
    reader.join()

    assert seen <= whole
    assert len(seen) > 1


def test_the_parents_are_made_and_nothing_else_is_left(tmp_path: Path) -> None:
    write_atomically(tmp_path / "a" / "b" / "file", b"x")

    assert [path.name for path in (tmp_path / "a" / "b").iterdir()] == ["file"]


def test_a_write_that_fails_leaves_what_was_there_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "folder" / "full").mkdir(parents=True)

    with pytest.raises(OSError, match="directory"):
        write_atomically(tmp_path / "folder", b"x")

    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


WRITER = """
import sys
from pathlib import Path
from nightbridge.files import write_atomically
number = 0
while True:
    number += 1
    write_atomically(Path(sys.argv[1]), str(number % 10).encode() * (1 << 22))
    print(number, flush=True)
"""


def test_a_writer_that_is_killed_leaves_a_whole_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    for delay in (0.0, 0.003, 0.011):
        process = subprocess.Popen([sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE)
        assert process.stdout is not None
        process.stdout.readline()
        time.sleep(delay)
        process.send_signal(signal.SIGKILL)
        process.wait()

        content = path.read_bytes()
        assert len(content) == 4 * MIB
        assert len(set(content)) == 1


def test_a_model_is_readable_json_with_a_line_end(tmp_path: Path) -> None:
    model = GitRepo(url="https://example.org/x.git", commit="v1")

    write_model(tmp_path / "model.json", model)

    text = (tmp_path / "model.json").read_text()
    assert GitRepo.model_validate_json(text) == model
    assert text.count("\n") > 3
    assert text.endswith("}\n")


def create(path: str, go: float) -> bool:
    time.sleep(max(0.0, go - time.time()))
    return create_exclusively(Path(path), f"{os.getpid()}".encode() * 1000)


def test_of_many_processes_one_creates_the_file_and_it_is_whole(tmp_path: Path) -> None:
    with multiprocessing.get_context("fork").Pool(8) as pool:
        for number in range(10):
            path = tmp_path / f"file-{number}"
            won = pool.starmap(create, [(str(path), time.time() + 0.05)] * 8)

            assert won.count(True) == 1
            content = path.read_text()
            assert content == content[: len(content) // 1000] * 1000
    assert {path.name for path in tmp_path.iterdir()} == {f"file-{number}" for number in range(10)}


def test_a_file_that_is_there_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("first")

    assert not create_exclusively(tmp_path / "file", b"second")
    assert (tmp_path / "file").read_text() == "first"
    assert len(list(tmp_path.iterdir())) == 1


def test_a_model_comes_back_as_it_was_written(tmp_path: Path) -> None:
    written = GitRepo(url="https://example.org/Run.git", commit="main")
    write_model(tmp_path / "repository.json", written)

    assert read_model(tmp_path / "repository.json", GitRepo, what="", advice="") == written
    assert read_model(tmp_path / "nothing.json", GitRepo, what="", advice="") is None


@pytest.mark.parametrize("content", [b"", b"{", b'{"url": 1}', b"\xff\xfe"])
def test_a_file_that_holds_no_such_model_is_damaged(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "repository.json"
    path.write_bytes(content)

    with pytest.raises(DamagedData, match=r"repository\.json: cannot be read\. Remove it"):
        read_model(path, GitRepo, what="cannot be read", advice="Remove it")


# --- the workspace -----------------------------------------------------------------------------------------------------


def test_a_workspace_is_made_and_left_empty(tmp_path: Path) -> None:
    check_workspace(tmp_path / "a" / "b")

    assert list((tmp_path / "a" / "b").iterdir()) == []


def test_what_is_in_a_workspace_stays(tmp_path: Path) -> None:
    (tmp_path / "kept").write_text("kept")

    check_workspace(tmp_path)

    assert [path.name for path in tmp_path.iterdir()] == ["kept"]


@pytest.mark.parametrize("place", ["{folder}/file", "{folder}/file/workspace", "/proc/nightbridge", "/dev/null/x"])
def test_a_place_that_takes_no_files_is_named_with_a_way_out(tmp_path: Path, place: str) -> None:
    (tmp_path / "file").write_text("in the way")
    workspace = Path(place.format(folder=tmp_path))

    with pytest.raises(PermanentError, match=f"{workspace}: the workspace cannot be written: .*--workspace"):
        check_workspace(workspace)
