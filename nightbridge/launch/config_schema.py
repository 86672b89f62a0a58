"""Which overrides a version of Megatron-Bridge accepts: the fields of its configuration classes, and their types.

Megatron-Bridge turns the recipe's configuration into an OmegaConf of plain values, lets Hydra lay the overrides over
it, and sets the result field by field. A name that does not exist ends the job when it starts, or is dropped where it
was written with a `+`; a value of a wrong type ends it later, or trains something else.
"""

import ast
import difflib
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from pydantic import Field

from nightbridge.launch import syntax_tree
from nightbridge.launch.versions import Version, version_for_pin
from nightbridge.models import Model

CONTAINER = "megatron.bridge.training.config:ConfigContainer"
ANY = "Any"
"""A type that cannot be determined from the source: every value is accepted."""

_DTYPES = frozenset(
    ["float32", "fp32", "float", "bfloat16", "bf16", "float16", "fp16", "half", "float8_e4m3fn", "float8_e5m2"]
)
_INTEGER = re.compile(r"[+-]?(?:0|[1-9]\d*(?:_\d+)*)")
_ZEROS_FIRST = re.compile(r"[+-]?0\d[\d_]*")
_NUMBER = re.compile(r"[+-]?(?:\d+(?:_\d+)*\.?\d*|\.\d+)(?:[eE][+-]?\d+)?|[+-]?(?:inf|nan)", re.IGNORECASE)
_WORDS: Mapping[str, Any] = {"null": None, "true": True, "false": False}

_Table = tuple[dict[str, tuple[str, ...]], bool]


class ConfigClass(Model):
    """One dataclass or enumeration.

    Attributes:
        bases: Qualified names (`module:Class`) of the classes that it extends.
        fields: Its own fields, each with its alternatives joined by ` | `: `int`, `float`, `bool`, `str`, `list`,
            `dict`, `dtype`, `None`, the `repr` of a literal, a qualified name, or `Any`.
        members: The names of an enumeration.
        open: Whether it extends a class that could not be read, so that it may have more fields.
        defaults: Those of its own fields that are literals; for a pinned checkout only.
    """

    bases: tuple[str, ...] = ()
    fields: dict[str, str] = Field(default_factory=dict)
    members: tuple[str, ...] = ()
    open: bool = False
    defaults: dict[str, Any] = Field(default_factory=dict)


class ConfigSchema(Model):
    """The configuration classes of one version.

    Attributes:
        commit: Commit of Megatron-Bridge that they were read from; empty for a pinned checkout's own.
        classes: By qualified name.
    """

    commit: str = ""
    classes: dict[str, ConfigClass]

    @cached_property
    def _subclasses(self) -> dict[str, list[str]]:
        found: dict[str, list[str]] = {}
        for name, definition in self.classes.items():
            for base in definition.bases:
                found.setdefault(base, []).append(name)
        return found

    def _with_subclasses(self, name: str) -> Iterator[str]:
        yield name
        for subclass in self._subclasses.get(name, ()):
            yield from self._with_subclasses(subclass)

    def _lineage(self, name: str) -> Iterator[ConfigClass]:
        """The bases of a class, each before those that override it, and the class itself."""
        for base in reversed(self.classes[name].bases):
            yield from self._lineage(base)
        yield self.classes[name]

    def _defaults(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for each in self._lineage(name):
            found = {key: value for key, value in found.items() if key not in each.fields} | each.defaults
        return found

    @property
    def defaults(self) -> dict[str, dict[str, Any]]:
        """The default values of each section whose class is certain; among subclasses the recipe chooses."""
        found = {}
        for section, types in self._table((CONTAINER,))[0].items():
            names = [name for name in types if name in self.classes]
            if len(names) == 1 and not self._subclasses.get(names[0]) and (values := self._defaults(names[0])):
                found[section] = values
        return found

    @cached_property
    def _tables(self) -> dict[tuple[str, ...], _Table]:
        return {}

    def _table(self, types: tuple[str, ...]) -> _Table:
        """The fields of values of these types, with the alternatives of each, and whether there may be more."""
        if types not in self._tables:
            names = {name for kind in types if kind in self.classes for name in self._with_subclasses(kind)}
            fields: dict[str, dict[str, None]] = {}
            is_open = bool({ANY, "dict"} & set(types))
            for name in sorted(names):
                lineage = list(self._lineage(name))
                is_open |= any(each.open for each in lineage)
                own = {field: annotation for each in lineage for field, annotation in each.fields.items()}
                for field, annotation in own.items():
                    fields.setdefault(field, {}).update(dict.fromkeys(annotation.split(" | ")))
            self._tables[types] = {field: tuple(kinds) for field, kinds in fields.items()}, is_open
        return self._tables[types]

    def problem(self, path: str, text: str | None) -> str | None:
        """What is wrong with an override; None where nothing is, or where the source does not say.

        Args:
            path: The dotted path without `+` or `~`.
            text: The value as Hydra reads it; None where the override removes the key.
        """
        types: tuple[str, ...] = (CONTAINER,)
        parts = path.split(".")
        for position, part in enumerate(parts):
            fields, is_open = self._table(types)
            if part not in fields:
                return None if is_open or not fields else self._unknown(path, parts[:position], fields)
            types = fields[part]
            if ANY in types:
                return None
        if text is None or any(self._fits(kind, hydra_value(text)) for kind in types):
            return None
        return self._wrong_type(path, types, text)

    def wrong_value(self, path: str, value: object) -> str | None:
        """What is wrong with a value that a dump has at a path; None where nothing is, or where nothing is known."""
        types = self.types(path)
        if not types or ANY in types or any(self._fits(kind, value) for kind in types):
            return None
        return self._wrong_type(path, types, value)

    def types(self, path: str) -> tuple[str, ...]:
        """The alternatives of the field at a path, as in `ConfigClass.fields`; none where there is no such field."""
        types: tuple[str, ...] = (CONTAINER,)
        for part in path.split("."):
            types = self._table(types)[0].get(part, ())
        return types

    def _unknown(self, path: str, parents: list[str], fields: Iterable[str]) -> str:
        near = nearest_path(path, self.paths)
        hint = f"; did you mean {near[0]}?" if near else ""
        where = f"the section {'.'.join(parents)}" if parents else "the configuration"
        return f"{path} does not exist: {where} has no field {path.split('.')[len(parents)]}{hint}"

    @cached_property
    def paths(self) -> tuple[str, ...]:
        """Every path down to three levels, which is as deep as overrides are written."""
        return tuple(self._below((CONTAINER,), "", 3))

    def _below(self, types: tuple[str, ...], prefix: str, levels: int) -> Iterator[str]:
        for field, kinds in self._table(types)[0].items():
            yield f"{prefix}{field}"
            if levels > 1:
                yield from self._below(kinds, f"{prefix}{field}.", levels - 1)

    def _fits(self, kind: str, value: Any) -> bool:
        if kind in self.classes:
            definition = self.classes[kind]
            if definition.members:
                return isinstance(value, str) and value.rsplit(".", 1)[-1] in definition.members
            return isinstance(value, dict)
        return _FITS[kind](value) if kind in _FITS else bool(ast.literal_eval(syntax_tree(kind, "eval")) == value)

    def _wrong_type(self, path: str, types: tuple[str, ...], text: object) -> str:
        wanted = [
            " or ".join(self.classes[kind].members) or f"a table of {kind.partition(':')[2]}"
            if kind in self.classes
            else _NAMES.get(kind, kind)
            for kind in types
        ]
        return f"{path} is {' or '.join(dict.fromkeys(wanted))}, not {text!r}"


@lru_cache(maxsize=4096)
def nearest_path(path: str, paths: tuple[str, ...]) -> list[str]:
    """The path that is most like another, as `difflib.get_close_matches` finds it; remembered, as several rules ask.

    Most paths cannot be nearer than the nearest so far, which their length and letters show.
    """
    matcher, best = difflib.SequenceMatcher(b=path), (0.7, "")
    for each in paths:
        matcher.set_seq1(each)
        if matcher.real_quick_ratio() >= best[0] and matcher.quick_ratio() >= best[0]:
            best = max(best, (matcher.ratio(), each))
    return [best[1]] if best[1] else []


_FITS: Mapping[str, Callable[[Any], bool]] = {
    "None": lambda value: value is None,
    "bool": lambda value: isinstance(value, int),  # some of NVIDIA's own recipes write 100 for true
    "int": lambda value: isinstance(value, int) and not isinstance(value, bool),
    "float": lambda value: isinstance(value, int | float) and not isinstance(value, bool),
    "str": lambda value: isinstance(value, str | int | float),
    "list": lambda value: isinstance(value, list),
    "dict": lambda value: isinstance(value, dict),
    "dtype": lambda value: isinstance(value, str) and value.removeprefix("torch.") in _DTYPES,
    ANY: lambda value: True,
}

_NAMES = {
    "None": "null",
    "bool": "true or false",
    "int": "a whole number",
    "float": "a number",
    "str": "a text",
    "list": "a list",
    "dict": "a table",
    "dtype": "a torch dtype such as torch.bfloat16",
}


def hydra_value(text: str) -> Any:
    """A value of Hydra's grammar: its type decides; what is inside a list or a table does not."""
    text = text.strip()
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    if text[:1] in ("[", "{"):
        return [] if text[0] == "[" else {}
    if text[:1] in ("'", '"') and text[-1:] == text[:1]:
        return text[1:-1]
    if _INTEGER.fullmatch(text) and len(text) < sys.int_info.default_max_str_digits:
        return int(text)
    if _ZEROS_FIRST.fullmatch(text):  # such as 007, which Hydra leaves a text
        return text
    return float(text.replace("_", "")) if _NUMBER.fullmatch(text) else text


_PLAIN = r"-\w/\\+.$%*@?|: "
# Text in quotes is refused for the way to the job, with its own reason.
_READABLE = re.compile(
    rf"['\"].*|[{_PLAIN}]*|[\[{{][{_PLAIN},\[\]{{}}]*|(?:int|float|str|bool)\([{_PLAIN}]*\)", re.ASCII
)
"""Values that Hydra's parser takes: texts and numbers, lists and tables of such, casts. A comma makes a sweep."""


def _is_closed(text: str) -> bool:
    """Whether the brackets of a list or table match, the first with the last character, and no item is missing."""
    if text[:1] not in ("[", "{") or set("\\$") & set(text):  # what is escaped or filled in may be a bracket
        return True
    opened = list[str]()
    for position, letter in enumerate(text, 1):
        if letter in "[{":
            opened.append("]" if letter == "[" else "}")
        elif letter in "]}" and (not opened or opened.pop() != letter or (not opened and position < len(text))):
            return False
    return not opened and not re.search(r"[\[{,] *,|, *[\]}]", text)


def unreadable(value: str) -> str | None:
    """What in the value of an override Hydra's parser stumbles over; None where it takes the value."""
    if _READABLE.fullmatch(value):
        return None if _is_closed(value.strip()) else value.strip()[0]
    return next((letter for letter in value if not re.fullmatch(rf"[{_PLAIN}]", letter, re.ASCII)), value)


_RELEASED = Path(__file__).parent / "config_schemas"


@lru_cache(maxsize=4)
def released_schema(version: Version) -> ConfigSchema:
    """The configuration classes of the newest release that is not newer than a version; `HEAD` is a recent main."""
    shipped = sorted((version_for_pin(path.stem), path) for path in _RELEASED.glob("*.json"))
    path = next((path for known, path in reversed(shipped) if known <= version), shipped[0][1])
    return ConfigSchema.model_validate_json(path.read_bytes())
