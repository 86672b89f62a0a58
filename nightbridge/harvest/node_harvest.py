"""A harvest on a compute node, for sites whose flows run where nothing big may run, such as a login node.

The node runs this module as a program, on the same shared file system, as the flow's host would have run the harvest.
The request is in a file of the attempt's folder. Secrets come on stdin and are written nowhere. Progress goes to
stderr, one line of JSON each, as do log lines; the last line of stdout is the result. A harvest resumes where it was,
so a job that is cancelled, killed, or orphaned by a flow that died costs time and nothing else. How a program gets onto
a node is the caller's: this module knows no Slurm.
"""

import hashlib
import logging
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from pydantic import ConfigDict, Field, ValidationError

from nightbridge.errors import NightbridgeError, TransientError
from nightbridge.files import MODEL_LIMIT, read_regular, write_model
from nightbridge.harvest.harvesting import HarvestRequest, run_harvest
from nightbridge.harvest.manifest import load_record
from nightbridge.models import Model, RunRecord, SecretRef
from nightbridge.node_programs import NodeResponse, RunOnNode, SerializedError, begin_on_node, read_response
from nightbridge.processes import own_program
from nightbridge.store.object_store import ObjectStore, open_store
from nightbridge.store.parallel import Progress

REQUEST_FILE = "harvest-request.json"
"""The request, in the attempt's folder."""

PROGRESS_INTERVAL = 5.0
"""Seconds between two lines of progress."""

_VARIABLE = "NIGHTBRIDGE_HARVEST_"

_log = logging.getLogger(__name__)


class NodeSecrets(Model):
    """What the node gets on stdin. Nothing of it stands in an error about it, as where stdin was cut off."""

    model_config = ConfigDict(hide_input_in_errors=True)

    variables: dict[str, str] = Field(
        {}, description="Environment variables that the request refers to, or by which boto3 finds its credentials."
    )
    masked: tuple[str, ...] = Field((), description="Values that must not leave the node.")


def harvest_on_node(
    request: HarvestRequest,
    store: ObjectStore,
    secrets: Mapping[SecretRef, str],
    run_on_node: RunOnNode,
    timeout: float,
    on_progress: Callable[[Progress], None] | None = None,
) -> RunRecord:
    """Have a run measured and stored by a job on a compute node; return its record.

    Args:
        request: What to harvest.
        store: The opened store of the request, as this host reaches it.
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

    def on_line(line: str) -> None:
        try:
            progress = Progress.model_validate_json(line)
        except ValidationError:
            _log.info("%s", line)
            return
        if on_progress is not None:
            on_progress(progress)

    for_node, variables = _with_variables(request, secrets)
    path = request.plan.attempt_dir / REQUEST_FILE
    write_model(path, for_node)
    finished = run_on_node(
        _job_name(request),
        own_program("nightbridge.harvest.node_harvest", [str(path)]),
        environment={},
        timeout=timeout,
        given=NodeSecrets(variables=variables, masked=tuple(secrets.values())).model_dump_json().encode(),
        on_line=on_line,
    )
    run_key, instead = request.run.run_key, 'on = "host" in [harvest]'
    read_response(finished, NodeResponse, doing="harvest", subject=run_key, instead=instead)
    record = load_record(store, request.prefix)
    if record is None:
        raise TransientError(
            "a compute node harvested the run, but it is not visible in this store",
            subject=store.url_of(request.prefix),
            advice="Use a store that this host and the nodes share",
        )
    return record


def _job_name(request: HarvestRequest) -> str:
    """The name of the harvest's job, of this workspace alone: a job of the name that still lives is cancelled first."""
    folder = hashlib.sha256(str(request.plan.attempt_dir).encode()).hexdigest()[:12]
    return f"harvest-{request.run.run_key}-a{request.job.attempt}-{folder}"


def _with_variables(request: HarvestRequest, secrets: Mapping[SecretRef, str]) -> tuple[HarvestRequest, dict[str, str]]:
    """The request with its store's secrets in the node's environment, and that environment.

    Where the store names no keys, boto3 searches by itself, and must find on the node what it finds here.
    """
    named = {field: getattr(request.store, field) for field in ("access_key", "secret_key")}
    keys = {
        field: SecretRef(source="env", name=f"{_VARIABLE}{field.upper()}") for field, found in named.items() if found
    }
    variables = {reference.name: secrets[named[field]] for field, reference in keys.items()}
    if not keys:
        variables = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
    return request.model_copy(update={"store": request.store.model_copy(update=keys)}), variables


def main(arguments: Sequence[str]) -> int:
    """Run the harvest that the file requests, the only argument; return the exit code."""
    begin_on_node()
    given = NodeSecrets.model_validate_json(sys.stdin.read())
    os.environ.update(given.variables)
    request = HarvestRequest.model_validate_json(read_regular(Path(arguments[0]), limit=MODEL_LIMIT))
    due = 0.0

    def report(progress: Progress) -> None:
        nonlocal due
        if progress.files_done == progress.files_total or time.monotonic() >= due:
            print(progress.model_dump_json(), file=sys.stderr, flush=True)
            due = time.monotonic() + PROGRESS_INTERVAL

    try:
        run_harvest(request, open_store(request.store), given.masked, report)
        response = NodeResponse()
    except NightbridgeError as error:
        response = NodeResponse(failure=SerializedError.of(error, given.masked))
    print(response.model_dump_json(), flush=True)
    return 1 if response.failure else 0
