"""The new lines of a growing log: read in bounded pieces, however large, rotated or cut the file is."""

import os
from pathlib import Path
from typing import BinaryIO

from nightbridge.outputs.logs import clean_line

MAX_BYTES = 256 << 10
"""Bytes read at one look, at the first one too: of a log of a gigabyte its end alone is read."""

_MAX_LINE_BYTES = 64 << 10


class LogTail:
    """One log file, read on from where the last look ended.

    A file that is missing has no lines yet. One that became shorter, or is another file under the same name, was
    rotated and is read from its beginning.

    Args:
        path: The log.
        most: Bytes of one look; what was written beyond them is left out, the older part first.

    """

    def __init__(self, path: Path, *, most: int = MAX_BYTES) -> None:
        self.path = path
        self.left_out = 0
        self._most = most
        self._file: tuple[int, int] | None = None
        self._offset = 0
        self._rest = b""
        self._in_cut_line = False

    def new_lines(self) -> list[str]:
        """The lines that were finished since the last look, without colour codes; carriage returns end lines too.

        Raises:
            OSError: The file is there and cannot be read.

        """
        try:
            with self.path.open("rb", buffering=0) as stream:
                data = self._new_bytes(stream)
        except FileNotFoundError:
            return []
        lines = (self._rest + data).replace(b"\r", b"\n").split(b"\n")
        self._rest = lines.pop()
        if self._in_cut_line and lines:
            # Its beginning was left out, and a secret may have been cut in two there.
            del lines[0]
            self._in_cut_line = False
        if len(self._rest) > _MAX_LINE_BYTES:
            self._rest, self._in_cut_line = b"", True
        return [clean_line(line) for line in lines]

    def last_line(self) -> list[str]:
        """The line at the end that was never finished, once the writer has ended; none when there is no such line."""
        rest, self._rest = self._rest, b""
        return [clean_line(rest)] if rest and not self._in_cut_line else []

    def _new_bytes(self, stream: BinaryIO) -> bytes:
        size = self._size_of(stream)
        if size - self._offset > self._most:
            self.left_out += size - self._most - self._offset
            self._offset, self._rest, self._in_cut_line = size - self._most, b"", True
        stream.seek(self._offset)
        data = stream.read(self._most) or b""
        self._offset += len(data)
        return data

    def _size_of(self, stream: BinaryIO) -> int:
        """The file's size; the position goes back to its beginning when it is another file, or a shorter one."""
        found = os.fstat(stream.fileno())
        if (found.st_dev, found.st_ino) != self._file or found.st_size < self._offset:
            self._offset, self._rest, self._in_cut_line = 0, b"", False
        self._file = (found.st_dev, found.st_ino)
        return found.st_size
