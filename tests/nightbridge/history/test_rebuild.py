"""The history again, from the runs themselves."""

from collections.abc import Callable

import pytest

from nightbridge.gate.run_verdict import compare
from nightbridge.harvest.manifest import load_record
from nightbridge.history import reading
from nightbridge.history.history_store import put_row
from nightbridge.history.reading import read_history, rebuild_history
from nightbridge.history.rows import row_of
from nightbridge.models import RunRecord, VerdictStatus
from nightbridge.store.directory import DirectoryStore
from nightbridge.store.object_store import ObjectStore


@pytest.fixture
def judged(
    store: DirectoryStore, make_record: Callable[..., RunRecord], commit: Callable[..., RunRecord]
) -> list[RunRecord]:
    """Three nights in the store, each with the verdict that the compare stage wrote, and no history."""
    records = [commit(store, make_record(night=f"2026-11-{day:02}")) for day in (7, 8, 9)]
    for number, record in enumerate(records):
        verdict = compare(record, [row_of(other, compare(other, ())) for other in records[:number]])
        store.put(f"{record.prefix.rsplit('/', 1)[0]}/verdict.json", verdict.model_dump_json().encode())
    return records


def test_rows_are_what_the_compare_stage_had_written(store: DirectoryStore, judged: list[RunRecord]) -> None:
    rebuilt = rebuild_history(store)

    rows = read_history(store, "dgx", judged[0].series)
    assert [row.run_key for row in rows] == [record.spec.run_key for record in judged]
    assert [row.verdict for row in rows] == ["no_baseline", "insufficient_data", "insufficient_data"]
    assert rebuilt == (3, ())


def test_doing_it_again_changes_nothing(store: DirectoryStore, judged: list[RunRecord]) -> None:
    assert rebuild_history(store) == rebuild_history(store)
    assert len(read_history(store, "dgx", judged[0].series)) == 3


def test_the_last_attempt_of_a_run_counts_and_an_earlier_ones_verdict_does_not(
    store: DirectoryStore, judged: list[RunRecord], commit: Callable[..., RunRecord]
) -> None:
    again = judged[2].model_copy(
        update={
            "prefix": judged[2].prefix.removesuffix("a1") + "a12",
            "jobs": (judged[2].job.model_copy(update={"attempt": 12}),),
        }
    )
    commit(store, again, attempt=12)

    rebuild_history(store)

    row = read_history(store, "dgx", again.series)[-1]
    assert row.night == "2026-11-09"
    assert row.attempt == 12
    assert row.verdict is None


def test_a_run_that_was_never_committed_has_no_row(store: DirectoryStore, judged: list[RunRecord]) -> None:
    store.delete(f"{judged[0].prefix}/manifest.json")

    rebuild_history(store)

    assert [row.night for row in read_history(store, "dgx", judged[0].series)] == ["2026-11-08", "2026-11-09"]


@pytest.mark.parametrize("name", ["a1/manifest.json", "verdict.json"])
def test_a_damaged_run_is_told_and_holds_up_no_other(store: DirectoryStore, judged: list[RunRecord], name: str) -> None:
    store.put(f"{judged[1].prefix.removesuffix('/a1')}/{name}", b"{")

    rebuilt = rebuild_history(store)

    assert [row.night for row in read_history(store, "dgx", judged[0].series)] == ["2026-11-07", "2026-11-09"]
    (damage,) = rebuilt.damaged
    assert judged[1].spec.run_key in damage


def test_a_row_whose_run_is_gone_is_left_as_it_is(
    store: DirectoryStore, judged: list[RunRecord], make_record: Callable[..., RunRecord]
) -> None:
    pruned = make_record(night="2026-11-01")
    put_row(store, row_of(pruned, compare(pruned, ())))

    rebuild_history(store)

    assert len(read_history(store, "dgx", judged[0].series)) == 4


def test_one_test_may_be_asked_for(
    store: DirectoryStore,
    judged: list[RunRecord],
    make_record: Callable[..., RunRecord],
    commit: Callable[..., RunRecord],
) -> None:
    other = commit(store, make_record(test_id="qwen3"))

    assert rebuild_history(store, "qwen3").number == 1
    assert [row.run_key for row in read_history(store, "dgx", other.series)] == [other.spec.run_key]


# --- what is damaged is mended ---------------------------------------------------------------------------------------


@pytest.fixture
def generation(store: DirectoryStore, judged: list[RunRecord]) -> str:
    """The key of the first generation, which has every row."""
    rebuild_history(store)
    (found,) = store.list("history")
    return found.key


def test_all_rows_of_a_series_are_one_object(store: DirectoryStore, generation: str) -> None:
    assert generation == "history/dgx/llama3-8b-0123456789ab/compacted/00000001.parquet"


def test_a_damaged_generation_is_replaced_and_told(
    store: DirectoryStore, judged: list[RunRecord], generation: str
) -> None:
    rows = read_history(store, "dgx", judged[0].series)
    store.put(generation, b"PAR1")

    rebuilt = rebuild_history(store)

    assert read_history(store, "dgx", judged[0].series) == rows
    (damage,) = rebuilt.damaged
    assert "00000001.parquet: not a table of history rows" in damage


def test_a_damaged_row_is_replaced_where_its_run_is_there(store: DirectoryStore, judged: list[RunRecord]) -> None:
    record = judged[0]
    folder = f"history/dgx/{record.series}"
    store.put(f"{folder}/{record.spec.night}-{record.spec.run_key}.json", b"{")
    store.put(f"{folder}/2026-01-01-llama3-8b-2026-01-01-ffffffffff.json", b"{")

    rebuilt = rebuild_history(store)

    (damage,) = rebuilt.damaged
    assert "2026-01-01-llama3-8b-2026-01-01-ffffffffff.json: not a history row" in damage
    assert [found.key for found in store.list(folder) if found.key.endswith(".json")] == [
        f"{folder}/2026-01-01-llama3-8b-2026-01-01-ffffffffff.json"
    ]


def test_a_wrong_row_is_corrected(store: DirectoryStore, judged: list[RunRecord]) -> None:
    rebuild_history(store)
    rows = read_history(store, "dgx", judged[0].series)
    put_row(store, rows[1].model_copy(update={"verdict": VerdictStatus.REGRESSED}))

    rebuild_history(store)

    assert read_history(store, "dgx", judged[0].series) == rows


def test_a_verdict_that_was_given_meanwhile_is_newer(
    store: DirectoryStore, judged: list[RunRecord], monkeypatch: pytest.MonkeyPatch
) -> None:
    rebuild_history(store)
    confirmed = read_history(store, "dgx", judged[0].series)[1].model_copy(update={"verdict": VerdictStatus.UNSTABLE})

    def read_and_be_overtaken(store: ObjectStore, prefix: str) -> RunRecord | None:
        record = load_record(store, prefix)
        if record and record.spec.run_key == confirmed.run_key:
            put_row(store, confirmed)
        return record

    monkeypatch.setattr(reading, "load_record", read_and_be_overtaken)

    rebuild_history(store)

    assert read_history(store, "dgx", judged[0].series)[1] == confirmed
