"""Released versions of Megatron-Bridge, and which of them a tag or a release branch means."""

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

V0_3_0, V0_3_1 = Version(0, 3), Version(0, 3, 1)
V0_4_0, V0_4_2 = Version(0, 4), Version(0, 4, 2)
V0_5_0, V0_6_0 = Version(0, 5), Version(0, 6)
RELEASES = (V0_3_0, V0_3_1, V0_4_0, Version(0, 4, 1), V0_4_2, V0_5_0, Version(0, 5, 1), V0_6_0)
"""Every release with a launcher, as of August 2026."""

_TAG = re.compile(r"^([vr]?)(\d{1,4})\.(\d{1,4})(?:\.(\d{1,4}))?(?:[.-]?(?:rc|a|b|dev)\d*)?$")


@lru_cache(maxsize=1024)
def version_of_ref(ref: str) -> Version | None:
    """Return the version that a tag (`v0.4.1`, `0.4.1`) names, or the newest on a release branch (`r0.4.0`); else None.

    The later releases of a minor version are made on its branch: `r0.4.0` holds v0.4.2.
    """
    match = _TAG.match(ref.rsplit("/", 1)[-1])
    if match is None:
        return None
    version = Version(*(int(part or 0) for part in match.groups()[1:]))
    later = (known for known in RELEASES if known[:2] == version[:2] and known > version)
    return max(later, default=version) if match[1] == "r" else version


def is_release(ref: str) -> bool:
    """Whether a pin looks like the tag of a release, whose code never changes; that of a branch does."""
    return version_of_ref(ref) is not None and not ref.rsplit("/", 1)[-1].startswith("r")


def version_for_pin(ref: str) -> Version:
    """Return the version of a pin: that of a tag or release branch, else `HEAD`."""
    return version_of_ref(ref) or HEAD
