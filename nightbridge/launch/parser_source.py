"""The argument parsers of pinned programs, read as source and never imported: the launcher's, and Megatron-LM's.

What a flag is called and which values it allows changes between commits. Importing a parser would run code of the
checkout, and need NeMo-Run or torch. The launcher's options stand in one file. Those of a Megatron-LM program are what
its own functions and Megatron-LM's add with `add_argument`, and what `ArgumentGroupFactory` makes of the fields of
configuration classes.
"""

import ast
import difflib
import json
import shlex
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from nightbridge.errors import InvalidInput
from nightbridge.launch import syntax_tree
from nightbridge.launch.config_source import ClassReader, Module, default_is, fields_of, keywords_of
from nightbridge.launch.flags import Choices
from nightbridge.models import Model, TestDefinition

LAUNCHER = Path("scripts/performance/setup_experiment.py")
"""Where Megatron-Bridge keeps its launcher, in every release since v0.3; its parser lies beside it."""

_PARSER_NAME = "argument_parser.py"
PARSER = LAUNCHER.with_name(_PARSER_NAME)


def launcher_of(test: TestDefinition) -> Path:
    """The launcher's path in its repository: the test's, else Megatron-Bridge's own."""
    return Path(test.megatron_bridge.launcher or LAUNCHER)


def known_flags(checkout: Path, launcher: Path = LAUNCHER) -> dict[str, Choices]:
    """Return every option string of the checkout's launcher with the values it allows (None: any).

    Choices are found where they are written as a list, as the keys of a table of the module, and where the option's
    type function tests `in` a list of the module.

    Raises:
        InvalidInput: The checkout has no such parser, or it is not Python that can be read.
    """
    try:
        options = flags_in(checkout / launcher.with_name(_PARSER_NAME))
    except OSError as error:
        raise InvalidInput(
            f"the pinned commit has no launcher at {launcher.with_name(_PARSER_NAME)}",
            subject=str(checkout),
            advice="Pin a Megatron-Bridge commit from v0.3.0 on, or set the launcher's path in git_repos",
        ) from error
    return {name: option.choices for name, option in options.items()}


def passes_every_image_on(checkout: Path, launcher: Path = LAUNCHER) -> bool:
    """Whether the checkout's launcher hands `container_image` to srun without ever looking at it, `none` included.

    One that compares or tests it may leave the container out. NVIDIA's never does, from v0.3 to 067f987d. A file that
    cannot be read proves nothing.
    """
    sources = (checkout / launcher, checkout / launcher.with_name("utils") / "executors.py")
    try:
        modules = [syntax_tree(path.read_text(encoding="utf-8")) for path in sources if path.exists()]
    except (OSError, SyntaxError, ValueError):
        return False
    nodes = [node for module in modules for node in ast.walk(module)]
    tests: list[ast.expr] = [node for node in nodes if isinstance(node, ast.Compare)]
    tests += [node.test for node in nodes if isinstance(node, ast.If | ast.IfExp)]
    return bool(modules) and not any("container_image" in ast.unparse(test) for test in tests)


def flags_in(path: Path) -> dict[str, "Option"]:
    """Return every option string that a Python file adds to a parser.

    Raises:
        OSError: The file cannot be read.
        InvalidInput: It is not Python.
    """
    try:
        module = Module(path.stem, path)
    except (SyntaxError, ValueError) as error:
        raise InvalidInput(f"cannot read the launcher's parser: {error}", subject=str(path)) from error
    reader = _ParserReader(path.parent)
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "add_argument":
            reader.add_argument(module, node)
    return reader.options


def _both_forms(names: Iterable[str], meta: Mapping[str, ast.expr]) -> Iterator[str]:
    """Options; `argparse.BooleanOptionalAction` adds `--no-` to each long one."""
    has_two = getattr(meta.get("action"), "attr", "") == "BooleanOptionalAction"
    for name in names:
        yield name
        if has_two and name.startswith("--"):
            yield f"--no-{name.removeprefix('--')}"


# --- the parser of a Megatron-LM program ------------------------------------------------------------------------------

Values = Literal["none", "one", "optional", "many", "unknown"]

_FACTORY = "ArgumentGroupFactory"
_ENTRY = "parse_args"
_REQUIRED = ("validate_args", "required_args")
"""Function of Megatron-LM, and the list in it that names what no run can do without."""

_KINDS = {"int": int, "float": float}
_NARGS: Mapping[str, Values] = {"?": "optional", "+": "many", "*": "many"}
_SIZES_ELSEWHERE = frozenset({"--yaml-cfg", "--use-checkpoint-args", "--heterogeneous-layers-config-path"})
"""Options that bring the sizes of the model along."""


class Option(Model):
    """One option of a program.

    Attributes:
        values: How many values it takes.
        kind: What each of them is read as: `int`, `float`, or `str` for everything else.
        choices: The values that it allows; None for any.
    """

    values: Values = "one"
    kind: Literal["int", "float", "str"] = "str"
    choices: tuple[str, ...] | None = None

    def words(self, values: Sequence[str]) -> Sequence[str]:
        """The words of its values; where it takes many, they are written in one text.

        Raises:
            ValueError: The text has a quote that is not closed.
        """
        return shlex.split(values[0]) if values and self.values == "many" else values


class ProgramParser(Model):
    """The parser of one program at one commit.

    Attributes:
        commit: Of Megatron-LM; empty for a pinned checkout's own.
        options: By name, `--` included.
        required: Options without which no run starts.
    """

    commit: str = ""
    options: dict[str, Option]
    required: tuple[str, ...] = ()

    def problems(self, arguments: Iterable[Sequence[str]]) -> Iterator[str]:
        """What the parser refuses in options that are given with their values, each in a line."""
        for name, *values in arguments:
            if (option := self.options.get(name)) is None:
                near = difflib.get_close_matches(name.replace("_", "-"), self.options, n=1, cutoff=0.75)
                yield f"{name}: the program has no such flag{f'; did you mean {near[0]}?' if near else ''}"
            elif problem := _problem(option, values):
                yield f"{name}: {problem}"

    def missing(self, arguments: Iterable[Sequence[str]]) -> tuple[str, ...]:
        """The required options that are not given; none where the sizes come from elsewhere."""
        written = {name for name, *_ in arguments}
        return () if _SIZES_ELSEWHERE & written else tuple(name for name in self.required if name not in written)


def _problem(option: Option, values: Sequence[str]) -> str | None:
    try:
        words = option.words(values)
    except ValueError as error:
        return f"{values[0]!r} cannot be split into words: {error}"
    if option.values == "none" and words:
        return f"it takes no value, and {words[0]!r} is written"
    if option.values in ("one", "many") and not words:
        return "it needs a value"
    wrong = next((word for word in words if not _is_read(option, word)), None)
    if wrong is None:
        return None
    return (
        f"{wrong!r} is not one of {', '.join(option.choices)}" if option.choices else f"{wrong!r} is no {option.kind}"
    )


def _is_read(option: Option, word: str) -> bool:
    if option.choices is not None:
        return word in option.choices
    try:
        _KINDS.get(option.kind, str)(word)
    except ValueError:
        return False
    return True


@lru_cache(maxsize=8)
def read_parser(checkout: Path, program: str) -> ProgramParser | None:
    """Read the parser of a program of a Megatron-LM checkout, once: a sweep needs it for every point.

    Returns:
        Its options; None where the program, or a parser of Megatron-LM that it uses, is not there.
    """
    reader = _ParserReader(checkout)
    module = reader.classes.module(program.removesuffix(".py").replace("/", "."))
    if module is None or not reader.read_program(module):
        return None
    return ProgramParser(options=reader.options, required=reader.required)


class _ParserReader:
    """Follows a program's functions to everything that adds options to a parser."""

    def __init__(self, checkout: Path) -> None:
        self.classes = ClassReader(checkout, (Path(),))
        self.options: dict[str, Option] = {}
        self.required: tuple[str, ...] = ()
        self._seen: set[tuple[str, str]] = set()

    def read_program(self, program: Module) -> bool:
        """Read the program's own options and those of Megatron-LM; False where the latter are not to be found."""
        found = self.classes.find(program, _ENTRY)
        if found is None or not isinstance(found[1], ast.FunctionDef):
            return False
        self._read(found[0], found[1])
        for function in program.functions.values():
            if function.args.args and function.args.args[0].arg == "parser":
                self._read(program, function)
        validate = found[0].functions.get(_REQUIRED[0])
        for node in ast.walk(validate) if validate else ():
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == _REQUIRED[1]:
                self.required = tuple(f"--{name.replace('_', '-')}" for name in ast.literal_eval(node.value))
        return True

    def _read(self, module: Module, function: ast.FunctionDef) -> None:
        if (module.name, function.name) in self._seen:
            return
        self._seen.add((module.name, function.name))
        nodes = list(ast.walk(function))
        for node in nodes:
            if isinstance(node, ast.ImportFrom):
                module.read(node)
        for call in (node for node in nodes if isinstance(node, ast.Call)):
            name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
            if name == "add_argument":
                self.add_argument(module, call)
            elif name == _FACTORY:
                self._add_fields(module, call, _excluded(call, nodes))
            elif any(isinstance(word, ast.Name) and word.id in ("parser", "group") for word in call.args):
                found = self.classes.find(module, name)
                if found and isinstance(found[1], ast.FunctionDef):
                    self._read(found[0], found[1])

    def add_argument(self, module: Module, call: ast.Call) -> None:
        """Read a call of `add_argument`."""
        meta = keywords_of(call)
        words = [word.value for word in call.args if isinstance(word, ast.Constant)]
        names = [word for word in words if isinstance(word, str) and word.startswith("-")]
        option = Option(**dict(self._settings(module, meta)))
        self.options.update(dict.fromkeys(_both_forms(names, meta), option))

    def _settings(self, module: Module, meta: Mapping[str, ast.expr]) -> Iterator[tuple[str, Any]]:
        """What the keywords of `add_argument` say about an option's values."""
        action, nargs, kind, choices = (meta.get(name) for name in ("action", "nargs", "type", "choices"))
        if action is not None:
            literal = action.value if isinstance(action, ast.Constant) else getattr(action, "attr", "")
            if str(literal).startswith("store_") or literal in ("BooleanOptionalAction", "count", "help"):
                yield "values", "none"
        if isinstance(nargs, ast.Constant):
            yield "values", "many" if isinstance(nargs.value, int) else _NARGS.get(str(nargs.value), "unknown")
        if kind is not None:
            yield "kind", kind.id if isinstance(kind, ast.Name) and kind.id in _KINDS else "str"
        function = module.functions.get(kind.id) if isinstance(kind, ast.Name) else None
        if choices is not None:
            yield "choices", self._choices(module, choices)
        elif function is not None:
            yield "choices", self._tested(module, function)

    def _choices(self, module: Module, node: ast.expr) -> tuple[str, ...] | None:
        """The words of a list, or of a table's keys, in place or by its name; None where they are computed."""
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            node = node.func.value  # TABLE.keys()
        if isinstance(node, ast.Name) and (found := self.classes.find(module, node.id)):
            node = found[1] if isinstance(found[1], ast.expr) else node
        if isinstance(node, ast.ListComp) and isinstance(node.generators[0].iter, ast.Name):
            return self._members(module, node.generators[0].iter.id)
        items = node.keys if isinstance(node, ast.Dict) else getattr(node, "elts", ())
        words = [self._constant(module, item) for item in items]
        return tuple(str(word.value) for word in words if word) if words and None not in words else None

    def _constant(self, module: Module, node: ast.expr | None) -> ast.Constant | None:
        found = self.classes.find(module, node.id) if isinstance(node, ast.Name) else None
        value = found[1] if found else node
        return value if isinstance(value, ast.Constant) else None

    def _tested(self, module: Module, function: ast.FunctionDef) -> tuple[str, ...] | None:
        """The words of a type function that raises for anything but members of lists; None for another one.

        Only a word that is tested as it is counts: one that is lower-cased first may be written in other ways.
        """
        nodes = list(ast.walk(function))
        tests = [node for node in nodes if isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.In)]
        named = [node.comparators[0] for node in tests if isinstance(node.left, ast.Name)]
        lists = [self._choices(module, node) for node in named if isinstance(node, ast.Name)]
        raises = any(isinstance(node, ast.Raise) for node in nodes)
        if not (lists and all(lists) and len(lists) == len(tests) and raises):
            return None
        return tuple(dict.fromkeys(word for words in lists for word in words or ()))

    def _members(self, module: Module, name: str) -> tuple[str, ...] | None:
        found = self.classes.find(module, name)
        if not found or not isinstance(found[1], ast.ClassDef):
            return None
        return self.classes.classes[self.classes.add(found[0], found[1])].members or None

    # --- options that are made of a configuration class's fields ------------------------------------------------------

    def _add_fields(self, module: Module, call: ast.Call, excluded: frozenset[str]) -> None:
        word = call.args[0] if call.args else None
        found = self.classes.find(module, word.id) if isinstance(word, ast.Name) else None
        if found and isinstance(found[1], ast.ClassDef):
            for name, (owner, field) in self._fields(found[0], found[1]).items():
                is_set_later = getattr(keywords_of(field.value).get("init"), "value", None) is False
                if name not in excluded and not is_set_later:
                    self._add_field(owner, name, field)

    def _fields(self, module: Module, definition: ast.ClassDef) -> dict[str, tuple[Module, ast.AnnAssign]]:
        fields: dict[str, tuple[Module, ast.AnnAssign]] = {}
        for base in reversed(definition.bases):
            found = self.classes.find(module, base.id) if isinstance(base, ast.Name) else None
            if found and isinstance(found[1], ast.ClassDef):
                fields.update(self._fields(found[0], found[1]))
        return {**fields, **{name: (module, field) for name, field in fields_of(definition)}}

    def _add_field(self, module: Module, name: str, field: ast.AnnAssign) -> None:
        meta = _argparse_meta(field)
        dashed = name.replace("_", "-")
        settings = self._of_type(module, field)
        # A switch that is on, or unset, by default is one that switches off.
        names = [f"--{dashed}"]
        if settings.pop("switch", False) and not default_is(False, field):
            names = [f"--no-{dashed}", f"--disable-{dashed}"]
        if isinstance(meta.get("arg_names"), ast.List | ast.Tuple):
            names = list(ast.literal_eval(meta["arg_names"]))
        option = Option(**{**settings, **dict(self._settings(module, meta))})
        self.options.update(dict.fromkeys(_both_forms(names, meta), option))

    def _of_type(self, module: Module, field: ast.AnnAssign) -> dict[str, Any]:
        kinds = [kind for kind in self.classes.type_of(module, field).split(" | ") if kind != "None"]
        first = kinds[0] if kinds else ""
        if first == "bool":
            return {"values": "none", "switch": True}
        if first in _KINDS:
            return {"kind": first}
        if first == "list":
            inner = ast.unparse(field.annotation)
            return {"values": "many", "kind": next((kind for kind in _KINDS if f"[{kind}]" in inner), "str")}
        if first[:1] in ("'", '"') or first.lstrip("-").isdigit():
            return {"choices": tuple(str(ast.literal_eval(kind)) for kind in kinds)}
        definition = self.classes.classes.get(first)
        return {"choices": definition.members} if definition and definition.members else {}


def _excluded(call: ast.Call, nodes: Iterable[ast.AST]) -> frozenset[str]:
    """The fields that a factory leaves out: a list in place, or one that the function has made before."""
    given = keywords_of(call).get("exclude")
    lists = [given]
    if isinstance(given, ast.Name):
        assigned = (node for node in nodes if isinstance(node, ast.Assign | ast.AugAssign))
        lists = [
            node.value
            for node in assigned
            if given.id in map(ast.unparse, node.targets if isinstance(node, ast.Assign) else [node.target])
        ]
    items = (item for found in lists if isinstance(found, ast.List) for item in found.elts)
    return frozenset(str(item.value) for item in items if isinstance(item, ast.Constant))


def _argparse_meta(field: ast.AnnAssign) -> dict[str, ast.expr]:
    """What a field's metadata tells `add_argument`."""
    table = keywords_of(field.value).get("metadata")
    for key, value in zip(table.keys, table.values, strict=True) if isinstance(table, ast.Dict) else ():
        if isinstance(key, ast.Constant) and key.value == "argparse_meta" and isinstance(value, ast.Dict):
            pairs = zip(value.keys, value.values, strict=True)
            return {str(name.value): each for name, each in pairs if isinstance(name, ast.Constant)}
    return {}


_NEWEST = Path(__file__).with_name("megatron_options.json")


@lru_cache(maxsize=1)
def newest_parser() -> ProgramParser:
    """The parser of `pretrain_mimo.py` of a recent main: for tests whose code has not been fetched."""
    return ProgramParser.model_validate_json(_NEWEST.read_bytes())


# python -m nightbridge.launch.parser_source CHECKOUT COMMIT > .../megatron_options.json
if __name__ == "__main__":
    parser = read_parser(Path(sys.argv[1]), "examples/mimo/pretrain_mimo.py")
    if parser is None:
        sys.exit(f"{sys.argv[1]} holds no examples/mimo/pretrain_mimo.py")
    lines = (
        f"{json.dumps(name)}: {option.model_dump_json(exclude_defaults=True)}"
        for name, option in sorted(parser.options.items())
    )
    required = json.dumps(parser.required)
    sys.stdout.write(
        f'{{"commit": "{sys.argv[2]}", "required": {required}, "options": {{\n' + ",\n".join(lines) + "\n}}\n"
    )
