"""The line of every key of a TOML file.

`tomllib` keeps no positions. This scan walks a text that tomllib has already accepted, so it only has to know where
keys, values and headers begin and end. Keys inside an inline table or an array share the line of the key before it.
"""

import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator

KeyPath = tuple[str | int, ...]
"""Keys from the root; an element of an array of tables is its index."""

_BLANK = re.compile(r"(?:[ \t\r\n]|#[^\n]*)*")
_SPACE = re.compile(r"[ \t]*")
_BARE = re.compile(r"[A-Za-z0-9_-]+")
_STRINGS = (
    re.compile(r'"""(?:[^\\]|\\.)*?"{3,5}', re.DOTALL),
    re.compile(r"'''.*?'{3,5}", re.DOTALL),
    re.compile(r'"(?:[^"\\\n]|\\.)*"'),
    re.compile(r"'[^'\n]*'"),
)
_PLAIN = re.compile(r"[^\"'\[\]{}#\n]+")
_ESCAPE = re.compile(r"\\(?:u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8})|(.))")
_ESCAPES = {"b": "\b", "t": "\t", "n": "\n", "f": "\f", "r": "\r", '"': '"', "\\": "\\"}


class _Lost(Exception):
    """The text is not what the scan expects; what has been found so far still holds."""


def key_lines(text: str) -> dict[KeyPath, int]:
    """Return the line, from 1, of every key and table header; keys that the scan cannot follow are absent."""
    lines: dict[KeyPath, int] = {}
    starts = [match.end() for match in re.finditer("\n", text)]
    try:
        for path, offset in _keys(text):
            lines.setdefault(path, _line_of(starts, offset))
    except _Lost:
        pass
    return lines


def line_of(lines: dict[KeyPath, int], path: KeyPath) -> int | None:
    """The line of a key, or of the nearest key around it that has one."""
    for length in range(len(path), 0, -1):
        if path[:length] in lines:
            return lines[path[:length]]
    return None


def _line_of(starts: list[int], offset: int) -> int:
    return bisect_right(starts, offset) + 1


def _keys(text: str) -> Iterator[tuple[KeyPath, int]]:
    position, table = 0, ()  # type: int, KeyPath
    elements: Counter[KeyPath] = Counter()
    while True:
        position = _match(_BLANK, text, position)
        if position >= len(text):
            return
        start = position
        if text[position] == "[":
            brackets = 2 if text.startswith("[[", position) else 1
            names, position = _key(text, position + brackets)
            position = _expect("]" * brackets, text, position)
            table = _resolve(names, elements)
            if brackets == 2:
                yield table, start
                elements[table] += 1
                table = (*table, elements[table] - 1)
            yield table, start
        else:
            names, position = _key(text, position)
            position = _skip_value(text, _expect("=", text, position))
            for length in range(1, len(names) + 1):
                yield (*table, *names[:length]), start


def _resolve(names: tuple[str, ...], elements: Counter[KeyPath]) -> KeyPath:
    """A header's path: a name that stands for an array of tables means its last element."""
    path: KeyPath = ()
    for index, name in enumerate(names):
        path = (*path, name)
        if index < len(names) - 1 and elements[path]:
            path = (*path, elements[path] - 1)
    return path


def _match(pattern: re.Pattern[str], text: str, position: int) -> int:
    match = pattern.match(text, position)
    if match is None:
        raise _Lost
    return match.end()


def _expect(token: str, text: str, position: int) -> int:
    position = _match(_SPACE, text, position)
    if not text.startswith(token, position):
        raise _Lost
    return position + len(token)


def _key(text: str, position: int) -> tuple[tuple[str, ...], int]:
    names: list[str] = []
    while True:
        position = _match(_SPACE, text, position)
        start = position
        if text.startswith(('"', "'"), position):
            position = _string_end(text, position)
            names.append(_unquoted(text[start:position]))
        else:
            position = _match(_BARE, text, position)
            names.append(text[start:position])
        position = _match(_SPACE, text, position)
        if not text.startswith(".", position):
            return tuple(names), position
        position += 1


def _unquoted(quoted: str) -> str:
    if quoted[0] == "'":
        return quoted[1:-1]
    return _ESCAPE.sub(
        lambda match: chr(int(match[1] or match[2], 16)) if not match[3] else _ESCAPES.get(match[3], match[3]),
        quoted[1:-1],
    )


def _string_end(text: str, position: int) -> int:
    for pattern in _STRINGS:
        if match := pattern.match(text, position):
            return match.end()
    raise _Lost


def _skip_value(text: str, position: int) -> int:
    """Return where the value that starts here ends: its line's end, or the end of a bracket or string left open."""
    depth = 0
    while position < len(text):
        character = text[position]
        if character == "\n" and depth == 0:
            return position
        if character in "\"'":
            position = _string_end(text, position)
        elif character == "#":
            end = text.find("\n", position)
            position = len(text) if end < 0 else end
        elif character in "[]{}\n":
            depth += {"[": 1, "{": 1, "]": -1, "}": -1}.get(character, 0)
            position += 1
        else:
            position = _match(_PLAIN, text, position)
    return position
