"""Which night a flow run belongs to: decided at its first start, the same after every retry.

What a night runs: planned once, when it begins, and gone by ever after.
"""

from collections.abc import Mapping, Sequence
from datetime import datetime, time
from functools import partial
from pathlib import Path
from typing import Any, Literal, cast
from uuid import UUID
from zoneinfo import ZoneInfo

from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import DeploymentSchedule, FlowRun
from prefect.logging import get_run_logger
from prefect.runtime import deployment
from prefect.server.schemas import schedules as server_schedules
from prefect.utilities.asyncutils import run_coro_as_sync

from nightbridge import config
from nightbridge.errors import TransientError
from nightbridge.models import Model, Site, utc_now
from nightbridge.nights.records import (
    LATE,
    NightPlan,
    NightStart,
    NightTest,
    checked_night,
    new_night,
    night_of_slot,
    plan_path,
    read_plan,
    record_start,
    write_plan,
)
from nightbridge.rules import check_scenario
from nightbridge.store.factory import open_store
from nightbridge.tasks.mirror import insist, show
from nightbridge.tasks.secrets import block_value
from nightbridge.tasks.stage import never_reused, stage
from nightbridge.tasks.this_run import this_flow_run
from nightbridge.tasks.validate import check_place, node_limits, show_violations


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
    kind: Any = getattr(server_schedules, type(schedule.schedule).__name__)
    dates = run_coro_as_sync(kind(**schedule.schedule.model_dump()).get_dates(n=3, start=start, end=end))
    return [date.astimezone(_zone(schedule)) for date in cast("list[datetime] | None", dates) or []]


def _zone(schedule: DeploymentSchedule) -> ZoneInfo:
    return ZoneInfo(getattr(schedule.schedule, "timezone", None) or "UTC")


PLAN_LABEL = "nightbridge.plan"
"""Label of a night's flow run: the path of its plan."""

CatchUp = Literal["last", "all", "none"]
"""Which nights that could not begin in time are run later: the last one, all of them, or none."""


class NightSkipped(Exception):
    """The night is not run: its slot was missed, and the catch-up policy says that it is let go."""


def check_catch_up(chosen: ChosenNight, policy: CatchUp) -> None:
    """Let a missed night go, if that is the policy.

    Raises:
        NightSkipped: It is.
    """
    if chosen.slot is None:
        return
    if policy == "last" and chosen.later_slot_due:
        raise NightSkipped("a later night is due as well, and only the last missed one is run")
    if policy == "none" and chosen.late:
        raise NightSkipped(f"its slot was at {chosen.slot:%H:%M}, and missed nights are not run")


def make_plan(scenario: str, chosen: ChosenNight, site: Site) -> NightPlan:
    """Read and check the scenario, settle what runs, and keep it: a restart and a cancellation go by the plan.

    Raises:
        InvalidInput: The scenario file is wrong, or is not there.
        PermanentError: The workspace or the store cannot be written.
    """
    written = config.load(Path(scenario))
    limits = node_limits(written, site)
    tests = check_scenario(written, limits)
    for warning in tests.warnings:
        get_run_logger().warning("%s", warning)
    show_violations(tests)
    check_place(site)
    runs = config.runs(tests, chosen.night, limits)
    flow_run = this_flow_run()
    start = NightStart(
        night=chosen.night,
        scenario=tests.name,
        cluster=site.cluster.name,
        workspace=site.workspace,
        begun_at=utc_now(),
        slot=chosen.slot,
        flow_run=str(flow_run.id) if flow_run else "",
        deployment=deployment.name or "",
        tests=tuple(NightTest(test_id=run.test.id, run_key=run.run_key) for run in runs),
        invalid=tuple(test.id for test in tests.invalid),
    )
    plan = NightPlan(start=start, scenario=tests, runs=runs, site=site, limits=limits)
    _label(write_plan(plan))
    keep_start(start, site)
    return plan


@stage("begin", waits_for=(TransientError,), key=never_reused)
def keep_start(start: NightStart, site: Site) -> None:
    """Record in the store that the night has begun, for the watchdog and for `nightbridge nights`."""
    record_start(open_store(site.store_settings, block_value), start)


def plan_of_this_run() -> NightPlan | None:
    """The plan that an earlier process of this flow run has made; None at its first start."""
    flow_run = this_flow_run()
    plan = plan_of(flow_run) if flow_run else None
    if plan is not None:
        get_run_logger().info("night %s: going by the plan of its first start", plan.start.night)
    return plan


def plan_of(flow_run: FlowRun, workspace: Path | None = None) -> NightPlan | None:
    """The plan of a flow run's night; None where it made none.

    Args:
        flow_run: The night's flow run.
        workspace: Where to look when the flow run does not say where its plan is.
    """
    path = flow_run.labels.get(PLAN_LABEL)
    if path:
        return read_plan(Path(str(path)))
    return read_plan(plan_path(workspace, str(flow_run.id))) if workspace else None


def show_name(name: str) -> None:
    """Name the flow run after its night: Prefect names it before anybody knows the night, and again at each start."""
    flow_run = this_flow_run()
    if flow_run is None:
        return

    def rename() -> None:
        with get_client(sync_client=True) as client:
            client.set_flow_run_name(flow_run.id, name)

    show("the night's name", rename)


def _label(path: Path) -> None:
    """Say on the flow run where the plan is: no other file is needed to find it."""
    flow_run = this_flow_run()
    if flow_run is None:
        return
    labels: Mapping[str, Any] = {PLAN_LABEL: str(path)}

    def update() -> None:
        with get_client(sync_client=True) as client:
            client.update_flow_run_labels(flow_run.id, labels=dict(labels))

    insist("the flow run's label", update)
