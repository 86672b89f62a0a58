"""One night with tests of every kind: each has its own verdict, its own attempts, and its own flow run."""

import json
import re
import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from uuid import UUID

import pytest
from httpx import Request
from prefect import flow, tags
from prefect.client.base import PrefectHttpxAsyncClient, PrefectHttpxSyncClient
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterName, TaskRunFilter, TaskRunFilterFlowRunId
from prefect.client.schemas.objects import FlowRun, State, StateType, TaskRun

from examples.practice.repositories import (
    PracticeRepositories,
    commit_behaviour,
    make_practice_repositories,
    move_main,
)
from nightbridge import config
from nightbridge.flows import nightly_regression, run_pipeline
from nightbridge.flows.final_states import BadEnd, result_of
from nightbridge.flows.nightly import nightly
from nightbridge.harvest.manifest import Manifest
from nightbridge.models import (
    NightReport,
    Outcome,
    RunRecord,
    Site,
    Verdict,
    VerdictStatus,
)
from nightbridge.nights.liveness import living
from nightbridge.slurm.attempts import attempts_of
from nightbridge.tasks.compare import compare
from nightbridge.tasks.context import this_flow_run
from nightbridge.tasks.prefect_calls import add_tags
from tests.flows.practice_night import Entry, write_scenario, write_site

pytestmark = [pytest.mark.launcher, pytest.mark.usefixtures("flows_here")]

MOST_ATTEMPTS = 2
STAGES = ["prepare", "clone", "container", "validate", "submit", "watch", "harvest", "compare"]


@dataclass(frozen=True)
class Mixed:
    """A night of a good test, one that fails, one that the cluster fails, and two that cannot run."""

    folder: Path
    report: NightReport

    @property
    def workspace(self) -> Path:
        return self.folder / "workspace"

    @property
    def store(self) -> Path:
        return self.workspace / "store"

    def verdict(self, test_id: str) -> Verdict:
        (found,) = (verdict for verdict in self.report.verdicts if verdict.test_id == test_id)
        return found


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, environments_dir: Path) -> tuple[Path, PracticeRepositories]:
    folder = tmp_path_factory.mktemp("pipeline")
    cluster = {"max_attempts": MOST_ATTEMPTS}
    write_site(folder / "site.toml", workspace=folder / "workspace", environments=environments_dir, cluster=cluster)
    return folder, make_practice_repositories(folder / "practice")


@pytest.fixture(scope="module")
def mixed(place: tuple[Path, PracticeRepositories]) -> Mixed:
    folder, repositories = place
    crash = commit_behaviour(repositories, "Crash", crash_at=3)
    flaky = commit_behaviour(repositories, "Lose the network", crash_at=None, print_flaky=3)
    move_main(repositories, repositories.sha("main"))
    scenario = write_scenario(
        folder / "conf",
        repositories,
        "mixed",
        Entry(id="crash", commit=crash),
        Entry(id="good"),
        Entry(id="flaky", commit=flaky),
        Entry(id="typo", cmd_args={"num_gpuss": 2}),
        Entry(id="no-such-commit", commit="0123456789abcdef"),
    )
    return Mixed(folder, nightly_regression(scenario, night="n1", system=str(folder / "site.toml")))


# --- verdicts --------------------------------------------------------------------------------------------------------


def test_every_test_has_its_own_verdict_whatever_becomes_of_the_others(mixed: Mixed) -> None:
    statuses = {verdict.test_id: verdict.status for verdict in mixed.report.verdicts}

    assert statuses == {
        "crash": VerdictStatus.FAILED,
        "good": VerdictStatus.NO_BASELINE,
        "flaky": VerdictStatus.INFRASTRUCTURE,
        "typo": VerdictStatus.INVALID,
        "no-such-commit": VerdictStatus.INVALID,
    }
    assert mixed.report.exit_code == 3


def test_a_bad_verdict_says_why(mixed: Mixed) -> None:
    assert "planned crash before iteration 3" in " ".join(mixed.verdict("crash").reasons)
    assert "DistBackendError" in " ".join(mixed.verdict("flaky").reasons)
    assert "did you mean 'num_gpus'?" in " ".join(mixed.verdict("typo").reasons)
    assert "0123456789abcdef" in " ".join(mixed.verdict("no-such-commit").reasons)


def test_the_report_is_where_the_night_says(mixed: Mixed) -> None:
    page = Path(urlsplit(mixed.report.report).path).read_text()

    assert mixed.report.report.endswith("/reports/n1/mixed.html")
    assert all(verdict.test_id in page for verdict in mixed.report.verdicts)


def test_a_run_that_ended_is_kept_with_its_verdict_and_its_measurements(mixed: Mixed) -> None:
    good = mixed.verdict("good")
    run = mixed.store / good.prefix

    assert Verdict.model_validate_json((run.parent / "verdict.json").read_bytes()) == good
    assert good.prefix == f"runs/good/n1/{good.run_key}/a1"
    assert (run / "metrics.parquet").exists()
    assert (run / "summary.json").exists()
    manifest = Manifest.model_validate_json((run / "manifest.json").read_bytes())
    assert {stored.kind for stored in manifest.files} >= {"checkpoint", "tensorboard", "log", "config"}


def test_a_test_that_could_not_run_leaves_no_attempt_and_no_stored_run(mixed: Mixed) -> None:
    begun = {folder.name.rsplit("-", 2)[0] for folder in (mixed.workspace / "runs").iterdir()}
    stored = {folder.name for folder in (mixed.store / "runs").iterdir()}

    assert begun == stored == {"crash", "good", "flaky"}


# --- attempts --------------------------------------------------------------------------------------------------------


def test_a_failure_of_the_cluster_opens_new_attempts_up_to_the_limit_and_all_are_kept(mixed: Mixed) -> None:
    flaky = mixed.verdict("flaky")
    manifest = json.loads((mixed.store / flaky.prefix / "manifest.json").read_text())
    record = RunRecord.model_validate(manifest["record"])

    assert len(attempts_of(flaky.run_key, mixed.workspace)) == MOST_ATTEMPTS
    assert flaky.prefix.endswith(f"/a{MOST_ATTEMPTS}")
    assert [job.attempt for job in record.jobs] == list(range(1, MOST_ATTEMPTS + 1))
    assert {job.outcome for job in record.jobs} == {Outcome.INFRASTRUCTURE}
    assert len({job.job_id for job in record.jobs}) == MOST_ATTEMPTS


@pytest.mark.parametrize("test_id", ["crash", "good"])
def test_nothing_else_is_tried_again(mixed: Mixed, test_id: str) -> None:
    assert len(attempts_of(mixed.verdict(test_id).run_key, mixed.workspace)) == 1


def signs_of_life(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, list[str]]]:
    """Filled with each run that is judged, and the flow runs that say at that moment that their process lives."""
    seen: list[tuple[str, list[str]]] = []

    def look(record: RunRecord, site: Site) -> Verdict:
        seen.append((record.spec.run_key, list(living(site.workspace))))
        return compare(record, site)

    monkeypatch.setattr("nightbridge.flows.pipeline.compare", look)
    return seen


def test_a_person_can_ask_for_a_new_attempt_after_the_last_one_ended(
    place: tuple[Path, PracticeRepositories], mixed: Mixed, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, repositories = place
    crash = commit_behaviour(repositories, "Crash", crash_at=3)
    move_main(repositories, repositories.sha("main"))
    file = write_scenario(folder / "conf", repositories, "alone", Entry(id="alone", commit=crash))
    site = str(folder / "site.toml")

    (run,) = config.runs(config.load(file), "n1")

    seen = signs_of_life(monkeypatch)
    first = run_pipeline(file, night="n1", system=site)
    again = run_pipeline(run, system=site)
    second = run_pipeline(file, night="n1", system=site, new_attempt=True)

    assert [first.prefix[-3:], again.prefix[-3:], second.prefix[-3:]] == ["/a1", "/a1", "/a2"]
    assert first.job_id == again.job_id != second.job_id
    assert {first.status, again.status, second.status} == {VerdictStatus.FAILED}
    assert len(attempts_of(first.run_key, folder / "workspace")) == 2
    # A run that is started alone says that it lives, as a night does for its runs: `logs -f` and `prune` go by it.
    with get_client(sync_client=True) as client:
        named = client.read_flow_runs(flow_run_filter=FlowRunFilter(name=FlowRunFilterName(any_=[run.run_key])))
    assert [run_key for run_key, _ in seen] == [run.run_key] * 3
    assert {alive for _, (alive,) in seen} == {str(each.id) for each in named}
    assert list(living(folder / "workspace")) == []

    # What `prune --run-days` does. Slurm forgets a job's name in time, and would take it again.
    shutil.rmtree(folder / "workspace" / "runs" / run.run_key)
    for new_attempt in (False, True):
        refused = run_pipeline(run, system=site, new_attempt=new_attempt)
        assert refused.status is VerdictStatus.INVALID
        assert f"ended as job {second.job_id}, and would be submitted again" in refused.reasons[0]


# --- flow runs -------------------------------------------------------------------------------------------------------


def flow_run_named(name: str) -> FlowRun:
    with get_client(sync_client=True) as client:
        (found,) = client.read_flow_runs(flow_run_filter=FlowRunFilter(name=FlowRunFilterName(any_=[name])))
    return found


def task_runs_of(flow_run: FlowRun) -> Sequence[TaskRun]:
    """The task runs of a flow run, in the order in which they began."""
    with get_client(sync_client=True) as client:
        found = client.read_task_runs(
            task_run_filter=TaskRunFilter(flow_run_id=TaskRunFilterFlowRunId(any_=[flow_run.id]))
        )
    return sorted(found, key=_begun_at)


def _begun_at(task_run: TaskRun) -> datetime:
    begun = task_run.start_time or task_run.expected_start_time
    assert begun is not None
    return begun


def state_of(name: str) -> State[Any]:
    """The final state of the flow run of a name."""
    state = flow_run_named(name).state
    assert state is not None
    return state


@pytest.mark.parametrize(
    ("test_id", "kind", "name"),
    [
        ("good", StateType.COMPLETED, "NoBaseline"),
        ("crash", StateType.FAILED, "RunFailed"),  # Failed is what a defect ends with, and an automation reports it
        ("flaky", StateType.FAILED, "Infrastructure"),
        ("no-such-commit", StateType.FAILED, "Invalid"),
    ],
)
def test_the_final_state_of_a_flow_run_is_its_verdict(mixed: Mixed, test_id: str, kind: StateType, name: str) -> None:
    state = state_of(mixed.verdict(test_id).run_key)

    assert (state.type, state.name) == (kind, name)
    assert state.message == "; ".join(mixed.verdict(test_id).reasons)


@pytest.mark.parametrize("test_id", ["good", "crash"])
def test_a_verdict_can_be_read_back_from_prefects_server(mixed: Mixed, test_id: str) -> None:
    # A flow whose last state was sent twice, because an answer was late, ends with what the server knows of it.
    verdict = mixed.verdict(test_id)

    assert result_of(state_of(verdict.run_key)) == verdict


def test_who_asks_prefect_for_the_result_of_a_bad_night_is_told_what_was_bad(mixed: Mixed) -> None:
    with pytest.raises(BadEnd, match="crash: failed") as told:
        state_of("mixed n1").result()

    assert told.value.returned == mixed.report


def test_a_report_can_be_read_back_from_prefects_server(mixed: Mixed) -> None:
    assert result_of(state_of("mixed n1")) == mixed.report


def test_the_final_state_of_a_night_is_its_gravest_verdict(mixed: Mixed) -> None:
    state = state_of("mixed n1")

    assert (state.type, state.name) == (StateType.FAILED, "RunFailed")
    assert "flaky: infrastructure" in (state.message or "")
    assert "good" not in (state.message or "")


def test_the_stages_are_tasks_in_their_order(mixed: Mixed) -> None:
    tasks = task_runs_of(flow_run_named(mixed.verdict("good").run_key))

    assert [task.name for task in tasks] == STAGES
    assert {task.state_name for task in tasks} == {"Completed"}


def test_every_attempt_is_validated_submitted_and_watched_anew_and_harvested_once(mixed: Mixed) -> None:
    tasks = task_runs_of(flow_run_named(mixed.verdict("flaky").run_key))

    again = ["validate", "submit", "watch"] * MOST_ATTEMPTS
    assert [task.name for task in tasks] == [*STAGES[:3], *again, *STAGES[-2:]]


def test_a_run_ends_at_the_stage_that_refused_it(mixed: Mixed) -> None:
    tasks = task_runs_of(flow_run_named(mixed.verdict("no-such-commit").run_key))

    assert [(task.name, task.state_name) for task in tasks] == [("prepare", "Completed"), ("clone", "Failed")]


# --- what it costs Prefect's server ----------------------------------------------------------------------------------


@pytest.fixture
def requested(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Filled with the requests of this process for flow runs, by method."""
    seen: Counter[str] = Counter()

    def counted(send: Callable[..., Any]) -> Callable[..., Any]:
        def counting(client: object, request: Request, *arguments: Any, **named: Any) -> Any:
            if re.search(r"/flow_runs/[0-9a-f-]{36}$", request.url.path):
                seen[request.method] += 1
            return send(client, request, *arguments, **named)

        return counting

    for kind in (PrefectHttpxSyncClient, PrefectHttpxAsyncClient):
        monkeypatch.setattr(kind, "send", counted(kind.send))
    return seen


def test_a_night_is_named_and_tagged_in_one_request(
    place: tuple[Path, PracticeRepositories], requested: Counter[str]
) -> None:
    folder, repositories = place
    scenario = write_scenario(folder / "conf", repositories, "refused", Entry(id="typo", cmd_args={"num_gpuss": 2}))

    nightly(str(scenario), night="n1", system=str(folder / "site.toml"), return_state=True)

    shown = flow_run_named("refused n1")
    assert {"scenario:refused", "cluster:local", "night:n1", "verdict:invalid"} <= {*shown.tags}
    # Prefect names the flow run when it begins; the night and its tags follow, and at the end the verdict.
    assert requested["PATCH"] == 3


def test_a_tag_that_a_person_gives_to_a_run_in_the_ui_stays() -> None:
    @flow(name="tagged")
    def tagged_meanwhile() -> UUID:
        run = this_flow_run()
        assert run is not None
        with get_client(sync_client=True) as client:
            client.update_flow_run(run.id, tags=[*run.tags, "look at this", "verdict:failed"])
        add_tags("verdict:passed")
        return run.id

    with tags("nightbridge"):
        run_id = tagged_meanwhile()

    with get_client(sync_client=True) as client:
        assert {*client.read_flow_run(run_id).tags} == {"nightbridge", "look at this", "verdict:passed"}
