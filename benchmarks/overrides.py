"""Overrides drawn from the configuration classes, against the real Hydra and OmegaConf.

For each field of a dumped ConfigContainer that the schema of a recent main has a type for: its own value, its name with
one letter changed, and a value of another type. What Megatron-Bridge would do is tried with the libraries that it uses:
Hydra lays the override over the dump with `set_struct`, and an OmegaConf node of the field's type takes the value.

    PYTHONPATH=. python benchmarks/overrides.py CONFIGCONTAINER_YAML [COUNT] [SEED]
"""

import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import yaml
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import BooleanNode, FloatNode, IntegerNode, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from nightbridge.launch.config_schema import CONTAINER, ConfigSchema, released_schema
from nightbridge.launch.versions import HEAD

WRONG: dict[str, tuple[Callable[..., Any], str]] = {
    "int": (IntegerNode, "many"),
    "float": (FloatNode, "three"),
    "bool": (BooleanNode, "maybe"),
}


def fields(schema: ConfigSchema, dump: dict[str, Any]) -> Iterator[tuple[str, Any, tuple[str, ...]]]:
    """Every field of a section of the dump with its value and its types."""
    for section, table in dump.items():
        if isinstance(table, dict):
            for name, value in table.items():
                types = schema.types(f"{section}.{name}")
                if types and not isinstance(value, dict | list):
                    yield f"{section}.{name}", value, types


def hydra_accepts(dump: dict[str, Any], override: str) -> bool:
    """Whether Hydra lays an override over the dump."""
    config = OmegaConf.create(dump)
    OmegaConf.set_struct(config, True)
    try:
        parsed = OverridesParser.create().parse_overrides([override])
        ConfigLoaderImpl._apply_overrides_to_config(overrides=parsed, cfg=config)
    except (HydraException, OmegaConfBaseException):
        return False
    return True


def node_accepts(node: Callable[..., Any], text: str) -> bool:
    """Whether a node of a type takes a value."""
    try:
        node(text)
    except OmegaConfBaseException:
        return False
    return True


def misspelt(path: str, draw: random.Random) -> str:
    """The path with one letter of the field's name doubled, dropped or replaced."""
    place = draw.randrange(path.index(".") + 2, len(path))
    middle = draw.choice((path[place] * 2, "", "z" if path[place] != "z" else "y"))
    return path[:place] + middle + path[place + 1 :]


def main(file: Path, count: int = 200, seed: int = 221123) -> None:
    """Print how often the schema and the libraries agree."""
    schema, draw = released_schema(HEAD), random.Random(seed)
    dump = yaml.safe_load(file.read_text())
    drawn = draw.sample(sorted(fields(schema, dump), key=lambda field: field[0]), count)
    right = names = suggested = wrong = refused = 0
    for path, value, types in drawn:
        text = "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
        right += hydra_accepts(dump, f"{path}={text!r}" if isinstance(value, str) else f"{path}={text}") == (
            schema.problem(path, text) is None
        )
        typo = misspelt(path, draw)
        problem = schema.problem(typo, text)
        names += hydra_accepts(dump, f"{typo}={text}") == (problem is None)
        suggested += f"did you mean {path}?" in str(problem)
        for kind in set(types) & WRONG.keys() if "str" not in types else ():
            node, bad = WRONG[kind]
            wrong += not node_accepts(node, bad)
            refused += schema.problem(path, bad) is not None
            break
    print(f"{count} fields of {len(dump)} sections, seed {seed}, {CONTAINER} at {schema.commit[:12]}")
    print(f"right name and value: same answer as Hydra for {right} of {count}")
    print(f"misspelt name: same answer as Hydra for {names} of {count}, the right suggestion for {suggested}")
    print(f"value of a wrong type: refused {refused} of the {wrong} that OmegaConf refuses")


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
