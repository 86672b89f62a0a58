"""Secrets: looked up in the process that needs them, and masked wherever text leaves it.

A `SecretRef` is all that models hold. The domain resolves environment variables and TOML keys; blocks are Prefect's, so
the tasks layer passes a function for them. Logins are lines of netrc(5), the format that curl and enroot use.

Masked are the values that are known, and texts that have the shape of a secret: tokens with a known beginning, and
values named as secrets. Every shape is anchored to a text that only secrets have. Forty hexadecimal digits alone are a
W&B key, and every git commit; `pad_token`, `eos_token_id` and `tokenizer` are no secrets at all. So a name counts only
when it is one of a list, and a value only when it has letters and digits.

Text files are masked in the copy that leaves the machine; binary files are searched for known values. Both are read in
chunks of bytes, so a log of many gigabytes, one without a line break, and one that is not UTF-8 are all fine. A value
counts also where it crosses the border of two chunks or of two lines.
"""

import contextlib
import netrc
import os
import re
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from nightbridge.errors import DamagedData, InvalidInput, PermanentError
from nightbridge.files import open_regular

if TYPE_CHECKING:
    # git's credential helper reads logins, and starts too often to pay for pydantic's import.
    from nightbridge.models import SecretRef

# --- lookup ----------------------------------------------------------------------------------------------------------

BlockValue = Callable[[str], str]
"""Returns the value of a Prefect `Secret` block by name; None of it where there is no Prefect."""

Login = tuple[str, str]
"""User and password. Never logged, never part of a model."""


def resolve_secret(ref: "SecretRef", block_value: BlockValue | None = None) -> str:
    """Return the secret's value.

    Args:
        ref: Where it is found.
        block_value: Returns the value of a Prefect `Secret` block by name; None where there is no Prefect.

    Raises:
        InvalidInput: It does not exist or is empty. The message names the source, never a value.

    """
    value = _RESOLVERS[ref.source](ref.name, block_value)
    if not value:
        raise InvalidInput(f"secret not found in {ref.source}", thing=ref.name, advice="Set it, or name another source")
    return value


def _from_environment(name: str, _: BlockValue | None) -> str:
    return os.environ.get(name, "")


def _from_block(name: str, block_value: BlockValue | None) -> str:
    if block_value is None:
        raise InvalidInput("Prefect Secret blocks are available in flows only", thing=name, advice="Run it as a flow")
    return block_value(name)


def _from_toml(name: str, _: BlockValue | None) -> str:
    file, _hash, dotted = name.partition("#")
    try:
        table: object = tomllib.loads(Path(file).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InvalidInput(
            "cannot read the file that holds this secret", thing=name, advice="Fix it, or start a new run"
        ) from error
    for part in dotted.split("."):
        if isinstance(table, list) and part.isdecimal() and int(part) < len(table):
            table = table[int(part)]  # an element of [[Tests]]
            continue
        if not isinstance(table, dict) or part not in table:
            return ""
        table = table[part]
    return table if isinstance(table, str) else ""


_RESOLVERS: dict[str, Callable[[str, BlockValue | None], str]] = {
    "env": _from_environment,
    "block": _from_block,
    "toml": _from_toml,
}


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
        raise PermanentError(
            f"cannot read these logins{where}",
            thing=name,
            advice="Each is a line `machine HOST login USER password PASSWORD` (netrc(5))",
        ) from None
    return {host: (user, password) for host, (user, _, password) in hosts.items()}


_CREDENTIAL_NAME = re.compile(
    r"(?:TOKEN|KEY|KEY_ID|SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIALS?|_(?:AUTH|PASS|PAT|PWD))$", re.IGNORECASE
)
_URL_PASSWORD = re.compile(r"://[^/@\s:]*:[^/@\s]+@")


def looks_like_credential(name: str, value: str) -> bool:
    """Whether a variable is named like a credential, or its value is a known kind of token or a URL with a login."""
    return bool(
        _CREDENTIAL_NAME.search(name)
        or _URL_PASSWORD.search(value)
        or next(find_shapes(value.encode("utf-8", "surrogateescape")), None)
    )


# --- masking ---------------------------------------------------------------------------------------------------------

MASK = "********"

CHUNK = 1 << 20
"""Bytes of a file read at once."""

MIN_LENGTH = 4
"""Characters of the shortest value that is masked: shorter ones also occur in ordinary words."""

MIN_BYTES_IN_BINARY = 8
"""Bytes of the shortest value looked for in binary files: shorter ones occur in gigabytes of weights by chance."""

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


_Find = Callable[[bytes, int], Iterator[re.Match[bytes]]]


def mask_secrets(text: str, values: Iterable[str]) -> str:
    """Replace every secret value in `text` that has `MIN_LENGTH`."""
    for value in sorted({value for value in values if len(value) >= MIN_LENGTH}, key=len, reverse=True):
        text = text.replace(value, MASK)
    return text


def copy_masked(source: Path, target: Path, secrets: Iterable[str], below: Path | None = None) -> int:
    """Copy a text file with every secret value, and every text in a secret's shape, replaced by `MASK`.

    The longest value at a position wins; values that `mask_secrets` does not mask stay here too. Returns how many
    were masked. The source is opened as by `files.open_regular`.

    Raises:
        DamagedData: The source cannot be read.
        PermanentError: The target cannot be written.

    """
    maskers = _maskers(secrets)
    try:
        with target.open("wb") as writer:
            for piece in _pieces(source, below):
                masked = piece
                for masker in maskers:
                    masked = masker.mask(masked, last=not piece)
                writer.write(masked)
    except OSError as error:
        raise PermanentError(
            f"cannot be written: {error.strerror}", thing=str(target), advice="Free space, or make it writable"
        ) from error
    return sum(masker.found for masker in maskers)


def _pieces(source: Path, below: Path | None) -> Iterator[bytes]:
    """A file in chunks; the last one is empty."""
    try:
        with open_regular(source, below=below) as reader:
            while piece := reader.read(CHUNK):
                yield piece
    except OSError as error:
        raise DamagedData(f"cannot be read: {error.strerror}", thing=str(source)) from error
    yield b""


def mask_text(text: str, secrets: Iterable[str]) -> str:
    """A text with everything masked that `copy_masked` masks in a file."""
    data = text.encode("utf-8", "surrogateescape")
    for masker in _maskers(secrets):
        data = masker.mask(data, last=True)
    return data.decode("utf-8", "surrogateescape")


class _Masker:
    """Masks what is found in data that comes in pieces.

    `find(data, start)` gives matches in order; of one with a group only the group is masked. `longest` is the most
    bytes of a match, which may depend on `LEFT_CONTEXT` bytes before it and one behind it. State: what is not yet
    decided, and the bytes before that.
    """

    def __init__(self, find: _Find, longest: int) -> None:
        self._find, self._reach = find, longest + 1
        self._waiting, self._decided = b"", 0
        self.found = 0

    def mask(self, piece: bytes, *, last: bool) -> bytes:
        """Take the next piece and return what is decided by now; all of it with the last piece."""
        data = self._waiting + piece
        # A match that begins before the border is complete, however long; what begins later waits for the next piece.
        border = len(data) if last else max(len(data) - self._reach, self._decided)
        pieces, done = [], self._decided
        for match in self._find(data, self._decided):
            if match.start() >= border and not last:
                break
            start, end = match.span(match.lastindex or 0)
            pieces += [data[done:start], MASK.encode()]
            done = end
            self.found += 1
        end = max(done, border)
        pieces.append(data[done:end])
        kept = max(end - LEFT_CONTEXT, 0)
        self._waiting, self._decided = data[kept:], end - kept
        return b"".join(pieces)


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


def _maskers(secrets: Iterable[str]) -> list[_Masker]:
    shapes = _Masker(find_shapes, MAX_SHAPE_BYTES)
    values = _values(secrets)
    if not values:
        return [shapes]
    pattern = re.compile(b"|".join(re.escape(value) for value in values))
    # Values first: a shape that ends in the middle of a value would leave the rest of it.
    return [_Masker(pattern.finditer, len(values[0])), shapes]


class SecretFinder:
    """Looks for secret values in a binary file that is fed to it in pieces; `found` counts the values seen so far."""

    def __init__(self, secrets: Iterable[str]) -> None:
        self._values = [value for value in _values(secrets) if len(value) >= MIN_BYTES_IN_BINARY]
        self._overlap = max((len(value) for value in self._values), default=1) - 1
        self._tail = b""
        self._seen = set[bytes]()

    @property
    def found(self) -> int:
        """How many of the values have been seen."""
        return len(self._seen)

    def feed(self, piece: bytearray, size: int) -> None:
        """Look at the first `size` bytes of the next piece, and at values that begin in the pieces before."""
        if not self._values:
            return
        border = self._tail + piece[: min(self._overlap, size)]
        self._seen |= {value for value in self._values if piece.find(value, 0, size) >= 0 or value in border}
        self._tail = (self._tail + piece[max(size - self._overlap, 0) : size])[-self._overlap :]


def _values(secrets: Iterable[str]) -> list[bytes]:
    maskable = {value for value in secrets if len(value) >= MIN_LENGTH}
    # Longest first. An environment variable that is not UTF-8 comes with surrogates; this gives its bytes back.
    return sorted((value.encode("utf-8", "surrogateescape") for value in maskable), key=len, reverse=True)
