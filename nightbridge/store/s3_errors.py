"""Errors of S3 servers and of the connection to them as errors of ours: transient, or for the user to fix."""

import contextlib
from collections.abc import Iterator

from botocore import exceptions as aws
from botocore.parsers import ResponseParserError

from nightbridge.errors import ErrorPattern, NightbridgeError, PermanentError, TransientError, classify

# Codes of the S3 error response; a HEAD answer has no body, so its code is the status. Amazon's list:
# https://docs.aws.amazon.com/AmazonS3/latest/API/ErrorResponses.html; QuotaExceeded and 507 are Ceph's.
_CODES = (
    ErrorPattern(r"^NoSuchBucket$", PermanentError, "no such bucket", "Create the bucket, or correct the store's URL"),
    ErrorPattern(
        r"^(AccessDenied|AllAccessDisabled|AccountProblem|Forbidden|403)$",
        PermanentError,
        "access denied",
        "Check the access key, and that it may list, read, write and delete objects of this bucket",
    ),
    ErrorPattern(
        r"^(InvalidAccessKeyId|InvalidToken)$",
        PermanentError,
        "unknown access key",
        "Check the access key and the endpoint",
    ),
    ErrorPattern(
        r"^SignatureDoesNotMatch$",
        PermanentError,
        "wrong secret key",
        "Check the secret key that belongs to this access key",
    ),
    ErrorPattern(
        r"^(PermanentRedirect|AuthorizationHeaderMalformed|IllegalLocationConstraintException|301)$",
        PermanentError,
        "the bucket is in another region",
        "Set the store's region or endpoint",
    ),
    ErrorPattern(
        r"^(QuotaExceeded|507)$",
        PermanentError,
        "quota exceeded or no space left",
        "Free space in the store or raise its quota",
    ),
    ErrorPattern(
        r"^(NotImplemented|MethodNotAllowed|501)$",
        PermanentError,
        "the server does not support this request",
        "Use another S3 server",
    ),
    ErrorPattern(
        r"^RequestTimeTooSkewed$", PermanentError, "this machine's clock differs from the server's", "Set the clock"
    ),
    ErrorPattern(
        r"^(SlowDown|Throttling|ThrottlingException|RequestLimitExceeded|TooManyRequests|429)$",
        TransientError,
        "rate limited by the server",
        "Try again later",
    ),
    ErrorPattern(
        r"^(ExpiredToken|ExpiredTokenException|TokenRefreshRequired|RequestExpired)$",
        TransientError,
        "the credentials have expired",
        "Renew them; the transfer then continues",
    ),
    ErrorPattern(
        r"^(BadDigest|IncompleteBody|XAmzContentSHA256Mismatch)$",
        TransientError,
        "data was corrupted in transit",
        "Try again",
    ),
    ErrorPattern(
        r"^(InternalError|ServiceUnavailable|RequestTimeout|OperationAborted|408|5\d\d)$",
        TransientError,
        "server error",
        "Try again; see the server's log if it persists",
    ),
)
_OTHER_CODE = ErrorPattern("", PermanentError, "the server refused the request", "See the server's message")

# What botocore raises without an answer, as the names of the exception's classes and its text.
_EXCEPTIONS = (
    ErrorPattern(
        r"\b(NoCredentialsError|PartialCredentialsError)\b",
        PermanentError,
        "no S3 credentials found",
        "Set the store's access_key and secret_key, a profile, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
    ),
    ErrorPattern(
        r"\b(CredentialRetrievalError|TokenRetrievalError|SSOError)\b",
        TransientError,
        "the credentials could not be fetched",
        "Log in again, or try later",
    ),
    ErrorPattern(
        r"\bParamValidationError\b",
        PermanentError,
        "not a valid request",
        "Check the bucket's name and the store's settings",
    ),
    ErrorPattern(
        r"(?s)\bSSLError\b.*CERTIFICATE_VERIFY_FAILED",
        PermanentError,
        "the server's certificate is not trusted",
        "Set the store's ca_bundle to the authority's file",
    ),
    ErrorPattern(
        r"\b(HTTPClientError|ConnectionError|IncompleteReadError)\b",
        TransientError,
        "the S3 server is unreachable",
        "Check the endpoint and the network",
    ),
    ErrorPattern(
        r"\bResponseParserError\b",
        TransientError,
        "not an S3 response",
        "Check that the endpoint is an S3 server",
    ),
)
_OTHER_EXCEPTION = ErrorPattern("", PermanentError, "boto3 refused the request")


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
    return _client_error(error, thing) if isinstance(error, aws.ClientError) else _local_error(error, thing)


def error_code(error: aws.ClientError) -> str:
    """The code of an S3 error response, or the HTTP status where there was no body."""
    return str(error.response.get("Error", {}).get("Code", ""))


def http_status(error: aws.ClientError) -> int:
    """The HTTP status of an S3 error response, 0 when unknown."""
    return int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))


def _client_error(error: aws.ClientError, thing: str) -> NightbridgeError:
    code = error_code(error)
    message = str(error.response.get("Error", {}).get("Message", "")).strip()
    detail = f"{code}: {message}" if message and message != code else code
    known = classify(code, _CODES) or classify(str(http_status(error)), _CODES) or _OTHER_CODE
    return known.error(thing, detail)


def _local_error(error: Exception, thing: str) -> NightbridgeError:
    classes = " ".join(kind.__name__ for kind in type(error).__mro__)
    return (classify(f"{classes}: {error}", _EXCEPTIONS) or _OTHER_EXCEPTION).error(thing, str(error))
