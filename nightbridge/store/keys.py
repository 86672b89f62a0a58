"""Keys of objects: relative paths with `/`, the same for every store, safe to use as file names."""

import hashlib
import uuid
from typing import TYPE_CHECKING

from nightbridge.errors import InvalidInput, PermanentError

if TYPE_CHECKING:
    from nightbridge.store.protocol import ObjectStore

KEY_LIMIT = 1000
"""Bytes of a whole key; S3 allows 1024, and the store's own prefix is part of that."""


def checked_key(key: str) -> str:
    """Return `key` if every store can hold it.

    Raises:
        InvalidInput: It is empty, absolute, too long, not UTF-8, or has an empty, `.` or `..` part or a control
            character. A key from a manifest becomes a path on restore, so this also keeps a restore in its folder.

    """
    reason = _unusable(key)
    if reason:
        raise InvalidInput(f"not a usable object key: {reason}", thing=repr(key), advice="Rename the file")
    return key


def checked_folder(prefix: str) -> str:
    """Return a prefix as `a/b/`, or `""` for the whole store. Prefixes are folders: `a/b` is not part of `a/bc`."""
    return checked_key(prefix.rstrip("/")) + "/" if prefix.rstrip("/") else ""


def write_read_delete(store: "ObjectStore") -> None:
    """Prove that a store takes objects, gives them back, and honours `put_if_absent`.

    Raises:
        PermanentError: It does not give back what was written, or lets two writers both create one object, which
            would let two harvesters both commit one run.

    """
    key, data = f".nightbridge-check-{uuid.uuid4().hex}", uuid.uuid4().bytes
    where = store.url_of(key)
    created = store.put_if_absent(key, data)
    try:
        created_again = store.put_if_absent(key, b"second")
        read = store.get(key)
    finally:
        store.delete(key)
    if created_again:
        raise PermanentError(
            "the store ignores `If-None-Match: *`, which exactly-once commits need",
            thing=store.url,
            advice="Use a server with conditional writes (AWS, Ceph) or a file:// store",
        )
    if not created or read != data:
        raise PermanentError(
            "the store does not return the bytes that were written", thing=where, advice="Check the server"
        )


def sha256_hex(data: bytes) -> str:
    """SHA-256 of `data` as lower-case hex, the form every checksum here has."""
    return hashlib.sha256(data).hexdigest()


def _unusable(key: str) -> str:
    try:
        length = len(key.encode())
    except UnicodeEncodeError:
        return "not valid UTF-8"
    if length > KEY_LIMIT:
        return f"longer than {KEY_LIMIT} bytes"
    if any(part in ("", ".", "..") for part in key.split("/")):
        return "empty, `.` or `..` part"
    if any(ord(character) < 0x20 or character == "\x7f" for character in key):
        return "control character"
    return ""
