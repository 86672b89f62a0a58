"""Errors of S3 servers and of the connection to them as errors of ours: transient, or for the user to fix."""

import contextlib
import re
from collections.abc import Iterator, Mapping

from botocore import exceptions as aws
from botocore.parsers import ResponseParserError

from nightbridge.errors import ErrorPattern, NightbridgeError, PermanentError, TransientError, classify


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
    "NotImplemented|MethodNotAllowed|501": (
        "the server does not support this request",
        "Use another S3 server",
    ),
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
    "CredentialRetrievalError|TokenRetrievalError|SSOError": (
        "the credentials could not be fetched",
        "Log in again, or try later",
    ),
    "HTTPClientError|ConnectionError|IncompleteReadError|error sending request": (
        "the S3 server is unreachable",
        "Check the endpoint and the network",
    ),
    "ResponseParserError|NotS3Response|MissingEtag|NotPartial": (
        "not an S3 response",
        "Check that the endpoint is an S3 server, and what stands before it",
    ),
}
_UNTRUSTED = ErrorPattern(
    r"(?s)\bSSLError\b.*CERTIFICATE_VERIFY_FAILED|invalid peer certificate",
    PermanentError,
    "the server's certificate is not trusted",
    "Set the store's ca_bundle to the authority's file",
)


def _patterns(form: str, kind: type[NightbridgeError], rows: Mapping[str, tuple[str, str]]) -> tuple[ErrorPattern, ...]:
    return tuple(ErrorPattern(form.format(names), kind, what, advice) for names, (what, advice) in rows.items())


_CODES = (
    ErrorPattern(r"^PreconditionFailed$", Taken, "another writer has stored other bytes there", TAKEN_ADVICE),
    ErrorPattern(r"^NoSuchUpload$", UploadGone, "another process ended the upload", "Run one harvest at a time"),
    *_patterns("^({})$", PermanentError, _PERMANENT_CODES),
    *_patterns("^({})$", TransientError, _TRANSIENT_CODES),
)
_EXCEPTIONS = (
    _UNTRUSTED,
    *_patterns(r"\b({})\b", PermanentError, _PERMANENT_EXCEPTIONS),
    *_patterns(r"\b({})\b", TransientError, _TRANSIENT_EXCEPTIONS),
)
_OTHER_CODE = ErrorPattern("", PermanentError, "the server refused the request", "See the server's message")
_NO_ANSWER = ErrorPattern("", TransientError, "the request to the S3 server failed", "Try again")
_OTHER_EXCEPTION = ErrorPattern("", PermanentError, "boto3 refused the request")


@contextlib.contextmanager
def s3_errors(thing: str) -> Iterator[None]:
    """Turn what boto3 raises inside into a `TransientError` or `PermanentError` about `thing`."""
    try:
        yield
    except (aws.ClientError, aws.BotoCoreError, ResponseParserError, RecursionError) as error:
        raise translate(error, thing) from error


def translate(error: Exception, thing: str) -> NightbridgeError:
    """Build the error of ours for a botocore exception, with the server's own words where it has some."""
    if not isinstance(error, aws.ClientError):
        classes = " ".join(kind.__name__ for kind in type(error).__mro__)
        return (classify(f"{classes}: {error}", _EXCEPTIONS) or _OTHER_EXCEPTION).error(thing, str(error))
    code = error_code(error)
    message = str(error.response.get("Error", {}).get("Message", "")).strip()
    detail = f"{code}: {message}" if message and message != code else code
    known = classify(code, _CODES) or classify(str(http_status(error)), _CODES) or _OTHER_CODE
    return known.error(thing, detail)


def translate_text(text: str, thing: str) -> NightbridgeError:
    """Build the error of ours for one of obstore's, whose text quotes the server's answer."""
    code = re.search(r"<Code>(\w+)</Code>", text) or re.search(r"non-2xx status code: (\d+)", text)
    what = text.partition("\n\nDebug source")[0]
    known = classify(code[1], _CODES) or _OTHER_CODE if code else classify(text, _EXCEPTIONS) or _NO_ANSWER
    return known.error(thing, f"{code[1]}: {what}" if code else what)


def error_code(error: aws.ClientError) -> str:
    """The code of an S3 error response, or the HTTP status where there was no body."""
    return str(error.response.get("Error", {}).get("Code", ""))


def http_status(error: aws.ClientError) -> int:
    """The HTTP status of an S3 error response, 0 when unknown."""
    return int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
