"""The one checksum of every file, and a file to send: read once, its checksum computed from the bytes that are sent.

It is the file's SHA-256. A file that S3 gets in parts has what S3 calls a composite checksum: the SHA-256 of its parts'
SHA-256s, in their order. So one pass over the bytes gives what the server checks with each part and what the manifest
records, and a reader needs nothing but the size of the parts to check it:
https://docs.aws.amazon.com/AmazonS3/latest/userguide/checking-object-integrity-upload.html
"""

import base64
import hashlib
import io
import os
import zlib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple, cast

from nightbridge.errors import DamagedData
from nightbridge.files import open_regular, unless_away
from nightbridge.masking import SecretFinder, holds_packed

PART_SIZE = 8 << 20
"""Bytes of a part, and of the largest file without parts."""

MAX_PARTS = 10_000
"""S3's limit; a file with more parts of `PART_SIZE` gets larger ones."""


def part_size(size: int) -> int:
    """Bytes of each part but the last of a file of `size` bytes, a whole number of MiB; 0: it has none."""
    smallest = -(-size // MAX_PARTS)
    return 0 if size <= PART_SIZE else max(PART_SIZE, -(-smallest >> 20) << 20)


def sha256_hex(data: bytes) -> str:
    """SHA-256 of `data` as lower-case hex, the form every checksum here has."""
    return hashlib.sha256(data).hexdigest()


class FileDigest:
    """Takes a file front to back in pieces of any size.

    `part_size` is the bytes of each part but the last; 0: the plain SHA-256 of the whole file.
    """

    def __init__(self, part_size: int = 0) -> None:
        self.part_size = part_size
        self._whole_parts: list[bytes] = []
        self._current, self._in_current = hashlib.sha256(), 0

    def update(self, piece: bytes | bytearray | memoryview) -> None:
        """Take what comes next."""
        view = memoryview(piece)
        while self.part_size and len(view) >= self.part_size - self._in_current:
            border = self.part_size - self._in_current
            self._current.update(view[:border])
            self._whole_parts.append(self._current.digest())
            self._current, self._in_current, view = hashlib.sha256(), 0, view[border:]
        self._current.update(view)
        self._in_current += len(view)

    def all_parts(self) -> list[bytes]:
        """The SHA-256 of every part, 32 bytes each, of a last one that is shorter than the others too."""
        return [*self._whole_parts, self._current.digest()] if self._in_current else self._whole_parts

    def base64(self) -> str:
        """Those SHA-256s, one after the other, as text."""
        return base64.b64encode(b"".join(self.all_parts())).decode()

    def hexdigest(self) -> str:
        """The checksum of what has been taken, lower-case hex."""
        return sha256_hex(b"".join(self.all_parts())) if self.part_size else self._current.hexdigest()


class CrcCheck:
    """Checks the CRC-32 of ranges of a file while its bytes pass, front to back in pieces of any size.

    Args:
        extents: Offset, length and CRC-32 of each range, one after the other in one flat sequence: a shard of a
            checkpoint has a hundred thousand. Ranges are in the order of the file and do not overlap.
    """

    def __init__(self, extents: Sequence[int]) -> None:
        self._extents = extents
        self._next = self._position = self._crc = 0

    def update(self, piece: bytes | bytearray | memoryview) -> None:
        """Take what comes next.

        Raises:
            DamagedData: A range that ends in this piece has another CRC-32 than it should have.
        """
        begin, view = self._position, memoryview(piece)
        self._position += len(view)
        while self._next < len(self._extents):
            offset, length, crc32 = self._extents[self._next : self._next + 3]
            if offset >= self._position and length:
                return
            self._crc = zlib.crc32(view[max(offset - begin, 0) : max(offset + length - begin, 0)], self._crc)
            if offset + length > self._position:
                return
            if self._crc != crc32:
                raise DamagedData(f"bytes {offset} to {offset + length} do not have the CRC-32 recorded for them")
            self._next, self._crc = self._next + 3, 0


def check_crcs(path: Path, extents: Sequence[int]) -> None:
    """Read a file and check the CRC-32 of its ranges, given as for `CrcCheck`.

    Raises:
        DamagedData: One has another; the message names the file.
        OSError: It cannot be read.
    """
    check = CrcCheck(extents)
    with open_regular(path, buffering=0) as stream:
        while piece := stream.read(1 << 20):
            try:
                check.update(piece)
            except DamagedData as error:
                raise DamagedData(f"{path.name}: {error.what}", subject=str(path)) from None


def sha256_of_file(path: Path, part_size: int = 0) -> str:
    """The checksum of a file on disk, lower-case hex.

    Raises:
        OSError: It cannot be read.
    """
    digest = FileDigest(part_size)
    with open_regular(path, buffering=0) as stream:
        # No larger than the file: many small ones are read at once.
        buffer = bytearray(min(1 << 20, max(os.fstat(stream.fileno()).st_size, 4096)))
        while size := cast("io.FileIO", stream).readinto(buffer):
            digest.update(memoryview(buffer)[:size])
    return digest.hexdigest()


def _signed(value: int) -> int:
    return (value + (1 << 63)) % (1 << 64) - (1 << 63)


class Stamp(NamedTuple):
    """Identifies the file that was chosen: size in bytes, modification time, inode, each a number of 64 bits."""

    size: int
    mtime_ns: int
    inode: int

    @classmethod
    def of(cls, status: os.stat_result) -> "Stamp":
        """The stamp of a file's status. File systems have times and inodes of 64 bits with and without a sign."""
        return cls(status.st_size, _signed(status.st_mtime_ns), _signed(status.st_ino))


class FileSource:
    """A file opened for sending. Use it in a `with` block; `sha256` is known once all of it has been read.

    Args:
        path: The file.
        stamp: What the file was when it was chosen; what it is at opening where that does not matter.
        secrets: Values that must not be in it.
        below: The run's folder that it lies in, as for `files.open_regular`.
        extents: Ranges of it with the CRC-32 that each must have, as for `CrcCheck`.

    Raises:
        DamagedData: From opening or any read: the file is gone, cannot be read, is not the one that was chosen, changed
            while it was read, holds a secret, or a range of it has another CRC-32. What was sent by then must not
            become an object.
        TransientError: From opening or any read: it cannot be read now, as its file system is away.
    """

    def __init__(
        self,
        path: Path,
        stamp: Stamp | None = None,
        secrets: Iterable[str] = (),
        below: Path | None = None,
        extents: Sequence[int] = (),
    ) -> None:
        self.path = path
        self._below = below
        self._extents = extents
        self._stamp = stamp
        self._secrets = tuple(secrets)
        self.on_read: Callable[[int], None] = lambda position: None
        """Called with the number of bytes read since the beginning, by the thread that reads."""

    def __enter__(self) -> "FileSource":
        try:
            self._opened = open_regular(self.path, below=self._below, buffering=0)
            self._stream = cast("io.FileIO", self._opened.__enter__())
        except OSError as error:
            raise self._unreadable(error) from error
        self._stamp = self._stamp or Stamp.of(os.fstat(self._stream.fileno()))
        try:
            self._check_unchanged()
            self._refuse_if(holds_packed(self._stream, self.size, self._secrets))
        except BaseException as error:
            self.__exit__()
            if isinstance(error, OSError):
                raise self._unreadable(error) from error
            raise
        self._begin(part_size(self.size))
        return self

    def __exit__(self, *_: object) -> None:
        self._opened.__exit__(None, None, None)

    @property
    def size(self) -> int:
        """Bytes of the file."""
        assert self._stamp is not None
        return self._stamp.size

    @property
    def sha256(self) -> str:
        """The checksum, lower-case hex, of what has been read since the beginning: all of it."""
        assert self._read == self.size, "read before the end"
        return self.digest.hexdigest()

    def rewind(self, part_size: int = 0) -> None:
        """Restart, as an interrupted upload does whose parts are gone.

        `part_size` is that of `FileDigest`: how the checksum is computed.
        """
        self._stream.seek(0)
        self._begin(part_size)

    def _begin(self, part_size: int) -> None:
        self.digest = FileDigest(part_size)
        self._finder = SecretFinder(self._secrets)
        self._crcs = CrcCheck(self._extents)
        self._read = 0

    def read_into(self, buffer: bytearray) -> int:
        """Fill `buffer` with what comes next; returns fewer bytes than it holds only at the end, 0 after it."""
        view, filled = memoryview(buffer), 0
        wanted = min(len(buffer), self.size - self._read)
        while filled < wanted:
            try:
                count = self._stream.readinto(view[filled:wanted])
            except OSError as error:
                raise self._unreadable(error) from error
            if not count:
                raise self._changed()
            filled += count
        self.digest.update(view[:filled])
        self._finder.feed(buffer, filled)
        self._refuse_if(self._finder.found)
        self._crcs.update(view[:filled])
        self._read += filled
        self.on_read(self._read)
        if filled and self._read == self.size:
            self._check_unchanged()
        return filled

    def _refuse_if(self, found: bool) -> None:
        if found:
            raise DamagedData("contains a secret; binary files are never altered", subject=str(self.path))

    def _check_unchanged(self) -> None:
        if Stamp.of(os.fstat(self._stream.fileno())) != self._stamp:
            raise self._changed()

    def _changed(self) -> DamagedData:
        return DamagedData("modified while it was read", subject=str(self.path), advice="Harvest it again")

    def _unreadable(self, error: OSError) -> DamagedData:
        unless_away(error, self.path)
        advice = "It was deleted, or its permissions changed"
        return DamagedData(f"cannot be read: {error.strerror}", subject=str(self.path), advice=advice)
