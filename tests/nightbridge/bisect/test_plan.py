"""From a history to what bisect searches, and what its runs are."""

from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Any

import pytest

from nightbridge.bisect.plan import BisectPlan, BisectRequest, keep_plan, load_plan, make_plan, point_run
from nightbridge.bisect.result import Point, evaluate, next_points, point_of, result_lines, stored_points
from nightbridge.errors import DamagedData, InvalidInput
from nightbridge.history.rows import HistoryRow
from nightbridge.models import RangeCommit, RunRecord, Summary, Verdict, VerdictStatus
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


@pytest.fixture
def plan(rows: Sequence[HistoryRow]) -> BisectPlan:
    return make_plan(rows, four_commits)


# --- what is searched ------------------------------------------------------------------------------------------------


def test_the_range_lies_between_the_pins_before_and_after_the_change(plan: BisectPlan) -> None:
    assert (plan.repository, plan.good, plan.bad) == ("megatron_bridge", GOOD, BAD)
    assert (plan.metric, plan.since) == ("step_time", night_id(SLOWER_FROM))
    assert plan.levels.good == pytest.approx(1.0, rel=0.003)
    assert plan.levels.bad == pytest.approx(1.03, rel=0.003)
    assert 0.002 < plan.levels.noise < 0.006


def test_the_same_question_has_the_same_id_and_another_one_another(rows: Sequence[HistoryRow]) -> None:
    first = make_plan(rows, four_commits)
    later = make_plan(rows, four_commits)
    other = make_plan(rows, four_commits, BisectRequest(good="f" * 40))

    assert first.bisect_id == later.bisect_id != other.bisect_id
    assert "-bisect-" in first.bisect_id


def test_one_regressed_night_is_enough_where_no_change_point_can_be_yet(
    make_row: Row, summary_of: Callable[..., Summary]
) -> None:
    history = [make_row(summary_of((1.0,) * 50), night_id(n), commit=GOOD) for n in range(3)]
    bad = make_row(summary_of((1.2,) * 50), night_id(3), commit=BAD, verdict=VerdictStatus.REGRESSED)

    plan = make_plan([*history, bad], four_commits)

    assert (plan.metric, plan.good, plan.bad) == ("step_time", GOOD, BAD)
    assert plan.levels.bad == pytest.approx(1.2)


def test_a_history_in_which_nothing_became_worse_has_nothing_to_search(rows: Sequence[HistoryRow]) -> None:
    with pytest.raises(InvalidInput, match="nothing became worse"):
        make_plan(rows[:SLOWER_FROM], four_commits)


def test_a_change_without_a_changed_commit_is_not_searched_for_one(
    make_row: Row, summary_of: Callable[..., Summary]
) -> None:
    history = [make_row(summary_of((1.0,) * 50), night_id(n)) for n in range(3)]
    bad = make_row(summary_of((1.2,) * 50), night_id(3), verdict=VerdictStatus.REGRESSED)

    with pytest.raises(InvalidInput, match="no commit changed"):
        make_plan([*history, bad], four_commits)


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


def test_every_run_of_every_point_has_a_key_of_its_own(plan: BisectPlan, make_record: Callable[..., RunRecord]) -> None:
    base = make_record()

    keys = {point_run(plan, base, place, number).run_key for place in plan.places for number in range(1, 100)}

    assert len(keys) == len(plan.places) * 99


def test_the_first_plan_of_an_id_holds(plan: BisectPlan, store: DirectoryStore) -> None:
    keep_plan(store, plan)
    changed = plan.model_copy(update={"since": "2026-12-24"})

    assert keep_plan(store, changed) == plan == load_plan(store, plan.bisect_id)


# --- what its runs say -----------------------------------------------------------------------------------------------


def verdict_on(run_key: str, status: VerdictStatus, prefix: str = "") -> Verdict:
    return Verdict(run_key=run_key, test_id="t", night="n", status=status, prefix=prefix)


def test_finished_points_are_found_again_in_the_store(
    plan: BisectPlan,
    store: DirectoryStore,
    make_record: Callable[..., RunRecord],
    commit: Any,
    summary_of: Callable[..., Summary],
) -> None:
    base = make_record(commit=BAD)
    run = point_run(plan, base, 3, 2)
    record = make_record(summary_of((1.03,) * 50), plan.bisect_id).model_copy(update={"spec": run})
    record = record.model_copy(update={"prefix": f"runs/{run.test_slug}/{run.night}/{run.run_key}/a1"})
    commit(store, record)
    verdict = verdict_on(run.run_key, VerdictStatus.REGRESSED, record.prefix)
    store.put(f"{record.prefix.rpartition('/')[0]}/verdict.json", verdict.model_dump_json().encode())

    (point,) = stored_points(store, plan, base)

    assert (point.place, point.number) == (3, 2)
    assert point.value == pytest.approx(1.03)


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
