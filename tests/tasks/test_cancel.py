"""When a cancellation is recorded as done: with a Slurm that answers, and with one that does not."""

import logging
import os
import re
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from prefect.client.schemas.objects import FlowRun
from prefect.flows import Flow
from prefect.states import Cancelling

from nightbridge.errors import StatusUnknown
from nightbridge.flows.attribute import attribute_flow
from nightbridge.flows.bisect import bisect_flow
from nightbridge.flows.nightly import cancel_hook, nightly
from nightbridge.flows.trial import try_flow
from nightbridge.models import Budget, ClusterSettings, RunSpec, Scenario, Site, utc_now
from nightbridge.nights.records import NightPlan, NightStart, NightTest, find_nights, write_plan
from nightbridge.processes import INTERRUPTED
from nightbridge.report.overview import index_html
from nightbridge.slurm.attempt_files import open_attempt
from nightbridge.slurm.attempts import CancelledJobs
from nightbridge.tasks.cancel import (
    cancel_night,
    cancel_runs,
    cancel_searches,
    is_recorded,
    note_search,
    noted_searches,
    record_cancelled,
)
from nightbridge.tasks.context import interrupted_together
from nightbridge.tasks.night import PLAN_LABEL
from nightbridge.tasks.site_access import store_of
from tests.builders import make_test

Answer = Callable[[bool], None]
WorksOn = Callable[[str], None]


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
def flow_run() -> FlowRun:
    """The flow run that is cancelled."""
    return FlowRun(flow_id=uuid4())


@pytest.fixture
def works_on(plan: NightPlan, flow_run: FlowRun, monkeypatch: pytest.MonkeyPatch) -> WorksOn:
    """Notes a search as the flow run that is cancelled does."""
    monkeypatch.setattr("nightbridge.tasks.cancel.this_flow_run", lambda: flow_run)
    return lambda search_id: note_search(search_id, plan.site)


@pytest.fixture
def hook(plan: NightPlan, flow_run: FlowRun, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Runs the night's cancellation hook as Prefect does."""
    monkeypatch.setattr("nightbridge.flows.nightly.send_events", lambda events: None)
    flow_run.labels[PLAN_LABEL] = str(write_plan(plan))
    return lambda: cancel_hook(nightly, flow_run, Cancelling())


def _begun(site: Site, test_id: str, night: str) -> str:
    """The key of a run of a search that has an attempt."""
    run = RunSpec(scenario="nightly", night=night, test=make_test(id=test_id))
    open_attempt(site.workspace, run.run_key, site.cluster)
    return run.run_key


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


def test_a_beginning_that_cannot_be_read_keeps_no_cancellation_open(
    plan: NightPlan, answers: Answer, hook: Callable[[], None]
) -> None:
    store_of(plan.site).put("nights/2026-11-21/nightly/begun.json", b"{")
    answers(True)

    hook()

    assert is_recorded(plan, plan.start.begun_at)


def test_an_attribution_that_may_live_on_keeps_the_cancellation_open(
    plan: NightPlan, answers: Answer, hook: Callable[[], None], works_on: WorksOn, monkeypatch: pytest.MonkeyPatch
) -> None:
    works_on("n1-attribute-1")
    open_attempt(plan.site.workspace, f"{plan.runs[1].test_slug}-n1-attribute-1-0123456789", plan.site.cluster)
    monkeypatch.setattr("nightbridge.flows.nightly.cancel_night", lambda plan: None)

    answers(False)
    hook()
    assert not is_recorded(plan, plan.start.begun_at)

    answers(True)
    hook()
    assert is_recorded(plan, plan.start.begun_at)


def test_the_hook_of_a_subflow_starts_programs_in_a_thread_whose_own_are_ended(
    plan: NightPlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[bool] = []

    def cancel_jobs(*_jobs: Any) -> CancelledJobs:
        ended.append(INTERRUPTED.get()())
        return CancelledJobs(jobs=(), doubts=())

    monkeypatch.setattr("nightbridge.tasks.cancel.cancel_jobs", cancel_jobs)
    with interrupted_together() as interruption:
        interruption.cause = KeyboardInterrupt()

        cancel_runs("night", [plan.runs[0].run_key], plan.site)

        assert INTERRUPTED.get()()
    assert ended == [False]


def test_whoever_cancels_is_told_that_jobs_may_live_on(
    plan: NightPlan, answers: Answer, caplog: pytest.LogCaptureFixture
) -> None:
    answers(False)

    with caplog.at_level(logging.WARNING), pytest.raises(StatusUnknown, match="night 2026-11-21: not every job"):
        cancel_night(plan)

    assert "night 2026-11-21: cancelled no job" in caplog.text


def test_a_cancelled_search_ends_its_own_jobs_and_no_one_elses(
    plan: NightPlan, answers: Answer, flow_run: FlowRun, works_on: WorksOn
) -> None:
    long = "megatron_bridge_nemotron_h_56b_pretraining_bf16_256gpu"
    own = [_begun(plan.site, long, night) for night in ("2026-11-20-attribute-aaaaaaaa", "2026-11-20-bisect-bbbbbbbb")]
    for test_id in (long, "dense", "dense-small"):
        for night in ("2026-11-20-bisect-cccccccc", "2026-11-26-try-dddddddd", "2026-11-20-attribute-eeeeeeee"):
            _begun(plan.site, test_id, night)
    works_on("2026-11-20-attribute-aaaaaaaa")
    works_on("2026-11-20-bisect-bbbbbbbb")
    answers(False)

    with pytest.raises(StatusUnknown) as error:
        cancel_searches(flow_run, plan.site)

    assert sorted(re.findall(r"[\w-]+(?=-a1: )", str(error.value))) == sorted(own)


def test_a_search_that_has_not_begun_cancels_nothing(plan: NightPlan, answers: Answer, flow_run: FlowRun) -> None:
    _begun(plan.site, "dense", "2026-11-20-bisect-cccccccc")
    answers(False)

    cancel_searches(flow_run, plan.site)


def test_a_search_is_noted_until_no_job_of_it_can_live_on(
    plan: NightPlan, answers: Answer, flow_run: FlowRun, works_on: WorksOn
) -> None:
    _begun(plan.site, "dense", "n1-bisect-1")
    works_on("n1-bisect-1")

    answers(False)
    with pytest.raises(StatusUnknown):
        cancel_searches(flow_run, plan.site)
    assert noted_searches(flow_run, plan.site)

    answers(True)
    cancel_searches(flow_run, plan.site)
    assert not noted_searches(flow_run, plan.site)


def test_a_search_that_another_flow_run_has_taken_up_since_goes_on(
    plan: NightPlan, answers: Answer, flow_run: FlowRun, works_on: WorksOn
) -> None:
    """Slurm did not answer the cancellation, and the search was started again before it was repeated."""
    _begun(plan.site, "dense", "n1-bisect-1")
    works_on("n1-bisect-1")
    (note,) = noted_searches(flow_run, plan.site)
    later = note.parents[1] / str(uuid4()) / note.name
    later.parent.mkdir()
    later.touch()
    os.utime(note, (1, 1))
    answers(False)

    cancel_searches(flow_run, plan.site)
    assert (note.exists(), later.exists()) == (False, True)

    os.utime(later, (0, 0))
    works_on("n1-bisect-1")
    with pytest.raises(StatusUnknown):
        cancel_searches(flow_run, plan.site)


@pytest.mark.parametrize("flow", [bisect_flow, attribute_flow, try_flow], ids=lambda flow: flow.name)
def test_cancelling_the_flow_run_of_a_search_finds_its_jobs_by_what_it_noted(
    flow: Flow[..., Any], plan: NightPlan, answers: Answer, flow_run: FlowRun, works_on: WorksOn, tmp_path: Path
) -> None:
    site = tmp_path / "site.toml"
    site.write_text(
        f'workspace = "{plan.site.workspace}"\n[cluster]\nkind = "slurm"\nname = "c"\nbin_dir = "{tmp_path / "bin"}"\n'
    )
    works_on("n1-search-1")
    run = _begun(plan.site, "dense", "n1-search-1")
    answers(False)

    with pytest.raises(StatusUnknown, match=f"n1-search-1: .*{run}-a1"):
        flow.on_cancellation_hooks[0](
            flow, flow_run.model_copy(update={"parameters": {"system": str(site)}}), Cancelling()
        )


def test_a_search_whose_record_is_damaged_is_not_taken_for_over(
    plan: NightPlan, answers: Answer, flow_run: FlowRun, works_on: WorksOn
) -> None:
    answers(False)
    works_on("n1-bisect-1")
    search = open_attempt(plan.site.workspace, "dense-n1-bisect-1-0123456789", plan.site.cluster)
    (search.attempt_dir / "attempt.json").write_text("{")

    with pytest.raises(StatusUnknown, match=f"n1-bisect-1: .*{search.name}"):
        cancel_searches(flow_run, plan.site)


def test_a_night_that_was_cancelled_before_its_beginning_could_be_recorded_is_among_the_nights(plan: NightPlan) -> None:
    record_cancelled(plan)

    (night,) = find_nights(store_of(plan.site))
    assert (night.start, night.end and night.end.title) == (plan.start, "cancelled")
    assert plan.start.night in index_html(store_of(plan.site))


def test_a_night_that_went_on_after_its_cancellation_is_to_be_cancelled_again(plan: NightPlan) -> None:
    record_cancelled(plan)

    assert is_recorded(plan, plan.start.begun_at)
    assert not is_recorded(plan, utc_now() + timedelta(seconds=1))
