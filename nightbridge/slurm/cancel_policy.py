"""When a job is cancelled because waiting for it has no sense any more, and what a person is told then.

Three policies: a pending reason that never clears, `max_pending` and `max_runtime` of the cluster's settings.
"""

from datetime import datetime

from nightbridge.models import ClusterSettings, JobState, JobStatus, utc_now
from nightbridge.slurm.attempts import Cancellation
from nightbridge.slurm.states import hopeless_advice

_WAITING = frozenset({JobState.PENDING, JobState.REQUEUED, JobState.REQUEUE_HOLD, JobState.SPECIAL_EXIT})
_RUNNING = frozenset({JobState.RUNNING, JobState.SUSPENDED, JobState.STOPPED})


def due_cancellation(
    status: JobStatus, settings: ClusterSettings, *, reason_seconds: float, grace: float, now: datetime
) -> Cancellation | None:
    """Say why a job should be cancelled; None while it should not.

    Args:
        status: Slurm's last word about it.
        settings: The cluster's, with `max_pending` and `max_runtime`.
        reason_seconds: For how long its state and reason have been what they are.
        grace: Seconds for which even a hopeless reason may stand: an administrator may be changing the partition.
        now: The time, against the job's own times.

    """
    if status.state in _WAITING:
        advice = hopeless_advice(status.reason)
        if advice is not None and reason_seconds >= grace:
            return Cancellation(
                job_id=status.job_id, policy="hopeless", reason=status.reason, advice=advice, at=utc_now()
            )
        if _longer_than(settings.max_pending, status.submitted_at, now):
            return Cancellation(
                job_id=status.job_id,
                policy="max_pending",
                reason=f"pending for {settings.max_pending:.0f} s, last for {status.reason or 'no reason given'}",
                advice="Raise the cluster's max_pending, or ask for less",
                at=utc_now(),
            )
    if status.state in _RUNNING and _longer_than(settings.max_runtime, status.started_at, now):
        return Cancellation(
            job_id=status.job_id,
            policy="max_runtime",
            reason=f"running for {settings.max_runtime:.0f} s",
            advice="Raise the cluster's max_runtime, or do fewer steps",
            at=utc_now(),
        )
    return None


def _longer_than(limit: float | None, since: datetime | None, now: datetime) -> bool:
    return limit is not None and since is not None and (now - since).total_seconds() > limit
