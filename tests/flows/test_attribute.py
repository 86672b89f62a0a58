"""`nightbridge attribute` on the practice workload: the cause on an axis, in its commits, stopped and gone on with."""

import html
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from examples.practice.repositories import commit_many
from nightbridge.attribution.attribution_result import AttributionResult, sentence
from nightbridge.flows import nightly_regression
from nightbridge.harvest.manifest import load_record
from nightbridge.history.reading import find_series, read_history
from nightbridge.models import VerdictStatus
from tests.flows.attributed_practice import SLOW, TEST, Practice

pytestmark = [pytest.mark.launcher, pytest.mark.usefixtures("flows_here")]


@dataclass(frozen=True)
class Attributed:
    """What was said after two runs, when it went on, and when it was asked again."""

    practice: Practice
    commits: Sequence[str]
    stopped: AttributionResult
    jobs_when_stopped: Counter[str]
    result: AttributionResult
    jobs: Counter[str]
    asked_again: AttributionResult
    jobs_after: Counter[str]


@pytest.fixture(scope="module")
def attributed(tmp_path_factory: pytest.TempPathFactory, environments_dir: Path, flows_here: None) -> Attributed:
    practice = Practice(tmp_path_factory.mktemp("attribute"), environments_dir)
    # Whoever looks for the commit has the speed that the bad night's site had, or finds every run fast.
    practice.run("n1", 1.3)
    commits = commit_many(practice.repositories, ["Tidy", "Synchronise after every bucket", "Document"], SLOW)
    assert practice.run("n2", 1.3, exclude=["node1"]) is VerdictStatus.REGRESSED
    stopped = practice.attribute(most_runs=2)
    jobs_when_stopped = practice.jobs
    result = practice.attribute()
    jobs = practice.jobs
    asked_again = practice.attribute()
    return Attributed(practice, commits, stopped, jobs_when_stopped, result, jobs, asked_again, practice.jobs)


def test_the_commit_is_named_and_every_other_axis_is_cleared(attributed: Attributed) -> None:
    result = attributed.result
    (within,) = result.descents

    assert result.plan.axes == ("megatron_bridge", "environment", "nodes")
    assert [factor.name for factor in result.factors] == ["Megatron-Bridge"]
    assert [culprit.commit for culprit in within.culprits] == [attributed.commits[1]]
    assert result.is_found
    assert result.probability > 0.97


def test_the_answer_is_one_sentence(attributed: Attributed) -> None:
    said = sentence(attributed.result)

    assert said.startswith(f'Megatron-Bridge {attributed.commits[1][:12]} "Synchronise after every bucket", 99')
    assert "not the environment, not the nodes" in said
    assert f"{attributed.result.run_count} runs, " in said


def test_it_goes_on_with_the_runs_that_it_has_and_buys_none_twice(attributed: Attributed) -> None:
    keys = [run.run_key for run in attributed.result.runs] + [
        point.run_key for one in attributed.result.descents for point in one.points
    ]

    assert (attributed.stopped.cause.kind, attributed.stopped.stopped) == ("undecided", "runs")
    assert set(attributed.jobs_when_stopped) < set(attributed.jobs)
    assert set(attributed.jobs.values()) == {1}
    assert sorted(attributed.jobs) == sorted([*(f"{key}-a1" for key in keys), *_nights(attributed)])


def test_asked_again_it_answers_from_the_store(attributed: Attributed) -> None:
    assert attributed.asked_again == attributed.result
    assert attributed.jobs_after == attributed.jobs


def test_the_runs_had_the_nodes_of_their_designs_and_are_no_nights(attributed: Attributed) -> None:
    plan = attributed.result.plan
    (nodes,) = [number for number, factor in enumerate(plan.factors) if factor.axis == "nodes"]

    assert {run.nodes for run in attributed.result.runs if run.design[nodes]} == {"node2"}
    assert {run.nodes for run in attributed.result.runs if not run.design[nodes]} == {"node1"}
    assert len(_nights(attributed)) == 2


def test_a_night_that_pays_for_it_tells_two_causes_that_share_a_change_apart(
    tmp_path: Path, environments_dir: Path
) -> None:
    practice = Practice(tmp_path, environments_dir)
    slow = {"node2": 1.06}
    practice.run("n1", 1.0, slow_nodes=slow)
    practice.sample = practice.sample.replace("\n[cmd_args]", '\nextra_srun_args = "--comment=second"\n[cmd_args]', 1)
    practice.prepare("n2", 1.06, exclude=["node1"], slow_nodes=slow)
    practice.site.write_text(f"{practice.site.read_text()}[budget]\nattribution = 1\n")
    report = nightly_regression(practice.scenario, night="n2", system=str(practice.site))
    jobs = practice.jobs
    result = practice.attribute()

    page = Path(report.report.removeprefix("file://")).read_text()
    assert result.plan.axes == ("configuration", "environment", "nodes")
    assert [factor.name for factor in result.factors] == ["$PRACTICE_CLUSTER", "node node2"]
    assert (result.cause.kind, result.cause.relation) == ("found", "shared")
    assert result.is_found
    assert "not the configuration" in sentence(result)
    assert html.escape(sentence(result), quote=False).split(" (")[0] in page
    assert "which change did it" in page
    assert practice.jobs == jobs, "what the night has found is not asked again"
    asked = {run.design: load_record(practice.store, run.prefix) for run in result.runs}
    assert len({design[0] for design in asked}) == 2
    for design, record in asked.items():
        assert record is not None
        assert ("--comment=second" in record.spec.test.sbatch_args) is design[0]


def _nights(attributed: Attributed) -> list[str]:
    store = attributed.practice.store
    rows = [row for one in find_series(store, TEST, "local") for row in read_history(store, "local", one.series)]
    return [f"{row.run_key}-a1" for row in rows if row.night in ("n1", "n2")]
