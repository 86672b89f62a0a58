"""A night that a person retries: every test gets its own run again, and the failed ones a new attempt."""

from collections.abc import Iterator
from pathlib import Path
from uuid import UUID

import pytest
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import State
from prefect.flow_engine import run_flow
from prefect.states import AwaitingRetry

from examples.practice.repositories import PracticeRepositories, commit_behaviour
from nightbridge.flows.final_states import result_of
from nightbridge.flows.nightly import nightly
from nightbridge.models import VerdictStatus
from tests.flows.practice_night import Entry, write_scenario, write_site
from tests.real.prefect_harness import prefect_in_this_process


@pytest.fixture(scope="module", autouse=True)
def _server() -> Iterator[None]:
    with prefect_in_this_process():
        yield


@pytest.mark.launcher
def test_a_retried_night_opens_new_attempts_for_what_failed_and_for_nothing_else(
    repositories: PracticeRepositories, environments_dir: Path, tmp_path: Path
) -> None:
    crash = commit_behaviour(repositories, "Crash", crash_at=3)
    good = commit_behaviour(repositories, "Repair", crash_at=None)
    entries = [Entry(id=f"t{number}", commit=crash if number == 1 else good) for number in range(3)]
    scenario = write_scenario(tmp_path / "conf", repositories, "three", *entries)
    site = write_site(tmp_path / "site.toml", workspace=tmp_path / "workspace", environments=environments_dir)
    parameters = {"scenario": str(scenario), "night": "n1", "system": str(site)}
    first = nightly(**parameters, return_state=True)
    runs = tmp_path / "workspace" / "runs"
    assert attempts_in(runs) == {"t0": ["a1"], "t1": ["a1"], "t2": ["a1"]}

    state = retry(first.state_details.flow_run_id, parameters)

    report = result_of(state)
    assert [verdict.test_id for verdict in report.verdicts] == ["t0", "t1", "t2"]
    assert [verdict.status for verdict in report.verdicts] == [
        VerdictStatus.NO_BASELINE,
        VerdictStatus.FAILED,
        VerdictStatus.NO_BASELINE,
    ]
    assert attempts_in(runs) == {"t0": ["a1"], "t1": ["a1", "a2"], "t2": ["a1"]}


def retry(flow_run_id: UUID | None, parameters: dict[str, str]) -> State:
    """What Retry in the UI does: the flow run is scheduled again, and a worker runs it."""
    assert flow_run_id is not None
    with get_client(sync_client=True) as client:
        client.set_flow_run_state(flow_run_id, AwaitingRetry(), force=True)
        flow_run = client.read_flow_run(flow_run_id)
    state = run_flow(nightly, flow_run=flow_run, parameters=parameters, return_type="state")
    assert isinstance(state, State)
    return state


def attempts_in(runs: Path) -> dict[str, list[str]]:
    return {folder.name[:2]: sorted(attempt.name for attempt in folder.iterdir()) for folder in runs.iterdir()}
