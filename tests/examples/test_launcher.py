"""The practice launcher: Megatron-Bridge's flags, submitted with the real NeMo-Run to a cluster that really runs it."""

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from nightbridge.launch.flags import CHOICES, FLAGS, choices_of, escaped
from nightbridge.launch.parser_source import known_flags
from nightbridge.launch.versions import HEAD
from nightbridge.models import CheckpointState, ClusterSettings, JobState
from nightbridge.outputs.checkpoints import find_checkpoints
from nightbridge.outputs.logs import read_logs
from nightbridge.slurm.local import LocalCluster
from nightbridge.slurm.states import TERMINAL

LAUNCHER = "scripts/performance/setup_experiment.py"
REQUIRED = ("-a", "tests", "-m", "llama", "-mr", "llama_small", "-g", "h100", "-ng", "2", "-gn", "2")


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[LocalCluster]:
    cluster = LocalCluster(ClusterSettings(), tmp_path / "cluster", kill_wait=1.0)
    yield cluster
    job_ids = [int(path.name) for path in (tmp_path / "cluster").rglob("*") if path.is_dir() and path.name.isdigit()]
    for job_id, status in cluster.states(job_ids).items():
        if status.state not in TERMINAL:
            cluster.cancel(job_id)


def launch(python: Path, checkout: Path, tmp_path: Path, *flags: str, **environment: str) -> str:
    done = subprocess.run(
        [str(python), str(checkout / LAUNCHER), *REQUIRED, *flags],
        env=os.environ
        | {"NEMORUN_HOME": str(tmp_path / "nemo-run"), "COLUMNS": "4000", "PYTHONDONTWRITEBYTECODE": "1"}
        | environment,
        cwd=checkout,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def script_of(dry_run: str) -> str:
    """The batch script that a dry run shows, without what rich prints beside it."""
    return "\n".join(
        line[:-20].strip() if re.search(r"\S+\.py:\d+$", line) else line.strip() for line in dry_run.splitlines()
    )


# --- the command line ------------------------------------------------------------------------------------------------


def test_the_parser_takes_every_flag_that_nightbridge_writes(checkout: Path) -> None:
    known = known_flags(checkout)

    missing = [flag.option for flag in FLAGS if flag.option and flag.option not in known]
    differing = {
        flag.field: (known[flag.option], choices_of(flag.field, HEAD))
        for flag in FLAGS
        if flag.field in CHOICES and sorted(known[flag.option] or ()) != sorted(choices_of(flag.field, HEAD) or ())
    }
    assert missing == []
    assert differing == {}


def test_help_and_mistakes_do_not_wait_for_nemo_run(checkout: Path) -> None:
    """This Python has no NeMo-Run: what needs it would fail."""
    command = [sys.executable, "-B", str(checkout / LAUNCHER)]

    helped = subprocess.run([*command, "--help"], capture_output=True, text=True)
    mistaken = subprocess.run([*command, *REQUIRED, "-c", "fp7"], capture_output=True, text=True)

    assert helped.returncode == 0
    assert "--model_recipe_name" in helped.stdout
    assert mistaken.returncode == 2
    assert "invalid choice: 'fp7'" in mistaken.stderr


@pytest.mark.launcher
def test_paths_that_nemo_run_would_spoil_are_refused(launcher_python: Path, checkout: Path, tmp_path: Path) -> None:
    """Without a container NeMo-Run replaces every `/nemo_run` in the script by the job's folder."""
    done = subprocess.run(
        [str(launcher_python), "-B", str(checkout / LAUNCHER), *REQUIRED, "--save_dir", f"{tmp_path}/nemo_run/x"],
        env=os.environ | {"NEMORUN_HOME": str(tmp_path / "nemo-run")},
        capture_output=True,
        text=True,
    )

    assert done.returncode == 1
    assert f"no path may contain /nemo_run: {tmp_path}/nemo_run/x" in done.stderr


# --- what is submitted -----------------------------------------------------------------------------------------------


@pytest.mark.launcher
def test_a_dry_run_shows_a_script_for_a_plain_slurm(launcher_python: Path, checkout: Path, tmp_path: Path) -> None:
    script = script_of(
        launch(
            launcher_python, checkout, tmp_path, "-ng", "5", "-t", "00:07:00", "-i", "none", "-wdj", "a-run-a1",
            "-E", "GREETING=good night; sleep well", "--packager", "none", "--dryrun",
        )
    )  # fmt: skip

    assert "#SBATCH --nodes=3" in script
    assert "#SBATCH --ntasks-per-node=2" in script
    assert "#SBATCH --time=00:07:00" in script
    assert "#SBATCH --job-name=tests-tests.a-run-a1" in script
    assert "export GREETING='good night; sleep well'" in script
    (srun,) = [line for line in script.splitlines() if line.startswith("srun --output")]
    assert "--mpi" not in srun
    assert "container" not in srun
    assert not list((tmp_path / "nemo-run").rglob("*.sh"))


@pytest.mark.launcher
def test_a_container_gets_the_options_that_containers_need(
    launcher_python: Path, checkout: Path, tmp_path: Path
) -> None:
    script = script_of(
        launch(
            launcher_python, checkout, tmp_path, "-i", "/images/nemo.sqsh", "-cm", "/data:/data", "--packager", "none",
            "--save_dir", str(tmp_path / "checkpoints"), "-cs=--label", "--dryrun",
        )
    )  # fmt: skip

    (srun,) = [line for line in script.splitlines() if line.startswith("srun --output")]
    assert "--container-image /images/nemo.sqsh" in srun
    assert "--label --mpi=pmix --no-container-mount-home --container-writable" in srun
    (mounts,) = re.findall(r"--container-mounts (\S+)", srun)
    assert {"/data:/data", f"{tmp_path}/checkpoints:{tmp_path}/checkpoints", f"{checkout}/src/megatron/bridge"} <= {
        mount if not mount.startswith(str(checkout)) else mount.split(":")[0] for mount in mounts.split(",")
    }


@pytest.mark.launcher
def test_a_submitted_job_trains_and_leaves_no_token_behind(
    launcher_python: Path, checkout: Path, cluster: LocalCluster, tmp_path: Path
) -> None:
    output = tmp_path / "output"

    said = launch(
        launcher_python, checkout, tmp_path, "-ms", "20", "-wdj", "a-run-a1", "--detach", "true", "--packager", "none",
        "-i", "none", "-hf", "hf_secret", "--wandb_key=wandb_secret", "-cb", "export MARK=made-it",
        "--additional_slurm_params", "comment=practice", "--save_dir", str(output / "checkpoints"),
        "--save_interval", "10", "--save_config_filepath", str(output / "configs/ConfigContainer.yaml"),
        "--pipeline_model_parallel_layout", escaped("Et*2|(t|)*2tL"),
        f"logger.tensorboard_dir={output / 'tb_logs'}", escaped("env_vars={A:(x)}"),
        **cluster.launch_environment(),
    )  # fmt: skip
    (job_id,) = {int(number) for number in re.findall(r"Job id: (\d+)", said)}
    state = wait_for_end(cluster, job_id)

    (log,) = (tmp_path / "nemo-run/experiments/a-run-a1").glob("a-run-a1_*/a-run-a1/log-*.out")
    reading = read_logs([log])
    assert state is JobState.COMPLETED, log.read_text()
    assert (reading.last_iteration, reading.training_done) == (20, True)
    assert [found.state for found in find_checkpoints(output / "checkpoints")] == [CheckpointState.COMPLETE] * 2
    assert list((output / "tb_logs").glob("events.out.tfevents.*"))
    config = (output / "configs/ConfigContainer.yaml").read_text()
    assert "pipeline_model_parallel_layout: Et*2|(t|)*2tL" in config
    assert "A:(x)" in config
    holders = [
        path for path in tmp_path.rglob("*") if path.is_file() and re.search(rb"(hf|wandb)_secret\b", path.read_bytes())
    ]
    assert holders == []
    status = ["git", "-C", str(checkout), "status", "--porcelain", "--ignored"]
    assert subprocess.run(status, capture_output=True, text=True).stdout == ""


@pytest.mark.launcher
def test_the_git_packager_ships_the_commit(
    launcher_python: Path, checkout: Path, cluster: LocalCluster, tmp_path: Path
) -> None:
    said = launch(launcher_python, checkout, tmp_path, "-ms", "2", "--packager", "git", **cluster.launch_environment())
    (job_id,) = {int(number) for number in re.findall(r"Job id: (\d+)", said)}

    assert wait_for_end(cluster, job_id) is JobState.COMPLETED
    (code,) = (tmp_path / "nemo-run/experiments/pretrain_llama_small_bf16_gpus2_h100").glob("*/*/code")
    assert (code / "src/megatron/bridge/behaviour.yaml").is_file()


def wait_for_end(cluster: LocalCluster, job_id: int) -> JobState:
    deadline = time.monotonic() + 60
    while (state := cluster.states([job_id])[job_id].state) not in TERMINAL:
        assert time.monotonic() < deadline, f"job {job_id} is still {state}"
        time.sleep(0.05)
    return state
