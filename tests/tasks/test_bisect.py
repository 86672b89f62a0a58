"""Which plan a request searches by."""

from pathlib import Path
from typing import Any

import pytest

from nightbridge.bisect.plan import BisectPlan, BisectRequest, Step, keep_plan, point_run
from nightbridge.bisect.result import Point
from nightbridge.bisect.search import BisectPolicy
from nightbridge.errors import DamagedData, InvalidInput
from nightbridge.models import ClusterSettings, Outcome, RunRecord, Site, VerdictStatus, utc_now
from nightbridge.slurm.attempt_files import ENDED_FILE, declare_intent, record_ended
from nightbridge.slurm.attempts import next_attempt
from nightbridge.tasks import bisect
from nightbridge.tasks.bisect import begun_points, dearer, find_plan
from nightbridge.tasks.site_access import store_of
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
        ("t", "dgx", {"metric": "peak_memory"}, "this bisect has a question of its own, and takes no metric"),
        ("t", "dgx", {"good": "a" * 40}, "takes no good"),
        ("t", "dgx", {"run_key": "t-2026-11-21-0123456789"}, "takes no run_key"),
    ],
)
def test_a_bisect_that_is_named_answers_no_other_question(
    tmp_path: Path, plan: BisectPlan, test_id: str, cluster: str, request_of: dict[str, Any], what: str
) -> None:
    elsewhere = Site(workspace=tmp_path, cluster=ClusterSettings(name=cluster))

    with pytest.raises(InvalidInput, match=what):
        find_plan(test_id, BisectRequest(bisect_id=plan.bisect_id, **request_of), elsewhere)


def test_runs_that_were_submitted_when_a_bisect_was_interrupted_are_resumed(site: Site, plan: BisectPlan) -> None:
    """However many would be chosen now. One without a job, or whose job was cancelled, is not among them.

    What lies here of a run that has its verdict is not looked at: it may be damaged by now.
    """
    steps = tuple(Step(commit=name * 40, subject="", author="", authored_at=utc_now()) for name in "abcdefgh")
    plan, base = plan.model_copy(update={"commits": steps}), make_record()
    for place, number in ((2, 1), (5, 1), (5, 2), (7, 1), (8, 1)):
        attempt = next_attempt(point_run(plan, base, place, number), site, after=0)
        if place != 7:
            declare_intent(attempt.attempt_dir, attempt.attempt_dir / "job.sh", attempt.attempt_dir, after=0)
        if place == 8:
            cancelled = {"attempt_dir": attempt.attempt_dir, "outcome": Outcome.CANCELLED}
            record_ended(base.job.model_copy(update=cancelled))
    done = point_run(plan, base, 2, 1).run_key
    (site.workspace / "runs" / done / "a1" / ENDED_FILE).write_text("half a rec")
    points = [Point(place=2, number=1, run_key=done, status=VerdictStatus.PASSED, value=1.0)]

    assert begun_points(plan, base, points, site) == ((5, 1), (5, 2))
    assert begun_points(plan, base, (), Site(workspace=site.workspace / "elsewhere")) == ()


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
