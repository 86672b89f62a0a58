"""Limits of the site: how many jobs of ours a cluster, and an account on it, have at once.

Each limit is a global concurrency limit of Prefect, so it holds for all flow runs of one Prefect server. A slot is
taken before a job is submitted and given back when it has ended. Prefect lends a slot for a while and the lease is
renewed as long as this process lives: a process that dies gives its slots back when the lease is over.

The leases are ours, and not those of Prefect's `concurrency`: it renews no more, for the rest of the job, once the
server has been away for some three minutes, and writes an error to the terminal for each question that was refused.

One night of a cluster at a time: a second fence behind the limit of the work queue.

Prefect's server counts a queue's free slots when a worker asks for work, not when it takes it: on PostgreSQL, two
workers that ask at the same moment are each given a night.
"""

import contextlib
import contextvars
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from uuid import UUID

from httpx import HTTPError, HTTPStatusError, codes
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import GlobalConcurrencyLimitUpdate
from prefect.client.schemas.responses import ConcurrencyLimitWithLeaseResponse
from prefect.concurrency._events import emit_concurrency_acquisition_events, emit_concurrency_release_events
from prefect.exceptions import ObjectAlreadyExists
from prefect.logging import get_run_logger
from prefect.settings import PREFECT_API_URL

from nightbridge.errors import PermanentError
from nightbridge.locking import lease, read_holder
from nightbridge.models import ClusterSettings, LaunchPlan, Site, slug
from nightbridge.slurm.attempt_files import read_submission
from nightbridge.tasks.context import raise_if_interrupted, run_log, this_flow_run, this_night
from nightbridge.tasks.prefect_calls import client_retries, insist, on_server

LEASE_SECONDS = 900.0
"""How long a dead process keeps its slots. Its job lives on, so a short lease would let another job in beside it."""

RENEWAL_SECONDS = 300.0
"""How often a lease is renewed: a server that is away for ten minutes finds it as it was."""

_RENEW_AGAIN = 5.0
"""Seconds after a renewal that failed, so that it comes soon after the server is back."""

_LOOK_AGAIN = 1.0
_LAST_ANSWER = 10.0
"""Seconds that a job which has ended waits for a question that is on its way; what it brings is given back later."""

# Of the whole process, and held for one question and the pause after it, so that a hundred runs that wait do not ask a
# hundred times a second; the others wait here, where they notice an interrupt at once.
_asking = threading.Lock()

_renewed: "set[_Lease]" = set()
"""Leases of this process, of jobs that are in Slurm. One may have ended while the server was away or the computer was
suspended: until it has its slot again, nobody else here asks for one."""


def limits_of(cluster: ClusterSettings) -> dict[str, int]:
    """The names of the limits that a job on this cluster falls under, and their slots."""
    name = f"nightbridge-{slug(cluster.name)}"
    limits = {name: cluster.max_jobs, f"{name}-{slug(cluster.account or 'no account')}": cluster.max_jobs_per_account}
    return {name: slots for name, slots in limits.items() if slots is not None}


@contextlib.contextmanager
def job_slots(plan: LaunchPlan, site: Site) -> Iterator[None]:
    """Hold a slot of each limit while the attempt's job is in Slurm; wait for them before it is submitted.

    A job that is found again after a crash is watched at once: its slots are taken as soon as they are free, which is
    when the lease of the process that died is over.
    """
    limits = limits_of(site.cluster)
    if not limits:
        yield
        return
    insist("the limits of the cluster", partial(_make, limits))
    names = list(limits)
    if read_submission(plan.attempt_dir) is None:
        with _taken(names, raise_if_interrupted):
            yield
    else:
        with _taken_beside(names):
            yield


def _make(limits: Mapping[str, int]) -> None:
    """Create the limits, or set them to the cluster's settings of now; once in a night."""
    night = this_night()
    with night.lock, get_client(sync_client=True) as client:
        for name, slots in limits.items() - night.limits:
            with contextlib.suppress(ObjectAlreadyExists):  # another process was as quick
                client.upsert_global_concurrency_limit_by_name(name, slots)
            if PREFECT_API_URL.value() is None:
                # Prefect's server for one process forgets leases, and so never takes a dead process's slots back.
                client.update_global_concurrency_limit(name, GlobalConcurrencyLimitUpdate(active_slots=0))
            night.limits.add((name, slots))


class _GivenUp(Exception):
    """The slots are not needed any more."""


def _take(client: SyncPrefectClient, names: list[str], slots: contextlib.ExitStack, check: Callable[[], None]) -> None:
    """Wait for a slot of each limit, and enter it; `check` is called now and then, and ends the wait by raising.

    Raises:
        PermanentError: A limit is gone: that is no wait.
    """
    logged, asked = "", list(names)
    while True:
        check()
        if not _asking.acquire(timeout=_LOOK_AGAIN):
            continue
        try:
            if not any(held.is_over() for held in tuple(_renewed)):
                # Asked again here: Prefect's own pauses grow to minutes, and would be slept through with the lock held.
                with contextlib.ExitStack() as taken, client_retries(0):
                    for name in asked:
                        taken.enter_context(_slot(client, name))
                    slots.enter_context(taken.pop_all())
                return
            why = "the lease of another job's slot is renewed first"
            time.sleep(_LOOK_AGAIN)
        except HTTPError as error:
            why = _refusal(error)
            asked.sort(key=lambda each: each != name)  # first next time, so that no slot of another is taken in vain
            time.sleep(_LOOK_AGAIN)
        finally:
            _asking.release()
        if why != logged:  # and not in each second of a night for which somebody has set the limit to 0
            get_run_logger().info("waiting for a slot of %s: %s", " and ".join(names), why)
        logged = why


@contextlib.contextmanager
def _slot(client: SyncPrefectClient, name: str) -> Iterator[None]:
    """Hold a slot of one limit. Of several names in one question, Prefect would pass over one that is not there."""
    held = _Lease(client, name)
    lent = held.take()
    events = emit_concurrency_acquisition_events(lent.limits, 1)
    try:
        with _beside(held.renew, f"lease-of-{name}"):
            yield
    finally:
        held.give_back()
        emit_concurrency_release_events(lent.limits, 1, events)


def _lent(client: SyncPrefectClient, name: str) -> ConcurrencyLimitWithLeaseResponse:
    """A slot of a limit for `LEASE_SECONDS`.

    Raises:
        PermanentError: The limit is gone.
    """
    answer = client.increment_concurrency_slots_with_lease([name], 1, "concurrency", LEASE_SECONDS)
    lent = ConcurrencyLimitWithLeaseResponse.model_validate(answer.json())
    if not lent.limits:
        raise PermanentError("the limit is gone from Prefect's server", subject=name, advice="Start the night again")
    return lent


class _Lease:
    """The lease of a slot of one limit; another one takes its place where the server has ended it.

    A server that was started again and keeps leases in memory has forgotten it before its time, and still counts the
    slot: it is held, and given back, without a lease.
    """

    def __init__(self, client: SyncPrefectClient, name: str) -> None:
        self._client, self._name = client, name
        self._lease_id: UUID | None = None
        self._begun = self._until = 0.0  # by the clock that goes on while a computer is suspended

    def take(self) -> ConcurrencyLimitWithLeaseResponse:
        """Take a slot.

        Raises:
            PermanentError: The limit is gone.
        """
        begun = time.time()
        lent = _lent(self._client, self._name)
        self._lease_id, self._begun, self._until = lent.lease_id, begun, begun + LEASE_SECONDS
        return lent

    def renew(self, over: threading.Event) -> None:
        """Renew it until the slot is given back.

        No failure of it is an error: the job keeps running, whether or not Prefect's server can count it.
        """
        pause = RENEWAL_SECONDS
        _renewed.add(self)
        try:
            with client_retries(0):
                while self._lease_id and not over.wait(pause):
                    try:
                        if not self._is_known(self._lease_id) and self._lease_id:
                            self.take()
                        _renewed.add(self)
                        pause = RENEWAL_SECONDS
                    except Exception as error:
                        if not isinstance(error, HTTPError):  # the limit is gone, which ends those that wait for it
                            _renewed.discard(self)
                        if pause != _RENEW_AGAIN and not over.is_set():
                            run_log().warning("the slot of %s is not renewed yet: %s", self._name, _refusal(error))
                        pause = _RENEW_AGAIN
        finally:
            _renewed.discard(self)

    def _is_known(self, lease_id: UUID) -> bool:
        """Whether the server has renewed it: it ends those that are over, and may have forgotten others."""
        until = time.time() + LEASE_SECONDS
        try:
            self._client.renew_concurrency_lease(lease_id, LEASE_SECONDS)
        except HTTPStatusError as error:
            if error.response.status_code != codes.GONE:
                raise
            if not self.is_over():
                self._lease_id = None
                run_log().warning("%s: %s", self._name, _FORGOTTEN)
            return False
        self._until = until
        return True

    def is_over(self) -> bool:
        """Whether nobody but the server can know whose the slot is."""
        return time.time() >= self._until

    def give_back(self) -> None:
        """Give the slot back, unless the server has done so."""
        if self._lease_id and self._is_known(self._lease_id):
            self._client.release_concurrency_slots_with_lease(self._lease_id)
        elif not self._lease_id:
            self._client.release_concurrency_slots([self._name], 1, max(time.time() - self._begun, 1.0))


_FORGOTTEN = (
    "Prefect's server was started again and has forgotten who holds a slot. This one is given back all the same, but "
    "not that of a process that dies: `nightbridge doctor` says what to set"
)


def _refusal(error: Exception) -> str:
    """Why the server gave no slot, or did not answer."""
    if isinstance(error, HTTPStatusError) and error.response.status_code == codes.LOCKED:
        return "all are taken"
    return " ".join(str(error).split())[:200] or type(error).__name__


@contextlib.contextmanager
def _taken(names: list[str], check: Callable[[], None]) -> Iterator[None]:
    """Hold a slot of each limit. Where they cannot be given back they come back with the end of their lease."""
    slots = contextlib.ExitStack()
    try:
        # Not the client of the task run, which ends with it: with settings of its own, Prefect makes another one.
        client = slots.enter_context(get_client(sync_client=True, httpx_settings={}))
        _take(client, names, slots, check)
        yield
    finally:
        try:
            slots.close()
        except Exception as error:
            get_run_logger().warning("a slot is given back only when its lease is over: %s", error)


@contextlib.contextmanager
def _taken_beside(names: list[str]) -> Iterator[None]:
    """Take the slots in a thread of their own, and hold them until the block is over."""

    def hold(over: threading.Event) -> None:
        def check() -> None:
            if over.is_set():
                raise _GivenUp

        with contextlib.suppress(_GivenUp), _taken(names, check):
            over.wait()

    with _beside(hold, "job-slots"):
        yield


@contextlib.contextmanager
def _beside(call: Callable[[threading.Event], None], name: str) -> Iterator[None]:
    """Call a function in a thread of this name beside the block; the event tells it that the block is over."""
    over = threading.Event()
    context = contextvars.copy_context()
    thread = threading.Thread(target=context.run, args=(call, over), name=name, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(timeout=_LAST_ANSWER)


LONGEST_NIGHT_SECONDS = 48 * 3600.0
"""How long a night waits for its turn."""

SILENCE_SECONDS = 600.0
"""How long a workspace may be away before the turn of the night that runs is given to the next one."""


@contextlib.contextmanager
def own_turn(site: Site) -> Iterator[None]:
    """Run the block while no other night of the cluster runs, if this night comes from a queue for one at a time.

    A person who gives the queue another limit wants several. Nights without a queue do not wait.

    Raises:
        TransientError: Another night held the turn all the time.
        PermanentError: The workspace cannot be written.
    """
    if not _one_at_a_time():
        yield
        return
    path = site.workspace / "nights" / f"{slug(site.cluster.name)}.turn"
    if holder := read_holder(path):
        run_log().info("waiting until the night before this one is over: %s", holder)
    with lease(path, ttl=SILENCE_SECONDS, timeout=LONGEST_NIGHT_SECONDS, on_wait=raise_if_interrupted):
        yield


def _one_at_a_time() -> bool:
    flow_run = this_flow_run()
    queue = flow_run.work_queue_id if flow_run else None
    if queue is None:
        return False
    limit = on_server(lambda client: client.read_work_queue(queue).concurrency_limit)
    return insist("the limit of the work queue", limit) == 1
