"""What people start from a form, on a real Prefect server."""

import json
import os
import time
from pathlib import Path

import pytest

from nightbridge.errors import TransientError
from nightbridge.flows.on_demand import accept, prune
from nightbridge.gate.decisions import list_decisions
from nightbridge.history.history_store import put_row
from nightbridge.history.rows import row_of
from nightbridge.models import StoreSettings, VerdictStatus
from nightbridge.store.directory import DirectoryStore
from nightbridge.tasks.stage import DELAY_VARIABLE
from tests.builders import make_record
from tests.real.prefect_server import PrefectServer

MONTHS_AGO = time.time() - 90 * 24 * 3600


def unused(folder: Path) -> Path:
    """A folder that nobody has used for months."""
    folder.mkdir(parents=True)
    os.utime(folder, (MONTHS_AGO, MONTHS_AGO))
    return folder


@pytest.mark.usefixtures("flows_here")
def test_prune_shows_each_thing_that_is_old_with_the_reason_and_removes_it_where_that_is_wanted(
    prefect_server: PrefectServer, tmp_path: Path
) -> None:
    checkout, environment = unused(tmp_path / "checkouts/Bridge" / ("a" * 40)), unused(tmp_path / "envs" / ("b" * 16))

    listed = prune(workspace=str(tmp_path), return_state=True)
    there = [path.exists() for path in (checkout, environment)]
    removed = prune(remove=True, workspace=str(tmp_path), return_state=True)

    total = "1 checkouts, 0 images, 1 launcher environments, 0 folders of runs and 0 stored runs, 0.0 GB"
    assert [(state.name, state.message) for state in (listed, removed)] == [
        ("Listed", f"would remove {total}"),
        ("Removed", f"removed {total}"),
    ]
    (artifact,) = prefect_server.ask(
        "POST",
        "artifacts/filter",
        {"artifacts": {"flow_run_id": {"any_": [str(listed.state_details.flow_run_id)]}, "type": {"any_": ["table"]}}},
    )
    reasons = {row["what"]: row["reason"] for row in json.loads(artifact["data"])}
    assert reasons == {str(checkout): "unused for 90 days", str(environment): "unused for 90 days"}
    assert there == [True, True]
    assert [checkout.exists(), environment.exists()] == [False, False]


@pytest.mark.usefixtures("flows_here")
def test_a_store_that_is_away_for_a_moment_gets_one_decision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Away before it has answered that the decision is stored."""
    store = DirectoryStore(StoreSettings(url=f"file://{tmp_path}/store"))
    bad = {"cluster": "local", "verdict": VerdictStatus.REGRESSED, "worse": {"step_time": 0.1}}
    row = row_of(make_record(), None).model_copy(update=bad)
    put_row(store, row)
    away, put = [TransientError("the store is away", subject=store.url)], DirectoryStore.put_if_absent

    def put_without_an_answer(to: DirectoryStore, key: str, data: bytes) -> bool:
        stored = put(to, key, data)
        if away:
            raise away.pop()
        return stored

    monkeypatch.setattr(DirectoryStore, "put_if_absent", put_without_an_answer)
    monkeypatch.setenv(DELAY_VARIABLE, "0.2")

    decided = accept(row.series, "known", "ann", store=store.url, return_state=True)

    (stored,) = list_decisions(store)
    assert decided.message == f"{row.series}: {stored.text}"
