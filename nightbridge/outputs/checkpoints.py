"""Checkpoint directories: which there are, and whether each is whole.

Megatron-Bridge writes a checkpoint in a fixed order: shards, `.metadata`, `metadata.json`, `train_state.pt`, the
tracker `latest_checkpointed_iteration.txt` beside the directory, `run_config.yaml`. A directory is complete when all of
that is there and every byte that `.metadata` names lies in its shard. Parts missing at the end of that order mean that
the writer is not there yet (an asynchronous save stays without `.metadata` for long); a part missing before one that is
there, or a short shard, means damage. `common.pt` is not required: newer versions do not write it.

Megatron-LM on its own writes neither `train_state.pt` nor `run_config.yaml`: its tracker is the last part. A folder
whose tracker names a checkpoint, and which has nothing of the sort anywhere, is such a one.

`.metadata` is a pickle, and a pickle can run any code when it is loaded. It is read without torch and without running
anything: every class that such a file may name becomes an inert stand-in that only keeps what it is given; every other
name is refused. Nothing is imported. Opcodes that torch never writes, and that go round that check or take memory
without bound, are refused before loading.
"""

import io
import json
import os
import pickle
import pickletools
import re
import stat
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from nightbridge.errors import DamagedData
from nightbridge.files import read_regular
from nightbridge.launch.config_container import check_yaml
from nightbridge.models import Checkpoint, CheckpointState
from nightbridge.numbers import whole_number

TRACKER = "latest_checkpointed_iteration.txt"
LOADER_STATES = "energon"
"""The folder beside the checkpoints in whose `iter_*` directories the data loader's ranks keep where they stood."""

_ITERATION = re.compile(r"iter_(\d{7,18})", re.ASCII)
_SHARD_SUFFIX = ".distcp"
_NAMES_SHOWN = 3
_MAX_REASON = 1000

_MAX_TRACKER_BYTES = 64
_MAX_CONFIG_BYTES = 4 << 20
_MAX_METADATA_BYTES = 1 << 30
"""The metadata of the largest known models has some tens of megabytes."""


def find_checkpoints(save_dir: Path) -> tuple[Checkpoint, ...]:
    """Judge every `iter_*` directory under `checkpoint.save`, by iteration.

    A missing folder has none; a directory that is deleted meanwhile (`most_recent_k`) is left out; links are not
    followed.
    """
    try:
        entries = sorted(entry.name for entry in os.scandir(save_dir) if entry.is_dir(follow_symlinks=False))
    except (FileNotFoundError, NotADirectoryError):
        return ()
    found = []
    for name in entries:
        if match := _ITERATION.fullmatch(name):
            path = save_dir / name
            # Before it is judged: of one that is found complete after that, every file was there to be counted.
            size = checkpoint_size(path)
            state, reason = checkpoint_state(path)
            if path.is_dir():
                found.append(Checkpoint(path=path, iteration=int(match[1]), state=state, reason=reason, size=size))
    return tuple(sorted(found, key=lambda checkpoint: checkpoint.iteration))


def tracked_iteration(save_dir: Path) -> int | None:
    """The iteration that the tracker file names; None without one, while it is written, or when it names a release."""
    try:
        return whole_number(read_regular(save_dir / TRACKER, limit=_MAX_TRACKER_BYTES).decode("ascii"))
    except (OSError, UnicodeDecodeError):
        return None


def checkpoint_size(path: Path) -> int:
    """Bytes of all regular files below a directory; what vanishes meanwhile counts nothing."""
    total = 0
    for parent, _, names in os.walk(path):
        for name in names:
            try:
                status = os.lstat(os.path.join(parent, name))
            except FileNotFoundError:
                continue
            if stat.S_ISREG(status.st_mode):
                total += status.st_size
    return total


def checkpoint_state(path: Path) -> tuple[CheckpointState, str]:
    """Judge one `iter_*` directory.

    Returns:
        The state, and why it is not complete. The reason of a complete one names stale shards, if any: files of an
        earlier, larger run in the same directory that `.metadata` does not name.

    """
    match = _ITERATION.fullmatch(path.name)
    iteration = int(match[1]) if match else 0
    try:
        state, reason = _judge(path, iteration)
        return state, reason[:_MAX_REASON]  # a file can name a shard in a megabyte
    except OSError as error:
        return CheckpointState.DAMAGED, f"cannot be read: {error.strerror or error}"


def _judge(path: Path, iteration: int) -> tuple[CheckpointState, str]:
    config = path / "run_config.yaml"
    tracked = tracked_iteration(path.parent)
    of_bridge = tracked is None or _has_parts_of_bridge(path)
    parts = [
        _Part(".metadata", _is_file(path / ".metadata")),
        _Part("metadata.json", _is_file(path / "metadata.json"), needed=_needs_metadata_json(config)),
        _Part("train_state.pt", _is_file(path / "train_state.pt"), needed=of_bridge),
        _Part(TRACKER, tracked is not None and tracked >= iteration),
        _Part("run_config.yaml", _is_file(config), needed=of_bridge),
    ]
    for number, part in enumerate(parts):
        if part.needed and not part.there:
            missing = _missing(part.name, tracked)
            # A later part of this checkpoint, or a later checkpoint's tracker: the writer has gone past this part.
            if any(later.there for later in parts[number:]) or (tracked is not None and tracked > iteration):
                return CheckpointState.DAMAGED, f"{missing}, although later files are present"
            return CheckpointState.IN_PROGRESS, f"{missing} yet"
    if problem := _unreadable(path):
        return CheckpointState.DAMAGED, problem
    return _judge_shards(path)


def _has_parts_of_bridge(path: Path) -> bool:
    """Whether this checkpoint, or its folder, holds what Megatron-Bridge writes and Megatron-LM does not.

    Megatron-Bridge writes a copy of the training state beside the tracker before it writes the tracker.
    """
    return any(
        _is_file(part)
        for part in (path / "train_state.pt", path / "run_config.yaml", path.parent / "latest_train_state.pt")
    )


class _Part(NamedTuple):
    """One part of a checkpoint in write order."""

    name: str
    there: bool
    needed: bool = True


def _missing(name: str, tracked: int | None) -> str:
    if name == TRACKER:
        return f"{TRACKER} names {'nothing' if tracked is None else f'iteration {tracked}'}, not this one"
    return f"there is no {name}"


def _is_file(path: Path) -> bool:
    """Whether there is a regular, non-empty file; a link is none, since its target is not part of the checkpoint."""
    try:
        status = path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    return stat.S_ISREG(status.st_mode) and status.st_size > 0


def _needs_metadata_json(config: Path) -> bool:
    """Every format but fsdp_dtensor has a `metadata.json`; without the run's configuration the format is not known."""
    if not _is_file(config):
        return False
    try:
        settings = _load_yaml(config)
    except ValueError:
        return True
    checkpoint = settings.get("checkpoint")
    return not (isinstance(checkpoint, dict) and checkpoint.get("ckpt_format") == "fsdp_dtensor")


def _load_yaml(path: Path) -> dict[str, Any]:
    """Read a YAML mapping as plain text, numbers and containers; tags of the writer's own classes are looked through.

    Raises:
        ValueError: It is not YAML, or not a mapping.

    """
    import yaml

    try:
        data = read_regular(path, limit=_MAX_CONFIG_BYTES)
        check_yaml(data)
        node = yaml.compose(data, Loader=yaml.CSafeLoader)
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from error
    if not isinstance(node, yaml.MappingNode):
        raise ValueError("it is not a mapping")
    return _plain(node, depth=2)


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


def _unreadable(path: Path) -> str:
    """What is wrong with the small files; empty when both can be parsed."""
    if _is_file(path / "metadata.json"):
        try:
            content = json.loads(read_regular(path / "metadata.json", limit=_MAX_CONFIG_BYTES))
        except (ValueError, RecursionError) as error:
            return f"metadata.json is not JSON: {error}"
        if not isinstance(content, dict):
            return "metadata.json is not a JSON object"
    if not _is_file(path / "run_config.yaml"):
        return ""
    try:
        _load_yaml(path / "run_config.yaml")
    except ValueError as error:
        return f"run_config.yaml cannot be parsed: {' '.join(str(error).split())}"
    return ""


def _judge_shards(path: Path) -> tuple[CheckpointState, str]:
    """Compare the shards with what `.metadata` says about them."""
    try:
        needed = _needed_sizes(path)
    except DamagedData as error:
        return CheckpointState.DAMAGED, error.what
    if not needed:
        return CheckpointState.DAMAGED, ".metadata names no shard"
    problems = [problem for name, size in sorted(needed.items()) if (problem := _shard_problem(path, name, size))]
    if problems:
        return CheckpointState.DAMAGED, _some(problems)
    stale = sorted(name for name in os.listdir(path) if name.endswith(_SHARD_SUFFIX) and name not in needed)
    return CheckpointState.COMPLETE, f"stale shards that .metadata does not name: {_some(stale)}" if stale else ""


def _needed_sizes(path: Path) -> dict[str, int]:
    """File name to the bytes it must at least have."""
    needed: dict[str, int] = {}
    for entry in read_storage_entries(path / ".metadata"):
        needed[entry.relative_path] = max(needed.get(entry.relative_path, 0), entry.offset + entry.length)
    return needed


def _shard_problem(path: Path, name: str, size: int) -> str:
    pure = PurePosixPath(name)
    if pure.is_absolute() or ".." in pure.parts:
        return f"{name} lies outside the checkpoint"
    try:
        status = (path / name).lstat()
    except FileNotFoundError:
        return f"shard {name} is missing"
    if not stat.S_ISREG(status.st_mode):
        return f"shard {name} is not a regular file"
    return f"shard {name} has {status.st_size} of {size} bytes" if status.st_size < size else ""


def _some(lines: list[str]) -> str:
    more = len(lines) - _NAMES_SHOWN
    return "; ".join(lines[:_NAMES_SHOWN]) + (f"; and {more} more" if more > 0 else "")


# --- the metadata ---------------------------------------------------------------------------------------------------

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

_MAX_KEY_VISITS = 10_000
"""Values of one key that are visited when it is hashed, deep or wide; torch's keys have ten."""
_MAX_VISITS_PER_BYTE = 64
_SIZE_OF_ALL = 1 << 62
_WITH_KEYS: dict[str, slice] = {
    "SETITEM": slice(1, None, 2),
    "SETITEMS": slice(1, None, 2),
    "DICT": slice(0, None, 2),
    "ADDITEMS": slice(1, None),
    "FROZENSET": slice(0, None),
}
"""Opcodes that hash, and which of the values that they take are keys."""


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
            return _empty_dict
        if not _is_inert(module, name):
            raise _Refused(f"{module}.{name}")
        return self._classes.setdefault((module, name), type(name, (_StandIn,), {}))


def _empty_dict() -> dict[Any, Any]:
    """What an `OrderedDict` is written as since Python 3: its items come later, and their keys are counted then."""
    return {}


def _is_inert(module: str, name: str) -> bool:
    if not _IDENTIFIER.fullmatch(name):
        return False
    pattern = _INERT_NAMES.get(module)
    return pattern.fullmatch(name) is not None if pattern else f"{module}.".startswith(_INERT_PACKAGES)


class _Refused(Exception):
    """A name in a file that checkpoints never need."""


def _check_opcodes(data: bytes) -> None:
    """Refuse opcodes that torch never writes, and keys that take for ever to hash.

    A tuple's hash is made anew each time from all that is in it. Of tuples that hold the one before twice, a pickle of
    220 bytes takes minutes, and one of 300 bytes longer than anybody waits; so what would be visited is counted first.
    """
    stack: list[int] = []
    """Of each value on the unpickler's stack, how many values are visited when it is hashed."""
    marks: list[int] = []
    memo: dict[int, int] = {}
    visits = 0
    for opcode, argument, _ in pickletools.genops(data):
        name = opcode.name
        if name in _REFUSED_OPCODES:
            raise _Refused(f"opcode {name}")
        if name in _MEMO_OPCODES:
            # The memo is a table as long as its largest index; no file remembers more often than it has bytes.
            if int(argument or 0) > len(data):
                raise _Refused(f"memo index {argument}")
            memo[int(argument or 0)] = stack[-1]
            continue
        if name == "MARK":
            marks.append(len(stack))
            continue
        taken = _take(stack, marks, opcode) if opcode.stack_before else []
        if keys := _WITH_KEYS.get(name):
            visits += sum(taken[keys])
            if max(taken[keys], default=0) > _MAX_KEY_VISITS or visits > _MAX_VISITS_PER_BYTE * len(data):
                raise _Refused("a key that takes for ever to hash")
        if name == "MEMOIZE":
            memo[len(memo)] = taken[0]
        if len(opcode.stack_after) == 1:
            stack.append(1 if type(argument) is str else _visits(name, argument, taken, memo))
        elif opcode.stack_after:
            stack += taken * 2  # DUP


def _take(stack: list[int], marks: list[int], opcode: pickletools.OpcodeInfo) -> list[int]:
    """Take from the stack what an opcode takes."""
    before = opcode.stack_before
    # A mark and what is above it count as two.
    start = marks.pop() + 2 - len(before) if pickletools.stackslice in before else len(stack) - len(before)
    if start < 0:
        raise ValueError("it takes more from the stack than there is")
    taken = stack[start:]
    del stack[start:]
    return taken


def _visits(name: str, argument: Any, taken: list[int], memo: dict[int, int]) -> int:
    """How many values are visited when the value that an opcode makes is hashed."""
    if name.startswith("TUPLE"):
        return min(1 + sum(taken), _SIZE_OF_ALL)
    if name in ("GET", "BINGET", "LONG_BINGET"):
        return memo[int(argument)]
    if name == "MEMOIZE":
        return taken[0]
    return 1 + argument.bit_length() // 64 if isinstance(argument, int) else 1


def read_storage_entries(path: Path) -> tuple[StorageEntry, ...]:
    """Read which bytes of which files a checkpoint consists of.

    Raises:
        DamagedData: The file is not such a pickle, is cut off, or names something that such a file has no use for;
            nothing of it was run.
        OSError: The file cannot be read.

    """
    data = read_regular(path, limit=_MAX_METADATA_BYTES)
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
