"""Why a flow run has started: for the first time, because a person retried it, or because it goes on where it was."""

from collections.abc import Sequence
from typing import Literal

from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import TERMINAL_STATES, State, StateType
from prefect.context import FlowRunContext

from tasks.mirror import insist

Start = Literal["first", "retry", "resumption"]
"""`first`; `retry`: it had ended, and a person asked for it again; `resumption`: it had not ended, but was suspended,
or given back by its worker."""

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
    types = [state.type for state in sorted(states, key=lambda state: state.timestamp)]
    while types and types[-1] is StateType.RUNNING:
        types.pop()
    while types and types[-1] in _ON_THE_WAY:
        types.pop()
    if not types:
        return "first"
    return "retry" if types[-1] in TERMINAL_STATES else "resumption"
