"""`make night`: a night that a person starts, or resumes, beside those of the schedule.

python -m nightbridge.flows.by_hand [ID [DEPLOYMENT]]      start a nightly deployment for one night, or resume it
"""

import contextlib
import re
import sys
from collections.abc import Iterator, Sequence
from typing import Any, cast
from uuid import UUID

from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import FlowFilter, FlowFilterName, FlowRunFilter, FlowRunFilterIdempotencyKey
from prefect.client.schemas.objects import FlowRun, State, StateType
from prefect.client.schemas.responses import DeploymentResponse
from prefect.deployments import run_deployment
from prefect.exceptions import ObjectNotFound
from prefect.settings import PREFECT_API_URL
from prefect.states import AwaitingRetry

from nightbridge.blocks import site_of
from nightbridge.errors import InvalidInput, NightbridgeError
from nightbridge.flows.deploy import NIGHTS
from nightbridge.nights.prefect_api import FLOW
from nightbridge.nights.records import checked_night, find_nights, new_night
from nightbridge.tasks.prefect_calls import away_is_transient
from nightbridge.tasks.site_access import store_of


def start_night(night: str, name: str = "") -> str:
    """Start a nightly deployment for a night, or resume its flow run where that has ended.

    A night that is over and passed is left alone: whoever wants it again starts another flow run of the deployment.

    Args:
        night: The night.
        name: The deployment's; when empty that which had the night, else the only one, or `nightly`.

    Returns:
        What was done, with the flow run's id.

    Raises:
        InvalidInput: No server is configured, or no such deployment is there, or several could be meant.
        PrefectAway: Prefect's server does not answer.
    """
    if not PREFECT_API_URL.value():
        what = "PREFECT_API_URL is not set, and only a server starts nights"
        advice = "With that of `make server`: export PREFECT_API_URL=http://127.0.0.1:4200/api"
        raise InvalidInput(what, subject=f"night {night}", advice=advice)
    with away_is_transient(f"night {night}"), get_client(sync_client=True) as client:
        deployments = _nightly_deployments(client, name)
        begun = {each.name: run for each in deployments if (run := _flow_run_of(client, each, night))}
        deployment = _only([*begun] or [each.name for each in deployments], night)
        known = begun.get(deployment)
        if known is None:
            key, full_name = _key(deployment, night), f"{FLOW}/{deployment}"
            parameters = {"night": night}
            made = run_deployment(full_name, parameters=parameters, idempotency_key=key, timeout=0, as_subflow=False)
            # Prefect types what serves sync and async callers as either.
            return f"night {night}: flow run {cast('FlowRun', made).id}, started"
        assert known.state is not None
        what = f"night {night}: flow run {known.id}"
        if not known.state.is_final():
            return f"{what}, still {_in_words(known.state)}"
        if known.state.is_completed():
            again = f"to run it again: .venv/bin/prefect deployment run {FLOW}/{deployment} -p night={night}"
            return f"{what}, ended: {_in_words(known.state)}; {again}"
        client.set_flow_run_state(known.id, AwaitingRetry(message="`make night`"))
        return f"{what}, {_ENDS[known.state.type]} before; resumed"


def _nightly_deployments(client: SyncPrefectClient, name: str) -> list[DeploymentResponse]:
    of_nights = FlowFilter(name=FlowFilterName(any_=[FLOW]))
    found = client.read_deployments(flow_filter=of_nights)
    kept = [each for each in found if each.name == name or (not name and f"{each.name}-".startswith(f"{NIGHTS}-"))]
    if not kept:
        others = f"One of {', '.join(sorted(each.name for each in found))}" if found else "Run `nightbridge deploy`"
        raise InvalidInput("no such deployment of nights on this server", subject=name or NIGHTS, advice=others)
    return kept


def _only(names: Sequence[str], night: str) -> str:
    """The only one of several deployments; of those that never had the night, the one that prefect.yaml names."""
    if len(names) == 1:
        return names[0]
    if NIGHTS in names:
        return NIGHTS
    advice = f"make night NIGHT={night} DEPLOYMENT={' or '.join(sorted(names))}"
    raise InvalidInput("several deployments run nights", subject=night, advice=advice)


_ENDS = {StateType.CRASHED: "crashed", StateType.FAILED: "failed", StateType.CANCELLED: "cancelled"}


def _in_words(state: State[Any]) -> str:
    """`AwaitingRetry` as `awaiting retry`."""
    if state.name == "Late":
        return "late: no worker is there (make worker), or another night of its cluster has its turn"
    return re.sub(r"\B(?=[A-Z])", " ", state.name or state.type.value).lower()


def _key(deployment: str, night: str) -> str:
    """The key that makes one flow run of two calls at the same moment; all deployments of the flow share its keys."""
    return f"night-{night}" if deployment == NIGHTS else f"night-{night}-{deployment}"


def _flow_run_of(client: SyncPrefectClient, deployment: DeploymentResponse, night: str) -> FlowRun | None:
    """The deployment's flow run of a night: the one that began it last, be it the schedule's, else the one by hand."""
    by_hand = FlowRunFilter(idempotency_key=FlowRunFilterIdempotencyKey(any_=[_key(deployment.name, night)]))
    found = [*_recorded(client, deployment, night), *client.read_flow_runs(flow_run_filter=by_hand)]
    own = [run for run in found if run.deployment_id == deployment.id]
    return next((run for run in own if run.state and not run.state.is_final()), own[0] if own else None)


def _recorded(client: SyncPrefectClient, deployment: DeploymentResponse, night: str) -> Iterator[FlowRun]:
    """The flow runs that began a night, as the store has them."""
    try:
        nights = find_nights(store_of(site_of(**deployment.parameters)), night=night)
    except NightbridgeError as error:
        print(f"nights by the schedule are not looked for: {error}", file=sys.stderr)
        return
    for found in nights:
        # Old flow runs are removed from Prefect's database, nights stay in the store.
        with contextlib.suppress(ObjectNotFound):
            if found.start.flow_run:
                yield client.read_flow_run(UUID(found.start.flow_run))


def main(arguments: list[str]) -> int:
    """Start or resume a night; return the exit code, which is that of `nightbridge` for the same error."""
    if len(arguments) > 2:
        print(__doc__, file=sys.stderr)
        return 2
    night, name = (*arguments, "", "")[:2]
    try:
        print(start_night(checked_night(night) if night else new_night(), name))
    except NightbridgeError as error:
        print(f"nightbridge: {error}", file=sys.stderr)
        return 2 if isinstance(error, InvalidInput) else 4
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
