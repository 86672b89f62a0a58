"""Only a whole squashfs file passes."""

import hashlib
from pathlib import Path

import pytest

from nightbridge.errors import DamagedData
from nightbridge.images.image import check_squashfs, sha256_of


def test_a_whole_image_passes(tmp_path: Path, tiny_image: bytes) -> None:
    path = tmp_path / "image.sqsh"
    # mksquashfs pads its files to 4 KiB.
    path.write_bytes(tiny_image.ljust(4096, b"\0"))

    check_squashfs(path)

    assert sha256_of(path) == hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (lambda image: b"", "empty"),
        (lambda image: image[:50], "not a complete squashfs image"),
        (lambda image: bytes(9000), "not a complete squashfs image"),
        (lambda image: bytes(96) + image[96:], "not a complete squashfs image"),
        (lambda image: image[:-1], "truncated: 243 of 244 bytes"),
    ],
)
def test_anything_else_does_not(tmp_path: Path, tiny_image: bytes, content: object, reason: str) -> None:
    path = tmp_path / "image.sqsh"
    path.write_bytes(content(tiny_image))  # type: ignore[operator]

    with pytest.raises(DamagedData, match=reason):
        check_squashfs(path)
