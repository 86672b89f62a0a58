"""The trend of a test: its nights, its changes, and what was pinned on both sides of each."""

import io
import re
from collections.abc import Callable, Sequence
from datetime import date, timedelta

import numpy as np
import pytest
from rich.console import Console

from nightbridge.gate.run_verdict import compare
from nightbridge.gate.trend import Trend, trends
from nightbridge.history.nightly_values import nights_of
from nightbridge.history.rows import HistoryRow, row_of
from nightbridge.models import Arm, Outcome, Summary, VerdictStatus
from nightbridge.report.trend_table import history_cells, standing_lines, trend_lines, trend_table
from tests.builders import make_record, make_summary

GOOD, BAD = "a" * 40, "e" * 40
PLANTED = 40


def night(number: int) -> str:
    return str(date(2026, 9, 1) + timedelta(days=number))


def summary(step_time: float, p05: float | None = None) -> Summary:
    return Summary(
        step_time=step_time,
        step_time_p05=step_time if p05 is None else p05,
        tflops_per_gpu=700 / step_time,
        peak_memory=80.0,
        final_loss=7.0,
    )


@pytest.fixture
def slowed(make_row: Callable[..., HistoryRow]) -> list[HistoryRow]:
    """Sixty nights of 1 % noise; from the planted one on, 5 % slower with another commit."""
    noise = 1 + 0.01 * np.random.default_rng(1).standard_normal(60)
    row = make_row(night="2026-11-10")
    return [
        row.model_copy(
            update={
                "night": night(number),
                "run_key": f"llama3-8b-{night(number)}-0123456789",
                "summary": summary(float(value) * (1.05 if number >= PLANTED else 1.0)),
                "megatron_bridge": row.megatron_bridge.model_copy(
                    update={"commit": BAD if number >= PLANTED else GOOD}
                ),
                "verdict": VerdictStatus.PASSED,
            }
        )
        for number, value in enumerate(noise)
    ]


def of_metric(found: Sequence[Trend], name: str) -> Trend:
    return next(trend for trend in found if trend.metric == name)


def test_a_slow_down_is_named_with_its_night_its_size_and_the_commits_around_it(slowed: list[HistoryRow]) -> None:
    trend = of_metric(trends(slowed), "step_time")

    (change,) = trend.changes
    assert change.night == night(PLANTED)
    assert change.last_night_before < night(PLANTED) <= change.latest_night
    assert change.worse
    assert change.change == pytest.approx(0.05, abs=0.01)
    assert [(suspect.name, suspect.before, suspect.after) for suspect in change.suspects] == [
        ("Megatron-Bridge", GOOD, BAD)
    ]
    assert change.suspects[0].url == slowed[0].megatron_bridge.url


def test_less_throughput_is_worse_and_less_time_is_better(slowed: list[HistoryRow]) -> None:
    faster = [row.model_copy(update={"summary": summary(1 / (row.summary.step_time or 1))}) for row in slowed]

    assert of_metric(trends(slowed), "tflops_per_gpu").changes[0].worse
    assert not of_metric(trends(faster), "step_time").changes[0].worse
    assert not of_metric(trends(faster), "tflops_per_gpu").changes[0].worse


def test_a_metric_that_stays_has_no_change(slowed: list[HistoryRow]) -> None:
    assert of_metric(trends(slowed), "peak_memory").changes == ()
    assert of_metric(trends(slowed), "final_loss").changes == ()


def test_the_order_of_the_rows_does_not_matter(slowed: list[HistoryRow]) -> None:
    assert trends(slowed[::-1]) == trends(slowed)


def test_confirming_runs_count_for_their_night_and_bisect_points_do_not(slowed: list[HistoryRow]) -> None:
    own = slowed[10]
    again = [
        own.model_copy(update={"run_key": f"again-{n}", "repeat": n, "summary": summary(value)})
        for n, value in ((1, 2.0), (2, 3.0))
    ]
    other_pins = own.megatron_bridge.model_copy(update={"commit": "c" * 40})
    bisect = own.model_copy(update={"repeat": 3, "megatron_bridge": other_pins, "summary": summary(9.0)})

    found = of_metric(trends([*slowed, *again, bisect]), "step_time")

    assert found.values[10] == 2.0
    assert len(found.nights) == 60


def test_a_table_has_how_many_runs_a_night_had_and_what_the_last_good_point_took(slowed: list[HistoryRow]) -> None:
    own, good = slowed[40], slowed[30]
    arms = [
        own.model_copy(
            update={"repeat": at, "summary": summary(value), "arm": Arm(role=role, pair=1, reference=good.run_key)}
        )
        for at, role, value in ((1, "new", 1.3), (2, "control", 1.0))
    ]
    rows = [*slowed, *arms]

    names, *cells = history_cells(trends(rows), rows, own.night)

    assert [names[-2:], cells[0][-2:], cells[1][-2:]] == [["runs", "control_step_time"], [2, 1.0], [1, None]]


def test_a_night_with_bisect_points_only_is_no_night(slowed: list[HistoryRow]) -> None:
    only = slowed[0].model_copy(update={"night": "2027-01-01", "repeat": 1})

    assert [each.own.night for each in nights_of([*slowed, only])] == [row.night for row in slowed]


@pytest.mark.parametrize(
    "update",
    [
        {"outcome": Outcome.SHORT},
        {"outcome": None},
        {"verdict": VerdictStatus.FAILED},
        {"summary": Summary(step_time=None)},
        {"summary": Summary(step_time=0.0)},
    ],
)
def test_a_run_that_did_not_do_all_its_steps_has_no_value(slowed: list[HistoryRow], update: dict[str, object]) -> None:
    slowed[5] = slowed[5].model_copy(update=update)

    found = of_metric(trends(slowed), "step_time")

    assert found.values[5] is None
    assert found.nights[5] == night(5)


def test_where_the_median_jumps_the_fastest_steps_tell(slowed: list[HistoryRow]) -> None:
    jumps = np.random.default_rng(2).random(60) < 0.5
    rows = [
        row.model_copy(
            update={"summary": summary((row.summary.step_time or 0) * (1.3 if jump else 1), row.summary.step_time)}
        )
        for row, jump in zip(slowed, jumps, strict=True)
    ]

    (change,) = of_metric(trends(rows), "step_time").changes

    assert change.statistic == "step_time_p05"
    assert change.night == night(PLANTED)


def test_a_change_without_changed_pins_points_to_the_cluster(slowed: list[HistoryRow]) -> None:
    same = [row.model_copy(update={"megatron_bridge": slowed[0].megatron_bridge}) for row in slowed]

    lines = trend_lines(trends(same))

    assert "no pinned version changed: check the cluster" in lines[1]


def test_the_lines_say_what_changed_since_when_and_the_commits(slowed: list[HistoryRow]) -> None:
    lines = trend_lines(trends(slowed))

    assert re.match(r"step time worse by \+[45]\.\d % since ", lines[0])
    assert f"since {night(PLANTED)}" in lines[0]
    assert lines[1] == f"  Megatron-Bridge: {GOOD} → {BAD}"


def test_the_table_shows_the_last_nights_and_marks_where_a_level_begins(slowed: list[HistoryRow]) -> None:
    console = Console(file=io.StringIO(), width=120)

    console.print(trend_table(trends(slowed), slowed))

    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "throughput" in text
    assert night(59) in text
    assert night(10) not in text
    (marked,) = (line for line in text.splitlines() if "◆" in line)
    assert night(PLANTED) in marked


def test_no_history_is_no_trend() -> None:
    assert [(trend.nights, trend.changes) for trend in trends([])] == [((), ())] * 4


def test_a_level_that_is_too_young_for_a_change_point_is_told_by_its_verdicts() -> None:
    rows: list[HistoryRow] = []
    for day, step_time in enumerate((1.0, 1.002, 0.998, 1.001, *(1.08, 1.081, 1.079, 1.08, 1.082)), 1):
        record = make_record(make_summary([step_time] * 50), f"2026-11-{day:02}")
        rows.append(row_of(record, compare(record, rows)))

    found = trends(rows)

    (line,) = standing_lines(rows, found)
    assert line.startswith("regressed since 2026-11-05, 5 nights by their verdicts: step time +")
    assert standing_lines(rows[:4], found) == ()
