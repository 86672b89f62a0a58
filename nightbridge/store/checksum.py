"""The one checksum of every file: its SHA-256, made in parts where the file is sent in parts.

A file that S3 gets in parts has what S3 calls a composite checksum: the SHA-256 of its parts' SHA-256s, in their order.
So one pass over the bytes gives what the server checks with each part and what the manifest records, and a reader needs
nothing but the size of the parts to check it:
https://docs.aws.amazon.com/AmazonS3/latest/userguide/checking-object-integrity-upload.html
"""

import hashlib
from pathlib import Path


class FileDigest:
    """Takes a file front to back in pieces of any size.

    Args:
        part_size: Bytes of each part but the last; 0: the plain SHA-256 of the whole file.

    """

    def __init__(self, part_size: int = 0) -> None:
        self.part_size = part_size
        self.parts: list[bytes] = []
        """The SHA-256 of each part that is whole, 32 bytes each."""
        self._current = hashlib.sha256()
        self._in_current = 0

    def update(self, piece: bytes | bytearray | memoryview) -> None:
        """Take what comes next."""
        view = memoryview(piece)
        while self.part_size and len(view) >= self.part_size - self._in_current:
            border = self.part_size - self._in_current
            self._current.update(view[:border])
            self.parts.append(self._current.digest())
            self._current, self._in_current, view = hashlib.sha256(), 0, view[border:]
        self._current.update(view)
        self._in_current += len(view)

    def all_parts(self) -> list[bytes]:
        """The SHA-256 of every part, of a last one that is shorter than the others too."""
        return [*self.parts, self._current.digest()] if self._in_current else self.parts

    def hexdigest(self) -> str:
        """The checksum of what has been taken, lower-case hex."""
        if not self.part_size:
            return self._current.hexdigest()
        return hashlib.sha256(b"".join(self.all_parts())).hexdigest()


def sha256_of_file(path: Path, part_size: int = 0) -> str:
    """The checksum of a file on disk, lower-case hex.

    Raises:
        OSError: It cannot be read.

    """
    with path.open("rb") as stream:
        if not part_size:
            return hashlib.file_digest(stream, "sha256").hexdigest()
        digest = FileDigest(part_size)
        while piece := stream.read(1 << 20):
            digest.update(piece)
        return digest.hexdigest()
