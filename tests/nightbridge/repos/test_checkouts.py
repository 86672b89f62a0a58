"""A checkout is a whole tree at one commit that many share; one that was modified is recreated."""

import os
import shutil
import subprocess
import threading
import time
import traceback
from pathlib import Path
from typing import Any

import pytest

from nightbridge import processes
from nightbridge.errors import DamagedData, InvalidInput, PermanentError
from nightbridge.models import PinnedRepository
from nightbridge.repos.checkouts import check_out, find_changes
from nightbridge.repos.mirrors import Mirror

TIMEOUT = 60.0
NOBODY = 65534


@pytest.fixture
def mirror(origin: Any, workspace: Path) -> Mirror:
    return Mirror(origin.url, workspace, timeout=TIMEOUT)


@pytest.fixture
def checkout(mirror: Mirror, workspace: Path) -> PinnedRepository:
    return check_out(mirror, "main", mirror.resolve("main"), workspace)


def git(folder: Path, *arguments: str) -> str:
    return subprocess.run(
        ["git", "-C", str(folder), *arguments], check=True, capture_output=True, text=True
    ).stdout.strip()


def test_the_tree_is_the_commit_with_its_description(origin: Any, checkout: PinnedRepository, workspace: Path) -> None:
    commit = origin.git("rev-parse", "main")

    assert checkout.path == workspace / "checkouts" / "Megatron-Bridge" / commit
    assert (checkout.path / "README.md").read_text() == "two\n"
    assert os.access(checkout.path / "scripts" / "run.sh", os.X_OK)
    assert (checkout.url, checkout.ref, checkout.commit) == (str(origin.path), "main", commit)
    assert checkout.subject == "Second"
    assert checkout.describe == f"v1.0-1-g{commit[:7]}"
    assert find_changes(checkout.path, commit) == []


def test_git_works_in_it_as_the_launcher_needs_without_mirror_and_origin(
    origin: Any, mirror: Mirror, checkout: PinnedRepository, tmp_path: Path
) -> None:
    shutil.rmtree(mirror.path)
    shutil.rmtree(origin.path)

    assert git(checkout.path, "rev-parse", "--show-toplevel") == str(checkout.path)
    git(checkout.path, "archive", "--format=tar", f"--output={tmp_path / 'code.tar'}", "HEAD:scripts/")
    git(checkout.path, "fsck", "--no-dangling")

    names = subprocess.run(["tar", "tf", tmp_path / "code.tar"], check=True, capture_output=True, text=True).stdout
    assert names.split() == ["run.sh"]


def test_it_stays_whole_when_the_mirror_is_packed_again(mirror: Mirror, checkout: PinnedRepository) -> None:
    git(mirror.path, "repack", "-a", "-d", "-q")
    git(mirror.path, "prune", "--expire=now")

    git(checkout.path, "fsck", "--no-dangling")
    assert find_changes(checkout.path, checkout.commit) == []


def test_it_shares_its_history_with_the_mirror(origin: Any, mirror: Mirror, workspace: Path) -> None:
    origin.commit("Large", {"large": os.urandom(200_000).hex()})
    commit = mirror.resolve("main")

    path = check_out(mirror, "main", commit, workspace).path

    packs = [
        pack for pack in (path / ".git" / "objects").rglob("*") if pack.is_file() and pack.stat().st_size > 100_000
    ]
    assert packs
    assert all(pack.stat().st_nlink > 1 for pack in packs)


def test_a_second_asker_gets_the_same_tree_untouched(
    origin: Any, mirror: Mirror, checkout: PinnedRepository, workspace: Path
) -> None:
    inode = checkout.path.stat().st_ino
    origin.path.rename(origin.path.with_name("away"))

    assert check_out(mirror, "main", checkout.commit, workspace) == checkout
    assert checkout.path.stat().st_ino == inode


def test_many_who_ask_at_once_get_one_tree(mirror: Mirror, workspace: Path) -> None:
    commit = mirror.resolve("main")
    found: list[PinnedRepository] = []

    def ask() -> None:
        found.append(check_out(Mirror(mirror.url, workspace, timeout=TIMEOUT), "main", commit, workspace))

    threads = [threading.Thread(target=ask) for _ in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert found == [found[0]] * 5
    assert [entry.name for entry in found[0].path.parent.iterdir()] == [commit]


def _edit(path: Path) -> None:
    readme = path / "README.md"
    readme.chmod(0o644)
    readme.write_text("changed\n")


CHANGES = {
    "an edited file": (_edit, "changed: README.md"),
    "a deleted file": (lambda path: (path / "README.md").unlink(), "deleted: README.md"),
    "an added file": (lambda path: (path / "scripts" / "new.py").write_text(""), "added: scripts/new.py"),
    "an ignored file": (lambda path: (path / "build.log").write_text(""), "added (ignored by git): build.log"),
    "an edit that was committed": (
        lambda path: git(path, "-c", "user.name=x", "-c", "user.email=x@x", "commit", "--allow-empty", "-qm", "x"),
        "it is at commit",
    ),
    "a lost repository": (lambda path: shutil.rmtree(path / ".git"), "not a complete git checkout"),
}


@pytest.mark.parametrize("what", CHANGES)
def test_a_changed_tree_is_found_out_and_made_again(origin: Any, mirror: Mirror, workspace: Path, what: str) -> None:
    commit = origin.commit("Ignore", {".gitignore": "*.log\n"})
    path = check_out(mirror, "main", commit, workspace).path
    change, said = CHANGES[what]
    change(path)

    assert any(said in line for line in find_changes(path, commit))
    again = check_out(mirror, "main", commit, workspace)

    assert again.path == path
    assert find_changes(path, commit) == []
    assert (path / "README.md").read_text() == "two\n"
    # A launcher may still be reading the old one.
    assert len(list(path.parent.glob(f"changed-{commit}.*"))) == 1


def test_what_another_user_made_is_no_damage_and_no_change(
    mirror: Mirror, workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = mirror.resolve("main")
    path = check_out(mirror, "main", commit, workspace).path
    before = sorted((entry.name, entry.stat().st_ino) for entry in (*path.parent.iterdir(), *mirror.path.iterdir()))
    monkeypatch.setenv("GIT_TEST_ASSUME_DIFFERENT_OWNER", "1")  # git's own means for such tests

    for ask in (
        mirror.damage,
        lambda: mirror.resolve(commit),
        lambda: mirror.resolve("main"),
        lambda: check_out(mirror, "main", commit, workspace),
        lambda: find_changes(path, commit),
    ):
        with pytest.raises(PermanentError, match=r"another user's repository.*workspace of your own"):
            ask()

    after = sorted((entry.name, entry.stat().st_ino) for entry in (*path.parent.iterdir(), *mirror.path.iterdir()))
    assert after == before


def test_bytecode_and_the_packagers_short_lived_folder_are_no_changes(checkout: PinnedRepository) -> None:
    (checkout.path / "scripts" / "__pycache__").mkdir()
    (checkout.path / "scripts" / "__pycache__" / "run.cpython-311.pyc").write_bytes(b"")
    (checkout.path / "temp_extract_01234567-89ab-cdef-0123-456789abcdef").mkdir()
    (checkout.path / "temp_extract_01234567-89ab-cdef-0123-456789abcdef" / "x").write_text("")

    assert find_changes(checkout.path, checkout.commit) == []


def test_files_are_read_only(checkout: PinnedRepository) -> None:
    files = [path for path in checkout.path.rglob("*") if path.is_file() and ".git" not in path.parts]

    assert len(files) == 2
    assert all(path.stat().st_mode & 0o222 == 0 for path in files)


def test_files_are_as_readable_as_the_sites_umask_allows(mirror: Mirror, workspace: Path) -> None:
    before = os.umask(0o027)
    try:
        path = check_out(mirror, "main", mirror.resolve("main"), workspace).path
    finally:
        os.umask(before)

    modes = {name: (path / name).stat().st_mode & 0o777 for name in ("README.md", "scripts/run.sh", "scripts")}
    assert modes == {"README.md": 0o440, "scripts/run.sh": 0o550, "scripts": 0o750}


def test_a_user_without_root_makes_the_same(origin: Any, tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can become another user; every other test runs without root here")
    origin.commit("Deep", {"one/two/three/deep.txt": "deep\n"})
    for parent in (tmp_path, *list(tmp_path.parents)[:3]):
        parent.chmod(parent.stat().st_mode | 0o011)
    home = tmp_path / "nobody"
    home.mkdir()
    os.chown(home, NOBODY, NOBODY)
    (home / ".gitconfig").write_text('[safe]\n\tdirectory = "*"\n')

    # A fork, because another user may not be able to read the Python that runs this, nor the guard of git's processes.
    processes.run(["true"], environment={}, timeout=TIMEOUT)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            os.chdir(home)
            os.environ["HOME"] = str(home)
            mirror = Mirror(origin.url, home, timeout=TIMEOUT)
            path = check_out(mirror, "main", mirror.resolve("main"), home).path
            (path / "one" / "two" / "archive").touch()
            git(path, "-c", "user.name=x", "-c", "user.email=x@x", "commit", "--allow-empty", "-qm", "x")
            with pytest.raises(PermissionError):
                (path / "README.md").write_text("changed")
            code = 0
        except BaseException as error:
            (home / "error").write_text("".join(traceback.format_exception(error)))
        os._exit(code)

    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0, (home / "error").read_text()


def at_the_next_second() -> None:
    time.sleep(1.05 - time.time() % 1)


@pytest.mark.parametrize("looks", [0, 1])
def test_a_change_that_keeps_size_and_time_is_found_at_once_and_later(
    mirror: Mirror, checkout: PinnedRepository, workspace: Path, looks: int
) -> None:
    readme = checkout.path / "README.md"
    before = readme.stat()
    for _ in range(looks):
        at_the_next_second()
        check_out(mirror, "main", checkout.commit, workspace)

    at_the_next_second()  # git compares whole seconds of when a file's state changed
    readme.chmod(0o600)
    with readme.open("r+b") as stream:
        stream.write(b"TWO\n")
    readme.chmod(before.st_mode)
    os.utime(readme, ns=(before.st_atime_ns, before.st_mtime_ns))

    assert find_changes(checkout.path, checkout.commit) == ["changed: README.md"]


def test_a_later_look_for_changes_reads_no_file_again(
    mirror: Mirror, checkout: PinnedRepository, workspace: Path
) -> None:
    at_the_next_second()
    check_out(mirror, "main", checkout.commit, workspace)

    # git reads a file again whose time is not before its index's, in whole seconds.
    times = [int(path.stat().st_mtime) for path in checkout.path.rglob("*") if ".git" not in path.parts]
    assert max(times) < int((checkout.path / ".git" / "index").stat().st_mtime)


def test_a_filter_that_changes_files_is_found_out_however_slow_the_checkout_is(
    origin: Any, mirror: Mirror, workspace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    origin.commit("Filtered", {".gitattributes": "*.md filter=shout\n*.slow filter=slow\n", "z.slow": "slow\n"})
    settings = tmp_path / "gitconfig"
    settings.write_text(
        '[filter "shout"]\n\tsmudge = tr a-z A-Z\n\tclean = cat\n'
        # README.md is written first, and is older than the index by more than a second.
        '[filter "slow"]\n\tsmudge = "sleep 2; cat"\n\tclean = cat\n'
    )
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(settings))

    with pytest.raises(DamagedData, match=r"differs from its commit: changed: README\.md"):
        check_out(mirror, "main", mirror.resolve("main"), workspace)


def test_a_commit_with_a_path_that_leads_outside_is_refused(origin: Any, mirror: Mirror, workspace: Path) -> None:
    tree = origin.git("rev-parse", "HEAD^{tree}")
    evil = subprocess.run(
        ["git", "-C", str(origin.path), "hash-object", "-t", "tree", "--literally", "-w", "--stdin"],
        input=b"40000 ..\0" + bytes.fromhex(tree), check=True, capture_output=True,
    ).stdout.decode().strip()  # fmt: skip
    origin.git("update-ref", "refs/heads/evil", origin.git("commit-tree", evil, "-m", "evil"))
    commit = mirror.resolve("evil")

    with pytest.raises(PermanentError):
        check_out(mirror, "evil", commit, workspace)

    assert sorted(path.name for path in (workspace / "checkouts" / "Megatron-Bridge").iterdir()) == []


def test_a_half_made_checkout_of_a_killed_process_is_removed(mirror: Mirror, workspace: Path) -> None:
    commit = mirror.resolve("main")
    half = workspace / "checkouts" / "Megatron-Bridge" / f".{commit}.0123.tmp"
    (half / ".git").mkdir(parents=True)

    path = check_out(mirror, "main", commit, workspace).path

    assert [entry.name for entry in path.parent.iterdir()] == [commit]


def test_an_unknown_commit_makes_no_checkout(mirror: Mirror, workspace: Path) -> None:
    with pytest.raises(InvalidInput):
        check_out(mirror, "f" * 40, "f" * 40, workspace)

    assert not (workspace / "checkouts").exists()


def test_a_persons_own_git_settings_change_nothing(
    mirror: Mirror, workspace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hooks = tmp_path / "template" / "hooks"
    hooks.mkdir(parents=True)
    (hooks / "post-checkout").write_text("#!/bin/sh\ntouch hooked\n")
    (hooks / "post-checkout").chmod(0o755)
    settings = tmp_path / "gitconfig"
    settings.write_text(f"[core]\nautocrlf = true\nhooksPath = {hooks}\n[init]\ntemplateDir = {hooks.parent}\n")
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(settings))

    path = check_out(mirror, "main", mirror.resolve("main"), workspace).path

    assert (path / "README.md").read_bytes() == b"two\n"
    assert not (path / "hooked").exists()


def test_a_login_in_the_address_does_not_reach_the_checkouts_settings(
    origin: Any, workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GIT_CONFIG_COUNT", "1")
    monkeypatch.setenv("GIT_CONFIG_KEY_0", f"url.{origin.path}.insteadOf")
    monkeypatch.setenv("GIT_CONFIG_VALUE_0", "https://token123@git.example.org/Run.git")
    mirror = Mirror("https://token123@git.example.org/Run.git", workspace, timeout=TIMEOUT)

    made = check_out(mirror, "main", mirror.resolve("main"), workspace)

    assert made.url == "https://********@git.example.org/Run.git"
    for folder in (made.path / ".git", mirror.path):
        assert "token123" not in (folder / "config").read_text()


def test_pointers_to_git_lfs_are_reported(origin: Any, workspace: Path, caplog: pytest.LogCaptureFixture) -> None:
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 5\n"
    commit = origin.commit(
        "Weights",
        {".gitattributes": "*.bin filter=lfs\n", "a/weights.bin": pointer, "text": pointer},
    )

    made = check_out(Mirror(origin.url, workspace, timeout=60.0), "main", commit, workspace)

    assert made.lfs_pointers == ("a/weights.bin",)
    assert "1 files are Git LFS pointers without content, such as a/weights.bin" in caplog.text
