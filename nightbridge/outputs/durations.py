"""How long a job waited, how long it took to begin, and how long training stood still to save."""

import math
import statistics
from typing import TYPE_CHECKING

from nightbridge.models import Job
from nightbridge.outputs.curves import LOG_FILE, METRICS, Curves, logging_interval
from nightbridge.outputs.logs import LogReading

if TYPE_CHECKING:
    import pandas as pd


def queue_time(job: Job | None) -> float | None:
    """Seconds from the submission of a job to its start; None when the cluster does not say both."""
    if job is None or job.status is None or job.status.started_at is None:
        return None
    submitted = job.status.submitted_at or job.submitted_at
    return max((job.status.started_at - submitted).total_seconds(), 0.0)


def startup_time(curves: Curves, job: Job | None) -> float | None:
    """Seconds from the start of a job to the beginning of its first iteration.

    An event is written when its iteration is over, so the iteration's own time, which compilation makes a long one, is
    taken off. None where no event file has step times (the log's clock has no time zone), or where the first one is
    older than the job.
    """
    if job is None or job.status is None or job.status.started_at is None:
        return None
    recorded = _step_times(curves)
    if not len(recorded):
        return None
    first = recorded.sort_values("wall_time").iloc[0]
    iterations = min(logging_interval(sorted(set(recorded["step"].tolist()))), int(first["step"]) - curves.start)
    began = float(first["wall_time"]) - iterations * float(first["value"])
    elapsed = began - job.status.started_at.timestamp()
    # Slurm's times are whole seconds, and two machines' clocks differ a little.
    return max(elapsed, 0.0) if elapsed > -_CLOCK_DIFFERENCE else None


_CLOCK_DIFFERENCE = 5.0


def _step_times(curves: Curves) -> "pd.DataFrame":
    import numpy as np

    table = curves.table
    usable = (table["tag"] == METRICS["step_time"].tag) & (table["file"] != LOG_FILE) & (table["step"] > curves.start)
    found: pd.DataFrame = table.loc[usable & np.isfinite(table["wall_time"]) & np.isfinite(table["value"])]
    return found


def checkpoint_time(log: LogReading) -> float | None:
    """Median seconds for which training stood still to save one checkpoint; None without one."""
    times = [seconds for seconds in log.save_times if math.isfinite(seconds)]
    return statistics.median(times) if times else None
