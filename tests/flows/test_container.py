"""A run on the real Slurm runs inside the image that the pipeline pulled from a real registry.

The image is made of Debian packages. It is pulled by the real enroot, and its containers are started by the real pyxis,
where they are installed; elsewhere by a test's own fronts of enroot and srun, which take the same options.
"""

import re
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from examples.practice.repositories import make_practice_repositories
from nightbridge.config.scenarios import load, runs
from nightbridge.images.image import pull_image
from nightbridge.launch.launch_plan import make_launch_plan
from nightbridge.models import (
    CheckpointState,
    ClusterSettings,
    Image,
    ImageImport,
    JobState,
    JobStatus,
    Site,
)
from nightbridge.outputs.experiment import RunOutput, read_run
from nightbridge.repos.clone import make_checkout
from nightbridge.rules import check_test, errors_of
from nightbridge.slurm.attempt_files import current_attempt
from nightbridge.slurm.factory import open_cluster
from nightbridge.slurm.protocol import Cluster
from nightbridge.slurm.states import TERMINAL
from nightbridge.slurm.submission import submit_attempt
from tests.conftest import need
from tests.flows.practice_night import Entry, write_scenario
from tests.real import debian_image, slurm_daemons
from tests.real.registry import missing_reason, start_registry
from tests.real.slurm_daemons import NODES, SlurmDaemons

pytestmark = [pytest.mark.slurm, pytest.mark.launcher, pytest.mark.timeout(1800)]

REAL = Path(__file__).parents[1] / "real"
PYXIS = [Path(folder) / "spank_pyxis.so" for folder in (slurm_daemons.COMMANDS.parent / "lib/slurm",
         "/usr/lib/x86_64-linux-gnu/slurm", "/usr/lib/slurm", "/usr/local/lib/slurm", "/usr/lib64/slurm")]  # fmt: skip
COMMANDS = ("sbatch", "squeue", "sacct", "scancel", "scontrol", "sinfo")
# The practice job writes event files with TensorBoard's own writer, which Debian has no package of.
TENSORBOARD = ("tensorboard", "google", "absl", "packaging", "six.py", "werkzeug", "markupsafe")

STEPS = 20
# Python runs it before anything else, in this image alone. One write for the whole line: an unbuffered print makes two,
# and srun may put another rank's line between them.
GREETING = """
import os, sys
os.write(1, f"{os.environ['FROM_THE_IMAGE']} from {sys.executable} below {os.stat('/').st_ino}\\n".encode())
"""


@dataclass(frozen=True)
class Ran:
    """The run in the container, and what it left."""

    image: Image
    status: JobStatus
    output: RunOutput

    @property
    def log(self) -> str:
        return "".join(path.read_text() for path in (*self.output.sbatch_logs, *self.output.logs))


@pytest.fixture(scope="module")
def debian_layout(environments_dir: Path) -> Path:
    """An image of Debian packages, made once and kept between test runs."""
    folder = environments_dir / "debian-image"
    need(missing_reason() or missing_enroot() or debian_image.missing_reason(folder))
    try:
        return debian_image.debian_layout(folder)
    except subprocess.CalledProcessError as error:  # such as package servers that are out of reach
        need(f"the image of Debian packages could not be made: {error.output[-300:]}")
        raise


def missing_enroot() -> str | None:
    """Why no image can be pulled here; None when one can."""
    if shutil.which("enroot"):
        return None
    missing = [tool for tool in ("umoci", "mksquashfs", "unsquashfs") if shutil.which(tool) is None]
    return f"not installed: enroot, or for its front {', '.join(missing)}" if missing else None


@pytest.fixture(scope="module")
def image(
    debian_layout: Path, launcher_python: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, str]]:
    """Name and digest of the image in a real registry."""
    folder = tmp_path_factory.mktemp("image")
    layout = folder / "layout"
    shutil.copytree(debian_layout, layout)
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
    plugin = next((path for path in PYXIS if path.exists()), None)
    if plugin and shutil.which("enroot"):
        link_commands(folder, ("srun", *COMMANDS))
        (slurm_cluster.folder / "plugstack.conf").write_text(f"required {plugin}\n")
        with slurm_cluster.slurm_conf.open("a") as stream:
            # Where PMIx keeps a folder of each step's name: these nodes are one machine.
            stream.write(f"TmpFS={folder}/%n\n")
        for node in NODES:  # slurmd reads its plugins when it starts
            slurm_cluster.kill_daemon(node)
            slurm_cluster.start_daemon(node, programs=enroot_of_node(folder / node))
    else:
        link_commands(folder, COMMANDS)
        write_front(folder)
    return folder


def enroot_of_node(folder: Path) -> Path:
    """A folder with an enroot whose containers are a node's own: pyxis gives those of one step the same name.

    pyxis lets a job's variables that name folders of enroot not through, but looks for enroot on slurmd's PATH.
    """
    folder.mkdir()
    program = folder / "enroot"
    own = " ".join(f"ENROOT_{name}_PATH={folder / name.lower()}" for name in ("DATA", "RUNTIME", "CACHE", "TEMP"))
    program.write_text(f'#!/bin/sh\nexport {own}\nmkdir -p {folder / "temp"}\nexec {shutil.which("enroot")} "$@"\n')
    program.chmod(0o755)
    return folder


def link_commands(folder: Path, names: Sequence[str]) -> None:
    for name in names:
        (folder / name).symlink_to(str(shutil.which(name)))


def write_front(folder: Path) -> None:
    (folder / "srun").write_text((REAL / "pyxis_srun.sh").read_text().replace("@SRUN@", str(shutil.which("srun"))))
    (folder / "srun").chmod(0o755)


@pytest.fixture(scope="module")
def site(
    commands: Path, slurm_cluster: SlurmDaemons, environments_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Site:
    return container_site(tmp_path_factory.mktemp("run"), commands, slurm_cluster.slurm_conf, environments_dir)


def container_site(folder: Path, commands: Path, slurm_conf: Path, environments: Path) -> Site:
    """A cluster of two nodes whose jobs can run in containers."""
    cluster = ClusterSettings(
        kind="slurm",
        name="debian",
        slurm_conf=slurm_conf,
        bin_dir=commands,
        containers="pyxis",
        gpus_per_node=2,
        accounting_horizon=6,
    )
    return Site(
        workspace=folder / "workspace",
        environments=environments,
        cluster=cluster,
        image_import=ImageImport(cache=folder / "cache", temp=folder / "temp"),
    )


@pytest.fixture(scope="module")
def ran(image: tuple[str, str], site: Site, launcher_python: Path) -> Ran:
    return pull_and_run(image[0], site)


def pull_and_run(name: str, site: Site) -> Ran:
    """What the stages of a run do, from the references in its files to the end of its job."""
    entry = Entry(
        id="in-a-container",
        cmd_args={"container_image": name, "num_gpus": 4, "max_steps": STEPS, "save_interval": STEPS},
    )
    folder = site.workspace.parent
    scenario = write_scenario(folder / "conf", make_practice_repositories(folder / "practice"), "container", entry)
    (spec,) = runs(load(scenario), "2026-11-21")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ENROOT_ALLOW_HTTP", "y")
        if shutil.which("enroot") is None:
            (folder / "programs").mkdir()
            (folder / "programs" / "enroot").symlink_to(REAL / "enroot_front.sh")
            patch.setenv("PATH", str(folder / "programs"), prepend=":")
        # Nobody keeps this image: packing it is what takes longest.
        patch.setenv("ENROOT_SQUASH_OPTIONS", "-noI -noD -noF -noX -exit-on-error")
        image = pull_image(spec, site)
    checkout = make_checkout(spec, site)
    cluster = open_cluster(site.cluster, site.workspace)
    limits = cluster.limits()
    assert not errors_of(check_test(spec.test, limits, checkout))
    attempt = current_attempt(site.workspace, spec.run_key, site.cluster)
    plan = make_launch_plan(spec, checkout, image, limits, site, attempt.attempt, attempt.attempt_dir)
    job = submit_attempt(plan, attempt, cluster, {})
    status = wait_for_end(cluster, job.job_id)
    return Ran(image, status, read_run(job, plan.output_dir))


def wait_for_end(cluster: Cluster, job_id: int) -> JobStatus:
    deadline = time.monotonic() + 1200
    while True:
        status = cluster.states([job_id]).get(job_id)
        if status is not None and status.state in TERMINAL:
            return status
        assert time.monotonic() < deadline, status
        time.sleep(1)


def test_the_cluster_says_that_it_can_run_containers(site: Site) -> None:
    assert open_cluster(site.cluster, site.workspace).limits().has_pyxis


def test_the_job_trained_inside_the_image_on_both_nodes(ran: Ran) -> None:
    assert ran.status.state is JobState.COMPLETED, f"{ran.status}\n{ran.log[-5000:]}"
    greetings = re.findall(r"good night from /usr/bin/python3 below (\d+)$", ran.log, re.MULTILINE)
    assert len(greetings) == 4  # one for each rank
    assert str(Path("/").stat().st_ino) not in greetings
    assert not Path("/usr/local/lib/practice-packages").exists()


def test_it_left_all_its_steps_its_curves_and_its_checkpoint_on_the_host(ran: Ran) -> None:
    assert f" iteration {STEPS:8d}/{STEPS:8d}" in ran.log
    assert [(checkpoint.iteration, checkpoint.state) for checkpoint in ran.output.checkpoints] == [
        (STEPS, CheckpointState.COMPLETE)
    ]
    assert len(ran.output.event_files) == 1


def test_the_image_is_the_one_in_the_registry_by_its_digest(ran: Ran, site: Site, image: tuple[str, str]) -> None:
    assert ran.image.digest == image[1]
    assert ran.image.path == site.images_dir / f"{image[1].removeprefix('sha256:')}.sqsh"
