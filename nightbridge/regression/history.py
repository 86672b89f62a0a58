"""History: what the runs of a series were and measured, one row per run, kept in the store.

A row says what the run was (pins, image, nodes), what became of it, and what it measured. It is written once the
verdict is known; a confirmed verdict or a new attempt of the same run replaces it. `row_objects` says how rows are
kept; many runs may add theirs at the same time.
"""

import re
from collections.abc import Sequence
from typing import NamedTuple
from urllib.parse import quote, unquote

from nightbridge.models import slug
from nightbridge.regression.look_back import first_that_counts
from nightbridge.regression.packs import Pack
from nightbridge.regression.row_objects import COMPACTED, ROOT, folder_of, put_row, read_objects
from nightbridge.regression.row_objects import compact as compact
from nightbridge.regression.rows import HistoryRow as HistoryRow
from nightbridge.regression.rows import Pin as Pin
from nightbridge.regression.rows import history_frame as history_frame
from nightbridge.regression.rows import row_of as row_of
from nightbridge.store.objects import ObjectStore


class StoredSeries(NamedTuple):
    """A series of the store, and how many rows it has."""

    cluster: str
    series: str
    rows: int
    last_night: str


def add(store: ObjectStore, row: HistoryRow) -> None:
    """Write a row; writing it again changes nothing, and a later version or attempt of the same run replaces it."""
    put_row(store, row)


def read_history(store: ObjectStore, cluster: str, series: str, since: str = "") -> tuple[HistoryRow, ...]:
    """The rows of a series, by night and, within a night, by the time of their harvest: all, or since a night.

    Raises:
        DamagedData: A row cannot be read. Leaving it out would move the baseline unseen.
    """
    return read_objects(store, folder_of(cluster, series)).history_rows(since)


def read_recent(store: ObjectStore, cluster: str, series: str, night: str) -> tuple[HistoryRow, ...]:
    """The rows that a verdict on a night takes into account: as `read_history`, without the years before them.

    Raises:
        DamagedData: One of them cannot be read.
    """
    found = read_objects(store, folder_of(cluster, series))
    past = [key for key in found.keys if key.night < night]
    return found.history_rows(past[first_that_counts(past)].night if past else "")


def find_series(store: ObjectStore, test_id: str, cluster: str | None = None) -> tuple[StoredSeries, ...]:
    """The series of a test, the one with the latest night first: of all clusters, or of one.

    Keys are listed; of each of the test's series only the newest generation is read, and no small object. A test that
    was reconfigured has one series per configuration.

    Raises:
        DamagedData: A generation cannot be read.
    """
    ours = re.compile(rf"{ROOT}/([^/]+)/({re.escape(slug(test_id))}-[0-9a-f]{{12}})/(.+)")
    objects: dict[tuple[str, str], list[str]] = {}
    for found in store.list(ROOT if cluster is None else f"{ROOT}/{quote(cluster, safe='')}"):
        if match := ours.fullmatch(found.key):
            objects.setdefault((unquote(match[1]), match[2]), []).append(match[3])
    known = []
    for names, keys in objects.items():
        nights = _nights(store, folder_of(*names), keys)
        if nights:
            known.append(StoredSeries(*names, rows=len(nights), last_night=max(nights.values())))
    return tuple(sorted(known, key=lambda one: (one.last_night, one.rows, one), reverse=True))


# <night>-<test slug>-<night>-<10 hex>, the stamp of the version after it.
_SMALL = re.compile(r"(.+?)-([^/]+-\1-[0-9a-f]{10})(?:\.[0-9a-f]+)?\.json")


def _nights(store: ObjectStore, folder: str, names: Sequence[str]) -> dict[str, str]:
    """The night of each run key, from the names of a series' objects and the keys of its newest generation."""
    nights = {match[2]: match[1] for name in names if (match := _SMALL.fullmatch(name))}
    newest = max((f"{folder}/{name}" for name in names if name.startswith(f"{COMPACTED}/")), default=None)
    data = store.get(newest) if newest else None
    if newest and data is None:  # the next generation has just taken its place
        return {key.run_key: key.night for key in read_objects(store, folder).keys}
    if newest and data is not None:
        nights |= {key.run_key: key.night for key in Pack(data, store.url_of(newest)).row_keys()}
    return nights
