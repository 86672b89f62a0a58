"""Subflows of one flow run, side by side in threads: started in a fixed order, and ended together.

Prefect finds a subflow of a retried flow run again by counting: the third call is the third subflow run. Threads call
in any order, and a retried night would take one test's finished run for another's. So each thread waits with its call
until the one before it has started.

A flow run that ends early ends its subflows with it, in seconds, and with their true states.
"""

import contextvars
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from prefect._internal.control_listener import get_intent
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import FlowRunFilter
from prefect.client.schemas.objects import TERMINAL_STATES, State, StateType
from prefect.exceptions import Pause, TerminationSignal
from prefect.states import Cancelled, Crashed

from nightbridge.processes import GUARD, end_within
from nightbridge.tasks.context import Interruption, interrupted_together, raise_if_interrupted, starting, this_flow_run
from nightbridge.tasks.mirror import show

A = TypeVar("A")
R = TypeVar("R")

_LOOK_AGAIN = 1.0

GRACE_SECONDS = 3.0
"""How long the threads of subflows may take to end and to report it to Prefect, before they are left behind."""

OWN_PROCESS_SECONDS = 5.5
"""How long a process that a worker has started takes to end: the worker looks every three seconds whether it has, and
sets the run's state itself where the process could not."""

EXIT_TERMINATED = 128 + signal.SIGTERM

_KILL_AGAIN = 0.2


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
        with starting(started[number]):
            return call(argument)

    results: list[Future[R]] = [Future() for _ in arguments]
    waiting: SimpleQueue[tuple[Future[R], Callable[[], R]]] = SimpleQueue()
    with interrupted_together() as interruption:
        for number, argument in enumerate(arguments):
            waiting.put((results[number], partial(contextvars.copy_context().run, one, number, argument)))
        try:
            for _ in range(min(len(arguments), most)):
                # Not those of a pool, for which Python would wait before the process ends.
                threading.Thread(target=_work_off, args=(waiting,), name="subflow", daemon=True).start()
            _wait_for(results)
        except BaseException as error:
            _leave_together(error, interruption, results)
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


def _leave_together(cause: BaseException, interruption: Interruption, results: Sequence[Future[Any]]) -> None:
    """End the threads of this flow run's subflows for the same cause, and leave none of them Running."""
    if _has_own_process():
        end_within(OWN_PROCESS_SECONDS, 0 if isinstance(cause, Pause) else EXIT_TERMINATED)
    end_threads(cause, interruption, results)
    show("how its subflows ended", lambda: _end_subflows(_state_after(cause)))


def end_threads(cause: BaseException, interruption: Interruption, results: Sequence[Future[Any]]) -> None:
    """End threads that run flows for the same cause; what has not ended after `GRACE_SECONDS` is left behind.

    Args:
        cause: What has ended the calling thread.
        interruption: What the threads look at.
        results: One for each thread.
    """
    interruption.cause = cause
    for result in results:
        result.cancel()
    over = time.monotonic() + GRACE_SECONDS
    while any(result.running() for result in results) and time.monotonic() < over:
        if not isinstance(cause, Exception):
            # Threads that wait for a program hear of nothing else; the next one that they start is ended as well.
            GUARD.kill_all()
        time.sleep(_KILL_AGAIN)


def _has_own_process() -> bool:
    """Whether a worker has started this process for this flow run alone."""
    flow_run = this_flow_run()
    return flow_run is not None and os.environ.get("PREFECT__FLOW_RUN_ID") == str(flow_run.id)


def _state_after(cause: BaseException) -> State[Any]:
    """The state of a subflow that could not report its own."""
    if isinstance(cause, TerminationSignal) and get_intent() == "cancel":
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
