"""Flows in threads of this process: subflows of one flow run side by side, and calls that leave an event loop.

Prefect finds a subflow of a retried flow run again by counting: the third call is the third subflow run. Threads call
in any order, and a retried night would take one test's finished run for another's. So each thread waits with its call
until the one before it has started. A flow run that ends early ends its subflows with it, in seconds, and with their
true states.

Where an event loop runs, as in a notebook, Prefect takes a call of a flow for one that is awaited, and returns a
coroutine. So the flow API calls in a thread without a loop.

Each thread has a copy of its caller's context: a flow that is called from a flow is its subflow.
"""

import asyncio
import contextvars
import os
import signal
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from contextlib import contextmanager, suppress
from functools import partial, wraps
from queue import Empty, SimpleQueue
from typing import Any, Generic, ParamSpec, TypeVar
from uuid import UUID

from prefect._internal.control_listener import get_intent
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import FlowRunFilter
from prefect.client.schemas.objects import TERMINAL_STATES, State, StateType
from prefect.exceptions import ObjectNotFound, Pause, TerminationSignal
from prefect.states import Cancelled, Crashed

from nightbridge.processes import GUARD, end_within
from nightbridge.tasks.context import (
    CancelledByPerson,
    Interruption,
    interrupted_together,
    raise_if_interrupted,
    this_flow_run,
)
from nightbridge.tasks.prefect_calls import client_retries, show

A = TypeVar("A")
P = ParamSpec("P")
R = TypeVar("R")

_LOOK_AGAIN = 1.0

GRACE_SECONDS = 3.0
"""How long the threads of subflows may take to end and to report it to Prefect, before they are left behind."""

OWN_PROCESS_SECONDS = 5.5
"""How long a process that a worker has started takes to end: the worker looks every three seconds whether it has, and
sets the run's state itself where the process could not."""

EXIT_TERMINATED = 128 + signal.SIGTERM

_KILL_AGAIN = 0.2


class _Calls(Generic[R]):
    """Calls that threads work off, each in a copy of the context in which this is made; they are interrupted together.

    Args:
        calls: What is called.
    """

    def __init__(self, calls: Sequence[Callable[[], R]]) -> None:
        self.results: list[Future[R]] = [Future() for _ in calls]
        self._waiting: SimpleQueue[tuple[Future[R], Callable[[], R]]] = SimpleQueue()
        with interrupted_together() as self._interruption:
            for result, call in zip(self.results, calls, strict=True):
                self._waiting.put((result, partial(contextvars.copy_context().run, call)))

    def start(self, most: int, name: str) -> None:
        """Begin to work them off, so many at once, in threads of this name."""
        for _ in range(min(len(self.results), most)):
            # Not those of a pool, for which Python would wait before the process ends.
            threading.Thread(target=self._work_off, name=name, daemon=True).start()

    def _work_off(self) -> None:
        while True:
            try:
                result, call = self._waiting.get_nowait()
            except Empty:
                return
            if not result.set_running_or_notify_cancel():
                continue
            try:
                result.set_result(call())
            except BaseException as error:  # also what ends a flow run: the waiting thread raises it again
                result.set_exception(error)

    def end(self, cause: BaseException) -> None:
        """End them for what ended the calling thread; what has not ended after `GRACE_SECONDS` is left behind."""
        self._interruption.cause = cause
        for result in self.results:
            result.cancel()
        over = time.monotonic() + GRACE_SECONDS
        while any(result.running() for result in self.results) and time.monotonic() < over:
            # Threads that wait for a program hear of nothing else; the next one that they start is ended as well.
            GUARD.kill_interrupted()
            time.sleep(_KILL_AGAIN)


# --- side by side ----------------------------------------------------------------------------------------------------

_started: contextvars.ContextVar[threading.Event | None] = contextvars.ContextVar("nightbridge_started", default=None)
"""What the next call waits for."""


def mark_started() -> None:
    """Let the next subflow start; called first by each subflow."""
    if (started := _started.get()) is not None:
        started.set()


def side_by_side(call: Callable[[A], R], arguments: Sequence[A], *, most: int) -> list[R]:
    """Call a function that runs a subflow for each argument in threads; return the results in the arguments' order.

    When the calling thread is interrupted, or one of the calls raises, the others end, too. What has not ended after
    `GRACE_SECONDS` is left behind, and no subflow stays Running: its state is set from here.

    Args:
        call: Runs one subflow, in this flow run's context, so that it becomes a subflow of this one.
        arguments: One for each call.
        most: How many run at once.
    """
    started = [threading.Event() for _ in arguments]

    def one(number: int, argument: A) -> R:
        while number and not started[number - 1].wait(_LOOK_AGAIN):
            raise_if_interrupted()
        raise_if_interrupted()
        _started.set(started[number])  # in this thread's own copy of the context
        try:
            return call(argument)
        finally:
            # A subflow that Prefect found finished, or that could not start, never marks its start.
            started[number].set()

    calls = _Calls([partial(one, number, argument) for number, argument in enumerate(arguments)])
    try:
        calls.start(most, "subflow")
        going = set(calls.results)
        while going:
            ended, going = wait(going, timeout=_LOOK_AGAIN, return_when=FIRST_EXCEPTION)
            for result in ended:
                result.result()
            raise_if_interrupted()
    except BaseException as error:
        _leave_together(error, calls)
        raise
    return [result.result() for result in calls.results]


def _leave_together(cause: BaseException, calls: "_Calls[Any]") -> None:
    """End the threads of this flow run's subflows for the same cause, and leave none of them Running."""
    # An error is handled by the flow: it still has to report its end, which takes longer while a server is away.
    if not isinstance(cause, Exception) and _has_own_process():
        end_within(OWN_PROCESS_SECONDS, 0 if isinstance(cause, Pause) else EXIT_TERMINATED)
    calls.end(cause)
    show("how its subflows ended", lambda: _end_subflows(_state_after(cause)))


def _has_own_process() -> bool:
    """Whether a worker has started this process for this flow run alone."""
    flow_run = this_flow_run()
    return flow_run is not None and os.environ.get("PREFECT__FLOW_RUN_ID") == str(flow_run.id)


def _state_after(cause: BaseException) -> State[Any]:
    """The state of a subflow that could not report its own."""
    if isinstance(cause, CancelledByPerson) or (isinstance(cause, TerminationSignal) and get_intent() == "cancel"):
        return Cancelled(message="The night was cancelled.")
    if isinstance(cause, Pause):
        # Not one that is to be rescheduled: without a deployment it could never be resumed.
        message = "The night is suspended; a submitted job keeps running."
        return State(type=StateType.PAUSED, name="Suspended", message=message)
    return Crashed(message="The process was interrupted; a submitted job keeps running.")


def _end_subflows(state: State[Any]) -> None:
    parent = this_flow_run()
    if parent is None:
        return
    unfinished = FlowRunFilter.model_validate(
        {"parent_flow_run_id": {"any_": [parent.id]}, "state": {"type": {"not_any_": list(TERMINAL_STATES)}}}
    )
    with get_client(sync_client=True) as client:
        for flow_run in client.read_flow_runs(flow_run_filter=unfinished):
            client.set_flow_run_state(flow_run.id, state, force=True)


# --- cancelled where no worker is ------------------------------------------------------------------------------------

CANCELLED_SECONDS = 5.0
"""Between two looks whether a flow run without a worker is cancelled."""

_heeded: contextvars.ContextVar[bool] = contextvars.ContextVar("nightbridge_heeded", default=False)
"""Whether the flow around this one hears of a cancellation."""


@contextmanager
def heeds_cancellation() -> Iterator[None]:
    """Let a person's cancellation in Prefect end what runs in the block, and all threads and programs of it.

    A worker ends the process of a flow run that it has started. One that a person started, by the command line or from
    Python, has nobody but itself to look.

    Raises:
        CancelledByPerson: The flow run is cancelled.
    """
    over = threading.Event()
    is_heeded = this_flow_run() is None or _heeded.get() or _has_own_process()
    before = _heeded.set(True)
    try:
        with interrupted_together() as interruption:
            if not is_heeded:
                look = partial(_look_for_cancellation, interruption, over)
                run = contextvars.copy_context().run
                threading.Thread(target=run, args=(look,), name="cancellation", daemon=True).start()
            try:
                yield
            except Exception:
                if interruption.cause is None:
                    raise
                raise CancelledByPerson from None  # what it has broken off failed for no other reason
    finally:
        over.set()
        _heeded.reset(before)


def _look_for_cancellation(interruption: Interruption, over: threading.Event) -> None:
    """Interrupt this flow run once it, or one that it was called in, is cancelled; then end its programs."""
    while not (over.wait(_LOOK_AGAIN) or interruption.cause):
        # Why Prefect does not answer is told by the flow run itself, which asks more of it.
        with suppress(Exception), get_client(sync_client=True) as client, client_retries(0):
            ids = _callers(client)
            cancelled = {"type": {"any_": [StateType.CANCELLING, StateType.CANCELLED]}}
            wanted = FlowRunFilter.model_validate({"id": {"any_": ids}, "state": cancelled})
            while not (over.wait(CANCELLED_SECONDS) or interruption.cause):
                if client.read_flow_runs(flow_run_filter=wanted, limit=1):
                    interruption.cause = CancelledByPerson()
    while not over.wait(_KILL_AGAIN):
        GUARD.kill_interrupted()


def _callers(client: SyncPrefectClient) -> list[UUID]:
    """The ids of this flow run, of the one that called it, and so on to the outermost."""
    flow_run, ids = this_flow_run(), []
    with suppress(ObjectNotFound):  # somebody has deleted it
        while flow_run:
            ids.append(flow_run.id)
            call = client.read_task_run(flow_run.parent_task_run_id) if flow_run.parent_task_run_id else None
            flow_run = client.read_flow_run(call.flow_run_id) if call and call.flow_run_id else None
    return ids


# --- outside of event loops -------------------------------------------------------------------------------------------


def outside_of_loops(call: Callable[P, R]) -> Callable[P, R]:
    """Let a function that runs flows be called where an event loop runs, which waits for it as for any function."""

    @wraps(call)
    def run(*arguments: P.args, **named: P.kwargs) -> R:
        if not _loop_runs():  # not within an `except`: an error of the call would be shown as a consequence of that one
            return call(*arguments, **named)
        task = asyncio.current_task()
        calls = _in_a_thread(partial(call, *arguments, **named))
        result = calls.results[0]
        try:
            while not wait([result], _LOOK_AGAIN).done:
                # Under `asyncio.run` the first Ctrl-C only cancels the task, which would hear of it at its next await.
                if task is not None and task.cancelling():
                    raise KeyboardInterrupt
        except BaseException as error:  # Ctrl-C, or a signal that a person's cancellation has sent
            calls.end(error)
            raise
        return result.result()

    return run


def _loop_runs() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def async_twin(call: Callable[P, R]) -> Callable[P, Coroutine[Any, Any, R]]:
    """Make the function that is awaited instead of called; when its task is cancelled, what it runs ends first."""

    @wraps(call)
    async def run(*arguments: P.args, **named: P.kwargs) -> R:
        calls = _in_a_thread(partial(call, *arguments, **named))
        result = asyncio.wrap_future(calls.results[0])
        try:
            # An interrupted cell of a notebook cancels its task without waking up a loop that has nothing else to do.
            while not result.done():
                await asyncio.wait([result], timeout=_LOOK_AGAIN)
            return result.result()
        except asyncio.CancelledError:
            result.cancel()
            await asyncio.to_thread(calls.end, KeyboardInterrupt())
            raise

    run.__name__ = run.__qualname__ = f"a{call.__name__}"
    run.__doc__ = f"Await `{call.__name__}`, which see."
    return run


def _in_a_thread(call: Callable[[], R]) -> _Calls[R]:
    calls = _Calls([call])
    calls.start(1, "flow")
    return calls
