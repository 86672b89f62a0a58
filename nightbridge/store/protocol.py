"""The one interface to a store of objects. Implementations: `s3` (boto3) and `directory`."""

from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Protocol

from nightbridge.models import Model
from nightbridge.store.checksum import FileSource


class ObjectInfo(Model):
    """One object. `sha256` is the checksum recorded with it, None where the store does not say.

    `part_size` says how it was computed, as in `StoredFile`.

    `etag` is what S3 calls the object's bytes: the MD5 of one sent at once, the MD5 of its parts' MD5s of one sent in
    parts, and something else where the bucket encrypts with keys of KMS. Empty where the store has no such thing.
    `modified` is when it was written; only listings report it.
    """

    key: str
    size: int
    sha256: str | None = None
    part_size: int = 0
    etag: str = ""
    modified: datetime | None = None


class ObjectStore(Protocol):
    """Keys are relative to the store's URL, with `/`. Writes are atomic: an object is whole or absent.

    Every method raises `TransientError` for what may pass (network, 5xx, throttling, expired credentials) and
    `PermanentError` for what will not (no such bucket, access denied), naming the store and what to check.
    """

    url: str

    def check_writable(self) -> None:
        """Write, read back and delete a small object; raises when that is not possible."""

    def put(self, key: str, data: bytes) -> None:
        """Write an object, replacing it."""

    def put_if_absent(self, key: str, data: bytes) -> bool:
        """Write an object unless it exists; return whether this call wrote it."""

    def put_file(self, key: str, source: FileSource) -> ObjectInfo:
        """Send a file; returns the object with the checksum of what was sent.

        What an interrupted call has sent of the same bytes is not sent again.

        Raises:
            DamagedData: The file cannot be read to its end, or must not be sent; there is no new object then.

        """

    def holds(self, key: str, source: FileSource) -> ObjectInfo | None:
        """Read a file and compare: the object, with the file's checksum, when it has just these bytes, else None.

        Raises:
            DamagedData: The file cannot be read to its end, or must not be sent.

        """

    def remove_leftovers(self, prefix: str, begun_before: datetime | None = None) -> None:
        """Remove what interrupted uploads have left below a prefix: of those begun before a time, or of all.

        An upload in progress there restarts.
        """

    def get(self, key: str) -> bytes | None:
        """Read an object; None when there is none."""

    def get_file(self, key: str, path: Path) -> None:
        """Download an object to `path` (parents are made), atomically, checking the recorded checksum.

        Raises:
            PermanentError: There is no such object, or `path` cannot be written.
            DamagedData: The bytes do not make the recorded checksum.

        """

    def stat(self, key: str, part_size: int = 0) -> ObjectInfo | None:
        """Size and checksum of an object; None when there is none.

        A store that computes checksums makes it of parts of `part_size` bytes; one that records them says what it has.
        """

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """All objects under a prefix, in key order, with their times and without checksums: `stat` has them.

        A prefix is a folder: `a/b` lists `a/b/...`, not `a/bc`; the empty one lists everything.
        """

    def delete(self, key: str) -> None:
        """Delete an object; a missing one is no error."""

    def url_of(self, key: str) -> str:
        """The full URL of a key, as shown to users."""

    def link_of(self, key: str) -> str:
        """The address at which a browser opens an object; empty where there is none. No request is sent."""
