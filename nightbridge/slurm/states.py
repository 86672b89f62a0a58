"""Job states, and what Slurm's sources know of a job as one `JobStatus`.

State words as squeue and sacct write them; the pending reasons that no waiting clears, and what policies end; rows of
each source; and what slurmctld and accounting know of the same jobs, merged. None stands for a source that did not
answer.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta

from nightbridge.errors import StatusUnknown
from nightbridge.models import ClusterSettings, JobState, JobStatus, utc_now
from nightbridge.numbers import whole_number
from nightbridge.slurm.attempt_files import JOB_SCRIPT, Cancellation, CancelPolicy
from nightbridge.slurm.protocol import Lookup

TERMINAL: frozenset[JobState] = frozenset({
    JobState.COMPLETED, JobState.FAILED, JobState.CANCELLED, JobState.TIMEOUT, JobState.DEADLINE, JobState.NODE_FAIL,
    JobState.BOOT_FAIL, JobState.OUT_OF_MEMORY, JobState.PREEMPTED, JobState.REVOKED,
})  # fmt: skip
"""States that a job does not leave. A requeued job is live again in squeue, which wins."""

ACTIVE: frozenset[JobState] = frozenset({
    JobState.CONFIGURING, JobState.RUNNING, JobState.COMPLETING, JobState.SUSPENDED, JobState.STOPPED,
    JobState.RESIZING, JobState.SIGNALING, JobState.STAGE_OUT,
})  # fmt: skip
"""States in which a job holds nodes."""

WAITING: frozenset[JobState] = frozenset(
    {JobState.PENDING, JobState.REQUEUED, JobState.REQUEUE_HOLD, JobState.SPECIAL_EXIT}
)
"""States in which a job is in the queue: those of a requeue, too."""

LOST = "lost"
"""The prefix of our own reason for a job that Slurm has lost, whatever accounting then made of it."""
QUEUED_AGAIN = "queued again by Slurm"
"""The prefix of our own reason for a job that Slurm has put back into its queue after its script had ended."""
BY_EXIT_FILE = "exit file; Slurm silent"
"""The prefix of our own reason for a job that Slurm has forgotten, and whose exit file tells its end."""

_LONGEST_CLEANING = timedelta(minutes=30)
"""How long an epilog, or the end of processes, may keep a job completing: after that a node of it is stuck, which may
take until somebody reboots it."""

# squeue(1), "JOB STATE CODES", as the formats that are asked for have them: whole words.
_STATES: dict[str, JobState] = {
    **{state.value: state for state in JobState if state is not JobState.UNKNOWN},
    "RESV_DEL_HOLD": JobState.PENDING,  # held, because its reservation was deleted
    "REQUEUE_FED": JobState.REQUEUED,
    "EXPEDITING": JobState.REQUEUED,  # since 25.11: requeued at once, ahead of others
}

_FIRST_WORD = re.compile(r"^\s*([A-Za-z_]+)")
_CANCELLED_BY = re.compile(r"^\s*CANCELLED by (\S+)", re.IGNORECASE)


def parse_state(text: str) -> JobState:
    """Read a state as Slurm writes it: `COMPLETED`, `CANCELLED by 1000`.

    Any other word is `JobState.UNKNOWN`, which never ends a job.
    """
    found = _FIRST_WORD.match(text)
    return _STATES.get(found[1].upper(), JobState.UNKNOWN) if found else JobState.UNKNOWN


def parse_cancelled_by(text: str) -> str:
    """The user or uid of `CANCELLED by 1000`; empty when the text has none."""
    found = _CANCELLED_BY.match(text)
    return found[1] if found else ""


# Reasons that no waiting clears, with what the user can do (job_state_reason.c of Slurm 22.05 to 25.11). Held jobs and
# nodes that are not available are left out on purpose: someone releases them, a reservation ends.
HOPELESS_REASONS: dict[str, str] = {
    "PartitionConfig": "Request no more nodes than the partition has.",
    "PartitionNodeLimit": "Request a number of nodes that the partition allows.",
    "PartitionTimeLimit": "Request a time limit that the partition allows.",
    "BadConstraints": "No node can meet the constraints; check GPUs, memory and features.",
    "InvalidAccount": "Set the cluster's account to one that you may charge.",
    "InvalidQOS": "Set the cluster's qos to one that your account has.",
    "AccountNotAllowed": "The partition does not accept this account.",
    "QOSNotAllowed": "The partition does not accept this QOS.",
    "DependencyNeverSatisfied": "The job that it depends on failed.",
    "AssocMaxWallDurationPerJobLimit": "Request less time: your account's limit is lower.",
    "QOSMaxWallDurationPerJobLimit": "Request less time: the QOS allows less.",
    "AssocMaxNodePerJobLimit": "Request fewer nodes: your account's limit is lower.",
    "QOSMaxNodePerJobLimit": "Request fewer nodes: the QOS allows less.",
    "QOSTimeLimit": "Request less time: the QOS allows less.",
    "QOSResourceLimit": "The QOS never allows this size.",
    "ReservationDeleted": "The reservation is gone; set another one.",
    "ReservationInvalid": "Set a reservation that exists and that you may use.",
    "MaxMemPerLimit": "Request less memory: the partition allows less for a node or a CPU.",
}
# What one job or one of its nodes requests is above, or below, what an account or a QOS allows: CPUs, memory, GPUs ...
_SIZE_OF_JOB = re.compile(r"(Assoc|QOS)(Max\w+Per(Job|Node)(Limit)?|Min\w+)")

_RESERVATION_GONE = re.compile(r"Reservation \S+ was deleted")  # squeue's words for RESV_DEL_HOLD


def hopeless_advice(reason: str) -> str | None:
    """Advice on a pending reason that can never clear; None for one that may.

    Args:
        reason: As squeue writes it, with or without parentheses and details (`(PartitionConfig)`).
    """
    word = reason.strip().lstrip("(").rstrip(")").split(",")[0].strip()
    if _RESERVATION_GONE.fullmatch(word):
        word = "ReservationDeleted"
    if found := _SIZE_OF_JOB.fullmatch(word):
        whose = "your account's" if found[1] == "Assoc" else "the QOS's"
        return HOPELESS_REASONS.get(word) or f"Change the job's size: {whose} limit {word} does not allow it."
    return HOPELESS_REASONS.get(word)


def waits_for_another(status: JobStatus) -> bool:
    """Whether a job waits for the end of one that it depends on: it is not in the queue for nodes yet."""
    return status.state in WAITING and status.reason.strip("()") == "Dependency"


_RUNNING = frozenset({JobState.RUNNING, JobState.SUSPENDED, JobState.STOPPED})


def due_cancellation(
    status: JobStatus,
    settings: ClusterSettings,
    *,
    queued_since: datetime | None,
    reason_seconds: float,
    grace: float,
    now: datetime,
) -> Cancellation | None:
    """The cancellation of a job that a policy ends; None while none does.

    Args:
        status: As Slurm last reported it.
        settings: The cluster's, with `max_pending` and `max_runtime`.
        queued_since: Since when it waits for nodes: `max_pending` does not count the wait for another job's end.
        reason_seconds: For how long its state and reason have been what they are.
        grace: Seconds for which even a hopeless reason may stand: an administrator may be changing the partition.
        now: The time, against the job's own times.
    """
    hopeless = hopeless_advice(status.reason) or ""
    pending, running = status.state in WAITING, status.state in _RUNNING
    due: tuple[tuple[bool, CancelPolicy, str, str], ...] = (
        (pending and bool(hopeless) and reason_seconds >= grace, "hopeless", status.reason, hopeless),
        (
            pending and _longer_than(settings.max_pending, queued_since, now),
            "max_pending",
            f"pending for {settings.max_pending or 0:.0f} s, last for {status.reason or 'no reason given'}",
            "Raise the cluster's max_pending, or request less",
        ),
        (
            running and _longer_than(settings.max_runtime, status.started_at, now),
            "max_runtime",
            f"running for {settings.max_runtime or 0:.0f} s",
            "Raise the cluster's max_runtime, or do fewer steps",
        ),
    )
    for is_due, policy, reason, advice in due:
        if is_due:
            return Cancellation(job_id=status.job_id, policy=policy, reason=reason, advice=advice, at=utc_now())
    return None


def _longer_than(limit: float | None, since: datetime | None, now: datetime) -> bool:
    return limit is not None and since is not None and (now - since).total_seconds() > limit


# Why a job waits, in words, with what helps; `{job}` is its id.
WAITING_REASONS: dict[str, str] = {
    "Priority": "other jobs go first",
    "Resources": "next in line: it starts when enough nodes are free",
    "JobHeldUser": "held by its user: `scontrol release {job}`",
    JobState.SPECIAL_EXIT: "its script has ended, and the site holds jobs with its exit code (RequeueExitHold)",
    "JobHeldAdmin": "held by an administrator: ask the site to `scontrol release {job}`",
    "job requeued in held state": "requeued by an operator and held: `scontrol release {job}`",
    "launch failed requeued held": "its launch failed, and Slurm holds it: `scontrol release {job}`",
    "JobHoldMaxRequeue": "requeued too often, and held: `scontrol release {job}`",
    "BeginTime": "its start was set to a later time: `scontrol update job={job} StartTime=now`",
    "Dependency": "waits for the end of another job: `squeue -o '%i %E' -j {job}`",
    "PartitionDown": "its partition is down: `sinfo -p PARTITION`",
    "PartitionInactive": "its partition is inactive: `sinfo -p PARTITION`",
    "ReqNodeNotAvail": "a node that it needs is busy, down, drained or reserved: `sinfo -R`",
    "Nodes required for job are DOWN": "nodes that it needs are busy, down, drained or reserved: `sinfo -R`",
    "Reservation": "waits for its reservation to begin: `scontrol show reservation`",
    "Licenses": "all licences of a kind are in use: `scontrol show licenses`",
    "BurstBufferResources": "waits for space in the burst buffer: `scontrol show burst`",
    "BurstBufferStageIn": "its files are copied to the burst buffer: `scontrol show burst`",
    "burst_buffer/": "the burst buffer failed, and Slurm holds the job: `scontrol release {job}` once it is repaired",
    "Prolog": "the prolog runs on its nodes",
    "Cleaning": "its last start is being cleaned up",
}
_LIMIT_REACHED = re.compile(r"(Assoc|QOS)(Grp|Max)\w+")


def waiting_words(status: JobStatus) -> str:
    """Why a job waits: Slurm's reason with its meaning, what to type, and the expected start."""
    word = status.reason.strip("()").split(",")[0]
    if status.state is JobState.SPECIAL_EXIT and word == "JobHeldUser":  # an operator's has another reason
        word = status.state
    meaning = WAITING_REASONS.get(word) or hopeless_advice(word) or ""
    meaning = next((text for begin, text in WAITING_REASONS.items() if not meaning and word.startswith(begin)), meaning)
    if not meaning and (limit := _LIMIT_REACHED.match(word)):
        whose, query = ("account", "assoc_mgr") if limit[1] == "Assoc" else ("QOS", "assoc_mgr flags=qos")
        meaning = f"a limit of the {whose} is used up by other jobs: `scontrol show {query}`"
    said = [f"{status.reason or 'no reason given yet'}"]
    said += [meaning.format(job=status.job_id)] if meaning else []
    said += [f"number {status.queue_position} in its partition's queue"] if status.queue_position else []
    said += [f"Slurm expects its start at {status.expected_start:%H:%M} UTC"] if status.expected_start else []
    return ", ".join(said)


# What Slurm says of an end (job_state_reason.c); any other reason of a job that has started is an old one.
_REASON_OF_AN_END = re.compile(
    rf"{LOST}:|NonZeroExitCode|RaisedSignal|NodeDown|SystemFailure|.*[Ll]aunch.?[Ff]ail|TimeLimit|InactiveLimit|OutOfMemory"
    r"|Dead[Ll]ine|BurstBufferOp|Preempt|Prolog"
)

SQUEUE_FORMAT = "%i|%T|%V|%S|%e|%N|%r|%j\t%o"
SACCT_FORMAT = "JobID,State,Submit,Start,End,NodeList,Reason,ExitCode,JobName"

_JOB_ID = re.compile(r"^(\d+)(?:\+0)?$")
_BEGIN_OF_ROW = re.compile(r"\s*\d[^\s|]*\|[A-Z]")
_SCRIPT_OF_AN_ATTEMPT = re.compile(rf"/runs/([^/]+)/(a[1-9]\d*)/{re.escape(JOB_SCRIPT)}")


def parse_squeue(text: str) -> list[JobStatus]:
    """The rows of `squeue --format=SQUEUE_FORMAT`. A banner, or a task of an array, is left out.

    A job that runs an attempt's script has the attempt's name, whatever a plugin of the site (job_submit, cli_filter)
    or a user has made of it.
    """
    return [_status(job_id, fields) for job_id, fields in _rows(text, 8)]


def parse_sacct(text: str) -> list[JobStatus]:
    """The rows of `sacct --allocations --parsable2 --format=SACCT_FORMAT`."""
    return [_status(job_id, fields) for job_id, fields in _rows(text, 9)]


def _rows(text: str, count: int) -> Iterator[tuple[int, list[str]]]:
    """The job id and the other fields of each row that is about a whole job.

    A reason may have several lines: the text of a script's error, as of burst_buffer/lua.
    """
    row = ""
    for line in text.splitlines():
        row = line if _BEGIN_OF_ROW.match(line) else f"{row} {line}"
        first, *fields = row.split("|", count - 1)
        if len(fields) == count - 1:
            row = ""
            found = _JOB_ID.match(first.strip())
            if found and (job_id := whole_number(found[1])) is not None:
                yield job_id, fields


def _status(job_id: int, fields: Sequence[str]) -> JobStatus:
    """One row; squeue has no exit code."""
    state, submitted, started, ended, nodes, reason, *exit_code, name = fields
    name, _, command = name.partition("\t")
    of_attempt = _SCRIPT_OF_AN_ATTEMPT.search(command)
    name = "-".join(of_attempt.groups()) if of_attempt else name
    code, _, signal = (exit_code or [""])[0].partition(":")
    return job_status(
        job_id, name=name, state=state, reason=reason, submitted=_parse_time(submitted),
        started=_parse_time(started), ended=_parse_time(ended), nodes=nodes,
        exit_code=whole_number(code), signal=whole_number(signal), cancelled_by=parse_cancelled_by(state),
    )  # fmt: skip


def job_status(
    job_id: int,
    *,
    name: str,
    state: str,
    reason: str,
    submitted: datetime | None,
    started: datetime | None,
    ended: datetime | None,
    nodes: str,
    exit_code: int | None = None,
    signal: int | None = None,
    cancelled_by: str = "",
) -> JobStatus:
    """One row of any source, without what Slurm only estimates or fills in.

    Times of a pending job are estimates, and of one that was cancelled while pending they are real. Accounting that has
    a job's state and not its end yet calls its exit code 0:0 (Slurm 22.05).
    """
    parsed = parse_state(state)
    held = nodes.strip() if parsed in ACTIVE | TERMINAL and nodes not in ("None assigned", "(null)") else ""
    is_over = parsed in TERMINAL and ended is not None
    return JobStatus(
        job_id=job_id,
        name=name,
        state=parsed,
        # Accounting keeps the reason for which a job was pending once.
        reason="" if reason == "None" or (held and not _REASON_OF_AN_END.match(reason)) else reason,
        exit_code=exit_code if is_over else None,
        signal=signal if is_over else None,
        submitted_at=submitted,
        started_at=started if held else None,
        ended_at=ended if is_over or parsed is JobState.COMPLETING else None,
        nodes=held,
        cancelled_by=cancelled_by if parsed is JobState.CANCELLED else "",
        expected_start=started if parsed is JobState.PENDING else None,
    )


def newest(rows: Iterable[JobStatus]) -> dict[int, JobStatus]:
    """One row for each id. Requeues and reused ids have several: the last submitted counts."""
    oldest = datetime.min.replace(tzinfo=UTC)
    return {row.job_id: row for row in sorted(rows, key=lambda row: row.submitted_at or oldest)}


def merge(live: dict[int, JobStatus], past: dict[int, JobStatus]) -> dict[int, JobStatus]:
    """Take the state from squeue: sacct knows exit code and who cancelled a job, and is used once it agrees.

    It is used as well for a job that is stuck in completing.
    """
    merged = dict(past)
    for job_id, row in live.items():
        known = past.get(job_id)
        if known is not None and known.state in TERMINAL and _is_same_job(known, row) and _agree(known, row):
            merged[job_id] = known.model_copy(update={"reason": row.reason or known.reason, "name": row.name})
        else:
            merged[job_id] = row
    return merged


def _is_same_job(known: JobStatus, row: JobStatus) -> bool:
    """Whether two rows of one id are about one job: accounting has the name that a site may have given to it."""
    return known.name == row.name or submitted_alike(known, row)


def submitted_alike(known: JobStatus, row: JobStatus) -> bool:
    """Whether two rows of one id are about one job by the time of its submission, whatever its name is in each."""
    return known.submitted_at is not None and known.submitted_at == row.submitted_at


def _agree(known: JobStatus, row: JobStatus) -> bool:
    return known.state is row.state or (is_stuck(row) and known.submitted_at == row.submitted_at)


def is_stuck(row: JobStatus) -> bool:
    """Whether slurmctld has called a job completing for longer after its end than any cleaning up takes."""
    since = row.ended_at if row.state is JobState.COMPLETING else None
    return since is not None and utc_now() - since >= _LONGEST_CLEANING


def without_false_cancellation(row: JobStatus) -> JobStatus:
    """A row of accounting about a job that slurmctld does not know.

    When slurmctld has lost a job, running or pending, slurmdbd closes it as cancelled, and by no user. Such a job is
    lost.
    """
    if row.state is JobState.CANCELLED and not row.cancelled_by:
        return row.model_copy(update={"reason": f"{LOST}: unknown to slurmctld, and cancelled by no user"})
    return row


# Accounting closes the row of a start that is requeued with these, and opens that of the next start seconds later.
_MAY_RUN_AGAIN = frozenset({JobState.NODE_FAIL, JobState.BOOT_FAIL, JobState.PREEMPTED})


def _unconfirmed(row: JobStatus) -> JobStatus:
    """A row of accounting while slurmctld does not answer. One that it may have requeued, or lost, is not over yet."""
    closed_by_slurm = row.state is JobState.CANCELLED and not row.cancelled_by
    if row.state not in _MAY_RUN_AGAIN and not closed_by_slurm:
        return row
    reason = f"{row.state} for accounting, to be confirmed by slurmctld"
    return row.model_copy(update={"state": JobState.COMPLETING, "reason": reason, "exit_code": None, "signal": None})


def time_of(seconds: float | None) -> datetime | None:
    """A time that a source gives in seconds since 1970; None where it has none."""
    return None if seconds is None else datetime.fromtimestamp(seconds, UTC)


def _parse_time(text: str) -> datetime | None:
    try:
        return datetime.fromisoformat(text.strip()).replace(tzinfo=UTC)
    except ValueError:  # Unknown, None, N/A
        return None


Rows = Sequence[JobStatus]


def lookup_of(name: str, live: Rows | None, past: Rows | None) -> Lookup:
    """The jobs of exactly this name, complete only when both sources answered.

    Slurm keeps a record of some jobs that sbatch was refused, as of one that no node can run: FAILED, without nodes and
    start. They are none: the corrected job gets the name.
    """
    # First: another job may have the id that one of this name had.
    queued = [row for row in live or () if row.name == name]
    merged = merge(newest(queued), newest(past or ()))
    named = (status for status in merged.values() if status.name == name)
    jobs = sorted((status for status in named if not _was_refused(status)), key=lambda status: status.job_id)
    return Lookup(
        jobs=tuple(jobs),
        complete=live is not None and past is not None,
        queue_answered=live is not None,
        queued=frozenset(row.job_id for row in queued),
    )


def _was_refused(status: JobStatus) -> bool:
    return status.state is JobState.FAILED and not status.nodes and status.started_at is None


def live_jobs(name: str, lookup: Lookup, states: Callable[[Sequence[int]], Mapping[int, JobStatus]]) -> list[int]:
    """The ids of the jobs of this name that are alive, and still have their ids.

    One that slurmctld has just listed is alive. Accounting goes on calling a job alive that slurmctld has lost, and
    another job may have got its id since: `states` is asked of those.
    """
    found = {job.job_id: job for job in lookup.jobs if job.state not in TERMINAL}
    unlisted = [job_id for job_id in found if job_id not in lookup.queued]
    now = states(unlisted) if unlisted else {}
    return [
        job_id
        for job_id, job in found.items()
        if job_id in lookup.queued
        or ((status := now.get(job_id)) and _is_same_job(status, job) and status.state not in TERMINAL)
    ]


def statuses_of(
    cluster: str,
    job_ids: Sequence[int],
    live: Rows | None,
    past: Rows | None,
    finished: Callable[[JobStatus], JobStatus] = lambda row: row,
) -> dict[int, JobStatus]:
    """The status of each of these jobs that is known, by its id, from the sources that answered.

    `live` is what slurmctld knows, `past` what accounting does; `finished` adds to a row what only slurmctld can still
    tell, as long as it answers.

    Raises:
        StatusUnknown: Neither answered.
    """
    if live is None and past is None:
        raise StatusUnknown("neither slurmctld nor slurmdbd answered", subject=cluster, advice="Will retry")
    merged = newest(past or ())
    if live is None:
        merged = {job_id: _unconfirmed(row) for job_id, row in merged.items()}
    else:
        # slurmctld answered and does not know the job: a row that still calls it live is accounting's delay.
        known = newest(live)
        ended = {
            job_id: row if job_id in known else without_false_cancellation(row)
            for job_id, row in merged.items()
            if job_id in known or row.state in TERMINAL
        }
        merged = {job_id: finished(row) for job_id, row in merge(known, ended).items()}
    return {job_id: merged[job_id] for job_id in job_ids if job_id in merged}
