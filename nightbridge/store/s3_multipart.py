"""Large files into a bucket: in parts, many at once in bounded memory; an interrupted upload is resumed.

Every file is read once, and the SHA-256 of each part is computed once, while it is read. It signs the part's request,
so that every server which checks signatures checks it; it is the checksum that S3 keeps with the part; and the checksum
of the whole is computed from it (`checksum`). A part stays in memory until its answer, so that it can be sent again
without being read again; all parts together stay below `MEMORY`. An interrupted upload stays in the bucket and is
resumed: a part that is there is identified by the SHA-256 that the server keeps, or by its MD5 (S3's ETag) where the
server keeps none. Only where there is neither (keys of KMS on such a server) are parts sent again.
"""

import base64
import contextlib
import hashlib
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from datetime import datetime
from typing import Any, NamedTuple
from urllib.parse import parse_qsl

from botocore import exceptions as aws

from nightbridge.errors import DamagedData, PermanentError, TransientError
from nightbridge.store.checksum import PART_SIZE, FileSource, part_size
from nightbridge.store.s3_client import REQUESTS, NotS3Response, UploadGone, error_code, http_status, s3_errors

MEMORY = 12 * PART_SIZE
"""Bytes of all parts in memory at any time. One part of a file larger than `MAX_PARTS` of these fits as well."""

SMALL = 1 << 16
"""Bytes of a buffer that counts for nothing: of the few that are in use, all together are less than a part."""

TRIES = 3
"""How often a request is repeated that another writer got in the way of."""

_ALGORITHM = "SHA256"

SHA256_METADATA = "sha256"
"""User metadata (`x-amz-meta-sha256`) with the checksum of an object that was sent with one request.

That of a file sent in parts is not known when its upload is created; the server makes it of the parts' or does not.
"""

# What servers answer that cannot list uploads, or users that may not: then nothing is resumed, and all else works.
# NoSuchUpload is what rclone answers about a bucket without any.
_CANNOT_LIST = frozenset({"AccessDenied", "MethodNotAllowed", "NotImplemented", "NoSuchUpload", "403", "405", "501"})

Answer = Mapping[str, Any]


class _Upload(NamedTuple):
    """An upload in progress. `checksums`: None where it was resumed and the server's support of SHA-256 is unknown."""

    id: str
    checksums: bool | None


class _Part(NamedTuple):
    """A part at the server; `sha256` (base64) where the server keeps it."""

    size: int
    etag: str
    sha256: str | None = None

    def holds(self, buffer: bytearray, filled: int, sha256: str) -> bool:
        """Whether the part has the bytes in the buffer."""
        if self.size != filled:
            return False
        return self.sha256 == sha256 if self.sha256 else self.etag == md5_hex(memoryview(buffer)[:filled])


class Uploader:
    """Sends files into one bucket. Safe for many threads, which share the memory and the requests.

    Args:
        client: The boto3 client.
        buffers: Memory for parts, shared with whoever sends whole files.
        bucket: The bucket.
        head: Returns the answer to HEAD with `ChecksumMode` for a key of the bucket; None when there is no object.
        options: Further arguments of each request that makes an object, such as its encryption.
    """

    def __init__(
        self,
        client: Any,
        bucket: str,
        buffers: "Buffers",
        head: Callable[[str], Answer | None],
        options: Mapping[str, str],
    ) -> None:
        self._client, self._bucket, self._head, self._options = client, bucket, head, options
        self._buffers = buffers
        tags = parse_qsl(options.get("Tagging", ""), keep_blank_values=True)
        self._tags = [{"Key": name, "Value": value} for name, value in tags]
        self._senders = ThreadPoolExecutor(REQUESTS, thread_name_prefix="nightbridge-s3")
        self._in_parts: set[FileSource] = set()

    def send(self, key: str, source: FileSource) -> str:
        """Send an opened source in parts; returns the object's ETag.

        Raises:
            DamagedData: The file cannot be read to its end, or must not be sent; nothing of it is stored.
            TransientError: Also when another process ended the upload again and again.
        """
        for _ in range(TRIES):
            try:
                return self._send_parts(key, source)
            except UploadGone:
                found = self._head(key)
                if found is not None and has_bytes_of(found, source):
                    return plain_etag(found)
        raise TransientError(
            "another process aborts every upload of it", subject=self._url(key), advice="Run one harvest at a time"
        )

    def abort_all(self, folder: str, begun_before: datetime | None = None) -> None:
        """Abort the unfinished uploads below a folder: those begun before a time, or all."""
        with s3_errors(self._url(folder)):
            for upload in self._unfinished(folder):
                if begun_before is None or upload["Initiated"] < begun_before:
                    self._abort(upload["Key"], upload["UploadId"])

    def tag(self, key: str) -> None:
        """Give an object the tags of the options, if there are any."""
        if self._tags:
            with s3_errors(self._url(key)):
                self._client.put_object_tagging(**self._object(key), Tagging={"TagSet": self._tags})

    def _url(self, key: str) -> str:
        return f"s3://{self._bucket}/{key}"

    def _object(self, key: str) -> dict[str, str]:
        return {"Bucket": self._bucket, "Key": key}

    def _send_parts(self, key: str, source: FileSource) -> str:
        source.rewind(part_size(source.size))
        upload, there = self._resume_or_create(key)
        sent: dict[int, Future[_Part]] = {}
        self._in_parts.add(source)
        try:
            kept = self._read_and_send(key, upload, source, there, sent)
            parts = kept | {number: part.result() for number, part in sent.items()}
        except DamagedData:
            wait_for(sent.values())
            self._abort(key, upload.id)
            raise
        finally:
            self._in_parts.discard(source)
            # Their memory must be free, and none may still be in progress, whatever happened.
            wait_for(sent.values())
        return self._complete(key, upload, source, dict(sorted(parts.items())))

    def _read_and_send(
        self, key: str, upload: _Upload, source: FileSource, there: Mapping[int, _Part], sent: dict[int, Future[_Part]]
    ) -> dict[int, _Part]:
        """Read to the end, or to the first part that failed. Returns the parts that are there, adds the others."""
        size, read, number = part_size(source.size), 0, 0
        kept: dict[int, _Part] = {}
        pending: set[Future[_Part]] = set()
        while read < source.size:
            number += 1
            # Every file in progress gets its share. Of many, each has its parts arrive in order, one after the other: a
            # server that writes a file as it comes (rclone) need not keep any back.
            while len(pending) >= max(1, REQUESTS // len(self._in_parts)):
                done, pending = wait_for(pending, return_when=FIRST_COMPLETED)
                if any(part.exception() for part in done):
                    return kept
            buffer = self._buffers.take(size)
            try:
                filled = source.read_into(buffer)
                read += filled
                sha256 = _base64(source.digest.all_parts()[-1])
                is_there = number in there and there[number].holds(buffer, filled, sha256)
            except BaseException:
                self._buffers.give(buffer)
                raise
            if is_there:
                self._buffers.give(buffer)
                kept[number] = there[number]
            else:
                sent[number] = self._senders.submit(self._send_part, key, upload, number, buffer, filled, sha256)
                pending.add(sent[number])
        return kept

    def _send_part(self, key: str, upload: _Upload, number: int, buffer: bytearray, filled: int, sha256: str) -> _Part:
        try:
            body = buffer if filled == len(buffer) else buffer[:filled]
            # Amazon refuses a checksum with a part of an upload that was created without one.
            known = {} if upload.checksums is None else {"ChecksumSHA256": sha256}
            with s3_errors(self._url(key)):
                answer = self._client.upload_part(
                    **self._object(key), UploadId=upload.id, PartNumber=number, Body=body, **known
                )
                etag = plain_etag(answer)
                if not etag:  # then it has stored nothing
                    raise NotS3Response(lacks="ETag")
                return _Part(filled, etag, sha256)
        finally:
            self._buffers.give(buffer)

    def _complete(self, key: str, upload: _Upload, source: FileSource, parts: Mapping[int, _Part]) -> str:
        listed = [{"PartNumber": number, "ETag": f'"{part.etag}"'} for number, part in parts.items()]
        if upload.checksums:
            digests = map(_base64, source.digest.all_parts())
            listed = [{**part, "ChecksumSHA256": sha256} for part, sha256 in zip(listed, digests, strict=True)]
        expected = _etag_of_parts([part.etag for part in parts.values()])
        answer: Answer | None
        try:
            with s3_errors(self._url(key)):
                answer = self._client.complete_multipart_upload(
                    **self._object(key), UploadId=upload.id, MultipartUpload={"Parts": listed}, IfNoneMatch="*"
                )
        except UploadGone:
            # The response to our first try may have been lost and boto3 have retried: then the object is there.
            answer = self._head(key)
            if answer is None or answer["ContentLength"] != source.size:
                raise
            if recorded_checksum(answer) != (source.sha256, source.digest.part_size) and plain_etag(answer) != expected:
                raise
        except PermanentError as error:
            if upload.checksums is not None:
                raise
            # SeaweedFS tells of no checksum, and refuses an upload of which some parts have one and others none.
            self._abort(key, upload.id)
            raise UploadGone("cannot be resumed", subject=self._url(key), advice="It is sent again") from error
        # Ceph and others do not give an object the tags that its upload was created with.
        self.tag(key)
        # Ceph's answer has no ETag.
        return plain_etag(answer or {}) or expected or plain_etag(self._head(key) or {})

    def _resume_or_create(self, key: str) -> tuple[_Upload, dict[int, _Part]]:
        """The upload to resume, and the parts it has. Of several, the latest is taken."""
        with s3_errors(self._url(key)):
            found = [each for each in self._unfinished(key) if each["Key"] == key]
            for unfinished in sorted(found, key=lambda each: each["Initiated"], reverse=True):
                try:
                    there = self._parts_of(key, unfinished["UploadId"])
                except UploadGone:
                    continue
                keeps = unfinished.get("ChecksumAlgorithm") == _ALGORITHM or any(part.sha256 for part in there.values())
                return _Upload(unfinished["UploadId"], keeps or None), there
            created = self._client.create_multipart_upload(
                **self._object(key), ChecksumAlgorithm=_ALGORITHM, **self._options
            )
            if "UploadId" not in created:
                raise NotS3Response(lacks="upload id")
            return _Upload(created["UploadId"], created.get("ChecksumAlgorithm") == _ALGORITHM), {}

    def _unfinished(self, prefix: str) -> list[dict[str, Any]]:
        pages = self._client.get_paginator("list_multipart_uploads").paginate(Bucket=self._bucket, Prefix=prefix)
        try:
            return [upload for page in pages for upload in page.get("Uploads", ())]
        except aws.ClientError as error:
            if error_code(error) in _CANNOT_LIST or str(http_status(error)) in _CANNOT_LIST:
                return []
            raise

    def _parts_of(self, key: str, upload: str) -> dict[int, _Part]:
        pages = self._client.get_paginator("list_parts").paginate(**self._object(key), UploadId=upload)
        with s3_errors(self._url(key)):
            return {
                part["PartNumber"]: _Part(part["Size"], plain_etag(part), part.get("ChecksumSHA256"))
                for page in pages
                for part in page.get("Parts", ())
            }

    def _abort(self, key: str, upload: str) -> None:
        with contextlib.suppress(UploadGone), s3_errors(self._url(key)):
            self._client.abort_multipart_upload(**self._object(key), UploadId=upload)


class Buffers:
    """Memory for parts. Buffers of the usual size are used again: fresh memory costs more than the copy into it."""

    def __init__(self) -> None:
        self._lent = 0
        self._free: list[bytearray] = []
        self._returned = threading.Condition()

    def take(self, size: int) -> bytearray:
        """A buffer of just that size; waits until the limit allows it. One is always allowed, and small ones are."""
        if size <= SMALL:
            return bytearray(size)
        with self._returned:
            self._returned.wait_for(lambda: not self._lent or self._lent + size <= MEMORY)
            self._lent += size
            if size == PART_SIZE and self._free:
                return self._free.pop()
        return bytearray(size)

    def give(self, buffer: bytearray) -> None:
        """Give a buffer back."""
        if len(buffer) <= SMALL:
            return
        with self._returned:
            self._lent -= len(buffer)
            if len(buffer) == PART_SIZE:
                self._free.append(buffer)
            self._returned.notify_all()


def has_bytes_of(answer: Answer, source: FileSource) -> bool:
    """Read an opened source to its end and compare it with an object: its SHA-256, or its ETag where none is recorded.

    `answer` is the server's to HEAD with `ChecksumMode`. The checksum is computed as the object's was, or as an upload
    does.
    """
    if answer["ContentLength"] != source.size:
        return False
    sha256, made_of = recorded_checksum(answer)
    usual = part_size(source.size)
    source.rewind(usual if sha256 is None else made_of)
    buffer = bytearray(min(usual or PART_SIZE, source.size))
    etags = []
    while filled := source.read_into(buffer):
        if sha256 is None:
            etags.append(md5_hex(memoryview(buffer)[:filled]))
    if sha256 is not None:
        return source.sha256 == sha256
    return plain_etag(answer) == (_etag_of_parts(etags) if usual else "".join(etags) or md5_hex(b""))


def recorded_checksum(answer: Answer) -> tuple[str | None, int]:
    """The SHA-256 that the answer to HEAD with `ChecksumMode` records (lower-case hex), and the bytes of its parts."""
    if SHA256_METADATA in answer["Metadata"]:
        return answer["Metadata"][SHA256_METADATA], 0
    digest, _, parts = str(answer.get("ChecksumSHA256", "")).partition("-")
    size = part_size(answer["ContentLength"])
    if not digest or (parts and not (size and parts == str(-(-answer["ContentLength"] // size)))):
        return None, 0  # not recorded, or sent in parts of another size by another writer
    return base64.b64decode(digest).hex(), size if parts else 0


def plain_etag(answer: Answer) -> str:
    """The ETag of an answer without its quotes."""
    return str(answer.get("ETag", "")).strip('"')


def md5_hex(data: bytes | bytearray | memoryview) -> str:
    """MD5 as S3 writes it in ETags."""
    return hashlib.md5(data, usedforsecurity=False).hexdigest()


def _etag_of_parts(etags: list[str]) -> str | None:
    try:
        digests = b"".join(bytes.fromhex(etag) for etag in etags)
    except ValueError:
        return None  # no MD5s, so the whole object's ETag is unknown
    return f"{md5_hex(digests)}-{len(etags)}"


def _base64(digest: bytes) -> str:
    return base64.b64encode(digest).decode()
