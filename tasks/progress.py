"""How far a task is, as an artifact of its run; how far a harvest is, in the run's log as well."""

import time
from typing import cast
from uuid import UUID

from prefect.artifacts import create_progress_artifact, update_progress_artifact
from prefect.logging import get_run_logger

from nightbridge.store.transfers import Progress
from nightbridge.tasks.context import raise_if_interrupted
from nightbridge.tasks.mirror import client_retries

LOG_INTERVAL, ARTIFACT_INTERVAL = 30.0, 5.0
"""Seconds between two lines of the log, and between two states of the artifact."""


class ProgressArtifact:
    """The progress artifact of a task run, made when it is first shown."""

    def __init__(self) -> None:
        self._id: UUID | None = None

    def show(self, percent: float, description: str) -> None:
        """Show this state, 0 to 100 percent; what the server does not take at once is out of date soon anyway."""
        with client_retries(0):
            if self._id is None:
                # Prefect types what serves sync and async callers as either.
                self._id = cast("UUID", create_progress_artifact(percent, description=description))
            else:
                update_progress_artifact(self._id, percent, description=description)


class ShownProgress:
    """Shows each progress that it is called with, not too often; the last one always.

    Nothing of it is needed: what goes wrong here is told once, and the harvest goes on.
    """

    def __init__(self, subject: str) -> None:
        self._subject = subject
        self._log = get_run_logger()
        self._artifact = ProgressArtifact()
        self._log_due = time.monotonic() + LOG_INTERVAL
        self._artifact_due = 0.0
        self._troubled = False

    def __call__(self, progress: Progress) -> None:
        """Show it, if it is time or the end; an interruption of the flow run ends what gets on."""
        raise_if_interrupted()
        now = time.monotonic()
        ended = progress.files_done == progress.files_total
        if ended or now >= self._log_due:
            self._log.info("%s", progress)
            self._log_due = now + LOG_INTERVAL
        if ended or now >= self._artifact_due:
            self._show(progress)
            self._artifact_due = time.monotonic() + ARTIFACT_INTERVAL

    def _show(self, progress: Progress) -> None:
        try:
            self._artifact.show(progress.percent, f"{self._subject}: {progress}")
        except Exception as error:
            if not self._troubled:
                self._log.warning("the progress of the harvest cannot be shown: %s", error)
            self._troubled = True
