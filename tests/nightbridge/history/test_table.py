"""The history as tables that other tools read: the documented queries, the export, and old stores."""

import json
import re
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import duckdb
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from nightbridge.errors import InvalidInput
from nightbridge.history import history_store
from nightbridge.history.history_store import COMPACT_AT, RowKey, compact, put_row
from nightbridge.history.reading import export_history, migrate_history, read_history
from nightbridge.history.rows import TIME, HistoryRow, columns, table_of
from nightbridge.models import VerdictStatus
from nightbridge.outputs.event_files import metrics_parquet
from nightbridge.store.directory import DirectoryStore

PAGE = (Path(__file__).parents[3] / "docs" / "store.md").read_text()
QUERIES = re.findall(r"```(sql|python)\n(.*?)```", PAGE, re.DOTALL)
NIGHTS = [f"2026-11-{day:02}" for day in range(1, 21)]


@pytest.fixture
def rows(store: DirectoryStore, make_row: Callable[..., HistoryRow]) -> list[HistoryRow]:
    """Twenty nights of one series in the store: most in a generation, the last four not yet."""
    one = make_row(verdict=VerdictStatus.PASSED)
    made = [
        one.model_copy(
            update={
                "night": night,
                "run_key": f"llama3-8b-{night}-0123456789",
                "cluster": "dgx",
                "facts": {"driver": "580.1"},
                "summary": one.summary.model_copy(update={"step_time": 0.25 + number / 100}),
            }
        )
        for number, night in enumerate(NIGHTS)
    ]
    for row in made[:COMPACT_AT]:
        put_row(store, row)
    assert compact(store, "dgx", one.series) == COMPACT_AT
    for row in made[COMPACT_AT:]:
        put_row(store, row)
    return made


@pytest.fixture
def inside(store: DirectoryStore, rows: list[HistoryRow], monkeypatch: pytest.MonkeyPatch) -> Path:
    """The store's folder as the working directory, with one run's scalars and an export."""
    folder = Path(store.url.removeprefix("file://"))
    scalars = [("iteration-time", 1, 0.25), ("iteration-time", 2, 0.75), ("lm loss", 1, 3.0), ("lm loss", 2, 2.5)]
    curves = pd.DataFrame(scalars, columns=["tag", "step", "value"]).assign(superseded=False)
    store.put("runs/llama3-8b/2026-11-09/RUN_KEY/a1/metrics.parquet", metrics_parquet(curves))
    monkeypatch.chdir(folder)
    assert export_history(store, Path("history.parquet")).number == len(rows)
    return folder


def test_the_page_has_queries_in_python_and_in_sql() -> None:
    assert sorted(language for language, _ in QUERIES) == ["python", "python", "sql", "sql", "sql"]


@pytest.mark.parametrize("query", [text for language, text in QUERIES if language == "sql"])
@pytest.mark.usefixtures("inside")
def test_the_documented_queries_find_what_is_there(query: str, rows: list[HistoryRow]) -> None:
    found = duckdb.execute(query).fetchall()
    if "metrics.parquet" in query:
        assert found == [("2026-11-09", 0.5)]
    elif "history.parquet" in query:
        assert sorted(row[1:] for row in found) == [
            (row.test_id, row.summary.step_time, row.summary.peak_memory, row.megatron_bridge.commit, "580.1")
            for row in rows
        ]
        assert {row[0] for row in found} == {row.harvested_at for row in rows}
    else:
        compacted = rows[:COMPACT_AT]
        assert found == [(row.night, row.test_id, row.summary.tokens_per_second_per_gpu) for row in compacted]


@pytest.mark.usefixtures("inside")
def test_the_documented_lines_of_pandas_run(rows: list[HistoryRow]) -> None:
    names: dict[str, Any] = {}
    for language, text in QUERIES:
        if language == "python":
            exec(text, names)
    assert names["losses"].to_dict() == {1: 3.0, 2: 2.5}
    assert names["trend"]["llama3-8b"].tolist() == [row.summary.tflops_per_gpu for row in rows]


def test_every_column_is_documented_and_none_that_is_not_there() -> None:
    listed = {name for line in PAGE.splitlines() if line.startswith("| ") for name in re.findall(r"`(\w+)`", line)}
    assert listed == {TIME, *columns()}


@pytest.mark.parametrize("suffix", [".parquet", ".csv"])
def test_an_export_has_every_row_of_every_series_with_its_types(
    store: DirectoryStore, rows: list[HistoryRow], tmp_path: Path, suffix: str
) -> None:
    other = rows[0].model_copy(update={"series": "other-0123456789ab", "cluster": "a b/c", "job_id": None})
    put_row(store, other)
    path = tmp_path / f"all{suffix}"
    assert export_history(store, path) == (len(rows) + 1, ())
    table = pd.read_parquet(path) if suffix == ".parquet" else pd.read_csv(path, parse_dates=[TIME])
    assert list(table.columns) == [TIME, *columns()]
    assert sorted(table["cluster"]) == sorted([*(row.cluster for row in rows), "a b/c"])
    of_series = table[table["cluster"] == "dgx"].sort_values("night")
    assert of_series["step_time"].tolist() == [row.summary.step_time for row in rows]
    assert of_series[TIME].dt.tz_convert("UTC").tolist() == [pd.Timestamp(row.harvested_at) for row in rows]
    assert table["job_id"].isna().sum() == 1


def test_a_series_that_cannot_be_read_is_named_and_stops_no_other(
    store: DirectoryStore, rows: list[HistoryRow], tmp_path: Path
) -> None:
    store.put("history/dgx/broken-0123456789ab/compacted/00000001.parquet", b"no table")
    done = export_history(store, tmp_path / "all.parquet")
    assert done.number == len(rows)
    assert [("broken-0123456789ab" in text, "not a table" in text) for text in done.damaged] == [(True, True)]
    assert [len(migrate_history(store).damaged) for _ in range(2)] == [1, 1]


def test_a_file_of_another_kind_is_refused_before_anything_is_written(store: DirectoryStore, tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"End its name with \.parquet or \.csv"):
        export_history(store, tmp_path / "history.xlsx")
    assert not list(tmp_path.glob("history*"))


def without_columns(data: bytes) -> bytes:
    """A generation as earlier versions wrote it."""
    table = pq.read_table(pa.BufferReader(data)).select([*RowKey._fields, "row"])
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, row_group_size=history_store.ROWS_TOGETHER, write_page_checksum=True)
    return bytes(sink.getvalue())


@pytest.fixture
def old_generation(store: DirectoryStore, rows: list[HistoryRow]) -> str:
    key = f"history/dgx/{rows[0].series}/compacted/00000001.parquet"
    data = store.get(key)
    assert data is not None
    store.put(key, without_columns(data))
    return key


def test_an_old_store_is_read_as_it_is_and_migrated_once(
    store: DirectoryStore, rows: list[HistoryRow], old_generation: str
) -> None:
    assert list(read_history(store, "dgx", rows[0].series)) == rows
    assert migrate_history(store) == (1, ())
    objects = [found.key for found in store.list("history")]
    assert objects == [old_generation, old_generation.replace("00000001", "00000002")]
    migrated = pq.read_table(pa.BufferReader(store.get(objects[-1]))).to_pandas()
    assert migrated["step_time"].tolist() == [row.summary.step_time for row in rows]
    assert list(read_history(store, "dgx", rows[0].series)) == rows
    assert migrate_history(store) == (0, ())
    assert [found.key for found in store.list("history")] == objects


class Killed(BaseException):
    """The process died."""


@pytest.mark.parametrize("dies_at", range(1, 7))
def test_a_migration_that_is_killed_loses_no_row_and_goes_on(
    store: DirectoryStore,
    rows: list[HistoryRow],
    old_generation: str,
    monkeypatch: pytest.MonkeyPatch,
    dies_at: int,
) -> None:
    changes = 0

    def dying(change: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            nonlocal changes
            changes += 1
            if changes == dies_at:
                raise Killed
            return change(*arguments)

        return call

    with monkeypatch.context() as patch:
        for name in ("put_if_absent", "delete"):
            patch.setattr(store, name, dying(getattr(store, name)))
        try:
            migrate_history(store)
        except Killed:
            assert list(read_history(store, "dgx", rows[0].series)) == rows
        else:
            assert dies_at > 5  # one generation written, four small objects removed
    migrate_history(store)
    assert list(read_history(store, "dgx", rows[0].series)) == rows
    assert migrate_history(store).number == 0


def test_what_is_no_row_has_nulls_and_never_another_type() -> None:
    bad = {"attempt": "three", "night": 7, "resumed": "yes", "job_id": 1 << 70, "harvested_at": "soon", "facts": []}
    bad |= {"summary": {"step_time": "fast", "steps_done": True, "final_loss": 2, "loss_digest": "\ud800"}}
    table = table_of([json.dumps(bad), "no JSON", "[]", json.dumps({"harvested_at": "2026-11-09T01:02:03Z"})])
    first, *others = table.to_pylist()
    assert {name: value for name, value in first.items() if value is not None} == {
        "final_loss": 2.0,
        "loss_digest": "?",
    }
    assert [{name: value for name, value in row.items() if value is not None} for row in others] == [
        {},
        {},
        {TIME: datetime(2026, 11, 9, 1, 2, 3, tzinfo=UTC)},
    ]
