"""From a history to what bisect searches, and what its runs are."""

from collections.abc import Callable, Sequence
from datetime import UTC, date, datetime, timedelta
from typing import Any

import pytest

from nightbridge.bisect.plan import (
    BisectPlan,
    BisectRequest,
    keep_plan,
    load_plan,
    make_bisect_plan,
    point_key,
    point_run,
)
from nightbridge.bisect.result import (
    BisectResult,
    Point,
    evaluate,
    next_points,
    point_of,
    price_of,
    result_lines,
    stored_points,
)
from nightbridge.bisect.search import BisectPolicy, Failure, Levels, Measured
from nightbridge.bisect.shift import SearchRequest, failure_of, find_rows, requested_shift
from nightbridge.errors import DamagedData, InvalidInput
from nightbridge.gate.decisions import Decision
from nightbridge.history.history_store import put_row
from nightbridge.history.rows import HistoryRow
from nightbridge.models import (
    GitRepo,
    JobState,
    JobStatus,
    Outcome,
    RangeCommit,
    RunRecord,
    Summary,
    Verdict,
    VerdictStatus,
)
from nightbridge.models.scenario import RunDependency
from nightbridge.store.directory import DirectoryStore

GOOD, BAD = "a" * 40, "e" * 40
NIGHTS = 24
SLOWER_FROM = 16

Row = Callable[..., HistoryRow]


def night_id(number: int) -> str:
    return f"2026-11-{number + 1:02d}"


@pytest.fixture
def rows(make_row: Row, summary_of: Callable[..., object]) -> list[HistoryRow]:
    """Nights of 1 s a step with a little noise; 3 % more from a night on, whose commit is another one."""
    made = []
    for number in range(NIGHTS):
        slower = number >= SLOWER_FROM
        step_time = (1.03 if slower else 1.0) * (1 + 0.002 * (-1) ** number)
        summary = summary_of((step_time,) * 50)
        made.append(make_row(summary, night_id(number), commit=BAD if slower else GOOD))
    return made


def four_commits(url: str, good: str, bad: str) -> tuple[RangeCommit, ...]:
    when = datetime(2026, 11, 16, tzinfo=UTC)
    hashes = ["b" * 40, "c" * 40, "d" * 40, bad]
    return tuple(
        RangeCommit(commit=commit, subject=f"Change {n}", author="Ada", authored_at=when)
        for n, commit in enumerate(hashes, start=1)
    )


def no_verdict(row: HistoryRow) -> Verdict | None:
    return None


@pytest.fixture
def plan(rows: Sequence[HistoryRow]) -> BisectPlan:
    return make_bisect_plan(rows, four_commits, no_verdict)


# --- what is searched ------------------------------------------------------------------------------------------------


def test_the_range_lies_between_the_pins_before_and_after_the_change(plan: BisectPlan) -> None:
    (searched,) = plan.ranges
    assert (searched.repository, searched.good, searched.bad) == ("megatron_bridge", GOOD, BAD)
    assert (plan.metric, plan.since) == ("step_time", night_id(SLOWER_FROM))
    assert isinstance(plan.levels, Levels)
    assert plan.levels.good == pytest.approx(1.0, rel=0.003)
    assert plan.levels.bad == pytest.approx(1.03, rel=0.003)
    assert 0.002 < plan.levels.noise < 0.006


def test_the_same_question_has_the_same_id_and_another_one_another(rows: Sequence[HistoryRow]) -> None:
    first = make_bisect_plan(rows, four_commits, no_verdict)
    later = make_bisect_plan(rows, four_commits, no_verdict)
    other = make_bisect_plan(rows, four_commits, no_verdict, BisectRequest(good="f" * 40))

    assert first.bisect_id == later.bisect_id != other.bisect_id
    assert "-bisect-" in first.bisect_id


def test_ends_that_are_named_by_branches_are_the_commits_that_these_had_when_the_search_began(
    rows: Sequence[HistoryRow],
) -> None:
    branches = {"stable": "f" * 40, "main": BAD}

    def planned(good: str, bad: str) -> BisectPlan:
        named = BisectRequest(good=good, bad=bad)
        return make_bisect_plan(
            rows, four_commits, no_verdict, named, commit_named=lambda _url, name: branches.get(name, name)
        )

    plan = planned("stable", "main")

    assert (plan.good, plan.bad, plan.commits[-1].commit) == ("f" * 40, BAD, BAD)
    assert plan.bisect_id == planned("f" * 40, BAD).bisect_id
    branches["stable"] = GOOD
    assert plan.bisect_id != planned("stable", "main").bisect_id


def test_one_regressed_night_is_enough_where_no_change_point_can_be_yet(
    make_row: Row, summary_of: Callable[..., Summary]
) -> None:
    history = [make_row(summary_of((1.0,) * 50), night_id(n), commit=GOOD) for n in range(3)]
    bad = make_row(summary_of((1.2,) * 50), night_id(3), commit=BAD, verdict=VerdictStatus.REGRESSED)

    plan = make_bisect_plan([*history, bad], four_commits, no_verdict)

    (searched,) = plan.ranges
    assert (plan.metric, searched.good, searched.bad) == ("step_time", GOOD, BAD)
    assert isinstance(plan.levels, Levels)
    assert plan.levels.bad == pytest.approx(1.2)


@pytest.fixture
def night_after_night(make_row: Row, summary_of: Callable[..., Summary]) -> Callable[..., list[HistoryRow]]:
    """Nights with these step times; those beyond a limit regressed."""

    def made(step_times: Sequence[float], limit: float) -> list[HistoryRow]:
        found = []
        for number, step_time in enumerate(step_times):
            status = VerdictStatus.REGRESSED if step_time > limit else VerdictStatus.PASSED
            night = str(date(2026, 9, 1) + timedelta(days=number))
            row = make_row(summary_of((step_time * (1 + 0.001 * (number % 3 - 1)),) * 50), night, verdict=status)
            found.append(row.model_copy(update={"worse": {"step_time": 0.1} if step_time > limit else {}}))
        return found

    return made


@pytest.mark.parametrize("metric", [None, "step_time"])
def test_a_night_is_not_searched_for_a_change_that_was_repaired_long_ago(
    night_after_night: Callable[..., list[HistoryRow]], metric: str | None
) -> None:
    rows = night_after_night([*[1.0] * 15, *[1.1] * 15, *[1.0] * 19, 1.3], limit=1.05)

    shift = requested_shift(rows, no_verdict, metric)

    assert (shift.since, shift.good.night, shift.bad.night) == (rows[49].night, rows[48].night, rows[49].night)


@pytest.mark.parametrize("nights", [1, 8])
@pytest.mark.parametrize("before", [{"topology": {"GPU": "H200"}}, {"series": "llama3-8b-ffffffffffff"}])
def test_a_night_is_not_searched_for_a_slower_machine_or_configuration_of_long_ago(
    night_after_night: Callable[..., list[HistoryRow]], before: dict[str, Any], nights: int
) -> None:
    rows = night_after_night([*[1.0] * 20, *[1.5] * 5, *[1.6] * nights], limit=1.55)
    own = {"topology": {"GPU": "H100"}}
    rows = [row.model_copy(update=own | before if at < 20 else own) for at, row in enumerate(rows)]

    shift = requested_shift(rows, no_verdict, None)

    assert (shift.since, shift.good.night, shift.bad.night) == (rows[25].night, rows[24].night, rows[25].night)
    assert isinstance(shift.levels, Levels)
    assert shift.levels.good == pytest.approx(1.5, rel=0.002)
    assert shift.levels.noise < 0.01


@pytest.mark.parametrize("between", [0.6, 1.4])
@pytest.mark.parametrize("nights", [1, 8])
def test_a_night_on_another_machine_type_is_not_the_last_good_one(
    night_after_night: Callable[..., list[HistoryRow]], between: float, nights: int
) -> None:
    rows = night_after_night([*[1.0] * 20, between, *[1.1] * nights], limit=1.05)
    rows = [row.model_copy(update={"topology": {"GPU": "H100"}}) for row in rows]
    other = {"topology": {"GPU": "H200"}, "verdict": VerdictStatus.PASSED, "worse": {}}
    rows[20] = rows[20].model_copy(update=other)

    shift = requested_shift(rows, no_verdict, None)

    assert (shift.since, shift.good.night, shift.bad.night) == (rows[21].night, rows[19].night, rows[21].night)
    assert isinstance(shift.levels, Levels)
    assert shift.levels.good == pytest.approx(1.0, rel=0.002)


def test_a_night_is_not_searched_for_a_level_that_was_accepted(
    night_after_night: Callable[..., list[HistoryRow]],
) -> None:
    rows = night_after_night([*[1.0] * 15, *[1.1] * 25, 1.4], limit=1.2)
    made = Decision(
        kind="baseline",
        **{name: getattr(rows[0], name) for name in ("cluster", "series", "test_id")},
        since=rows[15].night,
        night=rows[16].night,
        who="ann",
        why="new image",
        when=datetime(2026, 12, 1, tzinfo=UTC),
    )

    shift = requested_shift(rows, no_verdict, None, (made,))

    assert (shift.good.night, shift.bad.night) == (rows[39].night, rows[40].night)


@pytest.mark.parametrize(("nights", "good"), [(0, 15), (1, 16)])
def test_what_is_worse_than_a_level_that_was_just_accepted_is_searched_after_it(
    night_after_night: Callable[..., list[HistoryRow]], nights: int, good: int
) -> None:
    rows = night_after_night([*[1.0] * 15, *[1.1] * (1 + nights), 1.3], limit=1.2)
    accepted = rows[15].model_copy(update={"verdict": VerdictStatus.REGRESSED, "worse": {"step_time": 0.1}})
    made = Decision(
        kind="baseline",
        **{name: getattr(accepted, name) for name in ("cluster", "series", "test_id")},
        since=accepted.night,
        night=accepted.night,
        who="ann",
        why="new image",
        when=datetime(2026, 12, 1, tzinfo=UTC),
    )

    shift = requested_shift([*rows[:15], accepted, *rows[16:]], no_verdict, None, (made,))

    assert (shift.good.night, shift.bad.night) == (rows[good].night, rows[-1].night)
    assert isinstance(shift.levels, Levels)
    assert shift.levels.good == pytest.approx(1.1, rel=0.002)
    assert shift.levels.noise == pytest.approx(0.0033, rel=0.02)


def test_a_metric_that_moved_by_less_than_runs_scatter_is_not_searched(make_row: Row, summary_of: Any) -> None:
    def night(number: int, memory: float, **fields: Any) -> HistoryRow:
        summary = summary_of((1.0 + 0.1 * (number == 3),) * 50).model_copy(update={"peak_memory": memory})
        return make_row(summary, night_id(number), **fields)

    nights = [night(number, 47.3, commit=GOOD) for number in range(3)]
    slower = night(3, 47.31, commit=BAD, verdict=VerdictStatus.REGRESSED)
    slower = slower.model_copy(update={"worse": {"step_time": 0.1}})

    with pytest.raises(InvalidInput, match=r"peak memory is worse by 0\.0211 %, no more than single runs scatter"):
        make_bisect_plan([*nights, slower], four_commits, no_verdict, BisectRequest(metric="peak_memory"))
    assert make_bisect_plan([*nights, slower], four_commits, no_verdict).metric == "step_time"


@pytest.mark.parametrize("worse", ["startup_time", "peak_memory"])
def test_what_is_searched_is_what_regressed_and_not_what_moved_furthest(
    make_row: Row, summary_of: Callable[..., Summary], worse: str
) -> None:
    def night(number: int, **measured: float) -> HistoryRow:
        summary = summary_of((1.0 + 0.001 * number,) * 50).model_copy(update=measured)
        return make_row(summary, night_id(number), verdict=VerdictStatus.PASSED)

    good = [night(number, startup_time=100.0, peak_memory=60.0) for number in range(9)]
    bad = night(9, startup_time=150.0, peak_memory=60.5, final_loss=9.0)
    bad = bad.model_copy(update={"verdict": VerdictStatus.REGRESSED, "worse": {worse: 0.01}})

    assert requested_shift([*good, bad], no_verdict, None).metric == worse


def test_what_became_worse_after_something_else_is_searched_between_its_own_nights(
    make_row: Row, summary_of: Callable[..., Summary]
) -> None:
    def night(number: int, memory: float, startup: float, **worse: float) -> HistoryRow:
        summary = summary_of((1.0,) * 50).model_copy(update={"peak_memory": memory, "startup_time": startup})
        status = VerdictStatus.REGRESSED if worse else VerdictStatus.PASSED
        row = make_row(summary, night_id(number), verdict=status)
        return row.model_copy(update={"worse": worse})

    noise = (0.1, -0.1, 0.2)
    good = [night(number, 60.0 + noise[number % 3], 100.0 + noise[number % 3]) for number in range(9)]
    more = [night(number, 66.0, 100.0 + noise[number % 3], peak_memory=0.1) for number in (9, 10)]
    both = [night(11, 66.0, 200.0, peak_memory=0.1, startup_time=1.0)]
    later = [night(12, 66.0, 200.0, peak_memory=0.1, startup_time=1.0)]
    repaired = [night(12, 60.0, 200.0, startup_time=1.0)]

    def searched(rows: Sequence[HistoryRow], metric: str | None = None) -> tuple[str, str, str]:
        shift = requested_shift(rows, no_verdict, metric)
        return shift.metric, shift.good.night, shift.bad.night

    began = night_id(10), night_id(11)
    assert searched([*good, *more]) == ("peak_memory", night_id(8), night_id(9))
    assert searched([*good, *more, *both]) == ("startup_time", *began)
    assert searched([*good, *more, *both], "startup_time") == ("startup_time", *began)
    assert searched([*good, *more, *both, *later], "startup_time") == ("startup_time", *began)
    assert searched([*good, *more, *both, *later])[0] == "peak_memory"
    assert searched([*good, *more, *both, *repaired]) == ("startup_time", *began)


def test_where_nothing_is_worse_tonight_the_change_that_was_repaired_is_searched(
    night_after_night: Callable[..., list[HistoryRow]],
) -> None:
    rows = night_after_night([*[1.0] * 15, *[1.1] * 15, *[1.0] * 19], limit=1.05)

    assert requested_shift(rows, no_verdict, None).since == rows[15].night


@pytest.mark.parametrize("named", [False, True])
def test_a_history_that_has_lost_the_nights_own_runs_is_told(make_row: Row, store: DirectoryStore, named: bool) -> None:
    further = make_row(night=night_id(1), repeat=1)
    put_row(store, further)
    request = SearchRequest(run_key=further.run_key if named else None)

    with pytest.raises(InvalidInput, match=r"no night's own run.*nightbridge history llama3-8b --rebuild"):
        find_rows(store, "llama3-8b", "dgx", request)


def test_a_history_in_which_nothing_became_worse_has_nothing_to_search(rows: Sequence[HistoryRow]) -> None:
    with pytest.raises(InvalidInput, match="nothing became worse"):
        make_bisect_plan(rows[:SLOWER_FROM], four_commits, no_verdict)


def test_a_change_without_a_changed_commit_is_not_searched_for_one(
    make_row: Row, summary_of: Callable[..., Summary]
) -> None:
    history = [make_row(summary_of((1.0,) * 50), night_id(n)) for n in range(3)]
    bad = make_row(summary_of((1.2,) * 50), night_id(3), verdict=VerdictStatus.REGRESSED)

    with pytest.raises(InvalidInput, match="no commit changed"):
        make_bisect_plan([*history, bad], four_commits, no_verdict)


def test_where_both_repositories_changed_the_commits_of_both_are_searched(
    make_row: Row, summary_of: Callable[..., Summary], make_record: Callable[..., RunRecord]
) -> None:
    good = [make_row(summary_of((1.0,) * 50), night_id(n), commit=GOOD) for n in range(3)]
    assert good[0].nemo_run is not None
    bad = make_row(summary_of((1.2,) * 50), night_id(3), commit=BAD, verdict=VerdictStatus.REGRESSED)
    bad = bad.model_copy(update={"nemo_run": good[0].nemo_run.model_copy(update={"commit": "9" * 40})})

    plan = make_bisect_plan([*good, bad], four_commits, no_verdict)
    last_of_bridge, first_of_nemo, last = (point_run(plan, make_record(), place, 1).test for place in (4, 5, 8))

    assert [one.repository for one in plan.ranges] == ["megatron_bridge", "nemo_run"]
    assert len(plan.places) == 9
    assert (last_of_bridge.megatron_bridge.commit, last_of_bridge.nemo_run_repo.commit) == (BAD, "b" * 40)
    assert (first_of_nemo.megatron_bridge.commit, first_of_nemo.nemo_run_repo.commit) == (BAD, "b" * 40)
    assert (last.megatron_bridge.commit, last.nemo_run_repo.commit) == (BAD, "9" * 40)
    assert plan.range_of(5).repository == "nemo_run"


# --- failures --------------------------------------------------------------------------------------------------------


NAN = ("12 steps without a finite loss or gradient norm",)
CRASH = ("the program failed: RuntimeError: CUDA error at rank 3 of node17, see /scratch/u/12/log.out",)


@pytest.fixture
def failing(make_row: Row, summary_of: Callable[..., Summary]) -> list[HistoryRow]:
    """Three good nights, one that crashed, then two with steps that are not finite."""
    nights = [make_row(summary_of((1.0,) * 50), night_id(n), commit=GOOD) for n in range(3)]
    commits = ("c" * 40, "d" * 40, BAD)
    return nights + [
        make_row(summary_of((1.0,) * 50), night_id(n), commit=commit, verdict=VerdictStatus.FAILED)
        for n, commit in enumerate(commits, start=3)
    ]


def failed_verdict(row: HistoryRow) -> Verdict:
    reasons = CRASH if row.night == night_id(3) else NAN
    return Verdict(run_key=row.run_key, test_id="t", night=row.night, status=VerdictStatus.FAILED, reasons=reasons)


def test_a_test_that_fails_is_searched_from_its_last_good_night_to_the_first_that_failed_alike(
    failing: list[HistoryRow],
) -> None:
    plan = make_bisect_plan(failing, four_commits, failed_verdict)

    assert plan.metric == "failure"
    assert plan.levels == Failure(signature="failed: # steps without a finite loss or gradient norm")
    assert (plan.since, plan.good, plan.bad) == (night_id(4), GOOD, "d" * 40)


def test_a_metric_that_a_user_names_is_searched_though_the_test_fails(failing: list[HistoryRow]) -> None:
    with pytest.raises(InvalidInput, match="nothing became worse"):
        make_bisect_plan(failing, four_commits, failed_verdict, BisectRequest(metric="step_time"))


def test_a_test_that_did_not_fail_has_no_failure_to_search(rows: Sequence[HistoryRow]) -> None:
    with pytest.raises(InvalidInput, match="the latest night did not fail"):
        make_bisect_plan(rows, four_commits, no_verdict, BisectRequest(metric="failure"))


def test_failures_are_alike_whatever_the_rank_the_node_and_the_folder() -> None:
    def signature(reason: str) -> str | None:
        status = VerdictStatus.FAILED
        return failure_of(Verdict(run_key="r", test_id="t", night="n", status=status, reasons=(reason,)))

    elsewhere = "the program failed: RuntimeError: CUDA error at rank 12 of node4, see /home/v/3/log.out"
    assert signature(CRASH[0]) == signature(elsewhere)
    assert signature(CRASH[0]) != signature(CRASH[0].replace("CUDA", "NCCL"))
    assert failure_of(Verdict(run_key="r", test_id="t", night="n", status=VerdictStatus.REGRESSED)) is None


def test_a_run_that_fails_alike_is_bad_one_that_ends_is_good_and_another_failure_is_skipped(
    failing: list[HistoryRow],
) -> None:
    plan = make_bisect_plan(failing, four_commits, failed_verdict)
    verdicts = [
        Verdict(run_key="good", test_id="t", night="n", status=VerdictStatus.REGRESSED),
        Verdict(run_key="other", test_id="t", night="n", status=VerdictStatus.FAILED, reasons=CRASH),
        Verdict(run_key="lost", test_id="t", night="n", status=VerdictStatus.INFRASTRUCTURE, reasons=NAN),
        Verdict(run_key="bad", test_id="t", night="n", status=VerdictStatus.FAILED, reasons=NAN),
    ]
    points = [point_of(plan, place, 1, verdict, None) for place, verdict in enumerate(verdicts)]

    assert [point.value for point in points] == [0.0, None, None, 1.0]
    assert evaluate(plan, points).skipped == (1,)
    lines = "\n".join(result_lines(evaluate(plan, points)))
    assert "failure (failed: # steps without a finite loss" in lines
    assert f"commit 3 {'d' * 12}: 1 of 1 failed, 1 run" in lines


# --- other losses ----------------------------------------------------------------------------------------------------


@pytest.fixture
def other_losses(make_row: Row, summary_of: Callable[..., Summary]) -> list[HistoryRow]:
    """Nights of a deterministic test; since the fourth its losses are others, by next to nothing."""

    def night(number: int, digest: str, **fields: Any) -> HistoryRow:
        summary = summary_of((1.01 if number >= 3 else 1.0,) * 50).model_copy(
            update={"loss_digest": f"tensorboard:{digest}"}
        )
        return make_row(summary, night_id(number), **fields)

    bad = [night(n, "other", commit=BAD, verdict=VerdictStatus.REGRESSED) for n in range(3, 5)]
    bad = [row.model_copy(update={"worse": {"loss_curve": 2e-7}}) for row in bad]
    return [*(night(n, "usual", commit=GOOD) for n in range(3)), *bad]


def test_a_deterministic_test_is_searched_for_the_first_commit_with_other_losses(
    other_losses: list[HistoryRow],
) -> None:
    plan = BisectPlan.model_validate_json(make_bisect_plan(other_losses, four_commits, no_verdict).model_dump_json())

    assert (plan.metric, plan.since, plan.good, plan.bad) == ("losses", night_id(3), GOOD, BAD)
    assert plan.levels == Failure(signature="other losses", digest="tensorboard:usual")


def test_a_good_night_that_is_named_by_a_word_is_before_those_that_came_after_it(
    other_losses: list[HistoryRow],
) -> None:
    by_hand = {"night": "release-check", "harvested_at": datetime(2026, 11, 3, 12, tzinfo=UTC)}
    rows = [row.model_copy(update=by_hand) if row.night == night_id(2) else row for row in other_losses]
    repaired = rows[-1].model_copy(update={"summary": rows[0].summary, "verdict": VerdictStatus.REGRESSED})

    shift = requested_shift([*rows[:-1], repaired], no_verdict, "losses")

    assert (shift.good.night, shift.bad.night) == ("release-check", night_id(3))


def test_an_older_good_commit_of_a_night_that_is_named_by_a_word_is_found(make_row: Row) -> None:
    other = "f" * 40
    rows = [
        make_row(night=night_id(0), commit=GOOD).model_copy(
            update={"night": "release-check", "harvested_at": datetime(2026, 11, 1, 12, tzinfo=UTC)}
        ),
        make_row(night=night_id(1), commit=other),
        make_row(night=night_id(2), commit=BAD, verdict=VerdictStatus.FAILED),
    ]

    def commits(url: str, good: str, bad: str) -> tuple[RangeCommit, ...]:
        if good == other:
            raise InvalidInput("no ancestor", subject=good)
        return four_commits(url, good, bad)

    def failed(row: HistoryRow) -> Verdict:
        return Verdict(run_key=row.run_key, test_id="t", night=row.night, status=VerdictStatus.FAILED, reasons=("x",))

    assert make_bisect_plan(rows, commits, failed).good == GOOD


def test_a_run_with_other_losses_is_bad_and_one_without_any_or_from_the_log_is_skipped(
    other_losses: list[HistoryRow], make_record: Callable[..., RunRecord]
) -> None:
    plan = make_bisect_plan(other_losses, four_commits, no_verdict)
    digests = ("tensorboard:usual", None, "log:usual", "tensorboard:third", "tensorboard:other")
    passed = Verdict(run_key="r", test_id="t", night="n", status=VerdictStatus.PASSED)
    points = [
        point_of(plan, place, 1, passed, make_record(Summary(steps_done=50, loss_digest=digest)))
        for place, digest in enumerate(digests)
    ]
    failed = passed.model_copy(update={"status": VerdictStatus.FAILED})

    assert [point.value for point in points] == [0.0, None, None, 1.0, 1.0]
    assert point_of(plan, 1, 1, failed, make_record(Summary(loss_digest="tensorboard:other"))).value is None
    lines = "\n".join(result_lines(evaluate(plan, points)))
    assert "losses not the same bit for bit of llama3-8b since" in lines
    assert f"commit 3 {'d' * 12}: 1 of 1 with other losses, 1 run" in lines


def test_a_good_night_is_not_said_to_have_the_losses_of_itself(other_losses: list[HistoryRow]) -> None:
    with pytest.raises(InvalidInput, match=r"^llama3-8b: the latest night has no other losses"):
        make_bisect_plan(other_losses[:3], four_commits, no_verdict, BisectRequest(metric="losses"))


@pytest.mark.parametrize("digest", ["tensorboard:usual", "log:other", None])
def test_losses_that_are_the_same_or_cannot_be_compared_are_not_searched(
    other_losses: list[HistoryRow], digest: str | None
) -> None:
    rows = [
        row.model_copy(update={"summary": row.summary.model_copy(update={"loss_digest": digest})})
        if row.night >= night_id(3)
        else row
        for row in other_losses
    ]
    with pytest.raises(InvalidInput, match="not known to have other losses than 2026-11-03"):
        make_bisect_plan(rows, four_commits, no_verdict, BisectRequest(metric="losses"))


def test_a_metric_that_a_user_names_is_searched_though_the_losses_are_others(other_losses: list[HistoryRow]) -> None:
    assert (
        make_bisect_plan(other_losses, four_commits, no_verdict, BisectRequest(metric="step_time")).metric
        == "step_time"
    )


OLD = GitRepo(url="https://example.org/old.git", launcher="run.py")


def moved_commits(url: str, good: str, bad: str) -> tuple[RangeCommit, ...]:
    """The first of four commits is of the repository before it moved."""
    first, *others = four_commits(url, good, bad)
    return (first.model_copy(update={"url": OLD.url}), *others)


def moved_rows(rows: Sequence[HistoryRow]) -> list[HistoryRow]:
    """A history whose first nights had the old repository."""
    return [
        row.model_copy(update={"megatron_bridge": row.megatron_bridge.model_copy(update={"url": OLD.url})})
        if row.megatron_bridge and row.megatron_bridge.commit == GOOD
        else row
        for row in rows
    ]


def test_a_range_across_the_move_of_a_repository_begins_in_the_old_one(
    rows: Sequence[HistoryRow], make_record: Callable[..., RunRecord]
) -> None:
    plan = make_bisect_plan(moved_rows(rows), moved_commits, no_verdict, repo_of=lambda row, repository: OLD)
    new = make_record().spec.test.megatron_bridge

    ran = [point_run(plan, make_record(), place, 1).test.megatron_bridge for place in plan.places]

    assert [one.commit for one in ran] == [GOOD, *(commit.commit for commit in moved_commits("", GOOD, BAD))]
    assert [one.url for one in ran] == [OLD.url] * 2 + [new.url] * (len(ran) - 2)
    assert [one.launcher for one in ran][:3] == [OLD.launcher, OLD.launcher, new.launcher]


def test_a_move_of_which_no_good_run_is_stored_any_more_needs_a_good_end_since_then(rows: Sequence[HistoryRow]) -> None:
    with pytest.raises(InvalidInput, match="--good"):
        make_bisect_plan(rows, moved_commits, no_verdict)


# --- its runs --------------------------------------------------------------------------------------------------------


def test_a_point_is_the_bad_nights_run_at_another_commit(
    plan: BisectPlan, make_record: Callable[..., RunRecord]
) -> None:
    base: RunRecord = make_record(commit=BAD)

    run = point_run(plan, base, 2, 1)

    assert run.test.megatron_bridge.commit == "c" * 40
    assert run.test.nemo_run_repo.commit == "b" * 40  # as it was in the bad night
    assert run.test.cmd_args["container_image"] == f"nvcr.io/nvidia/nemo:26.08@sha256:{'d' * 64}"
    assert run.test.harvest.checkpoint == "none"
    assert run.night == plan.bisect_id


@pytest.mark.parametrize(
    ("metric", "ended", "golden"),
    [
        ("step_time", Outcome.SUCCEEDED, None),
        ("failure", Outcome.SUCCEEDED, "golden.json"),
        ("failure", Outcome.PROGRAM_ERROR, None),
    ],
)
def test_a_point_waits_for_no_other_run_and_is_held_to_golden_values_where_these_may_be_the_failure(
    plan: BisectPlan, make_record: Callable[..., RunRecord], metric: str, ended: Outcome, golden: str | None
) -> None:
    base = make_record(outcome=ended)
    gate = base.spec.test.gate.model_copy(update={"golden": "golden.json", "reference": "llama"})
    before = RunDependency(id="warm-up", type="start_post_success", run_keys=("warm-up-2026-11-17-0123456789",))
    spec = base.spec.model_copy(update={"test": base.spec.test.model_copy(update={"gate": gate}), "after": (before,)})

    run = point_run(plan.model_copy(update={"metric": metric}), base.model_copy(update={"spec": spec}), 2, 1)

    assert run.after == ()
    assert (run.test.gate.golden, run.test.gate.reference) == (golden, golden and "llama")


def test_every_run_of_every_point_has_a_key_of_its_own(plan: BisectPlan, make_record: Callable[..., RunRecord]) -> None:
    base = make_record()

    keys = {point_key(plan, base, place, number) for place in plan.places for number in range(1, 100)}

    assert len(keys) == len(plan.places) * 99
    assert {point_run(plan, base, place, 7).run_key for place in plan.places} <= keys


def test_the_first_plan_of_an_id_holds(plan: BisectPlan, store: DirectoryStore) -> None:
    keep_plan(store, plan)
    changed = plan.model_copy(update={"since": "2026-12-24"})

    assert keep_plan(store, changed) == plan == load_plan(store, plan.bisect_id)


def test_what_a_search_may_cost_is_what_was_requested_last(plan: BisectPlan, store: DirectoryStore) -> None:
    keep_plan(store, plan.model_copy(update={"policy": BisectPolicy(most_runs=1)}))
    generous = BisectPolicy(confidence=0.6, most_runs=20)

    assert keep_plan(store, plan.model_copy(update={"policy": generous})).policy == generous


# --- what its runs say -----------------------------------------------------------------------------------------------


def verdict_on(run_key: str, status: VerdictStatus, prefix: str = "") -> Verdict:
    return Verdict(run_key=run_key, test_id="t", night="n", status=status, prefix=prefix)


@pytest.mark.parametrize("test_id", ["llama-small", "deepseek-v3-gb200-256gpus-fp8-mx-pretrain-long-sequence-nightly"])
def test_finished_points_are_found_again_in_the_store(
    plan: BisectPlan,
    store: DirectoryStore,
    make_record: Callable[..., RunRecord],
    commit: Any,
    summary_of: Callable[..., Summary],
    test_id: str,
) -> None:
    base = make_record(commit=BAD, test_id=test_id)
    run = point_run(plan, base, 3, 2)
    record = make_record(summary_of((1.03,) * 50), plan.bisect_id).model_copy(update={"spec": run})
    record = record.model_copy(update={"prefix": f"runs/{run.test_slug}/{run.night}/{run.run_key}/a1"})
    commit(store, record)
    verdict = verdict_on(run.run_key, VerdictStatus.REGRESSED, record.prefix)
    store.put(f"{record.prefix.rpartition('/')[0]}/verdict.json", verdict.model_dump_json().encode())

    (point,) = stored_points(store, plan, base)

    assert (point.place, point.number) == (3, 2)
    assert point.value == pytest.approx(1.03)


def test_fewer_runs_than_there_are_leave_none_of_them_out(
    plan: BisectPlan, store: DirectoryStore, make_record: Callable[..., RunRecord]
) -> None:
    base = make_record(commit=BAD)
    for number in (1, 2, 3):
        run = point_run(plan, base, 3, number)
        folder = f"runs/{run.test_slug}/{run.night}/{run.run_key}"
        verdict = verdict_on(run.run_key, VerdictStatus.FAILED, f"{folder}/a1")
        store.put(f"{folder}/verdict.json", verdict.model_dump_json().encode())

    few = plan.model_copy(update={"policy": BisectPolicy(most_runs=1)})

    assert [point.number for point in stored_points(store, few, base)] == [1, 2, 3]


def test_a_damaged_verdict_of_a_point_names_its_object_and_what_to_do(
    plan: BisectPlan, store: DirectoryStore, make_record: Callable[..., RunRecord]
) -> None:
    base = make_record(commit=BAD)
    run = point_run(plan, base, 3, 2)
    key = f"runs/{run.test_slug}/{run.night}/{run.run_key}/verdict.json"
    store.put(key, b'{"run_key": ')

    with pytest.raises(DamagedData, match=f"{run.run_key}.*not a verdict.*runs the point again"):
        stored_points(store, plan, base)


def test_a_commit_that_fails_is_skipped_and_one_that_the_cluster_lost_is_tried_again(plan: BisectPlan) -> None:
    failed = point_of(plan, 2, 1, verdict_on("a", VerdictStatus.FAILED), None)
    lost = [point_of(plan, 1, n, verdict_on(f"b{n}", VerdictStatus.INFRASTRUCTURE), None) for n in (1, 2)]

    assert evaluate(plan, [failed, *lost]).skipped == (2,)
    third = point_of(plan, 1, 3, verdict_on("b3", VerdictStatus.INFRASTRUCTURE), None)
    assert evaluate(plan, [failed, *lost, third]).skipped == (1, 2)


def test_the_next_runs_are_new_ones(plan: BisectPlan) -> None:
    done = point_of(plan, 0, 1, verdict_on("a", VerdictStatus.INFRASTRUCTURE), None)

    assert next_points(plan, [done], at_once=3) == ((0, 2), (4, 1))


@pytest.mark.parametrize(
    ("again", "culprits"), [(VerdictStatus.PASSED, ["c" * 40]), (VerdictStatus.FAILED, ["c" * 40, "d" * 40])]
)
def test_a_commit_that_failed_once_is_tried_again_before_another_is_named_with_it(
    plan: BisectPlan, make_record: Any, summary_of: Any, again: VerdictStatus, culprits: list[str]
) -> None:
    """The second of four made it slower, and failed when it was run first."""
    points: list[Point] = []
    while chosen := next_points(plan, points, at_once=1):
        ((place, number),) = chosen
        status = VerdictStatus.PASSED if place != 2 else VerdictStatus.FAILED if number == 1 else again
        record = make_record(summary_of((1.03 if place >= 2 else 1.0,) * 50))
        given = record if status is VerdictStatus.PASSED else None
        points.append(point_of(plan, place, number, verdict_on(f"{place}-{number}", status), given))

    assert [step.commit for step in evaluate(plan, points).culprits] == culprits
    assert len([point for point in points if point.place == 2 and point.status is VerdictStatus.FAILED]) == len(
        culprits
    )


def searched(plan: BisectPlan, value_of: Callable[[int, int], float | None]) -> BisectResult:
    """What is found where a run, by its place and its number there, measures this; None where it fails."""
    points: list[Point] = []
    while chosen := next_points(plan, points, at_once=1):
        for place, number in chosen:
            value = value_of(place, number)
            status = VerdictStatus.FAILED if value is None else VerdictStatus.PASSED
            points.append(Point(place=place, number=number, run_key="", status=status, value=value))
    return evaluate(plan, points)


@pytest.mark.parametrize(
    ("end", "level", "said"),
    [
        (0, 1.03, f"commit 1, or none, for the good end {GOOD[:12]} does not run: name another one with --good"),
        (4, 1.0, f"commit 4, or none, for the bad end {BAD[:12]} does not run: name another one with --bad"),
    ],
)
def test_an_end_that_does_not_run_is_tried_twice_and_then_another_one_is_asked_for(
    plan: BisectPlan, end: int, level: float, said: str
) -> None:
    """Nothing tells whether the commit beside it did it, or the cluster."""
    result = searched(plan, lambda place, number: None if place == end else level)

    assert (result.answer.kind, result.culprits, result.skipped) == ("undecided", (), (end,))
    assert [point.number for point in result.points if point.place == end] == [1, 2]
    assert said in "\n".join(result_lines(result))


def test_an_end_that_failed_by_chance_leaves_nothing_open(plan: BisectPlan) -> None:
    result = searched(plan, lambda place, number: None if (place, number) == (0, 1) else 1.03 if place else 1.0)

    assert [step.commit for step in result.culprits] == ["b" * 40]


def test_while_it_is_undecided_whether_a_commit_did_it_none_is_called_the_likeliest(plan: BisectPlan) -> None:
    few = plan.model_copy(update={"policy": BisectPolicy(most_runs=2)})

    lines = "\n".join(result_lines(searched(few, lambda place, number: 1.03)))

    assert "undecided after 2 runs: most likely none of these commits" in lines


def test_a_point_that_was_measured_and_fails_since_is_not_run_until_it_does_not(plan: BisectPlan) -> None:
    result = searched(plan, lambda place, number: None if place == 0 and number > 1 else 1.03 if place else 1.0)

    assert [step.commit for step in result.culprits] == ["b" * 40]
    assert len([point for point in result.points if point.place == 0]) == 4


@pytest.mark.parametrize(
    ("at_the_good_end", "chosen"),
    [((None, None, 1.0, None), ((0, 5),)), ((1.0, None, None, None), ())],
)
def test_a_point_is_given_up_when_its_last_three_runs_said_nothing_and_not_when_it_was_measured_in_between(
    plan: BisectPlan, at_the_good_end: Sequence[float | None], chosen: tuple[tuple[int, int], ...]
) -> None:
    """The cluster may lose some runs of a point that works: its second run is still wanted."""
    values = {0: at_the_good_end, 1: (1.03, 1.03), 4: (1.03, 1.03)}
    points = [
        Point(place=place, number=number, run_key="", status=VerdictStatus.INFRASTRUCTURE, value=value)
        for place, measured in values.items()
        for number, value in enumerate(measured, start=1)
    ]

    assert next_points(plan, points, at_once=1) == chosen


def test_an_end_that_other_runs_have_measured_need_not_run_again(plan: BisectPlan) -> None:
    known = plan.model_copy(update={"known": (Measured(place=0, value=1.0),)})

    result = searched(known, lambda place, number: 1.03 if place else None)

    assert [step.commit for step in result.culprits] == ["b" * 40]


def test_runs_that_say_nothing_are_no_more_than_there_may_be_beside_what_is_known(plan: BisectPlan) -> None:
    known = tuple(Measured(place=place, value=value) for place, value in ((0, 1.0), (0, 1.0), (4, 1.03), (4, 1.03)))
    two_more = plan.model_copy(update={"known": known, "policy": BisectPolicy(most_runs=len(known) + 2)})

    assert len(searched(two_more, lambda place, number: None).points) == 2


def test_an_end_whose_runs_disagree_is_said(plan: BisectPlan, make_record: Any, summary_of: Any) -> None:
    points = [
        point_of(plan, 0, n, verdict_on(f"0-{n}", VerdictStatus.PASSED), make_record(summary_of((step_time,) * 50)))
        for n, step_time in enumerate((1.0, 1.03, 1.0), start=1)
    ]

    assert "the runs of the good end disagree: 1 of 3 are on the other side" in result_lines(evaluate(plan, points))


def test_the_answer_names_commit_subject_author_and_date(
    plan: BisectPlan, make_record: Callable[..., RunRecord], summary_of: Callable[..., Summary]
) -> None:
    points: list[Point] = []
    while chosen := next_points(plan, points, at_once=1):
        ((place, number),) = chosen
        step_time = 1.03 if place >= 3 else 1.0
        record = make_record(summary_of((step_time,) * 50))
        points.append(point_of(plan, place, number, verdict_on(f"{place}-{number}", VerdictStatus.PASSED), record))
    result = evaluate(plan, points)

    text = "\n".join(result_lines(result))

    assert [one.commit for one in result.culprits] == ["d" * 40]
    assert f"{'d' * 40} Change 3 (Ada, 2026-11-16" in text
    assert "GPU-hours" in text


def test_the_newest_good_ancestor_is_taken_where_the_last_good_night_was_newer(rows: list[HistoryRow]) -> None:
    asked: list[str] = []

    def only_the_oldest(url: str, good: str, bad: str) -> tuple[RangeCommit, ...]:
        asked.append(good)
        if good != oldest:
            raise InvalidInput("the branch was rewritten", subject=good)
        return four_commits(url, good, bad)

    oldest = rows[0].megatron_bridge.commit
    newer = [
        row.model_copy(update={"megatron_bridge": row.megatron_bridge.model_copy(update={"commit": "9" * 40})})
        if 0 < number < SLOWER_FROM
        else row
        for number, row in enumerate(rows)
    ]
    found = make_bisect_plan(newer, only_the_oldest, no_verdict)

    assert found.good == oldest
    assert asked[0] != oldest
    with pytest.raises(InvalidInput, match="the branch was rewritten"):
        make_bisect_plan(newer, only_the_oldest, no_verdict, BisectRequest(good="9" * 40))


def test_a_bisect_says_its_price_first(plan: BisectPlan, make_record: Callable[..., RunRecord]) -> None:
    begun = datetime(2026, 11, 21, tzinfo=UTC)
    record = make_record()
    status = JobStatus(job_id=1, state=JobState.COMPLETED, started_at=begun, ended_at=begun + timedelta(minutes=10))
    base = record.model_copy(
        update={
            "plan": record.plan.model_copy(update={"nodes": 8, "tasks_per_node": 8}),
            "jobs": (record.job.model_copy(update={"status": status}),),
        }
    )

    assert price_of(plan, (), base) == (
        "6 runs of 10 min on 8 nodes = 64 GPU-hours, at most 100 runs = 1,067 GPU-hours"
    )
    assert isinstance(plan.levels, Levels)
    done = Point(place=0, number=1, run_key="", status=VerdictStatus.PASSED, value=plan.levels.good)
    assert price_of(plan, [done], base) == (
        "5 runs of 10 min on 8 nodes = 53.3 GPU-hours, at most 99 runs = 1,056 GPU-hours"
    )
