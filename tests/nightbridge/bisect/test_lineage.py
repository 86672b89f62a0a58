"""The commits of a range, and those inside of bumps, as points."""

from datetime import UTC, datetime
from typing import Any

import pytest

from nightbridge.bisect.plan import BisectPlan, Repository, Step, range_of_steps, steps_of
from nightbridge.bisect.result import Point, evaluate, result_lines
from nightbridge.bisect.search import BisectPolicy, Levels
from nightbridge.models import Bump, RangeCommit, VerdictStatus

CORE = "3rdparty/Megatron-LM"
WHEN = datetime(2026, 11, 16, tzinfo=UTC)


def commit(name: str, *bumps: Bump, only: bool = False) -> RangeCommit:
    return RangeCommit(
        commit=name, subject=f"Subject {name}", author="Ada", authored_at=WHEN, bumps=bumps, only_bumps=only
    )


def bump(came: str, back: str = "", **about: Any) -> Bump:
    """A bump from the last one of `back`, or `old`, to the last one of `came`; each letter is a commit."""
    fields = {"folder": CORE, "before": back[-1:] or "old", "after": came[-1:] or "old", "base": "old", **about}
    return Bump(commits=tuple(map(commit, came)), reverted=tuple(map(commit, back)), **fields)


def as_it_is(one: RangeCommit) -> RangeCommit:
    return one


def points(*commits: RangeCommit) -> list[tuple[str, str, str, dict[str, str]]]:
    steps = steps_of("good", commits, as_it_is)
    return [(step.kind, step.commit, step.checked_out, step.moved) for step in steps]


def test_a_commit_that_only_moves_a_submodule_is_no_point_its_inner_commits_are() -> None:
    assert points(commit("a"), commit("B", bump("xyz"), only=True), commit("c")) == [
        ("commit", "a", "a", {}),
        ("inner", "x", "a", {CORE: "x"}),
        ("inner", "y", "a", {CORE: "y"}),
        ("inner", "z", "B", {}),  # the same tree as that of the bump itself
        ("commit", "c", "c", {}),
    ]


def test_one_that_does_more_is_split_in_two() -> None:
    assert points(commit("B", bump("xy"))) == [
        ("inner", "x", "good", {CORE: "x"}),
        ("inner", "y", "good", {CORE: "y"}),
        ("rest", "B", "B", {}),
    ]


def test_two_submodules_of_one_commit_move_one_after_the_other() -> None:
    assert points(commit("B", bump("x"), bump("u", folder="data"), only=True)) == [
        ("inner", "x", "good", {CORE: "x"}),
        ("inner", "u", "B", {}),
    ]
    (_, second, _) = points(commit("B", bump("x"), bump("u", folder="data")))
    assert second == ("inner", "u", "good", {CORE: "x", "data": "u"})


def test_a_bump_to_another_branch_takes_the_old_ones_commits_back_first() -> None:
    assert points(commit("B", bump("xy", "pq"), only=True)) == [
        ("reverted", "q", "good", {CORE: "p"}),
        ("reverted", "p", "good", {CORE: "old"}),
        ("inner", "x", "good", {CORE: "x"}),
        ("inner", "y", "B", {}),
    ]


def test_a_bump_back_takes_commits_back() -> None:
    assert points(commit("B", bump("", "p"), only=True)) == [("reverted", "p", "B", {})]


def test_a_submodule_s_commit_that_only_moves_a_submodule_of_its_own_says_which() -> None:
    inner = commit("2", bump("7", folder="deps/energon"), only=True)
    outer = bump("12").model_copy(update={"commits": (commit("1"), inner)})

    steps = steps_of("a" * 40, [commit("b", outer, only=True)], as_it_is)

    assert [step.subject.partition(" ")[0] for step in steps] == ["Subject", "bump"]
    assert "of deps/energon" in steps[1].subject


def test_a_bump_whose_commits_cannot_be_listed_is_one_point_that_says_so() -> None:
    closed = bump("", before="b" * 40, after="c" * 40, note="no such repository")

    (first, rest) = steps_of("good", [commit("B", closed)], as_it_is)

    assert (first.kind, first.commit, first.moved) == ("bump", "c" * 40, {CORE: "c" * 40})
    assert first.subject == f"bump of {CORE} {'b' * 12}..{'c' * 12}: no such repository"
    assert rest.kind == "rest"


def test_where_submodules_are_not_checked_out_a_bump_changes_nothing_and_is_no_point() -> None:
    commits = [commit("a"), commit("B", bump("xyz"), only=True), commit("C", bump("x"))]

    found = range_of_steps(("megatron_bridge", "url", "good", "C"), commits, None)

    assert [(step.kind, step.commit) for step in found.commits] == [("commit", "a"), ("commit", "C")]
    assert found.unopened == 2


def plan_of(*commits: RangeCommit) -> BisectPlan:
    searched = range_of_steps(("megatron_bridge", "url", "good", commits[-1].commit), commits, as_it_is)
    later = range_of_steps(("nemo_run", "url", "g", "n"), [commit("n")], None)
    return BisectPlan(
        bisect_id="n-bisect-1", test_id="t", cluster="c", series="s", metric="step_time", statistic="median_step_time",
        unit="s", since="n", **dict(searched), others=(later,), levels=Levels(good=1, bad=2, noise=0.1),
        prior=(0.2,) * 5, base="runs/t", policy=BisectPolicy(),
    )  # fmt: skip


def test_a_place_names_the_pins_of_the_repositories_and_of_their_submodules() -> None:
    plan = plan_of(commit("a"), commit("B", bump("xy")))

    pins = [plan.pins_at(place) for place in plan.places]

    core = f"megatron_bridge/{CORE}"
    assert pins == [
        {"megatron_bridge": "good", "nemo_run": "g"},
        {"megatron_bridge": "a", "nemo_run": "g"},
        {"megatron_bridge": "a", core: "x", "nemo_run": "g"},
        {"megatron_bridge": "a", core: "y", "nemo_run": "g"},
        {"megatron_bridge": "B", "nemo_run": "g"},
        {"megatron_bridge": "B", "nemo_run": "n"},
    ]


@pytest.mark.parametrize("field", ["kind", "folder", "bump", "tree", "moved"])
def test_a_plan_of_before_there_were_points_in_submodules_is_still_read(field: str) -> None:
    plan = plan_of(commit("a"), commit("b"))
    document = plan.model_dump(mode="json")
    for one in document["commits"]:
        del one[field], one["bumps"], one["only_bumps"]
    del document["unopened"]

    assert BisectPlan.model_validate(document) == plan
    assert plan.commits[0] == Step(commit="a", subject="Subject a", author="Ada", authored_at=WHEN)


def lines_of(plan: BisectPlan, first_bad: int) -> str:
    points = [
        Point(place=place, number=number, run_key=f"{place}-{number}", status=VerdictStatus.PASSED, value=value)
        for place in plan.places
        for number in range(1, 5)
        for value in [2.0 if place >= first_bad else 1.0]
    ]
    return "\n".join(result_lines(evaluate(plan, points)))


def test_what_a_bump_does_besides_is_said_to_be_the_cause() -> None:
    plan = plan_of(commit("a"), commit("B", bump("xy")))

    assert "  Megatron-Bridge B Subject B (Ada, 2026-11-16 00:00 +0000), by what it does beside its bump" in lines_of(
        plan, 4
    )
    assert f"5 commits (2 of them of {CORE})" in lines_of(plan, 4)
    assert f"  {CORE} y Subject y (Ada, 2026-11-16 00:00 +0000), inside the bump of 2 commits B" in lines_of(plan, 3)


def test_a_commit_that_a_bump_took_back_is_said_to_be_the_cause() -> None:
    lines = lines_of(plan_of(commit("B", bump("xy", "pq"), only=True)), 2)

    assert f"  {CORE} p Subject p (Ada, 2026-11-16 00:00 +0000), reverted by the bump of 4 commits B" in lines


def test_bumps_of_submodules_that_are_not_checked_out_are_said_not_to_be_searched() -> None:
    ends: tuple[Repository, str, str, str] = ("megatron_bridge", "url", "good", "C")
    searched = range_of_steps(ends, [commit("a"), commit("B", bump("xyz"), only=True), commit("C")], None)
    plan = plan_of(commit("a"), commit("C")).model_copy(update={**dict(searched), "prior": (0.3,) * 3})

    assert "1 bump of submodules not searched: the test does not check them out (init_submodules = false)" in lines_of(
        plan, 1
    )


def test_a_submodule_s_commit_that_only_moves_its_own_is_no_culprit_one_inside_it_is() -> None:
    inner = commit("y", bump("pq", folder="deps/energon"), only=True)
    plan = plan_of(commit("a"), commit("B", bump("xy").model_copy(update={"commits": (commit("x"), inner)})))

    assert plan.commits[2].kind == "nested"
    head, culprit = lines_of(plan, 3).splitlines()[1:3]
    assert head.startswith("a commit inside this bump, which cannot be run one by one (99")
    assert "y bump of 2 commits of deps/energon" in culprit
    assert "the first bad commit" in lines_of(plan, 2)
