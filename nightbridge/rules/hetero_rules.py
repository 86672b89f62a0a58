"""Two grids, a schedule in samples, frozen parts: what a heterogeneous-parallel run must satisfy before it is queued.

From Megatron-LM's `examples/mimo` and `megatron/training/arguments.py`: each of these ends a run after it was queued.
"""

from collections.abc import Iterator
from dataclasses import replace

from nightbridge.errors import InvalidInput
from nightbridge.launch.hetero import PROGRAMS, STANDALONE, hetero_plan, option_of, program_arguments, taken_options
from nightbridge.launch.hetero_arguments import DEFAULT_GPUS_PER_NODE, ProcessGrid, grids_of
from nightbridge.launch.parser_source import newest_parser
from nightbridge.launch.resources import gpus_per_node
from nightbridge.launch.versions import HEAD
from nightbridge.models import ClusterLimits, Image, RunSpec, Site
from nightbridge.rules import launcher
from nightbridge.rules.required import TIMES, untimed_steps
from nightbridge.rules.rule import RuleContext, cmd_args, is_local, rule

_MIMO = "Megatron-LM: examples/mimo/training/args.py at d98e8a64 (main of August 2026)"
_MEGATRON_LM = "Megatron-LM: megatron/training/arguments.py at d98e8a64 (main of August 2026)"


def _named_grids(run: RuleContext) -> Iterator[tuple[str, ProcessGrid]]:
    grids = grids_of(run.test)
    if grids.encoder:
        yield "encoder", grids.encoder
    yield "language_model", grids.language_model


@rule("grid-encoder", _MIMO, cmd_args("encoder llm_only"))
def _encoder(run: RuleContext) -> Iterator[str]:
    """The language model has either an encoder's ranks before its own, or all ranks."""
    alone, written = run.args.get("llm_only"), run.args.get("encoder")
    if alone and written:
        yield "cmd_args.llm_only leaves no ranks to [cmd_args.encoder]; remove one of them"
    if not alone and written is None:
        yield "[cmd_args.encoder] is missing; write its grid, or llm_only = true to train the language model alone"


@rule("grid-weight-shards", _MIMO, cmd_args("encoder language_model"))
def _weight_shards(run: RuleContext) -> Iterator[str]:
    """Weights are spread over the tensor-parallel ranks and a whole number of ranks for each of those."""
    for name, grid in _named_grids(run):
        for key, shards, axis, size in (
            ("weight_shards", grid.weight_shards, "tp", grid.tp),
            ("expert_weight_shards", grid.expert_weight_shards, "etp", grid.etp),
        ):
            if shards and name == "encoder":
                yield f"cmd_args.encoder.{key}: only the language model's weights can be spread; remove it"
            elif shards and shards % size:
                yield f"cmd_args.{name}.{key} {shards} is not a multiple of {axis} {size}; choose one"


@rule("grid-fills-nodes", _MIMO, cmd_args("encoder language_model gpus_per_node"))
def _fills_nodes(run: RuleContext) -> Iterator[str]:
    """Each grid owns whole nodes, and both are started by one srun."""
    per_node = gpus_per_node(run.test, HEAD, limits=run.limits) or DEFAULT_GPUS_PER_NODE
    total = grids_of(run.test).ranks
    for name, grid in _named_grids(run):
        spread = f" x {grid.data_ranks // grid.dp} for its weight shards" if grid.data_ranks != grid.dp else ""
        sizes = f"tp {grid.tp} x cp {grid.cp} x pp {grid.pp} x dp {grid.dp}{spread}"
        where = f"cmd_args.{name}: {sizes} = {grid.ranks} GPUs"
        if grid.nodes is not None and grid.nodes * per_node != grid.ranks:
            yield (
                f"{where} do not fill its {grid.nodes} nodes of {per_node}; "
                f"change dp so that the product is {grid.nodes * per_node}"
            )
        elif total > per_node and grid.ranks % per_node:
            yield f"{where} do not fill whole nodes of {per_node}: the other grid would share one; change dp"


@rule("lanes-per-encoder", _MIMO, cmd_args("encoder language_model mb"))
def _lanes(run: RuleContext) -> Iterator[str]:
    """Every encoder replica feeds the same whole number of the language model's samples."""
    grids, mb = grids_of(run.test), run.args.get("mb", 1)
    samples = mb * grids.language_model.data_ranks
    if grids.encoder and samples % grids.encoder.dp:
        yield (
            f"cmd_args: mb {mb} x the language model's data ranks {samples // mb} = {samples} is not a multiple of "
            f"encoder.dp {grids.encoder.dp}: {samples / grids.encoder.dp:.2f} lanes for each encoder; "
            "choose an encoder.dp that divides it"
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
    dp, mb, gb = grids_of(run.test).language_model.data_ranks, run.args.get("mb", 1), run.args.get("gb")
    if gb and gb % (mb * dp):
        yield (
            f"cmd_args.gb {gb} / (mb {mb} x the language model's data ranks {dp}) = {gb / (mb * dp):.2f} "
            f"micro-batches, which is not whole; choose a multiple of {mb * dp}"
        )


@rule("grid-context-parallel", _MIMO, cmd_args("encoder language_model"), "warning")
def _context_parallel(run: RuleContext) -> Iterator[str]:
    """No published program implements context parallelism across the two grids."""
    for name, grid in _named_grids(run):
        if grid.cp > 1:
            yield f"cmd_args.{name}.cp is {grid.cp}, and every program published so far refuses more than 1"


@rule("grid-flag-exists", _MIMO, (*cmd_args("encoder language_model program"), "extra_cmd_args"), needs="checkout")
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
        yield from map(str, error.violations or [error])


def _has_megatron_parser(run: RuleContext) -> bool:
    """Whether Megatron-LM's parser will read the flags; of a folder of this host, and once fetched, the code tells."""
    program, url = run.args.get("program"), run.test.megatron_bridge.url
    return run.checkout is None and program in (None, *PROGRAMS) and program != STANDALONE and not is_local(url)


@rule("program-needs", _MEGATRON_LM, ("cmd_args", "extra_cmd_args"))
def _needs(run: RuleContext) -> Iterator[str]:
    """Megatron-LM's parser knows no size of a model, whatever its provider is called."""
    if not _has_megatron_parser(run):
        return
    if missing := newest_parser().missing(program_arguments(run.test)):
        keys = ", ".join(name.removeprefix("--").replace("-", "_") for name in missing)
        yield f"the program ends without {', '.join(missing)}; write {keys} in [cmd_args]"
    extras = set(map(option_of, run.test.extra_cmd_args))
    for option, needed in _TOGETHER.items():
        if (option is None or option in extras) and needed not in extras:
            yield f"extra_cmd_args: {option or 'the program'} needs {needed}; write it beside it"


_TOGETHER = {
    None: "--use-distributed-optimizer",
    "--encoder-ddp-overlap": "--overlap-grad-reduce",
    "--mimo-encoder-prefetch": "--freeze-vit",
}
"""Options of the program, each with another that it ends without."""


@rule("program-flags", _MEGATRON_LM, ("cmd_args", "extra_cmd_args"), "warning")
def _flags(run: RuleContext) -> Iterator[str]:
    """Flags of a branch or commit are known once it has been fetched; until then, those of a recent main are."""
    if _has_megatron_parser(run):
        yield from newest_parser().problems(program_arguments(run.test))


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


@rule("steps-timed", TIMES, cmd_args("max_steps train_samples gb log_interval"))
def _steps_timed(run: RuleContext) -> Iterator[str]:
    """A step time is the mean of an interval, and a night of one mean fails for the steps without."""
    if interval := run.integer("log_interval"):
        yield from untimed_steps(run, "cmd_args.log_interval", interval)
