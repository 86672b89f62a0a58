"""A night: which one a flow run belongs to, what it runs, and when a person last retried it.

Night and plan are settled at the first start and kept: every restart, and a cancellation, goes by them.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from datetime import UTC, datetime, time
from functools import partial
from itertools import count, pairwise
from pathlib import Path
from typing import Any, Literal
from zoneinfo import ZoneInfo

from prefect.client.schemas.filters import FlowRunFilter
from prefect.client.schemas.objects import TERMINAL_STATES, DeploymentSchedule, FlowRun, State, StateType
from prefect.client.schemas.sorting import FlowRunSort
from prefect.logging import get_run_logger
from prefect.runtime import deployment

from nightbridge import config
from nightbridge.blocks import site_of
from nightbridge.errors import InvalidInput, TransientError
from nightbridge.models import Model, Scenario, Site, SiteChoice, utc_now
from nightbridge.nights.records import (
    LATE,
    NightPlan,
    NightStart,
    NightTest,
    checked_night,
    claim_start,
    new_night,
    night_of_further_slot,
    night_of_slot,
    plan_path,
    read_end,
    read_plan,
    read_start,
    record_start,
    write_plan,
)
from nightbridge.rules import check_scenario
from nightbridge.tasks.context import run_log, this_flow_run, this_night
from nightbridge.tasks.prefect_calls import insist, on_server
from nightbridge.tasks.prepare import check_place, node_limits, show_violations
from nightbridge.tasks.site_access import store_of
from nightbridge.tasks.stage import never_reused, patiently, stage


class ChosenNight(Model):
    """A night id, and what the schedule has to do with it."""

    night: str
    slot: datetime | None = None
    late: bool = False
    later_slot_due: bool = False


@stage("night")
def fix_night(night: str | None) -> ChosenNight:
    """Return the requested night, else the one of the schedule's slot, else a new one."""
    chosen = choose_night(night, this_flow_run())
    get_run_logger().info("night %s", chosen.night)
    return chosen


def choose_night(night: str | None, flow_run: FlowRun | None) -> ChosenNight:
    """The requested night, else the one of the flow run's slot, else a new one."""
    if night:
        return ChosenNight(night=checked_night(night))
    if flow_run is None or not flow_run.auto_scheduled or flow_run.deployment_id is None:
        return ChosenNight(night=new_night(flow_run.expected_start_time if flow_run else None))
    deployment_id, expected = flow_run.deployment_id, flow_run.expected_start_time
    assert expected is not None  # scheduled flow runs have one
    read = on_server(lambda client: client.read_deployment(deployment_id).schedules)
    slot = expected.astimezone(zone_of(flow_run, insist("the schedules of the deployment", read)))
    now = utc_now()
    today = {"after_": datetime.combine(slot.date(), time(), slot.tzinfo), "before_": now}
    since = FlowRunFilter.model_validate({"deployment_id": {"any_": [deployment_id]}, "expected_start_time": today})
    newest = FlowRunSort.EXPECTED_START_TIME_DESC
    find = on_server(lambda client: client.read_flow_runs(flow_run_filter=since, sort=newest))
    due = insist("the nights that are due", find)
    return night_of_schedule(slot, now, [run.expected_start_time for run in due if run.auto_scheduled])


def zone_of(flow_run: FlowRun, schedules: Sequence[DeploymentSchedule]) -> ZoneInfo:
    """The zone in which a scheduled flow run's slot counts: its schedule's."""
    own = [schedule for schedule in schedules if flow_run.created_by and schedule.id == flow_run.created_by.id]
    # A deployment that was made again since has new schedules: then the first of them gives the zone.
    names = (getattr(schedule.schedule, "timezone", None) for schedule in (*own, *schedules))
    return ZoneInfo(next(names, None) or "UTC")


def night_of_schedule(slot: datetime, now: datetime, due: Iterable[datetime | None]) -> ChosenNight:
    """The night of a slot, in its own zone.

    `due` are the slots of the deployment's scheduled flow runs since that day began: a slot without one is nobody's,
    such as those of the days before the schedule was moved.
    """
    slots = [found.astimezone(slot.tzinfo) for found in due if found]
    return ChosenNight(
        night=night_of_slot(slot, (found for found in slots if found.date() == slot.date())),
        slot=slot,
        late=now - slot > LATE,
        later_slot_due=any(found > slot for found in slots),
    )


PLAN_LABEL = "nightbridge.plan"
"""Label of a night's flow run: the path of its plan."""

CatchUp = Literal["last", "all", "none"]
"""Which nights that could not begin in time are run later: the last one, all of them, or none."""


class NightSkipped(Exception):
    """The night is not run: its slot was missed, and the catch-up policy drops it."""


def check_catch_up(chosen: ChosenNight, policy: CatchUp) -> None:
    """Drop a missed night, if that is the policy.

    Raises:
        NightSkipped: It is.
    """
    if chosen.slot is None:
        return
    if policy == "last" and chosen.later_slot_due:
        raise NightSkipped("a later night is due as well, and only the last missed one is run")
    if policy == "none" and chosen.late:
        raise NightSkipped(f"its slot was at {chosen.slot:%H:%M}, and missed nights are not run")


def read_scenario(path: str, tests: Sequence[str] = ()) -> Scenario:
    """The scenario of this night, checked by every rule that needs nothing of the site.

    It is the one that the flow's caller has read already, else it is read here, once.

    Args:
        path: The scenario file.
        tests: Ids of the tests to run, with those that they depend on; all when empty.

    Raises:
        InvalidInput: The scenario file is wrong, or is not there, or has no such test.
    """
    scenario = this_night().scenario or check_scenario(config.load(Path(path)))
    return config.only_tests(scenario, tests) if tests else scenario


def own_night(chosen: ChosenNight, scenario: Scenario, site: Site) -> tuple[ChosenNight, NightStart | None]:
    """The night with an id that is not taken: by another deployment, or a slot of before the schedule was moved.

    With it comes how it began, where it did.

    Raises:
        InvalidInput: Another cluster has the night in this store.
    """
    for name in _possible_nights(chosen):
        earlier = patiently(partial(_read_start, name, scenario.name, site))
        if earlier is None or not _is_anothers(earlier, chosen.slot, deployment.name, scenario.test_ids):
            break
        run_log().info("night %s is that of the slot at %s %s", name, earlier.slot, earlier.deployment)
    if earlier is not None and earlier.cluster != site.cluster.name:
        what = f"the store has this night already, of cluster {earlier.cluster}, not of {site.cluster.name}"
        advice = "Give each cluster a store of its own, such as a prefix in the store's URL, or the night another id"
        raise InvalidInput(what, subject=f"{scenario.name}, night {name}", advice=advice)
    return chosen.model_copy(update={"night": name}), earlier


def _possible_nights(chosen: ChosenNight) -> Iterator[str]:
    yield chosen.night
    if chosen.slot is not None:
        timed = night_of_further_slot(chosen.slot)
        if timed != chosen.night:
            yield timed
        yield from (f"{timed}-{number}" for number in count(2))


def _read_start(night: str, scenario: str, site: Site) -> NightStart | None:
    return read_start(store_of(site), night, scenario)


def _is_anothers(earlier: NightStart, slot: datetime | None, own: str | None, test_ids: Collection[str]) -> bool:
    """Whether a night is that of another slot, or for this one of another deployment that has none of these tests."""
    if earlier.slot is None or slot is None:
        return False
    if earlier.slot.astimezone(UTC) != slot.astimezone(UTC):
        return True
    return earlier.deployment not in ("", own) and set(earlier.test_ids).isdisjoint(test_ids)


def check_same_tests(scenario: Scenario, earlier: NightStart) -> None:
    """Refuse some tests under the id of a night that has others: its record and its report would forget these.

    Raises:
        InvalidInput: It has.
    """
    if others := [test for test in earlier.test_ids if test not in scenario.test_ids]:
        raise InvalidInput(
            f"this night has other tests, too: {', '.join(others)}",
            subject=f"{scenario.name}, night {earlier.night}",
            advice="Give these tests a night of their own, with another id or none, or start the night with all tests; "
            "Retry runs those again that ended badly",
        )


def make_night_plan(scenario: Scenario, chosen: ChosenNight, site: Site, choice: SiteChoice) -> NightPlan:
    """Settle what runs, and keep it: a restart and a cancellation go by the plan.

    Raises:
        PermanentError: The workspace or the store cannot be written.
    """
    limits = patiently(lambda: node_limits(scenario, site))
    if limits is not None:
        scenario = check_scenario(scenario, limits)
    for warning in scenario.warnings:
        get_run_logger().warning("%s", warning)
    show_violations(scenario, site.cluster.name)
    check_place(site)
    runs = config.runs(scenario, chosen.night, limits)
    flow_run = this_flow_run()
    start = NightStart(
        night=chosen.night,
        scenario=scenario.name,
        cluster=site.cluster.name,
        workspace=site.workspace,
        begun_at=utc_now(),
        slot=chosen.slot,
        flow_run=str(flow_run.id) if flow_run else "",
        deployment=deployment.name or "",
        tests=tuple(NightTest(test_id=run.test.id, run_key=run.run_key) for run in runs),
        invalid=tuple(test.id for test in scenario.invalid),
        site_options=choice.from_anywhere().as_options(),
    )
    plan = NightPlan(start=start, scenario=scenario, runs=runs, site=site, limits=limits)
    _label(write_plan(plan))
    return plan


@stage("begin", waits_for=(TransientError,), key=never_reused)
def keep_start(start: NightStart, site: Site) -> None:
    """Record in the store that the night has started, for the watchdog and for `nightbridge nights`.

    Every start of the flow run does: the one before may have been killed while it waited for the store.

    Raises:
        InvalidInput: The night has ended, and this workspace does not know its jobs: they would be submitted again. Or
            another deployment's night got the id since this one chose it: each would replace the other's report.
    """
    store = store_of(site)
    ended = read_end(store, start.night, start.scenario)
    submitted = [verdict.run_key for verdict in ended.verdicts if verdict.job_id is not None] if ended else []
    if gone := [run_key for run_key in submitted if not (site.workspace / "runs" / run_key).exists()]:
        raise InvalidInput(
            f"this night has ended, and {', '.join(gone[:3])} would be submitted again: what was kept of it is not"
            f" in {site.workspace / 'runs'}",
            subject=f"{start.scenario}, night {start.night}",
            advice="Give the night another id, or none; the results and the report of this one are kept",
        )
    earlier = claim_start(store, start)
    if earlier and _is_anothers(earlier, start.slot, start.deployment, start.test_ids):
        what = f"this night has become that of the slot at {earlier.slot} {earlier.deployment}"
        advice = f"Both began at one moment: run the deployment {start.deployment} by hand, without a night id"
        raise InvalidInput(what, subject=f"{start.scenario}, night {start.night}", advice=advice)
    if earlier != start:
        record_start(store, start)


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
        workspace: Where to look when the flow run does not name its plan.
    """
    path = flow_run.labels.get(PLAN_LABEL)
    if path:
        return read_plan(Path(str(path)))
    return read_plan(plan_path(workspace, str(flow_run.id))) if workspace else None


def workspace_of(flow_run: FlowRun) -> Path | None:
    """The workspace that a flow run's night recorded, else the one that its parameters name; None where nothing does.

    Raises:
        InvalidInput: A file or block that the parameters name cannot be read.
    """
    given = flow_run.parameters
    if plan := flow_run.labels.get(PLAN_LABEL):
        return Path(str(plan)).parents[1]
    if isinstance(site := given.get("site"), dict) and "workspace" in site:
        return Path(site["workspace"])
    return site_of(**given).workspace if "scenario" in given else None


def _label(path: Path) -> None:
    """Say on the flow run where the plan is: no other file is needed to find it."""
    flow_run = this_flow_run()
    if flow_run is not None:
        labels: dict[str, Any] = {PLAN_LABEL: str(path)}
        update = on_server(lambda client: client.update_flow_run_labels(flow_run.id, labels=labels))
        insist("the flow run's label", update)


# --- a person's retry -------------------------------------------------------------------------------------------------

RESUMING = "Resuming"
"""Name of the state of a flow run that is resumed without a person's retry: Prefect's own after a suspension, the
reaper's after a crash."""

_STARTING = frozenset({StateType.SCHEDULED, StateType.PENDING, StateType.RUNNING})


def last_retry() -> datetime | None:
    """When a person last retried this flow run; None without a retry.

    Prefect's own count of starts does not show it: it counts those after the loss of a worker, and not those after a
    suspension.

    Raises:
        PrefectAway: Prefect's server did not answer for as long as the patience lasts.
    """
    flow_run = this_flow_run()
    if flow_run is None:
        return None
    read = on_server(lambda client: client.read_flow_run_states(flow_run.id))
    return retried_at(insist("the states that this flow run has had", read))


def retried_at(states: Sequence[State]) -> datetime | None:
    """When a flow run that has had these states was last started again after it had ended, and not by the reaper."""
    ordered = sorted(states, key=lambda state: state.timestamp)
    retries = (
        state.timestamp
        for before, state in pairwise(ordered)
        if before.type in TERMINAL_STATES and state.type in _STARTING and state.name != RESUMING
    )
    return max(retries, default=None)
