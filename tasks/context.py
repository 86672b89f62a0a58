"""The flow run that the code runs in, and what the runs of one night share in this process.

A flow opens a `NightContext` (`shared_night`), and the threads of its subflows reach it through copies of its context:
the cluster's watcher, which runs may still submit, and how the flow run was interrupted. Nothing of it is module state,
and it ends with the flow.

Only one thread hears of an interruption: a Ctrl-C, SIGTERM, a cancellation or a suspension. The others end with the
same exception, because Prefect makes a run's state out of it. Slurm jobs keep running, and the next run of the same
night finds them, unless a person cancelled them.
"""

import contextlib
import contextvars
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

from prefect.client.schemas.objects import FlowRun
from prefect.context import FlowRunContext
from prefect.exceptions import MissingContextError, Pause, TerminationSignal
from prefect.logging import get_run_logger

from nightbridge.errors import TransientError
from nightbridge.models import Scenario, Site
from nightbridge.processes import INTERRUPTED
from nightbridge.slurm.factory import cluster_of
from nightbridge.slurm.watcher import Watcher

R = TypeVar("R")


# --- this flow run ---------------------------------------------------------------------------------------------------


def this_flow_run() -> FlowRun | None:
    """The flow run of the calling thread; None outside of any, as in a cancellation hook or a command."""
    context = FlowRunContext.get()
    return context.flow_run if context else None


def run_log() -> "logging.Logger | logging.LoggerAdapter[Any]":
    """The flow or task run's log; a plain one in a hook or a command, which Prefect calls outside of any run."""
    try:
        return get_run_logger()
    except MissingContextError:
        return logging.getLogger("nightbridge")


# --- what a night shares ---------------------------------------------------------------------------------------------


class NightContext:
    """What the runs of one night share in this process.

    Attributes:
        scenario: The scenario that the caller of the flow has read and checked; None where the flow reads it itself.
        limits: The concurrency limits that are known to exist on Prefect's server, with their slots.
        canary_series: Which series each canary ran in tonight.
        runs: How many runs it has had in this process.
        lock: Held while `limits` is brought up to date.
    """

    def __init__(self, scenario: Scenario | None = None) -> None:
        self.scenario = scenario
        self.limits: set[tuple[str, int]] = set()
        self.canary_series: dict[tuple[str, str, str, str], str] = {}
        self.runs = 0
        self.lock = threading.Lock()
        self._watchers: dict[str, Watcher] = {}
        self._unsubmitted: set[str] = set()
        self._changed = threading.Condition()

    def watcher(self, site: Site) -> Watcher:
        """The one watcher of a site's cluster: one query covers all jobs of the night."""
        key = f"{site.workspace} {site.cluster.model_dump_json()}"
        with self.lock:
            if key not in self._watchers:
                self._watchers[key] = Watcher(cluster_of(site))
            return self._watchers[key]

    def register_runs(self, run_keys: Iterable[str]) -> None:
        """Take in that these runs are about to start in this process."""
        with self._changed:
            before = len(self._unsubmitted)
            self._unsubmitted.update(run_keys)
            self.runs += len(self._unsubmitted) - before

    def unregister_run(self, run_key: str) -> None:
        """Take in that a run has ended, however: it will not submit any more jobs."""
        with self._changed:
            self._unsubmitted.discard(run_key)
            self._changed.notify_all()

    def may_submit(self, run_key: str) -> bool:
        """Whether a run of this process has not ended yet."""
        return run_key in self._unsubmitted

    def wait_for_a_run(self, seconds: float) -> None:
        """Wait until a run has ended, but no longer than this."""
        with self._changed:
            self._changed.wait(seconds)


class CancelledByPerson(BaseException):
    """A person has cancelled the flow run in Prefect, and no worker is there to end its process."""


@dataclass
class Interruption:
    """What ended a flow run, for the threads of its subflows: it, or what it is called by."""

    outer: "Interruption | None" = None
    cause: BaseException | None = None

    @property
    def any_cause(self) -> BaseException | None:
        """Its own cause, else that of what is around it."""
        return self.cause or (None if self.outer is None else self.outer.any_cause)

    def ends_programs(self) -> bool:
        """Whether what runs for it is over; an error is handled by the flow, which still has to report its end."""
        is_over = not isinstance(self.cause, Exception | None)
        return is_over or (self.outer is not None and self.outer.ends_programs())


_night: contextvars.ContextVar[NightContext | None] = contextvars.ContextVar("nightbridge_night", default=None)
_interruption: contextvars.ContextVar[Interruption | None] = contextvars.ContextVar(
    "nightbridge_interruption", default=None
)


def this_night() -> NightContext:
    """The night that the calling thread belongs to; one of its own for a stage that is called outside of any flow."""
    return _night.get() or NightContext()


def is_in_night() -> bool:
    """Whether the calling thread belongs to a night or a search; a run that is started alone does not."""
    return _night.get() is not None


@contextlib.contextmanager
def shared_night(scenario: Scenario | None = None) -> Iterator[NightContext]:
    """Share a night for the length of the block: the one that is open already, else a new one.

    Args:
        scenario: What the flow that is called in the block need not read and check again.
    """
    night = _night.get() or NightContext(scenario)
    token = _night.set(night)
    try:
        yield night
    finally:
        _night.reset(token)


@contextlib.contextmanager
def interrupted_together() -> Iterator[Interruption]:
    """Let the threads that copy this context within the block end with the cause that is set on the interruption."""
    interruption = Interruption(_interruption.get())
    of_threads, of_programs = _interruption.set(interruption), INTERRUPTED.set(interruption.ends_programs)
    try:
        yield interruption
    finally:
        INTERRUPTED.reset(of_programs)
        _interruption.reset(of_threads)


# --- interruption, and waiting that can be interrupted ---------------------------------------------------------------


def raise_if_interrupted() -> None:
    """End the calling thread's run if its flow run has been interrupted or suspended.

    Raises:
        KeyboardInterrupt: The process is ending. Prefect takes it for a crash and retries nothing.
        TerminationSignal: The same, by SIGTERM; Prefect knows whether that was a person's cancellation.
        Pause: A person has suspended the flow run; the wait is resumed with it.
        CancelledByPerson: A person has cancelled a flow run that has no worker.
    """
    if context := FlowRunContext.get():
        context.flow_run_suspension_request.raise_if_requested()
    interruption = _interruption.get()
    match interruption and interruption.any_cause:
        case None:
            return
        case TerminationSignal() as cause:
            raise TerminationSignal(signal=cause.signal)
        case Pause() as cause:
            raise Pause(state=cause.state)
        case CancelledByPerson():
            raise CancelledByPerson
        case _:
            raise KeyboardInterrupt("the process was interrupted; submitted jobs keep running")


PATIENCE = 720
"""How long to wait, in first delays: two hours of 10 seconds each. Each of a stage's retries waits as long again."""

LONGEST_DELAY = 30
"""The longest time between two tries, in first delays: five minutes."""

_WAKE_UP = 1.0


def wait_out(
    call: Callable[[], R],
    errors: tuple[type[TransientError], ...],
    *,
    first_delay: float,
    patience: float = PATIENCE,
    note: Callable[[str | None], None] = lambda what: None,
) -> R:
    """Call until no such error is raised; the run's log names what is waited for, once.

    Args:
        call: What is tried.
        errors: What is waited for; anything else is raised at once.
        first_delay: Seconds before the second try; each further delay is twice as long, up to `LONGEST_DELAY` times.
        patience: How many first delays in all.
        note: Called with what is waited for, and with None when the wait is over, however.

    Raises:
        TransientError: The last one, after the patience.
        KeyboardInterrupt: The process is ending; or what else ends the flow run (see `raise_if_interrupted`).
    """
    over = time.monotonic() + patience * first_delay
    delay, logged = first_delay, ""
    try:
        while True:
            try:
                return call()
            except errors as error:
                if time.monotonic() + delay > over:
                    raise
                # The same error is logged once, and not for every try of a night.
                if str(error) != logged:
                    run_log().warning("waiting, and trying again: %s", error)
                    note(str(error))
                logged = str(error)
            except Exception:
                # What an interruption has broken off, such as a program that was killed, failed for no other reason.
                raise_if_interrupted()
                raise
            _sleep(delay)
            delay = min(2 * delay, LONGEST_DELAY * first_delay)
    finally:
        if logged:
            note(None)


def _sleep(seconds: float) -> None:
    """Sleep, but not through an interruption."""
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        raise_if_interrupted()
        time.sleep(min(left, _WAKE_UP))
    raise_if_interrupted()
