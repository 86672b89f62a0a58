"""A store in memory: what a new kind of store takes. One module, this one, and one row of `STORES`."""

from collections import defaultdict
from collections.abc import Callable, Iterator
from datetime import UTC, datetime

from nightbridge.errors import PermanentError, TransientError
from nightbridge.models import StoreSettings
from nightbridge.store.checksum import FileDigest, FileSource, sha256_hex
from nightbridge.store.object_store import ObjectInfo, checked_folder, checked_key, write_read_delete

_objects: dict[str, dict[str, tuple[bytes, datetime]]] = defaultdict(dict)
"""By the store's URL: another store that is opened with it has the same objects, as on a server."""


class MemoryStore:
    """Objects of this process."""

    def __init__(self, settings: StoreSettings, block_value: Callable[[str], str] | None = None) -> None:
        del block_value
        self.url = settings.url.rstrip("/")
        self._objects = _objects[self.url]

    def check_writable(self) -> None:
        write_read_delete(self)

    def put(self, key: str, data: bytes) -> None:
        self._objects[checked_key(key)] = (data, datetime.now(UTC))

    def put_if_absent(self, key: str, data: bytes) -> bool:
        return self._objects.setdefault(checked_key(key), (data, datetime.now(UTC)))[0] == data

    def put_file(self, key: str, source: FileSource) -> ObjectInfo:
        with source:
            data = bytearray(source.size)
            source.read_into(data)
            kept, _ = self._objects.setdefault(checked_key(key), (bytes(data), datetime.now(UTC)))
            if kept != data:
                raise TransientError("another writer has stored other bytes there", subject=self.url_of(key))
            return ObjectInfo(key=key, size=source.size, sha256=source.sha256, part_size=source.digest.part_size)

    def holds(self, key: str, source: FileSource) -> ObjectInfo | None:
        with source:
            found = self.stat(key, source.digest.part_size)
            source.read_into(bytearray(source.size))
            return found if found and found.sha256 == source.sha256 else None

    def remove_leftovers(self, prefix: str, begun_before: datetime | None = None) -> None:
        """Nothing is ever half written."""

    def get(self, key: str) -> bytes | None:
        found = self._objects.get(checked_key(key))
        return found and found[0]

    def read(self, key: str, start: int, length: int) -> Iterator[memoryview]:
        data = self.get(key)
        if data is None:
            raise PermanentError("no such object", subject=self.url_of(key))
        yield memoryview(data)[start : start + length]

    def stat(self, key: str, part_size: int = 0) -> ObjectInfo | None:
        data = self.get(key)
        if data is None:
            return None
        digest = FileDigest(part_size)
        digest.update(data)
        return ObjectInfo(key=key, size=len(data), sha256=digest.hexdigest(), part_size=part_size)

    def list(self, prefix: str, begin: str = "") -> Iterator[ObjectInfo]:
        for key, (data, modified) in sorted(self._objects.items()):
            if key.startswith(checked_folder(prefix) + begin):
                yield ObjectInfo(key=key, size=len(data), modified=modified)

    def delete(self, key: str) -> None:
        self._objects.pop(checked_key(key), None)

    def url_of(self, key: str) -> str:
        return f"{self.url}/{key}"

    def link_of(self, key: str) -> str:
        return f"https://memory.example.org/{sha256_hex(key.encode())}"
