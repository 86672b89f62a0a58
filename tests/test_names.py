"""One name for one thing: see docs/glossary.md."""

import ast
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).parents[1]
# `nightbridge/flows`, `tasks` and `blocks` are links, which a walk would find a second time under their other names.
LINKS = {path for path in (ROOT / "nightbridge").iterdir() if path.is_symlink()}
MODULES = sorted(
    path
    for folder in ("nightbridge", "flows", "tasks", "blocks")
    for path in (ROOT / folder).rglob("*.py")
    if LINKS.isdisjoint(path.parents) and not path.stem.startswith("__")
)


def repeated(names: Iterable[tuple[str, str]]) -> Mapping[str, list[str]]:
    """The names that stand more than once, and where."""
    found = defaultdict(list)
    for name, place in names:
        found[name].append(place)
    return {name: places for name, places in found.items() if len(places) > 1}


def types_of(path: Path) -> Iterator[tuple[str, str]]:
    """The classes of a module with their places, and its aliases of types as they are defined: `Kind = Literal[...]`.

    Two modules may define an alias alike: it is the same thing.
    """
    for node in ast.parse(path.read_text()).body:
        match node:
            case ast.ClassDef(name=name):
                yield name, f"{path.relative_to(ROOT)}:{node.lineno}"
            case ast.Assign(targets=[ast.Name(id=name)]) if re.fullmatch(r"_?[A-Z]\w*[a-z]\w*", name):
                yield name, ast.unparse(node)


def test_every_type_has_a_name_of_its_own() -> None:
    assert repeated({found for path in MODULES for found in types_of(path)}) == {}


def test_every_module_has_a_name_of_its_own_but_a_flow_and_its_tasks() -> None:
    modules = repeated((path.stem, path.parent.relative_to(ROOT).as_posix()) for path in MODULES)
    assert {name: folders for name, folders in modules.items() if folders != ["flows", "tasks"]} == {}
