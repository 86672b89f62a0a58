"""Why a test has no verdict."""

import enum


class Cause(enum.StrEnum):
    """Why there is no verdict. Of several things that keep a night from beginning the first one here is named."""

    CRASHED = "crashed"
    SCHEDULE_OFF = "schedule_off"
    WORKER_AWAY = "worker_away"
    LATE = "late"  # Prefect knows the flow run, and it has not begun
    SERVER_AWAY = "server_away"  # Prefect's
    NOT_STARTED = "not_started"
    WAITING = "waiting"  # in Slurm's queue
    RUNNING = "running"  # in Slurm
    IN_PROGRESS = "in_progress"  # the night's process is at work: before the job, or after it
    UNKNOWN = "unknown"  # Slurm does not answer, or the workspace cannot be seen
