"""A person's questions about stored runs, by run key."""

import json
import random
import re
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest

from nightbridge.cli import main as cli
from nightbridge.errors import DamagedData, InvalidInput, PermanentError
from nightbridge.gate.run_verdict import compare
from nightbridge.goldens.goldens import read_golden
from nightbridge.goldens.parity import ParityGate, run_parity
from nightbridge.history.history_store import put_row
from nightbridge.history.reading import find_series
from nightbridge.history.rows import HistoryRow, row_of
from nightbridge.models import RunRecord, Summary, Verdict, VerdictStatus
from nightbridge.report.charts import differences_chart
from nightbridge.report.queries import compare_stored, history_of, parity_html, parity_page_stored, parity_stored
from nightbridge.store.directory import DirectoryStore
from tests.builders import scalar_table as table


def slower(summary: Summary) -> Summary:
    return summary.model_copy(update={"step_time": 1.1})


def put_verdict(store: DirectoryStore, record: RunRecord, status: VerdictStatus) -> None:
    spec = record.spec
    verdict = Verdict(run_key=spec.run_key, test_id=spec.test.id, night=spec.night, status=status)
    store.put(f"runs/{spec.test_slug}/{spec.night}/{spec.run_key}/verdict.json", verdict.model_dump_json().encode())


class TestCompare:
    def test_against_the_good_runs_before_it(
        self,
        store: DirectoryStore,
        make_record: Callable[..., RunRecord],
        commit: Callable[..., RunRecord],
        summary_of: Callable[..., Summary],
    ) -> None:
        for day in (7, 8, 9):
            good = make_record(night=f"2026-11-{day:02}")
            put_row(store, row_of(good, compare(good, ())))
        record = commit(store, make_record(slower(summary_of())))

        verdict = compare_stored(store, record.spec.run_key)

        assert verdict.status is VerdictStatus.REGRESSED
        assert len(verdict.baseline_runs) == 3

    def test_against_one_other_run_whenever_that_was(
        self,
        store: DirectoryStore,
        make_record: Callable[..., RunRecord],
        commit: Callable[..., RunRecord],
        summary_of: Callable[..., Summary],
    ) -> None:
        record = commit(store, make_record(slower(summary_of())))
        later = commit(store, make_record(night="2026-11-12"))

        verdict = compare_stored(store, record.spec.run_key, later.spec.run_key)

        assert verdict.status is VerdictStatus.REGRESSED
        assert verdict.baseline_runs == (later.spec.run_key,)
        assert f"against 1.000 s, {later.spec.run_key} (limit" in verdict.reasons[0]

    def test_a_baseline_that_measured_nothing_is_none(
        self, store: DirectoryStore, make_record: Callable[..., RunRecord], commit: Callable[..., RunRecord]
    ) -> None:
        record = commit(store, make_record())
        empty = commit(store, make_record(Summary(), night="2026-11-09"))

        assert compare_stored(store, record.spec.run_key, empty.spec.run_key).status is VerdictStatus.NO_BASELINE

    def test_a_run_that_is_not_in_the_store_is_named(self, store: DirectoryStore) -> None:
        with pytest.raises(PermanentError, match="llama3-8b-2026-11-10-0123456789"):
            compare_stored(store, "llama3-8b-2026-11-10-0123456789")


class TestGolden:
    def test_a_good_run_is_recorded_in_the_format_that_is_read(
        self,
        store: DirectoryStore,
        make_record: Callable[..., RunRecord],
        commit: Callable[..., RunRecord],
        tmp_path: Path,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        losses = {step: 10.0 - 0.1 * step for step in range(1, 51)}
        record = commit(store, make_record(), losses)
        put_verdict(store, record, VerdictStatus.PASSED)
        command = ["golden", record.spec.run_key, "--store", store.url]

        assert cli.run([*command, "--out", str(tmp_path / "golden.json")]) == 0
        assert cli.run(command) == 0

        text = (tmp_path / "golden.json").read_text()
        said = capsys.readouterr()
        assert said.out == text
        assert said.err == f"written: {tmp_path / 'golden.json'}\n"
        assert json.loads(text)["0"]["lm loss"] == losses[1]  # the key is the iteration minus one
        values = read_golden(text)
        assert values.metrics["lm loss"] == losses
        assert values.memory["max_alloc"] == record.summary.peak_memory

    @pytest.mark.parametrize("status", [VerdictStatus.FAILED, VerdictStatus.REGRESSED, VerdictStatus.SHORT, None])
    def test_the_values_of_a_run_that_was_not_good_are_not_recorded(
        self,
        store: DirectoryStore,
        make_record: Callable[..., RunRecord],
        commit: Callable[..., RunRecord],
        tmp_path: Path,
        capsys: pytest.CaptureFixture[str],
        status: VerdictStatus | None,
    ) -> None:
        record = commit(store, make_record())
        if status:
            put_verdict(store, record, status)

        code = cli.run(["golden", record.spec.run_key, "--store", store.url, "--out", str(tmp_path / "golden.json")])

        assert code == 2
        assert f"this run is {status or 'not judged'}" in capsys.readouterr().err
        assert not (tmp_path / "golden.json").exists()


class TestParity:
    def test_equal_runs_are_alike_and_a_biased_one_is_not(
        self, store: DirectoryStore, make_record: Callable[..., RunRecord], commit: Callable[..., RunRecord]
    ) -> None:
        losses = {step: 10.0 - 0.1 * step for step in range(1, 51)}
        a = commit(store, make_record(night="2026-11-08"), losses)
        b = commit(store, make_record(night="2026-11-09"), losses)
        c = commit(store, make_record(), {step: loss * 1.01 for step, loss in losses.items()})

        same, other = (parity_stored(store, a.spec.run_key, run.spec.run_key) for run in (b, c))

        assert same.same_numerics
        assert not other.same_numerics
        assert other.faults_of("convergence")
        assert (other.a, other.b) == (a.spec.run_key, c.spec.run_key)

    def test_a_loss_is_held_to_what_the_good_nights_before_keep_where_enough_of_them_tell_it(
        self, store: DirectoryStore, make_record: Callable[..., RunRecord], commit: Callable[..., RunRecord]
    ) -> None:
        def run(day: int, factor: float = 1.0) -> str:
            """A run whose loss is some per cent off, as a whole and at each step."""
            dice = random.Random(day)
            level = factor * (1 + dice.gauss(0, 0.01))
            losses = {step: (10.0 - 0.1 * step) * level * (1 + dice.gauss(0, 0.02)) for step in range(1, 51)}
            record = commit(store, make_record(night=f"2026-11-{day:02}"), losses)
            put_row(store, row_of(record, compare(record, ())))
            return record.spec.run_key

        first, second, *_, last = (run(day) for day in range(1, 9))
        biased = run(9, 1.2)

        early, alike, other, backwards = (
            parity_stored(store, *runs) for runs in ((first, second), (first, last), (last, biased), (last, first))
        )

        assert (early.own_bands, bool(early.faults_of("convergence"))) == (False, True)
        assert (alike.own_bands, alike.faults_of("convergence")) == (True, ())
        assert (backwards.own_bands, backwards.faults_of("convergence")) == (True, ())
        assert (other.own_bands, bool(other.faults_of("convergence"))) == (True, True)

    def test_the_page_names_both_runs(
        self, store: DirectoryStore, make_record: Callable[..., RunRecord], commit: Callable[..., RunRecord]
    ) -> None:
        a, b = commit(store, make_record(night="2026-11-08")), commit(store, make_record(night="2026-11-09"))

        page = parity_page_stored(store, parity_stored(store, a.spec.run_key, b.spec.run_key), "numerics")

        assert f"<code>{b.spec.run_key}</code> against <code>{a.spec.run_key}</code>" in page
        assert "compute the same, bit for bit" in page

    @pytest.mark.parametrize(
        ("gate", "code", "said"),
        [
            ("numerics", 1, "lm loss: first differs at step 30"),
            ("convergence", 0, "converge alike"),
            ("iterations", 1, "at iteration 30, +3.00 % (limit 1.5 %)"),
        ],
    )
    def test_the_exit_code_is_that_of_the_gate_that_was_asked_for(
        self,
        store: DirectoryStore,
        make_record: Callable[..., RunRecord],
        commit: Callable[..., RunRecord],
        tmp_path: Path,
        capsys: pytest.CaptureFixture[str],
        gate: str,
        code: int,
        said: str,
    ) -> None:
        losses = {step: 10.0 - 0.1 * step for step in range(1, 51)}
        a = commit(store, make_record(night="2026-11-08"), losses)
        b = commit(store, make_record(night="2026-11-09"), losses | {30: losses[30] * 1.03})
        runs, page = [a.spec.run_key, b.spec.run_key], tmp_path / "pages" / "parity.html"

        assert cli.run(["parity", *runs, "--gate", gate, "--page", str(page), "--store", store.url]) == code

        assert said in capsys.readouterr().out
        assert "<svg" in page.read_text()

    @pytest.mark.parametrize("option", ["--steps", "--first", "--later"])
    @pytest.mark.parametrize("gate", [(), ("--gate", "numerics")])
    def test_a_limit_of_single_iterations_is_refused_where_another_gate_decides(
        self,
        store: DirectoryStore,
        make_record: Callable[..., RunRecord],
        commit: Callable[..., RunRecord],
        capsys: pytest.CaptureFixture[str],
        option: str,
        gate: tuple[str, ...],
    ) -> None:
        losses = {step: 10.0 - 0.1 * step for step in range(1, 51)}
        a = commit(store, make_record(night="2026-11-08"), losses)
        b = commit(store, make_record(night="2026-11-09"), {step: losses[step] for step in range(1, 41)})
        command = ["parity", a.spec.run_key, b.spec.run_key, option, "40", "--store", store.url]

        assert cli.run([*command, *gate]) == 2
        error = " ".join(capsys.readouterr().err.split())
        assert f"{option}: has no effect with --gate" in error
        assert "Add --gate iterations" in error
        assert cli.run([*command, "--gate", "iterations"]) == (0 if option == "--steps" else 1)

    def test_a_difference_without_end_is_null_in_json(
        self,
        store: DirectoryStore,
        make_record: Callable[..., RunRecord],
        commit: Callable[..., RunRecord],
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        losses = {step: 10.0 - 0.1 * step for step in range(1, 51)}
        a = commit(store, make_record(night="2026-11-08"), losses | {30: 0.0})
        b = commit(store, make_record(night="2026-11-09"), losses)

        code = cli.run(["parity", a.spec.run_key, b.spec.run_key, "--json", "--store", store.url])

        document = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
        assert (code, document["passed"], document["curves"][0]["largest"]) == (1, False, None)

    @pytest.mark.parametrize("gate", ["numerics", "convergence", "iterations"])
    def test_what_fails_the_gate_is_among_the_faults_in_json(
        self,
        store: DirectoryStore,
        make_record: Callable[..., RunRecord],
        commit: Callable[..., RunRecord],
        capsys: pytest.CaptureFixture[str],
        gate: str,
    ) -> None:
        losses = {step: 10.0 - 0.1 * step for step in range(1, 51)}
        a = commit(store, make_record(night="2026-11-08"), losses)
        b = commit(store, make_record(night="2026-11-09"), losses | {30: losses[30] * 1.5})
        command = ["parity", a.spec.run_key, b.spec.run_key, "--gate", gate, "--store", store.url]

        codes = [cli.run([*command, *form]) for form in ([], ["--json"])]

        lines, brace, document = capsys.readouterr().out.partition("{")
        assert codes == [1, 1]
        assert json.loads(brace + document)["faults"] == lines.splitlines()[:-1]

    @pytest.mark.parametrize("damage", [None, b"", b"PAR1"])
    def test_missing_or_damaged_scalars_are_never_alike(
        self,
        store: DirectoryStore,
        make_record: Callable[..., RunRecord],
        commit: Callable[..., RunRecord],
        damage: bytes | None,
    ) -> None:
        record = commit(store, make_record())
        key = f"{record.prefix}/metrics.parquet"
        store.delete(key)
        if damage is not None:
            store.put(key, damage)

        with pytest.raises(DamagedData, match=r"metrics\.parquet"):
            parity_stored(store, record.spec.run_key, record.spec.run_key)


class TestHistory:
    def test_the_series_with_the_latest_night_is_shown_and_the_others_are_named(
        self, store: DirectoryStore, make_row: Callable[..., HistoryRow]
    ) -> None:
        old = make_row(night="2026-11-01").model_copy(update={"series": "llama3-8b-ffffffffffff"})
        rows = [make_row(night="2026-11-08"), make_row(night="2026-11-09")]
        for row in (old, *rows):
            put_row(store, row)

        found = history_of(store, "llama3-8b")

        assert found.rows == tuple(rows)
        assert (found.cluster, found.series) == ("dgx", rows[0].series)
        assert [(other.series, other.rows, other.last_night) for other in found.others] == [
            ("llama3-8b-ffffffffffff", 1, "2026-11-01")
        ]
        assert found.trends[0].values == (1.0, 1.0)

    def test_of_a_sweep_it_says_which_point_it_shows_and_another_is_shown_by_one_of_its_runs(
        self, store: DirectoryStore, make_row: Callable[..., HistoryRow]
    ) -> None:
        rows = [
            make_row(sweep_point={"cmd_args.tp": tp}).model_copy(update={"series": f"llama3-8b-{tp:012x}"})
            for tp in range(1, 9)
        ]
        for row in rows:
            put_row(store, row)

        latest, third = history_of(store, "llama3-8b"), history_of(store, "llama3-8b", run_key=rows[2].run_key)

        (line,) = latest.which_lines
        assert line.startswith("shown: llama3-8b-000000000008, tp = 8; also there: llama3-8b-000000000007 until 2026")
        assert ", 2 more. `nightbridge history RUN_KEY` shows" in line
        assert (third.rows, len(third.others)) == ((rows[2],), 7)
        assert third.which_lines[0].startswith("shown: llama3-8b-000000000003, tp = 3; also there: ")

    def test_of_a_run_that_was_never_stored_there_is_none(
        self, store: DirectoryStore, make_row: Callable[..., HistoryRow]
    ) -> None:
        put_row(store, make_row())

        with pytest.raises(InvalidInput, match=r"no such run in the history.*`nightbridge history llama3-8b` shows"):
            history_of(store, "llama3-8b", run_key="llama3-8b-2026-11-09-ffffffffff")

    def test_series_of_a_test_with_a_like_name_are_no_others_of_it(
        self, store: DirectoryStore, make_row: Callable[..., HistoryRow]
    ) -> None:
        later = make_row(night="2026-12-01").model_copy(
            update={"test_id": "LLAMA3 8B", "series": "llama3-8b-ffffffffffff"}
        )
        for row in (make_row(), later):
            put_row(store, row)

        assert history_of(store, "llama3-8b").others == ()

    def test_a_test_with_one_series_needs_no_word_about_it(
        self, store: DirectoryStore, make_row: Callable[..., HistoryRow]
    ) -> None:
        put_row(store, make_row())

        assert history_of(store, "llama3-8b").which_lines == ()

    def test_one_cluster_may_be_asked_for(self, store: DirectoryStore, make_row: Callable[..., HistoryRow]) -> None:
        row = make_row()
        later = make_row(night="2026-12-01").model_copy(update={"cluster": "other/one"})
        for each in (row, later):
            put_row(store, each)

        assert history_of(store, "llama3-8b").cluster == "other/one"
        assert history_of(store, "llama3-8b", "dgx").rows == (row,)

    @pytest.mark.parametrize("test_id", ["llama3", "llama3-8b-long", "LLAMA3 8B"])
    def test_tests_with_like_names_are_not_mixed_up(
        self, store: DirectoryStore, make_row: Callable[..., HistoryRow], test_id: str
    ) -> None:
        put_row(store, make_row())

        with pytest.raises(InvalidInput, match="no history of this test"):
            history_of(store, test_id)

    def test_night_ids_may_hold_dashes_and_the_tests_name(
        self, store: DirectoryStore, make_row: Callable[..., HistoryRow]
    ) -> None:
        put_row(store, make_row(night="by-hand-09-llama3-8b-x"))

        assert find_series(store, "llama3-8b")[0].last_night == "by-hand-09-llama3-8b-x"


# --- two runs laid over each other, as a page ------------------------------------------------------------------------


LOSS = {step: 10.0 - 0.1 * step for step in range(1, 51)}


def page(a: pd.DataFrame, b: pd.DataFrame, gate: ParityGate = "convergence") -> str:
    return parity_html(run_parity(a, b, names=("ref<1>", "new")), a, b, gate)


def test_every_quantity_is_drawn_with_the_reference_below_it() -> None:
    run = table(lm_loss=LOSS, grad_norm=LOSS)

    text = page(run, run)

    assert re.findall(r"<h2>(.*?)</h2>", text) == ["loss", "grad norm"]
    assert text.count("<svg") == 3  # the loss has its differences beside it
    assert "The two runs converge alike" in text
    assert "equal, bit for bit</dt><dd>at every step" in text


def test_nothing_is_loaded_and_names_are_text() -> None:
    text = page(table(lm_loss=LOSS), table(lm_loss=LOSS))

    assert "ref&lt;1&gt;" in text
    assert "ref<1>" not in text
    assert "<script" not in text
    assert not re.search(r'(src|href)="http', text)


@pytest.mark.parametrize(
    ("gate", "headline"),
    [
        ("numerics", "do not compute the same"),
        ("convergence", "converge alike"),
        ("iterations", "do not agree at every iteration"),
    ],
)
def test_the_headline_speaks_of_the_gate_that_was_asked_for(gate: ParityGate, headline: str) -> None:
    other = LOSS | {30: LOSS[30] * 1.03}

    text = page(table(lm_loss=LOSS), table(lm_loss=other), gate)

    assert f"The two runs {headline}" in text
    assert ("differs at step 30" in text) == (gate == "numerics")
    assert ("at iteration 30, +3.00 %" in text) == (gate == "iterations")


def test_runs_without_a_step_in_common_have_a_page_that_says_so() -> None:
    text = page(table(lm_loss=LOSS), table(lm_loss={step + 100: value for step, value in LOSS.items()}))

    assert "no step in common" in text
    assert "steps in common</dt><dd>none" in text


def test_no_differences_make_no_drawing() -> None:
    assert differences_chart([], [], []) == ""


def test_a_difference_that_is_infinite_does_not_stop_the_drawing() -> None:
    assert "<svg" in differences_chart([1, 2, 3], [0.0, float("inf"), 0.02], [0.005, 0.015, 0.015])
