"""The `.metadata` of a torch distributed checkpoint, read without torch and without running anything.

`.metadata` is a pickle, and a pickle can run any code when it is loaded. Here every class that such a file may name
becomes an inert stand-in that only keeps what it is given; every other name is refused. Nothing is imported. Opcodes
that torch never writes, and that go round that check or take memory without bound, are refused before loading.
"""

import io
import pickle
import pickletools
import re
from pathlib import Path
from typing import Any, NamedTuple

from nightbridge.errors import DamagedData

_SIZE_LIMIT = 1 << 30
"""Bytes. The metadata of the largest known models has some tens of megabytes."""

_INERT_PACKAGES = ("torch.distributed.checkpoint.", "torch.distributed._shard.", "megatron.core.dist_checkpointing.")
_INERT_NAMES: dict[str, re.Pattern[str]] = {
    "torch": re.compile(r"Size|bool|device|strided|jagged|sparse_\w+|(?:q?u?int|b?float|complex|bits)[0-9]\w*"),
    "torch.serialization": re.compile(r"_get_layout"),
    "pathlib": re.compile(r"Pure(?:Posix|Windows)?Path|(?:Posix|Windows)?Path"),
    "pathlib._local": re.compile(r"Pure(?:Posix|Windows)?Path|(?:Posix|Windows)?Path"),
}
_REFUSED_OPCODES = frozenset(("EXT1", "EXT2", "EXT4", "PERSID", "BINPERSID", "INST", "OBJ"))
_MEMO_OPCODES = frozenset(("PUT", "BINPUT", "LONG_BINPUT"))
_IDENTIFIER = re.compile(r"[A-Za-z_]\w*")


class StorageEntry(NamedTuple):
    """Where one item of a checkpoint lies: a file beside `.metadata`, and bytes in it."""

    relative_path: str
    offset: int
    length: int


class _StandIn:
    """Keeps what a pickle gives it, and does nothing."""

    def __new__(cls, *_arguments: Any, **_keywords: Any) -> "_StandIn":
        return object.__new__(cls)

    def __init__(self, *_arguments: Any, **_keywords: Any) -> None:
        self.state: dict[str, Any] = {}

    def __setstate__(self, state: Any) -> None:
        self.state = state if isinstance(state, dict) else {}


class _Unpickler(pickle.Unpickler):
    """Makes stand-ins. Their classes are new for each file, so that no file can change what another one gets."""

    def __init__(self, data: bytes) -> None:
        super().__init__(io.BytesIO(data))
        self._classes: dict[tuple[str, str], type] = {}

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("collections", "OrderedDict"):
            return dict
        if not _is_inert(module, name):
            raise _Refused(f"{module}.{name}")
        return self._classes.setdefault((module, name), type(name, (_StandIn,), {}))


def _is_inert(module: str, name: str) -> bool:
    if not _IDENTIFIER.fullmatch(name):
        return False
    pattern = _INERT_NAMES.get(module)
    return pattern.fullmatch(name) is not None if pattern else f"{module}.".startswith(_INERT_PACKAGES)


class _Refused(Exception):
    """A name in a file that checkpoints never need."""


def _check_opcodes(data: bytes) -> None:
    for opcode, argument, _ in pickletools.genops(data):
        if opcode.name in _REFUSED_OPCODES:
            raise _Refused(f"opcode {opcode.name}")
        # The memo is a table as long as its largest index; nothing can be remembered more often than there are bytes.
        if opcode.name in _MEMO_OPCODES and int(argument or 0) > len(data):
            raise _Refused(f"memo index {argument}")


def read_storage_entries(path: Path) -> tuple[StorageEntry, ...]:
    """Read which bytes of which files a checkpoint consists of.

    Raises:
        DamagedData: The file is not such a pickle, is cut off, or names something that such a file has no use for;
            nothing of it was run.
        OSError: The file cannot be read.

    """
    if path.stat().st_size > _SIZE_LIMIT:
        raise DamagedData("the checkpoint's metadata is too large", thing=str(path))
    data = path.read_bytes()
    try:
        _check_opcodes(data)
        metadata = _Unpickler(data).load()
        return tuple(_entry(entry) for entry in _state(metadata)["storage_data"].values())
    except _Refused as refused:
        raise DamagedData(
            f"the checkpoint's metadata refers to `{refused}`, which checkpoints never need; it was not loaded",
            thing=str(path),
            advice="Do not load this checkpoint with torch unless you trust its author",
        ) from refused
    # A damaged pickle can make the unpickler raise nearly anything; none of it is worth telling apart.
    except Exception as error:
        raise DamagedData(
            f"the checkpoint's metadata cannot be read: {type(error).__name__}: {error}", thing=str(path)
        ) from error


def _state(thing: Any) -> dict[str, Any]:
    if not isinstance(thing, _StandIn):
        raise TypeError(f"{type(thing).__name__} where an object with fields should be")
    return thing.state


def _entry(thing: Any) -> StorageEntry:
    state = _state(thing)
    entry = StorageEntry(state["relative_path"], state["offset"], state["length"])
    if (
        not isinstance(entry.relative_path, str)
        or not isinstance(entry.offset, int)
        or not isinstance(entry.length, int)
    ):
        raise TypeError("a storage entry is not a path with two numbers")
    if entry.offset < 0 or entry.length < 0 or "\0" in entry.relative_path:
        raise ValueError("a storage entry is not a range of a file")
    return entry
