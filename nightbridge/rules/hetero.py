"""Two grids, a schedule in samples, frozen parts: what a heterogeneous-parallel run must satisfy before it is queued.

From Megatron-LM's `examples/mimo` and `megatron/training/arguments.py`: each of these ends a run after it was queued.
"""

from collections.abc import Iterator
from dataclasses import replace

from nightbridge.errors import InvalidInput
from nightbridge.launch.flags import HEAD
from nightbridge.launch.hetero import hetero_plan, taken_options
from nightbridge.launch.hetero_arguments import DEFAULT_GPUS_PER_NODE, ProcessGrid, grids_of
from nightbridge.launch.resources import gpus_per_node
from nightbridge.models import ClusterLimits, Image, RunSpec, Site
from nightbridge.rules import launcher
from nightbridge.rules.rule import RuleContext, cmd_args, rule

_MIMO = "Megatron-LM: examples/mimo/training/args.py at d98e8a64 (main of August 2026)"
_MEGATRON_LM = "Megatron-LM: megatron/training/arguments.py at d98e8a64 (main of August 2026)"


def _named_grids(run: RuleContext) -> tuple[tuple[str, ProcessGrid], ...]:
    grids = grids_of(run.test)
    return ("encoder", grids.encoder), ("language_model", grids.language_model)


@rule("grid-fills-nodes", _MIMO, cmd_args("encoder language_model gpus_per_node"))
def _fills_nodes(run: RuleContext) -> Iterator[str]:
    """Each grid owns whole nodes, and both are started by one srun."""
    per_node = gpus_per_node(run.test, HEAD, limits=run.limits) or DEFAULT_GPUS_PER_NODE
    total = grids_of(run.test).ranks
    for name, grid in _named_grids(run):
        where = f"cmd_args.{name}: tp {grid.tp} x cp {grid.cp} x pp {grid.pp} x dp {grid.dp} = {grid.ranks} GPUs"
        if grid.nodes is not None and grid.nodes * per_node != grid.ranks:
            yield (
                f"{where} do not fill its {grid.nodes} nodes of {per_node}; "
                f"change dp so that the product is {grid.nodes * per_node}"
            )
        elif total > per_node and grid.ranks % per_node:
            yield f"{where} do not fill whole nodes of {per_node}: the other grid would share one; change dp"


@rule("lanes-per-encoder", _MIMO, cmd_args("encoder language_model"))
def _lanes(run: RuleContext) -> Iterator[str]:
    """Every encoder replica feeds the same whole number of language-model replicas."""
    encoder, language_model = (grid.dp for _, grid in _named_grids(run))
    if language_model % encoder:
        yield (
            f"cmd_args.language_model.dp {language_model} is not a multiple of encoder.dp {encoder}: "
            f"{language_model / encoder:.2f} lanes for each encoder; choose an encoder.dp that divides it"
        )


@rule("grid-experts", _MIMO, cmd_args("encoder language_model num_moe_experts"))
def _experts(run: RuleContext) -> Iterator[str]:
    """The expert grid covers the same GPUs, and each rank holds the same whole number of experts."""
    for name, grid in _named_grids(run):
        if grid.ranks % grid.expert_block:
            yield (
                f"cmd_args.{name}: {grid.ranks} GPUs are not a multiple of etp {grid.etp} x ep {grid.ep} x "
                f"pp {grid.pp} = {grid.expert_block}; choose an ep that divides"
            )
    experts = run.integer("num_moe_experts")
    ep = grids_of(run.test).language_model.ep
    if experts and experts % ep:
        yield f"cmd_args.num_moe_experts {experts} is not a multiple of language_model.ep {ep}; choose a divisor"


@rule("grid-micro-batches", _MIMO, cmd_args("encoder language_model gb mb"))
def _whole_micro_batches(run: RuleContext) -> Iterator[str]:
    """A step is a whole number of micro batches for each replica of the language model."""
    dp, mb, gb = grids_of(run.test).language_model.dp, run.args.get("mb", 1), run.args.get("gb")
    if gb and gb % (mb * dp):
        yield (
            f"cmd_args.gb {gb} / (mb {mb} x language_model.dp {dp}) = {gb / (mb * dp):.2f} micro-batches, "
            f"which is not whole; choose a multiple of {mb * dp}"
        )


@rule("grid-context-parallel", _MIMO, cmd_args("encoder language_model"), "warning")
def _context_parallel(run: RuleContext) -> Iterator[str]:
    """No published program implements context parallelism across the two grids."""
    for name, grid in _named_grids(run):
        if grid.cp > 1:
            yield f"cmd_args.{name}.cp is {grid.cp}, and every program published so far refuses more than 1"


@rule("grid-flag-exists", _MIMO, cmd_args("encoder language_model program"), needs="checkout")
def _grid_flags(run: RuleContext) -> Iterator[str]:
    """The pinned program's own parser decides which axes a grid has."""
    if run.checkout is None:
        return
    limits = run.limits or ClusterLimits()
    code = run.checkout.megatron_bridge
    try:
        spec = RunSpec(scenario="validate", night="validate", test=run.test)
        hetero_plan(spec, code, Image(kind="none"), limits, Site(), 1, code.path / "attempt")
    except InvalidInput as error:
        yield str(error)


@rule("nothing-trained", _MIMO, cmd_args("training_stage freeze_projection"))
def _frozen(run: RuleContext) -> Iterator[str]:
    """With every part frozen no parameter has a gradient."""
    if run.args.get("training_stage") == "stage1" and run.args.get("freeze_projection"):
        yield (
            "cmd_args.training_stage = 'stage1' trains the projector alone, and freeze_projection freezes it: "
            "nothing would be trained; remove one"
        )


@rule("image-resolution", _MIMO, cmd_args("dynamic_resolution dynamic_resolution_min_patches num_image_tiles"))
def _resolution(run: RuleContext) -> Iterator[str]:
    """Tiles and dynamic resolution are two ways to cut an image, and the bounds must be in order."""
    args = run.args
    low, high = args.get("dynamic_resolution_min_patches"), args.get("dynamic_resolution_max_patches")
    if low and high and low > high:
        yield f"cmd_args.dynamic_resolution_min_patches {low} is more than dynamic_resolution_max_patches {high}"
    if args.get("dynamic_resolution") is False and (low or high):
        yield "cmd_args.dynamic_resolution is off, and its patches are written; remove them or switch it on"
    if args.get("dynamic_resolution") and (args.get("num_image_tiles") or args.get("use_thumbnail")):
        yield "cmd_args.dynamic_resolution excludes tiles and thumbnails; remove num_image_tiles and use_thumbnail"


@rule("training-length", _MEGATRON_LM, cmd_args("max_steps train_samples"))
def _length(run: RuleContext) -> Iterator[str]:
    """Megatron-LM needs an end of training, in iterations or samples."""
    steps, samples = run.args.get("max_steps"), run.args.get("train_samples")
    if not steps and not samples:
        yield "neither cmd_args.train_samples nor max_steps is written: the program would never end"


@rule("samples-precede", _MEGATRON_LM, cmd_args("max_steps train_samples"), "warning")
def _both_lengths(run: RuleContext) -> Iterator[str]:
    """Megatron-LM takes one of the two lengths; samples win."""
    if run.args.get("max_steps") and run.args.get("train_samples"):
        yield (
            f"cmd_args.train_samples {run.args['train_samples']} takes precedence over max_steps "
            f"{run.args['max_steps']}, which is not passed on: {run.test.max_steps} iterations"
        )


@rule(
    "sample-schedule",
    _MEGATRON_LM,
    cmd_args(
        "lr_decay_style lr_wsd_decay_samples lr_wsd_decay_style lr_warmup_samples lr_decay_samples",
        "warmup_iters train_samples",
    ),
)
def _schedule(run: RuleContext) -> Iterator[str]:
    """Megatron-LM refuses a schedule that mixes samples and iterations, and a WSD schedule with a part missing."""
    args = run.args
    written = [name for name in ("lr_wsd_decay_samples", "lr_wsd_decay_style") if args.get(name)]
    if len(written) == 1:
        missing = ({"lr_wsd_decay_samples", "lr_wsd_decay_style"} - set(written)).pop()
        yield f"cmd_args.{written[0]} is written without {missing}: a WSD schedule needs both"
    if args.get("lr_decay_style") == "WSD" and not written:
        yield "cmd_args.lr_decay_style = 'WSD' needs lr_wsd_decay_samples and lr_wsd_decay_style"
    if written and args.get("lr_decay_style") != "WSD":
        yield f"cmd_args.{written[0]} has no effect without lr_decay_style = 'WSD'; write it, or remove the former"
    if args.get("train_samples") and args.get("warmup_iters"):
        yield "cmd_args.warmup_iters counts iterations in a schedule of train_samples; write lr_warmup_samples"
    if not args.get("train_samples"):
        for name in ("lr_warmup_samples", "lr_decay_samples", "lr_wsd_decay_samples"):
            if args.get(name):
                yield f"cmd_args.{name} counts samples in a schedule of iterations; write train_samples"


@rule("sample-schedule-order", _MEGATRON_LM, cmd_args("lr_warmup_samples lr_decay_samples lr_wsd_decay_samples"))
def _schedule_order(run: RuleContext) -> Iterator[str]:
    """A warm-up that outlasts the decay leaves no step at the requested learning rate."""
    total = run.integer("train_samples")
    warmup, decay = run.args.get("lr_warmup_samples") or 0, run.integer("lr_decay_samples") or total
    wsd = run.integer("lr_wsd_decay_samples") or 0
    if total is None or decay is None:
        return
    if warmup >= decay:
        yield f"cmd_args.lr_warmup_samples {warmup} do not end before lr_decay_samples {decay}; lower the first"
    if wsd > decay:
        yield f"cmd_args.lr_wsd_decay_samples {wsd} are more than lr_decay_samples {decay}; lower the first"


@rule("flag-once", _MEGATRON_LM, ("extra_cmd_args",))
def _extra(run: RuleContext) -> Iterator[str]:
    """An option given twice is decided by its position on the command line."""
    for key in taken_options(run.test):
        yield f"extra_cmd_args.{key} is decided by [cmd_args]; write it there"


resumes = replace(launcher.resumes, fields=(*cmd_args("load_dir finetune"), "extra_cmd_args"))
