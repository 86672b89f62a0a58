"""Plausibility: is what a run left whole, and did what was planned run, in a way that is physically possible?

Checked before anything is compared: a run of half the batch, or with a loss of zero, has numbers that look better than
any good night's. What contradicts the plan, or itself, or what a GPU can do, makes a run failed, on a first night too.
"""

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

from nightbridge.history.rows import HistoryRow
from nightbridge.launch.resources import num_gpus, resumed_from
from nightbridge.models import CheckpointState, RunRecord, Summary, TestDefinition
from nightbridge.numbers import format_count, format_value

Scalar = float | str


class Quantity(NamedTuple):
    """Something that is planned and then runs: where a test plans it, and how far its sources may be apart (a share).

    `argument` is its key in `[cmd_args]`, `override` Megatron-Bridge's. Where a test has both, which of them wins
    depends on the launcher, so that neither is the plan. `of_data`: another name of `Summary.ran` for the same.
    """

    name: str
    argument: str = ""
    override: str = ""
    tolerance: float = 0.0
    of_data: str = ""


LARGEST_RATE = "largest learning rate"
INTERVALS = "iterations a record"
CONFIGURED = "its configuration"
"""The source in `Summary.ran` that is what the run itself dumped of its plan."""

QUANTITIES = (
    Quantity("world size"),
    Quantity("global batch size", "gb", "train.global_batch_size"),
    Quantity("micro batch size", "mb", "train.micro_batch_size"),
    Quantity("sequence length", "seq_length", "model.seq_length", of_data="sequence length of the data"),
    Quantity("tensor parallel size", "tp", "model.tensor_model_parallel_size"),
    Quantity("pipeline parallel size", "pp", "model.pipeline_model_parallel_size"),
    Quantity("context parallel size", "cp", "model.context_parallel_size"),
    Quantity("iterations", "max_steps", "train.train_iters"),
    Quantity("consumed samples"),
    Quantity("precision", "compute_dtype"),
    # A rate is logged before or after its step, and a short schedule makes much of one step.
    Quantity(LARGEST_RATE, "lr", "optimizer.lr", tolerance=0.1),
    Quantity("last learning rate", tolerance=1.0),
)

SOME_RATES_TOLERANCE = 2.0
"""That of the largest rate by a source that logs every few iterations: the peak may lie between two records, and the
schedule be down at half of it by the next one."""

NOT_AFTER_RESUME = frozenset({"consumed samples", LARGEST_RATE, "last learning rate"})


class Gpu(NamedTuple):
    """A GPU by NVIDIA's data sheets: dense TFLOP/s of bf16, fp8 and fp4, and memory in GB (1e9), the largest sold."""

    bf16: float
    fp8: float
    fp4: float
    memory: float


GPUS: Mapping[str, Gpu] = {
    "a100": Gpu(312, 312, 312, 86),
    "h100": Gpu(989, 1979, 1979, 101),
    "h200": Gpu(989, 1979, 1979, 152),
    "b200": Gpu(2250, 4500, 9000, 207),
    "b300": Gpu(2250, 4500, 14000, 310),
    "gb200": Gpu(2500, 5000, 10000, 207),
    "gb300": Gpu(2500, 5000, 15000, 310),
}

BOOST = 1.1
"""Above the data sheet's clock a GPU may run by so much."""

FEW_STEPS = 5
"""A loss that is the same at fewer iterations than this may be chance."""


def implausible(record: RunRecord) -> tuple[str, ...]:
    """Why what a run says of itself cannot be, or is not what was planned; a line each, none for a plausible run."""
    return (
        *_contradictions(record),
        *_lost_resume(record),
        *_impossible_losses(record),
        *_lost_updates(record),
        *_impossible_speeds(record),
    )


def quantities_by_source(record: RunRecord) -> dict[str, dict[str, Scalar]]:
    """Every quantity by source, the plan first."""
    test, summary = record.spec.test, record.summary
    found: dict[str, dict[str, Scalar]] = {}
    for quantity in QUANTITIES:
        values = {"planned": value} if (value := _planned(quantity, test)) is not None else {}
        if quantity.name == LARGEST_RATE and _may_still_warm_up(value, summary.ran.get(LARGEST_RATE, {})):
            values = {}
        values |= summary.ran.get(quantity.name, {})
        if quantity.of_data in summary.ran:
            values["the data"] = next(iter(summary.ran[quantity.of_data].values()))
        found[quantity.name] = values
    if gpu := record.facts.get("GPU"):
        found["GPU"] = {**({"planned": planned} if (planned := _gpu_type(test)) else {}), "nvidia-smi": gpu}
    return found


def ran_otherwise(before: HistoryRow, summary: Summary) -> str:
    """What a run's configuration has otherwise than an earlier run's, in words: no fault, a recipe may have changed."""
    pairs = (
        (quantity.name, *(ran.get(quantity.name, {}).get(CONFIGURED) for ran in (before.summary.ran, summary.ran)))
        for quantity in QUANTITIES
    )
    changed = [
        f"{name} {_text(old)} → {_text(new)}"
        for name, old, new in pairs
        if old is not None and new is not None and old != new
    ]
    return f"ran otherwise than in {before.night}, by its configuration: {', '.join(changed)}" if changed else ""


def logs_otherwise(before: HistoryRow, summary: Summary) -> str:
    """At which other interval a run logs than an earlier one, in words: steps, curves and start-up differ by that."""
    was, now = (ran.get(INTERVALS, {}) for ran in (before.summary.ran, summary.ran))
    changed = [
        f"{source} {_text(was[source])} → {_text(now[source])}"
        for source in was
        if source in now and was[source] != now[source]
    ]
    if not changed:
        return ""
    return (
        f"logs at another interval than in {before.night}, iterations a record: {', '.join(changed)}; single steps, "
        "curves and start-up are not measured as they were"
    )


def _planned(quantity: Quantity, test: TestDefinition) -> Scalar | None:
    if quantity.name == "world size":
        return num_gpus(test)
    if quantity.name == "iterations":
        return test.max_steps
    overrides = {name.lstrip("+"): value for name, value in test.extra_cmd_args.items()}
    written = [
        table[name]
        for table, name in ((test.cmd_args, quantity.argument), (overrides, quantity.override))
        if name in table
    ]
    if len(written) != 1 or written[0] in (None, ""):
        return None
    if quantity.name == "precision":
        return str(written[0]).removeprefix("nv")
    try:
        return float(written[0])
    except (TypeError, ValueError):  # an interpolation, which only the run itself can resolve
        return None


def _may_still_warm_up(planned: Scalar | None, rates: Mapping[str, Scalar]) -> bool:
    """Whether a run may have stayed below its planned rate because its warm-up is longer than itself.

    Only its configuration knows the recipe's warm-up: where that ends in time, the configuration names the rate, too.
    """
    return CONFIGURED not in rates and all(
        isinstance(rate, float | int) and isinstance(planned, float | int) and 0 < rate < planned
        for rate in rates.values()
    )


def _gpu_type(test: TestDefinition) -> str:
    return str(test.cmd_args.get("gpu_type") or "").lower()


def _contradictions(record: RunRecord) -> Iterator[str]:
    tolerances = {quantity.name: quantity.tolerance for quantity in QUANTITIES}
    intervals = record.summary.ran.get(INTERVALS, {})
    some = frozenset(source for source, iterations in intervals.items() if iterations != 1)
    for name, values in quantities_by_source(record).items():
        if record.summary.start_step and name in NOT_AFTER_RESUME:
            continue
        first, *others = values.items() or (("", ""),)
        sparse = some if name == LARGEST_RATE else frozenset()
        if all(_agree(first, other, tolerances.get(name, 0.0), sparse) for other in others):
            continue
        sources = [
            f"{_text(value)} {source if source == 'planned' else f'by {source}'}" for source, value in values.items()
        ]
        yield f"not what was planned, {name}: {', '.join(sources)}"


def _lost_resume(record: RunRecord) -> Iterator[str]:
    """Where the folder has no checkpoint Megatron-LM warns, and starts from scratch."""
    path = resumed_from(record.spec.test)
    if path and not record.summary.start_step:
        yield (
            f"not what was planned, start: iteration 0, where {path} was to be resumed; with "
            "`checkpoint.finetune=true` a run that takes its weights alone begins there"
        )


def _agree(one: tuple[str, Scalar], other: tuple[str, Scalar], tolerance: float, sparse: Collection[str]) -> bool:
    """Whether two sources give the same value; one of `sparse` may have missed the largest, and be further below."""
    (_, left), (_, right) = one, other
    if isinstance(left, float | int) and isinstance(right, float | int):
        (low, below), (high, _) = sorted([(left, one[0]), (right, other[0])])
        tolerance = SOME_RATES_TOLERANCE if below in sparse else tolerance
        return high == low or (low > 0 and high <= low * (1 + tolerance) * (1 + 1e-6))
    # `fp8` is any of fp8_cs, fp8_mx and fp8_sc, and `h100` one word of "H100 80GB HBM3".
    small, large = sorted((str(left).lower(), str(right).lower()), key=len)
    return small in re.split(r"[\W_]+", large)


def _text(value: Scalar) -> str:
    return value if isinstance(value, str) else f"{value:.6g}"


def _impossible_losses(record: RunRecord) -> Iterator[str]:
    summary = record.summary
    if summary.loss_min is None or summary.loss_max is None:
        return
    if summary.loss_min <= 0:
        yield f"impossible: a loss of {summary.loss_min:.4g}; a cross-entropy is positive"
    if summary.loss_max - summary.loss_min <= 1e-6 * abs(summary.loss_max) and summary.steps_done >= FEW_STEPS:
        yield f"impossible: the loss is {summary.loss_max:.4g} at every iteration; nothing was learned"


def _lost_updates(record: RunRecord) -> Iterator[str]:
    summary, gate = record.summary, record.spec.test.gate
    smallest, largest = summary.grad_norm_min, summary.grad_norm_max
    # Without clipping Megatron-LM does not compute the norm and logs 0. The log rounds a small one to 0.
    clipped = 0 not in summary.ran.get("gradient clipping", {}).values()
    if smallest is not None and smallest < 0:
        yield f"impossible: a gradient norm of {smallest:.4g}; a norm is never negative"
    elif clipped and smallest is not None and (smallest if summary.source == "tensorboard" else largest) == 0:
        yield "impossible: a gradient norm of 0; no gradient reached the optimizer"
    for what, count, most in (
        ("skipped", summary.skipped_iterations, gate.skipped_iterations),
        ("NaN", summary.nan_iterations, gate.nan_iterations),
    ):
        if count and count > most:
            yield f"{format_count(count, 'iteration')} counted as {what} by the log, {most} allowed"


def _impossible_speeds(record: RunRecord) -> Iterator[str]:
    summary, test = record.summary, record.spec.test
    gpu = GPUS.get(_gpu_type(test))
    if gpu is None:
        return
    # An override or the recipe may choose what the arguments do not say; the run's own configuration then does.
    said = " ".join(map(str, quantities_by_source(record)["precision"].values()))
    precision, peak = next(
        ((name, value) for name, value in (("fp4", gpu.fp4), ("fp8", gpu.fp8)) if name in said), ("bf16", gpu.bf16)
    )
    if summary.tflops_per_gpu is not None and summary.tflops_per_gpu > BOOST * peak:
        yield (
            f"impossible: {format_value(summary.tflops_per_gpu, 'TFLOP/s')} per GPU, where {_gpu_type(test)} does "
            f"{peak:g} in {precision}"
        )
    if summary.step_time and summary.model_flops:
        least = summary.model_flops / (num_gpus(test) * BOOST * peak * 1e12)
        if summary.step_time < least:
            step = format_value(summary.step_time, "s")
            yield f"impossible: {step} a step, for which {_gpu_type(test)} needs {least:.3g} s"
    named = re.search(r"(\d+) ?GB", record.facts.get("GPU", ""))
    memory = int(named[1]) * 2**30 / 1e9 if named else gpu.memory
    if summary.peak_memory is not None and summary.peak_memory > memory:
        yield f"impossible: {format_value(summary.peak_memory, 'GB')} of memory on a GPU that has {memory:.0f} GB"


# --- what is there of it --------------------------------------------------------------------------------------------


def missing_steps(record: RunRecord, baseline: Sequence[HistoryRow]) -> tuple[str, ...]:
    """Why the run is short. The number of steps is the requested one, else what its recipe makes it."""
    done = record.summary.steps_done
    requested = (record.summary.steps_expected, record.plan.max_steps, record.spec.test.max_steps)
    expected = max((steps for steps in requested if steps is not None), default=None)
    if expected is None:
        expected = _usual_steps(record.summary, baseline)
    start = record.summary.start_step
    if start and not resumed_from(record.spec.test):
        return (
            f"{max(done - start, 0)} of {expected} steps recorded: resumed at iteration {start}, which is not planned",
        )
    return (f"{done} of {expected} steps recorded",) if done < expected else ()


def _usual_steps(summary: Summary, baseline: Sequence[HistoryRow]) -> int:
    """The steps of earlier runs of as long a recipe; else all of its own, unless earlier ones stopped before theirs.

    Args:
        summary: Of a run whose recipe decides how long it is.
        baseline: Earlier good runs, oldest first.
    """
    planned, earlier = _length_of(summary), [row.summary for row in baseline]
    alike = [one for one in earlier if planned is None or _length_of(one) == planned]
    if planned is None or alike or not earlier:
        return max((one.steps_done for one in alike), default=1)
    before, length = earlier[-1], _length_of(earlier[-1])
    # Of a release that did not read how long its recipe was it is not known whether it stopped before.
    return planned if length and before.steps_done >= length else min(planned, before.steps_done)


def _length_of(summary: Summary) -> int | None:
    """The iterations that a run was going to do, as it said itself; None where it did not."""
    said = next(iter(summary.ran.get("iterations", {}).values()), None)
    return int(said) if isinstance(said, float | int) and said > 0 else None


def wrong_data(summary: Summary) -> tuple[str, ...]:
    """What is wrong with what the run measured, apart from its length."""
    steps = summary.non_finite_steps
    non_finite = (f"{format_count(steps, 'step')} without a finite loss or gradient norm",) if steps else ()
    return non_finite + tuple(f"damaged data: {damage}" for damage in summary.damage)


def damaged_checkpoints(record: RunRecord) -> tuple[str, ...]:
    """Which of its checkpoints cannot be believed, one that was whole and could not be stored among them."""
    return tuple(
        f"damaged checkpoint {checkpoint.path.name}: {checkpoint.reason}"
        for checkpoint in record.checkpoints
        if checkpoint.state is CheckpointState.DAMAGED
    )


def missing_checkpoints(record: RunRecord) -> tuple[str, ...]:
    """Which checkpoints a run that did all its steps has not left, where its test keeps any.

    That alone makes no run bad: a save can be switched off in ways that are unknown here, and what looks half written
    by its names may be another program's.
    """
    kept = record.spec.test.harvest.checkpoint
    if kept == "none":
        return ()
    if not record.checkpoints:
        return (f'no checkpoint was left, although harvest.checkpoint is "{kept}"',)
    return tuple(
        f"the checkpoint {checkpoint.path.name} is half written and not stored: {checkpoint.reason}"
        for checkpoint in record.checkpoints
        if checkpoint.state is CheckpointState.IN_PROGRESS
    )
