"""Every call of ours to Prefect's API: the domain decides about a night, and Prefect shows it.

What only shows something (`show`, `ProgressArtifact`) never fails a stage, and never delays one for long. What a night
needs (`insist`), such as a subflow or the event of its end, is waited for as long as a store or a cluster is.
"""

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar, cast
from uuid import UUID

import httpx
from prefect.artifacts import (
    create_markdown_artifact,
    create_progress_artifact,
    create_table_artifact,
    update_progress_artifact,
)
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.concurrency.asyncio import ConcurrencySlotAcquisitionError
from prefect.context import SettingsContext, get_settings_context
from prefect.events import Event, RelatedResource

from nightbridge.errors import PermanentError, TransientError
from nightbridge.models import RunSpec, slug
from nightbridge.tasks.context import raise_if_interrupted, run_log, this_flow_run, wait_out
from nightbridge.tasks.stage import first_delay

R = TypeVar("R")

AWAY_STATUS = frozenset({408, 425, 429, 500, 502, 503, 504})
"""HTTP statuses of a server, or of a proxy before it, that may answer later; a locked database is a 500 or a 503."""

SHOW_RETRIES = 3
"""How often Prefect's own client tries again to show something: 2, 4 and 8 seconds apart."""

WRITTEN_SECONDS = 30.0
"""How long the server may take to write events down before they are sent again; it tries every 5 s."""


EVENTS_PAGE = 50
"""Events that Prefect's server returns at once."""


class PrefectAway(TransientError):
    """Prefect's server does not answer, or not with an answer."""


def show(what: str, call: Callable[[], object]) -> bool:
    """Show something in Prefect's UI, if that works; return whether it did.

    Args:
        what: What is shown, for the log.
        call: Shows it.
    """
    try:
        with client_retries(SHOW_RETRIES):
            call()
    except Exception as error:  # whatever it is: the work itself does not depend on it
        run_log().warning("Prefect does not show %s: %s", what, _reason(error))
        return False
    return True


def show_markdown(what: str, text: str, *, key: str, description: str) -> None:
    """Show a text as an artifact of the run; `what` is for the log."""
    show(what, lambda: create_markdown_artifact(text, key=key, description=description))


def show_table(what: str, rows: list[dict[str, Any]], *, key: str, description: str) -> None:
    """Show rows, if there are any, as an artifact of the run; `what` is for the log."""
    if rows:
        show(what, lambda: create_table_artifact(rows, key=key, description=description))


def artifact_key(kind: str, scenario: str, cluster: str, test: str = "") -> str:
    """The key of an artifact, which has one history for each scenario, cluster and test."""
    return "-".join(slug(part) for part in (kind, scenario, cluster, test) if part)


def run_tags(run: RunSpec, cluster: str) -> tuple[str, ...]:
    """The tags by which the flow run of a run is found."""
    return f"test:{run.test.id}", *night_tags(run.scenario, run.night, cluster)


def night_tags(scenario: str, night: str, cluster: str) -> tuple[str, ...]:
    """The tags by which a night and its runs are found."""
    return f"scenario:{scenario}", f"cluster:{cluster}", f"night:{night}"


def tagged(tags: Iterable[str], kind: str) -> str:
    """What a tag of a kind names, such as `cluster`; empty where there is none."""
    return next((tag.removeprefix(f"{kind}:") for tag in tags if tag.startswith(f"{kind}:")), "")


def add_tags(*new: str, name: str | None = None) -> None:
    """Tag this flow run, besides those that it has by now; the verdict of an earlier start goes.

    Args:
        new: The tags.
        name: What it is called from now on; as before when unset.
    """
    flow_run = this_flow_run()
    if flow_run is not None:

        def update(client: SyncPrefectClient) -> None:
            # A person may have given it some in the UI since it began.
            kept = {tag for tag in client.read_flow_run(flow_run.id).tags if not tag.startswith("verdict:")}
            client.update_flow_run(flow_run.id, tags=kept | {*new}, name=name)

        show("the tags" if name is None else "the night's name and tags", on_server(update))


@contextlib.contextmanager
def client_retries(count: int) -> Iterator[None]:
    """Let Prefect's own clients try so often again within the block.

    As `temporary_settings`, without validating all settings again: that takes longer than to show a job's progress.
    """
    context = get_settings_context()
    client = context.settings.client.model_copy(update={"max_retries": count})
    settings = context.settings.model_copy(update={"client": client})
    with SettingsContext(profile=context.profile, settings=settings):
        yield


class ProgressArtifact:
    """The progress artifact of a task run, made when it is first shown; a failure is logged once."""

    def __init__(self, subject: str) -> None:
        self._subject = subject
        self._id: UUID | None = None
        self._failed = False

    def show(self, percent: float, description: str) -> None:
        """Show this state, 0 to 100 percent; what the server does not take at once is out of date soon anyway."""
        try:
            with client_retries(0):
                if self._id is None:
                    # Prefect types what serves sync and async callers as either.
                    self._id = cast("UUID", create_progress_artifact(percent, description=description))
                else:
                    update_progress_artifact(self._id, percent, description=description)
        except Exception as error:  # whatever it is: the work itself does not depend on it
            if not self._failed:
                run_log().warning("Prefect does not show %s: %s", self._subject, _reason(error))
            self._failed = True


def on_server(call: Callable[[SyncPrefectClient], R]) -> Callable[[], R]:
    """What requests something of Prefect's API, for `show` and `insist`: the call, with a client for it."""

    def request() -> R:
        with get_client(sync_client=True) as client:
            return call(client)

    return request


def insist(what: str, call: Callable[[], R]) -> R:
    """Call until Prefect's server has answered; the wait stands in the run's log, and an interruption ends it.

    Args:
        what: What is requested, for the log.
        call: Requests it; it is called again from the start after a failure, so it must be repeatable.

    Raises:
        PrefectAway: There was no answer for as long as the patience for stores and clusters lasts.
    """

    def request() -> R:
        with away_is_transient(what):
            return call()

    return wait_out(request, (PrefectAway,), first_delay=first_delay())


@contextlib.contextmanager
def away_is_transient(what: str) -> Iterator[None]:
    """Turn the errors of a server that does not answer into `PrefectAway`.

    Prefect requests the limits of a task run's tags before each task run, and hides an outage then behind an error of
    its own.

    Raises:
        PrefectAway: The same request may be answered later.
        PermanentError: The server wants another login.
    """
    try:
        yield
    except (httpx.HTTPError, ConcurrencySlotAcquisitionError) as error:
        if isinstance(error, httpx.HTTPStatusError) and error.response.status_code in (401, 403):
            refused = f"Prefect's server answered {error.response.status_code}"
            raise PermanentError(refused, subject=what, advice="Set PREFECT_API_AUTH_STRING") from error
        if not _is_away(error.__cause__ if isinstance(error, ConcurrencySlotAcquisitionError) else error):
            raise
        reason = f"Prefect's server does not answer: {_reason(error)}"
        raise PrefectAway(reason, subject=what, advice="Look at the server's log") from error


def _is_away(error: BaseException | None) -> bool:
    if isinstance(error, httpx.HTTPStatusError):
        return error.response.status_code in AWAY_STATUS
    return isinstance(error, httpx.TransportError)


def send_events(events: Sequence[Event]) -> None:
    """Send events and wait until the server has them; for a deployment's flow run, until it has written them down.

    Prefect's own `emit_event` hands each to a thread that forgets it when the server is away. The server in turn keeps
    in memory what it has taken, for 5 s by default, and forgets it when it is killed. An event that is sent again under
    the same id is kept once. The flow run that they come from, if any, becomes a related resource.
    """
    related = []
    if flow_run := this_flow_run():
        labels = {
            "prefect.resource.id": f"prefect.flow-run.{flow_run.id}",
            "prefect.resource.role": "flow-run",
            "prefect.resource.name": flow_run.name,
        }
        related.append(RelatedResource(labels))
    documents = [event.model_copy(update={"related": related}).model_dump(mode="json") for event in events]

    def post(client: SyncPrefectClient) -> None:
        client.request("POST", "/events", json=documents)
        if flow_run and flow_run.deployment_id:
            _wait_until_written(client, events[-1])

    insist("the night's events", on_server(post))


def written_events(ids: Sequence[UUID]) -> set[UUID]:
    """Those of these events that Prefect's server has written down already.

    Raises:
        PrefectAway: There was no answer for as long as the patience for stores and clusters lasts.
    """

    def read(client: SyncPrefectClient) -> set[UUID]:
        found: set[UUID] = set()
        for first in range(0, len(ids), EVENTS_PAGE):
            some = [*map(str, ids[first : first + EVENTS_PAGE])]
            wanted = {"filter": {"id": {"id": some}}, "limit": EVENTS_PAGE}
            answer = client.request("POST", "/events/filter", json=wanted).json()
            found |= {UUID(event["id"]) for event in answer["events"]}
        return found

    return insist("the night's earlier events", on_server(read)) if ids else set()


def _wait_until_written(client: SyncPrefectClient, last: Event) -> None:
    """Wait for the last of the events that were sent: the server writes them in their order.

    Raises:
        PrefectAway: It is not there in time.
    """
    wanted = {"filter": {"id": {"id": [str(last.id)]}}, "limit": 1}
    deadline = time.monotonic() + WRITTEN_SECONDS
    while not client.request("POST", "/events/filter", json=wanted).json()["events"]:
        if time.monotonic() > deadline:
            reason = f"Prefect's server took them and has not written them within {WRITTEN_SECONDS:g} s"
            raise PrefectAway(reason, subject="the night's events", advice="Look at the server's log")
        raise_if_interrupted()
        time.sleep(0.5)


def _reason(error: Exception) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__
