"""What an S3 server or the way to it answered, as our errors: what passes with time, what a person must change."""

import contextlib
from collections.abc import Iterator
from typing import NamedTuple

from botocore import exceptions as aws
from botocore.parsers import ResponseParserError

from nightbridge.errors import NightbridgeError, PermanentError, TransientError


class Meaning(NamedTuple):
    """What an answer means for a person."""

    kind: type[NightbridgeError]
    what: str
    advice: str


_NO_BUCKET = Meaning(PermanentError, "no such bucket", "Create the bucket, or correct the store's URL")
_DENIED = Meaning(
    PermanentError,
    "access denied",
    "Check the access key, and that it may list, read, write and delete objects of this bucket",
)
_WRONG_KEY = Meaning(PermanentError, "unknown access key", "Check the access key and the endpoint")
_WRONG_SECRET = Meaning(PermanentError, "wrong secret key", "Check the secret key that belongs to this access key")
_WRONG_REGION = Meaning(PermanentError, "the bucket is in another region", "Set the store's region or endpoint")
_QUOTA = Meaning(PermanentError, "quota exceeded or no space left", "Free space in the store or raise its quota")
_NOT_SUPPORTED = Meaning(PermanentError, "the server does not support this request", "Use another S3 server")
_CLOCK = Meaning(PermanentError, "this machine's clock differs from the server's", "Set the clock")
_BUSY = Meaning(TransientError, "the server asks to slow down", "Try again later")
_SERVER = Meaning(TransientError, "the server failed", "Try again; see the server's log if it stays")
_EXPIRED = Meaning(TransientError, "the credentials have expired", "Renew them; then it goes on")
_CORRUPTED = Meaning(TransientError, "data was damaged on the way", "Try again")

# Codes of the S3 error response; a HEAD answer has no body, so its code is the status. Amazon's list:
# https://docs.aws.amazon.com/AmazonS3/latest/API/ErrorResponses.html; QuotaExceeded and 507 are Ceph's.
MEANINGS: dict[str, Meaning] = {
    "NoSuchBucket": _NO_BUCKET,
    "AccessDenied": _DENIED,
    "AllAccessDisabled": _DENIED,
    "AccountProblem": _DENIED,
    "403": _DENIED,
    "Forbidden": _DENIED,
    "InvalidAccessKeyId": _WRONG_KEY,
    "InvalidToken": _WRONG_KEY,
    "SignatureDoesNotMatch": _WRONG_SECRET,
    "PermanentRedirect": _WRONG_REGION,
    "301": _WRONG_REGION,
    "AuthorizationHeaderMalformed": _WRONG_REGION,
    "IllegalLocationConstraintException": _WRONG_REGION,
    "QuotaExceeded": _QUOTA,
    "507": _QUOTA,
    "NotImplemented": _NOT_SUPPORTED,
    "501": _NOT_SUPPORTED,
    "MethodNotAllowed": _NOT_SUPPORTED,
    "RequestTimeTooSkewed": _CLOCK,
    "SlowDown": _BUSY,
    "Throttling": _BUSY,
    "ThrottlingException": _BUSY,
    "RequestLimitExceeded": _BUSY,
    "TooManyRequests": _BUSY,
    "429": _BUSY,
    "InternalError": _SERVER,
    "ServiceUnavailable": _SERVER,
    "RequestTimeout": _SERVER,
    "OperationAborted": _SERVER,
    "408": _SERVER,
    "ExpiredToken": _EXPIRED,
    "ExpiredTokenException": _EXPIRED,
    "TokenRefreshRequired": _EXPIRED,
    "RequestExpired": _EXPIRED,
    "BadDigest": _CORRUPTED,
    "IncompleteBody": _CORRUPTED,
    "XAmzContentSHA256Mismatch": _CORRUPTED,
}

_NO_CREDENTIALS = Meaning(
    PermanentError,
    "no S3 credentials found",
    "Set the store's access_key and secret_key, a profile, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
)
_CERTIFICATE = Meaning(
    PermanentError, "the server's certificate is not trusted", "Set the store's ca_bundle to the authority's file"
)
_UNREACHABLE = Meaning(TransientError, "the S3 server does not answer", "Check the endpoint and the network")
_BAD_REQUEST = Meaning(PermanentError, "not a valid request", "Check the bucket's name and the store's settings")
_NOT_S3 = Meaning(TransientError, "the answer is not one of S3", "Check that the endpoint is an S3 server")
_CREDENTIAL_SOURCE = Meaning(TransientError, "the credentials could not be fetched", "Log in again, or try later")

# The first that fits counts, so special ones come before the general.
_EXCEPTIONS: tuple[tuple[type[Exception], Meaning], ...] = (
    (aws.NoCredentialsError, _NO_CREDENTIALS),
    (aws.PartialCredentialsError, _NO_CREDENTIALS),
    (aws.CredentialRetrievalError, _CREDENTIAL_SOURCE),
    (aws.TokenRetrievalError, _CREDENTIAL_SOURCE),
    (aws.SSOError, _CREDENTIAL_SOURCE),
    (aws.ParamValidationError, _BAD_REQUEST),
    (aws.HTTPClientError, _UNREACHABLE),
    (aws.ConnectionError, _UNREACHABLE),
    (aws.IncompleteReadError, _UNREACHABLE),
    (ResponseParserError, _NOT_S3),
)


LOCAL_ERRORS = (aws.BotoCoreError, ResponseParserError)
"""What boto3 raises when there is no S3 error response."""


@contextlib.contextmanager
def s3_errors(thing: str) -> Iterator[None]:
    """Turn what boto3 raises inside into a `TransientError` or `PermanentError` about `thing`."""
    try:
        yield
    except (aws.ClientError, *LOCAL_ERRORS) as error:
        raise translate(error, thing) from error


def translate(error: Exception, thing: str) -> NightbridgeError:
    """Say what a botocore exception means, with the server's own words where it has some."""
    meaning, detail = _client_error(error) if isinstance(error, aws.ClientError) else _local_error(error)
    return meaning.kind(f"{meaning.what} ({detail})" if detail else meaning.what, thing=thing, advice=meaning.advice)


def error_code(error: aws.ClientError) -> str:
    """The code of an S3 error response, or the HTTP status where there was no body."""
    return str(error.response.get("Error", {}).get("Code", ""))


def http_status(error: aws.ClientError) -> int:
    """The HTTP status of an S3 error response, 0 when unknown."""
    return int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))


def _client_error(error: aws.ClientError) -> tuple[Meaning, str]:
    code, status = error_code(error), http_status(error)
    message = str(error.response.get("Error", {}).get("Message", "")).strip()
    detail = f"{code}: {message}" if message and message != code else code
    known = MEANINGS.get(code) or MEANINGS.get(str(status))
    if known:
        return known, detail
    if status >= 500:
        return _SERVER, detail
    return Meaning(PermanentError, "the server refused the request", "See the server's message"), detail


def _local_error(error: Exception) -> tuple[Meaning, str]:
    if isinstance(error, aws.SSLError) and "CERTIFICATE_VERIFY_FAILED" in str(error):
        return _CERTIFICATE, ""
    for kind, meaning in _EXCEPTIONS:
        if isinstance(error, kind):
            return meaning, "" if meaning is _NO_CREDENTIALS else str(error)
    return Meaning(PermanentError, "boto3 refused the request", ""), str(error)
