"""Ranges inside an image, and inside a submodule that the test itself moves."""

from datetime import UTC, datetime

import pytest

from nightbridge.attribution.axes import Factor
from nightbridge.attribution.ranges import images_range, plan_of_range, submodule_range
from nightbridge.attribution.result import descent_plan, evaluate, ranges_of, sentence, with_descent
from nightbridge.bisect.plan import point_run
from nightbridge.bisect.result import BisectResult, result_lines
from nightbridge.bisect.search import Answer
from nightbridge.errors import InvalidInput
from nightbridge.models import RangeCommit, RunRecord
from tests.builders import ATTRIBUTION_PLAN, exchange_runs, make_record

CORE = "3rdparty/Megatron-LM"
SUBMODULE = Factor(axis="submodule", key=f"megatron_bridge/{CORE}", good="1" * 40, bad="4" * 40)
IMAGE = Factor(axis="image", good="/images/nemo-1.sqsh", bad="/images/nemo-3.sqsh")


def inner(digit: str) -> RangeCommit:
    when = datetime(2026, 11, 16, tzinfo=UTC)
    return RangeCommit(commit=digit * 40, subject=f"Core {digit}", author="Ada", authored_at=when)


def with_inner(commit: RangeCommit) -> RangeCommit:
    """The commits of a bump from 1 to 4: of the old branch 1 goes, and 3 and 4 come."""
    (bump,) = commit.bumps
    opened = bump.model_copy(update={"base": "0" * 40, "commits": (inner("3"), inner("4")), "reverted": (inner("1"),)})
    return commit.model_copy(update={"bumps": (opened,)})


def bad_run() -> RunRecord:
    made = make_record()
    (repo,) = made.spec.test.git_repos
    repo = repo.model_copy(update={"init_submodules": True, "submodules": {CORE: "dev"}})
    test = made.spec.test.model_copy(update={"git_repos": (repo,)})
    pinned = made.checkout.megatron_bridge.model_copy(update={"submodules": {CORE: SUBMODULE.bad}})
    checkout = made.checkout.model_copy(update={"megatron_bridge": pinned})
    return made.model_copy(update={"spec": made.spec.model_copy(update={"test": test}), "checkout": checkout})


def test_a_submodule_that_the_test_moved_is_searched_at_the_one_commit_of_its_repository() -> None:
    bad = bad_run()
    plan = plan_of_range(ATTRIBUTION_PLAN, submodule_range(SUBMODULE, bad, with_inner))

    ran = [point_run(plan, bad, place, 1).test.megatron_bridge for place in plan.places]

    assert {one.commit for one in ran} == {bad.checkout.megatron_bridge.commit}
    assert [one.submodules[CORE][0] for one in ran] == ["1", "0", "3", "4"]


def test_its_commit_is_named_without_a_bump_that_there_was_none_of() -> None:
    asked = ATTRIBUTION_PLAN.model_copy(update={"factors": (*ATTRIBUTION_PLAN.factors, SUBMODULE)})
    alone = evaluate(asked, exchange_runs([4], asked))
    (group,) = ranges_of(alone)
    plan = descent_plan(alone, group, plan_of_range(asked, submodule_range(SUBMODULE, bad_run(), with_inner)))
    found = Answer(kind="found", first=2, last=2, probability=0.995, runs=4)

    said = sentence(with_descent(alone, BisectResult(plan=plan, answer=found, points=())))

    assert said.startswith(f'Megatron-LM {"3" * 12} "Core 3", 99.')


def test_a_submodule_whose_commits_cannot_be_listed_says_why() -> None:
    def note(commit: RangeCommit) -> RangeCommit:
        (bump,) = commit.bumps
        return commit.model_copy(update={"bumps": (bump.model_copy(update={"note": "it is gone"}),)})

    with pytest.raises(InvalidInput, match=r"cannot be listed.*it is gone"):
        submodule_range(SUBMODULE, bad_run(), note)


def test_a_point_of_an_image_is_the_bad_run_in_it() -> None:
    bad = make_record()
    versions = ("/images/nemo-2.sqsh", IMAGE.bad)
    plan = plan_of_range(ATTRIBUTION_PLAN, images_range(IMAGE, versions, bad))

    ran = [point_run(plan, bad, place, 1) for place in plan.places]

    assert [run.test.cmd_args["container_image"] for run in ran] == [IMAGE.good, *versions]
    assert {run.test.megatron_bridge.commit for run in ran} == {bad.checkout.megatron_bridge.commit}
    assert len({run.run_key for run in ran}) == 3


def test_an_image_is_named_with_the_one_before_it() -> None:
    alone = evaluate(ATTRIBUTION_PLAN, exchange_runs([0]))
    (group,) = ranges_of(alone)
    versions = ("nvcr.io/nvidia/nemo:2", "nvcr.io/nvidia/nemo:3")
    factor = IMAGE.model_copy(update={"good": "nvcr.io/nvidia/nemo:1", "bad": versions[-1]})
    plan = descent_plan(alone, group, plan_of_range(alone.plan, images_range(factor, versions, make_record())))
    found = Answer(kind="found", first=1, last=1, probability=0.995, runs=4)

    within = BisectResult(plan=plan, answer=found, points=())
    said = sentence(with_descent(alone, within))

    assert result_lines(within)[1:3] == ("the first bad image (99.5 %):", "  nvcr.io/nvidia/nemo:2 after nemo:1")
    assert said.startswith("image nemo:2, after nemo:1, 99.")
