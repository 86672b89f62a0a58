"""Many records of an event file at once: what `event_files` reads one by one, with whole columns in place of numbers.

All is done by numpy for the records of a block together: where they begin, their checksums, their tags and their
numbers. Almost every record differs from one before it in three numbers only. A CRC is linear: what is left of a
record's checksum when the shares of these numbers are taken out of it is the checksum of its other bytes. That says
which earlier record of the block it is to be compared with, byte by byte; where the two agree, its checksum is right if
that one's is. Any other record has its checksum made by itself. The first one that is not whole or not what was written
ends a block: what is wrong with it is for the reader of single records to say.

Columns, too, are what says which rows count: a run may have gone back in its steps and done them again.
"""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from nightbridge.outputs.event_decoder import (
    FOOTER_SIZE,
    HEADER_SIZE,
    Columns,
    masked_crc,
    plain_scalar_tag,
    record_length,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray


BLOCK = 1 << 20
"""Bytes read at once. A record that is larger is read by itself."""

_SHORTEST, _LONGEST = 20, 256
"""Bytes of the records that are read together."""
_TIME_KEY, _TIME_AT, _STEP_KEY, _STEP_AT, _VALUE_SIZE = 0x09, 1, 0x10, 10, 4
"""How a plain record begins: key and wall time, key and step; and the bytes of the float at its end."""
_STEP_BYTES = 4
"""Longest step of a plain record, as written; longer ones are for the reader of single records."""


class _Records(NamedTuple):
    """Records of one block, each with a right header, side by side."""

    starts: "NDArray[np.int64]"
    ends: "NDArray[np.int64]"
    plain: "NDArray[np.bool_]"
    """Whether it begins with wall time (key 0x09) and step (key 0x10); the other columns mean nothing else."""
    steps: "NDArray[np.int64]"
    wall_times: "NDArray[np.float64]"
    values: "NDArray[np.float64]"
    templates: "NDArray[np.int64]"
    """Where the bytes between step and value begin: those that a record has in common with others of its tag."""
    rests: "NDArray[np.uint32]"
    """The CRC-32C that its footer gives to the record with zeros in place of its three numbers."""


def add_block(block: bytes, columns: Columns) -> int:
    """Add the records at the beginning of a block, up to the first that cannot be taken; returns their bytes."""
    starts, ends = _walk(block)
    if not len(starts):
        return 0
    records = _columns(block, starts, ends)
    tags = _tags(block, records, columns.number_of)
    done = 0
    for other in (*np.flatnonzero(tags < 0).tolist(), len(tags)):
        run = slice(done, other)
        rows = (tags, records.steps, records.wall_times, records.values)
        columns.add_rows(*(column[run].tobytes() for column in rows))
        if other < len(tags):
            columns.add(block[starts[other] : ends[other]])
        done = other + 1
    return int(ends[len(tags) - 1]) + FOOTER_SIZE if len(tags) else 0


def _tags(block: bytes, records: _Records, number_of: Callable[[str], int]) -> "NDArray[np.int32]":
    """The number of each record's tag, -1 where it has to be decoded in full; up to the first wrong checksum."""
    _, first, kinds = np.unique(records.rests, return_index=True, return_inverse=True)
    examples = first[kinds]  # of each record the first one with its rest
    sizes = records.ends - _VALUE_SIZE - records.templates
    lengths = records.ends - records.starts
    agree = records.plain & records.plain[examples] & (examples < np.arange(len(examples)))
    agree &= (sizes == sizes[examples]) & (lengths == lengths[examples])
    for size in np.unique(sizes[agree]).tolist():
        some = np.flatnonzero(agree & (sizes == size))
        one, other = (_at(block, f"S{size}", records.templates[which]) for which in (some, examples[some]))
        agree[some] = one == other
    tags = np.empty(len(examples), dtype=np.int32)
    right = len(examples)
    for number in np.flatnonzero(~agree).tolist():
        tag = _tag(block, records, number, number_of)
        if tag is None:
            right = number
            break
        tags[number] = tag
    tags[agree] = tags[examples[agree]]
    return tags[:right]


def _tag(block: bytes, records: _Records, number: int, number_of: Callable[[str], int]) -> int | None:
    """The number of one record's tag, by itself; None where its checksum is wrong."""
    start, end = int(records.starts[number]), int(records.ends[number])
    if masked_crc(block[start:end]) != int.from_bytes(block[end : end + FOOTER_SIZE], "little"):
        return None
    name = plain_scalar_tag(block[records.templates[number] : end - _VALUE_SIZE]) if records.plain[number] else None
    return -1 if name is None else number_of(name)


# --- where records are ------------------------------------------------------------------------------------------------

_HEADER_CRCS = np.array([masked_crc(length.to_bytes(8, "little")) for length in range(_LONGEST + 1)], dtype=np.uint32)
"""What a header has behind the length of a record."""


def _at(block: bytes, kind: str, where: "NDArray[np.int64]") -> "NDArray[Any]":
    """What of a kind, such as `<u4`, lies at each place of a block."""
    size = np.dtype(kind).itemsize
    return np.ndarray((len(block) - size + 1,), kind, block, strides=(1,))[where]


def _walk(block: bytes) -> "tuple[NDArray[np.int64], NDArray[np.int64]]":
    """Where the records begin and end that lie side by side from the beginning on, by their headers alone."""
    runs = _runs(block)
    starts, ends = [], []
    position, run = 0, next(runs, None)
    while True:
        while run is not None and run[0][0] < position:
            run = next(runs, None)  # what only looks like a header, within a record
        if run is not None and run[0][0] == position:
            headers, following = run
            starts.append(headers + HEADER_SIZE)
            ends.append(following - FOOTER_SIZE)
            position = int(following[-1])
            continue
        length = record_length(block[position : position + HEADER_SIZE])
        end = position + HEADER_SIZE + (length or 0)
        if length is None or end + FOOTER_SIZE > len(block):
            break
        starts.append(np.array([position + HEADER_SIZE]))
        ends.append(np.array([end]))
        position = end + FOOTER_SIZE
    nothing = np.empty(0, dtype=np.int64)
    return (np.concatenate(starts), np.concatenate(ends)) if starts else (nothing, nothing)


def _runs(block: bytes) -> "Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]":
    """Runs of right headers of short records, each header where the record before ends: where they are and lead."""
    content = np.frombuffer(block, dtype=np.uint8)
    last = len(content) - HEADER_SIZE - _SHORTEST - FOOTER_SIZE + 1
    if last <= 0:
        return
    # Most of what is no header has no such zeros, or no wall time behind them.
    like = (content[1 : last + 1] == 0) & (content[7 : last + 7] == 0)
    like &= content[HEADER_SIZE : last + HEADER_SIZE] == _TIME_KEY
    headers = np.flatnonzero(like)
    lengths = _at(block, "<u8", headers)
    short = np.minimum(lengths, _LONGEST).astype(np.int64)
    right = (lengths == short) & (short >= _SHORTEST) & (_at(block, "<u4", headers + 8) == _HEADER_CRCS[short])
    following = headers + HEADER_SIZE + short + FOOTER_SIZE
    right &= following <= len(block)
    headers, following = headers[right], following[right]
    border = 0
    for end in (*(np.flatnonzero(headers[1:] != following[:-1]) + 1).tolist(), len(headers)):
        if end > border:
            yield headers[border:end], following[border:end]
        border = end


# --- what is in them --------------------------------------------------------------------------------------------------


def _shares() -> "NDArray[np.uint32]":
    """What a byte adds to the CRC-32C of a record, by how many bytes come behind it, and then by its value."""
    polynomial = np.uint32(0x82F63B78)
    added = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        added = (added >> np.uint32(1)) ^ np.where(added & np.uint32(1), polynomial, np.uint32(0))
    of_distance = [added]
    for _ in range(_LONGEST):
        before = of_distance[-1]
        of_distance.append(added[before & np.uint32(0xFF)] ^ (before >> np.uint32(8)))
    return np.concatenate(of_distance)


_SHARES = _shares()


def _columns(block: bytes, starts: "NDArray[np.int64]", ends: "NDArray[np.int64]") -> _Records:
    lengths = ends - starts
    plain = (lengths >= _SHORTEST) & (lengths <= _LONGEST)
    # Of all others the first header is looked at: there is always as much.
    safe, last = np.where(plain, starts, 0), np.where(plain, ends - _VALUE_SIZE, 0)
    step = _at(block, "<u4", safe + _STEP_AT)
    ending = ~step & np.uint32(0x80808080)
    ending &= np.uint32(0) - ending  # the lowest: the highest bit of the step's last byte
    mask = (ending << np.uint32(1)) - np.uint32(1)
    plain &= (
        (ending != 0) & (_at(block, "u1", safe) == _TIME_KEY) & (_at(block, "u1", safe + _STEP_AT - 1) == _STEP_KEY)
    )
    step &= mask
    steps = np.zeros(len(starts), dtype=np.int64)
    for number in range(_STEP_BYTES):
        steps |= ((step >> np.uint32(8 * number)) & np.uint32(0x7F)).astype(np.int64) << (7 * number)
    times, values = _at(block, "<f8", safe + _TIME_AT), _at(block, "<f4", last)
    rests = _at(block, "<u4", ends) - np.uint32(0xA282EAD8)
    rests = (rests >> np.uint32(17)) | (rests << np.uint32(15))
    behind = np.where(plain, lengths, _LONGEST) - 1
    for column, offset in ((times, _TIME_AT), (step, _STEP_AT)):
        for number, byte in enumerate(column.view(np.uint8).reshape(len(starts), -1).T):
            rests ^= _SHARES.take(((behind - offset - number) << 8) + byte)
    for number, byte in enumerate(values.view(np.uint8).reshape(len(starts), -1).T):
        rests ^= _SHARES[(_VALUE_SIZE - 1 - number) << 8 :].take(byte)
    templates = starts + _STEP_AT + (np.bitwise_count(mask) >> 3)
    with np.errstate(invalid="ignore"):  # a signalling NaN
        return _Records(starts, ends, plain, steps, times, values.astype(np.float64), templates, rests)


# --- which rows count -------------------------------------------------------------------------------------------------


def done_again(tags: "NDArray[np.int32]", steps: "NDArray[np.int64]") -> "NDArray[np.bool_]":
    """Which rows, in the order of writing, a later row of their tag has done again: its step is no larger.

    A run that resumes from a checkpoint writes into another file, or goes back in its steps. What the life before it
    had after the checkpoint is no part of the run, even where the later life did not come as far. Steps below 1 are
    no iterations: of these only equal ones are done again.
    """
    again = np.zeros(len(steps), dtype=bool)
    # Stable: the rows of each tag stay in their order. Of 16 bits numpy sorts by counting.
    order = np.argsort(tags.astype(np.int16) if tags.max(initial=0) < 1 << 15 else tags, kind="stable")
    tags, steps = tags[order], steps[order]
    same_tag = tags[1:] == tags[:-1]
    back = np.flatnonzero(same_tag & (steps[1:] <= steps[:-1]))
    borders = np.concatenate(([0], np.flatnonzero(~same_tag) + 1, [len(tags)]))
    # A tag whose steps only grow, as almost every one's do, has nothing done again.
    for segment in np.unique(np.searchsorted(borders, back, side="right")).tolist():
        rows = slice(borders[segment - 1], borders[segment])
        again[order[rows]] = _again_of_one_tag(steps[rows])
    return again


def _again_of_one_tag(steps: "NDArray[np.int64]") -> "NDArray[np.bool_]":
    again = np.zeros(len(steps), dtype=bool)
    iterations, others = np.flatnonzero(steps > 0), np.flatnonzero(steps <= 0)
    later = np.minimum.accumulate(steps[iterations][::-1])[::-1]
    again[iterations[:-1]] = steps[iterations[:-1]] >= later[1:]
    if len(others):
        again[others] = True
        again[others[len(others) - 1 - np.unique(steps[others][::-1], return_index=True)[1]]] = False
    return again
