"""A store in a directory: local disk or a shared file system. One file per object, its key the path below the root."""

import contextlib
import errno
import os
import re
import time
import uuid
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from urllib.parse import quote

from nightbridge.errors import InvalidInput, PermanentError, TransientError
from nightbridge.files import create_exclusively, flush_folder, write_atomically
from nightbridge.models import StoreSettings
from nightbridge.secrets import BlockValue
from nightbridge.store.checksum import FileSource, sha256_of_file
from nightbridge.store.object_store import ObjectInfo, checked_folder, checked_key, write_read_delete

CHUNK = 1 << 20

INCOMING = ".incoming"
"""Folder of the root where uploads are written until they are complete; never listed."""

LEFTOVER_AGE = 6 * 3600.0
"""Seconds without a write after which a file in `INCOMING` belongs to a process that died."""

_TEMPORARY = re.compile(r"^\..+\.[0-9a-f]{32}\.tmp$")  # what nightbridge.files makes beside its target

_NOT_FOUND = (FileNotFoundError, NotADirectoryError, IsADirectoryError)

_FILE_IN_THE_PATH = ("a part of the path is a file, not a directory", "Remove that file, or choose another directory")

_PERMANENT_ERRORS: dict[int, tuple[str, str]] = {
    errno.EACCES: ("permission denied", "Give this user write access, or choose another store"),
    errno.EPERM: ("operation not permitted", "The file system must allow hard links and renames by this user"),
    errno.EOPNOTSUPP: ("the file system has no hard links", "Choose a directory on another file system"),
    errno.EROFS: ("read-only file system", "Mount it writable, or choose another store"),
    errno.ENOSPC: ("no space left on the device", "Free space, or choose another store"),
    errno.EDQUOT: ("disk quota exceeded", "Free space or raise the quota, or choose another store"),
    errno.EFBIG: ("file too large for the file system", "Choose another store"),
    errno.ENOTDIR: _FILE_IN_THE_PATH,
    errno.EEXIST: _FILE_IN_THE_PATH,
    errno.EISDIR: ("is a directory instead of an object", "Remove it, or choose another directory"),
    errno.ENAMETOOLONG: ("name too long for the file system", "Use shorter names"),
    errno.EXDEV: ("crosses a file system boundary", "Keep the whole store on one file system"),
}


class DirectoryStore:
    """Objects as files below a root directory, which the first write creates.

    `stat` computes the checksum from the bytes on disk, at the price of reading the file; `list` gives sizes only.
    Nothing but the objects is kept: no sidecar can disagree. Safe for many threads, processes and hosts at once on a
    file system with atomic rename and hard links.
    """

    def __init__(self, settings: StoreSettings, block_value: BlockValue | None = None) -> None:
        del block_value  # it has no secrets
        path = settings.url.removeprefix("file://")
        if not path.startswith("/"):
            raise InvalidInput("not an absolute path", subject=settings.url, advice="Use file:///DIRECTORY")
        self.root = Path(path)
        self.url = f"file://{self.root}"

    def check_writable(self) -> None:
        """Write, read back and delete a small object; remove the leftovers of killed uploads."""
        write_read_delete(self)
        self.remove_leftovers("")

    def put(self, key: str, data: bytes) -> None:
        """Write an object, replacing it."""
        path = self._path(key)
        with _store_errors(path):
            write_atomically(path, data)

    def put_if_absent(self, key: str, data: bytes) -> bool:
        """Write an object unless it exists; return whether it is there with these bytes."""
        path = self._path(key)
        with _store_errors(path):
            return create_exclusively(path, data) or self.get(key) == data

    def put_file(self, key: str, source: FileSource) -> ObjectInfo:
        """Copy a file in, flushed to disk and read back before it gets its name.

        Raises:
            DamagedData: The file cannot be read to its end, or must not be sent.
            PermanentError: The disk does not take it, or does not return it.
        """
        target = self._path(key)
        with source, _store_errors(target):
            incoming = self.root / INCOMING / uuid.uuid4().hex
            incoming.parent.mkdir(parents=True, exist_ok=True)
            try:
                with incoming.open("xb") as copy:
                    for chunk in _chunks(source):
                        copy.write(chunk)
                    copy.flush()
                    os.fsync(copy.fileno())
                if sha256_of_file(incoming, source.digest.part_size) != source.sha256:
                    what = "the disk does not return the bytes that were written"
                    raise PermanentError(what, subject=str(target), advice="Check the disk")
                target.parent.mkdir(parents=True, exist_ok=True)
                try:
                    os.link(incoming, target)
                except FileExistsError as error:
                    if not target.is_file() or sha256_of_file(target, source.digest.part_size) != source.sha256:
                        what, advice = "another writer has stored other bytes there", "Harvest the run again"
                        raise TransientError(what, subject=str(target), advice=advice) from error
                flush_folder(target.parent)
            finally:
                incoming.unlink(missing_ok=True)
        return ObjectInfo(key=key, size=source.size, sha256=source.sha256, part_size=source.digest.part_size)

    def holds(self, key: str, source: FileSource) -> ObjectInfo | None:
        """Compare a file with the bytes of an object."""
        with source:
            found = self.stat(key, source.digest.part_size)
            if found is None or found.size != source.size:
                return None
            for _ in _chunks(source):
                pass
            return found if found.sha256 == source.sha256 else None

    def remove_leftovers(self, prefix: str, begun_before: datetime | None = None) -> None:
        """Remove the leftovers of killed uploads, by age only: `INCOMING` is one for the whole store."""
        del prefix, begun_before
        oldest = time.time() - LEFTOVER_AGE
        with contextlib.suppress(OSError):  # another process may be removing them too
            for path in (self.root / INCOMING).iterdir():
                if path.stat().st_mtime < oldest:
                    path.unlink()

    def get(self, key: str) -> bytes | None:
        """Read an object; None when there is none."""
        path = self._path(key)
        with _store_errors(path):
            try:
                return path.read_bytes()
            except _NOT_FOUND:
                return None

    def read(self, key: str, start: int, length: int) -> Iterator[memoryview]:
        """The bytes of a range of an object, in order."""
        path, buffer = self._path(key), bytearray(min(CHUNK, length))
        with _store_errors(path):
            try:
                stream = path.open("rb", buffering=0)
            except _NOT_FOUND as error:
                raise PermanentError("no such object", subject=self.url_of(key)) from error
            with stream:
                stream.seek(start)
                while length and (count := stream.readinto(memoryview(buffer)[:length])):
                    length -= count
                    yield memoryview(buffer)[:count]

    def stat(self, key: str, part_size: int = 0) -> ObjectInfo | None:
        """Size and computed checksum of an object; None when there is none."""
        path = self._path(key)
        with _store_errors(path):
            if path.is_dir():
                return None
            try:
                size, sha256 = path.stat().st_size, sha256_of_file(path, part_size)
            except _NOT_FOUND:
                return None
        return ObjectInfo(key=key, size=size, sha256=sha256, part_size=part_size)

    def list(self, prefix: str, begin: str = "") -> Iterator[ObjectInfo]:
        """All objects under a prefix whose next name begins so, in key order, without checksums."""
        folder = checked_folder(prefix)
        with _store_errors(self.root / folder):
            yield from _objects_in(self.root / folder, folder, begin)

    def delete(self, key: str) -> None:
        """Delete an object; a missing one is no error.

        Empty folders stay: removing one could take it from under a writer.
        """
        path = self._path(key)
        with _store_errors(path), contextlib.suppress(*_NOT_FOUND):
            path.unlink()

    def url_of(self, key: str) -> str:
        """The full URL of a key, as shown to users."""
        return f"{self.url}/{key}"

    def link_of(self, key: str) -> str:
        """The `file://` URL of an object."""
        return f"{self.url}/{quote(key)}"

    def _path(self, key: str) -> Path:
        return self.root / checked_key(key)


def _objects_in(folder: Path, prefix: str, begin: str = "") -> Iterator[ObjectInfo]:
    # A directory sorts as its name with a slash: that makes the order of a walk the order of whole keys.
    try:
        with os.scandir(folder) as found:
            chosen = (entry for entry in found if entry.name.startswith(begin))
            entries = {entry.name + "/" * entry.is_dir(follow_symlinks=False): entry for entry in chosen}
    except _NOT_FOUND:
        return
    for name, entry in sorted(entries.items()):
        if prefix + name == f"{INCOMING}/" or _TEMPORARY.match(name):  # a run may have a folder of that name, too
            continue
        if name.endswith("/"):
            yield from _objects_in(folder / entry.name, prefix + name)
        elif entry.is_file():
            with contextlib.suppress(FileNotFoundError):  # deleted while we were listing
                status = entry.stat()
                modified = datetime.fromtimestamp(status.st_mtime, UTC)
                yield ObjectInfo(key=prefix + name, size=status.st_size, modified=modified)


def _chunks(source: FileSource) -> Iterator[memoryview]:
    buffer = bytearray(min(CHUNK, source.size))
    while count := source.read_into(buffer):
        yield memoryview(buffer)[:count]


@contextlib.contextmanager
def _store_errors(subject: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if known := _PERMANENT_ERRORS.get(error.errno or 0):
            what, advice = known
            raise PermanentError(what, subject=str(error.filename or subject), advice=advice) from error
        raise TransientError(f"the file system failed: {error.strerror or error}", subject=str(subject)) from error
