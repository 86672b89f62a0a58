"""What of a verdict is news, night by night."""

import pytest

from nightbridge.gate.verdict import compare
from nightbridge.history.rows import HistoryRow, row_of
from nightbridge.models import Outcome, Verdict
from tests.builders import make_record, make_summary

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


def test_what_stands_says_since_when() -> None:
    verdicts = nights(SLOW, SLOW, AWAY, SLOWER, GOOD)

    assert [verdict.since for verdict in verdicts] == ["2026-11-09", "2026-11-09", "2026-11-11", "2026-11-09", ""]
