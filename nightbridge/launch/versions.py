"""Megatron-Bridge versions: read from a pin that looks like a tag, else taken as the newest."""

import re
from functools import lru_cache
from typing import NamedTuple


class Version(NamedTuple):
    """A released version of Megatron-Bridge; tuples compare as versions do."""

    major: int
    minor: int
    patch: int = 0

    def __str__(self) -> str:
        return "HEAD" if self == HEAD else f"v{self.major}.{self.minor}.{self.patch}"


HEAD = Version(9999, 0)
"""Newer than every release: the development branch."""

_TAG = re.compile(r"^[vr]?(\d{1,4})\.(\d{1,4})(?:\.(\d{1,4}))?(?:[.-]?(?:rc|a|b|dev)\d*)?$")


@lru_cache(maxsize=1024)
def version_of_ref(ref: str) -> Version | None:
    """Return the version that a tag (`v0.4.1`, `0.4.1`) or release branch (`r0.4.0`) names; None for any other ref."""
    match = _TAG.match(ref.rsplit("/", 1)[-1])
    return Version(*(int(part or 0) for part in match.groups())) if match else None


def version_for_pin(ref: str) -> Version:
    """Return the version of a pin: its own when it says so, else `HEAD`."""
    return version_of_ref(ref) or HEAD
