"""Secrets: looked up in the process that needs them; `masking` takes them out of what leaves it.

A `SecretRef` is all that models hold. The domain resolves environment variables and TOML keys; blocks are Prefect's, so
the tasks layer passes a function for them. Logins are lines of netrc(5), the format that curl and enroot use.

A secret that nobody named is known by its shape: tokens with a known beginning, and values named as secrets. Every
shape is anchored to a text that only secrets have. Forty hexadecimal digits alone are a W&B key, and every git commit;
`pad_token`, `eos_token_id` and `tokenizer` are no secrets at all. So a name counts only when it is one of a list, and a
value only when it has letters and digits.
"""

import contextlib
import netrc
import os
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from nightbridge.errors import InvalidInput, PermanentError

if TYPE_CHECKING:
    # git's credential helper reads logins, and starts too often to pay for pydantic's import.
    from nightbridge.models import Model, SecretRef

BlockValue = Callable[[str], str]
"""Returns the value of a Prefect `Secret` block by name; None of it where there is no Prefect."""

Login = tuple[str, str]
"""User and password. Never logged, never part of a model."""


def resolve_secret(ref: "SecretRef", block_value: BlockValue | None = None) -> str:
    """Return the secret's value.

    Raises:
        InvalidInput: It does not exist or is empty. The message names the source, never a value.
    """
    value = _RESOLVERS[ref.source](ref.name, block_value)
    if not value:
        raise InvalidInput(
            f"secret not found in {ref.source}", subject=ref.name, advice="Set it, or name another source"
        )
    return value


def _from_block(name: str, block_value: BlockValue | None) -> str:
    if block_value is None:
        raise InvalidInput("Prefect Secret blocks are available in flows only", subject=name, advice="Run it as a flow")
    return block_value(name)


def _from_toml(name: str, _: BlockValue | None) -> str:
    file, _hash, dotted = name.rpartition("#")  # a folder may be called C#, and no key is
    try:
        table: object = tomllib.loads(Path(file).read_text(encoding="utf-8-sig"))
    except (OSError, ValueError) as error:
        advice = "Fix it, or start a new run"
        raise InvalidInput("cannot read the file that holds this secret", subject=name, advice=advice) from error
    for part in dotted.split("."):
        if isinstance(table, list) and part.isdecimal() and int(part) < len(table):
            table = table[int(part)]  # an element of [[Tests]]
            continue
        if not isinstance(table, dict) or part not in table:
            return ""
        table = table[part]
    return table if isinstance(table, str) else ""


_RESOLVERS: dict[str, Callable[[str, BlockValue | None], str]] = {
    "env": lambda name, _: os.environ.get(name, ""),
    "block": _from_block,
    "toml": _from_toml,
}


def named_secrets(settings: "Model", above: str = "") -> Iterator[tuple[str, "SecretRef"]]:
    """Every secret that settings name, such as those of a site, by its dotted key in their file."""
    from nightbridge.models import Model, SecretRef

    for name, value in settings:
        if isinstance(value, SecretRef):
            yield f"{above}{name}", value
        elif isinstance(value, Model):
            yield from named_secrets(value, f"{above}{name}.")


@contextlib.contextmanager
def file_in_memory(content: str) -> Iterator[Path]:
    """A file with these lines that this user's processes can read under the given path, and that no disk ever holds."""
    descriptor = os.memfd_create("login")
    try:
        os.write(descriptor, (content.rstrip("\n") + "\n").encode())
        yield Path(f"/proc/{os.getpid()}/fd/{descriptor}")
    finally:
        os.close(descriptor)


def read_netrc(path: Path, name: str) -> Mapping[str, Login]:
    """The logins of a file by host; `name` is what it is called in messages.

    Raises:
        PermanentError: They cannot be read.
    """
    try:
        hosts = netrc.netrc(path).hosts
    except (netrc.NetrcParseError, OSError, UnicodeDecodeError) as error:
        # The parser's own message shows the word that it stumbled over, which may be the password.
        where = f" at line {error.lineno}" if isinstance(error, netrc.NetrcParseError) else ""
        advice = "Each is a line `machine HOST login USER password PASSWORD` (netrc(5))"
        raise PermanentError(f"cannot read these logins{where}", subject=name, advice=advice) from None
    return {host: (user, password) for host, (user, _, password) in hosts.items()}


# --- what they look like ---------------------------------------------------------------------------------------------

MAX_SHAPE_BYTES = 96 + 8192
"""The most bytes of a match: of a name, and of a value."""

SHAPE_CONTEXT = 13
"""Bytes before a match that decide about it; behind it, it is one."""

_ANCHORS = (b"authorization", b"key", b"token", b"secret", b"passw", b"://")
"""What every named secret and every login begins with, in lower case: to look for these first is ten times as fast."""

# Beginning and rest of the tokens whose issuers publish their form, for scanners like this one: GitHub ("About
# authentication to GitHub"), GitLab ("Token overview"), Slack ("Tokens"), AWS ("IAM identifiers"), RFC 7519, RFC 7468;
# the others from the rules of gitleaks, whose lengths are bounded here.
_TOKENS = (
    (rb"hf_|api_org_", rb"[A-Za-z0-9]{30,200}"),  # Hugging Face
    (rb"wandb_v1_", rb"\w{40,200}"),  # W&B; its older keys are hexadecimal digits alone
    (rb"local-", rb"[0-9a-f]{40}(?!\w)"),  # a W&B server of one's own
    (rb"nvapi-", rb"[\w-]{20,200}"),  # NVIDIA NGC
    (rb"gh[pousr]_", rb"[A-Za-z0-9]{36,255}"),
    (rb"github_pat_", rb"\w{22,255}"),
    (rb"gl(?:pat|dt|rt|cbt|ptt|ft|imt|agent|oas|soat|ffct)-", rb"[\w.=-]{20,300}"),
    (rb"xox[abeoprs]-|xapp-", rb"[A-Za-z0-9.-]{10,250}"),
    (rb"hooks\.slack\.com/", rb"\w+/[\w/+-]{20,200}"),
    (rb"dckr_pat_", rb"[\w-]{20,100}"),
    (rb"sk-(?:ant|proj|svcacct|admin|or-v1)-", rb"[\w-]{20,300}"),
    (rb"sk-", rb"[A-Za-z0-9]{20}T3BlbkFJ[A-Za-z0-9]{20}"),  # OpenAI
    (rb"AIza", rb"[\w-]{35}(?![\w-])"),  # Google Cloud
    (rb"ya29\.", rb"[\w-]{20,400}"),
    (rb"npm_", rb"[A-Za-z0-9]{36}(?!\w)"),
    (rb"pypi-AgE", rb"[\w-]{50,400}"),
    (rb"hv[sb]\.", rb"[\w-]{24,300}"),  # HashiCorp Vault
    (rb"gl(?:c|sa)_", rb"[\w+/=]{32,400}"),  # Grafana
    (rb"dapi", rb"[0-9a-f]{32}(?:-\d)?(?!\w)"),  # Databricks
    (rb"SG\.", rb"[\w-]{22}\.[\w-]{43}(?!\w)"),  # SendGrid
    (rb"sk_live_|rk_live_", rb"[A-Za-z0-9]{20,200}"),
    (rb"A(?:KI|SI|BI|CC)A", rb"[A-Z0-9]{16}(?![A-Za-z0-9])"),
    (rb"eyJ", rb"[\w-]{8,512}\.eyJ[\w-]{8,4096}\.[\w-]{0,2048}"),
    (
        rb"-----BEGIN ",
        rb"[A-Z ]{0,40}PRIVATE KEY[A-Z ]{0,20}-----(?:[^-]|-(?!----)){1,8000}(?:-----END [A-Z ]{4,60}-----)?",
    ),
)
# Each begins with a letter, no class of them: then `re` skips what begins none, five times as fast.
_TOKEN_START = re.compile(b"|".join(start for start, _ in _TOKENS))
_TOKEN = rb"(?<![A-Za-z0-9_])(" + b"|".join(rb"(?:%s)%s" % token for token in _TOKENS) + rb")"

# Every token is a row of at least so many of these characters, each a `t` in the table of `bytes.translate`.
_LEAST_TOKEN, _BLOCK = 15, 1 << 16
_IN_TOKENS = bytes(ord("t") if re.match(rb"[\w.=+/ -]", bytes((byte,))) else 0 for byte in range(256))

_QUALIFIERS = (
    *(b"access", b"account", b"api", b"auth", b"aws", b"bearer", b"client", b"github", b"gitlab", b"hf", b"hub"),
    *(b"huggingface", b"ngc", b"private", b"refresh", b"registry", b"secret", b"security", b"session", b"signing"),
    b"wandb",
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

# No variable, no password that is masked already, and no tag before an image's digest.
_LOGIN = rb"://[^/@\s:]{0,64}:(?![$<{]|\*+@)([^/@\s:\"']{8,256})@(?!sha256:)(?=\w)"

_SHAPES = re.compile(b"|".join((_AUTHORIZATION, _LOGIN, _TOKEN, _NAMED, _ORDINARY)))


class Found(NamedTuple):
    """Where a match begins, and what of it is the secret."""

    begin: int
    start: int
    end: int


def find_shapes(data: bytes, start: int = 0) -> Iterator[Found]:
    """Find what looks like a secret from `start` on: matches in order that do not overlap.

    A match begins with the secret's name, where it has one.
    """
    lowered = data.lower()
    named = (position for anchor in _ANCHORS for position in positions(lowered, anchor, start))
    for position in sorted((*named, *(token.start() for token in _TOKEN_START.finditer(data, start)))):
        if position >= start and (match := _SHAPES.match(data, position)):
            start = match.end()
            yield Found(match.start(), *match.span(match.lastindex or 0))


def positions(data: bytes, text: bytes, start: int) -> Iterator[int]:
    """Where a text occurs from `start` on, also where it overlaps itself."""
    position = data.find(text, start)
    while position >= 0:
        yield position
        position = data.find(text, position + 1)


def holds_token(data: bytes | bytearray, size: int, most: int) -> bool:
    """Whether in the first `size` bytes of binary data is a token of a known form that begins in the first `most`."""
    blocks = (data[at : at + _BLOCK] for at in range(0, most, _BLOCK - _LEAST_TOKEN))
    # Weights hardly ever have so many characters of a token in a row: then nothing is left for `re`.
    has_row = any(b"t" * _LEAST_TOKEN in block.translate(_IN_TOKENS) for block in blocks)
    tokens = _TOKEN_START.finditer(data, 0, most) if has_row else ()
    return any(_SHAPES.match(data, start.start(), size) for start in tokens)


_PASSWORD = re.compile(r"://[^/@\s:]*:[^/@\s]+@")


def holds_secret(text: str) -> bool:
    """Whether a text holds a token of a known form, a value named as a secret, or an address with a password."""
    return _PASSWORD.search(text) is not None or any(find_shapes(text.encode("utf-8", "surrogateescape")))
