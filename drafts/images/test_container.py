"""A run on the real Slurm runs inside the image that the pipeline pulled from a real registry.

The image is made of Debian packages. Containers are started by the real pyxis where it is installed, with the enroot
that it needs; elsewhere by a test's own front of srun, which takes the same options.
"""

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from nightbridge.models import ClusterSettings, RunRecord, VerdictStatus
from nightbridge.practice.repositories import make_practice_repositories
from nightbridge.slurm.command_line import CommandLineCluster
from tests.conftest import need
from tests.flows.practice_night import Entry, nightbridge, write_scenario, write_site
from tests.real import debian_image
from tests.real.prefect_server import PrefectServer
from tests.real.registry import missing_reason, start_registry
from tests.real.slurm_daemons import NODES, SlurmDaemons

pytestmark = [pytest.mark.slurm, pytest.mark.launcher, pytest.mark.timeout(1800)]

FRONT = Path(__file__).parents[1] / "real" / "pyxis_srun.sh"
PYXIS = [Path(folder) / "spank_pyxis.so" for folder in ("/usr/lib/x86_64-linux-gnu/slurm", "/usr/lib/slurm",
         "/usr/local/lib/slurm", "/usr/lib64/slurm")]  # fmt: skip
COMMANDS = ("sbatch", "squeue", "sacct", "scancel", "scontrol", "sinfo")
# The practice job writes event files with TensorBoard's own writer, which Debian has no package of.
TENSORBOARD = ("tensorboard", "google", "absl", "packaging", "six.py", "werkzeug", "markupsafe")

STEPS = 20
# Python runs it before anything else, in this image alone.
GREETING = """
import os, sys
print(f"{os.environ['FROM_THE_IMAGE']} from {sys.executable} below {os.stat('/').st_ino}", flush=True)
"""


@dataclass(frozen=True)
class Night:
    """The night that ran in the container, and where it left its things."""

    process: "subprocess.CompletedProcess[str]"
    digest: str
    folder: Path

    @property
    def verdict(self) -> dict[str, Any]:
        (verdict,) = json.loads(self.process.stdout)["verdicts"]
        assert isinstance(verdict, dict)
        return verdict

    @property
    def log(self) -> str:
        logs = (self.folder / "workspace" / "runs").rglob("log-*.out")
        return "".join(path.read_text() for path in logs)


@pytest.fixture(scope="module")
def image(launcher_python: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """Name and digest of the image in a real registry."""
    need(missing_reason() or debian_image.missing_reason())
    folder = tmp_path_factory.mktemp("image")
    layout = folder / "layout"
    shutil.copytree(debian_image.debian_layout(), layout)
    packages = folder / "packages"
    packages.mkdir()
    for name in TENSORBOARD:
        for source in launcher_python.parents[1].glob(f"lib/python3.*/site-packages/{name}"):
            copy = shutil.copytree if source.is_dir() else shutil.copy
            copy(source, packages / name)
    (packages / "sitecustomize.py").write_text(GREETING)
    debian_image.insert(layout, packages, "/usr/local/lib/practice-packages")
    debian_image.configure(layout, "PYTHONPATH=/usr/local/lib/practice-packages", "FROM_THE_IMAGE=good night")
    registry = start_registry(folder / "registry")
    yield f"{registry.host}/team/practice:1", registry.push(layout, "team/practice:1")
    registry.stop()


@pytest.fixture(scope="module")
def commands(slurm_cluster: SlurmDaemons, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Slurm's commands, with an srun that knows containers."""
    folder = tmp_path_factory.mktemp("commands")
    for name in COMMANDS:
        (folder / name).symlink_to(str(shutil.which(name)))
    srun = Path(str(shutil.which("srun")))
    plugin = next((path for path in PYXIS if path.exists()), None)
    if plugin and shutil.which("enroot"):
        (folder / "srun").symlink_to(srun)
        (slurm_cluster.folder / "plugstack.conf").write_text(f"required {plugin}\n")
        for node in NODES:  # slurmd reads its plugins when it starts
            slurm_cluster.kill_daemon(node)
            slurm_cluster.start_daemon(node)
    else:
        (folder / "srun").write_text(FRONT.read_text().replace("@SRUN@", str(srun)))
        (folder / "srun").chmod(0o755)
    return folder


@pytest.fixture(scope="module")
def night(
    image: tuple[str, str],
    commands: Path,
    slurm_cluster: SlurmDaemons,
    prefect_server: PrefectServer,
    environments_dir: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Night:
    folder = tmp_path_factory.mktemp("container-night")
    name, digest = image
    cluster = {
        "kind": "slurm",
        "name": "debian",
        "slurm_conf": slurm_cluster.slurm_conf,
        "bin_dir": commands,
        "containers": "pyxis",
        "gpus_per_node": 2,
        "accounting_horizon": 6,
        "poll_interval": 2,
    }
    write_site(folder / "site.toml", workspace=folder / "workspace", environments=environments_dir, cluster=cluster)
    entry = Entry(
        id="in-a-container",
        cmd_args={"container_image": name, "num_gpus": 4, "max_steps": STEPS, "save_interval": STEPS},
    )
    scenario = write_scenario(folder / "conf", make_practice_repositories(folder / "practice"), "container", entry)
    process = nightbridge(
        "run", scenario, "--system", folder / "site.toml", "--night", "2026-11-21", "--json",
        environment=prefect_server.environment | {
            "ENROOT_ALLOW_HTTP": "y",
            "ENROOT_CACHE_PATH": str(folder / "cache"),
            "ENROOT_TEMP_PATH": str(folder / "temp"),
        },
        timeout=1200,
    )  # fmt: skip
    return Night(process, digest, folder)


def test_the_cluster_says_that_it_can_run_containers(commands: Path, slurm_cluster: SlurmDaemons) -> None:
    settings = ClusterSettings(kind="slurm", bin_dir=commands, slurm_conf=slurm_cluster.slurm_conf)

    assert CommandLineCluster(settings).limits().has_pyxis


def test_the_job_trained_inside_the_image_on_both_nodes(night: Night) -> None:
    assert night.verdict["status"] == VerdictStatus.NO_BASELINE, f"{night.process.stderr[-3000:]}\n{night.log[-3000:]}"
    greetings = re.findall(r"good night from /usr/bin/python3 below (\d+)$", night.log, re.MULTILINE)
    assert len(greetings) == 4  # one for each rank
    assert str(Path("/").stat().st_ino) not in greetings
    assert not Path("/usr/local/lib/practice-packages").exists()


def test_its_steps_curves_and_checkpoint_were_harvested(night: Night) -> None:
    kept = night.folder / "workspace" / "store" / night.verdict["prefix"]
    names = {path.relative_to(kept).as_posix() for path in kept.rglob("*") if path.is_file()}

    assert json.loads((kept / "summary.json").read_text())["steps_done"] == STEPS
    assert "manifest.json" in names
    assert any(name.startswith(f"checkpoints/iter_{STEPS:07d}/") for name in names)
    assert any(name.startswith("tensorboard/events.out.tfevents.") for name in names)


def test_the_record_names_the_image_by_its_digest(night: Night) -> None:
    records = list((night.folder / "workspace" / "store").rglob("record.json"))
    (record,) = [RunRecord.model_validate_json(path.read_bytes()) for path in records]

    assert record.image.digest == night.digest
    assert record.image.path == night.folder / "workspace" / "images" / f"{night.digest.removeprefix('sha256:')}.sqsh"
    assert record.image.sha256 is not None
