"""A harvest on a compute node, for sites whose flows run where nothing big may run, such as a login node.

The node runs this package as the flow's host would have, on the same shared file system. A harvest resumes where it
was, so a job that is cancelled, killed, or left alone by a flow that died costs time and nothing else. How a program
gets onto a node is the caller's: this module knows no Slurm.

The part of a harvest on a compute node that runs there.

Its order lies in a file of the attempt's folder. What is secret comes on stdin and is written down nowhere. Progress
goes to stderr, a line of JSON for each, and so does everything else that is said; how it ended is the last line of
stdout.
"""

import logging
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from pydantic import Field, ValidationError

from nightbridge.errors import NightbridgeError, TransientError
from nightbridge.files import write_model
from nightbridge.harvest.archive import load_record
from nightbridge.harvest.request import HarvestOrder, carry_out
from nightbridge.models import Model, RunRecord, SecretRef
from nightbridge.node_programs import Failure, RunOnNode, begin_on_node, read_answer
from nightbridge.processes import own_program
from nightbridge.store.factory import open_store
from nightbridge.store.protocol import ObjectStore
from nightbridge.store.transfers import Progress

ORDER_FILE = "harvest-order.json"
"""The order, in the attempt's folder."""

_VARIABLE = "NIGHTBRIDGE_HARVEST_"

log = logging.getLogger(__name__)


def harvest_on_node(
    order: HarvestOrder,
    store: ObjectStore,
    secrets: Mapping[SecretRef, str],
    run_on_node: RunOnNode,
    timeout: float,
    on_progress: Callable[[Progress], None] | None = None,
) -> RunRecord:
    """Have a run measured and stored by a job on a compute node; return its record.

    Args:
        order: What to harvest.
        store: The opened store of the order, as this host reaches it.
        secrets: The secrets of the run and of the store with their values, which reach the node through Slurm alone.
        run_on_node: How a program gets there.
        timeout: Seconds for waiting in the queue and the harvest together.
        on_progress: Called in another thread, at intervals.

    Raises:
        TransientError: The cluster did not let the harvest end, or the store did not answer; calling again resumes.
        LaunchRefused: The cluster refused the job for good.
        PermanentError: The store refuses, or a node cannot run this package.
        DamagedData: The run was committed earlier, and objects of it are missing.

    """
    there, variables = _for_the_node(order, secrets)
    path = order.plan.attempt_dir / ORDER_FILE
    write_model(path, there)
    given = NodeSecrets(variables=variables, masked=tuple(secrets.values()))
    finished = run_on_node(
        f"harvest-{order.run.run_key}-a{order.jobs[-1].attempt}",
        own_program("nightbridge.harvest.on_node", [str(path)]),
        environment={},
        timeout=timeout,
        given=given.model_dump_json().encode(),
        on_line=lambda line: _heard(line, on_progress),
    )
    answer = read_answer(
        finished, NodeAnswer, doing="harvest", thing=order.run.run_key, instead='on = "host" in [harvest]'
    )
    if answer.failure:
        raise answer.failure.error()
    record = load_record(store, order.prefix)
    if record is None:
        raise TransientError(
            "a compute node harvested the run, but it is not visible in this store",
            thing=store.url_of(order.prefix),
            advice="Use a store that this host and the nodes share",
        )
    return record


def _for_the_node(order: HarvestOrder, secrets: Mapping[SecretRef, str]) -> tuple[HarvestOrder, dict[str, str]]:
    """The order with its store's secrets in the node's environment, and that environment.

    Where the store names no keys, boto3 searches by itself, and must find on the node what it finds here.
    """
    keys = {
        field: SecretRef(source="env", name=f"{_VARIABLE}{field.upper()}")
        for field in ("access_key", "secret_key")
        if getattr(order.store, field) is not None
    }
    variables = {reference.name: secrets[getattr(order.store, field)] for field, reference in keys.items()}
    if not keys:
        variables = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
    return order.model_copy(update={"store": order.store.model_copy(update=keys)}), variables


def _heard(line: str, on_progress: Callable[[Progress], None] | None) -> None:
    try:
        progress = Progress.model_validate_json(line)
    except ValidationError:
        log.info("%s", line)
        return
    if on_progress is not None:
        on_progress(progress)


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
