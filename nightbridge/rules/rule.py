"""A rule, what it looks at, and what it finds.

A rule is a function that yields a message for each problem, and its docstring is the rule's reason:

    @rule("one-profiler", "Megatron-Bridge: ProfilingConfig", cmd_args("enable_nsys pytorch_profiler"))
    def _one_profiler(run: RuleContext) -> Iterator[str]:
        "Two profilers slow each other down, and the launcher passes only one of them on."
        if run.args.get("enable_nsys") and run.args.get("pytorch_profiler"):
            yield "enable_nsys and pytorch_profiler are both on; switch one off"

`checking` collects the rules of each module in the order in which they are defined, and reports them in that order.
"""

import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from types import ModuleType
from typing import Any, Generic, Literal, TypeVar

from nightbridge.launch.config_container import ConfigContainer
from nightbridge.launch.config_schema import ConfigSchema, released_schema
from nightbridge.launch.config_source import read_schema
from nightbridge.launch.flags import MEGATRON_NAMES, KnownFlags, items_of, known_in
from nightbridge.launch.launch_plan import launcher_version
from nightbridge.launch.parser_source import known_flags, launcher_of
from nightbridge.launch.resources import gpus_per_node, nodes_for, num_gpus
from nightbridge.launch.versions import HEAD, V0_5_0, V0_6_0, Version, version_for_pin
from nightbridge.models import Checkout, ClusterLimits, Severity, TestDefinition, Violation

Need = Literal["nothing", "limits", "checkout"]
Subject = TypeVar("Subject")

OLDEST = Version(0, 0)

UPSTREAM = re.compile(r"github\.com[:/]+NVIDIA(?:-NeMo)?/", re.IGNORECASE)
"""Addresses of NVIDIA's own repositories, whose releases are known."""

PARALLEL = ("tp", "pp", "cp")
"""The sizes whose product is one copy of a model."""

SIZE_OVERRIDES = {
    **{f"train.{MEGATRON_NAMES[size]}": size for size in ("gb", "mb")},
    **{f"model.{MEGATRON_NAMES[size]}": size for size in (*PARALLEL, "vp", "ep", "et")},
    "model.num_layers": "num_layers",
}
"""Overrides of sizes, each with the key of `[cmd_args]` that says the same and wins where both are written."""

PERFORMANCE_ONLY: Mapping[str, Version | None] = {
    **dict.fromkeys(("nccl_ub", "moe_flex_dispatcher_backend", "et"), V0_6_0),
    **dict.fromkeys(("compute_dtype", "config_variant", "optimizer_type", "moe_a2a_overlap")),
    **dict.fromkeys(("hidden_size", "num_layers", "num_moe_experts", "first_k_dense_replace", "use_tokendrop")),
    **dict.fromkeys(("pipeline_model_parallel_layout", "use_megatron_fsdp", "cuda_graph_impl", "cuda_graph_scope")),
    **dict.fromkeys(("recompute_num_layers", "recompute_modules", "activation_offload_layers")),
    **dict.fromkeys(("c4_root", "c4_train_shards")),
}
"""Keys that are not read with `use_recipes`, but from this version on."""

NO_GRAPHS = ("none", "null")
"""Spellings of `cuda_graph_impl` with which the launcher captures nothing."""


def is_local(url: str) -> bool:
    """Whether a repository is a folder of this host, as the practice's: nothing is guessed about one."""
    return "://" not in url and ":" not in url


@dataclass(frozen=True, slots=True)
class Rule(Generic[Subject]):
    """A named rule for runs (`RuleContext`) or for dumped configurations (`ConfigContainer`).

    Attributes:
        id: Its name, stable: users look it up and scripts match it.
        source: Whose code or documentation the rule follows.
        fields: The fields that it reads; its result depends on nothing else.
        check: Yields a message for each way in which the subject breaks the rule.
        reason: Why the rule exists, in one sentence.
        severity: What breaking it means.
        needs: What must be known before it can be checked.
        first: First version of Megatron-Bridge for which it holds.
        last: Last one; None while it holds.
        alone: Whether it looks at each value separately, so that combinations of values need no check.
    """

    id: str
    source: str
    fields: tuple[str, ...]
    check: Callable[[Subject], Iterable[str]]
    reason: str
    severity: Severity = "error"
    needs: Need = "nothing"
    first: Version = OLDEST
    last: Version | None = None
    alone: bool = False

    def holds(self, version: Version, available: frozenset[Need]) -> bool:
        """Whether it can be checked for runs of a version of which this much is known (`RuleContext.available`)."""
        return self.needs in available and self.first <= version and (self.last is None or version <= self.last)

    def violation(self, message: str, severity: Severity | None = None) -> Violation:
        """What the rule found, with the id to look it up."""
        return Violation(rule=self.id, severity=severity or self.severity, fields=self.fields, message=message)


def rule(
    rule_id: str,
    source: str,
    fields: tuple[str, ...],
    severity: Severity = "error",
    *,
    needs: Need = "nothing",
    first: Version = OLDEST,
    last: Version | None = None,
    alone: bool = False,
) -> Callable[[Callable[[Subject], Iterable[str]]], Rule[Subject]]:
    """Make a function a rule: see `Rule` for the arguments."""

    def make(check: Callable[[Subject], Iterable[str]]) -> Rule[Subject]:
        reason = inspect.getdoc(check) or ""
        return Rule(rule_id, source, fields, check, reason, severity, needs, first, last, alone)

    return make


def rules_in(*modules: ModuleType) -> tuple[Rule[Any], ...]:
    """The rules that modules define, in the order of their definition."""
    return tuple(found for module in modules for found in vars(module).values() if isinstance(found, Rule))


def cmd_args(*fields: str) -> tuple[str, ...]:
    """Keys of `[cmd_args]`, one by one or separated by spaces, as the fields of a rule."""
    return tuple(f"cmd_args.{field}" for names in fields for field in names.split())


OVERRIDDEN = (*cmd_args("use_recipes"), "extra_cmd_args")
"""What `RuleContext.overridden` reads, as further fields of a rule."""

# A sweep needs it for every point, and the parser of a commit never changes.
_pinned = lru_cache(maxsize=16)(known_flags)
_released = lru_cache(maxsize=16)(known_in)
pinned_schema = lru_cache(maxsize=16)(read_schema)
"""The configuration classes of a checkout; with a version, its shipped ones for what the checkout lacks."""


class RuleContext:
    """One run as the rules see it: a test with nothing left to choose, the cluster's limits and the pinned code.

    The last two are None until they are known.
    """

    def __init__(
        self, test: TestDefinition, limits: ClusterLimits | None = None, checkout: Checkout | None = None
    ) -> None:
        self.test, self.limits, self.checkout = test, limits, checkout
        self.args: Mapping[str, Any] = test.cmd_args

    @cached_property
    def available(self) -> frozenset[Need]:
        """Which of the needs of rules (`Rule.needs`) are met."""
        known: dict[Need, object] = {"nothing": self.test, "limits": self.limits, "checkout": self.checkout}
        return frozenset(need for need, value in known.items() if value is not None)

    @cached_property
    def known(self) -> KnownFlags:
        """The launcher's flags: the pinned commit's own, or the table's for the version it seems to be."""
        if self.checkout is not None:
            return _pinned(self.checkout.megatron_bridge.path, launcher_of(self.test))
        return _released(self.version)

    @cached_property
    def config_schema(self) -> ConfigSchema | None:
        """What overrides may name: the pinned commit's own classes (None: it has none), or those of its release."""
        if self.checkout is not None:
            return pinned_schema(self.checkout.megatron_bridge.path, self.version)
        return released_schema(self.version)

    @cached_property
    def version(self) -> Version:
        """The version that rules with a version range look at."""
        if not self.test.has_launcher:
            return HEAD
        if self.checkout is not None:
            return launcher_version(self.known)
        return version_for_pin(self.test.megatron_bridge.commit)

    @cached_property
    def gpus(self) -> int:
        """GPUs of the run."""
        return num_gpus(self.test)

    @cached_property
    def gpus_per_node(self) -> int | None:
        """GPUs of a node, which is also how many tasks the launcher starts on each; None where unknown."""
        return gpus_per_node(self.test, self.version, limits=self.limits)

    @property
    def nodes(self) -> int | None:
        """Nodes of the run, as the launch plan counts them; None where the GPUs of a node are unknown."""
        return nodes_for(self.gpus, self.gpus_per_node) if self.gpus_per_node else None

    @cached_property
    def trained(self) -> int:
        """GPUs that train: all of the nodes, for each has a task; those of the test where a node's are only guessed."""
        limits = self.limits
        reported = limits is not None and (limits.configured_gpus_per_node or limits.gpus_per_node)
        is_known = self.test.has_launcher and (reported or self.integer("gpus_per_node"))
        return self.nodes * self.gpus_per_node if is_known and self.nodes and self.gpus_per_node else self.gpus

    @cached_property
    def filled(self) -> frozenset[int]:
        """The numbers of GPUs that groups must divide: of those that train, and since v0.6.0 of the test's own."""
        return frozenset({self.trained} if self.version < V0_6_0 else {self.gpus, self.trained})

    @property
    def shown_gpus(self) -> str:
        """The GPUs as a message names them, with those that train where they are more."""
        requested = f"num_gpus {self.gpus}"
        if self.trained == self.gpus:
            return requested
        return f"{requested}, for which {self.trained} train on nodes of {self.gpus_per_node},"

    def reads(self, field: str) -> bool:
        """Whether the recipe is given this key of `[cmd_args]`; a rule that asks has `use_recipes` among its fields."""
        if field not in PERFORMANCE_ONLY or not self.args.get("use_recipes"):
            return True
        since = PERFORMANCE_ONLY[field]
        return since is not None and since <= self.version

    def value(self, field: str) -> Any:
        """A value of `[cmd_args]` as the recipe is given it; None where it is not written, or not read (`reads`)."""
        return self.args.get(field) if self.reads(field) else None

    @cached_property
    def graph_implementation(self) -> str | None:
        """How CUDA graphs are made, in lower case; None where the recipe decides."""
        value = self.value("cuda_graph_impl")
        return str(value).strip().lower() if value else None

    @cached_property
    def graph_scopes(self) -> tuple[str, ...]:
        """The parts of a layer that are captured, in lower case: those that are written and used."""
        value = self.value("cuda_graph_scope")
        if not value or self.graph_implementation in NO_GRAPHS:
            return ()
        return tuple([item.lower() for item in items_of(value)])

    @cached_property
    def _size_overrides(self) -> dict[str, tuple[str, int]]:
        return {
            field: (key, int(value))
            for key, path, value in overrides_of(self.test)
            if (field := SIZE_OVERRIDES.get(path.replace("model.transformer.", "model."))) is not None
            and value is not None
            and re.fullmatch(r"-?[0-9]{1,18}", value.strip())
        }

    def overridden(self, *fields: str) -> dict[str, tuple[str, int]]:
        """Those of these sizes that are written as overrides alone: by field the override and its number."""
        overrides = self._size_overrides
        found = {each: overrides[each] for each in fields if each in overrides and self.value(each) is None}
        is_dropped = found and self.args.get("use_recipes") and self.version < V0_5_0
        return {} if is_dropped else found

    def integer(self, field: str) -> int | None:
        """A positive whole number (`value`); None where there is none, or nonsense that has its own rule."""
        value = self.value(field)
        return value if isinstance(value, int) and value > 0 else None

    def layout(self, *fields: str) -> dict[str, int]:
        """Those of the fields that are written, be it as overrides alone, with their positive whole numbers."""
        overridden = self.overridden(*fields)
        found = {field: overridden[field][1] if field in overridden else self.integer(field) for field in fields}
        return {field: size for field, size in found.items() if size is not None and size > 0}

    def shown(self, sizes: Mapping[str, int]) -> str:
        """Sizes as a product, each under the name that it is written by."""
        overrides = self.overridden(*sizes)
        named = {field: overrides[field][0] if field in overrides else field for field in sizes}
        return " * ".join(f"{named[field]} {size}" for field, size in sizes.items())


def overrides_of(test: TestDefinition) -> Iterator[tuple[str, str, str | None]]:
    """Every override as it is written, its path, and its value; None for one that removes the key."""
    for key, value in test.extra_cmd_args.items():
        if not key.startswith("-"):  # a flag of a newer launcher
            yield key, key.lstrip("+~"), None if key.startswith("~") else value


def with_places(
    violation: Violation, read: TestDefinition | ConfigContainer, source: str, keys: Iterable[str] = ()
) -> Violation:
    """The violation with the lines of these keys, else of those that its message names or that its rule reads."""
    tables = tuple(f"{field}." for field in violation.fields if "." not in field)
    below = (key for key in read.lines if key.startswith(tables))
    said = violation.message.partition("; did you mean ")[0]  # the nearest name may be written elsewhere
    named = [key for key in dict.fromkeys((*violation.fields, *below)) if names(said, key)]
    exact = [key for key in named if not any(other.startswith(f"{key}.") for other in named)]
    written = [*keys] or exact or [key for key in violation.fields if key in read.lines] or ["cmd_args"]
    places = (read.lines.get(key) or read.lines.get(key.partition(".")[0]) or source for key in written)
    return violation.model_copy(update={"places": tuple(filter(None, dict.fromkeys(places)))})


def names(message: str, key: str) -> bool:
    """Whether a message names a key, with its table or without."""
    name = key.partition(".")[2] or key
    return name in message and re.search(rf"(?<!\w){re.escape(name)}(?!\w|\.\w)", message) is not None


def violations_of(rules: Iterable[Rule[Subject]], subject: Subject) -> Iterator[Violation]:
    """What the rules find."""
    return (found.violation(message) for found in rules for message in found.check(subject))
