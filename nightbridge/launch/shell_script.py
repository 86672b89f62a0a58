"""The command that a launch script starts with torchrun, read and never executed.

Assignments, arrays, `export`, `${NAME:-default}` and `$((...))` are followed in their order; branches, loops and
functions are not, and whatever cannot be determined is an error with its line.
"""

import ast
import operator
import re
import shlex
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from nightbridge.errors import InvalidInput
from nightbridge.launch import syntax_tree

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
