"""Prefect's database does not grow for ever: what `make server` starts forgets old flow runs, and only those."""

import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from uuid import UUID

import pytest
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.settings import PREFECT_API_URL, temporary_settings
from prefect.states import Completed, Running

from nightbridge.flows.nightly import nightly
from tests.real.prefect_server import PrefectServer

ROOT = Path(__file__).parents[2]
EVERY_SECOND = {"PREFECT_SERVER_SERVICES_DB_VACUUM_LOOP_SECONDS": "1"}


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[PrefectServer]:
    """A server that is started in the checkout, where its settings are."""
    monkeypatch.chdir(ROOT)
    server = PrefectServer(tmp_path, settings=EVERY_SECOND)
    server.start()
    yield server
    server.stop()


@pytest.fixture
def client(server: PrefectServer) -> Iterator[SyncPrefectClient]:
    with temporary_settings({PREFECT_API_URL: server.api_url}), get_client(sync_client=True) as made:
        yield made


def ended(client: SyncPrefectClient, server: PrefectServer, *, days_ago: int) -> UUID:
    """A flow run that ended so long ago."""
    run = client.create_flow_run(nightly, parameters={"scenario": "nightly.toml"}, state=Running())
    client.set_flow_run_state(run.id, Completed(), force=True)
    _age(server, run.id, days_ago)
    return run.id


def started(client: SyncPrefectClient, server: PrefectServer, *, days_ago: int) -> UUID:
    run = client.create_flow_run(nightly, parameters={"scenario": "nightly.toml"}, state=Running())
    _age(server, run.id, days_ago)
    return run.id


def _age(server: PrefectServer, flow_run: UUID, days_ago: int) -> None:
    with closing(sqlite3.connect(server.home / "prefect.db", timeout=60)) as database, database:
        for column in ("start_time", "end_time"):
            database.execute(
                f"UPDATE flow_run SET {column} = datetime('now', ?) WHERE id = ? AND {column} IS NOT NULL",
                (f"-{days_ago} days", str(flow_run)),
            )


def test_flow_runs_that_ended_over_30_days_ago_are_forgotten(client: SyncPrefectClient, server: PrefectServer) -> None:
    old = ended(client, server, days_ago=31)
    kept = {ended(client, server, days_ago=29), started(client, server, days_ago=31)}

    deadline = time.monotonic() + 120
    while old in (found := {run.id for run in client.read_flow_runs()}) and time.monotonic() < deadline:
        time.sleep(0.3)

    assert found == kept
