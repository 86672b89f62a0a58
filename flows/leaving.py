"""Leaving a flow run before its end together with its subflows, in seconds, with states that tell the truth."""

import os
import signal
import time
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

from prefect._internal.control_listener import get_intent
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import FlowRunFilter
from prefect.client.schemas.objects import TERMINAL_STATES, State, StateType
from prefect.context import FlowRunContext
from prefect.exceptions import Pause, TerminationSignal
from prefect.states import Cancelled, Crashed

from nightbridge.endings import end_within
from nightbridge.guard import GUARD
from tasks.interrupt import interrupt_stages
from tasks.mirror import show

GRACE_SECONDS = 3.0
"""How long the threads of subflows may take to end and to tell Prefect, before they are left behind."""

OWN_PROCESS_SECONDS = 5.5
"""How long a process that a worker has started takes to end: the worker looks every three seconds whether it has, and
tells the run's state itself where the process could not."""

EXIT_TERMINATED = 128 + signal.SIGTERM

_KILL_AGAIN = 0.2


def leave_together(cause: BaseException, results: Sequence[Future[Any]]) -> None:
    """End the threads of this flow run's subflows, and see that none of them stays Running.

    Args:
        cause: What ends this flow run, and so the subflows.
        results: What the threads work on.
    """
    interrupt_stages(cause)
    if _has_own_process():
        end_within(OWN_PROCESS_SECONDS, 0 if isinstance(cause, Pause) else EXIT_TERMINATED)
    for result in results:
        result.cancel()
    over = time.monotonic() + GRACE_SECONDS
    while any(result.running() for result in results) and time.monotonic() < over:
        if not isinstance(cause, Exception):
            # Threads that wait for a program hear of nothing else; the next one that they start is ended as well.
            GUARD.kill_all()
        time.sleep(_KILL_AGAIN)
    show("how its subflows ended", lambda: _end_subflows(_state_after(cause)))


def _has_own_process() -> bool:
    """Whether a worker has started this process for this flow run alone."""
    context = FlowRunContext.get()
    flow_run = context.flow_run if context else None
    return flow_run is not None and os.environ.get("PREFECT__FLOW_RUN_ID") == str(flow_run.id)


def _state_after(cause: BaseException) -> State[Any]:
    """The state of a subflow that could not tell its own."""
    if isinstance(cause, TerminationSignal) and get_intent() == "cancel":
        return Cancelled(message="The night was cancelled.")
    if isinstance(cause, Pause):
        # Not one that is to be rescheduled: without a deployment that could never go on.
        message = "The night is suspended; a job that was submitted goes on."
        return State(type=StateType.PAUSED, name="Suspended", message=message)
    return Crashed(message="The process was interrupted; a job that was submitted goes on.")


def _end_subflows(state: State[Any]) -> None:
    context = FlowRunContext.get()
    if context is None or context.flow_run is None:
        return
    going = FlowRunFilter.model_validate(
        {"parent_flow_run_id": {"any_": [context.flow_run.id]}, "state": {"type": {"not_any_": list(TERMINAL_STATES)}}}
    )
    with get_client(sync_client=True) as client:
        for flow_run in client.read_flow_runs(flow_run_filter=going):
            client.set_flow_run_state(flow_run.id, state, force=True)
