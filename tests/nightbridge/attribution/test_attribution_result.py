"""What the runs of an attribution say, in numbers and in a sentence."""

import math
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from nightbridge.attribution.attribution_plan import AttributionRequest, begin_designs, design_run, keep_plan
from nightbridge.attribution.attribution_result import (
    AttributionResult,
    ExchangeRun,
    Group,
    attribution_cost,
    descent_plan,
    descent_request,
    evaluate,
    exchanges_of,
    keep_result,
    load_result,
    next_designs,
    ranges_of,
    result_for,
    result_lines,
    sentence,
    shown_part,
    stored_runs,
    with_descent,
    within_budget,
)
from nightbridge.attribution.axes import Factor
from nightbridge.bisect.plan import BisectPlan, Step
from nightbridge.bisect.result import BisectResult
from nightbridge.bisect.search import BisectPolicy, Culprit, CulpritKind, Failure, Measured
from nightbridge.errors import InvalidInput
from nightbridge.models import Comparison, StoreSettings, Suspects, VerdictStatus
from nightbridge.store.directory import DirectoryStore
from tests.builders import (
    ATTRIBUTION_PLAN,
    commit_run,
    exchange_run,
    exchange_runs,
    make_record,
    make_summary,
    make_verdict,
)

GOOD, BAD = "a" * 40, "e" * 40


CORE = "3rdparty/Megatron-LM"
SUBMODULE = Factor(axis="submodule", key=f"megatron_bridge/{CORE}", good="1" * 40, bad="2" * 40)


def step(commit: str, **about: Any) -> Step:
    when = datetime(2026, 11, 16, tzinfo=UTC)
    fields = {"commit": commit * 40, "subject": f"Change {commit}", "author": "Ada", "authored_at": when}
    return Step.model_validate(fields | about)


STEPS = (
    step("b"),
    step("c"),
    step("1", kind="inner", folder=CORE, bump="d" * 40, tree="c" * 40, moved={CORE: "1" * 40}),
    step("2", kind="inner", folder=CORE, bump="d" * 40, tree="d" * 40),
    step("e"),
)


def descent(result: AttributionResult, group: Group, place: int = 2) -> BisectResult:
    """A bisect inside a group of factors that has named a commit."""
    usual = ATTRIBUTION_PLAN
    asked = BisectPlan(
        bisect_id="x", test_id="t", cluster="dgx", series=usual.series, metric="step_time", statistic="step_time",
        unit="s", since=usual.since, repository="megatron_bridge", url="u", good=GOOD, bad=BAD, commits=STEPS,
        levels=usual.levels, prior=(0.2,) * 5, base="runs/bad", policy=usual.policy,
    )  # fmt: skip
    plan = descent_plan(result, group, asked)
    found = Culprit(kind="found", first=place, last=place, probability=0.995, runs=4)
    return BisectResult(plan=plan, answer=found, points=())


# --- in words --------------------------------------------------------------------------------------------------------


def test_the_sentence_names_the_commit_what_it_is_not_and_the_cost() -> None:
    alone = evaluate(ATTRIBUTION_PLAN, exchange_runs([1]))
    result = with_descent(alone, descent(alone, (1,)))

    said = sentence(result)

    assert said.startswith(f'Megatron-Bridge {"c" * 12} "Change c", 99.')
    assert "not the image, not the configuration, not the nodes" in said
    assert said.endswith(f"{len(alone.runs)} runs, {8 * len(alone.runs)} GPU-hours")
    assert result.is_found
    assert result.probability == pytest.approx(alone.cause.probability * 0.995)


@pytest.mark.parametrize("kind", ["already_bad", "still_good"])
def test_a_search_inside_the_cause_that_contradicts_it_is_said(kind: CulpritKind) -> None:
    alone = evaluate(ATTRIBUTION_PLAN, exchange_runs([1]))
    none = Culprit(kind=kind, probability=0.995, runs=4)
    result = with_descent(alone, descent(alone, (1,)).model_copy(update={"answer": none}))

    assert "99.9 %, yet the search inside it did not find the change again; not the image" in sentence(result)
    assert not result.is_found


def test_a_key_is_named_with_its_levels() -> None:
    assert sentence(evaluate(ATTRIBUTION_PLAN, exchange_runs([2]))).startswith("cmd_args.mbs (1 → 2), 99.")


def test_two_causes_are_both_named() -> None:
    said = sentence(evaluate(ATTRIBUTION_PLAN, exchange_runs([0, 2])))

    assert said.startswith(
        "image (nemo@sha256:1 → nemo@sha256:2) and cmd_args.mbs (1 → 2), which share the change (50 % and 50 %), 99."
    )


@pytest.mark.parametrize(
    ("value", "words"),
    [(1.08, "the good point is as bad today, the cluster changed"), (1.0, "the bad point is as good as before today")],
)
def test_what_nothing_did_is_said(value: float, words: str) -> None:
    runs: list[ExchangeRun] = []
    while designs := next_designs(ATTRIBUTION_PLAN, runs, 1, 8.0)[0]:
        runs += [exchange_run(design, value, len(runs) + 1) for design in designs]

    assert words in sentence(evaluate(ATTRIBUTION_PLAN, runs))
    assert not evaluate(ATTRIBUTION_PLAN, runs).is_found


def test_where_no_run_has_started_nothing_is_called_likely() -> None:
    lost = [exchange_run((True,) * 4, None, 1, VerdictStatus.FAILED)]

    assert sentence(evaluate(ATTRIBUTION_PLAN, lost)).startswith("undecided, for none of its runs gave a result; ")


@pytest.mark.parametrize("value", [1.08, 1.0])
def test_what_changed_and_was_not_exchanged_is_named_where_no_factor_did_it(value: float) -> None:
    plan = ATTRIBUTION_PLAN.model_copy(update={"rest": ("driver 550 → 560",)})
    runs = [
        exchange_run((side,) * 4, value, number) for number, side in enumerate((True, False, True, False, False, False))
    ]

    assert "changed as well: driver 550 → 560" in sentence(evaluate(plan, runs))


def test_the_lines_have_every_factor_and_every_run() -> None:
    result = evaluate(ATTRIBUTION_PLAN, exchange_runs([2]))
    text = "\n".join(result_lines(result))

    assert text.startswith("step time +8.0 % of t since 2026-11-21: cmd_args.mbs (1 → 2)")
    assert "image: image, nemo@sha256:1 → nemo@sha256:2" in text
    assert "run 1: 1.080 s, everything bad" in text
    assert "run 2: 1.000 s, everything good" in text


# --- when it ends ----------------------------------------------------------------------------------------------------


def test_it_ends_at_its_budget_and_says_so() -> None:
    plan = ATTRIBUTION_PLAN.model_copy(update={"budget": 25.0})
    runs = exchange_runs([1], plan)

    designs, stopped = next_designs(plan, runs, 1, 8.0)

    assert (len(runs), designs, stopped) == (3, (), "budget")
    assert "undecided after the budget of 25 GPU-hours" in sentence(evaluate(plan, runs, stopped=stopped))


@pytest.mark.parametrize("at_once", [1, 2, 8])
def test_an_overspent_budget_starts_nothing_more(at_once: int) -> None:
    plan = ATTRIBUTION_PLAN.model_copy(update={"budget": 10.0})
    hung = [run.model_copy(update={"gpu_seconds": 30 * 3600.0}) for run in exchange_runs([1], plan)[:1]]

    assert next_designs(plan, hung, at_once, 8.0) == ((), "budget")


def test_a_budget_holds_where_it_is_not_known_what_a_run_usually_costs() -> None:
    plan = ATTRIBUTION_PLAN.model_copy(update={"budget": 10.0})
    runs = exchange_runs([1], ATTRIBUTION_PLAN)

    assert next_designs(plan, runs[:1], 2, 0.0)[0]
    assert next_designs(plan, runs[:2], 2, 0.0) == ((), "budget")


def test_a_budget_without_an_end_is_refused_before_anything_is_counted_by_it() -> None:
    with pytest.raises(ValidationError, match=r"budget\n.*finite number"):
        AttributionRequest(budget=math.inf)


def test_a_run_that_died_before_its_cost_was_known_takes_a_usual_one_of_the_budget() -> None:
    plan = ATTRIBUTION_PLAN.model_copy(update={"budget": 25.0})
    dead = [
        run.model_copy(update={"gpu_seconds": 0.0, "value": None, "status": VerdictStatus.INFRASTRUCTURE})
        for run in exchange_runs([1], plan)
    ]

    assert next_designs(plan, dead, 1, 8.0) == ((), "budget")
    for status in (VerdictStatus.INVALID, VerdictStatus.CANCELLED):
        never_run = [run.model_copy(update={"status": status}) for run in dead]
        assert next_designs(plan, never_run, 1, 8.0)[0]


def test_it_ends_at_its_number_of_runs_and_says_so() -> None:
    plan = ATTRIBUTION_PLAN.model_copy(update={"policy": BisectPolicy(most_runs=3)})
    runs = exchange_runs([1], plan)

    designs, stopped = next_designs(plan, runs, 4, 8.0)

    assert (len(runs), designs, stopped) == (3, (), "runs")
    assert "undecided after all its runs" in sentence(evaluate(plan, runs, stopped=stopped))


def test_a_run_that_the_cluster_lost_says_nothing_until_it_always_does() -> None:
    everything = (True,) * 4
    lost = [exchange_run(everything, None, number, VerdictStatus.INFRASTRUCTURE) for number in range(1, 4)]
    failed = exchange_run(everything, None, 4, VerdictStatus.FAILED)

    assert exchanges_of(lost[:2]) == []
    assert [each.value for each in exchanges_of(lost)] == [None] * 3
    assert [each.value for each in exchanges_of([failed])] == [None]


# --- into a range ----------------------------------------------------------------------------------------------------


def test_a_range_is_searched_with_what_the_exchanged_runs_have_measured() -> None:
    result = evaluate(ATTRIBUTION_PLAN, exchange_runs([1]))
    (group,) = ranges_of(result)

    request, within = descent_request(result, group), descent(result, group).plan

    assert (request.repository, request.metric) == ("megatron_bridge", "step_time")
    assert Measured(place=0, value=1.0) in within.known
    assert Measured(place=5, value=1.08) in within.known
    assert len(within.known) == len(result.runs)
    assert within.base == "runs/bad"
    assert len(within.bisect_id) <= 40


def with_submodule(*culprits: int) -> AttributionResult:
    """An attribution of a bump, whose submodule is factor 4, of which these factors are the cause."""
    factors = (*ATTRIBUTION_PLAN.factors, SUBMODULE)
    plan = ATTRIBUTION_PLAN.model_copy(update={"factors": factors})
    return evaluate(plan, exchange_runs(culprits, plan))


def test_a_submodule_is_searched_in_the_range_that_bumps_it_and_named_inside_its_bump() -> None:
    result = with_submodule(4)
    (group,) = ranges_of(result)

    found = descent(result, group, place=4)
    named = with_descent(result, found)

    assert descent_request(result, group).repository == "megatron_bridge"
    assert [share > 0.1 for share in found.plan.prior] == [False, False, True, True, False]
    assert sentence(named).startswith(
        f'Megatron-LM {"2" * 12} "Change 2", inside bump {"d" * 12} of Megatron-Bridge, 99.'
    )
    assert "not Megatron-Bridge" in sentence(named)


def test_a_repository_is_searched_without_the_commits_of_its_bumps() -> None:
    result = with_submodule(1)

    found = descent(result, (1,))

    assert [share > 0.1 for share in found.plan.prior] == [True, True, False, False, True]


def test_a_repository_and_its_submodule_are_one_search() -> None:
    result = with_submodule(1, 4)

    assert ranges_of(result) == ((1, 4),)
    assert descent(result, (1, 4)).plan.levels == ATTRIBUTION_PLAN.levels
    assert {one.place for one in descent(result, (1, 4)).plan.known} == {0, 5}


def test_a_range_without_the_factors_commits_is_not_searched() -> None:
    moved = SUBMODULE.model_copy(update={"key": "megatron_bridge/3rdparty/other"})
    plan = ATTRIBUTION_PLAN.model_copy(update={"factors": (*ATTRIBUTION_PLAN.factors, moved)})
    result = evaluate(plan, exchange_runs([4], plan))

    with pytest.raises(InvalidInput, match="its commits cannot be listed"):
        descent(result, (4,))


def test_a_search_inside_a_range_has_what_is_left_of_the_budget_and_says_when_that_is_spent() -> None:
    plan = ATTRIBUTION_PLAN.model_copy(update={"budget": 100.0})
    result = evaluate(plan, exchange_runs([1], plan))
    found = descent(result, (1,))
    left = int((100 - result.gpu_hours) / 8)

    within = within_budget(result, found.plan, 8.0)
    undecided = found.model_copy(
        update={"plan": within, "answer": found.answer.model_copy(update={"kind": "undecided"})}
    )

    assert within.policy.most_runs == left + len(within.known)
    assert with_descent(result, undecided).stopped == "budget"
    assert not with_descent(result, undecided).is_found
    assert with_descent(result, found).stopped == ""


def test_a_cause_that_is_no_range_is_not_searched() -> None:
    assert ranges_of(evaluate(ATTRIBUTION_PLAN, exchange_runs([2]))) == ()


# --- in the store ----------------------------------------------------------------------------------------------------


@pytest.fixture
def store(tmp_path: Path) -> DirectoryStore:
    return DirectoryStore(StoreSettings(url=f"file://{tmp_path}/store"))


def verdict_of(night: str, metric: str = "step_time", **fields: Any) -> Any:
    regressed = Comparison(
        metric=metric, unit="s", lower_is_better=True, value=1.08, baseline=1.0, threshold=0.05, status="regressed"
    )
    usual: Mapping[str, Any] = {"series": ATTRIBUTION_PLAN.series, "comparisons": (regressed,), "night": night}
    return make_verdict(**{"status": VerdictStatus.REGRESSED, **usual, **fields})


def test_a_result_is_found_by_every_later_verdict_on_the_same_change(store: DirectoryStore) -> None:
    result = evaluate(ATTRIBUTION_PLAN, exchange_runs([2]))
    keep_plan(store, ATTRIBUTION_PLAN)
    assert load_result(store, ATTRIBUTION_PLAN) is None

    keep_result(store, result)

    assert load_result(store, ATTRIBUTION_PLAN) == result
    assert result_for(store, verdict_of("2026-11-21"), "dgx") == result
    assert result_for(store, verdict_of("2026-11-24", since="2026-11-21"), "dgx") == result
    assert result_for(store, verdict_of("2026-11-20"), "dgx") is None
    assert result_for(store, verdict_of("2026-11-24", metric="peak_memory"), "dgx") is None
    assert result_for(store, verdict_of("2026-11-24", series=""), "dgx") is None


def test_a_result_about_a_change_that_was_repaired_is_not_that_of_tonight_s(store: DirectoryStore) -> None:
    result = evaluate(ATTRIBUTION_PLAN, exchange_runs([2]))
    keep_plan(store, ATTRIBUTION_PLAN)
    keep_result(store, result)
    own = Suspects(last_good="2026-11-20", night="2026-11-21", run_before="a", run_after="b")
    other = own.model_copy(update={"last_good": "2026-12-20", "night": "2026-12-21"})

    assert result_for(store, verdict_of("2026-12-21", since="2026-11-21", suspects=own), "dgx") == result
    assert result_for(store, verdict_of("2026-12-21", since="2026-12-21", suspects=other), "dgx") is None


def test_a_result_about_a_night_that_is_named_by_a_word_is_that_of_no_other(store: DirectoryStore) -> None:
    plan = ATTRIBUTION_PLAN.model_copy(update={"bad_night": "live"})
    result = evaluate(plan, exchange_runs([2], plan))
    keep_plan(store, plan)
    keep_result(store, result)
    own = Suspects(last_good="2026-11-20", night="live", run_before="a", run_after="b")
    later = own.model_copy(update={"last_good": "2026-11-25", "night": "release"})

    assert result_for(store, verdict_of("live", suspects=own), "dgx") == result
    assert result_for(store, verdict_of("release", suspects=later), "dgx") is None


@pytest.mark.parametrize(
    ("searched", "status", "metric", "is_shown"),
    [
        ("failure", VerdictStatus.FAILED, "step_time", True),
        ("failure", VerdictStatus.REGRESSED, "step_time", False),
        ("losses", VerdictStatus.REGRESSED, "loss_curve", True),
        ("losses", VerdictStatus.REGRESSED, "step_time", False),
        ("step_time", VerdictStatus.FAILED, "step_time", False),
    ],
)
def test_a_failure_s_cause_is_not_that_of_slower_steps(
    store: DirectoryStore, searched: str, status: VerdictStatus, metric: str, is_shown: bool
) -> None:
    plan = ATTRIBUTION_PLAN.model_copy(update={"metric": searched, "levels": Failure(signature="failed: CUDA error")})
    keep_plan(store, plan)
    keep_result(store, evaluate(plan, ()))

    found = result_for(store, verdict_of("2026-11-21", metric, status=status), "dgx")

    assert (found is not None) is is_shown


def test_attributions_are_on_their_month_s_account(store: DirectoryStore) -> None:
    keep_result(store, evaluate(ATTRIBUTION_PLAN, exchange_runs([2])))

    assert attribution_cost(store, "2026-11") == pytest.approx(8.0 * len(exchange_runs([2])))
    assert attribution_cost(store, "2026-12") == 0.0


def test_runs_that_have_ended_are_read_and_others_are_open(store: DirectoryStore) -> None:
    bad = make_record(commit=BAD)
    plan = keep_plan(store, ATTRIBUTION_PLAN)
    begun = begin_designs(store, plan, [(True,) * 4, (False,) * 4])
    spec = design_run(plan, bad, begun[0])
    done = make_record(make_summary((1.08,) * 50)).model_copy(
        update={"spec": spec, "prefix": f"runs/{spec.test_slug}/{spec.night}/{spec.run_key}/a1"}
    )
    commit_run(store, done)
    verdict = make_verdict(VerdictStatus.PASSED, run_key=spec.run_key, prefix=done.prefix)
    store.put(f"runs/{spec.test_slug}/{spec.night}/{spec.run_key}/verdict.json", verdict.model_dump_json().encode())

    ended, open_ones = stored_runs(store, plan, bad)

    assert [(each.number, each.value, each.nodes) for each in ended] == [(1, 1.08, "node[1-2]")]
    assert open_ones == begun[1:]


def test_a_run_shows_its_part_of_the_change_between_both_controls() -> None:
    runs = [
        exchange_run((True,) * 4, 1.10),
        exchange_run((False,) * 4, 1.02),
        exchange_run((True, False, True, True), 1.06),
    ]

    assert [shown_part(ATTRIBUTION_PLAN, runs, each) for each in runs] == pytest.approx([1.0, 0.0, 0.5])
    assert shown_part(ATTRIBUTION_PLAN, runs, exchange_run((True,) * 4, None)) is None
