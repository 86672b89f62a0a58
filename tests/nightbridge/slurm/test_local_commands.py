"""Slurm's commands on the embedded cluster: what NeMo-Run, our own command-line client, and people get."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from nightbridge.models import ClusterSettings, JobState
from nightbridge.slurm.command_line import CommandLineCluster
from nightbridge.slurm.local import LocalCluster
from nightbridge.slurm.local_shims import python_command
from tests.nightbridge.slurm.local_cluster import (
    local_cluster,
    status,
    wait_for_end,
    wait_for_state,
    wait_until,
    write_script,
)


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


def test_squeue_tells_nemo_run_whether_a_job_waits(cluster: LocalCluster, tmp_path: Path) -> None:
    first, second, third = (submit(cluster, tmp_path, "sleep 600") for _ in range(3))
    wait_for_state(cluster, second, "RUNNING")
    question = "squeue --start --noheader -j {} -o '%i|%S|%T'"

    assert command(cluster, question.format(third)).stdout == f"{third}|N/A|PENDING\n"
    assert command(cluster, question.format(first)).stdout == ""


def test_squeue_lists_live_jobs_for_people(cluster: LocalCluster, tmp_path: Path) -> None:
    wait_for_end(cluster, submit(cluster, tmp_path, "true", name="past"))
    job_id = submit(cluster, tmp_path, "sleep 600", name="present")
    wait_for_state(cluster, job_id, "RUNNING")

    lines = command(cluster, "squeue").stdout.splitlines()

    assert lines[0].split() == ["JOBID", "PARTITION", "NAME", "USER", "ST", "TIME", "NODES", "NODELIST(REASON)"]
    assert [line.split()[0] for line in lines[1:]] == [str(job_id)]
    assert command(cluster, "squeue -h -n past -o %i").stdout == ""
    assert command(cluster, "squeue -h -t all -n past -o '%i %t'").stdout == "1 CD\n"
    assert command(cluster, "squeue -j 99").returncode == 1


def test_scancel_ends_jobs_by_number_and_by_name(cluster: LocalCluster, tmp_path: Path) -> None:
    one = submit(cluster, tmp_path, "sleep 600", name="one")
    two = submit(cluster, tmp_path, "sleep 600", name="two")

    assert command(cluster, f"scancel {one}").returncode == 0
    assert command(cluster, "scancel --name two").returncode == 0
    unknown = command(cluster, "scancel 99")

    assert wait_for_end(cluster, one).state is JobState.CANCELLED
    assert wait_for_end(cluster, two).state is JobState.CANCELLED
    # The same as Slurm 22.05's: no proof of anything.
    assert unknown.returncode == 0
    assert "Invalid job id" in unknown.stderr
    assert command(cluster, "scancel").returncode == 1


def test_sbatch_submits_with_and_without_a_sentence(cluster: LocalCluster, tmp_path: Path) -> None:
    write_script(tmp_path / "job.sh", 'echo "$SLURM_JOB_NAME: $1 $2"')

    short = command(cluster, "sbatch --requeue --parsable job.sh one 'two words'")
    long = command(cluster, "sbatch -J named job.sh")

    assert short.stdout == "1\n"
    assert long.stdout == "Submitted batch job 2\n"
    wait_for_end(cluster, 1)
    assert (tmp_path / "slurm-1.out").read_text() == "job.sh: one two words\n"
    assert wait_for_end(cluster, 2).name == "named"


@pytest.mark.parametrize("line", ["sbatch", "sbatch missing.sh", "sbatch --wrap=true", "sbatch empty.sh"])
def test_sbatch_refuses_in_one_line(cluster: LocalCluster, tmp_path: Path, line: str) -> None:
    (tmp_path / "empty.sh").touch()

    answer = command(cluster, line)

    assert (answer.returncode, answer.stdout) == (1, "")
    assert answer.stderr.startswith("sbatch: error: ")
    assert len(answer.stderr.splitlines()) == 1


def test_scontrol_shows_host_names_and_jobs(cluster: LocalCluster, tmp_path: Path) -> None:
    job_id = submit(cluster, tmp_path, "sleep 600")

    assert command(cluster, "scontrol show hostnames node[1-3,5]").stdout.split() == [
        "node1",
        "node2",
        "node3",
        "node5",
    ]
    assert command(cluster, "scontrol show hostnames=a[1-2]").stdout.split() == ["a1", "a2"]
    assert command(cluster, "scontrol show hostnames", SLURM_JOB_NODELIST="node[1-2]").stdout == "node1\nnode2\n"
    assert f"JobId={job_id} JobName=practice-a1.job JobState=" in command(cluster, f"scontrol show job {job_id}").stdout
    assert command(cluster, "scontrol show job 99").returncode == 1


def test_a_requeue_is_refused_with_what_to_do_instead(cluster: LocalCluster) -> None:
    answer = command(cluster, "scontrol requeue 1")

    assert answer.returncode == 1
    assert "submit another attempt" in answer.stderr


def test_sinfo_shows_one_partition(cluster: LocalCluster) -> None:
    assert command(cluster, "sinfo").stdout == (
        "PARTITION AVAIL TIMELIMIT NODES STATE NODELIST\nlocal* up infinite 2 idle node[1-2]\n"
    )


def test_our_own_command_line_client_works_on_it_as_on_slurm(
    cluster: LocalCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in cluster.launch_environment().items():
        monkeypatch.setenv(name, value)
    client = CommandLineCluster(ClusterSettings(kind="slurm", bin_dir=cluster.root / "bin"))

    failed = client.submit("one-a1", write_script(tmp_path / "one.sh", "exit 3"), ())
    cancelled = client.submit("two-a1", write_script(tmp_path / "two.sh", "sleep 600"), ("--nodes=2",))
    wait_until("its end", lambda: client.states([failed])[failed].state is JobState.FAILED)
    client.cancel(cancelled)
    wait_until("its end", lambda: client.states([cancelled])[cancelled].state is JobState.CANCELLED)

    found = client.find("one-a1")
    assert found.complete
    assert [job.job_id for job in found.jobs] == [failed]
    for job_id in (failed, cancelled):
        theirs, ours = client.states([job_id])[job_id], status(cluster, job_id)
        assert (theirs.name, theirs.exit_code, theirs.nodes) == (ours.name, ours.exit_code, ours.nodes)
        assert theirs.ended_at is not None
        assert ours.ended_at is not None
        assert abs((theirs.ended_at - ours.ended_at).total_seconds()) <= 1
    assert client.limits().partitions == ("local",)
    assert not client.limits().has_pyxis


def test_commands_without_a_cluster_say_what_is_missing(cluster: LocalCluster) -> None:
    answer = command(cluster, "squeue", NIGHTBRIDGE_LOCAL_CLUSTER="")

    assert answer.returncode == 1
    assert "NIGHTBRIDGE_LOCAL_CLUSTER" in answer.stderr


def test_commands_do_not_care_for_the_jobs_python(cluster: LocalCluster, tmp_path: Path) -> None:
    (tmp_path / "json.py").write_text("raise SystemExit('the wrong json')")

    answer = command(cluster, "squeue -h", PYTHONPATH=str(tmp_path), PYTHONHOME="/nowhere")

    assert (answer.returncode, answer.stderr) == (0, "")


@pytest.mark.parametrize("module", ["local_commands", "local_srun", "local_runner", "local_submit", "local_listings"])
def test_commands_start_without_third_party_packages(module: str) -> None:
    # srun starts many times a night; pydantic alone would take longer than all the rest.
    words = python_command(f"nightbridge.slurm.{module}", [])
    imported = words[4].split(";")[1] + f"; import nightbridge.slurm.{module}; print(*sys.modules)"

    answer = subprocess.run(
        [sys.executable, "-I", "-S", "-c", f"import sys;{imported}"], capture_output=True, text=True, check=True
    )

    assert f"nightbridge.slurm.{module}" in answer.stdout.split()
    assert not {"pydantic", "nightbridge.models", "subprocess"} & set(answer.stdout.split()) - (
        {"subprocess"} if module in {"local_submit"} else set()
    )
