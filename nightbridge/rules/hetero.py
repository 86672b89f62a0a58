"""Two grids, a schedule in samples, frozen parts: what a heterogeneous-parallel run must satisfy before it is queued.

From Megatron-LM's `examples/mimo` and `megatron/training/arguments.py`: each of these ends a run after it was queued.
"""

from collections.abc import Iterator

from nightbridge.errors import InvalidInput
from nightbridge.launch.grids import GPUS_PER_NODE, Grid, grids_of, micro_batches
from nightbridge.launch.hetero import hetero_plan, taken_options
from nightbridge.launch.resources import gpus_per_node
from nightbridge.launch.versions import HEAD
from nightbridge.models import ClusterLimits, Image, RunSpec, Site
from nightbridge.rules.checkpoints import resumes
from nightbridge.rules.context import Facts
from nightbridge.rules.rule import Rule, from_source

_GRIDS = ("cmd_args.encoder", "cmd_args.language_model")


def _named_grids(facts: Facts) -> tuple[tuple[str, Grid], ...]:
    grids = grids_of(facts.test)
    return ("encoder", grids.encoder), ("language_model", grids.language_model)


def _fills_nodes(facts: Facts) -> Iterator[str]:
    """Each grid owns whole nodes, and both are started by one srun."""
    per_node = gpus_per_node(facts.test, HEAD, limits=facts.limits) or GPUS_PER_NODE
    total = grids_of(facts.test).ranks
    for name, grid in _named_grids(facts):
        where = f"cmd_args.{name}: tp {grid.tp} x cp {grid.cp} x pp {grid.pp} x dp {grid.dp} = {grid.ranks} GPUs"
        if grid.nodes is not None and grid.nodes * per_node != grid.ranks:
            yield (
                f"{where} do not fill its {grid.nodes} nodes of {per_node}; "
                f"change dp so that the product is {grid.nodes * per_node}"
            )
        elif total > per_node and grid.ranks % per_node:
            yield f"{where} do not fill whole nodes of {per_node}: the other grid would share one; change dp"


def _lanes(facts: Facts) -> Iterator[str]:
    """Every encoder replica feeds the same whole number of language-model replicas."""
    grids = grids_of(facts.test)
    if grids.language_model.dp % grids.encoder.dp:
        yield (
            f"cmd_args.language_model.dp {grids.language_model.dp} is not a multiple of encoder.dp {grids.encoder.dp}: "
            f"{grids.lanes_per_encoder:.2f} lanes for each encoder; choose an encoder.dp that divides it"
        )


def _experts(facts: Facts) -> Iterator[str]:
    """The expert grid covers the same GPUs, and each rank holds the same whole number of experts."""
    for name, grid in _named_grids(facts):
        if grid.ranks % grid.expert_block:
            yield (
                f"cmd_args.{name}: {grid.ranks} GPUs are not a multiple of etp {grid.etp} x ep {grid.ep} x "
                f"pp {grid.pp} = {grid.expert_block}; choose an ep that divides"
            )
    experts = facts.integer("num_moe_experts")
    ep = grids_of(facts.test).language_model.ep
    if experts and experts % ep:
        yield f"cmd_args.num_moe_experts {experts} is not a multiple of language_model.ep {ep}; choose a divisor"


def _whole_micro_batches(facts: Facts) -> Iterator[str]:
    """A step is a whole number of micro batches for each replica of the language model."""
    count = micro_batches(facts.test)
    if count is not None and not count.is_integer():
        dp, mb = grids_of(facts.test).language_model.dp, facts.args.get("mb", 1)
        yield (
            f"cmd_args.gb {facts.args['gb']} / (mb {mb} x language_model.dp {dp}) = {count:.2f} micro-batches, "
            f"which is not whole; choose a multiple of {mb * dp}"
        )


def _context_parallel(facts: Facts) -> Iterator[str]:
    """No published program implements context parallelism across the two grids."""
    for name, grid in _named_grids(facts):
        if grid.cp > 1:
            yield f"cmd_args.{name}.cp is {grid.cp}, and every program published so far refuses more than 1"


def _length(facts: Facts) -> Iterator[str]:
    """Megatron-LM needs an end of training, in iterations or samples."""
    steps, samples = facts.args.get("max_steps"), facts.args.get("train_samples")
    if not steps and not samples:
        yield "neither cmd_args.train_samples nor max_steps is written: the program would never end"


def _both_lengths(facts: Facts) -> Iterator[str]:
    """Megatron-LM takes one of the two lengths; samples win."""
    if facts.args.get("max_steps") and facts.args.get("train_samples"):
        yield (
            f"cmd_args.train_samples {facts.args['train_samples']} takes precedence over max_steps "
            f"{facts.args['max_steps']}, which is not passed on: {facts.test.max_steps} iterations"
        )


def _schedule(facts: Facts) -> Iterator[str]:
    """Megatron-LM refuses a schedule that mixes samples and iterations, and a WSD schedule with a part missing."""
    args = facts.args
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


def _schedule_order(facts: Facts) -> Iterator[str]:
    """A warm-up that outlasts the decay leaves no step at the requested learning rate."""
    total = facts.integer("train_samples")
    warmup, decay = facts.args.get("lr_warmup_samples") or 0, facts.integer("lr_decay_samples") or total
    wsd = facts.integer("lr_wsd_decay_samples") or 0
    if total is None or decay is None:
        return
    if warmup >= decay:
        yield f"cmd_args.lr_warmup_samples {warmup} do not end before lr_decay_samples {decay}; lower the first"
    if wsd > decay:
        yield f"cmd_args.lr_wsd_decay_samples {wsd} are more than lr_decay_samples {decay}; lower the first"


def _frozen(facts: Facts) -> Iterator[str]:
    """With every part frozen no parameter has a gradient."""
    if facts.args.get("training_stage") == "stage1" and facts.args.get("freeze_projection"):
        yield (
            "cmd_args.training_stage = 'stage1' trains the projector alone, and freeze_projection freezes it: "
            "nothing would be trained; remove one"
        )


def _resolution(facts: Facts) -> Iterator[str]:
    """Tiles and dynamic resolution are two ways to cut an image, and the bounds must be in order."""
    args = facts.args
    low, high = args.get("dynamic_resolution_min_patches"), args.get("dynamic_resolution_max_patches")
    if low and high and low > high:
        yield f"cmd_args.dynamic_resolution_min_patches {low} is more than dynamic_resolution_max_patches {high}"
    if args.get("dynamic_resolution") is False and (low or high):
        yield "cmd_args.dynamic_resolution is off, and its patches are written; remove them or switch it on"
    if args.get("dynamic_resolution") and (args.get("num_image_tiles") or args.get("use_thumbnail")):
        yield "cmd_args.dynamic_resolution excludes tiles and thumbnails; remove num_image_tiles and use_thumbnail"


def _extra(facts: Facts) -> Iterator[str]:
    """An option given twice is decided by its position on the command line."""
    for key in taken_options(facts.test):
        yield f"extra_cmd_args.{key} is decided by [cmd_args]; write it there"


def _grid_flags(facts: Facts) -> Iterator[str]:
    """The pinned program's own parser decides which axes a grid has."""
    if facts.checkout is None:
        return
    limits = facts.limits or ClusterLimits()
    place = facts.checkout.megatron_bridge.path
    try:
        run = RunSpec(scenario="validate", night="validate", test=facts.test)
        hetero_plan(run, facts.checkout.megatron_bridge, Image(kind="none"), limits, Site(), 1, place / "attempt")
    except InvalidInput as error:
        yield str(error)


RULES = (
    *from_source(
        "Megatron-LM: examples/mimo",
        Rule("grid-fills-nodes", "error", (*_GRIDS, "cmd_args.gpus_per_node"), _fills_nodes),
        Rule("lanes-per-encoder", "error", _GRIDS, _lanes),
        Rule("grid-experts", "error", (*_GRIDS, "cmd_args.num_moe_experts"), _experts),
        Rule("grid-micro-batches", "error", (*_GRIDS, "cmd_args.gb", "cmd_args.mb"), _whole_micro_batches),
        Rule("grid-context-parallel", "warning", _GRIDS, _context_parallel),
        Rule("grid-flag-exists", "error", (*_GRIDS, "cmd_args.program"), _grid_flags, needs="checkout"),
        Rule("nothing-trained", "error", ("cmd_args.training_stage", "cmd_args.freeze_projection"), _frozen),
        Rule(
            "image-resolution",
            "error",
            ("cmd_args.dynamic_resolution", "cmd_args.dynamic_resolution_min_patches", "cmd_args.num_image_tiles"),
            _resolution,
        ),
    ),
    *from_source(
        "Megatron-LM: its arguments and learning-rate schedule",
        Rule("training-length", "error", ("cmd_args.max_steps", "cmd_args.train_samples"), _length),
        Rule("samples-precede", "warning", ("cmd_args.max_steps", "cmd_args.train_samples"), _both_lengths),
        Rule(
            "sample-schedule",
            "error",
            (
                "cmd_args.lr_decay_style",
                "cmd_args.lr_wsd_decay_samples",
                "cmd_args.lr_wsd_decay_style",
                "cmd_args.lr_warmup_samples",
                "cmd_args.lr_decay_samples",
                "cmd_args.warmup_iters",
                "cmd_args.train_samples",
            ),
            _schedule,
        ),
        Rule(
            "sample-schedule-order",
            "error",
            ("cmd_args.lr_warmup_samples", "cmd_args.lr_decay_samples", "cmd_args.lr_wsd_decay_samples"),
            _schedule_order,
        ),
        Rule("flag-once", "error", ("extra_cmd_args",), _extra),
    ),
    *from_source(
        "nightbridge: what a night stores and compares",
        Rule("resumes", "warning", ("cmd_args.load_dir", "cmd_args.finetune", "extra_cmd_args"), resumes),
    ),
)
