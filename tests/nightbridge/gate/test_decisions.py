"""Decisions: what people accepted stops alarming, is shown, and hides nothing that comes after it."""

import json
import random
import re
from collections.abc import Callable, Sequence
from datetime import UTC, date, datetime, timedelta
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from nightbridge.bisect.shift import requested_shift
from nightbridge.cli.main import run
from nightbridge.errors import DamagedData, InvalidInput
from nightbridge.gate.accept import accept, checked_kind, checked_metrics, withdraw
from nightbridge.gate.decisions import (
    Decision,
    Withdrawal,
    as_of,
    decision_on,
    in_force,
    is_accepted,
    is_left_out,
    level_start,
    list_decisions,
    passed_by_ended,
    read_decisions,
    record_decision,
)
from nightbridge.gate.run_verdict import compare
from nightbridge.gate.stored_verdicts import judge_again, judge_and_record
from nightbridge.gate.tonight import Evidence
from nightbridge.gate.trend import suspect_nights, trends
from nightbridge.history.history_store import put_row
from nightbridge.history.reading import read_history
from nightbridge.history.rows import HistoryRow, row_of
from nightbridge.models import GOOD_VERDICTS, GatePolicy, Limits, RunRecord, Summary, Verdict, VerdictStatus
from nightbridge.nights.records import read_verdict
from nightbridge.report.queries import compare_stored
from nightbridge.report.trend_table import trend_lines
from nightbridge.store.directory import DirectoryStore
from tests import builders

SERIES = "llama3-8b-0123456789ab"


def decision(kind: str, since: str, night: str, *, day: int = 1, metrics: tuple[str, ...] = ()) -> Decision:
    fields: dict[str, Any] = {"kind": kind, "since": since, "night": night, "metrics": metrics}
    return Decision(
        cluster="dgx",
        series=SERIES,
        test_id="llama3-8b",
        who="ann",
        why="new image",
        when=datetime(2026, 12, day, tzinfo=UTC),
        **fields,
    )


# --- kept ------------------------------------------------------------------------------------------------------------


def test_a_decision_is_kept_with_who_when_and_why(store: DirectoryStore) -> None:
    made = decision("baseline", "2026-11-04", "2026-11-06")

    key = record_decision(store, made)
    record_decision(store, made)

    assert key.startswith(f"decisions/dgx/{SERIES}/20261201T000000")
    assert read_decisions(store, "dgx", SERIES) == (made,)
    assert made.text == ("the level since 2026-11-04 accepted as the new baseline by ann on 2026-12-01: new image")


def test_a_night_that_an_older_release_stored_by_its_word_is_none_after_the_decision(store: DirectoryStore) -> None:
    record_decision(store, decision("acknowledged", "2026-11-04", "checked-06"))

    found = read_decisions(store, "dgx", SERIES)

    assert [is_accepted(found, "step_time", night) for night in ("2026-11-06", "2026-12-02")] == [True, False]


def test_a_decision_about_some_metrics_names_them_as_tables_do() -> None:
    made = decision("fixed", "n1", "n2", metrics=("tflops_per_gpu", "step_time"))

    assert made.text.startswith("throughput, step time since n1 ")


def test_a_decision_without_a_reason_is_none(store: DirectoryStore) -> None:
    with pytest.raises(InvalidInput, match="an author and a reason"):
        record_decision(store, decision("baseline", "n1", "n2").model_copy(update={"why": " "}))


def test_a_damaged_decision_is_told_and_not_left_out(store: DirectoryStore) -> None:
    store.put(f"decisions/dgx/{SERIES}/x.json", b"{}")

    with pytest.raises(DamagedData, match="not a decision"):
        read_decisions(store, "dgx", SERIES)


# --- what they do ----------------------------------------------------------------------------------------------------


def test_a_baseline_begins_the_history_anew_for_its_metrics_alone() -> None:
    made = [decision("baseline", "n10", "n12", metrics=("step_time",))]

    assert level_start(made, "step_time") == "n10"
    assert level_start(made, "peak_memory") == ""
    assert is_left_out(made, "step_time", "n09")
    assert not is_left_out(made, "step_time", "n11")


def test_nights_of_a_fault_that_was_fixed_count_for_nothing() -> None:
    made = [decision("fixed", "n10", "n12")]

    assert [night for night in ("n09", "n10", "n12", "n13") if is_left_out(made, "step_time", night)] == ["n10", "n12"]


def test_a_later_decision_overrules_an_earlier_one_about_the_same_nights() -> None:
    known = decision("acknowledged", "n10", "n12", day=1)
    fixed = decision("fixed", "n10", "n15", day=2)

    assert in_force([known, fixed], "step_time") == (fixed,)
    assert in_force([known], "step_time") == (known,)


# --- the gate and the trend ------------------------------------------------------------------------------------------


def night(number: int) -> str:
    return str(date(2026, 9, 1) + timedelta(days=number))


def summary_at(step_time: float) -> Summary:
    return Summary(
        steps_expected=50,
        steps_done=50,
        step_time=step_time,
        step_time_p05=step_time,
        tflops_per_gpu=700.0,
        peak_memory=80.0,
        final_loss=5.0,
    )


def judged(
    levels: Sequence[float], before: Sequence[HistoryRow], decisions: tuple[Decision, ...] = ()
) -> tuple[list[Verdict], list[HistoryRow]]:
    """Nights of these levels after those before, each judged with what is decided; the rows are those of all."""
    rows, verdicts = list(before), []
    for number, level in enumerate(levels, start=len(before)):
        summary = summary_at(level * (1 + 0.001 * (number % 3 - 1)))
        record = builders.make_record(summary, night(number), gate=GatePolicy(confirm=0))
        verdicts.append(compare(record, rows, Evidence(decisions=decisions)))
        rows.append(row_of(record, verdicts[-1]))
    return verdicts, rows


@cache
def good_nights(number: int) -> tuple[HistoryRow, ...]:
    """What nearly all tests here begin with, judged once."""
    return tuple(judged([1.0] * number, ())[1])


@pytest.fixture
def slowed() -> Callable[..., tuple[list[Verdict], list[HistoryRow]]]:
    """Twenty good nights, and then slower ones; these are judged with what is decided."""

    def judge(
        *levels: float, decisions: tuple[Decision, ...] = (), good: int = 20
    ) -> tuple[list[Verdict], list[HistoryRow]]:
        return judged(levels, good_nights(good), decisions)

    return judge


def found(verdicts: list[Verdict]) -> list[VerdictStatus]:
    return [verdict.status for verdict in verdicts]


@pytest.mark.parametrize("kind", ["acknowledged", "baseline"])
def test_an_accepted_level_alarms_no_more_and_the_verdict_says_so(slowed: Callable[..., Any], kind: str) -> None:
    made = decision(kind, night(20), night(24))

    verdicts, _rows = slowed(*[1.1] * 12, decisions=(made,))

    assert VerdictStatus.REGRESSED not in found(verdicts)
    assert made.text in verdicts[-1].reasons


@pytest.mark.parametrize(
    ("metrics", "reason"),
    [
        ((), "the accepted level begins with this night: no earlier run of it to compare with"),
        (("step_time",), "the accepted level of step time begins with this night: no earlier run of it"),
    ],
)
def test_a_night_with_which_an_accepted_level_begins_is_not_said_to_have_no_earlier_good_run(
    slowed: Callable[..., Any], metrics: tuple[str, ...], reason: str
) -> None:
    made = decision("baseline", night(20), night(20), metrics=metrics)

    verdicts, _rows = slowed(1.1, decisions=(made,))

    assert reason in verdicts[-1].reasons
    assert "no earlier good run" not in " ".join(verdicts[-1].reasons)


@pytest.mark.parametrize(
    ("memory", "worse"), [(60.0, ()), (60.2, ()), (60.6, ("peak_memory",)), (62.7, ("peak_memory",))]
)
@pytest.mark.parametrize("later", [1, 3])
def test_while_an_accepted_level_is_young_every_metric_has_the_noise_of_the_nights_before_it(
    make_record: Callable[..., RunRecord], memory: float, worse: tuple[str, ...], later: int
) -> None:
    made = decision("baseline", night(12), night(12))
    rows: list[HistoryRow] = []
    for number in range(12 + 1 + later):
        noise = 0.001 * (number % 3 - 1)
        size = (memory if number == 12 + later else 60.0) * (1 + noise / 10)
        summary = summary_at((1.1 if number >= 12 else 1.0) * (1 + noise)).model_copy(update={"peak_memory": size})
        record = make_record(summary, night(number), gate=GatePolicy(confirm=0))
        verdict = compare(record, rows, Evidence(decisions=(made,) if number > 12 else ()))
        rows.append(row_of(record, verdict))

    assert rows[12].verdict is VerdictStatus.REGRESSED
    assert tuple(rows[-1].worse) == worse


def test_getting_worse_still_alarms(slowed: Callable[..., Any]) -> None:
    made = decision("acknowledged", night(20), night(24))

    verdicts, _rows = slowed(*[1.1] * 12, 1.25, 1.25, decisions=(made,))

    assert found(verdicts)[-2:] == [VerdictStatus.REGRESSED] * 2


def test_a_fault_that_was_fixed_alarms_again_when_it_was_not(slowed: Callable[..., Any]) -> None:
    made = decision("fixed", night(20), night(24))

    repaired, _rows = slowed(*[1.1] * 5, *[1.0] * 5, decisions=(made,))
    still_there, _rows = slowed(*[1.1] * 10, decisions=(made,))

    assert VerdictStatus.REGRESSED not in found(repaired)[5:]
    assert found(still_there)[5:] == [VerdictStatus.REGRESSED] * 5


def test_the_trend_shows_the_change_with_the_decision(slowed: Callable[..., Any]) -> None:
    _verdicts, rows = slowed(*[1.1] * 12)
    made = decision("baseline", night(20), night(24))

    found_trends = trends(rows, decisions=(made,))

    (change,) = (change for trend in found_trends if trend.metric == "step_time" for change in trend.changes)
    assert change.decision == made
    assert f"  {made.text}" in trend_lines(found_trends)


@pytest.mark.parametrize("count", [4, 5, 6, 7])
def test_a_level_that_was_accepted_in_its_first_night_is_decided_about_while_it_is_young(
    slowed: Callable[..., Any], count: int
) -> None:
    made = decision("baseline", night(20), night(20))
    _verdicts, rows = slowed(*[1.1] * count, decisions=(made,))

    changes = [change for trend in trends(rows, decisions=(made,)) for change in trend.changes]

    assert all((change.night, change.decision) == (night(20), made) for change in changes)


# --- accept ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cluster", ["dgx", "dgx/h100 Süd"])
def test_accepting_a_series_decides_about_the_level_that_it_stands_at(
    store: DirectoryStore, slowed: Callable[..., Any], cluster: str
) -> None:
    _verdicts, rows = slowed(*[1.1] * 6)
    for row in rows:
        put_row(store, row.model_copy(update={"cluster": cluster}))

    made = accept(store, SERIES, "baseline", who="ann", why="new image", cluster=cluster)

    assert (made.since, made.night, made.run_key) == (night(20), night(25), "")
    assert read_decisions(store, cluster, SERIES) == (made,)


@pytest.mark.parametrize("kind", ["baseline", "acknowledged", "fixed"])
def test_a_level_begins_with_its_own_change_and_not_with_one_that_was_repaired_long_ago(
    slowed: Callable[..., Any], store: DirectoryStore, kind: str
) -> None:
    _verdicts, rows = slowed(*[1.1] * 15, *[1.0] * 15, 1.3)
    for row in rows:
        put_row(store, row)

    made = accept(store, SERIES, checked_kind(kind), who="ann", why="new image", cluster="dgx")

    assert (made.since, made.night) == (night(50), night(50))


@pytest.mark.parametrize("kind", ["baseline", "acknowledged", "fixed"])
def test_what_is_worse_than_a_level_that_was_accepted_the_night_before_begins_after_it(
    slowed: Callable[..., Any], store: DirectoryStore, kind: str
) -> None:
    made = decision("baseline", night(20), night(20))
    _verdicts, before = slowed(1.1)
    _verdicts, after = slowed(1.1, 1.3, decisions=(made,))
    for row in (*before, after[-1]):
        put_row(store, row)
    record_decision(store, made)

    later = accept(store, SERIES, checked_kind(kind), who="ann", why="another change", cluster="dgx")

    assert [row.verdict for row in (before[-1], after[-1])] == [VerdictStatus.REGRESSED] * 2
    assert (later.since, later.night) == (night(21), night(21))


def test_a_level_that_was_repaired_and_comes_back_begins_when_it_came_back(
    slowed: Callable[..., Any], store: DirectoryStore
) -> None:
    levels = (*[1.1] * 10, *[1.0] * 4, 1.1)
    _verdicts, rows = slowed(*levels)
    for row in rows:
        put_row(store, row)

    made = accept(store, SERIES, "baseline", who="ann", why="needed after all", cluster="dgx")

    assert made.since == night(34)
    verdicts, _rows = slowed(*levels, 1.1, 1.1, decisions=(made,))
    assert VerdictStatus.REGRESSED not in found(verdicts)[-2:]


def test_a_ceiling_that_an_accepted_level_breaks_stands_since_that_level_and_is_blamed_on_no_later_night(
    make_record: Callable[..., RunRecord],
) -> None:
    made = decision("acknowledged", night(20), night(22))
    rows: list[HistoryRow] = []
    for number in range(24):
        summary = summary_at((1.1 if number >= 20 else 1.0) * (1 + 0.001 * (number % 3 - 1)))
        record = make_record(summary, night(number), gate=GatePolicy(confirm=0, limits={"step_time": Limits(max=1.05)}))
        known = (made,) if number > 22 else ()
        verdict = compare(record, rows, Evidence(decisions=known))
        rows.append(row_of(record, verdict))

    assert (verdict.status, verdict.news, verdict.since) == (VerdictStatus.REGRESSED, "standing", night(20))
    suspects = suspect_nights(verdict, rows, (made,))
    assert suspects is not None
    assert [row.night for row in suspects] == [night(19), night(20)]
    searched = requested_shift(rows, lambda _: None, None, (made,))
    assert (searched.good.night, searched.bad.night) == (night(19), night(20))


@pytest.mark.parametrize("kind", ["acknowledged", "baseline"])
@pytest.mark.parametrize("later", [0, 1])
@pytest.mark.parametrize("metric", ["step_time", None])
def test_what_was_accepted_can_still_be_searched(
    slowed: Callable[..., Any], kind: str, later: int, metric: str | None
) -> None:
    made = decision(kind, night(20), night(20))
    _verdicts, before = slowed(1.1)
    _verdicts, after = slowed(*[1.1] * (1 + later), decisions=(made,))

    searched = requested_shift([*before, *after[len(before) :]], lambda _: None, metric, (made,))

    assert (searched.good.night, searched.bad.night) == (night(19), night(20))


@pytest.mark.parametrize("good", [1, 2, 3, 4])
def test_a_fault_that_was_not_acknowledged_is_marked_as_fixed_by_its_last_run(
    slowed: Callable[..., Any], store: DirectoryStore, good: int
) -> None:
    _verdicts, rows = slowed(*[1.1] * 8, *[1.0] * good)
    for row in rows:
        put_row(store, row)

    with pytest.raises(InvalidInput, match="Name the last run that was worse"):
        accept(store, SERIES, "fixed", who="ann", why="reverted", cluster="dgx")


def test_one_fast_night_ends_no_regression_that_is_within_the_band() -> None:
    """Of sixty bad nights two pass; nine did when one good night was taken for a repair."""
    passed, good = 0, builders.make_verdict(VerdictStatus.PASSED)
    for seed in range(100, 112):
        noise = random.Random(seed)
        rows: list[HistoryRow] = []
        for number, level in enumerate([1.0] * 25 + [1.02] * 10 + [1.0] + [1.02] * 5):
            summary = summary_at(level * (1 + 0.004 * noise.gauss(0, 1)))
            record = builders.make_record(summary, night(number), gate=GatePolicy(confirm=0))
            verdict = compare(record, rows, Evidence()) if number >= 25 else good
            rows.append(row_of(record, verdict))
            passed += number > 35 and verdict.status in GOOD_VERDICTS

    assert passed <= 4


@pytest.mark.parametrize("kind", ["baseline", "fixed"])
@pytest.mark.parametrize("judged_as", [VerdictStatus.REGRESSED, VerdictStatus.PASSED, None])
def test_further_runs_do_not_say_which_nights_have_the_level_that_is_decided_about(
    slowed: Callable[..., Any], store: DirectoryStore, kind: Any, judged_as: VerdictStatus | None
) -> None:
    _verdicts, rows = slowed(1.1, 1.1)
    update = {"repeat": 1, "verdict": judged_as}
    further = [row.model_copy(update={"run_key": f"{row.run_key[:-1]}r", **update}) for row in rows[-4:]]
    for row in (*rows, *further):
        put_row(store, row)

    made = accept(store, SERIES, kind, who="ann", why="new image", cluster="dgx")

    assert (made.since, made.night) == (night(20), night(21))


def test_accepting_what_was_too_good_begins_with_its_first_night(
    slowed: Callable[..., Any], store: DirectoryStore
) -> None:
    _verdicts, rows = slowed(1.1, 1.1, 1.1, *[0.5] * 4)
    for row in rows:
        put_row(store, row)

    made = accept(store, rows[-1].series, "baseline", who="ada", why="half the batch", cluster="dgx")

    assert made.since == night(23)
    verdicts, _rows = slowed(1.1, 1.1, 1.1, *[0.5] * 5, decisions=(made,))
    assert found(verdicts)[-2:] == [VerdictStatus.PASSED] * 2


def test_accepting_a_run_of_a_night_without_a_date_decides_about_that_night_and_no_later_one(
    store: DirectoryStore,
    slowed: Callable[..., Any],
    make_record: Callable[..., RunRecord],
    commit: Callable[..., RunRecord],
) -> None:
    _verdicts, rows = slowed(1.1, 1.1)
    at_noon = datetime(2026, 9, 21, 12, tzinfo=UTC)  # between the last two nights
    record = commit(store, make_record(night="upgrade-21").model_copy(update={"harvested_at": at_noon}))
    for row in (*rows, row_of(record, None)):
        put_row(store, row)

    made = accept(store, record.spec.run_key, "baseline", who="ann", why="known")

    assert made.night == "2026-09-21-120000"


def test_accepting_a_run_takes_cluster_series_and_night_from_it(
    store: DirectoryStore,
    slowed: Callable[..., Any],
    make_record: Callable[..., RunRecord],
    commit: Callable[..., RunRecord],
) -> None:
    _verdicts, rows = slowed(1.1, 1.1)
    for row in rows:
        put_row(store, row)
    record = commit(store, make_record(night=night(21)))

    made = accept(store, record.spec.run_key, "acknowledged", who="ann", why="known", metrics=("step_time",))

    assert (made.since, made.night, made.run_key) == (night(20), night(21), record.spec.run_key)
    assert (made.cluster, made.series, made.metrics) == ("dgx", SERIES, ("step_time",))


KNOWN = decision("acknowledged", night(20), night(22))


@pytest.mark.parametrize(
    ("levels", "decisions", "expected"),
    [
        ((1.1,) * 7, (KNOWN,), (night(20), night(26))),
        ((1.1,) * 3, (KNOWN,), (night(20), night(22))),
        ((*(1.1,) * 7, 1.0), (KNOWN,), (night(20), night(26))),
        ((*(1.1,) * 7, *(1.0,) * 12), (KNOWN,), (night(20), night(26))),
        ((1.1, 1.1), (), (night(20), night(21))),
        ((1.1,) * 7, (), (night(20), night(26))),
        ((*(1.1,) * 15, *(1.0,) * 15, 1.3), (KNOWN,), (night(50), night(50))),
    ],
    ids=[
        "known",
        "known for three nights",
        "known, on the first night after it",
        "known, long after it",
        "on its second night",
        "on its seventh night",
        "another one than is known",
    ],
)
def test_what_is_fixed_reaches_from_its_first_night_to_its_last(
    slowed: Callable[..., Any],
    store: DirectoryStore,
    levels: tuple[float, ...],
    decisions: tuple[Decision, ...],
    expected: tuple[str, str],
) -> None:
    _verdicts, rows = slowed(*levels, decisions=decisions)
    for row in rows:
        put_row(store, row)
    for one in decisions:
        record_decision(store, one)

    made = accept(store, SERIES, "fixed", who="ann", why="reverted", cluster="dgx")

    assert (made.since, made.night) == expected
    later = made.model_copy(update={"when": KNOWN.when + timedelta(days=1)})
    assert expected[0] > KNOWN.since or in_force([*decisions, later], "step_time") == (later,)


def test_what_is_fixed_on_one_machine_type_ends_there_when_it_is_said_on_another(
    slowed: Callable[..., Any], store: DirectoryStore
) -> None:
    _verdicts, rows = slowed(*(1.1,) * 7, *(1.0,) * 5, *(0.6,) * 3, decisions=(KNOWN,))
    for at, row in enumerate(rows):
        gpu = {"topology": {**row.topology, "GPU": "H100" if at < 32 else "H200"}}
        put_row(
            store, row.model_copy(update=gpu | ({"verdict": VerdictStatus.PASSED, "worse": {}} if at >= 27 else {}))
        )
    record_decision(store, KNOWN)

    made = accept(store, SERIES, "fixed", who="ann", why="reverted", cluster="dgx")

    assert (made.since, made.night) == (KNOWN.since, night(26))


@pytest.mark.parametrize("decisions", [(), (KNOWN, decision("fixed", night(20), night(26), day=2))])
def test_a_night_without_a_fault_cannot_be_marked_as_fixed(
    slowed: Callable[..., Any], store: DirectoryStore, decisions: tuple[Decision, ...]
) -> None:
    _verdicts, rows = slowed(*(1.1,) * 7 * bool(decisions), *(1.0,) * 5, decisions=decisions)
    for row in rows:
        put_row(store, row)
    for one in decisions:
        record_decision(store, one)

    with pytest.raises(InvalidInput, match="nothing is worse at this run"):
        accept(store, SERIES, "fixed", who="ann", why="reverted", cluster="dgx")


def test_what_does_not_exist_is_refused() -> None:
    with pytest.raises(InvalidInput, match="no such kind of decision"):
        checked_kind("ignored")
    with pytest.raises(InvalidInput, match="no such metric"):
        checked_metrics(["speed"])


def test_the_command_line_decides_and_says_what(
    store: DirectoryStore, slowed: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    _verdicts, rows = slowed(1.1, 1.1)
    for row in rows:
        put_row(store, row)
    options = ["--store", store.url, "--cluster", "dgx", "--who", "ann"]

    done = run(["accept", SERIES, "--as", "baseline", "--why", "new image", *options])
    refused = run(["accept", SERIES, "--as", "ignored", "--why", "new image", *options])

    (made,) = read_decisions(store, "dgx", SERIES)
    said = capsys.readouterr()
    assert (done, refused) == (0, 2)
    assert made.text in said.out
    assert "no such kind of decision" in said.err


# --- withdrawn, and over ---------------------------------------------------------------------------------------------


class Nights:
    """Nights of a store, each judged by what the store has, as the nightly does it."""

    def __init__(self, store: DirectoryStore, commit: Callable[..., RunRecord]) -> None:
        self._store, self._commit = store, commit
        self.keys: list[str] = []

    def run(self, *levels: float) -> list[VerdictStatus]:
        return [self._judge(level).status for level in levels]

    def _judge(self, level: float) -> Verdict:
        number = len(self.keys)
        found = self.judge(level * (1 + 0.001 * (number % 3 - 1)), night(number))
        self.keys.append(found.run_key)
        return found

    def judge(self, level: float, name: str, harvested_at: datetime | None = None) -> Verdict:
        """A night by its name, which need not be a date."""
        record = builders.make_record(summary_at(level), name, gate=GatePolicy(confirm=0))
        if harvested_at:
            record = record.model_copy(update={"harvested_at": harvested_at})
        return judge_and_record(self._store, self._commit(self._store, record), {}, lambda *_range: ())

    def stored(self) -> list[VerdictStatus | None]:
        return [row.verdict for row in read_history(self._store, "dgx", SERIES)]


@pytest.fixture
def nights(store: DirectoryStore, commit: Callable[..., RunRecord]) -> Nights:
    return Nights(store, commit)


def undo(store: DirectoryStore, target: str) -> str:
    withdrawal = Withdrawal(who="bob", why="by mistake", when=datetime(2026, 12, 2, tzinfo=UTC))
    return str(withdraw(store, target, withdrawal, {}, lambda *_range: ())[1])


def test_a_withdrawn_decision_leaves_no_night_that_it_let_pass(store: DirectoryStore, nights: Nights) -> None:
    assert nights.run(*[1.0] * 4, 1.08)[-1] is VerdictStatus.REGRESSED
    accept(store, nights.keys[-1], "baseline", who="ann", why="new image")
    assert GOOD_VERDICTS.issuperset(nights.run(*[1.08] * 7))  # more than there are good ones

    said = undo(store, nights.keys[4])

    assert said == "8 nights judged again, 7 with another verdict"
    assert nights.stored()[4:] == [VerdictStatus.REGRESSED] * 8
    assert nights.run(1.08) == [VerdictStatus.REGRESSED]
    assert nights.run(1.0)[0] in GOOD_VERDICTS


def test_of_two_withdrawn_decisions_the_later_hides_no_night_of_the_earlier(
    store: DirectoryStore, nights: Nights
) -> None:
    nights.run(*[1.0] * 6, 1.08)
    accept(store, nights.keys[-1], "baseline", who="ann", why="new image")
    nights.run(1.08, 1.08, 1.2)
    accept(store, nights.keys[-1], "baseline", who="ann", why="another one")

    undo(store, nights.keys[6])

    assert nights.stored()[6:9] == [VerdictStatus.REGRESSED] * 3


def test_an_earlier_night_is_judged_by_what_was_before_it_whatever_level_was_accepted_later(
    store: DirectoryStore, nights: Nights
) -> None:
    nights.run(*[1.0] * 6, 1.5, 1.0, 1.08)
    made = accept(store, nights.keys[-1], "baseline", who="ann", why="new image")

    assert nights.stored()[6:8] == [VerdictStatus.REGRESSED, VerdictStatus.INSUFFICIENT_DATA]
    assert [compare_stored(store, key).status for key in nights.keys[6:8]] == nights.stored()[6:8]
    assert (as_of(night(7), [made]), as_of(night(8), [made])) == ((), (made,))


def test_withdrawing_again_finishes_and_changes_nothing(store: DirectoryStore, nights: Nights) -> None:
    nights.run(*[1.0] * 4, 1.08)
    accept(store, nights.keys[-1], "baseline", who="ann", why="new image")
    nights.run(1.08)

    undo(store, nights.keys[4])
    (stored,) = list_decisions(store)

    assert undo(store, stored.id) == "2 nights judged again, each as before"
    assert stored.withdrawn is not None
    assert stored.text.endswith(
        "ann on " + f"{stored.decision.when:%Y-%m-%d}: new image; withdrawn by bob on 2026-12-02: by mistake"
    )
    assert read_decisions(store, "dgx", SERIES) == ()


def test_a_night_whose_run_was_pruned_is_no_baseline_after_the_withdrawal(
    store: DirectoryStore, nights: Nights
) -> None:
    nights.run(*[1.0] * 4, 1.08)
    accept(store, nights.keys[-1], "baseline", who="ann", why="new image")
    nights.run(1.08)
    for stored in list(store.list(f"runs/{nights.keys[-1].split('-2026')[0]}/{night(5)}/")):
        store.delete(stored.key)

    said = undo(store, nights.keys[4])

    assert said == "1 night judged again, each as before, 1 night without a stored run no baseline any more"
    assert nights.stored()[5] is None


def test_a_verdict_that_cannot_be_read_keeps_no_decision_from_being_withdrawn(
    store: DirectoryStore, nights: Nights
) -> None:
    nights.run(*[1.0] * 4, 1.08)
    accept(store, nights.keys[-1], "baseline", who="ann", why="new image")
    key = f"runs/{nights.keys[-1].split('-2026')[0]}/{night(4)}/{nights.keys[-1]}/verdict.json"
    store.put(key, b'{"run_key": ')

    assert undo(store, nights.keys[4]) == "1 night judged again, each as before"


@pytest.mark.parametrize(
    ("held_to", "runs", "status"),
    [
        ("golden", 1, VerdictStatus.REGRESSED),
        ("reference", 1, VerdictStatus.PASSED),
        ("reference", 0, VerdictStatus.FAILED),
    ],
)
def test_a_night_is_judged_again_by_what_golden_values_and_reference_said_that_night(
    store: DirectoryStore,
    commit: Callable[..., RunRecord],
    tmp_path: Path,
    held_to: str,
    runs: int,
    status: VerdictStatus,
) -> None:
    """They need not be there any more, nor say the same."""
    golden = tmp_path / "golden.json"
    losses = {str(step): 9.0 - 0.1 * step for step in range(1, 51)}
    golden.write_text(json.dumps({"lm loss": {"start_step": 1, "end_step": 50, "step_interval": 1, "values": losses}}))
    other = builders.make_record(summary_at(1.0), night(0), test_id="other")
    for record in [other] * runs:
        commit(store, record)
    named = {"golden": str(golden), "reference": other.spec.run_key}[held_to]
    rules = {"required_metrics": ("lm loss",), "required_memory": (), "grad_norm": "if measured"}
    gate = GatePolicy.model_validate({held_to: named, "golden_rules": rules})
    record = commit(store, builders.make_record(summary_at(1.0), night(1), gate=gate))
    said = judge_and_record(store, record, {}, lambda *_range: ())
    golden.unlink()
    for stored in list(store.list(f"runs/{other.spec.test_slug}/")):
        store.delete(stored.key)

    again = judge_again(store, "dgx", SERIES, night(0), {}, lambda *_range: ())

    assert (said.status, again.nights, again.changed) == (status, (night(1),), ())
    assert read_verdict(store, record.spec.run_key, night(1)) == said


def test_a_decision_that_is_meant_must_be_the_only_one(store: DirectoryStore, nights: Nights) -> None:
    nights.run(*[1.0] * 4, 1.08)
    for kind in ("acknowledged", "baseline"):
        accept(store, nights.keys[-1], checked_kind(kind), who="ann", why="new image")
    ids = [stored.id for stored in list_decisions(store)]

    with pytest.raises(InvalidInput, match="2 decisions about it") as several:
        undo(store, nights.keys[-1])
    with pytest.raises(InvalidInput, match="no decisions about it"):
        undo(store, nights.keys[0])

    assert all(one in str(several.value) for one in ids)


def test_a_level_on_a_slower_machine_type_begins_with_its_own_change_and_not_with_the_machine(
    store: DirectoryStore, slowed: Callable[..., Any]
) -> None:
    _verdicts, rows = slowed(*[1.5] * 10, *[1.6] * 3)
    others = [
        row.model_copy(update={"topology": {**row.topology, "GPU": "H200" if at < 20 else "H100"}})
        for at, row in enumerate(rows)
    ]
    for row in others[:30]:
        put_row(store, row.model_copy(update={"verdict": VerdictStatus.PASSED, "worse": {}}))
    for row in others[30:]:
        put_row(store, row)

    made = accept(store, SERIES, "baseline", who="ann", why="new image", cluster="dgx")

    assert (made.since, made.night) == (night(30), night(32))


def test_a_level_that_is_accepted_by_a_night_without_a_date_makes_no_later_night_a_good_one(
    store: DirectoryStore, nights: Nights
) -> None:
    nights.run(*[1.0] * 8, 1.1, 1.1)
    by_hand = nights.judge(1.1, "checked-10", datetime(2026, 9, 10, 12, tzinfo=UTC))

    made = accept(store, by_hand.run_key, "acknowledged", who="ann", why="known")

    assert by_hand.status is VerdictStatus.REGRESSED
    assert (made.since, made.night) == (night(8), "2026-09-10-120000")
    assert nights.run(1.1, 1.1)[-1] in GOOD_VERDICTS
    assert nights.run(*[1.14] * 9) == [VerdictStatus.REGRESSED] * 9


def test_a_night_without_a_date_is_judged_again_by_what_was_before_it(store: DirectoryStore, nights: Nights) -> None:
    nights.run(*[1.0] * 8)
    by_hand = nights.judge(1.0, "checked-08", datetime(2026, 9, 8, 12, tzinfo=UTC))
    nights.run(1.1)
    accept(store, nights.keys[-1], "baseline", who="ann", why="new image")
    nights.run(*[1.1] * 8)

    assert compare_stored(store, by_hand.run_key).status is by_hand.status is VerdictStatus.PASSED


def test_a_night_without_a_date_keeps_its_suspects_when_it_is_judged_again(
    store: DirectoryStore, nights: Nights
) -> None:
    nights.run(*[1.0] * 8)
    by_hand = nights.judge(1.1, "checked-08", datetime(2026, 9, 8, 12, tzinfo=UTC))
    before = suspect_nights(by_hand, read_history(store, "dgx", SERIES))
    nights.run(*[1.0] * 3)

    again = suspect_nights(by_hand, read_history(store, "dgx", SERIES))

    assert before is not None
    assert again == before


def test_a_level_that_begins_with_a_night_without_a_date_is_accepted_for_those_after_it(
    store: DirectoryStore, nights: Nights
) -> None:
    nights.run(*[1.0] * 8)
    nights.judge(1.1, "upgrade-08", datetime(2026, 9, 8, 12, tzinfo=UTC))
    nights.run(1.1, 1.1)

    made = accept(store, nights.keys[-1], "baseline", who="ann", why="new image")

    assert (made.since, made.night) == ("2026-09-08-120000", night(9))
    assert set(nights.run(1.1, 1.1)) <= GOOD_VERDICTS


def test_a_decision_ends_with_its_last_night(store: DirectoryStore, nights: Nights) -> None:
    nights.run(*[1.0] * 4, 1.08)
    made = accept(store, nights.keys[-1], "acknowledged", who="ann", why="until the fix", until=night(8))

    held = nights.run(*[1.08] * 4)
    over = nights.run(*[1.08] * 2, 1.0)

    assert GOOD_VERDICTS.issuperset(held)
    assert over[:2] == [VerdictStatus.REGRESSED] * 2
    assert over[2] in GOOD_VERDICTS
    (ended,) = as_of(night(9), [made])
    assert f"acknowledged until {night(8)}, which is over, by ann" in ended.text
    assert passed_by_ended([ended], "step_time", night(8))
    assert not passed_by_ended([ended], "step_time", night(9))


def test_a_decision_cannot_end_before_its_level_begins(store: DirectoryStore, nights: Nights) -> None:
    nights.run(*[1.0] * 4, 1.08)

    with pytest.raises(InvalidInput, match="not a night that this decision can end with"):
        accept(store, nights.keys[-1], "baseline", who="ann", why="new", until=night(1))

    assert list_decisions(store) == ()


@pytest.mark.parametrize("until", ["30.12.2026", "30-12-2026", "20261230", "2026-12-32", "2026-12-3", "friday"])
def test_a_decision_ends_with_a_date(store: DirectoryStore, nights: Nights, until: str) -> None:
    nights.run(*[1.0] * 4, 1.08)

    with pytest.raises(InvalidInput, match=f"{re.escape(until)}: no night with a date"):
        accept(store, nights.keys[-1], "acknowledged", who="ann", why="known", until=until)

    assert list_decisions(store) == ()


def test_a_decision_may_end_with_one_of_several_nights_of_a_day(store: DirectoryStore, nights: Nights) -> None:
    nights.run(*[1.0] * 4, 1.08)

    assert accept(store, nights.keys[-1], "baseline", who="ann", why="new", until=f"{night(8)}-1300").until


def test_the_command_line_lists_and_withdraws(
    store: DirectoryStore, nights: Nights, capsys: pytest.CaptureFixture[str]
) -> None:
    nights.run(*[1.0] * 4, 1.08)
    key = nights.keys[-1]
    options = ["--store", store.url]

    assert run(["accept", key, "--why", "known", "--who", "ann", "--until", night(9), *options]) == 0
    nights.run(1.08)
    codes = [
        run(["accept", "--list", *options]),
        run(["accept", "--undo", key, "--why", "by mistake", "--who", "bob", *options]),
        run(["accept", "--list", *options]),
        run(["accept", *options]),
    ]

    said = capsys.readouterr()
    assert codes == [0, 0, 0, 2]
    assert f"the level since {night(4)} alerts again (2 nights judged again, 1 with another verdict)" in said.out
    assert said.out.count("withdrawn by bob") == 1
    assert "Name a run to accept, --undo ID, or --list" in said.err


@pytest.mark.parametrize(
    ("last_before", "first", "is_about"),
    [
        ("2026-11-17", "2026-11-18", False),
        ("2026-11-18", "2026-11-19", True),
        ("2026-11-20", "2026-11-21", True),
        ("2026-11-21", "2026-11-22", False),
    ],
    ids=["before the fault", "its begin", "its end", "after it"],
)
def test_a_fault_that_was_repaired_explains_its_own_begin_and_end(last_before: str, first: str, is_about: bool) -> None:
    fixed = builders.make_decision("llama3-8b").model_copy(update={"kind": "fixed"})

    assert decision_on([fixed], "step_time", last_before, first) == (fixed if is_about else None)
