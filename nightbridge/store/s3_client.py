"""The boto3 client of an S3 store: endpoint, credentials, signatures, the options of every object; and its errors as
errors of ours: transient, or for the user to fix.
"""

import base64
import contextlib
import os
import re
import ssl
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from urllib.parse import quote, urlencode

import boto3
import boto3.exceptions
import botocore
import botocore.session
from botocore import exceptions as aws
from botocore.auth import S3SigV4Auth
from botocore.config import Config
from botocore.credentials import AssumeRoleCredentialFetcher, DeferredRefreshableCredentials
from botocore.parsers import ResponseParserError

from nightbridge.errors import ErrorPattern, InvalidInput, NightbridgeError, PermanentError, TransientError, classify
from nightbridge.models import SecretRef, StoreSettings
from nightbridge.secrets import BlockValue, resolve_secret
from nightbridge.store.parallel import FILES

REQUESTS = 8
"""Parts of large files sent at once."""

_CONFIG: dict[str, Any] = {
    "signature_version": "s3v4",
    # boto3's defaults send checksum trailers that Ceph's gateway refuses over HTTPS, and others never check. Integrity
    # rests on SHA-256: of each request's body in its signature, over HTTPS as well, and of the file in the manifest.
    # boto3's own transfers are not used: their CRT client ignores endpoint_url and sends to amazonaws.com.
    "request_checksum_calculation": "when_required",
    "response_checksum_validation": "when_required",
    "retries": {"mode": "adaptive", "total_max_attempts": 4},
    "connect_timeout": 10,
    "read_timeout": 60,
    "max_pool_connections": REQUESTS + FILES,
}

ROLE_SESSION = "nightbridge"
"""Name of the session with an assumed role, as the account's audit log shows it."""

# Objects of these classes answer a GET with an error until they are restored; a verification would fail.
_NOT_READABLE_AT_ONCE = frozenset({"GLACIER", "DEEP_ARCHIVE"})


class Connection(NamedTuple):
    """boto3's client, and the credentials it signs with: None where it found none."""

    client: Any
    credentials: Any


def connect(settings: StoreSettings, block_value: BlockValue | None) -> Connection:
    """Make the client that the settings describe; no request is sent yet.

    With `endpoint_url` every request goes there, those that assume a role included: an own S3 server is its own STS.

    Raises:
        InvalidInput: The settings cannot work.
        TransientError: What hands out the credentials fails now.
    """
    _check(settings)
    try:
        session = boto3.Session(
            profile_name=settings.profile,
            region_name=settings.region,
            aws_access_key_id=_secret(settings.access_key, block_value),
            aws_secret_access_key=_secret(settings.secret_key, block_value),
        )
        endpoint: dict[str, Any] = {
            "endpoint_url": settings.endpoint_url,
            # Every S3 server but Amazon's takes any region; a signature needs one.
            "region_name": session.region_name or "us-east-1",
            "verify": _verify(settings),
        }
        if settings.role_arn is not None:
            session = _with_role(session, settings.role_arn, endpoint)
        addressing = "path" if settings.path_style else "virtual"
        config = Config(**_CONFIG, s3={"addressing_style": addressing, "payload_signing_enabled": True})
        client = session.client("s3", **endpoint, config=config)
        credentials = session.get_credentials()
        _sign_known_checksums(client, credentials)
        client.meta.events.register("needs-retry.s3", _retry_if_not_s3)
        client.meta.events.register("after-call.s3", _check_is_s3)
    except aws.CredentialRetrievalError as error:  # of the profile's credential_process, or of the machine's service
        raise translate(error, settings.url) from error
    except (aws.BotoCoreError, boto3.exceptions.Boto3Error, ValueError, OSError) as error:
        raise InvalidInput(str(error), subject=settings.url, advice="Correct the store's settings") from error
    return Connection(client, credentials)


def object_options(settings: StoreSettings) -> dict[str, str]:
    """The arguments that every request has which makes an object: encryption and tags."""
    options: dict[str, str] = {}
    if settings.encryption != "none":
        options["ServerSideEncryption"] = settings.encryption
    if settings.kms_key_id:
        options["SSEKMSKeyId"] = settings.kms_key_id
    if settings.tags:
        # Ceph takes the plus sign of a form for what it is.
        options["Tagging"] = urlencode(settings.tags, quote_via=quote)
    return options


def _check(settings: StoreSettings) -> None:
    wrong = (
        (
            (settings.access_key is None) != (settings.secret_key is None),
            "access_key and secret_key go together",
            "Set both or neither",
        ),
        (
            settings.kms_key_id is not None and settings.encryption != "aws:kms",
            'kms_key_id goes with encryption = "aws:kms"',
            "Set both or leave the key out",
        ),
        (
            settings.storage_class in _NOT_READABLE_AT_ONCE,
            f"objects of class {settings.storage_class} cannot be read back immediately",
            "Use a class with immediate access, and a lifecycle rule that moves old objects",
        ),
    )
    for is_wrong, what, advice in wrong:
        if is_wrong:
            raise InvalidInput(what, subject=settings.url, advice=advice)
    if settings.ca_bundle is not None and not os.path.isfile(settings.ca_bundle):
        raise InvalidInput("ca_bundle: no such file", subject=str(settings.ca_bundle), advice="Correct the path")


def _with_role(base: boto3.Session, role_arn: str, endpoint: Mapping[str, Any]) -> boto3.Session:
    """A session with the rights of a role, which is assumed when first needed and again before it expires."""
    credentials = base.get_credentials()
    if credentials is None:
        raise aws.NoCredentialsError
    config = Config(retries=_CONFIG["retries"], connect_timeout=10, read_timeout=60)
    fetcher = AssumeRoleCredentialFetcher(
        client_creator=lambda service, **keys: base.client(service, **endpoint, config=config, **keys),
        source_credentials=credentials,
        role_arn=role_arn,
        extra_args={"RoleSessionName": ROLE_SESSION},
    )
    core = botocore.session.Session()
    role = DeferredRefreshableCredentials(fetcher.fetch_credentials, method="assume-role")
    core.register_component("credential_provider", SimpleNamespace(load_credentials=lambda: role))
    return boto3.Session(botocore_session=core, region_name=base.region_name)


def _secret(ref: SecretRef | None, block_value: BlockValue | None) -> str | None:
    return None if ref is None else resolve_secret(ref, block_value)


def _verify(settings: StoreSettings) -> str | bool | None:
    """Which authorities to trust: the settings' own, else boto3's search, in which AWS_CA_BUNDLE counts."""
    if settings.ca_bundle is not None:
        return str(settings.ca_bundle)
    # Nothing is verified over plain HTTP, so a broken AWS_CA_BUNDLE must not be looked at.
    return True if (settings.endpoint_url or "").startswith("http://") else None


def read_certificates(path: str) -> bytes:
    """The content of a file of certificate authorities.

    Raises:
        InvalidInput: It cannot be read, or holds no certificate.
    """
    try:
        ssl.create_default_context(cafile=path)
        return Path(path).read_bytes()
    except OSError as error:
        what = f"no certificates can be read from it: {error.strerror or error}"
        raise InvalidInput(what, subject=path, advice="Name a PEM file in ca_bundle, or in AWS_CA_BUNDLE") from error


REQUEST_ID = "x-amz-request-id"
"""Header of every answer of every S3 server, and of no login page that a proxy answers with status 200 instead."""

NOT_S3_TRIES = 4


def _retry_if_not_s3(response: Any, attempts: int, **_: Any) -> float | None:
    """Seconds after which botocore tries again; None: by its own rules."""
    http = response and response[0]
    foreign = http is not None and http.status_code < 300 and REQUEST_ID not in http.headers
    return 0.2 * 2**attempts if foreign and attempts < NOT_S3_TRIES else None


def _check_is_s3(http_response: Any, **_: Any) -> None:
    if http_response.status_code < 300 and REQUEST_ID not in http_response.headers:
        raise NotS3Response(lacks=REQUEST_ID)


_SIGNATURE_V4 = frozenset({"v4", "s3v4"})
"""What botocore calls Signature Version 4 of an S3 request; presigned URLs and S3 Express have signers of their own."""


class _KnownChecksumAuth(S3SigV4Auth):  # type: ignore[misc]  # botocore has no types
    """Signature Version 4 of a request whose `x-amz-checksum-sha256` is that of its body."""

    def payload(self, request: Any) -> str:
        """The SHA-256 that is signed and that the server checks, lower-case hex."""
        known = request.headers.get("x-amz-checksum-sha256")
        return base64.b64decode(known).hex() if known else str(super().payload(request))


def _sign_known_checksums(client: Any, credentials: Any) -> None:
    """Make one client take the checksum given with a body for the signature too; botocore would compute it again.

    botocore looks signers up in one table of the whole process. So these requests stay unsigned by it, and the
    client's own event handler signs them.
    """

    def choose_none(signature_version: Any, **_: Any) -> Any:
        return botocore.UNSIGNED if signature_version in _SIGNATURE_V4 else None

    def sign(request: Any, signing_name: str, region_name: str, signature_version: Any, **_: Any) -> None:
        if signature_version is botocore.UNSIGNED:
            region = request.context.get("signing", {}).get("region") or region_name
            try:
                frozen = credentials.get_frozen_credentials() if credentials else None
            except OSError as error:  # of the file with a web identity's token
                raise aws.CredentialRetrievalError(provider=credentials.method, error_msg=str(error)) from error
            _KnownChecksumAuth(frozen, signing_name, region).add_auth(request)

    client.meta.events.register_first("choose-signer.s3", choose_none)
    client.meta.events.register_last("before-sign.s3", sign)


# --- errors -----------------------------------------------------------------------------------------------------------


class NotS3Response(aws.BotoCoreError):  # type: ignore[misc]  # botocore has no types
    """An answer of success that no S3 server gave: a login page, a proxy's greeting, another service on the port."""

    fmt = "it has no {lacks}"


class UploadGone(TransientError):
    """A multipart upload no longer exists: another process has completed or aborted it."""


TAKEN_ADVICE = "Another harvest of this run is in progress or done: try again to get its record"


class Taken(TransientError):
    """Another writer has created the object: a harvest that has no lease in common with this one."""


# Codes of the S3 error response; a HEAD answer has no body, so its code is the status. Amazon's list:
# https://docs.aws.amazon.com/AmazonS3/latest/API/ErrorResponses.html; QuotaExceeded and 507 are Ceph's.
_PERMANENT_CODES = {
    "NoSuchKey": ("no such object", "Run `nightbridge verify` for what else is missing"),
    "NoSuchBucket": ("no such bucket", "Create the bucket, or correct the store's URL"),
    "AccessDenied|AllAccessDisabled|AccountProblem|Forbidden|403": (
        "access denied",
        "Check the access key, and that it may list, read, write and delete objects of this bucket",
    ),
    "InvalidAccessKeyId|InvalidToken": ("unknown access key", "Check the access key and the endpoint"),
    "SignatureDoesNotMatch": ("wrong secret key", "Check the secret key that belongs to this access key"),
    "PermanentRedirect|AuthorizationHeaderMalformed|IllegalLocationConstraintException|301|307": (
        "the bucket is in another region",
        "Set the store's region or endpoint",
    ),
    "QuotaExceeded|507": ("quota exceeded or no space left", "Free space in the store or raise its quota"),
    "NotImplemented|MethodNotAllowed|501": ("the server does not support this request", "Use another S3 server"),
    "RequestTimeTooSkewed": ("this machine's clock differs from the server's", "Set the clock"),
}
_TRANSIENT_CODES = {
    "SlowDown|Throttling|ThrottlingException|RequestLimitExceeded|TooManyRequests|429": (
        "rate limited by the server",
        "Try again later",
    ),
    "ExpiredToken|ExpiredTokenException|TokenRefreshRequired|RequestExpired": (
        "the credentials have expired",
        "Renew them; the transfer then continues",
    ),
    # InvalidPart: the answer to a part had another ETag than the part has.
    "BadDigest|IncompleteBody|XAmzContentSHA256Mismatch|InvalidPart|InvalidPartOrder": (
        "data was corrupted in transit",
        "Try again",
    ),
    r"InternalError|ServiceUnavailable|ConditionalRequestConflict|RequestTimeout|OperationAborted|408|5\d\d": (
        "server error",
        "Try again; see the server's log if it persists",
    ),
}

# What botocore raises without an answer: names of the exception's classes.
_PERMANENT_EXCEPTIONS = {
    "NoCredentialsError|PartialCredentialsError": (
        "no S3 credentials found",
        "Set the store's access_key and secret_key, a profile, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
    ),
    # RecursionError: botocore asks for the bucket's region, and is redirected again, without end.
    "incorrectly configured region|RecursionError": (
        "the bucket is in another region",
        "Set the store's region or endpoint",
    ),
    "ParamValidationError": ("not a valid request", "Check the bucket's name and the store's settings"),
}
_TRANSIENT_EXCEPTIONS = {
    # obstore writes before an exception of boto3's that its credentials come from outside.
    "CredentialRetrievalError|TokenRetrievalError|SSOError|External AWS credential provider": (
        "the credentials could not be fetched",
        "Log in again, or try later",
    ),
    "HTTPClientError|ConnectionError|IncompleteReadError|error sending request": (
        "the S3 server is unreachable",
        "Check the endpoint and the network",
    ),
    "ResponseParserError|NotS3Response|MissingEtag|NotPartial": (
        "not an S3 response",
        "Check that the endpoint is an S3 server, and any proxy before it",
    ),
}


def _patterns(form: str, kind: type[NightbridgeError], rows: Mapping[str, tuple[str, str]]) -> tuple[ErrorPattern, ...]:
    return tuple(ErrorPattern(form.format(names), kind, what, advice) for names, (what, advice) in rows.items())


_CODES = (
    ErrorPattern(r"^PreconditionFailed$", Taken, "another writer has stored other bytes there", TAKEN_ADVICE),
    ErrorPattern(r"^NoSuchUpload$", UploadGone, "another process ended the upload", "Run one harvest at a time"),
    *_patterns("^({})$", PermanentError, _PERMANENT_CODES),
    *_patterns("^({})$", TransientError, _TRANSIENT_CODES),
)
_EXCEPTIONS = (
    ErrorPattern(
        r"(?s)\bSSLError\b.*CERTIFICATE_VERIFY_FAILED|invalid peer certificate",
        PermanentError,
        "the server's certificate is not trusted",
        "Set the store's ca_bundle to the authority's file",
    ),
    *_patterns(r"\b({})\b", PermanentError, _PERMANENT_EXCEPTIONS),
    *_patterns(r"\b({})\b", TransientError, _TRANSIENT_EXCEPTIONS),
)
_OTHER_CODE = ErrorPattern("", PermanentError, "the server refused the request", "See the server's message")
_NO_ANSWER = ErrorPattern("", TransientError, "the request to the S3 server failed", "Try again")
_OTHER_EXCEPTION = ErrorPattern("", PermanentError, "boto3 refused the request")


@contextlib.contextmanager
def s3_errors(subject: str) -> Iterator[None]:
    """Turn what boto3 raises inside into a `TransientError` or `PermanentError` about `subject`."""
    try:
        yield
    except (aws.ClientError, aws.BotoCoreError, ResponseParserError, RecursionError) as error:
        raise translate(error, subject) from error


def translate(error: Exception, subject: str) -> NightbridgeError:
    """Build the error of ours for a botocore exception, with the server's own words where it has some."""
    if not isinstance(error, aws.ClientError):
        classes = " ".join(kind.__name__ for kind in type(error).__mro__)
        return (classify(f"{classes}: {error}", _EXCEPTIONS) or _OTHER_EXCEPTION).error(subject, str(error))
    code = error_code(error)
    message = str(error.response.get("Error", {}).get("Message", "")).strip()
    detail = f"{code}: {message}" if message and message != code else code
    known = classify(code, _CODES) or classify(str(http_status(error)), _CODES) or _OTHER_CODE
    return known.error(subject, detail)


def translate_text(text: str, subject: str) -> NightbridgeError:
    """Build the error of ours for one of obstore's, whose text quotes the server's answer."""
    what = text.partition("\n\nDebug source")[0]
    answered = (re.search(pattern, text) for pattern in (r"<Code>(\w+)</Code>", r"non-2xx status code: (\d+)"))
    codes = [found[1] for found in answered if found]
    if not codes:
        return (classify(text, _EXCEPTIONS) or _NO_ANSWER).error(subject, what)
    known = next(filter(None, (classify(code, _CODES) for code in codes)), _OTHER_CODE)
    return known.error(subject, f"{codes[0]}: {what}")


def error_code(error: aws.ClientError) -> str:
    """The code of an S3 error response, or the HTTP status where there was no body."""
    return str(error.response.get("Error", {}).get("Code", ""))


def http_status(error: aws.ClientError) -> int:
    """The HTTP status of an S3 error response, 0 when unknown."""
    return int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
