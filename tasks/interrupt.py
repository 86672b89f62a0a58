"""The end of a flow run before its time: only one thread is told, and the others of its subflows have to end too.

A person's Ctrl-C, SIGTERM, a cancellation and a suspension all come here, and each thread ends with what its flow run
ended with, because Prefect makes the state of a run out of it. Slurm jobs are no part of it: they go on, and the next
run of the same night finds them, unless a person cancelled them.
"""

import contextlib
import contextvars
import time
from collections.abc import Callable, Iterator
from typing import NoReturn, TypeVar

from prefect.context import FlowRunContext
from prefect.exceptions import Pause, TerminationSignal

from nightbridge.errors import TransientError
from nightbridge.tasks.this_run import run_log

R = TypeVar("R")


PATIENCE = 720
"""How long is waited, in first delays: two hours of 10 seconds each. Each of a stage's retries waits as long again."""


LONGEST_DELAY = 30
"""The longest time between two tries, in first delays: five minutes."""


_WAKE_UP = 1.0


def wait_out(
    call: Callable[[], R], errors: tuple[type[TransientError], ...], *, first_delay: float, patience: float = PATIENCE
) -> R:
    """Call until no such error is raised; what is waited for stands in the run's log.

    Args:
        call: What is tried.
        errors: What is waited for; anything else is raised at once.
        first_delay: Seconds before the second try; each further delay is twice as long, up to `LONGEST_DELAY` times.
        patience: How many first delays in all.

    Raises:
        TransientError: The last one, after the patience.
        KeyboardInterrupt: The process is ending; or what else ends the flow run (see `interrupt`).

    """
    over = time.monotonic() + patience * first_delay
    delay, told = first_delay, ""
    while True:
        try:
            return call()
        except errors as error:
            if time.monotonic() + delay > over:
                raise
            # One that stays is said once, and not for every try of a night.
            if str(error) != told:
                run_log().warning("waiting, and trying again: %s", error)
            told = str(error)
        except Exception:
            # What an interruption has broken off, such as a program that was killed, failed for no other reason.
            raise_if_interrupted()
            raise
        _sleep(delay)
        delay = min(2 * delay, LONGEST_DELAY * first_delay)


def _sleep(seconds: float) -> None:
    """Sleep, awake enough for an interrupt."""
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        raise_if_interrupted()
        time.sleep(min(left, _WAKE_UP))
    raise_if_interrupted()


class _Interruption:
    """What ended a flow run; the threads of its subflows share it with their contexts."""

    cause: BaseException | None = None


_interruption: contextvars.ContextVar[_Interruption | None] = contextvars.ContextVar("interruption", default=None)


@contextlib.contextmanager
def interrupted_together() -> Iterator[None]:
    """Let what interrupts this thread within the block be heard by the threads that have a copy of its context."""
    token = _interruption.set(_Interruption())
    try:
        yield
    finally:
        _interruption.reset(token)


def interrupt_stages(cause: BaseException) -> None:
    """From now on no stage in these threads begins, and those that wait end."""
    if (interruption := _interruption.get()) is not None:
        interruption.cause = cause


def raise_if_interrupted() -> None:
    """End the calling thread's run if its flow run has been interrupted or suspended.

    Raises:
        KeyboardInterrupt: The process is ending. Prefect takes it for a crash and tries nothing again.
        TerminationSignal: The same, by SIGTERM; Prefect knows whether that was a person's cancellation.
        Pause: A person has suspended the flow run: what is being waited for is found again when it is resumed.
    """
    if context := FlowRunContext.get():
        context.flow_run_suspension_request.raise_if_requested()
    interruption = _interruption.get()
    if interruption is not None and interruption.cause is not None:
        _raise_again(interruption.cause)


def _raise_again(cause: BaseException) -> NoReturn:
    match cause:
        case TerminationSignal():
            raise TerminationSignal(signal=cause.signal)
        case Pause():
            raise Pause(state=cause.state)
        case _:
            raise KeyboardInterrupt("the process was interrupted; jobs that were submitted go on")
