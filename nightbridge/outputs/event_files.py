"""TensorBoard event files to rows: every record checked, nothing lost in silence.

TensorBoard's own reader stops without a word at the first bad checksum; this one says where the damage is, why, and how
much was saved. Records after the damage are not guessed at.
"""

import contextlib
import io
import itertools
import os
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Literal

import numpy as np

from nightbridge.errors import DamagedData
from nightbridge.files import CHUNK, open_regular, reading, unless_away, walk
from nightbridge.models import Model
from nightbridge.outputs import event_blocks
from nightbridge.outputs.event_decoder import (
    FOOTER_SIZE,
    HEADER_SIZE,
    Columns,
    RecordsEnd,
    next_record,
)
from nightbridge.outputs.reader_process import read_in_child

if TYPE_CHECKING:
    import pandas as pd
    from numpy.typing import NDArray

COLUMNS = ("tag", "step", "wall_time", "value", "file", "superseded", "session")
"""The columns of the scalar table, in order."""

# tensorboardX replaces what it takes for unsafe characters; the run's tags have spaces.
_CANONICAL_TAGS = {
    "lm_loss": "lm loss",
    "lm_loss_validation": "lm loss validation",
    "lm_loss_validation_ppl": "lm loss validation ppl",
}
_MTP_LOSS = re.compile(r"mtp_(\d+)_loss")
_AGAINST_SAMPLES = re.compile(r"[ _]vs[ _]samples$")
_LOSS = "lm loss"
_LOSS_OVER_SAMPLES = re.compile(r"lm[ _]loss[ _]vs[ _]samples")
_TIME_IN_NAME = re.compile(r"tfevents\.(\d+)")


class EventFile(Columns):
    """The scalars of one file, as columns of equal length, and how whole the file was.

    `status` complete: every byte was read. truncated: the last record is cut off, as after a kill, or zeros follow.
    corrupt: a record is not what was written.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path
        self.status: Literal["complete", "truncated", "corrupt"] = "complete"
        self.damage_offset: int | None = None
        self.reason = ""
        self.bytes_total = 0

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


def read_event_file(path: Path) -> EventFile:
    """Read one event file up to its end or its first damage. Damage is part of the answer, not an error.

    Raises:
        DamagedData: The file cannot be opened or read at all.
    """
    file = EventFile(path)
    try:
        with open_regular(path, buffering=CHUNK) as stream:
            file.bytes_total = os.fstat(stream.fileno()).st_size
            for _ in read_on(stream, file.bytes_total, file):
                pass
    except RecordsEnd as stop:
        file.status, file.damage_offset, file.reason = stop.status, stop.offset, stop.reason
    except OSError as error:
        unless_away(error, path)
        raise DamagedData(f"cannot read the event file: {error.strerror or error}", subject=str(path)) from error
    return file


def sound_length(path: Path, below: Path) -> int:
    """Bytes of an event file up to the end of its last record before any that is cut off or damaged, read in a child.

    `below` is the run's folder, as for `files.open_regular`.

    Raises:
        DamagedData: It cannot be read.
    """
    return read_in_child(_sound_length, path, (below,), subject=str(path))[0]


def _sound_length(path: Path) -> tuple[int, bytes]:
    length = 0
    with reading(path), open_regular(path, buffering=CHUNK) as stream, contextlib.suppress(RecordsEnd):
        for offset in read_on(stream, os.fstat(stream.fileno()).st_size, Columns()):
            length = offset
    return length, b""


def read_on(stream: BinaryIO, total: int, columns: Columns, offset: int = 0) -> Iterator[int]:
    """Add all records between `offset` and `total` of a file, many at once where possible; yields the offsets reached.

    Raises:
        RecordsEnd: The walk ended at a record that is cut off or damaged.
    """
    while offset < total:
        stream.seek(offset)
        size = event_blocks.add_block(stream.read(min(event_blocks.BLOCK, total - offset)), columns)
        if not size:
            stream.seek(offset)
            record = next_record(stream, total, offset)
            columns.add(record)
            size = HEADER_SIZE + len(record) + FOOTER_SIZE
        offset += size
        yield offset


# --- many files ------------------------------------------------------------------------------------------------------


def find_event_files(folder: Path) -> tuple[Path, ...]:
    """All that is named as an event file under a folder, by name; links apart. A missing folder has none."""
    found = [
        parent / name
        for parent, _, names in walk(folder, lambda error: None)
        for name in names
        if _TIME_IN_NAME.search(name)
    ]
    return tuple(sorted(path for path in found if not path.is_symlink()))


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


def read_event_files(paths: Sequence[Path]) -> tuple[list[EventFile], list[str]]:
    """Read event files: those that can be read, in the order of writing, and one line per damaged file."""
    files: list[EventFile] = []
    damage: list[str] = []
    for path in paths:
        try:
            files.append(read_event_file(path))
        except DamagedData as error:
            damage.append(str(error))
    files.sort(key=lambda file: (file_time(file.path), file.wall_times[0] if len(file) else 0.0, file.path.name))
    return files, damage + [file.damage for file in files if file.damage]


class FoundScalars(Model):
    """A line for each damaged file, and how many values of each kind are no scalars."""

    damage: tuple[str, ...]
    skipped: dict[str, int]


def find_scalars(path: Path) -> tuple[FoundScalars, bytes]:
    """Read an event file, or all under a folder, in a child; also returns their `scalar_table` as `metrics_parquet`."""
    root = path if path.is_dir() else path.parent
    return read_in_child(_find_scalars, path, (root,), subject=str(path))


def _find_scalars(path: Path) -> tuple[FoundScalars, bytes]:
    files, damage = read_event_files((path,) if path.is_file() else find_event_files(path))
    skipped = sum((Counter(file.skipped) for file in files), Counter[str]())
    return FoundScalars(damage=tuple(damage), skipped=skipped), metrics_parquet(scalar_table(files))


def scalar_table(files: Sequence[EventFile]) -> "pd.DataFrame":
    """The scalars of files in the order of writing, as one table with `COLUMNS`.

    tag (canonical), step, wall_time (seconds since 1970), value (NaN and infinities kept), file (its name), superseded
    (True for what a restarted run has done again or thrown away: see `done_again` and `_sessions`), session (how many
    `SessionLog.START` stand before it).
    """
    import pandas as pd

    if not any(map(len, files)):
        return empty_table()
    # Numbers for tags and files as long as possible: a million strings take more room and time than all else.
    tags = list(dict.fromkeys(tag for file in files for name in file.names if (tag := canonical_tag(name)) is not None))
    # One file's columns are used as they lie there: no copy of them.
    columns = {
        "tag": _joined([_tag_numbers(file, tags) for file in files]),
        "step": _joined([np.frombuffer(file.steps, dtype=np.int64) for file in files]),
        "wall_time": _joined([np.frombuffer(file.wall_times, dtype=np.float64) for file in files]),
        "value": _joined([np.frombuffer(file.values, dtype=np.float64) for file in files]),
        "file": np.repeat(np.arange(len(files), dtype=np.int32), [len(file) for file in files]),
    }
    table = pd.DataFrame(columns, copy=False)
    table["superseded"], table["session"] = _sessions(files, table["step"].to_numpy())
    if (table["tag"] < 0).any():
        table = table[table["tag"] >= 0].reset_index(drop=True)
    table["superseded"] |= event_blocks.done_again(table["tag"].to_numpy(), table["step"].to_numpy())
    for column, words in (("tag", tags), ("file", [file.path.name for file in files])):
        table[column] = pd.Series(words, dtype="str").take(table[column].to_numpy()).array
    return table


def last_samples(files: Sequence[EventFile]) -> tuple[int, int] | None:
    """The last iteration whose loss was recorded over samples, too, and the samples up to it; None without one.

    A curve over samples has them where others have the iteration, so that no table of iterations can hold it.
    """
    for file in reversed(files):
        loss = [number for number, name in enumerate(file.names) if canonical_tag(name) == _LOSS]
        over = [number for number, name in enumerate(file.names) if _LOSS_OVER_SAMPLES.fullmatch(name)]
        tags = np.frombuffer(file.tag_numbers, dtype=np.int32)
        counts = np.isin(tags, over).nonzero()[0]
        losses = np.isin(tags[: counts[-1]], loss).nonzero()[0] if len(counts) else counts
        if len(losses):
            return file.steps[losses[-1]], file.steps[counts[-1]]
    return None


def _tag_numbers(file: EventFile, tags: Sequence[str]) -> "NDArray[np.int32]":
    """For each row of a file the number of its canonical tag in `tags`, -1 where it has none."""
    number_of = {tag: number for number, tag in enumerate(tags)}
    canonical = [-1 if (tag := canonical_tag(name)) is None else number_of[tag] for name in file.names]
    numbers: NDArray[np.int32] = np.array(canonical, dtype=np.int32)[np.frombuffer(file.tag_numbers, dtype=np.int32)]
    return numbers


def _joined(parts: "Sequence[NDArray[Any]]") -> "NDArray[Any]":
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def empty_table() -> "pd.DataFrame":
    """A scalar table without rows, with the right columns and types."""
    import pandas as pd

    types = ("str", "int64", "float64", "float64", "str", "bool", "int32")
    return pd.DataFrame({name: pd.Series([], dtype=kind) for name, kind in zip(COLUMNS, types, strict=True)})


def _sessions(files: Sequence[EventFile], steps: "NDArray[np.int64]") -> "tuple[NDArray[np.bool_], NDArray[np.int32]]":
    """Which rows a `SessionLog.START` voids, those before it, of any tag, at its step or later; and each row's session.

    So does TensorBoard's `EventAccumulator`, and so `purge_step` of PyTorch's `SummaryWriter` is meant.
    """
    begins = itertools.accumulate((len(file) for file in files), initial=0)
    starts = [(begin + rows, at) for begin, file in zip(begins, files, strict=False) for rows, at in file.starts]
    if not starts:
        return np.zeros(len(steps), dtype=bool), np.zeros(len(steps), dtype=np.int32)
    positions, least = (np.array(column, dtype=np.int64) for column in zip(*starts, strict=True))
    least = np.append(np.minimum.accumulate(least[::-1])[::-1], np.iinfo(np.int64).max)
    session = np.searchsorted(positions, np.arange(len(steps)), side="right")
    return steps >= least[session], session.astype(np.int32)


def metrics_parquet(table: "pd.DataFrame") -> bytes:
    """The content of `metrics.parquet`: the scalar table as one Parquet file. The same table, the same bytes.

    Numbers are packed (zstd), and texts are not: a run has named them, and they are searched for secrets before they
    are stored.
    """
    packing: Any = {name: "none" if name in ("tag", "file") else "zstd" for name in table.columns}
    buffer = io.BytesIO()
    table.to_parquet(buffer, engine="pyarrow", index=False, compression=packing)
    return buffer.getvalue()
