"""Archives of `torch.save`: where their records lie, and the CRC-32 that each has to have.

`torch.save` writes a ZIP archive of stored records; each item of a distributed checkpoint's shard is such an archive.
PyTorch never checks the CRC-32 of a record, so a flipped bit is loaded as a wrong number without a word. Here an
archive's directory and the headers of its records are read and compared, a few hundred bytes of each; the outcome is
where its records lie. Whoever reads the bytes anyway, to send them, checks them by it (`store.checksum.CrcCheck`).

The format: https://pkware.cachefly.net/webdocs/casestudies/APPNOTE.TXT
"""

import io
import struct
from typing import BinaryIO, NamedTuple

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


def has_checksums(records: tuple[Record, ...]) -> bool:
    """Whether the writer made CRCs: `torch.serialization.set_crc32_options(False)` leaves zeros in their place."""
    return any(record.crc32 for record in records)


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
