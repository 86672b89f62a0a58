"""The retry policy that stands behind every stage."""

import errno
from pathlib import Path
from typing import Any

import pytest
from prefect import Task, flow, tags
from prefect.context import FlowRunContext, TaskRunContext
from pydantic import create_model

from nightbridge.errors import InvalidInput, PermanentError, StatusUnknown, TransientError
from nightbridge.models import Model, RunSpec, Site
from nightbridge.slurm.attempt_files import read_waiting
from nightbridge.tasks import compare, harvest, job, prepare, report
from nightbridge.tasks.stage import DELAY_VARIABLE, is_transient, stage
from tests.builders import make_spec

pytestmark = pytest.mark.usefixtures("flows_here")

STAGES = [
    prepare.clone,
    prepare.container,
    prepare.validate,
    job.submit,
    job.watch,
    harvest.harvest,
    compare.compare,
    report.report,
]


@pytest.mark.parametrize("task", STAGES, ids=lambda task: task.name)
def test_every_stage_retries_transient_errors_only_and_keeps_its_result(task: Task[..., Any]) -> None:
    assert task.retries >= 3
    assert task.retry_condition_fn is is_transient
    assert task.retry_jitter_factor
    assert task.retry_delay_seconds == sorted(task.retry_delay_seconds)
    assert task.persist_result


def test_a_stage_has_no_tags_of_which_prefect_would_ask_for_limits() -> None:
    found: list[object] = []

    @stage("look")
    def look() -> None:
        found.append((context := TaskRunContext.get()) and context.task_run.tags)

    @flow
    def one() -> None:
        found.append((context := FlowRunContext.get()) and context.flow_run and context.flow_run.tags)
        look()

    with tags("test:qwen3"):
        one()

    assert found == [["test:qwen3"], []]


def failing(errors: list[Exception]) -> list[str]:
    """Run a stage that raises the given errors in turn, then succeeds; return what happened."""
    calls: list[str] = []

    @stage("failing")
    def work() -> str:
        calls.append("call")
        if len(calls) <= len(errors):
            raise errors[len(calls) - 1]
        return "done"

    work.retry_delay_seconds = [0.01]

    @flow
    def one() -> None:
        calls.append(work())

    try:
        one()
    except Exception as error:
        calls.append(type(error).__name__)
    return calls


def test_a_transient_error_is_tried_again() -> None:
    assert failing([TransientError("network"), StatusUnknown("slurmdbd")]) == ["call", "call", "call", "done"]


def test_a_file_system_that_is_away_for_a_moment_is_tried_again() -> None:
    away = [OSError(number, "away", "/lustre/w/a1") for number in (errno.ESTALE, errno.EIO, errno.ENOTCONN)]

    assert failing([*away]) == ["call", "call", "call", "call", "done"]


@pytest.mark.parametrize(
    "error",
    [PermanentError("gone"), InvalidInput("typo"), ValueError("bug"), OSError(errno.EACCES, "denied")],
)
def test_anything_else_ends_the_stage_at_once(error: Exception) -> None:
    assert failing([error]) == ["call", type(error).__name__]


def test_a_retried_flow_run_takes_finished_stages_from_their_results() -> None:
    calls: list[str] = []

    @stage("first")
    def first() -> int:
        calls.append("first")
        return 1

    @flow(retries=1)
    def one() -> None:
        first()
        calls.append("flow")
        if calls.count("flow") == 1:
            raise ValueError("the process dies here")

    one()

    assert calls == ["first", "flow", "flow"]


def test_a_stage_whose_result_is_of_a_class_that_an_upgrade_has_moved_is_done_again() -> None:
    releases = [create_model("Chosen", __base__=Model, __module__=f"nightbridge.of_{at}", night=str) for at in "ab"]
    found: list[object] = []

    @flow(retries=1)
    def one() -> None:
        kind = releases[len(found)]

        def choose() -> Model:
            return kind.model_validate({"night": "2026-11-21"})

        choose.__annotations__["return"] = kind
        found.append(stage("choose")(choose)())
        if len(found) == 1:
            raise ValueError("the process dies here, and is started again after the upgrade")

    one()

    assert [type(each) for each in found] == releases


def test_what_a_stage_waits_for_stands_in_its_runs_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(DELAY_VARIABLE, "0.01")
    site, run = Site(workspace=tmp_path), make_spec()
    read: list[str] = []

    @stage("waits", waits_for=(StatusUnknown,))
    def waits(run: RunSpec, site: Site) -> None:
        read.append(str(read_waiting(run.run_key, site.workspace) or ""))
        if len(read) < 3:
            raise StatusUnknown("slurmctld is away")

    waits.fn(run, site)

    assert [line.partition(": ")[2] for line in read] == ["", "slurmctld is away", "slurmctld is away"]
    assert read_waiting(run.run_key, site.workspace) is None
