"""The history of a series: reading its rows, adding one, and writing them again from the stored runs.

A row says what the run was (pins, image, nodes), what became of it, and what it measured. It is written once the
verdict is known; a confirmed verdict or a new attempt of the same run replaces it. `history_store` says how rows are
kept; many runs may add theirs at the same time.

Rows are a copy of what manifests, records and verdicts say, so that the history can be rebuilt. All rows of a series
become one generation, written at once: a rebuild that is killed has changed whole series or nothing of them.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote, unquote

from nightbridge.errors import DamagedData, InvalidInput
from nightbridge.files import new_file
from nightbridge.harvest.manifest import MANIFEST, load_record
from nightbridge.history.history_store import (
    COMPACTED,
    NEWEST_GROUPS,
    ROOT,
    Pack,
    RowKey,
    compact,
    list_generations,
    read_objects,
    series_folder,
    write_generation,
)
from nightbridge.history.rows import COMPLETE_OUTCOMES, HistoryRow, row_of, table_of
from nightbridge.launch.config_container import ConfigContainer, parse_container
from nightbridge.models import GOOD_VERDICTS, RunSpec, StoredModel, Verdict, has_date, slug, utc_now
from nightbridge.models.series import former_series_id, series_id
from nightbridge.store.object_store import ObjectStore, folder_of_series, read_stored

ALIASES = "aliases"

DUMPED = "configs/ConfigContainer.yaml"
"""Where a stored run has the configuration that it dumped."""


class Alias(StoredModel):
    """That a series' objects lie under the name that it had before; written once, never changed."""

    series: str


class StoredSeries(NamedTuple):
    """A series of the store, and how many rows it has."""

    cluster: str
    series: str
    rows: int
    last_night: str


def series_of(store: ObjectStore, run: RunSpec, cluster: str) -> str:
    """The series of a run in a store: the name that the same configuration had before, where its history is there.

    Raises:
        DamagedData: The alias cannot be read. Without it the history would start over.
    """
    series, former = series_id(run, cluster), former_series_id(run, cluster)
    if (known := kept_as(store, cluster, series)) != series:
        return known
    if series == former or has_rows(store, cluster, series) or not has_rows(store, cluster, former):
        return series
    if store.put_if_absent(_alias_key(cluster, series), Alias(series=former).model_dump_json().encode()):
        return former
    return series_of(store, run, cluster)  # another process wrote one at the same moment


def kept_as(store: ObjectStore, cluster: str, series: str) -> str:
    """The name under which a store has a series: its own, or the one before it that was kept.

    Raises:
        DamagedData: The alias cannot be read.
    """
    key, advice = _alias_key(cluster, series), "Delete it; it is written again"
    alias = read_stored(store, key, Alias, what="not an alias", advice=advice)
    return alias.series if alias else series


def _alias_key(cluster: str, series: str) -> str:
    return f"{folder_of_series(ALIASES, cluster, series)}.json"


def has_rows(store: ObjectStore, cluster: str, series: str) -> bool:
    """Whether the store has anything of a series."""
    return next(iter(store.list(series_folder(cluster, series))), None) is not None


def read_history(store: ObjectStore, cluster: str, series: str, since: str = "") -> tuple[HistoryRow, ...]:
    """The rows of a series, by night and, within a night, by the time of their harvest: all, or since a night.

    Raises:
        DamagedData: A row cannot be read. Leaving it out would move the baseline unseen.
    """
    return read_objects(store, series_folder(cluster, series)).history_rows(since)


def read_recent(store: ObjectStore, cluster: str, series: str, night: str) -> tuple[HistoryRow, ...]:
    """The rows that a verdict on a night takes into account: as `read_history`, without the years before them.

    Raises:
        DamagedData: One of them cannot be read.
    """
    for groups in (NEWEST_GROUPS, None):
        found = read_objects(store, series_folder(cluster, series), groups)
        # A night that is named by a word is after every date; how old it is, only its own rows say.
        own = min((key.order for key in found.keys if key.night == night), default=night)
        past = [key for key in found.keys if key.night < night and key.order < own]
        since = past[first_that_counts(past)].order if past else ""
        if not found.cut or (has_date(own) and since > found.cut and any(map(is_good, past))):
            break  # nothing that counts is older than what was read
    return found.history_rows(since)


def last_good_dump(store: ObjectStore, cluster: str, series: str, night: str) -> ConfigContainer | None:
    """The `ConfigContainer.yaml` of the last good run before a night; None where there is none.

    Raises:
        DamagedData: A row cannot be read.
        InvalidInput: It holds no ConfigContainer.
    """
    past = read_recent(store, cluster, series, night)
    good = [row for row in past if row.night < night and row.prefix and is_good(row)]
    if not good:
        return None
    key = f"{good[-1].prefix}/{DUMPED}"
    data = store.get(key)
    return None if data is None else parse_container(data, Path(key))


def find_series(store: ObjectStore, test_id: str, cluster: str | None = None) -> tuple[StoredSeries, ...]:
    """The series of a test, the one with the latest night first: of all clusters, or of one.

    Keys are listed, of one cluster those of the test alone: every test of a night may look for its series. Of each of
    the test's series only the newest generation is read, and small objects only where one is of a night whose name has
    no date. A test that was reconfigured has one series per configuration.

    Raises:
        DamagedData: One of these objects cannot be read.
    """
    name = slug(test_id)
    ours = re.compile(rf"{ROOT}/([^/]+)/({re.escape(name)}-[0-9a-f]{{12}})/(.+)")
    objects: dict[tuple[str, str], list[str]] = {}
    for found in store.list(ROOT) if cluster is None else store.list(f"{ROOT}/{quote(cluster, safe='')}", f"{name}-"):
        if match := ours.fullmatch(found.key):
            objects.setdefault((unquote(match[1]), match[2]), []).append(match[3])
    known = []
    for names, keys in objects.items():
        nights = _nights(store, series_folder(*names), keys)
        if nights:
            order, last_night = max(nights.values())
            known.append((order, len(nights), StoredSeries(*names, rows=len(nights), last_night=last_night)))
    return tuple(series for _order, _rows, series in sorted(known, reverse=True))


# <night>-<test slug>-<night>-<10 hex>, the stamp of the version after it.
_SMALL = re.compile(r"(.+?)-([^/]+-\1-[0-9a-f]{10})(?:\.[0-9a-f]+)?\.json")


def _nights(store: ObjectStore, folder: str, names: Sequence[str]) -> dict[str, tuple[str, str]]:
    """The night of each run key, behind its order: from names of objects and the keys of the newest generation."""
    nights = {match[2]: (match[1], match[1]) for name in names if (match := _SMALL.fullmatch(name))}
    newest = max((f"{folder}/{name}" for name in names if name.startswith(f"{COMPACTED}/")), default=None)
    data = store.get(newest) if newest else b""
    # The next generation may just have taken its place. When a night without a date was, only its rows say.
    if data is None or not all(has_date(night) for night, _order in nights.values()):
        return {key.run_key: (key.order, key.night) for key in read_objects(store, folder).keys}
    keys = Pack(data, store.url_of(newest)).row_keys() if newest else ()
    return nights | {key.run_key: (key.order, key.night) for key in keys}


_SERIES = re.compile(rf"{ROOT}/([^/]+)/([^/]+)/.+")


class Done(NamedTuple):
    """What was done to the whole history: how many rows or series, and what could not be read, each with the reason."""

    number: int
    damaged: tuple[str, ...]


def _of_each_series(store: ObjectStore, function: Callable[[str, str], int]) -> Done:
    """Apply a function to the cluster and name of every series; a series that cannot be read stops no other."""
    found = (_SERIES.fullmatch(each.key) for each in store.list(ROOT))
    number, damaged = 0, []
    for cluster, series in dict.fromkeys((unquote(match[1]), match[2]) for match in found if match):
        try:
            number += function(cluster, series)
        except DamagedData as error:
            damaged.append(str(error))
    return Done(number, tuple(damaged))


def export_history(store: ObjectStore, path: Path) -> Done:
    """Write every row of the history into one table (`table_of`), `.parquet` or `.csv` by the file's name.

    Raises:
        InvalidInput: The name says neither.
        OSError: The file cannot be written.
    """
    import pyarrow as pa
    from pyarrow import csv, parquet

    writers = {".parquet": partial(parquet.ParquetWriter, compression="zstd"), ".csv": csv.CSVWriter}
    if path.suffix not in writers:
        raise InvalidInput("not a kind of table", subject=str(path), advice="End its name with .parquet or .csv")
    with new_file(path) as stream, writers[path.suffix](pa.PythonFile(stream, "w"), table_of([]).schema) as writer:

        def write(cluster: str, series: str) -> int:
            texts = [text for _key, text in read_objects(store, series_folder(cluster, series)).texts()]
            writer.write_table(table_of(texts))
            return len(texts)

        return _of_each_series(store, write)


def migrate_history(store: ObjectStore) -> Done:
    """Give every series one generation with all columns, and all rows in it; return how many series were changed.

    Every series is changed at once or not at all: killed, and called again, it resumes where it was.
    """

    def migrate(cluster: str, series: str) -> int:
        before = list_generations(store, series_folder(cluster, series))
        compact(store, cluster, series, least=0)
        return list_generations(store, series_folder(cluster, series)) != before

    return _of_each_series(store, migrate)


LOOK_BACK = 100
"""Nights up to the last good one that are looked at: later ones of a standing regression come on top."""

Judged = HistoryRow | RowKey
"""What of a run says whether it may be compared with."""


def is_good(row: Judged) -> bool:
    """Whether a run may make a baseline: a night's own, complete, and not worse than those before it."""
    return row.repeat == 0 and row.verdict in GOOD_VERDICTS and row.outcome in COMPLETE_OUTCOMES


def first_that_counts(past: Sequence[Judged]) -> int:
    """The index of the first row that a verdict takes into account: `LOOK_BACK` nights end with the last good run.

    Args:
        past: The rows of earlier nights, oldest first. Each night has one, and may have several, so that as many rows
            hold at least as many nights as are wanted.
    """
    last_good = next((index for index in range(len(past) - 1, -1, -1) if is_good(past[index])), len(past) - 1)
    nights: set[str] = set()
    for index in range(last_good, -1, -1):
        nights.add(past[index].night)
        if len(nights) > LOOK_BACK:
            return index + 1
    return 0


_MANIFEST = re.compile(rf"(runs/[^/]+/[^/]+/[^/]+)/a(\d+)/{re.escape(MANIFEST)}")


def rebuild_history(store: ObjectStore, test_id: str | None = None) -> Done:
    """Write the row of every committed run again, of one test or of all.

    The last committed attempt of a run counts, and the verdict that was given on that night, not one of today. A run
    without a verdict gets a row without one, which makes no baseline. A row whose run is gone is left as it is, and so
    is one that was written while this was reading. Unreadable runs are reported and do not stop the others.
    """
    began = utc_now()
    by_series: dict[tuple[str, str], list[HistoryRow]] = {}
    damaged: list[str] = []
    for folder, attempt in sorted(_last_attempts(found.key for found in store.list("runs")).items()):
        try:
            record = load_record(store, f"{folder}/a{attempt}")
            if record is None or test_id not in (None, record.spec.test.id):
                continue
            key, advice = f"{folder}/verdict.json", "Compare the run again"
            verdict = read_stored(store, key, Verdict, what="not a verdict", advice=advice)
            # A verdict on an earlier attempt says nothing about this one.
            row = row_of(record, verdict if verdict and verdict.prefix == record.prefix else None)
            by_series.setdefault((row.cluster, row.series), []).append(row)
        except DamagedData as error:
            damaged.append(str(error))
    for (cluster, series), rows in by_series.items():
        damaged += write_generation(store, cluster, series, rows, began)
    return Done(sum(map(len, by_series.values())), tuple(damaged))


def _last_attempts(keys: Iterable[str]) -> dict[str, int]:
    """The number of the last committed attempt, by the run's folder."""
    last: dict[str, int] = {}
    for key in keys:
        if match := _MANIFEST.fullmatch(key):
            last[match[1]] = max(int(match[2]), last.get(match[1], 0))
    return last
