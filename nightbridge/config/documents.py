"""TOML files as read: their tables, and the position of every key."""

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from nightbridge.config.positions import KeyPath, key_lines, line_of
from nightbridge.errors import InvalidInput

Table = Mapping[str, Any]

SIZE_LIMIT = 4 * 1024 * 1024
"""Bytes; a configuration is never this large, and a training log given by mistake would be."""


DEPTH_LIMIT = 50
"""Tables and lists inside each other; a configuration has about six. Dotted keys nest as deeply as a line is long."""

NUL = "\0"


@dataclass(frozen=True)
class Document:
    """One TOML file.

    Attributes:
        path: The file as the user named it.
        text: Its text.
        table: What tomllib made of it.

    """

    path: Path
    text: str = field(repr=False)
    table: dict[str, Any] = field(repr=False)

    @cached_property
    def _lines(self) -> dict[KeyPath, int]:
        return key_lines(self.text)

    def where(self, path: KeyPath) -> str:
        """`FILE:LINE` of a key, or the file alone where the line is not known."""
        line = line_of(self._lines, path)
        return f"{self.path}:{line}" if line else str(self.path)


def read_document(path: Path) -> Document:
    """Read and parse a TOML file.

    Raises:
        InvalidInput: It cannot be read, is not UTF-8, or is not TOML; the message says where.

    """
    try:
        if path.is_file() and path.stat().st_size > SIZE_LIMIT:
            raise InvalidInput("too large for a configuration", thing=str(path), advice="Name a TOML file")
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise InvalidInput("no such file", thing=str(path), advice="Check the path") from error
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise InvalidInput(f"cannot be read: {reason}", thing=str(path), advice="Name a readable TOML file") from error
    return parse_document(text, path)


def parse_document(text: str, path: Path) -> Document:
    """Parse a TOML text that came from `path`.

    Raises:
        InvalidInput: It is not TOML.

    """
    try:
        table = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # besides its own error: huge integers, endless nesting
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise InvalidInput(f"not valid TOML: {reason}", thing=str(path), advice="Fix the syntax there") from error
    _check_values(table, path)
    return Document(path, text, table)


def _check_values(table: Table, path: Path) -> None:
    """Refuse what is TOML and no configuration; without recursion, of which there is less than there may be tables."""
    level: list[Any] = [table]
    for _ in range(DEPTH_LIMIT):
        inside = [
            inner
            for value in level
            for inner in ((*value, *value.values()) if isinstance(value, Mapping) else value)
            if isinstance(inner, Mapping | list | str)
        ]
        if any(NUL in text for text in inside if isinstance(text, str)):
            raise InvalidInput(
                "contains a NUL character (\\u0000), which paths, arguments and variables cannot contain",
                thing=str(path),
                advice="Remove it",
            )
        level = [inner for inner in inside if not isinstance(inner, str)]
        if not level:
            return
    raise InvalidInput(
        f"tables are nested more than {DEPTH_LIMIT} deep", thing=str(path), advice="Look for a key with many dots"
    )


@dataclass(frozen=True)
class Layer:
    """A table and where it comes from: a part of a document, or the caller when there is none."""

    table: Table
    document: Document | None = None
    base: KeyPath = ()


@dataclass(frozen=True)
class Layered:
    """Tables laid over each other, the last one on top: deep-merged, and still knowing where each key was written.

    Tables merge key by key; anything else, lists too, replaces what is below it, as CloudAI does.
    """

    layers: Sequence[Layer]

    @cached_property
    def table(self) -> dict[str, Any]:
        """The merged table; it holds only what was written."""
        merged: dict[str, Any] = {}
        for layer in self.layers:
            merged = merge(merged, layer.table)
        return merged

    def origin(self, path: KeyPath) -> Layer:
        """The topmost layer that writes the key, or the part of its path that anyone writes."""
        for length in range(len(path), 0, -1):
            for layer in reversed(self.layers):
                if _has(layer.table, path[:length]):
                    return layer
        return self.layers[-1]

    def where(self, path: KeyPath) -> str:
        """`FILE:LINE` of the key."""
        layer = self.origin(path)
        return layer.document.where((*layer.base, *path)) if layer.document else "an override"


def merge(below: Table, above: Table) -> dict[str, Any]:
    """Lay one table over another; neither is changed."""
    merged = dict(below)
    for key, value in above.items():
        under = merged.get(key)
        merged[key] = merge(under, value) if isinstance(under, dict) and isinstance(value, dict) else value
    return merged


def _has(table: Any, path: KeyPath) -> bool:
    for part in path:
        inside_list = isinstance(table, list) and isinstance(part, int) and part < len(table)
        if not inside_list and not (isinstance(table, Mapping) and part in table):
            return False
        table = table[part]
    return True
