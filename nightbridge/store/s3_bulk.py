"""The way of the data into and out of a bucket, over obstore (Rust): small objects whole, and ranges of large ones.

boto3 spends 4,680 Python calls on a request, obstore none. What obstore lacks stays with boto3: uploads in parts that
are resumed, the headers of answers, tags with spaces, and servers whose certificate is its own authority. obstore uses
the endpoint and the credentials that boto3 found.
"""

import itertools
import os
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import urlsplit

import obstore
import obstore.exceptions
import obstore.store
import tenacity
from botocore import exceptions as aws

from nightbridge.errors import TransientError
from nightbridge.models import StoreSettings
from nightbridge.store.s3_client import Connection, http_status, s3_errors, translate_text

if TYPE_CHECKING:
    from obstore.store import ClientConfig, RetryConfig, S3Config, S3Credential

CHUNK = 1 << 18
"""Bytes of a range handed over at once: they are hashed and written while they are in the processor's cache."""

CREDENTIALS_AGE = timedelta(minutes=5)
"""How long obstore keeps what boto3 gave it; boto3 renews it by itself."""

STORAGE_CLASS = "Storage-Class"
"""The attribute that is no user metadata."""

_Mode = Literal["create", "overwrite"]

_RETRIES: "RetryConfig" = {
    "max_retries": 4,
    "retry_timeout": timedelta(minutes=2),
    "backoff": {"init_backoff": timedelta(milliseconds=100), "max_backoff": timedelta(seconds=10), "base": 2},
}

_SELF_SIGNED = "CaUsedAsEndEntity"
"""What Rust's TLS says of a certificate that is its own authority; OpenSSL, and so boto3, takes it."""

# obstore repeats what a server refuses with 5xx; a page instead of an answer it takes for a broken server.
_retried = tenacity.retry(
    retry=tenacity.retry_if_exception_type(TransientError),
    stop=tenacity.stop_after_attempt(3),
    wait=tenacity.wait_random_exponential(multiplier=0.2, max=2),
    reraise=True,
)


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
        config["virtual_hosted_style_request"] = not settings.path_style
        if settings.encryption != "none":
            config["server_side_encryption"] = settings.encryption
        if settings.kms_key_id:
            config["sse_kms_key_id"] = settings.kms_key_id
        client: ClientConfig = {"connect_timeout": "10s", "read_timeout": "60s", "timeout": "10m"}
        client["allow_http"] = address.scheme == "http"
        authority = settings.ca_bundle or os.environ.get("AWS_CA_BUNDLE")
        if authority and address.scheme == "https":
            client["root_certificate"] = Path(authority).read_bytes()
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
        try:
            return self._put(key, body, attributes, mode)
        except TransientError:
            # tenacity takes 0.1 ms for each call, a small object 0.5 ms: only what failed once goes through it.
            return _retried(self._put)(key, body, attributes, mode)

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
        if STORAGE_CLASS in metadata:
            more["StorageClass"] = metadata.pop(STORAGE_CLASS)
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
