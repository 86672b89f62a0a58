"""Import on a compute node of a real Slurm, by a scripted enroot that the node finds on its PATH."""

import functools
import hashlib
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nightbridge.errors import LaunchRefused, PermanentError, TransientError
from nightbridge.images.image import pull_image
from nightbridge.images.on_node import EnrootOnNode
from nightbridge.models import ClusterSettings, GitRepo, ImageImport, RunSpec, Site, TestDefinition
from nightbridge.slurm.node_command import run_on_node
from tests.real.registry import DEMO_CONFIG, PASSWORD, USER, demo_layers, start_private_registry, write_layout
from tests.real.slurm_daemons import SlurmDaemons

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(900)]

HEX = "ab" * 32
PINNED = f"nvcr.io/nvidia/nemo@sha256:{HEX}"
SHORT = ("--time=5", "--mem=50")


def run_spec(image: str) -> RunSpec:
    repo = GitRepo(url="https://git.example.org/x.git")
    test = TestDefinition(id="t", name="t", cmd_args={"container_image": image}, git_repos=(repo,), nemo_run_repo=repo)
    return RunSpec(scenario="s", night="2026-11-21", test=test)


@pytest.fixture
def settings(slurm_cluster: SlurmDaemons) -> ClusterSettings:
    return ClusterSettings(kind="slurm", name="debian", slurm_conf=slurm_cluster.slurm_conf)


@pytest.fixture
def site(tmp_path: Path, settings: ClusterSettings) -> Site:
    temp = tmp_path / "temp"
    return Site(workspace=tmp_path / "workspace", cluster=settings, image_import=ImageImport(on="slurm", temp=temp))


def importer(site: Site, credentials: str = "", options: tuple[str, ...] = SHORT) -> EnrootOnNode:
    return EnrootOnNode(functools.partial(run_on_node, site.cluster, options=options), site.image_import, credentials)


def test_the_image_is_made_there_checked_here_and_the_sidecar_says_where(
    site: Site, enroot: Any, tiny_image: bytes
) -> None:
    image = pull_image(run_spec(PINNED), site, lambda: importer(site))

    assert image.path is not None
    assert image.path.read_bytes() == tiny_image
    assert json.loads(image.path.with_suffix(".json").read_text())["tool"] in (
        "enroot 4.1.2 on node1",
        "enroot 4.1.2 on node2",
    )
    (call,) = enroot.calls("import")
    assert call.endswith(f" docker://nvcr.io#nvidia/nemo@sha256:{HEX}")
    said = enroot.environment()
    assert Path(said["ENROOT_TEMP_PATH"]).parents[1] == site.image_import.temp
    assert int(said["ENROOT_TRANSFER_TIMEOUT"]) > 0
    assert list((site.workspace.parent / "temp").iterdir()) == []


def test_an_enroot_3_there_gets_the_address_that_it_understands(site: Site, enroot: Any) -> None:
    enroot.set_version("3.5.0")

    pull_image(run_spec(PINNED), site, lambda: importer(site))

    assert enroot.calls("import")[0].endswith(f" docker://nvcr.io#nvidia/nemo:sha256:{HEX}")


@pytest.mark.parametrize(
    ("fault", "kind", "message"),
    [
        ("429", TransientError, "busy or out of order"),
        ("curl-22", TransientError, "could not be reached"),
        ("killed", TransientError, "was killed"),
        ("cut", TransientError, "left no whole image"),
        ("401", PermanentError, r"login \$oauthtoken"),
    ],
)
def test_its_failures_mean_the_same_as_on_this_machine(
    site: Site, enroot: Any, fault: str, kind: type[Exception], message: str
) -> None:
    enroot.fail_once(fault)

    with pytest.raises(kind, match=message):
        pull_image(run_spec(PINNED), site, lambda: importer(site))

    assert list(site.images_dir.iterdir()) == []
    assert list((site.workspace.parent / "temp").iterdir()) == []


def test_a_node_without_enroot_and_a_partition_that_is_not_there_are_told(
    site: Site, path_without_enroot: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", path_without_enroot)
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:1")

    with pytest.raises(PermanentError, match=r"no enroot on node\d.*srun_args"):
        pull_image(run_spec(PINNED), site, lambda: importer(site))
    with pytest.raises(LaunchRefused, match="no such partition"):
        pull_image(run_spec(PINNED), site, lambda: importer(site, options=("--partition=nowhere",)))


def test_too_little_space_on_the_node_is_told_with_its_name(
    site: Site, enroot: Any, demo_image: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ENROOT_ALLOW_HTTP", "y")
    monkeypatch.setattr("nightbridge.images.on_node.UNPACKED_FACTOR", 1e12)

    with pytest.raises(PermanentError, match=r"too little space in /.*/temp on node\d: the import needs [\d,]+ bytes"):
        pull_image(run_spec(f"{demo_image.registry.host}/{demo_image.name}:1"), site, lambda: importer(site))

    assert enroot.calls("import") == []


@pytest.fixture
def private_image(tmp_path: Path, enroot: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """An image behind a login, which the registry itself is asked about."""
    monkeypatch.setenv("ENROOT_ALLOW_HTTP", "y")
    monkeypatch.setenv("ENROOT_CONFIG_PATH", str(tmp_path / "nothing"))
    monkeypatch.setenv("REGISTRY_AUTH_FILE", str(tmp_path / "nothing"))
    registry = start_private_registry(tmp_path / "private")
    registry.push(write_layout(tmp_path / "layout", demo_layers(), DEMO_CONFIG), "secret:1")
    yield f"{registry.host}/secret:1"
    registry.stop()


def test_credentials_reach_the_node_through_slurm_and_are_written_down_nowhere(
    site: Site, enroot: Any, private_image: str, slurm_cluster: SlurmDaemons, tmp_path: Path
) -> None:
    lines = f"machine 127.0.0.1 login {USER} password {PASSWORD}"

    pull_image(run_spec(private_image), site, lambda: importer(site, lines))

    assert enroot.login() == hashlib.sha256(f"{lines}\n".encode()).hexdigest()
    shown = PASSWORD.encode()
    for folder in (tmp_path, slurm_cluster.folder, Path("/dev/shm")):
        found = [path for path in folder.rglob("*") if path.is_file() and shown in read(path)]
        assert [path for path in found if "private" not in path.parts] == []


def read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:  # a daemon's own file that is just going
        return b""


PULL = """
import functools, sys
from nightbridge.images.image import pull_image
from nightbridge.images.on_node import EnrootOnNode
from nightbridge.models import RunSpec, Site
from nightbridge.slurm.node_command import run_on_node
site = Site.model_validate_json(sys.argv[2])
srun = functools.partial(run_on_node, site.cluster, options=("--time=5", "--mem=50"))
pull_image(RunSpec.model_validate_json(sys.argv[1]), site, lambda: EnrootOnNode(srun, site.image_import))
"""


def test_an_import_whose_process_was_killed_is_cancelled_by_the_next_one(
    site: Site, enroot: Any, tiny_image: bytes, slurm_cluster: SlurmDaemons
) -> None:
    enroot.fail_once("hang")
    spec = run_spec(PINNED)
    process = subprocess.Popen([sys.executable, "-c", PULL, spec.model_dump_json(), site.model_dump_json()])
    wait_for(lambda: (enroot.folder / "hanging").exists())
    process.kill()
    process.wait()
    # The kill has hit our process alone: its srun, and the job, go on.
    hanging = int((enroot.folder / "hanging").read_text())
    assert Path(f"/proc/{hanging}").exists()

    image = pull_image(spec, site, lambda: importer(site))

    assert image.path is not None
    assert image.path.read_bytes() == tiny_image
    assert sorted(path.name for path in site.images_dir.iterdir()) == [f"{HEX}.json", f"{HEX}.sqsh"]
    wait_for(lambda: not slurm_cluster.command("squeue", "-h", "-t", "R,PD,CG").stdout.strip())
    assert not Path(f"/proc/{hanging}").exists()


def wait_for(happened: Any) -> None:
    end = time.monotonic() + 120
    while not happened():
        assert time.monotonic() < end
        time.sleep(0.1)
