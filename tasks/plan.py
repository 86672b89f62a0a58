"""What a night runs: planned once, when it begins, and gone by ever after."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import FlowRun
from prefect.logging import get_run_logger
from prefect.runtime import deployment

from nightbridge import config
from nightbridge.errors import TransientError
from nightbridge.models import Site, utc_now
from nightbridge.nights.records import (
    NightPlan,
    NightStart,
    NightTest,
    plan_path,
    read_plan,
    record_start,
    write_plan,
)
from nightbridge.rules import check_scenario
from nightbridge.store.objects import open_store
from tasks.mirror import insist, show
from tasks.night import ChosenNight
from tasks.prepare import check_place, node_limits
from tasks.secrets import block_value
from tasks.stage import never_reused, stage
from tasks.this_run import this_flow_run
from tasks.validate import show_violations

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
