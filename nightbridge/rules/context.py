"""What a rule can look at: one run, the version it is pinned to, and what is known of launcher and cluster."""

from collections.abc import Mapping
from functools import cached_property, lru_cache
from typing import Any

from nightbridge.launch.flags import KnownFlags, items_of, known_in
from nightbridge.launch.parser_source import known_flags, launcher_of
from nightbridge.launch.plan import launcher_version
from nightbridge.launch.resources import gpus_per_node, nodes_for, num_gpus
from nightbridge.launch.versions import HEAD, Version, version_for_pin
from nightbridge.models import Checkout, ClusterLimits, TestDefinition

# A sweep needs it for every point, and the parser of a commit never changes.
_pinned = lru_cache(maxsize=16)(known_flags)
_released = lru_cache(maxsize=16)(known_in)

PARALLEL = ("tp", "pp", "cp")
"""The sizes whose product is one copy of a model."""

NO_GRAPHS = ("none", "null")
"""Spellings of `cuda_graph_impl` with which the launcher captures nothing."""

_AVAILABLE = {
    (limits, checkout): frozenset({"nothing", *("limits",) * limits, *("checkout",) * checkout})
    for limits in (False, True)
    for checkout in (False, True)
}


class Facts:
    """One run as the rules see it.

    Attributes:
        test: The run's test, with nothing left to choose.
        limits: What the cluster allows; None until queried.
        checkout: The pinned code; None before it is fetched.
        args: The test's `[cmd_args]`.
        available: Which of the things that rules need (`Rule.needs`) are there.

    """

    def __init__(
        self, test: TestDefinition, limits: ClusterLimits | None = None, checkout: Checkout | None = None
    ) -> None:
        self.test, self.limits, self.checkout = test, limits, checkout
        self.args: Mapping[str, Any] = test.cmd_args
        self.available: frozenset[str] = _AVAILABLE[limits is not None, checkout is not None]

    @cached_property
    def known(self) -> KnownFlags:
        """The launcher's flags: the pinned commit's own, or the table's for the version it seems to be."""
        if self.checkout is not None:
            return _pinned(self.checkout.megatron_bridge.path, launcher_of(self.test))
        return _released(self.version)

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
    def parallel_sizes(self) -> Mapping[str, int]:
        """Those of tp, pp and cp that are written."""
        return {field: size for field in PARALLEL if (size := self.integer(field)) is not None}

    @cached_property
    def graph_implementation(self) -> str | None:
        """How CUDA graphs are made, in lower case; None where the recipe says."""
        value = self.args.get("cuda_graph_impl")
        return str(value).strip().lower() if value else None

    @cached_property
    def graph_scopes(self) -> tuple[str, ...]:
        """The parts of a layer that are captured, in lower case: those that are written and used."""
        value = self.args.get("cuda_graph_scope")
        if not value or self.graph_implementation in NO_GRAPHS:
            return ()
        return tuple([item.lower() for item in items_of(value)])

    def integer(self, field: str) -> int | None:
        """A positive whole number of `[cmd_args]`; None where it is not written, or nonsense that has its own rule."""
        value = self.args.get(field)
        return value if isinstance(value, int) and value > 0 else None
