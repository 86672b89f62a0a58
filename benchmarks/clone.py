"""What the second night costs, with one new commit, against cloning everything again.

    python benchmarks/clone.py [--folder FOLDER] [--repository REPO --submodule REPO] [--scale 1.0] [--repeats 5]

Makes a repository of Megatron-Bridge's size (2,700 files of 42 MB, 110,000 objects, 165 MiB of history) with a
submodule of Megatron-LM's (3,100 files of 63 MB, 250 MiB), from random bytes, and serves both through `git daemon` on
loopback. Or takes real ones: bare repositories with a branch `main`, of which the first has the second as a submodule.

Then it prints time and transferred bytes of two ways to have the newest commit with its submodule checked out: a fresh
`git clone` with `git submodule update`, and our clone stage on the second night. Loopback has no latency and no limit,
so the ratio of the times is the smallest that can be seen; the ratio of bytes is the same everywhere. Needs about 4 GB
in FOLDER (default: the system's temporary folder).
"""

import argparse
import contextlib
import os
import random
import shutil
import socket
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from nightbridge.repos.checkouts import WITH_SUBMODULES, check_out, find_changes
from nightbridge.repos.commits import pinned
from nightbridge.repos.mirrors import Mirror

TIMEOUT = 600.0
IDENTITY = "Author <author@example.org>"
FILES_PER_FOLDER, COMMITS_PER_TAG, BLOBS_PER_COMMIT = 20, 500, 8


class Size(NamedTuple):
    """A repository: files of the newest commit with their bytes, and commits whose files have other bytes."""

    files: int
    file_bytes: int
    commits: int
    blob_bytes: int

    def scaled(self, factor: float) -> "Size":
        """A repository with so many times the files and commits."""
        return self._replace(files=max(1, round(self.files * factor)), commits=max(2, round(self.commits * factor)))


# As Megatron-Bridge and Megatron-LM were in August 2026.
BRIDGE = Size(files=2_700, file_bytes=15_500, commits=6_000, blob_bytes=2_500)
SUBMODULE = Size(files=3_100, file_bytes=20_000, commits=8_000, blob_bytes=3_000)


def git(*arguments: str | Path, folder: Path | None = None) -> str:
    command = ["git", "-c", "protocol.allow=always", "-c", "gc.auto=0", *(("-C", folder) if folder else ()), *arguments]
    return subprocess.run([str(part) for part in command], check=True, capture_output=True, text=True).stdout.strip()


def make_repository(path: Path, size: Size, seed: int, submodule: tuple[str, str] | None = None) -> None:
    """Write a history with fast-import; `submodule` is its address and its commit."""
    source = random.Random(seed)
    git("init", "--quiet", "--bare", "--initial-branch=main", path)
    importer = subprocess.Popen(["git", "-C", path, "fast-import", "--quiet"], stdin=subprocess.PIPE)
    assert importer.stdin is not None
    names = [f"src/part{file // FILES_PER_FOLDER}/file{file}.py" for file in range(size.files)]
    for number in range(size.commits):
        is_first, is_last = number == 0, number == size.commits - 1
        changed = names if is_first or is_last else source.sample(names, min(BLOBS_PER_COMMIT, len(names)))
        lines = [
            b"commit refs/heads/main",
            f"committer {IDENTITY} {1_700_000_000 + number} +0000".encode(),
            b"data 1",
            b"x",
        ]
        importer.stdin.write(b"\n".join(lines) + b"\n")
        if is_first and submodule:
            text = f'[submodule "lm"]\n\tpath = 3rdparty/lm\n\turl = {submodule[0]}\n'.encode()
            importer.stdin.write(b"M 100644 inline .gitmodules\ndata %d\n%s\n" % (len(text), text))
            importer.stdin.write(f"M 160000 {submodule[1]} 3rdparty/lm\n".encode())
        for name in changed:
            content = source.randbytes(size.file_bytes if is_last else size.blob_bytes)
            importer.stdin.write(f"M 100644 inline {name}\ndata {len(content)}\n".encode() + content + b"\n")
        if number % COMMITS_PER_TAG == 0:
            importer.stdin.write(f"reset refs/tags/v{number}\nfrom refs/heads/main\n\n".encode())
    importer.stdin.close()
    assert importer.wait() == 0


def take_repository(real: Path, path: Path) -> None:
    """A copy of a real repository; branches and tags alone, which are what a clone gets."""
    git("clone", "--quiet", "--bare", real, path)
    git("symbolic-ref", "HEAD", "refs/heads/main", folder=path)


def add_commit(path: Path, number: int) -> str:
    """One commit that changes one file."""
    content = f"new {number}\n"
    importer = subprocess.Popen(["git", "-C", path, "fast-import", "--quiet"], stdin=subprocess.PIPE)
    importer.communicate(
        f"commit refs/heads/main\ncommitter {IDENTITY} {1_900_000_000 + number} +0000\n"
        "data 3\nnew\nfrom refs/heads/main^0\n"
        f"M 100644 inline src/part0/file0.py\ndata {len(content)}\n{content}\n".encode()
    )
    assert importer.returncode == 0
    return git("rev-parse", "main", folder=path)


@contextlib.contextmanager
def served(folder: Path) -> Iterator[str]:
    """The address under which the repositories of a folder are served."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = ["git", "daemon", "--export-all", f"--base-path={folder}", "--listen=127.0.0.1", f"--port={port}"]
    daemon = subprocess.Popen([*command, str(folder)], start_new_session=True, stderr=subprocess.DEVNULL)
    try:
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                break
            time.sleep(0.05)
        yield f"git://127.0.0.1:{port}"
    finally:
        os.killpg(daemon.pid, 15)
        daemon.wait()


def pack_bytes(folder: Path) -> int:
    """Bytes of all object files below a folder: what was transferred to get them."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file() and "objects" in path.parts)


def fresh_clone(url: str, folder: Path) -> None:
    git("clone", "--quiet", url, folder)
    git("submodule", "--quiet", "update", "--init", "--recursive", folder=folder)


def night(url: str, name: str, workspace: Path) -> Path:
    mirror = Mirror(url, workspace, timeout=TIMEOUT)
    commit = pinned(mirror, "main", name, workspace).commit
    return check_out(mirror, "main", commit, workspace, with_submodules=True).path


def submodule_address(path: Path) -> str:
    """The address of the one submodule of a repository's newest commit."""
    return git("config", "--blob", "main:.gitmodules", "--get-regexp", r"submodule\..*\.url", folder=path).split()[1]


def make_origins(origins: Path, base: str, repository: Path | None, submodule: Path | None, scale: float) -> None:
    """Make `bridge.git` and its submodule `lm.git`, served under `base`, or copy real ones."""
    if repository is None or submodule is None:
        make_repository(origins / "lm.git", SUBMODULE.scaled(scale), 1)
        pinned = git("rev-parse", "main", folder=origins / "lm.git")
        make_repository(origins / "bridge.git", BRIDGE.scaled(scale), 2, (f"{base}/lm.git", pinned))
        return
    take_repository(repository, origins / "bridge.git")
    take_repository(submodule, origins / "lm.git")
    # Both ways ask our server for what is elsewhere.
    os.environ |= {
        "GIT_CONFIG_COUNT": "1",
        "GIT_CONFIG_KEY_0": f"url.{base}/lm.git.insteadOf",
        "GIT_CONFIG_VALUE_0": submodule_address(origins / "bridge.git"),
    }


def main(folder: Path, repository: Path | None, submodule: Path | None, scale: float, repeats: int) -> None:
    origins, workspace = folder / "origins", folder / "workspace"
    origins.mkdir(parents=True)
    with served(origins) as base:
        make_origins(origins, base, repository, submodule, scale)
        url = f"{base}/bridge.git"
        print(f"repository {pack_bytes(origins / 'bridge.git') >> 20} MiB, "
              f"submodule {pack_bytes(origins / 'lm.git') >> 20} MiB", flush=True)  # fmt: skip

        started = time.perf_counter()
        night(url, "first", workspace)
        print(f"{'first night':14} {time.perf_counter() - started:8.2f} s", flush=True)

        nights, clones = [], []
        for number in range(repeats):
            commit = add_commit(origins / "bridge.git", number)
            before = pack_bytes(workspace / "repos")
            started = time.perf_counter()
            tree = night(url, f"night-{number}", workspace)
            nights.append((time.perf_counter() - started, pack_bytes(workspace / "repos") - before))

            # Kept: a file system that has just deleted many files may be slow to make others.
            fresh = folder / f"fresh-{number}{WITH_SUBMODULES}"
            started = time.perf_counter()
            fresh_clone(url, fresh)
            clones.append((time.perf_counter() - started, pack_bytes(fresh / ".git")))
            assert find_changes(tree, commit) == find_changes(fresh, commit) == []
            print(f"{'':14} {nights[-1][0]:8.2f} s against {clones[-1][0]:8.2f} s", flush=True)

    night_seconds, night_bytes = (statistics.median(column) for column in zip(*nights, strict=True))
    clone_seconds, clone_bytes = (statistics.median(column) for column in zip(*clones, strict=True))
    print(f"median of {repeats}:")
    print(f"{'fresh clone':14} {clone_seconds:8.2f} s {clone_bytes:12,.0f} bytes")
    print(f"{'second night':14} {night_seconds:8.2f} s {night_bytes:12,.0f} bytes")
    print(f"{'ratio':14} {clone_seconds / night_seconds:8.1f} x {clone_bytes / night_bytes:12,.0f} x")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--repository", type=Path)
    parser.add_argument("--submodule", type=Path)
    parser.add_argument("--scale", type=float, default=1.0, help="size of the repositories that are made")
    parser.add_argument("--repeats", type=int, default=5)
    given = parser.parse_args()
    scratch = Path(tempfile.mkdtemp(prefix="nightbridge-clone-", dir=given.folder))
    try:
        main(scratch, given.repository, given.submodule, given.scale, given.repeats)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
