"""What squeue and sacct print, as `JobStatus`: explicit fields, parsable text, the free text last."""

import re
from collections.abc import Iterable
from datetime import UTC, datetime

from nightbridge.models import JobState, JobStatus
from nightbridge.slurm.states import ACTIVE, LOST, TERMINAL, parse_cancelled_by, parse_state

SQUEUE_FORMAT = "%i|%T|%V|%S|%e|%N|%r|%j"
SACCT_FORMAT = "JobID,State,Submit,Start,End,NodeList,Reason,ExitCode,JobName"

_JOB_ID = re.compile(r"^(\d+)(?:\+0)?$")


def parse_squeue(text: str) -> list[JobStatus]:
    """The rows of `squeue --format=SQUEUE_FORMAT`. A banner, or a task of an array, is left out."""
    rows = []
    for line in text.splitlines():
        fields = line.split("|", 7)
        if len(fields) < 8 or (found := _JOB_ID.match(fields[0].strip())) is None:
            continue
        _, state, submitted, started, ended, nodes, reason, name = fields
        parsed = parse_state(state)
        rows.append(
            JobStatus(
                job_id=int(found[1]),
                name=name,
                state=parsed,
                reason="" if reason == "None" else reason,
                submitted_at=_parse_time(submitted),
                # Of a pending job these are estimates, and of one that was cancelled while pending the time of that.
                started_at=_parse_time(started) if parsed in ACTIVE | TERMINAL and nodes.strip() else None,
                ended_at=_parse_time(ended) if parsed in TERMINAL else None,
                nodes=nodes if parsed in ACTIVE | TERMINAL else "",
            )
        )
    return rows


def parse_sacct(text: str) -> list[JobStatus]:
    """The rows of `sacct --allocations --parsable2 --format=SACCT_FORMAT`."""
    rows = []
    for line in text.splitlines():
        fields = line.split("|", 8)
        if len(fields) < 9 or (found := _JOB_ID.match(fields[0].strip())) is None:
            continue
        _, state, submitted, started, ended, nodes, reason, exit_code, name = fields
        parsed = parse_state(state)
        code, _, signal = exit_code.partition(":")
        # Accounting that has heard of a job's state and not of its end calls its exit code 0:0 (Slurm 22.05).
        ended_at = _parse_time(ended)
        is_over = parsed in TERMINAL and ended_at is not None
        assigned = "" if nodes == "None assigned" else nodes
        rows.append(
            JobStatus(
                job_id=int(found[1]),
                name=name,
                state=parsed,
                reason="" if reason == "None" else reason,
                exit_code=int(code) if code.isdigit() and is_over else None,
                signal=int(signal) if signal.isdigit() and is_over else None,
                submitted_at=_parse_time(submitted),
                started_at=_parse_time(started) if assigned else None,
                ended_at=ended_at,
                nodes=assigned,
                cancelled_by=parse_cancelled_by(state),
            )
        )
    return rows


def newest(rows: Iterable[JobStatus]) -> dict[int, JobStatus]:
    """One row for each id. Requeues and reused ids have several: the last submitted counts."""
    oldest = datetime.min.replace(tzinfo=UTC)
    return {row.job_id: row for row in sorted(rows, key=lambda row: row.submitted_at or oldest)}


def merge(live: dict[int, JobStatus], past: dict[int, JobStatus]) -> dict[int, JobStatus]:
    """Take the state from squeue: sacct knows exit code and who cancelled a job, and is used once it agrees."""
    merged = dict(past)
    for job_id, row in live.items():
        known = past.get(job_id)
        if known is not None and known.state is row.state and row.state in TERMINAL and known.name == row.name:
            merged[job_id] = known.model_copy(update={"reason": row.reason or known.reason})
        else:
            merged[job_id] = row
    return merged


def without_false_cancellation(row: JobStatus) -> JobStatus:
    """A row of accounting about a job that slurmctld does not know.

    When slurmctld has lost a running job, slurmdbd closes it as cancelled, and by nobody. It is said to be lost.
    """
    if row.state is JobState.CANCELLED and not row.cancelled_by and row.nodes:
        return row.model_copy(update={"reason": f"{LOST}: unknown to slurmctld, and nobody cancelled it"})
    return row


def _parse_time(text: str) -> datetime | None:
    try:
        return datetime.fromisoformat(text.strip()).replace(tzinfo=UTC)
    except ValueError:  # Unknown, None, N/A
        return None
