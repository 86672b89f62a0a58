"""A store in an S3 bucket, over boto3. Imported when such a store is opened; `s3_upload` sends its files."""

import base64
import hashlib
import io
import uuid
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

import tenacity
import urllib3.exceptions
from botocore import exceptions as aws

from nightbridge.errors import DamagedData, InvalidInput, PermanentError, TransientError
from nightbridge.files import new_file
from nightbridge.models import StoreSettings
from nightbridge.secrets import BlockValue
from nightbridge.store.checksum import FileSource, sha256_hex
from nightbridge.store.protocol import ObjectInfo, checked_folder, checked_key, write_read_delete
from nightbridge.store.s3_client import make_client, object_options
from nightbridge.store.s3_errors import error_code, http_status, s3_errors
from nightbridge.store.s3_upload import SHA256_METADATA, Uploader, has_bytes_of, plain_etag, recorded_checksum

WRITER_METADATA = "writer"
"""User metadata of an exclusively created object: distinguishes a lost response to our own write from another's."""

CHUNK = 1 << 20


class _Conflict(TransientError):
    """The server is deciding between two writers of one object; boto3 does not retry by itself."""


class S3Store:
    """Objects under a prefix of one bucket. Safe for many threads.

    An object records its SHA-256 in its metadata. That of one sent in parts the server records if it can; if not, its
    ETag identifies its bytes.
    """

    def __init__(self, settings: StoreSettings, block_value: BlockValue | None = None) -> None:
        location = urlsplit(settings.url)
        self.bucket, self.prefix = location.netloc, checked_folder(location.path.strip("/"))
        if not self.bucket:
            raise InvalidInput("the store's URL has no bucket", thing=settings.url, advice="Use s3://BUCKET/PREFIX")
        self.url = f"s3://{self.bucket}/{self.prefix}".rstrip("/")
        self._settings = settings
        self._client = make_client(settings, block_value)
        self._bucket_seen = False
        self._every_object = object_options(settings)
        # What is read again tomorrow, such as manifests and history, stays in the bucket's usual class.
        storage_class = {"StorageClass": settings.storage_class} if settings.storage_class else {}
        self._uploader = Uploader(self._client, self.bucket, self._head, {**self._every_object, **storage_class})

    def check_writable(self) -> None:
        """Write, read back and delete a small object; check that the server honours `If-None-Match` and checksums."""
        write_read_delete(self)
        self._check_that_damage_is_refused()

    def put(self, key: str, data: bytes) -> None:
        """Write an object, replacing it."""
        with s3_errors(self.url_of(key)):
            self._client.put_object(
                **self._object(key), Body=data, Metadata={SHA256_METADATA: sha256_hex(data)}, **self._every_object
            )

    def put_if_absent(self, key: str, data: bytes) -> bool:
        """Write an object unless it exists; return whether this call wrote it.

        One request, never multipart: Ceph ignores the condition when a multipart upload is completed.
        """
        writer = uuid.uuid4().hex
        if self._create(key, data, writer):
            return True
        # The response to our first try may have been lost and boto3 have retried: then the object is ours.
        found = self._head(self._key(key))
        if found is None:
            raise TransientError("another writer created it and deleted it again", thing=self.url_of(key))
        return bool(found["Metadata"].get(WRITER_METADATA) == writer)

    def put_file(self, key: str, source: FileSource) -> ObjectInfo:
        """Send a file, in parts when it is large; what an interrupted call has sent is not sent again.

        Raises:
            DamagedData: The file cannot be read to its end, or must not be sent. The upload is aborted and the object
                that was there before, if any, stays.

        """
        with source:
            etag = self._uploader.send(self._key(key), source)
            return _sent(key, source, etag)

    def holds(self, key: str, source: FileSource) -> ObjectInfo | None:
        """Compare a file with the checksum recorded with an object, or with its ETag where there is none."""
        found = self._head(self._key(key))
        with source:
            if found is None or not has_bytes_of(found, source):
                return None
            return _sent(key, source, plain_etag(found))

    def remove_leftovers(self, prefix: str, begun_before: datetime | None = None) -> None:
        """Abort the unfinished uploads below a prefix: their parts take space and are invisible."""
        self._uploader.abort_all(self.prefix + checked_folder(prefix), begun_before)

    def get(self, key: str) -> bytes | None:
        """Read an object and check its recorded checksum; None when there is none."""
        data = io.BytesIO()
        return data.getvalue() if self._read(key, data.write) else None

    def get_file(self, key: str, path: Path) -> None:
        """Download an object to `path` (parents are created), atomically, checking its recorded checksum.

        Raises:
            PermanentError: There is no such object, or `path` cannot be written.
            DamagedData: The bytes do not make the checksum.

        """
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with new_file(path) as copy:
                if not self._read(key, copy.write):
                    raise PermanentError("no such object", thing=self.url_of(key))
        except OSError as error:
            raise PermanentError(f"cannot be written: {error.strerror}", thing=str(path)) from error

    def stat(self, key: str, part_size: int = 0) -> ObjectInfo | None:
        """Size and recorded checksum of an object, as the writer computed it; None when there is none."""
        del part_size
        found = self._head(self._key(key))
        if found is None:
            return None
        sha256, made_of = recorded_checksum(found)
        return ObjectInfo(
            key=key, size=found["ContentLength"], sha256=sha256, part_size=made_of, etag=plain_etag(found)
        )

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """All objects under a prefix, in key order, without checksums."""
        folder = self.prefix + checked_folder(prefix)
        with s3_errors(self.url_of(prefix)):
            for page in self._client.get_paginator("list_objects_v2").paginate(Bucket=self.bucket, Prefix=folder):
                for found in page.get("Contents", ()):
                    key = found["Key"].removeprefix(self.prefix)
                    modified, etag = found["LastModified"], plain_etag(found)
                    yield ObjectInfo(key=key, size=found["Size"], modified=modified, etag=etag)

    def delete(self, key: str) -> None:
        """Delete an object; a missing one is no error."""
        with s3_errors(self.url_of(key)):
            self._client.delete_object(**self._object(key))

    def url_of(self, key: str) -> str:
        """The full URL of a key, as shown to users."""
        return f"{self.url}/{key}"

    def link_of(self, key: str) -> str:
        """The address by which the endpoint serves the object, AWS's own where a region and no endpoint is set.

        Whether the browser may read it is the bucket's decision.
        """
        settings, path = self._settings, quote(self.prefix + key)
        if not settings.endpoint_url:
            return f"https://{self.bucket}.s3.{settings.region}.amazonaws.com/{path}" if settings.region else ""
        endpoint = urlsplit(settings.endpoint_url)
        below = endpoint.path.rstrip("/")
        if settings.path_style:
            return f"{endpoint.scheme}://{endpoint.netloc}{below}/{self.bucket}/{path}"
        return f"{endpoint.scheme}://{self.bucket}.{endpoint.netloc}{below}/{path}"

    def _key(self, key: str) -> str:
        return self.prefix + checked_key(key)

    def _object(self, key: str) -> dict[str, str]:
        return {"Bucket": self.bucket, "Key": self._key(key)}

    def _check_that_damage_is_refused(self) -> None:
        """Send other bytes than the checksum is of. All uploads rest on a server refusing that."""
        key = f".nightbridge-check-{uuid.uuid4().hex}"
        checksum = base64.b64encode(hashlib.sha256(b"sent").digest()).decode()
        with s3_errors(self.url_of(key)):
            try:
                self._client.put_object(**self._object(key), Body=b"arrived", ChecksumSHA256=checksum)
            except aws.ClientError as error:
                if 400 <= http_status(error) < 500:
                    return
                raise
        self.delete(key)
        raise PermanentError(
            "the server accepts bytes that do not match their SHA-256, so corruption in transit goes unnoticed",
            thing=self.url,
            advice="Use a server that checks signatures or checksums (AWS, Ceph, MinIO), or a file:// store",
        )

    @tenacity.retry(
        retry=tenacity.retry_if_exception_type(_Conflict),
        stop=tenacity.stop_after_attempt(4),
        wait=tenacity.wait_random_exponential(multiplier=0.2, max=2),
        reraise=True,
    )
    def _create(self, key: str, data: bytes, writer: str) -> bool:
        metadata = {SHA256_METADATA: sha256_hex(data), WRITER_METADATA: writer}
        with s3_errors(self.url_of(key)):
            try:
                self._client.put_object(
                    **self._object(key), Body=data, Metadata=metadata, IfNoneMatch="*", **self._every_object
                )
            except aws.ClientError as error:
                if http_status(error) == 412 or error_code(error) == "PreconditionFailed":
                    return False
                if error_code(error) == "ConditionalRequestConflict":  # S3's 409: it is deciding on another request
                    raise _Conflict("another writer is creating it", thing=self.url_of(key)) from error
                raise
        return True

    def _head(self, whole_key: str) -> dict[str, Any] | None:
        with s3_errors(f"s3://{self.bucket}/{whole_key}"):
            try:
                found: dict[str, Any] = self._client.head_object(
                    Bucket=self.bucket, Key=whole_key, ChecksumMode="ENABLED"
                )
            except aws.ClientError as error:
                missing = http_status(error) == 404
                if missing and self._bucket_seen:
                    return None
                # A HEAD answer has no body: only a listing shows whether key, bucket or credentials are at fault.
                self._client.list_objects_v2(Bucket=self.bucket, Prefix=whole_key, MaxKeys=1)
                if not missing:
                    raise
                self._bucket_seen = True
                return None
        return found

    def _read(self, key: str, write: Callable[[bytes], object]) -> bool:
        """Pass an object's bytes on and check them; returns False when there is none."""
        thing = self.url_of(key)
        with s3_errors(thing):
            try:
                opened = self._client.get_object(**self._object(key))
            except aws.ClientError as error:
                if error_code(error) == "NoSuchKey":
                    return False
                raise
        digest, size = hashlib.sha256(), 0
        for chunk in _chunks(opened["Body"], thing):
            digest.update(chunk)
            size += len(chunk)
            write(chunk)
        if size != opened["ContentLength"]:
            raise TransientError(f"only {size} of {opened['ContentLength']} bytes received", thing=thing)
        recorded = opened["Metadata"].get(SHA256_METADATA, digest.hexdigest())
        if recorded != digest.hexdigest():
            raise DamagedData(
                f"its sha256 is {digest.hexdigest()}, expected {recorded}",
                thing=thing,
                advice="The object was modified or damaged in the store",
            )
        return True


def _sent(key: str, source: FileSource, etag: str) -> ObjectInfo:
    return ObjectInfo(key=key, size=source.size, sha256=source.sha256, part_size=source.digest.part_size, etag=etag)


def _chunks(body: Any, thing: str) -> Iterator[bytes]:
    try:
        yield from body.iter_chunks(CHUNK)
    except (aws.BotoCoreError, urllib3.exceptions.HTTPError) as error:
        raise TransientError(f"the connection was lost: {error}", thing=thing) from error
    finally:
        body.close()
