"""Versions of Megatron-Bridge by what a pin is called."""

import pytest

from nightbridge.launch.versions import HEAD, Version, version_for_pin, version_of_ref


@pytest.mark.parametrize(
    ("ref", "version"),
    [
        ("v0.4.1", Version(0, 4, 1)),
        ("0.4.1", Version(0, 4, 1)),
        ("r0.2.0", Version(0, 2, 0)),
        ("r0.4.0", Version(0, 4, 2)),  # a branch of 2026-08 with all three releases of v0.4
        ("refs/heads/r0.3.0", Version(0, 3, 1)),
        ("refs/tags/v0.5", Version(0, 5)),
        ("v0.6.0rc1", Version(0, 6, 0)),
        ("main", None),
        ("06f25c227ef9d3d9b22e5561fb9f46e1cbdab7e2", None),
    ],
)
def test_a_pin_that_looks_like_a_tag_or_a_release_branch_says_its_version(ref: str, version: Version | None) -> None:
    assert version_of_ref(ref) == version


def test_any_other_pin_is_taken_for_the_newest() -> None:
    assert version_for_pin("main") == HEAD
    assert str(HEAD) == "HEAD"
