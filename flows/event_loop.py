"""Flow API functions where an event loop runs: in a notebook, under `asyncio.run`, in an `async` flow.

Where a loop runs, Prefect takes a call of a flow for one that is awaited, and returns a coroutine. So the call is made
in a thread without a loop. The thread copies the context: a flow that is called from a flow is its subflow.
"""

import asyncio
import contextvars
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, wait
from functools import partial, wraps
from typing import Any, ParamSpec, TypeVar

from nightbridge.flows.side_by_side import end_threads
from nightbridge.tasks.context import Interruption, interrupted_together

P = ParamSpec("P")
R = TypeVar("R")

_LOOK_AGAIN = 0.5


def outside_of_loops(call: Callable[P, R]) -> Callable[P, R]:
    """Let a function that runs flows be called where an event loop runs, which waits for it as for any function."""

    @wraps(call)
    def run(*arguments: P.args, **named: P.kwargs) -> R:
        try:
            task = asyncio.current_task()
        except RuntimeError:  # no loop runs
            return call(*arguments, **named)
        result, interruption = _start(partial(call, *arguments, **named))
        try:
            while not wait([result], _LOOK_AGAIN).done:
                # Under `asyncio.run` the first Ctrl-C only cancels the task, which would hear of it at its next await.
                if task is not None and task.cancelling():
                    raise KeyboardInterrupt
        except BaseException as error:  # Ctrl-C, or a signal that a person's cancellation has sent
            end_threads(error, interruption, [result])
            raise
        return result.result()

    return run


def async_twin(call: Callable[P, R]) -> Callable[P, Coroutine[Any, Any, R]]:
    """Make the function that is awaited instead of called; when its task is cancelled, what it runs ends first."""

    @wraps(call)
    async def run(*arguments: P.args, **named: P.kwargs) -> R:
        result, interruption = _start(partial(call, *arguments, **named))
        try:
            return await asyncio.wrap_future(result)
        except asyncio.CancelledError:
            await asyncio.to_thread(end_threads, KeyboardInterrupt(), interruption, [result])
            raise

    run.__name__ = run.__qualname__ = f"a{call.__name__}"
    run.__doc__ = f"Await `{call.__name__}`, which see."
    return run


def _start(call: Callable[[], R]) -> tuple[Future[R], Interruption]:
    """Begin a call in a thread; return its result and what interrupts it."""
    result: Future[R] = Future()
    result.set_running_or_notify_cancel()

    def work() -> None:
        try:
            result.set_result(context.run(call))
        except BaseException as error:  # also what ends a flow run: the waiting thread raises it again
            result.set_exception(error)

    with interrupted_together() as interruption:
        context = contextvars.copy_context()
    # Not one of a pool, for which Python would wait before the process ends.
    threading.Thread(target=work, name=getattr(call, "__name__", "flow"), daemon=True).start()
    return result, interruption
