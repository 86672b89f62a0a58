"""Recipes by name: `{recipe}_{task}_{N}gpu_{gpu}_{dtype}_config`."""

import importlib
import re
from pathlib import Path

_RECIPE = re.compile(r"^def ([a-zA-Z0-9_]+_config)\(", re.MULTILINE)


def catalogue():
    """Every recipe function's name to the module that defines it, read from the sources."""
    folder = Path(__file__).parent
    found = {}
    for path in sorted(folder.glob("*/*.py")):
        module = f"{__name__}.{path.parent.name}.{path.stem}"
        found.update(dict.fromkeys(_RECIPE.findall(path.read_text(encoding="utf-8")), module))
    return found


def load_recipe(recipe, task, gpus, gpu, dtype):
    """Build the recipe's configuration; another number of GPUs will do, and its batch is scaled.

    Raises:
        ValueError: There is no such recipe for this GPU and precision.

    """
    names = catalogue()
    pattern = re.compile(rf"{re.escape(f'{recipe}_{task}_')}(\d+)gpu_{gpu}_{dtype}_config")
    sizes = {int(match[1]): name for name in names if (match := pattern.fullmatch(name))}
    if not sizes:
        known = sorted({name.split(f"_{task}_")[0] for name in names if f"_{task}_" in name})
        raise ValueError(f"no recipe {recipe} for {task} on {gpu} in {dtype}; recipes for {task}: {', '.join(known)}")
    size = gpus if gpus in sizes else max(sizes)
    config = getattr(importlib.import_module(names[sizes[size]]), sizes[size])()
    config["train"]["global_batch_size"] = config["train"]["global_batch_size"] * gpus // size
    return config
