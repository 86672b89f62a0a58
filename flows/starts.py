"""Subflows of one flow run that go on side by side, and yet begin in a fixed order.

Prefect finds a subflow of a retried flow run again by counting: the third call is the third subflow run. Threads call
in any order, and a retried night would take one test's finished run for another's. So each thread waits with its call
until the one before it has begun.
"""

import contextvars
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

A = TypeVar("A")
R = TypeVar("R")

_begun: contextvars.ContextVar[threading.Event | None] = contextvars.ContextVar("begun", default=None)


def tell_begun() -> None:
    """Let the next subflow begin; the first thing that a subflow does."""
    if event := _begun.get():
        event.set()


def side_by_side(
    call: Callable[[A], R], arguments: Sequence[A], *, most: int, on_interrupt: Callable[[], None]
) -> list[R]:
    """Call a function that runs a subflow for each argument in threads; return the results in the arguments' order.

    Args:
        call: Runs one subflow, in this flow run's context, so that it becomes a subflow of this one.
        arguments: One for each call.
        most: How many go on at once.
        on_interrupt: Called when this thread is interrupted; has to make the others end, since it waits for them.
    """
    begun = [threading.Event() for _ in arguments]

    def one(number: int, argument: A) -> R:
        if number:
            begun[number - 1].wait()
        with _telling(begun[number]):
            return call(argument)

    with ThreadPoolExecutor(max(1, min(len(arguments), most))) as threads:
        going = [
            threads.submit(contextvars.copy_context().run, one, number, argument)
            for number, argument in enumerate(arguments)
        ]
        try:
            return [result.result() for result in going]
        except BaseException:
            threads.shutdown(wait=False, cancel_futures=True)
            on_interrupt()
            raise


@contextmanager
def _telling(event: threading.Event) -> Iterator[None]:
    token = _begun.set(event)
    try:
        yield
    finally:
        # A subflow that Prefect found finished, or that could not start, never says that it has begun.
        event.set()
        _begun.reset(token)
