"""The axes of a run: what differs between a good and a bad stored run, and the run that has each at either level.

    image             by its digest
    Megatron-Bridge   its commit, with every submodule that changed at its own
    submodules        each at the commit of either run, whatever the Megatron-Bridge beside it pins
    NeMo-Run          its commit
    configuration     each key of `[cmd_args]` and `[extra_cmd_args]`, and each option of sbatch
    environment       each variable, be it the test's or the site's
    nodes             each node that only the bad run had, in the place of one that only the good one had

All that is left over, such as the driver, cannot be exchanged: it is named where nothing else did it.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import PurePosixPath
from typing import Any, Literal

from pydantic import Field

from nightbridge.attribution.factor_search import Design
from nightbridge.bisect.plan import REPOSITORIES, Searched
from nightbridge.gate.control_arm import pinned_image, run_at
from nightbridge.gate.nodes import ABOUT_NODES, node_names, on_nodes
from nightbridge.gate.suspects import neutral, requested_changes
from nightbridge.launch.resources import variables_given
from nightbridge.models import GitRepo, Model, RunRecord, RunSpec, Site, TestDefinition
from nightbridge.models.series import NOT_IN_ENVIRONMENT

Axis = Literal["image", "megatron_bridge", "submodule", "nemo_run", "configuration", "environment", "nodes"]

AXIS_WORDS: Mapping[Axis, str] = {
    "image": "the image",
    "megatron_bridge": "Megatron-Bridge",
    "submodule": "the submodules",
    "nemo_run": "NeMo-Run",
    "configuration": "the configuration",
    "environment": "the environment",
    "nodes": "the nodes",
}

MAX_NODE_FACTORS = 32
"""Nodes are exchanged one by one up to so many, else in as many groups."""

_FLAGS = {"-p": "partition", "-gn": "GPUs per node", "-cm": "mounts"}
"""Flags of the launcher that no key of a test has alone, and that no series depends on."""


class Factor(Model):
    """One thing that can be at its good or at its bad level; a level that is None is the thing's absence."""

    axis: Axis
    key: str = Field(
        "", description="Which key, variable or option; of a commit its repository, as `run_at` and bisect call it."
    )
    good: Any = None
    bad: Any = None
    former: GitRepo | None = Field(None, description="Of a repository that moved since: as the good run named it.")

    @property
    def name(self) -> str:
        """What it is called in results."""
        match self.axis:
            case "image":
                return "image"
            case "megatron_bridge" | "nemo_run":
                return REPOSITORIES[self.axis]
            case "submodule":
                return PurePosixPath(self.key).name
            case "environment":
                return f"${self.key}"
            case "nodes":
                return f"{'node' if len(self.bad) == 1 else 'nodes'} {','.join(self.bad)}"
        return self.key

    @property
    def is_range(self) -> bool:
        """Whether there may be levels in between: commits, and images."""
        return self.is_commit or self.axis == "image"

    @property
    def is_commit(self) -> bool:
        """Whether its levels are commits."""
        return self.axis in ("megatron_bridge", "submodule", "nemo_run")

    @property
    def repository(self) -> Searched:
        """The range that it is searched in: a submodule's commits come with bumps of its repository."""
        match self.axis:
            case "image" | "nemo_run":
                return self.axis
        return "megatron_bridge"

    @property
    def folder(self) -> str:
        """Of a submodule's commit, where it lies in the repository; else empty."""
        return self.key.partition("/")[2] if self.axis == "submodule" else ""

    @property
    def change(self) -> str:
        """Both levels, `good → bad`."""
        return " → ".join(_shown(level, self.is_commit) for level in (self.good, self.bad))


def find_factors(good: RunRecord, bad: RunRecord, *, same_nodes: bool) -> tuple[Factor, ...]:
    """What differs between two runs and can be exchanged, axis by axis.

    Args:
        good: The last run with the old level.
        bad: The first one with the new level.
        same_nodes: Whether pairs on the same nodes have shown the change: then it is not the nodes.
    """
    return (
        *_image(good, bad),
        *_commits(good, bad),
        *_configuration(good, bad),
        *_environment(good, bad),
        *(() if same_nodes else _nodes(good, bad)),
    )


def not_exchanged(good: RunRecord, bad: RunRecord, factors: Sequence[Factor]) -> tuple[str, ...]:
    """What differs besides and is not exchanged, a line each: `driver 550.54 → 560.35`."""
    before, after = ({**_surroundings(record), **record.facts} for record in (good, bad))
    facts = {name: (before.get(name), after.get(name)) for name in sorted(before.keys() | after.keys())}
    lines = [f"{name} {old or 'unknown'} → {new or 'unknown'}" for name, (old, new) in facts.items() if old != new]
    digests = good.image.digest, bad.image.digest
    if digests[0] != digests[1] and not any(factor.axis == "image" for factor in factors):
        lines.append(f"image {' → '.join((digest or 'none')[:19] for digest in digests)}, under one name")
    return tuple(lines)


def _surroundings(record: RunRecord) -> dict[str, str]:
    """Of how a run was started, what is no factor and counts: the site's part of it, and what the container sees."""
    test, plan = record.spec.test, record.plan
    words = dict(itertools.pairwise(plan.argv))
    options = (one for one in plan.sbatch_args if one not in test.sbatch_args and not one.startswith(ABOUT_NODES))
    known = {
        **{name: words.get(flag) for flag, name in _FLAGS.items()},
        "the site's options of sbatch": " ".join(options),
        "init_submodules": test.megatron_bridge.init_submodules,
    }
    return {name: neutral("none" if value in (None, "") else value, record) for name, value in known.items()}


def weights_of(factors: Sequence[Factor]) -> tuple[float, ...]:
    """How likely each factor is beforehand: every axis as likely as another, whatever it has of keys."""
    axes = [(factor.axis, factor.key if factor.is_commit else "") for factor in factors]
    return tuple(1 / axes.count(axis) for axis in axes)


def exchanged_run(bad: RunRecord, factors: Sequence[Factor], design: Design) -> RunSpec:
    """The bad run once more, with each factor at the level that a design gives it; its nodes are `nodes_at`.

    Args:
        bad: The bad night's own run.
        factors: Every factor between it and the good one.
        design: Of each factor whether it is at its bad level.
    """
    levels = [(factor, factor.bad if is_bad else factor.good) for factor, is_bad in zip(factors, design, strict=True)]
    commits = {factor.key: level for factor, level in levels if factor.is_commit}
    former = {factor.key: factor.former for factor, level in levels if factor.former and level == factor.good}
    run = run_at(bad, commits, former)
    test = run.test
    for factor, level in levels:
        test = _with_level(test, factor, level)
    return run.model_copy(update={"test": test})


def nodes_at(factors: Sequence[Factor], design: Design, bad: RunRecord) -> str:
    """The nodes that a run of a design has, as Slurm writes them; empty where it may have any."""
    exchanged = [(factor, is_bad) for factor, is_bad in zip(factors, design, strict=True) if factor.axis == "nodes"]
    if not exchanged:
        return ""
    moved = {node for factor, _ in exchanged for node in factor.bad}
    kept = [node for node in _nodes_of(bad) if node not in moved]
    return ",".join(
        [*kept, *(node for factor, is_bad in exchanged for node in (factor.bad if is_bad else factor.good))]
    )


def base_of_descent(bad: RunRecord, factors: Sequence[Factor], cause: Sequence[Factor]) -> RunRecord:
    """The bad run as a search inside a factor of the cause repeats it, at a site that is `exchanged_site`.

    The variables that its site had are its test's; and it has its nodes where these have a part in the cause.
    """
    test = bad.spec.test
    for factor in factors:
        if factor.axis == "environment":
            test = _with_level(test, factor, factor.bad)
    spec = bad.spec.model_copy(update={"test": test})
    if any(factor.axis == "nodes" for factor in cause):
        spec = on_nodes(spec, nodes_at(factors, (True,) * len(factors), bad))
    return bad.model_copy(update={"spec": spec})


def exchanged_site(site: Site, factors: Sequence[Factor]) -> Site:
    """The site without the variables that are exchanged: each run sets its own, or has none."""
    ours = {factor.key for factor in factors if factor.axis == "environment"}
    kept = {name: value for name, value in site.cluster.env_vars.items() if name not in ours}
    return site.model_copy(update={"cluster": site.cluster.model_copy(update={"env_vars": kept})})


def _with_level(test: TestDefinition, factor: Factor, level: Any) -> TestDefinition:
    """The test with one factor that is no commit at a level."""
    match factor.axis:
        case "image":
            return test.model_copy(update={"cmd_args": {**test.cmd_args, "container_image": level}})
        case "environment":
            return test.model_copy(update={"extra_env_vars": _set(test.extra_env_vars, factor.key, level)})
        case "configuration":
            table, _, key = factor.key.partition(".")
            if table == "sbatch":
                kept = (option for option in test.sbatch_args if _option(option) != key)
                return test.model_copy(update={"sbatch_args": (*kept, *([level] if level else []))})
            return test.model_copy(update={table: _set(getattr(test, table), key, level)})
    return test


def _set(table: Mapping[str, Any], key: str, level: Any) -> dict[str, Any]:
    """A table with one key at a level, however many `+` it is written with; without it where the level is None."""
    kept = {name: value for name, value in table.items() if name.lstrip("+") != key.lstrip("+")}
    return kept if level is None else {**kept, key: level}


def _image(good: RunRecord, bad: RunRecord) -> Iterator[Factor]:
    before, after = (
        pinned_image(record).get("container_image", record.spec.test.cmd_args.get("container_image"))
        for record in (good, bad)
    )
    if before != after:
        yield Factor(axis="image", good=before, bad=after)


def _commits(good: RunRecord, bad: RunRecord) -> Iterator[Factor]:
    before, after = good.checkout, bad.checkout
    old, new = before.megatron_bridge, after.megatron_bridge
    if old.commit != new.commit:
        former = good.spec.test.megatron_bridge if old.url != new.url else None
        yield Factor(axis="megatron_bridge", key="megatron_bridge", good=old.commit, bad=new.commit, former=former)
    # What a submodule's folder holds is not run where a checkout has nothing there.
    used = all(record.spec.test.megatron_bridge.init_submodules for record in (good, bad))
    for folder in sorted(old.submodules.keys() & new.submodules.keys()) if used else ():
        if old.submodules[folder] != new.submodules[folder]:
            key = f"megatron_bridge/{folder}"
            yield Factor(axis="submodule", key=key, good=old.submodules[folder], bad=new.submodules[folder])
    if before.nemo_run and after.nemo_run and before.nemo_run.commit != after.nemo_run.commit:
        yield Factor(axis="nemo_run", key="nemo_run", good=before.nemo_run.commit, bad=after.nemo_run.commit)


def _configuration(good: RunRecord, bad: RunRecord) -> Iterator[Factor]:
    """Keys and options that differ. What carries a run's own name or commit differs always, and does not count."""
    for change in requested_changes(good, bad):
        table, _, key = change.name.partition(".")
        if table in ("cmd_args", "extra_cmd_args"):
            old, new = (getattr(record.spec.test, table) for record in (good, bad))
            name = next(name for name in (*new, *old) if name.lstrip("+") == key)
            yield Factor(axis="configuration", key=f"{table}.{name}", good=_value(old, key), bad=_value(new, key))
    before, after = (
        {_option(option): option for option in record.spec.test.sbatch_args if not option.startswith(ABOUT_NODES)}
        for record in (good, bad)
    )
    for option in sorted(before.keys() | after.keys()):
        if before.get(option) != after.get(option):
            yield Factor(axis="configuration", key=f"sbatch.{option}", good=before.get(option), bad=after.get(option))


def _value(table: Mapping[str, Any], key: str) -> Any:
    """The value of a key, however many `+` it is written with; None without it."""
    return next((value for name, value in table.items() if name.lstrip("+") == key), None)


def _environment(good: RunRecord, bad: RunRecord) -> Iterator[Factor]:
    before, after = variables_given(good), variables_given(bad)
    for name in sorted(before.keys() | after.keys()):
        levels = before.get(name), after.get(name)
        old, new = (level and neutral(level, run) for level, run in zip(levels, (good, bad), strict=True))
        if old != new and not any(fnmatchcase(name, pattern) for pattern in NOT_IN_ENVIRONMENT):
            yield Factor(axis="environment", key=name, good=levels[0], bad=levels[1])


def _nodes(good: RunRecord, bad: RunRecord) -> Iterator[Factor]:
    before, after = _nodes_of(good), _nodes_of(bad)
    gone, came = ([node for node in own if node not in others] for own, others in ((before, after), (after, before)))
    if len(gone) != len(came):
        return  # another number of nodes is another configuration
    groups = min(len(came), MAX_NODE_FACTORS)
    for group in range(groups):
        yield Factor(axis="nodes", good=gone[group::groups], bad=came[group::groups])


def _nodes_of(record: RunRecord) -> tuple[str, ...]:
    return node_names(record.job.status.nodes) if record.job.status else ()


def _option(text: str) -> str:
    """The name of an option of sbatch, `--name=value` or `--name`."""
    return text.partition("=")[0].lstrip("-")


def _shown(level: Any, is_commit: bool) -> str:
    if level is None:
        return "not set"
    if isinstance(level, list | tuple):
        return ",".join(map(str, level))
    text = str(level)
    return text[:12] if is_commit else text if len(text) <= 60 else f"…{text[-59:]}"
