"""Stage 4, submit: exactly one Slurm job per attempt.

Dependencies: a run whose job waits for another one's needs that job's id first.
"""

from prefect.logging import get_run_logger

from nightbridge.errors import StatusUnknown
from nightbridge.models import Job, LaunchPlan, RunSpec, Site
from nightbridge.slurm.attempt_files import read_attempt, read_submission
from nightbridge.slurm.attempts import NotSubmittedYet, dependency_options
from nightbridge.slurm.factory import cluster_of
from nightbridge.slurm.protocol import JobNotAccepted
from nightbridge.slurm.submission import submit_attempt
from nightbridge.tasks.context import raise_if_interrupted, this_night
from nightbridge.tasks.mirror import PrefectAway
from nightbridge.tasks.site import resolve_all, secret_variables
from nightbridge.tasks.stage import stage


@stage("submit", waits_for=(JobNotAccepted, StatusUnknown, PrefectAway))
def submit(plan: LaunchPlan, site: Site, options: tuple[str, ...] = ()) -> Job:
    """Submit the attempt through the upstream launcher, or find the job that it already has.

    A controller that is away and a limit that is reached are waited for, hours if it must be.

    Args:
        plan: What is started.
        site: Where.
        options: Further options for sbatch, which were unknown when the launch was planned.
    """
    cluster = cluster_of(site)
    plan = plan.model_copy(update={"sbatch_args": (*plan.sbatch_args, *options)})
    job = submit_attempt(
        plan,
        read_attempt(plan.attempt_dir),
        cluster,
        resolve_all(plan.secret_environment),
        withheld=secret_variables(site),
    )
    get_run_logger().info("job %d on %s is %s", job.job_id, job.cluster, job.name)
    return job


_LOOK_AGAIN = 2.0


def dependencies_of(run: RunSpec, plan: LaunchPlan, site: Site) -> tuple[str, ...]:
    """Wait until the jobs that this run depends on are in Slurm; return the sbatch options for them.

    Raises:
        LaunchRefused: A test that had to end well has not.
    """
    if not run.after or read_submission(plan.attempt_dir) is not None:
        return ()  # nothing to wait for, or its own job is in Slurm
    night, logged = this_night(), set[str]()
    while True:
        try:
            options = dependency_options(run, site.workspace, night.may_submit)
        except NotSubmittedYet as waiting_for:
            if str(waiting_for) not in logged:
                get_run_logger().info("waiting until %s has submitted its job", waiting_for)
            logged.add(str(waiting_for))
        else:
            get_run_logger().info("depends on: %s", " ".join(options) or "nothing that has not ended")
            return options
        raise_if_interrupted()
        night.wait_for_a_run(_LOOK_AGAIN)
