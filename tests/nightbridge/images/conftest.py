"""A scripted enroot that behaves as enroot 4.1.2 was seen to, and a real squashfs image for it to make."""

import base64
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import need
from tests.real.registry import DEMO_CONFIG, Registry, demo_layers, missing_reason, start_registry, write_layout

# Made by mksquashfs 4.5.1 from one file, /etc/rc; 244 bytes.
TINY_IMAGE = base64.b64decode(
    "aHNxcwMAAAAAAAAAAAACAAEAAAABABEAwAABAAQAAABAAAAAAAAAAPQAAAAAAAAA7AAAAAAAAAD//////////2YAAAAAAAAAkwAAAAAAAADGAAAA"
    "AAAAAN4AAAAAAAAAaGVsbG8KKwB42mNiWMLIAAVMDKiADYgZGd7C5RmR1EkCMTOaPDMSLcUgxsACpAGcfwLnHwB42mNggAAmOM3IUJQM5QDZDAwK"
    "YJqJIbUkGQAZMAI7EIBgAAAAAAAAAAYAAAEAAAAAtAAAAAAAAAAOAHjaU2BABQ5QGgAFGABhzgAAAAAAAAAEgAAAAADmAAAAAAAAAA=="
)

ENROOT = r"""#!/bin/sh
# What a fault prints, leaves and exits with was observed on enroot 4.1.2 against a registry with injected faults.
here=@HERE@
echo "$*" >> $here/calls
command=$1
shift
if [ "$1" = --arch ]; then shift 2; fi
case $command in
version) cat $here/version; exit 0 ;;
digest) uri=$1 ;;
import) [ "$1" = --output ] || { echo "Usage: enroot import" >&2; exit 1; }; output=$2 uri=$3 ;;
*) echo "Usage: enroot COMMAND" >&2; exit 1 ;;
esac
env | grep ^ENROOT_ > $here/environment
[ -z "${ENROOT_CONFIG_PATH-}" ] || grep -s ^machine "$ENROOT_CONFIG_PATH/.credentials" | sha256sum > $here/login
url=https://registry/v2/manifests/x
case $uri in
*" "*) echo "[ERROR] Invalid image reference: $uri" >&2; exit 1 ;;
*127.0.0.1:1[#/]*) echo "[INFO] Querying registry for permission grant" >&2; echo "curl: (7) Failed to connect to 127.0.0.1 port 1" >&2; exit 7 ;;
esac
if [ -n "$output" ] && [ -e "$output" ]; then echo "[ERROR] File already exists: $output" >&2; exit 1; fi
fault=
if [ -e $here/fault.$command ]; then fault=$(cat $here/fault.$command); mv $here/fault.$command $here/fault.used; fi
echo "[INFO] Querying registry for permission grant" >&2
case $fault in
[45]??) echo "[ERROR] URL $url returned error code: $fault" >&2; exit 1 ;;
blob-429) echo "curl: (22) The requested URL returned error: 429" >&2; exit 22 ;;
curl-*) echo "curl: (${fault#curl-}) it failed" >&2; exit ${fault#curl-} ;;
silent-*) exit ${fault#silent-} ;;
stalled) echo "curl: (28) Operation timed out after 4000 milliseconds" >&2; exit 1 ;;
truncated) echo "curl: (18) transfer closed with 10 bytes remaining to read" >&2; exit 18 ;;
corrupted) echo "pigz: skipping: <stdin>: corrupted -- incomplete deflate data" >&2; exit 1 ;;
checksum) echo "Checksum mismatch: 0123" >&2; exit 1 ;;
exists) echo "[ERROR] File already exists: $output" >&2; exit 1 ;;
concurrent) echo "Failed to read existing filesystem - will not overwrite - ABORTING!" >&2; exit 1 ;;
disk) echo "Write failed because No space left on device" >&2; echo "FATAL ERROR: Failed to write to output filesystem" >&2; exit 1 ;;
cache-disk) echo "zstd: error 70 : Write error : cannot write block" >&2; echo "curl: (23) Failure writing output" >&2; exit 1 ;;
no-tool) echo "[ERROR] Command not found: mksquashfs" >&2; exit 1 ;;
killed) head -c 9000 /dev/zero > "$output"; kill -9 $$ ;;
cut) head -c 100 $here/image > "$output"; exit 0 ;;
nothing) exit 0 ;;
hang) echo $$ > $here/hanging; head -c 9000 /dev/zero > "$output"; exec sleep 60 ;;
slow) sleep 0.3 ;;
arch) echo "[WARN] Image architecture doesn't match the requested one: amd64 != arm64" >&2 ;;
esac
case $command in
digest) cat $here/digest ;;
import)
    work=${ENROOT_TEMP_PATH:-/tmp}/enroot.$$
    mkdir "$work"
    echo "[INFO] Creating squashfs filesystem..." >&2
    # Longer than one moment, so that a kill can find it half made.
    for piece in $(seq 0 $(($(cat $here/pieces) - 1))); do
        dd if=$here/image of="$output" bs=$(cat $here/piece-size) skip=$piece seek=$piece count=1 conv=notrunc status=none
        [ "$piece" = 0 ] || sleep 0.05
    done
    rmdir "$work"
    ;;
esac
"""

DIGEST = "sha256:" + "ab" * 32


class ScriptedEnroot:
    """The enroot on PATH, and what it was asked."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "bin").mkdir(parents=True)
        self.program = folder / "bin" / "enroot"
        self.program.write_text(ENROOT.replace("@HERE@", str(folder)))
        self.program.chmod(0o755)
        self.set_version("4.1.2")
        self.set_digest(DIGEST)
        self.set_image(TINY_IMAGE)

    def set_version(self, version: str) -> None:
        (self.folder / "version").write_text(f"{version}\n")

    def set_digest(self, digest: str) -> None:
        (self.folder / "digest").write_text(f"{digest}\n")

    def set_image(self, content: bytes, pieces: int = 1) -> None:
        """What an import writes, in so many pieces with a pause between them."""
        (self.folder / "image").write_bytes(content)
        (self.folder / "pieces").write_text(str(pieces))
        (self.folder / "piece-size").write_text(str(-(-len(content) // pieces)))

    def configure(self, **settings: object) -> None:
        """Give it an enroot.conf: its script reads that first, in these two lines, and the environment comes before."""
        lines = (f'export {name}="${{{name}:-{value}}}"\n' for name, value in settings.items())
        section = f"# ---- BEGIN CONFIG ----\n{''.join(lines)}# ----- END CONFIG -----\n"
        first, rest = self.program.read_text().split("\n", 1)
        self.program.write_text(f"{first}\n{section}{rest}")

    def fail_once(self, fault: str, command: str = "import") -> None:
        (self.folder / f"fault.{command}").write_text(fault)

    def calls(self, command: str) -> list[str]:
        path = self.folder / "calls"
        lines = path.read_text().splitlines() if path.exists() else []
        return [line for line in lines if line.split()[0] == command]

    def login(self) -> str:
        """The SHA-256 of the lines with logins that it could read; a copy of theirs would be a trace of them."""
        return (self.folder / "login").read_text().split()[0]

    def environment(self) -> dict[str, str]:
        lines = (self.folder / "environment").read_text().splitlines()
        return dict(line.split("=", 1) for line in lines)


@pytest.fixture
def enroot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ScriptedEnroot:
    """A scripted enroot first on PATH."""
    made = ScriptedEnroot(tmp_path / "scripted-enroot")
    monkeypatch.setenv("PATH", str(made.program.parent), prepend=":")
    for name in ("ENROOT_TRANSFER_TIMEOUT", "ENROOT_TRANSFER_RETRIES", "ENROOT_CONNECT_TIMEOUT"):
        monkeypatch.delenv(name, raising=False)
    # The registries that these tests name are never asked: this is at once a proxy that nobody answers.
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:1")
    return made


@pytest.fixture
def real_enroot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The enroot that is installed here, with folders of its own; it asks registries without encryption, and once."""
    if shutil.which("enroot") is None:
        pytest.skip("enroot is not installed (it is in no Debian package)")
    for name in ("CACHE", "DATA", "TEMP", "RUNTIME", "CONFIG"):
        monkeypatch.setenv(f"ENROOT_{name}_PATH", str(tmp_path / "enroot" / name.lower()))
        (tmp_path / "enroot" / name.lower()).mkdir(parents=True)
    monkeypatch.setenv("ENROOT_ALLOW_HTTP", "y")
    monkeypatch.setenv("ENROOT_TRANSFER_RETRIES", "0")


@pytest.fixture
def tiny_image() -> bytes:
    """A whole squashfs file system."""
    return TINY_IMAGE


class DemoImage:
    """An image in a real registry, as `name` there."""

    def __init__(self, registry: Registry, folder: Path) -> None:
        self.registry = registry
        self.layout = write_layout(folder, demo_layers(), DEMO_CONFIG)
        self.name = "team/demo"
        self.digest = registry.push(self.layout, f"{self.name}:1")


@pytest.fixture(scope="session")
def demo_image(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DemoImage]:
    """Two layers with all that an import can get wrong, in a real registry."""
    need(missing_reason())
    registry = start_registry(tmp_path_factory.mktemp("registry") / "r")
    yield DemoImage(registry, tmp_path_factory.mktemp("layout"))
    registry.stop()


@pytest.fixture
def registry_without_login(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The registry is asked without encryption, and this user has no login for it."""
    monkeypatch.setenv("ENROOT_ALLOW_HTTP", "y")
    monkeypatch.setenv("ENROOT_CONFIG_PATH", str(tmp_path / "config"))
