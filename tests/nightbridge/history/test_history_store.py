"""The objects of a series: every row once, at every moment, beside writers, compactions and deaths of either."""

import io
import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta

import pyarrow.parquet as pq
import pytest

from nightbridge.errors import DamagedData
from nightbridge.history.history_store import COMPACT_AT, compact, put_row, read_objects, write_generation
from nightbridge.history.reading import find_series, read_history
from nightbridge.history.rows import HistoryRow
from nightbridge.models import StoreSettings, VerdictStatus
from nightbridge.store.directory import DirectoryStore
from nightbridge.store.object_store import ObjectInfo

Rows = Callable[..., HistoryRow]

SERIES = "llama3-8b-0123456789ab"
FOLDER = f"history/dgx/{SERIES}"


class Killed(BaseException):
    """The process died: nothing handles this."""


class MortalStore(DirectoryStore):
    """A store whose user dies at its n-th change, before or after the change reached the disk."""

    def __init__(self, settings: StoreSettings, dies_at: int, *, done: bool) -> None:
        super().__init__(settings)
        self.dies_at, self.done, self.changes = dies_at, done, 0

    def put(self, key: str, data: bytes) -> None:
        with self.change():
            super().put(key, data)

    def put_if_absent(self, key: str, data: bytes) -> bool:
        with self.change():
            return super().put_if_absent(key, data)

    def delete(self, key: str) -> None:
        with self.change():
            super().delete(key)

    def change(self) -> "Change":
        self.changes += 1
        return Change(self.changes == self.dies_at, done=self.done)


class Change:
    def __init__(self, deadly: bool, *, done: bool) -> None:
        self.deadly, self.done = deadly, done

    def __enter__(self) -> None:
        if self.deadly and not self.done:
            raise Killed

    def __exit__(self, *_raised: object) -> None:
        if self.deadly and self.done:
            raise Killed


class CountingStore(DirectoryStore):
    """Counts what it is asked for."""

    requests = 0

    def list(self, prefix: str, begin: str = "") -> Iterator[ObjectInfo]:
        self.requests += 1
        return super().list(prefix, begin)

    def get(self, key: str) -> bytes | None:
        self.requests += 1
        return super().get(key)


@pytest.fixture
def make_rows(make_row: Rows) -> Callable[[int], list[HistoryRow]]:
    row = make_row()

    def make(count: int) -> list[HistoryRow]:
        nights = [str(datetime(2025, 1, 1, tzinfo=UTC).date() + timedelta(days=number)) for number in range(count)]
        return [row.model_copy(update={"night": night, "run_key": f"llama3-8b-{night}-0123456789"}) for night in nights]

    return make


def keys(store: DirectoryStore) -> tuple[list[str], list[str]]:
    """The names of the small objects, and of the generations."""
    names = [found.key.removeprefix(f"{FOLDER}/") for found in store.list(FOLDER)]
    return [name for name in names if "/" not in name], [name for name in names if "/" in name]


def settings(store: DirectoryStore) -> StoreSettings:
    return StoreSettings(url=store.url)


# --- what a compaction does ------------------------------------------------------------------------------------------


def test_many_small_objects_become_one_and_the_rows_are_the_same(
    store: DirectoryStore, make_rows: Callable[[int], list[HistoryRow]]
) -> None:
    rows = make_rows(COMPACT_AT)
    for row in rows:
        put_row(store, row)

    assert compact(store, "dgx", SERIES) == COMPACT_AT

    assert keys(store) == ([], ["compacted/00000001.parquet"])
    assert read_history(store, "dgx", SERIES) == tuple(rows)
    assert find_series(store, "llama3-8b") == (("dgx", SERIES, COMPACT_AT, rows[-1].night),)


def test_a_short_history_is_left_as_it_is(store: DirectoryStore, make_rows: Callable[[int], list[HistoryRow]]) -> None:
    for row in make_rows(COMPACT_AT - 1):
        put_row(store, row)

    assert compact(store, "dgx", SERIES) == 0

    assert len(keys(store)[0]) == COMPACT_AT - 1


def test_the_next_generation_has_all_of_the_one_before(
    store: DirectoryStore, make_rows: Callable[[int], list[HistoryRow]]
) -> None:
    rows = make_rows(2 * COMPACT_AT)
    for row in rows[:COMPACT_AT]:
        put_row(store, row)
    compact(store, "dgx", SERIES)
    for row in rows[COMPACT_AT:]:
        put_row(store, row)

    compact(store, "dgx", SERIES)

    assert keys(store) == ([], ["compacted/00000001.parquet", "compacted/00000002.parquet"])
    assert read_history(store, "dgx", SERIES) == tuple(rows)


def test_a_superseded_generation_goes_when_its_successor_is_a_day_old(
    store: DirectoryStore, make_rows: Callable[[int], list[HistoryRow]], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = make_rows(3)
    for number, later in enumerate((timedelta(0), timedelta(0), timedelta(days=2))):
        put_row(store, rows[number])
        now = datetime.now(UTC) + later
        monkeypatch.setattr("nightbridge.history.history_store.utc_now", lambda now=now: now)
        compact(store, "dgx", SERIES, least=1)

    # The second was superseded only now, by what is younger than a day for whoever looks at a clock two days ahead.
    assert keys(store)[1] == ["compacted/00000003.parquet"]
    assert read_history(store, "dgx", SERIES) == tuple(rows)


def test_a_generation_that_was_superseded_a_moment_ago_stays_for_those_who_read_it(
    store: DirectoryStore, make_rows: Callable[[int], list[HistoryRow]]
) -> None:
    for row in make_rows(3):
        put_row(store, row)
        compact(store, "dgx", SERIES, least=1)

    assert len(keys(store)[1]) == 3


@pytest.mark.parametrize("swallowed", [True, False])
def test_a_later_version_of_a_row_counts_wherever_the_earlier_one_lies(
    store: DirectoryStore, make_rows: Callable[[int], list[HistoryRow]], swallowed: bool
) -> None:
    rows = make_rows(COMPACT_AT)
    for row in rows:
        put_row(store, row)
    if swallowed:
        compact(store, "dgx", SERIES)
    confirmed = rows[3].model_copy(update={"verdict": VerdictStatus.REGRESSED})

    put_row(store, confirmed)

    expected = (*rows[:3], confirmed, *rows[4:])
    assert read_history(store, "dgx", SERIES) == expected
    compact(store, "dgx", SERIES, least=1)
    assert keys(store)[0] == []
    assert read_history(store, "dgx", SERIES) == expected


def test_what_a_newer_release_says_of_a_run_outlives_the_compaction_of_an_older_one(
    store: DirectoryStore, make_rows: Callable[[int], list[HistoryRow]]
) -> None:
    rows = make_rows(COMPACT_AT)
    for row in rows:
        put_row(store, row)
    key = f"{FOLDER}/{keys(store)[0][3]}"
    document = json.loads(store.get(key) or b"")
    document["moon_phase"] = document["summary"]["moon_phase"] = "full"
    store.put(key, json.dumps(document).encode())

    compact(store, "dgx", SERIES)

    texts = [json.loads(text) for _key, text in read_objects(store, FOLDER).texts()]
    kept = [(text.get("moon_phase"), text["summary"].get("moon_phase")) for text in texts]
    assert kept[2:5] == [(None, None), ("full", "full"), (None, None)]
    assert texts[2] == json.loads(rows[2].model_dump_json())
    assert read_history(store, "dgx", SERIES) == tuple(rows)


def test_an_earlier_attempt_that_is_written_late_does_not_count(
    store: DirectoryStore, make_rows: Callable[[int], list[HistoryRow]]
) -> None:
    (row,) = make_rows(1)
    second = row.model_copy(update={"attempt": 2})

    for each in (second, row):
        put_row(store, each)

    assert read_history(store, "dgx", SERIES) == (second,)


@pytest.mark.parametrize("nights", [50, 1826])
def test_reading_takes_a_few_requests_however_long_the_history_is(
    store: DirectoryStore, make_rows: Callable[[int], list[HistoryRow]], nights: int
) -> None:
    rows = make_rows(nights)
    write_generation(store, "dgx", SERIES, rows[:-5], datetime.now(UTC))
    for row in rows[-5:]:
        put_row(store, row)
    counting = CountingStore(settings(store))

    assert read_history(counting, "dgx", SERIES) == tuple(rows)
    assert counting.requests == 2 + 1 + 5


def test_a_generation_is_a_table_that_anybody_can_read(
    store: DirectoryStore, make_rows: Callable[[int], list[HistoryRow]]
) -> None:
    rows = make_rows(COMPACT_AT)
    for row in rows:
        put_row(store, row)
    compact(store, "dgx", SERIES)

    table = pq.read_table(io.BytesIO(store.get(f"{FOLDER}/compacted/00000001.parquet") or b"")).to_pydict()

    assert table["night"] == [row.night for row in rows]
    assert [HistoryRow.model_validate_json(text) for text in table["row"]] == rows


# --- deaths ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("done", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("generations", [0, 1])
def test_a_compaction_may_be_killed_at_each_of_its_changes(
    store: DirectoryStore, make_rows: Callable[[int], list[HistoryRow]], generations: int, done: bool
) -> None:
    rows = make_rows(COMPACT_AT * (generations + 1))
    for row in rows[: COMPACT_AT * generations]:
        put_row(store, row)
    compact(store, "dgx", SERIES)
    for row in rows[COMPACT_AT * generations :]:
        put_row(store, row)
    died = 0
    # Each death leaves what the next compaction begins with: all of it, all but the generation, and so on.
    for at in range(1, 100):
        mortal = MortalStore(settings(store), at, done=done)
        try:
            compact(mortal, "dgx", SERIES, least=1)
        except Killed:
            died += 1
            assert read_history(store, "dgx", SERIES) == tuple(rows)
            assert find_series(store, "llama3-8b")[0].rows == len(rows)
            continue
        break

    assert died >= 2
    assert read_history(store, "dgx", SERIES) == tuple(rows)
    assert keys(store)[0] == []


@pytest.mark.parametrize("done", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("at", [1, 2, COMPACT_AT, COMPACT_AT + 1])
def test_after_any_one_death_the_next_compaction_ends_the_work(
    store: DirectoryStore, make_rows: Callable[[int], list[HistoryRow]], at: int, done: bool
) -> None:
    rows = make_rows(COMPACT_AT)
    for row in rows:
        put_row(store, row)

    with pytest.raises(Killed):
        compact(MortalStore(settings(store), at, done=done), "dgx", SERIES)

    assert read_history(store, "dgx", SERIES) == tuple(rows)
    compact(store, "dgx", SERIES, least=1)
    assert keys(store) == ([], ["compacted/00000001.parquet"])
    assert read_history(store, "dgx", SERIES) == tuple(rows)


# --- side by side ----------------------------------------------------------------------------------------------------


def test_readers_see_every_row_once_while_rows_are_added_and_compacted(
    store: DirectoryStore, make_rows: Callable[[int], list[HistoryRow]]
) -> None:
    rows = make_rows(60)
    written: list[HistoryRow] = []
    ended = threading.Event()

    def write() -> None:
        try:
            for row in rows:
                put_row(store, row)
                written.append(row)
        finally:
            ended.set()

    def tidy() -> int:
        generations = 0
        while not ended.is_set():
            generations += bool(compact(store, "dgx", SERIES, least=3))
        return generations

    def look() -> int:
        looks = 0
        while not ended.is_set():
            before = list(written)
            seen = [row.run_key for row in read_history(store, "dgx", SERIES)]
            assert len(seen) == len(set(seen))
            assert {row.run_key for row in before} <= set(seen)
            looks += 1
        return looks

    with ThreadPoolExecutor(5) as threads:
        readers = [threads.submit(look) for _ in range(2)]
        compactions = [threads.submit(tidy) for _ in range(2)]
        threads.submit(write).result()

    assert all(reader.result() for reader in readers)
    assert sum(each.result() for each in compactions) >= 2
    assert read_history(store, "dgx", SERIES) == tuple(rows)


class PausedStore(DirectoryStore):
    """Does something else at one moment: before the n-th listing goes on."""

    def __init__(self, settings: StoreSettings, at: int, meanwhile: Callable[[], object]) -> None:
        super().__init__(settings)
        self.at, self.meanwhile, self.listings = at, meanwhile, 0

    def list(self, prefix: str, begin: str = "") -> Iterator[ObjectInfo]:
        self.listings += 1
        if self.listings == self.at:
            self.meanwhile()
        return super().list(prefix, begin)

    def put_if_absent(self, key: str, data: bytes) -> bool:
        if self.at == 0:
            self.at = -1
            self.meanwhile()
        return super().put_if_absent(key, data)


@pytest.mark.parametrize("at", [1, 2])
def test_a_reader_that_a_compaction_overtakes_sees_all_rows(
    store: DirectoryStore, make_rows: Callable[[int], list[HistoryRow]], at: int
) -> None:
    rows = make_rows(COMPACT_AT)
    for row in rows:
        put_row(store, row)
    overtaken = PausedStore(settings(store), at, lambda: compact(store, "dgx", SERIES))

    assert read_history(overtaken, "dgx", SERIES) == tuple(rows)
    assert keys(store)[0] == []


@pytest.mark.parametrize("at", [1, 2, 3, 0, 4])
def test_of_two_compactions_at_once_the_slower_one_spoils_nothing(
    store: DirectoryStore, make_rows: Callable[[int], list[HistoryRow]], at: int
) -> None:
    rows = make_rows(2 * COMPACT_AT)
    for row in rows[:COMPACT_AT]:
        put_row(store, row)

    def meanwhile() -> None:
        compact(store, "dgx", SERIES)
        for row in rows[COMPACT_AT:]:
            put_row(store, row)

    compact(PausedStore(settings(store), at, meanwhile), "dgx", SERIES)

    assert read_history(store, "dgx", SERIES) == tuple(rows)


def test_a_compaction_that_slept_for_days_removes_nothing_that_later_generations_lack(
    store: DirectoryStore, make_rows: Callable[[int], list[HistoryRow]]
) -> None:
    rows = make_rows(3 * COMPACT_AT)
    for row in rows[:COMPACT_AT]:
        put_row(store, row)

    def meanwhile() -> None:
        for number in (1, 2):
            for row in rows[COMPACT_AT * number : COMPACT_AT * (number + 1)]:
                put_row(store, row)
            compact(store, "dgx", SERIES)
        # As if the second had been written days ago: the first is gone, and its number free.
        store.delete(f"{FOLDER}/compacted/00000001.parquet")
        # A row that the generations since have not seen.
        put_row(store, rows[0].model_copy(update={"attempt": 2}))

    swallowed = compact(PausedStore(settings(store), 0, meanwhile), "dgx", SERIES)

    assert swallowed == 0
    assert read_history(store, "dgx", SERIES) == (rows[0].model_copy(update={"attempt": 2}), *rows[1:])


# --- damage ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("damage", [b"", b"PAR1", b"cut", b"flipped"])
def test_a_damaged_generation_is_named_and_nothing_is_read_around_it(
    store: DirectoryStore, make_rows: Callable[[int], list[HistoryRow]], damage: bytes
) -> None:
    write_generation(store, "dgx", SERIES, make_rows(300), datetime.now(UTC))
    key = f"{FOLDER}/compacted/00000001.parquet"
    whole = store.get(key) or b""
    flipped = bytearray(whole)
    flipped[len(whole) // 2] ^= 0x10
    store.put(key, {b"cut": whole[:-100], b"flipped": bytes(flipped)}.get(damage, damage))

    with pytest.raises(DamagedData, match=r"00000001\.parquet.*not a table of history rows.*--rebuild"):
        read_history(store, "dgx", SERIES)


def test_a_compaction_removes_nothing_where_a_row_is_damaged(
    store: DirectoryStore, make_rows: Callable[[int], list[HistoryRow]]
) -> None:
    for row in make_rows(COMPACT_AT):
        put_row(store, row)
    store.put(f"{FOLDER}/2025-01-03-bad.json", b"{")

    with pytest.raises(DamagedData, match=r"2025-01-03-bad\.json"):
        compact(store, "dgx", SERIES)

    assert len(keys(store)[0]) == COMPACT_AT + 1


def test_a_series_without_objects_has_no_rows(store: DirectoryStore) -> None:
    found = read_objects(store, FOLDER)

    assert (found.rows, found.generation, found.history_rows()) == ((), 0, ())
    assert compact(store, "dgx", SERIES, least=0) == 0
