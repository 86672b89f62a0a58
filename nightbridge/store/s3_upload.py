"""Files into a bucket: small ones with one request, large ones in parts, many of both at once in bounded memory.

Every file is read once, and the SHA-256 of each part is made once, while it is read. It signs the part's request, so
that every server which checks signatures checks it; it is the checksum that S3 keeps with the part; and the checksum of
the whole is made of it (`checksum`). A part lies in memory from its reading to its answer, so that it can be sent again
without being read again; all parts together stay below `MEMORY`. An interrupted upload stays in the bucket and is
resumed: a part that is there is known by the SHA-256 that the server keeps, or by its MD5, which S3 calls its ETag,
where the server keeps none. Only where there is neither (keys of KMS on such a server) are parts sent again.
"""

import base64
import hashlib
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from urllib.parse import parse_qsl

from botocore import exceptions as aws

from nightbridge.errors import DamagedData, NightbridgeError, TransientError
from nightbridge.store.checksum import FileSource
from nightbridge.store.s3_errors import error_code, http_status, s3_errors

PART_SIZE = 8 << 20
"""Bytes of a part, and of the largest file sent with one request."""

MAX_PARTS = 10_000
"""S3's limit; a file with more parts of `PART_SIZE` gets larger ones."""

REQUESTS = 8
"""Parts sent at once."""

MEMORY = 12 * PART_SIZE
"""Bytes of all parts in memory at any time. One part of a file larger than `MAX_PARTS` of these fits as well."""

TRIES = 3
"""How often an upload restarts because another process aborted it."""

_ALGORITHM = "SHA256"
_EMPTY_MD5 = hashlib.md5(usedforsecurity=False).hexdigest()

SHA256_METADATA = "sha256"
"""User metadata (`x-amz-meta-sha256`) with the checksum of an object that was sent with one request.

That of a file sent in parts is not known when its upload is created; the server makes it of the parts' or does not.
"""

# What servers answer that cannot list uploads, or users that may not: then nothing is resumed, and all else works.
# NoSuchUpload is what rclone answers about a bucket without any.
_CANNOT_LIST = frozenset({"AccessDenied", "MethodNotAllowed", "NotImplemented", "NoSuchUpload", "403", "405", "501"})


class _UploadGone(Exception):
    """The upload is not there any more: another process has completed or aborted it."""


@dataclass(frozen=True)
class _Place:
    """Where a file goes. `thing` names it in errors."""

    bucket: str
    key: str
    thing: str

    @property
    def request(self) -> dict[str, str]:
        return {"Bucket": self.bucket, "Key": self.key}


@dataclass(frozen=True)
class _Upload:
    """An upload in progress. `checksums`: None where it was resumed and the server's support of SHA-256 is unknown."""

    id: str
    checksums: bool | None


@dataclass(frozen=True)
class _Part:
    """A part at the server; `sha256` (base64) where the server keeps it."""

    size: int
    etag: str
    sha256: str | None = None


class Uploader:
    """Sends files with one boto3 client. Safe for many threads, which share the memory and the requests.

    Args:
        client: The boto3 client.
        options: Further arguments of each request that makes an object, such as its encryption.

    """

    def __init__(self, client: Any, options: Mapping[str, str] | None = None) -> None:
        self._client = client
        self._options = dict(options or {})
        self._buffers = _Buffers(MEMORY)
        self._senders = ThreadPoolExecutor(REQUESTS, thread_name_prefix="nightbridge-s3")
        self._files = _Count()

    def send(self, bucket: str, key: str, thing: str, source: FileSource) -> str:
        """Send an opened source; returns the object's ETag.

        Raises:
            DamagedData: The file cannot be read to its end, or must not be sent; nothing of it is left.
            TransientError: Also when another process ended the upload again and again.

        """
        place = _Place(bucket, key, thing)
        if source.size <= PART_SIZE:
            return self._send_whole(place, source)
        for _ in range(TRIES):
            try:
                return self._send_parts(place, source)
            except _UploadGone:
                found = self._head(place)
                if found is not None and has_bytes_of(found, source):
                    return plain_etag(found)
        raise TransientError(
            "another process aborts every upload of it", thing=thing, advice="Run one harvest at a time"
        )

    def abort_all(self, bucket: str, folder: str, thing: str, begun_before: datetime | None = None) -> None:
        """Abort the unfinished uploads below a folder: those begun before a time, or all."""
        with s3_errors(thing):
            for upload in self._unfinished(bucket, folder):
                if begun_before is None or upload["Initiated"] < begun_before:
                    self._abort(_Place(bucket, upload["Key"], thing), upload["UploadId"])

    def _send_whole(self, place: _Place, source: FileSource) -> str:
        with self._buffers.lend(source.size) as body:
            source.read_into(body)
            with s3_errors(place.thing):
                answer = self._client.put_object(
                    **place.request,
                    Body=body,
                    ChecksumSHA256=_base64(bytes.fromhex(source.sha256)),
                    Metadata={SHA256_METADATA: source.sha256},
                    **self._options,
                )
        return plain_etag(answer)

    def _send_parts(self, place: _Place, source: FileSource) -> str:
        source.rewind(part_size(source.size))
        upload, there = self._resume_or_create(place)
        sent: dict[int, Future[_Part]] = {}
        try:
            with self._files.one_more():
                parts = self._read_and_send(place, upload, source, there, sent)
        except DamagedData:
            wait_for(sent.values())
            self._abort(place, upload.id)
            raise
        finally:
            # Their memory must be free, and none may still be under way, whatever happened.
            wait_for(sent.values())
        return self._complete(place, upload, source, parts)

    def _read_and_send(
        self,
        place: _Place,
        upload: _Upload,
        source: FileSource,
        there: dict[int, _Part],
        sent: dict[int, Future[_Part]],
    ) -> dict[int, _Part]:
        size, read, number, failed = part_size(source.size), 0, 0, False
        kept: dict[int, _Part] = {}
        under_way: set[Future[_Part]] = set()
        while read < source.size:
            number += 1
            # Every file under way gets its share. Of many, each has its parts arrive in order, one after the other: a
            # server that writes a file as it comes (rclone) need not keep any back.
            while len(under_way) >= max(1, REQUESTS // self._files.value):
                done, under_way = wait_for(under_way, return_when=FIRST_COMPLETED)
                failed = failed or any(part.exception() for part in done)
            if failed:
                break
            buffer = self._buffers.take(size)
            try:
                filled = source.read_into(buffer)
                read += filled
                sha256 = _base64(source.digest.all_parts()[-1])
                if number in there and _is_part(there[number], buffer, filled, sha256):
                    kept[number] = there[number]
                    self._buffers.give(buffer)
                    continue
            except BaseException:
                self._buffers.give(buffer)
                raise
            sent[number] = self._senders.submit(self._send_part, place, upload, number, buffer, filled, sha256)
            under_way.add(sent[number])
        return kept | {number: part.result() for number, part in sent.items()}

    def _send_part(
        self, place: _Place, upload: _Upload, number: int, buffer: bytearray, filled: int, sha256: str
    ) -> _Part:
        try:
            body = buffer if filled == len(buffer) else buffer[:filled]
            # Amazon refuses a checksum with a part of an upload that was created without one.
            known = {} if upload.checksums is None else {"ChecksumSHA256": sha256}
            with s3_errors(place.thing), _gone_uploads():
                answer = self._client.upload_part(
                    **place.request, UploadId=upload.id, PartNumber=number, Body=body, **known
                )
            return _Part(filled, plain_etag(answer), sha256)
        finally:
            self._buffers.give(buffer)

    def _complete(self, place: _Place, upload: _Upload, source: FileSource, parts: dict[int, _Part]) -> str:
        listed = [{"PartNumber": number, "ETag": f'"{parts[number].etag}"'} for number in sorted(parts)]
        if upload.checksums:
            digests = map(_base64, source.digest.all_parts())
            listed = [{**part, "ChecksumSHA256": sha256} for part, sha256 in zip(listed, digests, strict=True)]
        expected = _etag_of_parts([parts[number].etag for number in sorted(parts)])
        try:
            with s3_errors(place.thing), _gone_uploads():
                answer = self._client.complete_multipart_upload(
                    **place.request, UploadId=upload.id, MultipartUpload={"Parts": listed}
                )
        except _UploadGone:
            # The response to our first try may have been lost and boto3 have retried: then the object is there.
            answer = self._head(place)
            if answer is None or answer["ContentLength"] != source.size:
                raise
            if recorded_checksum(answer) != (source.sha256, source.digest.part_size) and plain_etag(answer) != expected:
                raise
        if "Tagging" in self._options:
            # Ceph and others do not give an object the tags that its upload was created with.
            tags = [{"Key": name, "Value": value} for name, value in parse_qsl(self._options["Tagging"])]
            with s3_errors(place.thing):
                self._client.put_object_tagging(**place.request, Tagging={"TagSet": tags})
        # Ceph's answer has no ETag.
        return plain_etag(answer) or expected or plain_etag(self._head(place) or {})

    def _resume_or_create(self, place: _Place) -> tuple[_Upload, dict[int, _Part]]:
        """The upload to resume, and the parts it has. Of several, the latest is taken."""
        with s3_errors(place.thing):
            found = [each for each in self._unfinished(place.bucket, place.key) if each["Key"] == place.key]
            for unfinished in sorted(found, key=lambda each: each["Initiated"], reverse=True):
                try:
                    with _gone_uploads():
                        there = self._parts_of(place, unfinished["UploadId"])
                except _UploadGone:
                    continue
                keeps = unfinished.get("ChecksumAlgorithm") == _ALGORITHM or any(part.sha256 for part in there.values())
                return _Upload(unfinished["UploadId"], keeps or None), there
            created = self._client.create_multipart_upload(
                **place.request, ChecksumAlgorithm=_ALGORITHM, **self._options
            )
            return _Upload(created["UploadId"], created.get("ChecksumAlgorithm") == _ALGORITHM), {}

    def _unfinished(self, bucket: str, prefix: str) -> list[dict[str, Any]]:
        pages = self._client.get_paginator("list_multipart_uploads").paginate(Bucket=bucket, Prefix=prefix)
        try:
            return [upload for page in pages for upload in page.get("Uploads", ())]
        except aws.ClientError as error:
            if error_code(error) in _CANNOT_LIST or str(http_status(error)) in _CANNOT_LIST:
                return []
            raise

    def _parts_of(self, place: _Place, upload: str) -> dict[int, _Part]:
        pages = self._client.get_paginator("list_parts").paginate(**place.request, UploadId=upload)
        return {
            part["PartNumber"]: _Part(part["Size"], plain_etag(part), part.get("ChecksumSHA256"))
            for page in pages
            for part in page.get("Parts", ())
        }

    def _head(self, place: _Place) -> dict[str, Any] | None:
        try:
            with s3_errors(place.thing):
                found: dict[str, Any] = self._client.head_object(**place.request, ChecksumMode="ENABLED")
        except NightbridgeError as error:
            if isinstance(error.__cause__, aws.ClientError) and http_status(error.__cause__) == 404:
                return None
            raise
        return found

    def _abort(self, place: _Place, upload: str) -> None:
        try:
            with _gone_uploads():
                self._client.abort_multipart_upload(**place.request, UploadId=upload)
        except _UploadGone:
            return


class _Count:
    """How many threads are in a block."""

    def __init__(self) -> None:
        self.value = 0
        self._lock = threading.Lock()

    @contextmanager
    def one_more(self) -> Iterator[None]:
        with self._lock:
            self.value += 1
        try:
            yield
        finally:
            with self._lock:
                self.value -= 1


class _Buffers:
    """Memory for parts. Buffers of the usual size are used again: fresh memory costs more than the copy into it."""

    def __init__(self, limit: int) -> None:
        self._limit, self._lent = limit, 0
        self._free: list[bytearray] = []
        self._returned = threading.Condition()

    def take(self, size: int) -> bytearray:
        """A buffer of just that size; waits until the limit allows it. One is always allowed."""
        with self._returned:
            self._returned.wait_for(lambda: not self._lent or self._lent + size <= self._limit)
            self._lent += size
            if size == PART_SIZE and self._free:
                return self._free.pop()
        return bytearray(size)

    def give(self, buffer: bytearray) -> None:
        """Give a buffer back."""
        with self._returned:
            self._lent -= len(buffer)
            if len(buffer) == PART_SIZE:
                self._free.append(buffer)
            self._returned.notify_all()

    @contextmanager
    def lend(self, size: int) -> Iterator[bytearray]:
        buffer = self.take(size)
        try:
            yield buffer
        finally:
            self.give(buffer)


def part_size(size: int) -> int:
    """Bytes of each part but the last of a file of `size` bytes: a whole number of MiB."""
    smallest = -(-size // MAX_PARTS)
    return max(PART_SIZE, -(-smallest >> 20) << 20)


def has_bytes_of(answer: Mapping[str, Any], source: FileSource) -> bool:
    """Read a source to its end and compare it with an object: with its SHA-256, or its ETag where none is recorded.

    Args:
        answer: What the server answered to HEAD with `ChecksumMode`.
        source: An opened source; its checksum is made as the object's is, or as an upload makes it.

    """
    if answer["ContentLength"] != source.size:
        return False
    sha256, made_of = recorded_checksum(answer)
    usual = part_size(source.size) if source.size > PART_SIZE else 0
    source.rewind(usual if sha256 is None else made_of)
    buffer = bytearray(min(usual or PART_SIZE, source.size))
    etags = []
    while filled := source.read_into(buffer):
        if sha256 is None:
            etags.append(_md5(buffer, filled))
    if sha256 is not None:
        return source.sha256 == sha256
    return plain_etag(answer) == (_etag_of_parts(etags) if usual else "".join(etags) or _EMPTY_MD5)


def recorded_checksum(answer: Mapping[str, Any]) -> tuple[str | None, int]:
    """The SHA-256 that is recorded with an object (lower-case hex), and the bytes of the parts that it is made of.

    Args:
        answer: What the server answered to HEAD with `ChecksumMode`.

    """
    if SHA256_METADATA in answer["Metadata"]:
        return answer["Metadata"][SHA256_METADATA], 0
    digest, _, parts = str(answer.get("ChecksumSHA256", "")).partition("-")
    size = part_size(answer["ContentLength"])
    if not digest or (parts and parts != str(-(-answer["ContentLength"] // size))):
        return None, 0  # not recorded, or sent in parts of another size by another writer
    return base64.b64decode(digest).hex(), size if parts else 0


def plain_etag(answer: Mapping[str, Any]) -> str:
    """The ETag of an answer without its quotes."""
    return str(answer.get("ETag", "")).strip('"')


def _etag_of_parts(etags: list[str]) -> str | None:
    try:
        digests = b"".join(bytes.fromhex(etag) for etag in etags)
    except ValueError:
        return None  # no MD5s, so the whole object's ETag is unknown
    return f"{hashlib.md5(digests, usedforsecurity=False).hexdigest()}-{len(etags)}"


def _md5(buffer: bytearray, filled: int) -> str:
    return hashlib.md5(memoryview(buffer)[:filled], usedforsecurity=False).hexdigest()


def _base64(digest: bytes) -> str:
    return base64.b64encode(digest).decode()


def _is_part(there: _Part, buffer: bytearray, filled: int, sha256: str) -> bool:
    if there.size != filled:
        return False
    return there.sha256 == sha256 if there.sha256 else there.etag == _md5(buffer, filled)


@contextmanager
def _gone_uploads() -> Iterator[None]:
    try:
        yield
    except aws.ClientError as error:
        if error_code(error) == "NoSuchUpload":
            raise _UploadGone from error
        raise
