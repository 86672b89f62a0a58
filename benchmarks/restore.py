"""How fast a stored run comes back from an S3 server, beside s5cmd: `benchmarks/upload.py` the other way round.

    python benchmarks/restore.py [--s5cmd PATH] [--repeats 5] [--files 64] [--mib 64] [--small 100000] [--gib 5]
                                 [--cut] [--times 1000] [--folder DIRECTORY]

Starts Ceph's gateway on this machine, stores the files as a run, and lets both clients fetch all of them in turns, each
in a process of its own into an empty folder. nightbridge checks every byte against the manifest, s5cmd checks nothing.
`--cut`: once more through a proxy that cuts a body at random on every third read, and without cuts, with 16 such files;
`--times N`: N uploads and restores of a small run, 50 of each in one process, which must all end well.
"""

import argparse
import random
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.upload import Sending, delete, make_files, send, serving  # noqa: E402  no installed package
from tests.real.s3_proxy import Request, proxy_to  # noqa: E402
from tests.real.s3_servers import S3Server, start_ceph  # noqa: E402

STORE = """
import sys, tempfile
from pathlib import Path
from nightbridge.harvest.manifest import Manifest, commit_manifest
from nightbridge.harvest.upload import LocalFile, Unit, upload
from nightbridge.models import StoreSettings, utc_now
from nightbridge.store.object_store import open_store
from tests.nightbridge.harvest.left_run import make_run
store = open_store(StoreSettings(url=f"s3://{sys.argv[4]}", endpoint_url=sys.argv[3], region="us-east-1"))
names = [path.name for path in sorted(Path(sys.argv[1]).iterdir())]
files = tuple(LocalFile(f"{sys.argv[1]}/{name}", f"checkpoints/{name}", "checkpoint") for name in names)
with tempfile.TemporaryDirectory() as scratch:
    sent = upload(store, sys.argv[2], [Unit(path="checkpoints", files=files)], (), Path(scratch)).files
    job = make_run(Path(scratch), shard_size=1000).jobs[-1]
assert len(sent) == len(files)
run = {"run_key": "run", "attempt": 1, "prefix": sys.argv[2], "files": sent, "job": job, "committed_at": utc_now()}
assert commit_manifest(store, Manifest(**run))
"""

FETCH = """
import sys
from pathlib import Path
from nightbridge.harvest.restore import fetch_run
from nightbridge.models import StoreSettings
from nightbridge.store.object_store import open_store
store = open_store(StoreSettings(url=f"s3://{sys.argv[4]}", endpoint_url=sys.argv[3], region="us-east-1"))
fetch_run(store, sys.argv[2], Path(sys.argv[1]), only="checkpoint")
"""


TOGETHER = 50

STORE_AND_FETCH = """
import shutil, sys, tempfile
from pathlib import Path
from nightbridge.harvest.manifest import Manifest, commit_manifest
from nightbridge.harvest.restore import fetch_run
from nightbridge.harvest.upload import LocalFile, Unit, upload
from nightbridge.models import StoreSettings, utc_now
from nightbridge.store.object_store import open_store
from tests.nightbridge.harvest.left_run import make_run
names = [path.name for path in sorted(Path(sys.argv[1]).iterdir())]
files = tuple(LocalFile(f"{sys.argv[1]}/{name}", f"checkpoints/{name}", "checkpoint") for name in names)
with tempfile.TemporaryDirectory() as folder:
    job = make_run(Path(folder, "run"), shard_size=1000).jobs[-1]
for number in range(int(sys.argv[5])):
    store = open_store(StoreSettings(url=f"s3://{sys.argv[4]}", endpoint_url=sys.argv[3], region="us-east-1"))
    prefix = f"{sys.argv[2]}-{number}"
    with tempfile.TemporaryDirectory() as folder:
        sent = upload(store, prefix, [Unit(path="checkpoints", files=files)], (), Path(folder)).files
        run = {"run_key": "run", "attempt": 1, "prefix": prefix, "files": sent, "job": job, "committed_at": utc_now()}
        assert commit_manifest(store, Manifest(**run))
        fetch_run(store, prefix, Path(folder, "back"), only="checkpoint")
        assert all(Path(folder, "back", name).read_bytes() == Path(sys.argv[1], name).read_bytes() for name in names)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--s5cmd", type=Path)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--files", type=int, default=64)
    parser.add_argument("--mib", type=int, default=64)
    parser.add_argument("--small", type=int, default=100_000)
    parser.add_argument("--gib", type=float, default=5.0)
    parser.add_argument("--cut", action="store_true")
    parser.add_argument("--times", type=int, default=0)
    parser.add_argument("--folder", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder, prefix="nightbridge-restore-") as folder:
        scratch = Path(folder)
        with serving(start_ceph(scratch / "ceph")) as server:
            for name, files, size in (
                ("large", options.files, options.mib << 20),
                ("small", options.small, 4096),
                ("one", int(options.gib > 0), int(options.gib * (1 << 30))),
            ):
                if files:
                    store(server, make_files(scratch / name, files, size), name)
                    shutil.rmtree(scratch / name)
                    compare(server, scratch / "back", name, files, size, options.s5cmd, options.repeats)
            if options.cut:
                store(server, make_files(scratch / "cut", 16, options.mib << 20), "cut")
                through_cuts(server, scratch / "back", options.repeats)
            if options.times:
                store_and_fetch(server, scratch, options.times)


def store(server: S3Server, folder: Path, prefix: str) -> None:
    """Store a folder's files as the checkpoint of a run."""
    send(server, folder, [sys.executable, "-c", STORE, "FOLDER", "PREFIX", "ENDPOINT", "BUCKET"], prefix)


def fetch(server: S3Server, into: Path, prefix: str, command: list[str]) -> Sending:
    """Fetch a run into an empty folder."""
    shutil.rmtree(into, ignore_errors=True)
    into.mkdir()
    return send(server, into, command, prefix)


def nightbridge() -> list[str]:
    return [sys.executable, "-c", FETCH, "FOLDER", "PREFIX", "ENDPOINT", "BUCKET"]


def compare(server: S3Server, into: Path, prefix: str, files: int, size: int, s5cmd: Path | None, repeats: int) -> None:
    what = ["s3://BUCKET/PREFIX/checkpoints/*", "FOLDER/"]
    commands = {"nightbridge": nightbridge()}
    if s5cmd:
        commands["s5cmd"] = [str(s5cmd), "--log", "error", "--endpoint-url", "ENDPOINT", "cp", *what]
    runs: dict[str, list[Sending]] = {name: [] for name in commands}
    for _ in range(repeats):
        for name, command in commands.items():
            runs[name].append(fetch(server, into, prefix, command))
    medians = {name: statistics.median(run.seconds for run in found) for name, found in runs.items()}
    peer = list(commands)[-1]
    print(f"{files} files, {files * size / 1e6:.0f} MB, median of {repeats}")
    for name, found in runs.items():
        cpu = statistics.median(run.cpu for run in found)
        print(
            f"{name:12} {medians[name]:6.1f} s ({min(run.seconds for run in found):.1f}-"
            f"{max(run.seconds for run in found):.1f}) {files * size / medians[name] / 1e6:6.1f} MB/s"
            f" {cpu / (files * size) * (1 << 30):6.2f} s of CPU per GiB {cpu / files * 1000:6.2f} ms per file"
            f" {max(run.memory for run in found) / 1e6:4.0f} MB  {medians[peer] / medians[name]:5.2f} x {peer}",
            flush=True,
        )


def through_cuts(server: S3Server, into: Path, repeats: int) -> None:
    chance = random.Random(17)
    seconds: dict[str, list[float]] = {"whole": [], "cut": []}
    with proxy_to(server.endpoint_url) as proxy:

        def every_third_body(request: Request) -> int | None:
            first, _, last = request.headers.get("range", "").removeprefix("bytes=").partition("-")
            return chance.randrange(int(last) - int(first) + 1) if last and proxy.count("GET") % 3 == 0 else None

        def no_body(_: Request) -> None:
            return None

        behind = S3Server(proxy.endpoint_url, server.access_key, server.secret_key)
        for _ in range(repeats):
            for name, found in seconds.items():
                proxy.cut = every_third_body if name == "cut" else no_body
                found.append(fetch(behind, into, "cut", nightbridge()).seconds)
                proxy.requests.clear()
    whole, cut = (statistics.median(found) for found in seconds.values())
    print(f"every third body cut: {cut:.1f} s, {cut / whole:.2f} times the {whole:.1f} s without", flush=True)


def store_and_fetch(server: S3Server, scratch: Path, times: int) -> None:
    files, began, failures = make_files(scratch / "run", 6, 100_000), time.perf_counter(), 0
    (files / "large").write_bytes(random.Random(1).randbytes(20 << 20))
    for first in range(0, times, TOGETHER):
        count = str(min(TOGETHER, times - first))
        command = [sys.executable, "-c", STORE_AND_FETCH, "FOLDER", "PREFIX", "ENDPOINT", "BUCKET", count]
        try:
            send(server, files, command, f"run-{first}")
        except SystemExit:
            failures += 1
        delete(server, f"run-{first}", settle=0)
    print(
        f"{times} uploads and restores, {TOGETHER} in a process: {failures} processes failed,"
        f" {time.perf_counter() - began:.0f} s",
        flush=True,
    )
    if failures:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
