"""The objects of a series: one small object per row, merged from time to time into one Parquet object with all rows.

    history/<cluster>/<series>/<night>-<run key>.<stamp>.json    a version of a row; written once, never changed
    history/<cluster>/<series>/compacted/<generation>.parquet    every row of the generation before it, and more

No object is ever written twice, and nothing is removed before something that has it is there, so writers, compactions
and readers need no lock:

* A row is written under a name of its own. Of several versions of one run's row (a confirmed verdict, a later attempt)
  one counts by a rule that does not depend on where they lie, so a row that is in two objects is still one row.
* A compaction reads everything, writes the next generation only if no other process has, and only then removes what
  it has merged. Killed at any moment it leaves rows in both, and the next compaction removes the small ones.
* A reader lists the rows first and the generations afterwards: a row that was removed before it could be listed is in a
  generation that was there before. It restarts when an object vanishes before it is read.
* A generation is removed a day after the next one was written. No listing takes that long, so every listing has the
  newest generation of its beginning, or a newer one.

Reading takes two listings, one Parquet object and fewer than `COMPACT_AT` small ones, however long the history is.

The rows' text is kept as it is, beside columns to choose rows by, and a column for each plain value that is for other
tools (`table_of`). So a row which a later version of the model reads is read the same from both. It lies in groups of
`ROWS_TOGETHER`, oldest first: whoever wants the latest nights decodes only the last groups.
"""

import io
import itertools
import re
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import PurePosixPath
from typing import Any, NamedTuple, TypeVar

from pydantic import ValidationError
from pydantic_core import from_json, to_json

from nightbridge.errors import DamagedData, TransientError
from nightbridge.history.rows import HistoryRow, columns, table_of
from nightbridge.models import has_date, night_order, utc_now
from nightbridge.store.object_store import ObjectInfo, ObjectStore, folder_of_series
from nightbridge.store.parallel import in_parallel

ROWS_TOGETHER = 128

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)

NEWEST_GROUPS = 2
"""Groups that are looked at first where the newest rows may be all that is wanted."""

DAMAGE_ADVICE = "Rebuild the history from the runs: nightbridge history TEST_ID --rebuild"


class RowKey(NamedTuple):
    """What rows are chosen by. Of two versions of a run's row the one with the greater `precedence` counts.

    `harvested_at` is in microseconds since 1970; `stamp` says when the version was written, and is empty for rows of
    a time when they had none.
    """

    night: str
    harvested_at: int
    run_key: str
    attempt: int
    stamp: str
    repeat: int
    verdict: str | None
    outcome: str | None

    @property
    def order(self) -> str:
        """What the rows of several nights sort by."""
        return night_order(self.night, _EPOCH + timedelta(microseconds=self.harvested_at))

    @property
    def precedence(self) -> tuple[int, str]:
        """Later attempts before earlier ones, and later versions of an attempt before earlier ones."""
        return self.attempt, self.stamp


class Pack:
    """The rows of one Parquet object, decoded on first use.

    Args:
        data: The object.
        url: Its name in messages.

    Raises:
        DamagedData: It is no pack. Methods raise it, too: parts of the object are only looked at when needed.
    """

    def __init__(self, data: bytes, url: str) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        self._url = url
        with self._reading():
            self._file = pq.ParquetFile(pa.BufferReader(data), page_checksum_verification=True)

    def row_keys(self, group: int = 0) -> list[RowKey]:
        """The key of every row from a group of `ROWS_TOGETHER` on, in the order in which they lie: by night."""
        with self._reading():
            groups = range(group, self.groups)
            table = self._file.read_row_groups(groups, columns=list(RowKey._fields), use_threads=False)
            columns = (table[name].to_pylist() for name in RowKey._fields)
            return [RowKey(*values) for values in zip(*columns, strict=True)]

    @property
    def groups(self) -> int:
        """How many groups of `ROWS_TOGETHER` rows it has."""
        return int(self._file.num_row_groups)

    @property
    def has_all_columns(self) -> bool:
        """Whether every value has a column; packs of earlier versions have only the rows' text."""
        return columns().keys() <= set(self._file.schema_arrow.names)

    def texts(self, first: int = 0) -> list[str]:
        """The JSON of the rows from index `first` on."""
        with self._reading():
            groups = range(first // ROWS_TOGETHER, self.groups)
            table = self._file.read_row_groups(groups, columns=["row"], use_threads=False)
            found: list[str] = table["row"].to_pylist()
        return found[first % ROWS_TOGETHER :]

    @contextmanager
    def _reading(self) -> Iterator[None]:
        import pyarrow as pa

        try:
            yield
        except (pa.ArrowException, OSError, KeyError, TypeError) as error:
            raise DamagedData("not a table of history rows", subject=self._url, advice=DAMAGE_ADVICE) from error


def packed(rows: Sequence[tuple[RowKey, str]]) -> bytes:
    """The Parquet object of some rows, each with its JSON, oldest first."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    numbers = ("harvested_at", "attempt", "repeat")
    schema = pa.schema([(name, pa.int64() if name in numbers else pa.string()) for name in RowKey._fields])
    chosen_by = pa.Table.from_pylist([key._asdict() for key, _text in rows], schema)
    texts = [text for _key, text in rows]
    others = table_of(texts, [name for name in columns() if name not in RowKey._fields])
    names = [*RowKey._fields, *others.column_names, "row"]
    table = pa.table([*chosen_by.columns, *others.columns, pa.array(texts)], names=names)
    buffer = io.BytesIO()
    pq.write_table(
        table,
        buffer,
        row_group_size=ROWS_TOGETHER,
        compression="zstd",
        use_dictionary=[name for name in names if name not in ("run_key", "stamp", "harvested_at", "row")],
        write_statistics=False,
        write_page_checksum=True,
    )
    return buffer.getvalue()


ROOT = "history"
COMPACTED = "compacted"

COMPACT_AT = 16
"""Small objects of a series that are worth a compaction."""

SUPERSEDED_FOR = timedelta(days=1)
"""Age of a generation at which the one before it is removed."""

MAX_READINGS = 20
"""Objects can only vanish under a reader when a compaction ends, and there is one in many nights."""

_GENERATION = re.compile(rf".+/{COMPACTED}/(\d{{8}})\.parquet")


class _Row(NamedTuple):
    """The version of a row that counts: its position in the newest generation, or the row of a small object.

    `data`: that object, which may have more than this release knows.
    """

    key: RowKey
    position: int
    row: HistoryRow | None
    data: bytes = b""

    @property
    def text(self) -> str:
        """The JSON of a small object's row, with the fields that a newer release has given it."""
        known = self.row.model_dump(mode="json") if self.row else {}
        return to_json(_merged(from_json(self.data), known), inf_nan_mode="null").decode()


_AnyRow = TypeVar("_AnyRow", _Row, tuple[RowKey, str])


class SeriesObjects(NamedTuple):
    """What a series has: the rows that count, by night and harvest, and the objects that they were found in.

    `cut`: the night's `order` at which the rows were cut off, of which some may be missing, as all earlier ones; empty
    where all rows are there.
    """

    rows: tuple[_Row, ...]
    generation: int
    pack: Pack | None
    small: tuple[str, ...]
    cut: str = ""

    @property
    def keys(self) -> list[RowKey]:
        """The keys of the rows that count."""
        return [row.key for row in self.rows]

    def history_rows(self, since: str = "") -> tuple[HistoryRow, ...]:
        """The rows from a night on, or from its `order`; only those are decoded.

        Raises:
            DamagedData: A row cannot be read. Leaving it out would move the baseline unseen.
        """
        first_order = min((key.order for key in self.keys if key.night == since and not has_date(since)), default=since)
        wanted = [row for row in self.rows if row.key.order >= first_order]
        indexes = [row.position for row in wanted if row.row is None]
        first = min(indexes, default=0)
        texts = self.pack.texts(first) if self.pack and indexes else []
        return tuple(row.row or _parsed(texts[row.position - first], row.key.run_key) for row in wanted)

    def texts(self) -> list[tuple[RowKey, str]]:
        """Every row with its JSON, as a generation keeps it."""
        packed_texts = self.pack.texts() if self.pack else []
        return [(row.key, row.text if row.row else packed_texts[row.position]) for row in self.rows]


def series_folder(cluster: str, series: str) -> str:
    """Where the objects of a series are."""
    return folder_of_series(ROOT, cluster, series)


def put_row(store: ObjectStore, row: HistoryRow) -> None:
    """Write a version of a row, under a name that no other has; a later one, or attempt of its run, replaces it."""
    key = f"{series_folder(row.cluster, row.series)}/{row.night}-{row.run_key}.{new_stamp()}.json"
    store.put(key, row.model_dump_json(indent=2).encode() + b"\n")


def new_stamp(at: datetime | None = None) -> str:
    """A text that sorts by time and that no other writer has: microseconds since 1970, and a random end."""
    return f"{_microseconds(at or utc_now()):014x}{secrets.token_hex(3)}"


def key_of(row: HistoryRow, stamp: str) -> RowKey:
    """What a row is chosen by."""
    return RowKey(
        night=row.night,
        harvested_at=_microseconds(row.harvested_at),
        run_key=row.run_key,
        attempt=row.attempt,
        stamp=stamp,
        repeat=row.repeat,
        verdict=row.verdict,
        outcome=row.outcome,
    )


def read_objects(store: ObjectStore, folder: str, groups: int | None = None) -> SeriesObjects:
    """Read what a series has, every row once.

    Args:
        store: The store.
        folder: The series'.
        groups: How many groups of its newest rows are wanted: years of others then stay undecoded. None for all.

    Raises:
        DamagedData: An object is no row and no generation.
        TransientError: Objects vanish faster than they can be read.
    """
    for _ in range(MAX_READINGS):
        # In this order: see the module's docstring.
        small = small_objects(folder, store.list(folder))
        generations = list_generations(store, folder)
        wanted = [*small, *([generations[-1].key] if generations else [])]
        pairs = zip(wanted, in_parallel(store.get, wanted), strict=True)
        found = {key: data for key, data in pairs if data is not None}
        if len(found) == len(wanted):
            return _objects(store, folder, found, groups)
    raise TransientError("the history changes faster than it can be read", subject=store.url_of(folder))


def small_objects(folder: str, listed: Iterable[ObjectInfo]) -> list[str]:
    """Of a listing, the keys of a series' small objects."""
    return [found.key for found in listed if not found.key.startswith(f"{folder}/{COMPACTED}/")]


def list_generations(store: ObjectStore, folder: str) -> list[ObjectInfo]:
    """The series' generations, oldest first."""
    return [each for each in store.list(f"{folder}/{COMPACTED}") if _GENERATION.fullmatch(each.key)]


def compact(store: ObjectStore, cluster: str, series: str, least: int = COMPACT_AT) -> int:
    """Merge a series' small objects into the next generation, where there are at least so many; return how many.

    A generation that an earlier version wrote gets the columns that it lacks.

    Safe beside writers, readers and other compactions: of two at once the later one leaves everything as it is.

    Raises:
        DamagedData: An object cannot be read; nothing was changed.
    """
    folder = series_folder(cluster, series)
    if len(small_objects(folder, store.list(folder))) < least:
        return 0
    found = read_objects(store, folder)
    number = found.generation
    if any(row.row for row in found.rows) or (found.pack and not found.pack.has_all_columns):
        number += 1
        if not _put_generation(store, folder, number, found.texts()):
            return 0
    return len(found.small) if _remove_merged(store, folder, number, found.small) else 0


def write_generation(
    store: ObjectStore, cluster: str, series: str, rows: Sequence[HistoryRow], at: datetime
) -> tuple[str, ...]:
    """Write a generation of given rows and all that can be read; return what could not be read, in words.

    A given row takes the place of what the series has of its run, unless that says the same or was written after `at`.
    Small objects that cannot be read go where the given rows have their run; the others stay, to be looked at.

    Args:
        store: Where to.
        cluster: Name of the cluster.
        series: The series.
        rows: Its rows, as the runs themselves say.
        at: When reading the runs began: what others have written since is newer.
    """
    folder = series_folder(cluster, series)
    given = {row.run_key: (key_of(row, new_stamp(at)), row.model_dump_json()) for row in rows}
    while True:
        small = small_objects(folder, store.list(folder))
        generations = list_generations(store, folder)
        newest = _number(generations[-1].key) if generations else 0
        found, damaged = _readable(store, folder, small, generations)
        best = _best(found)
        for run_key, (key, text) in given.items():
            known = best.get(run_key)
            if known is None or (known[1] != text and key.precedence > known[0].precedence):
                best[run_key] = (key, text)
        ordered = sorted(best.values(), key=lambda row: (row[0].order, row[0]))
        if not best or _put_generation(store, folder, newest + 1, ordered):
            break
    replaced = {key for key in damaged if any(run_key in key for run_key in given)}
    _remove_merged(store, folder, newest + 1, [key for key in small if key not in damaged or key in replaced])
    return tuple(text for key, text in damaged.items() if key not in replaced)


def _remove_merged(store: ObjectStore, folder: str, number: int, small: Iterable[str]) -> bool:
    """Remove small objects that generation `number` has, and what it supersedes; return whether that was possible.

    One that was read long ago may have been written a second time, after its successors were: those that the newest
    generation was made from are then not known to have all that it has.
    """
    generations = list_generations(store, folder)
    if not generations or _number(generations[-1].key) > number:
        return False
    for key in small:
        store.delete(key)
    oldest = utc_now() - SUPERSEDED_FOR
    for superseded, successor in itertools.pairwise(generations):
        if successor.modified is not None and successor.modified < oldest:
            store.delete(superseded.key)
    return True


def _objects(store: ObjectStore, folder: str, data: Mapping[str, bytes], groups: int | None = None) -> SeriesObjects:
    small = [key for key in data if not key.startswith(f"{folder}/{COMPACTED}/")]
    newest = next((key for key in data if key not in small), None)
    pack = Pack(data[newest], store.url_of(newest)) if newest else None
    first = max(0, pack.groups - groups) if pack and groups else 0
    keys = pack.row_keys(first) if pack else []
    packed_rows = [_Row(key, position, None) for position, key in enumerate(keys, first * ROWS_TOGETHER)]
    # The same version may be in both; that of the generation, which comes first, is then the one to keep.
    best = _best([*packed_rows, *(_small_row(store, key, data[key]) for key in small)])
    rows = tuple(sorted(best.values(), key=lambda row: (row.key.order, row.key)))
    cut = keys[0].order if first else ""
    return SeriesObjects(rows, _number(newest) if newest else 0, pack, tuple(small), cut)


def _best(rows: Iterable[_AnyRow]) -> dict[str, _AnyRow]:
    """Of each run's versions the one that counts; of equal ones the first."""
    best: dict[str, _AnyRow] = {}
    for row in rows:
        key = row[0]
        if key.run_key not in best or key.precedence > best[key.run_key][0].precedence:
            best[key.run_key] = row
    return best


def _small_row(store: ObjectStore, key: str, data: bytes) -> _Row:
    row = _parsed(data, store.url_of(key))
    # Of a time when rows had no stamp: the name ends with the run key, and every later version counts before it.
    stamp = key.removesuffix(".json").rpartition("/")[2].partition(".")[2]
    return _Row(key_of(row, stamp), -1, row, data)


def _merged(document: Mapping[str, Any], known: Mapping[str, Any]) -> dict[str, Any]:
    """A document with the values that are known of it, at every depth; what else it has stays."""
    both = {
        name: _merged(document[name], value)
        for name, value in known.items()
        if isinstance(value, dict) and isinstance(document.get(name), dict)
    }
    return {**document, **known, **both}


def _readable(
    store: ObjectStore, folder: str, small: Sequence[str], generations: Sequence[ObjectInfo]
) -> tuple[list[tuple[RowKey, str]], dict[str, str]]:
    """Every row of every object that can be read, and what is wrong with each of the others, by key."""
    texts: list[tuple[RowKey, str]] = []
    damaged: dict[str, str] = {}
    for key in (*(generation.key for generation in generations), *small):
        data = store.get(key)
        try:
            texts += _objects(store, folder, {key: data}).texts() if data is not None else ()
        except DamagedData as error:
            damaged[key] = str(error)
    return texts, damaged


def _put_generation(store: ObjectStore, folder: str, number: int, rows: Sequence[tuple[RowKey, str]]) -> bool:
    return store.put_if_absent(f"{folder}/{COMPACTED}/{number:08}.parquet", packed(rows))


def _number(generation: str) -> int:
    """The number of a generation, of those that `list_generations` has."""
    return int(PurePosixPath(generation).stem)


def _parsed(data: bytes | str, where: str) -> HistoryRow:
    try:
        return HistoryRow.model_validate_json(data)
    except ValidationError as error:
        problem = error.errors(include_input=False, include_url=False)[0]
        raise DamagedData(f"not a history row ({problem['msg']})", subject=where, advice=DAMAGE_ADVICE) from error


def _microseconds(time: datetime) -> int:
    return (time - _EPOCH) // timedelta(microseconds=1)
