"""How far a task is, in the run's log and as an artifact, against what Prefect's own functions are asked."""

import logging
from uuid import UUID, uuid4

import pytest

from nightbridge.store.parallel import Progress
from nightbridge.tasks import harvest, prefect_calls
from nightbridge.tasks.harvest import ARTIFACT_INTERVAL, LOG_INTERVAL, ShownProgress
from nightbridge.tasks.prefect_calls import ProgressArtifact


def test_an_artifact_is_made_once_and_brought_up_to_date_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[float, str]] = []
    updated: list[tuple[UUID, float, str]] = []
    identity = uuid4()

    def create(percent: float, description: str) -> UUID:
        made.append((percent, description))
        return identity

    def update(artifact_id: UUID, percent: float, description: str) -> None:
        updated.append((artifact_id, percent, description))

    monkeypatch.setattr(prefect_calls, "create_progress_artifact", create)
    monkeypatch.setattr(prefect_calls, "update_progress_artifact", update)
    artifact = ProgressArtifact("a harvest")

    artifact.show(10.0, "begun")
    artifact.show(60.0, "going on")
    artifact.show(100.0, "done")

    assert made == [(10.0, "begun")]
    assert updated == [(identity, 60.0, "going on"), (identity, 100.0, "done")]


class Shown:
    """A harvest's progress, what it shows, and the clock by which it does."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.clock = 1000.0
        self.artifacts: list[str] = []
        self.error: Exception | None = None
        monkeypatch.setattr(harvest, "get_run_logger", lambda: logging.getLogger("harvest"))
        monkeypatch.setattr("nightbridge.tasks.harvest.time.monotonic", lambda: self.clock)
        monkeypatch.setattr(
            prefect_calls, "create_progress_artifact", lambda percent, description: self._take(description)
        )
        monkeypatch.setattr(
            prefect_calls, "update_progress_artifact", lambda _, percent, description: self._take(description)
        )
        self.progress = ShownProgress("harvest of a-run")

    def _take(self, description: str) -> UUID:
        if self.error is not None:
            raise self.error
        self.artifacts.append(description)
        return UUID(int=0)

    def after(self, seconds: float, files_done: int) -> None:
        self.clock += seconds
        self.progress(
            Progress(
                step="sending", files_done=files_done, files_total=9, bytes_done=files_done * 10**9,
                bytes_total=9 * 10**9, seconds=10,
            )
        )  # fmt: skip


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Shown:
    caplog.set_level(logging.INFO)
    return Shown(monkeypatch)


def test_a_harvest_tells_files_bytes_rate_and_time_left_in_the_log_and_the_artifact(
    shown: Shown, caplog: pytest.LogCaptureFixture
) -> None:
    shown.after(LOG_INTERVAL, 3)
    told = "sending: 3 of 9 files, 3 GB of 9 GB, 300 MB/s, 20 s left"
    assert caplog.messages == [told]
    assert shown.artifacts == [f"harvest of a-run: {told}"]


def test_a_harvest_is_shown_at_intervals_and_at_its_end(shown: Shown, caplog: pytest.LogCaptureFixture) -> None:
    for files_done in range(1, 8):
        shown.after(ARTIFACT_INTERVAL / 2, files_done)
    shown.after(0.0, 9)
    assert [line.split(" files")[0] for line in caplog.messages] == ["sending: 9 of 9"]
    assert [line.split(": ")[2].split(" of")[0] for line in shown.artifacts] == ["1", "3", "5", "7", "9"]


def test_an_artifact_that_cannot_be_shown_is_said_once_and_disturbs_nothing(
    shown: Shown, caplog: pytest.LogCaptureFixture
) -> None:
    shown.error = OSError("no server")
    for files_done in range(1, 4):
        shown.after(ARTIFACT_INTERVAL, files_done)
    assert caplog.messages == ["Prefect does not show the progress of the harvest of a-run: no server"]
