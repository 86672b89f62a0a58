"""What the gate takes into account besides the last good runs: limits, the canary, the nodes, all nights together."""

from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, date, datetime, timedelta
from typing import Any

import numpy as np
import pytest

from nightbridge.gate.evidence import canary_rows, gather_evidence, limits_for
from nightbridge.gate.run_verdict import compare
from nightbridge.gate.stored_verdicts import judge_and_record
from nightbridge.gate.tonight import Evidence
from nightbridge.history.history_store import put_row
from nightbridge.history.rows import HistoryRow, row_of
from nightbridge.models import GatePolicy, Limits, RunRecord, Summary, Verdict, VerdictStatus
from nightbridge.store.directory import DirectoryStore
from nightbridge.store.object_store import ObjectInfo
from tests.builders import commit_run, make_record, make_summary, make_verdict

Records = Callable[..., RunRecord]

QUIET = Summary(steps_expected=50, steps_done=50, tflops_per_gpu=700.0, peak_memory=80.0, final_loss=5.0)


def night(number: int) -> str:
    return str(date(2026, 9, 1) + timedelta(days=number))


@pytest.fixture
def judged(make_record: Records) -> Callable[..., tuple[list[Verdict], list[HistoryRow]]]:
    """Judge nights one after the other, each with the rows of those before it, and return verdicts and rows."""

    def judge(
        step_times: Sequence[float],
        *,
        nodes: Sequence[str] = (),
        canary: Sequence[HistoryRow] = (),
        evidence: Evidence | None = None,
        gate: GatePolicy | None = None,
        test_id: str = "llama3-8b",
    ) -> tuple[list[Verdict], list[HistoryRow]]:
        rows: list[HistoryRow] = []
        verdicts = []
        for number, value in enumerate(step_times):
            record = make_record(
                QUIET.model_copy(update={"step_time": float(value), "step_time_p05": float(value)}),
                night(number),
                gate=gate or GatePolicy(confirm=0),
                test_id=test_id,
            )
            if nodes:
                assert record.job.status is not None
                status = record.job.status.model_copy(update={"nodes": nodes[number]})
                record = record.model_copy(update={"jobs": (record.job.model_copy(update={"status": status}),)})
            verdict = compare(
                record,
                rows,
                (evidence or Evidence())._replace(canary=[row for row in canary if row.night <= night(number)]),
            )
            verdicts.append(verdict)
            rows.append(row_of(record, verdict))
        return verdicts, rows

    return judge


def noise(nights: int, seed: int, sigma: float = 0.004) -> np.ndarray:
    return 1 + sigma * np.random.default_rng(seed).standard_normal(nights)


def statuses(verdicts: Sequence[Verdict]) -> set[VerdictStatus]:
    return {verdict.status for verdict in verdicts}


class TestAllNightsTogether:
    def test_what_is_smaller_than_any_nights_band_is_found_over_several_and_says_since_when(
        self, judged: Callable[..., Any]
    ) -> None:
        values = noise(40, 1, sigma=0.008)
        values[28:] *= 1.025

        verdicts, _rows = judged(values)

        assert VerdictStatus.REGRESSED not in statuses(verdicts[:28])
        assert verdicts[-1].status is VerdictStatus.REGRESSED
        (reason,) = (reason for reason in verdicts[-1].reasons if "since" in reason)
        assert any(f"since {night(start)}" in reason for start in (27, 28, 29))
        assert "p = " in reason

    def test_it_stays_regressed_until_the_night_that_is_back(self, judged: Callable[..., Any]) -> None:
        values = np.r_[noise(30, 2, sigma=0.002), 1.04 * noise(15, 3, sigma=0.002), noise(6, 4, sigma=0.002)]

        verdicts, _rows = judged(values)

        assert statuses(verdicts[30:45]) == {VerdictStatus.REGRESSED}
        assert VerdictStatus.REGRESSED not in statuses(verdicts[45:])


class TestLimits:
    def test_a_ceiling_of_the_test_fails_the_first_night_of_all(self, judged: Callable[..., Any]) -> None:
        verdicts, _rows = judged([1.0], gate=GatePolicy(confirm=0, limits={"step_time": Limits(max=0.9)}))

        assert verdicts[0].status is VerdictStatus.REGRESSED
        assert "step time is above its ceiling of 0.9 s, the test's" in verdicts[0].reasons[0]

    def test_a_limit_of_the_test_for_what_was_never_measured_is_not_kept(self, judged: Callable[..., Any]) -> None:
        gate = GatePolicy(confirm=0, limits={"checkpoint_time": Limits(max=60)})

        verdicts, _rows = judged([1.0] * 2, gate=gate)

        assert statuses(verdicts) == {VerdictStatus.FAILED}
        assert "checkpoint time was not measured" in verdicts[0].reasons[0]

    def test_what_the_cluster_owes_the_test_counts_too(self, judged: Callable[..., Any]) -> None:
        evidence = Evidence(contract={"tflops_per_gpu": Limits(min=710)})

        verdicts, _rows = judged([1.0] * 3, evidence=evidence)

        assert statuses(verdicts) == {VerdictStatus.REGRESSED}
        assert "below its floor of 710 TFLOP/s/GPU, what dgx owes it" in verdicts[0].reasons[0]

    def test_the_last_pattern_that_fits_a_test_counts(self) -> None:
        contract = {"*": {"step_time": Limits(max=9)}, "llama*": {"step_time": Limits(max=2)}}

        assert limits_for("llama3-8b", contract)["step_time"].max == 2
        assert limits_for("deepseek", contract)["step_time"].max == 9


class TestCanary:
    def test_what_the_canary_shows_is_not_laid_at_the_codes_door(self, judged: Callable[..., Any]) -> None:
        drift = np.r_[np.ones(30), np.full(6, 1.08)]
        _verdicts, canary = judged(3 * drift * noise(36, 5, 0.002), test_id="canary")

        alone, _rows = judged(drift * noise(36, 6, 0.002))
        beside, _rows = judged(drift * noise(36, 6, 0.002), canary=canary)

        assert alone[-1].status is VerdictStatus.REGRESSED
        assert VerdictStatus.REGRESSED not in statuses(beside)

    def test_a_slower_commit_is_found_beside_a_canary_that_stays(self, judged: Callable[..., Any]) -> None:
        values = noise(36, 7, 0.002)
        values[30:] *= 1.08
        _verdicts, canary = judged(noise(36, 8, 0.002), test_id="canary")

        verdicts, _rows = judged(values, canary=canary)

        assert statuses(verdicts[30:]) == {VerdictStatus.REGRESSED}


class TestCanarysSeries:
    @pytest.fixture
    def ran(self, store: DirectoryStore, make_row: Callable[..., HistoryRow]) -> Callable[..., None]:
        """Let the canary run in a night."""

        def run(number: int, series: str = "canary-0123456789ab") -> None:
            put_row(store, make_row(night=night(number), test_id="canary").model_copy(update={"series": series}))

        return run

    def test_all_tests_of_a_night_find_it_by_one_listing(
        self, store: DirectoryStore, ran: Callable[..., None], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for number in range(3):
            ran(number)
        listed: list[str] = []
        listing = store.list

        def list_and_count(prefix: str, begin: str = "") -> Iterator[ObjectInfo]:
            listed.append(prefix)
            return listing(prefix, begin)

        monkeypatch.setattr(store, "list", list_and_count)

        known: dict[tuple[str, str, str, str], str] = {}
        found = [canary_rows(store, "canary", "dgx", night=night(2), known=known) for _test in range(5)]

        assert [[row.night for row in rows] for rows in found] == [[night(0), night(1), night(2)]] * 5
        assert listed.count("history/dgx") == 1

    def test_until_it_has_run_tonight_it_is_looked_for_again(
        self, store: DirectoryStore, ran: Callable[..., None]
    ) -> None:
        known: dict[tuple[str, str, str, str], str] = {}
        ran(0)
        before = canary_rows(store, "canary", "dgx", night=night(1), known=known)
        ran(1, series="canary-aaaaaaaaaaaa")

        after = canary_rows(store, "canary", "dgx", night=night(1), known=known)

        assert ([row.night for row in before], [row.night for row in after]) == ([night(0)], [night(1)])


class TestLosses:
    @pytest.fixture
    def nights(self, store: DirectoryStore) -> list[HistoryRow]:
        """Eight good nights."""
        records = [self.run(store, number) for number in range(8)]
        return [row_of(record, make_verdict(VerdictStatus.PASSED, night=record.spec.night)) for record in records]

    @staticmethod
    def run(store: DirectoryStore, number: int, late: float = 1.0, early: float = 1.0) -> RunRecord:
        """A stored run of fifty iterations; those of its two halves have their loss multiplied."""
        noise = np.random.default_rng(number)
        losses = [2 + 6 * float(np.exp(-step / 10)) for step in range(1, 51)]
        losses = [
            loss * (1 + 1e-5 * noise.standard_normal()) * (late if step > 25 else early)
            for step, loss in enumerate(losses, 1)
        ]
        anchors = tuple((step, losses[step - 1]) for step in (1, 13, 25, 38, 50))
        summary = make_summary(losses=losses).model_copy(update={"loss_anchors": anchors})
        record = make_record(summary, night(number), gate=GatePolicy(deterministic=False))
        return commit_run(store, record, dict(enumerate(losses, 1)))

    def judge(self, store: DirectoryStore, rows: Sequence[HistoryRow], **fields: float) -> Verdict:
        tonight = self.run(store, 10, **{"late": 1.004, **fields})
        return compare(tonight, rows, gather_evidence(store, tonight, history=rows))

    @pytest.mark.parametrize("damaged", [0, 1, 3])
    def test_the_newest_good_nights_that_cannot_be_read_are_less_to_compare_with(
        self, store: DirectoryStore, nights: list[HistoryRow], damaged: int
    ) -> None:
        for row in nights[8 - damaged :]:
            store.put(f"{row.prefix}/metrics.parquet", b"PAR1")

        verdict = self.judge(store, nights)

        assert verdict.status is VerdictStatus.REGRESSED
        assert "loss curve does not follow the median of the last 8 good runs" in " ".join(verdict.reasons)

    @pytest.mark.parametrize(
        ("late", "status"), [(1.003, VerdictStatus.REGRESSED), (0.996, VerdictStatus.PASSED)], ids=["above", "below"]
    )
    def test_a_loss_that_was_lower_first_is_judged_by_where_it_ends(
        self, store: DirectoryStore, nights: list[HistoryRow], late: float, status: VerdictStatus
    ) -> None:
        assert self.judge(store, nights, late=late, early=0.996).status is status

    def test_what_stands_is_not_run_again_every_night(self, store: DirectoryStore, nights: list[HistoryRow]) -> None:
        first = self.run(store, 8, late=1.004)
        new = compare(first, nights, gather_evidence(store, first, history=nights))

        stands = self.judge(store, [*nights, row_of(first, new)])

        assert (new.status, new.reruns) == (VerdictStatus.REGRESSED, 2)
        assert (stands.status, stands.reruns) == (VerdictStatus.REGRESSED, 0)

    def test_a_verdict_says_so_where_too_few_can_be_read(self, store: DirectoryStore, nights: list[HistoryRow]) -> None:
        for row in nights[4:]:
            store.put(f"{row.prefix}/metrics.parquet", b"PAR1")

        reasons = self.judge(store, nights).reasons

        assert "losses were not compared: those of 4 of the last 8 good runs cannot be read" in reasons

    def test_few_good_nights_are_no_reason(self, store: DirectoryStore, nights: list[HistoryRow]) -> None:
        assert "not compared" not in " ".join(self.judge(store, nights[:4]).reasons)


class TestNodes:
    def test_the_level_of_a_known_node_set_is_no_regression(self, judged: Callable[..., Any]) -> None:
        slow = np.arange(40) % 5 == 4
        nodes = ["node[5-8]" if other else "node[1-4]" for other in slow]

        verdicts, _rows = judged(noise(40, 9, 0.002) * np.where(slow, 1.04, 1.0), nodes=nodes)

        assert VerdictStatus.REGRESSED not in statuses(verdicts[26:])


# --- a new series ------------------------------------------------------------------------------------------------------


def test_a_new_series_says_which_key_began_it_and_how_the_one_before_compares(
    store: DirectoryStore, make_record: Records, commit: Callable[..., RunRecord]
) -> None:
    arguments = {"model_recipe_name": "llama3_8b", "num_gpus": 8, "max_steps": 50}
    old = commit(store, make_record(QUIET.model_copy(update={"step_time": 2.0}), "2026-11-09", cmd_args=arguments))
    put_row(store, row_of(old, compare(old, ())))
    new = make_record(
        QUIET.model_copy(update={"step_time": 2.1}),
        "2026-11-10",
        cmd_args=arguments | {"mb": 2},
        extra_env_vars={"NCCL_ALGO": "Ring"},
    ).model_copy(update={"series": "llama3-8b-aaaaaaaaaaaa"})

    verdict = compare(new, (), gather_evidence(store, new))

    assert verdict.status is VerdictStatus.NO_BASELINE
    assert verdict.reasons[-1] == (
        "the configuration changed since 2026-11-09, $NCCL_ALGO unset → Ring, cmd_args.mb unset → 2: against that night "
        "step time +5.0 %, throughput ±0.0 %, peak memory ±0.0 %, final loss ±0.0 %"
    )


def test_a_series_that_a_night_without_a_date_began_changed_what_was_before_that_night(
    store: DirectoryStore, make_record: Records, commit: Callable[..., RunRecord]
) -> None:
    begun = {"series": "llama3-8b-aaaaaaaaaaaa"}
    ring = {"extra_env_vars": {"NCCL_ALGO": "Ring"}}
    at = datetime(2026, 11, 9, 12, tzinfo=UTC)
    by_hand = make_record(night="try-ring09", **ring).model_copy(update={**begun, "harvested_at": at})
    later = make_record(night="2026-11-11", **ring).model_copy(update=begun)
    for record in (make_record(night="2026-11-09"), make_record(night="2026-11-10"), later):
        put_row(store, row_of(commit(store, record), compare(record, ())))

    (told,) = gather_evidence(store, by_hand, history=[row_of(later, compare(later, ()))]).split

    assert told.startswith("the configuration changed since 2026-11-09, $NCCL_ALGO unset → Ring: ")


def test_the_first_series_of_a_test_and_another_point_of_its_sweep_say_nothing(
    store: DirectoryStore, make_record: Records, commit: Callable[..., RunRecord]
) -> None:
    first = commit(store, make_record(night="2026-11-09", sweep_point={"tp": 1}))
    assert gather_evidence(store, first).split == ()
    put_row(store, row_of(first, compare(first, ())))
    other = make_record(night="2026-11-10", sweep_point={"tp": 2}).model_copy(
        update={"series": "llama3-8b-aaaaaaaaaaaa"}
    )

    assert gather_evidence(store, other).split == ()


def test_a_test_whose_id_only_looks_alike_has_begun_no_series(
    store: DirectoryStore, make_record: Records, commit: Callable[..., RunRecord]
) -> None:
    old = commit(store, make_record(night="2026-11-09", test_id="llama3.8b"))
    put_row(store, row_of(old, compare(old, ())))
    new = make_record(night="2026-11-10", extra_env_vars={"NCCL_ALGO": "Ring"})

    assert gather_evidence(store, new.model_copy(update={"series": "llama3-8b-aaaaaaaaaaaa"})).split == ()


def test_damage_in_the_series_before_is_told_and_loses_no_verdict(
    store: DirectoryStore, make_record: Records, commit: Callable[..., RunRecord]
) -> None:
    store.put("history/dgx/llama3-8b-0123456789ab/compacted/00000001.parquet", b"PAR1")
    new = commit(store, make_record(night="2026-11-10").model_copy(update={"series": "llama3-8b-aaaaaaaaaaaa"}))

    verdict = judge_and_record(store, new, {}, lambda *_range: ())

    assert verdict.status is VerdictStatus.NO_BASELINE
    assert verdict.reasons[-1].startswith("what this configuration has changed is not known: file://")
    assert "not a table of history rows" in verdict.reasons[-1]
