"""What the runs of a night share, and waiting for what may be away for hours."""

import contextlib
import contextvars
import logging
import signal
import threading
import time
from pathlib import Path

import pytest
from prefect.exceptions import Pause, TerminationSignal
from prefect.states import Suspended

from nightbridge.errors import PermanentError, StatusUnknown, TransientError
from nightbridge.models import ClusterSettings, Scenario, Site
from nightbridge.processes import INTERRUPTED
from nightbridge.tasks.context import (
    CancelledByPerson,
    NightContext,
    interrupted_together,
    is_in_night,
    raise_if_interrupted,
    shared_night,
    this_night,
    wait_out,
)
from nightbridge.tasks.night import read_scenario


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


@pytest.mark.parametrize("cause", [None, PermanentError("no such partition")])
def test_a_wait_is_noted_once_and_its_end_too(cause: Exception | None) -> None:
    noted: list[str | None] = []
    away = [StatusUnknown("slurmctld is away")] * 3

    with contextlib.suppress(PermanentError):
        wait_out(Tried(*away, *([cause] if cause else [])), (StatusUnknown,), first_delay=0.01, note=noted.append)

    assert noted == ["slurmctld is away", None]


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
        (CancelledByPerson(), CancelledByPerson),
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


def test_an_interruption_around_ends_what_a_failure_inside_left_running() -> None:
    with interrupted_together() as outer, interrupted_together() as inner:
        inner.cause = ValueError("one of the calls beside it failed")
        goes_on = INTERRUPTED.get()()
        outer.cause = KeyboardInterrupt()

        assert (goes_on, INTERRUPTED.get()()) == (False, True)


# --- what a night shares ---------------------------------------------------------------------------------------------


def test_a_scenario_that_the_caller_has_read_is_not_read_again() -> None:
    scenario = Scenario(name="nightly", tests=())

    with shared_night(scenario):
        assert read_scenario("nowhere.toml") is scenario


def test_a_thread_outside_of_loops_belongs_to_no_night_until_one_is_opened_in_it_with_its_scenario() -> None:
    scenario = Scenario(name="nightly", tests=())

    with interrupted_together() as interruption:  # as a notebook's call of a flow
        assert not is_in_night()
        with shared_night(scenario) as night:
            assert is_in_night()
            assert read_scenario("nowhere.toml") is scenario
            with interrupted_together():
                assert this_night() is night
            interruption.cause = KeyboardInterrupt()
            with pytest.raises(KeyboardInterrupt):
                raise_if_interrupted()


def test_threads_share_the_night_of_the_context_that_they_copy() -> None:
    seen: list[NightContext] = []

    with shared_night() as night, shared_night() as inner:
        here = contextvars.copy_context()
        thread = threading.Thread(target=here.run, args=(lambda: seen.append(this_night()),))
        thread.start()
        thread.join()

    assert seen == [night]
    assert inner is night
    assert this_night() is not night


def test_a_run_may_submit_from_its_registration_to_its_end() -> None:
    night = NightContext()
    night.register_runs(["a", "b"])

    night.unregister_run("a")

    assert (night.may_submit("a"), night.may_submit("b"), night.may_submit("c")) == (False, True, False)


def test_a_night_has_one_watcher_for_each_cluster(tmp_path: Path) -> None:
    night = NightContext()
    one, other = (Site(workspace=tmp_path, cluster=ClusterSettings(name=name)) for name in ("one", "other"))

    assert night.watcher(one) is night.watcher(one)
    assert night.watcher(one) is not night.watcher(other)
