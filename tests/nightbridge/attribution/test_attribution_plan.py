"""From a history to what an attribution asks, kept and found again."""

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from nightbridge.attribution.attribution_plan import (
    AttributionPlan,
    AttributionRequest,
    begin_designs,
    begun_designs,
    design_run,
    find_change,
    images_range,
    keep_plan,
    make_attribution_plan,
    plan_of_range,
    plans_of,
    same_change,
    submodule_range,
)
from nightbridge.attribution.attribution_result import descent_plan, evaluate, ranges_of, sentence, with_descent
from nightbridge.attribution.axes import Factor
from nightbridge.bisect.plan import point_run
from nightbridge.bisect.result import BisectResult, result_lines
from nightbridge.bisect.search import Culprit, Levels
from nightbridge.bisect.shift import SearchRequest, find_rows
from nightbridge.errors import DamagedData, InvalidInput
from nightbridge.history.history_store import put_row
from nightbridge.history.reading import find_series, read_history
from nightbridge.history.rows import HistoryRow, row_of
from nightbridge.models import Arm, RangeCommit, RunRecord, StoreSettings, VerdictStatus
from nightbridge.store.directory import DirectoryStore
from tests.builders import ATTRIBUTION_PLAN, exchange_runs, make_record, make_summary, make_verdict

GOOD, BAD = "a" * 40, "e" * 40
REQUEST = AttributionRequest()


def night(number: int) -> str:
    return f"2026-11-{number + 1:02d}"


def record(
    number: int, *, series: str = "llama3-8b-0123456789ab", arm: Arm | None = None, repeat: int = 0
) -> RunRecord:
    """Nights of 1 s a step, from the fourth on of 1.2 s with another commit and variable."""
    slow = number >= 3 and (arm is None or arm.role == "new")
    made = make_record(
        make_summary((1.2 if slow else 1.0,) * 50),
        night(number),
        commit=BAD if slow else GOOD,
        extra_env_vars={"NCCL_ALGO": "Tree"} if slow else {},
        repeat=repeat,
    )
    spec = made.spec.model_copy(update={"arm": arm})
    return made.model_copy(update={"series": series, "spec": spec})


def row(made: RunRecord, status: VerdictStatus | None = None) -> HistoryRow:
    slow = made.summary.step_time == 1.2
    verdict = make_verdict(status or (VerdictStatus.REGRESSED if slow else VerdictStatus.PASSED))
    return row_of(made, verdict)


@pytest.fixture
def store(tmp_path: Path) -> DirectoryStore:
    return DirectoryStore(StoreSettings(url=f"file://{tmp_path}/store"))


ROWS = [row(record(number)) for number in range(5)]
RECORDS = {made.prefix: made for made in (record(number) for number in range(5))}


def plan_of(rows: Sequence[HistoryRow], request: AttributionRequest = REQUEST) -> AttributionPlan:
    return make_attribution_plan(rows, find_change(rows, lambda _row: None, request), RECORDS.get, request)


def plan_of_change(rows: Sequence[HistoryRow]) -> tuple[str, str, str]:
    shift = find_change(rows, lambda _row: None, REQUEST)
    return shift.metric, shift.good.night, shift.bad.night


# --- what is asked ---------------------------------------------------------------------------------------------------


def test_what_changed_lies_between_the_last_good_and_the_first_bad_night() -> None:
    plan = plan_of(ROWS)

    assert (plan.metric, plan.good_night, plan.bad_night) == ("step_time", night(2), night(3))
    assert plan.axes == ("megatron_bridge", "environment")
    assert isinstance(plan.levels, Levels)
    assert (plan.levels.good, plan.levels.bad) == pytest.approx((1.0, 1.2))
    assert "-attribute-" in plan.attribution_id
    assert len(f"{plan.attribution_id}-99") <= 40


def test_two_nights_that_are_named_are_compared_whatever_their_verdicts() -> None:
    rows = [row(record(number), VerdictStatus.PASSED) for number in range(5)]

    plan = plan_of(rows, AttributionRequest(good=night(1), bad=night(4)))

    assert (plan.metric, plan.good_night, plan.bad_night) == ("step_time", night(1), night(4))


def test_the_level_of_a_named_good_night_is_that_of_its_own_configuration() -> None:
    fast = [make_record(make_summary((1.0,) * 50), night(number)) for number in range(7)]
    slow = [make_record(make_summary((time,) * 50), night(number)) for number, time in ((7, 2.0), (8, 2.2))]
    rows = [row(made, VerdictStatus.PASSED) for made in fast]
    rows += [row(made.model_copy(update={"series": "llama3-8b-1"}), VerdictStatus.NO_BASELINE) for made in slow]

    found = find_change(rows, lambda _row: None, AttributionRequest(good=night(7), bad=night(8)))

    assert isinstance(found.levels, Levels)
    assert (found.levels.good, found.levels.bad) == (2.0, 2.2)


@pytest.mark.parametrize(("good", "bad"), [(night(1), None), (night(1), "2020-01-01")])
def test_one_night_alone_and_a_night_that_was_not_are_refused(good: str, bad: str | None) -> None:
    with pytest.raises(InvalidInput, match="no such night in the history"):
        plan_of(ROWS, AttributionRequest(good=good, bad=bad))


@pytest.mark.parametrize("good", [night(3), night(4)])
def test_the_good_night_is_before_the_bad_one(good: str) -> None:
    with pytest.raises(InvalidInput, match=f"{good}: it is not before {night(3)}"):
        plan_of(ROWS, AttributionRequest(good=good, bad=night(3)))


def test_a_new_configuration_starts_a_new_series_and_is_compared_with_the_one_before(store: DirectoryStore) -> None:
    for number in range(5):
        series = f"llama3-8b-{'1' if number >= 3 else '0'}123456789ab"
        put_row(store, row(record(number, series=series)))

    rows = find_rows(store, "llama3-8b", "dgx", REQUEST)
    plan = plan_of(rows)

    assert len({each.series for each in rows}) == 2
    assert (plan.good_night, plan.bad_night, plan.series) == (night(2), night(3), "llama3-8b-1123456789ab")


@pytest.fixture
def swept(store: DirectoryStore) -> DirectoryStore:
    """A sweep of three points with a series each; the second is slower in the last night."""
    for number in range(2, 4):
        for tp in (1, 2, 4):
            made = record(number if tp == 2 else 0, series=f"llama3-8b-{tp:012x}")
            spec = made.spec.model_copy(update={"night": night(number), "sweep_point": {"cmd_args.tp": tp}})
            put_row(store, row(made.model_copy(update={"spec": spec})))
    return store


def test_of_a_sweep_a_point_that_is_worse_is_searched(swept: DirectoryStore) -> None:
    rows = find_rows(swept, "llama3-8b", "dgx", REQUEST)

    assert [each.sweep_point for each in rows] == [{"cmd_args.tp": 2}] * 2
    assert plan_of_change(rows) == ("step_time", night(2), night(3))


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_of_a_sweep_the_point_of_the_run_that_is_named_is_searched_until_its_night(
    swept: DirectoryStore, tp: int
) -> None:
    history = [row for each in find_series(swept, "llama3-8b") for row in read_history(swept, "dgx", each.series)]
    (run_key,) = (row.run_key for row in history if (row.sweep_point["cmd_args.tp"], row.night) == (tp, night(2)))

    rows = find_rows(swept, "llama3-8b", "dgx", SearchRequest(run_key=run_key))

    assert [(each.sweep_point, each.night) for each in rows] == [({"cmd_args.tp": tp}, night(2))]


def test_a_scenario_in_which_the_test_is_good_hides_no_other_one_s_regression(store: DirectoryStore) -> None:
    for one in ROWS:
        weekly = {"run_key": f"weekly-{one.run_key}", "scenario": "weekly", "summary": ROWS[0].summary, "worse": {}}
        earlier = {"harvested_at": one.harvested_at - timedelta(hours=1), "verdict": VerdictStatus.PASSED}
        put_row(store, one)
        put_row(store, one.model_copy(update=weekly | earlier))

    for request in (REQUEST, AttributionRequest(run_key=ROWS[4].run_key)):
        rows = find_rows(store, ROWS[0].test_id, ROWS[0].cluster, request)
        found = find_change(rows, lambda _row: None, request)

        assert (found.good.night, found.bad.run_key) == (night(2), ROWS[3].run_key)


def test_of_several_iterations_the_one_that_is_worse_or_that_is_named_is_searched(store: DirectoryStore) -> None:
    for one in ROWS:
        first = {"summary": ROWS[0].summary, "worse": {}, "verdict": VerdictStatus.PASSED}
        put_row(store, one.model_copy(update=first))
        put_row(store, one.model_copy(update={"run_key": f"{one.run_key[:-10]}0123456789", "iteration": 2}))

    for run_key in (None, f"{ROWS[4].run_key[:-10]}0123456789"):
        request = AttributionRequest(run_key=run_key)
        rows = find_rows(store, ROWS[0].test_id, ROWS[0].cluster, request)
        found = find_change(rows, lambda _row: None, request)

        assert (found.good.night, found.bad.night, found.bad.iteration) == (night(2), night(3), 2)


@pytest.mark.parametrize("other", [{"iteration": 2}, {"scenario": "weekly"}], ids=["iteration", "scenario"])
def test_a_night_of_which_only_another_point_of_the_sweep_has_the_run_in_question_counts(
    store: DirectoryStore, other: dict[str, int | str]
) -> None:
    """The last good night is one: the cluster lost its second iteration, or its scenario ran no more than one point."""
    for one in ROWS:
        at = {"sweep_point": {"cmd_args.tp": 2 if one.night == night(2) else 1}}
        put_row(store, one.model_copy(update={"sweep_point": {"cmd_args.tp": 1}, "worse": {}}))
        put_row(store, one.model_copy(update=at | other | {"run_key": f"{one.run_key[:-10]}0123456789"}))

    request = AttributionRequest(run_key=f"{ROWS[4].run_key[:-10]}0123456789")
    rows = find_rows(store, ROWS[0].test_id, ROWS[0].cluster, request)

    assert [(row.night, row.sweep_point["cmd_args.tp"]) for row in rows] == [(night(number), 1) for number in range(5)]


def test_a_run_that_is_in_no_history_is_refused(swept: DirectoryStore) -> None:
    with pytest.raises(InvalidInput, match="no such run in the history"):
        find_rows(swept, "llama3-8b", "dgx", SearchRequest(run_key="llama3-8b-2026-11-04-0000000000"))


def test_a_test_without_a_history_is_refused(store: DirectoryStore) -> None:
    with pytest.raises(InvalidInput, match="no history of this test"):
        find_rows(store, "nobody", "dgx", REQUEST)


def test_a_history_in_which_nothing_became_worse_has_no_cause() -> None:
    with pytest.raises(InvalidInput, match="nothing became worse"):
        plan_of(ROWS[:3])


def test_where_nothing_changed_that_can_be_exchanged_the_cluster_is_named() -> None:
    same = {prefix: record(0).model_copy(update={"facts": {"driver": prefix[-20:]}}) for prefix in RECORDS}
    shift = find_change(ROWS, lambda _row: None, REQUEST)

    with pytest.raises(InvalidInput, match=r"nothing changed that can be exchanged(?s:.*)driver"):
        make_attribution_plan(ROWS, shift, same.get, REQUEST)


def test_a_run_that_was_pruned_is_said() -> None:
    shift = find_change(ROWS, lambda _row: None, REQUEST)

    with pytest.raises(DamagedData, match="not stored any more"):
        make_attribution_plan(ROWS, shift, lambda _prefix: None, REQUEST)


def test_pairs_that_proved_it_on_the_same_nodes_clear_the_nodes() -> None:
    arms = [
        row(record(3, arm=Arm(role=role, pair=1, reference="r"), repeat=repeat))
        for repeat, role in enumerate(("new", "control"), start=1)
    ]

    assert plan_of([*ROWS, *arms]).same_nodes
    assert not plan_of(ROWS).same_nodes


# --- what is kept ----------------------------------------------------------------------------------------------------


def test_the_first_plan_of_a_change_holds_by_what_each_request_may_cost(store: DirectoryStore) -> None:
    first = keep_plan(store, plan_of(ROWS))
    changed = plan_of(ROWS, AttributionRequest(budget=1.0)).model_copy(update={"rest": ("another driver",)})

    assert keep_plan(store, changed) == first.model_copy(update={"budget": 1.0})
    assert list(plans_of(store, first.cluster, first.series)) == [first]


def test_a_later_night_asks_about_the_same_change(store: DirectoryStore) -> None:
    first = keep_plan(store, plan_of(ROWS[:4]))
    later = find_change(ROWS, lambda _row: None, AttributionRequest(good=night(1), bad=night(4)))
    next_one = later._replace(good=ROWS[3], bad=ROWS[4])

    assert same_change(store, later) == first
    assert same_change(store, later._replace(metric="peak_memory")) is None
    assert same_change(store, next_one) is None


def test_a_change_after_a_night_that_was_named_by_a_word_is_another_one(store: DirectoryStore) -> None:
    by_hand = ROWS[3].model_copy(update={"night": "live"})
    first = keep_plan(store, plan_of([*ROWS[:3], by_hand]))
    again = find_change([*ROWS[:3], by_hand], lambda _row: None, REQUEST)
    repaired, worse = (row(record(number)) for number in (2, 4))
    later = again._replace(
        good=repaired.model_copy(update={"night": "2026-12-01"}), bad=worse.model_copy(update={"night": "2026-12-02"})
    )

    assert (first.good_night, first.bad_night) == (night(2), "live")
    assert same_change(store, again) == first
    assert same_change(store, later) is None


def test_nights_that_are_named_are_not_answered_with_other_ones(store: DirectoryStore) -> None:
    wide = AttributionRequest(good=night(1), bad=night(4))
    first = keep_plan(store, plan_of(ROWS, wide))
    narrow = AttributionRequest(good=night(2), bad=night(4))
    change = find_change(ROWS, lambda _row: None, narrow)

    assert same_change(store, change, narrow) is None
    assert same_change(store, find_change(ROWS, lambda _row: None, wide), wide) == first
    assert same_change(store, change) == first


def test_a_design_is_written_down_before_its_run_and_keeps_its_number(store: DirectoryStore) -> None:
    plan = keep_plan(store, plan_of(ROWS))

    begun = [*begin_designs(store, plan, [(True, True), (False, False)]), *begin_designs(store, plan, [(True, False)])]
    runs = [design_run(plan, RECORDS[plan.bad], each) for each in begun]

    assert [each.number for each in begun] == [1, 2, 3]
    assert begun_designs(store, plan) == tuple(begun)
    assert [run.test.megatron_bridge.commit for run in runs] == [BAD, GOOD, BAD]
    assert [run.test.extra_env_vars for run in runs] == [{"NCCL_ALGO": "Tree"}, {}, {}]
    assert {run.night for run in runs} == {plan.attribution_id}
    assert len({run.run_key for run in runs}) == 3


# --- ranges inside an image, and inside a submodule that the test itself moves ---------------------------------------


CORE = "3rdparty/Megatron-LM"
SUBMODULE = Factor(axis="submodule", key=f"megatron_bridge/{CORE}", good="1" * 40, bad="4" * 40)
IMAGE = Factor(axis="image", good="/images/nemo-1.sqsh", bad="/images/nemo-3.sqsh")


def inner(digit: str) -> RangeCommit:
    when = datetime(2026, 11, 16, tzinfo=UTC)
    return RangeCommit(commit=digit * 40, subject=f"Core {digit}", author="Ada", authored_at=when)


def with_inner(commit: RangeCommit) -> RangeCommit:
    """The commits of a bump from 1 to 4: of the old branch 1 goes, and 3 and 4 come."""
    (bump,) = commit.bumps
    opened = bump.model_copy(update={"base": "0" * 40, "commits": (inner("3"), inner("4")), "reverted": (inner("1"),)})
    return commit.model_copy(update={"bumps": (opened,)})


def bad_run() -> RunRecord:
    made = make_record()
    (repo,) = made.spec.test.git_repos
    repo = repo.model_copy(update={"init_submodules": True, "submodules": {CORE: "dev"}})
    test = made.spec.test.model_copy(update={"git_repos": (repo,)})
    pinned = made.checkout.megatron_bridge.model_copy(update={"submodules": {CORE: SUBMODULE.bad}})
    checkout = made.checkout.model_copy(update={"megatron_bridge": pinned})
    return made.model_copy(update={"spec": made.spec.model_copy(update={"test": test}), "checkout": checkout})


def test_a_submodule_that_the_test_moved_is_searched_at_the_one_commit_of_its_repository() -> None:
    bad = bad_run()
    plan = plan_of_range(ATTRIBUTION_PLAN, submodule_range(SUBMODULE, bad, with_inner))

    ran = [point_run(plan, bad, place, 1).test.megatron_bridge for place in plan.places]

    assert {one.commit for one in ran} == {bad.checkout.megatron_bridge.commit}
    assert [one.submodules[CORE][0] for one in ran] == ["1", "0", "3", "4"]


def test_its_commit_is_named_without_a_bump_that_there_was_none_of() -> None:
    asked = ATTRIBUTION_PLAN.model_copy(update={"factors": (*ATTRIBUTION_PLAN.factors, SUBMODULE)})
    alone = evaluate(asked, exchange_runs([4], asked))
    (group,) = ranges_of(alone)
    plan = descent_plan(alone, group, plan_of_range(asked, submodule_range(SUBMODULE, bad_run(), with_inner)))
    found = Culprit(kind="found", first=2, last=2, probability=0.995, runs=4)

    said = sentence(with_descent(alone, BisectResult(plan=plan, answer=found, points=())))

    assert said.startswith(f'Megatron-LM {"3" * 12} "Core 3", 99.')


def test_a_submodule_whose_commits_cannot_be_listed_says_why() -> None:
    def note(commit: RangeCommit) -> RangeCommit:
        (bump,) = commit.bumps
        return commit.model_copy(update={"bumps": (bump.model_copy(update={"note": "it is gone"}),)})

    with pytest.raises(InvalidInput, match=r"cannot be listed.*it is gone"):
        submodule_range(SUBMODULE, bad_run(), note)


def test_a_point_of_an_image_is_the_bad_run_in_it() -> None:
    bad = make_record()
    versions = ("/images/nemo-2.sqsh", IMAGE.bad)
    plan = plan_of_range(ATTRIBUTION_PLAN, images_range(IMAGE, versions, bad))

    ran = [point_run(plan, bad, place, 1) for place in plan.places]

    assert [run.test.cmd_args["container_image"] for run in ran] == [IMAGE.good, *versions]
    assert {run.test.megatron_bridge.commit for run in ran} == {bad.checkout.megatron_bridge.commit}
    assert len({run.run_key for run in ran}) == 3


def test_an_image_is_named_with_the_one_before_it() -> None:
    alone = evaluate(ATTRIBUTION_PLAN, exchange_runs([0]))
    (group,) = ranges_of(alone)
    versions = ("nvcr.io/nvidia/nemo:2", "nvcr.io/nvidia/nemo:3")
    factor = IMAGE.model_copy(update={"good": "nvcr.io/nvidia/nemo:1", "bad": versions[-1]})
    plan = descent_plan(alone, group, plan_of_range(alone.plan, images_range(factor, versions, make_record())))
    found = Culprit(kind="found", first=1, last=1, probability=0.995, runs=4)

    within = BisectResult(plan=plan, answer=found, points=())
    said = sentence(with_descent(alone, within))

    assert result_lines(within)[1:3] == ("the first bad image (99.5 %):", "  nvcr.io/nvidia/nemo:2 after nemo:1")
    assert said.startswith("image nemo:2, after nemo:1, 99.")
