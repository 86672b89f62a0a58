"""Dependencies between the runs of a night as dependencies between Slurm jobs."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from nightbridge.errors import LaunchRefused
from nightbridge.models import Job, Outcome, RunDependency, RunSpec
from nightbridge.slurm.attempt_files import Submission, read_submission
from nightbridge.slurm.attempts import GOOD_OUTCOMES, attempts_of, read_ended

SLURM_TYPES: Mapping[str, str] = {
    "start_post_comp": "afterany",
    "start_post_init": "after",
    "start_post_success": "afterok",
}
"""CloudAI's types of dependency, and ours, as types of sbatch's `--dependency`. An `afterok` that can never be
satisfied leaves the job pending as DependencyNeverSatisfied, which ends the wait for it."""


class NotSubmittedYet(Exception):
    """A job that another one depends on is still to be submitted, by the run of this key."""


def dependency_options(run: RunSpec, workspace: Path, goes_on: Callable[[str], bool]) -> tuple[str, ...]:
    """The sbatch option that makes a run's job wait for the jobs that it depends on; none when none is left.

    What has ended is judged here and not by Slurm, which forgets a job some minutes after its end.

    Args:
        run: The run.
        workspace: Where the attempts of all runs of the night are recorded.
        goes_on: Whether a run of this night, by its key, may still submit a job.

    Raises:
        NotSubmittedYet: Ask again when the run that it names has submitted its job, or is over.
        LaunchRefused: A test that had to end well has not.

    """
    wishes = [
        f"{SLURM_TYPES[dependency.type]}:{job_id}"
        for dependency in run.after
        for job_id in _jobs_to_wait_for(run, dependency, workspace, goes_on)
    ]
    return (f"--dependency={','.join(dict.fromkeys(wishes))}",) if wishes else ()


def _jobs_to_wait_for(
    run: RunSpec, dependency: RunDependency, workspace: Path, goes_on: Callable[[str], bool]
) -> Iterator[int]:
    if not dependency.run_keys:
        _check_end(run, dependency, "cannot run")
    for run_key in dependency.run_keys:
        # Asked before the records are read: what is submitted in between is seen there.
        may_submit = goes_on(run_key)
        submission, ended = _newest_job(run_key, workspace)
        if ended is not None and not (may_submit and ended.outcome is Outcome.INFRASTRUCTURE):
            _check_end(run, dependency, f"ended as {ended.outcome}", good=ended.outcome in GOOD_OUTCOMES)
        elif ended is None and submission is not None:
            yield submission.job_id
        elif may_submit:
            raise NotSubmittedYet(run_key)
        else:
            _check_end(run, dependency, "never had a job")


def _newest_job(run_key: str, workspace: Path) -> tuple[Submission | None, Job | None]:
    attempts = attempts_of(run_key, workspace)
    if not attempts:
        return None, None
    return read_submission(attempts[-1].attempt_dir), read_ended(attempts[-1].attempt_dir)


def _check_end(run: RunSpec, dependency: RunDependency, what: str, *, good: bool = False) -> None:
    if dependency.type == "start_post_success" and not good:
        raise LaunchRefused(
            f"it starts only after {dependency.id!r} has ended well, and that {what}",
            thing=run.test.id,
            advice=f"Fix {dependency.id!r}, or depend on its end alone (start_post_comp)",
        )
