"""A real Slurm for the tests of this folder."""

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from nightbridge.files import write_model
from nightbridge.models import ClusterSettings
from nightbridge.slurm.attempt_files import ATTEMPT_FILE, AttemptContext, open_attempt
from nightbridge.slurm.command_line import CommandLineCluster
from tests.real.slurm_daemons import SlurmDaemons


def opened_attempt(workspace: Path, run_key: str, settings: ClusterSettings, *options: str) -> AttemptContext:
    """A freshly opened attempt with options for sbatch, as the submit stage records those of a plan."""
    opened = open_attempt(workspace, run_key, settings).model_copy(update={"sbatch_options": options})
    write_model(opened.attempt_dir / ATTEMPT_FILE, opened)
    return opened


@pytest.fixture
def workspace() -> Iterator[Path]:
    """A workspace with a short path."""
    folder = Path(tempfile.mkdtemp(prefix="nb-ws-"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def settings(slurm_cluster: SlurmDaemons) -> ClusterSettings:
    """Settings that reach the daemons, with a short accounting horizon."""
    return ClusterSettings(
        kind="slurm", name="debian", slurm_conf=slurm_cluster.slurm_conf, accounting_horizon=6.0, poll_interval=2.0
    )


@pytest.fixture
def cluster(settings: ClusterSettings) -> CommandLineCluster:
    """The cluster under test."""
    return CommandLineCluster(settings)


@pytest.fixture
def attempt(workspace: Path, settings: ClusterSettings, run_key: str) -> AttemptContext:
    """A freshly opened attempt."""
    return opened_attempt(workspace, run_key, settings, "--time=5")


@pytest.fixture
def run_key(request: pytest.FixtureRequest) -> str:
    """A run key of this test's own: accounting never forgets a name."""
    import re
    import uuid

    name = re.sub(r"[^a-z0-9]+", "-", request.node.name.lower())[:60].strip("-")
    return f"{name}-{uuid.uuid4().hex[:10]}"
