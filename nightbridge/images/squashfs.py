"""Squashfs files: whether one is whole, and its checksum."""

import hashlib
import os
import shutil
import struct
from pathlib import Path

from nightbridge.errors import DamagedData
from nightbridge.processes import run

MAGIC = b"hsqs"
# The superblock of squashfs 4 is 96 bytes; the file system's length is a 64-bit number at offset 40 (kernel
# documentation, filesystems/squashfs). mksquashfs writes the superblock last, so a killed one leaves none.
_SUPERBLOCK_BYTES = 96
_LENGTH_OFFSET = 40
_UNSQUASHFS_TIMEOUT_SECONDS = 120.0
_BLOCK_BYTES = 4 * 1024 * 1024


def check_squashfs(path: Path) -> None:
    """Raise unless a file is a whole squashfs file system.

    Raises:
        DamagedData: It is empty, no squashfs, shorter than its own superblock says, or unsquashfs refuses it.

    """
    with path.open("rb") as stream:
        superblock = stream.read(_SUPERBLOCK_BYTES)
    size = path.stat().st_size
    if not size:
        raise DamagedData("the image is empty", thing=str(path))
    if len(superblock) < _SUPERBLOCK_BYTES or not superblock.startswith(MAGIC):
        raise DamagedData("not a complete squashfs image", thing=str(path))
    (length,) = struct.unpack_from("<Q", superblock, _LENGTH_OFFSET)
    if size < length:
        raise DamagedData(f"the image is truncated: {size} of {length} bytes", thing=str(path))
    program = shutil.which("unsquashfs")
    if program:
        finished = run([program, "-s", path], environment=os.environ, timeout=_UNSQUASHFS_TIMEOUT_SECONDS)
        if finished.code:
            raise DamagedData(f"unsquashfs cannot read the image: {finished.tail}", thing=str(path))


def sha256_of(path: Path) -> str:
    """The hex SHA-256 of a file, read in blocks."""
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as stream:
        while block := stream.read(_BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()
