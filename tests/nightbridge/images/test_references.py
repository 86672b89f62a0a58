"""References are understood as people write them, and written as each enroot understands them."""

import pytest

from nightbridge.errors import InvalidInput
from nightbridge.images.registry import parse_reference

DIGEST = "sha256:" + "0a" * 32


@pytest.mark.parametrize(
    "text",
    [
        "nvcr.io#nvidia/nemo:26.02.00",
        "nvcr.io/nvidia/nemo:26.02.00",
        "docker://nvcr.io#nvidia/nemo:26.02.00",
        "docker://nvcr.io/nvidia/nemo:26.02.00",
        "  nvcr.io/nvidia/nemo:26.02.00 ",
    ],
)
def test_one_image_in_all_its_spellings_is_one_image(text: str) -> None:
    reference = parse_reference(text)

    assert str(reference) == "nvcr.io/nvidia/nemo:26.02.00"
    assert reference.uri(3) == reference.uri(4) == "docker://nvcr.io#nvidia/nemo:26.02.00"
    assert reference.identity == parse_reference("nvcr.io#nvidia/nemo:26.02.00").identity


@pytest.mark.parametrize(
    ("text", "uri"),
    [
        ("ubuntu", "docker://ubuntu:latest"),
        ("ubuntu:22.04", "docker://ubuntu:22.04"),
        ("nvidia/cuda:12", "docker://nvidia/cuda:12"),
        ("docker.io/library/ubuntu:22.04", "docker://library/ubuntu:22.04"),
        ("localhost/team/x:1", "docker://localhost#team/x:1"),
        ("localhost:5000/x", "docker://localhost:5000#x:latest"),
        ("registry.example.org:5000#team/deep/x:1", "docker://registry.example.org:5000#team/deep/x:1"),
        ("$oauthtoken@nvcr.io#nvidia/nemo:1", "docker://$oauthtoken@nvcr.io#nvidia/nemo:1"),
        (f"nvcr.io/nvidia/nemo@{DIGEST}", f"docker://nvcr.io#nvidia/nemo@{DIGEST}"),
        (f"nvcr.io/nvidia/nemo:26.02@{DIGEST}", f"docker://nvcr.io#nvidia/nemo@{DIGEST}"),
        (f"ubuntu@{DIGEST}", f"docker://ubuntu@{DIGEST}"),
    ],
)
def test_the_address_for_enroot_4(text: str, uri: str) -> None:
    assert parse_reference(text).uri(4) == uri


@pytest.mark.parametrize("text", [f"ubuntu@{DIGEST}", f"ubuntu:22.04@{DIGEST}", f"docker://ubuntu:22.04@{DIGEST}"])
def test_a_name_before_a_digest_is_no_user(text: str) -> None:
    reference = parse_reference(text)

    assert (reference.user, reference.name, reference.digest) == (None, "ubuntu", DIGEST)


def test_enroot_3_is_given_a_digest_in_the_place_of_the_tag() -> None:
    reference = parse_reference(f"nvcr.io/nvidia/nemo:26.02@{DIGEST}")

    assert reference.uri(3) == f"docker://nvcr.io#nvidia/nemo:{DIGEST}"


@pytest.mark.parametrize(
    "text",
    [
        "NVCR.io/NVIDIA/nemo:1",
        "nvcr.io/nvidia/nemo:",
        "nvcr.io/nvidia/nemo:a b",
        "nvcr.io/nvidia/nemo@sha256:123",
        "dockerd://nemo:1",
        "--help",
        "nvcr.io#",
        "nemo;rm -rf x",
    ],
)
def test_what_is_no_reference_is_refused(text: str) -> None:
    with pytest.raises(InvalidInput, match="not an image reference"):
        parse_reference(text)


def test_a_password_is_refused_without_showing_it() -> None:
    with pytest.raises(InvalidInput, match="credentials file") as caught:
        parse_reference("me:hunter22@nvcr.io#nvidia/nemo:1")

    assert "hunter22" not in str(caught.value)
