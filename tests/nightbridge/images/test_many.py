"""Many processes that want one image at once make one import from a real registry; killed at any moment, none is lost.

With the scripted enroot, and with the real one wherever it is installed.
"""

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from nightbridge.images.image import check_squashfs, pull_image, sha256_of
from nightbridge.models import Image, RunSpec, Site
from tests.builders import make_image_spec
from tests.conftest import SEEDS
from tests.real.s3_proxy import Proxy, proxy_to

PROCESSES = 20
PIECES = 8

# Says when it begins: how long Python needs to start is no part of what is measured or killed.
PULL = """
import sys
from nightbridge.images.image import pull_image
from nightbridge.models import RunSpec, Site
from tests.builders import make_image_spec
spec, site = RunSpec.model_validate_json(sys.argv[1]), Site.model_validate_json(sys.argv[2])
print("ready", flush=True)
print(pull_image(spec, site).model_dump_json())
"""


@dataclass
class Tool:
    """What imports here. `image` is what the scripted enroot makes; the real one makes the registry's demo image."""

    name: str
    image: bytes = b""

    def assert_whole(self, image: Image) -> None:
        """The file is the whole image, and the very one of which it is said that it was verified."""
        assert image.path is not None
        assert sha256_of(image.path) == image.sha256
        check_squashfs(image.path)
        if self.image:
            assert image.path.read_bytes() == self.image
        else:
            shown = subprocess.run(["unsquashfs", "-cat", image.path, "kept/changed"], check=True, capture_output=True)
            assert shown.stdout == b"second\n"


@pytest.fixture(scope="module")
def two_megabytes(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A real squashfs that takes a while to write in pieces."""
    folder = tmp_path_factory.mktemp("rootfs")
    (folder / "random").write_bytes(random.Random(1).randbytes(2 << 20))
    output = folder.with_suffix(".sqsh")
    subprocess.run(
        ["mksquashfs", str(folder), str(output), "-no-progress", "-comp", "lzo"], check=True, stdout=subprocess.DEVNULL
    )
    return output.read_bytes()


@pytest.fixture(params=["scripted enroot", "real enroot"])
def tool(
    request: pytest.FixtureRequest, demo_image: Any, two_megabytes: bytes, monkeypatch: pytest.MonkeyPatch
) -> Tool:
    if request.param == "scripted enroot":
        enroot = request.getfixturevalue("enroot")
        enroot.set_digest(demo_image.digest)
        enroot.set_image(two_megabytes, PIECES)
        monkeypatch.setenv("ENROOT_ALLOW_HTTP", "y")
        return Tool(request.param, two_megabytes)
    request.getfixturevalue("real_enroot")
    return Tool(request.param)


@pytest.fixture
def proxy(demo_image: Any) -> Iterator[Proxy]:
    with proxy_to(f"http://{demo_image.registry.host}") as made:
        yield made


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(workspace=tmp_path / "workspace")


def start(spec: RunSpec, site: Site) -> "subprocess.Popen[str]":
    command = [sys.executable, "-c", PULL, spec.model_dump_json(), site.model_dump_json()]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def wait_until_it_begins(process: "subprocess.Popen[str]") -> None:
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"


def test_twenty_processes_make_one_import(
    tool: Tool, proxy: Proxy, demo_image: Any, site: Site, request: pytest.FixtureRequest
) -> None:
    spec = make_image_spec(f"{proxy.endpoint_url.removeprefix('http://')}/{demo_image.name}:1")

    processes = [start(spec, site) for _ in range(PROCESSES)]
    answers = [process.communicate()[0] for process in processes]

    assert [process.returncode for process in processes] == [0] * PROCESSES
    assert len(set(answers)) == 1
    tool.assert_whole(Image.model_validate_json(answers[0].removeprefix("ready\n")))
    assert len(list(site.images_dir.iterdir())) == 2
    blobs = [asked.path for asked in proxy.requests if asked.method == "GET" and "/blobs/" in asked.path]
    if tool.name == "scripted enroot":
        enroot = request.getfixturevalue("enroot")
        assert [len(enroot.calls(command)) for command in ("digest", "import")] == [1, 1]
    else:
        assert len(blobs) == len(set(blobs)) == 3  # the configuration and two layers, once each


@pytest.fixture(scope="module")
def undisturbed() -> dict[str, float]:
    """Seconds that an import takes on this machine, by tool, once somebody has measured it."""
    return {}


def measure(spec: RunSpec, site: Site) -> float:
    process = start(spec, site)
    wait_until_it_begins(process)
    started = time.monotonic()
    process.communicate()
    assert process.returncode == 0
    return time.monotonic() - started


def kill(process: "subprocess.Popen[str]", *, with_its_programs: bool) -> None:
    """Kill a process: with the programs that it runs, as when a node goes down; without, these go on for a while."""
    process.send_signal(signal.SIGSTOP)
    children: list[str] = []
    with suppress(FileNotFoundError):  # It may have ended just before.
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    process.kill()
    process.communicate()
    for child in children if with_its_programs else ():
        # Each program is in a session of its own.
        with suppress(ProcessLookupError):
            os.killpg(int(child), signal.SIGKILL)


@pytest.mark.random_kill
@pytest.mark.parametrize("seed", SEEDS)
def test_killed_at_any_moment_the_next_one_succeeds(
    tool: Tool, demo_image: Any, site: Site, tmp_path: Path, undisturbed: dict[str, float], seed: int
) -> None:
    spec = make_image_spec(f"{demo_image.registry.host}/{demo_image.name}:1")
    if tool.name not in undisturbed:
        undisturbed[tool.name] = measure(spec, Site(workspace=tmp_path / "measured"))
    source = random.Random(seed)
    process = start(spec, site)
    wait_until_it_begins(process)
    time.sleep(source.uniform(0, undisturbed[tool.name]))
    kill(process, with_its_programs=source.random() < 0.5)
    for visible in site.images_dir.glob("[0-9a-f]*.sqsh"):
        check_squashfs(visible)

    image = pull_image(spec, site)

    assert image.path is not None
    tool.assert_whole(image)
    assert image.digest == demo_image.digest
    # One that was killed while it asked for the lease leaves its request of 200 bytes: nobody may know whose it is.
    left = {path.name for path in site.images_dir.iterdir() if ".lease." not in path.name}
    assert left == {image.path.name, image.path.with_suffix(".json").name}
