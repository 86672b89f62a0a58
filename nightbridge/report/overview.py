"""All tests of the last nights: in a line each, and as the page `reports/index.html` with a square for each night.

It reads records and verdicts alone: no numpy, and for the lines no template either. `trend_table` has the trend of one.
"""

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from urllib.parse import quote

from pydantic import Field

from nightbridge.gate.decisions import Decision, StoredDecision, in_force, list_decisions
from nightbridge.models import Model, Verdict, VerdictStatus, night_order
from nightbridge.models.metrics import METRIC_BY_NAME
from nightbridge.nights.records import Night, NightEnd, NightVerdict, find_nights, newest_first, verdict_since
from nightbridge.numbers import format_count, format_value
from nightbridge.report.charts import NightPoint, PointKind, sparkline
from nightbridge.report.tables import STATUS_WORDS, cause_of, gravest_first, gravity, short_reason
from nightbridge.store.object_store import ObjectStore
from nightbridge.store.parallel import in_parallel

OVERVIEW_NIGHTS = 14
INDEX_NIGHTS = 90
INDEX = "reports/index.html"

SQUARE = 9
"""Pixels of a night in the strip of a test."""

_POINT_KINDS: Mapping[str, PointKind] = {"good": "good", "none": "good", "bad": "regressed", "warn": "other"}


class TestOverview(Model):
    """A test's last nights and its newest verdict."""

    __test__ = False  # not a pytest class

    test_id: str
    run_key: str
    night: str
    verdict: VerdictStatus
    reason: str = Field("", description="What is wrong, in a few words.")
    since: str = Field("", description="The first night of what stands.")
    cause: str = ""
    decision: str = Field("", description="What people decided about it that still holds.")
    step_time: float | None = Field(None, description="Seconds.")
    nights: dict[str, VerdictStatus] = Field(description="Verdict of each night, oldest first; the gravest of a sweep.")

    def __str__(self) -> str:
        signs = "".join(STATUS_WORDS[status].symbol for status in self.nights.values())
        label = STATUS_WORDS[self.verdict].label
        reason = self.reason.removeprefix(label).lstrip(", ")
        said = "; ".join(filter(None, (reason, self.cause, self.decision)))
        return f"{signs}  {label}{said and f': {said}'}  {format_value(self.step_time, 's')}  {self.run_key}"


def overview_of_tests(store: ObjectStore, since: str = "") -> tuple[TestOverview, ...]:
    """Every test of the last nights that ended, by id: since a night, else of the last `OVERVIEW_NIGHTS`.

    Raises:
        DamagedData: A record of a night or a verdict cannot be read.
    """
    nights = itertools.takewhile(
        lambda night: night_order(night.start.night, night.start.begun_at) >= since, newest_first(store)
    )
    wanted = list(nights if since else itertools.islice(nights, OVERVIEW_NIGHTS))
    ends = [night.end for night in wanted if night.end]
    by_test: dict[str, dict[str, list[NightVerdict]]] = {}
    for end in reversed(ends):
        for run in end.verdicts:
            by_test.setdefault(run.test_id, {}).setdefault(end.night, []).append(run)
    newest = [(run, night) for known in by_test.values() for night in [next(reversed(known))] for run in known[night]]
    judged = gravest_first(in_parallel(lambda run: verdict_since(store, *run), newest))
    gravest = {verdict.test_id: verdict for verdict in reversed(judged)}
    decided: dict[str, str] = {}
    for one in _open_decisions(store, ends[:1]):
        verdict = gravest.get(one.decision.test_id)
        if verdict and verdict.series in ("", one.decision.series):  # not of another configuration, point or cluster
            decided[verdict.test_id] = one.text
    return tuple(_overview(gravest[test], by_test[test], decided.get(test, "")) for test in sorted(by_test))


def _open_nights(newest_first: Iterable[Night]) -> list[str]:
    """The nights that have begun and not ended, be they under way or dead, with a test that no later night has."""
    later: set[str] = set()
    found = []
    for night in newest_first:
        tests = {run.test_id for run in night.start.tests}
        if night.ended is None and not tests <= later:
            found.append(f"{night.start.night} of {night.start.scenario}")
        later |= tests if night.end is None else {run.test_id for run in night.end.verdicts}
    return found


def _open_decisions(store: ObjectStore, newest: Sequence[NightEnd]) -> list[StoredDecision]:
    """The decisions by which a level is held to be good in the newest night, where there is one, the newest last."""
    known = [one for one in list_decisions(store) if not one.withdrawn]
    of_series: dict[tuple[str, str], list[Decision]] = {}
    for one in known:
        of_series.setdefault((one.decision.cluster, one.decision.series), []).append(one.decision)
    forced = {one for made in of_series.values() for metric in METRIC_BY_NAME for one in in_force(made, metric)}
    held = (one for one in known if one.decision.holds and one.decision in forced)
    night = max((night_order(end.night, end.ended_at) for end in newest), default="")
    return [one for one in held if (one.decision.until or night) >= night]


def _overview(verdict: Verdict, nights: Mapping[str, Sequence[NightVerdict]], decision: str) -> TestOverview:
    """A test by its runs of each night, oldest first, and the gravest verdict of the newest night."""
    of_night = {night: min((run.status for run in runs), key=gravity) for night, runs in nights.items()}
    in_short = {run.run_key: run.step_time for run in nights[verdict.night]}
    measured = verdict.metric("step_time")
    return TestOverview(
        test_id=verdict.test_id,
        run_key=verdict.run_key,
        night=verdict.night,
        verdict=verdict.status,
        reason=short_reason(verdict) if STATUS_WORDS[verdict.status].task else "",
        since=verdict.since,
        cause=cause_of(verdict),
        decision=decision,
        step_time=measured.value if measured else in_short[verdict.run_key],
        nights=of_night | {verdict.night: verdict.status},
    )


def index_html(store: ObjectStore, disk: Sequence[str] = ()) -> str:
    """The page of all tests by the last nights, those that need somebody first, with trends, decisions and GPU-hours.

    Args:
        store: Where the nights are.
        disk: Lines about the disks that are used.

    Raises:
        DamagedData: A record of a night or a decision cannot be read.
    """
    from nightbridge.report.night_page import render_page

    newest = find_nights(store, limit=INDEX_NIGHTS)
    ends = [night.end for night in reversed(newest) if night.end]
    nights = list(dict.fromkeys(end.night for end in ends))
    by_test: dict[str, dict[str, tuple[NightVerdict, str]]] = {}
    hours, confirmation, stored = defaultdict[str, float](float), 0.0, defaultdict[str, int](int)
    for end in ends:
        page = f"{quote(end.night)}/{quote(end.scenario)}.html"
        for verdict in end.verdicts:
            hours[verdict.test_id] += verdict.gpu_hours + verdict.confirmation_gpu_hours
            confirmation += verdict.confirmation_gpu_hours
            stored[verdict.test_id] += verdict.stored_bytes
            known = by_test.setdefault(verdict.test_id, {})
            before = known.get(end.night)
            if before is None or gravity(verdict.status) < gravity(before[0].status):
                known[end.night] = (verdict, f"{page}#{quote(verdict.run_key)}")
    last = {test: list(known.values())[-1][0] for test, known in by_test.items()}
    calls = {test for test, verdict in last.items() if STATUS_WORDS[verdict.status].task}
    tests = sorted(by_test, key=lambda test: (test not in calls, gravity(last[test].status), test))
    open_nights = _open_nights(newest[:OVERVIEW_NIGHTS])
    decided = _open_decisions(store, ends[-1:])
    count = format_count(len(tests), "test")
    headline, tone = "No test needs attention", "good"
    if calls:
        verb = "needs" if len(calls) == 1 else "need"
        headline, tone = f"{len(calls)} of {count} {verb} attention", "bad"
    elif open_nights:
        headline, tone = "No test needed attention; not every night has ended", "warn"
    return render_page(
        "index.html.j2",
        headline=headline,
        tone=tone,
        nights=nights,
        pages=[
            (end.night, end.scenario, f"{quote(end.night)}/{quote(end.scenario)}.html", _call(end.title))
            for end in ends
        ],
        strips=[_strip(test, by_test[test], nights) for test in tests],
        hours=hours,
        stored=stored,
        width=SQUARE * len(nights),
        square=SQUARE,
        facts=(
            f"{sum(hours.values()):,.1f} GPU-hours, {confirmation:,.1f} of them confirmation; "
            f"{sum(stored.values()) / 1e9:,.1f} GB went to the store",
            *(f"Night {night} has not ended" for night in open_nights),
            *disk,
        ),
        decisions=[f"{one.decision.test_id}: {one.text}" for one in decided],
    )


def _call(title: str) -> str:
    """What a night asks a person to look at, in words; empty where all of it is well."""
    quiet = {status for status, words in STATUS_WORDS.items() if not words.task}
    return "" if title in quiet else title.replace("_", " ")


def _strip(test_id: str, known: Mapping[str, tuple[NightVerdict, str]], nights: Sequence[str]) -> dict[str, object]:
    """A test's row. `path`: its good nights as an SVG path; `squares`: the others, `x` pixels from the left."""
    squares, good = [], []
    points: list[NightPoint] = []
    for x, night in enumerate(nights):
        if night not in known:
            continue
        verdict, link = known[night]
        words = STATUS_WORDS[verdict.status]
        points.append(NightPoint(night, verdict.step_time, None, None, _POINT_KINDS[words.tone]))
        if words.task:
            squares.append({"x": x * SQUARE, "night": night, "words": words, "link": link})
        else:
            good.append(x)
    counts = Counter(STATUS_WORDS[verdict.status].label for verdict, _link in known.values())
    newest, link = list(known.values())[-1]
    return {
        "test_id": test_id,
        "words": STATUS_WORDS[newest.status],
        "link": link,
        "path": "".join(
            f"M{SQUARE * first} 0h{SQUARE * count - 1}v12h{1 - SQUARE * count}z" for first, count in _runs(good)
        ),
        "squares": squares,
        "summary": ", ".join(f"{count} {label}" for label, count in counts.most_common()),
        "trend": sparkline(points) if sum(point.value is not None for point in points) > 1 else "",
        "step_time": format_value(newest.step_time, "s"),
    }


def _runs(numbers: Sequence[int]) -> list[tuple[int, int]]:
    """Ascending numbers as runs without a gap: first number and length."""
    groups = itertools.groupby(enumerate(numbers), key=lambda item: item[1] - item[0])
    runs = [[number for _at, number in group] for _difference, group in groups]
    return [(run[0], len(run)) for run in runs]
