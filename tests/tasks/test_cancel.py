"""When a cancellation is recorded as done: with a Slurm that answers, and with one that does not."""

import logging
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from uuid import uuid4

import pytest
from prefect.client.schemas.objects import FlowRun
from prefect.states import Cancelling

from nightbridge.errors import StatusUnknown
from nightbridge.flows.nightly import cancel_hook, nightly
from nightbridge.models import Budget, ClusterSettings, RunSpec, Scenario, Site, utc_now
from nightbridge.nights.records import NightPlan, NightStart, NightTest, write_plan
from nightbridge.slurm.attempt_files import open_attempt
from nightbridge.tasks.cancel import cancel_night, cancel_search, is_recorded, record_cancelled
from nightbridge.tasks.night import PLAN_LABEL
from tests.builders import make_test

Answer = Callable[[bool], None]


@pytest.fixture
def answers(tmp_path: Path) -> Answer:
    """Sets whether Slurm answers; it knows of no job."""
    (tmp_path / "bin").mkdir()

    def say(whether: bool) -> None:
        for name in ("squeue", "sacct"):
            path = tmp_path / "bin" / name
            path.write_text("#!/bin/sh\n" + ("" if whether else "echo error: no answer >&2; exit 1\n"))
            path.chmod(0o755)

    return say


@pytest.fixture
def plan(tmp_path: Path) -> NightPlan:
    """A night of two runs, the first with an attempt."""
    slurm = ClusterSettings(kind="slurm", name="c", bin_dir=tmp_path / "bin")
    site = Site(workspace=tmp_path / "ws", cluster=slurm, budget=Budget(attribution=1.0))
    tests = [make_test(id=name) for name in ("dense", "experts")]
    runs = tuple(RunSpec(scenario="nightly", night="2026-11-21", test=test) for test in tests)
    open_attempt(site.workspace, runs[0].run_key, slurm)
    start = NightStart(
        night="2026-11-21",
        scenario="nightly",
        cluster="c",
        workspace=site.workspace,
        begun_at=utc_now(),
        flow_run=str(uuid4()),
        tests=tuple(NightTest(test_id=run.test.id, run_key=run.run_key) for run in runs),
    )
    return NightPlan(start=start, scenario=Scenario(name="nightly", tests=()), runs=runs, site=site)


@pytest.fixture
def hook(plan: NightPlan, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Runs the night's cancellation hook as Prefect does."""
    monkeypatch.setattr("nightbridge.flows.nightly.send_events", lambda events: None)
    flow_run = FlowRun(flow_id=uuid4(), labels={PLAN_LABEL: str(write_plan(plan))})
    return lambda: cancel_hook(nightly, flow_run, Cancelling())


def test_a_cancellation_is_recorded_as_done_once_no_job_can_live_on(
    plan: NightPlan, answers: Answer, hook: Callable[[], None], caplog: pytest.LogCaptureFixture
) -> None:
    answers(False)
    hook()

    assert not is_recorded(plan, plan.start.begun_at)
    assert f"{plan.runs[0].run_key}-a1: squeue or sacct did not answer" in caplog.text

    answers(True)
    hook()

    assert is_recorded(plan, plan.start.begun_at)


def test_an_attribution_that_may_live_on_keeps_the_cancellation_open(
    plan: NightPlan, answers: Answer, hook: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    open_attempt(plan.site.workspace, f"{plan.runs[1].test_slug}-n1-attribute-1-0123456789", plan.site.cluster)
    monkeypatch.setattr("nightbridge.flows.nightly.cancel_night", lambda plan: None)

    answers(False)
    hook()
    assert not is_recorded(plan, plan.start.begun_at)

    answers(True)
    hook()
    assert is_recorded(plan, plan.start.begun_at)


def test_whoever_cancels_is_told_that_jobs_may_live_on(
    plan: NightPlan, answers: Answer, caplog: pytest.LogCaptureFixture
) -> None:
    answers(False)

    with caplog.at_level(logging.WARNING), pytest.raises(StatusUnknown, match="night 2026-11-21: not every job"):
        cancel_night(plan)

    assert "night 2026-11-21: cancelled no job" in caplog.text


def test_a_search_whose_record_is_damaged_is_not_taken_for_over(plan: NightPlan, answers: Answer) -> None:
    answers(False)
    search = open_attempt(plan.site.workspace, "dense-n1-bisect-1-0123456789", plan.site.cluster)
    (search.attempt_dir / "attempt.json").write_text("{")

    with pytest.raises(StatusUnknown, match=f"bisect of dense: .*{search.name}"):
        cancel_search("bisect", "dense", plan.site)


def test_a_night_that_went_on_after_its_cancellation_is_to_be_cancelled_again(plan: NightPlan) -> None:
    record_cancelled(plan)

    assert is_recorded(plan, plan.start.begun_at)
    assert not is_recorded(plan, utc_now() + timedelta(seconds=1))
