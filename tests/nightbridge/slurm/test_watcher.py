"""Watching: to the true end, through silence, many jobs at once. A cluster that says what the test tells it to."""

import errno
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from nightbridge.errors import PermanentError, StatusUnknown
from nightbridge.files import write_model
from nightbridge.models import ClusterLimits, ClusterSettings, Job, JobState, JobStatus, utc_now
from nightbridge.slurm.attempt_files import (
    AttemptContext,
    declare_intent,
    open_attempt,
    read_cancellation,
    read_exit_code,
    read_intents,
    record_cancellation,
)
from nightbridge.slurm.command_line import CommandLineCluster
from nightbridge.slurm.protocol import Lookup
from nightbridge.slurm.script import wrap_script
from nightbridge.slurm.states import LOST
from nightbridge.slurm.watcher import Graces, Watcher
from tests.nightbridge.slurm.conftest import opened_attempt
from tests.real.slurm_daemons import SlurmDaemons
from tests.waiting import wait_until


class StubCluster:
    """Answers from a table; an exception in it is raised."""

    def __init__(self) -> None:
        self.settings = ClusterSettings(poll_interval=0.05)
        self.rows: dict[int, JobStatus] = {}
        self.error: Exception | None = None
        self.queries: list[tuple[int, ...]] = []
        self.by_name: dict[str, tuple[JobStatus, ...]] = {}
        self.complete = True
        self.queue_answered = False
        self.cancelled: list[int] = []
        self.cancel_errors: list[Exception] = []
        self.slurm_name: str | None = None
        self.scripts: dict[int, Path] = {}

    def say(self, job_id: int, state: JobState, **changes: object) -> None:
        self.rows[job_id] = JobStatus(job_id=job_id, name=f"run-{job_id}-a1", state=state).model_copy(update=changes)

    def states(self, job_ids: Sequence[int]) -> dict[int, JobStatus]:
        self.queries.append(tuple(job_ids))
        if self.error is not None:
            raise self.error
        return {job_id: self.rows[job_id] for job_id in job_ids if job_id in self.rows}

    def find(self, name: str) -> Lookup:
        return Lookup(jobs=self.by_name.get(name, ()), complete=self.complete, queue_answered=self.queue_answered)

    @property
    def description(self) -> str:
        return "a stub"

    @property
    def accounting_horizon(self) -> float:
        return 0.0

    def test_only(self, name: str, options: Sequence[str]) -> None:
        raise NotImplementedError

    def available_slots(self, nodes: int) -> int:
        raise NotImplementedError

    def submit(self, name: str, script: Path, options: Sequence[str]) -> int:
        raise NotImplementedError

    def cancel(self, job_id: int) -> None:
        if self.cancel_errors:
            raise self.cancel_errors.pop()
        self.cancelled.append(job_id)
        self.say(job_id, JobState.CANCELLED, exit_code=0, cancelled_by="0")

    def limits(self) -> ClusterLimits:
        return ClusterLimits()

    def script_of(self, job_id: int) -> Path | None:
        return self.scripts.get(job_id)

    def configured(self, key: str) -> str | None:
        return self.slurm_name

    def launch_environment(self) -> dict[str, str]:
        return {}


@pytest.fixture
def stub() -> StubCluster:
    return StubCluster()


@pytest.fixture
def watcher(stub: StubCluster) -> Iterator[Watcher]:
    watcher = Watcher(stub, Graces(silent=0.3, detail=0.2, hopeless=3, lost=2, unanswered=4))
    yield watcher
    watcher.stop()


@pytest.fixture
def following(watcher: Watcher) -> Iterator[Callable[..., "Future[Job]"]]:
    with ThreadPoolExecutor() as pool:
        yield lambda job, on_change=None: pool.submit(watcher.follow, job, on_change)
        watcher.stop()


def make_job(folder: Path, job_id: int = 1) -> Job:
    attempt_dir = folder / f"a{job_id}"
    attempt_dir.mkdir(exist_ok=True)
    return Job(
        run_key=f"run-{job_id}",
        attempt=1,
        job_id=job_id,
        cluster="stub",
        attempt_dir=attempt_dir,
        script=attempt_dir / "job.sh",
        experiment_dir=attempt_dir,
        submitted_at=utc_now(),
    )


def test_a_job_is_followed_through_its_states_to_its_end(
    stub: StubCluster, following: Callable[..., "Future[Job]"], tmp_path: Path
) -> None:
    seen: list[JobState] = []
    stub.say(1, JobState.PENDING)

    end = following(make_job(tmp_path), lambda status: seen.append(status.state))
    for state in (JobState.RUNNING, JobState.COMPLETING):
        time.sleep(0.3)
        stub.say(1, state)
    time.sleep(0.3)
    (tmp_path / "a1/exit_code").write_text("0\n")
    stub.say(1, JobState.COMPLETED, exit_code=0)
    job = end.result(timeout=60)

    assert seen == [JobState.PENDING, JobState.RUNNING, JobState.COMPLETING, JobState.COMPLETED]
    assert job.status is not None
    assert job.status.state is JobState.COMPLETED
    assert job.exit_file_code == 0


def test_many_jobs_are_queried_together(
    stub: StubCluster, following: Callable[..., "Future[Job]"], tmp_path: Path
) -> None:
    for job_id in range(1, 31):
        stub.say(job_id, JobState.RUNNING)

    ends = [following(make_job(tmp_path, job_id)) for job_id in range(1, 5)]
    time.sleep(0.5)
    for job_id in range(1, 5):
        stub.say(job_id, JobState.COMPLETED, exit_code=0)
    for end in ends:
        end.result(timeout=60)

    assert (1, 2, 3, 4) in {tuple(sorted(ids)) for ids in stub.queries}
    assert len(stub.queries) < 60


def test_silence_is_not_an_end(
    stub: StubCluster, following: Callable[..., "Future[Job]"], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stub.say(1, JobState.RUNNING)
    end = following(make_job(tmp_path))
    time.sleep(0.2)

    stub.error = StatusUnknown("neither squeue nor sacct answered", subject="stub")
    time.sleep(1.2)
    assert not end.done()
    stub.error = None
    stub.say(1, JobState.FAILED, exit_code=2)

    job = end.result(timeout=60)
    assert job.status is not None
    assert job.status.exit_code == 2
    assert "unknown since" in caplog.text


def test_the_exit_file_ends_a_job_that_slurm_has_forgotten(
    stub: StubCluster, following: Callable[..., "Future[Job]"], tmp_path: Path
) -> None:
    stub.say(1, JobState.RUNNING, nodes="node1")
    end = following(make_job(tmp_path))
    time.sleep(0.2)

    del stub.rows[1]
    (tmp_path / "a1/exit_code").write_text("3\n")
    job = end.result(timeout=60)

    assert job.exit_file_code == 3
    assert job.status is not None
    assert (job.status.state, job.status.exit_code, job.status.nodes) == (JobState.FAILED, 3, "node1")
    assert "exit file" in job.status.reason


def test_an_exit_file_alone_does_not_end_a_job_that_slurm_calls_live(
    stub: StubCluster, following: Callable[..., "Future[Job]"], tmp_path: Path
) -> None:
    stub.say(1, JobState.COMPLETING)
    job = make_job(tmp_path)
    (job.attempt_dir / "exit_code").write_text("0\n")

    end = following(job)

    time.sleep(1.0)
    assert not end.done()
    stub.say(1, JobState.COMPLETED, exit_code=0)
    assert end.result(timeout=60).exit_file_code == 0


def requeued(stub: StubCluster, following: Callable[..., "Future[Job]"], tmp_path: Path) -> tuple[Job, "Future[Job]"]:
    """A job that waits to run again, with the exit file of its first start, when slurmctld goes away; and its end."""
    job = make_job(tmp_path)
    (job.attempt_dir / "exit_code").write_text("143\n")
    stub.say(1, JobState.PENDING, reason="BeginTime")
    end = following(job)
    time.sleep(0.3)
    stub.error = StatusUnknown("slurmctld is away")
    return job, end


def test_the_exit_file_of_before_a_requeue_does_not_end_a_job_that_waits_to_run_again(
    stub: StubCluster, following: Callable[..., "Future[Job]"], tmp_path: Path
) -> None:
    job, end = requeued(stub, following, tmp_path)

    time.sleep(1.0)
    assert not end.done()
    (job.attempt_dir / "exit_code").write_text("0\n")
    stub.error = None
    stub.say(1, JobState.COMPLETED, exit_code=0)

    assert end.result(timeout=60).exit_file_code == 0


def test_the_exit_file_of_a_job_that_ran_while_slurm_did_not_answer_ends_it(
    stub: StubCluster, following: Callable[..., "Future[Job]"], tmp_path: Path
) -> None:
    """It was waiting to run again when Slurm was last heard of, and has started and ended since."""
    job, end = requeued(stub, following, tmp_path)

    (job.attempt_dir / "exit_code").unlink()
    (job.attempt_dir / "exit_code").write_text("0\n")

    assert end.result(timeout=10).exit_file_code == 0


STARTED = {"nodes": "node[1-8]", "started_at": utc_now() - timedelta(hours=3)}


def let_script_end(job: Job, code: int) -> None:
    """Leave what the guard leaves of a script that ended by itself."""
    (job.attempt_dir / "claim").write_text(f"{job.job_id} 0 node1.99\n")
    (job.attempt_dir / "exit_code").write_text(f"{code}\n")
    os.utime(job.attempt_dir / "claim", (utc_now().timestamp() - 3 * 3600,) * 2)


def queued_again(stub: StubCluster, following: Callable[..., "Future[Job]"], job: Job, code: int) -> "Future[Job]":
    """The end of a job that was seen to run, and is seen to wait again since its script has ended."""
    seen: list[JobState] = []
    stub.say(1, JobState.RUNNING, **STARTED)
    end = following(job, lambda status: seen.append(status.state))
    wait_until(lambda: seen == [JobState.RUNNING])
    let_script_end(job, code)
    stub.say(1, JobState.PENDING, reason="BeginTime")
    wait_until(lambda: JobState.PENDING in seen)
    return end


@pytest.mark.parametrize(
    ("state", "reason", "code"),
    [
        (JobState.SPECIAL_EXIT, "JobHeldUser", 43),
        (JobState.PENDING, "BeginTime", 42),
        (JobState.PENDING, "Resources", 0),
        (JobState.CANCELLED, "", 43),
    ],
)
def test_a_job_that_slurm_queues_again_after_its_script_has_ended_is_over(
    stub: StubCluster, following: Callable[..., "Future[Job]"], tmp_path: Path, state: JobState, reason: str, code: int
) -> None:
    """RequeueExitHold holds it until somebody removes it, and what RequeueExit starts again the guard ends at once."""
    end = queued_again(stub, following, make_job(tmp_path), code)
    stub.say(1, state, reason=reason, cancelled_by="1000" if state is JobState.CANCELLED else "")

    ended = end.result(timeout=20)

    assert ended.status is not None
    assert (ended.exit_file_code, ended.status.exit_code) == (code, code)
    assert ended.status.state is (JobState.FAILED if code else JobState.COMPLETED)
    assert ended.status.reason.startswith("queued again by Slurm after its script had ended: RequeueExit or")
    assert ended.status.nodes == "node[1-8]"
    assert ended.status.started_at is not None
    assert ended.status.ended_at is not None
    assert abs(ended.status.ended_at - ended.status.started_at - timedelta(hours=3)) < timedelta(minutes=1)


@pytest.mark.parametrize("state", [JobState.PENDING, JobState.REQUEUE_HOLD, JobState.SPECIAL_EXIT, JobState.CANCELLED])
def test_a_job_whose_script_an_administrator_ended_by_a_requeue_is_not_over(
    stub: StubCluster, following: Callable[..., "Future[Job]"], tmp_path: Path, state: JobState
) -> None:
    job = make_job(tmp_path)
    let_script_end(job, 1)
    (job.attempt_dir / ".pid.1").write_text("99\n")
    stub.say(1, state, cancelled_by="1000" if state is JobState.CANCELLED else "")

    end = following(job)

    if state is JobState.CANCELLED:
        status = end.result(timeout=20).status
        assert status is not None
        assert (status.state, status.cancelled_by) == (JobState.CANCELLED, "1000")
    else:
        time.sleep(1)
        assert not end.done()


def test_a_cancelled_job_whose_script_ended_a_moment_before_its_signal_stays_cancelled(
    stub: StubCluster, following: Callable[..., "Future[Job]"], tmp_path: Path
) -> None:
    """The ranks of another node were killed first, and their program ended the script."""
    job = make_job(tmp_path)
    let_script_end(job, 1)
    stub.say(1, JobState.CANCELLED, cancelled_by="1000", exit_code=1, **STARTED)

    status = following(job).result(timeout=20).status

    assert status is not None
    assert (status.state, status.started_at) == (JobState.CANCELLED, STARTED["started_at"])


def test_a_job_whose_second_start_the_guard_ended_has_the_nodes_and_times_of_the_first(
    stub: StubCluster, following: Callable[..., "Future[Job]"], watcher: Watcher, tmp_path: Path
) -> None:
    watcher._graces = watcher._graces._replace(silent=60)
    end = queued_again(stub, following, make_job(tmp_path), 42)
    now = utc_now()
    stub.say(1, JobState.FAILED, exit_code=79, nodes="node9", started_at=now, ended_at=now)

    ended = end.result(timeout=20)

    assert ended.status is not None
    assert (ended.status.nodes, ended.status.exit_code, ended.exit_file_code) == ("node[1-8]", 79, 42)
    assert ended.status.started_at is not None
    assert now - ended.status.started_at > timedelta(hours=2)


def test_an_unknown_state_ends_nothing(
    stub: StubCluster, following: Callable[..., "Future[Job]"], tmp_path: Path
) -> None:
    stub.say(1, JobState.UNKNOWN)

    end = following(make_job(tmp_path))

    time.sleep(0.5)
    assert not end.done()
    (tmp_path / "a1/exit_code").write_text("0\n")
    assert end.result(timeout=60).exit_file_code == 0


def test_a_job_id_used_again_by_another_job_is_not_taken_for_ours(
    stub: StubCluster, following: Callable[..., "Future[Job]"], tmp_path: Path
) -> None:
    stub.say(1, JobState.FAILED, name="somebody-elses", exit_code=1)
    stub.by_name["run-1-a1"] = (JobStatus(job_id=1, name="run-1-a1", state=JobState.COMPLETED, exit_code=0),)

    job = following(make_job(tmp_path)).result(timeout=60)

    assert job.status is not None
    assert job.status.state is JobState.COMPLETED


@pytest.mark.parametrize(("seconds_later", "state"), [(0, JobState.COMPLETED), (1, JobState.UNKNOWN)])
def test_a_job_that_somebody_renamed_is_known_by_when_it_was_submitted_and_a_later_one_of_its_id_is_not(
    stub: StubCluster, following: Callable[..., "Future[Job]"], tmp_path: Path, seconds_later: int, state: JobState
) -> None:
    submitted = utc_now().replace(microsecond=0)
    reported = threading.Event()
    stub.say(1, JobState.RUNNING, submitted_at=submitted)
    end = following(make_job(tmp_path), lambda status: reported.set())
    assert reported.wait(60)

    other = {"name": "renamed", "submitted_at": submitted + timedelta(seconds=seconds_later)}
    stub.say(1, JobState.COMPLETED, exit_code=0, **other)
    job = end.result(timeout=60)

    assert job.status is not None
    assert job.status.state is state


def test_a_job_that_the_site_named_otherwise_is_known_by_its_script(
    stub: StubCluster, following: Callable[..., "Future[Job]"], tmp_path: Path
) -> None:
    """As a job_submit plugin that puts an account first leaves it: the id that sbatch gave never had our name."""
    job = make_job(tmp_path)
    stub.scripts[1] = job.script
    stub.say(1, JobState.RUNNING, name="acct_run-1-a1", submitted_at=utc_now())
    seen: list[JobStatus] = []
    end = following(job, seen.append)

    wait_until(lambda: seen)
    time.sleep(2.5)  # longer than the grace of a lost job
    stub.say(1, JobState.TIMEOUT, name="acct_run-1-a1", exit_code=0)
    ended = end.result(timeout=60).status

    assert [status.state for status in seen][:1] == [JobState.RUNNING]
    assert ended is not None
    assert (ended.state, ended.name) == (JobState.TIMEOUT, "run-1-a1")


def test_two_jobs_of_a_night_that_slurm_gave_the_same_id_are_followed_each_to_its_own_end(
    stub: StubCluster, following: Callable[..., "Future[Job]"], tmp_path: Path
) -> None:
    first, second = make_job(tmp_path), make_job(tmp_path, 2).model_copy(update={"job_id": 1})
    stub.say(1, JobState.RUNNING, name=second.name)

    ends = [following(first), following(second)]
    lost = ends[0].result(timeout=20)
    assert not ends[1].done()
    stub.say(1, JobState.COMPLETED, name=second.name, exit_code=0)
    completed = ends[1].result(timeout=20)

    assert lost.status is not None
    assert completed.status is not None
    assert (lost.name, lost.status.state) == (first.name, JobState.UNKNOWN)
    assert (completed.name, completed.status.state) == (second.name, JobState.COMPLETED)
    assert completed.attempt_dir == second.attempt_dir


def test_what_accounting_still_calls_live_is_not_ours_when_slurm_gave_its_id_away(
    stub: StubCluster, following: Callable[..., "Future[Job]"], tmp_path: Path
) -> None:
    stub.say(1, JobState.RUNNING, name="somebody-elses")
    stub.by_name["run-1-a1"] = (JobStatus(job_id=1, name="run-1-a1", state=JobState.RUNNING),)

    job = following(make_job(tmp_path)).result(timeout=60)

    assert job.status is not None
    assert (job.status.state, job.exit_file_code) == (JobState.UNKNOWN, None)
    assert job.status.reason.startswith("lost: unknown to Slurm since")


def test_a_job_that_all_sources_certainly_do_not_know_is_lost_and_no_other(
    stub: StubCluster, following: Callable[..., "Future[Job]"], tmp_path: Path
) -> None:
    stub.say(1, JobState.RUNNING, nodes="node1")
    stub.complete = False
    end = following(make_job(tmp_path))
    time.sleep(0.3)

    del stub.rows[1]
    time.sleep(1.0)
    assert not end.done()
    stub.complete = True
    job = end.result(timeout=60)

    assert job.status is not None
    assert (job.status.state, job.status.nodes) == (JobState.UNKNOWN, "node1")


@pytest.mark.parametrize("name", ["alps", None])
def test_a_job_that_another_cluster_does_not_know_is_not_lost(
    stub: StubCluster, following: Callable[..., "Future[Job]"], tmp_path: Path, name: str | None
) -> None:
    """A night that is resumed in a shell whose Slurm is another cluster's, or does not tell its name yet."""
    job = make_job(tmp_path)
    declare_intent(job.attempt_dir, job.script, job.experiment_dir, after=0, slurm_cluster="eos")
    stub.slurm_name = name

    end = following(job)

    if name is None:
        time.sleep(4.0)
        assert not end.done()
        stub.slurm_name = "alps"
    with pytest.raises(PermanentError, match="submitted to Slurm's cluster eos, and Slurm's commands reach alps here"):
        end.result(timeout=20)


def test_a_lookup_that_fails_for_good_ends_no_watch(
    stub: StubCluster, following: Callable[..., "Future[Job]"], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A package of Slurm that is being upgraded has no squeue for a moment."""

    def missing(_name: str) -> Lookup:
        raise PermanentError("squeue: command not found", subject="squeue", advice="Install it")

    with monkeypatch.context() as patch:
        patch.setattr(stub, "find", missing)
        end = following(make_job(tmp_path))
        time.sleep(4.0)
        assert not end.done()
    assert end.result(timeout=20).status is not None


@pytest.mark.parametrize("recorded", ["eos", None])
def test_a_job_that_its_own_cluster_does_not_know_is_lost(
    stub: StubCluster, following: Callable[..., "Future[Job]"], tmp_path: Path, recorded: str | None
) -> None:
    """None: of an intent that an earlier release recorded."""
    job = make_job(tmp_path)
    declare_intent(job.attempt_dir, job.script, job.experiment_dir, after=0, slurm_cluster=recorded)
    stub.slurm_name = "eos"

    ended = following(job).result(timeout=20)

    assert ended.status is not None
    assert ended.status.reason.startswith("lost: unknown to Slurm")


def test_a_job_that_slurm_itself_has_cancelled_is_not_lost_once_slurmctld_has_forgotten_it(
    stub: StubCluster, tmp_path: Path
) -> None:
    """By kill_invalid_depend, where MinJobAge is shorter than the wait for whom accounting names."""
    watcher = Watcher(stub, Graces(silent=0.3, detail=1.5, hopeless=3, lost=2, unanswered=4))
    with ThreadPoolExecutor() as pool:
        stub.say(1, JobState.CANCELLED, reason="DependencyNeverSatisfied")
        end = pool.submit(watcher.follow, make_job(tmp_path))
        wait_until(lambda: len(stub.queries) > 1)
        stub.say(1, JobState.CANCELLED, reason=f"{LOST}: unknown to slurmctld, and cancelled by no user")
        job = end.result(timeout=20)
        watcher.stop()

    assert job.status is not None
    assert job.status.reason == "DependencyNeverSatisfied"


def test_a_job_whose_end_accounting_learns_late_is_not_lost(
    stub: StubCluster, following: Callable[..., "Future[Job]"], tmp_path: Path
) -> None:
    """slurmdbd was away for long, and slurmctld forgot the job meanwhile."""
    stub.complete = False
    end = following(make_job(tmp_path))
    time.sleep(2.5)

    stub.complete = True
    time.sleep(0.5)
    stub.say(1, JobState.TIMEOUT, exit_code=0, cancelled_by="")
    job = end.result(timeout=60)

    assert job.status is not None
    assert job.status.state is JobState.TIMEOUT


def test_a_job_that_squeue_has_forgotten_while_sacct_never_answers_has_an_unknown_end_and_no_outcome(
    stub: StubCluster, following: Callable[..., "Future[Job]"], tmp_path: Path
) -> None:
    stub.complete, stub.queue_answered = False, True
    job, kept = make_job(tmp_path), make_job(tmp_path, 2)
    stub.say(2, JobState.RUNNING)

    ends = [following(job), following(kept)]
    with pytest.raises(PermanentError, match=r"run-1-a1: .*sacct has not answered.*the night again once `sacct -j 1`"):
        ends[0].result(timeout=20)

    assert not ends[1].done()
    stub.say(2, JobState.COMPLETED, exit_code=0)
    ends[1].result(timeout=20)


def test_a_job_that_may_still_run_is_followed_while_no_source_or_accounting_alone_answers(
    stub: StubCluster, following: Callable[..., "Future[Job]"], tmp_path: Path
) -> None:
    stub.complete = False

    end = following(make_job(tmp_path))
    time.sleep(3)
    stub.queue_answered = True
    time.sleep(2.5)
    stub.error = StatusUnknown("the network is away")
    time.sleep(0.5)
    stub.error = None
    time.sleep(2.5)

    assert not end.done()
    stub.say(1, JobState.COMPLETED, exit_code=0)
    assert end.result(timeout=20).status is not None


def test_what_was_unknown_before_an_outage_is_not_lost_by_the_first_answer_after_it(
    stub: StubCluster, following: Callable[..., "Future[Job]"], tmp_path: Path
) -> None:
    end = following(make_job(tmp_path))
    time.sleep(1.3)

    stub.error = StatusUnknown("the network is away")
    time.sleep(2)
    stub.error = None
    time.sleep(0.7)
    assert not end.done()
    stub.say(1, JobState.TIMEOUT, exit_code=0)
    job = end.result(timeout=60)

    assert job.status is not None
    assert job.status.state is JobState.TIMEOUT


def test_a_job_that_can_never_start_is_cancelled_after_a_grace_with_the_advice(
    stub: StubCluster, following: Callable[..., "Future[Job]"], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stub.cancel_errors = [StatusUnknown("scancel did not answer", subject="stub")]
    stub.say(1, JobState.PENDING, reason="PartitionConfig")
    job = make_job(tmp_path)

    end = following(job)
    time.sleep(0.3)
    assert stub.cancelled == []
    end.result(timeout=60)

    assert stub.cancelled == [1]
    cancellation = read_cancellation(job.attempt_dir)
    assert cancellation is not None
    assert (cancellation.job_id, cancellation.policy, cancellation.reason) == (1, "hopeless", "PartitionConfig")
    assert "no more nodes than the partition has" in caplog.text
    assert "cannot be cancelled" in caplog.text


def test_a_reason_that_clears_in_time_cancels_nothing(
    stub: StubCluster, following: Callable[..., "Future[Job]"], tmp_path: Path
) -> None:
    stub.say(1, JobState.PENDING, reason="PartitionConfig")
    end = following(make_job(tmp_path))
    time.sleep(0.2)
    stub.say(1, JobState.PENDING, reason="Resources")
    time.sleep(4)
    stub.say(1, JobState.COMPLETED, exit_code=0)

    end.result(timeout=60)

    assert stub.cancelled == []


@pytest.mark.parametrize(
    ("policy", "state", "since"),
    [("max_pending", JobState.PENDING, "submitted_at"), ("max_runtime", JobState.RUNNING, "started_at")],
)
def test_waiting_and_running_have_their_limits(
    policy: str,
    state: JobState,
    since: str,
    stub: StubCluster,
    following: Callable[..., "Future[Job]"],
    tmp_path: Path,
) -> None:
    stub.settings = stub.settings.model_copy(update={policy: 60.0})
    stub.say(1, state, **{since: utc_now() - timedelta(seconds=30)})
    stub.say(2, state, **{since: utc_now() - timedelta(seconds=90)})
    stub.say(3, JobState.COMPLETING, **{since: utc_now() - timedelta(seconds=90)})
    jobs = [make_job(tmp_path, job_id) for job_id in (1, 2, 3)]

    ends = [following(job) for job in jobs]
    ends[1].result(timeout=60)

    assert stub.cancelled == [2]
    cancellation = read_cancellation(jobs[1].attempt_dir)
    assert cancellation is not None
    assert cancellation.policy == policy
    assert "60 s" in cancellation.reason
    assert [ends[0].done(), ends[2].done()] == [False, False]


class Failing:
    """Calls a function, but raises these errors first, one for each call."""

    def __init__(self, function: Callable[..., Any], *errors: BaseException) -> None:
        self.function = function
        self.errors = list(errors)

    def __call__(self, *arguments: Any) -> Any:
        if self.errors:
            raise self.errors.pop(0)
        return self.function(*arguments)


@pytest.mark.parametrize("number", [errno.ESTALE, errno.EIO])
def test_a_file_system_that_is_away_for_a_moment_ends_no_watching(
    number: int,
    stub: StubCluster,
    following: Callable[..., "Future[Job]"],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reading = Failing(read_exit_code, *[OSError(number, "away")] * 4)
    monkeypatch.setattr("nightbridge.slurm.watcher.read_exit_code", reading)
    for job_id in (1, 2):
        stub.say(job_id, JobState.RUNNING)
    ends = [following(make_job(tmp_path, job_id)) for job_id in (1, 2)]
    time.sleep(1)

    for job_id in (1, 2):
        (tmp_path / f"a{job_id}/exit_code").write_text("0\n")
        stub.say(job_id, JobState.COMPLETED, exit_code=0)

    assert [end.result(timeout=20).exit_file_code for end in ends] == [0, 0]


@pytest.mark.parametrize(
    "error", [PermanentError("no space left on the device"), OSError(errno.ESTALE, "away"), RuntimeError("a bug")]
)
def test_a_cancellation_that_cannot_be_recorded_is_tried_again_and_holds_up_no_other_job(
    error: Exception,
    stub: StubCluster,
    following: Callable[..., "Future[Job]"],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    recording = Failing(record_cancellation, error)
    monkeypatch.setattr("nightbridge.slurm.watcher.record_cancellation", recording)
    stub.settings = stub.settings.model_copy(update={"max_runtime": 60.0})
    jobs = [make_job(tmp_path, job_id) for job_id in (1, 2)]
    ends = [following(job) for job in jobs]
    time.sleep(0.3)

    stub.say(1, JobState.RUNNING, started_at=utc_now() - timedelta(seconds=90))
    ends[0].result(timeout=20)
    stub.say(2, JobState.COMPLETED, exit_code=0)
    ends[1].result(timeout=20)

    assert stub.cancelled == [1]
    assert read_cancellation(jobs[0].attempt_dir) is not None


def test_a_job_whose_cancellation_is_always_refused_keeps_no_other_one_beyond_its_limit(
    stub: StubCluster, following: Callable[..., "Future[Job]"], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cancel = stub.cancel

    def cancel_but_the_first(job_id: int) -> None:
        if job_id == 1:
            raise PermanentError("scancel refused: Access/permission denied", subject="job 1")
        cancel(job_id)

    monkeypatch.setattr(stub, "cancel", cancel_but_the_first)
    stub.settings = stub.settings.model_copy(update={"max_runtime": 60.0})
    ends = []
    for job_id in (1, 2):
        stub.say(job_id, JobState.RUNNING, started_at=utc_now() - timedelta(seconds=90))
        ends.append(following(make_job(tmp_path, job_id)))
        time.sleep(0.3)

    ends[1].result(timeout=20)
    stub.say(1, JobState.COMPLETED, exit_code=0)
    ends[0].result(timeout=20)

    assert stub.cancelled == [2]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_watching_thread_that_died_or_could_not_start_is_started_again(
    stub: StubCluster, following: Callable[..., "Future[Job]"], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stub, "states", Failing(stub.states, SystemExit()))
    refused = [RuntimeError("can't start new thread")]

    class Thread(threading.Thread):
        def start(self) -> None:
            if self.name == "nightbridge-watcher" and refused:
                raise refused.pop()
            super().start()

    monkeypatch.setattr(threading, "Thread", Thread)
    stub.say(1, JobState.COMPLETED, exit_code=0)

    assert following(make_job(tmp_path)).result(timeout=20).status is not None


def test_the_wait_for_another_job_is_not_counted_as_pending(
    stub: StubCluster, following: Callable[..., "Future[Job]"], tmp_path: Path
) -> None:
    stub.settings = stub.settings.model_copy(update={"max_pending": 2.0})
    submitted = utc_now() - timedelta(hours=2)
    stub.say(1, JobState.PENDING, submitted_at=submitted, reason="Dependency")
    end = following(make_job(tmp_path))
    time.sleep(0.5)

    stub.say(1, JobState.PENDING, submitted_at=submitted, reason="Priority")
    time.sleep(1)
    assert stub.cancelled == []
    end.result(timeout=20)

    assert stub.cancelled == [1]


def test_the_wait_for_another_job_before_a_restart_is_not_counted_either(
    stub: StubCluster, following: Callable[..., "Future[Job]"], tmp_path: Path
) -> None:
    stub.settings = stub.settings.model_copy(update={"max_pending": 2.0})
    context = opened_attempt(tmp_path, "run-1", stub.settings, "--dependency=afterany:7")
    stub.say(1, JobState.PENDING, submitted_at=utc_now() - timedelta(hours=2), reason="Priority")
    end = following(make_job(tmp_path).model_copy(update={"attempt_dir": context.attempt_dir}))

    time.sleep(1)
    assert stub.cancelled == []
    end.result(timeout=20)

    assert stub.cancelled == [1]


def test_a_job_that_was_cancelled_before_it_started_is_over_at_once(stub: StubCluster, tmp_path: Path) -> None:
    stub.say(1, JobState.CANCELLED, cancelled_by="1000")
    watcher = Watcher(stub, Graces(detail=600))
    with ThreadPoolExecutor() as pool:
        following = pool.submit(watcher.follow, make_job(tmp_path))
        try:
            ended = following.result(timeout=10)
        finally:
            watcher.stop()

    assert ended.status is not None
    assert (ended.status.state, ended.status.exit_code) == (JobState.CANCELLED, None)


def test_a_job_that_lost_the_claim_hands_over_to_the_one_that_runs(
    stub: StubCluster, following: Callable[..., "Future[Job]"], tmp_path: Path
) -> None:
    job = make_job(tmp_path)
    (job.attempt_dir / "claim").write_text("9\n")
    (job.attempt_dir / "exit_code").write_text("0\n")
    stub.say(1, JobState.FAILED, exit_code=79)
    submitted = utc_now() - timedelta(hours=1)
    stub.say(9, JobState.COMPLETED, name="run-1-a1", exit_code=0, submitted_at=submitted)

    first = declare_intent(job.attempt_dir, tmp_path / "1.sh", tmp_path / "of 9", after=0)
    declare_intent(job.attempt_dir, tmp_path / "2.sh", tmp_path / "of 1", after=1)
    assert first is not None
    write_model(first, read_intents(job.attempt_dir)[0].model_copy(update={"at": utc_now() - timedelta(hours=2)}))

    followed = following(job).result(timeout=60)

    assert followed.job_id == 9
    assert followed.exit_file_code == 0
    assert followed.experiment_dir == tmp_path / "of 9"


def test_a_refusal_reaches_every_follower(
    stub: StubCluster, following: Callable[..., "Future[Job]"], tmp_path: Path
) -> None:
    stub.error = PermanentError("command not found", subject="squeue")

    with pytest.raises(PermanentError, match="squeue"):
        following(make_job(tmp_path)).result(timeout=60)


@pytest.mark.parametrize(
    "error", [PermanentError("command not found", subject="squeue"), OSError(errno.EACCES, "denied"), ValueError("bug")]
)
def test_a_cluster_that_was_reached_once_and_cannot_be_asked_now_ends_no_job(
    error: Exception, stub: StubCluster, following: Callable[..., "Future[Job]"], tmp_path: Path
) -> None:
    stub.say(1, JobState.RUNNING)
    end = following(make_job(tmp_path))
    time.sleep(0.3)

    stub.error = error
    time.sleep(1.2)
    assert not end.done()
    stub.error = None
    stub.say(1, JobState.COMPLETED, exit_code=0)

    assert end.result(timeout=20).status is not None


def test_stopping_lets_the_followers_go(
    stub: StubCluster, watcher: Watcher, following: Callable[..., "Future[Job]"], tmp_path: Path
) -> None:
    stub.say(1, JobState.RUNNING)
    end = following(make_job(tmp_path))
    time.sleep(0.2)

    watcher.stop()

    with pytest.raises(StatusUnknown, match="stopped"):
        end.result(timeout=60)


def test_after_the_last_job_no_query_is_made_and_a_later_job_is_followed_again(
    stub: StubCluster, following: Callable[..., "Future[Job]"], tmp_path: Path
) -> None:
    stub.say(1, JobState.COMPLETED, exit_code=0)
    following(make_job(tmp_path)).result(timeout=60)
    time.sleep(0.3)
    asked = len(stub.queries)
    time.sleep(0.5)
    assert len(stub.queries) == asked
    assert not [thread for thread in threading.enumerate() if thread.name == "nightbridge-watcher"]

    assert following(make_job(tmp_path)).result(timeout=60).status is not None


@pytest.mark.slurm
def test_several_jobs_are_followed_to_their_end_while_slurmdbd_is_down(
    slurm_cluster: SlurmDaemons, cluster: CommandLineCluster, settings: ClusterSettings, workspace: Path, run_key: str
) -> None:
    attempts = [open_attempt(workspace, f"{run_key}-{number}", settings) for number in range(3)]
    bodies = ["sleep 1", "sleep 2; exit 4", "sleep 60"]
    watcher = Watcher(cluster, Graces(silent=5, detail=1))
    slurm_cluster.kill_daemon("slurmdbd")
    try:
        jobs = [_submit(cluster, attempt, body) for attempt, body in zip(attempts, bodies, strict=True)]
        with ThreadPoolExecutor() as pool:
            ends = [pool.submit(watcher.follow, job) for job in jobs]
            time.sleep(3)
            cluster.cancel(jobs[2].job_id)
            followed = [end.result(timeout=60) for end in ends]
    finally:
        watcher.stop()
        slurm_cluster.start_daemon("slurmdbd")
        while not cluster.find("x").complete:
            time.sleep(0.2)

    assert [job.status.state for job in followed if job.status] == [
        JobState.COMPLETED,
        JobState.FAILED,
        JobState.CANCELLED,
    ]
    assert [job.exit_file_code for job in followed][:2] == [0, 4]
    assert read_exit_code(attempts[2].attempt_dir) in (None, 143)


def _submit(cluster: CommandLineCluster, attempt: AttemptContext, body: str) -> Job:
    script = attempt.attempt_dir / "job.sh"
    text = f"#!/bin/bash\n#SBATCH --output={attempt.attempt_dir}/out\n{body}\n"
    script.write_text(wrap_script(text, attempt.attempt_dir))
    return Job(
        run_key=attempt.run_key,
        attempt=1,
        job_id=cluster.submit(attempt.name, script, []),
        cluster="debian",
        attempt_dir=attempt.attempt_dir,
        script=script,
        experiment_dir=attempt.attempt_dir,
        submitted_at=utc_now(),
    )
