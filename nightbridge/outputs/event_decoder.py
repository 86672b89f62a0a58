"""The records of an event file, and the part of TensorBoard's protocol buffers that scalars need, decoded by hand.

An event file is a chain of TFRecords: length (8 bytes, little endian), masked CRC-32C of the length, the record, masked
CRC-32C of the record.

Only four messages matter: `Event`, `Summary`, `Summary.Value` and `TensorProto`. Reading them without the protobuf
classes keeps tensorboard out of the runtime and is several times faster. Field numbers are those of tensorboard's
`event.proto`, `summary.proto`, `tensor.proto` and `types.proto`, which never change once released.
"""

import struct
from array import array
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO, Literal, NamedTuple

import google_crc32c

# Wire types (https://protobuf.dev/programming-guides/encoding/).
_VARINT, _LENGTH = 0, 2
_FIXED_SIZES = {1: 8, 5: 4}

HEADER_SIZE = 12
"""Bytes before a record: its length, and the masked checksum of these eight bytes."""

FOOTER_SIZE = 4
"""Bytes after a record: its masked checksum."""


def masked_crc(data: bytes) -> int:
    """CRC-32C as TFRecords write it."""
    crc: int = google_crc32c.value(data)
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF


def record_length(header: bytes) -> int | None:
    """The length of the record after a header; None where the header is cut off or its checksum is wrong."""
    if len(header) < HEADER_SIZE:
        return None
    length: int
    length, checksum = struct.unpack("<QI", header)
    return length if checksum == masked_crc(header[:8]) else None


MAX_RECORD_BYTES = 32 << 20
"""A record is decoded in memory, and a sparse file of some kilobytes on disk can hold one of terabytes."""


@dataclass(eq=False)
class RecordsEnd(Exception):
    """Where a walk over the records ended before the end of the file."""

    status: Literal["truncated", "corrupt"]
    offset: int
    reason: str


def next_record(stream: BinaryIO, total: int, offset: int) -> bytes:
    """The record of a stream that stands at `offset`.

    Raises:
        RecordsEnd: The record is cut off or damaged.
    """
    header = stream.read(HEADER_SIZE)
    if not header.strip(b"\0"):  # as file systems that allocate ahead leave it
        raise RecordsEnd("truncated", offset, "zeros follow in place of a record")
    if len(header) < HEADER_SIZE:
        raise RecordsEnd("truncated", offset, "the last record's header is truncated")
    length = record_length(header)
    if length is None:
        raise RecordsEnd("corrupt", offset, "the checksum of a record's length is wrong")
    if length > MAX_RECORD_BYTES:
        raise RecordsEnd("corrupt", offset, f"a record of {length} bytes; no scalar has more than {MAX_RECORD_BYTES}")
    following = offset + HEADER_SIZE + length + FOOTER_SIZE
    if following > total:
        raise RecordsEnd("truncated", offset, "the last record is truncated")
    record = stream.read(length)
    footer = stream.read(FOOTER_SIZE)
    if len(footer) < FOOTER_SIZE:
        raise RecordsEnd("truncated", offset, "the file shrank while it was read")
    if int.from_bytes(footer, "little") != masked_crc(record):
        raise RecordsEnd("corrupt", offset, "the record's checksum is wrong")
    return record


class MalformedRecord(ValueError):
    """The bytes are not the protocol buffer that they should be."""


class _Message(NamedTuple):
    """The fields of one message by field number, values in order: varints, 4 or 8 bytes of fixed size, and blocks."""

    numbers: dict[int, list[int]]
    fixed: dict[int, list[bytes]]
    blocks: dict[int, list[bytes]]

    # A field that is not repeated may still be written twice; the last one counts.

    def number(self, field: int) -> int:
        return self.numbers[field][-1] if field in self.numbers else 0

    def fixed_value(self, field: int, size: int) -> bytes | None:
        value = self.fixed[field][-1] if field in self.fixed else None
        if value is not None and len(value) != size:
            raise MalformedRecord(f"field {field} has {len(value)} bytes instead of {size}")
        return value

    def block(self, field: int) -> bytes | None:
        return self.blocks[field][-1] if field in self.blocks else None


_MAX_NUMBER = (1 << 64) - 1


def _varint(data: bytes, position: int) -> tuple[int, int]:
    result = shift = 0
    while True:
        if position >= len(data) or shift > 63:
            raise MalformedRecord("a number runs past its end")
        byte = data[position]
        position += 1
        result |= (byte & 0x7F) << shift
        if byte < 0x80:
            return result & _MAX_NUMBER, position
        shift += 7


_MAX_FIELDS = 1 << 16
"""Of one message. A summary has one for each of its values."""


def _message(data: bytes) -> _Message:
    """Split one message into its fields."""
    message = _Message(defaultdict(list), defaultdict(list), defaultdict(list))
    position = count = 0
    while position < len(data):
        count += 1
        if count > _MAX_FIELDS:
            raise MalformedRecord(f"a message of more than {_MAX_FIELDS} fields")
        key, position = _varint(data, position)
        field, wire = key >> 3, key & 7
        if wire == _VARINT:
            value, position = _varint(data, position)
            message.numbers[field].append(value)
            continue
        if wire == _LENGTH:
            size, position = _varint(data, position)
        elif wire in _FIXED_SIZES:
            size = _FIXED_SIZES[wire]
        else:
            raise MalformedRecord(f"wire type {wire} of field {field} is not in use")
        if position + size > len(data):
            raise MalformedRecord(f"field {field} runs past the end of its message")
        target = message.blocks if wire == _LENGTH else message.fixed
        target[field].append(data[position : position + size])
        position += size
    return message


def signed(number: int) -> int:
    """Read a varint as the two's complement of 64 bits, as int32 and int64 fields are written."""
    return number - (1 << 64) if number >= 1 << 63 else number


def _text(data: bytes | None) -> str:
    return (data or b"").decode("utf-8", "replace")


# --- tensors ---------------------------------------------------------------------------------------------------------


_LAYOUTS = {1: ("<f", 5), 2: ("<d", 6)}
"""By the number of the type in `types.proto`, the layout of a number and its field of `TensorProto`. TensorFlow's and
PyTorch's writers of scalars use no other types."""


def _tensor_scalar(data: bytes) -> float | None:
    """The one number in a tensor; None for text, integers, and anything with more or fewer elements."""
    message = _message(data)
    layout, field = _LAYOUTS.get(message.number(1), ("", 0))
    # As bytes of the whole tensor, or as a repeated field, packed or one by one: writers do all three.
    content = message.block(4)
    values = [content] if content else [*message.fixed.get(field, ()), *message.blocks.get(field, ())]
    if not layout or [len(value) for value in values] != [struct.calcsize(layout)]:
        return None
    return float(struct.unpack(layout, values[0])[0])


# --- events ----------------------------------------------------------------------------------------------------------

_OTHER_VALUES = {3: "histogram", 4: "image", 5: "histogram", 6: "audio"}
"""Fields of `Summary.Value` that hold something else than a number."""


class Row(NamedTuple):
    """One scalar."""

    tag: str
    step: int
    wall_time: float
    value: float


class Columns:
    """Collects the rows of one file. What it knows of the file's tags stays when they are taken.

    `skipped` counts what else the file holds, by its kind.
    """

    def __init__(self) -> None:
        self.names: list[str] = []
        self.tag_numbers = array("i")
        self.steps = array("q")
        self.wall_times = array("d")
        self.values = array("d")
        self.skipped: Counter[str] = Counter()
        self.starts: list[tuple[int, int]] = []
        """Of each `SessionLog.START` the number of rows before it, and its step."""
        self._numbers: dict[str, int] = {}
        self._plugins: dict[str, str] = {}
        """The plugin of each tag, which a v2 writer names only once per tag."""

    def add(self, record: bytes) -> None:
        """Add the scalars of one record, an `Event`; of one that is none, nothing."""
        try:
            event = _message(record)
            wall_time = event.fixed_value(1, 8)
            summaries = [_message(summary) for summary in event.blocks.get(5, [])]
            found = [self._value(_message(value)) for summary in summaries for value in summary.blocks.get(1, [])]
            session_starts = _message(event.block(7) or b"").number(1) == 1  # SessionLog.START
        except MalformedRecord:
            self.skipped["malformed"] += 1
            return
        step = signed(event.number(2))
        if session_starts:
            self.starts.append((len(self), step))
        for tag, value in found:
            if isinstance(value, str):
                self.skipped[value] += 1
                continue
            self.tag_numbers.append(self.number_of(tag))
            self.steps.append(step)
            self.wall_times.append(struct.unpack("<d", wall_time)[0] if wall_time else 0.0)
            self.values.append(value)

    def _value(self, value: _Message) -> tuple[str, float | str]:
        """The tag of a value, and its number, or the kind of what it is instead."""
        tag = _text(value.block(1))
        plugin_data = _message(value.block(9) or b"").block(1)  # of Value.metadata
        plugin = _text(_message(plugin_data or b"").block(1)) or self._plugins.get(tag, "")
        self._plugins[tag] = plugin
        if simple := value.fixed_value(2, 4):
            return tag, float(struct.unpack("<f", simple)[0])
        tensor = value.block(8)
        if tensor is None:
            return tag, next((kind for field, kind in _OTHER_VALUES.items() if field in value.blocks), "other")
        number = _tensor_scalar(tensor) if plugin in ("", "scalars") else None
        return tag, plugin or "tensor" if number is None else number

    def add_rows(self, tag_numbers: bytes, steps: bytes, wall_times: bytes, values: bytes) -> None:
        """Add rows as the bytes of their columns."""
        self.tag_numbers.frombytes(tag_numbers)
        self.steps.frombytes(steps)
        self.wall_times.frombytes(wall_times)
        self.values.frombytes(values)

    def __len__(self) -> int:
        return len(self.tag_numbers)

    @property
    def rows(self) -> Iterator[Row]:
        """The scalars in the order of the file, tags as written."""
        tags = (self.names[number] for number in self.tag_numbers)
        return map(Row, tags, self.steps, self.wall_times, self.values)

    def take(self) -> list[Row]:
        """The rows that were collected, which are forgotten then."""
        rows = list(self.rows)
        for column in (self.tag_numbers, self.steps, self.wall_times, self.values):
            del column[:]
        return rows

    def number_of(self, tag: str) -> int:
        """The number of a tag in `names`, which gets it when it is new."""
        number = self._numbers.setdefault(tag, len(self.names))
        if number == len(self.names):
            self.names.append(tag)
        return number


def plain_scalar_tag(template: bytes) -> str | None:
    """The tag of the commonest record, judged by its bytes between the step and the value.

    Every writer of v1 scalars lays an event out as wall time, step, summary of one value of tag and float. Two events
    whose bytes between step and float agree have the same structure and tag, so a reader can decode such a template
    once and then take only the three numbers out of every further record.

    `template` is the bytes that follow the step, without the four bytes of the float at the end. None: the record has
    to be decoded in full.
    """
    position, end = 0, len(template) + 4
    try:
        for key in (0x2A, 0x0A):  # Event.summary, Summary.value: each must reach to the record's end
            if template[position] != key:
                return None
            size, position = _varint(template, position + 1)
            if position + size != end:
                return None
        if template[position] != 0x0A:  # Value.tag
            return None
        size, position = _varint(template, position + 1)
    except (IndexError, MalformedRecord):
        return None
    # What is left after the tag must be the key of Value.simple_value and nothing else.
    if template[position + size :] != b"\x15":
        return None
    return _text(template[position : position + size])
