"""`ConfigContainer.yaml`: the whole configuration of a run, as Megatron-Bridge dumps it, and what follows from it.

Nothing of Megatron-Bridge is imported: the file is data. Sizes are computed as its own `validate()` computes them.
"""

import copy
import difflib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from nightbridge.errors import InvalidInput
from nightbridge.files import read_regular
from nightbridge.launch.config_schema import ConfigSchema, hydra_value, released_schema
from nightbridge.launch.versions import HEAD, V0_5_0
from nightbridge.masking import MASK
from nightbridge.models import Model

SIZES = ("model.tensor_model_parallel_size", "model.pipeline_model_parallel_size", "model.context_parallel_size")
"""The parallel sizes whose product is one copy of the model."""

_MISSING = object()
_SIZE_LIMIT = 4 * 1024 * 1024


@dataclass(frozen=True)
class ConfigContainer:
    """One ConfigContainer.

    Attributes:
        path: The file as the user named it.
        table: What YAML made of it.
        world_size: GPUs of the run, where known.
        text: The file's bytes, for the lines of its keys.
    """

    path: Path
    table: Mapping[str, Any] = field(repr=False)
    world_size: int | None = None
    text: bytes = field(default=b"", repr=False)

    @cached_property
    def lines(self) -> dict[str, str]:
        """`FILE:LINE` of every key; that of `model.transformer.X` is found as `model.X`, too."""
        import yaml

        places = {
            path: f"{self.path}:{line}"
            for path, line in _key_lines(yaml.compose(_without_masks(self.text), yaml.CSafeLoader), "")
        }
        moved = {path.replace(".transformer.", ".", 1): place for path, place in places.items()}
        return {**moved, **places}

    def value(self, path: str) -> Any:
        """The value at a dotted path; None where there is none.

        `model.X` is `model.transformer.X` where the file has it there, as newer versions of Megatron-Bridge do.
        """
        section, _, rest = path.partition(".")
        if section == "model":
            found = _at(self.table, f"model.transformer.{rest}")
            if found is not _MISSING:
                return found
        found = _at(self.table, path)
        return None if found is _MISSING else found

    def integer(self, path: str) -> int | None:
        """The whole number of at most 63 bits at a path; None for anything else."""
        value = self.value(path)
        return value if isinstance(value, int) and not isinstance(value, bool) and value.bit_length() < 64 else None

    def number(self, path: str) -> float | None:
        """The number at a path; None for anything else."""
        value = self.value(path)
        return value if isinstance(value, float) else self.integer(path)

    def names(self, path: str) -> tuple[str, ...]:
        """The texts at a path: a list of them, or one alone. Of a member of an enumeration it is the name."""
        value = self.value(path)
        items = value if isinstance(value, list) else [value] if value else []
        return tuple(str(item.get("_name_", item) if isinstance(item, dict) else item) for item in items)

    def is_on(self, path: str) -> bool:
        """Whether the value is true, or at least not empty."""
        return bool(self.value(path))

    def kind(self, section: str) -> str:
        """The name of the class that a section was dumped from; empty where it is unknown."""
        target = self.value(f"{section}._target_")
        return str(target).rsplit(".", 1)[-1] if target else ""

    def size(self, name: str) -> int:
        """A parallel size of the model; one where it is not written."""
        return self.integer(f"model.{name}") or 1

    def dtype(self, path: str) -> str:
        """The last part of a dumped torch type's name, such as `bfloat16`; empty where none is written."""
        value = self.value(f"{path}._target_") or self.value(path)
        return str(value).rsplit(".", 1)[-1] if value else ""

    @property
    def is_since_0_5(self) -> bool:
        """Whether the file is of v0.5.0 or newer, which alone have this switch."""
        return self.value("model.moe_paged_stash") is not None

    @property
    def is_since_0_6(self) -> bool:
        """Whether the file is of v0.6.0 or newer, whose models have their transformer's fields in a part of its own."""
        return isinstance(self.value("model.transformer"), Mapping)

    @property
    def captured_modules(self) -> tuple[str, ...]:
        """What CUDA graphs capture of each layer; empty for all of it. Before v0.5 the field was called scope."""
        return self.names("model.cuda_graph_modules") or self.names("model.cuda_graph_scope")

    @property
    def captures_graphs(self) -> bool:
        """Whether anything runs as a CUDA graph."""
        return self.value("model.cuda_graph_impl") not in (None, "none")

    @property
    def captures_iteration(self) -> bool:
        """Whether one CUDA graph holds the full iteration."""
        scopes = self.names("model.cuda_graph_scope")
        return self.value("model.cuda_graph_impl") == "full_iteration" or "full_iteration" in scopes

    @property
    def model_parallel_size(self) -> int:
        """How many GPUs hold one copy of the model: TP x PP x CP."""
        return math.prod(self.integer(path) or 1 for path in SIZES)

    @property
    def data_parallel_size(self) -> int | None:
        """How many copies of the model train: 0 where there are too few GPUs, None where it is unknown.

        Without a world size it is the one that the file itself records.
        """
        if self.world_size is not None:
            return self.world_size // self.model_parallel_size
        return self.integer("comm_overlap.data_parallel_size")

    @property
    def decay_samples(self) -> int | None:
        """Samples over which the learning rate decays; None where the duration is not written."""
        if samples := self.integer("train.train_samples"):
            written = self.integer("scheduler.lr_decay_samples")
            return samples if written is None else written
        iterations, batch = self.integer("train.train_iters"), self.integer("train.global_batch_size")
        if iterations is None or batch is None:
            return None
        lengths = (self.integer("scheduler.max_steps"), self.integer("scheduler.lr_decay_iters"), iterations)
        return next(length for length in lengths if length is not None) * batch

    @property
    def schema(self) -> ConfigSchema:
        """The fields of the release that dumped it: those of the transformer are one level deeper since v0.6.0."""
        return released_schema(HEAD if _at(self.table, "model.transformer") is not _MISSING else V0_5_0)

    def wrong_types(self) -> Iterator[str]:
        """What is wrong with each plain value whose field takes values of another type."""
        for path, value in _leaves(self.table, ""):
            is_plain = isinstance(value, str | int | float | list) and not path.endswith("_")  # `_target_` is a class
            if is_plain and (problem := self.schema.wrong_value(path, value)):
                yield problem


class Difference(Model):
    """One value that differs between two ConfigContainers; None for one that is not there."""

    path: str
    before: Any = None
    after: Any = None


_MAX_DEPTH = 64
_MAX_EVENTS = 200_000
_MAX_NUMBER_LENGTH = 400


def _without_masks(data: bytes) -> bytes:
    """A masked value begins with a star: YAML would take it for a reference to another value."""
    return data.replace(MASK.encode(), b"(masked)")


def check_yaml(data: bytes) -> None:
    """Check that values can be built of YAML that a job may have written.

    libyaml's parser keeps its own stack and expands nothing. What builds values from its events recurses in C, resolves
    merge keys into copies, and converts numbers of any length. Who walks the values meets what a reference stands for
    each time, so its values and its levels count each time.

    Raises:
        ValueError: It is not YAML, or nests deeper, holds more, or has other things than a configuration.
    """
    import yaml

    number, opened, sizes = 0, list[tuple[str | None, int]](), dict[str | None, tuple[int, int]]()
    below = [0]  # the most levels in each of the opened, and in the whole
    try:
        for event in yaml.parse(data, Loader=yaml.CSafeLoader):
            number += 1
            if isinstance(event, yaml.CollectionStartEvent):
                opened.append((event.anchor, number))
                below.append(0)
            elif isinstance(event, yaml.CollectionEndEvent):
                (anchor, start), levels = opened.pop(), below.pop() + 1
                sizes[anchor] = number - start, levels
                below[-1] = max(below[-1], levels)
            elif isinstance(event, yaml.AliasEvent):
                if event.anchor in {anchor for anchor, _ in opened}:
                    raise ValueError("a reference to what it is a part of")
                more, levels = sizes.get(event.anchor, (0, 0))
                number, below[-1] = number + more, max(below[-1], levels)
            if len(opened) + below[-1] > _MAX_DEPTH or number > _MAX_EVENTS:
                raise ValueError(f"more than {_MAX_DEPTH} levels or {_MAX_EVENTS} values")
            if isinstance(event, yaml.ScalarEvent) and event.implicit[0]:
                if event.value == "<<":
                    raise ValueError("a merge key, which no configuration has")
                if len(event.value) > _MAX_NUMBER_LENGTH and event.value[0] in "+-.0123456789":
                    raise ValueError(f"a number of more than {_MAX_NUMBER_LENGTH} digits")
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from error


def load_yaml(data: bytes) -> Any:
    """The values of YAML that a job may have written and that was masked.

    Raises:
        ValueError: As for `check_yaml`, in one line.
    """
    import yaml

    data = _without_masks(data)
    try:
        check_yaml(data)
        return yaml.load(data, Loader=yaml.CSafeLoader)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ValueError(" ".join(str(error).split())) from error


def read_container(path: Path) -> ConfigContainer:
    """Read a `ConfigContainer.yaml`.

    Raises:
        InvalidInput: It cannot be read, is not YAML, or holds no ConfigContainer.
    """
    try:
        data = read_regular(path.resolve(), limit=_SIZE_LIMIT)
    except OSError as error:
        raise InvalidInput(f"cannot be read: {error.strerror}", subject=str(path), advice="Check the path") from error
    return parse_container(data, path)


def parse_container(data: bytes, path: Path) -> ConfigContainer:
    """Parse the bytes of a `ConfigContainer.yaml` that came from `path`.

    Raises:
        InvalidInput: It is not YAML, or holds no ConfigContainer.
    """
    try:
        table = load_yaml(data)
    except ValueError as error:
        raise InvalidInput(f"not valid YAML: {error}", subject=str(path), advice="Fix the syntax there") from error
    sections = (table.get("model"), table.get("train")) if isinstance(table, dict) else (None,)
    if not all(isinstance(section, dict) for section in sections):
        raise InvalidInput(
            "not a ConfigContainer: it has no tables model and train",
            subject=str(path),
            advice="Name the configs/ConfigContainer.yaml of a run",
        )
    return ConfigContainer(path, table, text=data)


def _key_lines(node: Any, prefix: str) -> Iterator[tuple[str, int]]:
    """Each key below a node of YAML, with its line."""
    for key, value in node.value if node and node.id == "mapping" else ():
        yield f"{prefix}{key.value}", key.start_mark.line + 1
        yield from _key_lines(value, f"{prefix}{key.value}.")


def with_overrides(container: ConfigContainer, overrides: Sequence[str]) -> ConfigContainer:
    """Lay overrides in Hydra's grammar over a ConfigContainer: `a.b=value`, `+a.b=value`, `~a.b`.

    Raises:
        InvalidInput: An override is none of these, or names a key that is not there. Megatron-Bridge refuses such a
            key as well, and drops it silently where it has a `+`, so here both are refused.
    """
    import yaml

    table = copy.deepcopy(dict(container.table))
    problems = []
    for override in overrides:
        key, equals, text = override.partition("=")
        path = key.strip().lstrip("+~")
        removes = key.startswith("~")
        if removes == bool(equals):
            problems.append(f"{override!r} is not key=value, +key=value or ~key")
        elif _at(table, path) is _MISSING and not (key.startswith("+") and _is_free(container, path)):
            problems.append(f"{override!r} does not name a key of the configuration{_hint(table, path)}")
        else:
            *parents, last = path.split(".")
            parent = _at(table, ".".join(parents)) if parents else table
            try:
                # As Hydra reads it: `1e-5` is a number, which it is not in YAML.
                is_collection = text.strip()[:1] in ("[", "{")
                parent[last] = None if removes else yaml.safe_load(text) if is_collection else hydra_value(text)
            except (yaml.YAMLError, ValueError, RecursionError):  # such as a date or a number that Python has not
                problems.append(f"{override!r} has an invalid value")
    if problems:
        raise InvalidInput("the overrides are not valid", subject=str(container.path), violations=problems)
    return replace(container, table=table)


def _is_free(container: ConfigContainer, path: str) -> bool:
    """Whether the names of a table are the user's own, such as those of environment variables."""
    section = path.rpartition(".")[0]
    return isinstance(_at(container.table, section), Mapping) and "dict" in container.schema.types(section)


def _hint(table: Mapping[str, Any], path: str) -> str:
    """The key that was meant: `model.X` has become `model.transformer.X`, anything else is misspelt."""
    moved = f"model.transformer.{path.removeprefix('model.')}"
    near = [moved] if _at(table, moved) is not _MISSING else difflib.get_close_matches(path, _paths(table, ""), n=1)
    return f"; did you mean {near[0]}?" if near else "; with a + it would be dropped silently"


def _paths(value: Mapping[str, Any], prefix: str) -> Iterator[str]:
    """Every key, those of sections too."""
    for key, inner in value.items():
        yield f"{prefix}{key}"
        if isinstance(inner, Mapping):
            yield from _paths(inner, f"{prefix}{key}.")


def model_flops(container: ConfigContainer) -> float | None:
    """FLOPs of a step: six for each weight and token of a dense transformer; attention itself comes on top."""
    sparse = ("num_moe_experts", "multi_latent_attention", "is_hybrid_model", "heterogeneous_block_specs")
    fields = ("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "seq_length", "vocab_size")
    found = [container.integer(f"model.{field}") for field in fields]
    batch = container.integer("train.global_batch_size")
    if (
        not all(found)
        or not batch
        or container.value("peft")
        or any(container.is_on(f"model.{name}") for name in sparse)
    ):
        return None
    layers, hidden, inner, heads, sequence, vocabulary = (float(value or 0) for value in found)
    channels = container.integer("model.kv_channels") or hidden / heads
    groups = container.integer("model.num_query_groups") or heads
    attention = 2 * hidden * channels * (heads + groups)
    weights = layers * (attention + (2 + container.is_on("model.gated_linear_unit")) * hidden * inner)
    return 6 * (weights + vocabulary * hidden) * batch * sequence


def container_differences(before: ConfigContainer, after: ConfigContainer) -> tuple[Difference, ...]:
    """Every value that is not the same in both, by path; lists are compared as a whole."""
    old, new = dict(_leaves(before.table, "")), dict(_leaves(after.table, ""))
    return tuple(
        Difference(path=path, before=old.get(path), after=new.get(path))
        for path in sorted(old.keys() | new.keys())
        if not _same(old.get(path, _MISSING), new.get(path, _MISSING))
    )


def _leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping) and value:
        for key, inner in value.items():
            yield from _leaves(inner, f"{path}.{key}" if path else str(key))
    else:
        yield path, value


def _same(before: Any, after: Any) -> bool:
    both_nan = isinstance(before, float) and isinstance(after, float) and math.isnan(before) and math.isnan(after)
    return both_nan or (type(before) is type(after) and bool(before == after))


def _at(table: Any, path: str) -> Any:
    for part in path.split("."):
        if not isinstance(table, Mapping) or part not in table:
            return _MISSING
        table = table[part]
    return table
