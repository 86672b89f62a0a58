"""Masking: secrets are taken out of texts wherever they are, and found in binaries."""

import base64
import bz2
import errno
import gzip
import html
import json
import lzma
import os
import quopri
import random
import re
import shlex
import textwrap
import time
import tracemalloc
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from urllib.parse import quote, quote_plus

import markupsafe
import pyarrow
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from nightbridge import files, masking, secrets
from nightbridge.errors import DamagedData, PermanentError
from nightbridge.masking import MASK, SecretFinder, copy_masked, holds_packed, mask_text
from nightbridge.secrets import MAX_SHAPE_BYTES, find_shapes

TOKEN = "hf_PlantedToken"
SECRETS = ["hf_0123456789abcdef", "hf_0123456789abcdef-longer", "line\nbreak", "größe!"]


def test_the_longer_of_two_secrets_is_masked_whole() -> None:
    assert mask_text("abcdef abcd", ["abcd", "abcdef"]) == f"{MASK} {MASK}"


def test_a_value_too_short_to_be_a_secret_masks_no_words() -> None:
    assert mask_text("the cat", ["", "a", "cat"]) == "the cat"


PRINTED = st.characters(codec="utf-8", exclude_categories=("Cc", "Zs", "Zl", "Zp"))
"""What a secret may be made of: no white space, which may stand anywhere in the text."""


@given(before=st.text(), secret=st.text(PRINTED, min_size=4), after=st.text())
def test_a_masked_text_never_holds_the_secret(before: str, secret: str, after: str) -> None:
    masked = mask_text(before + secret + after, [secret])

    assert secret not in masked.replace(MASK, "\0") or secret in MASK


# --- encodings -------------------------------------------------------------------------------------------------------

HARD = "s3cr/et+\"wörd'<&>%\\ 9"
"""Every encoding has something to escape in it."""


@pytest.mark.parametrize("secret", ["hf_0123456789abcdefXYZ", HARD, "-" * 8, "a\nsecret of\n  three lines"])
@pytest.mark.parametrize(
    "encode",
    [
        str,
        repr,
        json.dumps,
        lambda text: json.dumps(text, ensure_ascii=False),
        lambda text: json.dumps({"log": json.dumps({"token": text})}),
        lambda text: json.dumps(text, ensure_ascii=False).replace("/", "\\/"),
        html.escape,
        shlex.quote,
        lambda text: "'" + text.replace("'", "'\\''") + "'",
        lambda text: "'" + text.replace("'", "''") + "'",
        lambda text: re.sub(r"[ \"'<>&;$*?!()\[\]{}|^`,\\]", r"\\\g<0>", text),
        lambda text: html.escape(text).replace("&#x27;", "&apos;"),
        lambda text: html.escape(text, quote=False),
        lambda text: str(markupsafe.escape(text)),
        quote,
        quote_plus,
        lambda text: quote(text, safe=""),
        lambda text: quote(text, safe="").lower(),
        lambda text: "".join(f"%{byte:02X}" for byte in text.encode()),
        lambda text: text.encode().hex(),
        lambda text: text.encode().hex().upper(),
        lambda text: text.encode().hex(" "),
        lambda text: text.encode().hex(":"),
        lambda text: "".join(f"\\x{byte:02x}" for byte in text.encode()),
        lambda text: "\n".join(text),
        lambda text: "\r\n    ".join(text),
        lambda text: "\x1b[1;31m".join(text),
        lambda text: "\x1b(B\x1b[m".join(text),  # as `tput sgr0` ends a colour
        lambda text: "\x1b]8;;http://x\x07\x1b[0m\n".join(text),
        lambda text: textwrap.fill(text.encode().hex(), 7, initial_indent="  "),
    ],
)
def test_a_value_is_masked_in_every_encoding(tmp_path: Path, encode: Callable[[str], str], secret: str) -> None:
    if secret.lower() != secret and encode(secret) == quote(secret, safe="").lower():
        secret = secret.lower()  # lower-case escapes of an upper-case secret are another secret
    text = encode(secret)
    expected = masked(tmp_path, b"before " + text.encode() + b" after", [secret]).decode()

    assert text.strip("\"'{}\\ ") not in expected
    assert MASK in expected
    assert len(expected) <= len(f"before {MASK} after") + len(text) - len(text.strip("\"'{}:\\ logtken"))


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be", "utf-32-le", "utf-32-be"])
def test_a_value_is_masked_in_a_text_of_wide_characters(tmp_path: Path, encoding: str) -> None:
    text = f"before {SECRETS[0]} after"
    left = masked(tmp_path, text.encode(encoding), SECRETS)
    assert left.replace(b"\0", b"") == f"before {MASK} after".encode()


@pytest.mark.parametrize("wrap", [0, 5, 76])
@pytest.mark.parametrize("encode", [base64.b64encode, base64.urlsafe_b64encode])
def test_a_value_is_masked_in_base64_wherever_it_begins_in_what_was_encoded(
    wrap: int, encode: Callable[[bytes], bytes]
) -> None:
    secret = "hf_?~ÿ?~ÿ?0123456789abcdef"
    for before, after in product(("", "x", "user:", "user1:", "user22:"), ("", "\n", "more of it")):
        encoded = encode((before + secret + after).encode()).decode()
        text = "\n".join(textwrap.wrap(encoded, wrap)) if wrap else encoded

        left = mask_text(text, [secret]).replace("\n", "").split(MASK)

        # Of the first and the last byte of the value one character each remains, at most: less than all its bits.
        begin, end = len(before.encode()) * 8, len((before + secret).encode()) * 8
        assert [len(part) for part in left] == [-(-begin // 6), len(encoded) - end // 6], (before, after)


@pytest.mark.parametrize(
    ("secret", "part"),
    [
        (
            "machine git.example.org login me password pass-word-77\nmachine b login c password other-word",
            "pass-word-77",
        ),
        ("machine git.example.org login me password pass-word-77\nmachine b login c password other-word", "other-word"),
        ("machine nvcr.io login $oauthtoken password $NGC_PLANTED", "key-of-the-registry"),
        ("https://hooks.example.org/services/T0/B0/word", "/services/T0/B0/word"),
        ('machine b login c password "other word 77"', "other word 77"),
        ("http://svc:of-the-proxy@proxy:3128", "of-the-proxy"),
    ],
)
def test_of_a_login_or_an_address_the_secret_part_alone_is_masked(
    monkeypatch: pytest.MonkeyPatch, secret: str, part: str
) -> None:
    monkeypatch.setenv("NGC_PLANTED", "key-of-the-registry")

    assert mask_text(f"a {part} b", [secret]) == f"a {MASK} b"


@pytest.mark.parametrize("size", [16, 4096])
def test_a_value_with_gaps_is_masked_wherever_a_chunk_ends_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    monkeypatch.setattr(files, "CHUNK", size)
    text = b"x" * 5000 + b"\x1b[31m".join(bytes([byte]) for byte in SECRETS[0].encode()) + b"\n" + b"y" * 5000

    assert masked(tmp_path, text, SECRETS) == b"x" * 5000 + MASK.encode() + b"\n" + b"y" * 5000


def test_a_text_of_nothing_but_parts_of_a_value_is_masked_in_linear_time(tmp_path: Path) -> None:
    def seconds(count: int) -> float:
        began = time.thread_time()
        assert MASK.encode() not in masked(tmp_path, b"hf_01234567\n" * count, ["hf_0123456789abcdef"])
        return time.thread_time() - began

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "CHUNK", 1 << 20)
        short, long = (min(seconds(count) for _ in range(3)) for count in (20_000, 80_000))
    assert long < 10 * short


# --- pieces ----------------------------------------------------------------------------------------------------------

OTHERS = "[rank3] loading the tokenizer of token 7\n"
WRAPPED = "hf_0123456789abcdefXYZ-and-a-middle-and-a-tail-of-it"


@pytest.mark.parametrize("other", [OTHERS, OTHERS * 3, "\x1b[1m" + OTHERS], ids=["a line", "three lines", "a colour"])
@pytest.mark.parametrize(
    "encode",
    [
        str,
        lambda text: text.encode().hex(":"),
        lambda text: base64.b64encode(b"x" + text.encode()).decode(),
        lambda text: "".join(f"%{byte:02X}" for byte in text.encode()),
    ],
)
def test_pieces_of_a_value_are_masked_where_another_ranks_lines_stand_between(
    tmp_path: Path, encode: Callable[[str], str], other: str
) -> None:
    text = encode(WRAPPED)
    first, second, third = text[:14], text[14:28], text[28:]
    for end, indent in product(("\n", "\r\n", "   \n"), ("", "        ", "\t")):
        shown = f"{other}token {first}{end}{other}{indent}{second}{end}{other}{indent}{third} is refused\n{other}"

        left = masked(tmp_path, shown.encode(), [WRAPPED]).decode()

        assert [piece for piece in (first, second, third[:-2]) if piece in left] == []
        assert left.count(MASK) == 3
        assert left.replace(MASK, "").count(other) == shown.count(other)


@pytest.mark.parametrize(
    "folded",
    [
        yaml.dump({"key": f"é{WRAPPED[:14]}\\{WRAPPED[14:]}"}, width=20),
        f"curl -H {WRAPPED[:14]}\\\n    {WRAPPED[14:]}",
        f"token: {WRAPPED[:14]}=\r\n{WRAPPED[14:]}",
        quopri.encodestring(b"a" * 60 + WRAPPED.encode()).decode(),
    ],
    ids=["yaml", "shell", "quoted-printable", "quopri"],
)
def test_a_value_is_masked_where_a_sign_says_that_the_next_line_goes_on_with_it(folded: str) -> None:
    left = mask_text(folded, [WRAPPED, f"{WRAPPED[:14]}\\{WRAPPED[14:]}"])
    assert WRAPPED[:12] not in left
    assert WRAPPED[-20:] not in left


@pytest.mark.parametrize("cut", range(12, 41))
def test_wherever_a_value_is_cut_less_than_a_piece_of_it_remains(cut: int) -> None:
    left = mask_text(f"token {WRAPPED[:cut]}\n{OTHERS}    {WRAPPED[cut:]}\n", [WRAPPED])

    assert left == f"token {MASK}\n{OTHERS}    {MASK}\n"


@pytest.mark.parametrize(
    "text", ["see 0123456789abcdef in it\n", "\n0123456789abcdef in it\n", "hf_01234567\n", "x\n  a-tail-of-i\n"]
)
def test_what_stands_elsewhere_in_a_line_or_is_short_is_no_piece(text: str) -> None:
    assert mask_text(text, [WRAPPED]) == text


# --- files -----------------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "CHUNK", 16)


def masked(folder: Path, data: bytes, secrets: list[str]) -> bytes:
    (folder / "source").write_bytes(data)
    copy_masked(folder / "source", folder / "copy", secrets)
    return (folder / "copy").read_bytes()


@pytest.mark.parametrize("secret", SECRETS)
def test_a_secret_is_masked_wherever_it_crosses_a_chunk(tmp_path: Path, secret: str) -> None:
    for offset in range(40):
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
    assert result == mask_text(text, secrets)
    assert not any(secret in result for secret in secrets)


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


TOKENS = (
    *(b"gh%s_" % kind + b"Ab1" * 12 for kind in (b"p", b"o", b"u", b"s", b"r")),
    b"github_pat_" + b"Ab1" * 7 + b"_" + b"Cd2" * 19,
    b"glpat-" + b"Ab1_-" * 4,
    b"glrt-" + b"t1_Ab1-" * 4,
    b"xoxb-" + b"123456789012-" * 2 + b"AbCdEf",
    b"https://hooks.slack.com/"[8:] + b"services/T00000000/B00000000/" + b"Ab1" * 8,
    b".".join((b"eyJ" + b"hbGciOiJIUzI1NiJ9", b"eyJ" + b"zdWIiOiIxMjM0In0", b"Ab1-_" * 8)),
    b"-----BEGIN RSA " + b"PRIVATE KEY-----\n" + b"Ab1/+" * 600 + b"\n-----END RSA PRIVATE KEY-----",
    b"-----BEGIN " + b"PRIVATE KEY-----\\n" + b"Ab1/+" * 300 + b"\\n-----END PRIVATE KEY-----",
    b"wandb" + b"_v1_" + b"Ab1" * 25,
    b"local-" + WANDB,
    b"dckr_pat_" + b"Ab1-_" * 5,
    b"sk-ant-" + b"Ab1-_" * 8,
    b"sk-" + b"Ab1Cd" * 4 + b"T3Blbk" + b"FJ" + b"Ef2Gh" * 4,
    b"AIza" + b"Ab1-_" * 7,
    b"ya29." + b"Ab1-_" * 20,
    b"npm_" + b"Ab1" * 12,
    b"pypi-AgE" + b"Ab1-_" * 30,
    b"hvs." + b"Ab1-_" * 18,
    b"glc_" + b"Ab1+/" * 20,
    b"dapi" + b"0123456789abcdef" * 2,
    b"SG." + b"Ab1-_" * 4 + b"cD." + b"Ab1-_" * 8 + b"eF3",
    b"sk_live_" + b"Ab1" * 8,
)


def whole(data: bytes) -> bytes:
    """The data with every shape masked, looked at in one piece."""
    pieces, done = [], 0
    for _, start, end in find_shapes(data):
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
        (b"proxy http://me:", b"correct7horse", b"@proxy.example.org:3128"),
        (b"redis://:", b"correct-horse", b"@127.0.0.1/0"),
        (b"?X-Amz-Security-Token=", AWS_SECRET.replace(b"/", b"+"), b"&X-Amz-Expires=3600"),
        *((b"with ", token, b" it") for token in TOKENS),
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
        b"ghp_short",
        b"the_glpat-is-a-prefix-of-many-tokens-and-none",
        b"ghp_" + b"x" * 35,
        b"eyJhbGciOiJIUzI1NiJ9.no-second-part-0123456789",
        b"-----BEGIN CERTIFICATE-----" + b"A" * 64 + b"-----END CERTIFICATE-----",
        b"local-0123456789abcdef0123456789abcdef0123456789",
        b"sk-learn-1.5.2-with-a-rather-long-name-behind-it",
        b"https://me:$GIT_PASSWORD@git.example.org/x.git",
        b"ssh://git@git.example.org:29418/x.git, me@example.org",
        b"tcp://node1:29500, node2:29500 and s3://bucket/a:long-name@night",
        b"docker://nvcr.io#nvidia/nemo:26.06.01@sha256",
        b"docker://ubuntu:noble-20261013@sha256:0123",
    ],
)
def test_what_only_resembles_a_secret_is_left(tmp_path: Path, text: bytes) -> None:
    assert masked(tmp_path, text + b"\n", []) == text + b"\n"


def test_a_login_counts_once(tmp_path: Path) -> None:
    """Prefect masks it, too, as in the address of its own database."""
    (tmp_path / "log").write_bytes(b"redis://me:correct-horse@db postgresql://prefect:********@db\n")
    assert copy_masked(tmp_path / "log", tmp_path / "copy", ["correct-horse"]) == 1


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
        masker = masking._Masker(find_shapes, MAX_SHAPE_BYTES)
        first = masker.mask(data[:split], last=False)
        decided_inside += len(filler) < len(first) < len(filler) + len(text)
        assert first + masker.mask(data[split:], last=False) + masker.mask(b"", last=True) == expected
    assert decided_inside >= len(b"token: ")


def test_a_value_that_is_known_is_masked_whole_also_where_a_shape_would_end_inside_it(tmp_path: Path) -> None:
    secret = "abc12345$and more of it"
    assert masked(tmp_path, b"api_key: " + secret.encode() + b"\n", [secret]) == b"api_key: " + MASK.encode() + b"\n"


@pytest.mark.parametrize(
    "unit",
    [
        *(
            b"-----BEGIN PRIVATE KEY-----",
            b"-eyJ",
            b".eyJ01234567.",
            b"hf_",
            b"-glpat-",
            b"xoxb-1-",
            b"\x1b[",
            b"\x1b]a",
        ),
        *(
            b"\n",
            b"token: ",
            b"authorization: bearer ",
            b"password=a",
            b"\x1b[31mhf_0123",
            b"68665f30313233",
            b"%68%66",
        ),
    ],
)
def test_a_hostile_log_takes_time_in_proportion_to_its_length(unit: bytes) -> None:
    def seconds(size: int) -> float:
        text = (unit * size)[:size].decode("latin-1")
        began = time.thread_time()
        mask_text(text, SECRETS)
        return time.thread_time() - began

    seconds(1)
    short = min(seconds(1 << 16) for _ in range(3))
    assert short < 0.5
    assert any(seconds(1 << 18) < 12 * short for _ in range(3))


def test_a_line_of_a_million_separators_is_looked_at_in_no_time(tmp_path: Path) -> None:
    data = b"key=" * 250_000
    assert whole(data) == data


def test_a_key_of_kilobytes_takes_little_memory() -> None:
    """Such as a service account's file, in every encoding."""
    key = random.Random(1).randbytes(1200).hex()
    tracemalloc.start()
    assert mask_text(f"a {key} b", [key]) == f"a {MASK} b"
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 64 << 20


# --- binaries --------------------------------------------------------------------------------------------------------


WIDE = ("utf-16-le", "utf-16-be", "utf-32-le", "utf-32-be")


def found(data: bytes, secrets: list[str], piece: int = 16) -> bool:
    finder = SecretFinder(secrets)
    for start in range(0, len(data), piece):
        part = data[start : start + piece]
        finder.feed(bytearray(part.ljust(piece, b"?")), len(part))
    return finder.found


@pytest.mark.parametrize("piece", [3, 16, 100])
def test_a_secret_is_found_in_a_binary_wherever_it_crosses_a_piece(piece: int) -> None:
    for offset, end in product(range(40), (b"", b"\x00" * 50)):
        assert found(b"\x00" * offset + SECRETS[0].encode() + end, SECRETS, piece), (offset, end)


def test_what_lies_in_a_buffer_behind_the_piece_is_not_in_the_file() -> None:
    finder = SecretFinder(SECRETS)
    finder.feed(bytearray(SECRETS[0].encode()), len(SECRETS[0]) - 1)
    finder.feed(bytearray(b"-" * 16), 16)
    assert not finder.found


def test_a_short_value_in_a_binary_is_chance() -> None:
    assert not found(b"\x001234\x00", ["1234"])


@pytest.mark.parametrize("shift", range(3))
@pytest.mark.parametrize("piece", [3, 16, 100])
def test_an_encoded_value_is_found_in_a_binary(shift: int, piece: int) -> None:
    wide = (SECRETS[0].encode(encoding) for encoding in WIDE)
    for text in (base64.b64encode(b"u" * shift + SECRETS[0].encode()), SECRETS[0].encode().hex().encode(), *wide):
        assert found(b"\0" * 21 + text + b"\0" * 30, SECRETS, piece)


@pytest.mark.parametrize("at_once", [16, 1 << 18])
@pytest.mark.parametrize("shift", range(40, 43))
def test_a_value_with_line_breaks_is_found_near_the_beginning_of_a_binary(
    monkeypatch: pytest.MonkeyPatch, shift: int, at_once: int
) -> None:
    monkeypatch.setattr(masking, "_BLOCK", at_once)
    wrapped = base64.encodebytes(b"u" * shift + SECRETS[0].encode() + b"u" * 99)
    assert found(b"\0" * 21 + wrapped, SECRETS, 1000)
    assert not found(b"\0" * 21 + wrapped.replace(b"\n", b"-"), SECRETS, 1000)


PACKERS: dict[str, Callable[[bytes], bytes]] = {
    "gzip": gzip.compress,
    "bzip2": bz2.compress,
    "xz": lzma.compress,
    "zstd": lambda data: bytes(pyarrow.compress(data, "zstd", asbytes=True)),
    "lz4": lambda data: bytes(pyarrow.compress(data, "lz4", asbytes=True)),
}


def found_packed(folder: Path, data: bytes) -> bool:
    (folder / "packed").write_bytes(data)
    with (folder / "packed").open("rb", buffering=0) as stream:
        found = holds_packed(stream, len(data), SECRETS)
        assert stream.tell() == 0
    return found


@pytest.mark.parametrize("pack", PACKERS.values(), ids=PACKERS)
@pytest.mark.parametrize("size", [0, 2000, 1_100_000])
def test_a_secret_is_found_in_what_a_packed_file_unpacks_to(
    tmp_path: Path, pack: Callable[[bytes], bytes], size: int
) -> None:
    noise, secret = random.Random(1).randbytes(size), SECRETS[0].encode()
    packed = pack(noise + secret + noise)
    assert found_packed(tmp_path, packed)
    assert found_packed(tmp_path, pack(noise) + packed), "a second member, as where a writer appends"
    assert not found_packed(tmp_path, pack(noise + secret[:-1] + noise))
    assert not found_packed(tmp_path, b"-" + packed), "no packed file"


@pytest.mark.parametrize("pack", PACKERS.values(), ids=PACKERS)
def test_a_packed_file_is_looked_at_as_far_as_it_is_whole(tmp_path: Path, pack: Callable[[bytes], bytes]) -> None:
    """A job that was killed left the beginning of its trace."""
    words = random.Random(1).randbytes(1 << 19).hex().encode()
    packed = pack(words[: 1 << 18] + SECRETS[0].encode() + words)
    assert found_packed(tmp_path, packed[:-5000])
    assert not found_packed(tmp_path, packed[:5000])
    found_packed(tmp_path, packed[:5000] + bytes(5000) + packed[10_000:])  # and no damage is an error


@pytest.mark.parametrize("pack", PACKERS.values(), ids=PACKERS)
def test_a_file_that_was_made_to_unpack_to_much_more_than_it_is_is_not_unpacked(
    tmp_path: Path, pack: Callable[[bytes], bytes]
) -> None:
    began = time.process_time()
    assert not found_packed(tmp_path, pack(bytes(30 << 20)) + pack(SECRETS[0].encode()))
    assert time.process_time() - began < 10


def test_an_xz_file_takes_no_more_memory_to_unpack_than_xz_needs(tmp_path: Path) -> None:
    for exponent, allowed in ((26, True), (28, False)):
        filters = [{"id": lzma.FILTER_LZMA2, "dict_size": 1 << exponent, "preset": 0}]
        packed = lzma.compress(SECRETS[0].encode(), filters=filters)
        assert found_packed(tmp_path, packed) is allowed


def test_a_packed_file_that_cannot_be_read_now_is_not_taken_for_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_packed: object) -> Iterator[bytes]:
        raise OSError(errno.EIO, os.strerror(errno.EIO))
        yield b""

    monkeypatch.setitem(masking._UNPACKERS, lzma.compress(b"")[:6], fail)
    with pytest.raises(OSError, match=os.strerror(errno.EIO)):
        found_packed(tmp_path, lzma.compress(b"text"))


@pytest.mark.parametrize("token", [HF, AWS, *TOKENS])
def test_a_token_is_found_near_the_beginning_of_a_binary(monkeypatch: pytest.MonkeyPatch, token: bytes) -> None:
    assert found(b"\0" * 500 + token + b"\0" * 50, [])

    monkeypatch.setattr(masking, "TOKENS_IN_BINARY", 400)
    assert not found(b"\0" * 500 + token + b"\0" * 50, [])


@pytest.mark.parametrize("token", [HF, AWS, *TOKENS, b"xapp-0123456789", b"-----BEGIN PRIVATE KEY-----\n"])
def test_a_token_is_found_wherever_it_crosses_a_block_of_a_binary(
    monkeypatch: pytest.MonkeyPatch, token: bytes
) -> None:
    monkeypatch.setattr(secrets, "_BLOCK", 32)
    assert all(found(b"\0" * offset + token + b"\0" * 50, [], 1000) for offset in range(64))


def test_random_weights_hold_no_secret() -> None:
    assert not found(random.Random(1).randbytes(8 << 20), [*SECRETS, TOKEN], 1 << 20)


@pytest.mark.parametrize("start", [each.decode() for start, _rest in secrets._TOKENS for each in start.split(b"|")])
def test_every_token_begins_with_a_character_that_is_none_of_a_choice(start: str) -> None:
    """One that begins with a class makes `re` try all of them at every byte: five times the time of a small file."""
    assert start[0].isalnum() or start[0] == "-"
