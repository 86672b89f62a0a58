"""One small object per run in the store."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime

import pytest

from nightbridge.errors import DamagedData
from nightbridge.models import RunRecord, Summary, VerdictStatus
from nightbridge.regression.gate import compare
from nightbridge.regression.history import HistoryRow, add, read_history, row_of
from nightbridge.store.directory import DirectoryStore


def test_a_row_says_what_the_run_was_what_became_of_it_and_what_it_measured(
    make_record: Callable[..., RunRecord],
) -> None:
    record = make_record(subject="Fuse the softmax", sweep_point={"tp": 2})

    row = row_of(record, compare(record, ()))

    assert row.run_key == record.spec.run_key
    assert (row.cluster, row.series, row.nodes, row.job_id) == ("dgx", record.series, "node[1-2]", 4711)
    assert (row.megatron_bridge.commit, row.megatron_bridge.subject) == ("a" * 40, "Fuse the softmax")
    assert row.nemo_run.commit == "b" * 40
    assert row.image_digest == "sha256:" + "d" * 64
    assert row.summary == record.summary
    assert row.verdict is VerdictStatus.NO_BASELINE
    assert row.sweep_point == {"tp": 2}


def test_rows_lie_where_the_design_says(store: DirectoryStore, make_row: Callable[..., HistoryRow]) -> None:
    row = make_row()

    add(store, row)

    keys = [found.key for found in store.list("history")]
    assert keys == [f"history/dgx/{row.series}/{row.night}-{row.run_key}.json"]


def test_what_was_added_is_read_back_in_the_order_of_nights_and_harvests(
    store: DirectoryStore, make_row: Callable[..., HistoryRow]
) -> None:
    late = make_row(night="2026-11-08", repeat=1).model_copy(
        update={"harvested_at": datetime(2026, 11, 8, 9, tzinfo=UTC)}
    )
    early = make_row(night="2026-11-08").model_copy(update={"harvested_at": datetime(2026, 11, 8, 5, tzinfo=UTC)})
    rows = [make_row(night="2026-11-09"), late, early, make_row(night="2026-11-07")]
    for row in rows:
        add(store, row)

    read = read_history(store, "dgx", rows[0].series)

    assert read == (rows[3], early, late, rows[0])


def test_adding_again_replaces_the_row_of_an_earlier_attempt(
    store: DirectoryStore, make_row: Callable[..., HistoryRow]
) -> None:
    row = make_row(Summary())
    again = make_row().model_copy(update={"attempt": 2})

    for each in (row, row, again):
        add(store, each)

    assert read_history(store, "dgx", row.series) == (again,)


def test_series_and_clusters_are_kept_apart(store: DirectoryStore, make_row: Callable[..., HistoryRow]) -> None:
    row = make_row()
    add(store, row)
    add(store, row.model_copy(update={"cluster": "other"}))
    add(store, row.model_copy(update={"series": row.series + "0"}))

    assert read_history(store, "dgx", row.series) == (row,)
    assert read_history(store, "dgx", "llama3-8b-ffffffffffff") == ()


def test_a_cluster_may_be_called_anything(store: DirectoryStore, make_row: Callable[..., HistoryRow]) -> None:
    row = make_row().model_copy(update={"cluster": "dgx/h100 ../Süd"})

    add(store, row)

    assert read_history(store, "dgx/h100 ../Süd", row.series) == (row,)


def test_runs_side_by_side_lose_no_row(store: DirectoryStore, make_row: Callable[..., HistoryRow]) -> None:
    rows = [make_row(night=f"2026-11-{day:02}") for day in range(1, 29)]

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda row: add(store, row), rows))

    assert read_history(store, "dgx", rows[0].series) == tuple(rows)


def test_a_measured_nan_comes_back_as_not_measured(store: DirectoryStore, make_row: Callable[..., HistoryRow]) -> None:
    row = make_row().model_copy(update={"summary": Summary(step_time=float("nan"), final_loss=float("inf"))})

    add(store, row)

    (read,) = read_history(store, "dgx", row.series)
    assert (read.summary.step_time, read.summary.final_loss) == (None, None)


@pytest.mark.parametrize("damage", [b"", b"{", b'{"run_key": "x"}', b"\xff\xfe"])
def test_a_damaged_row_is_named_and_never_left_out(
    store: DirectoryStore, make_row: Callable[..., HistoryRow], damage: bytes
) -> None:
    row = make_row()
    add(store, row)
    store.put(f"history/dgx/{row.series}/2026-11-01-bad.json", damage)

    with pytest.raises(DamagedData, match=r"2026-11-01-bad\.json.*not a history row.*Delete it"):
        read_history(store, "dgx", row.series)
