"""srun of the embedded cluster, from batch scripts that really run. Exit codes are those of Slurm 22.05."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from nightbridge.slurm.local import LocalCluster
from tests.nightbridge.embedded.local_cluster import is_running, local_cluster, wait_for_end, write_script


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalCluster]:
    monkeypatch.chdir(tmp_path)
    with local_cluster(tmp_path) as opened:
        yield opened


def run(cluster: LocalCluster, tmp_path: Path, body: str, *options: str) -> str:
    """Run a batch script on two nodes with two tasks each; return its log."""
    options = ("--nodes=2", "--ntasks-per-node=2", "--output=log.txt", *options)
    job_id = cluster.submit("night-a1", write_script(tmp_path / "job.sh", body), options)
    wait_for_end(cluster, job_id)
    return (tmp_path / "log.txt").read_text()


def test_a_step_has_the_jobs_tasks_on_all_its_nodes(cluster: LocalCluster, tmp_path: Path) -> None:
    names = ("PROCID", "LOCALID", "NODEID", "STEP_ID", "NTASKS", "NNODES", "STEP_NUM_TASKS", "STEP_NODELIST")
    task = "echo " + " ".join(f"$SLURM_{name}" for name in names) + " $SLURMD_NODENAME"

    log = run(cluster, tmp_path, f"srun true\nsrun bash -c '{task}'")

    assert sorted(log.splitlines()) == [
        "0 0 0 1 4 2 4 node[1-2] node1",
        "1 1 0 1 4 2 4 node[1-2] node1",
        "2 0 1 1 4 2 4 node[1-2] node2",
        "3 1 1 1 4 2 4 node[1-2] node2",
    ]


@pytest.mark.parametrize(
    ("options", "places"),
    [
        ("--nodes=1 --ntasks=1 -w node2", ["0 node2"]),
        ("-N1 -n 2", ["0 node1", "1 node1"]),
        ("-n 3", ["0 node1", "1 node1", "2 node2"]),
        ("-n 1", ["0 node1"]),
        ("--ntasks-per-node=1", ["0 node1", "1 node2"]),
        ("--nodelist=node[1-2] --ntasks-per-node 1 --overlap --mpi=none --het-group=0", ["0 node1", "1 node2"]),
    ],
)
def test_options_choose_nodes_and_tasks(cluster: LocalCluster, tmp_path: Path, options: str, places: list[str]) -> None:
    log = run(cluster, tmp_path, f"srun {options} bash -c 'echo $SLURM_PROCID $SLURMD_NODENAME' 2> /dev/null")

    assert sorted(log.splitlines()) == places


def test_the_head_nodes_address_can_be_read_from_srun(cluster: LocalCluster, tmp_path: Path) -> None:
    body = 'ip=$(srun --nodes=1 --ntasks=1 -w node1 hostname --ip-address)\necho "<$ip>"'

    assert re.fullmatch(r"<[0-9a-f.: ]+>\n", run(cluster, tmp_path, body))


def test_all_tasks_write_to_one_log_and_no_line_is_torn(cluster: LocalCluster, tmp_path: Path) -> None:
    # Every task writes its lines in pieces, as an unbuffered Python does.
    task = 'for i in $(seq 20); do printf "rank $SLURM_PROCID "; sleep 0.01; printf "line $i of 20"; sleep 0.01; echo; done'

    run(cluster, tmp_path, f"srun --output 'step_%j_%x.out' bash -c '{task}'")

    lines = (tmp_path / "step_1_night-a1.out").read_text().splitlines()
    assert len(lines) == 80
    for rank in "0123":
        mine = [line for line in lines if line.startswith(f"rank {rank} ")]
        assert mine == [f"rank {rank} line {number} of 20" for number in range(1, 21)]


def test_output_and_errors_can_have_a_file_each(cluster: LocalCluster, tmp_path: Path) -> None:
    body = "srun -o 'out_%j.txt' -e errors.txt bash -c 'echo out; echo err >&2'"

    assert run(cluster, tmp_path, body) == ""
    assert (tmp_path / "out_1.txt").read_text() == "out\n" * 4
    assert (tmp_path / "errors.txt").read_text() == "err\n" * 4


def test_a_task_starts_in_the_requested_folder(cluster: LocalCluster, tmp_path: Path) -> None:
    (tmp_path / "code").mkdir()

    assert run(cluster, tmp_path, "srun -n1 -N1 --chdir code pwd") == f"{tmp_path}/code\n"


@pytest.mark.parametrize(
    ("command", "code"),
    [
        ("srun true", 0),
        ("srun bash -c 'exit $SLURM_PROCID'", 3),
        ("srun bash -c 'kill -9 $$'", 137),
        ("srun -n1 -N1 no-such-program", 2),
        ("srun --kill-on-bad-exit=1 bash -c '[ $SLURM_PROCID = 1 ] && exit 1; sleep 600'", 143),
        ("srun --wait=1 bash -c '[ $SLURM_PROCID = 1 ] && exit 0; sleep 600'", 143),
    ],
)
def test_the_exit_code_is_the_highest_of_the_tasks(
    cluster: LocalCluster, tmp_path: Path, command: str, code: int
) -> None:
    assert run(cluster, tmp_path, f"{command} 2> /dev/null\necho code $?") == f"code {code}\n"


def test_without_kill_on_bad_exit_the_others_keep_running(cluster: LocalCluster, tmp_path: Path) -> None:
    log = run(cluster, tmp_path, "srun bash -c '[ $SLURM_PROCID = 1 ] && exit 7; sleep 0.3; echo done'\necho code $?")

    *lines, last = log.splitlines()
    assert sorted(lines) == [*["done"] * 3, "srun: error: node1: task 1: Exited with exit code 7"]
    assert last == "code 7"


def test_an_ended_task_leaves_nothing_running_and_nothing_waiting(cluster: LocalCluster, tmp_path: Path) -> None:
    # The helper holds the task's output open; srun ends all the same, and the helper with it.
    log = run(cluster, tmp_path, f"srun -n1 -N1 bash -c 'sleep 600 & echo $! > {tmp_path}/helper'\necho after")

    assert log == "after\n"
    assert not is_running(int((tmp_path / "helper").read_text()))


def test_sigterm_reaches_the_tasks_which_may_use_the_grace(cluster: LocalCluster, tmp_path: Path) -> None:
    task = 'trap "echo saved $SLURM_PROCID; exit 0" TERM; echo up; while :; do sleep 0.05; done'
    body = f"srun --output step.txt bash -c '{task}'"
    options = ("--nodes=2", "--time=0:03")
    job_id = cluster.submit("night-a1", write_script(tmp_path / "job.sh", body), options)

    assert wait_for_end(cluster, job_id).state == "TIMEOUT"

    log = (tmp_path / "step.txt").read_text()
    assert "saved 0" in log
    assert "saved 1" in log
    assert f"*** STEP {job_id}.0 ON node1 CANCELLED AT " in log
    assert "DUE TO TIME LIMIT ***" in log


def test_a_killed_srun_takes_its_tasks_along(cluster: LocalCluster, tmp_path: Path) -> None:
    body = (
        f"srun -n1 -N1 bash -c 'echo $$ > {tmp_path}/task; exec sleep 600' &\nwhile [ ! -s task ]; do sleep 0.05; done"
    )

    run(
        cluster, tmp_path, f"{body}\nkill -9 $!; wait; sleep 0.2; kill -0 $(cat task) 2>/dev/null && echo alive > still"
    )

    assert not (tmp_path / "still").exists()


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("srun --container-image /img.sqsh --container-mounts /a:/b true", "--container-image is not possible here"),
        ("srun --container-image=/img.sqsh true", "no container runtime"),
        ("srun --multi-prog conf", "--multi-prog is not possible here"),
        ("srun --no-such-option true", "unrecognized option '--no-such-option'"),
        ("srun --nodes=5 true", "more nodes than the job has"),
        ("srun -w node9 true", "not in this job"),
        ("srun -N2 -w node1 true", "more nodes than"),
        ("srun --chdir /no/such true", "no such folder"),
        ("srun --signal=USR1@60 true", "no signal before the time limit"),
        ("srun --export=NONE true", "--export=NONE is not possible here"),
        ("srun", "no command to run"),
        ("env -u NIGHTBRIDGE_LOCAL_JOB srun true", "not inside a job"),
        ("srun -o missing/out.txt true", "cannot open output file"),
    ],
)
def test_what_it_cannot_do_is_refused_in_one_line(
    cluster: LocalCluster, tmp_path: Path, command: str, message: str
) -> None:
    lines = run(cluster, tmp_path, f"{command}\necho code $?").splitlines()

    assert len(lines) == 2
    assert lines[0].startswith("srun: error: ")
    assert message in lines[0]
    assert lines[1] == "code 1"


def test_steps_at_the_same_time_have_numbers_of_their_own(cluster: LocalCluster, tmp_path: Path) -> None:
    body = "for i in 1 2 3 4; do srun -n1 -N1 bash -c 'echo $SLURM_STEP_ID' & done; wait"

    numbers = run(cluster, tmp_path, body).split()

    assert sorted(numbers) == ["0", "1", "2", "3"]
