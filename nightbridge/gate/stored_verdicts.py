"""Judging a stored run: everything that is known about it goes in, and the verdict becomes part of the history."""

from collections.abc import Sequence
from typing import NamedTuple

from nightbridge.gate.control_arm import PROOF
from nightbridge.gate.decisions import Decision
from nightbridge.gate.evidence import CanarySeries, Contract, gather_evidence
from nightbridge.gate.run_verdict import compare
from nightbridge.gate.suspects import CommitsBetween, suspects_between
from nightbridge.gate.tonight import Evidence
from nightbridge.gate.trend import suspect_nights
from nightbridge.harvest.manifest import load_record
from nightbridge.history.history_store import put_row
from nightbridge.history.reading import read_history, read_recent
from nightbridge.history.rows import HistoryRow, row_of
from nightbridge.models import EXIT_CODES, GOOD_VERDICTS, RunRecord, Suspects, Verdict, VerdictStatus
from nightbridge.numbers import format_count
from nightbridge.store.object_store import ObjectStore, read_stored

NEEDS_SUSPECTS = frozenset(
    {
        VerdictStatus.REGRESSED,
        VerdictStatus.SUSPICIOUS,
        VerdictStatus.UNSTABLE,
        VerdictStatus.IMPROVED,
        VerdictStatus.FAILED,
        VerdictStatus.SHORT,
    }
)
"""Verdicts whose possible causes are listed."""


class Rejudged(NamedTuple):
    """What judging the nights of a series again did.

    `nights`: those that were judged. `changed`: of these the ones with another verdict. `lost`: those whose run was
    pruned and that had passed; they have no verdict any more, so that none is a baseline. `alarms`: whether the last
    night does.
    """

    nights: tuple[str, ...]
    changed: tuple[str, ...]
    lost: tuple[str, ...]
    alarms: bool

    def __str__(self) -> str:
        said = f"{format_count(len(self.nights), 'night')} judged again"
        said += f", {len(self.changed)} with another verdict" if self.changed else ", each as before"
        gone = (
            f", {format_count(len(self.lost), 'night')} without a stored run no baseline any more" if self.lost else ""
        )
        return said + gone


def judge(
    store: ObjectStore,
    record: RunRecord,
    contract: Contract,
    canary_series: CanarySeries | None = None,
    proof: float = PROOF,
    judged: Verdict | None = None,
) -> tuple[Verdict, Sequence[HistoryRow], Evidence]:
    """Judge a stored run by the nights before it: the verdict, and the history and the evidence that it rests on.

    Args:
        store: Where run, history and decisions are.
        record: The run.
        contract: What the site owes each test.
        canary_series: Shared by the runs of a night; see `canary_rows`.
        proof: The log-likelihood ratio that proves a regression; see `proof_needed`.
        judged: See `gather_evidence`.

    Raises:
        InvalidInput: The test's golden file is missing or is none.
        DamagedData: Something of it cannot be read.
    """
    history = read_recent(store, record.job.cluster, record.series, record.spec.night)
    evidence = gather_evidence(store, record, contract, canary_series, history, judged)
    evidence = evidence._replace(proof=proof)
    return compare(record, history, evidence), history, evidence


def judge_and_record(
    store: ObjectStore,
    record: RunRecord,
    contract: Contract,
    commits_between: CommitsBetween,
    canary_series: CanarySeries | None = None,
    proof: float = PROOF,
    judged: Verdict | None = None,
) -> Verdict:
    """Judge a stored run, and write its verdict and the row that later nights are judged by. Raises as `judge` does."""
    verdict, history, evidence = judge(store, record, contract, canary_series, proof, judged)
    row = row_of(record, verdict)
    rows = (*(other for other in history if other.run_key != row.run_key), row)
    suspects = find_suspects(store, verdict, rows, commits_between, evidence.decisions)
    why = verdict.rerun_reason
    if verdict.further_runs and not why:
        # As the night's verdict said before they had run.
        before = judged or _stored_verdict(store, record)
        why = before.rerun_reason if before else ""
    verdict = verdict.model_copy(update={"suspects": suspects, "rerun_reason": why})
    put_row(store, row)
    store.put(_verdict_key(record), verdict.model_dump_json(indent=2).encode())
    return verdict


def find_suspects(
    store: ObjectStore,
    verdict: Verdict,
    rows: Sequence[HistoryRow],
    commits_between: CommitsBetween,
    decisions: Sequence[Decision] = (),
) -> Suspects | None:
    """What changed since the run was as it should be; None for a good run, and for one without a good one before it.

    What cannot be found out is a note: a lost mirror or a pruned run is no reason to lose the verdict.

    Args:
        store: Where the runs are.
        verdict: The verdict on the run.
        rows: The history of its series, the run's own row among them.
        commits_between: Lists commits from the mirror of a repository.
        decisions: Users' decisions about the series: known changes are not suspects.
    """
    if verdict.status not in NEEDS_SUSPECTS:
        return None
    nights = suspect_nights(verdict, rows, decisions)
    return suspects_between(store, *nights, commits_between) if nights else None


def _stored_verdict(store: ObjectStore, record: RunRecord) -> Verdict | None:
    key = _verdict_key(record)
    return read_stored(store, key, Verdict, what="not a verdict", advice="Run the night again")


def _verdict_key(record: RunRecord) -> str:
    return f"{record.prefix.rsplit('/', 1)[0]}/verdict.json"


def judge_again(
    store: ObjectStore, cluster: str, series: str, since: str, contract: Contract, commits_between: CommitsBetween
) -> Rejudged:
    """Judge the nights of a series from `since` on again, oldest first: each by what those before it are now.

    Runs that were never judged are left alone, and so are confirming re-runs, which count for their night. Doing it a
    second time changes nothing, so that it may be interrupted. Raises as `judge` does.
    """
    nights: list[str] = []
    changed: list[str] = []
    lost: list[str] = []
    alarms = False
    for row in read_history(store, cluster, series, since):
        if row.repeat or row.verdict is None:
            continue
        record = load_record(store, row.prefix) if row.prefix else None
        if record is not None:
            nights.append(row.night)
            gate = record.spec.test.gate
            before = _stored_verdict(store, record) if gate.golden or gate.reference else None
            verdict = judge_and_record(store, record, contract, commits_between, judged=before)
            alarms = bool(EXIT_CODES[verdict.status])
            changed += [row.night] if verdict.status is not row.verdict else []
        elif row.verdict in GOOD_VERDICTS:
            lost.append(row.night)
            put_row(store, row.model_copy(update={"verdict": None}))
    return Rejudged(tuple(nights), tuple(changed), tuple(lost), alarms)
