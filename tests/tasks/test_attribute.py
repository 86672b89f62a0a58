"""When an attribution was answered before, and what it goes on with."""

from pathlib import Path

import pytest

from nightbridge.attribution.attribution_result import evaluate, keep_result
from nightbridge.bisect.plan import BisectPlan
from nightbridge.bisect.search import BisectPolicy
from nightbridge.errors import InvalidInput
from nightbridge.history.history_store import put_row
from nightbridge.history.rows import HistoryRow, row_of
from nightbridge.models import RangeCommit, Site, VerdictStatus, utc_now
from nightbridge.tasks import attribute
from nightbridge.tasks.attribute import earlier_result, plan_descent
from nightbridge.tasks.site_access import store_of
from tests.builders import ATTRIBUTION_PLAN, exchange_runs, make_record, make_summary, make_verdict


def test_an_answer_that_is_not_as_sure_as_requested_or_lacks_a_range_is_none(tmp_path: Path) -> None:
    site = Site(workspace=tmp_path)
    answer = evaluate(ATTRIBUTION_PLAN, exchange_runs([1]))
    keep_result(store_of(site), answer)
    surer = BisectPolicy(confidence=0.9999)

    assert earlier_result(ATTRIBUTION_PLAN, site) == answer
    assert earlier_result(ATTRIBUTION_PLAN.model_copy(update={"policy": surer}), site) is None
    keep_result(store_of(site), answer.model_copy(update={"notes": ("the registry refused us",)}))
    assert earlier_result(ATTRIBUTION_PLAN, site) is None


@pytest.fixture
def one_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between any two nights there is one commit."""
    commit = RangeCommit(commit="2" * 40, subject="Tidy", author="", authored_at=utc_now())
    monkeypatch.setattr(attribute, "commits_between", lambda *_ends: (commit,))


def planned_between(good: HistoryRow, bad: HistoryRow, site: Site) -> BisectPlan | None:
    """The search inside Megatron-Bridge between two runs of a test."""
    about = {"test_id": bad.test_id, "cluster": bad.cluster, "series": bad.series}
    plan = ATTRIBUTION_PLAN.model_copy(update={**about, "good": good.prefix, "bad": bad.prefix})
    return plan_descent.fn(evaluate(plan, exchange_runs([1])), (1,), site)


def test_a_new_attempt_of_the_bad_night_does_not_keep_its_commits_from_being_searched(
    tmp_path: Path, one_commit: None
) -> None:
    site = Site(workspace=tmp_path)
    store = store_of(site)
    nights = [make_record(make_summary((1.0,) * 50), f"2026-11-0{day}", commit=str(day) * 40) for day in (1, 2)]
    good, bad = (row_of(made, make_verdict(VerdictStatus.PASSED)) for made in nights)
    put_row(store, good)
    put_row(store, bad.model_copy(update={"attempt": 2, "prefix": f"{bad.prefix[:-1]}2"}))

    planned = planned_between(good, bad, site)

    assert planned is not None
    assert [step.commit for step in planned.commits] == ["2" * 40]


def test_a_range_between_runs_of_two_scenarios_is_searched_where_the_good_night_had_both(
    tmp_path: Path, one_commit: None
) -> None:
    site = Site(workspace=tmp_path)
    rows = {}
    for scenario, day in (("nightly", 1), ("weekly", 1), ("weekly", 2)):
        made = make_record(make_summary((1.0,) * 50), f"2026-11-0{day}", commit=str(day) * 40)
        made = made.model_copy(update={"spec": made.spec.model_copy(update={"scenario": scenario})})
        row = row_of(made, make_verdict(VerdictStatus.PASSED))
        rows[scenario, day] = row.model_copy(update={"prefix": f"runs/llama3-8b/{row.night}/{row.run_key}/a1"})
        put_row(store_of(site), rows[scenario, day])
    good, bad = rows["nightly", 1], rows["weekly", 2]

    planned = planned_between(good, bad, site)

    assert planned is not None
    assert [step.commit for step in planned.commits] == ["2" * 40]


def test_a_night_that_is_in_no_history_any_more_is_said(tmp_path: Path) -> None:
    site = Site(workspace=tmp_path)
    bad = row_of(make_record(make_summary((1.0,) * 50), "2026-11-02"), make_verdict(VerdictStatus.PASSED))
    put_row(store_of(site), bad)
    about = {"test_id": bad.test_id, "cluster": bad.cluster, "series": bad.series, "bad": bad.prefix}
    plan = ATTRIBUTION_PLAN.model_copy(update={**about, "good": "runs/t/n1/gone-n1-0123456789/a1"})

    with pytest.raises(InvalidInput, match="gone-n1-0123456789: not in the history"):
        plan_descent.fn(evaluate(plan, exchange_runs([1])), (1,), site)
