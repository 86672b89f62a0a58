"""Signatures that take over a checksum that is known: botocore would make the SHA-256 of every body once more."""

import base64
from typing import Any

import botocore.auth

_SIGNER = "nightbridge-s3v4"
_REPLACED = frozenset({"v4", "s3v4"})
"""What botocore calls Signature Version 4 of an S3 request; presigned URLs and S3 Express have signers of their own."""


class KnownChecksumAuth(botocore.auth.S3SigV4Auth):  # type: ignore[misc]  # botocore has no types
    """Signature Version 4 of a request whose `x-amz-checksum-sha256` is that of its body."""

    def payload(self, request: Any) -> str:
        """The SHA-256 that is signed and that the server checks, lower-case hex."""
        known = request.headers.get("x-amz-checksum-sha256")
        return base64.b64decode(known).hex() if known else str(super().payload(request))


botocore.auth.AUTH_TYPE_MAPS[_SIGNER] = KnownChecksumAuth


def sign_with_known_checksums(client: Any) -> None:
    """Make an S3 client take the checksum that a caller gives with a body for the signature too."""
    client.meta.events.register_first("choose-signer.s3", _choose)


def _choose(signature_version: Any, **_: Any) -> str | None:
    return _SIGNER if signature_version in _REPLACED else None
