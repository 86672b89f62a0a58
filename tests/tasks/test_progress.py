"""The progress artifact of a task run, against what Prefect's own functions are asked."""

from uuid import UUID, uuid4

import pytest

from tasks import progress
from tasks.progress import ProgressArtifact


def test_an_artifact_is_made_once_and_brought_up_to_date_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    made, updated = [], []
    identity = uuid4()

    def create(percent: float, description: str) -> UUID:
        made.append((percent, description))
        return identity

    def update(artifact_id: UUID, percent: float, description: str) -> None:
        updated.append((artifact_id, percent, description))

    monkeypatch.setattr(progress, "create_progress_artifact", create)
    monkeypatch.setattr(progress, "update_progress_artifact", update)
    artifact = ProgressArtifact()

    artifact.show(10.0, "begun")
    artifact.show(60.0, "going on")
    artifact.show(100.0, "done")

    assert made == [(10.0, "begun")]
    assert updated == [(identity, 60.0, "going on"), (identity, 100.0, "done")]
