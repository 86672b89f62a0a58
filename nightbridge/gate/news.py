"""What of a verdict is news: a fault that stands since a week is none, its end is."""

from collections.abc import Sequence
from typing import NamedTuple

from nightbridge.history.nightly_values import Night
from nightbridge.models import EXIT_CODES, News, Verdict, VerdictStatus

WITHOUT_RESULT = frozenset({VerdictStatus.CANCELLED, VerdictStatus.INFRASTRUCTURE, VerdictStatus.INVALID, None})
"""Nights with these verdicts say nothing about the test: what stood before them stands after them."""

MODES_TAKE_TURNS = 15
"""A test that was unstable in so many nights is so still: a fast night in between says nothing else."""


class Standing(NamedTuple):
    """What is news about tonight, and the first night of what stands; empty where nothing does."""

    news: News
    since: str


def standing(verdict: Verdict, past: Sequence[Night]) -> Standing:
    """Whether it is new, worse, better or over, or stands. `past`: the nights before, oldest first, judged."""
    judged = [night.own for night in past if night.own.verdict not in WITHOUT_RESULT]
    before = judged[-1].verdict if judged else None
    if not EXIT_CODES[verdict.status]:
        if before and EXIT_CODES[before]:
            return Standing("over", "")
        better = verdict.status is VerdictStatus.IMPROVED and before is not VerdictStatus.IMPROVED
        return Standing("better" if better else "", "")
    if verdict.status is VerdictStatus.UNSTABLE:
        unstable = [row.night for row in judged[-MODES_TAKE_TURNS:] if row.verdict is verdict.status]
        return Standing("standing", unstable[0]) if unstable else Standing("new", verdict.night)
    if verdict.status in WITHOUT_RESULT or verdict.status is not before:
        return Standing("new", verdict.night)
    streak = next((index for index, row in enumerate(reversed(judged)) if row.verdict is not before), len(judged))
    known = judged[-1].worse
    worse = any(
        item.metric not in known or abs(item.change or 0.0) > abs(known[item.metric]) + item.threshold
        for item in verdict.comparisons
        if item.status == "regressed"
    )
    return Standing("worse" if worse else "standing", judged[-streak].night)
