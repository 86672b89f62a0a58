"""The flow run that the code runs in, and its log."""

import logging
from typing import Any

from prefect.client.schemas.objects import FlowRun
from prefect.context import FlowRunContext
from prefect.exceptions import MissingContextError
from prefect.logging import get_run_logger


def this_flow_run() -> FlowRun | None:
    """The flow run of the calling thread; None outside of any, as in a cancellation hook or a command."""
    context = FlowRunContext.get()
    return context.flow_run if context else None


def run_log() -> "logging.Logger | logging.LoggerAdapter[Any]":
    """The flow or task run's log; a plain one in a hook or a command, which Prefect calls outside of any run."""
    try:
        return get_run_logger()
    except MissingContextError:
        return logging.getLogger("nightbridge")
