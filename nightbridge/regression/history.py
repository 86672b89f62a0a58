"""History: one small object per run in the store, `history/<cluster>/<series>/<night>-<run key>.json`.

A row says what the run was (pins, image, nodes), what became of it, and what it measured. It is written once the
verdict is known; a new attempt of the same run replaces it. Writers never touch each other's objects, so many runs
may add their rows at the same time.
"""

import re
from collections.abc import Iterator, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import quote, unquote

from pydantic import AwareDatetime, Field, ValidationError

from nightbridge.errors import DamagedData
from nightbridge.models import (
    Model,
    Outcome,
    PinnedRepository,
    RunRecord,
    Summary,
    Verdict,
    VerdictStatus,
    slug,
)
from nightbridge.store.objects import ObjectStore

if TYPE_CHECKING:
    import pandas as pd

ROOT = "history"


class StoredSeries(NamedTuple):
    """A series of the store, and how many rows it has."""

    cluster: str
    series: str
    rows: int
    last_night: str


class Pin(Model):
    """A commit that a run was pinned to, without the place of its checkout."""

    url: str
    ref: str = ""
    commit: str = Field(description="Full 40-character commit.")
    describe: str = Field("", description="`git describe --tags --always` of the commit.")
    subject: str = ""
    committed_at: datetime | None = None


class HistoryRow(Model):
    """One run, as later nights and the report need it."""

    run_key: str
    scenario: str = ""
    night: str
    test_id: str
    series: str
    cluster: str
    attempt: int = Field(ge=1)
    sweep_point: dict[str, Any] = Field({})
    iteration: int = 1
    repeat: int = Field(0, description="0 for the night's own run; confirming re-runs and bisect points count up.")
    job_id: int | None = None
    nodes: str = Field("", description="Slurm's node expression, e.g. `node[1-2]`.")
    outcome: Outcome | None = None
    outcome_reason: str = ""
    verdict: VerdictStatus | None = Field(None, description="None while nobody has judged the run.")
    megatron_bridge: Pin
    nemo_run: Pin | None = Field(None, description="None for a workload without a launcher.")
    image: str | None = Field(None, description="Image reference; None without a container.")
    image_digest: str | None = None
    summary: Summary
    store_url: str = ""
    prefix: str = Field("", description="Where the attempt's objects are, relative to the store.")
    harvested_at: AwareDatetime


def row_of(record: RunRecord, verdict: Verdict | None) -> HistoryRow:
    """The history row of a run; None while nobody has judged it."""
    job = record.job
    return HistoryRow(
        run_key=record.spec.run_key,
        scenario=record.spec.scenario,
        night=record.spec.night,
        test_id=record.spec.test.id,
        series=record.series,
        cluster=job.cluster,
        attempt=job.attempt,
        sweep_point=record.spec.sweep_point,
        iteration=record.spec.iteration,
        repeat=record.spec.repeat,
        job_id=job.job_id,
        nodes=job.status.nodes if job.status else "",
        outcome=job.outcome,
        outcome_reason=job.outcome_reason,
        verdict=verdict.status if verdict else None,
        megatron_bridge=_pin_of(record.checkout.megatron_bridge),
        nemo_run=_pin_of(record.checkout.nemo_run) if record.checkout.nemo_run else None,
        image=record.image.reference,
        image_digest=record.image.digest,
        summary=record.summary,
        store_url=record.store_url,
        prefix=record.prefix,
        harvested_at=record.harvested_at,
    )


def add(store: ObjectStore, row: HistoryRow) -> None:
    """Write a row; writing it again changes nothing, and a later attempt of the same run replaces it."""
    key = f"{_folder(row.cluster, row.series)}{row.night}-{row.run_key}.json"
    store.put(key, row.model_dump_json(indent=2).encode() + b"\n")


def read_history(store: ObjectStore, cluster: str, series: str) -> tuple[HistoryRow, ...]:
    """All rows of a series, by night and, within a night, by the time of their harvest.

    Raises:
        DamagedData: A row cannot be read. Leaving it out would move the baseline unseen.
    """
    rows = _read_rows(store, _folder(cluster, series))
    return tuple(sorted(rows, key=lambda row: (row.night, row.harvested_at)))


def find_series(store: ObjectStore, test_id: str, cluster: str | None = None) -> tuple[StoredSeries, ...]:
    """The series of a test, the one with the latest night first: of all clusters, or of one.

    Only keys are listed, nothing is read. A test that was configured anew has one series per configuration.
    """
    ours = re.compile(rf"{ROOT}/([^/]+)/({re.escape(slug(test_id))}-[0-9a-f]{{12}})/(.+)-.+-\3-[0-9a-f]{{10}}\.json")
    nights: dict[tuple[str, str], list[str]] = {}
    for found in store.list(ROOT if cluster is None else f"{ROOT}/{quote(cluster, safe='')}"):
        if match := ours.fullmatch(found.key):
            nights.setdefault((unquote(match[1]), match[2]), []).append(match[3])
    known = (StoredSeries(*names, rows=len(each), last_night=max(each)) for names, each in nights.items())
    return tuple(sorted(known, key=lambda one: (one.last_night, one.rows, one), reverse=True))


def history_frame(rows: Sequence[HistoryRow]) -> "pd.DataFrame":
    """The rows as a table for people who work in Python: one line per run, its measurements as columns of their own.

    Pins become `megatron_bridge` and `nemo_run` (the commits) and their `..._describe`; `harvested_at` is UTC.
    """
    import pandas as pd

    lines = []
    for row in rows:
        line = row.model_dump(exclude={"summary", "megatron_bridge", "nemo_run", "outcome", "verdict"})
        for name in ("megatron_bridge", "nemo_run"):
            pin: Pin | None = getattr(row, name)
            line |= {
                name: pin.commit if pin else None,
                f"{name}_describe": pin.describe if pin else None,
                f"{name}_subject": pin.subject if pin else None,
            }
        line |= {name: value.value if (value := getattr(row, name)) else None for name in ("outcome", "verdict")}
        lines.append(line | row.summary.model_dump())
    if not lines:
        fields = [name for name in HistoryRow.model_fields if name != "summary"]
        return pd.DataFrame(columns=[*fields, *Summary.model_fields])
    return pd.DataFrame(lines)


def _read_rows(store: ObjectStore, folder: str) -> Iterator[HistoryRow]:
    for found in store.list(folder):
        data = store.get(found.key)
        if data is None:
            continue  # deleted since it was listed
        try:
            yield HistoryRow.model_validate_json(data)
        except ValidationError as error:
            problem = error.errors(include_input=False, include_url=False)[0]
            raise DamagedData(
                f"not a history row ({problem['msg']})",
                thing=store.url_of(found.key),
                advice="Delete it, or write it again from the run's manifest",
            ) from error


def _folder(cluster: str, series: str) -> str:
    return f"{ROOT}/{quote(cluster, safe='')}/{series}/"


def _pin_of(repository: PinnedRepository) -> Pin:
    return Pin(
        url=repository.url,
        ref=repository.ref,
        commit=repository.commit,
        describe=repository.describe,
        subject=repository.subject,
        committed_at=repository.committed_at,
    )
