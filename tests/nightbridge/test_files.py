"""Files appear whole or not at all, and only one of many creates one."""

import ast
import errno
import multiprocessing
import os
import pwd
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

import pytest

import nightbridge
from nightbridge.errors import DamagedData, PermanentError, TransientError
from nightbridge.files import (
    RefusedFile,
    create_exclusively,
    open_regular,
    open_workspace,
    read_model,
    read_regular,
    write_atomically,
    write_model,
)
from nightbridge.models import GitRepo

MIB = 1 << 20


def test_a_full_disk_is_named_with_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "runs" / "a1" / "intent.json"

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    for write in (write_atomically, create_exclusively):
        with pytest.raises(PermanentError, match=f"{path}: no space left on the device. Free space there"):
            write(path, b"x")
    assert list(path.parent.iterdir()) == []


def test_a_quota_is_named_with_the_path_and_whose_it_may_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "runs" / "a1" / "intent.json"

    def full(descriptor: int) -> None:
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    monkeypatch.setattr(os, "fsync", full)
    user = pwd.getpwuid(os.geteuid()).pw_name

    with pytest.raises(TransientError) as error:
        create_exclusively(path, b"{}")

    assert error.value.subject == str(path)
    assert f"the disk quota of {user} is used up ({path.parent} belongs to {user}" in error.value.what
    assert list(path.parent.iterdir()) == []


def test_a_name_may_be_as_long_as_the_file_system_allows(tmp_path: Path) -> None:
    for number, write in enumerate((write_atomically, create_exclusively)):
        write(tmp_path / f"{number}{'n' * 254}", b"x")

    assert len(list(tmp_path.iterdir())) == 2


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
    open_workspace(tmp_path / "a" / "b")

    assert list((tmp_path / "a" / "b").iterdir()) == []


@pytest.mark.parametrize(
    ("mode", "then", "folder", "file"),
    [
        (None, 0o700, 0o700, 0o600),
        (0o755, 0o755, 0o750, 0o640),
        (0o2770, 0o2770, 0o2770, 0o660),
        (0o1777, 0o1777, 0o770, 0o660),
    ],
)
def test_a_workspace_and_what_is_written_in_it_are_for_this_user_or_for_the_group_that_its_mode_names(
    tmp_path: Path, mode: int | None, then: int, folder: int, file: int
) -> None:
    workspace = tmp_path / "workspace"
    os.umask(0)
    if mode is not None:
        workspace.mkdir()
        workspace.chmod(mode)

    open_workspace(workspace)
    write_atomically(workspace / "runs" / "attempt.json", b"")
    subprocess.run(["touch", workspace / "runs" / "log"], check=True)

    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (workspace, *workspace.rglob("*"))}
    assert modes == {"workspace": then, "runs": folder, "attempt.json": file, "log": file}


def test_a_umask_that_is_narrower_stays(tmp_path: Path) -> None:
    (tmp_path / "workspace").mkdir()
    (tmp_path / "workspace").chmod(0o770)
    os.umask(0o077)

    open_workspace(tmp_path / "workspace")

    assert os.umask(0o077) == 0o077


def test_what_is_in_a_workspace_stays(tmp_path: Path) -> None:
    (tmp_path / "kept").write_text("kept")

    open_workspace(tmp_path)

    assert [path.name for path in tmp_path.iterdir()] == ["kept"]


@pytest.mark.parametrize("place", ["{folder}/file", "{folder}/file/workspace", "/proc/nightbridge", "/dev/null/x"])
def test_a_place_that_takes_no_files_is_named_with_a_way_out(tmp_path: Path, place: str) -> None:
    (tmp_path / "file").write_text("in the way")
    workspace = Path(place.format(folder=tmp_path))

    with pytest.raises(PermanentError, match=f"{workspace}: the workspace cannot be written: .*--workspace"):
        open_workspace(workspace)


# --- files that somebody else wrote ----------------------------------------------------------------------------------


def make_link_to_fifo(path: Path) -> None:
    os.mkfifo(f"{path}.fifo")
    path.symlink_to(f"{path}.fifo")


def make_large(path: Path) -> None:
    path.touch()
    os.truncate(path, 1 << 40)


def make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        # The name of a socket has at most 107 bytes.
        os.chdir(path.parent)
        server.bind(path.name)


FOREIGN = {
    "a FIFO": (os.mkfifo, "not a regular file"),
    "a folder": (Path.mkdir, "not a regular file"),
    "a socket": (make_socket, "not a regular file"),
    "a link to a file": (lambda path: path.symlink_to("/etc/passwd"), "a link"),
    "a link to nothing": (lambda path: path.symlink_to("gone"), "a link"),
    "a link to a FIFO": (make_link_to_fifo, "a link"),
    "a file that is too large": (make_large, "larger than 1000 bytes"),
}


@pytest.mark.timeout(5)
@pytest.mark.parametrize("within", [False, True])
@pytest.mark.parametrize(("make", "reason"), FOREIGN.values(), ids=FOREIGN)
def test_what_is_no_file_of_the_run_is_refused_at_once(
    make: Callable[[Path], object], reason: str, within: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    make(tmp_path / "file")

    with pytest.raises(RefusedFile, match=reason):
        read_regular(tmp_path / "file", below=tmp_path if within else None, limit=1000)


@pytest.mark.parametrize("link", ["run", "run/logs", "run/logs/deep"])
def test_no_folder_of_a_run_is_reached_through_a_link(link: str, tmp_path: Path) -> None:
    (tmp_path / "home" / "logs" / "deep").mkdir(parents=True)
    for folder in ("home", "home/logs", "home/logs/deep"):
        (tmp_path / folder / "log").write_text("a credential")
    (tmp_path / link).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / link).symlink_to(tmp_path / link.replace("run", "home", 1))
    path = tmp_path / link / "log"
    assert path.read_text() == "a credential"

    with pytest.raises(OSError, match=r"a link|Not a directory"), open_regular(path, below=tmp_path / "run"):
        pass


@pytest.mark.parametrize("path", ["run/../secret", "secret", "run", "run/sub/../../secret", "run/a\0b"])
def test_nothing_outside_of_the_run_is_opened(path: str, tmp_path: Path) -> None:
    (tmp_path / "run" / "sub").mkdir(parents=True)
    (tmp_path / "secret").write_text("a credential")

    with pytest.raises(RefusedFile, match="does not lie in the run's folder"):
        read_regular(tmp_path / path, below=tmp_path / "run", limit=1000)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to somebody else")
def test_a_hard_link_to_another_users_file_is_none_of_the_run(tmp_path: Path) -> None:
    (tmp_path / "theirs").write_text("a credential")
    os.chown(tmp_path / "theirs", 12345, -1)
    (tmp_path / "run").mkdir()
    os.link(tmp_path / "theirs", tmp_path / "run" / "log")

    with pytest.raises(RefusedFile, match="hard link to another user's file"):
        read_regular(tmp_path / "run" / "log", below=tmp_path / "run", limit=1000)


def test_a_file_swapped_for_a_link_a_thousand_times_is_read_as_it_was_or_not_at_all(tmp_path: Path) -> None:
    """A look at the name before the use of it would lose this race within the first dozens of rounds."""
    (tmp_path / "secret").write_text("a credential")
    run, path = tmp_path / "run", tmp_path / "run" / "log"
    run.mkdir()
    ended = threading.Event()

    def swap() -> None:
        while not ended.is_set():
            (run / "link").symlink_to(tmp_path / "secret")
            (run / "link").replace(path)
            (run / "new").write_text("of the run")
            (run / "new").replace(path)

    path.write_text("of the run")
    swapper = threading.Thread(target=swap)
    swapper.start()
    found = Counter[str]()
    try:
        # On one busy core the reader may have all of its turns while the name is a file.
        while found.total() < 1000 or (len(found) == 1 and found.total() < 1_000_000):
            try:
                found[read_regular(path, below=run, limit=1000).decode()] += 1
            except RefusedFile:
                found["refused"] += 1
    finally:
        ended.set()
        swapper.join()
    assert set(found) == {"of the run", "refused"}


def test_a_growing_file_is_read_up_to_its_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_bytes(b"x" * 2000)
    status = os.stat(__file__)
    monkeypatch.setattr(os, "fstat", lambda _: os.stat_result((*status[:6], 0, *status[7:])))

    with pytest.raises(RefusedFile, match="larger than 1000 bytes"):
        read_regular(tmp_path / "file", limit=1000)


@pytest.mark.timeout(5)
@pytest.mark.parametrize(("make", "_reason"), FOREIGN.values(), ids=FOREIGN)
def test_a_stored_model_that_was_replaced_is_damage(
    make: Callable[[Path], object], _reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    make(tmp_path / "model.json")

    with pytest.raises(DamagedData, match="no repository"):
        read_model(tmp_path / "model.json", GitRepo, what="no repository", advice="")


def test_descriptors_are_not_leaked(tmp_path: Path) -> None:
    (tmp_path / "run" / "logs").mkdir(parents=True)
    (tmp_path / "run" / "logs" / "log").touch()
    (tmp_path / "run" / "logs" / "link").symlink_to("log")
    before = len(os.listdir("/proc/self/fd"))

    for name in ("log", "link", "gone", "../logs"):
        with suppress(OSError), open_regular(tmp_path / "run" / "logs" / name, below=tmp_path / "run"):
            pass

    assert len(os.listdir("/proc/self/fd")) == before


# --- who opens what a job can write ----------------------------------------------------------------------------------

PACKAGE = Path(nightbridge.__file__).parent
OF_JOBS = (
    *("outputs", "harvest", "slurm", "goldens", "nights", "gate", "history", "report", "store", "cli", "prune.py"),
    *("locking.py", "masking.py", "secrets.py"),
)
OTHERS = [
    "cli/output.py: open",  # /dev/null
    "harvest/restore.py: open",  # what it writes itself
    "harvest/restore.py: open",  # what it has restored
    "locking.py: read_text",  # /proc
    "locking.py: read_text",
    "masking.py: fdopen",  # what `open_regular` has opened
    "nights/prefect_api.py: read_text",  # Prefect's settings
    "outputs/reader_process.py: open",  # folders, without reading them
    "outputs/reader_process.py: read_text",  # /proc
    "outputs/torch_check.py: read_bytes",  # a program of ours
    "secrets.py: read_text",  # a TOML file of the site's
    "slurm/attempts.py: read_text",  # nodes to leave out, which a test names
    "slurm/script.py: read_text",  # the launcher's script, before there is a job
    "slurm/warm_launchers.py: fdopen",  # a pipe
    "slurm/warm_launchers.py: open",  # /dev/null
    "store/directory.py: open",  # an object, which is whole
    "store/directory.py: read_bytes",
    "store/s3_client.py: read_bytes",  # the site's certificate
]
READING = {"read_text", "read_bytes", "open", "fdopen", "file_digest", "fromfile", "memmap", "loadtxt", "read_csv"}


def openings(module: Path) -> list[str]:
    """The calls of a module that open a file for reading by its name, other than through `open_regular`."""
    found = []
    for node in ast.walk(ast.parse(module.read_text())):
        if not isinstance(node, ast.Call):
            continue
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        modes = [argument.value for argument in node.args if isinstance(argument, ast.Constant)]
        if name in READING and not any(isinstance(mode, str) and set(mode) & set("wxa") for mode in modes):
            found.append(f"{module.relative_to(PACKAGE)}: {name}")
    return found


def test_what_jobs_can_write_is_opened_in_one_place_only() -> None:
    """Scanned is all that handles what jobs leave; a reader that opens a path by itself brings FIFOs and links back."""
    modules = {
        module
        for name in (*OF_JOBS, "launch/config_container.py")
        for module in ([PACKAGE / name] if name.endswith(".py") else (PACKAGE / name).rglob("*.py"))
    }
    assert len(modules) > 60

    assert sorted(each for module in modules for each in openings(module)) == OTHERS
    assert openings(PACKAGE / "files.py"), "what this looks for is found where it is"


# --- who parses what a job has written -------------------------------------------------------------------------------


IN_THE_CALLERS_PROCESS = {
    ("cli/runs.py", "LogTail"),  # `logs --follow` shows lines, cut and without control codes, and parses none
    ("cli/store.py", "checkpoints_in"),  # names, and one bounded number
    ("harvest/selection.py", "trackers_of"),  # one bounded number, and whether two files are the same
    ("nights/status.py", "progress_in_log"),  # the last kibibytes of a log, in linear time
}


def calls(node: ast.AST) -> set[str]:
    """The names of all that is called below a node."""
    called = [each.func for each in ast.walk(node) if isinstance(each, ast.Call)]
    return {func.attr if isinstance(func, ast.Attribute) else getattr(func, "id", "") for func in called}


def opening_readers(modules: Iterable[Path]) -> set[str]:
    """The functions and classes that open files of jobs in the process of their caller, themselves or by what they call.

    What is handed to `read_in_child` or `call_shared` is named there and not called.
    """
    defined = {
        node.name: calls(node)
        for module in modules
        for node in ast.parse(module.read_text()).body
        if isinstance(node, ast.FunctionDef | ast.ClassDef)
    }
    opening = {"open_regular", "read_regular"}
    while more := {name for name, called in defined.items() if called & opening} - opening:
        opening |= more
    return opening


def test_what_jobs_have_written_is_parsed_by_the_reader_process_only() -> None:
    """Nobody outside `nightbridge.outputs` calls its readers but through the functions that call them in a child."""
    readers = opening_readers((PACKAGE / "outputs").glob("*.py"))
    assert {"read_logs", "read_event_files", "read_curves", "read_run", "find_checkpoints"} <= readers
    found = {
        (str(path.relative_to(PACKAGE)), alias.name)
        for top in (PACKAGE, *(PACKAGE / name for name in ("flows", "tasks", "blocks")))
        for path in top.rglob("*.py")
        if not path.is_relative_to(PACKAGE / "outputs")
        if "nightbridge.outputs" in (source := path.read_text())
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("nightbridge.outputs")
        for alias in node.names
        if alias.name in readers
    }

    assert found == IN_THE_CALLERS_PROCESS
