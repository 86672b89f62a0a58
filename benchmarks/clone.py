"""What the second night costs, with one new commit, against cloning everything again.

    python benchmarks/clone.py [FOLDER]

Makes a repository of Megatron-Bridge's size (about 900 files, 100 000 objects, 165 MiB of history) and a submodule of
a third of that, from random bytes, and serves both through `git daemon` on loopback. Then it prints time and
transferred bytes of two ways to have the newest commit with its submodule checked out: a fresh `git clone` with
`git submodule update`, and our clone stage on the second night. Loopback has no latency and no limit, so the ratio of
the times is the smallest that can be seen; the ratio of bytes is the same everywhere. Needs about 2 GB in FOLDER
(default: the system's temporary folder).
"""

import contextlib
import os
import random
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from nightbridge.repos.checkouts import check_out, find_changes
from nightbridge.repos.mirrors import Mirror
from nightbridge.repos.pins import pin

TIMEOUT = 600.0
FOLDERS, FILES_PER_FOLDER = 45, 20
BRIDGE_COMMITS, SUBMODULE_COMMITS, COMMITS_PER_TAG = 6_000, 2_000, 500
BLOBS_PER_COMMIT, BLOB_BYTES = 8, 2_800
REPEATS = 3
IDENTITY = "Author <author@example.org>"


def git(*arguments: str | Path, folder: Path | None = None) -> str:
    command = ["git", "-c", "protocol.allow=always", "-c", "gc.auto=0", *(("-C", folder) if folder else ()), *arguments]
    return subprocess.run([str(part) for part in command], check=True, capture_output=True, text=True).stdout.strip()


def make_repository(path: Path, commits: int, seed: int, submodule: tuple[str, str] | None = None) -> None:
    """Write a history with fast-import; `submodule` is its address and its commit."""
    source = random.Random(seed)
    git("init", "--quiet", "--bare", "--initial-branch=main", path)
    importer = subprocess.Popen(["git", "-C", path, "fast-import", "--quiet", "--depth=0"], stdin=subprocess.PIPE)
    assert importer.stdin is not None
    names = [f"src/part{folder}/file{file}.py" for folder in range(FOLDERS) for file in range(FILES_PER_FOLDER)]
    for number in range(commits):
        changed = names if number == 0 else source.sample(names, BLOBS_PER_COMMIT)
        lines = [
            b"commit refs/heads/main",
            f"committer {IDENTITY} {1_700_000_000 + number} +0000".encode(),
            b"data 1",
            b"x",
        ]
        importer.stdin.write(b"\n".join(lines) + b"\n")
        if number == 0 and submodule:
            text = f'[submodule "lm"]\n\tpath = 3rdparty/lm\n\turl = {submodule[0]}\n'.encode()
            importer.stdin.write(b"M 100644 inline .gitmodules\ndata %d\n%s\n" % (len(text), text))
            importer.stdin.write(f"M 160000 {submodule[1]} 3rdparty/lm\n".encode())
        for name in changed:
            content = source.randbytes(BLOB_BYTES)
            importer.stdin.write(f"M 100644 inline {name}\ndata {len(content)}\n".encode() + content + b"\n")
        if number % COMMITS_PER_TAG == 0:
            importer.stdin.write(f"reset refs/tags/v{number}\nfrom refs/heads/main\n\n".encode())
    importer.stdin.close()
    assert importer.wait() == 0


def add_commit(path: Path, number: int) -> str:
    """One commit that changes one file."""
    importer = subprocess.Popen(["git", "-C", path, "fast-import", "--quiet"], stdin=subprocess.PIPE)
    importer.communicate(
        f"commit refs/heads/main\ncommitter {IDENTITY} {1_800_000_000 + number} +0000\n"
        "data 3\nnew\nfrom refs/heads/main^0\n"
        f"M 100644 inline src/part0/file0.py\ndata 6\nnew {number}\n\n".encode()
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
    commit = pin(mirror, "main", name, workspace)
    return check_out(mirror, "main", commit, workspace, with_submodules=True).path


def main(folder: Path) -> None:
    origins, workspace = folder / "origins", folder / "workspace"
    origins.mkdir(parents=True)
    with served(origins) as base:
        make_repository(origins / "lm.git", SUBMODULE_COMMITS, 1)
        pinned = git("rev-parse", "main", folder=origins / "lm.git")
        make_repository(origins / "bridge.git", BRIDGE_COMMITS, 2, (f"{base}/lm.git", pinned))
        url = f"{base}/bridge.git"
        print(f"repository {pack_bytes(origins / 'bridge.git') >> 20} MiB, "
              f"submodule {pack_bytes(origins / 'lm.git') >> 20} MiB")  # fmt: skip

        started = time.perf_counter()
        night(url, "first", workspace)
        print(f"{'first night':14} {time.perf_counter() - started:8.2f} s")

        nights, clones = [], []
        for number in range(REPEATS):
            commit = add_commit(origins / "bridge.git", number)
            before = pack_bytes(workspace / "repos")
            started = time.perf_counter()
            tree = night(url, f"night-{number}", workspace)
            nights.append((time.perf_counter() - started, pack_bytes(workspace / "repos") - before))

            fresh = folder / f"fresh-{number}"
            started = time.perf_counter()
            fresh_clone(url, fresh)
            clones.append((time.perf_counter() - started, pack_bytes(fresh / ".git")))
            assert find_changes(tree, commit) == find_changes(fresh, commit) == []

    # The fastest of each: whatever else the machine does can only add to a time.
    (night_seconds, night_bytes), (clone_seconds, clone_bytes) = min(nights), min(clones)
    print(f"fastest of {REPEATS}:")
    print(f"{'fresh clone':14} {clone_seconds:8.2f} s {clone_bytes:12,d} bytes")
    print(f"{'second night':14} {night_seconds:8.2f} s {night_bytes:12,d} bytes")
    print(f"{'ratio':14} {clone_seconds / night_seconds:8.1f} x {clone_bytes / night_bytes:12,.0f} x")


if __name__ == "__main__":
    place = Path(tempfile.mkdtemp(prefix="nightbridge-clone-", dir=sys.argv[1] if len(sys.argv) > 1 else None))
    try:
        main(place)
    finally:
        shutil.rmtree(place, ignore_errors=True)
