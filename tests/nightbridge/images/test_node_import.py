"""Import on a compute node of a real Slurm: by a scripted enroot that the node finds on its PATH."""

import functools
import hashlib
import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from nightbridge.errors import InvalidInput, LaunchRefused, NightbridgeError, PermanentError, TransientError
from nightbridge.images.image import pull_image
from nightbridge.images.node_import import NodeImporter
from nightbridge.models import ClusterSettings, Image, ImageImport, Site
from nightbridge.slurm.node_command import run_on_node
from tests.builders import make_image_spec
from tests.real.registry import DEMO_CONFIG, PASSWORD, USER, demo_layers, start_private_registry, write_layout
from tests.real.slurm_daemons import SlurmDaemons
from tests.waiting import wait_until

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(900)]

HEX = "ab" * 32
PINNED = f"nvcr.io/nvidia/nemo@sha256:{HEX}"
SHORT = ("--time=5", "--mem=50")


@pytest.fixture
def cluster(slurm_cluster: SlurmDaemons) -> ClusterSettings:
    return ClusterSettings(kind="slurm", name="debian", slurm_conf=slurm_cluster.slurm_conf)


@pytest.fixture
def site(tmp_path: Path, cluster: ClusterSettings) -> Site:
    image_import = ImageImport(on="node", srun_args=SHORT, cache=tmp_path / "cache", temp=tmp_path / "temp")
    return Site(workspace=tmp_path / "workspace", cluster=cluster, image_import=image_import)


def importer(site: Site, credentials: str = "", options: tuple[str, ...] = SHORT) -> NodeImporter:
    return NodeImporter(functools.partial(run_on_node, site.cluster, options=options), site.image_import, credentials)


def pull(site: Site, image: str = PINNED) -> Image:
    return pull_image(make_image_spec(image), site, lambda: importer(site))


def nothing_is_left(site: Site) -> bool:
    temp = site.workspace.parent / "temp"
    return not list(site.images_dir.iterdir()) and (not temp.exists() or not list(temp.iterdir()))


def test_the_image_is_made_there_checked_here_and_the_sidecar_names_the_node(
    site: Site, enroot: Any, tiny_image: bytes
) -> None:
    image = pull(site)

    assert image.path is not None
    assert image.path.read_bytes() == tiny_image
    tool = json.loads(image.path.with_suffix(".json").read_text())["tool"]
    assert tool in ("enroot 4.1.2 on node1", "enroot 4.1.2 on node2")
    (call,) = enroot.calls("import")
    assert call.endswith(f" docker://nvcr.io#nvidia/nemo@sha256:{HEX}")
    said = enroot.environment()
    assert Path(said["ENROOT_TEMP_PATH"]).parent == site.image_import.temp
    assert said["ENROOT_CACHE_PATH"] == str(site.image_import.cache)
    assert int(said["ENROOT_TRANSFER_TIMEOUT"]) > 0
    assert list((site.workspace.parent / "temp").iterdir()) == []


def test_the_node_imports_the_image_for_the_processor_of_the_nodes(site: Site, enroot: Any) -> None:
    image = pull_image(make_image_spec(PINNED, gpu_type="gb200"), site, lambda: importer(site))

    assert image.path == site.images_dir / f"{HEX}-aarch64.sqsh"
    (call,) = enroot.calls("import")
    assert call.startswith("import --arch aarch64 --output ")


@pytest.mark.parametrize(
    ("fault", "kind", "message"),
    [
        ("429", TransientError, r"busy or failing \(.*on node\d"),
        ("killed", TransientError, "was killed"),
        ("cut", TransientError, "produced an incomplete image"),
        ("401", PermanentError, r"login \$oauthtoken"),
        ("404", InvalidInput, "no such image"),
    ],
)
def test_its_failures_mean_the_same_as_on_this_host(
    site: Site, enroot: Any, fault: str, kind: type[NightbridgeError], message: str
) -> None:
    enroot.fail_once(fault)

    with pytest.raises(kind, match=message):
        pull(site)

    assert nothing_is_left(site)


def test_a_node_without_enroot_and_a_missing_partition_are_errors(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands = tmp_path / "commands"
    commands.mkdir()
    for name in ("srun", "squeue", "sacct", "scancel", "scontrol"):
        (commands / name).symlink_to(str(shutil.which(name)))
    monkeypatch.setenv("PATH", str(commands))

    with pytest.raises(PermanentError, match=r"enroot is not installed here \(on node\d\)"):
        pull(site)
    with pytest.raises(LaunchRefused, match="no such partition"):
        pull_image(make_image_spec(PINNED), site, lambda: importer(site, options=("--partition=nowhere",)))


def test_a_python_that_the_nodes_do_not_see_is_an_error(
    site: Site, enroot: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.executable", str(tmp_path / "only-here" / "python"))

    with pytest.raises(PermanentError, match=r"could not start the import.*must see .*only-here/python"):
        pull(site)


@pytest.fixture
def private_image(tmp_path: Path, enroot: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """An image behind a login, which the registry itself is asked about."""
    monkeypatch.setenv("ENROOT_ALLOW_HTTP", "y")
    monkeypatch.setenv("ENROOT_CONFIG_PATH", str(tmp_path / "nothing"))
    registry = start_private_registry(tmp_path / "private")
    registry.push(write_layout(tmp_path / "layout", demo_layers(), DEMO_CONFIG), "secret:1")
    yield f"{registry.host}/secret:1"
    registry.stop()


def test_credentials_reach_the_node_through_slurm_and_are_written_down_nowhere(
    site: Site, enroot: Any, private_image: str, slurm_cluster: SlurmDaemons, tmp_path: Path
) -> None:
    lines = f"machine 127.0.0.1 login {USER} password {PASSWORD}"

    pull_image(make_image_spec(private_image), site, lambda: importer(site, lines))

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


def test_a_job_that_was_cancelled_is_transient_and_the_next_one_clears_up_after_it(
    site: Site, enroot: Any, tiny_image: bytes, slurm_cluster: SlurmDaemons
) -> None:
    enroot.fail_once("hang")

    with ThreadPoolExecutor() as pool:
        pulled = pool.submit(pull, site)
        wait_until((enroot.folder / "hanging").exists)
        (job,) = slurm_cluster.command("squeue", "-h", "-t", "R", "-o", "%i").stdout.split()
        slurm_cluster.command("scancel", job)
        with pytest.raises(TransientError, match="Slurm did not let the job end"):
            pulled.result()

    assert list(site.images_dir.iterdir()) == []
    wait_until(lambda: not Path(f"/proc/{(enroot.folder / 'hanging').read_text().strip()}").exists())
    image = pull(site)
    assert image.path is not None
    assert image.path.read_bytes() == tiny_image
    assert list((site.workspace.parent / "temp").iterdir()) == []


def test_a_job_that_takes_too_long_is_cancelled(cluster: ClusterSettings, slurm_cluster: SlurmDaemons) -> None:
    with pytest.raises(TransientError, match="did not end within"):
        run_on_node(cluster, "too-long", ["sleep", "600"], environment={}, timeout=20, options=SHORT)

    wait_until(lambda: not slurm_cluster.command("squeue", "-h", "--name=too-long").stdout.strip())


PULL = """
import functools, sys
from nightbridge.images.image import pull_image
from nightbridge.images.node_import import NodeImporter
from nightbridge.models import RunSpec, Site
from nightbridge.slurm.node_command import run_on_node
site = Site.model_validate_json(sys.argv[2])
srun = functools.partial(run_on_node, site.cluster, options=site.image_import.srun_args)
pull_image(RunSpec.model_validate_json(sys.argv[1]), site, lambda: NodeImporter(srun, site.image_import))
"""


def test_an_import_whose_flow_was_killed_is_ended_by_the_next_one_and_leaves_no_half_image(
    site: Site, enroot: Any, tiny_image: bytes, slurm_cluster: SlurmDaemons
) -> None:
    enroot.fail_once("hang")
    process = subprocess.Popen(
        [sys.executable, "-c", PULL, make_image_spec(PINNED).model_dump_json(), site.model_dump_json()]
    )
    wait_until((enroot.folder / "hanging").exists)
    process.send_signal(signal.SIGKILL)
    process.wait()
    # The kill has hit our process alone: its srun, and the job, go on.
    hanging = (enroot.folder / "hanging").read_text().strip()
    assert Path(f"/proc/{hanging}").exists()

    image = pull(site)

    assert not Path(f"/proc/{hanging}").exists()
    assert image.path is not None
    assert image.path.read_bytes() == tiny_image
    assert sorted(path.name for path in site.images_dir.iterdir()) == [f"{HEX}.json", f"{HEX}.sqsh"]
    assert list((site.workspace.parent / "temp").iterdir()) == []
    assert not slurm_cluster.command("squeue", "-h", "-t", "R,PD").stdout.strip()
