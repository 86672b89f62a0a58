"""A search down into a submodule: the slow commit hides inside the bump that a bot made, the one before another that does
more. `nightbridge attribute` tells the submodule from the bump, and the bisect inside it names the commit.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from examples.practice.repositories import SUBMODULE, add_submodule, bump_submodule, commit_many
from nightbridge.attribution.attribution_result import AttributionResult, sentence
from nightbridge.bisect.plan import BisectPlan, BisectRequest
from nightbridge.bisect.result import result_lines
from nightbridge.blocks import load_site
from nightbridge.models import SiteChoice, VerdictStatus
from nightbridge.tasks.bisect import find_plan
from tests.flows.attributed_practice import TEST, Practice

pytestmark = [pytest.mark.launcher, pytest.mark.usefixtures("flows_here")]

INNER, SLOW = 4, 1


@dataclass(frozen=True)
class Searched:
    """What a bisect alone would search in a range of two bumps, and what an attribution said of it."""

    core: Sequence[str]
    bumps: Sequence[str]
    alone: BisectPlan
    result: AttributionResult


@pytest.fixture(scope="module")
def searched(tmp_path_factory: pytest.TempPathFactory, environments_dir: Path, flows_here: None) -> Searched:
    practice = Practice(tmp_path_factory.mktemp("bumps"), environments_dir)
    practice.variables = {"PRACTICE": "same"}
    add_submodule(practice.repositories)
    bridge = 'Megatron-Bridge.git"\n'
    practice.sample = practice.sample.replace(bridge, f"{bridge}init_submodules = true\n")
    practice.run("n1", 1.0)
    messages = [f"Core change {number}" for number in range(INNER)]
    core = commit_many(practice.repositories, messages, {SLOW: {"step_time_factor": 1.1}}, workload="megatron_lm")
    bumps = [
        bump_submodule(practice.repositories, "Bump Megatron-LM", core[2]),
        bump_submodule(practice.repositories, "Bump Megatron-LM, and adapt", core[3], slow_wall=0.001),
    ]
    assert practice.run("n2", 1.0) is VerdictStatus.REGRESSED
    alone = find_plan(TEST, BisectRequest(), load_site(SiteChoice(system=str(practice.site))))
    return Searched(core, bumps, alone, practice.attribute(at_once=2, confidence=0.95))


def test_the_submodules_commit_is_named_and_not_the_bump(searched: Searched) -> None:
    (within,) = searched.result.descents
    (culprit,) = within.culprits

    assert (culprit.commit, culprit.kind, culprit.folder) == (searched.core[SLOW], "inner", SUBMODULE)
    assert culprit.bump == searched.bumps[0]
    lines = "\n".join(result_lines(within))
    assert f"  {SUBMODULE} {culprit.commit} Core change {SLOW} " in lines
    assert f", inside the bump of 3 commits {searched.bumps[0][:12]} of Megatron-Bridge" in lines
    assert not within.skipped


def test_the_submodule_is_told_from_the_repository_that_pins_it(searched: Searched) -> None:
    said, bump = sentence(searched.result), searched.bumps[0]

    assert searched.result.plan.axes == ("megatron_bridge", "submodule")
    assert [factor.name for factor in searched.result.factors] == ["Megatron-LM"]
    named = f'Megatron-LM {searched.core[SLOW][:12]} "Core change {SLOW}"'
    assert said.startswith(f"{named}, inside bump {bump[:12]} of Megatron-Bridge, 9")
    assert "not Megatron-Bridge" in said
    assert searched.result.is_found


def test_the_places_are_the_submodules_commits_and_what_a_bump_does_besides(searched: Searched) -> None:
    plan = searched.alone

    assert [step.commit for step in plan.commits] == [*searched.core, searched.bumps[1]]
    assert [step.kind for step in plan.commits] == ["inner"] * INNER + ["rest"]
