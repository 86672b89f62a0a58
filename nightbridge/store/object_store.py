"""The one interface to a store of objects, and what all stores share: how one is opened, valid keys, models as JSON, a
check of writing. A new kind of store is one module and one row of `STORES`.

Keys are relative paths with `/`, the same for every store, and safe to use as file names.
"""

import pkgutil
import re
import uuid
from collections.abc import Iterator
from datetime import datetime
from typing import NamedTuple, Protocol, TypeVar
from urllib.parse import quote

import pydantic

from nightbridge.errors import DamagedData, InvalidInput, PermanentError
from nightbridge.models import Model, StoreSettings
from nightbridge.secrets import BlockValue
from nightbridge.store.checksum import FileSource

_M = TypeVar("_M", bound=Model)

KEY_LIMIT = 1000
"""Bytes of a key; S3 allows 1024, and the store's own prefix is part of that."""

_NO_PARTS, _CONTROL = frozenset({"", ".", ".."}), re.compile(r"[\x00-\x1f\x7f]")


class ObjectInfo(NamedTuple):
    """One object. `sha256` is the checksum recorded with it, None where the store does not record one.

    `part_size` says how it was computed, as in `StoredFile`.

    `etag` is what S3 calls the object's bytes: the MD5 of one sent at once, the MD5 of its parts' MD5s of one sent in
    parts, and something else where the bucket encrypts with keys of KMS. Empty where the store has no ETags.
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
        """Write an object unless it exists; return whether it is there with these bytes.

        Whether this call wrote them cannot be known for sure: the answer to it, or to the same call before, may have
        been lost. Writers that must not both win write what tells them apart.
        """

    def put_file(self, key: str, source: FileSource) -> ObjectInfo:
        """Create an object of a file; returns it with the checksum of what was sent.

        What an interrupted call has sent of the same bytes is not sent again. An object that is there stays: it is
        returned if it has these bytes.

        Raises:
            DamagedData: The file cannot be read to its end, or must not be sent; there is no new object then.
            TransientError: Also when there is an object of other bytes: another writer is at work.
        """

    def holds(self, key: str, source: FileSource) -> ObjectInfo | None:
        """Read a file and compare: the object, with the file's checksum, when it has just these bytes, else None.

        Raises:
            DamagedData: The file cannot be read to its end, or must not be sent.
        """

    def remove_leftovers(self, prefix: str, begun_before: datetime | None = None) -> None:
        """Remove the leftovers of interrupted uploads below a prefix: of those begun before a time, or of all.

        An upload in progress there restarts.
        """

    def get(self, key: str) -> bytes | None:
        """Read an object; None when there is none."""

    def read(self, key: str, start: int, length: int) -> Iterator[memoryview]:
        """The bytes of a range of an object, in order and in chunks; fewer where the object ends before.

        A chunk is valid until the next. Nothing is checked: the reader has the checksums of the parts. `length` is at
        least 1.

        Raises:
            PermanentError: There is no such object.
        """

    def stat(self, key: str, part_size: int = 0) -> ObjectInfo | None:
        """Size and checksum of an object; None when there is none.

        A store that computes checksums does so over parts of `part_size` bytes; one that records them returns its own.
        """

    def list(self, prefix: str, begin: str = "") -> Iterator[ObjectInfo]:
        """All objects under a prefix, in key order, with their times and without checksums: `stat` has them.

        A prefix is a folder: `a/b` lists `a/b/...`, not `a/bc`; the empty one lists everything. `begin` narrows that to
        the names in the folder that begin so: with `b`, `a` lists `a/b/...` and `a/bc`. No others are read.
        """

    def delete(self, key: str) -> None:
        """Delete an object; a missing one is no error."""

    def url_of(self, key: str) -> str:
        """The full URL of a key, as shown to users."""

    def link_of(self, key: str) -> str:
        """The address at which a browser opens an object; empty where there is none. No request is sent."""


# Imported when one is opened: boto3 takes half a second, and commands that need no S3 do not pay for it.
STORES = {
    "file": "nightbridge.store.directory:DirectoryStore",
    "s3": "nightbridge.store.s3:S3Store",
}
"""Scheme of the store's URL, and the class: called with the settings and with `block_value`."""


def open_store(settings: StoreSettings, block_value: BlockValue | None = None) -> ObjectStore:
    """Open the store that the settings describe. Nothing is read or written yet.

    Args:
        settings: Where it is and how it is reached.
        block_value: Returns the value of a Prefect `Secret` block by name; None where there is no Prefect.

    Raises:
        InvalidInput: No store has this kind of URL, or the settings cannot work (unknown profile, missing secret or
            certificate file).
        TransientError: What hands out the credentials fails now.
    """
    name = STORES.get(settings.url.partition("://")[0])
    if name is None:
        raise InvalidInput(
            "not a store URL", subject=settings.url, advice="Use file:///DIRECTORY or s3://BUCKET/PREFIX"
        )
    store: ObjectStore = pkgutil.resolve_name(name)(settings, block_value)
    return store


def checked_key(key: str) -> str:
    """Return `key` if every store can hold it.

    Raises:
        InvalidInput: It is empty, absolute, too long, not UTF-8, or has an empty, `.` or `..` part or a control
            character. A key from a manifest becomes a path on restore, so this also keeps a restore in its folder.
    """
    reason = _invalid_because(key)
    if reason:
        raise InvalidInput(f"not a usable object key: {reason}", subject=repr(key), advice="Rename the file")
    return key


def checked_folder(prefix: str) -> str:
    """Return a prefix as `a/b/`, or `""` for the whole store. Prefixes are folders: `a/b` is not part of `a/bc`."""
    return checked_key(prefix.rstrip("/")) + "/" if prefix.rstrip("/") else ""


def folder_of_series(root: str, cluster: str, series: str) -> str:
    """What belongs to a series, below a folder of the store. A cluster may be called anything: its name is quoted."""
    return f"{root}/{quote(cluster, safe='')}/{series}"


def _invalid_because(key: str) -> str:
    try:
        length = len(key.encode())
    except UnicodeEncodeError:
        return "not valid UTF-8"
    if length > KEY_LIMIT:
        return f"longer than {KEY_LIMIT} bytes"
    if not _NO_PARTS.isdisjoint(key.split("/")):
        return "empty, `.` or `..` part"
    if _CONTROL.search(key):
        return "control character"
    return ""


def read_stored(store: ObjectStore, key: str, kind: type[_M], *, what: str, advice: str) -> _M | None:
    """Read a model that was written as JSON; None where there is no such object.

    `what` happened where the object holds something else, such as `not a manifest`; `advice` is how to fix that.

    Raises:
        DamagedData: The object does not hold such a model.
    """
    data = store.get(key)
    try:
        return None if data is None else kind.model_validate_json(data)
    except pydantic.ValidationError as error:
        raise DamagedData(f"{what}: {error.errors()[0]['msg']}", subject=store.url_of(key), advice=advice) from error


def write_read_delete(store: ObjectStore) -> None:
    """Prove that a store takes objects, returns them, and honours `put_if_absent`.

    Raises:
        PermanentError: It does not return what was written, or lets two writers both create one object, which would
            let two harvesters both commit one run.
    """
    key, data = f".nightbridge-check-{uuid.uuid4().hex}", uuid.uuid4().bytes
    created = store.put_if_absent(key, data)
    try:
        created_again = store.put_if_absent(key, b"second")
        read = store.get(key)
    finally:
        store.delete(key)
    if created_again:
        raise PermanentError(
            "the store ignores `If-None-Match: *`, which exactly-once commits need",
            subject=store.url,
            advice="Use a server with conditional writes (AWS, Ceph in a bucket without versioning) or a file:// store",
        )
    if not created or read != data:
        raise PermanentError(
            "the store does not return the bytes that were written",
            subject=store.url_of(key),
            advice="Check the server",
        )
