"""Secrets in files: masked in the copy of a text file that leaves the machine, looked for in binary files.

Works on bytes in chunks, so a log of many gigabytes, one without a line break, and one that is not UTF-8 are all fine.
A value counts also where it crosses the border of two chunks or of two lines.
"""

import contextlib
import hashlib
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from nightbridge.errors import PermanentError
from nightbridge.models import Model
from nightbridge.secrets import MASK, mask_secrets

CHUNK = 1 << 20

SHORTEST_IN_BINARY = 8
"""Bytes of the shortest value looked for in binary files: shorter ones occur in gigabytes of weights by chance."""


class Digest(Model):
    """What was read or written: bytes, their checksum, and how many secret values were found in the source."""

    size: int
    sha256: str
    secrets: int


def copy_masked(source: Path, target: Path, secrets: Iterable[str]) -> Digest:
    """Copy a text file with every secret value replaced by `MASK`; returns the copy's digest.

    The longest value at a place wins, and values that `nightbridge.secrets.mask_secrets` leaves are left here too.

    Raises:
        OSError: The source cannot be read.
        PermanentError: The target cannot be written.

    """
    values = _values(secrets)
    pattern = re.compile(b"|".join(re.escape(value) for value in values)) if values else None
    longest = max((len(value) for value in values), default=1)
    digest, size, found, waiting = hashlib.sha256(), 0, 0, b""
    with source.open("rb") as reader, _Target(target) as writer:
        while True:
            chunk = reader.read(CHUNK)
            waiting += chunk
            # Up to here a match is whole, however long: what begins later waits for the next chunk.
            border = len(waiting) - longest + 1 if chunk else len(waiting)
            output, done, count = _mask_until(waiting, max(border, 0), pattern)
            waiting = waiting[done:]
            found += count
            digest.update(output)
            size += len(output)
            writer.write(output)
            if not chunk:
                return Digest(size=size, sha256=digest.hexdigest(), secrets=found)


class SecretFinder:
    """Looks for secret values in a binary file that is fed to it in pieces; `found` counts the values seen so far."""

    def __init__(self, secrets: Iterable[str]) -> None:
        self._values = [value for value in _values(secrets) if len(value) >= SHORTEST_IN_BINARY]
        self._overlap = max((len(value) for value in self._values), default=1) - 1
        self._tail = b""
        self._seen = set[bytes]()

    @property
    def found(self) -> int:
        """How many of the values have been seen."""
        return len(self._seen)

    def feed(self, piece: bytearray, size: int) -> None:
        """Look at the first `size` bytes of the next piece, and at values that begin in the pieces before."""
        if not self._values:
            return
        border = self._tail + piece[: min(self._overlap, size)]
        self._seen |= {value for value in self._values if piece.find(value, 0, size) >= 0 or value in border}
        self._tail = (self._tail + piece[max(size - self._overlap, 0) : size])[-self._overlap :]


class _Target:
    """A file being written whose errors are ours, so that they are not taken for those of the file being read."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> "_Target":
        with self._errors():
            self._stream = self._path.open("wb")
        return self

    def __exit__(self, *_: object) -> None:
        with self._errors():
            self._stream.close()

    def write(self, data: bytes) -> None:
        with self._errors():
            self._stream.write(data)

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise PermanentError(
                f"cannot be written: {error.strerror}", thing=str(self._path), advice="Free space, or make it writable"
            ) from error


def _values(secrets: Iterable[str]) -> list[bytes]:
    # mask_secrets decides which values are long enough to be masked at all.
    maskable = {value for value in secrets if mask_secrets(value, (value,)) != value}
    # An environment variable that is not UTF-8 comes with surrogates; this gives its bytes back.
    return sorted((value.encode("utf-8", "surrogateescape") for value in maskable), key=len, reverse=True)


def _mask_until(data: bytes, border: int, pattern: re.Pattern[bytes] | None) -> tuple[bytes, int, int]:
    """Mask every match that begins before `border`; return the output, how far it goes in `data`, and the count."""
    pieces, done, count = [], 0, 0
    for match in pattern.finditer(data) if pattern else ():
        if match.start() >= border:
            break
        pieces += [data[done : match.start()], MASK.encode()]
        done = match.end()
        count += 1
    end = max(done, border)
    pieces.append(data[done:end])
    return b"".join(pieces), end, count
