"""Dependencies between runs become options of sbatch, as soon as the ids are known."""

from pathlib import Path

import pytest

from nightbridge.errors import LaunchRefused
from nightbridge.models import (
    ClusterSettings,
    GitRepo,
    Job,
    JobState,
    JobStatus,
    Outcome,
    RunDependency,
    RunSpec,
    TestDefinition,
    utc_now,
)
from nightbridge.slurm.attempt_files import (
    AttemptContext,
    CannotKnow,
    declare_intent,
    open_attempt,
    read_submission,
    record_ended,
)
from nightbridge.slurm.attempts import NotSubmittedYet, attempts_of, dependency_options, unrecorded_ends
from nightbridge.slurm.local import LocalCluster
from tests.builders import record_submission

TEST = TestDefinition(
    id="fine",
    name="fine",
    cmd_args={},
    git_repos=(GitRepo(url="https://example.org/Megatron-Bridge.git"),),
    nemo_run_repo=GitRepo(url="https://example.org/Run.git"),
)


def after(*dependencies: tuple[str, str, tuple[str, ...]]) -> RunSpec:
    return RunSpec(
        scenario="nightly",
        night="2026-11-21",
        test=TEST,
        after=tuple(RunDependency(type=kind, id=of, run_keys=keys) for kind, of, keys in dependencies),
    )


def opened(workspace: Path, run_key: str) -> AttemptContext:
    return open_attempt(workspace, run_key, ClusterSettings(), len(attempts_of(run_key, workspace)) + 1)


def submitted(workspace: Path, run_key: str, job_id: int) -> AttemptContext:
    attempt = opened(workspace, run_key)
    record_submission(attempt.attempt_dir, attempt.name, job_id)
    return attempt


def ended(workspace: Path, run_key: str, job_id: int, outcome: Outcome) -> AttemptContext:
    attempt = submitted(workspace, run_key, job_id)
    record_ended(
        Job(
            run_key=run_key, attempt=attempt.attempt, job_id=job_id, cluster="local", attempt_dir=attempt.attempt_dir,
            script=attempt.attempt_dir, experiment_dir=attempt.attempt_dir, submitted_at=utc_now(), outcome=outcome,
        )
    )  # fmt: skip
    return attempt


def test_a_run_without_dependencies_has_no_option(tmp_path: Path) -> None:
    assert dependency_options(after(), tmp_path, lambda _: True) == ()


def test_live_jobs_become_one_option(tmp_path: Path) -> None:
    submitted(tmp_path, "base-1", 11)
    submitted(tmp_path, "base-2", 12)
    submitted(tmp_path, "good", 13)
    submitted(tmp_path, "begun", 14)
    run = after(
        ("start_post_comp", "base", ("base-1", "base-2")),
        ("start_post_success", "good", ("good",)),
        ("start_post_init", "begun", ("begun",)),
    )

    assert dependency_options(run, tmp_path, lambda _: True) == (
        "--dependency=afterany:11,afterany:12,afterok:13,after:14",
    )


def test_of_two_jobs_of_an_attempt_the_one_that_claimed_it_is_waited_for(tmp_path: Path) -> None:
    attempt = submitted(tmp_path, "good", 13)
    (attempt.attempt_dir / "claim").write_text("12 0 node1 77\n")

    assert dependency_options(after(("start_post_success", "good", ("good",))), tmp_path, lambda _: True) == (
        "--dependency=afterok:12",
    )


def test_a_job_that_is_still_to_be_submitted_is_waited_for(tmp_path: Path) -> None:
    opened(tmp_path, "base")
    for run_key in ("base", "not even opened"):
        with pytest.raises(NotSubmittedYet, match=run_key):
            dependency_options(after(("start_post_comp", "base", (run_key,))), tmp_path, lambda _: True)


def test_a_job_that_the_cluster_failed_is_waited_for_while_another_attempt_may_come(tmp_path: Path) -> None:
    ended(tmp_path, "base", 11, Outcome.INFRASTRUCTURE)
    run = after(("start_post_success", "base", ("base",)))
    with pytest.raises(NotSubmittedYet):
        dependency_options(run, tmp_path, lambda _: True)
    submitted(tmp_path, "base", 12)
    assert dependency_options(run, tmp_path, lambda _: True) == ("--dependency=afterok:12",)


@pytest.mark.parametrize("outcome", [Outcome.SUCCEEDED, Outcome.TEARDOWN, Outcome.PROGRAM_ERROR])
def test_the_end_of_a_job_is_enough_where_no_success_is_required(tmp_path: Path, outcome: Outcome) -> None:
    ended(tmp_path, "base", 11, outcome)
    assert dependency_options(after(("start_post_comp", "base", ("base",))), tmp_path, lambda _: True) == ()


def test_a_run_that_never_had_a_job_is_an_end_too(tmp_path: Path) -> None:
    run = after(("start_post_comp", "base", ("base",)), ("start_post_init", "invalid", ()))
    assert dependency_options(run, tmp_path, lambda _: False) == ()


def test_what_had_to_end_well_and_did_lets_the_run_start(tmp_path: Path) -> None:
    ended(tmp_path, "base", 11, Outcome.TEARDOWN)
    assert dependency_options(after(("start_post_success", "base", ("base",))), tmp_path, lambda _: False) == ()


@pytest.mark.parametrize("outcome", [Outcome.PROGRAM_ERROR, Outcome.INFRASTRUCTURE, Outcome.CANCELLED])
def test_what_had_to_end_well_and_did_not_refuses_the_run(tmp_path: Path, outcome: Outcome) -> None:
    ended(tmp_path, "base", 11, outcome)
    with pytest.raises(LaunchRefused, match=f"'base' has ended well, and that ended as {outcome}"):
        dependency_options(after(("start_post_success", "base", ("base",))), tmp_path, lambda _: False)


def test_a_test_that_cannot_run_refuses_what_needs_it(tmp_path: Path) -> None:
    with pytest.raises(LaunchRefused, match="that cannot run"):
        dependency_options(after(("start_post_success", "base", ())), tmp_path, lambda _: False)


@pytest.mark.parametrize("status", [None, JobStatus(job_id=11, name="of-somebody-else", state=JobState.RUNNING)])
def test_a_cluster_that_cannot_know_a_job_proves_no_end_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: JobStatus | None
) -> None:
    """A site that was switched to another cluster, where the id may be another job's."""
    attempt = open_attempt(tmp_path, "base", ClusterSettings(kind="slurm", name="eos"))
    declare_intent(attempt.attempt_dir, tmp_path / "job.sh", tmp_path, after=0)
    record_submission(attempt.attempt_dir, attempt.name, 11)
    here = LocalCluster(ClusterSettings(), tmp_path / "cluster")
    monkeypatch.setattr(here, "states", lambda job_ids: {11: status} if status else {})

    with pytest.raises(CannotKnow, match="submitted to the cluster eos"):
        unrecorded_ends(after(("start_post_comp", "base", ("base",))), tmp_path, lambda _: True, here)


@pytest.mark.parametrize("is_watched", [True, False])
def test_another_job_that_got_the_id_after_slurmctld_lost_its_state_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_watched: bool
) -> None:
    attempt = submitted(tmp_path, "base", 11)
    here = LocalCluster(ClusterSettings(), tmp_path / "cluster")
    theirs = JobStatus(job_id=11, name="of-somebody-else", state=JobState.RUNNING)
    monkeypatch.setattr(here, "states", lambda job_ids: {11: theirs})
    scripts = {11: tmp_path / "theirs.sh"}
    monkeypatch.setattr(here, "script_of", scripts.get)
    run = after(("start_post_success", "base", ("base",)))

    if is_watched:
        assert unrecorded_ends(run, tmp_path, lambda _: True, here) == (11,)
    else:
        with pytest.raises(LaunchRefused, match="failed before it recorded how job 11 ended"):
            unrecorded_ends(run, tmp_path, lambda _: False, here)
    # One that the site named otherwise.
    submission = read_submission(attempt.attempt_dir)
    assert submission is not None
    scripts[11] = submission.script
    assert unrecorded_ends(run, tmp_path, lambda _: is_watched, here) == ()
