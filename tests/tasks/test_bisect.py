"""Which plan a request searches by."""

from pathlib import Path

from nightbridge.bisect.plan import BisectPlan, BisectRequest, keep_plan
from nightbridge.bisect.search import BisectPolicy
from nightbridge.models import Site
from nightbridge.tasks.bisect import find_plan
from nightbridge.tasks.site import store_of
from tests.builders import ATTRIBUTION_PLAN


def test_a_bisect_that_is_named_goes_on_with_what_it_may_cost_now(tmp_path: Path) -> None:
    site = Site(workspace=tmp_path)
    question = {name: getattr(ATTRIBUTION_PLAN, name) for name in ("test_id", "cluster", "series", "metric", "since")}
    levels = {name: getattr(ATTRIBUTION_PLAN, name) for name in ("statistic", "unit", "levels")}
    ends = {"repository": "megatron_bridge", "url": "u", "good": "a" * 40, "bad": "b" * 40, "commits": ()}
    few = BisectPolicy(most_runs=1)
    plan = BisectPlan(bisect_id="n1-bisect-1", prior=(), base="", policy=few, **question, **levels, **ends)
    keep_plan(store_of(site), plan)

    found = find_plan(plan.test_id, BisectRequest(bisect_id="n1-bisect-1", most_runs=20, confidence=0.6), site)

    assert found == plan.model_copy(update={"policy": BisectPolicy(most_runs=20, confidence=0.6)})
