"""The history again, from the runs themselves: rows are a copy of what manifests, records and verdicts say.

All rows of a series become one generation (`row_objects`), written at once: a rebuild that is killed has changed whole
series or nothing of them.
"""

import re
from collections.abc import Iterable
from typing import NamedTuple

from pydantic import ValidationError

from nightbridge.errors import DamagedData
from nightbridge.harvest.manifest import MANIFEST, load_record
from nightbridge.history.history_store import write_generation
from nightbridge.history.rows import HistoryRow, row_of
from nightbridge.models import RunRecord, Verdict, utc_now
from nightbridge.store.protocol import ObjectStore

_MANIFEST = re.compile(rf"(runs/[^/]+/[^/]+/[^/]+)/a(\d+)/{re.escape(MANIFEST)}")


class Rebuilt(NamedTuple):
    """What a rebuild did: the rows that the runs have, and what it could not read, each with the reason."""

    rows: tuple[HistoryRow, ...]
    damaged: tuple[str, ...]


def rebuild_history(store: ObjectStore, test_id: str | None = None) -> Rebuilt:
    """Write the row of every committed run again, of one test or of all.

    The last committed attempt of a run counts, and the verdict that was given on that night, not one of today. A run
    without a verdict gets a row without one, which makes no baseline. A row whose run is gone is left as it is, and so
    is one that was written while this was reading. Unreadable runs are reported and do not stop the others.
    """
    began = utc_now()
    rows: list[HistoryRow] = []
    damaged: list[str] = []
    for folder, attempt in sorted(_last_attempts(found.key for found in store.list("runs")).items()):
        try:
            record = load_record(store, f"{folder}/a{attempt}")
            if record is None or (test_id is not None and record.spec.test.id != test_id):
                continue
            row = _row(store, folder, record)
        except DamagedData as error:
            damaged.append(str(error))
            continue
        rows.append(row)
    by_series: dict[tuple[str, str], list[HistoryRow]] = {}
    for row in rows:
        by_series.setdefault((row.cluster, row.series), []).append(row)
    for (cluster, series), of_series in by_series.items():
        damaged += write_generation(store, cluster, series, of_series, began)
    return Rebuilt(tuple(rows), tuple(damaged))


def _last_attempts(keys: Iterable[str]) -> dict[str, int]:
    """The number of the last committed attempt, by the run's folder."""
    last: dict[str, int] = {}
    for key in keys:
        if match := _MANIFEST.fullmatch(key):
            last[match[1]] = max(int(match[2]), last.get(match[1], 0))
    return last


def _row(store: ObjectStore, folder: str, record: RunRecord) -> HistoryRow:
    key = f"{folder}/verdict.json"
    data = store.get(key)
    if data is None:
        return row_of(record, None)
    try:
        verdict = Verdict.model_validate_json(data)
    except ValidationError as error:
        raise DamagedData("not a verdict", thing=store.url_of(key), advice="Compare the run again") from error
    # A verdict on an earlier attempt says nothing about this one.
    return row_of(record, verdict if verdict.prefix == record.prefix else None)
