"""A rule of ConfigContainers, and the helpers that several rules share."""

import functools
import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from nightbridge.launch.config_container import Container
from nightbridge.rules.rule import Severity

SIZES = ("model.tensor_model_parallel_size", "model.pipeline_model_parallel_size", "model.context_parallel_size")
SCHEDULE = ("train.train_iters", "train.train_samples", "scheduler")


@dataclass(frozen=True, slots=True)
class ContainerFacts:
    """A ConfigContainer and the GPUs that it is to run on, where known."""

    container: Container
    world_size: int | None = None


Check = Callable[[Container], Iterable[str]]


@dataclass(frozen=True, slots=True)
class ContainerRule:
    """A named rule of ConfigContainers.

    Attributes:
        id: Its name, stable.
        fields: Dotted paths that it reads.
        check: Yields a message for each way in which a configuration breaks it; its docstring is the reason.
        severity: What breaking it means.
        source: Whose code or documentation the rule follows.

    """

    id: str
    fields: tuple[str, ...]
    check: Callable[[ContainerFacts], Iterable[str]]
    severity: Severity = "error"
    source: str = "Megatron-Bridge: ConfigContainer.validate() and finalize()"

    @property
    def reason(self) -> str:
        """Why the rule exists, in one sentence."""
        return inspect.getdoc(self.check) or ""


def of(check: Check) -> Callable[[ContainerFacts], Iterable[str]]:
    """A check that needs nothing but the file."""

    @functools.wraps(check)
    def of_container(facts: ContainerFacts) -> Iterable[str]:
        return check(facts.container)

    return of_container


def captured_modules(c: Container) -> tuple[str, ...]:
    """What is captured of each layer; empty for all of it. Before v0.5 the field was called scope."""
    return c.names("model.cuda_graph_modules") or c.names("model.cuda_graph_scope")


def dtype_of(c: Container, path: str) -> str:
    """The last part of a dumped torch type's name, `bfloat16`; empty where none is written."""
    value = c.value(f"{path}._target_") or c.value(path)
    return str(value).rsplit(".", 1)[-1] if value else ""
