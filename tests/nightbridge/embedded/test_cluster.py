"""The embedded cluster as a `Cluster`: batch scripts on this machine, with real processes."""

import json
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from nightbridge.embedded.jobs import job_dir, read_record
from nightbridge.errors import InvalidInput, LaunchRefused, PermanentError
from nightbridge.models import ClusterSettings, JobState
from nightbridge.slurm.factory import open_cluster
from nightbridge.slurm.local import LocalCluster
from nightbridge.slurm.protocol import Cluster
from nightbridge.slurm.states import TERMINAL
from tests.nightbridge.embedded.local_cluster import (
    is_running,
    local_cluster,
    status,
    wait_for_end,
    wait_for_state,
    wait_for_text,
    write_script,
)
from tests.waiting import wait_until


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalCluster]:
    monkeypatch.chdir(tmp_path)
    with local_cluster(tmp_path) as opened:
        yield opened


def run(cluster: LocalCluster, tmp_path: Path, body: str, *options: str, name: str = "night-a1") -> int:
    return cluster.submit(name, write_script(tmp_path / "job.sh", body), options)


def test_the_settings_open_it(tmp_path: Path) -> None:
    opened: Cluster = open_cluster(ClusterSettings(kind="local"), tmp_path)

    assert isinstance(opened, LocalCluster)
    assert opened.root == tmp_path / "cluster"
    assert opened.accounting_horizon == 0
    assert not opened.limits().has_pyxis
    assert not opened.find("anything").jobs
    assert list(tmp_path.iterdir()) == []


def test_a_job_runs_to_its_end_and_has_its_times(cluster: LocalCluster, tmp_path: Path) -> None:
    job_id = run(cluster, tmp_path, "echo done")

    ended = wait_for_end(cluster, job_id)

    assert (ended.state, ended.exit_code, ended.signal) == (JobState.COMPLETED, 0, 0)
    assert ended.name == "night-a1"
    assert ended.nodes == "node1"
    assert ended.submitted_at is not None
    assert ended.started_at is not None
    assert ended.ended_at is not None
    assert ended.submitted_at <= ended.started_at <= ended.ended_at
    assert (tmp_path / f"slurm-{job_id}.out").read_text() == "done\n"


def test_an_exit_code_fails_the_job(cluster: LocalCluster, tmp_path: Path) -> None:
    ended = wait_for_end(cluster, run(cluster, tmp_path, "exit 3"))

    assert (ended.state, ended.exit_code, ended.signal) == (JobState.FAILED, 3, 0)


def test_a_signal_fails_the_job(cluster: LocalCluster, tmp_path: Path) -> None:
    ended = wait_for_end(cluster, run(cluster, tmp_path, "kill -SEGV $$"))

    assert (ended.state, ended.exit_code, ended.signal) == (JobState.FAILED, 0, int(signal.SIGSEGV))


def test_ids_continue_after_a_restart_and_are_found_by_name(cluster: LocalCluster, tmp_path: Path) -> None:
    first = run(cluster, tmp_path, "true", name="one")
    second = run(cluster, tmp_path, "true", name="two")
    opened_again = LocalCluster(cluster.settings, cluster.root)

    third = run(opened_again, tmp_path, "true", name="one")

    assert [first, second, third] == [1, 2, 3]
    found = opened_again.find("one")
    assert found.complete
    assert [job.job_id for job in found.jobs] == [1, 3]
    assert opened_again.find("on").jobs == ()


def test_what_a_newer_release_says_of_a_job_is_read_as_far_as_it_is_known(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    ended = wait_for_end(cluster, run(cluster, tmp_path, "exit 3"))
    folder = job_dir(cluster.root, ended.job_id)
    for record in (*(folder / f"{name}.json" for name in ("job", "runner", "end")), cluster.root / "cluster.json"):
        record.write_text(json.dumps({**(read_record(record) or {}), "of_the_future": [1]}))

    assert cluster.states([ended.job_id]) == {ended.job_id: ended}
    assert wait_for_end(cluster, run(cluster, tmp_path, "true")).state is JobState.COMPLETED


def test_an_unknown_job_is_not_in_the_answer(cluster: LocalCluster, tmp_path: Path) -> None:
    job_id = run(cluster, tmp_path, "true")

    assert set(cluster.states([job_id, 77])) == {job_id}
    with pytest.raises(PermanentError, match="no such job"):
        cluster.cancel(77)


def test_options_of_the_command_line_win_over_the_scripts_own(cluster: LocalCluster, tmp_path: Path) -> None:
    body = "#SBATCH --job-name=theirs --output=theirs.out\n#SBATCH --nodes=1 --account=nobody --mem=0 --exclusive\necho"

    job_id = run(cluster, tmp_path, body, "--output=ours-%x-%j.out", "-N", "3", "--no-requeue")

    ended = wait_for_end(cluster, job_id)
    assert ended.name == "night-a1"
    assert ended.nodes == "node[1-3]"
    assert (tmp_path / f"ours-night-a1-{job_id}.out").exists()
    assert not (tmp_path / "theirs.out").exists()


def test_output_and_error_go_to_their_files_and_append_on_request(cluster: LocalCluster, tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "out.txt").write_text("before\n")
    (tmp_path / "logs" / "err.txt").write_text("before\n")
    options = ("--chdir=logs", "--output=out.txt", "--error=err.txt")

    wait_for_end(cluster, run(cluster, tmp_path, "echo out; echo err >&2", *options, "--open-mode=append"))
    assert (tmp_path / "logs" / "out.txt").read_text() == "before\nout\n"
    assert (tmp_path / "logs" / "err.txt").read_text() == "before\nerr\n"

    wait_for_end(cluster, run(cluster, tmp_path, "pwd; echo err >&2", *options))
    assert (tmp_path / "logs" / "out.txt").read_text() == f"{tmp_path}/logs\n"
    assert (tmp_path / "logs" / "err.txt").read_text() == "err\n"


def test_an_output_file_that_cannot_be_opened_fails_the_job(cluster: LocalCluster, tmp_path: Path) -> None:
    ended = wait_for_end(cluster, run(cluster, tmp_path, "true", "--output=missing/out.txt"))

    assert ended.state is JobState.FAILED
    assert "cannot open" in ended.reason


def test_a_job_has_slurms_variables_and_the_submitters_own(
    cluster: LocalCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_RESTART_COUNT", "7")
    monkeypatch.setenv("SBATCH_ACCOUNT", "other")
    monkeypatch.setenv("TOKEN_OF_MINE", "hidden-value-4711")

    job_id = run(cluster, tmp_path, "env", "--nodes=2", "--ntasks-per-node=4", "--partition=fast")

    wait_for_end(cluster, job_id)
    lines = (tmp_path / f"slurm-{job_id}.out").read_text().splitlines()
    seen = dict(line.split("=", 1) for line in lines if "=" in line)
    assert {name: seen.get(name) for name in sorted(EXPECTED)} == {
        name: value.format(job_id=job_id, folder=tmp_path) for name, value in sorted(EXPECTED.items())
    }
    assert "SLURM_RESTART_COUNT" not in seen
    assert "SBATCH_ACCOUNT" not in seen
    assert seen["TOKEN_OF_MINE"] == "hidden-value-4711"
    assert seen["PATH"].startswith(str(cluster.root / "bin"))


EXPECTED = {
    "SLURM_JOB_ID": "{job_id}",
    "SLURM_JOBID": "{job_id}",
    "SLURM_JOB_NAME": "night-a1",
    "SLURM_JOB_NODELIST": "node[1-2]",
    "SLURM_NODELIST": "node[1-2]",
    "SLURM_NNODES": "2",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_NTASKS": "8",
    "SLURM_NTASKS_PER_NODE": "4",
    "SLURM_TASKS_PER_NODE": "4(x2)",
    "SLURM_SUBMIT_DIR": "{folder}",
    "SLURM_CLUSTER_NAME": "here",
    "SLURM_JOB_PARTITION": "fast",
}


def test_the_environment_is_never_written_down(
    cluster: LocalCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOKEN_OF_MINE", "hidden-value-4711")

    wait_for_end(cluster, run(cluster, tmp_path, "srun -n2 true; scontrol show hostnames"))

    files = [path for path in cluster.root.rglob("*") if path.is_file()]
    assert len(files) > 5
    assert [path for path in files if b"hidden-value-4711" in path.read_bytes()] == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("echo no shebang\n", "does not look like a batch script"),
        ("", "does not look like a batch script"),
        ("#!/bin/bash\n#SBATCH --export=NONE\n", "--export=NONE is not possible here"),
        ("#!/bin/bash\n#SBATCH --nodes=many\n", "--nodes"),
        ("#!/bin/bash\n#SBATCH --time=soon\n", "--time"),
        ("#!/bin/bash\n#SBATCH --array=1-3\n", "no job arrays"),
        ("#!/bin/bash\n#SBATCH --signal=USR1@60\n", "no signal before the time limit"),
        ("#!/bin/bash\n#SBATCH --dependency=singleton\n", "job dependency problem"),
        ("#!/bin/bash\n#SBATCH --frobnicate\n", "unrecognized option '--frobnicate'"),
        ("#!/bin/bash\n#SBATCH hetjob\n", "hetjob"),
        ("#!/bin/bash\n#SBATCH --dependency=afterok:99\n", "no such job"),
    ],
)
def test_what_is_no_batch_script_for_it_is_refused_and_leaves_no_job(
    cluster: LocalCluster, tmp_path: Path, text: str, message: str
) -> None:
    script = tmp_path / "bad.sh"
    script.write_bytes(text.encode())

    with pytest.raises((LaunchRefused, InvalidInput), match=message):
        cluster.submit("bad", script, ())
    assert cluster.find("bad").jobs == ()


def test_a_folder_that_cannot_be_made_is_a_permanent_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    cluster = LocalCluster(ClusterSettings(), tmp_path / "file" / "cluster")

    with pytest.raises(PermanentError, match="the embedded cluster's folder cannot be written"):
        cluster.submit("night", write_script(tmp_path / "job.sh", "true"), ())


def test_an_interpreter_that_is_missing_fails_the_job(cluster: LocalCluster, tmp_path: Path) -> None:
    script = tmp_path / "job.sh"
    script.write_text("#!/no/such/shell\n")
    job_id = cluster.submit("night-a1", script, ())

    assert wait_for_end(cluster, job_id).exit_code == 2
    assert "/no/such/shell: No such file" in (tmp_path / f"slurm-{job_id}.out").read_text()


def test_submitters_at_the_same_time_get_ids_of_their_own(cluster: LocalCluster, tmp_path: Path) -> None:
    script = write_script(tmp_path / "job.sh", "true")

    with ThreadPoolExecutor(8) as pool:
        ids = list(pool.map(lambda number: cluster.submit(f"night-{number}", script, ()), range(12)))

    assert sorted(ids) == list(range(1, 13))
    assert [cluster.find(f"night-{number}").jobs[0].job_id for number in range(12)] == ids
    assert {wait_for_end(cluster, job_id).state for job_id in ids} == {JobState.COMPLETED}


# --- slots and dependencies ------------------------------------------------------------------------------------------


def test_more_jobs_than_slots_wait(cluster: LocalCluster, tmp_path: Path) -> None:
    order, gate = tmp_path / "order", tmp_path / "gate"
    body = f"echo + >> {order}; until [ -e {gate} ]; do sleep 0.05; done; echo - >> {order}"
    ids = [run(cluster, tmp_path, body) for _ in range(6)]
    wait_until(lambda: order.exists() and order.read_text().count("+") >= 2, "two running jobs")
    waiting = [status(cluster, job_id) for job_id in ids[2:]]
    gate.touch()

    ended = [wait_for_end(cluster, job_id) for job_id in ids]

    assert {(job.state, job.reason, job.nodes) for job in waiting} == {(JobState.PENDING, "Resources", "")}
    assert {job.state for job in ended} == {JobState.COMPLETED}
    assert busiest(order.read_text().splitlines()) == 2


def busiest(events: list[str]) -> int:
    running, most = 0, 0
    for event in events:
        running += 1 if event.startswith("+") else -1
        most = max(most, running)
    return most


def test_jobs_start_in_their_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with local_cluster(tmp_path, slots=1) as narrow:
        ids = [run(narrow, tmp_path, f"echo $SLURM_JOB_ID >> {tmp_path}/order; sleep 0.1") for _ in range(5)]
        for job_id in ids:
            wait_for_end(narrow, job_id)

    assert (tmp_path / "order").read_text().split() == [str(job_id) for job_id in ids]


def test_the_farther_back_a_job_waits_the_less_its_runner_works(tmp_path: Path) -> None:
    script = write_script(tmp_path / "job.sh", "sleep 600")
    with local_cluster(tmp_path, slots=1) as cluster:
        ids = [cluster.submit("night-a1", script, ["--output=/dev/null"]) for _ in range(12)]
        runners = [read_record(job_dir(cluster.root, ids[place]) / "runner.json") or {} for place in (1, -1)]

        def reads() -> list[int]:
            # `syscr` (proc(5)). A look at the queue is more than a hundred reads; else a waiting runner reads nothing.
            return [int(Path(f"/proc/{runner['pid']}/io").read_text().split()[5]) for runner in runners]

        before = reads()
        wait_until(lambda: reads()[0] - before[0] > 1000, "some looks at the queue")

        used = [now - then for now, then in zip(reads(), before, strict=True)]
        assert used[1] < used[0] / 2


def test_a_dependency_is_waited_for_and_holds_up_no_other_job(cluster: LocalCluster, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    first = run(cluster, tmp_path, f"while [ ! -e {gate} ]; do sleep 0.05; done; exit 1")
    after_any = run(cluster, tmp_path, "true", f"--dependency=afterany:{first}")
    after_ok = run(cluster, tmp_path, "true", f"--dependency=afterok:{first}")

    assert wait_for_end(cluster, run(cluster, tmp_path, "true")).state is JobState.COMPLETED
    assert status(cluster, after_any).reason == "Dependency"
    gate.touch()

    assert wait_for_end(cluster, after_any).state is JobState.COMPLETED
    assert status(cluster, after_ok).state is JobState.PENDING
    assert status(cluster, after_ok).reason == "DependencyNeverSatisfied"


# --- being ended -----------------------------------------------------------------------------------------------------


def test_the_time_limit_ends_a_job_and_is_named_in_its_log(cluster: LocalCluster, tmp_path: Path) -> None:
    job_id = run(cluster, tmp_path, "sleep 600", "--time=0:01")

    ended = wait_for_end(cluster, job_id)

    assert (ended.state, ended.signal) == (JobState.TIMEOUT, int(signal.SIGTERM))
    assert f"*** JOB {job_id} ON node1 CANCELLED AT " in (tmp_path / f"slurm-{job_id}.out").read_text()
    assert "DUE TO TIME LIMIT ***" in (tmp_path / f"slurm-{job_id}.out").read_text()


def test_a_job_that_ignores_sigterm_is_killed_after_the_grace(cluster: LocalCluster, tmp_path: Path) -> None:
    job_id = run(cluster, tmp_path, "trap '' TERM; echo up; while :; do sleep 0.1; done")
    wait_for_text(tmp_path / f"slurm-{job_id}.out", "up")

    cluster.cancel(job_id)

    wait_for_state(cluster, job_id, "COMPLETING")
    ended = wait_for_end(cluster, job_id)
    assert (ended.state, ended.signal) == (JobState.CANCELLED, int(signal.SIGKILL))


def test_a_job_may_use_the_grace_to_clean_up(cluster: LocalCluster, tmp_path: Path) -> None:
    job_id = run(cluster, tmp_path, "trap 'echo saved; exit 0' TERM; echo up; while :; do sleep 0.1; done")
    wait_for_text(tmp_path / f"slurm-{job_id}.out", "up")

    cluster.cancel(job_id)

    assert wait_for_end(cluster, job_id).state is JobState.CANCELLED
    assert "saved" in (tmp_path / f"slurm-{job_id}.out").read_text()


def test_a_cancel_ends_the_whole_tree_even_what_left_the_session(cluster: LocalCluster, tmp_path: Path) -> None:
    # A grandchild in a session of its own, orphaned, deaf to SIGTERM and without the job's environment.
    orphan = f'trap "" TERM; echo $$ > {tmp_path}/orphan; exec env -i sleep 600'
    body = f"(setsid bash -c '{orphan}' &)\nsleep 600 & echo $! > {tmp_path}/child\nwait"
    job_id = run(cluster, tmp_path, body)
    pids = [int(wait_for_text(tmp_path / name)) for name in ("orphan", "child")]

    cluster.cancel(job_id)
    cluster.cancel(job_id)

    ended = wait_for_end(cluster, job_id)
    assert ended.state is JobState.CANCELLED
    assert ended.cancelled_by
    assert [pid for pid in pids if is_running(pid)] == []
    cluster.cancel(job_id)
    assert status(cluster, job_id) == ended


def test_what_a_script_leaves_running_ends_with_it(cluster: LocalCluster, tmp_path: Path) -> None:
    job_id = run(cluster, tmp_path, f"setsid sleep 600 & echo $! > {tmp_path}/left; exit 0")

    assert wait_for_end(cluster, job_id).state is JobState.COMPLETED
    assert not is_running(int((tmp_path / "left").read_text()))


def test_a_waiting_job_can_be_cancelled(cluster: LocalCluster, tmp_path: Path) -> None:
    running = [run(cluster, tmp_path, "sleep 600") for _ in range(2)]
    job_id = run(cluster, tmp_path, "echo never")

    cluster.cancel(job_id)

    ended = wait_for_end(cluster, job_id)
    assert (ended.state, ended.started_at, ended.exit_code) == (JobState.CANCELLED, None, None)
    assert not (tmp_path / f"slurm-{job_id}.out").exists()
    assert {status(cluster, other).state for other in running} == {JobState.RUNNING}


def test_a_job_that_submits_another_does_not_take_it_along(cluster: LocalCluster, tmp_path: Path) -> None:
    write_script(tmp_path / "next.sh", "sleep 0.5; echo $SLURM_JOB_ID")
    job_id = run(cluster, tmp_path, "sbatch --parsable --job-name=next next.sh")

    wait_for_end(cluster, job_id)

    inner = cluster.find("next").jobs[0].job_id
    assert (tmp_path / f"slurm-{job_id}.out").read_text() == f"{inner}\n"
    assert wait_for_end(cluster, inner).state is JobState.COMPLETED
    assert (tmp_path / f"slurm-{inner}.out").read_text() == f"{inner}\n"


def test_a_removed_folder_ends_the_job(cluster: LocalCluster, tmp_path: Path) -> None:
    job_id = run(cluster, tmp_path, f"echo $$ > {tmp_path}/pid; sleep 600")
    pid = int(wait_for_text(tmp_path / "pid"))

    (cluster.root / "jobs" / str(job_id)).rename(tmp_path / "away")

    wait_until(lambda: not is_running(pid), "the job's end")
    assert cluster.states([job_id]) == {}


def test_many_questions_at_once_agree(cluster: LocalCluster, tmp_path: Path) -> None:
    ids = [run(cluster, tmp_path, "true") for _ in range(4)]
    seen: dict[int, list[JobState]] = {job_id: [] for job_id in ids}
    while any(history[-1:] == [] or history[-1] not in TERMINAL for history in seen.values()):
        for job_id, answer in cluster.states(ids).items():
            seen[job_id].append(answer.state)
        time.sleep(0.005)

    order = [JobState.PENDING, JobState.RUNNING, JobState.COMPLETING, JobState.COMPLETED]
    for history in seen.values():
        assert [order.index(state) for state in history] == sorted(order.index(state) for state in history)
