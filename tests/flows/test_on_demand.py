"""What people start from a form, on a real Prefect server."""

import json
import os
import time
from pathlib import Path

import pytest

from nightbridge.flows.on_demand import prune
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

    total = "1 checkouts, 0 images, 1 launcher environments and 0 stored runs, 0.0 GB"
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
