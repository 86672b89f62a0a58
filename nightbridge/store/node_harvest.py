"""The part of a harvest on a compute node that runs there.

Its order lies in a file of the attempt's folder. What is secret comes on stdin and is written down nowhere. Progress
goes to stderr, a line of JSON for each, and so does everything else that is said; how it ended is the last line of
stdout.
"""

import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from pydantic import Field

from nightbridge.errors import NightbridgeError
from nightbridge.models import Model
from nightbridge.node_programs import Failure, begin_on_node
from nightbridge.store.objects import open_store
from nightbridge.store.order import HarvestOrder, carry_out
from nightbridge.store.progress import Progress

PROGRESS_INTERVAL = 5.0
"""Seconds between two lines of progress."""


class NodeSecrets(Model):
    """What the node gets on stdin."""

    variables: dict[str, str] = Field(
        {}, description="Environment variables that the order refers to, or by which boto3 finds its credentials."
    )
    masked: tuple[str, ...] = Field((), description="Values that must not leave the node.")


class NodeAnswer(Model):
    """How a harvest on a node ended."""

    failure: Failure | None = None


def main(arguments: Sequence[str]) -> int:
    """Carry out the order in the file that is the only argument; return the exit code."""
    begin_on_node()
    given = NodeSecrets.model_validate_json(sys.stdin.read())
    os.environ.update(given.variables)
    order = HarvestOrder.model_validate_json(Path(arguments[0]).read_bytes())
    try:
        carry_out(order, open_store(order.store), given.masked, _Told())
    except NightbridgeError as error:
        answer = NodeAnswer(failure=Failure.of(error, given.masked))
    else:
        answer = NodeAnswer()
    print(answer.model_dump_json(), flush=True)
    return 1 if answer.failure else 0


class _Told:
    """Writes progress down, not too often; the last one always."""

    def __init__(self) -> None:
        self._due = 0.0

    def __call__(self, progress: Progress) -> None:
        if progress.files_done == progress.files_total or time.monotonic() >= self._due:
            print(progress.model_dump_json(), file=sys.stderr, flush=True)
            self._due = time.monotonic() + PROGRESS_INTERVAL
