"""Files into a bucket: small ones with one request, large ones in parts, many of both at once in bounded memory.

Every file is read once. A part lies in memory from its reading to its answer, so that it can be sent again without
being read again; all parts together stay below `MEMORY`. An interrupted upload stays in the bucket and goes on: a part
that is there is known by its MD5, which S3 calls its ETag, and is not sent again. (Where ETags are something else, as
with keys of KMS, parts are sent again.) The server checks each request against the SHA-256 that signs it.
"""

import hashlib
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from typing import Any

from botocore import exceptions as aws

from nightbridge.errors import DamagedData, TransientError
from nightbridge.store.s3_errors import error_code, http_status, s3_errors
from nightbridge.store.source import FileSource

PART_SIZE = 8 << 20
"""Bytes of a part, and of the largest file sent with one request."""

MOST_PARTS = 10_000
"""S3's limit; a file with more parts of `PART_SIZE` gets larger ones."""

REQUESTS = 8
"""Parts sent at once."""

MEMORY = 12 * PART_SIZE
"""Bytes of all parts in memory at any time. One part of a file larger than `MOST_PARTS` of these fits as well."""

TRIES = 3
"""How often an upload begins again because another process has ended it."""

SHA256_METADATA = "sha256"
"""User metadata (`x-amz-meta-sha256`) with the checksum of an object that was sent with one request.

That of a file sent in parts is not known when its upload is created; its ETag tells its bytes.
"""

# What servers answer that cannot list uploads, or users that may not: then nothing is resumed, and all else works.
_CANNOT_LIST = frozenset({"AccessDenied", "MethodNotAllowed", "NotImplemented", "403", "405", "501"})


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
class _Part:
    size: int
    etag: str


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
                source.rewind()
                etag = self._etag_of(place)
                if etag is not None and etag == etag_of(source):
                    return etag
                source.rewind()
        raise TransientError("another process ends every upload of it", thing=thing, advice="Harvest it only once")

    def abort_all(self, bucket: str, folder: str, thing: str) -> None:
        """Abort every unfinished upload below a folder."""
        with s3_errors(thing):
            for upload in self._unfinished(bucket, folder):
                self._abort(_Place(bucket, upload["Key"], thing), upload["UploadId"])

    def _send_whole(self, place: _Place, source: FileSource) -> str:
        with self._buffers.lend(source.size) as body:
            source.read_into(body)
            with s3_errors(place.thing):
                answer = self._client.put_object(
                    **place.request, Body=body, Metadata={SHA256_METADATA: source.sha256}, **self._options
                )
        return plain_etag(answer)

    def _send_parts(self, place: _Place, source: FileSource) -> str:
        upload, there = self._resume_or_create(place)
        sent: dict[int, Future[_Part]] = {}
        try:
            parts = self._read_and_send(place, upload, source, there, sent)
        except DamagedData:
            wait_for(sent.values())
            self._abort(place, upload)
            raise
        finally:
            # Their memory must be free, and none may still be under way, whatever happened.
            wait_for(sent.values())
        return self._complete(place, upload, parts)

    def _read_and_send(
        self, place: _Place, upload: str, source: FileSource, there: dict[int, _Part], sent: dict[int, Future[_Part]]
    ) -> dict[int, _Part]:
        size, read = part_size(source.size), 0
        kept: dict[int, _Part] = {}
        for number in count(1):
            if read == source.size:
                break
            failed = next((part for part in sent.values() if part.done() and part.exception()), None)
            if failed is not None:
                break
            buffer = self._buffers.take(size)
            try:
                filled = source.read_into(buffer)
                read += filled
                if number in there and there[number] == _Part(filled, _md5(buffer, filled)):
                    kept[number] = there[number]
                    self._buffers.give(buffer)
                    continue
            except BaseException:
                self._buffers.give(buffer)
                raise
            sent[number] = self._senders.submit(self._send_part, place, upload, number, buffer, filled)
        return kept | {number: part.result() for number, part in sent.items()}

    def _send_part(self, place: _Place, upload: str, number: int, buffer: bytearray, filled: int) -> _Part:
        try:
            body = buffer if filled == len(buffer) else buffer[:filled]
            with s3_errors(place.thing), _gone_uploads():
                answer = self._client.upload_part(**place.request, UploadId=upload, PartNumber=number, Body=body)
            return _Part(filled, plain_etag(answer))
        finally:
            self._buffers.give(buffer)

    def _complete(self, place: _Place, upload: str, parts: dict[int, _Part]) -> str:
        listed = [{"PartNumber": number, "ETag": f'"{parts[number].etag}"'} for number in sorted(parts)]
        expected = _etag_of_parts([parts[number].etag for number in sorted(parts)])
        try:
            with s3_errors(place.thing), _gone_uploads():
                answer = self._client.complete_multipart_upload(
                    **place.request, UploadId=upload, MultipartUpload={"Parts": listed}
                )
        except _UploadGone:
            # The answer to our own first try may have been lost and boto3 have asked again: then the object is there.
            if expected is None or self._etag_of(place) != expected:
                raise
            return expected
        # Ceph's answer has no ETag.
        return plain_etag(answer) or expected or self._etag_of(place) or ""

    def _resume_or_create(self, place: _Place) -> tuple[str, dict[int, _Part]]:
        """The upload to go on with, and the parts it has. Of several, the one begun last is taken."""
        with s3_errors(place.thing):
            found = [each for each in self._unfinished(place.bucket, place.key) if each["Key"] == place.key]
            for unfinished in sorted(found, key=lambda each: each["Initiated"], reverse=True):
                try:
                    with _gone_uploads():
                        return str(unfinished["UploadId"]), self._parts_of(place, unfinished["UploadId"])
                except _UploadGone:
                    continue
            return str(self._client.create_multipart_upload(**place.request, **self._options)["UploadId"]), {}

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
            part["PartNumber"]: _Part(part["Size"], plain_etag(part))
            for page in pages
            for part in page.get("Parts", ())
        }

    def _etag_of(self, place: _Place) -> str | None:
        try:
            with s3_errors(place.thing):
                return plain_etag(self._client.head_object(**place.request))
        except Exception as error:
            if isinstance(error.__cause__, aws.ClientError) and http_status(error.__cause__) == 404:
                return None
            raise

    def _abort(self, place: _Place, upload: str) -> None:
        try:
            with _gone_uploads():
                self._client.abort_multipart_upload(**place.request, UploadId=upload)
        except _UploadGone:
            return


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
    smallest = -(-size // MOST_PARTS)
    return max(PART_SIZE, -(-smallest >> 20) << 20)


def etag_of(source: FileSource) -> str | None:
    """Read a source to its end and return the ETag that an upload of it gets, in parts if it is large."""
    buffer = bytearray(min(part_size(source.size), source.size))
    parts = []
    while filled := source.read_into(buffer):
        parts.append(_md5(buffer, filled))
    if source.size <= PART_SIZE:
        return parts[0] if parts else hashlib.md5(usedforsecurity=False).hexdigest()
    return _etag_of_parts(parts)


def plain_etag(answer: dict[str, Any]) -> str:
    """The ETag of an answer without its quotes."""
    return str(answer.get("ETag", "")).strip('"')


def _etag_of_parts(etags: list[str]) -> str | None:
    try:
        digests = b"".join(bytes.fromhex(etag) for etag in etags)
    except ValueError:
        return None  # no MD5s, and then nobody knows what the whole is called
    return f"{hashlib.md5(digests, usedforsecurity=False).hexdigest()}-{len(etags)}"


def _md5(buffer: bytearray, filled: int) -> str:
    return hashlib.md5(memoryview(buffer)[:filled], usedforsecurity=False).hexdigest()


@contextmanager
def _gone_uploads() -> Iterator[None]:
    try:
        yield
    except aws.ClientError as error:
        if error_code(error) == "NoSuchUpload":
            raise _UploadGone from error
        raise
