"""One night of a cluster at a time: a second fence behind the limit of the work queue.

Prefect's server counts a queue's free places when a worker asks for work, not when it takes it: on PostgreSQL, two
workers that ask at the same moment are each given a night.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from prefect.client.orchestration import get_client

from nightbridge.locking import lease, read_holder
from nightbridge.models import Site, slug
from tasks.interrupt import raise_if_interrupted
from tasks.logs import run_log
from tasks.mirror import insist
from tasks.this_run import this_flow_run

LONGEST_NIGHT_SECONDS = 48 * 3600.0
"""How long a night waits for its turn."""

SILENCE_SECONDS = 600.0
"""How long a workspace may be away before the turn of the night that runs is given to the next one."""


@contextmanager
def own_turn(site: Site) -> Iterator[None]:
    """Run the block while no other night of the cluster runs, if this night comes from a queue for one at a time.

    A person who gives the queue another limit wants several. Nights without a queue wait for nobody.

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

    def limit() -> int | None:
        with get_client(sync_client=True) as client:
            return client.read_work_queue(queue).concurrency_limit

    return insist("the limit of the work queue", limit) == 1
