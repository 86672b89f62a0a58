"""Why a flow run has started, told from the states that it has had."""

from datetime import UTC, datetime, timedelta

import pytest
from prefect.client.schemas.objects import State, StateType

from nightbridge.tasks.night import start_after

FIRST = "Scheduled Late Pending Running"


def history(names: str) -> list[State]:
    begun = datetime(2026, 11, 22, tzinfo=UTC)
    types = {"Late": "SCHEDULED", "AwaitingRetry": "SCHEDULED", "Resuming": "SCHEDULED", "Suspended": "PAUSED"}
    types |= {"AwaitingConcurrencySlot": "SCHEDULED", "Submitting": "PENDING", "Passed": "COMPLETED"}
    return [
        State(type=StateType(types.get(name, name.upper())), name=name, timestamp=begun + timedelta(seconds=number))
        for number, name in enumerate(names.split())
    ]


@pytest.mark.parametrize(
    ("names", "start"),
    [
        ("Running", "first"),
        (FIRST, "first"),
        (f"{FIRST} Crashed AwaitingRetry Pending Running", "retry"),
        (f"{FIRST} Failed AwaitingRetry Late AwaitingConcurrencySlot Pending Submitting Running", "retry"),
        (f"{FIRST} Cancelled AwaitingRetry Pending Running", "retry"),
        (f"{FIRST} Passed AwaitingRetry Pending Running", "retry"),
        (f"{FIRST} Suspended Resuming Pending Running", "resumption"),
        (f"{FIRST} AwaitingRetry Pending Running", "resumption"),
        (f"{FIRST} Crashed Resuming Late Pending Running", "resumption"),
        (f"{FIRST} Crashed Resuming Pending Running Failed AwaitingRetry Pending Running", "retry"),
        (f"{FIRST} Failed AwaitingRetry Pending Running Suspended Resuming Pending Running", "resumption"),
        (f"{FIRST} Suspended Resuming Pending Running Crashed AwaitingRetry Pending Running", "retry"),
    ],
)
def test_a_start_is_told_by_the_state_that_it_followed(names: str, start: str) -> None:
    states = history(names)

    assert start_after(states) == start
    assert start_after(states[::-1]) == start
