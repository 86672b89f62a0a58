"""CloudAI's own constraints, for `compat = "cloudai"`: the same verdicts as CloudAI gives, mistakes included.

CloudAI numbers its constraints and keeps one answer, yes or no, for all of them. Each is a named rule here; those that
have turned out too strict or too lax are corrected in `megatron_core`, which the normal profile uses, and name the
rules that replace them. An unwritten size counts as 1 in this module only. The constraints are those of CloudAI's
development branch from August 2026 on.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from nightbridge.models.series import DEFAULT_NUM_GPUS
from nightbridge.rules.rule import Rule, RuleContext, cmd_args, rule

_SIZES = "num_gpus tp pp cp"
_GRAPH = "cuda_graph_impl cuda_graph_scope"
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


def _constraint(
    number: int, name: str, fields: str, *corrected_by: str
) -> Callable[[Callable[[Mapping[str, Any]], Iterator[str]]], Rule[RuleContext]]:
    """Make a function that yields messages about `[cmd_args]` a rule with CloudAI's number.

    Args:
        number: The number by which CloudAI's log names it.
        name: The rest of the rule's id.
        fields: The keys of `[cmd_args]` that it reads.
        corrected_by: The rules of the normal profile that replace it.
    """

    def make(messages: Callable[[Mapping[str, Any]], Iterator[str]]) -> Rule[RuleContext]:
        def check(run: RuleContext) -> Iterator[str]:
            return (f"{message} (constraint {number} of CloudAI)" for message in messages(run.args))

        check.__doc__ = f"CloudAI refuses it. Corrected in the normal profile: {', '.join(corrected_by)}."
        source = f"CloudAI: constraint {number} of workloads/megatron_bridge/megatron_bridge.py at 5b5c0f72"
        return rule(f"cloudai-{number:02}-{name}", source, cmd_args(fields))(check)

    return make


# --- how CloudAI reads the values -------------------------------------------------------------------------------------


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


# --- the constraints -------------------------------------------------------------------------------------------------


def _unchecked(args: Mapping[str, Any]) -> Iterator[str]:
    """CloudAI has a number for it and checks nothing."""
    return iter(())


@_constraint(1, "gpus-divide", _SIZES, "gpus-divide")
def _gpus_divide(args: Mapping[str, Any]) -> Iterator[str]:
    size = _model_parallel(args)
    if _gpus(args) % size:
        yield f"num_gpus {_gpus(args)} is not a multiple of tp * pp * cp = {size}; change one of them"


_layers = _constraint(2, "layers", "vp num_layers", "layers-divide")(_unchecked)


@_constraint(3, "data-parallel", _SIZES, "gpus-divide", "sizes-positive")
def _data_parallel_given(args: Mapping[str, Any]) -> Iterator[str]:
    if _data_parallel(args) == 0:
        yield f"num_gpus {_gpus(args)} leave a data parallel size of 0; use at least tp * pp * cp GPUs"


@_constraint(
    4, "batch-divides", f"gb mb {_SIZES} use_megatron_fsdp num_distributed_optimizer_instances", "batch-divides"
)
def _batch_divides(args: Mapping[str, Any]) -> Iterator[str]:
    micro, total = _given(args, "mb"), _given(args, "gb")
    if not micro or not total:
        return
    instances = _given(args, "num_distributed_optimizer_instances") or 1
    unit = micro * _data_parallel(args) * (instances if args.get("use_megatron_fsdp") else 1)
    if unit == 0 or total % unit:
        yield f"gb {total} is not a multiple of mb * data parallel size = {unit}; change one of them"


@_constraint(5, "fsdp-graphs", f"use_megatron_fsdp {_GRAPH}", "fsdp-graphs")
def _fsdp_graphs(args: Mapping[str, Any]) -> Iterator[str]:
    if args.get("use_megatron_fsdp") and _graphs(args):
        yield "use_megatron_fsdp excludes CUDA graphs; switch one off"


@_constraint(6, "fsdp-sizes", "use_megatron_fsdp pp cp vp", "fsdp-sizes")
def _fsdp_sizes(args: Mapping[str, Any]) -> Iterator[str]:
    virtual = _given(args, "vp")
    if args.get("use_megatron_fsdp") and not (
        _size(args, "pp") == 1 and _size(args, "cp") == 1 and virtual in (None, 1)
    ):
        yield "use_megatron_fsdp needs pp, cp and vp of 1; change them or switch it off"


@_constraint(7, "experts-divide", "num_gpus et ep pp", "expert-gpus-divide")
def _experts_divide(args: Mapping[str, Any]) -> Iterator[str]:
    tensor, expert = _given(args, "et"), _given(args, "ep")
    if tensor is None or expert is None:
        return
    size = tensor * expert * _size(args, "pp")
    if size == 0 or _gpus(args) % size:
        yield f"num_gpus {_gpus(args)} is not a multiple of et * ep * pp = {size}; change one of them"


_virtual_pipeline = _constraint(8, "virtual-pipeline", "vp", "virtual-pipeline")(_unchecked)


@_constraint(9, "optimizer-instances", "num_distributed_optimizer_instances use_megatron_fsdp", "optimizer-instances")
def _instances_need_fsdp(args: Mapping[str, Any]) -> Iterator[str]:
    instances = _given(args, "num_distributed_optimizer_instances") or 1
    if instances > 1 and not args.get("use_megatron_fsdp"):
        yield f"num_distributed_optimizer_instances {instances} needs use_megatron_fsdp = true"


@_constraint(10, "offload-pipeline", "pp activation_offload_layers", "offload-pipeline")
def _offload_pipeline(args: Mapping[str, Any]) -> Iterator[str]:
    if _size(args, "pp") > 1 and _offloaded(args) > 0:
        yield "activation_offload_layers excludes pp > 1; use one of them"


@_constraint(11, "overlap-graphs", "moe_a2a_overlap cuda_graph_impl", "overlap-graphs")
def _overlap_implementation(args: Mapping[str, Any]) -> Iterator[str]:
    if args.get("moe_a2a_overlap") and _implementation(args) not in _NO_GRAPHS:
        yield f"moe_a2a_overlap excludes cuda_graph_impl = {_implementation(args)!r}; switch one off"


@_constraint(12, "offload-graphs", f"activation_offload_layers {_GRAPH}", "offload-graphs")
def _offload_graphs(args: Mapping[str, Any]) -> Iterator[str]:
    if _graphs(args) and _offloaded(args) > 0:
        yield "activation_offload_layers excludes CUDA graphs; use one of them"


@_constraint(13, "graph-impl", "cuda_graph_impl", "choice")
def _implementation_known(args: Mapping[str, Any]) -> Iterator[str]:
    if _implementation(args) not in _IMPLEMENTATIONS:
        yield f"cuda_graph_impl {_implementation(args)!r} is not none, transformer_engine or local"


@_constraint(14, "graph-scope", _GRAPH, "graph-scope", "choice")
def _scope_fits(args: Mapping[str, Any]) -> Iterator[str]:
    implementation, scopes = _implementation(args), _scopes(args)
    if implementation == "local" and scopes and scopes != ["full_iteration"]:
        yield "cuda_graph_impl local takes the scope full_iteration alone; change cuda_graph_scope"
    if implementation == "transformer_engine" and (unknown := sorted(set(scopes) - _LAYER_SCOPES)):
        yield f"cuda_graph_impl transformer_engine takes no scope {', '.join(unknown)}; change cuda_graph_scope"


@_constraint(15, "graph-moe-router", "cuda_graph_scope", "graph-moe-router")
def _scope_moe(args: Mapping[str, Any]) -> Iterator[str]:
    if {"moe", "moe_router"} <= {*_scopes(args)}:
        yield "cuda_graph_scope holds both moe and moe_router; keep one"


@_constraint(16, "graph-moe-preprocess", "cuda_graph_scope", "graph-moe-preprocess")
def _scope_preprocess(args: Mapping[str, Any]) -> Iterator[str]:
    scopes = _scopes(args)
    if "moe_preprocess" in scopes and "moe_router" not in scopes:
        yield "cuda_graph_scope moe_preprocess needs moe_router beside it"


@_constraint(17, "graph-recompute", "cuda_graph_scope recompute_modules", "graph-recompute", "graph-recompute-dropout")
def _recompute(args: Mapping[str, Any]) -> Iterator[str]:
    scopes, modules = set(_scopes(args)), set(_names(args.get("recompute_modules")))
    clashes = [
        f"{scope} x {module}" for scope in _RECOMPUTE if scope in scopes for module in _RECOMPUTE[scope] & modules
    ]
    if "layernorm" in modules and {"attn", "mlp"} <= scopes and scopes & {"moe", "moe_router"}:
        clashes.append("attn, mlp and moe x layernorm")
    if clashes:
        yield f"captured and recomputed: {', '.join(sorted(clashes))}; take them out of one"


@_constraint(18, "deepseek-layout", "model_recipe_name pp vp", "deepseek-layout")
def _deepseek_stages(args: Mapping[str, Any]) -> Iterator[str]:
    recipe = str(args.get("model_recipe_name") or "").lower()
    if "deepseek_v3" not in recipe and "deepseekv3" not in recipe:
        return
    virtual = _given(args, "vp")
    pair = (_size(args, "pp"), 1 if virtual is None else virtual)
    if pair not in DEEPSEEK_STAGES:
        yield f"DeepSeek-V3 has no layout for pp {pair[0]} with vp {pair[1]}; known: {sorted(DEEPSEEK_STAGES)}"
