"""Waiting for what may be away for hours."""

import logging
import signal
import threading
import time

import pytest
from prefect.exceptions import Pause, TerminationSignal
from prefect.states import Suspended

from nightbridge.errors import PermanentError, StatusUnknown, TransientError
from nightbridge.tasks.context import interrupted_together, wait_out


@pytest.fixture(autouse=True)
def logger(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nightbridge.tasks.context.run_log", lambda: logging.getLogger("waiting"))


class Tried:
    """What is tried: raises each error in turn, then answers."""

    def __init__(self, *errors: Exception) -> None:
        self.errors = list(errors)
        self.times = 0

    def __call__(self) -> str:
        self.times += 1
        if self.errors:
            raise self.errors.pop(0)
        return "answer"


def test_what_is_waited_for_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    away = StatusUnknown("slurmctld is away")
    tried = Tried(away, away, away, StatusUnknown("slurmdbd is away"))

    assert wait_out(tried, (StatusUnknown,), first_delay=0.01) == "answer"

    assert [record.getMessage().partition(": ")[2] for record in caplog.records] == [
        "slurmctld is away",
        "slurmdbd is away",
    ]


def test_delays_grow_up_to_the_longest(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr("nightbridge.tasks.context._sleep", slept.append)

    wait_out(Tried(*[StatusUnknown("away")] * 8), (StatusUnknown,), first_delay=10)

    assert slept == [10, 20, 40, 80, 160, 300, 300, 300]


@pytest.mark.parametrize("error", [TransientError("the launcher hung"), PermanentError("no"), ValueError("bug")])
def test_other_errors_are_not_waited_for(error: Exception) -> None:
    with pytest.raises(type(error)):
        wait_out(tried := Tried(error), (StatusUnknown,), first_delay=0.01)

    assert tried.times == 1


def test_patience_has_an_end() -> None:
    with pytest.raises(StatusUnknown, match="away"):
        wait_out(Tried(*[StatusUnknown("away")] * 1000), (StatusUnknown,), first_delay=0.01, patience=20)


@pytest.mark.parametrize(
    ("cause", "raised"),
    [
        (KeyboardInterrupt(), KeyboardInterrupt),
        (TerminationSignal(signal=signal.SIGTERM), TerminationSignal),
        (Pause(state=Suspended()), Pause),
        (ValueError("a sibling's defect"), KeyboardInterrupt),
    ],
)
def test_an_interruption_ends_the_wait_at_once_with_its_own_cause(
    cause: BaseException, raised: type[BaseException]
) -> None:
    began = time.monotonic()

    with interrupted_together() as interruption:
        threading.Timer(0.2, setattr, args=(interruption, "cause", cause)).start()
        with pytest.raises(raised):
            wait_out(Tried(StatusUnknown("away")), (StatusUnknown,), first_delay=600)

    assert time.monotonic() - began < 60


def test_what_fails_because_of_an_interruption_tells_the_interruption() -> None:
    def killed() -> None:
        interruption.cause = KeyboardInterrupt()
        raise PermanentError("git was killed")

    with interrupted_together() as interruption, pytest.raises(KeyboardInterrupt):
        wait_out(killed, (StatusUnknown,), first_delay=0.01)
