"""Many records of an event file at once: what `event_files` reads one by one, with whole columns in place of numbers.

Python only walks from one record to the next, has each one's checksum made, and looks up its tag; checksums are
compared and numbers taken out by numpy, for all records of a block together. The first record that is not whole or not
what was written ends a block: what is wrong with it is for the reader of single records to say.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import google_crc32c
import numpy as np

from nightbridge.outputs.event_decoder import FOOTER_SIZE, HEADER_SIZE, plain_scalar_tag, record_length

if TYPE_CHECKING:
    from numpy.typing import NDArray


BLOCK = 1 << 20
"""Bytes read at once. A record that is larger is read by itself."""

_SMALLEST_PLAIN = 20
_VALUE_SIZE = 4
_STEP_AT = 10
_STEP_BYTES = 4
"""Longest step of a plain record, as written; longer ones are for the reader of single records."""


class PlainScalars(NamedTuple):
    """Records of one block that all lie side by side and hold one v1 scalar each."""

    tags: "NDArray[np.int32]"
    steps: "NDArray[np.int64]"
    wall_times: "NDArray[np.float64]"
    values: "NDArray[np.float64]"


class Block(NamedTuple):
    """The records at the beginning of a block, up to the first that cannot be taken: pieces in their order.

    A piece is a run of plain scalars, or one record that has to be decoded in full.
    """

    size: int
    pieces: list[PlainScalars | bytes]


class BlockReader:
    """Reads the blocks of one file. State: the record lengths and the tags that have occurred.

    Args:
        number_of: Gives every tag a number.

    """

    def __init__(self, number_of: Callable[[str], int]) -> None:
        self._number_of = number_of
        # Few lengths occur in a file, and each has one right checksum.
        self._lengths: dict[bytes, int] = {}
        self._templates: dict[bytes, int] = {}

    def read(self, block: bytes) -> Block:
        """Read what is whole in a block that begins with a record."""
        starts, ends = self._whole_records(block)
        if not len(starts):
            return Block(0, [])
        content = np.frombuffer(block, dtype=np.uint8)
        plain, steps, after_step = _steps(content, starts, ends)
        numbers = np.full(len(starts), -1, dtype=np.int32)
        candidates = np.flatnonzero(plain)
        known = self._templates.get
        numbers[candidates] = [
            self._number(template) if (number := known(template := block[start:end])) is None else number
            for start, end in zip(
                after_step[candidates].tolist(), (ends[candidates] - _VALUE_SIZE).tolist(), strict=True
            )
        ]
        pieces: list[PlainScalars | bytes] = []
        done = 0
        for other in (*np.flatnonzero(numbers < 0).tolist(), len(starts)):
            if other > done:
                run = slice(done, other)
                times = _gather(content, starts[run] + 1, 8).view("<f8")
                values = _gather(content, ends[run] - _VALUE_SIZE, _VALUE_SIZE).view("<f4")
                pieces.append(PlainScalars(numbers[run], steps[run], times, values.astype(np.float64)))
            if other < len(starts):
                pieces.append(block[starts[other] : ends[other]])
            done = other + 1
        return Block(int(ends[-1]) + FOOTER_SIZE, pieces)

    def _whole_records(self, block: bytes) -> "tuple[NDArray[np.int64], NDArray[np.int64]]":
        """Where the records begin and end whose headers and checksums are right, up to the first other one."""
        lengths, checksum_of, size = self._lengths, google_crc32c.value, len(block)
        ends: list[int] = []
        checksums: list[int] = []
        position = 0
        while True:
            start = position + HEADER_SIZE
            header = block[position:start]
            length = lengths.get(header)
            if length is None:
                length = record_length(header)
                if length is None:
                    break
                lengths[header] = length
            end = start + length
            position = end + FOOTER_SIZE
            if position > size:
                break
            checksums.append(checksum_of(block[start:end]))
            ends.append(end)
        where, crc = np.array(ends, dtype=np.int64), np.array(checksums, dtype=np.uint32)
        masked = ((crc >> np.uint32(15)) | (crc << np.uint32(17))) + np.uint32(0xA282EAD8)
        written = _gather(np.frombuffer(block, dtype=np.uint8), where, FOOTER_SIZE).view("<u4")
        wrong = np.flatnonzero(masked != written)
        whole = int(wrong[0]) if len(wrong) else len(where)
        begins = np.concatenate(([0], where[:-1] + FOOTER_SIZE)) + HEADER_SIZE if whole else where
        return begins[:whole], where[:whole]

    def _number(self, template: bytes) -> int:
        """The number of the tag of a plain record that is new, -1 where its template is no plain scalar's."""
        tag = plain_scalar_tag(template)
        if tag is None:
            return -1
        self._templates[template] = self._number_of(tag)
        return self._templates[template]


def _gather(content: "NDArray[np.uint8]", where: "NDArray[np.int64]", size: int) -> "NDArray[np.uint8]":
    """`size` bytes at each place, one after the other."""
    gathered: NDArray[np.uint8] = content[where[:, None] + np.arange(size)].reshape(-1)
    return gathered


def _steps(
    content: "NDArray[np.uint8]", starts: "NDArray[np.int64]", ends: "NDArray[np.int64]"
) -> "tuple[NDArray[np.bool_], NDArray[np.int64], NDArray[np.int64]]":
    """Which records begin with wall time (key 0x09) and step (key 0x10); their steps, and where each step ends."""
    large = ends - starts >= _SMALLEST_PLAIN
    safe = np.where(large, starts, 0)  # the first record's header: there is always as much as is looked at
    plain = large & (content[safe] == 0x09) & (content[np.minimum(safe + 9, len(content) - 1)] == 0x10)
    steps, unfinished = np.zeros(len(starts), dtype=np.int64), np.ones(len(starts), dtype=bool)
    after = starts + _STEP_AT
    for number in range(_STEP_BYTES):
        byte = content[np.minimum(safe + _STEP_AT + number, len(content) - 1)].astype(np.int64)
        steps += np.where(unfinished, (byte & 0x7F) << (7 * number), 0)
        after += unfinished
        unfinished &= byte >= 0x80
    return plain & ~unfinished, steps, after
