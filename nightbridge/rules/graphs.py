"""CUDA graphs, recomputation, offloading and overlap: what Megatron-Core refuses in combination.

Scopes say which parts of a layer a graph captures. With `cuda_graph_impl = "none"` the launcher drops them, and an
implementation without scopes captures the whole layer. What is not written is the recipe's and not guessed.
"""

from collections.abc import Iterator, Mapping

from nightbridge.launch.flags import items_of
from nightbridge.rules.cloudai import DEEPSEEK_STAGES
from nightbridge.rules.context import NO_GRAPHS, Facts
from nightbridge.rules.rule import Rule, from_source

_RECOMPUTED_INSIDE: Mapping[str, frozenset[str]] = {
    "attn": frozenset({"core_attn"}),
    "mlp": frozenset({"mlp"}),
    "moe": frozenset({"moe_act", "shared_experts"}),
    "moe_router": frozenset({"shared_experts"}),
}
_NOT_OVERLAPPED = ("full_iteration", "mlp", "moe")

# DeepSeek-V3 ships with layouts of its own for these, beside those that the recipe can make.
_SHIPPED_STAGES = frozenset({(2, 8), (8, 4)})


def _graphs_on(facts: Facts) -> bool:
    return facts.graph_implementation not in (None, *NO_GRAPHS)


def _modules(facts: Facts) -> frozenset[str]:
    value = facts.args.get("recompute_modules")
    return frozenset(item.lower() for item in items_of(value)) if value else frozenset()


def _fsdp_graphs(facts: Facts) -> Iterator[str]:
    """FSDP gathers and frees parameters at every step, and a captured graph keeps fixed addresses."""
    if facts.args.get("use_megatron_fsdp") and _graphs_on(facts):
        yield (
            f"use_megatron_fsdp and cuda_graph_impl = {facts.graph_implementation!r} exclude each other; "
            'switch FSDP off or write cuda_graph_impl = "none"'
        )


def _offload_graphs(facts: Facts) -> Iterator[str]:
    """Offloading copies activations to the host on other streams, which a captured graph cannot replay."""
    layers = facts.integer("activation_offload_layers")
    if layers and _graphs_on(facts):
        yield (
            f"activation_offload_layers {layers} and cuda_graph_impl = {facts.graph_implementation!r} exclude each "
            'other, whatever the scope; remove one or write cuda_graph_impl = "none"'
        )


def _offload_pipeline(facts: Facts) -> Iterator[str]:
    """Offloading of activations is implemented for a single pipeline stage."""
    layers, stages = facts.integer("activation_offload_layers"), facts.integer("pp")
    if layers and stages and stages > 1:
        yield f"activation_offload_layers {layers} needs pp 1, not {stages}; remove it or use pp = 1"


def _graph_scope(facts: Facts) -> Iterator[str]:
    """A graph of the full iteration contains every other one, and Transformer Engine captures layers only."""
    scopes = facts.graph_scopes
    if "full_iteration" not in scopes:
        return
    if len(scopes) > 1:
        yield f"cuda_graph_scope {', '.join(scopes)}: full_iteration excludes all others; remove it or the others"
    if facts.graph_implementation == "transformer_engine":
        yield 'cuda_graph_scope full_iteration is not for transformer_engine; write cuda_graph_impl = "local"'


def _graph_moe_router(facts: Facts) -> Iterator[str]:
    """The graph of moe contains its router, which cannot be captured twice."""
    if {"moe", "moe_router"} <= set(facts.graph_scopes):
        yield "cuda_graph_scope holds moe and moe_router, and moe contains the router; keep one of them"


def _graph_moe_preprocess(facts: Facts) -> Iterator[str]:
    """Preprocessing consumes the router's output, so both are captured, or neither."""
    scopes = facts.graph_scopes
    # The local implementation adds the other one of the pair itself.
    if "moe_preprocess" in scopes and "moe_router" not in scopes and facts.graph_implementation != "local":
        yield "cuda_graph_scope moe_preprocess needs moe_router beside it; add moe_router"


def _graph_recompute(facts: Facts) -> Iterator[str]:
    """Recomputing the expert layer runs it again outside the graph that captured part of it."""
    captured = [scope for scope in ("moe", "moe_router") if scope in facts.graph_scopes]
    if captured and "moe" in _modules(facts) and facts.graph_implementation != "local":
        yield (
            f"recompute_modules moe would be recomputed around the captured {', '.join(captured)}; "
            "remove moe from recompute_modules or from cuda_graph_scope"
        )


def _graph_recompute_dropout(facts: Facts) -> Iterator[str]:
    """What is recomputed inside a graph must repeat exactly, which dropout and jitter prevent."""
    scopes, modules = facts.graph_scopes, _modules(facts)
    for scope, inside in _RECOMPUTED_INSIDE.items():
        if scope in scopes and (both := sorted(inside & modules)):
            yield (
                f"{', '.join(both)} is recomputed inside the captured {scope}: "
                "Megatron-Core refuses that unless dropout and jitter are 0; make sure the recipe has none"
            )


def _overlap_graphs(facts: Facts) -> Iterator[str]:
    """The overlap splits the expert layer into parts that run on two streams, so no graph may hold it whole."""
    if not facts.args.get("moe_a2a_overlap"):
        return
    captured = [scope for scope in facts.graph_scopes if scope in _NOT_OVERLAPPED]
    if facts.graph_implementation == "local" or captured:
        what = f"captures {', '.join(captured)}" if captured else "is local"
        yield (
            f"moe_a2a_overlap is on and the CUDA graph {what}; switch the overlap off, or capture "
            "attn, moe_router and moe_preprocess with transformer_engine"
        )


def _overlap_needs(facts: Facts) -> Iterator[str]:
    """The overlap hides the all-to-all of one micro batch behind the compute of another one."""
    if not facts.args.get("moe_a2a_overlap"):
        return
    if facts.integer("ep") == 1:
        yield "moe_a2a_overlap needs ep > 1; raise ep or switch it off"
    stages = facts.integer("pp")
    if stages and stages > 1 and facts.args.get("vp") in (1, "None"):
        yield f"moe_a2a_overlap with pp {stages} needs a virtual pipeline; write vp > 1 or switch it off"
    if facts.integer("recompute_num_layers"):
        yield "moe_a2a_overlap excludes recomputing whole layers; remove recompute_num_layers or switch it off"
    if "moe" in _modules(facts):
        yield "moe_a2a_overlap excludes recomputing moe; remove it from recompute_modules or switch the overlap off"


def _deepseek_layout(facts: Facts) -> Iterator[str]:
    """61 layers divide into few pipelines, and the recipe refuses all others."""
    args = facts.args
    if args.get("model_recipe_name") != "deepseek_v3" or args.get("pipeline_model_parallel_layout"):
        return
    stages, virtual = facts.integer("pp"), 1 if args.get("vp") == "None" else facts.integer("vp")
    known = DEEPSEEK_STAGES | _SHIPPED_STAGES
    if stages is not None and virtual is not None and (stages, virtual) not in known:
        shown = ", ".join(f"{pp} and {vp}" for pp, vp in sorted(known))
        yield (
            f"pp {stages} with vp {virtual}: DeepSeek-V3's recipe has no layout of its layers for that; "
            f"write pipeline_model_parallel_layout, or use pp and vp of {shown}"
        )


def _cmd(*fields: str) -> tuple[str, ...]:
    return tuple(f"cmd_args.{field}" for field in fields)


_GRAPH = ("cuda_graph_impl", "cuda_graph_scope")

RULES = (
    *from_source(
        "Megatron-Core: TransformerConfig",
        Rule("fsdp-graphs", "error", _cmd("use_megatron_fsdp", "cuda_graph_impl"), _fsdp_graphs),
        Rule("offload-graphs", "error", _cmd("activation_offload_layers", "cuda_graph_impl"), _offload_graphs),
        Rule("offload-pipeline", "error", _cmd("activation_offload_layers", "pp"), _offload_pipeline),
        Rule("graph-scope", "error", _cmd(*_GRAPH), _graph_scope),
        Rule("graph-moe-router", "error", _cmd(*_GRAPH), _graph_moe_router),
        Rule("graph-moe-preprocess", "error", _cmd(*_GRAPH), _graph_moe_preprocess),
        Rule("graph-recompute", "error", _cmd(*_GRAPH, "recompute_modules"), _graph_recompute),
        Rule("graph-recompute-dropout", "warning", _cmd(*_GRAPH, "recompute_modules"), _graph_recompute_dropout),
        Rule("overlap-graphs", "error", _cmd("moe_a2a_overlap", *_GRAPH), _overlap_graphs),
        Rule(
            "overlap-needs",
            "error",
            _cmd("moe_a2a_overlap", "ep", "pp", "vp", "recompute_num_layers", "recompute_modules"),
            _overlap_needs,
        ),
    ),
    *from_source(
        "Megatron-Bridge: the recipe of DeepSeek-V3",
        Rule(
            "deepseek-layout",
            "error",
            _cmd("model_recipe_name", "pipeline_model_parallel_layout", "pp", "vp"),
            _deepseek_layout,
        ),
    ),
)
