"""What of a verdict is news, night by night."""

from collections.abc import Sequence
from typing import Any

import pytest

from nightbridge.gate.control_arm import arm_of
from nightbridge.gate.run_verdict import compare
from nightbridge.gate.tonight import Evidence
from nightbridge.gate.trend import standing, suspect_nights
from nightbridge.history.nightly_values import NightRuns
from nightbridge.history.rows import HistoryRow, row_of
from nightbridge.models import Arm, Outcome, ReferenceResult, RunRecord, Verdict, VerdictStatus
from tests.builders import make_decision, make_record, make_summary, make_verdict

GOOD, SLOW, SLOWER, FAST = 1.0, 1.1, 1.25, 0.9
AWAY = 0.0
"""A night of which the cluster lost the job."""


def nights(*levels: float) -> list[Verdict]:
    """The verdicts of nights with these step times after eight good ones."""
    rows: list[HistoryRow] = []
    verdicts = []
    for day, level in enumerate([GOOD] * 8 + list(levels), start=1):
        outcome = Outcome.SUCCEEDED if level else Outcome.INFRASTRUCTURE
        seconds = level or GOOD
        summary = make_summary([seconds] * 50, tflops=700.0 / seconds)
        record = make_record(summary, f"2026-11-{day:02}", outcome=outcome)
        verdicts.append(compare(record, rows))
        rows.append(row_of(record, verdicts[-1]))
    return verdicts[8:]


@pytest.mark.parametrize(
    ("levels", "news"),
    [
        ((GOOD, GOOD), ["", ""]),
        ((SLOW,), ["new"]),
        ((SLOW, SLOW, SLOW), ["new", "standing", "standing"]),
        ((SLOW, SLOW, SLOWER, SLOWER), ["new", "standing", "worse", "standing"]),
        ((SLOW, GOOD, GOOD), ["new", "over", ""]),
        ((SLOW, GOOD, SLOW), ["new", "over", "new"]),
        ((FAST, FAST), ["better", ""]),
        ((AWAY,), ["new"]),
        ((SLOW, AWAY, SLOW, GOOD), ["new", "new", "standing", "over"]),
    ],
)
def test_only_what_changed_is_news(levels: tuple[float, ...], news: list[str]) -> None:
    assert [verdict.news for verdict in nights(*levels)] == news


OOM, CRASH = (
    (Outcome.OUT_OF_MEMORY, "CUDA out of memory after 12 of 50 steps"),
    (Outcome.PROGRAM_ERROR, "ImportError: x"),
)


@pytest.mark.parametrize(
    ("failures", "expected"),
    [
        ((OOM, CRASH), [("new", "2026-11-09"), ("new", "2026-11-10")]),
        ((OOM, CRASH, CRASH), [("new", "2026-11-09"), ("new", "2026-11-10"), ("standing", "2026-11-10")]),
        ((CRASH, (Outcome.PROGRAM_ERROR, "IndexError: y")), [("new", "2026-11-09"), ("new", "2026-11-10")]),
        (
            (OOM, (OOM[0], "CUDA out of memory after 9 of 50 steps")),
            [("new", "2026-11-09"), ("standing", "2026-11-09")],
        ),
        (
            (OOM, (Outcome.INFRASTRUCTURE, ""), OOM),
            [("new", "2026-11-09"), ("new", "2026-11-10"), ("standing", "2026-11-09")],
        ),
    ],
    ids=["another", "another that stands", "another error", "at another step", "a night without a result"],
)
def test_only_the_same_failure_stands(
    failures: tuple[tuple[Outcome, str], ...], expected: list[tuple[str, str]]
) -> None:
    rows: list[HistoryRow] = []
    verdicts = []
    for day, (outcome, reason) in enumerate([(Outcome.SUCCEEDED, "")] * 8 + list(failures), start=1):
        record = make_record(night=f"2026-11-{day:02}", outcome=outcome, outcome_reason=reason)
        verdicts.append(compare(record, rows))
        rows.append(row_of(record, verdicts[-1]))

    assert [(verdict.news, verdict.since) for verdict in verdicts[8:]] == expected


@pytest.mark.parametrize(("metrics", "expected"), [((), "new"), (("peak_memory",), "worse")])
def test_what_is_worse_than_a_level_that_was_accepted_is_new(metrics: tuple[str, ...], expected: str) -> None:
    about = {"since": "2026-11-09", "night": "2026-11-09", "metrics": metrics}
    accepted = make_decision("llama3-8b").model_copy(update=about)
    rows: list[HistoryRow] = []
    for day, level in enumerate([GOOD] * 8 + [SLOWER, SLOWER + 0.2], start=1):
        record = make_record(make_summary([level] * 50, tflops=700.0 / level), f"2026-11-{day:02}")
        verdict = compare(record, rows, Evidence(decisions=(accepted,) if day > 9 else ()))
        rows.append(row_of(record, verdict))

    assert (verdict.status, verdict.news) == (VerdictStatus.REGRESSED, expected)
    assert verdict.since == ("2026-11-10" if expected == "new" else "2026-11-09")
    before, after = suspect_nights(verdict, rows, (accepted,)) or (rows[0], rows[0])
    assert (before.night, after.night) == (
        ("2026-11-09", "2026-11-10") if expected == "new" else ("2026-11-08", "2026-11-09")
    )


def test_what_a_broken_run_measured_is_no_news() -> None:
    rows: list[HistoryRow] = []
    for day, (steps, memory) in enumerate([(50, 80.0)] * 8 + [(20, 80.0), (45, 96.0)], start=1):
        record = make_record(make_summary([GOOD] * steps, memory=memory), f"2026-11-{day:02}")
        verdict = compare(record, rows)
        rows.append(row_of(record, verdict))

    assert (verdict.status, verdict.news, verdict.since) == (VerdictStatus.SHORT, "standing", "2026-11-09")


def test_another_fact_that_becomes_worse_has_its_own_news_and_suspects() -> None:
    rows: list[HistoryRow] = []
    found = []
    for day, (level, memory) in enumerate([(GOOD, 80.0)] * 8 + [(SLOW, 80.0), (SLOW, 96.0), (GOOD, 96.0)], start=1):
        summary = make_summary([level] * 50, tflops=700.0 / level, memory=memory)
        record = make_record(summary, f"2026-11-{day:02}")
        verdict = compare(record, rows)
        rows.append(row_of(record, verdict))
        before, after = suspect_nights(verdict, rows) or (rows[0], rows[0])
        found.append((verdict.news, verdict.since, before.night, after.night))

    assert found[8:] == [
        ("new", "2026-11-09", "2026-11-08", "2026-11-09"),
        ("worse", "2026-11-09", "2026-11-09", "2026-11-10"),
        ("standing", "2026-11-10", "2026-11-09", "2026-11-10"),
    ]


AWAY_FROM_GOLDEN = ReferenceResult(whole=True, as_good=False, reasons=("golden values, final loss: 23 %",))
SLOW_FOR_GOLDEN = ReferenceResult(
    whole=True, as_good=False, reasons=("golden values, performance: 5 %",), only_slower=True
)


@pytest.mark.parametrize(
    ("levels", "expected"),
    [
        (
            ((SLOW, None), (SLOW, AWAY_FROM_GOLDEN), (SLOW, AWAY_FROM_GOLDEN), (GOOD, AWAY_FROM_GOLDEN)),
            [
                ("new", "2026-11-09", "2026-11-08", "2026-11-09"),
                ("worse", "2026-11-09", "2026-11-09", "2026-11-10"),
                ("standing", "2026-11-09", "2026-11-08", "2026-11-09"),
                ("standing", "2026-11-10", "2026-11-09", "2026-11-10"),
            ],
        ),
        (
            ((GOOD, AWAY_FROM_GOLDEN), (SLOW, None)),
            [("new", "2026-11-09", "2026-11-08", "2026-11-09"), ("new", "2026-11-10", "2026-11-09", "2026-11-10")],
        ),
        (
            ((SLOW, None), (SLOW, SLOW_FOR_GOLDEN), (SLOW, None), (SLOW, AWAY_FROM_GOLDEN)),
            [
                ("new", "2026-11-09", "2026-11-08", "2026-11-09"),
                ("standing", "2026-11-09", "2026-11-08", "2026-11-09"),
                ("standing", "2026-11-09", "2026-11-08", "2026-11-09"),
                ("worse", "2026-11-09", "2026-11-11", "2026-11-12"),
            ],
        ),
    ],
    ids=["after another fact", "before it", "after it was slow for golden values as well"],
)
def test_what_is_worse_than_golden_values_is_a_fact_of_its_own(
    levels: Sequence[tuple[float, ReferenceResult | None]], expected: list[tuple[str, str, str, str]]
) -> None:
    rows: list[HistoryRow] = []
    found = []
    for day, (level, golden) in enumerate([(GOOD, None)] * 8 + list(levels), start=1):
        record = make_record(make_summary([level] * 50, tflops=700.0 / level), f"2026-11-{day:02}")
        verdict = compare(record, rows, Evidence(golden=golden))
        rows.append(row_of(record, verdict))
        before, after = suspect_nights(verdict, rows) or (rows[0], rows[0])
        found.append((verdict.news, verdict.since, before.night, after.night))

    assert found[8:] == expected


def test_golden_values_of_a_row_that_did_not_name_them_stand() -> None:
    rows = [row_of(record := make_record(night="2026-11-08"), compare(record, ()))]
    for day in (9, 10):
        record = make_record(night=f"2026-11-{day:02}")
        verdict = compare(record, rows, Evidence(golden=AWAY_FROM_GOLDEN))
        rows.append(row_of(record, verdict).model_copy(update={"worse": {}, "broken": ()}))

    assert (verdict.news, verdict.since) == ("standing", "2026-11-09")


def test_the_runs_that_a_test_has_each_night_have_their_own_news() -> None:
    rows: list[HistoryRow] = []
    found = []
    for day, second in enumerate([GOOD] * 8 + [SLOW, SLOW, GOOD], start=1):
        tonight = []
        for iteration, level in ((1, GOOD), (2, second)):
            record = make_record(make_summary([level] * 50, tflops=700.0 / level), f"2026-11-{day:02}")
            record = record.model_copy(update={"spec": record.spec.model_copy(update={"iteration": iteration})})
            verdict = compare(record, rows)
            tonight.append(row_of(record, verdict))
            found.append((verdict.news, verdict.since))
        rows += tonight

    of_the_first, of_the_second = found[16::2], found[17::2]
    assert of_the_first == [("", "")] * 3
    assert of_the_second == [("new", "2026-11-09"), ("standing", "2026-11-09"), ("over", "")]


def test_a_slow_second_run_of_each_night_is_given_pairs_in_its_first_one() -> None:
    rows: list[HistoryRow] = []
    further = []
    for day, second in enumerate([GOOD] * 8 + [SLOWER] * 4, start=1):
        tonight: list[HistoryRow] = []
        for iteration, level in ((1, GOOD), (2, second)):
            arms: list[HistoryRow] = []
            verdict = compare(record := repeated(day, iteration, level), rows)
            while verdict.reruns > len(arms):
                arm = arm_of(len(arms) + 1, verdict.control.run_key if verdict.control else "")
                seconds = GOOD if arm.role == "control" else level
                arms.append(row_of(repeated(day, iteration, seconds, repeat=len(arms) + 1, arm=arm), None))
                verdict = compare(record, [*rows, *arms])
            tonight += [row_of(record, verdict), *arms]
        further.append(verdict.further_runs)
        rows += tonight

    assert further[8] > 0
    assert further[9:] == [0, 0, 0]


def repeated(day: int, iteration: int, level: float, repeat: int = 0, arm: Arm | None = None) -> RunRecord:
    record = make_record(make_summary([level] * 50, tflops=700.0 / level), f"2026-11-{day:02}", repeat=repeat)
    spec = record.spec.model_copy(update={"iteration": iteration, "arm": arm})
    return record.model_copy(update={"spec": spec})


def test_two_known_speeds_are_no_news_where_golden_values_find_the_slow_one_too_slow() -> None:
    rows = [row_of(make_record(night=f"2026-10-{day:02}"), unstable()) for day in range(1, 17)]
    own = row_of(make_record(night="2026-10-17"), None)
    tonight = unstable(night="2026-10-17", as_golden=False)

    assert standing(tonight, [NightRuns(row, (row,)) for row in (*rows, own)]).news == "standing"


def unstable(**fields: Any) -> Verdict:
    return make_verdict(VerdictStatus.UNSTABLE, **fields)


def test_what_stands_says_since_when() -> None:
    verdicts = nights(SLOW, SLOW, AWAY, SLOWER, GOOD)

    assert [verdict.since for verdict in verdicts] == ["2026-11-09", "2026-11-09", "2026-11-11", "2026-11-09", ""]
