"""The real NeMo-Run on the embedded cluster: what it generates runs unchanged."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from nightbridge.models import JobState
from nightbridge.slurm.local import LocalCluster
from tests.nightbridge.embedded.local_cluster import local_cluster, wait_for_end

LAUNCHER = """
import os
import sys
import nemo_run as run

experiments = os.path.join(os.environ["NEMORUN_HOME"], "experiments")

executor = run.SlurmExecutor(
    account="practice", partition="batch", nodes=2, ntasks_per_node=2, time="00:05:00", exclusive=True, mem="0",
    tunnel=run.LocalTunnel(job_dir=experiments), packager=run.GitArchivePackager(), env_vars={"GREETING": "hello"},
)
with run.Experiment("greet", executor=executor) as experiment:
    experiment.add(run.Script(inline=sys.argv[1]), name="greet", tail_logs=False)
    experiment.run(detach=True)
"""

RANK = 'echo "$GREETING from rank $SLURM_PROCID on $SLURMD_NODENAME of $SLURM_NNODES in $(basename $PWD)"'


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalCluster]:
    monkeypatch.chdir(tmp_path)
    with local_cluster(tmp_path) as opened:
        yield opened


def launch(python: Path, cluster: LocalCluster, tmp_path: Path, inline: str) -> Path:
    """Launch a script with NeMo-Run, detached; return the job's folder."""
    (tmp_path / "launch.py").write_text(LAUNCHER)
    for words in ("init -q", "add launch.py", "-c user.name=me -c user.email=me@example.org commit -q -m first"):
        subprocess.run(["git", *words.split()], cwd=tmp_path, check=True)
    # Not "nemo_run": without a container NeMo-Run 0.11.1 replaces "/nemo_run" in every path of the script.
    home = {"NEMORUN_HOME": str(tmp_path / "home"), "COLUMNS": "400"}
    answer = subprocess.run(
        [str(python), "launch.py", inline],
        env=os.environ | cluster.launch_environment() | home,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert answer.returncode == 0, answer.stdout + answer.stderr
    return next((tmp_path / "home" / "experiments" / "greet").glob("greet_*")) / "greet"


@pytest.mark.launcher
def test_a_generated_script_runs_to_its_end_with_all_ranks_in_its_log(
    launcher_python: Path, cluster: LocalCluster, tmp_path: Path
) -> None:
    folder = launch(launcher_python, cluster, tmp_path, RANK)

    ended = wait_for_end(cluster, 1)

    assert (ended.state, ended.name, ended.nodes) == (JobState.COMPLETED, "practice-practice.greet", "node[1-2]")
    log = (folder / "log-practice-practice.greet_1_0.out").read_text()
    assert sorted(line for line in log.splitlines() if line.startswith("hello from")) == [
        "hello from rank 0 on node1 of 2 in code",
        "hello from rank 1 on node1 of 2 in code",
        "hello from rank 2 on node2 of 2 in code",
        "hello from rank 3 on node2 of 2 in code",
    ]
    batch_log = (folder / "sbatch_practice-practice.greet_1.out").read_text()
    assert "job exited with code 0" in batch_log
    assert "error" not in batch_log


@pytest.mark.launcher
def test_a_failing_rank_fails_the_job_and_ends_the_others(
    launcher_python: Path, cluster: LocalCluster, tmp_path: Path
) -> None:
    folder = launch(launcher_python, cluster, tmp_path, '[ "$SLURM_PROCID" = 2 ] && exit 7; sleep 600')

    ended = wait_for_end(cluster, 1)

    assert (ended.state, ended.exit_code) == (JobState.FAILED, 143)
    assert "task 2: Exited with exit code 7" in (folder / "sbatch_practice-practice.greet_1.out").read_text()
