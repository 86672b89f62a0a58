"""A night that a person retries: every test gets its own run again, and the failed ones a new attempt.

What a person has requested stands until it is done, whatever comes in between.
"""

import errno
import html
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from uuid import UUID

import httpx
import pytest
from prefect import flow
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import State
from prefect.flow_engine import run_flow
from prefect.states import AwaitingRetry, Completed
from pydantic import BaseModel

from examples.practice.repositories import PracticeRepositories, commit_behaviour
from nightbridge.attribution.attribution_plan import keep_plan
from nightbridge.attribution.attribution_result import evaluate, keep_result
from nightbridge.flows import nightly_regression
from nightbridge.flows.final_states import result_of
from nightbridge.flows.nightly import _attributed, _verdict_of, nightly
from nightbridge.harvest import node_harvest
from nightbridge.models import (
    Comparison,
    NightReport,
    RunSpec,
    Scenario,
    Site,
    StoreSettings,
    Verdict,
    VerdictStatus,
    utc_now,
)
from nightbridge.models.site import Budget
from nightbridge.nights.records import NightPlan, NightStart, NightTest, find_nights, record_end, record_start
from nightbridge.processes import Finished, own_program, run
from nightbridge.slurm.attempt_files import AttemptContext, record_ended
from nightbridge.slurm.attempts import AttemptRequest, choose_attempt, next_attempt
from nightbridge.store.object_store import open_store
from nightbridge.tasks import harvest
from nightbridge.tasks.context import NightContext
from nightbridge.tasks.site_access import store_of
from tests.builders import ATTRIBUTION_PLAN, exchange_runs, make_job, make_record, make_verdict
from tests.flows.practice_night import SAMPLES, Entry, write_scenario, write_site


@pytest.mark.launcher
@pytest.mark.usefixtures("flows_here")
def test_a_retried_night_opens_new_attempts_for_what_failed_and_for_nothing_else(
    repositories: PracticeRepositories, environments_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The release before began it, and pickled what its runs returned."""
    crash = commit_behaviour(repositories, "Crash", crash_at=3)
    good = commit_behaviour(repositories, "Repair", crash_at=None)
    entries = [Entry(id="t0", commit=crash), Entry(id="t1", commit=good)]
    scenario = write_scenario(tmp_path / "conf", repositories, "two", *entries)
    site = write_site(tmp_path / "site.toml", workspace=tmp_path / "workspace", environments=environments_dir)
    parameters = {"scenario": str(scenario), "night": "n1", "system": str(site)}
    with monkeypatch.context() as before:
        before.setattr(Verdict, "__getstate__", without_newer_fields)
        first = nightly(**parameters, return_state=True)
    runs = tmp_path / "workspace" / "runs"
    assert attempts_in(runs) == {"t0": ["a1"], "t1": ["a1"]}

    state = retry(first.state_details.flow_run_id, parameters)

    report = result_of(state)
    assert [(verdict.test_id, verdict.status) for verdict in report.verdicts] == [
        ("t0", VerdictStatus.FAILED),
        ("t1", VerdictStatus.NO_BASELINE),
    ]
    assert attempts_in(runs) == {"t0": ["a1", "a2"], "t1": ["a1"]}

    # Without the UI: `nightbridge run --retry`, and from Python.
    nightly_regression(scenario, night="n1", system=str(site), retry=True)
    assert attempts_in(runs) == {"t0": ["a1", "a2", "a3"], "t1": ["a1"]}


def without_newer_fields(verdict: Verdict) -> dict[str, Any]:
    """What of a verdict a release pickles that lacks the fields of later ones."""
    state = BaseModel.__getstate__(verdict)
    newer = {"as_golden", "repeat", "further_runs", "news", "moved"}
    return {**state, "__dict__": {name: value for name, value in vars(verdict).items() if name not in newer}}


@pytest.mark.launcher
@pytest.mark.usefixtures("flows_here")
def test_a_harvest_that_an_upgrade_took_its_program_from_is_done_by_a_retry_without_a_second_job(
    repositories: PracticeRepositories, environments_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The flow run is of the release before, which names a module that the package on the node does not have."""
    good = commit_behaviour(repositories, "Good", crash_at=None)
    scenario = write_scenario(tmp_path / "conf", repositories, "one", Entry(id="t0", commit=good))
    site = write_site(tmp_path / "site.toml", workspace=tmp_path / "workspace", environments=environments_dir)
    site.write_text(f'{site.read_text()}[harvest]\non = "node"\n')
    parameters = {"scenario": str(scenario), "night": "n1", "system": str(site)}
    monkeypatch.setattr(harvest, "node_runner", lambda *_: run_here)
    with monkeypatch.context() as before:
        before.setattr(
            node_harvest, "own_program", lambda _, arguments: own_program("nightbridge.of_before", arguments)
        )
        first = nightly(**parameters, return_state=True)
    (lost,) = result_of(first).verdicts
    assert lost.status is VerdictStatus.INFRASTRUCTURE
    said = " ".join(lost.reasons)
    assert "No module named 'nightbridge.of_before'" in said
    assert "upgraded during the night, Retry" in said

    (kept,) = result_of(retry(first.state_details.flow_run_id, parameters)).verdicts

    assert kept.status is VerdictStatus.NO_BASELINE
    assert attempts_in(tmp_path / "workspace" / "runs") == {"t0": ["a1"]}


def run_here(
    _name: str,
    argv: Sequence[str | Path],
    *,
    environment: Mapping[str, str],
    timeout: float,
    given: bytes = b"",
    on_line: Callable[[str], None] | None = None,
) -> Finished:
    """A node that is this machine."""
    return run(argv, environment={**os.environ, **environment}, timeout=timeout, given=given, on_line=on_line)


@pytest.mark.usefixtures("flows_here")
def test_a_night_that_died_before_it_was_recorded_as_begun_is_recorded_when_it_is_started_again(tmp_path: Path) -> None:
    scenario = tmp_path / "invalid.toml"
    scenario.write_text((SAMPLES / "llama_small.toml").read_text().replace("num_gpus = 2", "num_gpuss = 2"))
    parameters = {"scenario": str(scenario), "night": "n1", "workspace": str(tmp_path / "workspace")}
    first = nightly(**parameters, return_state=True)
    (begun,) = (tmp_path / "workspace" / "store" / "nights").rglob("begun.json")
    recorded = begun.read_text()
    begun.unlink()

    retry(first.state_details.flow_run_id, parameters)

    assert begun.read_text() == recorded


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


# --- a request is not forgotten --------------------------------------------------------------------------------------


@pytest.fixture
def passed(tmp_path: Path) -> tuple[RunSpec, Site]:
    """A run whose first attempt has passed, for which a new one is requested."""
    record, site = make_record(), Site(workspace=tmp_path)
    end(next_attempt(record.spec, site, after=0))
    verdict = make_verdict(VerdictStatus.PASSED, run_key=record.spec.run_key, prefix=record.prefix)
    store_of(site).put(f"{record.prefix.rpartition('/')[0]}/verdict.json", verdict.model_dump_json().encode())
    return record.spec, site


def end(attempt: AttemptContext) -> None:
    """Record that the attempt's job ended, and wait until the clock of the file system has moved on."""
    record_ended(make_job(attempt.run_key, attempt.attempt_dir).model_copy(update={"attempt": attempt.attempt}))
    time.sleep(0.02)


def test_a_new_attempt_is_opened_once_and_for_all_tries_of_a_prefect_that_does_not_answer(
    passed: tuple[RunSpec, Site], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NIGHTBRIDGE_RETRY_DELAY", "0.01")
    run, site = passed
    worked_on: list[str] = []

    def pipeline(run: RunSpec, site: Site, request: AttemptRequest, *, return_state: bool) -> State[Verdict]:
        worked_on.append("")
        if len(worked_on) == 1:  # the flow run could not be made
            raise httpx.ConnectError("All connection attempts failed")
        attempt = choose_attempt(request, run, site)
        end(attempt)
        worked_on[-1] = attempt.attempt_dir.name
        if len(worked_on) < 4:  # its last state could not be reported
            raise httpx.ConnectError("All connection attempts failed")
        return Completed(data=make_verdict(VerdictStatus.FAILED, run_key=run.run_key))

    monkeypatch.setattr("nightbridge.flows.nightly.pipeline", pipeline)
    verdict = _verdict_of(run, site, AttemptRequest(new=utc_now()), NightContext())

    assert verdict.status is VerdictStatus.FAILED
    assert worked_on == ["", "a2", "a2", "a2"]


@pytest.mark.parametrize("opened", [False, True])
def test_when_a_requested_attempt_dies_the_night_does_not_say_what_the_one_before_it_did(
    passed: tuple[RunSpec, Site], monkeypatch: pytest.MonkeyPatch, opened: bool
) -> None:
    def pipeline(run: RunSpec, site: Site, request: AttemptRequest, *, return_state: bool) -> State[Verdict]:
        if opened:
            choose_attempt(request, run, site)
        raise OSError(116, "Stale file handle")

    monkeypatch.setattr("nightbridge.flows.nightly.pipeline", pipeline)

    assert _verdict_of(*passed, AttemptRequest(new=utc_now()), NightContext()).status is VerdictStatus.INFRASTRUCTURE
    assert _verdict_of(*passed, AttemptRequest(), NightContext()).status is (
        VerdictStatus.INFRASTRUCTURE if opened else VerdictStatus.PASSED
    )


# --- a night keeps its verdicts --------------------------------------------------------------------------------------


@pytest.mark.usefixtures("flows_here")
def test_some_tests_are_not_started_under_the_id_of_a_night_that_has_others(
    repositories: PracticeRepositories, environments_dir: Path, tmp_path: Path
) -> None:
    """They would replace its record and its report, and what of it regressed would be forgotten."""
    scenario = write_scenario(tmp_path / "conf", repositories, "two", Entry(id="t0"), Entry(id="t1"))
    site = write_site(tmp_path / "site.toml", workspace=tmp_path / "workspace", environments=environments_dir)
    store = open_store(StoreSettings(url=f"file://{tmp_path}/workspace/store"))
    tests = tuple(NightTest(test_id=test, run_key=f"{test}-n1-0123456789") for test in ("t0", "t1"))
    begun = {"scenario": "two", "cluster": "local", "workspace": tmp_path, "begun_at": utc_now(), "tests": tests}
    record_start(store, NightStart(night="n1", **begun))

    state = nightly(str(scenario), tests=["t0"], night="n1", system=str(site), return_state=True)

    assert state.is_failed()
    assert "two, night n1: this night has other tests, too: t1. " in (state.message or "")
    assert [night.start.tests for night in find_nights(store)] == [tests]
    assert not list((tmp_path / "workspace").glob("runs/*"))


@pytest.mark.usefixtures("flows_here")
def test_a_night_whose_search_for_the_cause_is_cut_short_keeps_its_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A moment of the file system, not only an error of ours."""
    searched: list[str] = []

    def attribute(test: str, *_: object) -> None:
        searched.append(test)
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    monkeypatch.setattr("nightbridge.flows.attribute.attribute", attribute)
    worse = make_verdict(VerdictStatus.REGRESSED, further_runs=2)
    written = NightReport(scenario="nightly", night=worse.night, verdicts=(worse,), report="file:///report.html")
    start = NightStart(night=worse.night, scenario="nightly", cluster="local", workspace=tmp_path, begun_at=utc_now())
    site = Site(workspace=tmp_path, budget=Budget(attribution=1))
    plan = NightPlan(start=start, scenario=Scenario(name="nightly", tests=()), runs=(), site=site)

    @flow
    def night() -> NightReport:
        return _attributed(plan, written)

    assert night() == written
    assert searched == [worse.test_id]


def written_and_reported(site: Site) -> tuple[NightReport, NightReport]:
    """The report of a night in which a test became slower, and that after the search, where the month has nothing left."""
    slower = Comparison(
        metric="step_time", unit="s", lower_is_better=True, value=1.08, baseline=1.0, threshold=0.05, status="regressed"
    )
    its_own: dict[str, Any] = {"series": ATTRIBUTION_PLAN.series, "comparisons": (slower,), "further_runs": 2}
    worse = make_verdict(VerdictStatus.REGRESSED, night="2026-11-21", **its_own)
    spent = make_verdict(VerdictStatus.PASSED, night="2026-11-20", confirmation_gpu_hours=8.0)
    record_end(store_of(site), NightReport(scenario="nightly", night=spent.night, verdicts=(spent,)))
    written = NightReport(scenario="nightly", night=worse.night, verdicts=(worse,), report="file:///report.html")
    record_end(store_of(site), written)
    begun = {"cluster": site.cluster.name, "workspace": site.workspace, "begun_at": utc_now()}
    start = NightStart(night=worse.night, scenario="nightly", **begun)
    plan = NightPlan(start=start, scenario=Scenario(name="nightly", tests=()), runs=(), site=site)

    @flow
    def night() -> NightReport:
        return _attributed(plan, written)

    return written, night()


@pytest.mark.usefixtures("flows_here")
def test_a_report_says_what_was_not_searched_for_lack_of_budget(tmp_path: Path) -> None:
    _, reported = written_and_reported(Site(workspace=tmp_path, budget=Budget(month=5, attribution=1)))

    assert not reported.found_again, "by this flow run, before the search, and by no earlier one"
    why = "no cause is known: 2026-11-21: the month's budget of 5 GPU-hours is spent"
    assert any(reason.startswith(why) for reason in reported.verdicts[0].reasons)
    assert why in html.unescape(Path(reported.report.removeprefix("file://")).read_text())


@pytest.mark.usefixtures("flows_here")
def test_a_report_keeps_the_answer_of_a_search_that_has_spent_the_budget(tmp_path: Path) -> None:
    """As of a night that is started again."""
    site = Site(workspace=tmp_path, budget=Budget(month=5, attribution=1))
    asked = keep_plan(store_of(site), ATTRIBUTION_PLAN.model_copy(update={"cluster": site.cluster.name}))
    keep_result(store_of(site), evaluate(asked, exchange_runs([2])))

    written, reported = written_and_reported(site)

    assert reported == written
