"""`nightbridge bisect` down into a submodule: the slow commit hides inside the bump that a bot made."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from prefect.settings import PREFECT_API_URL, PREFECT_FLOWS_HEARTBEAT_FREQUENCY, temporary_settings

from examples.practice.repositories import (
    SUBMODULE,
    add_submodule,
    bump_submodule,
    commit_many,
    make_practice_repositories,
)
from nightbridge.bisect.result import BisectResult, result_lines
from nightbridge.flows import bisect_regression, run_pipeline
from nightbridge.models import VerdictStatus
from tests.flows.practice_night import Entry, write_scenario, write_site
from tests.real.prefect_server import PrefectServer

pytestmark = pytest.mark.launcher

TEST = "bumped"
FEW_STEPS = {"max_steps": 14, "save_interval": 14}
INNER, SLOW = 4, 1


@dataclass(frozen=True)
class Searched:
    """What bisect said of a range of two bumps."""

    core: Sequence[str]
    bumps: Sequence[str]
    result: BisectResult


@pytest.fixture(scope="module")
def searched(
    tmp_path_factory: pytest.TempPathFactory, environments_dir: Path, prefect_server: PrefectServer
) -> Searched:
    folder = tmp_path_factory.mktemp("bumps")
    site = str(write_site(folder / "site.toml", workspace=folder / "workspace", environments=environments_dir))
    repositories = make_practice_repositories(folder / "practice")
    add_submodule(repositories)
    scenario = write_scenario(folder / "conf", repositories, "one", Entry(id=TEST, cmd_args=FEW_STEPS))
    sample = scenario.parent / "llama_small.toml"
    bridge = 'Megatron-Bridge.git"\n'
    text = sample.read_text().replace(bridge, f"{bridge}init_submodules = true\n")
    sample.write_text(text.replace("[harvest]", '[harvest]\ncheckpoint = "none"'))
    in_this_process = {PREFECT_API_URL: prefect_server.api_url, PREFECT_FLOWS_HEARTBEAT_FREQUENCY: None}
    with temporary_settings(in_this_process):
        run_pipeline(scenario, night="n1", system=site)
        messages = [f"Core change {number}" for number in range(INNER)]
        core = commit_many(repositories, messages, {SLOW: {"step_time_factor": 1.1}}, workload="megatron_lm")
        bumps = [
            bump_submodule(repositories, "Bump Megatron-LM", core[2]),
            bump_submodule(repositories, "Bump Megatron-LM, and adapt", core[3], slow_wall=0.001),
        ]
        assert run_pipeline(scenario, night="n2", system=site).status is VerdictStatus.REGRESSED
        result = bisect_regression(TEST, system=site, at_once=2, confidence=0.95)
    return Searched(core, bumps, result)


def test_the_submodules_commit_is_named_and_not_the_bump(searched: Searched) -> None:
    (culprit,) = searched.result.culprits

    assert (culprit.commit, culprit.kind, culprit.folder) == (searched.core[SLOW], "inner", SUBMODULE)
    assert culprit.bump == searched.bumps[0]
    lines = "\n".join(result_lines(searched.result))
    assert f"  {SUBMODULE} {culprit.commit} Core change {SLOW} " in lines
    assert f", inside the bump of 3 commits {searched.bumps[0][:12]} of Megatron-Bridge" in lines


def test_the_places_are_the_submodules_commits_and_what_a_bump_does_besides(searched: Searched) -> None:
    plan = searched.result.plan

    assert [step.commit for step in plan.commits] == [*searched.core, searched.bumps[1]]
    assert [step.kind for step in plan.commits] == ["inner"] * INNER + ["rest"]
    assert not searched.result.skipped
