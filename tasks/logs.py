"""The log of the run that this is, wherever the code is called from."""

import logging
from typing import Any

from prefect.exceptions import MissingContextError
from prefect.logging import get_run_logger


def run_log() -> "logging.Logger | logging.LoggerAdapter[Any]":
    """The flow or task run's log; a plain one in a hook or a command, which Prefect calls outside of any run."""
    try:
        return get_run_logger()
    except MissingContextError:
        return logging.getLogger("nightbridge")
