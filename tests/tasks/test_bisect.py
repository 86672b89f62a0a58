"""Which plan a request searches by."""

from pathlib import Path
from typing import Any

import pytest

from nightbridge.bisect.plan import BisectPlan, BisectRequest, keep_plan
from nightbridge.bisect.search import BisectPolicy
from nightbridge.errors import DamagedData, InvalidInput
from nightbridge.models import ClusterSettings, RunRecord, Site
from nightbridge.tasks import bisect
from nightbridge.tasks.bisect import dearer, find_plan
from nightbridge.tasks.site import store_of
from tests.builders import ATTRIBUTION_PLAN, make_record


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(workspace=tmp_path, cluster=ClusterSettings(name=ATTRIBUTION_PLAN.cluster))


@pytest.fixture
def plan(site: Site) -> BisectPlan:
    """One that is kept."""
    question = {name: getattr(ATTRIBUTION_PLAN, name) for name in ("test_id", "cluster", "series", "metric", "since")}
    levels = {name: getattr(ATTRIBUTION_PLAN, name) for name in ("statistic", "unit", "levels")}
    ends = {"repository": "megatron_bridge", "url": "u", "good": "a" * 40, "bad": "b" * 40, "commits": ()}
    few = BisectPolicy(most_runs=1)
    plan = BisectPlan(bisect_id="n1-bisect-1", prior=(), base="", policy=few, **question, **levels, **ends)
    keep_plan(store_of(site), plan)
    return plan


def test_a_bisect_that_is_named_goes_on_with_what_it_may_cost_now(site: Site, plan: BisectPlan) -> None:
    found = find_plan(plan.test_id, BisectRequest(bisect_id="n1-bisect-1", most_runs=20, confidence=0.6), site)

    assert found == plan.model_copy(update={"policy": BisectPolicy(most_runs=20, confidence=0.6)})


@pytest.mark.parametrize(
    ("test_id", "cluster", "request_of", "what"),
    [
        ("other", "dgx", {}, "this bisect has test t, not other"),
        ("t", "local", {}, "this bisect has cluster dgx, not local"),
        ("t", "dgx", {"metric": "peak_memory"}, "this bisect has metric step_time, not peak_memory"),
        ("t", "dgx", {"good": "a" * 40}, "takes no good"),
    ],
)
def test_a_bisect_that_is_named_answers_no_other_question(
    tmp_path: Path, plan: BisectPlan, test_id: str, cluster: str, request_of: dict[str, Any], what: str
) -> None:
    elsewhere = Site(workspace=tmp_path, cluster=ClusterSettings(name=cluster))

    with pytest.raises(InvalidInput, match=what):
        find_plan(test_id, BisectRequest(bisect_id=plan.bisect_id, **request_of), elsewhere)


def test_a_run_of_a_search_is_taken_to_cost_what_the_night_did_that_ran_to_its_end(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, (crashed, whole) = store_of(site), (make_record(night=night) for night in ("2026-11-21", "2026-11-20"))
    hours = {crashed.prefix: 0.5, whole.prefix: 32.0}

    def stored(_store: object, prefix: str) -> RunRecord | None:
        if prefix == "damaged":
            raise DamagedData("not a manifest")
        return whole if prefix == whole.prefix else None

    monkeypatch.setattr(bisect, "load_record", stored)
    monkeypatch.setattr(bisect, "gpu_hours", lambda record: hours[record.prefix])

    found = [dearer(store, good, crashed) for good in (whole.prefix, "pruned", "damaged", "")]

    assert found == [whole, crashed, crashed, crashed]
