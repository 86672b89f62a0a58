"""What Megatron-Core refuses: sizes that do not fit the GPUs, and graphs, recomputation and overlap in combination.

What is not written, a size too, is the recipe's and not guessed. Scopes are the parts of a layer that a graph
captures. With `cuda_graph_impl = "none"` the launcher drops them, and an implementation without scopes captures the
whole layer.
"""

import math
from collections.abc import Iterator, Mapping

from nightbridge.launch.flags import items_of
from nightbridge.launch.versions import V0_4_0, V0_4_2, V0_5_0, V0_6_0, is_release
from nightbridge.rules.config_container_model import layout_problem
from nightbridge.rules.config_container_training import SCHEDULES
from nightbridge.rules.required import MEGATRON_CORE, has_performance_recipe
from nightbridge.rules.rule import (
    NO_GRAPHS,
    OVERRIDDEN,
    PARALLEL,
    SIZE_OVERRIDES,
    RuleContext,
    cmd_args,
    overrides_of,
    rule,
)

_PARALLEL_STATE = "Megatron-Core: parallel_state.py and transformer_config.py at 2a75ac12 (main of August 2026)"
_UNTIL_0_4 = "Megatron-Core: transformer_config.py, from b0cc2706 (v0.3.0) to 2edffadb (v0.4.2)"
_SINCE_0_5 = "Megatron-Core: transformer_config.py, from d0b3b775 (v0.5.0) to 2a75ac12 (main of August 2026)"
_LAYOUT = "Megatron-Core: pipeline_parallel_layer_layout.py, from b0cc2706 (v0.3.0) to 2a75ac12 (main of August 2026)"
_LAUNCHER = "Megatron-Bridge: scripts/performance/utils/overrides.py, from 21b02e0c (v0.3.0) to 067f987d (main)"
_BRIDGE_0_6 = "Megatron-Bridge: utils/cuda_graph.py, from 51885cf1 (v0.6.0) to 067f987d (main of August 2026)"

_POSITIVE = (
    *("num_gpus", "gpus_per_node", "tp", "pp", "cp", "vp", "ep", "et", "mb", "gb", "seq_length", "max_steps"),
    *("hidden_size", "num_layers", "num_moe_experts", "save_interval", "vocab_size"),
)

_RECOMPUTED_INSIDE: Mapping[str, frozenset[str]] = {
    "attn": frozenset({"core_attn"}),
    "mlp": frozenset({"mlp"}),
    "moe": frozenset({"moe_act", "shared_experts"}),
    "moe_router": frozenset({"shared_experts"}),
}

_FULL_ITERATION = "full_iteration"


@rule("sizes-positive", _PARALLEL_STATE, (*cmd_args(*_POSITIVE), *OVERRIDDEN), alone=True)
def _positive(run: RuleContext) -> Iterator[str]:
    """Sizes and counts below one fail in Megatron-Core, most of them as a division by zero."""
    for field in _POSITIVE:
        value = run.args.get(field)
        if isinstance(value, int) and value < 1:
            yield f"cmd_args.{field} = {value} must be at least 1; remove it to leave it to the recipe"
    for key, size in run.overridden(*SIZE_OVERRIDES.values()).values():
        if size < 1:
            yield f"extra_cmd_args: {key} = {size} must be at least 1; remove it to leave it to the recipe"


def _evaluated(factors: str, product: int) -> str:
    """`tp 2 * pp 4 = 8`; a single factor as it is."""
    return f"{factors} = {product}" if " * " in factors else factors


@rule("gpus-divide", _PARALLEL_STATE, (*cmd_args("num_gpus gpus_per_node tp pp cp"), *OVERRIDDEN))
def _gpus_divide(run: RuleContext) -> Iterator[str]:
    """Every GPU belongs to exactly one model-parallel group, so the groups must fill the GPUs."""
    sizes = run.layout(*PARALLEL)
    product = math.prod(sizes.values())
    if run.gpus > 0 and any(gpus % product for gpus in run.filled):
        unit = math.lcm(product, run.gpus_per_node or 1) if run.trained != run.gpus else product
        near = sorted({max(run.gpus // unit, 1) * unit, (run.gpus // unit + 1) * unit})
        yield (
            f"{run.shown_gpus} is not a multiple of {_evaluated(run.shown(sizes), product)}; "
            f"use {' or '.join(map(str, near))} GPUs, or other sizes"
        )


@rule("expert-gpus-divide", _PARALLEL_STATE, (*cmd_args("num_gpus gpus_per_node et ep pp"), *OVERRIDDEN))
def _expert_sizes_divide(run: RuleContext) -> Iterator[str]:
    """Experts are laid over the same GPUs by sizes of their own, which must fill them as well."""
    sizes = run.layout("et", "ep", "pp")
    product = math.prod(sizes.values())
    # Whatever the recipe's other sizes are, those that are written must divide the GPUs together.
    if "ep" in sizes and run.gpus > 0 and any(gpus % product for gpus in run.filled):
        yield f"{run.shown_gpus} is not a multiple of {_evaluated(run.shown(sizes), product)}; change one of them"


_QWEN3 = ("qwen3_30b_a3b", "qwen3_235b_a22b", "qwen3_vl_30b_a3b", "qwen3_vl_235b_a22b")
EXPERTS: Mapping[str, int] = {
    **dict.fromkeys(("llama3_8b", "llama3_70b", "llama31_405b", "nemotronh_56b", "wan_14b"), 0),
    **dict.fromkeys((*_QWEN3, "gpt_oss_120b", "nemotron_3_nano"), 128),
    "deepseek_v3": 256,
    "kimi_k2": 384,
    "qwen3_next_80b_a3b": 512,
    "gpt_oss_20b": 32,
}
"""Experts of a layer, by recipe; 0 for a dense model.

`num_moe_experts` of src/megatron/bridge/models/{deepseek,gpt_oss,kimi,llama,nemotronh,qwen}/*_provider.py of v0.3.0
(21b02e0c); nemotron_3_nano's of recipes/nemotronh/h100/nemotron_3_nano.py at 067f987d, where the others come from the
checkpoints' own configurations. Recipes whose number no release states are left out.
"""


@rule("experts-parallel", _PARALLEL_STATE, (*cmd_args("ep model_recipe_name num_moe_experts"), *OVERRIDDEN))
def _experts_parallel(run: RuleContext) -> Iterator[str]:
    """Each rank holds the same whole number of experts, so a dense model has nothing to spread."""
    recipe, parallel = str(run.args.get("model_recipe_name")), run.layout("ep").get("ep")
    experts = run.integer("num_moe_experts") or EXPERTS.get(recipe)
    if not parallel or parallel == 1 or experts is None:
        return
    written = run.shown({"ep": parallel})
    if not experts:
        yield f"{written}: {recipe} is a dense model without experts; write 1, or remove it"
    elif experts % parallel:
        yield f"{written} does not divide the {experts} experts of {recipe}; use a divisor of {experts}"


_BATCH = (
    *cmd_args("gb mb num_gpus gpus_per_node tp pp cp use_megatron_fsdp num_distributed_optimizer_instances"),
    *OVERRIDDEN,
)


def _uneven_batch(run: RuleContext, group: int = 1) -> Iterator[str]:
    """What is wrong with a batch that is not made of whole groups of micro batches, each `group` of every replica."""
    batches, sizes = run.layout("mb", "gb"), run.layout(*PARALLEL)
    if len(batches) < 2:
        return
    product = math.prod(sizes.values())
    unit, reason = batches["mb"], run.shown({"mb": batches["mb"]})
    if len(sizes) == len(PARALLEL) and run.gpus > 0 and run.trained % product == 0:
        parallel = run.trained // product
        reason = f"{reason} * data parallel size {parallel} ({run.shown_gpus} / ({run.shown(sizes)}))"
        unit *= parallel
    instances = run.integer("num_distributed_optimizer_instances") or 1
    if instances > 1 and run.value("use_megatron_fsdp"):
        unit, reason = unit * instances, f"{reason} * num_distributed_optimizer_instances {instances}"
    if group > 1:
        unit, reason = unit * group, f"{reason} * {run.shown({'pp': group})} of a virtual pipeline"
    total = batches["gb"]
    if total % unit:
        below, above = total // unit * unit, (total // unit + 1) * unit
        near = f"{below} or {above}" if below else above
        yield f"{run.shown({'gb': total})} is not a multiple of {_evaluated(reason, unit)}; use {near}"


@rule("batch-divides", _PARALLEL_STATE, _BATCH)
def _batch_divides(run: RuleContext) -> Iterator[str]:
    """Each data-parallel replica takes the same whole number of micro batches in a step."""
    return iter(()) if run.overridden("gb") else _uneven_batch(run)


@rule("batch-interleaves", SCHEDULES, (*_BATCH, *cmd_args("vp")))
def _batch_interleaves(run: RuleContext) -> Iterator[str]:
    """A virtual pipeline takes micro batches in groups of its stages, and its first step fails where some are left."""
    sizes = run.layout(*PARALLEL, "vp")
    names = {path.rpartition(".")[2] for _, path, _ in overrides_of(run.test)}  # a batch that grows may never be whole
    if names & {"microbatch_group_size_per_vp_stage", "rampup_batch_size"} or run.args.get("use_recipes"):
        return
    if len(sizes) > len(PARALLEL) and not run.overridden("gb") and min(sizes["vp"], sizes["pp"]) > 1:
        yield from () if any(_uneven_batch(run)) else _uneven_batch(run, sizes["pp"])


@rule("batch-override-divides", _LAUNCHER, _BATCH, "warning")
def _batch_override_divides(run: RuleContext) -> Iterator[str]:
    """On other GPUs than the recipe's the launcher scales the batch after overrides, so that it may divide in the end.

    Since v0.5.0 it does so only where the override is what the recipe has.
    """
    if run.overridden("gb"):
        yield from (f"{found}, and write it as cmd_args.gb, which is never scaled" for found in _uneven_batch(run))


@rule("fsdp-sizes", _PARALLEL_STATE, (*cmd_args("use_megatron_fsdp pp cp vp"), *OVERRIDDEN))
def _fsdp_sizes(run: RuleContext) -> Iterator[str]:
    """Megatron FSDP shards over the data-parallel group alone and supports no pipeline or context parallelism."""
    if not run.value("use_megatron_fsdp"):
        return
    larger = {field: size for field, size in run.layout("pp", "cp", "vp").items() if size > 1}
    if larger:
        yield f"use_megatron_fsdp needs pp, cp and vp of 1, not {run.shown(larger)}; change them or switch it off"


@rule(
    "optimizer-instances",
    _PARALLEL_STATE,
    cmd_args("num_distributed_optimizer_instances use_megatron_fsdp use_recipes"),
)
def _optimizer_instances(run: RuleContext) -> Iterator[str]:
    """Several instances of the distributed optimizer exist only under Megatron FSDP's hybrid sharding."""
    instances = run.integer("num_distributed_optimizer_instances")
    if instances and instances > 1 and not run.value("use_megatron_fsdp"):
        yield f"num_distributed_optimizer_instances {instances} needs use_megatron_fsdp = true; write it, or remove it"


@rule(
    "virtual-pipeline",
    f"{_PARALLEL_STATE}; Megatron-Bridge: mamba_provider.py, from 21b02e0c (v0.3.0), and hybrid_provider.py of v0.6.0",
    (*cmd_args("vp pp model_family_name"), *OVERRIDDEN, "git_repos"),
)
def _virtual_pipeline(run: RuleContext) -> Iterator[str]:
    """A virtual pipeline interleaves the stages of a pipeline; with one stage there is nothing to interleave."""
    sizes = run.layout("vp", "pp")
    # A flag of 1 is passed on as None; an override of it is a virtual pipeline to Megatron-Core.
    is_virtual = sizes.get("vp", 1) > 1 or ("vp" in sizes and "vp" in run.overridden("vp"))
    if is_virtual and sizes.get("pp") == 1:
        virtual, stages = run.shown({"vp": sizes["vp"]}), run.shown({"pp": 1})
        yield f"{virtual} splits the stages of a pipeline, and {stages} is none; use vp = 1 or pp > 1"
        return
    # Of a branch it is not known whether its hybrid models have one.
    is_hybrid = run.args.get("model_family_name") == "nemotronh" and is_release(run.test.megatron_bridge.commit)
    if is_virtual and is_hybrid:
        yield f"{run.shown({'vp': sizes['vp']})}: models of Mamba's layers have no virtual pipeline; use vp = 1"


_EVEN_RECIPES = frozenset({"llama3_8b", "qwen3_30b_a3b", "qwen3_vl_30b_a3b", "gpt_oss_20b", "gpt_oss_120b"})
"""Those without a layout, without stages of their own, and in which embedding and loss count as no layers.

Of scripts/performance/configs from 21b02e0c (v0.3.0), and of perf_recipes/ at 067f987d (main).
"""

_SPLITS = (
    *("pipeline_model_parallel_layout", "num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage"),
    *("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"),
)


@rule(
    "layers-divide",
    _PARALLEL_STATE,
    (*cmd_args("num_layers pp vp pipeline_model_parallel_layout model_recipe_name"), *OVERRIDDEN),
)
def _layers_divide(run: RuleContext) -> Iterator[str]:
    """Without a layout every pipeline stage gets the same whole number of layers."""
    sizes = {size: count for size, count in run.layout("pp", "vp", "num_layers").items() if size != "vp" or count > 1}
    layers = sizes.pop("num_layers", None)
    if layers is None or "pp" not in sizes or run.value("pipeline_model_parallel_layout"):
        return
    written = {path.rpartition(".")[2] for _, path, _ in overrides_of(run.test)}
    if run.args.get("model_recipe_name") not in _EVEN_RECIPES or written.intersection(_SPLITS):
        return
    product = math.prod(sizes.values())
    if layers % product:
        yield (
            f"{run.shown({'num_layers': layers})} is not a multiple of {_evaluated(run.shown(sizes), product)}; "
            "change one of them or write pipeline_model_parallel_layout"
        )


_LAYERS: Mapping[str, int] = {
    "llama3_8b": 32,
    "llama3_70b": 80,
    "llama31_405b": 126,
    "deepseek_v3": 61,
    "kimi_k2": 61,
    "qwen3_30b_a3b": 48,
    "qwen3_235b_a22b": 94,
    "gpt_oss_20b": 24,
    "gpt_oss_120b": 36,
}
"""Layers of a recipe's decoder, of the same files; no performance recipe of a release sets another number."""


@rule(
    "pipeline-layout",
    _LAYOUT,
    (*cmd_args("pipeline_model_parallel_layout pp vp num_layers model_recipe_name"), *OVERRIDDEN, "git_repos"),
)
def _pipeline_layout(run: RuleContext) -> Iterator[str]:
    """A layout says where every layer is, so the sizes of the pipeline and the model must agree with it."""
    layout, sizes = run.value("pipeline_model_parallel_layout"), run.layout("pp", "vp", "num_layers")
    if not layout:
        return
    known = _LAYERS.get(str(run.args.get("model_recipe_name"))) if has_performance_recipe(run) else None
    # A flag of 1 is passed on as None, with which the layout decides.
    virtual = sizes.get("vp") if sizes.get("vp", 1) > 1 or "vp" in run.overridden("vp") else None
    if problem := layout_problem(layout, sizes.get("pp"), virtual, sizes.get("num_layers", known), None):
        yield f"pipeline_model_parallel_layout {layout!r} {problem}"


# --- CUDA graphs, recomputation, offloading and overlap ---------------------------------------------------------------

_GRAPHS = cmd_args("cuda_graph_impl cuda_graph_scope use_recipes")


def _graphs_on(run: RuleContext) -> bool:
    return run.graph_implementation not in (None, *NO_GRAPHS)


def _modules(run: RuleContext) -> frozenset[str]:
    return frozenset(item.lower() for item in items_of(run.value("recompute_modules") or ()))


@rule("fsdp-graphs", MEGATRON_CORE, cmd_args("use_megatron_fsdp cuda_graph_impl use_recipes"))
def _fsdp_graphs(run: RuleContext) -> Iterator[str]:
    """FSDP gathers and frees parameters at every step, and a captured graph keeps fixed addresses."""
    if run.value("use_megatron_fsdp") and _graphs_on(run):
        yield (
            f"use_megatron_fsdp and cuda_graph_impl = {run.graph_implementation!r} exclude each other; "
            'switch FSDP off or write cuda_graph_impl = "none"'
        )


@rule("offload-graphs", _UNTIL_0_4, cmd_args("activation_offload_layers cuda_graph_impl use_recipes"), last=V0_4_2)
def _offload_graphs(run: RuleContext) -> Iterator[str]:
    """Offloading copies activations to the host on other streams, which a captured graph cannot replay."""
    layers = run.integer("activation_offload_layers")
    if layers and _graphs_on(run):
        yield (
            f"activation_offload_layers {layers} and cuda_graph_impl = {run.graph_implementation!r} exclude each "
            'other, whatever the scope; remove one or write cuda_graph_impl = "none"'
        )


@rule(
    "offload-layer-graphs",
    _SINCE_0_5,
    (*cmd_args("activation_offload_layers"), *_GRAPHS),
    first=V0_5_0,
)
def _offload_layer_graphs(run: RuleContext) -> Iterator[str]:
    """Offloading copies activations to the host, which only a graph of the full iteration holds as well."""
    layers = run.integer("activation_offload_layers")
    if layers and _graphs_on(run) and _FULL_ITERATION not in run.graph_scopes:
        yield (
            f"activation_offload_layers {layers} and CUDA graphs of layers exclude each other; remove one, or write "
            'cuda_graph_impl = "local" and cuda_graph_scope = "full_iteration"'
        )


@rule("offload-pipeline", MEGATRON_CORE, cmd_args("activation_offload_layers pp use_recipes"))
def _offload_pipeline(run: RuleContext) -> Iterator[str]:
    """Offloading of activations is implemented for a single pipeline stage."""
    layers, stages = run.integer("activation_offload_layers"), run.integer("pp")
    if layers and stages and stages > 1:
        yield f"activation_offload_layers {layers} needs pp 1, not {stages}; remove it or use pp = 1"


@rule("graph-scope", MEGATRON_CORE, _GRAPHS)
def _graph_scope(run: RuleContext) -> Iterator[str]:
    """A graph of the full iteration contains every other one, and Transformer Engine captures layers only."""
    scopes = run.graph_scopes
    if _FULL_ITERATION not in scopes:
        return
    if len(scopes) > 1:
        yield f"cuda_graph_scope {', '.join(scopes)}: full_iteration excludes all others; remove it or the others"
    if run.graph_implementation == "transformer_engine":
        yield 'cuda_graph_scope full_iteration is not for transformer_engine; write cuda_graph_impl = "local"'


@rule("local-graph-scope", _BRIDGE_0_6, _GRAPHS, first=V0_6_0)
def _local_graph_scope(run: RuleContext) -> Iterator[str]:
    """Megatron-Bridge captures layers with Transformer Engine only; its local graphs hold the full iteration."""
    scopes = run.graph_scopes
    if run.graph_implementation == "local" and scopes and _FULL_ITERATION not in scopes:
        yield (
            f"cuda_graph_scope {', '.join(scopes)} needs transformer_engine: local captures the full iteration only; "
            'write cuda_graph_impl = "transformer_engine", or cuda_graph_scope = "full_iteration"'
        )


@rule("graph-full-recompute", MEGATRON_CORE, (*_GRAPHS, *cmd_args("recompute_num_layers")))
def _graph_full_recompute(run: RuleContext) -> Iterator[str]:
    """Whole layers can be recomputed only within a graph of the full iteration."""
    layers, scopes = run.integer("recompute_num_layers"), run.graph_scopes
    per_layer = run.graph_implementation == "transformer_engine" or (_graphs_on(run) and scopes)
    if layers and per_layer and _FULL_ITERATION not in scopes:
        yield (
            f"recompute_num_layers {layers} excludes CUDA graphs of layers; remove it, recompute modules instead, or "
            'write cuda_graph_impl = "local" and cuda_graph_scope = "full_iteration"'
        )


@rule(
    "recompute-one",
    MEGATRON_CORE,
    cmd_args("recompute_num_layers recompute_modules activation_offload_layers use_recipes"),
)
def _recompute_one(run: RuleContext) -> Iterator[str]:
    """Layers are recomputed, or parts of them, or their activations are offloaded."""
    fields = ("recompute_num_layers", "recompute_modules", "activation_offload_layers")
    given = [field for field in fields if run.value(field)]
    if len(given) > 1:
        yield f"{' and '.join(given)} exclude each other; keep one of them"


@rule("graph-moe-router", MEGATRON_CORE, _GRAPHS)
def _graph_moe_router(run: RuleContext) -> Iterator[str]:
    """The graph of moe contains its router, which cannot be captured twice."""
    if {"moe", "moe_router"} <= set(run.graph_scopes):
        yield "cuda_graph_scope holds moe and moe_router, and moe contains the router; keep one of them"


@rule("graph-moe-preprocess", MEGATRON_CORE, _GRAPHS)
def _graph_moe_preprocess(run: RuleContext) -> Iterator[str]:
    """Preprocessing consumes the router's output, so both are captured, or neither."""
    scopes = run.graph_scopes
    # The local implementation adds the other one of the pair itself.
    if "moe_preprocess" in scopes and "moe_router" not in scopes and run.graph_implementation != "local":
        yield "cuda_graph_scope moe_preprocess needs moe_router beside it; add moe_router"


@rule("graph-recompute", MEGATRON_CORE, (*_GRAPHS, *cmd_args("recompute_modules")))
def _graph_recompute(run: RuleContext) -> Iterator[str]:
    """Recomputing the expert layer runs it again outside the graph that captured part of it."""
    captured = [scope for scope in ("moe", "moe_router") if scope in run.graph_scopes]
    if captured and "moe" in _modules(run) and run.graph_implementation != "local":
        yield (
            f"recompute_modules moe would be recomputed around the captured {', '.join(captured)}; "
            "remove moe from recompute_modules or from cuda_graph_scope"
        )


@rule("graph-recompute-dropout", MEGATRON_CORE, (*_GRAPHS, *cmd_args("recompute_modules")), "warning")
def _graph_recompute_dropout(run: RuleContext) -> Iterator[str]:
    """What is recomputed inside a graph must repeat exactly, which dropout and jitter prevent."""
    scopes, modules = run.graph_scopes, _modules(run)
    for scope, inside in _RECOMPUTED_INSIDE.items():
        if scope in scopes and (both := sorted(inside & modules)):
            yield (
                f"{', '.join(both)} is recomputed inside the captured {scope}: "
                "Megatron-Core refuses that unless dropout and jitter are 0; make sure the recipe has none"
            )


@rule("overlap-graphs", _UNTIL_0_4, (*cmd_args("moe_a2a_overlap"), *_GRAPHS), last=V0_4_2)
def _overlap_graphs(run: RuleContext) -> Iterator[str]:
    """The overlap splits the expert layer into parts that run on two streams, so no graph may hold it whole."""
    if not run.value("moe_a2a_overlap"):
        return
    captured = [scope for scope in run.graph_scopes if scope in (_FULL_ITERATION, "mlp", "moe")]
    if run.graph_implementation == "local" or captured:
        what = f"captures {', '.join(captured)}" if captured else "is local"
        yield (
            f"moe_a2a_overlap is on and the CUDA graph {what}; switch the overlap off, or capture "
            "attn, moe_router and moe_preprocess with transformer_engine"
        )


@rule("overlap-layer-graphs", _SINCE_0_5, (*cmd_args("moe_a2a_overlap"), *_GRAPHS), first=V0_5_0)
def _overlap_layer_graphs(run: RuleContext) -> Iterator[str]:
    """The overlap splits the expert layer into parts that run on two streams, so no graph of layers may hold it."""
    captured = [scope for scope in ("mlp", "moe") if scope in run.graph_scopes]
    if run.value("moe_a2a_overlap") and run.graph_implementation == "transformer_engine" and captured:
        yield (
            f"moe_a2a_overlap is on and the CUDA graph captures {', '.join(captured)}; switch the overlap off, or "
            "capture attn, moe_router and moe_preprocess"
        )


@rule(
    "overlap-biases",
    "Megatron-Bridge: training/comm_overlap.py and models/gpt_oss, from v0.4.0 on, at 067f987d (main of August 2026)",
    (*cmd_args("moe_a2a_overlap model_family_name model_recipe_name"), *_GRAPHS, "extra_cmd_args"),
    first=V0_4_0,
)
def _overlap_biases(run: RuleContext) -> Iterator[str]:
    """With the overlap the launcher delays the weights' gradients, and a graph cannot hold those of biases."""
    overrides = {path.rpartition(".")[2] for _, path, _ in overrides_of(run.test)}
    is_biased = run.args.get("model_family_name") == "gpt_oss" and not overrides & {"add_bias_linear", "add_qkv_bias"}
    if run.value("moe_a2a_overlap") and is_biased and _graphs_on(run) and "attn" in run.graph_scopes:
        yield (
            f"moe_a2a_overlap excludes a CUDA graph of attn where {run.args.get('model_recipe_name')} has biases; "
            "leave attn out of cuda_graph_scope, or switch the overlap off"
        )


@rule(
    "overlap-needs",
    MEGATRON_CORE,
    cmd_args("moe_a2a_overlap ep pp vp recompute_num_layers recompute_modules use_recipes"),
)
def _overlap_needs(run: RuleContext) -> Iterator[str]:
    """The overlap hides the all-to-all of one micro batch behind the compute of another one."""
    if not run.value("moe_a2a_overlap"):
        return
    if run.integer("ep") == 1:
        yield "moe_a2a_overlap needs ep > 1; raise ep or switch it off"
    stages = run.integer("pp")
    if stages and stages > 1 and run.args.get("vp") in (1, "None"):
        yield f"moe_a2a_overlap with pp {stages} needs a virtual pipeline; write vp > 1 or switch it off"
    if run.integer("recompute_num_layers"):
        yield "moe_a2a_overlap excludes recomputing whole layers; remove recompute_num_layers or switch it off"
    if "moe" in _modules(run):
        yield "moe_a2a_overlap excludes recomputing moe; remove it from recompute_modules or switch the overlap off"
