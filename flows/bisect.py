"""Bisect: the culprit commit. Each point is a run of its own through the same pipeline, several of them at once."""

from functools import partial

from prefect import flow
from prefect.client.schemas.objects import State
from prefect.logging import get_run_logger
from prefect.runtime import flow_run
from prefect.states import Completed, Failed

from nightbridge.bisect.plan import DEFAULT_REQUEST, BisectPlan, BisectRequest, point_run
from nightbridge.bisect.result import BisectResult, Point, next_points, point_of, result_lines, stored_points
from nightbridge.blocks import site_of
from nightbridge.flows.final_states import ends_plainly
from nightbridge.flows.forms import ClusterField, StoreField, SystemField
from nightbridge.flows.pipeline import pipeline_verdict
from nightbridge.flows.threads import side_by_side
from nightbridge.models import RunRecord, Site
from nightbridge.nights.liveness import alive
from nightbridge.tasks.bisect import base_run, begun_points, keep_result, plan_bisect, room_for
from nightbridge.tasks.cancel import cancel_hook, note_search
from nightbridge.tasks.compare import record_of
from nightbridge.tasks.context import shared_night
from nightbridge.tasks.site_access import store_of

MAX_AT_ONCE = 8
"""Points that are run at once where the cluster has room: more hardly speed up the search."""


@flow(name="bisect", flow_run_name="bisect {test_id}", on_cancellation=[cancel_hook], persist_result=True)
@ends_plainly
def bisect_flow(  # noqa: D417  (`SiteChoice` describes the others)
    test_id: str,
    request: BisectRequest = DEFAULT_REQUEST,
    system: SystemField = None,
    cluster: ClusterField = None,
    store: StoreField = None,
    workspace: str | None = None,
) -> State[BisectResult]:
    """Find the commit that made a metric of a test worse.

    Args:
        test_id: The test.
        request: What to search, and what it may cost.
    """
    site = site_of(system=system, cluster=cluster, store=store, workspace=workspace)
    plan = plan_bisect(test_id, request, site)
    with shared_night(), alive(site.workspace, str(flow_run.id)):
        result = search(plan, base_run(plan, site), site, request.at_once)
    kind = Completed if result.culprits else Failed
    name = {"found": "Found", "undecided": "Undecided"}.get(result.answer.kind, "NotInRange")
    return kind(name=name, message="\n".join(result_lines(result)[:3]), data=result)


def search(plan: BisectPlan, base: RunRecord, site: Site, at_once: int | None) -> BisectResult:
    """Run points until the commit is named, and keep the answer."""
    note_search(plan.bisect_id, site)
    points = list(stored_points(store_of(site), plan, base))
    if points:
        get_run_logger().info("%d runs of this bisect are already there", len(points))
    one_point = partial(_run_point, plan=plan, base=base, site=site)
    begun = begun_points(plan, base, points, site)
    points += side_by_side(one_point, begun, most=len(begun))
    while chosen := next_points(plan, points, at_once or room_for(base, site, MAX_AT_ONCE)):
        for index, number in chosen:
            get_run_logger().info("commit %d of %d, run %d", index, len(plan.all_commits), number)
        points += side_by_side(one_point, chosen, most=len(chosen))
    return keep_result(plan, tuple(points), site)


def _run_point(chosen: tuple[int, int], plan: BisectPlan, base: RunRecord, site: Site) -> Point:
    index, number = chosen
    verdict = pipeline_verdict(point_run(plan, base, index, number), site)
    return point_of(plan, index, number, verdict, record_of(verdict, site))
