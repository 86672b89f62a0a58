"""Whether the recipe exists in the pinned code, found by reading it: importing it would need torch and a GPU."""

import re
from collections.abc import Iterator
from difflib import get_close_matches
from functools import lru_cache
from pathlib import Path

from nightbridge.launch.parser_source import launcher_of
from nightbridge.rules.context import Facts
from nightbridge.rules.rule import Rule, from_source

PERF_RECIPES = Path("src/megatron/bridge/perf_recipes")
"""Where Megatron-Bridge keeps its flat performance recipes, one function each; older versions have no such folder."""

_DEFINED = re.compile(r"^def ([a-zA-Z0-9_]+_config)\(", re.MULTILINE)
_GPUS = re.compile(r"_\d+gpu_")
_DEFAULT_TASK, _DEFAULT_DTYPE = "pretrain", "bf16"
_OLD_VARIANTS = frozenset({"v1", "v2"})
"""Labels of older versions, which select the canonical recipe."""

_FIELDS = tuple(
    f"cmd_args.{field}"
    for field in (
        *("model_recipe_name", "task", "num_gpus", "gpu_type", "compute_dtype", "config_variant"),
        *("use_recipes", "list_config_variants"),
    )
)


@lru_cache(maxsize=16)
def perf_recipe_names(root: Path) -> tuple[str, ...]:
    """The names of all flat performance recipes below Megatron-Bridge's root; none where it has no folder of them."""
    files = sorted((root / PERF_RECIPES).rglob("*.py"))
    return tuple(
        name for path in files for name in _DEFINED.findall(path.read_text(encoding="utf-8", errors="replace"))
    )


def _wanted(facts: Facts) -> tuple[str, str, tuple[str, ...]] | None:
    """The name that the launcher will look for, the same without its number of GPUs, and all names there are."""
    recipe, gpu = facts.args.get("model_recipe_name"), facts.args.get("gpu_type")
    if facts.checkout is None or facts.args.get("use_recipes") or not recipe or not gpu:
        return None
    names = perf_recipe_names(facts.checkout.megatron_bridge.path / launcher_of(facts.test).parent.parent.parent)
    if not names:
        return None
    dtype = str(facts.args.get("compute_dtype") or _DEFAULT_DTYPE).lower().replace("_", "")
    variant = str(facts.args.get("config_variant") or "").lower()
    tail = f"_{variant}_config" if variant and variant not in _OLD_VARIANTS else "_config"
    task = facts.args.get("task") or _DEFAULT_TASK
    before, after = f"{recipe}_{task}", f"{str(gpu).lower()}_{dtype}{tail}"
    return f"{before}_{facts.gpus}gpu_{after}", f"{before}_{after}", names


def _exists(facts: Facts) -> Iterator[str]:
    """The launcher looks the recipe up by name when the job starts, after the wait in the queue."""
    wanted = _wanted(facts)
    if wanted is None:
        return
    _, any_size, names = wanted
    sizeless = {_GPUS.sub("_", name) for name in names}
    if any_size not in sizeless:
        near = get_close_matches(any_size, sorted(sizeless), n=3)
        hint = f"; there are {', '.join(near)}" if near else ""
        yield (
            f"the pinned code has no performance recipe {any_size} for any number of GPUs{hint}; "
            "change model_recipe_name, task, gpu_type, compute_dtype or config_variant"
        )


def _for_these_gpus(facts: Facts) -> Iterator[str]:
    """A recipe tuned for another number of GPUs runs with sizes chosen for another one."""
    wanted = _wanted(facts)
    if wanted is None:
        return
    exact, any_size, names = wanted
    if exact not in names:
        sizes = sorted(int(_size_of(name)) for name in names if _GPUS.sub("_", name) == any_size)
        if sizes:
            yield (
                f"the pinned code has this recipe for {', '.join(map(str, sizes))} GPUs, not for {facts.gpus}: "
                "another one is taken and its global batch size scaled; write gb to say it yourself"
            )


def _size_of(name: str) -> str:
    found = re.search(r"_(\d+)gpu_", name)
    return found[1] if found else "0"


RULES = (
    *from_source(
        "Megatron-Bridge: src/megatron/bridge/perf_recipes at the pinned commit",
        Rule("recipe-exists", "error", _FIELDS, _exists, needs="checkout"),
        Rule("recipe-gpus", "warning", _FIELDS, _for_these_gpus, needs="checkout"),
    ),
)
