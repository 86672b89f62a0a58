"""Why a flow run has started: for the first time, because a person retried it, or because it goes on where it was."""

from collections.abc import Sequence
from typing import Literal

from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import TERMINAL_STATES, State, StateType
from prefect.context import FlowRunContext

from nightbridge.tasks.mirror import insist

Start = Literal["first", "retry", "resumption"]
"""`first`; `retry`: it had ended, and a person asked for it again; `resumption`: it had not ended, but was suspended,
given back by its worker, or had crashed and goes on by itself."""

RESUMING = "Resuming"
"""Name of the state of a flow run that goes on without a person's retry: Prefect's own after a suspension, the reaper's
after a crash."""

_ON_THE_WAY = frozenset({StateType.SCHEDULED, StateType.PENDING})


def this_start() -> Start:
    """Why this flow run has started.

    Prefect's own count of starts does not tell: it counts those after the loss of a worker, and not those after a
    suspension.

    Raises:
        PrefectAway: Prefect's server did not answer for as long as the patience lasts.
    """
    context = FlowRunContext.get()
    if context is None or context.flow_run is None:
        return "first"
    flow_run = context.flow_run.id

    def read() -> list[State]:
        with get_client(sync_client=True) as client:
            return client.read_flow_run_states(flow_run)

    return start_after(insist("the states that this flow run has had", read))


def start_after(states: Sequence[State]) -> Start:
    """Why a flow run has started that has had these states; its present one, Running, is the last."""
    ordered = sorted(states, key=lambda state: state.timestamp)
    on_the_way: set[str | None] = set()
    while ordered and ordered[-1].type is StateType.RUNNING:
        ordered.pop()
    while ordered and ordered[-1].type in _ON_THE_WAY:
        on_the_way.add(ordered.pop().name)
    if not ordered:
        return "first"
    by_itself = RESUMING in on_the_way or ordered[-1].type not in TERMINAL_STATES
    return "resumption" if by_itself else "retry"
