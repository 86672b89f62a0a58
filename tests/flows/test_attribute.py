"""`nightbridge attribute` on the practice workload: the cause on an axis, in its commits, stopped and gone on with."""

import html
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from examples.practice.repositories import add_submodule, bump_submodule, commit_many
from nightbridge.attribution.attribution_result import AttributionResult, sentence
from nightbridge.flows import nightly_regression
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


def test_a_night_finds_the_cause_itself_where_the_site_pays_for_it(tmp_path: Path, environments_dir: Path) -> None:
    practice = Practice(tmp_path, environments_dir)
    practice.run("n1", 1.0)
    commit_many(practice.repositories, ["Tidy"], {})
    practice.prepare("n2", 1.1)
    practice.site.write_text(f"{practice.site.read_text()}[budget]\nattribution = 1\n")
    report = nightly_regression(practice.scenario, night="n2", system=str(practice.site))
    jobs = practice.jobs
    result = practice.attribute()

    page = Path(report.report.removeprefix("file://")).read_text()
    assert (result.cause.kind, [factor.name for factor in result.factors]) == ("found", ["$PRACTICE_CLUSTER"])
    assert result.is_found
    assert "not Megatron-Bridge" in sentence(result)
    assert html.escape(sentence(result), quote=False).split(" (")[0] in page
    assert "which change did it" in page
    assert practice.jobs == jobs, "what the night has found is not asked again"


@pytest.mark.thorough
def test_a_submodule_s_commit_is_named_inside_its_bump(tmp_path: Path, environments_dir: Path) -> None:
    practice = Practice(tmp_path, environments_dir)
    add_submodule(practice.repositories)
    bridge = 'Megatron-Bridge.git"\n'
    practice.sample = practice.sample.replace(bridge, f"{bridge}init_submodules = true\n")
    practice.run("n1", 1.0)
    messages = [f"Core change {number}" for number in range(3)]
    core = commit_many(practice.repositories, messages, SLOW, workload="megatron_lm")
    bump = bump_submodule(practice.repositories, "Bump Megatron-LM", core[2])
    commit_many(practice.repositories, ["Tidy"], {})
    practice.run("n2", 1.0)
    result = practice.attribute()

    assert result.plan.axes == ("megatron_bridge", "submodule", "environment")
    assert [factor.name for factor in result.factors] == ["Megatron-LM"]
    assert sentence(result).startswith(
        f'Megatron-LM {core[1][:12]} "Core change 1", inside bump {bump[:12]} of Megatron-Bridge, 9'
    )
    assert "not Megatron-Bridge, not the environment" in sentence(result)
    assert result.is_found


@pytest.mark.thorough
def test_a_key_and_a_node_that_share_a_change_are_told_apart(tmp_path: Path, environments_dir: Path) -> None:
    practice = Practice(tmp_path, environments_dir)
    slow = {"node2": 1.06}
    text = practice.sample
    practice.sample = text.replace("[cmd_args]", "[cmd_args]\ngb = 128\nseq_length = 1024")
    practice.run("n1", 1.0, slow_nodes=slow)
    commit_many(practice.repositories, ["Tidy"], {})
    practice.sample = text.replace("[cmd_args]", "[cmd_args]\ngb = 128\nseq_length = 1088")
    practice.run("n2", 1.0, exclude=["node1"], slow_nodes=slow)
    result = practice.attribute(good="n1", bad="n2", metric="step_time")

    assert result.plan.axes == ("megatron_bridge", "configuration", "environment", "nodes")
    assert [factor.name for factor in result.factors] == ["cmd_args.seq_length", "node node2"]
    assert (result.cause.kind, result.cause.relation) == ("found", "shared")
    assert "not Megatron-Bridge, not the environment" in sentence(result)


def _nights(attributed: Attributed) -> list[str]:
    store = attributed.practice.store
    rows = [row for one in find_series(store, TEST, "local") for row in read_history(store, "local", one.series)]
    return [f"{row.run_key}-a1" for row in rows if row.night in ("n1", "n2")]
