"""The configurations that a checkout of Megatron-Bridge ships, as tests write them; read as source, never imported.

Until v0.5 they are constants of `scripts/performance/configs/*/*_workload_base_configs.py`, each a replacement of
fields of an earlier one. Since v0.6 they are functions below `src/megatron/bridge/perf_recipes` that assign to fields.
"""

import ast
import json
import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from nightbridge.launch import syntax_tree
from nightbridge.launch.flags import MEGATRON_NAMES
from nightbridge.launch.versions import RELEASES, Version, version_for_pin
from nightbridge.models import Model

_PRESETS = Path("scripts/performance/configs")
_RECIPES = Path("src/megatron/bridge/perf_recipes")

_FIELDS = {
    "num_gpus": "num_gpus",
    **{name: field for field, name in MEGATRON_NAMES.items()},
    "use_megatron_fsdp": "use_megatron_fsdp",
    "nccl_ub": "nccl_ub",
    "cuda_graph_impl": "cuda_graph_impl",
    "cuda_graph_scope": "cuda_graph_scope",
    "cuda_graph_modules": "cuda_graph_scope",
    "cpu_offloading_num_layers": "activation_offload_layers",
    "recompute_num_layers": "recompute_num_layers",
    "recompute_modules": "recompute_modules",
    "moe_a2a_overlap": "moe_a2a_overlap",
    "overlap_moe_expert_parallel_comm": "moe_a2a_overlap",
    "pp_layout": "pipeline_model_parallel_layout",
}
"""Fields of both forms, each with its key of `[cmd_args]`."""

_PRESET = re.compile(
    r"(?!_|BASE_)(?P<recipe>\w+)_(?P<task>PRETRAIN|SFT|LORA)_CONFIG_(?P<gpu>[A-Z]+\d+)"
    r"(?:_(?P<dtype>BF16|NVFP4|FP8_[A-Z]+))?(?:_\w+)?"
)
_RECIPE = re.compile(
    r"(?P<recipe>\w+?)_(?P<task>pretrain|sft|lora|peft)_(?P<gpus>\d+)gpu_(?P<gpu>[a-z]+\d+)_"
    r"(?P<dtype>bf16|nvfp4|fp8[a-z]+)(?:_(?P<variant>\w+))?_config"
)


Recipes = Mapping[str, frozenset[str]]
"""Families of models, with the recipes of each."""


@lru_cache(maxsize=16)
def released_recipes(version: Version) -> Recipes:
    """The performance recipes of a release; none for one that is not known."""
    if version not in RELEASES:
        return {}
    written = json.loads(Path(__file__).with_name("shipped_recipes.json").read_text(encoding="utf-8"))
    listed = {version_for_pin(ref): families for ref, families in written.items()}
    # A release without a list, v0.4.1, ships what the one before it did.
    families = listed[max(known for known in listed if known <= version)]
    return {family: frozenset(names) for family, names in families.items()}


@lru_cache(maxsize=16)
def pinned_recipes(checkout: Path) -> Recipes:
    """The performance recipes of a checkout."""
    found: dict[str, set[str]] = {}
    for each in shipped_configurations(checkout):
        found.setdefault(each.cmd_args["model_family_name"], set()).add(each.cmd_args["model_recipe_name"])
    return {family: frozenset(names) for family, names in found.items()}


class ShippedConfiguration(Model):
    """One configuration that NVIDIA ships.

    Attributes:
        name: Its constant or function.
        place: `FILE:LINE` of it, relative to the checkout.
        cmd_args: The keys of `[cmd_args]` that say the same.
    """

    name: str
    place: str
    cmd_args: dict[str, Any]


def shipped_configurations(checkout: Path) -> Iterator[ShippedConfiguration]:
    """Yield what a checkout ships, of both forms, in the order of its files."""
    for path in sorted((checkout / _PRESETS).glob("*/*_workload_base_configs.py")):
        yield from _presets(path, path.relative_to(checkout))
    for path in sorted((checkout / _RECIPES).rglob("*.py")):
        yield from _recipes(path, path.relative_to(checkout))


def _presets(path: Path, shown: Path) -> Iterator[ShippedConfiguration]:
    known: dict[str, dict[str, Any]] = {}
    for statement in syntax_tree(path.read_text(encoding="utf-8")).body:
        if not isinstance(statement, ast.Assign) or not isinstance(statement.targets[0], ast.Name):
            continue
        values = _preset(statement.value, known)
        if values is None:
            continue
        name = statement.targets[0].id
        known[name] = values
        if match := _PRESET.fullmatch(name):
            yield _shipped(path.parent.name, match, values, f"{shown}:{statement.lineno}")


def _preset(value: ast.expr, known: Mapping[str, dict[str, Any]]) -> dict[str, Any] | None:
    """The fields of a preset: another one's name, `WorkloadBaseConfig(...)` or `replace(OTHER, ...)`."""
    if isinstance(value, ast.Name):
        return known.get(value.id)
    if not isinstance(value, ast.Call) or not isinstance(value.func, ast.Name):
        return None
    written = {each.arg: _constant(each.value) for each in value.keywords if each.arg}
    if value.func.id == "replace" and value.args:
        below = _preset(value.args[0], known)
        return None if below is None else {**below, **written}
    return written if value.func.id == "WorkloadBaseConfig" else None


def _recipes(path: Path, shown: Path) -> Iterator[ShippedConfiguration]:
    known: dict[str, dict[str, Any]] = {}
    for function in syntax_tree(path.read_text(encoding="utf-8")).body:
        match = _RECIPE.fullmatch(function.name) if isinstance(function, ast.FunctionDef) else None
        if not isinstance(function, ast.FunctionDef) or match is None:
            continue
        values: dict[str, Any] = {}
        for statement in function.body:
            if isinstance(statement, ast.Assign):
                values |= _assigned(statement, known)
        known[function.name] = values
        family = shown.relative_to(_RECIPES).parts[0]
        yield _shipped(family, match, {**values, "num_gpus": int(match["gpus"])}, f"{shown}:{function.lineno}")


def _assigned(statement: ast.Assign, known: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """The fields that an assignment sets: all of another recipe's, or `cfg.model.X` and `cfg.train.X`."""
    if isinstance(statement.value, ast.Call) and isinstance(statement.value.func, ast.Name):
        return dict(known.get(statement.value.func.id, {})) if isinstance(statement.targets[0], ast.Name) else {}
    targets = [target for target in statement.targets if isinstance(target, ast.Attribute)]
    return {target.attr: _constant(statement.value) for target in targets}


def _constant(value: ast.expr) -> Any:
    """The value of a literal; None for anything that must be computed."""
    try:
        return ast.literal_eval(value)
    except ValueError:
        return None


def _shipped(family: str, match: re.Match[str], values: Mapping[str, Any], place: str) -> ShippedConfiguration:
    named = {key: text.lower() for key, text in match.groupdict().items() if text}
    dtype = named.get("dtype", "bf16")
    args = {
        "model_family_name": family,
        "model_recipe_name": named["recipe"],
        "task": named["task"],
        "gpu_type": named["gpu"],
        "compute_dtype": dtype if "_" in dtype or not dtype.startswith("fp8") else f"fp8_{dtype.removeprefix('fp8')}",
        **{_FIELDS[field]: value for field, value in values.items() if field in _FIELDS and value not in (None, [])},
    }
    if variant := named.get("variant"):
        args["config_variant"] = variant
    if args.get("cuda_graph_impl") == "full_iteration":  # the launcher's parser has no such word
        args |= {"cuda_graph_impl": "local", "cuda_graph_scope": "full_iteration"}
    return ShippedConfiguration(name=match[0], place=place, cmd_args=args)
