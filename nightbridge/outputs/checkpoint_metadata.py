"""What a checkpoint says of itself: the bytes of its items, and the settings that it was saved with.

`.metadata` of a distributed checkpoint has which bytes of which files its items are. It is a pickle, and a pickle can
run any code when it is loaded. It is read without torch and without running anything: every class that such a file may
name becomes an inert stand-in that only keeps what it is given; every other name is refused. Nothing is imported.
Opcodes that torch never writes, and such as go round that check or take time or memory without bound, are refused
before loading.

The file has no checksum. What it says twice is compared instead: every chunk of every tensor has its storage and the
other way round, chunks fill their tensor without overlap, names agree with the paths that they were made of.
"""

import bisect
import io
import json
import math
import pickle
import pickletools
import re
import stat
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from nightbridge.errors import DamagedData
from nightbridge.files import read_regular
from nightbridge.launch.config_container import check_yaml

_MAX_BYTES = 1 << 30
"""The metadata of the largest known models has some tens of megabytes."""

_METADATA_NAMES = re.compile(
    r"Metadata|MetadataIndex|(?:Tensor|Bytes|Chunk)StorageMetadata|TensorProperties|StorageMeta|_?MEM_FORMAT_ENCODING"
)
_KNOWN_NAMES: dict[str, re.Pattern[str]] = {
    "torch": re.compile(r"bool|device|strided|jagged|sparse_\w+|(?:q?u?int|b?float|complex|bits)[0-9]\w*"),
    "torch.serialization": re.compile(r"_get_layout"),
    "pathlib": re.compile(r"Pure(?:Posix|Windows)?Path|(?:Posix|Windows)?Path"),
    "pathlib._local": re.compile(r"Pure(?:Posix|Windows)?Path|(?:Posix|Windows)?Path"),
    "torch.distributed.checkpoint.metadata": _METADATA_NAMES,
    "torch.distributed._shard.sharded_tensor.metadata": _METADATA_NAMES,
    "torch.distributed.checkpoint.filesystem": re.compile(r"_StorageInfo|_StoragePrefix"),
    "torch.distributed.checkpoint.planner": re.compile(r"SavePlan|WriteItem|WriteItemType|TensorWriteData"),
    "megatron.core.dist_checkpointing.strategies.torch": re.compile(r"MCoreMetadata|MCoreSavePlan"),
}
_INERT_PACKAGES = ("torch.distributed.checkpoint.", "torch.distributed._shard.", "megatron.core.dist_checkpointing.")
"""Their other names are inert, too; a release that writes one may mean by it what this one does not know."""
_REFUSED_OPCODES = frozenset(
    ("EXT1", "EXT2", "EXT4", "PERSID", "BINPERSID", "INST", "OBJ", "FROZENSET", "EMPTY_SET", "ADDITEMS", "DUP")
)
_MEMO_OPCODES = frozenset(("PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE"))
_GETS = frozenset(("GET", "BINGET", "LONG_BINGET"))
_HASHED_WHOLE = frozenset(("TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "REDUCE", "NEWOBJ"))
_MAX_WEIGHT = 1000
"""Objects of a tuple, those of the tuples in it counted each time: so many are hashed when it is a key."""
_IDENTIFIER = re.compile(r"[A-Za-z_]\w*")
_BITS = re.compile(r"[a-z]+([0-9]+)")
_MAX_DIMENSION = 1 << 62


class Item(NamedTuple):
    """One item of a checkpoint: a file beside `.metadata`, and bytes in it."""

    name: str
    relative_path: str
    offset: int
    length: int
    transforms: tuple[str, ...] = ()
    """What the bytes were passed through, such as a compression."""
    dtype: str = ""
    """The element type of a tensor's chunk; empty for an object."""
    size: int = 0
    """Bytes of the chunk's elements, 0 where not known."""


class CheckpointMetadata(NamedTuple):
    """What a `.metadata` says."""

    items: tuple[Item, ...]
    nested: bool
    """Whether torch.distributed.checkpoint flattened the state dict; Megatron-Core hands over a flat one."""
    unknown: tuple[str, ...]
    """Classes of torch and Megatron-Core that this release does not know."""

    @property
    def shard_sizes(self) -> dict[str, int]:
        """Bytes that each shard has at least, by its name."""
        sizes: dict[str, int] = {}
        for item in self.items:
            sizes[item.relative_path] = max(sizes.get(item.relative_path, 0), item.offset + item.length)
        return sizes

    def has(self, name: str) -> bool:
        """Whether an item has this name, or is one of its shards."""
        return any(item.name == name or item.name.startswith((f"{name}/", f"{name}.")) for item in self.items)


def read_metadata(path: Path) -> CheckpointMetadata:
    """Read which bytes of which files a checkpoint consists of.

    Raises:
        DamagedData: The file is not such a pickle, is cut off, contradicts itself, or names something that such a file
            has no use for; nothing of it was run.
        OSError: The file cannot be read.
    """
    data = read_regular(path, limit=_MAX_BYTES)
    try:
        _check_opcodes(data)
        unpickler = _Unpickler(data)
        fields = _fields(unpickler.load())
        names, storage = fields.get("state_dict_metadata", {}), fields["storage_data"]
        return CheckpointMetadata(
            items=tuple(_items(names, storage)),
            nested=_check_paths(names, fields.get("planner_data")),
            unknown=tuple(sorted(unpickler.unknown)),
        )
    except _Refused as refused:
        raise DamagedData(
            f"the checkpoint's metadata refers to `{refused}`, which checkpoints never need; it was not loaded",
            subject=str(path),
            advice="Do not load this checkpoint with torch unless you trust its author",
        ) from refused
    # A damaged pickle can make the unpickler raise nearly anything; none of it is worth telling apart.
    except Exception as error:
        reason = f": {error}" if isinstance(error, (ValueError, pickle.UnpicklingError)) else ""
        raise DamagedData(
            f"the checkpoint's metadata cannot be read: {type(error).__name__}{reason}", subject=str(path)
        ) from error


# --- what it says twice ---------------------------------------------------------------------------------------------


class _Box(NamedTuple):
    """A chunk of a tensor: where it begins and how far it reaches, in each dimension."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    def overlaps(self, other: "_Box") -> bool:
        return all(
            one < two + reach and two < one + extent
            for one, extent, two, reach in zip(self.offsets, self.sizes, other.offsets, other.sizes, strict=True)
        )


def _items(names: Mapping[str, Any], storage: Mapping[Any, Any]) -> Iterator[Item]:
    """Every item; each chunk of each tensor, and each object, has to be stored once."""
    wanted = {key: found for name, described in names.items() for key, found in _chunks(name, described)}
    for index, place in storage.items():
        where = _fields(index)
        name, offset = where["fqn"], where.get("offset")
        if not isinstance(name, str):
            raise ValueError("a storage entry has no name")
        offset = offset if offset is None else _shape(offset)
        if (name, offset) not in wanted:
            raise ValueError(f"it stores {_quoted(name)} twice, or stores what the state dict does not have")
        dtype, size = wanted.pop((name, offset))
        yield _item(name, _fields(place), dtype, size)
    if wanted:
        name, _ = next(iter(wanted))
        raise ValueError(f"{len(wanted)} parts of the state dict are not stored, the first is of {_quoted(name)}")


def _chunks(name: str, described: Any) -> Iterator[tuple[tuple[str, Any], tuple[str, int]]]:
    """The name and the offset of each stored part, with its element type and its bytes."""
    if type(described).__name__ == "BytesStorageMetadata":
        yield (name, None), ("", 0)
        return
    fields = _fields(described)
    whole = _shape(fields["size"])
    boxes = [_Box(_shape(chunk["offsets"]), _shape(chunk["sizes"])) for chunk in map(_fields, fields["chunks"])]
    _check_filled(name, whole, boxes)
    dtype = _dtype(fields["properties"])
    match = _BITS.match(dtype)
    bytes_each = 1 if dtype == "bool" else int(match[1]) // 8 if match else 0
    for box in boxes:
        yield (name, box.offsets), (dtype, math.prod(box.sizes) * bytes_each)


def _dtype(properties: Any) -> str:
    """The element type, from either form of `TensorProperties`: a tuple, and before torch 2.1 fields."""
    state = properties.state
    dtype, encoding = (state["dtype"], None) if isinstance(state, dict) else (state[0], state[3])
    if encoding is not None and encoding.arguments not in ((0,), (1,), (2,)):
        raise ValueError("a tensor has a memory format that there is not")
    if not isinstance(dtype, type) or dtype.__module__ != "torch":
        raise ValueError("a tensor's element type is none")
    return dtype.__name__


def _shape(numbers: Any) -> tuple[int, ...]:
    if not isinstance(numbers, tuple) or not all(type(each) is int and 0 <= each < _MAX_DIMENSION for each in numbers):
        raise ValueError("a shape is not a tuple of numbers")
    return numbers


def _check_filled(name: str, whole: tuple[int, ...], boxes: list[_Box]) -> None:
    """Chunks lie in their tensor, do not overlap, and fill it: torch refuses to save others."""
    for box in boxes:
        if len(box.offsets) != len(whole) or len(box.sizes) != len(whole):
            raise ValueError(f"a chunk of {_quoted(name)} has not its tensor's dimensions")
        if any(at + size > limit for at, size, limit in zip(box.offsets, box.sizes, whole, strict=True)):
            raise ValueError(f"a chunk of {_quoted(name)} lies outside of its tensor")
    if sum(math.prod(box.sizes) for box in boxes) != math.prod(whole) or _some_overlap(boxes, len(whole)):
        raise ValueError(f"the chunks of {_quoted(name)} do not fill its tensor once")


def _some_overlap(boxes: list[_Box], dimensions: int) -> bool:
    """Whether any two overlap, by a sweep over the dimension that most of them differ in."""
    sweep = max(range(dimensions), key=lambda each: len({box.offsets[each] for box in boxes}), default=None)
    if sweep is None:
        return len(boxes) > 1
    active: list[tuple[int, _Box]] = []
    for box in sorted(boxes, key=lambda each: each.offsets[sweep]):
        del active[: bisect.bisect_right(active, box.offsets[sweep], key=lambda each: each[0])]
        if any(box.overlaps(other) for _, other in active):
            return True
        bisect.insort(active, (box.offsets[sweep] + box.sizes[sweep], box))
    return False


def _check_paths(names: Mapping[str, Any], paths: Any) -> bool:
    """Compare names with the paths in the nested state dict that they were made of; return whether there are any."""
    if not isinstance(paths, dict) or not paths:
        return False
    for name in names:
        path = paths.get(name)
        if not isinstance(path, tuple) or not all(isinstance(part, (str, int)) for part in path):
            raise ValueError("a path in the state dict is none")
        if ".".join(map(str, path)) != name:
            raise ValueError(f"the name {_quoted(name)} does not agree with its path")
    return True


def _item(name: str, place: dict[str, Any], dtype: str, size: int) -> Item:
    transforms = tuple(each for each in place.get("transform_descriptors") or () if isinstance(each, str))
    item = Item(name, place["relative_path"], place["offset"], place["length"], transforms, dtype, size)
    if not isinstance(item.relative_path, str) or type(item.offset) is not int or type(item.length) is not int:
        raise TypeError("a storage entry is not a path with two numbers")
    if not 0 <= item.offset < _MAX_DIMENSION or not 0 <= item.length < _MAX_DIMENSION or "\0" in item.relative_path:
        raise ValueError("a storage entry is not a range of a file")
    return item


def _quoted(name: Any) -> str:
    return f"`{str(name)[:100]}`" if isinstance(name, str) else "what has no name"


# --- the pickle -----------------------------------------------------------------------------------------------------


class _StandIn:
    """Keeps what a pickle gives it, and does nothing."""

    arguments: tuple[Any, ...]
    state: Any

    def __new__(cls, *arguments: Any, **_keywords: Any) -> "_StandIn":
        made = object.__new__(cls)
        made.arguments, made.state = arguments, {}
        return made

    def __init__(self, *_arguments: Any, **_keywords: Any) -> None:
        """Take what `__new__` has kept."""

    def __setstate__(self, state: Any) -> None:
        self.state = state


def _fields(value: Any) -> dict[str, Any]:
    if not isinstance(value, _StandIn) or not isinstance(value.state, dict):
        raise TypeError(f"{type(value).__name__} where an object with fields should be")
    return value.state


class _Refused(Exception):
    """What checkpoints never need."""


def _size(numbers: Any = ()) -> tuple[Any, ...]:
    """In place of `torch.Size`. A list could hold shared tuples that nobody has weighed."""
    if type(numbers) is not tuple:
        raise ValueError("a shape is not made of a tuple")
    return numbers


_REPLACED: dict[tuple[str, str], Callable[..., Any]] = {("collections", "OrderedDict"): dict, ("torch", "Size"): _size}


class _Unpickler(pickle.Unpickler):
    """Makes stand-ins. Their classes are new for each file, so that no file can change what another one gets."""

    def __init__(self, data: bytes) -> None:
        super().__init__(io.BytesIO(data))
        self._classes: dict[tuple[str, str], type] = {}
        self.unknown: set[str] = set()

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _REPLACED:
            return _REPLACED[module, name]
        known = _KNOWN_NAMES.get(module)
        if known is None or not known.fullmatch(name):
            if not _IDENTIFIER.fullmatch(name) or not f"{module}.".startswith(_INERT_PACKAGES):
                raise _Refused(f"{module}.{name}")
            self.unknown.add(f"{module}.{name}")
        return self._classes.setdefault((module, name), type(name, (_StandIn,), {"__module__": module}))


_EFFECTS = {
    opcode.name: (
        pickletools.markobject in opcode.stack_before,
        sum(each not in (pickletools.markobject, pickletools.stackslice) for each in opcode.stack_before),
        [None if each is pickletools.markobject else 1 for each in opcode.stack_after],
    )
    for opcode in pickletools.opcodes
}
"""Of each opcode: whether it takes all down to a mark, what else it takes, and what it puts there, None for a mark."""


def _check_opcodes(data: bytes) -> None:
    """Refuse opcodes that torch never writes, and tuples that take for ever to hash: nested and shared, 40 are enough.

    The weight of each object on the stack is followed as the unpickler would do; None is a mark.
    """
    stack: list[int | None] = []
    memo: dict[int, int | None] = {}
    for opcode, argument, _ in pickletools.genops(data):
        name = opcode.name
        if name in _MEMO_OPCODES:
            index = len(memo) if argument is None else argument
            # The memo is a table as long as its largest index; there is no more to remember than there are bytes.
            if index > len(data):
                raise _Refused(f"memo index {index}")
            memo[index] = stack[-1]
            continue
        if name in _GETS:
            stack.append(memo.get(int(argument or 0), 1))
            continue
        if name in _REFUSED_OPCODES:
            raise _Refused(f"opcode {name}")
        to_mark, singles, made = _EFFECTS[name]
        weight = 1
        if to_mark:
            while (each := stack.pop()) is not None:
                weight += each
        for _ in range(singles):
            weight += stack.pop() or 0
        if name in _HASHED_WHOLE:
            if weight > _MAX_WEIGHT:
                raise _Refused("tuples within tuples")
            stack.append(weight)
        else:
            stack += made


def is_pickle(data: bytes) -> bool:
    """Whether an object was written as a pickle, or is empty, as some extra states are."""
    try:
        return not data or [at for *_, at in pickletools.genops(data)][-1] == len(data) - 1
    except (ValueError, IndexError, TypeError):
        return False


# --- the files beside it ----------------------------------------------------------------------------------------------

MAX_CONFIG_BYTES = 4 << 20
"""Of `run_config.yaml` and of `metadata.json`, at most."""


def shard_problem(folder: Path, name: str, size: int) -> str:
    """Why a shard that `.metadata` names cannot be what it is said to be; empty for none."""
    pure = PurePosixPath(name)
    if "\0" in name:
        return f"{name!r} is no name of a file"
    if pure.is_absolute() or ".." in pure.parts:
        return f"{name} lies outside the checkpoint"
    try:
        status = (folder / name).lstat()
    except FileNotFoundError:
        return f"shard {name} is missing"
    if not stat.S_ISREG(status.st_mode):
        return f"shard {name} is not a regular file"
    return f"shard {name} has {status.st_size} of {size} bytes" if status.st_size < size else ""


def is_file(path: Path) -> bool:
    """Whether there is a regular, non-empty file; a link is none, since its target is not part of the checkpoint."""
    try:
        status = path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    return stat.S_ISREG(status.st_mode) and status.st_size > 0


def read_config(path: Path) -> tuple[dict[str, Any], str]:
    """What `run_config.yaml` says, and what is wrong with it; nothing of either where there is none."""
    import yaml

    if not is_file(path):
        return {}, ""
    data = read_regular(path, limit=MAX_CONFIG_BYTES)
    try:
        check_yaml(data)
        # Tags of the writer's own classes are looked through.
        node = yaml.compose(data, Loader=yaml.CSafeLoader)
    except (ValueError, yaml.YAMLError) as error:
        return {}, f"run_config.yaml cannot be parsed: {' '.join(str(error).split())}"
    if not isinstance(node, yaml.MappingNode):
        return {}, "run_config.yaml cannot be parsed: it is not a mapping"
    settings = _plain(node, depth=2)
    # What wrote it ends every line, and sorts the sections of its configuration, of which `train` is one of the last.
    if not data.endswith(b"\n"):
        return settings, "run_config.yaml is cut off within a line"
    if "_target_" in settings and "train_iters" not in (settings.get("train") or ()):
        return settings, "run_config.yaml is cut off: it has no `train.train_iters`"
    return settings, ""


def _plain(node: Any, depth: int) -> dict[str, Any]:
    """The scalars of a YAML mapping as text, down to `depth` levels: no more is needed."""
    import yaml

    result: dict[str, Any] = {}
    for key, value in node.value:
        if isinstance(value, yaml.ScalarNode):
            result[str(key.value)] = value.value
        elif isinstance(value, yaml.MappingNode) and depth > 1:
            result[str(key.value)] = _plain(value, depth - 1)
    return result


def unreadable_json(path: Path) -> str:
    """What is wrong with `metadata.json`; empty when it can be parsed, or is not there."""
    if (path / "metadata.json").exists():
        try:
            content = json.loads(read_regular(path / "metadata.json", limit=MAX_CONFIG_BYTES))
        except (ValueError, RecursionError) as error:
            return f"metadata.json is not JSON: {error}"
        if not isinstance(content, dict):
            return "metadata.json is not a JSON object"
    return ""
