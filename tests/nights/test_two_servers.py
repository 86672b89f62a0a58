"""Two Prefect API servers behind one address: one of them may die, and the night does not notice."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.conftest import need
from tests.nights.conftest import EVERY_STAGE, PLAIN, Rig, in_any_stage, make_rig
from tests.nights.night import Night
from tests.real.balanced_servers import BalancedServers, balanced_missing_reason
from tests.real.postgres import postgres_missing_reason, start_postgres
from tests.real.prefect_proxy import proxy_to
from tests.real.prefect_server import make_database

pytestmark = pytest.mark.launcher


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BalancedServers]:
    need(balanced_missing_reason())
    need(postgres_missing_reason())
    with ExitStack() as stack:
        postgres = start_postgres()
        stack.callback(postgres.remove)
        pair = BalancedServers(tmp_path_factory.mktemp("servers"), database_url=make_database(postgres))
        stack.callback(pair.stop)
        pair.start()
        yield pair


@pytest.fixture(scope="module")
def whole_rig(
    servers: BalancedServers, tmp_path_factory: pytest.TempPathFactory, environments_dir: Path, launcher_python: Path
) -> Iterator[Rig]:
    with proxy_to(servers.api_url) as proxy:
        rig = make_rig(tmp_path_factory.mktemp("rig"), servers, proxy, environments_dir, launcher_python, {})
        rig.pause_schedules("nightly", "reaper", "watchdog")
        yield rig
        rig.stop()


@in_any_stage()
def test_one_of_them_is_killed_and_the_night_passes_and_so_does_the_next(
    servers: BalancedServers, begin: Callable[..., Night], stage: str
) -> None:
    for member in servers.members:
        if not member.answers():
            member.start()
    night = begin(entries=PLAIN)
    night.wait_until(stage)

    servers.members[0].kill()

    night.passes()
    assert "Crashed" not in night.state_history
    begin(entries=PLAIN if EVERY_STAGE else PLAIN[:1]).passes()
