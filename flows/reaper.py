"""The reaper: marks flow runs whose process is gone as Crashed, and starts their nights again.

A process that is killed together with its worker reports nothing: its flow run would stay Running for ever, and under a
concurrency limit no later night would start. Heartbeats cannot tell it from a living one whose server was away, so the
reaper reads the night's own sign of life in the workspace (`nightbridge.nights.liveness`). It runs on a schedule and
decides each time from what it finds: nothing is lost with a server that restarts or a reaper that is killed.

It also cancels the jobs of nights and searches that were cancelled while no process of theirs was running, or Slurm did
not answer.
"""

import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from typing import Any, NamedTuple
from uuid import UUID

from prefect import flow
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import FlowRunFilter
from prefect.client.schemas.objects import TERMINAL_STATES, FlowRun, State, StateType
from prefect.client.schemas.sorting import FlowRunSort
from prefect.events.filters import EventFilter
from prefect.logging import get_run_logger
from prefect.settings import get_current_settings
from prefect.states import Cancelled, Crashed, Scheduled

from nightbridge.blocks import site_of
from nightbridge.errors import NightbridgeError
from nightbridge.flows.final_states import TAG
from nightbridge.nights.liveness import SILENCE_SECONDS, LastSign, last_sign
from nightbridge.nights.prefect_api import FLOW
from nightbridge.tasks.night import RESUMING, plan_of, workspace_of

MAX_RESUMES = 3
RESUME_WITHIN = timedelta(hours=24)
"""A night that crashed longer ago stays as it is: the next one has been there since."""

SUSPECT_LABEL = "nightbridge.suspected_at"
"""Label of a flow run that was found without a process, by its heartbeats: when, in seconds since 1970."""

_STARTED = [StateType.PENDING, StateType.RUNNING]
_UNFINISHED = [kind for kind in StateType if kind not in TERMINAL_STATES]


class Patience(NamedTuple):
    """How long the reaper waits before it concludes something, in seconds."""

    silence: float
    start_up: float
    no_heartbeat: float
    second_look: float
    last_word: float


class Gone(NamedTuple):
    """A flow run whose process is gone, and how that is known."""

    run: FlowRun
    message: str
    by_file: bool


@flow(name="reaper")
def reaper(
    silence: float = SILENCE_SECONDS,
    start_up: float = 600,
    no_heartbeat: float = 3600,
    second_look: float = 60,
    last_word: float = 60,
) -> None:
    """Crash the flow runs whose process is gone, and start crashed nights again.

    Args:
        silence: Seconds after which a process of another host is dead that has not refreshed its sign of life.
        start_up: Seconds after which a flow run that a worker took and never started is dead.
        no_heartbeat: Seconds without a heartbeat after which a flow run without a sign of life in a workspace is dead.
        second_look: Seconds from the first look to the second: who is dead in both is dead.
        last_word: Seconds that a worker has to finish reporting a crash, before the night is started again.
    """
    patience = Patience(silence, start_up, no_heartbeat, second_look, last_word)
    with get_client(sync_client=True) as client:
        crashed = _ended_of_late(client, StateType.CRASHED, patience)
        # A worker reports a crash twice, some seconds apart: the second report would end a flow run started in between.
        for run in [each for each in crashed if not _lives(_sign_of(each), patience)]:
            _end_children(client, run.id, Crashed(message="The flow run that started it crashed"))
            _resume_or_cancel(client, run)
        for run in _ended_of_late(client, StateType.CANCELLED, patience):
            _finish_cancellation(client, run)
        for run, message, _ in _gone_in_both_looks(client, patience):
            _end_children(client, run.id, Crashed(message=message))
            client.set_flow_run_state(run.id, Crashed(message=message))
            get_run_logger().warning("%s (%s): crashed. %s", run.name, run.id, message)
            _resume_or_cancel(client, run)


def _gone_in_both_looks(client: SyncPrefectClient, patience: Patience) -> Iterator[Gone]:
    """Look twice: a worker that lives reports the end of its own process, and the living have time for a heartbeat.

    They could not while the file system, or the server that takes heartbeats, was away until a moment ago.
    """
    first = _gone(client, patience)
    # Before the wait below: what was found of them would be old after it.
    yield from (one for one in first if not one.by_file and _suspected_before(client, one.run, patience))
    suspects = {one.run.id for one in first if one.by_file}
    if suspects:
        get_run_logger().info("%d flow run(s) seem to have no process: checking again", len(suspects))
        time.sleep(patience.second_look)
        yield from (one for one in _gone(client, patience) if one.run.id in suspects)


def _suspected_before(client: SyncPrefectClient, run: FlowRun, patience: Patience) -> bool:
    """Whether an earlier run of the reaper found it gone, and no heartbeat came in the time of two.

    Heartbeats are ten minutes apart, and a reaper that waited for one would hold up the nights that crashed meanwhile:
    the suspicion is kept as a label of the flow run.
    """
    assert run.state is not None  # it was found by its state
    now = datetime.now(UTC)
    heartbeat = get_current_settings().flows.heartbeat_frequency or 0
    noted = run.labels.get(SUSPECT_LABEL)
    since = datetime.fromtimestamp(float(noted), UTC) if noted is not None else now
    age = (now - since).total_seconds()
    if noted is None or run.state.timestamp > since or _has_heartbeat(client, run, now, age):
        client.update_flow_run_labels(run.id, {SUSPECT_LABEL: now.timestamp()})
        return False
    return age >= max(patience.second_look, 2 * heartbeat)


def _gone(client: SyncPrefectClient, patience: Patience) -> list[Gone]:
    runs = _read_all(client, _ours(_STARTED))
    return [found for run in runs if (found := _if_gone(client, run, patience))]


def _if_gone(client: SyncPrefectClient, run: FlowRun, patience: Patience) -> Gone | None:
    now = datetime.now(UTC)
    assert run.state is not None  # it was found by its state
    age = (now - run.state.timestamp).total_seconds()
    sign = _sign_of(run)
    if _lives(sign, patience):
        return None
    if sign and sign.silent_for < age:
        who = f"host {sign.holder.host}, process {sign.holder.pid}, " if sign.holder else ""
        at = now - timedelta(seconds=sign.silent_for)
        message = f"The flow's process is gone: {who}last sign of life {at:%Y-%m-%d %H:%M:%S} UTC"
        return Gone(run=run, message=message, by_file=True)
    # No sign, or one from before the flow run was started again: its process has not come as far, or has ended it.
    if run.state.is_pending():
        overdue = age > patience.start_up
    else:
        overdue = age > patience.no_heartbeat and not _has_heartbeat(client, run, now, patience.no_heartbeat)
    if not overdue:
        return None
    message = f"The flow's process is gone: no sign of life since {run.state.timestamp:%Y-%m-%d %H:%M:%S} UTC"
    return Gone(run=run, message=message, by_file=False)


def _lives(sign: LastSign | None, patience: Patience) -> bool:
    return sign is not None and sign.is_of_the_living(patience.silence)


def _sign_of(run: FlowRun) -> LastSign | None:
    try:
        workspace = workspace_of(run)
        return last_sign(workspace, str(run.id)) if workspace else None
    except NightbridgeError as error:
        get_run_logger().warning("%s (%s): its sign of life cannot be read: %s", run.name, run.id, error)
        return None


def _has_heartbeat(client: SyncPrefectClient, run: FlowRun, now: datetime, seconds: float) -> bool:
    wanted = EventFilter.model_validate(
        {
            "event": {"name": ["prefect.flow-run.heartbeat"]},
            "resource": {"id": [f"prefect.flow-run.{run.id}"]},
            "occurred": {"since": now - timedelta(seconds=seconds)},
        }
    )
    return client.read_events(filter=wanted, limit=1).total > 0


def _ended_of_late(client: SyncPrefectClient, kind: StateType, patience: Patience) -> list[FlowRun]:
    now = datetime.now(UTC)
    times = {"after_": now - RESUME_WITHIN, "before_": now - timedelta(seconds=patience.last_word)}
    return _read_all(client, _ours([kind], end_time=times))


def _finish_cancellation(client: SyncPrefectClient, run: FlowRun) -> None:
    """Cancel the jobs of a cancelled night or search, unless that is recorded as done since it was last started.

    A suspended night has no process, so Prefect runs no hook when it is cancelled. Of any other, the hook may have
    left open whether a job lives on: Slurm did not answer it, or sbatch was under way.
    """
    if run.run_count == 0:  # Prefect gives it a time of its start all the same
        return  # it never ran, as most reapers after a day without a worker
    # Here, and not every five minutes: the flow of a night is half a second of imports, and hardly ever needed.
    from nightbridge.flows.nightly import cancel_hook, nightly
    from nightbridge.tasks.cancel import cancel_searches, is_recorded, noted_searches

    try:
        plan = plan_of(run)
        if plan is None:
            site = site_of(**run.parameters)
            if noted_searches(run, site):
                cancel_searches(run, site)
            return
        states = client.read_flow_run_states(run.id)
        starts = (state.timestamp for state in states if state.type is StateType.RUNNING)
        if is_recorded(plan, max(starts, default=plan.start.begun_at)):
            return
    except NightbridgeError as error:
        get_run_logger().warning("%s (%s): whether its jobs are cancelled is not known: %s", run.name, run.id, error)
        return
    assert run.state is not None  # it was found by its state
    get_run_logger().warning("%s (%s): it was cancelled, its jobs may live: cancelling them", run.name, run.id)
    cancel_hook(nightly, run, run.state)
    _end_children(client, run.id, Cancelled(message="The night was cancelled"))


def _resume_or_cancel(client: SyncPrefectClient, run: FlowRun) -> None:
    """Start a crashed night again; a crashed flow run that a person cancelled ends as cancelled instead."""
    states = sorted(client.read_flow_run_states(run.id), key=lambda state: state.timestamp)
    ends = [state.type for state in states if state.type in (*_STARTED, StateType.CANCELLING, StateType.CANCELLED)]
    if ends and ends[-1] not in _STARTED:  # a person cancelled it since it was last started
        client.set_flow_run_state(run.id, Cancelled(message="Its process was gone before it could cancel"), force=True)
        _finish_cancellation(client, client.read_flow_run(run.id))
    elif run.deployment_id is not None and client.read_flow(run.flow_id).name == FLOW:
        _resume(client, run, states)


def _resume(client: SyncPrefectClient, run: FlowRun, states: Sequence[State]) -> None:
    """Start a crashed night again, up to `MAX_RESUMES` times, by its states so far in order."""
    # A person's resumption after a suspension has the same name.
    times = 1 + sum(after.name == RESUMING and before.is_crashed() for before, after in pairwise(states))
    if times > MAX_RESUMES:
        get_run_logger().warning("%s (%s): crashed once more, and stays as it is", run.name, run.id)
        return
    message = f"Its process was gone; it is resumed, {times} of at most {MAX_RESUMES} times"
    client.set_flow_run_state(run.id, Scheduled(name=RESUMING, message=message))
    get_run_logger().warning("%s (%s): started again. %s", run.name, run.id, message)


def _end_children(client: SyncPrefectClient, flow_run: UUID, state: State[Any]) -> None:
    children = FlowRunFilter.model_validate(
        {"parent_flow_run_id": {"any_": [flow_run]}, "state": {"type": {"any_": _UNFINISHED}}}
    )
    while found := client.read_flow_runs(flow_run_filter=children):
        for child in found:
            _end_children(client, child.id, state)
            client.set_flow_run_state(child.id, state, force=True)


def _read_all(client: SyncPrefectClient, wanted: FlowRunFilter) -> list[FlowRun]:
    """Every flow run that is wanted: the server returns no more than 200 at once.

    There are more after a day without a worker, when each reaper but one is cancelled.
    """
    found: dict[UUID, FlowRun] = {}
    at = 0
    while page := client.read_flow_runs(flow_run_filter=wanted, sort=FlowRunSort.ID_DESC, offset=at):
        found |= {run.id: run for run in page}  # one that came in between moves the others into the next page
        at += len(page)
    return list(found.values())


def _ours(states: list[StateType], **conditions: object) -> FlowRunFilter:
    """The flow runs of nightbridge in these states that no other flow run started."""
    return FlowRunFilter.model_validate(
        {
            "tags": {"all_": [TAG]},
            "parent_task_run_id": {"is_null_": True},
            "state": {"type": {"any_": states}},
            **conditions,
        }
    )
