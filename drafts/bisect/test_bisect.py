"""Bisect on the practice workload: the commit is named, what does not run is skipped, and nothing is run twice."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from prefect.settings import PREFECT_FLOWS_HEARTBEAT_FREQUENCY, temporary_settings
from prefect.testing.utilities import prefect_test_harness

from flows import bisect_regression, run_pipeline
from nightbridge.errors import InvalidInput
from nightbridge.models import VerdictStatus
from nightbridge.practice.repositories import PracticeRepositories, commit_many, make_practice_repositories
from nightbridge.regression.bisect_result import BisectResult, result_lines
from tests.flows.practice_night import Entry, write_scenario, write_site

pytestmark = pytest.mark.launcher

# Commits of the bad night, and what some of them do. The crash is gone with the commit after it.
COMMITS = 5
CRASH, CRASH_MENDED, SLOW = 1, 2, 3


@pytest.fixture(scope="module", autouse=True)
def _server() -> Iterator[None]:
    with (
        prefect_test_harness(server_startup_timeout=120),
        temporary_settings({PREFECT_FLOWS_HEARTBEAT_FREQUENCY: None}),
    ):
        yield


@dataclass(frozen=True)
class Searched:
    folder: Path
    commits: tuple[str, ...]
    result: BisectResult

    @property
    def site(self) -> str:
        return str(self.folder / "site.toml")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, environments_dir: Path) -> tuple[Path, PracticeRepositories]:
    folder = tmp_path_factory.mktemp("bisect")
    write_site(folder / "site.toml", workspace=folder / "workspace", environments=environments_dir)
    return folder, make_practice_repositories(folder / "practice")


@pytest.fixture(scope="module")
def searched(place: tuple[Path, PracticeRepositories]) -> Searched:
    folder, repositories = place
    steps = {"max_steps": 14, "save_interval": 14}
    scenario = write_scenario(folder / "conf", repositories, "one", Entry(id="slower", cmd_args=steps))
    system = str(folder / "site.toml")
    run_pipeline(scenario, night="n1", system=system)
    commits = commit_many(
        repositories,
        [f"Change {number}" for number in range(COMMITS)],
        {CRASH: {"crash_at": 2}, CRASH_MENDED: {"crash_at": None}, SLOW: {"step_time_factor": 1.3}},
    )
    assert run_pipeline(scenario, night="n2", system=system).status is VerdictStatus.REGRESSED
    return Searched(folder, commits, bisect_regression("slower", system=system, at_once=2))


def test_the_commit_that_made_it_slower_is_named_exactly(searched: Searched) -> None:
    (culprit,) = searched.result.culprits

    assert culprit.commit == searched.commits[SLOW]
    assert culprit.subject == f"Change {SLOW}"
    assert culprit.author == "Practice"
    assert culprit.commit in "\n".join(result_lines(searched.result))


def test_the_answer_comes_with_its_evidence_and_its_cost(searched: Searched) -> None:
    result = searched.result
    by_place = {point.place: point.value for point in result.points if point.value is not None}

    assert result.answer.probability >= 0.99
    assert by_place[SLOW + 1] == pytest.approx(result.plan.levels.bad, rel=0.03)
    assert by_place[SLOW] == pytest.approx(result.plan.levels.good, rel=0.03)
    assert len(result.points) == len({point.run_key for point in result.points})
    assert result.gpu_hours > 0


def test_asked_again_it_finds_every_point_and_starts_nothing(searched: Searched) -> None:
    runs = searched.folder / "workspace" / "runs"
    before = sorted(path.name for path in runs.iterdir())

    again = bisect_regression("slower", system=searched.site)

    assert again.culprits == searched.result.culprits
    assert {point.run_key for point in again.points} == {
        point.run_key for point in searched.result.points if point.value is not None or point.gpu_seconds
    }
    assert sorted(path.name for path in runs.iterdir()) == before


def test_a_commit_that_does_not_run_is_skipped_and_said(searched: Searched) -> None:
    only_crash = searched.commits[CRASH]

    found = bisect_regression(
        "slower", system=searched.site, good=searched.commits[CRASH - 1], bad=searched.commits[SLOW], at_once=3
    )

    (culprit,) = found.culprits
    assert culprit.commit == searched.commits[SLOW]
    crashed = [point for point in found.points if found.plan.commit_at(point.place) == only_crash]
    assert all(point.value is None for point in crashed)


def test_bisect_points_are_no_nights_of_the_history(searched: Searched) -> None:
    from nightbridge.config.sites import plain_site
    from nightbridge.regression.stored import history_of
    from nightbridge.store.objects import open_store

    plain = plain_site(searched.site)
    assert plain is not None
    history = history_of(open_store(plain[0].store_settings), "slower")

    assert history.trends[0].nights == ("n1", "n2")


def test_a_test_without_history_is_refused(searched: Searched) -> None:
    with pytest.raises(InvalidInput, match="no history of this test"):
        bisect_regression("unknown", system=searched.site)
