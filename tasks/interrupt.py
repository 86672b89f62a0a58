"""The end of a flow run before its time: only one thread is told, and the others of its subflows have to end too.

A person's Ctrl-C, SIGTERM, a cancellation and a suspension all come here, and each thread ends with what its flow run
ended with, because Prefect makes the state of a run out of it. Slurm jobs are no part of it: they go on, and the next
run of the same night finds them, unless a person cancelled them.
"""

import contextlib
import contextvars
from collections.abc import Iterator
from typing import NoReturn

from prefect.context import FlowRunContext
from prefect.exceptions import Pause, TerminationSignal


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
