"""The gate's inputs besides a run and its history, gathered from the store and from the site."""

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase

from nightbridge.gate.decisions import read_decisions
from nightbridge.gate.gate import Evidence
from nightbridge.gate.golden_gate import golden_answer
from nightbridge.gate.reference import joined, reference_answer
from nightbridge.history.reading import HistoryRow, find_series, read_history
from nightbridge.models import Limits, MetricName, RunRecord
from nightbridge.store.protocol import ObjectStore

Contract = Mapping[str, Mapping[MetricName, Limits]]


def gather_evidence(
    store: ObjectStore,
    record: RunRecord,
    contract: Contract | None = None,
    since: str = "",
    canary_series: dict[tuple[str, str, str, str], str] | None = None,
) -> Evidence:
    """Everything that a verdict on a run takes into account.

    Args:
        store: Where history and decisions are.
        record: The run.
        contract: The site's limits, by a pattern of test ids and by metric.
        since: The first night that counts; earlier ones of the canary are ignored.
        canary_series: Shared by the runs of a night; see `canary_rows`.

    Raises:
        InvalidInput: The test's golden file is missing or is none.
        DamagedData: A decision, a row of the canary's history, the golden file, or the reference run cannot be read.
    """
    cluster, test = record.job.cluster, record.spec.test
    return Evidence(
        contract=limits_for(test.id, contract or {}),
        canary=canary_rows(store, test.gate.canary, cluster, since, record.spec.night, canary_series)
        if test.gate.canary != test.id
        else (),
        decisions=read_decisions(store, cluster, record.series),
        golden=joined(golden_answer(store, record), reference_answer(store, record)),
    )


def limits_for(test_id: str, contract: Contract) -> dict[MetricName, Limits]:
    """The limits of one test; of several patterns that fit, the last one written counts for each metric."""
    found: dict[MetricName, Limits] = {}
    for pattern, limits in contract.items():
        if fnmatchcase(test_id, pattern):
            found |= limits
    return found


def since_of(history: Sequence[HistoryRow]) -> str:
    """The first night of a history; none where it is empty."""
    return min((row.night for row in history), default="")


def canary_rows(
    store: ObjectStore,
    canary: str | None,
    cluster: str,
    since: str = "",
    night: str = "",
    known: dict[tuple[str, str, str, str], str] | None = None,
) -> tuple[HistoryRow, ...]:
    """The canary's history on a cluster since a night; none where it has not run there.

    Finding its series lists the histories of all tests, so that is done once for all tests of the given night: `known`
    remembers the series that the canary ran in tonight, by store, cluster, canary and night.
    """
    if canary is None:
        return ()
    site = (store.url, cluster, canary, night)
    known = {} if known is None else known
    for series in [known[site]] if site in known else [found.series for found in find_series(store, canary, cluster)]:
        rows = read_history(store, cluster, series, since)
        if rows and rows[0].test_id == canary:
            if any(row.night == night for row in rows):
                known[site] = series
            return rows
    return ()
