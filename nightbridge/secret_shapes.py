"""What a secret looks like whose value nobody told us: tokens with a known beginning, and values named as secrets.

Every shape is anchored to a text that only secrets have. Forty hexadecimal digits alone are a W&B key, and every git
commit; `pad_token`, `eos_token_id` and `tokenizer` are no secrets at all. So a name counts only when it is one of a
list, and a value only when it has letters and digits.
"""

import re
from collections.abc import Iterator

_MAX_NAME = 96
_MAX_VALUE = 4096

MAX_SHAPE_BYTES = _MAX_NAME + _MAX_VALUE
"""The most bytes of a match."""

LEFT_CONTEXT = 13
"""Bytes before a match that decide about it; behind it, it is one."""

_ANCHORS = (b"authorization", b"hf_", b"nvapi-", b"akia", b"asia", b"key", b"token", b"secret", b"passw")
"""What every shape begins with, in lower case. To look for these first is ten times as fast as one big expression."""

_TOKENS = (
    rb"(?<![A-Za-z0-9_])("
    rb"hf_[A-Za-z0-9]{30,200}"  # Hugging Face: 34 characters
    rb"|nvapi-[A-Za-z0-9_-]{20,200}"  # NVIDIA NGC: 64
    rb"|(?:AKIA|ASIA)[A-Z0-9]{16}(?![A-Za-z0-9])"  # AWS access key ids
    rb")"
)

_QUALIFIERS = (
    *(b"access", b"account", b"api", b"auth", b"aws", b"bearer", b"client", b"github", b"gitlab", b"hf", b"hub"),
    *(b"huggingface", b"ngc", b"private", b"refresh", b"registry", b"secret", b"session", b"signing", b"wandb"),
)
_QUALIFIED = b"|".join(
    rb"(?<=%s)(?<![A-Za-z0-9]%s)" % (each, each)
    for qualifier in _QUALIFIERS
    for each in (qualifier, qualifier + b"[_-]")
)
_ASSIGNED = rb"\\?[\"']?[ \t]{0,3}[:=][ \t]{0,3}\\?[\"']?"
# Both occur among the first characters of any real secret, and in few words.
_LETTER_AND_DIGIT = rb"(?=[\w.~+/=-]{0,63}?[0-9])(?=[\w.~+/=-]{0,63}?[A-Za-z])"

_NAMED = (
    rb"(?i:(?:"
    + _QUALIFIED
    + rb")(?:key|token|secret)|(?<![A-Za-z0-9])passw(?:or)?d)"
    # No path, and nothing that the shell has yet to fill in.
    + _ASSIGNED
    + rb"(?![./~])"
    + _LETTER_AND_DIGIT
    + rb"([\w.~+/=-]{8,4096})"
)
# Names as ordinary as these also stand before tensors' names, run keys and paths, which have other characters in them.
_ORDINARY = (
    rb"(?i:(?<![A-Za-z0-9_])(?<![A-Za-z0-9]-)(?:key|token|secret))"
    + _ASSIGNED
    + _LETTER_AND_DIGIT
    + rb"([A-Za-z0-9+]{20,4096}+)(?![\w./-])"
)
_AUTHORIZATION = rb"(?i:authorization)" + _ASSIGNED + rb"(?i:bearer|basic|token)[ \t]{1,3}([\w.~+/=-]{8,4096})"

_SHAPES = re.compile(b"|".join((_AUTHORIZATION, _TOKENS, _NAMED, _ORDINARY)))


def find_shapes(data: bytes, start: int = 0) -> Iterator[re.Match[bytes]]:
    """Find what looks like a secret from `start` on: matches in order that do not overlap.

    A match begins with the secret's name; the one group that takes part in it is the secret alone.
    """
    lowered = data.lower()
    for position in sorted(position for anchor in _ANCHORS for position in _occurrences(lowered, anchor, start)):
        if position >= start and (match := _SHAPES.match(data, position)):
            start = match.end()
            yield match


def _occurrences(data: bytes, text: bytes, start: int) -> Iterator[int]:
    position = data.find(text, start)
    while position >= 0:
        yield position
        position = data.find(text, position + 1)
