"""CloudAI's own constraints, for `compat = "cloudai"`: the same verdicts as CloudAI gives, mistakes included.

CloudAI numbers its constraints and keeps one answer, yes or no, for all of them. Each is a named rule here; those that
have turned out too strict or too lax stand corrected in `sizes` and `graphs`, which the normal profile uses.
`CORRECTED` says which rule covers which constraint. An unwritten size counts as 1 in this module only.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from nightbridge.launch.resources import DEFAULT_NUM_GPUS
from nightbridge.rules.context import Facts
from nightbridge.rules.rule import Rule

CORRECTED: Mapping[int, tuple[str, ...]] = {
    1: ("gpus-divide",),
    2: ("layers-divide",),
    3: ("gpus-divide", "sizes-positive"),
    4: ("batch-divides",),
    5: ("fsdp-graphs",),
    6: ("fsdp-sizes",),
    7: ("expert-gpus-divide",),
    8: ("virtual-pipeline",),
    9: ("optimizer-instances",),
    10: ("offload-pipeline",),
    11: ("overlap-graphs",),
    12: ("offload-graphs",),
    13: ("choice",),
    14: ("graph-scope", "choice"),
    15: ("graph-moe-router",),
    16: ("graph-moe-preprocess",),
    17: ("graph-recompute", "graph-recompute-dropout"),
    18: ("deepseek-layout",),
}
"""CloudAI's number of a constraint to the rules of the normal profile that stand for it."""

_NO_GRAPHS = frozenset({"", "none", "null"})
_IMPLEMENTATIONS = _NO_GRAPHS | {"transformer_engine", "local"}
_LAYER_SCOPES = frozenset({"attn", "mlp", "moe", "moe_router", "moe_preprocess", "mamba"})
_RECOMPUTE: Mapping[str, frozenset[str]] = {
    "attn": frozenset({"core_attn", "mla_up_proj"}),
    "mlp": frozenset({"mlp"}),
    "moe": frozenset({"moe_act", "moe", "shared_experts"}),
    "moe_router": frozenset({"moe", "shared_experts"}),
}
DEEPSEEK_STAGES = frozenset({(1, 1), (4, 1), (8, 1), (4, 2), (16, 1), (8, 2), (4, 4)})
"""Pipeline and virtual pipeline sizes for which Megatron-Bridge has a layout of DeepSeek-V3's layers."""


@dataclass(frozen=True, slots=True)
class Constraint:
    """One constraint of CloudAI.

    Attributes:
        number: The number by which CloudAI's log names it.
        rule: The same as a rule of the `cloudai` profile.

    """

    number: int
    rule: Rule
    broken: Callable[[Mapping[str, Any]], str | None]


@dataclass(frozen=True, slots=True)
class CloudaiVerdict:
    """What CloudAI says of one configuration.

    Attributes:
        passed: Its answer.
        failed: The numbers of the constraints that its log would name, ascending.

    """

    passed: bool
    failed: tuple[int, ...]


# --- what CloudAI makes of the values --------------------------------------------------------------------------------


def _size(args: Mapping[str, Any], field: str) -> int:
    return _given(args, field) or 1


def _given(args: Mapping[str, Any], field: str) -> int | None:
    value = args.get(field)
    return None if value in (None, "None") else int(value)


def _gpus(args: Mapping[str, Any]) -> int:
    value = _given(args, "num_gpus")
    return DEFAULT_NUM_GPUS if value is None else value


def _model_parallel(args: Mapping[str, Any]) -> int:
    return math.prod(_size(args, field) for field in ("tp", "pp", "cp"))


def _data_parallel(args: Mapping[str, Any]) -> int:
    size = _model_parallel(args)
    return _gpus(args) // size if size > 0 else 0


def _fsdp(args: Mapping[str, Any]) -> bool:
    return bool(args.get("use_megatron_fsdp"))


def _implementation(args: Mapping[str, Any]) -> str:
    return str(args.get("cuda_graph_impl") or "").strip().lower()


def _names(value: Any) -> list[str]:
    """The names in a list, or in a text such as `"[attn, mlp]"`, in lower case.

    Quotes with nothing between them are a name in a text, and none in a list.
    """
    if isinstance(value, list | tuple):
        return [name for text in value for name in _names(str(text)) if name]
    plain = str(value or "").strip().strip("\"'")
    if plain.startswith("[") and plain.endswith("]"):
        plain = plain[1:-1]
    return [part.strip().strip("\"'").lower() for part in plain.split(",") if part.strip()]


def _scopes(args: Mapping[str, Any]) -> list[str]:
    return _names(args.get("cuda_graph_scope"))


def _graphs(args: Mapping[str, Any]) -> bool:
    return _implementation(args) not in _NO_GRAPHS and bool(_scopes(args))


def _offloaded(args: Mapping[str, Any]) -> int:
    return _given(args, "activation_offload_layers") or 0


# --- the constraints: a message where one is broken ------------------------------------------------------------------


def _gpus_divide(args: Mapping[str, Any]) -> str | None:
    size = _model_parallel(args)
    if _gpus(args) % size == 0:
        return None
    return f"num_gpus {_gpus(args)} is not a multiple of tp * pp * cp = {size}; change one of them"


def _always_met(args: Mapping[str, Any]) -> str | None:
    """CloudAI has a number for it and checks nothing."""
    return None


def _data_parallel_given(args: Mapping[str, Any]) -> str | None:
    if _data_parallel(args) != 0:
        return None
    return f"num_gpus {_gpus(args)} leave a data parallel size of 0; use at least tp * pp * cp GPUs"


def _batch_divides(args: Mapping[str, Any]) -> str | None:
    micro, total = _given(args, "mb"), _given(args, "gb")
    if not micro or not total:
        return None
    instances = _given(args, "num_distributed_optimizer_instances") or 1
    unit = micro * _data_parallel(args) * (instances if _fsdp(args) else 1)
    if unit != 0 and total % unit == 0:
        return None
    return f"gb {total} is not a multiple of mb * data parallel size = {unit}; change one of them"


def _fsdp_graphs(args: Mapping[str, Any]) -> str | None:
    return "use_megatron_fsdp excludes CUDA graphs; switch one off" if _fsdp(args) and _graphs(args) else None


def _fsdp_sizes(args: Mapping[str, Any]) -> str | None:
    virtual = _given(args, "vp")
    if not _fsdp(args) or (_size(args, "pp") == 1 and _size(args, "cp") == 1 and virtual in (None, 1)):
        return None
    return "use_megatron_fsdp needs pp, cp and vp of 1; change them or switch it off"


def _experts_divide(args: Mapping[str, Any]) -> str | None:
    tensor, expert = _given(args, "et"), _given(args, "ep")
    if tensor is None or expert is None:
        return None
    size = tensor * expert * _size(args, "pp")
    if size != 0 and _gpus(args) % size == 0:
        return None
    return f"num_gpus {_gpus(args)} is not a multiple of et * ep * pp = {size}; change one of them"


def _instances_need_fsdp(args: Mapping[str, Any]) -> str | None:
    instances = _given(args, "num_distributed_optimizer_instances") or 1
    if instances <= 1 or _fsdp(args):
        return None
    return f"num_distributed_optimizer_instances {instances} needs use_megatron_fsdp = true"


def _offload_pipeline(args: Mapping[str, Any]) -> str | None:
    if _size(args, "pp") <= 1 or _offloaded(args) <= 0:
        return None
    return "activation_offload_layers excludes pp > 1; use one of them"


def _overlap_implementation(args: Mapping[str, Any]) -> str | None:
    if not args.get("moe_a2a_overlap") or _implementation(args) in _NO_GRAPHS:
        return None
    return f"moe_a2a_overlap excludes cuda_graph_impl = {_implementation(args)!r}; switch one off"


def _overlap_graphs(args: Mapping[str, Any]) -> str | None:
    """The published check of March 2026, which an implementation without a scope passes."""
    return _overlap_implementation(args) if _graphs(args) else None


def _offload_graphs(args: Mapping[str, Any]) -> str | None:
    if not _graphs(args) or _offloaded(args) <= 0:
        return None
    return "activation_offload_layers excludes CUDA graphs; use one of them"


def _implementation_known(args: Mapping[str, Any]) -> str | None:
    if _implementation(args) in _IMPLEMENTATIONS:
        return None
    return f"cuda_graph_impl {_implementation(args)!r} is not none, transformer_engine or local"


def _scope_fits(args: Mapping[str, Any]) -> str | None:
    implementation, scopes = _implementation(args), _scopes(args)
    if implementation == "local" and scopes and scopes != ["full_iteration"]:
        return "cuda_graph_impl local takes the scope full_iteration alone; change cuda_graph_scope"
    if implementation == "transformer_engine" and (odd := sorted(set(scopes) - _LAYER_SCOPES)):
        return f"cuda_graph_impl transformer_engine takes no scope {', '.join(odd)}; change cuda_graph_scope"
    return None


def _scope_moe(args: Mapping[str, Any]) -> str | None:
    return (
        "cuda_graph_scope holds both moe and moe_router; keep one"
        if {"moe", "moe_router"} <= {*_scopes(args)}
        else None
    )


def _scope_preprocess(args: Mapping[str, Any]) -> str | None:
    scopes = _scopes(args)
    if "moe_preprocess" not in scopes or "moe_router" in scopes:
        return None
    return "cuda_graph_scope moe_preprocess needs moe_router beside it"


def _recompute(args: Mapping[str, Any]) -> str | None:
    scopes, modules = set(_scopes(args)), set(_names(args.get("recompute_modules")))
    clashes = [
        f"{scope} x {module}" for scope in _RECOMPUTE if scope in scopes for module in _RECOMPUTE[scope] & modules
    ]
    if "layernorm" in modules and {"attn", "mlp"} <= scopes and scopes & {"moe", "moe_router"}:
        clashes.append("attn, mlp and moe x layernorm")
    return f"captured and recomputed: {', '.join(sorted(clashes))}; take them out of one" if clashes else None


def _deepseek_stages(args: Mapping[str, Any]) -> str | None:
    recipe = str(args.get("model_recipe_name") or "").lower()
    if "deepseek_v3" not in recipe and "deepseekv3" not in recipe:
        return None
    virtual = _given(args, "vp")
    pair = (_size(args, "pp"), 1 if virtual is None else virtual)
    if pair in DEEPSEEK_STAGES:
        return None
    return f"DeepSeek-V3 has no layout for pp {pair[0]} with vp {pair[1]}; known: {sorted(DEEPSEEK_STAGES)}"


def _constraint(number: int, name: str, broken: Callable[[Mapping[str, Any]], str | None], *fields: str) -> Constraint:
    def check(facts: Facts) -> Iterator[str]:
        if (message := broken(facts.args)) is not None:
            yield f"{message} (constraint {number} of CloudAI)"

    rule = Rule(
        f"cloudai-{number:02}-{name}",
        "error",
        tuple(f"cmd_args.{field}" for field in fields),
        check,
        source=f"CloudAI: constraint {number} of its Megatron-Bridge workload",
        why=f"CloudAI refuses it. Corrected in the normal profile: {', '.join(CORRECTED[number])}.",
    )
    return Constraint(number, rule, broken)


_SIZES = ("num_gpus", "tp", "pp", "cp")
_GRAPH = ("cuda_graph_impl", "cuda_graph_scope")

_SHARED: Mapping[int, Constraint] = {
    constraint.number: constraint
    for constraint in (
        _constraint(1, "gpus-divide", _gpus_divide, *_SIZES),
        _constraint(2, "layers", _always_met, "vp", "num_layers"),
        _constraint(3, "data-parallel", _data_parallel_given, *_SIZES),
        _constraint(
            4,
            "batch-divides",
            _batch_divides,
            *("gb", "mb", *_SIZES, "use_megatron_fsdp", "num_distributed_optimizer_instances"),
        ),
        _constraint(5, "fsdp-graphs", _fsdp_graphs, "use_megatron_fsdp", *_GRAPH),
        _constraint(6, "fsdp-sizes", _fsdp_sizes, "use_megatron_fsdp", "pp", "cp", "vp"),
        _constraint(7, "experts-divide", _experts_divide, "num_gpus", "et", "ep", "pp"),
        _constraint(8, "virtual-pipeline", _always_met, "vp"),
        _constraint(
            9, "optimizer-instances", _instances_need_fsdp, "num_distributed_optimizer_instances", "use_megatron_fsdp"
        ),
        _constraint(10, "offload-pipeline", _offload_pipeline, "pp", "activation_offload_layers"),
        _constraint(11, "overlap-graphs", _overlap_implementation, "moe_a2a_overlap", "cuda_graph_impl"),
        _constraint(12, "offload-graphs", _offload_graphs, "activation_offload_layers", *_GRAPH),
        _constraint(13, "graph-impl", _implementation_known, "cuda_graph_impl"),
        _constraint(14, "graph-scope", _scope_fits, *_GRAPH),
        _constraint(15, "graph-moe-router", _scope_moe, "cuda_graph_scope"),
        _constraint(16, "graph-moe-preprocess", _scope_preprocess, "cuda_graph_scope"),
        _constraint(17, "graph-recompute", _recompute, "cuda_graph_scope", "recompute_modules"),
        _constraint(18, "deepseek-layout", _deepseek_stages, "model_recipe_name", "pp", "vp"),
    )
}

CONSTRAINTS: tuple[Constraint, ...] = tuple(_SHARED.values())
"""The constraints of CloudAI's development branch, from August 2026 on: eighteen."""

_PUBLISHED_11 = _constraint(11, "overlap-graphs", _overlap_graphs, "moe_a2a_overlap", *_GRAPH)

PUBLISHED: tuple[Constraint, ...] = tuple({**_SHARED, 11: _PUBLISHED_11}[number] for number in range(1, 18))
"""The seventeen of CloudAI's published documentation of 3 March 2026."""

RULES: tuple[Rule, ...] = tuple(constraint.rule for constraint in CONSTRAINTS)


def cloudai_verdict(args: Mapping[str, Any], constraints: tuple[Constraint, ...] = CONSTRAINTS) -> CloudaiVerdict:
    """Say what CloudAI would say of one `[cmd_args]` table without sweeps.

    Args:
        args: Field to value, as the table has them; a field that is missing or None counts as CloudAI's default.
        constraints: `CONSTRAINTS` or `PUBLISHED`.

    """
    failed = tuple(constraint.number for constraint in constraints if constraint.broken(args) is not None)
    return CloudaiVerdict(not failed, failed)
