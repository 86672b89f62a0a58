"""Secrets in files: masked in text wherever they lie, found in binaries, everything else untouched."""

import hashlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nightbridge.errors import PermanentError
from nightbridge.secrets import MASK, mask_secrets
from nightbridge.store import redaction
from nightbridge.store.redaction import SecretFinder, copy_masked

SECRETS = ["hf_0123456789abcdef", "hf_0123456789abcdef-longer", "line\nbreak", "größe!"]


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redaction, "CHUNK", 16)


def masked(folder: Path, data: bytes, secrets: list[str]) -> bytes:
    (folder / "source").write_bytes(data)
    digest = copy_masked(folder / "source", folder / "copy", secrets)
    result = (folder / "copy").read_bytes()
    assert (digest.size, digest.sha256) == (len(result), hashlib.sha256(result).hexdigest())
    return result


@pytest.mark.parametrize("offset", range(40))
@pytest.mark.parametrize("secret", SECRETS)
def test_a_secret_is_masked_wherever_it_crosses_a_chunk(tmp_path: Path, secret: str, offset: int) -> None:
    data = b"\xff" * offset + secret.encode() + b"\xfe end"
    assert masked(tmp_path, data, SECRETS) == b"\xff" * offset + MASK.encode() + b"\xfe end"


@given(
    parts=st.lists(st.sampled_from([*SECRETS, "hf_", "0123456789abcdef", " ", "\n", "x", "hf_0123456789abcdef-"])),
    secrets=st.lists(st.sampled_from(SECRETS), unique=True),
)
def test_a_file_is_masked_as_a_whole_text_would_be(
    tmp_path_factory: pytest.TempPathFactory, parts: list[str], secrets: list[str]
) -> None:
    text = "".join(parts)
    result = masked(tmp_path_factory.mktemp("masked"), text.encode(), secrets).decode()
    assert result == mask_secrets(text, secrets)


def test_values_too_short_to_be_secrets_are_left(tmp_path: Path) -> None:
    assert masked(tmp_path, b"abc abcd", ["abc", "", "abcd"]) == b"abc " + MASK.encode()


def test_the_number_of_masks_is_told(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"token=" + SECRETS[0].encode() + b"\n" + SECRETS[0].encode())
    assert copy_masked(tmp_path / "f", tmp_path / "copy", SECRETS).secrets == 2


def test_a_copy_that_cannot_be_written_is_not_blamed_on_the_source(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"text")
    with pytest.raises(PermanentError, match="no-such-folder/copy: cannot be written"):
        copy_masked(tmp_path / "f", tmp_path / "no-such-folder" / "copy", SECRETS)
    with pytest.raises(FileNotFoundError):
        copy_masked(tmp_path / "gone", tmp_path / "copy", SECRETS)


def found(data: bytes, secrets: list[str], piece: int = 16) -> int:
    finder = SecretFinder(secrets)
    for start in range(0, len(data), piece):
        part = data[start : start + piece]
        finder.feed(bytearray(part.ljust(piece, b"?")), len(part))
    return finder.found


@pytest.mark.parametrize("offset", range(40))
@pytest.mark.parametrize("piece", [3, 16, 100])
def test_a_secret_is_found_in_a_binary_wherever_it_crosses_a_piece(offset: int, piece: int) -> None:
    for end in (b"", b"\x00" * 50):
        assert found(b"\x00" * offset + SECRETS[0].encode() + end, SECRETS, piece) == 1


def test_what_lies_in_a_buffer_behind_the_piece_is_not_in_the_file() -> None:
    finder = SecretFinder(SECRETS)
    finder.feed(bytearray(SECRETS[0].encode()), len(SECRETS[0]) - 1)
    finder.feed(bytearray(b"x" * 16), 16)
    assert finder.found == 0


def test_a_short_value_in_a_binary_is_chance() -> None:
    assert found(b"\x001234\x00", ["1234"]) == 0
