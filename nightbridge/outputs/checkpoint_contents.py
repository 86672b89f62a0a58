"""What the files of a checkpoint prove about their bytes, each by what its format says twice.

`prove` reads directories, headers and small files; of the rest it returns the CRC-32s by which whoever reads the bytes
checks them (`store.checksum.CrcCheck`). A file that contradicts itself is damage. One whose format has no checksum is
named: it is whole as far as its lengths tell, and no more than that.

`torch.save` writes a ZIP archive of stored records; each item of a distributed checkpoint's shard is such an archive.
PyTorch never checks the CRC-32 of a record, so a flipped bit is loaded as a wrong number without a word. Here an
archive's directory and the headers of its records are read and compared, a few hundred bytes of each; the outcome is
where its records lie. The format: https://pkware.cachefly.net/webdocs/casestudies/APPNOTE.TXT
"""

import io
import json
import math
import re
import struct
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, NamedTuple

from nightbridge.errors import DamagedData
from nightbridge.files import open_regular, read_regular
from nightbridge.outputs.checkpoint_metadata import Item, is_pickle, read_metadata, shard_problem

# --- archives of torch.save -------------------------------------------------------------------------------------------

_END = struct.Struct("<4s4H2LH")  # disk, disk of the directory, entries on it, entries, size, offset, comment
_END64 = struct.Struct("<4sQ2H2L4Q")  # size of this, versions, disks, entries on it, entries, size, offset
_LOCATOR = struct.Struct("<4sLQL")  # disk, offset of the 64-bit end, disks
_ENTRY = struct.Struct("<4s6H3L5H2L")
_LOCAL = struct.Struct("<4s5H3L2H")
_EXTRA = struct.Struct("<2H")

_MAX_DIRECTORY = 64 << 20
_STORED = 0
_FLAGS_ALLOWED = 0x0808
"""The sizes follow the data; the name is UTF-8."""
_DIRECTORY_ATTRIBUTE = 0x10
_IN_EXTRA_FIELD = 0xFFFFFFFF


class BadArchive(Exception):
    """Why bytes are not an archive as `torch.save` writes it."""


class Record(NamedTuple):
    """One record: its name without the archive's own, and where its bytes lie in the file."""

    name: str
    offset: int
    size: int
    crc32: int


class _Entry(NamedTuple):
    """A record as the directory describes it; `header` is the offset of its local header within the archive."""

    name: bytes
    header: int
    size: int
    crc32: int


def read_archive(stream: BinaryIO, start: int, size: int) -> tuple[Record, ...]:
    """The records of the archive that fills `size` bytes of a file from `start` on, in their order.

    Raises:
        BadArchive: These bytes are no such archive, or what it says about itself does not agree.
    """
    directory, entries = _read_directory(stream, start, size)
    records = []
    position = 0
    for entry in entries:
        if not position <= entry.header < directory:
            raise BadArchive("its records do not lie one after the other")
        header = _read(stream, start + entry.header, _LOCAL.size + len(entry.name))
        signature, *_, name_size, extra_size = _LOCAL.unpack_from(header)
        if signature != b"PK\3\4" or header[_LOCAL.size :] != entry.name:
            raise BadArchive(f"the header of the record at byte {start + entry.header} is damaged")
        offset = entry.header + _LOCAL.size + name_size + extra_size
        position = offset + entry.size
        name = entry.name.decode(errors="replace").partition("/")[2]
        records.append(Record(name, start + offset, entry.size, entry.crc32))
    if position > directory or not any(record.name == "data.pkl" for record in records):
        raise BadArchive("its directory is damaged")
    return tuple(records)


def _read_directory(stream: BinaryIO, start: int, size: int) -> tuple[int, list[_Entry]]:
    """Offset of the directory within the archive, and its entries."""
    end = size - _END.size
    fields = _END.unpack(_read(stream, start + max(end, 0), _END.size))
    if end < 0 or fields[0] != b"PK\5\6":
        raise BadArchive("it does not end as an archive does")
    *disks, here, count, length, offset, comment = narrow = fields[1:]
    locator = end - _LOCATOR.size
    marker, disk, end64, total = _LOCATOR.unpack(_read(stream, start + max(locator, 0), _LOCATOR.size))
    if locator >= 0 and marker == b"PK\6\7":
        fields = _END64.unpack(_read(stream, start + end64, _END64.size)) if end64 < size else (b"",)
        if fields[:2] != (b"PK\6\6", _END64.size - 12) or end64 + _END64.size != locator or disk or total != 1:
            raise BadArchive("its end is damaged")
        *disks, here, count, length, offset = wide = fields[4:]
        if any(one not in (other, 0xFFFF, 0xFFFFFFFF) for one, other in zip(narrow, wide, strict=False)):
            raise BadArchive("its two ends do not agree")
        end = end64
    if any(disks) or here != count or comment or offset + length != end or length > _MAX_DIRECTORY:
        raise BadArchive("its end is damaged")
    return offset, _entries(_read(stream, start + offset, length), count)


def _entries(directory: bytes, count: int) -> list[_Entry]:
    entries: list[_Entry] = []
    position = 0
    while position < len(directory):
        if position + _ENTRY.size > len(directory):
            raise BadArchive("its directory is cut off")
        fields = _ENTRY.unpack_from(directory, position)
        signature, _, _, flags, method, _, _, crc32, packed, size, *lengths, disk, _, attributes, header = fields
        name_size, extra_size, comment_size = lengths
        name_at = position + _ENTRY.size
        position = name_at + name_size + extra_size + comment_size
        name = directory[name_at : name_at + name_size]
        extra = directory[name_at + name_size : position - comment_size]
        if signature != b"PK\1\2" or flags & ~_FLAGS_ALLOWED or disk or attributes & _DIRECTORY_ATTRIBUTE:
            raise BadArchive(f"the entry of its record {len(entries)} is damaged")
        size, packed, header = _wide((size, packed, header), extra)
        if method != _STORED or packed != size:
            raise BadArchive(f"its record {len(entries)} is compressed, or its entry is damaged")
        entries.append(_Entry(name, header, size, crc32))
    if position != len(directory) or len(entries) != count:
        raise BadArchive(f"its directory has {len(entries)} of {count} entries")
    return entries


def _wide(numbers: tuple[int, ...], extra: bytes) -> tuple[int, ...]:
    """Sizes and offset of an entry, those that need more than 32 bits from its extra field 1."""
    position = 0
    while position + _EXTRA.size <= len(extra):
        kind, size = _EXTRA.unpack_from(extra, position)
        position += _EXTRA.size
        if kind == 1:
            content = io.BytesIO(extra[position : position + size])
            return tuple(
                int.from_bytes(content.read(8), "little") if number == _IN_EXTRA_FIELD else number for number in numbers
            )
        position += size
    return numbers


def _read(stream: BinaryIO, offset: int, size: int) -> bytes:
    stream.seek(offset)
    data = stream.read(size)
    if len(data) < size:
        raise BadArchive("it is cut off")
    return data


# --- the files of a checkpoint ----------------------------------------------------------------------------------------

_MAX_JSON_BYTES = 256 << 20
_MAX_PICKLE_BYTES = 16 << 20
_LEGACY_SAVE = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
"""How a file begins that `torch.save` wrote before torch 1.6: a number, as a pickle of its own."""
_ARCHIVE = b"PK\3\4"
_TENSOR = re.compile(rb"ctorch\._utils\n_rebuild_tensor_v([23])\n")
_TORCH_NAME = re.compile(rb"ctorch\n(\w+)\n")
_STORAGES = {
    "DoubleStorage": "float64",
    "FloatStorage": "float32",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "LongStorage": "int64",
    "IntStorage": "int32",
    "ShortStorage": "int16",
    "CharStorage": "int8",
    "ByteStorage": "uint8",
    "BoolStorage": "bool",
    "ComplexFloatStorage": "complex64",
    "ComplexDoubleStorage": "complex128",
}
_INDEX = "model.safetensors.index.json"
_TRAIN_STATE = re.compile(r"iter_(\d+)/train_state\.pt", re.ASCII)
_STEP_FIRST = re.compile(
    rb".{6,7}\x04\x00\x00\x00stepq.ctorch\._utils\n_rebuild_tensor_v2\n.{18}ctorch\n(?:Long|Int)Storage\n", re.DOTALL
)
"""How a pickled training state begins: Megatron-Bridge writes its step first, as a tensor of one integer."""
_SAFETENSORS_BITS = re.compile(r"(?:BOOL|C|F|I|U|BF)(\d*)(?:_\w+)?")


class Proof(NamedTuple):
    """What is known of files that do not contradict themselves.

    `extents`: of each file offset, length and CRC-32 of its parts, as `store.checksum.CrcCheck` takes them. `unproven`:
    what has no checksum, a line each.
    """

    extents: dict[Path, "array[int]"]
    unproven: tuple[str, ...]


def prove(folder: Path, files: Iterable[Path]) -> Proof:
    """Look into the files of a checkpoint in `folder`, those that belong to it and lie elsewhere included.

    Raises:
        DamagedData: One of them is not what its writer wrote, or another one is missing.
        OSError: One of them cannot be read.
    """
    prover = _Prover()
    unchecked = []
    files = sorted(files)
    for path in files:
        if prove_file := next((check for pattern, check in _CHECKS.items() if path.match(pattern)), None):
            prove_file(prover, path)
        elif not any(map(path.match, _JUDGED_BY_LAYOUT)):
            unchecked.append(path)
    _check_parts(folder, set(files), prover.named)
    _check_ranks(files)
    _check_exports(files)
    prover.unproven += [f"{path.name} has no checksum" for path in unchecked if path not in prover.named]
    return Proof(prover.extents, tuple(prover.unproven))


class _Prover:
    def __init__(self) -> None:
        self.extents: dict[Path, array[int]] = {}
        self.unproven: list[str] = []
        self.named: set[Path] = set()
        """Shards that a `.metadata` names."""

    def archive(self, path: Path) -> None:
        """A file of `torch.save`."""
        with open_regular(path) as stream:
            if stream.read(len(_LEGACY_SAVE)) == _LEGACY_SAVE:
                self.unproven.append(f"{path.name} has the format that torch had before 1.6, without checksums")
                return
            size = stream.seek(0, 2)
            try:
                records = read_archive(stream, 0, size)
                _check_step(stream, path, records)
            except BadArchive as error:
                raise DamagedData(f"{path.name} cannot be opened: {error}", subject=str(path)) from error
            self._note(path, records)

    def shards(self, path: Path) -> None:
        """The shards that a `.metadata` names."""
        metadata = read_metadata(path)
        if metadata.unknown:
            self.unproven.append(f"{path.name} has classes that this release does not know: {metadata.unknown[0]}")
        items: dict[str, list[Item]] = defaultdict(list)
        for item in metadata.items:
            items[item.relative_path].append(item)
        sizes = metadata.shard_sizes
        for name, own in items.items():
            self.named.add(path.parent / name)
            if problem := shard_problem(path.parent, name, sizes[name]):
                raise DamagedData(problem, subject=str(path.parent / name))
            with open_regular(path.parent / name) as stream:
                try:
                    self._shard(stream, path.parent / name, sorted(own, key=lambda item: (item.offset, item.length)))
                except BadArchive as error:
                    raise DamagedData(f"shard {name}: {error}", subject=str(path.parent / name)) from error

    def _shard(self, stream: BinaryIO, path: Path, items: list[Item]) -> None:
        if _safetensors_header(stream) is not None:
            self.unproven.append(f"{path.name} is a safetensors file, which has no checksum")
            return
        position = 0
        for item in items:
            if item.offset < position:
                raise BadArchive(f"two items share byte {item.offset}")
            _check_unnamed(stream, position, item.offset)
            self._item(stream, path, item)
            position = item.offset + item.length
        _check_unnamed(stream, position, stream.seek(0, 2))

    def _item(self, stream: BinaryIO, path: Path, item: Item) -> None:
        if item.transforms:
            self.unproven.append(f"{path.name} went through {', '.join(item.transforms)}, which is not looked into")
            return
        try:
            records = read_archive(stream, item.offset, item.length)
        except BadArchive as error:
            if item.dtype or item.length > _MAX_PICKLE_BYTES or not is_pickle(_read(stream, item.offset, item.length)):
                raise BadArchive(f"`{item.name}` at byte {item.offset} is damaged: {error}") from error
            self.unproven.append(f"{path.name} has objects without a checksum, such as `{item.name}`")
            return
        if item.dtype:
            _check_tensor(stream, item, records)
        self._note(path, records)

    def _note(self, path: Path, records: tuple[Record, ...]) -> None:
        # `torch.serialization.set_crc32_options(False)` leaves zeros in their place.
        if not any(record.crc32 for record in records):
            self.unproven.append(f"the writer of {path.name} had checksums switched off")
            return
        extents = self.extents.setdefault(path, array("Q"))
        for record in records:
            extents.extend(record[1:])

    def json(self, path: Path) -> None:
        """Anything in JSON; of the index of several safetensors files also what it names."""
        try:
            content = json.loads(read_regular(path, limit=_MAX_JSON_BYTES))
        except (ValueError, RecursionError) as error:
            raise DamagedData(f"{path.name} is not JSON: {error}", subject=str(path)) from error
        if path.name.endswith(".safetensors.index.json"):
            _check_index(path, content)

    def safetensors(self, path: Path) -> None:
        """A safetensors file."""
        with open_regular(path) as stream:
            if _safetensors_header(stream) is None:
                raise DamagedData(f"{path.name} has no whole safetensors header, or another length", subject=str(path))
        self.unproven.append(f"{path.name} is a safetensors file, which has no checksum")


_CHECKS: dict[str, Callable[[_Prover, Path], None]] = {
    ".metadata": _Prover.shards,
    "*.pt": _Prover.archive,
    "*.pth": _Prover.archive,
    "*.json": _Prover.json,
    "*.safetensors": _Prover.safetensors,
}
"""By the file's name; shards are found through `.metadata`."""

_JUDGED_BY_LAYOUT = ("run_config.yaml", "latest_checkpointed_iteration.txt", "*.distcp")
"""Text that is read before all else, and shards of an earlier save."""


_MODELOPT = "modelopt_state"
"""The folder of a checkpoint with a distributed checkpoint of what ModelOpt did to the model."""


def _check_parts(folder: Path, files: set[Path], named: set[Path]) -> None:
    """A distributed checkpoint within a checkpoint has a `.metadata`; shards that this does not name are stale."""
    shards = [path for path in files - named if path.match("*.distcp") and path.parent != folder]
    parts = {path.parent for path in shards if path.is_relative_to(folder)}
    if (folder / _MODELOPT).is_dir() and not (folder / _MODELOPT).is_symlink():
        parts.add(folder / _MODELOPT)
    for part in sorted(parts):
        if part / ".metadata" not in files:
            raise DamagedData(f"{part.relative_to(folder)} has no .metadata", subject=str(part))


_RANKS = re.compile(r"(mp_rank|train_dataloader_dprank)_?(\d+(?:_\d+)*)(?:\.pt)?", re.ASCII)


def _check_ranks(files: Iterable[Path]) -> None:
    """Folders and files that bear the numbers of ranks, from 0 on: there is one for every number below the highest."""
    ranks: dict[tuple[Path, str, int], set[int]] = defaultdict(set)
    for path in {each for file in files for each in (file, file.parent)}:
        if match := _RANKS.fullmatch(path.name):
            for position, number in enumerate(match[2].split("_")):
                ranks[path.parent, match[1], position].add(int(number))
    for (folder, kind, _), found in ranks.items():
        lost = next(number for number in range(len(found) + 1) if number not in found)
        if lost < max(found):
            raise DamagedData(f"there is no {kind} {lost}, but a {kind} {max(found)}", subject=str(folder))


_OF_SEVERAL = re.compile(r"model-(\d{5})-of-(\d{5})\.safetensors", re.ASCII)


def _check_exports(files: Iterable[Path]) -> None:
    """Files of weights name how many there are: all are there, or an index, which is written last, is beside them."""
    found: dict[tuple[Path, str], set[int]] = defaultdict(set)
    for path in files:
        if (match := _OF_SEVERAL.fullmatch(path.name)) and not path.with_name(_INDEX).exists():
            found[path.parent, match[2]].add(int(match[1]))
    for (folder, number), there in found.items():
        if lost := next((each for each in range(1, int(number) + 1) if each not in there), None):
            raise DamagedData(f"there is no model-{lost:05d}-of-{number}.safetensors", subject=str(folder))


def _check_step(stream: BinaryIO, path: Path, records: tuple[Record, ...]) -> None:
    """Megatron-Bridge names the folder by the step in the training state, and looks for that folder when it resumes."""
    folder = _TRAIN_STATE.fullmatch("/".join(path.parts[-2:]))
    places = {record.name: record for record in records}
    step, described = places.get("data/0"), places["data.pkl"]
    if not folder or not step or step.size not in (4, 8):
        return
    if _STEP_FIRST.match(_read(stream, described.offset, min(described.size, 256))):
        saved = int.from_bytes(_read(stream, step.offset, step.size), "little")
        if saved != int(folder[1]):
            raise DamagedData(f"{path.name} is of iteration {saved}", subject=str(path))


def _check_unnamed(stream: BinaryIO, begin: int, end: int) -> None:
    """Bytes that no item is made of are harmless, unless they are an item."""
    stream.seek(begin)
    if stream.read(min(end - begin, len(_ARCHIVE))) == _ARCHIVE:
        raise BadArchive(f"bytes {begin} to {end} are an item that .metadata does not name")


def _check_tensor(stream: BinaryIO, item: Item, records: tuple[Record, ...]) -> None:
    """Compare a plain tensor's archive with the chunk that `.metadata` says it is."""
    described = next(record for record in records if record.name == "data.pkl")
    stream.seek(described.offset)
    text = stream.read(min(described.size, _MAX_PICKLE_BYTES))
    values = [record for record in records if record.name.startswith("data/")]
    version = _TENSOR.search(text)
    if version is None or len(values) != 1:
        return
    names = [name.decode(errors="replace") for name in _TORCH_NAME.findall(text)]
    dtypes = (_STORAGES.get(name, name if name.islower() else "") for name in names)
    dtype = next(filter(None, dtypes), "")
    if (dtype and dtype != item.dtype) or values[0].size < item.size:
        raise BadArchive(
            f"`{item.name}` at byte {item.offset} has {values[0].size} bytes of {dtype}, .metadata says {item.size} of"
            f" {item.dtype}"
        )


def _safetensors_header(stream: BinaryIO) -> dict[str, Any] | None:
    """The header of a file that is safetensors: its tensors fill it without a gap. None of any other."""
    size = stream.seek(0, 2)
    stream.seek(0)
    length = int.from_bytes(stream.read(8), "little")
    if not 2 <= length <= min(size - 8, _MAX_JSON_BYTES) or stream.read(1) != b"{":
        return None
    stream.seek(8)
    try:
        header = json.loads(stream.read(length))
        tensors = [value for key, value in header.items() if key != "__metadata__"]
        end = 0
        for tensor in sorted(tensors, key=lambda each: each["data_offsets"]):
            begin, following = tensor["data_offsets"]
            bits = _SAFETENSORS_BITS.fullmatch(tensor["dtype"])
            wanted = math.prod(tensor["shape"]) * int((bits and bits[1]) or 8) if bits else 8 * (following - begin)
            if begin != end or 8 * (following - begin) != wanted:
                return None
            end = following
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None
    return header if 8 + length + end == size else None


def _check_index(path: Path, content: Any) -> None:
    """Every tensor that an index names lies in the file that it names."""
    names: dict[str, set[str]] = defaultdict(set)
    try:
        for tensor, file in content["weight_map"].items():
            names[str(PurePosixPath(file))].add(tensor)
    except (TypeError, KeyError, AttributeError) as error:
        raise DamagedData(f"{path.name} has no map of its tensors", subject=str(path)) from error
    for file, tensors in names.items():
        if problem := shard_problem(path.parent, file, 0):
            raise DamagedData(f"{problem}, and {path.name} names it", subject=str(path))
        with open_regular(path.parent / file) as stream:
            header = _safetensors_header(stream)
        if lost := tensors - set(header or ()):
            raise DamagedData(f"{file} lacks {len(lost)} tensors that {path.name} names", subject=str(path))
