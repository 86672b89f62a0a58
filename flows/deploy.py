"""What the deployments need on the Prefect server besides `prefect deploy`, and a night by hand.

python -m nightbridge.flows.deploy prepare         make the work queues; remove what older releases left
python -m nightbridge.flows.deploy night [ID]      start the nightly deployment for one night, or resume it
"""

import contextlib
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast
from uuid import UUID

import yaml
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import WorkPoolCreate
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterIdempotencyKey
from prefect.client.schemas.objects import FlowRun, State, StateType
from prefect.client.schemas.responses import DeploymentResponse
from prefect.deployments import run_deployment
from prefect.exceptions import ObjectAlreadyExists, ObjectNotFound
from prefect.states import AwaitingRetry
from prefect.workers.process import ProcessWorker

from nightbridge.blocks import load_site
from nightbridge.errors import NightbridgeError
from nightbridge.models import SiteChoice
from nightbridge.nights.records import checked_night, find_nights, new_night
from nightbridge.tasks.site import store_of

DEPLOYMENT = "nightly-regression/nightly"
PREFECT_YAML = Path("prefect.yaml")
"""In the current folder, where `prefect deploy` looks for it as well."""

FORMER_AUTOMATIONS = ("nightbridge: crash flow runs without a heartbeat",)
"""It crashed everybody's flow runs, and the living after an outage of the server; the reaper took its place."""


def prepare(definition: Path = PREFECT_YAML) -> list[str]:
    """Make the work pool and the work queues that the deployments name, and remove what older releases left.

    A queue runs one flow run at a time: `prefect deploy` would make it without a limit. A pool or queue that exists
    keeps its settings.

    Args:
        definition: The file that defines the deployments.

    Returns:
        What there is now, a line each.
    """
    pools = [deployment["work_pool"] for deployment in yaml.safe_load(definition.read_text("utf-8"))["deployments"]]
    with get_client(sync_client=True) as client:
        for name in FORMER_AUTOMATIONS:
            for automation in client.read_automations_by_name(name):
                client.delete_automation(automation.id)
        for pool in sorted({pool["name"] for pool in pools}):
            _make_pool(client, pool)
        queues = sorted({(pool["name"], pool["work_queue_name"]) for pool in pools if "work_queue_name" in pool})
        return [_make_queue(client, pool, queue) for pool, queue in queues]


def _make_pool(client: SyncPrefectClient, name: str) -> None:
    template = ProcessWorker.get_default_base_job_template()
    with contextlib.suppress(ObjectAlreadyExists):
        client.create_work_pool(WorkPoolCreate(name=name, type=ProcessWorker.type, base_job_template=template))


def _make_queue(client: SyncPrefectClient, pool: str, name: str) -> str:
    try:
        queue = client.read_work_queue_by_name(name, work_pool_name=pool)
    except ObjectNotFound:
        queue = client.create_work_queue(name, work_pool_name=pool, concurrency_limit=1)
    return f"work queue {name} of {pool}: {queue.concurrency_limit or 'any number of'} flow run(s) at a time"


def start_night(night: str) -> str:
    """Start the nightly deployment for a night, or resume its flow run where that has ended.

    A night that is over and passed is left alone: whoever wants it again starts another flow run of the deployment.

    Returns:
        What was done, with the flow run's id.
    """
    with get_client(sync_client=True) as client:
        deployment = client.read_deployment_by_name(DEPLOYMENT)
        known = _flow_run_of(client, deployment, night)
        if known is None:
            return _started(night)
        assert known.state is not None
        what = f"night {night}: flow run {known.id}"
        if not known.state.is_final():
            return f"{what}, still {_in_words(known.state)}"
        if known.state.is_completed():
            return f"{what}, {_in_words(known.state)} before; {_again(night)}"
        client.set_flow_run_state(known.id, AwaitingRetry(message="`make night`"))
        return f"{what}, {_ENDS[known.state.type]} before; resumed"


_ENDS = {StateType.CRASHED: "crashed", StateType.FAILED: "failed", StateType.CANCELLED: "cancelled"}


def _in_words(state: State[Any]) -> str:
    """`AwaitingRetry` as `awaiting retry`."""
    return re.sub(r"\B(?=[A-Z])", " ", state.name or state.type.value).lower()


def _again(night: str) -> str:
    return f"to run it again: .venv/bin/prefect deployment run {DEPLOYMENT} -p night={night}"


def _started(night: str) -> str:
    # The key makes one flow run of two calls at the same moment.
    started = run_deployment(
        DEPLOYMENT, parameters={"night": night}, idempotency_key=f"night-{night}", timeout=0, as_subflow=False
    )
    flow_run = cast("FlowRun", started)  # Prefect types what serves sync and async callers as either
    return f"night {night}: flow run {flow_run.id}, started"


def _flow_run_of(client: SyncPrefectClient, deployment: DeploymentResponse, night: str) -> FlowRun | None:
    """The deployment's flow run of a night: the one that began it last, be it the schedule's, else the one by hand."""
    by_hand = FlowRunFilter(idempotency_key=FlowRunFilterIdempotencyKey(any_=[f"night-{night}"]))
    found = [*_read(client, _recorded(deployment, night)), *client.read_flow_runs(flow_run_filter=by_hand)]
    own = [run for run in found if run.deployment_id == deployment.id]
    return next((run for run in own if run.state and not run.state.is_final()), own[0] if own else None)


def _recorded(deployment: DeploymentResponse, night: str) -> list[UUID]:
    """The flow runs that began a night, as the store has them."""
    try:
        site = load_site(SiteChoice.of(deployment.parameters))
        nights = find_nights(store_of(site), night=night)
    except NightbridgeError as error:
        print(f"nights by the schedule are not looked for: {error}", file=sys.stderr)
        return []
    return [UUID(found.start.flow_run) for found in nights if found.start.flow_run]


def _read(client: SyncPrefectClient, flow_runs: Iterable[UUID]) -> list[FlowRun]:
    found = []
    for flow_run in flow_runs:
        try:
            found.append(client.read_flow_run(flow_run))
        except ObjectNotFound:  # old flow runs are removed from Prefect's database, nights stay in the store
            continue
    return found


def main(arguments: list[str]) -> int:
    """Run one of the two commands; return the exit code."""
    match arguments:
        case ["prepare"]:
            print("\n".join(prepare()))
        case ["night", *rest] if len(rest) <= 1:
            print(start_night(checked_night(rest[0]) if rest else new_night()))
        case _:
            print(__doc__, file=sys.stderr)
            return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
