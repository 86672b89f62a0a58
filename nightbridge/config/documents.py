"""TOML files as read: their tables, the line of every key, and the findings about them, each with its line.

`tomllib` keeps no positions. Neither does `tomlkit` 0.15, whose parser takes eight times as long (13.6 against 1.6 ms
for the 18 files of `conf/`). When a line is wanted, the text is cut into statements, and `tomllib` reads each of them
alone. Keys inside an inline table or an array share the line of the key before it.
"""

import difflib
import json
import re
import tomllib
import typing
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from nightbridge.errors import InvalidInput
from nightbridge.models import Severity, Violation

AnyModel = TypeVar("AnyModel", bound=BaseModel)
KeyPath = tuple[str | int, ...]
"""Keys from the root; an element of an array of tables is its index."""

_TOKEN = re.compile(
    r""""{3}(?:[^\\]|\\.)*?"{3,5}|'{3}.*?'{3,5}|"(?:[^"\\\n]|\\.)*"|'[^'\n]*'|\#[^\n]*|[\[\]{}\n]""", re.DOTALL
)
"""What decides where a statement ends: strings, comments, brackets and line ends."""


def key_lines(text: str) -> dict[KeyPath, int]:
    """Return the line, from 1, of every key and table header; what follows invalid TOML is absent."""
    lines: dict[KeyPath, int] = {}
    implied: dict[KeyPath, int] = {}  # [a.b] makes a as well, which may have a header of its own further down
    elements: Counter[KeyPath] = Counter()
    table: KeyPath = ()
    line = 1
    for statement in _statements(text.replace("\r\n", "\n")):
        try:
            paths = list(_paths(tomllib.loads(statement)))
        except (ValueError, RecursionError):
            break
        if statement.lstrip().startswith("["):
            *above, table = (_resolve(path, elements) for path in paths)
            for each in above:
                implied.setdefault(each, line)
            if statement.lstrip().startswith("[["):
                lines.setdefault(table, line)
                elements[table] += 1
                table = (*table, elements[table] - 1)
            paths = [()]
        for path in paths:
            lines.setdefault((*table, *path), line)
        line += statement.count("\n") + 1
    return implied | lines


def line_of(lines: dict[KeyPath, int], path: KeyPath) -> int | None:
    """The line of a key, or of the nearest key around it that has one."""
    return next((lines[path[:length]] for length in range(len(path), 0, -1) if path[:length] in lines), None)


def _statements(text: str) -> Iterator[str]:
    """Cut a text at the line ends that are in no string and no bracket."""
    start = depth = 0
    for token in _TOKEN.finditer(text):
        if token[0] == "\n" and depth == 0:
            yield text[start : token.start()]
            start = token.end()
        depth += {"[": 1, "{": 1, "]": -1, "}": -1}.get(token[0], 0)
    yield text[start:]


def _paths(table: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    for key, value in table.items():
        yield (key,)
        if isinstance(value, dict):
            yield from ((key, *path) for path in _paths(value))


def _resolve(names: Sequence[str], elements: Counter[KeyPath]) -> KeyPath:
    """A header's path: the name of an array of tables means its last element."""
    path: KeyPath = ()
    for index, name in enumerate(names):
        path = (*path, name)
        if index < len(names) - 1 and elements[path]:
            path = (*path, elements[path] - 1)
    return path


Table = Mapping[str, Any]

SIZE_LIMIT = 4 * 1024 * 1024
"""Bytes; no configuration is this large, but a training log passed by mistake is."""

DEPTH_LIMIT = 50
"""Tables and lists inside each other; a configuration has about six. Dotted keys nest as deeply as a line is long."""


@dataclass(frozen=True)
class Document:
    """One TOML file, under the path by which the user named it."""

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


def printable_path(path: Path) -> str:
    r"""A path as it can be printed and stored, the bytes that are not UTF-8 as `\xff`."""
    return str(path).encode(errors="surrogateescape").decode(errors="backslashreplace")


def check_name(path: Path) -> None:
    """Refuse a path that is not UTF-8: it stands in JSON, which holds nothing else.

    Raises:
        InvalidInput: It is not.
    """
    if printable_path(path) != str(path):
        raise InvalidInput("its path is not UTF-8", subject=printable_path(path), advice="Rename the file or folder")


def read_document(path: Path) -> Document:
    """Read and parse a TOML file.

    Raises:
        InvalidInput: It cannot be read, it or its path is not UTF-8, or it is not TOML; the message names the line.
    """
    check_name(path)
    try:
        if path.is_file() and path.stat().st_size > SIZE_LIMIT:
            raise InvalidInput("too large for a configuration", subject=str(path), advice="Name a TOML file")
        text = path.read_text(encoding="utf-8-sig")  # without the byte order mark that some editors write
    except FileNotFoundError as error:
        raise InvalidInput("no such file", subject=str(path), advice="Check the path") from error
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise InvalidInput(
            f"cannot be read: {reason}", subject=str(path), advice="Name a readable TOML file"
        ) from error
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
        raise InvalidInput(f"not valid TOML: {reason}", subject=str(path), advice="Fix the syntax there") from error
    _check_values(table, path)
    return Document(path, text, table)


def _check_values(table: Table, path: Path) -> None:
    """Refuse valid TOML that is no configuration, without recursion: tables may nest deeper than Python's stack."""
    level: list[Any] = [table]
    for _ in range(DEPTH_LIMIT):
        inside = [
            inner
            for value in level
            for inner in ((*value, *value.values()) if isinstance(value, Mapping) else value)
            if isinstance(inner, Mapping | list | str)
        ]
        if any("\0" in text for text in inside if isinstance(text, str)):
            what = "contains a NUL character (\\u0000), which paths, arguments and variables cannot contain"
            raise InvalidInput(what, subject=str(path), advice="Remove it")
        level = [inner for inner in inside if not isinstance(inner, str)]
        if not level:
            return
    raise InvalidInput(
        f"tables are nested more than {DEPTH_LIMIT} deep", subject=str(path), advice="Look for a key with many dots"
    )


@dataclass(frozen=True)
class Layer:
    """A table, and the part of a document that it comes from."""

    table: Table
    document: Document
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
            merged = overlay(merged, layer.table)
        return merged

    def origin(self, path: KeyPath) -> Layer:
        """The topmost layer that writes the key, or the longest written part of its path."""
        for length in range(len(path), 0, -1):
            for layer in reversed(self.layers):
                if _has(layer.table, path[:length]):
                    return layer
        return self.layers[-1]

    def where(self, path: KeyPath) -> str:
        """`FILE:LINE` of the key."""
        layer = self.origin(path)
        return layer.document.where((*layer.base, *path))

    @cached_property
    def lines(self) -> dict[str, str]:
        """`FILE:LINE` of every key of the merged table, and of the tables in it."""
        paths = (
            (key, *inner)
            for key, value in self.table.items()
            for inner in ((), *((name,) for name in (value if isinstance(value, Mapping) else ())))
        )
        return {dotted(path): self.where(path) for path in paths}


def overlay(below: Table, above: Table) -> dict[str, Any]:
    """Lay one table over another; neither is changed."""
    merged = dict(below)
    for key, value in above.items():
        under = merged.get(key)
        merged[key] = overlay(under, value) if isinstance(under, dict) and isinstance(value, dict) else value
    return merged


def _has(table: Any, path: KeyPath) -> bool:
    for part in path:
        inside_list = isinstance(table, list) and isinstance(part, int) and part < len(table)
        if not inside_list and not (isinstance(table, Mapping) and part in table):
            return False
        table = table[part]
    return True


class Findings:
    """Collects problems and warnings while a test is read, so that all of them are reported at once."""

    def __init__(self, source: Layered, tables: Mapping[str, Iterable[str]] | None = None) -> None:
        self.source = source
        self.tables = tables or {}  # the keys of each, by what it is called, to say where one of them belongs
        self.problems: dict[Violation, None] = {}  # in their order, and each once
        self.warnings: list[Violation] = []

    def problem(self, path: KeyPath, message: str) -> None:
        """Add something that keeps the test from running; the same finding is added once."""
        self.problems[finding(self.source.where(path), path, message)] = None

    def warn(self, path: KeyPath, message: str) -> None:
        """Add a warning; the test runs."""
        self.warnings.append(finding(self.source.where(path), path, message, "warning"))

    def unknown(self, path: KeyPath, known: Iterable[str]) -> None:
        """Add a key that does not exist, with the nearest one that does, here or in another table."""
        key, here = str(path[-1]), f"[{dotted(path[:-1])}]"
        others = {ours: table for table, keys in self.tables.items() if table != here for ours in keys}
        self.problem(path, f"unknown key{_meant_elsewhere(key, known, others) or meant(key, known)}")

    def taken(self, table: Table, ignored: Mapping[str, str], base: KeyPath = ()) -> dict[str, Any]:
        """The table at `base` without keys that are accepted and do nothing; each is a warning, with its reason."""
        for key in table:
            if key in ignored:
                self.warn((*base, key), ignored[key])
        return {key: value for key, value in table.items() if key not in ignored}


OTHER_NAMES: Mapping[str, str] = {
    "mb": "micro_batch_size",
    "gb": "global_batch_size",
    "tp": "tensor_parallel tensor_model_parallel_size",
    "pp": "pipeline_parallel pipeline_model_parallel_size",
    "vp": "virtual_pipeline_model_parallel_size",
    "cp": "context_parallel context_parallel_size",
    "ep": "expert_parallel expert_model_parallel_size",
    "et": "expert_tensor_parallel_size",
    "max_steps": "train_iters num_steps",
    "seq_length": "sequence_length",
    "num_moe_experts": "num_experts",
    "compute_dtype": "precision dtype",
    "warmup_iters": "lr_warmup_iters",
    "lr": "learning_rate",
    "model_recipe_name": "model recipe",
    "num_gpus": "gpus",
    "container_image": "image",
}
"""Keys of `[cmd_args]`, and what Megatron and NeMo call them."""

ELSEWHERE = {name: key for key, names in OTHER_NAMES.items() for name in names.split()}

TABLES = frozenset({"extra_cmd_args", "extra_env_vars", "harvest", "gate", "sweep", "nemo_run_repo", "git_repos"})


def finding(place: str, path: KeyPath, message: str, severity: Severity = "error") -> Violation:
    """What is wrong with the key at a path, which is written at a place."""
    key = dotted(path)
    return Violation(severity=severity, fields=(key,), message=f"{key}: {message}", places=(place,))


def dotted(path: KeyPath) -> str:
    """`git_repos[0].url` for the path of a key."""
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)
    return text.removeprefix(".")


def unknown_key(key: str, known: Iterable[str]) -> str:
    """The message for a key that does not exist."""
    return f"unknown key{meant(key, known)}"


def meant(name: str, known: Iterable[str]) -> str:
    """What somebody means by a name that does not exist, as the end of a message; empty where nothing is near."""
    names = sorted(known)
    if (here := ELSEWHERE.get(name)) in names:
        return f"; write {here}"
    if name in TABLES:
        return f"; it is a table of the test, [{name}]"
    nearest = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    return f"; did you mean {nearest[0]!r}?" if nearest else ""


def _meant_elsewhere(name: str, known: Iterable[str], others: Mapping[str, str]) -> str:
    """The same of a key of another table, by `others`, where no key of this one is as near."""
    names, ours = {*known}, ELSEWHERE.get(name, name)
    if ours in names or name in TABLES:
        return ""
    if ours in others:
        return f"; write {'it' if ours == name else ours} in {others[ours]}"
    near = difflib.get_close_matches(name, [*sorted(names), *others], n=1, cutoff=0.8)
    return f"; did you mean {near[0]!r} of {others[near[0]]}?" if near and near[0] not in names else ""


# --- a table as a model ----------------------------------------------------------------------------------------------

_MESSAGES: Mapping[str, str] = {
    "missing": "is required",
    "string_type": "must be text, in quotes",
    "dict_type": "must be a table",
    "model_type": "must be a table",
    "tuple_type": "must be a list",
    "string_too_short": "must not be empty",
    "too_short": "must not be empty",
    "float_type": "must be a number",
    "float_parsing": "must be a number, without quotes",
    "int_type": "must be a whole number",
    "int_from_float": "must be a whole number",
    "int_parsing": "must be a whole number, without quotes",
    "bool_type": "must be true or false",
    "bool_parsing": "must be true or false, without quotes",
}
_PERCENTAGE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*%\s*")

_UNIONS: Mapping[str | int, tuple[int, str]] = {
    "extra_env_vars": (2, "must be text, in quotes, or a list of texts to sweep over"),
    "num_nodes": (1, "must be a whole number, or a list of them to sweep over"),
    "extra_srun_args": (1, "must be text, or a list of texts"),
}
"""Tables and keys that allow several types: how long the path of such a value is, and what it must be."""


def validated(
    model: type[AnyModel],
    table: Mapping[str, Any],
    findings: Findings,
    *,
    base: KeyPath = (),
    also_known: Iterable[str] = (),
) -> AnyModel | None:
    """Read a table as a model; every problem goes to `findings`, and then there is no result.

    `base` is the table's path in its file, `also_known` are keys that have been taken out of it.
    """
    try:
        return model.model_validate(table)
    except ValidationError as error:
        for problem in error.errors(include_url=False):
            kind, message = problem["type"], problem["msg"]
            path = tuple(part for part in problem["loc"] if part != "[key]")  # pydantic's mark of a table's key
            if kind == "extra_forbidden":
                findings.unknown((*base, *path), {*_fields_at(model, path), *(also_known if len(path) == 1 else ())})
            elif path[0] in _UNIONS:
                # Where several types are allowed, pydantic reports each of them below the key: one line is enough.
                length, wants = _UNIONS[path[0]]
                findings.problem((*base, *path[:length]), wants)
            else:
                said = _MESSAGES.get(kind) or message[:1].lower() + message[1:]
                if kind == "float_parsing" and (percent := _PERCENTAGE.fullmatch(problem["input"])):
                    share = float(percent[1]) / 100
                    said = f"must be a number, without a percent sign; write {share:g} for {percent[1]} %"
                words = re.findall(r"'([^']*)'", problem.get("ctx", {}).get("expected", ""))
                near = difflib.get_close_matches(str(problem["input"]), words, n=1)
                findings.problem((*base, *path), f"{said}; did you mean {near[0]!r}?" if near else said)
        return None


def _fields_at(model: type[BaseModel], path: KeyPath) -> Iterable[str]:
    """The fields of the innermost model on the way to a key."""
    for part in path[:-1]:
        if field := model.model_fields.get(str(part)):
            model = _model_in(field.annotation) or model
    return model.model_fields


def _model_in(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((found for argument in typing.get_args(annotation) if (found := _model_in(argument))), None)


# --- values as TOML ---------------------------------------------------------------------------------------------------


def toml_value(value: Any) -> str:
    """Text, a number, a boolean, or a mapping, list or tuple of such as TOML, tables inline."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_quoted(key)} = {toml_value(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(toml_value, value)) + "]"
    if isinstance(value, bool):
        return "true" if value else "false"
    return _quoted(value) if isinstance(value, str) else repr(value)


def _quoted(text: str) -> str:
    # JSON escapes what TOML wants escaped, but for one control character.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def toml_assignments(table: Mapping[str, Any]) -> Iterator[str]:
    """The lines of a table, `key = value`."""
    for key, value in table.items():
        yield f"{key if re.fullmatch(r'[A-Za-z0-9_-]+', key) else _quoted(key)} = {toml_value(value)}"
