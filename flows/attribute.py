"""Attribution: the cause of a change on every axis. Each exchange is a run of its own through the same pipeline."""

from functools import partial

from prefect import flow
from prefect.client.schemas.objects import State
from prefect.logging import get_run_logger
from prefect.runtime import flow_run
from prefect.states import Completed, Failed

from nightbridge.attribution.attribution_plan import (
    DEFAULT_REQUEST,
    AttributionPlan,
    AttributionRequest,
    PlannedRun,
    begin_designs,
    design_run,
)
from nightbridge.attribution.attribution_result import (
    AttributionResult,
    ExchangeRun,
    Stop,
    evaluate,
    next_designs,
    ranges_of,
    run_of,
    sentence,
    stored_runs,
    with_descent,
    within_budget,
)
from nightbridge.attribution.axes import base_of_descent, exchanged_site, nodes_at
from nightbridge.blocks import site_of
from nightbridge.errors import PermanentError
from nightbridge.flows.bisect import MAX_AT_ONCE, search
from nightbridge.flows.final_states import ends_plainly
from nightbridge.flows.forms import ClusterField, StoreField, SystemField
from nightbridge.flows.pipeline import pipeline_verdict
from nightbridge.flows.threads import side_by_side
from nightbridge.gate.nodes import on_nodes
from nightbridge.models import RunRecord, Site
from nightbridge.nights.liveness import alive
from nightbridge.tasks.attribute import bad_run, earlier_result, keep_answer, plan_attribution, plan_descent, usual_cost
from nightbridge.tasks.bisect import base_run, room_for
from nightbridge.tasks.cancel import cancel_hook, note_search
from nightbridge.tasks.compare import record_of
from nightbridge.tasks.context import shared_night
from nightbridge.tasks.site_access import store_of
from nightbridge.tasks.stage import patiently


@flow(name="attribute", flow_run_name="attribute {test_id}", on_cancellation=[cancel_hook], persist_result=True)
@ends_plainly
def attribute_flow(  # noqa: D417  (`SiteChoice` describes the others)
    test_id: str,
    request: AttributionRequest = DEFAULT_REQUEST,
    system: SystemField = None,
    cluster: ClusterField = None,
    store: StoreField = None,
    workspace: str | None = None,
) -> State[AttributionResult]:
    """Find what made a test worse: image, commits, submodules, configuration, environment or nodes.

    Args:
        test_id: The test.
        request: What to find the cause of, and what it may cost.
    """
    site = site_of(system=system, cluster=cluster, store=store, workspace=workspace)
    with alive(site.workspace, str(flow_run.id)):
        result = attribute(test_id, request, site)
    kind = Completed if result.is_found else Failed
    names = {"found": "Found", "undecided": "Undecided", "indistinct": "Indistinct"}
    return kind(name=names.get(result.cause.kind, "NotInChanges"), message=sentence(result), data=result)


def attribute(test_id: str, request: AttributionRequest, site: Site) -> AttributionResult:
    """Find the cause of the last change, or return what was found before.

    Raises:
        InvalidInput: The test has no history, nothing became worse, or nothing changed.
    """
    plan = plan_attribution(test_id, request, site)
    if found := earlier_result(plan, site):
        get_run_logger().info("answered before: %s", sentence(found))
        return found
    note_search(plan.attribution_id, site)
    own = exchanged_site(site, plan.factors)
    with shared_night():
        bad = bad_run(plan, site)
        usual = patiently(partial(usual_cost, plan, site))
        result = _exchange(plan, bad, own, request.at_once, usual)
        return keep_answer(_descend(result, bad, own, request.at_once, usual), site)


def _exchange(
    plan: AttributionPlan, bad: RunRecord, site: Site, at_once: int | None, usual: float
) -> AttributionResult:
    """Exchange factors between the good and the bad night until the answer is as sure as wanted."""
    ended, begun = stored_runs(store_of(site), plan, bad)
    if ended or begun:
        get_run_logger().info("%d runs of this attribution are already there, %d begun", len(ended), len(begun))
    one_run = partial(_run_design, plan=plan, bad=bad, site=site)
    runs = [*ended, *side_by_side(one_run, begun, most=len(begun))]
    stopped: Stop = ""
    while True:
        room = at_once or room_for(bad, site, MAX_AT_ONCE // 4)
        designs, stopped = next_designs(plan, runs, room, usual)
        if not designs:
            break
        begun = begin_designs(store_of(site), plan, designs)
        runs += side_by_side(one_run, begun, most=len(begun))
    return evaluate(plan, runs, stopped=stopped)


def _descend(
    result: AttributionResult, bad: RunRecord, site: Site, at_once: int | None, usual: float
) -> AttributionResult:
    """The answer with what was found inside those factors of the cause that are ranges."""
    plan = result.plan
    for group in ranges_of(result):
        try:
            if planned := plan_descent(result, group, site):
                within = within_budget(result, planned, usual)
                own = base_of_descent(bad, plan.factors, result.factors)
                base = own if within.base == plan.bad else base_run(within, site)
                result = with_descent(result, search(within, base, site, at_once))
        except PermanentError as error:  # a rewritten branch or a closed registry is no reason to lose what is known
            result = result.model_copy(update={"notes": (*result.notes, str(error))})
    return result


def _run_design(planned: PlannedRun, plan: AttributionPlan, bad: RunRecord, site: Site) -> ExchangeRun:
    run = on_nodes(design_run(plan, bad, planned), nodes_at(plan.factors, planned.design, bad))
    verdict = pipeline_verdict(run, site)
    return run_of(plan, planned, verdict, record_of(verdict, site))
