"""What became of a job: Slurm's word, the exit file and the run's own evidence, in every combination that matters."""

import os
import pwd
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

import pytest

from nightbridge.models import ClusterSettings, Job, JobState, JobStatus, Outcome
from nightbridge.slurm.attempt_files import Cancellation, record_cancellation
from nightbridge.slurm.attempts import may_try_again
from nightbridge.slurm.command_line import CommandLineCluster
from nightbridge.slurm.outcome import RunEvidence, classify_job
from nightbridge.slurm.script import ALREADY_CLAIMED, CLAIM, wrap_script
from nightbridge.slurm.states import TERMINAL
from nightbridge.slurm.watcher import Watcher

NOW = datetime(2026, 11, 21, tzinfo=UTC)


def evidence(steps_done: int = 50, **changes: object) -> RunEvidence:
    whole = RunEvidence(
        steps_done=steps_done,
        steps_expected=50,
        losses_finite=True,
        finished_marker=steps_done == 50,
        flaky_marker=None,
        timeout_marker=False,
        last_error="",
    )
    return whole.model_copy(update=changes)


def ended(tmp_path: Path, state: JobState | None, *, exit_file: int | None = None, **status: object) -> Job:
    return Job(
        run_key="run",
        attempt=1,
        job_id=7,
        cluster="c",
        attempt_dir=tmp_path,
        script=tmp_path / "job.sh",
        experiment_dir=tmp_path,
        submitted_at=NOW,
        status=JobStatus(job_id=7, state=state, started_at=NOW).model_copy(update=status) if state else None,
        exit_file_code=exit_file,
    )


ALL, SOME = evidence(), evidence(20)


def test_a_job_that_was_killed_says_how_many_steps_were_done_and_not_how_many_were_numbered(tmp_path: Path) -> None:
    run = evidence(0, steps_expected=400_000, steps_seen=11)

    job = classify_job(ended(tmp_path, JobState.TIMEOUT), run)

    assert (job.outcome, job.outcome_reason) == (Outcome.TIMEOUT, "TIMEOUT after 11 of 400000 steps")


def test_steps_that_no_line_numbers_make_no_run_a_whole_one(tmp_path: Path) -> None:
    assert (
        classify_job(ended(tmp_path, JobState.COMPLETED, exit_file=0), evidence(0, steps_seen=50)).outcome
        is Outcome.SHORT
    )


@pytest.mark.parametrize(
    ("state", "exit_file", "run", "outcome"),
    [
        (JobState.COMPLETED, 0, ALL, Outcome.SUCCEEDED),
        (JobState.COMPLETED, None, ALL, Outcome.SUCCEEDED),
        (None, 0, ALL, Outcome.SUCCEEDED),
        (JobState.UNKNOWN, 0, ALL, Outcome.SUCCEEDED),
        (JobState.COMPLETED, 0, SOME, Outcome.SHORT),
        (JobState.COMPLETED, 0, evidence(0), Outcome.SHORT),
        (JobState.COMPLETED, 0, evidence(losses_finite=False), Outcome.PROGRAM_ERROR),
        (JobState.COMPLETED, 1, ALL, Outcome.TEARDOWN),
        (JobState.COMPLETED, 1, SOME, Outcome.PROGRAM_ERROR),
        (JobState.FAILED, 1, ALL, Outcome.TEARDOWN),
        (JobState.FAILED, 0, ALL, Outcome.TEARDOWN),
        (JobState.TIMEOUT, None, ALL, Outcome.TEARDOWN),
        (JobState.NODE_FAIL, None, ALL, Outcome.TEARDOWN),
        (None, 1, ALL, Outcome.TEARDOWN),
        (JobState.FAILED, 1, evidence(losses_finite=False), Outcome.PROGRAM_ERROR),
        (JobState.FAILED, 1, SOME, Outcome.PROGRAM_ERROR),
        (JobState.FAILED, 1, evidence(20, flaky_marker="ncclRemoteError"), Outcome.INFRASTRUCTURE),
        (JobState.FAILED, 1, evidence(20, flaky_marker="x", losses_finite=False), Outcome.PROGRAM_ERROR),
        (JobState.FAILED, 1, evidence(20, timeout_marker=True), Outcome.TIMEOUT),
        (
            JobState.FAILED,
            1,
            evidence(20, last_error="torch.OutOfMemoryError: CUDA out of memory."),
            Outcome.OUT_OF_MEMORY,
        ),
        (JobState.NODE_FAIL, None, SOME, Outcome.INFRASTRUCTURE),
        (JobState.BOOT_FAIL, None, evidence(0), Outcome.INFRASTRUCTURE),
        (JobState.PREEMPTED, 143, SOME, Outcome.INFRASTRUCTURE),
        (JobState.REVOKED, None, SOME, Outcome.NEVER_STARTED),
        (JobState.REVOKED, None, evidence(0), Outcome.NEVER_STARTED),
        (JobState.TIMEOUT, None, SOME, Outcome.TIMEOUT),
        (JobState.DEADLINE, None, SOME, Outcome.TIMEOUT),
        (JobState.OUT_OF_MEMORY, 137, SOME, Outcome.OUT_OF_MEMORY),
        (JobState.CANCELLED, 143, SOME, Outcome.CANCELLED),
        (JobState.CANCELLED, 143, ALL, Outcome.CANCELLED),
        # A slurmctld that was killed before it saved a job's start calls it cancelled when it is back.
        (JobState.CANCELLED, 0, ALL, Outcome.TEARDOWN),
        (JobState.CANCELLED, 0, SOME, Outcome.CANCELLED),
        (None, None, SOME, Outcome.INFRASTRUCTURE),
        (JobState.UNKNOWN, None, ALL, Outcome.INFRASTRUCTURE),
    ],
)
def test_the_outcome_of(
    state: JobState | None, exit_file: int | None, run: RunEvidence, outcome: Outcome, tmp_path: Path
) -> None:
    judged = classify_job(ended(tmp_path, state, exit_file=exit_file), run)

    assert judged.outcome is outcome
    assert judged.outcome_reason


@pytest.mark.parametrize("claimed", [True, False])
def test_no_second_job_is_submitted_beside_one_that_runs_on_a_sibling_of_the_federation(
    claimed: bool, tmp_path: Path
) -> None:
    if claimed:
        (tmp_path / CLAIM).write_text("7\n")

    job = classify_job(ended(tmp_path, JobState.REVOKED), evidence(3))

    assert not may_try_again([job], ClusterSettings())
    assert "`squeue --federation`" in job.outcome_reason


@pytest.mark.parametrize("state", sorted(TERMINAL))
def test_nothing_but_slurms_completed_and_all_steps_is_a_success(state: JobState, tmp_path: Path) -> None:
    for exit_file in (None, 0, 1):
        for run in (ALL, SOME, evidence(losses_finite=False)):
            succeeded = classify_job(ended(tmp_path, state, exit_file=exit_file), run).outcome is Outcome.SUCCEEDED
            assert succeeded == (state is JobState.COMPLETED and exit_file in (None, 0) and run is ALL)


@pytest.mark.parametrize("named", [True, False])
def test_a_quota_that_ended_a_run_is_named_with_path_and_owner(named: bool, tmp_path: Path) -> None:
    path = tmp_path / "checkpoints" / "iter_0000050" / "weights.distcp"
    error = f"OSError: [Errno 122] Disk quota exceeded: '{path}'" if named else "write error: Disk quota exceeded"

    judged = classify_job(ended(tmp_path, JobState.FAILED, exit_file=1), evidence(20, last_error=error))

    assert judged.outcome is Outcome.PROGRAM_ERROR
    owner = pwd.getpwuid(os.geteuid()).pw_name
    assert f"{error} (the disk quota of {owner} is used up ({tmp_path} belongs to {owner}" in judged.outcome_reason


def test_without_an_expected_number_of_steps_the_programs_own_word_counts(tmp_path: Path) -> None:
    job = ended(tmp_path, JobState.COMPLETED, exit_file=0)

    assert classify_job(job, evidence(20, steps_expected=None, finished_marker=True)).outcome is Outcome.SUCCEEDED
    assert classify_job(job, evidence(20, steps_expected=None, finished_marker=False)).outcome is Outcome.SHORT


def test_a_workspace_that_the_node_does_not_see_is_named_with_the_node(tmp_path: Path) -> None:
    guard = classify_job(ended(tmp_path, JobState.FAILED, exit_code=78, nodes="node17"), evidence(0))
    output = classify_job(ended(tmp_path, JobState.FAILED, exit_code=0, signal=53, nodes="node17"), evidence(0))

    assert guard.outcome is output.outcome is Outcome.INFRASTRUCTURE
    assert guard.outcome_reason == "workspace not visible on node17"
    assert output.outcome_reason.startswith("workspace not visible on node17")


@pytest.mark.slurm
@pytest.mark.parametrize("output", ["/dev/null", "{gone}/sbatch.out"])
def test_a_real_node_that_does_not_see_the_workspace_is_named(
    output: str, cluster: CommandLineCluster, workspace: Path, run_key: str
) -> None:
    gone = workspace / "runs" / run_key / "a1"
    script = workspace / "job.sh"
    script.write_text(wrap_script(f"#!/bin/bash\n#SBATCH --output={output.format(gone=gone)}\ntrue\n", gone))
    job_id = cluster.submit(f"{run_key}-a1", script, ["--chdir=/", "--nodelist=node2"])
    job = ended(gone, None).model_copy(update={"job_id": job_id, "run_key": run_key})

    judged = classify_job(Watcher(cluster).follow(job), evidence(0))

    assert judged.outcome is Outcome.INFRASTRUCTURE
    assert judged.outcome_reason.startswith("workspace not visible on node2")


@pytest.mark.parametrize(
    ("holder", "exit_file", "outcome"),
    [
        (8, None, Outcome.NEVER_STARTED),
        (7, None, Outcome.INFRASTRUCTURE),
        (7, 143, Outcome.INFRASTRUCTURE),
        (7, ALREADY_CLAIMED, Outcome.PROGRAM_ERROR),
    ],
    ids=["another job's", "its own first start's, still alive", "which Slurm killed", "the script's own code"],
)
def test_a_start_that_the_claim_ended_is_told_by_whose_claim_it_is(
    holder: int, exit_file: int | None, outcome: Outcome, tmp_path: Path
) -> None:
    job = ended(tmp_path, JobState.FAILED, exit_code=ALREADY_CLAIMED, exit_file=exit_file)
    (tmp_path / CLAIM).write_text(f"{holder} 0 node1.4711\n")

    assert classify_job(job, evidence(0)).outcome is outcome


def test_a_scripts_own_exit_code_is_not_taken_for_the_guards(tmp_path: Path) -> None:
    judged = classify_job(ended(tmp_path, JobState.FAILED, exit_file=78, exit_code=78), SOME)

    assert judged.outcome is Outcome.PROGRAM_ERROR


def test_a_job_cancelled_because_it_could_never_start_has_never_started(tmp_path: Path) -> None:
    job = ended(tmp_path, JobState.CANCELLED, started_at=None, reason="PartitionNodeLimit")

    judged = classify_job(job, evidence(0))

    assert judged.outcome is Outcome.NEVER_STARTED
    assert "PartitionNodeLimit" in judged.outcome_reason


@pytest.mark.parametrize(
    ("policy", "started_at", "outcome"),
    [
        ("hopeless", None, Outcome.NEVER_STARTED),
        ("max_pending", None, Outcome.NEVER_STARTED),
        # It started while it was being cancelled, or somebody cancelled it later.
        ("max_pending", NOW, Outcome.CANCELLED),
        ("max_runtime", NOW, Outcome.TIMEOUT),
    ],
)
def test_a_job_that_a_policy_cancelled_has_the_reason_and_the_advice(
    policy: Literal["hopeless", "max_pending", "max_runtime"],
    started_at: datetime | None,
    outcome: Outcome,
    tmp_path: Path,
) -> None:
    record_cancellation(
        tmp_path, Cancellation(job_id=7, policy=policy, reason="pending for 60 s", advice="Ask for less", at=NOW)
    )

    judged = classify_job(ended(tmp_path, JobState.CANCELLED, started_at=started_at), SOME)
    another = classify_job(ended(tmp_path, JobState.CANCELLED).model_copy(update={"job_id": 8}), SOME)

    assert judged.outcome is outcome
    assert ("pending for 60 s. Ask for less" in judged.outcome_reason) == (outcome is not Outcome.CANCELLED)
    assert another.outcome is Outcome.CANCELLED


def test_the_policy_that_cancelled_it_at_last_is_the_reason(tmp_path: Path) -> None:
    records: list[tuple[int, Literal["hopeless", "max_pending", "max_runtime"]]] = [
        (6, "max_pending"),  # another job of the attempt
        (7, "hopeless"),  # could not be cancelled then, and started after all
        (7, "max_runtime"),
    ]
    for job_id, policy in records:
        record_cancellation(
            tmp_path, Cancellation(job_id=job_id, policy=policy, reason=policy, advice="Ask for less", at=NOW)
        )

    judged = classify_job(ended(tmp_path, JobState.CANCELLED, started_at=NOW), SOME)

    assert (judged.outcome, "max_runtime" in judged.outcome_reason) == (Outcome.TIMEOUT, True)


def test_a_job_that_slurm_lost_is_not_taken_for_cancelled(tmp_path: Path) -> None:
    lost = ended(tmp_path, JobState.CANCELLED, reason="lost: unknown to slurmctld, and cancelled by no user")

    assert classify_job(lost, SOME).outcome is Outcome.INFRASTRUCTURE
    assert classify_job(lost.model_copy(update={"exit_file_code": 0}), ALL).outcome is Outcome.TEARDOWN
    assert classify_job(lost.model_copy(update={"exit_file_code": 1}), SOME).outcome is Outcome.PROGRAM_ERROR


def test_the_reason_names_the_canceller_and_the_steps_done(tmp_path: Path) -> None:
    judged = classify_job(ended(tmp_path, JobState.CANCELLED, cancelled_by="4123456"), SOME)

    assert judged.outcome_reason == "cancelled by uid 4123456 after 20 of 50 steps"
