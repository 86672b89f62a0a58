"""The parts of a sweep that are not run: which, how many, and why."""

from collections.abc import Sequence

import pytest

from nightbridge.models import SkippedPart, SweepAxis, SweepPolicy, TestDefinition
from nightbridge.rules import grid_of
from nightbridge.rules.sweeps import MAX_LISTED, Point, SkippedParts, skipped_parts
from tests.nightbridge.rules.test_sweeps import every_point, is_valid, swept


def skipped(test: TestDefinition) -> SkippedParts:
    return skipped_parts(test, grid_of(test))


def covered(parts: Sequence[SkippedPart], point: Point) -> list[SkippedPart]:
    return [part for part in parts if part.point.items() <= point.items()]


def test_every_invalid_point_is_in_one_part_and_no_valid_one_is() -> None:
    test = swept(num_gpus=[8, 16], tp=[1, 3, 8], pp=[1, 2, 4], gb=[7, 64], mb=[1])

    found = skipped(test)

    points = every_point(test)
    assert [len(covered(found.parts, point)) for point in points] == [0 if is_valid(test, p) else 1 for p in points]
    assert found.points == sum(part.points for part in found.parts) == sum(not is_valid(test, p) for p in points)
    assert found.note == ""


def test_a_part_says_which_rule_it_breaks_with_its_own_values() -> None:
    found = skipped(swept(tp=[1, 3, 5]))

    assert [(part.point, part.points, part.rule) for part in found.parts] == [
        ({"tp": 3}, 1, "gpus-divide"),
        ({"tp": 5}, 1, "gpus-divide"),
    ]
    assert "16 is not a multiple of tp 5" in found.parts[1].reason


def test_a_whole_branch_is_one_part_with_the_number_of_its_points() -> None:
    found = skipped(swept(tp=[1, 3], seq_length=[1024, 2048, 4096]))

    assert [(part.point, part.points) for part in found.parts] == [({"tp": 3}, 3)]


def test_more_parts_than_are_listed_are_counted() -> None:
    found = skipped(swept(tp=[1, *range(17, 17 + MAX_LISTED + 5)]))

    assert (len(found.parts), found.points) == (MAX_LISTED, MAX_LISTED + 5)
    assert found.note == "5 more parts are not listed"


def test_a_grid_that_is_not_walked_to_its_end_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nightbridge.rules.sweeps.MAX_OUTCOMES", 3)

    assert skipped(swept(seq_length=[1, 2, 3, 4, 5])).note == "of 5 points only 3 were checked"


def test_drawn_points_that_break_a_rule_are_listed_whole() -> None:
    drawn = (SweepAxis(field="cmd_args.tp", values=(3, 5)),)
    test = swept(sweep=SweepPolicy(method="random", points=4)).model_copy(update={"drawn": drawn})

    found = skipped(test)

    assert {part.point["tp"] for part in found.parts} <= {3, 5}
    assert found.points == len(found.parts) >= 1
    assert {part.rule for part in found.parts} == {"gpus-divide"}


def test_a_sweep_without_an_invalid_point_skips_nothing() -> None:
    assert skipped(swept(seq_length=[1024, 2048])).parts == ()
