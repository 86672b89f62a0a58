"""The reader process: the death of a child is damage of one file, and a child can do nothing but read its run."""

import errno
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from nightbridge import files
from nightbridge.errors import DamagedData, TransientError
from nightbridge.files import Confinement, RefusedFile
from nightbridge.outputs import reader_process
from nightbridge.outputs.checkpoints import layout_state
from nightbridge.outputs.event_files import read_event_files
from nightbridge.outputs.logs import read_logs
from nightbridge.outputs.reader_process import Child, ReaderDied, Setup, call_shared, read_in_child
from tests.nightbridge.outputs import misbehaving_readers as readers
from tests.nightbridge.outputs.misbehaving_readers import Answer

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Four files, of which two are bad."""
    for name, text in (("a", "good"), ("b", "bad"), ("c", "good"), ("d", "bad")):
        (tmp_path / "run").mkdir(exist_ok=True)
        (tmp_path / "run" / name).write_text(text)
    return tmp_path / "run"


def read(reader: Callable[[Path], tuple[Answer, bytes]], folder: Path) -> dict[str, str]:
    answer, blob = read_in_child(reader, folder, (folder,), subject="the run")
    assert blob == b"blob"
    return answer.read


@pytest.mark.parametrize(
    ("reader", "reason"),
    [("crash", "died after"), ("hang", "died after"), ("sleep", "died after")],
)
def test_the_file_over_which_a_child_dies_is_damage_and_the_others_are_read(
    reader: str, reason: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader_process, "CPU_SECONDS", 0.3)

    found = read(getattr(readers, reader), folder)

    assert (found["a"], found["c"]) == ("read", "read")
    assert reason in found["b"]
    assert reason in found["d"]


def test_a_log_of_short_complaints_is_read_in_a_part_of_its_time(tmp_path: Path) -> None:
    log = tmp_path / "log.out"
    log.write_text("[rank3]: error: retrying\n" * 10_000)
    before = time.process_time()

    read_logs([log])

    taken = time.process_time() - before
    assert taken < reader_process.CPU_SECONDS_PER_MIB * log.stat().st_size / (1 << 20) / 3


def test_a_run_over_whose_every_file_children_die_is_damage_with_the_reasons(folder: Path) -> None:
    for name in "abcdefgh":
        (folder / name).write_text("bad")

    with pytest.raises(DamagedData, match=r"cannot be read: .*its reader died") as caught:
        read(readers.crash, folder)

    assert caught.value.subject == "the run"


def test_a_child_that_dies_before_it_opens_a_file_is_tried_once_more(folder: Path) -> None:
    with pytest.raises(DamagedData) as caught:
        read(readers.exits, folder)

    assert caught.value.what.count("no file: its reader died") == 2


def test_a_child_that_needs_too_much_memory_is_damage_and_this_process_grows_by_nothing(folder: Path) -> None:
    with pytest.raises(DamagedData, match="takes too much memory"):
        read(readers.allocate, folder)


def test_what_a_reader_does_not_expect_is_damage(folder: Path) -> None:
    with pytest.raises(DamagedData, match="IndexError: no such thing"):
        read(readers.raises, folder)


def test_a_file_system_that_is_away_is_no_damage(folder: Path) -> None:
    with pytest.raises(TransientError, match=f"{folder}: cannot be read now: Stale file handle"):
        read(readers.is_away, folder)


@pytest.mark.parametrize(
    "reads", [lambda path: read_logs([path]), lambda path: read_event_files([path]), lambda path: layout_state(path)]
)
def test_no_reader_takes_a_file_system_that_is_away_for_damage_of_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reads: Callable[[Path], object]
) -> None:
    def refuse(path: Path, _below: Path | None) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))

    monkeypatch.setattr(files, "_descriptor", refuse)
    with pytest.raises(TransientError, match=f"{tmp_path}/.*: cannot be read now: Input/output error"):
        reads(tmp_path / "iter_0000050")


def test_a_child_sees_its_run_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No file elsewhere, no network, no secret of this process's environment; it writes nothing, and has one thread."""
    monkeypatch.setenv("SECRET_TOKEN", "hf_secret")
    (tmp_path / "credentials").write_text("a credential")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "own").write_text(str(tmp_path / "run" / "own"))
    (tmp_path / "run" / "theirs").write_text(str(tmp_path / "credentials"))
    with socket.create_server(("127.0.0.1", 0)):
        found = read(readers.attempts, tmp_path / "run")

    assert found == {"own": "open", "theirs": ""}


def test_a_reader_that_is_sent_elsewhere_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "other").mkdir()

    with pytest.raises(DamagedData, match="PermissionError"):
        read_in_child(readers.crash, tmp_path / "other", (tmp_path / "run",), subject="")


def test_without_landlock_files_outside_of_the_roots_are_refused_as_well(tmp_path: Path) -> None:
    for name in ("run", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").touch()
    opened: list[Path] = []
    confinement = Confinement(
        (tmp_path / "run",), {tmp_path / "run" / "bad": "died"}, lambda path, _: opened.append(path)
    )

    assert confinement.root_of(tmp_path / "run" / "file") == tmp_path / "run"
    for path, reason in (
        ("other/file", "does not lie in"),
        ("run/bad", "died"),
        ("run/../other/file", "does not lie in"),
    ):
        with pytest.raises(RefusedFile, match=reason):
            files._descriptor(tmp_path / path, confinement.root_of(tmp_path / path))


def test_a_workspace_behind_a_link_is_read(tmp_path: Path) -> None:
    (tmp_path / "lustre" / "run").mkdir(parents=True)
    (tmp_path / "lustre" / "run" / "a").write_text("good")
    (tmp_path / "home").symlink_to("lustre")

    assert read(readers.crash, tmp_path / "home" / "run") == {"a": "read"}


def test_at_most_four_children_at_once_and_all_answer(folder: Path) -> None:
    results: list[dict[str, str]] = []
    threads = [threading.Thread(target=lambda: results.append(read(readers.crash, folder))) for _ in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 12
    assert all(found["a"] == "read" for found in results)


def test_a_shared_child_is_made_anew_after_its_death(folder: Path) -> None:
    with pytest.raises(ReaderDied):
        call_shared(readers.crash, folder, (folder,))
    for name in "bd":
        (folder / name).write_text("good")

    found = [call_shared(readers.crash, folder, (folder,)) for _ in range(2)]

    assert found[0] == found[1]
    assert set(found[0].read.values()) == {"read"}


def test_a_call_that_waits_for_a_shared_child_outlives_its_death_over_the_files_of_another(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader_process, "CPU_SECONDS", 1.0)
    neighbour = folder.with_name("neighbour")
    neighbour.mkdir()
    (neighbour / "a").write_text("good")
    died: list[Path | None] = []

    def call() -> None:
        try:
            call_shared(readers.hang, folder, (folder.parent,))
        except ReaderDied as death:
            died.append(death.path)

    first = threading.Thread(target=call)
    first.start()
    time.sleep(0.3)

    assert call_shared(readers.hang, neighbour, (folder.parent,)).read == {"a": "read"}
    first.join()
    assert died == [folder / "b"]


def test_a_dead_child_is_forgotten_in_no_moment_in_which_another_thread_looks_for_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between its being found and taken it was gone, which was a KeyError."""
    under_the_lock = []

    class Children(dict[Setup, Child]):
        def __delitem__(self, setup: Setup) -> None:
            under_the_lock.append(reader_process._shared_lock.locked())
            super().__delitem__(setup)

    monkeypatch.setattr(reader_process, "_shared", Children())
    with pytest.raises(ReaderDied):
        call_shared(readers.crash, folder, (folder,))

    assert under_the_lock == [True]


def test_a_shared_child_that_dies_before_it_opens_a_file_blames_none_of_an_earlier_call(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in "bd":
        (folder / name).write_text("good")
    call_shared(readers.crash, folder, (folder,))

    monkeypatch.setattr(reader_process, "_receive", lambda _connection: None)
    with pytest.raises(ReaderDied) as died:
        call_shared(readers.crash, folder, (folder,))

    assert died.value.path is None


def test_a_call_that_was_interrupted_leaves_its_answer_to_no_other(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    neighbour = folder.with_name("neighbour")
    neighbour.mkdir()
    (neighbour / "own").write_text("good")
    (folder / "b").unlink()
    (folder / "d").unlink()

    def interrupt(_connection: socket.socket) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(reader_process, "_receive", interrupt)
        with pytest.raises(KeyboardInterrupt):
            call_shared(readers.crash, folder, (folder.parent,))

    assert call_shared(readers.crash, neighbour, (folder.parent,)).read == {"own": "read"}


def test_a_server_that_was_killed_is_started_again(folder: Path) -> None:
    read(readers.crash, folder)
    for pid in servers_of(os.getpid()):
        os.kill(pid, signal.SIGKILL)
        while Path(f"/proc/{pid}/exe").exists():
            time.sleep(0.01)

    assert read(readers.crash, folder)["a"] == "read"


def servers_of(parent: int) -> list[int]:
    found = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = status.read_text().rpartition(")")[2].split()
            arguments = status.with_name("cmdline").read_bytes()
        except OSError:
            continue
        if int(fields[1]) == parent and b"reader_process" in arguments:
            found.append(int(status.parent.name))
    return found
