"""Masking: secrets are taken out of every text that leaves the process or the machine.

Masked are the values that are known, in every usual encoding and also where escape codes or line breaks split them,
what line breaks have cut off of them where other ranks' lines stand in between, and texts that have the shape of a
secret (`secrets.find_shapes`).

Text files are masked in the copy that leaves the machine; binary files are searched for values in these encodings, and
at their beginning for tokens. Both are read in chunks of bytes, so a log of many gigabytes, one without a line break,
and one that is not UTF-8 are all fine.
"""

import base64
import bisect
import bz2
import functools
import gzip
import html
import json
import lzma
import os
import re
import threading
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO
from urllib.parse import quote, quote_plus

from nightbridge.files import CHUNK, copy_regular
from nightbridge.secrets import MAX_SHAPE_BYTES, SHAPE_CONTEXT, Found, find_shapes, holds_token, positions

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

MASK = "********"

MIN_LENGTH = 4
"""Characters of the shortest value that is masked: shorter ones also occur in ordinary words."""

MIN_ENCODED = 8
"""Bytes of the shortest text looked for in an encoding, with gaps or in a binary file: shorter ones occur by chance."""

_PARTS = (
    re.compile(r'\bpassword\s+"([^"]+)"'),
    re.compile(r'\bpassword\s+([^\s"]\S*)'),
    re.compile(r"\w+://[^/\s]+(/\S+)"),
    re.compile(r"\w+://[^/@\s:]*:([^/@\s]{8,})@"),  # shorter ones also occur in ordinary words
)
"""What of a line of netrc(5) or a URL is a secret by itself: a password, and the path of a webhook."""

_BARE_IN_SHELL = re.compile(r"[^\w@%+=:./~#\n-]")

_ESCAPE = rb"\x1b(?:\[[0-?]{0,64}[ -/]{0,8}[@-~]|\][^\x07\x1b]{0,256}(?:\x07|\x1b\\)|\(B)"
_SPACE = b" \t\r\n"
_ESCAPES, _GAPS = re.compile(_ESCAPE), re.compile(rb"(?:[ \t\r\n]|%s)+" % _ESCAPE)
"""What may stand between two characters of a value: a terminal's escape codes, line breaks and indentation."""

_GAP_FACTOR = 8
"""How many times as long a value may become by gaps in it, such as a colour for each character."""


def _spellings(value: str) -> Iterator[bytes]:
    """A value as it is, and as it appears in JSON, Python, YAML, a shell, HTML, URLs, hex dumps and base64."""
    raw = value.encode("utf-8", "surrogateescape")  # an environment variable that is not UTF-8 comes with surrogates
    yield raw
    if len(raw) < MIN_ENCODED:
        return
    escaped, plain, page = json.dumps(value)[1:-1], json.dumps(value, ensure_ascii=False)[1:-1], html.escape(value)
    texts = [
        *(escaped, plain, plain.replace("/", "\\/"), json.dumps(escaped)[1:-1], repr(value)[1:-1]),
        *(page, html.escape(value, quote=False), page.replace("&#x27;", "&#39;").replace("&quot;", "&#34;")),
        *(page.replace("&#x27;", "&apos;"), value.replace("'", "''")),
        *(value.replace("'", "'\"'\"'"), value.replace("'", "'\\''"), _BARE_IN_SHELL.sub(r"\\\g<0>", value)),
    ]
    yield from (text.encode("utf-8", "surrogateescape") for text in texts)
    digits = [f"{byte:02x}" for byte in raw]
    addresses = (quote(raw), quote(raw, safe=""), quote_plus(raw), "%" + "%".join(digits).upper())
    for text in (*addresses, "".join(digits), ":".join(digits), "\\x" + "\\x".join(digits)):
        yield text.encode()
        yield re.sub(r"%..", lambda escape: escape[0].lower(), text).encode() if "%" in text else text.upper().encode()
    for before in range(3):
        # The characters of base64 that the value alone decides, wherever it stands in what was encoded.
        own = slice(-(-8 * before // 6), 8 * (before + len(raw)) // 6)
        for encode in (base64.b64encode, base64.urlsafe_b64encode):
            encoded = encode(bytes(before) + raw + bytes(2))[own]
            yield from (encoded, quote(encoded, safe="").encode())


def _known_texts(values: Collection[str]) -> set[bytes]:
    """Every spelling of the values, and of those parts of them that are secrets by themselves.

    Also in UTF-16 and UTF-32, as other languages keep texts: without the zeros that stand last or first.
    """
    parts = {part for value in values for found in _PARTS for part in found.findall(value)}
    known = [each for each in {*values, *parts, *map(os.path.expandvars, parts)} if len(each) >= MIN_LENGTH]
    wide = ((value, form) for value in known for form in ("utf-16-le", "utf-32-le") if len(value) >= MIN_ENCODED)
    encoded = (value.encode(form, "surrogatepass").strip(b"\0") for value, form in wide)
    return {*encoded, *(text for value in known for text in _spellings(value))}


_MULTIPLIER = 2654435761
"""Knuth's, for multiplicative hashing."""

_BLOCK = 1 << 18
"""Bytes that are looked at in one piece: what numpy makes of them stays in the processor's cache."""


class _Texts:
    """Finds any of many texts of `MIN_ENCODED` bytes and more, as fast as a few.

    Every occurrence covers four bytes at a multiple of four. So only these words are looked up among those that the
    texts have at one of four offsets: by a hash of 16 bits, then by their first two bytes, then with the word behind
    them, since small integers are like letters of UTF-32; the rest is compared.
    """

    def __init__(self, texts: Iterable[bytes]) -> None:
        import numpy as np  # slow to import, and not needed to look secrets up

        found = {text for text in texts if len(text) >= MIN_ENCODED}
        self.longest = max(map(len, found), default=0)
        self._by_word: dict[int, list[tuple[bytes, int]]] = {}
        pairs, alone = list[tuple[int, int]](), list[int]()
        for text in found:
            for offset in range(4):
                word = int.from_bytes(text[offset : offset + 4], "little")
                self._by_word.setdefault(word, []).append((text, offset))
                if len(text) >= offset + 8:
                    pairs.append((word, int.from_bytes(text[offset + 4 : offset + 8], "little")))
                else:
                    alone.append(word)
        words = np.array(list(self._by_word), dtype="<u4")
        self._hashes, self._first_bytes, self._alone, self._pairs = np.zeros((4, 1 << 16), dtype=bool)
        self._hashes[self._hash(words)] = True
        self._first_bytes[words.view("<u2")[::2]] = True
        self._alone[self._hash(np.array(alone, dtype="<u4"))] = True
        self._pairs[self._hash_pairs(*np.array(pairs, dtype="<u4").reshape(-1, 2).T)] = True

    def find(self, data: bytes | bytearray, size: int) -> set[tuple[int, int]]:
        """Where in the first `size` bytes the texts begin and end."""
        import numpy as np

        found = set()
        for begin in range(0, size - 3 if self._by_word else 0, _BLOCK):
            words = np.frombuffer(data, "<u4", min(_BLOCK, size - begin) // 4, begin)
            likely = np.flatnonzero(self._hashes.take(self._hash(words)))
            likely = likely[self._first_bytes.take(words[likely].view("<u2")[::2])]
            for index in likely[self._may_go_on(words, likely)].tolist():
                for text, offset in self._by_word.get(int(words[index]), ()):
                    start = begin + 4 * index - offset
                    if start >= 0 and data.startswith(text, start) and start + len(text) <= size:
                        found.add((start, start + len(text)))
        return found

    def _may_go_on(self, words: "NDArray[np.uint32]", likely: "NDArray[np.int_]") -> "NDArray[np.bool_]":
        """Behind which of some words stands what does in a text; what is behind the last one is not known."""
        first, second = words[likely], words.take(likely + 1, mode="clip")
        fits: NDArray[np.bool_] = self._pairs.take(self._hash_pairs(first, second))
        fits |= self._alone.take(self._hash(first)) | (likely == len(words) - 1)
        return fits

    @classmethod
    def _hash_pairs(cls, first: "NDArray[np.uint32]", second: "NDArray[np.uint32]") -> "NDArray[np.uint16]":
        return cls._hash(first * first.dtype.type(_MULTIPLIER >> 8) + second)

    @staticmethod
    def _hash(words: "NDArray[np.uint32]") -> "NDArray[np.uint16]":
        return (words * words.dtype.type(_MULTIPLIER)).view("<u2")[1::2]


@functools.lru_cache(maxsize=8)
def _texts(values: frozenset[str]) -> _Texts:
    return _Texts(_known_texts(values))


MIN_PIECE = 12
"""Bytes of the shortest piece of a text that is masked at the beginning or the end of a line."""

_MAX_INDENT = 64
"""White space before a piece, or behind it, at most."""

_BREAKS, _BLANKS, _ENDS = (bytes(byte in these for byte in range(256)) for these in (b"\n\r", b" \t", b" \t\\="))
"""Line breaks; what may stand before a piece; and behind it: YAML, a shell and quoted-printable go on after a sign."""


class _Pieces:
    """Finds what line breaks have cut off of texts, where other lines stand between the pieces.

    Eight ranks that print one configuration, wrapped to the width of a terminal, write into one log line by line. A
    piece is the end of a text, or its middle in a line of its own, at the beginning of a line, or the beginning of a
    text at the end of one. By their first or last four bytes they are looked up in a table of bits.
    """

    def __init__(self, texts: Iterable[bytes]) -> None:
        import numpy as np

        # Where a text is cut, not the pieces: those of a key of 2 KB, in every encoding, are a gigabyte.
        self._after: dict[int, list[tuple[bytes, int]]] = {}
        self._before: dict[int, list[tuple[bytes, int]]] = {}
        for text in texts:
            for at in range(1, len(text) - MIN_PIECE + 1):
                self._after.setdefault(int.from_bytes(text[at : at + 4], "little"), []).append((text, at))
            for end in range(MIN_PIECE, len(text)):
                self._before.setdefault(int.from_bytes(text[end - 4 : end], "little"), []).append((text, end))
        self._likely = [np.zeros(1 << 20, dtype=bool) for _side in (self._after, self._before)]
        for table, side in zip(self._likely, (self._after, self._before), strict=True):
            table[self._hash(np.array(list(side), dtype="<u4"))] = True
        self._breaks, self._blanks, self._ends = (np.frombuffer(each, dtype=bool) for each in (_BREAKS, _BLANKS, _ENDS))

    def find(self, data: bytes, start: int) -> Iterator["Found"]:
        """Find them from `start` on, in any order; what is found after a line break begins there."""
        import numpy as np

        if not self._after:
            return
        array = np.frombuffer(data, np.uint8)
        breaks = np.flatnonzero(self._breaks.take(array[start:])) + start
        if len(breaks):
            yield from self._after_breaks(data, array, breaks)
            yield from self._before_breaks(data, array, breaks, start)

    def _after_breaks(self, data: bytes, array: "NDArray[np.uint8]", breaks: "NDArray[np.int_]") -> Iterator["Found"]:
        first = self._past_blanks(array, breaks + 1, 1, 0)
        for index in self._likely_at(0, array, first, len(array) - MIN_PIECE):
            at = int(first[index])
            ends = int(breaks[index + 1]) if index + 1 < len(breaks) else at
            line = data[at:ends].rstrip()
            for text, cut in self._after.get(int.from_bytes(data[at : at + 4], "little"), ()):
                rest = text[cut:]
                if data.startswith(rest, at):
                    yield Found(int(breaks[index]), at, at + len(rest))
                elif len(line) >= MIN_PIECE and rest.startswith(line):
                    yield Found(int(breaks[index]), at, at + len(line))

    def _before_breaks(
        self, data: bytes, array: "NDArray[np.uint8]", breaks: "NDArray[np.int_]", start: int
    ) -> Iterator["Found"]:
        last = self._past_blanks(array, breaks, -1, start)
        for index in self._likely_at(1, array, last - 4, len(array)):
            end = int(last[index])
            for text, cut in self._before.get(int.from_bytes(data[end - 4 : end], "little"), ()):
                if end - cut >= start and data.startswith(text[:cut], end - cut):
                    yield Found(end - cut, end - cut, end)

    def _past_blanks(
        self, array: "NDArray[np.uint8]", at: "NDArray[np.int_]", step: int, least: int
    ) -> "NDArray[np.int_]":
        """Some places without the white space behind them, for `step` 1, or before them and from `least` on, for -1."""
        import numpy as np

        blanks = self._blanks if step > 0 else self._ends
        for _blank in range(_MAX_INDENT):
            looked_at = at if step > 0 else at - 1
            (inside,) = np.nonzero((looked_at >= least) & (looked_at < len(array)))
            blank = inside[blanks.take(array[looked_at[inside]])]
            if not len(blank):
                break
            at = at.copy()
            at[blank] += step
        return at

    def _likely_at(self, side: int, array: "NDArray[np.uint8]", at: "NDArray[np.int_]", most: int) -> list[int]:
        """Which of some places have four bytes that a piece may begin, or end, with."""
        import numpy as np

        (inside,) = np.nonzero((at >= 0) & (at <= most))
        words = np.zeros(len(inside), dtype="<u4")
        for byte in range(4):
            words |= array.take(at[inside] + byte).astype("<u4") << np.uint32(8 * byte)
        found: list[int] = inside[self._likely[side].take(self._hash(words))].tolist()
        return found

    @staticmethod
    def _hash(words: "NDArray[np.uint32]") -> "NDArray[np.uint32]":
        return (words * words.dtype.type(_MULTIPLIER)) >> words.dtype.type(12)


class _Values:
    """Finds known values in a text, also with gaps in them."""

    def __init__(self, texts: frozenset[bytes]) -> None:
        self._short = [text for text in texts if len(text) < MIN_ENCODED]
        self._joined = _Texts(_joined(text) for text in texts)
        self._pieces = _Pieces(text for text in texts if len(text) >= MIN_ENCODED and b"\0" not in text)
        self.longest = max(map(len, texts), default=0)

    def find(self, data: bytes, start: int) -> Iterator[Found]:
        """Find them from `start` on: in order, of several in one place the longest, and not overlapping."""
        rest = data[start:]
        joined = _joined(rest)
        spans = {Found(each, each, each + len(text)) for text in self._short for each in positions(data, text, start)}
        if found := self._joined.find(joined, len(joined)):
            # Positions in `joined` from which on so many bytes more are missing before it.
            runs, missing = [0], [start]
            for gap in _GAPS.finditer(rest):
                runs.append(gap.start() + start - missing[-1])
                missing.append(missing[-1] + len(gap[0]))
            for begin, end in found:
                first, last = (at + missing[bisect.bisect(runs, at) - 1] for at in (begin, end - 1))
                spans.add(Found(first, first, last + 1))
        spans.update(self._pieces.find(data, start))
        done = 0
        for span in sorted(spans, key=lambda span: (span.start, -span.end)):
            if span.start >= done:
                done = span.end
                yield span


def _joined(data: bytes) -> bytes:
    return _ESCAPES.sub(b"", data).translate(None, _SPACE)


@functools.lru_cache(maxsize=8)
def _values(values: frozenset[str]) -> _Values:
    return _Values(frozenset(_known_texts(values)))


# --- masking ---------------------------------------------------------------------------------------------------------


def copy_masked(source: Path, target: Path, secrets: Iterable[str], below: Path | None = None) -> int:
    """Copy a text file with every secret value, and every text in a secret's shape, replaced by `MASK`.

    The longest value at a position wins; values shorter than `MIN_LENGTH` stay. Returns how many were masked. The
    source is opened as by `files.open_regular`.

    Raises:
        DamagedData: The source cannot be read.
        PermanentError: The target cannot be written.
    """
    maskers = _maskers(secrets)

    def masked(piece: bytes) -> bytes:
        found = piece
        for masker in maskers:
            found = masker.mask(found, last=not piece)
        return found

    copy_regular(source, target, below, masked)
    return sum(masker.found for masker in maskers)


def mask_text(text: str, secrets: Iterable[str]) -> str:
    """A text with everything masked that `copy_masked` masks in a file."""
    data = text.encode("utf-8", "surrogateescape")
    for masker in _maskers(secrets):
        data = masker.mask(data, last=True)
    return data.decode("utf-8", "surrogateescape")


class _Masker:
    """Masks what is found in data that comes in pieces.

    `find(data, start)` gives matches in order. `longest` is the most bytes of a match, which may depend on
    `SHAPE_CONTEXT` bytes before it and one behind it. State: what is not yet decided, and the bytes before that.
    """

    def __init__(self, find: Callable[[bytes, int], Iterator[Found]], longest: int) -> None:
        self._find, self._reach = find, longest + 1
        self._waiting, self._decided, self.found = b"", 0, 0

    def mask(self, piece: bytes, *, last: bool) -> bytes:
        """Take the next piece and return what is decided by now; all of it with the last piece."""
        data = self._waiting + piece
        # A match that begins before the border is complete, however long; what begins later waits for the next piece.
        border = len(data) if last else max(len(data) - self._reach, self._decided)
        pieces, done = [], self._decided
        for begin, start, end in self._find(data, self._decided):
            if begin >= border and not last:
                break
            pieces += [data[done:start], MASK.encode()]
            done = end
            self.found += 1
        end = max(done, border)
        pieces.append(data[done:end])
        kept = max(end - SHAPE_CONTEXT, 0)
        self._waiting, self._decided = data[kept:], end - kept
        return b"".join(pieces)


def _maskers(secrets: Iterable[str]) -> list[_Masker]:
    values = _values(frozenset(secrets))
    shapes = _Masker(find_shapes, MAX_SHAPE_BYTES)
    # Values first: a shape that ends in the middle of a value would leave the rest of it.
    return [_Masker(values.find, _GAP_FACTOR * values.longest), shapes] if values.longest else [shapes]


TOKENS_IN_BINARY = 4 << 20
"""Bytes at the beginning of a binary file that are searched for tokens, and for values with gaps: texts of TensorBoard
and pickled arguments lie there, and weights behind them."""


class SecretFinder:
    """Looks for secrets in a binary file that is fed to it in pieces; `found` says whether there was one so far."""

    def __init__(self, secrets: Iterable[str]) -> None:
        self._texts = _texts(frozenset(secrets))
        self._overlap = max(self._texts.longest, MAX_SHAPE_BYTES) - 1
        self._tail, self._unread, self.found = b"", TOKENS_IN_BINARY, False

    def feed(self, piece: bytearray, size: int) -> None:
        """Look at the first `size` bytes of the next piece, and at secrets that begin in the pieces before."""
        self.found |= self._holds(piece, size)
        if self._tail:
            border = self._tail + piece[: min(self._overlap, size)]
            self.found |= self._holds(border, len(border))
        self._unread -= size
        self._tail = (self._tail + piece[max(size - self._overlap, 0) : size])[-self._overlap :]

    def _holds(self, data: bytes | bytearray, size: int) -> bool:
        beginning = max(min(self._unread, size), 0)
        found = self._texts.find(data, size) or self._holds_joined(data, beginning)
        return bool(found) or holds_token(data, size, beginning)

    def _holds_joined(self, data: bytes | bytearray, size: int) -> bool:
        """Whether a value with gaps is in the first `size` bytes: a little at once, as many threads do so."""
        joined = b""
        for at in range(0, size, _BLOCK):
            joined = joined[-self._overlap :] + data[at : min(at + _BLOCK, size)].translate(None, _SPACE)
            if self._texts.find(joined, len(joined)):
                return True
        return False


# --- packed files ----------------------------------------------------------------------------------------------------

_MAX_RATIO = 100
"""A file that unpacks to more times its size was made to, and is not unpacked further: texts reach a tenth of that."""

_XZ_MEMORY = 128 << 20
"""Bytes that an xz file may take to be unpacked, twice what `xz -9` needs; Zstandard's library has the same limit."""
_unpacking = threading.Semaphore(4)


def holds_packed(stream: BinaryIO, size: int, secrets: Iterable[str]) -> bool:
    """Whether a secret is in what a gzip, bzip2, xz, Zstandard or LZ4 file unpacks to, such as PyTorch's trace.

    Args:
        stream: The file, unbuffered and at its beginning, where it is left.
        size: Bytes of the file.
        secrets: The values; tokens of a known form count, too.

    Raises:
        OSError: The file cannot be read. One that is damaged is looked at as far as it can be unpacked.
    """
    head = os.pread(stream.fileno(), max(map(len, _UNPACKERS)), 0)
    unpack = next((each for magic, each in _UNPACKERS.items() if head.startswith(magic)), None)
    if unpack is None:
        return False
    finder, waiting, allowed = SecretFinder(secrets), bytearray(), _MAX_RATIO * size
    # What reads a packed file also closes it.
    with _unpacking, os.fdopen(os.dup(stream.fileno()), "rb", buffering=0) as packed:
        for piece in _while_sound(unpack(packed)):
            waiting += piece
            allowed -= len(piece)
            if len(waiting) >= CHUNK or allowed <= 0:
                finder.feed(waiting, len(waiting))
                waiting.clear()
            if finder.found or allowed <= 0:
                break
        finder.feed(waiting, len(waiting))
    stream.seek(0)
    return finder.found


def _while_sound(pieces: Iterator[bytes]) -> Iterator[bytes]:
    try:
        yield from pieces
    except (OSError, EOFError, ValueError, zlib.error, lzma.LZMAError) as error:
        if isinstance(error, OSError) and error.errno:  # of the file system, and not of what is in the file
            raise


def _xz(packed: BinaryIO) -> Iterator[bytes]:
    """As of `lzma.LZMAFile`, which takes as much memory as the file says."""
    rest = b""
    while rest or (rest := packed.read(CHUNK)):
        unpacker = lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=_XZ_MEMORY)
        while not unpacker.eof and (rest or not unpacker.needs_input or (rest := packed.read(CHUNK))):
            yield unpacker.decompress(rest, CHUNK)
            rest = b""
        rest = unpacker.unused_data


def _by_arrow(form: str, packed: BinaryIO) -> Iterator[bytes]:
    import pyarrow as pa  # slow to import, and hardly ever needed

    with pa.CompressedInputStream(pa.PythonFile(packed, mode="r"), form) as reader:
        # In few bytes: of a read that ends in damage nothing is left.
        yield from iter(functools.partial(reader.read, 4096), b"")


_UNPACKERS: dict[bytes, Callable[[BinaryIO], Iterator[bytes]]] = {
    b"\x1f\x8b\x08": lambda packed: iter(functools.partial(gzip.GzipFile(fileobj=packed).read1, CHUNK), b""),
    b"BZh": lambda packed: iter(functools.partial(bz2.BZ2File(packed).read1, CHUNK), b""),
    b"\xfd7zXZ\0": _xz,
    b"\x28\xb5\x2f\xfd": functools.partial(_by_arrow, "zstd"),
    b"\x04\x22\x4d\x18": functools.partial(_by_arrow, "lz4"),
}
"""How a file begins, and what unpacks it."""
