"""Re-run before alarm: what a night's runs have in common counts, and what only one of them says alarms nobody.

Floors and ceilings, which hold by themselves.
"""

from collections.abc import Callable

import pytest

from nightbridge.gate.metric_comparison import beyond_limits, reruns_wanted
from nightbridge.gate.nodes import node_names
from nightbridge.gate.run_verdict import compare
from nightbridge.history.nightly_values import agreement_of
from nightbridge.history.rows import HistoryRow, row_of
from nightbridge.models import GatePolicy, Limits, Outcome, RunRecord, Summary, Verdict, VerdictStatus
from nightbridge.models.metrics import METRIC_BY_NAME

Records = Callable[..., RunRecord]
Rows = Callable[..., HistoryRow]
Summaries = Callable[..., Summary]

SLOW, USUAL = 1.1, 1.0


@pytest.mark.parametrize(
    ("worse", "runs", "wanted"),
    [(0, 1, 0), (1, 1, 2), (3, 3, 2), (1, 3, 2), (2, 3, 4), (3, 5, 4)],
    ids=["fine", "suspicious", "confirmed", "a single bad run", "they disagree", "they still do"],
)
def test_how_many_further_runs_a_night_wants(worse: int, runs: int, wanted: int) -> None:
    agreement = agreement_of([1] * worse + [0] * (runs - worse))

    assert reruns_wanted(agreement, GatePolicy(pairs=1)) == wanted
    assert reruns_wanted(agreement, GatePolicy(pairs=1, max_runs=1)) == min(wanted, 1)
    assert reruns_wanted(agreement, GatePolicy(pairs=0)) == 0


@pytest.fixture
def judge(make_record: Records, make_row: Rows, summary_of: Summaries) -> Callable[..., Verdict]:
    """The verdict on a night after nine good ones, its own run's step time first and then those of its further runs."""

    def judge(
        *step_times: float,
        nodes: str = "node[1-2]",
        commit: str = "e" * 40,
        pairs: int = 1,
        outcome: Outcome = Outcome.SUCCEEDED,
        other_commit: str = "",
    ) -> Verdict:
        good = [make_row(night=f"2026-11-{day:02}") for day in range(1, 10)]
        gate = GatePolicy(control="off", pairs=pairs)
        own, *further = (summary_of([step_time] * 50) for step_time in step_times)
        record = make_record(own, commit=commit, gate=gate)
        repeats = [
            row_of(
                make_record(summary, repeat=number, commit=other_commit or commit, gate=gate, outcome=outcome), None
            ).model_copy(update={"nodes": nodes})
            for number, summary in enumerate(further, start=1)
        ]
        return compare(record, [*good, *repeats])

    return judge


def test_a_suspicious_result_is_not_final(judge: Callable[..., Verdict]) -> None:
    verdict = judge(SLOW)

    assert (verdict.status, verdict.reruns) == (VerdictStatus.REGRESSED, 2)


def test_what_all_runs_of_the_night_say_is_a_regression(judge: Callable[..., Verdict]) -> None:
    verdict = judge(SLOW, SLOW, SLOW)

    assert (verdict.status, verdict.reruns) == (VerdictStatus.REGRESSED, 2)
    assert "in 3 of 3 runs" in verdict.reasons[0]
    assert verdict.certainty == "3 of 3 runs"


def test_a_single_bad_run_is_told_and_alarms_nobody(judge: Callable[..., Verdict]) -> None:
    verdict = judge(SLOW, USUAL, USUAL, nodes="node[3-4]")

    assert verdict.status is VerdictStatus.PASSED
    assert "out of its band in 1 of 3 runs of this night, the first at 1.100 s: no regression" in verdict.reasons[0]
    assert verdict.comparisons[0].value == USUAL
    assert verdict.certainty == ""


def test_runs_that_disagree_are_given_as_many_again_and_then_it_is_unstable(judge: Callable[..., Verdict]) -> None:
    undecided, unstable, settled = (
        judge(SLOW, SLOW, USUAL),
        judge(SLOW, SLOW, USUAL, SLOW, USUAL),
        judge(SLOW, SLOW, USUAL, USUAL, USUAL),
    )

    assert undecided.reruns == 4
    assert (unstable.status, unstable.reruns) == (VerdictStatus.UNSTABLE, 4)
    assert settled.status is VerdictStatus.PASSED


def test_without_a_policy_of_confirming_one_run_is_enough(judge: Callable[..., Verdict]) -> None:
    verdict = judge(SLOW, pairs=0)

    assert (verdict.status, verdict.reruns) == (VerdictStatus.REGRESSED, 0)


def test_further_runs_that_failed_or_ran_other_code_confirm_nothing_and_clear_nothing(
    judge: Callable[..., Verdict],
) -> None:
    failed = judge(SLOW, USUAL, USUAL, outcome=Outcome.INFRASTRUCTURE)
    bisect_points = judge(SLOW, USUAL, USUAL, other_commit="f" * 40)

    assert {failed.status, bisect_points.status} == {VerdictStatus.REGRESSED}


def test_the_nodes_are_suspect_where_nothing_that_is_pinned_has_changed(judge: Callable[..., Verdict]) -> None:
    same_code, new_code = judge(SLOW, commit="a" * 40), judge(SLOW)

    said = "no pinned version changed since 2026-11-09, the last good night: check the nodes, not the code"
    assert said in same_code.reasons
    assert said not in new_code.reasons
    # The history knows no other nodes: a run that may not have these would wait indefinitely.
    assert same_code.suspect_nodes == ()


def test_the_second_night_of_a_regression_does_not_blame_the_nodes(
    make_record: Records, make_row: Rows, summary_of: Summaries
) -> None:
    good = [make_row(night=f"2026-11-{day:02}") for day in range(1, 9)]
    bad = make_row(summary_of([SLOW] * 50), night="2026-11-09", commit="e" * 40, verdict=VerdictStatus.REGRESSED)

    verdict = compare(make_record(summary_of([SLOW] * 50), commit="e" * 40), [*good, bad])

    assert verdict.status is VerdictStatus.REGRESSED
    assert not any("check the nodes" in reason for reason in verdict.reasons)


def test_a_good_night_blames_no_nodes(judge: Callable[..., Verdict]) -> None:
    verdict = judge(SLOW, USUAL, USUAL, commit="a" * 40)

    assert verdict.status is VerdictStatus.PASSED
    assert not any("check the nodes" in reason for reason in verdict.reasons)


@pytest.mark.parametrize(
    ("limits", "broken"),
    [
        (Limits(), False),
        (Limits(max=1.0), False),
        (Limits(max=0.9), True),
        (Limits(min=1.0), False),
        (Limits(min=1.1), True),
        (Limits(min=0.5, max=2.0), False),
    ],
)
def test_a_floor_and_a_ceiling_hold(limits: Limits, broken: bool) -> None:
    assert bool(beyond_limits(METRIC_BY_NAME["step_time"], 1.0, limits)) is broken


def test_what_is_no_number_keeps_no_limit() -> None:
    assert beyond_limits(METRIC_BY_NAME["step_time"], float("nan"), Limits(max=1.0))


@pytest.mark.parametrize(
    ("expression", "names"),
    [
        ("", ()),
        ("login", ("login",)),
        ("node[1-3,5],login", ("node1", "node2", "node3", "node5", "login")),
        ("gpu[08-10]-ib", ("gpu08-ib", "gpu09-ib", "gpu10-ib")),
        ("odd[a-b]", ("odd[a-b]",)),
    ],
)
def test_a_node_expression_is_expanded(expression: str, names: tuple[str, ...]) -> None:
    assert node_names(expression) == names


def test_a_level_is_compared_with_the_best_before_it_where_another_statistic_shows_it(make_record: Records) -> None:
    rows: list[HistoryRow] = []
    for place in range(29):
        level = 10.0 if place < 10 else 9.4 if place < 20 else 9.86
        summary = make_record().summary.model_copy(
            update={
                "step_time": level * (1 + 0.004 * (-1) ** place),
                "step_time_p05": level * (1 + 0.001 * (place % 3)),
            }
        )
        record = make_record(summary, f"2026-11-{place + 1:02}", gate=GatePolicy(control="off", confirm=0))
        verdict = compare(record, rows)
        rows.append(row_of(record, verdict))

    found = verdict.metric("step_time")

    assert found is not None, verdict.reasons
    assert found.baseline == pytest.approx(9.4, abs=0.05)
    assert found.change == pytest.approx(0.05, abs=0.01)
    assert "since 2026-11-21" in verdict.reasons[0]
