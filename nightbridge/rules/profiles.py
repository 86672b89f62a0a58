"""All rules, and checking runs and configurations against them."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import lru_cache

from nightbridge.launch.config_container import ConfigContainer
from nightbridge.launch.flags import Version
from nightbridge.launch.resources import at_point
from nightbridge.models import Checkout, ClusterLimits, Compat, InvalidTest, RunSpec, Scenario, TestDefinition
from nightbridge.rules import (
    cloudai,
    config_container_extra,
    config_container_runtime,
    config_container_training,
    hetero,
    launcher,
    megatron_core,
    required,
    site_rules,
)
from nightbridge.rules.rule import Rule, RuleContext, Severity, Violation, rules_in, violations_of
from nightbridge.rules.sweeps import (
    MAX_OUTCOMES,
    MAX_RUNS,
    Expansion,
    Grid,
    Point,
    chosen_points,
    drawn_points,
    expansion_of,
)

RunRules = tuple[Rule[RuleContext], ...]

RULES: RunRules = rules_in(required, megatron_core, site_rules, launcher)
"""The rules of the normal profile."""

CLOUDAI_RULES: RunRules = rules_in(cloudai)

PROFILES: Mapping[Compat, RunRules] = {
    "none": RULES,
    "cloudai": (*rules_in(required), *CLOUDAI_RULES, *rules_in(site_rules, launcher)),
}
"""What a test's `compat` makes of sizes and CUDA graphs: our corrected rules, or CloudAI's own constraints.

The rules of the launcher and the site hold in both: no verdict of another tool makes them pass.
"""

HETERO_RULES: RunRules = rules_in(site_rules, hetero)
"""The rules of a heterogeneous-parallel test: the site's, and its own."""

CONTAINER_RULES: tuple[Rule[ConfigContainer], ...] = rules_in(
    config_container_training, config_container_runtime, config_container_extra
)
"""What Megatron-Bridge's own check of a configuration raises when the job starts, then what it lets through."""


def rules_of(test: TestDefinition) -> RunRules:
    """The rules that a test is checked by."""
    return _profile(test.compat, test.has_launcher)


def _profile(compat: Compat, has_launcher: bool) -> RunRules:
    return PROFILES[compat] if has_launcher else HETERO_RULES


@lru_cache(maxsize=256)
def _holding(compat: Compat, has_launcher: bool, version: Version, available: frozenset[str]) -> RunRules:
    """The rules of a profile that hold: the same for every run of a night, so computed once."""
    return tuple(rule for rule in _profile(compat, has_launcher) if rule.holds(version, available))


def check_container(container: ConfigContainer, world_size: int | None = None) -> tuple[Violation, ...]:
    """Return every rule that a ConfigContainer breaks.

    Args:
        container: The configuration.
        world_size: GPUs of the run; without it, the data parallel size that the file records is taken.
    """
    return tuple(violations_of(CONTAINER_RULES, replace(container, world_size=world_size)))


def check(
    spec: RunSpec, limits: ClusterLimits | None = None, checkout: Checkout | None = None
) -> tuple[Violation, ...]:
    """Return every rule that the run breaks, errors and warnings, in the order of its profile.

    Rules that need the cluster's limits or the pinned code are left out where these are not given.

    Raises:
        InvalidInput: The checkout holds no launcher that can be read.
    """
    return _check_one(spec.test, limits, checkout)


def errors_of(violations: Iterable[Violation]) -> tuple[Violation, ...]:
    """The violations that keep a run from starting."""
    return tuple(violation for violation in violations if violation.severity == "error")


def check_test(
    test: TestDefinition, limits: ClusterLimits | None = None, checkout: Checkout | None = None
) -> tuple[Violation, ...]:
    """Return every rule that a test breaks, whatever the night.

    Of a swept test the points that break a rule are warnings, one for each rule, as long as a valid point is left; then
    the other rules are checked at the first valid point.
    """
    if not test.axes and not test.drawn:
        return _check_one(test, limits, checkout)
    grid = grid_of(test, limits, checkout)
    expansion = expansion_of(grid, MAX_OUTCOMES)
    first = next(iter(chosen_points(test, grid)), None)
    severity: Severity = "error" if first is None else "warning"
    refused = (*_skipped(test, expansion, severity), *_skipped_draws(test, grid, severity))
    if first is None:
        return refused
    return (*_too_many(test, expansion), *refused, *_check_one(at_point(test, first, limits=limits), limits, checkout))


def grid_of(test: TestDefinition, limits: ClusterLimits | None = None, checkout: Checkout | None = None) -> Grid:
    """The points of a test under the rules of its profile."""
    return Grid(test, rules_of(test), limits, checkout)


def points_of(test: TestDefinition, limits: ClusterLimits | None = None) -> Iterator[Point]:
    """The points of a test that are to be run, in order: those that its `[sweep]` selects and that break no rule."""
    return chosen_points(test, grid_of(test, limits)) if test.axes or test.drawn else iter(({},))


def _check_one(test: TestDefinition, limits: ClusterLimits | None, checkout: Checkout | None) -> tuple[Violation, ...]:
    run = RuleContext(test, limits, checkout)
    return tuple(violations_of(_holding(test.compat, test.has_launcher, run.version, run.available), run))


def _skipped(test: TestDefinition, expansion: Expansion, severity: Severity) -> Iterator[Violation]:
    walked = _walked(expansion)
    for rule in rules_of(test):
        if skipped := expansion.skipped.get(rule.id):
            message = f"{skipped.points} of {walked} of the sweep are skipped, for example: {skipped.example}"
            yield rule.violation(message, severity)


def _skipped_draws(test: TestDefinition, grid: Grid, severity: Severity) -> Iterator[Violation]:
    if not test.drawn:
        return
    refusals = [grid.first_refusal(point) for point in drawn_points(test, grid)]
    skipped: dict[str, list[tuple[Rule[RuleContext], str]]] = {}
    for refusal in refusals:
        if refusal is not None:
            skipped.setdefault(refusal[0].id, []).append(refusal)
    for refused in skipped.values():
        rule, example = refused[0]
        message = f"{len(refused)} of {len(refusals)} sampled points are skipped, for example: {example}"
        yield rule.violation(message, severity)


def _walked(expansion: Expansion) -> str:
    if expansion.walked == expansion.points:
        return f"{expansion.points} points"
    return f"the {expansion.walked} points checked (there are {expansion.points})"


def _too_many(test: TestDefinition, expansion: Expansion) -> Iterator[Violation]:
    if test.sweep.method == "grid" and (expansion.valid > MAX_RUNS or expansion.walked < expansion.points):
        yield Violation(
            rule="sweep-size",
            severity="error",
            fields=tuple(axis.field for axis in test.axes),
            message=(
                f"{expansion.valid} of {_walked(expansion)} of the sweep are valid, and a night runs at most "
                f'{MAX_RUNS} of a test; write fewer values, or [sweep] method = "random" and points'
            ),
        )


def check_scenario(scenario: Scenario, limits: ClusterLimits | None = None) -> Scenario:
    """Move every test that breaks a rule to `invalid` and add the warnings of the rules; the other tests stay."""
    valid: list[TestDefinition] = []
    invalid = list(scenario.invalid)
    warnings = list(scenario.warnings)
    for test in scenario.tests:
        found = check_test(test, limits)
        where = f"{test.source}: {test.id}"
        refused = errors_of(found)
        warnings.extend(f"{where}: {violation}" for violation in found if violation.severity == "warning")
        if refused:
            violations = tuple(f"{where}: {violation}" for violation in refused)
            invalid.append(InvalidTest(id=test.id, source=test.source, violations=violations))
        else:
            valid.append(test)
    return scenario.model_copy(
        update={"tests": tuple(valid), "invalid": tuple(invalid), "warnings": tuple(dict.fromkeys(warnings))}
    )
