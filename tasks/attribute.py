"""The stages of an attribution besides those of a run: the question, what a run measured, and the answer."""

import math
from collections.abc import Sequence
from functools import partial

from prefect.logging import get_run_logger

from nightbridge.attribution.attribution_plan import (
    AttributionPlan,
    AttributionRequest,
    find_change,
    images_range,
    keep_plan,
    make_attribution_plan,
    plan_of_range,
    same_change,
    submodule_range,
)
from nightbridge.attribution.attribution_result import (
    AttributionResult,
    Group,
    descent_plan,
    descent_request,
    keep_result,
    load_result,
    result_lines,
    sentence,
)
from nightbridge.attribution.axes import AXIS_WORDS
from nightbridge.bisect import plan as bisect_plans
from nightbridge.bisect.plan import BisectPlan
from nightbridge.bisect.shift import Shift, decisions_of, find_rows, rows_of_test, searched_rows
from nightbridge.errors import InvalidInput
from nightbridge.harvest.manifest import load_record, run_key_of
from nightbridge.history.rows import HistoryRow, gpu_hours
from nightbridge.images.image import versions_between
from nightbridge.images.registry import registry_tags
from nightbridge.models import RunRecord, Site
from nightbridge.tasks.bisect import dearer, inner_of, repo_of, show_answer, stored_base, verdict_of
from nightbridge.tasks.prefect_calls import artifact_key
from nightbridge.tasks.site_access import commits_between, image_login, open_bumps, store_of
from nightbridge.tasks.stage import never_reused, stage


@stage("attribution-plan", key=never_reused)
def plan_attribution(test_id: str, request: AttributionRequest, site: Site) -> AttributionPlan:
    """Find what became worse in the test's history and what changed with it; the first such plan holds."""
    store = store_of(site)
    plan = keep_plan(store, find_plan(test_id, request, site))
    changed = ", ".join(factor.name for factor in plan.factors)
    get_run_logger().info("attribution %s: %s changed", plan.attribution_id, changed)
    return plan


def find_plan(test_id: str, request: AttributionRequest, site: Site) -> AttributionPlan:
    """The plan of a request: a new one, or that of an earlier search for the same change. Nothing is written.

    What it may cost is the request's each time: a larger budget resumes it.
    """
    store = store_of(site)
    rows = find_rows(store, test_id, site.cluster.name, request)
    shift = find_change(rows, partial(verdict_of, store), request, decisions_of(store, rows))
    plan = same_change(store, shift, request) or make_attribution_plan(
        rows, shift, partial(load_record, store), request
    )
    return plan.model_copy(update={"policy": request.policy, "budget": request.budget})


def cost_of(test_id: str, request: AttributionRequest, site: Site) -> str:
    """What an attribution exchanges and will about cost, what is stored already taken off; said before it begins."""
    plan = find_plan(test_id, request, site)
    if earlier_result(plan, site):
        return "answered before, nothing is run"
    # Both controls, one that shows the cause directly, and a bit for each doubling of the factors.
    ranges = ", as many again if it is a commit" if any(factor.is_range for factor in plan.factors) else ""
    runs = 3 + math.ceil(math.log2(len(plan.factors) + 1))
    changed = ", ".join(AXIS_WORDS[axis].removeprefix("the ") for axis in plan.axes)
    return f"{changed} changed; about {runs} runs{ranges}, {usual_cost(plan, site):.3g} GPU-hours each"


def usual_cost(plan: AttributionPlan, site: Site) -> float:
    """What a run of an attribution usually costs, in GPU-hours; 0 where it is not known.

    It is what the dearer one of both nights cost: half of the runs are as good as the good one, and where the bad one
    died at once, these are what the search costs.
    """
    bad = load_record(store_of(site), plan.bad)
    return (gpu_hours(dearer(store_of(site), plan.good, bad)) or 0.0) if bad else 0.0


def earlier_result(plan: AttributionPlan, site: Site) -> AttributionResult | None:
    """What was found about the same change; None where that does not answer the plan."""
    found = load_result(store_of(site), plan)
    return found if found and found.answers(plan) else None


@stage("attribution-base", key=never_reused)
def bad_run(plan: AttributionPlan, site: Site) -> RunRecord:
    """The bad night's own run, which all runs of an attribution repeat."""
    return stored_base(plan.bad, site, advice="Name other nights")


@stage("attribution-descent", key=never_reused)
def plan_descent(result: AttributionResult, group: Group, site: Site) -> BisectPlan | None:
    """The bisect inside factors of the cause, kept where a bisect is; None where nothing lies between both ends.

    Raises:
        InvalidInput: The commits between both ends cannot be listed.
    """
    store = store_of(site)
    searched = _own_range(result, group, site) or _range_of_commits(result, group, site)
    if searched.repository == "image" and len(searched.all_commits) == 1:
        return None
    return bisect_plans.keep_plan(store, descent_plan(result, group, searched))


def _own_range(result: AttributionResult, group: Group, site: Site) -> BisectPlan | None:
    """The range of an image, or of a submodule that the test itself pins; None for any other."""
    store, plan = store_of(site), result.plan
    factor = plan.factors[group[0]]
    good, bad = (load_record(store, prefix) for prefix in (plan.good, plan.bad))
    if good is None or bad is None:
        return None
    if factor.axis == "image":
        versions = versions_between(factor.good, factor.bad, partial(registry_tags, credentials=image_login(site)))
        return plan_of_range(plan, images_range(factor, versions, bad))
    pinned = good.spec.test.megatron_bridge.submodules, bad.spec.test.megatron_bridge.submodules
    if len(group) == 1 and any(factor.folder in each for each in pinned):
        url = bad.spec.test.megatron_bridge.url
        return plan_of_range(plan, submodule_range(factor, bad, partial(open_bumps, site, url)))
    return None


def _range_of_commits(result: AttributionResult, group: Group, site: Site) -> BisectPlan:
    """The bisect of a repository's commits, submodules' among them."""
    store, plan = store_of(site), result.plan
    request = descent_request(result, group)
    every = rows_of_test(store, plan.test_id, plan.cluster)
    return bisect_plans.make_bisect_plan(
        searched_rows(every, request),
        partial(commits_between, site),
        partial(verdict_of, store),
        request,
        _shift_of(plan, every),
        partial(inner_of, store, site),
        partial(repo_of, store),
    )


@stage("attribution-result", key=never_reused)
def keep_answer(result: AttributionResult, site: Site) -> AttributionResult:
    """Keep the answer with its evidence, and show it."""
    keep_result(store_of(site), result)
    key = artifact_key("attribution", result.plan.cluster, result.plan.test_id)
    show_answer(result_lines(result), "attribution", key=key, description=sentence(result)[:200])
    return result


def _shift_of(plan: AttributionPlan, rows: Sequence[HistoryRow]) -> Shift:
    """What became worse, as the plan has it, though another attempt of a run may be in the history by now."""
    by_key = {row.run_key: row for row in rows}
    ends = [run_key_of(prefix) for prefix in (plan.good, plan.bad)]
    if gone := [key for key in ends if key not in by_key]:
        raise InvalidInput("not in the history of this test", subject=gone[0], advice="Name other nights")
    good, bad = (by_key[key] for key in ends)
    return Shift(plan.metric, plan.metric, plan.statistic, plan.unit, plan.since, good, bad, plan.levels)
