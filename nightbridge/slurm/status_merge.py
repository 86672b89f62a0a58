"""What slurmctld and accounting say of the same jobs, put together; None is a source that did not answer."""

from collections.abc import Callable, Sequence

from nightbridge.errors import StatusUnknown
from nightbridge.models import JobStatus
from nightbridge.slurm.listings import merge, newest, without_false_cancellation
from nightbridge.slurm.protocol import Lookup
from nightbridge.slurm.states import TERMINAL

Rows = Sequence[JobStatus]

SHORTER_RANGES = (90, 30, 7, 1)
"""Days to go back where a site forbids long ranges in accounting."""


def lookup_of(name: str, live: Rows | None, past: Rows | None) -> Lookup:
    """The jobs of exactly this name, complete only when both sources answered."""
    merged = merge(newest(live or ()), newest(past or ()))
    jobs = (status for status in merged.values() if status.name == name)
    return Lookup(
        jobs=tuple(sorted(jobs, key=lambda status: status.job_id)), complete=live is not None and past is not None
    )


def statuses_of(
    cluster: str,
    job_ids: Sequence[int],
    live: Rows | None,
    past: Rows | None,
    finished: Callable[[JobStatus], JobStatus] = lambda row: row,
) -> dict[int, JobStatus]:
    """The status of each of these jobs that is known, by its id, from the sources that answered.

    Args:
        cluster: Its name, for the message.
        job_ids: The jobs.
        live: What slurmctld knows.
        past: What accounting knows.
        finished: Adds to a row what only slurmctld can still tell, as long as it answers.

    Raises:
        StatusUnknown: Neither answered.

    """
    if live is None and past is None:
        raise StatusUnknown("neither slurmctld nor slurmdbd answered", thing=cluster, advice="They are asked again")
    merged = _merged(live, newest(past or ()), finished)
    return {job_id: merged[job_id] for job_id in job_ids if job_id in merged}


def _merged(
    live: Rows | None, ended: dict[int, JobStatus], finished: Callable[[JobStatus], JobStatus]
) -> dict[int, JobStatus]:
    if live is None:
        return ended
    # slurmctld answered and does not know the job: a row that still calls it live is accounting's delay.
    known = newest(live)
    ended = {
        job_id: row if job_id in known else without_false_cancellation(row)
        for job_id, row in ended.items()
        if job_id in known or row.state in TERMINAL
    }
    return {job_id: finished(row) for job_id, row in merge(known, ended).items()}
