"""All rules: checking runs and configurations against them, and the list that `nightbridge rules` shows."""

import difflib
import json
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from nightbridge.errors import InvalidInput
from nightbridge.launch.config_container import ConfigContainer, Difference, container_differences, with_overrides
from nightbridge.launch.config_schema import ConfigSchema
from nightbridge.launch.resources import at_point, num_gpus
from nightbridge.launch.versions import Version, is_release
from nightbridge.models import (
    READING_RULE,
    Checkout,
    ClusterLimits,
    Compat,
    InvalidTest,
    Model,
    Scenario,
    Severity,
    TestDefinition,
    Violation,
)
from nightbridge.rules import (
    cloudai,
    config_container_compute,
    config_container_model,
    config_container_training,
    hetero_rules,
    launcher,
    megatron_core,
    required,
    site_rules,
)
from nightbridge.rules.rule import (
    OLDEST,
    Need,
    Rule,
    RuleContext,
    is_local,
    names,
    overrides_of,
    rules_in,
    violations_of,
    with_places,
)
from nightbridge.rules.sweep_points import (
    MAX_OUTCOMES,
    MAX_RUNS,
    Grid,
    PointValues,
    chosen_points,
    draw_violations,
    expansion_of,
    grid_violations,
    too_many_runs,
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

HETERO_RULES: RunRules = rules_in(site_rules, hetero_rules)
"""The rules of a heterogeneous-parallel test: the site's, and its own."""

CONTAINER_RULES: tuple[Rule[ConfigContainer], ...] = rules_in(
    config_container_model, config_container_compute, config_container_training
)
"""What Megatron-Bridge's own check of a configuration raises when the job starts, and what it lets through."""


def rules_of(test: TestDefinition) -> RunRules:
    """The rules that a test is checked by."""
    return PROFILES[test.compat] if test.has_launcher else HETERO_RULES


@lru_cache(maxsize=64)
def _rules_for(compat: Compat | None, version: Version, available: frozenset[Need]) -> RunRules:
    """The rules of a profile, or of heterogeneous tests, that hold for a version of which this much is known."""
    rules = PROFILES[compat] if compat else HETERO_RULES
    return tuple(rule for rule in rules if rule.holds(version, available))


def check_container(container: ConfigContainer, world_size: int | None = None) -> tuple[Violation, ...]:
    """Return every rule that a ConfigContainer breaks on so many GPUs; else the file's data parallel size is taken."""
    return tuple(violations_of(CONTAINER_RULES, replace(container, world_size=world_size)))


def check_dumped(dumped: ConfigContainer, test: TestDefinition) -> tuple[tuple[Violation, ...], tuple[Difference, ...]]:
    """Lay tonight's flags and overrides over what an earlier run dumped: what they newly break, and what differs.

    Overrides whose names are not in the dump are left out: the rules on overrides decide about those.
    """
    gpus = num_gpus(test)
    container, written = dumped, tuple(_tonight(test, dumped))
    for _, override, _ in written:
        with suppress(InvalidInput):
            container = with_overrides(container, [override])
    before = {(found.rule, found.message) for found in check_container(dumped, gpus)}
    if _has_new_layout(test):
        before |= {
            (found.rule, found.message) for found in violations_of((config_container_model.layout_agrees,), container)
        }
    broken = (found for found in check_container(container, gpus) if (found.rule, found.message) not in before)
    placed = (with_places(found, test, test.source, _keys_of(found, written)) for found in broken)
    return tuple(placed), container_differences(dumped, container)


def _has_new_layout(test: TestDefinition) -> bool:
    """Whether the launcher makes a layout for the pipeline that flags set, instead of the one that was dumped."""
    args = test.cmd_args
    if args.get("use_recipes") or args.get("pipeline_model_parallel_layout"):
        return False
    return args.get("model_recipe_name") in ("deepseek_v3", "kimi_k2") and ("pp" in args or "vp" in args)


def _keys_of(found: Violation, written: Iterable[tuple[str, str, str]]) -> list[str]:
    """The keys of a test that set what a violation of its configuration names, else of those that its rule reads."""
    set_by = [(path.replace("model.transformer.", "model."), key) for path, _, key in written]
    named = [key for path, key in set_by if names(found.message, path)]
    return named or [key for path, key in set_by if path in found.fields]


def check_defaults(schema: ConfigSchema, test: TestDefinition) -> Iterator[Violation]:
    """What tonight's values break among themselves, and in the defaults of the pinned classes.

    What the recipe sets is not known, so a violation that a default has a part in is a warning. Where the defaults are
    not known either, as of the shipped classes, it is left out. So are rules on what recipe and launcher always set.
    """
    defaults = ConfigContainer(
        Path("defaults"), {"model": {}, "train": {}, **schema.defaults} if schema.defaults else _unset(test)
    )
    overrides = {path for _, path, _ in overrides_of(test)}
    given = {path for path, _, _ in _tonight(test, defaults)}
    for found in check_dumped(defaults, test)[0]:
        of_rule = {field.partition(".")[0] for field in found.fields}
        known = (path for path in schema.paths if path.partition(".")[0] in of_rule)
        named = {key for key in {*known} | (of_rule & overrides) if names(found.message, key)}
        # The recipe chooses the class of model and dataset, and so their defaults.
        if of_rule & {"model", "dataset"} or not named & overrides or "checkpoint.save" in named:
            continue
        if named <= given:
            yield found
        elif schema.defaults:
            message = f"by the defaults of the pinned code {found.message}; the recipe may set it"
            yield found.model_copy(update={"severity": "warning", "message": message})


def _unset(test: TestDefinition) -> dict[str, Any]:
    """The fields that overrides name, without their values."""
    sections: dict[str, Any] = {"model": {}, "train": {}}
    for _, path, _ in overrides_of(test):
        *parents, last = path.split(".")
        table = sections
        for name in parents:
            if not isinstance(table.get(name), dict):
                table[name] = {}
            table = table[name]
        table.setdefault(last, None)
    return sections


def _tonight(test: TestDefinition, dumped: ConfigContainer) -> Iterator[tuple[str, str, str]]:
    """A test's overrides, then its flags, as the launcher lays them over its recipe: path, override, and its key."""
    for key, path, value in overrides_of(test):
        yield path, key if value is None else f"{key}={value}", f"extra_cmd_args.{key}"
    nested = isinstance(dumped.table["model"].get("transformer"), Mapping)
    layout = "pipeline_model_parallel_layout"
    performance = {} if test.cmd_args.get("use_recipes") else {f"model.{layout}": layout}
    for path, flag in {**launcher.SET_BY_FLAGS, **performance}.items():
        given = test.cmd_args.get(flag)
        if isinstance(given, int | float) or (isinstance(given, str) and (given != "None" or flag == "vp")):
            if flag == "vp" and given in (1, "None"):
                given = None  # as the launcher passes it on
            # Since v0.6.0 all of the model's fields that flags set but one are below `model.transformer`.
            is_moved = nested and flag != "seq_length"
            field = path.replace("model.", "model.transformer.", 1) if is_moved else path
            yield field, f"{field}={json.dumps(given)}", f"cmd_args.{flag}"


def errors_of(violations: Iterable[Violation]) -> tuple[Violation, ...]:
    """The violations that keep a run from starting."""
    return tuple(violation for violation in violations if violation.severity == "error")


MAX_COUNTED = 2_000
"""Points and cuts of a grid that are looked at for each rule alone, to count what it refuses."""


def check_test(
    test: TestDefinition, limits: ClusterLimits | None = None, checkout: Checkout | None = None
) -> tuple[Violation, ...]:
    """Return every rule that a test breaks, whatever the night: errors and warnings, in the order of its profile.

    Rules that need the cluster's limits or the pinned code are left out where these are not given. Of a swept test the
    points that break a rule are warnings, one for each rule, as long as a valid point is left; then the other rules are
    checked at the first valid point.

    Raises:
        InvalidInput: The checkout holds no launcher that can be read.
    """
    if not test.axes and not test.drawn:
        return _check_one(test, limits, checkout)
    grid = grid_of(test, limits, checkout)
    expansion = expansion_of(grid, MAX_OUTCOMES)
    first = next(iter(chosen_points(test, grid)), None)
    severity: Severity = "error" if first is None else "warning"
    refused = (*grid_violations(test, grid, expansion, severity), *draw_violations(test, grid, severity))
    if first is None:
        refused = (*refused, *_hidden(test, {found.rule for found in refused}, limits, checkout))
        broken = {found.rule for found in refused}
        written = {axis.name: axis.values[0] for axis in (*test.axes, *test.drawn)}
        others = _check_one(at_point(test, written, limits=limits), limits, checkout)
        return (*refused, *(found for found in others if found.rule not in broken))
    return (
        *too_many_runs(test, expansion),
        *refused,
        *_check_one(at_point(test, first, limits=limits), limits, checkout),
    )


def grid_of(test: TestDefinition, limits: ClusterLimits | None = None, checkout: Checkout | None = None) -> Grid:
    """The points of a test under the rules of its profile."""
    return Grid(test, rules_of(test), limits, checkout)


def points_of(test: TestDefinition, limits: ClusterLimits | None = None) -> Iterator[PointValues]:
    """The points of a test that are to be run, in order: those that its `[sweep]` selects and that break no rule."""
    return chosen_points(test, grid_of(test, limits)) if test.axes or test.drawn else iter(({},))


def _check_one(test: TestDefinition, limits: ClusterLimits | None, checkout: Checkout | None) -> tuple[Violation, ...]:
    run, pin = RuleContext(test, limits, checkout), test.megatron_bridge
    rules = _rules_for(test.compat if test.has_launcher else None, run.version, run.available)
    broken = tuple(with_places(found, test, test.source) for found in violations_of(rules, run))
    schema = run.config_schema if test.has_launcher and test.extra_cmd_args else None
    if schema is None or (checkout is None and is_local(pin.url)):
        return broken
    clashes = (with_places(found, test, test.source) for found in check_defaults(schema, test))
    is_certain = checkout is not None or is_release(pin.commit)
    return (*broken, *(each if is_certain else each.model_copy(update={"severity": "warning"}) for each in clashes))


def check_read(
    test: TestDefinition | InvalidTest, limits: ClusterLimits | None = None, checkout: Checkout | None = None
) -> tuple[Violation, ...]:
    """Return what could not be read of a test, and every rule that the rest of it breaks.

    What a rule says about a key that could not be read is left out.
    """
    if isinstance(test, TestDefinition):
        return check_test(test, limits, checkout)
    if test.readable is None:
        return test.findings
    unread = {field for found in test.findings for field in found.fields}
    broken = check_test(test.readable, limits, checkout)
    return (*test.findings, *(found for found in broken if not any(names(found.message, key) for key in unread)))


def _hidden(
    test: TestDefinition, broken: Collection[str], limits: ClusterLimits | None, checkout: Checkout | None
) -> Iterator[Violation]:
    """Rules that are broken only by points that others refuse already, each with its own count."""
    for rule in rules_of(test) if test.axes else ():
        if rule.id not in broken:
            alone = Grid(test, (rule,), limits, checkout)
            yield from grid_violations(test, alone, expansion_of(alone, MAX_COUNTED), "error")


def check_scenario(scenario: Scenario, limits: ClusterLimits | None = None) -> Scenario:
    """Move every test that breaks a rule to `invalid` and add the warnings of the rules; the other tests stay."""
    valid: list[TestDefinition] = []
    invalid: list[InvalidTest] = []
    warnings = list(scenario.findings)
    read: tuple[TestDefinition | InvalidTest, ...] = (*scenario.invalid, *scenario.tests)
    for test in read:
        found = check_read(test, limits)
        warnings.extend(violation for violation in found if violation.severity == "warning")
        if isinstance(test, TestDefinition) and not errors_of(found):
            valid.append(test)
        else:
            invalid.append(InvalidTest(id=test.id, source=test.source, findings=errors_of(found)))
    return scenario.model_copy(
        update={"tests": tuple(valid), "invalid": tuple(invalid), "findings": tuple(dict.fromkeys(warnings))}
    )


# --- the list of all rules --------------------------------------------------------------------------------------------

_NEEDS: Mapping[Need, str] = {
    "nothing": "",
    "limits": "the cluster's limits: --cluster or --system",
    "checkout": "the pinned code: --pinned",
}


class RuleEntry(Model):
    """One rule, as people look it up: the fields are those of `Rule`, in words.

    Attributes:
        applies_to: The files that it checks.
        versions: Versions of Megatron-Bridge for which it holds; empty for all.
        needs: What must be known besides the file before it can be checked; empty for nothing.
    """

    id: str
    severity: Severity = "error"
    applies_to: tuple[str, ...] = ("tests",)
    versions: str = ""
    needs: str = ""
    fields: tuple[str, ...] = ()
    reason: str
    source: str


_READING = (
    RuleEntry(
        id=READING_RULE,
        applies_to=("every file",),
        reason="A key or value that cannot be read would be ignored, or mean something else than was written.",
        source="nightbridge: the tables of the configuration reference",
    ),
    RuleEntry(
        id="pinned-code",
        needs=_NEEDS["checkout"],
        fields=("git_repos", "nemo_run_repo"),
        reason="A pin that its repository does not have fails every night.",
        source="nightbridge: the repositories of the test",
    ),
    RuleEntry(
        id="sweep-size",
        reason="A sweep grows with the product of its lists, and a night has an end.",
        source=f"nightbridge: at most {MAX_RUNS} runs of a test in a night",
    ),
)
"""What is found while files are read, besides the rules proper."""


def rule_entries() -> tuple[RuleEntry, ...]:
    """Every rule of every profile, each once."""
    checked: Mapping[str, tuple[Rule[Any], ...]] = {
        "tests": RULES,
        'tests with compat = "cloudai"': CLOUDAI_RULES,
        "heterogeneous tests": HETERO_RULES,
        "ConfigContainer.yaml": CONTAINER_RULES,
    }
    merged = {entry.id: entry for entry in _READING}
    for files, rules in checked.items():
        for rule in rules:
            if known := merged.get(rule.id):
                applies_to, fields = (*known.applies_to, files), dict.fromkeys((*known.fields, *rule.fields))
                merged[rule.id] = known.model_copy(update={"applies_to": applies_to, "fields": tuple(fields)})
                continue
            versions = (f"from {rule.first}" if rule.first != OLDEST else "", f"to {rule.last}" if rule.last else "")
            merged[rule.id] = RuleEntry(
                id=rule.id,
                severity=rule.severity,
                applies_to=(files,),
                versions=" ".join(filter(None, versions)),
                needs=_NEEDS[rule.needs],
                fields=rule.fields,
                reason=rule.reason,
                source=rule.source,
            )
    return tuple(merged.values())


def find_rule(rule_id: str) -> RuleEntry:
    """The rule of this id.

    Raises:
        InvalidInput: There is none.
    """
    entries = {entry.id: entry for entry in rule_entries()}
    if rule_id not in entries:
        close = difflib.get_close_matches(rule_id, entries, n=1)
        advice = f"Did you mean {close[0]}?" if close else "`nightbridge rules` lists all of them"
        raise InvalidInput("no such rule", subject=rule_id, advice=advice)
    return entries[rule_id]
