"""Which of a folder's complete checkpoints a policy keeps."""

from pathlib import Path

import pytest
from pydantic import ValidationError

from nightbridge.harvest.selection import chosen
from nightbridge.models import Checkpoint, CheckpointState, HarvestPolicy

COMPLETE = [Checkpoint(path=Path(f"iter_{n}"), iteration=n, state=CheckpointState.COMPLETE) for n in range(10, 80, 10)]


@pytest.mark.parametrize(
    ("policy", "iterations"),
    [
        ("none", []),
        ("last", [70]),
        ("all", [10, 20, 30, 40, 50, 60, 70]),
        ("every 1", [10, 20, 30, 40, 50, 60, 70]),
        ("every 3", [10, 40, 70]),
        ("every 5", [20, 70]),
        ("every 100", [70]),
    ],
)
def test_every_kth_is_counted_back_from_the_last(policy: str, iterations: list[int]) -> None:
    assert [checkpoint.iteration for checkpoint in chosen(COMPLETE, policy)] == iterations
    assert list(chosen([], policy)) == []


@pytest.mark.parametrize("policy", ["latest", "every", "every 0", "every -1", "every 1.5", "every 5 ", ""])
def test_what_is_no_policy_is_refused_in_words(policy: str) -> None:
    with pytest.raises(ValidationError, match='must be "none", "last", "all" or "every K"'):
        HarvestPolicy(checkpoint=policy)
