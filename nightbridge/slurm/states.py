"""Slurm's job states as text: what squeue and sacct write, in full, truncated or as short codes."""

import re

from nightbridge.models import JobState

TERMINAL: frozenset[JobState] = frozenset(
    {
        JobState.COMPLETED,
        JobState.FAILED,
        JobState.CANCELLED,
        JobState.TIMEOUT,
        JobState.DEADLINE,
        JobState.NODE_FAIL,
        JobState.BOOT_FAIL,
        JobState.OUT_OF_MEMORY,
        JobState.PREEMPTED,
        JobState.REVOKED,
    }
)
"""States that a job does not leave. A requeued job is live again in squeue, which is asked first."""

ACTIVE: frozenset[JobState] = frozenset(
    {
        JobState.CONFIGURING,
        JobState.RUNNING,
        JobState.COMPLETING,
        JobState.SUSPENDED,
        JobState.STOPPED,
        JobState.RESIZING,
        JobState.SIGNALING,
        JobState.STAGE_OUT,
    }
)
"""States in which a job holds nodes. PENDING and the requeued states are neither active nor terminal."""

LOST = "lost"
"""How our own reason begins where Slurm has lost a job, whatever accounting then made of it."""

# squeue(1), "JOB STATE CODES".
_SHORT: dict[str, JobState] = {
    "BF": JobState.BOOT_FAIL,
    "CA": JobState.CANCELLED,
    "CD": JobState.COMPLETED,
    "CF": JobState.CONFIGURING,
    "CG": JobState.COMPLETING,
    "DL": JobState.DEADLINE,
    "F": JobState.FAILED,
    "NF": JobState.NODE_FAIL,
    "OOM": JobState.OUT_OF_MEMORY,
    "PD": JobState.PENDING,
    "PR": JobState.PREEMPTED,
    "R": JobState.RUNNING,
    "RD": JobState.PENDING,  # RESV_DEL_HOLD: held, because its reservation was deleted
    "RF": JobState.REQUEUED,  # REQUEUE_FED
    "RH": JobState.REQUEUE_HOLD,
    "RQ": JobState.REQUEUED,
    "RS": JobState.RESIZING,
    "RV": JobState.REVOKED,
    "SE": JobState.SPECIAL_EXIT,
    "SI": JobState.SIGNALING,
    "SO": JobState.STAGE_OUT,
    "ST": JobState.STOPPED,
    "S": JobState.SUSPENDED,
    "TO": JobState.TIMEOUT,
}

_LONG: dict[str, JobState] = {
    **{state.value: state for state in JobState if state is not JobState.UNKNOWN},
    "RESV_DEL_HOLD": JobState.PENDING,
    "REQUEUE_FED": JobState.REQUEUED,
    "EXPEDITING": JobState.REQUEUED,  # since 25.11: requeued at once, ahead of others
}

_FIRST_WORD = re.compile(r"^\s*([A-Za-z_]+)(\+?)")
_CANCELLED_BY = re.compile(r"^\s*CANCELLED by (\S+)", re.IGNORECASE)


def parse_state(text: str) -> JobState:
    """Read a state as Slurm writes it: `COMPLETED`, `OUT_OF_ME+`, `CANCELLED by 1000`, `CANCELLED+`, `CD`.

    A truncated word (`+` at its end) counts when exactly one state begins with it. What no one has heard of is
    `JobState.UNKNOWN`, which never ends a job.
    """
    found = _FIRST_WORD.match(text)
    if found is None:
        return JobState.UNKNOWN
    word, truncated = found[1].upper(), bool(found[2])
    if state := _LONG.get(word) or _SHORT.get(word):
        return state
    candidates = {state for name, state in _LONG.items() if name.startswith(word)} if truncated else set()
    return candidates.pop() if len(candidates) == 1 else JobState.UNKNOWN


def parse_cancelled_by(text: str) -> str:
    """The user or uid of `CANCELLED by 1000`; empty when the text does not say."""
    found = _CANCELLED_BY.match(text)
    return found[1] if found else ""


# Reasons that no waiting clears, with what a person can do (job_state_reason.c of Slurm 22.05 to 25.11). Held jobs and
# nodes that are not available are left out on purpose: a person releases them, a reservation ends.
HOPELESS_REASONS: dict[str, str] = {
    "PartitionConfig": "Ask for no more nodes than the partition has.",
    "PartitionNodeLimit": "Ask for a number of nodes that the partition allows.",
    "PartitionTimeLimit": "Ask for a time limit that the partition allows.",
    "BadConstraints": "No node can meet the constraints; check GPUs, memory and features.",
    "InvalidAccount": "Set the cluster's account to one that you may charge.",
    "InvalidQOS": "Set the cluster's qos to one that your account has.",
    "AccountNotAllowed": "The partition does not accept this account.",
    "QOSNotAllowed": "The partition does not accept this QOS.",
    "DependencyNeverSatisfied": "The job that it depends on failed.",
    "AssocMaxWallDurationPerJobLimit": "Ask for less time: your account's limit is lower.",
    "QOSMaxWallDurationPerJobLimit": "Ask for less time: the QOS allows less.",
    "AssocMaxNodePerJobLimit": "Ask for fewer nodes: your account's limit is lower.",
    "QOSMaxNodePerJobLimit": "Ask for fewer nodes: the QOS allows less.",
    "QOSTimeLimit": "Ask for less time: the QOS allows less.",
    "QOSResourceLimit": "The QOS never allows this size.",
    "ReservationDeleted": "The reservation is gone; set another one.",
    "ReservationInvalid": "Set a reservation that exists and that you may use.",
    "MaxMemPerLimit": "Ask for less memory: the partition allows less for a node or a CPU.",
}
# What one job or one of its nodes asks for is above, or below, what an account or a QOS allows: CPUs, memory, GPUs ...
_SIZE_OF_JOB = re.compile(r"(Assoc|QOS)(Max\w+Per(Job|Node)(Limit)?|Min\w+)")


def hopeless_advice(reason: str) -> str | None:
    """Say what to do about a pending reason that can never clear; None for one that may.

    Args:
        reason: As squeue writes it, with or without parentheses and details (`(PartitionConfig)`).

    """
    word = reason.strip().lstrip("(").rstrip(")").split(",")[0].strip()
    if found := _SIZE_OF_JOB.fullmatch(word):
        whose = "your account's" if found[1] == "Assoc" else "the QOS's"
        return HOPELESS_REASONS.get(word) or f"Change the job's size: {whose} limit {word} does not allow it."
    return HOPELESS_REASONS.get(word)
