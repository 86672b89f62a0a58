"""One name for one thing: see docs/glossary.md."""

import ast
from collections import defaultdict
from collections.abc import Iterable, Mapping
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


def test_every_class_has_a_name_of_its_own() -> None:
    classes = (
        (node.name, f"{path.relative_to(ROOT)}:{node.lineno}")
        for path in MODULES
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.ClassDef)
    )
    assert repeated(classes) == {}


def test_every_module_has_a_name_of_its_own_but_a_flow_and_its_tasks() -> None:
    modules = repeated((path.stem, path.parent.relative_to(ROOT).as_posix()) for path in MODULES)
    assert {name: folders for name, folders in modules.items() if folders != ["flows", "tasks"]} == {}
