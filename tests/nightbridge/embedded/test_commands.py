"""Slurm's commands on the embedded cluster: what batch scripts and NeMo-Run get, and what is refused."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from nightbridge.embedded.sbatch import python_command
from nightbridge.slurm.local import LocalCluster
from tests.nightbridge.embedded.local_cluster import local_cluster, wait_for_end, wait_for_state, write_script


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalCluster]:
    monkeypatch.chdir(tmp_path)
    with local_cluster(tmp_path) as opened:
        yield opened


def command(cluster: LocalCluster, line: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | cluster.launch_environment() | variables
    return subprocess.run(line, shell=True, env=environment, capture_output=True, text=True, timeout=300, check=False)


def submit(cluster: LocalCluster, tmp_path: Path, body: str, name: str = "practice-a1.job") -> int:
    return cluster.submit(name, write_script(tmp_path / "job.sh", body), ("--account=practice", "--nodes=2"))


def test_sacct_prints_what_nemo_run_reads(cluster: LocalCluster, tmp_path: Path) -> None:
    job_id = submit(cluster, tmp_path, "exit 4")
    wait_for_end(cluster, job_id)

    assert command(cluster, f"sacct --parsable2 -j {job_id}").stdout == (
        "JobID|JobName|Partition|Account|AllocCPUS|State|ExitCode\n"
        f"{job_id}|practice-a1.job|local|practice|2|FAILED|4:0\n"
    )


def test_sacct_of_an_unknown_job_is_a_heading(cluster: LocalCluster, tmp_path: Path) -> None:
    answer = command(cluster, "sacct --parsable2 -j 99")

    assert (answer.returncode, len(answer.stdout.splitlines())) == (0, 1)


def test_squeue_shows_nemo_run_whether_a_job_waits(cluster: LocalCluster, tmp_path: Path) -> None:
    first, second, third = (submit(cluster, tmp_path, "sleep 600") for _ in range(3))
    wait_for_state(cluster, second, "RUNNING")
    question = "squeue --start --noheader -j {} -o '%i|%S|%T'"

    assert command(cluster, question.format(third)).stdout == f"{third}|N/A|PENDING\n"
    assert command(cluster, question.format(first)).stdout == ""
    assert command(cluster, question.format(99)).returncode == 1


def test_sbatch_submits_with_and_without_a_sentence(cluster: LocalCluster, tmp_path: Path) -> None:
    write_script(tmp_path / "job.sh", 'echo "$SLURM_JOB_NAME"')

    short = command(cluster, "sbatch --requeue --parsable job.sh")
    long = command(cluster, "sbatch -J named job.sh")

    assert short.stdout == "1\n"
    assert long.stdout == "Submitted batch job 2\n"
    wait_for_end(cluster, 1)
    assert (tmp_path / "slurm-1.out").read_text() == "job.sh\n"
    assert wait_for_end(cluster, 2).name == "named"


@pytest.mark.parametrize(
    "line",
    [
        "sbatch",
        "sbatch missing.sh",
        "sbatch --wrap=true",
        "sbatch empty.sh",
        "sbatch --hold job.sh",
        "sbatch job.sh word",
    ],
)
def test_sbatch_refuses_in_one_line(cluster: LocalCluster, tmp_path: Path, line: str) -> None:
    (tmp_path / "empty.sh").touch()

    answer = command(cluster, line)

    assert (answer.returncode, answer.stdout) == (1, "")
    assert answer.stderr.startswith("sbatch: error: ")
    assert len(answer.stderr.splitlines()) == 1


def test_scontrol_expands_the_nodes_of_a_job(cluster: LocalCluster) -> None:
    assert command(cluster, "scontrol show hostnames node[1-3]").stdout.split() == ["node1", "node2", "node3"]
    assert command(cluster, "scontrol show hostnames", SLURM_JOB_NODELIST="node[1-2]").stdout == "node1\nnode2\n"


@pytest.mark.parametrize(
    "line",
    [
        "squeue",
        "squeue --me",
        "sacct --parsable2 -j 1 --format=State",
        "scontrol show job 1",
        "scontrol requeue 1",
        "scancel 1",
        "sinfo",
        "salloc -N1",
    ],
)
def test_what_only_a_person_would_call_is_refused_with_what_to_do_instead(cluster: LocalCluster, line: str) -> None:
    answer = command(cluster, line)

    assert (answer.returncode, answer.stdout) == (1, "")
    assert answer.stderr.startswith(f"{line.split()[0]}: error: ")
    assert "nightbridge status" in answer.stderr


def test_commands_do_not_care_for_the_jobs_python(cluster: LocalCluster, tmp_path: Path) -> None:
    (tmp_path / "json.py").write_text("raise SystemExit('the wrong json')")

    answer = command(cluster, "scontrol show hostnames node1", PYTHONPATH=str(tmp_path), PYTHONHOME="/nowhere")

    assert (answer.returncode, answer.stdout, answer.stderr) == (0, "node1\n", "")


@pytest.mark.parametrize("module", ["commands", "srun", "runner", "sbatch"])
def test_commands_start_without_third_party_packages(module: str) -> None:
    # srun starts many times a night; pydantic alone would take longer than all the rest.
    words = python_command(f"nightbridge.embedded.{module}", [])
    imported = words[4].split(";")[1] + f"; import nightbridge.embedded.{module}; print(*sys.modules)"

    answer = subprocess.run(
        [sys.executable, "-I", "-S", "-c", f"import sys;{imported}"], capture_output=True, text=True, check=True
    )

    assert f"nightbridge.embedded.{module}" in answer.stdout.split()
    assert not {"pydantic", "nightbridge.models", "subprocess"} & set(answer.stdout.split()) - (
        {"subprocess"} if module in {"sbatch"} else set()
    )
