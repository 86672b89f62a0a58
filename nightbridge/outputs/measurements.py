"""The summary of a run: what it did, how fast, with how much memory, to what loss.

The steady window. With S the iteration that the run started from (0 unless it resumed) and D the last iteration done,
the first `warmup_steps` iterations after S are left out; when D - S is less than twice that, the first half is. The
window is all recorded iterations from there to D, but for those that a profiler slowed. Its medians and percentiles
need a finite value at every recorded iteration of the window, or at every one of the metric's own longer interval: a
statistic over the part that happened to be recorded could hide the part that went wrong. A run that was restarted warms
up again: as many iterations of each later life are left out as well, where others remain. So is what is recorded of an
interval that begins among the first `warmup_steps`: its mean step time has their compilation in it.

What the measurements need to know of the run's configuration (GPUs, tokens of one step, profiled steps) is taken from
the dumped `ConfigContainer.yaml` where there is one, since it is what really ran; the test file is the fallback.
"""

import hashlib
import itertools
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from pydantic import Field

from nightbridge.launch.config_container import model_flops
from nightbridge.launch.launch_plan import ProfiledSteps, profiled_steps, steps_profiled
from nightbridge.launch.resources import num_gpus
from nightbridge.models import GatePolicy, Job, LaunchPlan, Model, RunSpec, Summary
from nightbridge.models.metrics import METRICS
from nightbridge.outputs.curves import LOG_FILE, STEP_COLUMNS, Curves, logging_interval, read_curves, value_of
from nightbridge.outputs.event_files import metrics_parquet
from nightbridge.outputs.experiment import RunOutput, dumped_container, read_facts, read_files, read_run
from nightbridge.outputs.logs import latest_steps
from nightbridge.outputs.reader_process import read_in_child
from nightbridge.outputs.run_evidence import BATCH_SIZE_TAG, WORLD_SIZE_TAG, RunToRead, dumped, what_ran
from nightbridge.outputs.training_report import training_report
from nightbridge.slurm.attempt_files import unreadable_numbers

if TYPE_CHECKING:
    import pandas as pd


class RunSettings(Model):
    """What measurements need to know; None where unknown."""

    num_gpus: int | None = None
    global_batch_size: int | None = None
    sequence_length: int | None = None
    profiled: ProfiledSteps | None = None
    dumped: dict[str, float | str] = Field({}, description="What its configuration plans, by `Summary.ran`'s names.")
    model_flops: float | None = Field(None, description="As in `Summary`.")


def read_settings(spec: RunSpec, config_container: Path | None) -> RunSettings:
    """The settings of a run, from what it dumped and, for what that does not say, from its test.

    A `ConfigContainer.yaml` that is no ConfigContainer is passed over.
    """
    requested, container = _requested(spec), dumped_container(config_container)
    if container is None:
        return requested
    return RunSettings(
        num_gpus=requested.num_gpus,
        global_batch_size=container.integer("train.global_batch_size") or requested.global_batch_size,
        sequence_length=(
            container.integer("model.seq_length")
            or container.integer("dataset.seq_length")
            or requested.sequence_length
        ),
        profiled=steps_profiled(
            container.integer("profiling.profile_step_start") or 0,
            container.integer("profiling.profile_step_end") or 0,
            nsys=container.is_on("profiling.use_nsys_profiler"),
            pytorch=container.is_on("profiling.use_pytorch_profiler"),
        ),
        dumped=dumped(container),
        model_flops=model_flops(container),
    )


def _requested(spec: RunSpec) -> RunSettings:
    args = spec.test.cmd_args
    return RunSettings(
        num_gpus=num_gpus(spec.test),
        global_batch_size=args.get("gb"),
        sequence_length=args.get("seq_length"),
        profiled=profiled_steps(args),
    )


_ANCHORS = 5


def loss_digest(curves: Curves) -> str | None:
    """`<source>:<sha256>` over every recorded iteration and its loss, None without a loss.

    Hashed are, in ascending order, the iteration as 8 and the loss as 8 bytes (int64 and IEEE double, little endian;
    any NaN is the same NaN). The source is `tensorboard`, `log`, or `mixed`: the log rounds to seven digits, so only
    digests of one source can be compared.
    """
    losses = curves.steps["loss"]
    if not losses.notna().any():
        return None
    pairs = np.empty(len(losses), dtype=[("step", "<i8"), ("loss", "<f8")])
    pairs["step"] = losses.index.to_numpy()
    pairs["loss"] = np.where(losses.isna(), np.nan, losses.to_numpy())
    of_log = curves.rows_of(STEP_COLUMNS["loss"].tag)["file"] == LOG_FILE
    source = "log" if of_log.all() else "mixed" if of_log.any() else "tensorboard"
    return f"{source}:{hashlib.sha256(pairs.tobytes()).hexdigest()}"


def loss_anchors(curves: Curves) -> "tuple[tuple[int, float], ...]":
    """A few points of the curve, first and last among them, to see at a glance where two curves part."""
    losses: pd.Series[float] = curves.steps["loss"]
    finite = losses[losses.map(math.isfinite)]
    last = len(finite) - 1
    positions = sorted({round(last * part / (_ANCHORS - 1)) for part in range(_ANCHORS)}) if len(finite) else []
    return tuple((int(finite.index[position]), float(finite.iloc[position])) for position in positions)


_NORMAL_SIGMA = 1.4826
"""The standard deviation of a normal distribution in units of its median absolute deviation."""

_TAIL_SHARE, _MIN_TAIL = 0.05, 3
"""The last steps are this share of the steady window, and at least so many: one slow step among them is no news."""


class RunToMeasure(RunToRead):
    """A run to be measured."""

    spec: RunSpec
    pinned: tuple[str, ...] = ()
    """Commits of the checked-out repositories (`experiment.read_facts`)."""


class MeasuredRun(Model):
    """A run's output, and what was measured of it. Of `earlier` attempts the logs and curves are stored as well."""

    output: RunOutput
    summary: Summary
    earlier: tuple[RunOutput, ...] = ()
    facts: dict[str, str] = Field({})
    training_report: dict[str, Any] | None = None


def measure_run(run: RunToMeasure) -> tuple[MeasuredRun, bytes]:
    """Find and measure a run's output in a child; also returns the content of `metrics.parquet`.

    Raises:
        DamagedData: Its output cannot be read.
    """
    return read_in_child(_measure_run, run, run.roots, subject=run.job.name)


def _measure_run(run: RunToMeasure) -> tuple[MeasuredRun, bytes]:
    plan = run.plan
    output = read_run(run.job, plan.output_dir, plan.checkpoint_dir)
    settings = read_settings(run.spec, output.config_container)
    curves = read_curves(output.event_files, output.logs)
    summary = summarise(curves, run.spec.test.gate, plan.max_steps, settings, run.job)
    damage = (*summary.damage, *unreadable_numbers(run.job.attempt_dir))
    teardown = None if run.spec.arm else summary.teardown_time  # an arm saves nothing then, as its night's own run does
    summary = summary.model_copy(update={"damage": damage, "teardown_time": teardown})
    earlier = tuple(read_files(job, _output_dir_of(job, plan)) for job in run.jobs[:-1])
    facts = read_facts(output, run.job, run.pinned)
    report = _report(run, output, curves.table, summary)
    measured = MeasuredRun(output=output, summary=summary, earlier=earlier, facts=facts, training_report=report)
    return measured, metrics_parquet(curves.table)


def _report(run: RunToMeasure, output: RunOutput, table: "pd.DataFrame", summary: Summary) -> dict[str, Any] | None:
    """CloudAI's report, where the test asks for it and the run dumped its configuration."""
    test = run.spec.test
    container = dumped_container(output.config_container) if test.harvest.training_report else None
    if container is None:
        return None
    return training_report(table, summary, container, test, num_gpus(test), run.plan.nodes)


def _output_dir_of(earlier: Job, plan: LaunchPlan) -> Path | None:
    """Where an earlier attempt wrote: where the last one's plan has it, below the earlier attempt's own folder."""
    if plan.output_dir is None or not plan.output_dir.is_relative_to(plan.attempt_dir):
        return None
    return earlier.attempt_dir / plan.output_dir.relative_to(plan.attempt_dir)


_VALIDATION_TAG = "lm loss validation"


def summarise(
    curves: Curves, gate: GatePolicy, steps_expected: int | None, settings: RunSettings, job: Job | None
) -> Summary:
    """Summarise curves, where None means not measured; see the module for the steady window.

    Of `gate` only `warmup_steps` and `post_profiling_steps` are used. `steps_expected` are the iterations that the run
    had to reach; None when the recipe decides. `job` has the times that Slurm knows.
    """
    warm = _after_warmup(curves, gate)
    profiled = settings.profiled
    if profiled is not None:
        profiled = profiled.model_copy(update={"last": profiled.last + gate.post_profiling_steps})
    window = _without_profiled(warm, curves, profiled)
    early = _without_profiled(curves.steps[~curves.steps.index.isin(warm.index)], curves, profiled)
    damage = list(curves.damage)
    if curves.missing_steps:
        damage.append(f"{curves.missing_steps} iterations up to {curves.steps_done} were not recorded")
    times, rates = curves.due("step_time", window), curves.due("tflops_per_gpu", window)
    for name, values in (("step_time", times), ("tflops_per_gpu", rates)):
        present = len(_finite(values))
        # A metric that never occurs was not requested; one that occurs only at times was lost.
        if 0 < present < len(values):
            lost = f"{len(values) - present} of {len(values)} steady iterations"
            damage.append(f"`{STEP_COLUMNS[name].tag}` is missing or not finite at {lost}")
    evaluated = curves.rows_of(_VALIDATION_TAG)["value"]
    if bad := len(evaluated) - len(_finite(evaluated)):
        damage.append(f"`{_VALIDATION_TAG}` is not finite at {bad} of {len(evaluated)} evaluations")
    grad_norms, losses = _finite(curves.steps["grad_norm"]), _finite(curves.steps["loss"])
    logged = latest_steps(curves.log.steps).values()
    of_times = _statistics("step_time", times)
    step_time, p95 = of_times.get("step_time"), of_times.get("step_time_p95")
    measured: dict[str, Any] = {
        **{metric.field: value_of(metric, curves, window) for metric in METRICS if metric.reduce is not None},
        **of_times,
        **_statistics("tflops_per_gpu", rates),
    }
    return Summary(
        steps_expected=steps_expected,
        steps_done=curves.steps_done,
        start_step=curves.start,
        steady_first_step=int(window.index[0]) if len(window) else None,
        steady_last_step=int(window.index[-1]) if len(window) else None,
        steady_steps=len(window),
        profiled_steps=len(warm) - len(window),
        step_time_midmean=_midmean(times),
        wall_step_time=_wall_step_time(curves, times),
        slow_steps=p95 / step_time if p95 is not None and step_time else None,
        slow_pattern=slow_pattern(times),
        warmup_step_time=_wall_step_time(
            curves, curves.due("step_time", early[early.index > curves.start + 1]), since=curves.start + 1
        ),
        first_step_time=_mean(early[early.index == curves.start + 1]["step_time"]),
        tail_slowdown=tail_slowdown(times),
        tokens_per_second_per_gpu=_tokens_per_second(curves, window, step_time, settings),
        final_loss=_final_loss(curves, steps_expected),
        loss_min=float(losses.min()) if len(losses) else None,
        loss_max=float(losses.max()) if len(losses) else None,
        loss_digest=loss_digest(curves),
        loss_anchors=loss_anchors(curves),
        grad_norm_min=float(grad_norms.min()) if len(grad_norms) else None,
        grad_norm_max=float(grad_norms.max()) if len(grad_norms) else None,
        non_finite_steps=curves.non_finite_steps,
        nan_iterations=sum(step.nan_iterations for step in logged) if logged else None,
        skipped_iterations=sum(step.skipped_iterations for step in logged) if logged else None,
        ran=what_ran(curves, settings.dumped),
        model_flops=settings.model_flops,
        queue_time=queue_time(job),
        startup_time=startup_time(curves, job),
        teardown_time=teardown_time(curves, job),
        source=curves.source,
        lives=curves.lives,
        damage=tuple(damage),
        notes=curves.notes,
        **measured,
    )


def _after_warmup(curves: Curves, gate: GatePolicy) -> "pd.DataFrame":
    dropped = gate.warmup_of(max(curves.steps_done - curves.start, 0))
    window = curves.steps[curves.steps.index > curves.start + dropped]
    steady = window
    for life in curves.lives[1:]:
        steady = steady[(steady.index < life.first_step) | (steady.index >= life.first_step + dropped)]
    window = steady if len(steady) else window
    interval = curves.interval_of("step_time")
    with_warmup = (window.index % interval == 0) & (window.index - interval < curves.start + dropped)
    steady = window[~with_warmup]
    return steady if steady["step_time"].notna().any() else window


def _without_profiled(steps: "pd.DataFrame", curves: Curves, profiled: ProfiledSteps | None) -> "pd.DataFrame":
    if profiled is None:
        return steps
    interval = max(logging_interval(curves.steps.index.tolist()), curves.interval_of("step_time"))
    return steps.drop([iteration for iteration in steps.index if profiled.spoils(iteration, interval)])


def _statistics(name: str, values: "pd.Series[float]") -> dict[str, float | None]:
    """Fields of `Summary`: the median and, linear between neighbours, quantiles over the steady window.

    None without values, or when one is not a finite number.
    """
    if not _is_complete(values):
        return {}
    p05, median, p95 = (float(values.quantile(quantile)) for quantile in (0.05, 0.5, 0.95))
    deviation = float((values - median).abs().median())
    spread = _NORMAL_SIGMA * deviation / abs(median) if median else None
    return {name: median, f"{name}_p05": p05, f"{name}_p95": p95, f"{name}_spread": spread}


def _midmean(values: "pd.Series[float]") -> float | None:
    """The mean of the middle half; None as for `_statistics`."""
    if not _is_complete(values):
        return None
    quarter = len(values) // 4
    return float(values.sort_values().iloc[quarter : len(values) - quarter].mean())


def _mean(values: "pd.Series[float]") -> float | None:
    """None as for `_statistics`."""
    return float(values.mean()) if _is_complete(values) else None


def _wall_step_time(curves: Curves, values: "pd.Series[float]", since: int | None = None) -> float | None:
    """The mean step time, or more where the events' own times say that there were pauses between the steps.

    The pause of a restart is the machine's. `since`: the step with whose end the first of them began; None where a
    pause before that one is none of theirs.
    """
    mean = _mean(values)
    if mean is None:
        return None
    first = values.index[0] if since is None else since
    recorded = _step_times(curves)
    is_theirs = recorded["step"].isin(values.index) | (recorded["step"] == first)
    times = recorded[is_theirs].groupby("step")["wall_time"].max()
    if len(times) < 2 or times.index[-1] - times.index[0] != values.index[-1] - first:
        return mean
    life = np.searchsorted(sorted(life.first_step for life in curves.lives[1:]), times.index, side="right")
    same = np.diff(life) == 0
    steps = int(np.diff(times.index)[same].sum())
    return max(mean, float(np.diff(times)[same].sum()) / steps) if steps else mean


_SLOW = 1.2
"""A step is slow that takes so many times the median."""


def slow_pattern(values: "pd.Series[float]") -> str:
    """Which steps are slow: `8 of 40 steps take 2.0 times as long, every 5 steps`; empty where none is."""
    median = float(values.median()) if len(values) else math.nan
    slow = values[values > _SLOW * median]
    if not len(slow) or not median:
        return ""
    distances = {later - earlier for earlier, later in itertools.pairwise(slow.index.tolist())}
    which = ""
    if len(distances) == 1 and len(slow) > 2:
        distance = distances.pop()
        which = f", every {distance} steps" if distance > 1 else f", {slow.index[0]} to {slow.index[-1]}"
    return f"{len(slow)} of {len(values)} steps take {float(slow.median()) / median:.1f} times as long{which}"


def tail_slowdown(values: "pd.Series[float]") -> float | None:
    """How slow the last steps are against all; None where the window is too short to have an end of its own."""
    steps = max(_MIN_TAIL, math.ceil(_TAIL_SHARE * len(values)))
    if len(values) < 3 * steps or not _is_complete(values):
        return None
    median = float(values.median())
    return float(values.iloc[-steps:].median()) / median if median else None


def _tokens_per_second(
    curves: Curves, window: "pd.DataFrame", step_time: float | None, settings: RunSettings
) -> float | None:
    """Tokens per second and GPU over the window: from batch, sequence, step time and GPUs, else as the run says.

    The run's own tag is there only once its averaging window, 100 iterations by default, is full.
    """
    batch = _recorded(curves, window, BATCH_SIZE_TAG) or settings.global_batch_size
    gpus = _recorded(curves, window, WORLD_SIZE_TAG) or settings.num_gpus
    if batch and gpus and settings.sequence_length and step_time:
        return batch * settings.sequence_length / step_time / gpus
    return _recorded(curves, window, "throughput/device/tokens_per_sec")


def _recorded(curves: Curves, window: "pd.DataFrame", tag: str) -> float | None:
    """The median of a tag over the window, None where it was not recorded."""
    rows = curves.rows_of(tag)
    values = rows.loc[rows["step"].isin(window.index), "value"]
    return float(values.median()) if _is_complete(values) else None


def _is_complete(values: "pd.Series[float]") -> bool:
    """Whether there are values, and all of them are finite numbers."""
    return 0 < len(values) == len(_finite(values))


def _finite(values: "pd.Series[float]") -> "pd.Series[float]":
    return values[np.isfinite(values)]


def _final_loss(curves: Curves, steps_expected: int | None) -> float | None:
    """The loss at the last expected iteration, or the last one done when nothing is expected."""
    last = steps_expected if steps_expected is not None else curves.steps_done
    if last == curves.steps_done:
        last = curves.last_recorded  # the last record of a longer interval is the mean up to there
    losses = _finite(curves.steps["loss"])
    return float(losses.loc[last]) if last in losses.index else None


def queue_time(job: Job | None) -> float | None:
    """Seconds from the submission of a job to its start; None when the cluster does not say both."""
    if job is None or job.status is None or job.status.started_at is None:
        return None
    submitted = job.status.submitted_at or job.submitted_at
    return max((job.status.started_at - submitted).total_seconds(), 0.0)


def startup_time(curves: Curves, job: Job | None) -> float | None:
    """Seconds from the start of a job to the beginning of its first iteration.

    An event is written when its iteration is over, so the iteration's own time, which compilation makes a long one, is
    taken off. Negative where the first one is older than the job by Slurm's clock, which is no measurement; the gate
    says so. None where no event file has step times (the log's clock has no time zone).
    """
    if job is None or job.status is None or job.status.started_at is None:
        return None
    recorded = _step_times(curves)
    if not len(recorded):
        return None
    first = recorded.sort_values("wall_time").iloc[0]
    iterations = min(logging_interval(sorted(set(recorded["step"].tolist()))), int(first["step"]) - curves.start)
    began = float(first["wall_time"]) - iterations * float(first["value"])
    return began - job.status.started_at.timestamp()


_SHORT_TEARDOWN = 180.0
"""Seconds after the last step of which fewer count as so many: such a time is noise, and no job that hangs."""

_SAME_CLOCK = 5.0
"""Seconds by which two clocks may be apart without a word; Slurm's counts whole ones."""


def teardown_time(curves: Curves, job: Job | None) -> float | None:
    """Seconds from the end of a job's last recorded iteration to its own end, `_SHORT_TEARDOWN` at least.

    The last save and evaluation are in it. Negative where the iteration is younger than the job's end by Slurm's clock,
    which is no measurement; the gate says so. None where no event file has step times, where Slurm does not know the
    end, and where the iteration is older than the job's start, as of one that was requeued.
    """
    status = job.status if job else None
    if status is None or status.started_at is None or status.ended_at is None:
        return None
    last = float(_step_times(curves)["wall_time"].max())
    if not last >= status.started_at.timestamp():
        return None
    elapsed = status.ended_at.timestamp() - last
    return elapsed if elapsed < -_SAME_CLOCK else max(elapsed, _SHORT_TEARDOWN)


def _step_times(curves: Curves) -> "pd.DataFrame":
    table = curves.table
    usable = (
        (table["tag"] == STEP_COLUMNS["step_time"].tag) & (table["file"] != LOG_FILE) & (table["step"] > curves.start)
    )
    found: pd.DataFrame = table.loc[usable & np.isfinite(table["wall_time"]) & np.isfinite(table["value"])]
    return found
