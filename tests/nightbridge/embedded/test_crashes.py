"""The embedded cluster when processes die without a word: submitters and runners, at every moment."""

import errno
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nightbridge.embedded.jobs import JobEnd, job_dir, write_record
from nightbridge.embedded.process_tree import descendants, identify, is_gone
from nightbridge.files import write_atomically
from nightbridge.models import JobState
from nightbridge.slurm.local import LocalCluster
from tests.conftest import SEEDS
from tests.nightbridge.embedded.local_cluster import (
    is_running,
    local_cluster,
    processes_of,
    status,
    wait_for_end,
    wait_for_text,
    write_script,
)
from tests.waiting import wait_until

SUBMITTER = """
import sys
from pathlib import Path
from nightbridge.models import ClusterSettings
from nightbridge.embedded import sbatch
from nightbridge.slurm.local import LocalCluster
import os, signal

def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)

{fault}
cluster = LocalCluster(ClusterSettings(name="here", slots=2), Path(sys.argv[1]), kill_wait=1.0)
print("now", flush=True)
print(cluster.submit(sys.argv[2], Path(sys.argv[3]), ()), flush=True)
{after}
"""


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalCluster]:
    monkeypatch.chdir(tmp_path)
    with local_cluster(tmp_path) as opened:
        yield opened


def start_submitter(
    cluster: LocalCluster, name: str, script: Path, *, fault: str = "", after: str = ""
) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", SUBMITTER.format(fault=fault, after=after), str(cluster.root), name, str(script)],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def runner_pid(cluster: LocalCluster, job_id: int) -> int:
    return int(json.loads((job_dir(cluster.root, job_id) / "runner.json").read_text())["pid"])


# --- the submitter dies ----------------------------------------------------------------------------------------------


def test_a_job_outlives_the_process_that_submitted_it(cluster: LocalCluster, tmp_path: Path) -> None:
    script = write_script(tmp_path / "job.sh", f"while [ ! -e {tmp_path}/go ]; do sleep 0.05; done; echo alive")
    submitter = start_submitter(cluster, "night-a1", script, after="import time; time.sleep(600)")
    assert submitter.stdout is not None
    assert submitter.stdout.readline() == "now\n"
    job_id = int(submitter.stdout.readline())

    os.killpg(submitter.pid, signal.SIGKILL)
    submitter.communicate()
    (tmp_path / "go").touch()

    assert wait_for_end(cluster, job_id).state is JobState.COMPLETED
    assert (tmp_path / f"slurm-{job_id}.out").read_text() == "alive\n"


@pytest.mark.parametrize(
    ("fault", "jobs"),
    [
        ("sbatch.subprocess.Popen = die", 0),  # the folder is there, no runner
        ("sbatch._wait_until_ready = die", 0),  # the runner is starting
        ("sbatch._claim_id = die", 0),  # the runner waits to be registered
        ("sbatch.flush_folder = lambda folder: folder.name == 'jobs' and die()", 1),  # registered, not told
    ],
)
def test_a_submitter_that_dies_leaves_no_job_or_one_that_runs(
    cluster: LocalCluster, tmp_path: Path, fault: str, jobs: int
) -> None:
    script = write_script(tmp_path / "job.sh", f"echo ran >> {tmp_path}/ran")

    start_submitter(cluster, "night-a1", script, fault=fault).communicate()

    found = cluster.find("night-a1")
    assert found.complete
    assert len(found.jobs) == jobs
    for job in found.jobs:
        assert wait_for_end(cluster, job.job_id).state is JobState.COMPLETED
    wait_until(lambda: not processes_of(cluster.root), "the runner's end")
    assert cluster.find("night-a1").jobs == tuple(status(cluster, job.job_id) for job in found.jobs)
    assert (tmp_path / "ran").exists() == bool(jobs)


@pytest.mark.random_kill
@pytest.mark.parametrize("seed", SEEDS)
def test_find_is_complete_whenever_the_submitter_is_killed(cluster: LocalCluster, tmp_path: Path, seed: int) -> None:
    choice = random.Random(seed)
    for number in range(4):
        name = f"night{number}-a1"
        script = write_script(tmp_path / f"{name}.sh", f"echo $SLURM_JOB_ID >> {tmp_path}/{name}.ran")
        submitter = start_submitter(cluster, name, script)
        assert submitter.stdout is not None
        assert submitter.stdout.readline() == "now\n"
        time.sleep(choice.uniform(0, 0.25))
        os.killpg(submitter.pid, signal.SIGKILL)
        told = submitter.communicate()[0].split()

        found = [job.job_id for job in cluster.find(name).jobs]

        # What was told is there; at most one; and none turns up later.
        assert [str(job_id) for job_id in found] == told or (not told and len(found) <= 1)
        assert [wait_for_end(cluster, job_id).state for job_id in found] == [JobState.COMPLETED] * len(found)
        wait_until(lambda: not processes_of(cluster.root), "the runner's end")
        assert [job.job_id for job in cluster.find(name).jobs] == found
        ran = (tmp_path / f"{name}.ran").read_text().split() if found else []
        assert ran == [str(job_id) for job_id in found]
        assert found or not (tmp_path / f"{name}.ran").exists()


# --- the runner dies -------------------------------------------------------------------------------------------------


def test_a_killed_runner_is_a_node_failure_and_takes_what_it_started_along(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    body = f"setsid sleep 600 & echo $! > {tmp_path}/away\nsrun -n2 bash -c 'echo $$ > {tmp_path}/task$SLURM_PROCID; sleep 600'"
    job_id = cluster.submit("night-a1", write_script(tmp_path / "job.sh", body), ())
    pids = [int(wait_for_text(tmp_path / name)) for name in ("away", "task0", "task1")]

    os.kill(runner_pid(cluster, job_id), signal.SIGKILL)
    wait_until(lambda: not is_running(runner_pid(cluster, job_id)), "the runner's end")

    answer = status(cluster, job_id)
    assert (answer.state, answer.exit_code) == (JobState.NODE_FAIL, None)
    assert answer.reason == "the runner died"
    assert [pid for pid in pids if is_running(pid)] == []


def test_a_killed_runner_takes_its_processes_along_in_a_workspace_that_is_a_link(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to("disk")
    with local_cluster(tmp_path / "link") as cluster:
        script = write_script(tmp_path / "job.sh", "setsid sleep 600 & echo $!; sleep 600")
        job_id = cluster.submit("night-a1", script, [f"--chdir={tmp_path}"])
        child = int(wait_for_text(tmp_path / f"slurm-{job_id}.out", "\n"))

        os.kill(runner_pid(cluster, job_id), signal.SIGKILL)

        wait_until(lambda: status(cluster, job_id).state == JobState.NODE_FAIL)
        assert not is_running(child)


def test_a_query_about_a_dead_runner_leaves_the_exit_codes_of_own_children(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    job_id = cluster.submit(
        "night-a1", write_script(tmp_path / "job.sh", "echo up; trap '' TERM; sleep 600 & wait"), ()
    )
    wait_for_text(tmp_path / f"slurm-{job_id}.out", "up")
    mine = subprocess.Popen(["bash", "-c", "exit 7"])
    wait_until(lambda: not is_running(mine.pid), "the child's end")

    os.kill(runner_pid(cluster, job_id), signal.SIGKILL)
    wait_until(lambda: status(cluster, job_id).state is JobState.NODE_FAIL, "the node failure")

    assert mine.wait() == 7


def test_a_killed_runner_does_not_take_along_what_its_job_submitted(cluster: LocalCluster, tmp_path: Path) -> None:
    write_script(tmp_path / "next.sh", f"while [ ! -e {tmp_path}/go ]; do sleep 0.05; done")
    outer = write_script(tmp_path / "job.sh", "sbatch --parsable --job-name=next next.sh > inner; sleep 600")
    job_id = cluster.submit("night-a1", outer, ())
    inner = int(wait_for_text(tmp_path / "inner", "\n"))

    os.kill(runner_pid(cluster, job_id), signal.SIGKILL)
    wait_until(lambda: status(cluster, job_id).state is JobState.NODE_FAIL, "the node failure")
    (tmp_path / "go").touch()

    assert wait_for_end(cluster, inner).state is JobState.COMPLETED


def test_a_killed_runner_gives_its_slot_back(cluster: LocalCluster, tmp_path: Path) -> None:
    script = write_script(tmp_path / "job.sh", "[ $SLURM_JOB_ID -gt 2 ] || sleep 600")
    ids = [cluster.submit("night-a1", script, ()) for _ in range(3)]
    wait_until(lambda: all(status(cluster, job).state is JobState.RUNNING for job in ids[:2]), "two running jobs")

    os.kill(runner_pid(cluster, ids[0]), signal.SIGKILL)

    assert wait_for_end(cluster, ids[2]).state is JobState.COMPLETED


def test_a_runner_that_dies_while_its_job_waits_is_a_node_failure(cluster: LocalCluster, tmp_path: Path) -> None:
    script = write_script(tmp_path / "job.sh", "sleep 600")
    ids = [cluster.submit("night-a1", script, ()) for _ in range(3)]

    os.kill(runner_pid(cluster, ids[2]), signal.SIGKILL)
    wait_until(lambda: not is_running(runner_pid(cluster, ids[2])), "the runner's end")

    answer = status(cluster, ids[2])
    assert (answer.state, answer.started_at) == (JobState.NODE_FAIL, None)


def test_a_stopped_runner_ends_its_job_and_records_why(cluster: LocalCluster, tmp_path: Path) -> None:
    job_id = cluster.submit("night-a1", write_script(tmp_path / "job.sh", "echo up; sleep 600"), ())
    wait_for_text(tmp_path / f"slurm-{job_id}.out", "up")

    os.kill(runner_pid(cluster, job_id), signal.SIGTERM)

    ended = wait_for_end(cluster, job_id)
    assert (ended.state, ended.reason) == (JobState.NODE_FAIL, "the runner was stopped")


# --- the disk is full ------------------------------------------------------------------------------------------------


def test_a_job_that_fills_the_disk_has_its_own_end_and_costs_no_other_its_place(
    small_disk: Path, tmp_path: Path
) -> None:
    body = f"until test -e {tmp_path}/go; do sleep 0.05; done; cat /dev/zero > {small_disk}/checkpoint; echo $$ > {tmp_path}/pid; exit 3"
    with local_cluster(small_disk, slots=1) as cluster:
        script = write_script(tmp_path / "job.sh", body)
        ids = [cluster.submit("night-a1", script, [f"--chdir={small_disk}"]) for _ in range(2)]
        (tmp_path / "go").touch()
        pid = int(wait_for_text(tmp_path / "pid", "\n"))
        wait_until(lambda: not is_running(pid), "the script's end")
        time.sleep(0.5)

        assert [status(cluster, job_id).state for job_id in ids] == [JobState.RUNNING, JobState.PENDING]
        (small_disk / "checkpoint").unlink()

        assert (wait_for_end(cluster, ids[0]).state, status(cluster, ids[0]).exit_code) == (JobState.FAILED, 3)
        wait_until(lambda: (small_disk / "checkpoint").exists(), "the second job")
        (small_disk / "checkpoint").unlink()
        assert wait_for_end(cluster, ids[1]).exit_code == 3


def test_a_job_whose_slot_was_written_though_the_file_server_reported_an_error_starts(tmp_path: Path) -> None:
    first = write_script(tmp_path / "first.sh", f"until test -e {tmp_path}/go; do sleep 0.05; done")
    with local_cluster(tmp_path, slots=1) as cluster:
        second = write_script(tmp_path / "job.sh", "true")
        ids = [cluster.submit(path.stem, path, [f"--chdir={tmp_path}"]) for path in (first, second)]
        write_atomically(job_dir(cluster.root, ids[1]) / "started.json", b'{"at": 1.0}')
        (tmp_path / "go").touch()

        assert [wait_for_end(cluster, job_id).state for job_id in ids] == [JobState.COMPLETED] * 2


def test_a_job_over_its_time_is_that_on_a_full_disk_as_well(small_disk: Path, tmp_path: Path) -> None:
    body = f"echo $$ > {tmp_path}/pid; cat /dev/zero > {small_disk}/checkpoint; sleep 600"
    with local_cluster(small_disk) as cluster:
        job_id = cluster.submit(
            "night-a1", write_script(tmp_path / "job.sh", body), [f"--chdir={small_disk}", "--time=0:01"]
        )
        pid = int(wait_for_text(tmp_path / "pid", "\n"))
        wait_until(lambda: not is_running(pid), "the script's end")
        time.sleep(0.5)

        (small_disk / "checkpoint").unlink()

        assert wait_for_end(cluster, job_id).state is JobState.TIMEOUT


# --- who is who ------------------------------------------------------------------------------------------------------


def test_a_process_is_known_by_when_it_started_not_by_its_number() -> None:
    me = identify(os.getpid())
    assert me is not None

    assert not is_gone(me)
    assert is_gone(replace(me, start_ticks=me.start_ticks + 1))
    assert is_gone(replace(me, boot_id="another boot"))
    # Nobody can look from here.
    assert not is_gone(replace(me, host="elsewhere", boot_id="another boot"))
    assert not is_gone(replace(me, start_ticks=me.start_ticks + 1, process_table="pid:[another container]"))


@pytest.mark.parametrize("where", [{"process_table": "pid:[another container]"}, {"host": "elsewhere"}])
def test_a_job_whose_runner_cannot_be_seen_runs_until_the_runner_has_long_been_silent(
    cluster: LocalCluster, tmp_path: Path, where: dict[str, str]
) -> None:
    job_id = cluster.submit("night-a1", write_script(tmp_path / "job.sh", "echo up; sleep 600"), ())
    wait_for_text(tmp_path / f"slurm-{job_id}.out", "up")
    runner, record = runner_pid(cluster, job_id), job_dir(cluster.root, job_id) / "runner.json"
    os.kill(runner, signal.SIGSTOP)
    record.write_text(json.dumps(json.loads(record.read_text()) | where))
    assert status(cluster, job_id).state == JobState.RUNNING

    os.utime(record, (0, 0))

    assert status(cluster, job_id).state == JobState.NODE_FAIL
    os.kill(runner, signal.SIGCONT)
    wait_until(lambda: not is_running(runner), "the runner's end")


def test_a_runner_that_was_taken_for_dead_ends_its_job(cluster: LocalCluster, tmp_path: Path) -> None:
    job_id = cluster.submit("night-a1", write_script(tmp_path / "job.sh", "echo up; sleep 600"), ())
    wait_for_text(tmp_path / f"slurm-{job_id}.out", "up")

    write_record(job_dir(cluster.root, job_id) / "end.json", JobEnd("NODE_FAIL", time.time()))

    wait_until(lambda: not processes_of(cluster.root), "the end of every process")


@pytest.mark.parametrize("last", [-3600, 3600], ids=["long-ago", "by-a-clock-ahead-of-its-own"])
def test_a_runner_gives_signs_of_life(cluster: LocalCluster, tmp_path: Path, last: float) -> None:
    job_id = cluster.submit("night-a1", write_script(tmp_path / "job.sh", "sleep 600"), ())
    record = job_dir(cluster.root, job_id) / "runner.json"

    os.utime(record, (time.time() + last, time.time() + last))

    wait_until(lambda: abs(record.stat().st_mtime - time.time()) < 60, "a sign of life")


def test_a_process_with_the_number_of_a_runner_of_another_host_ends_with_its_job(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    body = f"setsid sleep 600 & echo $! > {tmp_path}/child; wait"
    job_id = cluster.submit("night-a1", write_script(tmp_path / "job.sh", body), ())
    child = int(wait_for_text(tmp_path / "child", "\n"))
    elsewhere = shutil.copytree(job_dir(cluster.root, job_id), job_dir(cluster.root, job_id + 1))
    record = json.loads((elsewhere / "runner.json").read_text()) | {"host": "elsewhere", "pid": child}
    (elsewhere / "runner.json").write_text(json.dumps(record))

    cluster.cancel(job_id)
    ended = wait_for_end(cluster, job_id)
    write_record(elsewhere / "end.json", JobEnd("COMPLETED", time.time()))

    assert ended.state is JobState.CANCELLED
    assert not is_running(child)


def test_a_proc_that_hides_the_processes_of_other_users_hides_no_own_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    def read_text(path: Path, **options: Any) -> str:
        if str(path) == "/proc/1/stat":  # with the option hidepid=1 of its mount
            raise PermissionError(errno.EPERM, "Operation not permitted", str(path))
        return path.read_bytes().decode(errors="replace")

    monkeypatch.setattr(Path, "read_text", read_text)
    child = subprocess.Popen(["sleep", "60"])
    try:
        assert child.pid in descendants(os.getpid())
    finally:
        child.kill()
        child.wait()


def test_a_zombie_is_gone() -> None:
    child = subprocess.Popen(["cat"], stdin=subprocess.PIPE)
    identity = identify(child.pid)
    assert identity is not None
    assert not is_gone(identity)
    assert child.stdin is not None

    child.stdin.close()
    wait_until(lambda: not is_running(child.pid), "the child's end")

    assert is_gone(identity)
    child.wait()
