"""How fast files reach Ceph's gateway, against boto3's `upload_file` file by file and, where its path is given, s5cmd.

    python benchmarks/upload.py [--s5cmd PATH] [--repeats 5] [--files 64] [--mib 64] [--folder DIRECTORY]

Starts Ceph's gateway on this machine, makes the files, and lets every client send all of them, in turns, each time to
a prefix of its own in a process of its own; what was sent is deleted before the next one begins. Prints the median of
the repeats in MB/s, its ratio to boto3's, and the processor time and the most memory that the client took. The server
shares the machine with the client: only the ratios mean anything elsewhere. What nightbridge takes to go on with an
upload that was complete but not committed is told as well, and (`--small N`) all of it for N files of 4 KiB.
"""

import argparse
import os
import random
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests.real.s3_servers import S3Server, start_ceph  # noqa: E402  the test servers are no installed package

BUCKET = "benchmark"

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
from nightbridge.store.objects import open_store
from nightbridge.store.upload import Unit, upload
store = open_store(StoreSettings(url=f"s3://{sys.argv[4]}", endpoint_url=sys.argv[3], region="us-east-1"))
units = [Unit.of(path, path.name, "checkpoint") for path in sorted(Path(sys.argv[1]).iterdir())]
with tempfile.TemporaryDirectory() as scratch:
    sent = upload(store, sys.argv[2], units, ["a secret that is looked for"], Path(scratch))
assert len(sent.files) == len(units)
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
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--files", type=int, default=64)
    parser.add_argument("--mib", type=int, default=64)
    parser.add_argument("--small", type=int, default=0)
    parser.add_argument("--folder", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder, prefix="nightbridge-upload-") as scratch:
        server = start_ceph(Path(scratch) / "ceph")
        try:
            server.make_bucket(BUCKET)
            large = make_files(Path(scratch) / "large", options.files, options.mib << 20)
            compare(server, large, clients(options.s5cmd), options.repeats)
            if options.small:
                shutil.rmtree(large)
                compare(server, make_files(Path(scratch) / "small", options.small, 4096), clients(options.s5cmd), 1)
        finally:
            server.stop()


def clients(s5cmd: Path | None) -> dict[str, list[str]]:
    """Command lines by client; FOLDER, PREFIX, ENDPOINT and BUCKET stand for what they get."""
    places = ["FOLDER", "PREFIX", "ENDPOINT", "BUCKET"]
    commands = {
        "boto3 upload_file": [sys.executable, "-c", BOTO3, *places],
        "nightbridge": [sys.executable, "-c", NIGHTBRIDGE, *places],
    }
    if s5cmd:
        target = ["FOLDER/", "s3://BUCKET/PREFIX/"]
        commands["s5cmd"] = [str(s5cmd), "--log", "error", "--endpoint-url", "ENDPOINT", "cp", *target]
    return commands


def make_files(folder: Path, files: int, size: int) -> Path:
    folder.mkdir()
    for number in range(files):
        (folder / f"__{number}_0.distcp").write_bytes(random.Random(number).randbytes(size))
    return folder


def compare(server: S3Server, folder: Path, commands: dict[str, list[str]], repeats: int) -> None:
    size = sum(path.stat().st_size for path in folder.iterdir())
    print(f"{len(list(folder.iterdir()))} files, {size / 1e6:.0f} MB, median of {repeats}", flush=True)
    runs: dict[str, list[Sending]] = {name: [] for name in commands}
    again = []
    for turn in range(repeats):
        for name, command in commands.items():
            prefix = f"{name.split()[0]}-{turn}"
            runs[name].append(send(server, folder, command, prefix))
            if name == "nightbridge":
                again.append(send(server, folder, command, prefix).seconds)
            delete(server, prefix)
    medians = {name: statistics.median(run.seconds for run in found) for name, found in runs.items()}
    for name, found in runs.items():
        speeds = sorted(size / run.seconds / 1e6 for run in found)
        cpu = statistics.median(run.cpu for run in found) / size * (1 << 30)
        print(
            f"{name:20} {size / medians[name] / 1e6:6.1f} MB/s ({speeds[0]:.0f}-{speeds[-1]:.0f})"
            f"  {medians['boto3 upload_file'] / medians[name]:5.2f} x boto3  {cpu:5.2f} s of CPU per GiB"
            f"  {max(run.memory for run in found) / 1e6:6.0f} MB of memory",
            flush=True,
        )
    second = statistics.median(again)
    share = second / medians["nightbridge"]
    print(f"{'nightbridge, again':20} {second:6.1f} s, {share:.0%} of the first: every file is read, none is sent")


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


def delete(server: S3Server, prefix: str) -> None:
    client = server.client()
    for page in client.get_paginator("list_objects_v2").paginate(Bucket=BUCKET, Prefix=prefix):
        keys = [{"Key": found["Key"]} for found in page.get("Contents", ())]
        if keys:
            client.delete_objects(Bucket=BUCKET, Delete={"Objects": keys})
    # The gateway frees the room in the background; the next client must not pay for that, nor find the disk full.
    time.sleep(10)


if __name__ == "__main__":
    main()
