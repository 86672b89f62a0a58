"""The parts of a sweep that are not run, each with the rule that it breaks and what that rule says."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice

from nightbridge.models import SkippedPart, TestDefinition
from nightbridge.rules.sweeps import MAX_OUTCOMES, Cut, Grid, drawn_points

MAX_LISTED = 200
"""The most parts that are listed one by one, so that the table stays readable."""


@dataclass(frozen=True, slots=True)
class SkippedParts:
    """What a sweep leaves out.

    Attributes:
        parts: The first `MAX_LISTED` of them, in the order of the grid.
        points: How many points all of them have, the unlisted ones too.
        note: What the list omits; empty where it is complete.

    """

    parts: tuple[SkippedPart, ...]
    points: int
    note: str = ""


def skipped_parts(test: TestDefinition, grid: Grid) -> SkippedParts:
    """Say which points of a swept test break a rule.

    Points that `[sweep]` did not draw are listed as well: they say where not to look. A grid
    of any size is walked in constant memory, and at most as far as the rules themselves walk it.

    Args:
        test: The swept test.
        grid: Its points under the rules of its profile.

    """
    listed: list[SkippedPart] = []
    points = walked = parts = 0
    for outcome in islice(grid.outcomes(), MAX_OUTCOMES if test.axes else 0):
        walked += outcome.points if isinstance(outcome, Cut) else 1
        if isinstance(outcome, Cut):
            points += outcome.points
            parts += max(len(outcome.values), 1)
            if len(listed) < MAX_LISTED:
                listed += (_part(grid, cut) for cut in _by_value(outcome))
    for part in _refused_draws(test, grid):
        points, parts = points + 1, parts + 1
        listed.append(part)
    listed = listed[:MAX_LISTED]
    notes = (
        f"{parts - len(listed):,} more parts are not listed" if parts > len(listed) else "",
        f"of {grid.size:,} points only {walked:,} were checked" if test.axes and walked < grid.size else "",
    )
    return SkippedParts(tuple(listed), points, "; ".join(text for text in notes if text))


def _by_value(cut: Cut) -> Iterator[Cut]:
    """A cut of several values is one part for each of them: a rule's words have one value in them."""
    if not cut.axis:
        yield cut
        return
    for value in cut.values:
        yield replace(cut, values=(value,), points=cut.points // len(cut.values))


def _part(grid: Grid, cut: Cut) -> SkippedPart:
    point = {**cut.fixed, cut.axis: cut.values[0]} if cut.axis else dict(cut.fixed)
    return SkippedPart(point=point, points=cut.points, rule=cut.rule.id, reason="; ".join(grid.messages(cut)))


def _refused_draws(test: TestDefinition, grid: Grid) -> Iterator[SkippedPart]:
    """Drawn points that break a rule: draws are known for whole points only, so these are checked one by one."""
    for point in drawn_points(test, grid) if test.drawn else ():
        if (refusal := grid.first_refusal(point)) is not None:
            rule, message = refusal
            yield SkippedPart(point=dict(point), points=1, rule=rule.id, reason=message)
