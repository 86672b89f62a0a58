"""The points of a swept test: expanded lazily, checked on the way, and cut where a rule breaks.

A rule names the fields that it reads. So it is checked once for each combination of values of *those* fields, as soon
as the last of them is set, and whatever lies below a combination that it refuses is left out whole and only counted.
Nothing is kept but the results of such checks, so a grid of any size takes the same memory.

What of a sweep is not run is told for each rule, with how many points break it and its message for the first: to
whoever checks the file (`grid_violations`, `draw_violations`), and in the sweep's results (`skipped_parts`).
"""

import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import islice, repeat
from typing import Any

from nightbridge.launch.resources import at_point
from nightbridge.models import Checkout, ClusterLimits, Severity, SkippedPart, SweepAxis, TestDefinition, Violation
from nightbridge.rules.rule import Rule, RuleContext, with_places

MAX_RUNS = 1000
"""Points of one test that are run in one night; more are almost certainly a mistake."""

MAX_REPEATED = 10_000
"""Runs of one test in one night, each point as often as `iterations` says, which by itself may be as large."""

MAX_OUTCOMES = 2_000_000
"""Points and cuts that are looked at before a grid is called too large for a night; a few seconds of work."""

_ANSWERS_KEPT = 100_000
_TRIES_PER_POINT, _MIN_TRIES = 1_000, 10_000

PointValues = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Cut:
    """A part of a grid that one rule refuses.

    Attributes:
        fixed: The values of the axes before the one at which it broke.
        axis: Name of that axis; empty where the fields that are not swept over break the rule already.
        values: The values of that axis that are refused.
        points: How many points of the grid are left out with it.
    """

    rule: Rule[RuleContext]
    fixed: PointValues
    axis: str
    values: tuple[Any, ...]
    points: int

    @property
    def first(self) -> dict[str, Any]:
        """What its first point is known by."""
        return {**self.fixed, self.axis: self.values[0]} if self.axis else {}


@dataclass(slots=True)
class Skipped:
    """How many points one rule refuses, as the first of all rules, what the first of them is known by, and why."""

    points: int
    first: PointValues
    example: str


@dataclass(slots=True)
class Expansion:
    """The counts of a grid that has been walked.

    Attributes:
        valid: How many points break no rule.
        walked: How many of the points have been looked at: all, unless the walk was cut short.
        skipped: Rule id to the points that it refuses, in the order in which they were found.
    """

    points: int
    valid: int = 0
    walked: int = 0
    skipped: dict[str, Skipped] = field(default_factory=dict)

    @property
    def checked(self) -> str:
        """How many points were checked, in words."""
        if self.walked == self.points:
            return f"{self.points} points"
        return f"the {self.walked} points checked (there are {self.points})"


_Check = tuple[Rule[RuleContext], Callable[[Sequence[int]], int]]
"""A rule, and which values it takes on the last axis that it depends on, as bits, given those chosen before it."""


class Grid:
    """All points of a swept test, and the rules that they have to keep.

    Rules that only warn are not checked. A test without axes is a grid of one point.

    Attributes:
        rules: The rules that are checked.
    """

    def __init__(
        self,
        test: TestDefinition,
        rules: Sequence[Rule[RuleContext]],
        limits: ClusterLimits | None = None,
        checkout: Checkout | None = None,
    ) -> None:
        self._test, self._limits, self._checkout = test, limits, checkout
        self._base = self._context({})
        self._axes: tuple[SweepAxis, ...] = test.axes
        self._below = [
            math.prod(len(axis.values) for axis in self._axes[depth + 1 :]) for depth in range(len(test.axes))
        ]
        self._checks: list[list[_Check]] = [[] for _ in self._axes]
        self._refused_at_once: list[Rule[RuleContext]] = []
        self.rules = [
            rule for rule in rules if rule.severity == "error" and rule.holds(self._base.version, self._base.available)
        ]
        for rule in self.rules:
            self._place(rule)

    @property
    def size(self) -> int:
        """How many points there are, valid or not."""
        return math.prod(len(axis.values) for axis in self._axes)

    def outcomes(self) -> Iterator[PointValues | Cut]:
        """Yield every valid point and every part that is cut, in the order in which the values were written.

        The last axis changes fastest. Points and the cuts' `points` add up to `size`.
        """
        if self._refused_at_once:
            yield Cut(self._refused_at_once[0], {}, "", (), self.size)
        elif self._axes:
            yield from self._outcomes_below(0, [0] * len(self._axes), {})
        else:
            yield {}

    def drawn(self, count: int, seed: int) -> tuple[PointValues, ...]:
        """Draw valid points at random, each at most once and all equally likely, in the grid's order.

        Where valid points are rare, fewer are found than requested.
        """
        dice = random.Random(seed)
        tried: set[int] = set()
        found: dict[int, PointValues] = {}
        for _ in range(0 if self._refused_at_once else _MIN_TRIES + _TRIES_PER_POINT * count):
            if len(found) == count or len(tried) == self.size:
                break
            index = dice.randrange(self.size)
            if index not in tried:
                tried.add(index)
                chosen = [
                    index // below % len(axis.values) for below, axis in zip(self._below, self._axes, strict=True)
                ]
                if all(
                    taken(chosen) >> value & 1
                    for value, checks in zip(chosen, self._checks, strict=True)
                    for _, taken in checks
                ):
                    found[index] = self._point(dict(enumerate(chosen)))
        return tuple(found[index] for index in sorted(found))

    def first_refusal(self, point: PointValues) -> tuple[Rule[RuleContext], str] | None:
        """The first rule that a whole point breaks, and its message; None where it breaks none."""
        run = self._context(point)
        for rule in self.rules:
            for message in rule.check(run):
                return rule, message
        return None

    def messages(self, cut: Cut) -> tuple[str, ...]:
        """The rule's messages for the first point that was cut."""
        return tuple(cut.rule.check(self._context(cut.first)))

    # --- implementation ---------------------------------------------------------------------------------------------

    def _context(self, point: PointValues, test: TestDefinition | None = None) -> RuleContext:
        concrete = at_point(test or self._test, point, self._base.version if point else None, self._limits)
        return RuleContext(concrete, self._limits, self._checkout)

    def _place(self, rule: Rule[RuleContext]) -> None:
        """Check the rule at the last axis that it depends on."""
        axes = [index for index, axis in enumerate(self._axes) if _reads(rule, axis, self._axes)]
        if (rule.alone or not axes) and any(rule.check(self._base)):
            self._refused_at_once.append(rule)
        if rule.alone:
            # Such a rule looks at one value at a time, so every axis has a check of its own.
            nothing = self._test.model_copy(
                update={"cmd_args": {}, "extra_env_vars": {}, "extra_cmd_args": {}, "extra_container_mounts": ()}
            )
            for axis in axes:
                self._add_check(rule, [axis], nothing)
        elif axes:
            self._add_check(rule, axes, self._test)

    def _add_check(self, rule: Rule[RuleContext], axes: Sequence[int], test: TestDefinition) -> None:
        *before, last = axes
        width = len(self._axes[last].values)

        @lru_cache(maxsize=_ANSWERS_KEPT)
        def answer(key: tuple[int, ...]) -> int:
            chosen = dict(zip(before, key, strict=True))
            points = (self._point({**chosen, last: value}) for value in range(width))
            return sum(1 << i for i, each in enumerate(points) if not any(rule.check(self._context(each, test))))

        self._checks[last].append((rule, lambda chosen: answer(tuple([chosen[axis] for axis in before]))))

    def _point(self, chosen: Mapping[int, int]) -> dict[str, Any]:
        return {self._axes[axis].name: self._axes[axis].values[value] for axis, value in chosen.items()}

    def _outcomes_below(self, depth: int, chosen: list[int], fixed: dict[str, Any]) -> Iterator[PointValues | Cut]:
        axis = self._axes[depth]
        name, values = axis.name, axis.values
        left = (1 << len(values)) - 1
        for rule, taken in self._checks[depth]:
            if refused := left & ~taken(chosen):
                left &= ~refused
                cut = tuple(value for index, value in enumerate(values) if refused >> index & 1)
                yield Cut(rule, fixed, name, cut, len(cut) * self._below[depth])
                if not left:
                    return
        is_last = depth + 1 == len(self._axes)
        for index, value in enumerate(values):
            if not left >> index & 1:
                continue
            point = {**fixed, name: value}
            if is_last:
                yield point
            else:
                chosen[depth] = index
                yield from self._outcomes_below(depth + 1, chosen, point)


def expansion_of(grid: Grid, most: int | None = None) -> Expansion:
    """Walk a grid once and count what is in it; `most` is after how many points and cuts to stop."""
    found = Expansion(grid.size)
    for outcome in islice(grid.outcomes(), most):
        found.walked += outcome.points if isinstance(outcome, Cut) else 1
        if not isinstance(outcome, Cut):
            found.valid += 1
        elif (skipped := found.skipped.get(outcome.rule.id)) is not None:
            skipped.points += outcome.points
        else:
            found.skipped[outcome.rule.id] = Skipped(
                outcome.points, outcome.first, next(iter(grid.messages(outcome)), "")
            )
    return found


def chosen_points(test: TestDefinition, grid: Grid) -> Iterator[PointValues]:
    """The valid points that the test's `[sweep]` selects, at most `MAX_RUNS`; one empty point without a sweep."""
    if not test.drawn:
        return _chosen_of_grid(test, grid)
    return (point for point in drawn_points(test, grid) if grid.first_refusal(point) is None)


def drawn_points(test: TestDefinition, grid: Grid) -> Iterator[PointValues]:
    """The points of a test some of whose parameters are drawn: each point once, valid or not.

    The n-th point gets the n-th draw of every parameter. A test that sweeps over nothing else has `sweep.points`.
    """
    points = _chosen_of_grid(test, grid) if test.axes else repeat({}, test.sweep.points)
    seen = set()
    for trial, point in enumerate(points, 1):
        whole = {**point, **draw(test, trial)}
        if (known := repr(whole)) not in seen:
            seen.add(known)
            yield whole


def draw(test: TestDefinition, trial: int) -> dict[str, Any]:
    """One value of every drawn parameter, as CloudAI draws it: dice of its own, seeded `SEED:NAME:TRIAL`."""
    drawn = {}
    for axis in test.drawn:
        dice = random.Random(f"{test.sweep.seed}:{axis.name}:{trial}")
        drawn[axis.name] = dice.choices(axis.values, axis.weights)[0] if axis.weights else dice.choice(axis.values)
    return drawn


def _chosen_of_grid(test: TestDefinition, grid: Grid) -> Iterator[PointValues]:
    if test.sweep.method == "random" and test.axes:
        return iter(grid.drawn(test.sweep.points, test.sweep.seed))
    outcomes = islice(grid.outcomes(), MAX_OUTCOMES)
    return islice((outcome for outcome in outcomes if not isinstance(outcome, Cut)), MAX_RUNS)


def _reads(rule: Rule[RuleContext], axis: SweepAxis, axes: Sequence[SweepAxis]) -> bool:
    """Whether the rule's result can change along the axis."""
    table = axis.field.split(".", 1)[0]
    if axis.field in rule.fields or table in rule.fields:
        return True
    # The number of GPUs follows from the number of nodes and the GPUs of a node.
    sets_gpus = {"num_nodes", "cmd_args.gpu_type", "cmd_args.gpus_per_node"}
    return (
        axis.field in sets_gpus
        and any(other.field == "num_nodes" for other in axes)
        and ("cmd_args.num_gpus" in rule.fields or "cmd_args" in rule.fields)
    )


def skipped_draws(test: TestDefinition, grid: Grid) -> dict[str, Skipped]:
    """By rule, the drawn points that it refuses: a draw is known for a whole point only, so each is checked."""
    found: dict[str, Skipped] = {}
    for point in drawn_points(test, grid) if test.drawn else ():
        if (refusal := grid.first_refusal(point)) is not None:
            rule, message = refusal
            found.setdefault(rule.id, Skipped(0, point, message)).points += 1
    return found


def skipped_parts(test: TestDefinition, grid: Grid) -> tuple[SkippedPart, ...]:
    """Which points of a swept test, whose grid this is, break a rule; points that `[sweep]` did not draw, too.

    A grid of any size is walked in constant memory, and at most as far as the rules themselves walk it.
    """
    of_grid = expansion_of(grid, MAX_OUTCOMES).skipped if test.axes else {}
    return tuple(
        SkippedPart(point=dict(part.first), points=part.points, rule=rule, reason=part.example)
        for rule, part in (*of_grid.items(), *skipped_draws(test, grid).items())
    )


def grid_violations(test: TestDefinition, grid: Grid, expansion: Expansion, severity: Severity) -> Iterator[Violation]:
    """One violation for each rule that points of the grid break: how many, with its message for the first."""
    return _violations(test, grid, expansion.skipped, f"{expansion.checked} of the sweep", severity)


def draw_violations(test: TestDefinition, grid: Grid, severity: Severity) -> Iterator[Violation]:
    """The same of drawn points."""
    drawn = sum(1 for _ in drawn_points(test, grid)) if test.drawn else 0
    return _violations(test, grid, skipped_draws(test, grid), f"{drawn} sampled points", severity)


def _violations(
    test: TestDefinition, grid: Grid, skipped: Mapping[str, Skipped], of_all: str, severity: Severity
) -> Iterator[Violation]:
    for rule in grid.rules:
        if found := skipped.get(rule.id):
            message = f"{found.points} of {of_all} are skipped, for example: {found.example}"
            yield with_places(rule.violation(message, severity), test, test.source)


def too_many_runs(test: TestDefinition, expansion: Expansion) -> Iterator[Violation]:
    """The error of a sweep that has more valid points, or more repetitions of them, than a night runs of one test."""
    swept = tuple(axis.field for axis in test.axes)
    points = min(expansion.valid, test.sweep.points) if test.sweep.method == "random" else expansion.valid
    if test.sweep.method == "grid" and (expansion.valid > MAX_RUNS or expansion.walked < expansion.points):
        message = (
            f"{expansion.valid} of {expansion.checked} of the sweep are valid, and a night runs at most "
            f'{MAX_RUNS} of a test; write fewer values, or [sweep] method = "random" and points'
        )
        yield Violation(rule="sweep-size", fields=swept, message=message)
    elif points * test.iterations > MAX_REPEATED:
        message = (
            f"{points} points of the sweep and iterations = {test.iterations} are {points * test.iterations:,} "
            f"runs, and a night runs a test at most {MAX_REPEATED:,} times; lower iterations, or write fewer values"
        )
        yield Violation(rule="sweep-size", fields=("iterations", *swept), message=message)
