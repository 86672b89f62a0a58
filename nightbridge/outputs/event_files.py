"""TensorBoard event files to rows: every record checked, nothing lost in silence.

An event file is a chain of TFRecords: length (8 bytes, little endian), masked CRC-32C of the length, the record, masked
CRC-32C of the record. TensorBoard's own reader stops without a word at the first bad checksum; this one says where the
damage is, why, and how much was saved. Records after the damage are not guessed at.
"""

import io
import os
import re
import struct
from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Literal, NamedTuple

import google_crc32c

from nightbridge.errors import DamagedData
from nightbridge.outputs.event_wire import EventDecoder, MalformedRecord, plain_scalar_tag

if TYPE_CHECKING:
    import pandas as pd

_HEADER_SIZE = 12
_FOOTER_SIZE = 4
_BLOCK = 1 << 20

COLUMNS = ("tag", "step", "wall_time", "value", "file", "superseded")
"""The columns of the scalar table, in order."""

# tensorboardX replaces what it takes for unsafe characters; the run's tags have spaces.
_CANONICAL_TAGS = {
    "lm_loss": "lm loss",
    "lm_loss_validation": "lm loss validation",
    "lm_loss_validation_ppl": "lm loss validation ppl",
}
_MTP_LOSS = re.compile(r"mtp_(\d+)_loss")
_AGAINST_SAMPLES = re.compile(r"[ _]vs[ _]samples$")
_TIME_IN_NAME = re.compile(r"tfevents\.(\d+)")


class Row(NamedTuple):
    """One scalar."""

    tag: str
    step: int
    wall_time: float
    value: float


@dataclass(frozen=True)
class EventFile:
    """The scalars of one file, as columns of equal length, and how whole the file was.

    `status` complete: every byte was read, or only zeros follow, as file systems that allocate ahead leave them.
    truncated: the last record is cut off, as after a kill. corrupt: a record is not what was written.
    """

    path: Path
    status: Literal["complete", "truncated", "corrupt"] = "complete"
    damage_offset: int | None = None
    reason: str = ""
    bytes_ok: int = 0
    bytes_total: int = 0
    skipped: dict[str, int] = field(default_factory=dict)
    tags: list[str] = field(default_factory=list, repr=False)
    steps: "array[int]" = field(default_factory=lambda: array("q"), repr=False)
    wall_times: "array[float]" = field(default_factory=lambda: array("d"), repr=False)
    values: "array[float]" = field(default_factory=lambda: array("d"), repr=False)

    def __len__(self) -> int:
        return len(self.tags)

    @property
    def rows(self) -> Iterator[Row]:
        """The scalars in the order of the file, tags as written."""
        return map(Row, self.tags, self.steps, self.wall_times, self.values)

    @property
    def damage(self) -> str:
        """What is wrong with the file in one line, empty when nothing is."""
        malformed = self.skipped.get("malformed", 0)
        if self.status == "complete":
            return f"{self.path.name}: {malformed} records are not events" if malformed else ""
        return (
            f"{self.path.name}: {self.status} at byte {self.damage_offset} of {self.bytes_total}"
            f" ({self.reason}); {len(self)} scalars before it were kept"
        )


class RecordsEnd(Exception):
    """Where a walk over the records ended before the end of the file."""

    def __init__(self, status: Literal["truncated", "corrupt"], offset: int, reason: str) -> None:
        super().__init__(status, offset, reason)
        self.status: Literal["truncated", "corrupt"] = status
        self.offset = offset
        self.reason = reason


def _masked_crc(data: bytes) -> int:
    crc: int = google_crc32c.value(data)
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF


def _only_zeros_from(stream: BinaryIO, offset: int) -> bool:
    stream.seek(offset)
    while block := stream.read(_BLOCK):
        if block.count(0) != len(block):
            return False
    return True


def records(stream: BinaryIO, total: int, offset: int = 0) -> Iterator[tuple[int, bytes]]:
    """Walk over the records of a stream that stands at `offset`, up to `total` bytes: (offset after it, record).

    Raises:
        RecordsEnd: The walk ended at a record that is cut off or damaged.

    """
    # Few lengths occur in a file, and each has one right checksum.
    known_headers: dict[bytes, int] = {}
    while offset < total:
        header = stream.read(_HEADER_SIZE)
        if len(header) < _HEADER_SIZE:
            if not header.strip(b"\0"):
                return
            raise RecordsEnd("truncated", offset, "the last record's header is cut off")
        length = known_headers.get(header)
        if length is None:
            length, checksum = struct.unpack("<QI", header)
            if checksum != _masked_crc(header[:8]):
                _end_at_bad_header(stream, offset)
                return
            known_headers[header] = length
        following = offset + _HEADER_SIZE + length + _FOOTER_SIZE
        if following > total:
            raise RecordsEnd("truncated", offset, "the last record is cut off")
        record = stream.read(length)
        footer = stream.read(_FOOTER_SIZE)
        if len(footer) < _FOOTER_SIZE:
            raise RecordsEnd("truncated", offset, "the file became shorter while it was read")
        if int.from_bytes(footer, "little") != _masked_crc(record):
            if _only_zeros_from(stream, following - 1):
                raise RecordsEnd("truncated", offset, "the last record is cut off and filled up with zeros")
            raise RecordsEnd("corrupt", offset, "the record's checksum is wrong")
        offset = following
        yield offset, record


def _end_at_bad_header(stream: BinaryIO, offset: int) -> None:
    """Judge a header whose checksum is wrong: return at a tail of zeros, else raise what it is."""
    if _only_zeros_from(stream, offset):
        return
    if _only_zeros_from(stream, offset + _HEADER_SIZE - 1):
        raise RecordsEnd("truncated", offset, "the last record's header is cut off and filled up with zeros")
    raise RecordsEnd("corrupt", offset, "the checksum of a record's length is wrong")


class Columns:
    """Collects the rows of one file. What it knows of the file's tags stays when they are taken."""

    def __init__(self) -> None:
        self.tags: list[str] = []
        self.steps = array("q")
        self.wall_times = array("d")
        self.values = array("d")
        self.skipped: Counter[str] = Counter()
        self._decoder = EventDecoder()
        self._plain_tags: dict[bytes, str] = {}

    def add(self, record: bytes) -> None:
        """Add the scalars of one record, by the short way where its bytes allow it."""
        if not self._add_plain(record):
            self._add_any(record)

    def take(self) -> list[Row]:
        """The rows that were collected, which are forgotten then."""
        rows = list(map(Row, self.tags, self.steps, self.wall_times, self.values))
        for column in (self.tags, self.steps, self.wall_times, self.values):
            del column[:]
        return rows

    def _add_plain(self, record: bytes) -> bool:
        # Wall time (key 0x09), then step (key 0x10) of up to four bytes.
        if len(record) < 20 or record[0] != 0x09 or record[9] != 0x10:
            return False
        step, shift, position = 0, 0, 10
        while True:
            byte = record[position]
            position += 1
            step |= (byte & 0x7F) << shift
            if byte < 0x80:
                break
            shift += 7
            if shift > 21:
                return False
        template = record[position:-4]
        tag = self._plain_tags.get(template)
        if tag is None:
            tag = plain_scalar_tag(template)
            if tag is None:
                return False
            self._plain_tags[template] = tag
        self.tags.append(tag)
        self.steps.append(step)
        self.wall_times.append(_unpack_double(record, 1)[0])
        self.values.append(_unpack_float(record, len(record) - 4)[0])
        return True

    def _add_any(self, record: bytes) -> None:
        try:
            event = self._decoder.decode(record)
        except MalformedRecord:
            self.skipped["malformed"] += 1
            return
        self.skipped.update(event.skipped)
        for scalar in event.scalars:
            self.tags.append(scalar.tag)
            self.steps.append(event.step)
            self.wall_times.append(event.wall_time)
            self.values.append(scalar.value)


_unpack_double = struct.Struct("<d").unpack_from
_unpack_float = struct.Struct("<f").unpack_from


def read_event_file(path: Path) -> EventFile:
    """Read one event file up to its end or its first damage. Damage is part of the answer, not an error.

    Raises:
        DamagedData: The file cannot be opened or read at all.

    """
    columns = Columns()
    status: Literal["complete", "truncated", "corrupt"] = "complete"
    damage_offset, reason, bytes_ok = None, "", 0
    try:
        with path.open("rb", buffering=_BLOCK) as stream:
            total = os.fstat(stream.fileno()).st_size
            try:
                for offset, record in records(stream, total):
                    columns.add(record)
                    bytes_ok = offset
                bytes_ok = total
            except RecordsEnd as stop:
                status, damage_offset, reason = stop.status, stop.offset, stop.reason
    except OSError as error:
        raise DamagedData(f"the event file cannot be read: {error.strerror or error}", thing=str(path)) from error
    return EventFile(
        path=path,
        status=status,
        damage_offset=damage_offset,
        reason=reason,
        bytes_ok=bytes_ok,
        bytes_total=total,
        skipped=dict(columns.skipped),
        tags=columns.tags,
        steps=columns.steps,
        wall_times=columns.wall_times,
        values=columns.values,
    )


# --- many files ------------------------------------------------------------------------------------------------------


def find_event_files(folder: Path) -> tuple[Path, ...]:
    """All event files under a folder, by name; links are not followed. A missing folder has none."""
    found = [
        Path(parent) / name for parent, _, names in os.walk(folder) for name in names if _TIME_IN_NAME.search(name)
    ]
    return tuple(sorted(path for path in found if path.is_file() and not path.is_symlink()))


def canonical_tag(tag: str) -> str | None:
    """The tag as Megatron-Bridge names it, or None for a curve over samples, whose steps are no iterations."""
    if _AGAINST_SAMPLES.search(tag):
        return None
    if match := _MTP_LOSS.fullmatch(tag):
        return f"mtp_{match[1]} loss"
    return _CANONICAL_TAGS.get(tag, tag)


def file_time(path: Path) -> int:
    """The time in a file's name, seconds since 1970: copies and S3 do not keep modification times."""
    match = _TIME_IN_NAME.search(path.name)
    return int(match[1]) if match else 0


def _age(file: EventFile) -> tuple[int, float, str]:
    """Order of files: the time in the name; ties by first event."""
    return (file_time(file.path), file.wall_times[0] if len(file) else 0.0, file.path.name)


def scalars(source: Path | Sequence[Path]) -> "tuple[pd.DataFrame, list[str]]":
    """Read all scalars of a run into one tidy table.

    Args:
        source: A folder to search, one event file, or a list of event files. A missing folder gives an empty table.

    Returns:
        The table with `COLUMNS`, in the order of writing: tag (canonical), step, wall_time (seconds since 1970), value
        (NaN and infinities kept), file (its name), superseded (True where a later row has the same tag and step, as
        after a restart). And one line per damaged file.

    """
    if isinstance(source, Path):
        source = find_event_files(source) if not source.is_file() else (source,)
    files: list[EventFile] = []
    damage: list[str] = []
    for path in source:
        try:
            files.append(read_event_file(path))
        except DamagedData as error:
            damage.append(str(error))
    files.sort(key=_age)
    damage += [file.damage for file in files if file.damage]
    return _table(files), damage


def _table(files: Sequence[EventFile]) -> "pd.DataFrame":
    import pandas as pd

    names = {tag: canonical_tag(tag) for file in files for tag in set(file.tags)}
    frames = [
        pd.DataFrame(
            {
                "tag": pd.Series(file.tags, dtype="str").map(names),
                "step": pd.Series(file.steps, dtype="int64"),
                "wall_time": pd.Series(file.wall_times, dtype="float64"),
                "value": pd.Series(file.values, dtype="float64"),
                "file": pd.Series([file.path.name] * len(file), dtype="str"),
            }
        )
        for file in files
        if len(file)
    ]
    if not frames:
        return empty_table()
    table = pd.concat(frames, ignore_index=True).dropna(subset=["tag"])
    table["tag"] = table["tag"].astype("str")
    return mark_superseded(table)


def empty_table() -> "pd.DataFrame":
    """A scalar table without rows, with the right columns and types."""
    import pandas as pd

    types = ("str", "int64", "float64", "float64", "str", "bool")
    return pd.DataFrame({name: pd.Series([], dtype=kind) for name, kind in zip(COLUMNS, types, strict=True)})


def mark_superseded(table: "pd.DataFrame") -> "pd.DataFrame":
    """Add the column `superseded` to rows that are in the order of writing: the last of a tag and step counts."""
    table = table.reset_index(drop=True)
    table["superseded"] = table.duplicated(["tag", "step"], keep="last")
    return table


def metrics_parquet(table: "pd.DataFrame") -> bytes:
    """The content of `metrics.parquet`: the scalar table as one Parquet file (zstd). The same table, the same bytes."""
    buffer = io.BytesIO()
    table.to_parquet(buffer, engine="pyarrow", index=False, compression="zstd")
    return buffer.getvalue()
