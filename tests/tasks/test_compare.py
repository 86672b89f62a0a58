"""What confirmation costs, and which runs it is made of."""

import itertools
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from nightbridge.attribution.attribution_result import evaluate, keep_result
from nightbridge.errors import InvalidInput, TransientError
from nightbridge.gate.nodes import on_nodes
from nightbridge.gate.paired_trial import ProposedChange, plan_trial, trial_arm
from nightbridge.models import Budget, ControlArm, NightReport, Site, VerdictStatus
from nightbridge.nights.records import new_night, read_verdict, record_end
from nightbridge.slurm.attempts import next_attempt
from nightbridge.store.object_store import ObjectStore
from nightbridge.tasks.compare import (
    Spending,
    Wanted,
    attribution_budget,
    further_runs,
    interrupted,
    nodes_of,
    stored_verdict,
    without_confirmation,
)
from nightbridge.tasks.site_access import store_of
from tests.builders import ATTRIBUTION_PLAN, commit_run, exchange_runs, make_record, make_verdict

NIGHT = "2026-11-10"


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(workspace=tmp_path)


def wanted(reruns: int = 2, started: int = 0, hours: float = 3.0, **fields: Any) -> Wanted:
    verdict = make_verdict(VerdictStatus.REGRESSED, night=NIGHT, reruns=reruns, gpu_hours=hours, **fields)
    return Wanted(make_record(night=NIGHT).spec, verdict, started)


def test_without_a_budget_everything_is_confirmed(site: Site) -> None:
    assert Spending(NIGHT, site).allows(wanted(hours=1e6)) == ""


def test_a_nights_budget_ends_with_what_it_has_no_room_for(site: Site) -> None:
    spending = Spending(NIGHT, site.model_copy(update={"budget": Budget(night=10)}))

    assert spending.allows(wanted()) == ""
    assert "takes 6.00 GPU-hours, and the night's budget of 10 has 4.00 left" in spending.allows(wanted())
    assert spending.allows(wanted(hours=2.0)) == ""


def test_a_months_budget_counts_its_ended_nights(site: Site) -> None:
    site = site.model_copy(update={"budget": Budget(month=20)})
    for night in ("2026-10-31", "2026-11-08", "2026-11-09"):
        spent = make_verdict(VerdictStatus.PASSED, night=night, confirmation_gpu_hours=8.0)
        record_end(store_of(site), NightReport(scenario="s", night=night, verdicts=(spent,)))

    assert "the month's budget of 20 has 4.00 left" in Spending(NIGHT, site).allows(wanted())
    assert Spending(NIGHT, site).allows(wanted(hours=2.0)) == ""


def test_a_night_whose_name_has_no_date_is_of_the_month_in_which_it_is_run(site: Site) -> None:
    site = site.model_copy(update={"budget": Budget(month=20, attribution=40)})
    for night in ("release-check", new_night(), "2020-10-31"):
        spent = make_verdict(VerdictStatus.PASSED, night=night, confirmation_gpu_hours=8.0)
        record_end(store_of(site), NightReport(scenario="s", night=night, verdicts=(spent,)))
    assert attribution_budget("try-1", site) == 4.0

    plan = ATTRIBUTION_PLAN.model_copy(update={"attribution_id": "release-attribute-0123abcd"})
    keep_result(store_of(site), evaluate(plan, exchange_runs([2])))
    assert "the month's budget of 20 has 0.00 left" in Spending("try-1", site).allows(wanted())


def test_a_months_budget_counts_what_the_search_for_causes_has_cost(site: Site) -> None:
    site = site.model_copy(update={"budget": Budget(month=60, attribution=50)})
    assert attribution_budget(NIGHT, site) == 50

    result = evaluate(ATTRIBUTION_PLAN, exchange_runs([2]))
    keep_result(store_of(site), result)

    assert result.gpu_hours > 10
    assert attribution_budget(NIGHT, site) == pytest.approx(60 - result.gpu_hours)
    assert "the month's budget of 60" in Spending(NIGHT, site).allows(wanted(hours=30.0))
    with pytest.raises(InvalidInput, match="budget of 20 GPU-hours is spent"):
        attribution_budget(NIGHT, site.model_copy(update={"budget": Budget(month=20, attribution=40)}))


def test_a_month_whose_nights_cannot_be_read_pays_for_nothing_and_says_why(site: Site) -> None:
    site = site.model_copy(update={"budget": Budget(month=20)})
    store_of(site).put("nights/2026-11-08/s/ended.json", b"{half")

    why = Spending(NIGHT, site).allows(wanted(hours=1.0))

    assert why.startswith("not confirmed: what the month has spent cannot be read: ")
    assert "nights/2026-11-08/s/ended.json: not the record of a night" in why


@pytest.fixture
def away(monkeypatch: pytest.MonkeyPatch) -> None:
    """A store that is away whenever it is asked for, and there a moment later."""
    monkeypatch.setenv("NIGHTBRIDGE_RETRY_DELAY", "0.01")
    requests = itertools.count()

    def now_and_then(site: Site) -> ObjectStore:
        if next(requests) % 2 == 0:
            raise TransientError("does not answer", subject="s3://bucket")
        return store_of(site)

    monkeypatch.setattr("nightbridge.tasks.compare.store_of", now_and_then)


@pytest.mark.usefixtures("away")
def test_a_store_that_is_away_for_a_moment_changes_nothing_about_the_further_runs_of_a_night(site: Site) -> None:
    store = store_of(site)
    base = commit_run(store, make_record(night="2026-11-01"))
    control = ControlArm(run_key=base.spec.run_key, night="2026-11-01", prefix=base.prefix)

    assert nodes_of(make_verdict(VerdictStatus.PASSED, prefix=base.prefix), site) == "node[1-2]"
    assert [len(chain) for chain in further_runs(wanted(control=control), site)] == [2]
    assert Spending(NIGHT, site.model_copy(update={"budget": Budget(month=20)})).allows(wanted()) == ""
    verdict = without_confirmation(wanted().verdict, "not confirmed: no budget", site)
    assert read_verdict(store, verdict.run_key, NIGHT) == verdict


def test_a_store_that_takes_nothing_leaves_the_night_its_verdicts(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    store = store_of(site)
    damaged = commit_run(store, make_record())
    store.put(f"{damaged.prefix}/manifest.json", b"{half")
    assert nodes_of(make_verdict(VerdictStatus.PASSED, prefix=damaged.prefix), site) == ""

    (site.workspace / "store").rename(site.workspace / "moved")
    (site.workspace / "store").write_text("no folder")

    assert without_confirmation(wanted().verdict, "not confirmed: no budget", site).reruns == 0
    assert "the verdict is not stored" in caplog.text


def test_what_was_not_confirmed_is_stored_with_the_reason(site: Site) -> None:
    verdict = without_confirmation(wanted().verdict, "not confirmed: no budget", site)

    assert (verdict.status, verdict.reruns) == (VerdictStatus.REGRESSED, 0)
    stored = store_of(site).get(f"{verdict.prefix.rpartition('/')[0]}/verdict.json")
    assert stored is not None
    assert b"not confirmed: no budget" in stored


def test_a_stored_verdict_is_the_runs_own_until_a_newer_attempt_is_opened(site: Site) -> None:
    record = make_record(night=NIGHT)
    passed = make_verdict(VerdictStatus.PASSED, night=NIGHT, run_key=record.spec.run_key, prefix=record.prefix)
    store_of(site).put(f"{record.prefix.rpartition('/')[0]}/verdict.json", passed.model_dump_json().encode())
    assert stored_verdict(record.spec, site) == passed  # also where the workspace has been emptied since

    next_attempt(record.spec, site, after=0)
    assert stored_verdict(record.spec, site) == passed

    next_attempt(record.spec, site, after=1)
    assert stored_verdict(record.spec, site) is None


def test_pairs_of_the_last_good_point_follow_each_other_and_the_first_avoids_the_suspects(site: Site) -> None:
    base = commit_run(store_of(site), make_record(night="2026-11-01"))
    control = ControlArm(run_key=base.spec.run_key, night="2026-11-01", prefix=base.prefix)

    first, second = further_runs(wanted(4, control=control, suspect_nodes=("node1",)), site)

    assert [[run.arm.role for run in pair if run.arm] for pair in (first, second)] == [
        ["new", "control"],
        ["control", "new"],
    ]
    assert {run.test.sbatch_args for run in first} == {("--exclude=node1",)}
    assert {run.test.sbatch_args for run in second} == {()}


def test_a_run_on_given_nodes_keeps_nothing_else_that_says_where_it_runs() -> None:
    spec = make_record().spec
    options = ("-xnode1", "--exclude=node2", "-wnode3", "--nodelist=node4", "--comment=x")
    run = spec.model_copy(update={"test": spec.test.model_copy(update={"sbatch_args": options})})

    assert on_nodes(run, "node[2-3]").test.sbatch_args == ("--comment=x", "--nodelist=node[2-3]")
    assert on_nodes(run, "") == run


def test_without_the_last_good_point_the_same_run_is_repeated(site: Site) -> None:
    gone = ControlArm(run_key="gone", night="2026-11-01", prefix="runs/gone")

    chains = list(further_runs(wanted(2, control=gone, suspect_nodes=("node1",)), site))

    assert [[(run.repeat, run.arm) for run in chain] for chain in chains] == [[(1, None)], [(2, None)]]


def test_a_trial_that_was_interrupted_before_midnight_goes_on_under_its_name(site: Site) -> None:
    evening = datetime(2026, 11, 23, 23, 50, tzinfo=UTC)
    begun, control = plan_trial(make_record().spec, ProposedChange(bridge="7"), evening)
    (site.workspace / "runs" / trial_arm(control, begun.change, 1).run_key).mkdir(parents=True)

    def go_on(days: int) -> tuple[str, str]:
        later = plan_trial(make_record().spec, ProposedChange(bridge="7"), evening + timedelta(days=days))
        trial, control = interrupted(*later, site)
        return trial.trial_id, control.night

    assert go_on(1) == go_on(2) == (begun.trial_id, begun.trial_id)
    assert go_on(3) != (begun.trial_id, begun.trial_id)

    store_of(site).put(f"tries/{begun.trial_id}/result.json", b"{}")
    assert go_on(1) != (begun.trial_id, begun.trial_id)
