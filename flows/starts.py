"""Subflows of one flow run that go on side by side, and yet begin in a fixed order.

Prefect finds a subflow of a retried flow run again by counting: the third call is the third subflow run. Threads call
in any order, and a retried night would take one test's finished run for another's. So each thread waits with its call
until the one before it has begun.
"""

import contextvars
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from contextlib import contextmanager
from functools import partial
from queue import Empty, SimpleQueue
from typing import TypeVar

from flows.leaving import leave_together
from tasks.interrupt import interrupted_together, raise_if_interrupted

A = TypeVar("A")
R = TypeVar("R")

_LOOK_AGAIN = 1.0

_begun: contextvars.ContextVar[threading.Event | None] = contextvars.ContextVar("begun", default=None)


def tell_begun() -> None:
    """Let the next subflow begin; the first thing that a subflow does."""
    if event := _begun.get():
        event.set()


def side_by_side(call: Callable[[A], R], arguments: Sequence[A], *, most: int) -> list[R]:
    """Call a function that runs a subflow for each argument in threads; return the results in the arguments' order.

    When the calling thread is interrupted, or one of the calls raises, the others end, too. What has not ended after
    `GRACE_SECONDS` is left behind, and no subflow stays Running: its state is set from here.

    Args:
        call: Runs one subflow, in this flow run's context, so that it becomes a subflow of this one.
        arguments: One for each call.
        most: How many go on at once.
    """
    begun = [threading.Event() for _ in arguments]

    def one(number: int, argument: A) -> R:
        while number and not begun[number - 1].wait(_LOOK_AGAIN):
            raise_if_interrupted()
        raise_if_interrupted()
        with _telling(begun[number]):
            return call(argument)

    results: list[Future[R]] = [Future() for _ in arguments]
    waiting: SimpleQueue[tuple[Future[R], Callable[[], R]]] = SimpleQueue()
    with interrupted_together():
        for number, argument in enumerate(arguments):
            waiting.put((results[number], partial(contextvars.copy_context().run, one, number, argument)))
        try:
            for _ in range(min(len(arguments), most)):
                # Not those of a pool, for which Python would wait before the process ends.
                threading.Thread(target=_work_off, args=(waiting,), name="subflow", daemon=True).start()
            _wait_for(results)
        except BaseException as error:
            leave_together(error, results)
            raise
    return [result.result() for result in results]


def _work_off(waiting: "SimpleQueue[tuple[Future[R], Callable[[], R]]]") -> None:
    while True:
        try:
            result, call = waiting.get_nowait()
        except Empty:
            return
        if not result.set_running_or_notify_cancel():
            continue
        try:
            result.set_result(call())
        except BaseException as error:  # also what ends a flow run: the waiting thread raises it again
            result.set_exception(error)


def _wait_for(results: Sequence[Future[R]]) -> None:
    """Wait until all have ended, or raise the error of the first that fails, or what interrupts this flow run."""
    going = set(results)
    while going:
        ended, going = wait(going, timeout=_LOOK_AGAIN, return_when=FIRST_EXCEPTION)
        for result in ended:
            result.result()
        raise_if_interrupted()


@contextmanager
def _telling(event: threading.Event) -> Iterator[None]:
    token = _begun.set(event)
    try:
        yield
    finally:
        # A subflow that Prefect found finished, or that could not start, never says that it has begun.
        event.set()
        _begun.reset(token)
