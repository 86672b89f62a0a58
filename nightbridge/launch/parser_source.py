"""The pinned launcher's own argument parser, read as source and never imported.

What a flag is called and which values it allows changes between commits. The file is parsed with `ast`: importing it
would run code of the checkout and need NeMo-Run.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

from nightbridge.errors import InvalidInput
from nightbridge.launch.flags import Choices
from nightbridge.models import TestDefinition

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
        return flags_in(checkout / launcher.with_name(_PARSER_NAME))
    except OSError as error:
        raise InvalidInput(
            f"the pinned commit has no launcher at {launcher.with_name(_PARSER_NAME)}",
            thing=str(checkout),
            advice="Pin a Megatron-Bridge commit from v0.3.0 on, or set the launcher's path in git_repos",
        ) from error


def passes_every_image_on(checkout: Path, launcher: Path = LAUNCHER) -> bool:
    """Whether the checkout's launcher hands `container_image` to srun without ever looking at it, `none` included.

    One that compares or tests it may leave the container out. NVIDIA's never does, from v0.3 to 067f987d. A file that
    cannot be read proves nothing.
    """
    sources = (checkout / launcher, checkout / launcher.with_name("utils") / "executors.py")
    try:
        modules = [ast.parse(path.read_text(encoding="utf-8")) for path in sources if path.exists()]
    except (OSError, SyntaxError, ValueError):
        return False
    nodes = [node for module in modules for node in ast.walk(module)]
    tests: list[ast.expr] = [node for node in nodes if isinstance(node, ast.Compare)]
    tests += [node.test for node in nodes if isinstance(node, ast.If | ast.IfExp)]
    return bool(modules) and not any("container_image" in ast.unparse(test) for test in tests)


def flags_in(path: Path) -> dict[str, Choices]:
    """Return every option string that a Python file adds to a parser, with the values it allows (None: any).

    Raises:
        OSError: The file cannot be read.
        InvalidInput: It is not Python.
    """
    try:
        module = ast.parse(path.read_text(encoding="utf-8"))
    except (SyntaxError, ValueError) as error:
        raise InvalidInput(f"cannot read the launcher's parser: {error}", thing=str(path)) from error
    constants = _constants(module)
    tested = _tested_lists(module, constants)
    flags: dict[str, Choices] = {}
    for call in _add_argument_calls(module):
        flags.update(dict.fromkeys(_names(call), _choices(call, constants, tested)))
    return {name: choices for name, choices in flags.items() if name.startswith("-")}


def _add_argument_calls(module: ast.Module) -> Iterator[ast.Call]:
    for node in ast.walk(module):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "add_argument":
            yield node


def _names(call: ast.Call) -> Iterator[str]:
    """The option strings of a call; `argparse.BooleanOptionalAction` adds `--no-` to each long one."""
    names = [word.value for word in call.args if isinstance(word, ast.Constant) and isinstance(word.value, str)]
    yield from names
    actions = [keyword.value for keyword in call.keywords if keyword.arg == "action"]
    if any(isinstance(action, ast.Attribute) and action.attr == "BooleanOptionalAction" for action in actions):
        yield from (f"--no-{name.removeprefix('--')}" for name in names if name.startswith("--"))


def _constants(module: ast.Module) -> dict[str, tuple[str, ...]]:
    """The module's own lists and tables of texts, by name; of a table, its keys."""
    found: dict[str, tuple[str, ...]] = {}
    for node in module.body:
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            values = _texts(node.value)
            if values is not None:
                found[node.targets[0].id] = values
    return found


def _texts(node: ast.expr) -> tuple[str, ...] | None:
    items = node.keys if isinstance(node, ast.Dict) else getattr(node, "elts", None)
    if items is None or not all(isinstance(item, ast.Constant) for item in items):
        return None
    return tuple(str(item.value) for item in items if isinstance(item, ast.Constant))


def _tested_lists(module: ast.Module, constants: dict[str, tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
    """Type functions that raise for anything but members of lists of the module, by name.

    Only a word that is tested as it is counts: one that is lower-cased first may be written in other ways.
    """
    tested: dict[str, tuple[str, ...]] = {}
    for function in module.body:
        if not isinstance(function, ast.FunctionDef):
            continue
        nodes = list(ast.walk(function))
        tests = [node for node in nodes if isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.In)]
        lists = [node.comparators[0] for node in tests if isinstance(node.left, ast.Name)]
        names = [node.id for node in lists if isinstance(node, ast.Name) and node.id in constants]
        if names and len(names) == len(tests) and any(isinstance(node, ast.Raise) for node in nodes):
            tested[function.name] = tuple(dict.fromkeys(word for name in names for word in constants[name]))
    return tested


def _choices(call: ast.Call, constants: dict[str, tuple[str, ...]], tested: dict[str, tuple[str, ...]]) -> Choices:
    arguments = {keyword.arg: keyword.value for keyword in call.keywords}
    choices, kind = arguments.get("choices"), arguments.get("type")
    if choices is not None:
        if isinstance(choices, ast.Call) and isinstance(choices.func, ast.Attribute):
            choices = choices.func.value  # TABLE.keys()
        return constants.get(choices.id) if isinstance(choices, ast.Name) else _texts(choices)
    return tested.get(kind.id) if isinstance(kind, ast.Name) else None
