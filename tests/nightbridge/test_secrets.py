"""Secrets: found where a reference names them, masked in text wherever they are, found in binaries, and never shown."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nightbridge import secrets
from nightbridge.errors import DamagedData, InvalidInput, PermanentError
from nightbridge.models import SecretRef
from nightbridge.secrets import (
    MASK,
    MAX_SHAPE_BYTES,
    SecretFinder,
    copy_masked,
    find_shapes,
    mask_secrets,
    mask_text,
    resolve_secret,
)

TOKEN = "hf_PlantedToken"
SECRETS = ["hf_0123456789abcdef", "hf_0123456789abcdef-longer", "line\nbreak", "größe!"]


def test_a_secret_in_an_environment_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", TOKEN)

    assert resolve_secret(SecretRef(source="env", name="HF_TOKEN")) == TOKEN


def test_a_secret_in_a_block_is_asked_of_prefect() -> None:
    blocks = {"hf-token": TOKEN}

    assert resolve_secret(SecretRef(source="block", name="hf-token"), blocks.__getitem__) == TOKEN


@pytest.mark.parametrize("key", ["cmd_args.hf_token", "Tests.1.cmd_args.hf_token"])
def test_a_secret_in_a_toml_file(tmp_path: Path, key: str) -> None:
    file = tmp_path / "test.toml"
    table = f'hf_token = "{TOKEN}"'
    file.write_text(f"[cmd_args]\n{table}\n[[Tests]]\nid = 'a'\n[[Tests]]\n[Tests.cmd_args]\n{table}\n")

    assert resolve_secret(SecretRef(source="toml", name=f"{file}#{key}")) == TOKEN


@pytest.mark.parametrize("key", ["cmd_args.nowhere", "cmd_args", "cmd_args.hf_token.deeper", "Tests.5.x", ""])
def test_a_key_that_is_gone_is_named(tmp_path: Path, key: str) -> None:
    file = tmp_path / "test.toml"
    file.write_text(f'[cmd_args]\nhf_token = "{TOKEN}"\n[[Tests]]\nx = "{TOKEN}"\n')

    with pytest.raises(InvalidInput, match="secret not found in toml") as refused:
        resolve_secret(SecretRef(source="toml", name=f"{file}#{key}"))

    assert refused.value.thing == f"{file}#{key}"
    assert TOKEN not in str(refused.value)


@pytest.mark.parametrize("content", [None, f'hf_token = "{TOKEN}', b"\xff\xfe"])
def test_a_file_that_cannot_be_read_any_more_is_named(tmp_path: Path, content: str | bytes | None) -> None:
    file = tmp_path / "test.toml"
    if content is not None:
        file.write_bytes(content if isinstance(content, bytes) else content.encode())

    with pytest.raises(InvalidInput, match=f"{file}#hf_token: ") as refused:
        resolve_secret(SecretRef(source="toml", name=f"{file}#hf_token"))

    assert TOKEN not in str(refused.value)


@pytest.mark.parametrize("value", [None, ""])
def test_a_variable_that_is_not_set_or_empty_is_named(monkeypatch: pytest.MonkeyPatch, value: str | None) -> None:
    monkeypatch.delenv("HF_TOKEN", raising=False)
    if value is not None:
        monkeypatch.setenv("HF_TOKEN", value)

    with pytest.raises(InvalidInput, match="HF_TOKEN: secret not found in env"):
        resolve_secret(SecretRef(source="env", name="HF_TOKEN"))


def test_a_block_without_prefect_says_how_it_is_read() -> None:
    with pytest.raises(
        InvalidInput, match=r"hf-token: Prefect Secret blocks are available in flows only\. Run it as a flow"
    ):
        resolve_secret(SecretRef(source="block", name="hf-token"))


def test_the_longer_of_two_secrets_is_masked_whole() -> None:
    assert mask_secrets("abcdef abcd", ["abcd", "abcdef"]) == f"{MASK} {MASK}"


def test_a_value_too_short_to_be_a_secret_masks_no_words() -> None:
    assert mask_secrets("the cat", ["", "a", "cat"]) == "the cat"


@given(before=st.text(), secret=st.text(min_size=4), after=st.text())
def test_a_masked_text_never_holds_the_secret(before: str, secret: str, after: str) -> None:
    masked = mask_secrets(before + secret + after, [secret])

    assert secret not in masked.replace(MASK, "\0") or secret in MASK


# --- files -----------------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(secrets, "CHUNK", 16)


def masked(folder: Path, data: bytes, secrets: list[str]) -> bytes:
    (folder / "source").write_bytes(data)
    copy_masked(folder / "source", folder / "copy", secrets)
    return (folder / "copy").read_bytes()


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
    assert result == whole(mask_secrets(text, secrets).encode()).decode()


@given(parts=st.lists(st.sampled_from([*SECRETS, "hf_" + "Ab1" * 11, "key=", " ", "\n", "x"])))
def test_a_text_in_memory_is_masked_as_a_file_is(tmp_path_factory: pytest.TempPathFactory, parts: list[str]) -> None:
    text = "".join(parts)
    in_a_file = masked(tmp_path_factory.mktemp("masked"), text.encode(), SECRETS)
    assert mask_text(text, SECRETS).encode() == in_a_file


def test_values_too_short_to_be_secrets_are_left(tmp_path: Path) -> None:
    assert masked(tmp_path, b"abc abcd", ["abc", "", "abcd"]) == b"abc " + MASK.encode()


def test_the_number_of_masks_is_returned(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"token=" + SECRETS[0].encode() + b"\n" + SECRETS[0].encode())
    assert copy_masked(tmp_path / "f", tmp_path / "copy", SECRETS) == 2


def test_a_copy_that_cannot_be_written_is_not_blamed_on_the_source(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"text")
    with pytest.raises(PermanentError, match="no-such-folder/copy: cannot be written"):
        copy_masked(tmp_path / "f", tmp_path / "no-such-folder" / "copy", SECRETS)
    with pytest.raises(DamagedData, match="gone: cannot be read"):
        copy_masked(tmp_path / "gone", tmp_path / "copy", SECRETS)


# --- shapes ----------------------------------------------------------------------------------------------------------

# Put together here, so that no scanner of this repository takes them for real ones.
HF = b"hf_" + b"AbCdEfGhIjKlMnOpQrStUvWxYz01234567"
NVAPI = b"nvapi-" + b"Ab_9-" * 12 + b"wxyz"
AWS = b"AKIA" + b"IOSFODNN7EXAMPLE"
WANDB = b"0123456789abcdef0123456789abcdef01234567"
AWS_SECRET = b"wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY"


def whole(data: bytes) -> bytes:
    """The data with every shape masked, looked at in one piece."""
    pieces, done = [], 0
    for match in find_shapes(data):
        start, end = match.span(match.lastindex or 0)
        pieces += [data[done:start], MASK.encode()]
        done = end
    return b"".join([*pieces, data[done:]])


@pytest.mark.parametrize(
    ("before", "secret", "after"),
    [
        (b"login with ", HF, b"."),
        (b"'", HF, b"'"),
        (b"", NVAPI, b" "),
        (b"id ", AWS, b"\n"),
        (b"WANDB_API_KEY=", WANDB, b" python train.py"),
        (b'  "api-key": "', WANDB, b'",'),
        (b'{\\"access_token\\": \\"', WANDB, b'\\"}'),
        (b"wandb_api_key: ", WANDB, b"\n"),
        (b"aws_secret_access_key = ", AWS_SECRET, b"\n"),
        (b"--token=", WANDB, b" --steps=5"),
        (b"token: '", WANDB, b"'"),
        (b"?key=", WANDB, b"&x=1"),
        (b"password: ", b"correct7horse", b"\n"),
        (b"Authorization: Bearer ", b"abcDEFghi.jkl", b"\r\n"),
        (b'"authorization": "Bearer ', WANDB, b'"'),
    ],
)
def test_what_has_the_shape_of_a_secret_is_masked_and_its_name_stays(
    tmp_path: Path, before: bytes, secret: bytes, after: bytes
) -> None:
    data = before + secret + after
    assert masked(tmp_path, data, []) == before + MASK.encode() + after
    assert copy_masked(tmp_path / "source", tmp_path / "copy", []) == 1


@pytest.mark.parametrize(
    "text",
    [
        WANDB,
        b"commit " + WANDB,
        b"megatron_bridge: " + WANDB,
        b"pad_token: " + WANDB,
        b"eos_token=unk0123456789abcdefghij",
        b"max-token=0123456789abcdefghij",
        b"eos_token_id: 128001",
        b"tokenizer_type: HuggingFaceTokenizer0123456789",
        b"tokenizer_model: meta-llama/Meta-Llama-3-8B",
        b"num_tokens: 4096000000000000000000",
        b"key=decoder.layers.0.self_attention.linear_qkv.weight",
        b"run key: llama3-8b-2026-11-20-0123456789",
        b"monkey=0123456789abcdefghij",
        b"token: true",
        b"hf_token: null",
        b"export HF_TOKEN=$HF_TOKEN",
        b"WANDB_API_KEY=/run/secrets/wandb1",
        b"secret: the-word-without-a-digit",
        b"hf_hub_download",
        b"AKIAIOSFODNN7EXAMPLEANDMORE",
        b"authorization: none",
    ],
)
def test_what_only_resembles_a_secret_is_left(tmp_path: Path, text: bytes) -> None:
    assert masked(tmp_path, text + b"\n", []) == text + b"\n"


@pytest.mark.parametrize(
    "text",
    [b"x " + HF, b"wandb-api-key: " + WANDB, b"pad_token: " + WANDB, b"max-token=" + WANDB, b"token: " + WANDB + b".w"],
)
def test_a_split_anywhere_changes_nothing(text: bytes) -> None:
    filler = b"\n" * (MAX_SHAPE_BYTES + 100)
    data = filler + text + filler
    expected = whole(data)
    decided_inside = 0
    for split in range(len(filler) + MAX_SHAPE_BYTES - 20, len(filler) + MAX_SHAPE_BYTES + len(text) + 20):
        masker = secrets._Masker(find_shapes, MAX_SHAPE_BYTES)
        first = masker.mask(data[:split], last=False)
        decided_inside += len(filler) < len(first) < len(filler) + len(text)
        assert first + masker.mask(data[split:], last=False) + masker.mask(b"", last=True) == expected
    assert decided_inside >= len(b"token: ")


def test_a_value_that_is_known_is_masked_whole_also_where_a_shape_would_end_inside_it(tmp_path: Path) -> None:
    secret = "abc12345$and more of it"
    assert masked(tmp_path, b"api_key: " + secret.encode() + b"\n", [secret]) == b"api_key: " + MASK.encode() + b"\n"


def test_a_line_of_a_million_separators_is_looked_at_in_no_time(tmp_path: Path) -> None:
    data = b"key=" * 250_000
    assert whole(data) == data


# --- binaries --------------------------------------------------------------------------------------------------------


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
