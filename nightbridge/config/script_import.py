"""A published launch script of two grids as a test, and both command lines compared.

The command that a script starts with torchrun is read and never executed. Assignments, arrays, `export`,
`${NAME:-default}` and `$((...))` are followed in their order; branches, loops and functions are not, and whatever
cannot be determined is an error with its line.
"""

import ast
import operator
import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nightbridge.config.documents import toml_assignments, toml_value
from nightbridge.config.scenarios import load, runs
from nightbridge.errors import InvalidInput
from nightbridge.launch import syntax_tree
from nightbridge.launch.hetero import ENCODER, LANGUAGE_MODEL, OFFSET, PROGRAMS, SHARDS
from nightbridge.launch.hetero_arguments import PASSED, HeteroArguments, option_of_field
from nightbridge.launch.launch_plan import placeholder_plan
from nightbridge.launch.parser_source import newest_parser
from nightbridge.models import Model, Site
from nightbridge.models.series import number_in

# --- what the script starts -------------------------------------------------------------------------------------------

_ASSIGNMENT = re.compile(r"\s*(?P<export>export\s+)?(?P<name>[A-Za-z_]\w*)(?P<more>\+?)=(?P<value>.*)", re.DOTALL)
_ELEMENTS = re.compile(r'"?\$\{(?P<name>[A-Za-z_]\w*)\[[@*]\]\}"?|"?\$[@*]"?')
_VARIABLE = re.compile(
    r"\$\(\((?P<sum>[^()]*)\)\)|\$\{(?P<braced>\w+)(?::?-(?P<default>[^{}]*))?\}|\$(?P<plain>\w+)|(?P<command>\$\(|`)"
)
_TORCHRUN = re.compile(r"\btorchrun\b|\btorch\.distributed\.(?:run|launch)\b")
_BEGINS, _ENDS = frozenset({"if", "for", "while", "case", "until"}), frozenset({"fi", "done", "esac"})
_OPERATORS = frozenset({"|", "||", "&&", ";", "&", ">", ">>", "2>&1", "&>", "<"})
_SWITCHES = frozenset({"--standalone", "--no-python", "--no_python", "-m", "--module", "--run-path", "--run_path"})
_SUMS: Mapping[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
    ast.Mod: operator.mod,
}


@dataclass(frozen=True, slots=True)
class Launch:
    """What a script starts: a program of its repository with its words, and what it exports."""

    program: str
    arguments: tuple[str, ...]
    variables: Mapping[str, str]


def read_launch(path: Path, given: Mapping[str, str]) -> Launch:
    """Read the one command of a launch script that starts ranks.

    `given` are variables of the environment, which the script's defaults give way to.

    Raises:
        InvalidInput: The script cannot be read, has no such command, or a value in it cannot be determined without
            executing it.
    """
    script = _Script(path, dict(given))
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = (isinstance(error, OSError) and error.strerror) or "it is not UTF-8"
        raise InvalidInput(f"cannot be read: {reason}", subject=str(path), advice="Name a readable script") from error
    for number, line in _lines(text):
        if _TORCHRUN.search(line) and not _ASSIGNMENT.match(line) and not line.lstrip().startswith("echo"):
            return _launch(script.words(line, number), script)
        script.take(line, number)
    raise InvalidInput(
        "starts nothing with torchrun outside of branches", subject=str(path), advice="Name a script that does"
    )


def _lines(text: str) -> Iterator[tuple[int, str]]:
    """Logical lines with their numbers: continued ones and arrays in one piece; comments and branches left out."""
    depth, pending, start = 0, "", 0
    for number, line in enumerate(text.splitlines(), 1):
        line = re.sub(r"(^|\s)#.*", "", line)
        start = start if pending else number
        pending += line.removesuffix("\\") + " "
        is_array = re.match(r"\s*\w+\+?=\(", pending) and not pending.rstrip().endswith(")")
        if line.endswith("\\") or is_array:
            continue
        words = pending.split()
        depth += bool(words) and (words[0] in _BEGINS or words[-1] == "{")
        if words and not depth:
            yield start, pending.strip()
        depth -= bool(words) and (words[0] in _ENDS or words == ["}"])
        pending = ""


class _Script:
    """The variables of a script, as far as it has been read."""

    def __init__(self, path: Path, given: dict[str, str]) -> None:
        self.path = path
        self._values: dict[str, str] = given
        self._arrays: dict[str, list[str]] = {}
        self.exported: dict[str, str] = {}
        self._undetermined: dict[str, int] = {}

    def take(self, line: str, number: int) -> None:
        """Follow an assignment; other commands change nothing that is read here."""
        if not (found := _ASSIGNMENT.fullmatch(line)):
            return
        name, value = found["name"], found["value"].strip()
        try:
            if value.startswith("("):
                words = self.words(value[1:-1], number)
                self._arrays[name] = [*self._arrays.get(name, []), *words] if found["more"] else words
                return
            text = " ".join(self.words(value, number))
        except InvalidInput:
            self._undetermined[name] = number  # an error only where the command needs it
            return
        self._values[name] = self._values.get(name, "") + text if found["more"] else text
        if found["export"]:
            self.exported[name] = self._values[name]

    def words(self, text: str, number: int) -> list[str]:
        """The words of a line, with everything expanded."""
        text = _ELEMENTS.sub(lambda match: shlex.join(self._arrays.get(match["name"] or "", [])), text)
        parts = re.split(r"('[^']*')", text)  # nothing expands between single quotes
        expanded = (part if part[:1] == "'" else self._expanded(part, number) for part in parts)
        try:
            return shlex.split("".join(expanded))
        except ValueError as error:
            raise self._error(str(error), number) from error

    def _expanded(self, text: str, number: int) -> str:
        def value(match: re.Match[str]) -> str:
            if match["command"]:
                raise self._error("the output of a command cannot be determined", number)
            if match["sum"] is not None:
                return str(self._sum(match["sum"], number))
            name = match["braced"] or match["plain"]
            found = self._values.get(name)
            if found is None and match["default"] is not None:
                found = self._expanded(match["default"].strip("\"'"), number)
            if found is None:
                where = (
                    f", for line {self._undetermined[name]} cannot be determined" if name in self._undetermined else ""
                )
                raise self._error(f"${name} has no value{where}", number)
            return re.sub(r'(["\\$`])', r"\\\1", found)

        return _VARIABLE.sub(value, text)

    def _sum(self, text: str, number: int) -> int:
        def of(node: ast.expr) -> int:
            if isinstance(node, ast.BinOp) and type(node.op) in _SUMS:
                return _SUMS[type(node.op)](of(node.left), of(node.right))
            if isinstance(node, ast.Name) and self._values.get(node.id, "").isdigit():
                return int(self._values[node.id])
            if isinstance(node, ast.Constant) and isinstance(node.value, int):
                return node.value
            raise ValueError(ast.unparse(node))

        try:
            return of(syntax_tree(self._expanded(text, number).strip(), "eval").body)
        except (SyntaxError, ValueError, ZeroDivisionError) as error:
            raise self._error(f"$(({text})) cannot be determined: {error}", number) from error

    def _error(self, problem: str, number: int) -> InvalidInput:
        return InvalidInput(problem, subject=f"{self.path}:{number}", advice="Give it with --set NAME=VALUE")


def _launch(words: list[str], script: _Script) -> Launch:
    position = next(i for i, word in enumerate(words) if _TORCHRUN.search(word))
    rest = words[position + 1 :]
    end = next((i for i, word in enumerate(rest) if word in _OPERATORS), len(rest))
    rest = rest[:end]
    while rest and rest[0].startswith("-") and rest[0] not in ("-m", "--module"):
        word = rest.pop(0)
        if "=" not in word and word not in _SWITCHES and rest:
            rest.pop(0)
    is_module = rest.pop(0) if rest[:1] in (["-m"], ["--module"]) else ""
    if not rest:
        raise InvalidInput("torchrun gets no program", subject=str(script.path), advice="Name a complete script")
    program = f"{rest[0].replace('.', '/')}.py" if is_module else rest[0]
    return Launch(program, tuple(rest[1:]), script.exported)


# --- the test ---------------------------------------------------------------------------------------------------------

_FIELDS = {option_of_field(field): field for field in PASSED}
_GRIDS = {
    **{option: ("encoder", axis) for axis, option in ENCODER.items()},
    **{option: ("language_model", axis) for axis, option in {**LANGUAGE_MODEL, **SHARDS}.items()},
}
_DECIDED = frozenset({"--tensorboard-dir", OFFSET})
"""What a run decides by itself: where its output goes, and at which rank the language model begins."""

Options = dict[str, str]
"""Options by name, each with its values as one text."""


class ImportedScript(Model):
    """A launch script as a test file's text, and the options that it gives its program."""

    toml: str
    options: Options


class OptionsDiff(Model):
    """The options of a test beside those of the script which it comes from; `different` ones have both values."""

    only_test: tuple[str, ...]
    only_script: tuple[str, ...]
    different: tuple[str, ...]


def import_script(script: Path, image: str, given: Mapping[str, str]) -> ImportedScript:
    """Turn a launch script into a test file's text.

    Args:
        script: A bash script that starts a program of two grids with torchrun.
        image: Container image of the test; a script names none.
        given: Variables of the environment that the script asks for.

    Raises:
        InvalidInput: The script starts nothing of the kind, or a value in it cannot be determined.
    """
    launch = read_launch(script, given)
    if launch.program not in PROGRAMS:
        advice = f"Import a script that starts {' or '.join(PROGRAMS)}"
        raise InvalidInput(f"starts {launch.program}, which has no two grids", subject=str(script), advice=advice)
    options = _options(launch.arguments, script)
    return ImportedScript(toml="\n".join(_test_lines(script, image, launch, options)) + "\n", options=options)


def compare_command_lines(imported: ImportedScript, file: Path) -> OptionsDiff:
    """Read a test file, plan its run, and compare what the program gets with what the script gives it.

    Raises:
        InvalidInput: The file cannot be a test; every violation is reported.
    """
    scenario = load(file)
    if scenario.invalid:
        what = "cannot be a test as it stands"
        advice = "Fix these lines, or the script"
        raise InvalidInput(what, subject=str(file), advice=advice, violations=scenario.invalid[0].violations)
    (spec,) = runs(scenario, "import")
    here = _options(_program_words(placeholder_plan(spec, Site()).batch_script or ""), file)
    there = imported.options
    return OptionsDiff(
        only_test=tuple(sorted(here.keys() - there.keys())),
        only_script=tuple(sorted(there.keys() - here.keys())),
        different=tuple(
            f"{name} {there[name]} became {here[name]}"
            for name in sorted(here.keys() & there.keys())
            if not _same(here[name], there[name])
        ),
    )


def _options(words: Iterable[str], script: Path) -> Options:
    """The options of a command line; one that is given again replaces what it was, as for argparse."""
    found: dict[str, list[str]] = {}
    name = ""
    for word in words:
        if word.startswith("-") and not re.fullmatch(r"-\d+(\.\d+)?(e-?\d+)?", word):
            name, _, value = word.partition("=")
            found[name] = [value] if value else []
        elif not name:
            raise InvalidInput(f"the program gets {word!r}, which is not an option", subject=str(script))
        else:
            found[name].append(word)
    return {option: values[0] if len(values) == 1 else shlex.join(values) for option, values in found.items()}


def _same(one: str, other: str) -> bool:
    try:
        return one == other or float(one) == float(other)
    except ValueError:
        return False


def _program_words(batch_script: str) -> list[str]:
    match = re.search(r"bash -c (.*)\Z", batch_script, re.DOTALL)
    words = shlex.split(shlex.split(match[1])[0]) if match else []
    return words[next(i for i, word in enumerate(words) if word.endswith(".py")) + 1 :]


def _test_lines(script: Path, image: str, launch: Launch, options: Options) -> Iterator[str]:
    grids: dict[str, dict[str, Any]] = {}
    arguments: dict[str, Any] = {"container_image": image}
    if launch.program != PROGRAMS[0]:
        arguments["program"] = launch.program
    extra: Options = {}
    for name, value in options.items():
        positive = f"--{name.removeprefix('--no-')}"
        if name in _GRIDS:
            grid, axis = _GRIDS[name]
            grids.setdefault(grid, {})[axis] = number_in(value)
        elif name in _FIELDS:
            arguments[_FIELDS[name]] = number_in(value) if value else True
        elif name.startswith("--no-") and positive in _FIELDS and name not in newest_parser().options:
            arguments[_FIELDS[positive]] = False
        elif name not in _DECIDED:
            extra[name.removeprefix("--")] = value
    yield f"# From {script.name}."
    yield ""
    yield f"name = {toml_value(script.stem)}"
    yield 'test_template_name = "HeteroMIMO"'
    yield from _table("cmd_args", {key: _text_where_required(key, value) for key, value in arguments.items()})
    for grid, sizes in grids.items():
        yield from _table(f"cmd_args.{grid}", sizes)
    yield from _table("extra_cmd_args", extra)
    yield from _table("extra_env_vars", launch.variables)
    yield from ("", "[[git_repos]]", 'url = "https://github.com/NVIDIA/Megatron-LM.git"', 'commit = "main"')


def _text_where_required(key: str, value: Any) -> Any:
    annotation = str(HeteroArguments.model_fields[key].annotation)
    return value if isinstance(value, bool) or "int" in annotation or "float" in annotation else str(value)


def _table(name: str, values: Mapping[str, Any]) -> Iterator[str]:
    if values:
        yield from ("", f"[{name}]")
        yield from toml_assignments(values)
