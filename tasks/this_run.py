"""The flow run that the code runs in."""

from prefect.client.schemas.objects import FlowRun
from prefect.context import FlowRunContext


def this_flow_run() -> FlowRun | None:
    """The flow run of the calling thread; None outside of any, as in a cancellation hook or a command."""
    context = FlowRunContext.get()
    return context.flow_run if context else None
