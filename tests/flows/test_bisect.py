"""`nightbridge bisect` on the practice workload: killed on its way, gone on with, and asked once more."""

import os
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from prefect.settings import PREFECT_API_URL, PREFECT_FLOWS_HEARTBEAT_FREQUENCY, temporary_settings

from examples.practice.repositories import commit_many, make_practice_repositories
from nightbridge.bisect.result import BisectResult, result_lines
from nightbridge.bisect.search import Levels
from nightbridge.embedded.jobs import all_jobs
from nightbridge.flows import bisect_regression, run_pipeline
from nightbridge.history.nightly_values import nights_of
from nightbridge.history.reading import find_series, read_history
from nightbridge.models import ClusterSettings, StoreSettings, VerdictStatus
from nightbridge.nights.liveness import living
from nightbridge.slurm.local import LocalCluster
from nightbridge.store.directory import DirectoryStore
from tests.flows.practice_night import NIGHTBRIDGE, Entry, write_scenario, write_site
from tests.real.prefect_server import PrefectServer

pytestmark = pytest.mark.launcher

TEST = "slower"
CHANGES: Mapping[int, Mapping[str, Any]] = {1: {"crash_at": 2}, 2: {"crash_at": None}, 3: {"step_time_factor": 1.1}}
"""What some of the bad night's five commits do. The crash is gone with the commit after it.

Once both ends were measured, the crash is where two points divide the range in thirds: no noise leaves it out.
"""
COMMITS, CRASH, SLOW = 5, 1, 3
FEW_STEPS = {"max_steps": 14, "save_interval": 14}
PATIENCE = 850.0


@dataclass(frozen=True)
class Searched:
    """A history of two nights, and what bisect said when it went on after it was killed, and when it was asked again."""

    folder: Path
    commits: Sequence[str]
    jobs_when_killed: Counter[str]
    result: BisectResult
    jobs: Counter[str]
    asked_again: BisectResult
    jobs_after: Counter[str]

    @property
    def store(self) -> DirectoryStore:
        return DirectoryStore(StoreSettings(url=f"file://{self.folder}/workspace/store"))


@pytest.fixture(scope="module")
def searched(
    tmp_path_factory: pytest.TempPathFactory, environments_dir: Path, prefect_server: PrefectServer
) -> Searched:
    folder = tmp_path_factory.mktemp("bisect")
    site = str(write_site(folder / "site.toml", workspace=folder / "workspace", environments=environments_dir))
    repositories = make_practice_repositories(folder / "practice")
    scenario = write_scenario(folder / "conf", repositories, "one", Entry(id=TEST, cmd_args=FEW_STEPS))
    sample = scenario.parent / "llama_small.toml"
    sample.write_text(sample.read_text().replace("[harvest]", '[harvest]\ncheckpoint = "none"'))
    in_this_process = {PREFECT_API_URL: prefect_server.api_url, PREFECT_FLOWS_HEARTBEAT_FREQUENCY: None}
    with temporary_settings(in_this_process):
        run_pipeline(scenario, night="n1", system=site)
        commits = commit_many(repositories, [f"Change {number}" for number in range(COMMITS)], CHANGES)
        assert run_pipeline(scenario, night="n2", system=site).status is VerdictStatus.REGRESSED
        command: list[str | Path] = [NIGHTBRIDGE, "bisect", TEST, "--at-once", "2", "--system", site]
        _kill_with_a_point_done(command, prefect_server.environment, folder / "workspace")
        jobs_when_killed = _jobs(folder)
        result = bisect_regression(TEST, system=site, at_once=2)
        jobs = _jobs(folder)
        asked_again = bisect_regression(TEST, system=site)
    return Searched(folder, commits, jobs_when_killed, result, jobs, asked_again, _jobs(folder))


def _kill_with_a_point_done(command: Sequence[str | Path], environment: Mapping[str, str], workspace: Path) -> None:
    """Start a bisect as a shell does, and kill it when the first of its points has a verdict."""
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, process_group=0
    )
    deadline = time.monotonic() + PATIENCE
    while not list(workspace.glob(f"store/runs/{TEST}/*-bisect-*/*/verdict.json")):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, "no point ended in time"
        time.sleep(0.05)
    assert list(living(workspace)), "`prune` leaves its runs alone"
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


def _jobs(folder: Path) -> Counter[str]:
    """How many jobs of each name the cluster has had."""
    cluster = LocalCluster(ClusterSettings(), folder / "workspace" / "cluster")
    states = cluster.states([job.job_id for job in all_jobs(cluster.root)])
    return Counter(status.name for status in states.values())


def test_the_commit_that_made_it_slower_is_named_exactly(searched: Searched) -> None:
    (culprit,) = searched.result.culprits

    assert (culprit.commit, culprit.subject) == (searched.commits[SLOW], f"Change {SLOW}")
    assert searched.result.answer.probability >= 0.99


def test_the_answer_comes_with_its_evidence_and_its_cost(searched: Searched) -> None:
    levels = searched.result.plan.levels
    assert isinstance(levels, Levels)
    measured = {point.place: point.value for point in searched.result.points if point.value is not None}
    lines = "\n".join(result_lines(searched.result))

    assert measured[SLOW] == pytest.approx(levels.good, rel=0.03)
    assert measured[SLOW + 1] == pytest.approx(levels.bad, rel=0.03)
    assert searched.result.gpu_hours > 0
    assert f"{len(searched.result.points)} runs, {searched.result.gpu_hours:.2f} GPU-hours" in lines


def test_a_commit_that_does_not_run_is_skipped_and_said(searched: Searched) -> None:
    assert searched.result.skipped == (CRASH + 1,)
    assert f"{searched.commits[CRASH][:12]}: does not run, skipped" in "\n".join(result_lines(searched.result))


def test_a_killed_bisect_goes_on_where_it_was_and_submits_nothing_twice(searched: Searched) -> None:
    points = {f"{point.run_key}-a1" for point in searched.result.points}

    assert set(searched.jobs_when_killed) < set(searched.jobs)
    assert set(searched.jobs.values()) == {1}
    assert len(searched.jobs) == len(points) + 2  # and the two nights
    assert points < set(searched.jobs)


def test_asked_again_it_answers_from_what_is_stored(searched: Searched) -> None:
    assert searched.asked_again.culprits == searched.result.culprits
    assert searched.asked_again.gpu_hours == pytest.approx(searched.result.gpu_hours)
    assert searched.jobs_after == searched.jobs


def test_points_are_no_nights_of_the_history(searched: Searched) -> None:
    (series,) = find_series(searched.store, TEST, "local")

    rows = read_history(searched.store, "local", series.series)

    assert [night.own.night for night in nights_of(rows)] == ["n1", "n2"]
