"""Which night a flow run belongs to: decided at its first start, the same after every retry."""

from collections.abc import Sequence
from datetime import datetime, time
from functools import partial
from uuid import UUID
from zoneinfo import ZoneInfo

from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import DeploymentSchedule, FlowRun
from prefect.logging import get_run_logger
from prefect.server.schemas import schedules as server_schedules
from prefect.utilities.asyncutils import run_coro_as_sync

from nightbridge.models import Model
from nightbridge.nights.ids import checked_night, new_night, night_of_slot
from nightbridge.nights.records import LATE
from tasks.mirror import insist
from tasks.stage import stage
from tasks.this_run import this_flow_run


class ChosenNight(Model):
    """A night id, and what the schedule has to do with it."""

    night: str
    slot: datetime | None = None
    late: bool = False
    later_slot_due: bool = False


@stage("night")
def fix_night(night: str | None) -> ChosenNight:
    """Return the night that was asked for, else the one of the schedule's slot, else a new one."""
    chosen = choose_night(night, this_flow_run())
    get_run_logger().info("night %s", chosen.night)
    return chosen


def choose_night(night: str | None, flow_run: FlowRun | None) -> ChosenNight:
    """The night that was asked for, else the one of the flow run's slot, else a new one."""
    if night:
        return ChosenNight(night=checked_night(night))
    if flow_run is None or not flow_run.auto_scheduled or flow_run.deployment_id is None:
        return ChosenNight(night=new_night(flow_run.expected_start_time if flow_run else None))
    schedules = insist("the schedules of the deployment", partial(_schedules_of, flow_run.deployment_id))
    return night_of_schedule(flow_run, schedules, datetime.now(ZoneInfo("UTC")))


def _schedules_of(deployment_id: UUID) -> list[DeploymentSchedule]:
    with get_client(sync_client=True) as client:
        return client.read_deployment(deployment_id).schedules


def night_of_schedule(flow_run: FlowRun, schedules: Sequence[DeploymentSchedule], now: datetime) -> ChosenNight:
    """The night of a scheduled flow run, from its deployment's schedules; each slot counts in its schedule's zone."""
    own = [schedule for schedule in schedules if flow_run.created_by and schedule.id == flow_run.created_by.id]
    expected = flow_run.expected_start_time
    assert expected is not None  # scheduled flow runs have one
    # A deployment that was made again since has new schedules: then the first of them says the zone.
    zone = _zone([*own, *schedules][0]) if schedules else ZoneInfo("UTC")
    slot = expected.astimezone(zone)
    first_of_the_day = [
        found
        for schedule in schedules
        for found in _slots(schedule, datetime.combine(slot.date(), time(), _zone(schedule)), slot)[:1]
        if found.date() == slot.date()
    ]
    later = any(found > slot for schedule in own for found in _slots(schedule, slot, now))
    return ChosenNight(
        night=night_of_slot(slot, first_of_the_day), slot=slot, late=now - slot > LATE, later_slot_due=later
    )


def _slots(schedule: DeploymentSchedule, start: datetime, end: datetime) -> list[datetime]:
    """The first few times at which a schedule wants a run, from `start` to `end`, in the schedule's own zone."""
    kind = getattr(server_schedules, type(schedule.schedule).__name__)
    dates = run_coro_as_sync(kind(**schedule.schedule.model_dump()).get_dates(n=3, start=start, end=end))
    return [date.astimezone(_zone(schedule)) for date in dates or []]


def _zone(schedule: DeploymentSchedule) -> ZoneInfo:
    return ZoneInfo(getattr(schedule.schedule, "timezone", None) or "UTC")
