"""Stage 4, submit: exactly one Slurm job per attempt."""

from prefect.logging import get_run_logger

from nightbridge.errors import StatusUnknown
from nightbridge.models import Job, LaunchPlan, Site
from nightbridge.slurm.attempts import read_attempt
from nightbridge.slurm.factory import open_cluster
from nightbridge.slurm.protocol import JobNotAccepted
from nightbridge.slurm.submission import submit_attempt
from tasks.mirror import PrefectAway
from tasks.secrets import resolve_all, variables_of
from tasks.stage import stage


@stage("submit", waits_for=(JobNotAccepted, StatusUnknown, PrefectAway))
def submit(plan: LaunchPlan, site: Site, options: tuple[str, ...] = ()) -> Job:
    """Submit the attempt through the upstream launcher, or find the job that it already has.

    A controller that is away and a limit that is reached are waited for, hours if it must be.

    Args:
        plan: What is started.
        site: Where.
        options: Further options for sbatch, that nobody knew when the launch was planned.
    """
    cluster = open_cluster(site.cluster, site.workspace)
    plan = plan.model_copy(update={"sbatch_args": (*plan.sbatch_args, *options)})
    job = submit_attempt(
        plan,
        read_attempt(plan.attempt_dir),
        cluster,
        resolve_all(plan.secret_environment),
        withheld=variables_of((site.store_settings.access_key, site.store_settings.secret_key)),
    )
    get_run_logger().info("job %d on %s is %s", job.job_id, job.cluster, job.name)
    return job
