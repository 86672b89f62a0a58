"""A slurmctld that is away when the night begins is waited for, as it is at the submission."""

from pathlib import Path

import pytest

from nightbridge.models import ClusterSettings, Site
from nightbridge.slurm.attempt_files import read_waiting
from nightbridge.tasks.prepare import prepare
from nightbridge.tasks.stage import DELAY_VARIABLE
from tests.builders import make_spec

AWAY = "slurm_load_partitions: Unable to contact slurm controller (connect failure)"


def test_a_controller_that_is_away_when_the_night_begins_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(DELAY_VARIABLE, "0.01")
    usual = {"model_family_name": "llama", "model_recipe_name": "llama3_8b", "gpu_type": "h100", "num_gpus": 8}
    run = make_spec(cmd_args={**usual, "container_image": "/images/nemo.sqsh", "max_steps": 50})
    site = Site(
        workspace=tmp_path / "workspace",
        cluster=ClusterSettings(kind="slurm", name="alps", bin_dir=tmp_path / "bin"),
    )
    noted = site.workspace / "runs" / run.run_key
    tries = tmp_path / "tries"
    commands = {
        "sinfo": f"echo x >> {tries}; cat {noted}/*.json >> {tmp_path}/noted 2> /dev/null\n"
        f"[ $(wc -l < {tries}) -gt 9 ] || {{ echo '{AWAY}' >&2; exit 1; }}; echo 'batch*|1-00:00:00|1-64|64|gpu:8'",
        "srun": "echo '      --container-image=[USER@]...'",
        "scontrol": "exit 1",
        "sacctmgr": "exit 1",
    }  # fmt: skip
    (tmp_path / "bin").mkdir()
    for name, body in commands.items():
        (tmp_path / "bin" / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / "bin" / name).chmod(0o755)

    limits = prepare.fn(run, site)

    assert limits.partition == "batch"
    assert len(tries.read_text().splitlines()) == 10, "more than all retries of a stage"
    assert caplog.text.count("Unable to contact slurm controller") == 1, "said once"
    assert "Unable to contact slurm controller" in (tmp_path / "noted").read_text(), "in the run's folder"
    assert read_waiting(run.run_key, site.workspace) is None
