"""A real container registry for tests, on loopback, in a folder of its own: Debian's docker-registry.

Images are made layer by layer in Python and pushed with skopeo as Docker's manifest format, which enroot needs. The
registry dies with the process that started it.
"""

import gzip
import hashlib
import io
import json
import shutil
import subprocess
import tarfile
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.real.s3_servers import _listens, _start, _stop, _wait_until, free_port

USER, PASSWORD = "tester", "a-test-password"
# The same password by bcrypt, the one format that docker-registry reads.
HASHED_PASSWORD = "$2b$04$bm2bAOeujbWzQBCDQB0DFOhPpx3Qtx6tm87trKv6HH.PO0aGW9fIu"

TOOLS = ("docker-registry", "skopeo")

LAYER = "application/vnd.oci.image.layer.v1.tar+gzip"
CONFIG = "application/vnd.oci.image.config.v1+json"
MANIFEST = "application/vnd.oci.image.manifest.v1+json"
DOCKER_MANIFEST = "application/vnd.docker.distribution.manifest.v2+json"
DOCKER_LIST = "application/vnd.docker.distribution.manifest.list.v2+json"


def missing_reason() -> str | None:
    """Why no registry can be started here; None when one can."""
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    return f"not installed: {', '.join(missing)}" if missing else None


@dataclass
class Registry:
    """A running registry without encryption; `user` and `password` only where it asks for them."""

    host: str
    folder: Path
    user: str = ""
    password: str = ""
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def push(self, layout: Path, name: str) -> str:
        """Push an OCI layout as `name:tag`; return the digest of the manifest that the registry keeps."""
        digest_file = layout / "pushed"
        login = [f"--dest-creds={self.user}:{self.password}"] if self.user else []
        command = ["skopeo", "--insecure-policy", "copy", "--quiet", "--format", "v2s2", "--dest-tls-verify=false"]
        command += [*login, f"--digestfile={digest_file}", f"oci:{layout}:image", f"docker://{self.host}/{name}"]
        subprocess.run(command, check=True, capture_output=True, timeout=300)
        return digest_file.read_text().strip()

    def push_for(self, layouts: Mapping[str, Path], name: str, tag: str) -> None:
        """Push an image of several, by the processor as OCI names it: `amd64`, `arm64`."""
        digests = {arch: self.push(layout, f"{name}:{tag}-{arch}") for arch, layout in layouts.items()}
        kept = self.folder / "data/docker/registry/v2/blobs/sha256"
        manifests = [
            {
                "mediaType": DOCKER_MANIFEST,
                "digest": digest,
                "size": (kept / digest[7:9] / digest[7:] / "data").stat().st_size,
                "platform": {"architecture": arch, "os": "linux"},
            }
            for arch, digest in digests.items()
        ]
        index = {"schemaVersion": 2, "mediaType": DOCKER_LIST, "manifests": manifests}
        request = urllib.request.Request(
            f"http://{self.host}/v2/{name}/manifests/{tag}",
            method="PUT",
            data=json.dumps(index).encode(),
            headers={"Content-Type": DOCKER_LIST},
        )
        urllib.request.urlopen(request, timeout=30).close()

    def stop(self) -> None:
        """Stop it; returns when it is gone."""
        _stop(self.processes)


def start_registry(folder: Path) -> Registry:
    """Start a registry on a free port that lets everybody in."""
    return _start_registry(folder, {})


def start_private_registry(folder: Path) -> Registry:
    """Start a registry on a free port that asks everybody for `USER` and `PASSWORD`."""
    folder.mkdir(parents=True)
    (folder / "htpasswd").write_text(f"{USER}:{HASHED_PASSWORD}\n")
    registry = _start_registry(folder, {"auth": {"htpasswd": {"realm": "test", "path": str(folder / "htpasswd")}}})
    registry.user, registry.password = USER, PASSWORD
    return registry


def _start_registry(folder: Path, access: Mapping[str, Any]) -> Registry:
    folder.mkdir(parents=True, exist_ok=True)
    port = free_port()
    settings: dict[str, Any] = {
        "version": 0.1,
        "log": {"level": "warn"},
        "storage": {"filesystem": {"rootdirectory": str(folder / "data")}},
        "http": {"addr": f"127.0.0.1:{port}"},
        **access,
    }
    # JSON is YAML.
    (folder / "config.yml").write_text(json.dumps(settings))
    command = ["docker-registry", "serve", str(folder / "config.yml")]
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(folder), "OTEL_TRACES_EXPORTER": "none"}
    registry = Registry(f"127.0.0.1:{port}", folder)
    registry.processes.append(_start(command, folder / "registry.log", environment))
    _wait_until(lambda: _listens(port), registry.processes, folder, seconds=30)
    return registry


def tar_of(members: Sequence[tuple[tarfile.TarInfo, bytes]]) -> bytes:
    """An uncompressed layer."""
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for member, content in members:
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return stream.getvalue()


def member(name: str, kind: bytes = tarfile.REGTYPE, *, mode: int = 0o644) -> tarfile.TarInfo:
    """One entry of a layer."""
    made = tarfile.TarInfo(name)
    made.type, made.mode, made.mtime = kind, mode, 1_700_000_000
    return made


def write_layout(folder: Path, layers: Sequence[bytes], config: Mapping[str, Any], architecture: str = "amd64") -> Path:
    """Write an OCI layout with one image called `image`; `config` is what a Dockerfile sets (Env, Entrypoint...)."""
    blobs = folder / "blobs" / "sha256"
    blobs.mkdir(parents=True)

    def add(content: bytes, media_type: str) -> dict[str, Any]:
        digest = hashlib.sha256(content).hexdigest()
        (blobs / digest).write_bytes(content)
        return {"mediaType": media_type, "digest": f"sha256:{digest}", "size": len(content)}

    packed = [add(gzip.compress(layer, compresslevel=1, mtime=0), LAYER) for layer in layers]
    about = {
        "architecture": architecture,
        "os": "linux",
        "config": dict(config),
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{hashlib.sha256(layer).hexdigest()}" for layer in layers]},
        # enroot's first question has no Accept header, and the registry's answer to that needs a history.
        "history": [{"created": "2026-01-01T00:00:00Z", "created_by": "a test"} for _ in layers],
    }
    manifest = {
        "schemaVersion": 2,
        "mediaType": MANIFEST,
        "config": add(json.dumps(about).encode(), CONFIG),
        "layers": packed,
    }
    described = add(json.dumps(manifest).encode(), MANIFEST)
    described["annotations"] = {"org.opencontainers.image.ref.name": "image"}
    (folder / "index.json").write_text(json.dumps({"schemaVersion": 2, "manifests": [described]}))
    (folder / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')
    return folder


DEMO_CONFIG: Mapping[str, Any] = {"Env": ["PATH=/usr/local/bin:/usr/bin:/bin"], "Cmd": ["/bin/sh"]}


def demo_layers() -> list[bytes]:
    """Two layers: the second one changes a file of the first, and brings half a megabyte."""
    first = [
        (member("etc/hostname", mode=0o600), b"demo\n"),
        (member("kept/changed"), b"first\n"),
        (member("closed", tarfile.DIRTYPE, mode=0o500), b""),
        (member("closed/file", mode=0o400), b"closed\n"),
    ]
    second = [(member("kept/changed"), b"second\n"), (member("weights"), bytes(range(256)) * 2000)]
    return [tar_of(first), tar_of(second)]
