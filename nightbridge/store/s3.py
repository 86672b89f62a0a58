"""A store in an S3 bucket: requests and decisions go through boto3, the data through obstore (Rust) and `s3_multipart`.

boto3 spends 4,680 Python calls on a request, obstore none: it moves small objects whole, and ranges of large ones. What
obstore lacks stays with boto3: uploads in parts that are resumed, the headers of answers, tags with spaces, and servers
whose certificate is its own authority. obstore uses the endpoint and the credentials that boto3 found.
"""

import base64
import contextlib
import hashlib
import itertools
import os
import random
import time
import uuid
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import quote, urlsplit

import obstore
import obstore.exceptions
import obstore.store
from botocore import exceptions as aws

from nightbridge.errors import DamagedData, InvalidInput, PermanentError, TransientError
from nightbridge.models import StoreSettings
from nightbridge.secrets import BlockValue
from nightbridge.store.checksum import FileSource, sha256_hex
from nightbridge.store.object_store import ObjectInfo, checked_folder, checked_key, write_read_delete
from nightbridge.store.s3_client import (
    TAKEN_ADVICE,
    Connection,
    Taken,
    connect,
    error_code,
    http_status,
    object_options,
    read_certificates,
    s3_errors,
    translate_text,
)
from nightbridge.store.s3_multipart import (
    SHA256_METADATA,
    TRIES,
    Buffers,
    Uploader,
    has_bytes_of,
    md5_hex,
    plain_etag,
    recorded_checksum,
)

if TYPE_CHECKING:
    from obstore.store import ClientConfig, RetryConfig, S3Config, S3Credential

CHUNK = 1 << 18
"""Bytes of a range handed over at once: they are hashed and written while they are in the processor's cache."""

CREDENTIALS_AGE = timedelta(minutes=5)
"""How long obstore keeps what boto3 gave it; boto3 renews it by itself."""

LONGEST_KEY = 1024
"""Bytes of a key: the limit of S3."""

STORAGE_CLASS, CONTENT_TYPE = "Storage-Class", "Content-Type"
"""The attributes that are no user metadata, as boto3's arguments without the dash."""

_CONTENT_TYPES = {".html": "text/html; charset=utf-8", ".json": "application/json", ".xml": "application/xml"}

_Mode = Literal["create", "overwrite"]

_RETRIES: "RetryConfig" = {
    "max_retries": 4,
    "retry_timeout": timedelta(minutes=2),
    "backoff": {"init_backoff": timedelta(milliseconds=100), "max_backoff": timedelta(seconds=10), "base": 2},
}

_SELF_SIGNED = "CaUsedAsEndEntity"
"""What Rust's TLS says of a certificate that is its own authority; OpenSSL, and so boto3, takes it."""

REPEATS = 3
"""How often an object is sent again: obstore repeats what is refused with 5xx, and not what no S3 server answered."""


class S3Store:
    """Objects under a prefix of one bucket. Safe for many threads.

    An object records its SHA-256 in its metadata. That of one sent in parts the server records if it can; if not, its
    ETag identifies its bytes.
    """

    def __init__(self, settings: StoreSettings, block_value: BlockValue | None = None) -> None:
        for address, name in ((settings.url, "URL"), (settings.endpoint_url or "", "endpoint")):
            scheme, _, rest = address.partition("://")
            _login, has_login, host = rest.partition("/")[0].rpartition("@")
            if has_login:
                what = f"a login in the store's {name} would appear in logs"
                raise InvalidInput(what, subject=f"{scheme}://{host}", advice="Set its access_key and secret_key")
        try:
            location = urlsplit(settings.url)
        except ValueError as error:
            raise InvalidInput(str(error), subject=settings.url, advice="Use s3://BUCKET/PREFIX") from error
        if location.query or location.fragment or settings.url[-1] in "?#":
            advice = "Leave out what begins there: earlier releases have stored without it"
            raise InvalidInput("`?` and `#` cannot be part of the store's prefix", subject=settings.url, advice=advice)
        self.bucket, self.prefix = location.netloc, checked_folder(location.path.strip("/"))
        if not self.bucket:
            raise InvalidInput("the store's URL has no bucket", subject=settings.url, advice="Use s3://BUCKET/PREFIX")
        self.url = f"s3://{self.bucket}/{self.prefix}".rstrip("/")
        self._settings = settings
        connection, options = connect(settings, block_value), object_options(settings)
        self._client = connection.client
        self._bulk = BulkTransfers(settings, self.bucket, connection, options)
        self._bucket_seen = False
        self._etags_are_md5: bool | None = None
        # What is read again tomorrow, such as manifests and history, stays in the bucket's usual class.
        self._file_attributes = {STORAGE_CLASS: settings.storage_class} if settings.storage_class else {}
        storage_class = {"StorageClass": settings.storage_class} if settings.storage_class else {}
        self._buffers = Buffers()
        self._uploader = Uploader(self._client, self.bucket, self._buffers, self._head, {**options, **storage_class})

    def check_writable(self) -> None:
        """Write, read back and delete a small object; check that the server honours `If-None-Match` and checksums."""
        write_read_delete(self)
        self._check_that_damage_is_refused()

    def put(self, key: str, data: bytes) -> None:
        """Write an object, replacing it. A browser shows a page of ours; what jobs wrote is none, whatever it is."""
        attributes = {SHA256_METADATA: sha256_hex(data)}
        if kind := _CONTENT_TYPES.get(PurePosixPath(key).suffix):
            attributes[CONTENT_TYPE] = kind
        etag = self._bulk.put(self._key(key), data, attributes, "overwrite")
        self._proved_etag(self._key(key), etag or "", data)
        self._tag(self._key(key))

    def put_if_absent(self, key: str, data: bytes) -> bool:
        """Write an object unless it exists; return whether it is there with these bytes.

        One request, never multipart: Ceph ignores the condition when a multipart upload is completed.
        """
        attributes = {SHA256_METADATA: sha256_hex(data)}
        for _ in range(TRIES):
            if self._create(self._key(key), data, attributes) is not None:
                return True
            # The answer to a try of ours, or of an earlier call, may have been lost: then the bytes are ours. If there
            # is nothing, the server was deciding on another writer's request (409), or that writer has deleted it.
            if (found := self.get(key)) is not None:
                return found == data
        raise TransientError("another writer is creating and deleting it", subject=self.url_of(key))

    def put_file(self, key: str, source: FileSource) -> ObjectInfo:
        """Send a file, in parts when it is large; what an interrupted call has sent is not sent again."""
        with source:
            try:
                send = self._uploader.send if source.digest.part_size else self._create_whole
                etag = send(self._key(key), source)
            except Taken:
                found = self._head(self._key(key))
                if found is None or not has_bytes_of(found, source):
                    raise
                etag = plain_etag(found)
            return _sent(key, source, etag)

    def read(self, key: str, start: int, length: int) -> Iterator[memoryview]:
        """The bytes of a range of an object, in order."""
        return self._bulk.read(self._key(key), start, length)

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
        """Read an object, again where its bytes were damaged on the way; None when there is none."""
        subject = self.url_of(key)
        for _ in range(TRIES):
            with s3_errors(subject):
                try:
                    opened = self._client.get_object(**self._object(key))
                    data: bytes = opened["Body"].read()
                except aws.ClientError as error:
                    if error_code(error) == "NoSuchKey":
                        return None
                    raise
            recorded = opened["Metadata"].get(SHA256_METADATA)
            if not recorded or recorded == sha256_hex(data):
                return data
        raise DamagedData(
            f"its sha256 is {sha256_hex(data)}, expected {recorded}",
            subject=subject,
            advice="The object was modified or damaged in the store",
        )

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

    def list(self, prefix: str, begin: str = "") -> Iterator[ObjectInfo]:
        """All objects under a prefix whose next name begins so, in key order, without checksums."""
        folder = self.prefix + checked_folder(prefix) + begin
        with s3_errors(self.url_of(prefix)):
            for page in self._client.get_paginator("list_objects_v2").paginate(Bucket=self.bucket, Prefix=folder):
                for found in page.get("Contents", ()):
                    if found["Key"].endswith("/"):
                        continue  # a console or a mounted bucket marks a folder so, and no key of ours is like that
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
        whole = self.prefix + checked_key(key)
        if len(whole.encode()) > LONGEST_KEY:
            what = f"not a usable object key: longer than {LONGEST_KEY} bytes with the store's prefix"
            raise InvalidInput(what, subject=repr(whole), advice="Rename the file, or shorten the prefix")
        return whole

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
            subject=self.url,
            advice="Use a server that checks signatures or checksums (AWS, Ceph, MinIO), or a file:// store",
        )

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

    def _create_whole(self, key: str, source: FileSource) -> str:
        """Send a file with one request; returns its ETag."""
        body = self._buffers.take(source.size)
        try:
            source.read_into(body)
            etag = self._create(key, body, {SHA256_METADATA: source.sha256, **self._file_attributes})
        finally:
            self._buffers.give(body)
        if etag is None:
            subject = f"s3://{self.bucket}/{key}"
            raise Taken("another writer has stored other bytes there", subject=subject, advice=TAKEN_ADVICE)
        return etag

    def _create(self, key: str, body: bytes | bytearray, attributes: dict[str, str]) -> str | None:
        """Send an object that is not there yet; returns its ETag, None where there is one already."""
        etag = self._bulk.put(key, body, attributes, "create")
        if etag is None:
            return None
        try:
            etag = self._proved_etag(key, etag, body)
        except TransientError:
            # It is what came of ours, and its recorded checksum says that it is whole.
            with s3_errors(f"s3://{self.bucket}/{key}"):
                self._client.delete_object(Bucket=self.bucket, Key=key)
            raise
        self._tag(key)
        return etag

    def _tag(self, key: str) -> None:
        if not self._bulk.tags:
            self._uploader.tag(key)

    def _proved_etag(self, key: str, answered: str, body: bytes | bytearray) -> str:
        """The ETag of what was sent at once: its MD5, or another where the bucket encrypts with keys of KMS.

        Whether a server's ETags are MD5s shows with the first that is one; until then the bytes are read back.
        """
        md5 = md5_hex(body)
        if answered == md5:
            self._etags_are_md5 = True
            return md5
        found = self._head(key)
        if found is not None:
            etag, is_md5 = plain_etag(found), self._etags_are_md5 and found.get("ServerSideEncryption") != "aws:kms"
            if is_md5 is None and (not body or b"".join(self._bulk.read(key, 0, len(body))) == body):
                is_md5 = self._etags_are_md5 = etag == md5
            if etag == md5 or (is_md5 is False and etag == answered):
                return etag
        raise TransientError(
            f"ETag {answered} for bytes whose MD5 is {md5}",
            subject=f"s3://{self.bucket}/{key}",
            advice="Check the proxies between this machine and the S3 server",
        )


def _sent(key: str, source: FileSource, etag: str) -> ObjectInfo:
    return ObjectInfo(key=key, size=source.size, sha256=source.sha256, part_size=source.digest.part_size, etag=etag)


class BulkTransfers:
    """Requests for one bucket. Safe for many threads: obstore lets go of the interpreter while it waits.

    `options` are what boto3's requests that make an object have, such as their encryption.
    """

    def __init__(self, settings: StoreSettings, bucket: str, connection: Connection, options: dict[str, str]) -> None:
        self._name, self._client, self._options, self._by_boto3 = bucket, connection.client, options, False
        meta, credentials = connection.client.meta, connection.credentials
        address = urlsplit(meta.endpoint_url)
        if not settings.path_style:
            address = address._replace(netloc=f"{bucket}.{address.netloc}")

        def provide() -> "S3Credential":
            if credentials is None:
                raise aws.NoCredentialsError
            key, secret, token = credentials.get_frozen_credentials()[:3]
            expires = datetime.now(UTC) + CREDENTIALS_AGE
            return {"access_key_id": key, "secret_access_key": secret, "token": token, "expires_at": expires}

        config: S3Config = {"region": meta.region_name, "endpoint": address.geturl()}
        # AWS asks for one where a bucket's Object Lock has a default retention; it is what the signature has anyway.
        config["checksum_algorithm"] = "SHA256"
        config["virtual_hosted_style_request"] = not settings.path_style
        if settings.encryption != "none":
            config["server_side_encryption"] = settings.encryption
        if settings.kms_key_id:
            config["sse_kms_key_id"] = settings.kms_key_id
        client: ClientConfig = {"connect_timeout": "10s", "read_timeout": "60s", "timeout": "10m"}
        client["allow_http"] = address.scheme == "http"
        authority = settings.ca_bundle or os.environ.get("AWS_CA_BUNDLE")
        if authority and address.scheme == "https":
            client["root_certificate"] = read_certificates(str(authority))
        self._bucket = obstore.store.S3Store(
            bucket, config=config, client_options=client, retry_config=_RETRIES, credential_provider=provide
        )
        # obstore writes a space as the plus sign of a form, which Ceph takes for what it is.
        self.tags = settings.tags if " " not in "".join(itertools.chain(*settings.tags.items())) else {}

    def put(self, key: str, body: bytes | bytearray, attributes: dict[str, str], mode: _Mode) -> str | None:
        """Send an object with one request whose signature covers the bytes; returns its ETag.

        Returns None where there is one already and the mode is `create`: another writer's, or this one's whose answer
        was lost.
        """
        for failures in range(REPEATS):
            with contextlib.suppress(TransientError):
                return self._put(key, body, attributes, mode)
            time.sleep(random.uniform(0, 0.2 * 2**failures))
        return self._put(key, body, attributes, mode)

    def _put(self, key: str, body: bytes | bytearray, attributes: dict[str, str], mode: _Mode) -> str | None:
        if self._by_boto3:
            return self._put_by_boto3(key, body, attributes, mode)
        try:
            made = obstore.put(
                self._bucket, key, body, attributes=attributes, tags=self.tags or None, mode=mode, use_multipart=False
            )
        except (obstore.exceptions.AlreadyExistsError, obstore.exceptions.PreconditionError):
            return None
        except (obstore.exceptions.BaseError, OSError) as error:
            self._give_up(error, key)
            return self._put_by_boto3(key, body, attributes, mode)
        return (made["e_tag"] or "").strip('"')

    def read(self, key: str, start: int, length: int) -> Iterator[memoryview]:
        """The bytes of a range in order, `CHUNK` or a little more at once; fewer where the object ends before."""
        if not self._by_boto3:
            try:
                if length <= CHUNK:
                    yield memoryview(obstore.get_range(self._bucket, key, start=start, length=length))
                    return
                found = obstore.get(self._bucket, key, options={"range": (start, start + length)})
                for chunk in found.stream(min_chunk_size=CHUNK):
                    yield memoryview(chunk)
            except (obstore.exceptions.BaseError, OSError) as error:
                self._give_up(error, key)
            else:
                return
        with s3_errors(self._url(key)):
            range_ = f"bytes={start}-{start + length - 1}"
            body = self._client.get_object(Bucket=self._name, Key=key, Range=range_)["Body"]
            yield from (memoryview(chunk) for chunk in body.iter_chunks(CHUNK))

    def _give_up(self, error: Exception, key: str) -> None:
        """Leave this server to boto3 where only that can reach it; raises the error of ours where it is another."""
        if _SELF_SIGNED not in str(error):
            raise translate_text(str(error), self._url(key)) from error
        self._by_boto3 = True

    def _put_by_boto3(self, key: str, body: bytes | bytearray, attributes: dict[str, str], mode: _Mode) -> str | None:
        more: dict[str, Any] = {**self._options, **({"IfNoneMatch": "*"} if mode == "create" else {})}
        metadata = dict(attributes)
        more["ChecksumSHA256"] = base64.b64encode(bytes.fromhex(metadata[SHA256_METADATA])).decode()
        more |= {
            name.replace("-", ""): metadata.pop(name) for name in (STORAGE_CLASS, CONTENT_TYPE) if name in metadata
        }
        with s3_errors(self._url(key)):
            try:
                made = self._client.put_object(Bucket=self._name, Key=key, Body=body, Metadata=metadata, **more)
            except aws.ClientError as error:
                if http_status(error) == 412:
                    return None
                raise
        return str(made["ETag"]).strip('"')

    def _url(self, key: str) -> str:
        return f"s3://{self._name}/{key}"
