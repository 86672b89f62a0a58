"""Which night a flow run belongs to: decided at its first start, the same after every retry."""

from prefect.logging import get_run_logger
from prefect.runtime import deployment, flow_run

from nightbridge.nights import checked_night, new_night, night_of
from tasks.stage import stage


@stage("night")
def fix_night(night: str | None, timezone: str) -> str:
    """Return the asked night, else the scheduled start's date for a deployment's run, else a new night."""
    if night:
        decided = checked_night(night)
    elif deployment.id:
        decided = night_of(flow_run.scheduled_start_time, timezone)
    else:
        decided = new_night()
    get_run_logger().info("night %s", decided)
    return decided
