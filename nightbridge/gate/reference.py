"""A stored run against the run that its test names: `[gate] reference = "RUN KEY or TEST ID"`.

Two programs that should compute the same, such as one model on two grids and on one, are run with the same seed and
data, and their losses are laid over each other. The first iteration has seen no update yet: what differs there is the
model or the data. From the second on, the order of additions differs, and a band says how far that may lead.

It fails closed: without the reference, or without an iteration of either, the gate fails.
"""

from typing import TYPE_CHECKING

from nightbridge.errors import DamagedData, PermanentError
from nightbridge.gate.gate import COMPLETE_OUTCOMES, GoldenAnswer
from nightbridge.harvest.manifest import METRICS, committed_attempts
from nightbridge.history.reading import find_series, read_history
from nightbridge.models import RunRecord
from nightbridge.store.protocol import ObjectStore

if TYPE_CHECKING:
    import pandas as pd


def reference_answer(store: ObjectStore, record: RunRecord) -> GoldenAnswer | None:
    """What the reference says about a stored run; None for a test that names none.

    Raises:
        DamagedData: The scalars of one of the two are not what was committed.
    """
    gate = record.spec.test.gate
    if gate.reference is None:
        return None
    try:
        prefix = reference_prefix(store, record)
        theirs, own = read_scalars(store, prefix), read_scalars(store, record.prefix)
    except PermanentError as error:
        if isinstance(error, DamagedData):
            raise
        return GoldenAnswer(whole=False, as_good=True, reasons=(f"reference {gate.reference}: {error.what}",))
    from nightbridge.goldens.parity import LOSS, curve_of, follow

    found = follow(curve_of(theirs, LOSS), curve_of(own, LOSS), gate.reference_rules)
    run_key = prefix.split("/")[-2]
    return GoldenAnswer(
        whole=found.is_complete,
        as_good=not found.beyond,
        reasons=tuple(f"reference {run_key}: {fault}" for fault in found.faults),
        run_key=run_key,
    )


def reference_prefix(store: ObjectStore, record: RunRecord) -> str:
    """Where the reference of a run lies: the run of that key, else the newest whole run of that test until this night.

    Raises:
        PermanentError: The store has neither.
        DamagedData: The test's history cannot be read.
    """
    name = record.spec.test.gate.reference or ""
    if attempts := committed_attempts(store, name):
        return attempts[-1]
    cluster, night = record.job.cluster, record.spec.night
    rows = [
        row
        for series in find_series(store, name, cluster)
        for row in read_history(store, cluster, series.series)
        if row.test_id == name and row.night <= night and not row.repeat and row.outcome in COMPLETE_OUTCOMES
    ]
    if not rows:
        raise PermanentError(
            "no such run, and no complete run of such a test up to this night",
            thing=name,
            advice="Name a stored run, or a test that has run on this cluster",
        )
    return max(rows, key=lambda row: (row.night, row.harvested_at)).prefix


def read_scalars(store: ObjectStore, prefix: str) -> "pd.DataFrame":
    """The scalar table of a stored run: tag, step, value, superseded.

    Raises:
        DamagedData: There is none, or it is no table of scalars.
    """
    import io

    import pandas as pd
    import pyarrow as pa

    key = f"{prefix}/{METRICS}"
    data = store.get(key)
    if data is None:
        raise DamagedData("no scalars", thing=store.url_of(key), advice="Harvest the run again")
    try:
        return pd.read_parquet(io.BytesIO(data), columns=["tag", "step", "value", "superseded"])
    except (pa.ArrowException, ValueError) as error:
        raise DamagedData("not a table of scalars", thing=store.url_of(key), advice="Harvest the run again") from error


def joined(one: GoldenAnswer | None, other: GoldenAnswer | None) -> GoldenAnswer | None:
    """What golden values and a reference say together: as good only where both are."""
    if one is None or other is None:
        return one or other
    return GoldenAnswer(
        whole=one.whole and other.whole,
        as_good=one.as_good and other.as_good,
        reasons=(*one.reasons, *other.reasons),
        values={**other.values, **one.values},
        run_key=one.run_key or other.run_key,
    )
