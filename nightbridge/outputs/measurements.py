"""The summary of a run: what it did, how fast, with how much memory, to what loss.

The steady window. With S the iteration that the run started from (0 unless it resumed) and D the last iteration done,
the first `warmup_steps` iterations after S are left out; when D - S is less than twice that, the first half is. The
window is all recorded iterations from there to D, but for those that a profiler slowed. Its medians and percentiles
need a finite value at every recorded iteration of the window: a statistic over the part that happened to be recorded
could hide the part that went wrong.
"""

import math
from typing import TYPE_CHECKING, NamedTuple

from nightbridge.models import GatePolicy, Job, Summary
from nightbridge.outputs.curves import METRICS, Curves, logging_interval, read_curves
from nightbridge.outputs.durations import checkpoint_time, queue_time, startup_time
from nightbridge.outputs.experiment import RunOutput
from nightbridge.outputs.logs import latest_steps
from nightbridge.outputs.loss_curve import loss_anchors, loss_digest
from nightbridge.outputs.settings import ProfiledSteps, RunSettings

if TYPE_CHECKING:
    import pandas as pd

_NORMAL_SIGMA = 1.4826
"""The standard deviation of a normal distribution in units of its median absolute deviation."""

_TAIL_SHARE, _MIN_TAIL = 0.05, 3
"""The last steps are this share of the steady window, and at least so many: one slow step among them is no news."""

_BATCH_SIZE_TAG = "batch-size"
_WORLD_SIZE_TAG = "world-size"
_TOKENS_TAG = "throughput/device/tokens_per_sec"


def measure(
    output: RunOutput,
    gate: GatePolicy,
    steps_expected: int | None,
    settings: RunSettings | None = None,
    job: Job | None = None,
) -> "tuple[Summary, pd.DataFrame]":
    """Measure a run from its event files and logs.

    Args:
        output: What the run left.
        gate: Only `warmup_steps` is used.
        steps_expected: The iterations that the run had to reach; None when the recipe decides.
        settings: How the run was configured (`settings.read_settings`).
        job: The job, for the times that Slurm knows.

    Returns:
        The summary, where None means not measured, and the scalar table for `metrics.parquet`
        (`event_files.COLUMNS`; rows from the log have the file `log`).

    """
    curves = read_curves(output.event_files, output.logs)
    return summarise(curves, gate, steps_expected, settings or RunSettings(), job), curves.table


def summarise(
    curves: Curves, gate: GatePolicy, steps_expected: int | None, settings: RunSettings, job: Job | None
) -> Summary:
    """Summarise curves; see the module for the steady window."""
    warm = _after_warmup(curves, gate.warmup_steps)
    window = _without_profiled(warm, curves, settings.profiled)
    damage = list(curves.damage)
    if curves.missing_steps:
        damage.append(f"{curves.missing_steps} iterations up to {curves.steps_done} were not recorded")
    for name in ("step_time", "tflops_per_gpu"):
        present = len(_finite(window[name]))
        # A metric that never occurs was not requested; one that occurs only at times was lost.
        if 0 < present < len(window):
            lost = f"{len(window) - present} of {len(window)} steady iterations"
            damage.append(f"`{METRICS[name].tag}` is missing or not finite at {lost}")
    step_time, tflops = _statistics(window["step_time"]), _statistics(window["tflops_per_gpu"])
    grad_norms = _finite(curves.steps["grad_norm"])
    logged = latest_steps(curves.log.steps).values()
    return Summary(
        steps_expected=steps_expected,
        steps_done=curves.steps_done,
        steady_first_step=int(window.index[0]) if len(window) else None,
        steady_last_step=int(window.index[-1]) if len(window) else None,
        steady_steps=len(window),
        profiled_steps=len(warm) - len(window),
        step_time=step_time.median,
        step_time_p05=step_time.p05,
        step_time_p95=step_time.p95,
        step_time_midmean=step_time.midmean,
        step_time_spread=step_time.spread,
        tail_slowdown=tail_slowdown(window["step_time"]),
        tflops_per_gpu=tflops.median,
        tflops_per_gpu_p05=tflops.p05,
        tflops_per_gpu_p95=tflops.p95,
        tflops_per_gpu_spread=tflops.spread,
        tokens_per_second_per_gpu=_tokens_per_second(curves, window, step_time.median, settings),
        peak_memory=curves.peak_memory,
        final_loss=_final_loss(curves, steps_expected),
        loss_digest=loss_digest(curves),
        loss_anchors=loss_anchors(curves),
        grad_norm_min=float(grad_norms.min()) if len(grad_norms) else None,
        grad_norm_max=float(grad_norms.max()) if len(grad_norms) else None,
        non_finite_steps=curves.non_finite_steps,
        nan_iterations=sum(step.nan_iterations for step in logged) if logged else None,
        skipped_iterations=sum(step.skipped_iterations for step in logged) if logged else None,
        queue_time=queue_time(job),
        startup_time=startup_time(curves, job),
        checkpoint_time=checkpoint_time(curves.log),
        source=curves.source,
        damage=tuple(damage),
        notes=curves.notes,
    )


def _after_warmup(curves: Curves, warmup_steps: int) -> "pd.DataFrame":
    done = max(curves.steps_done - curves.start, 0)
    dropped = warmup_steps if done >= 2 * warmup_steps else done // 2
    return curves.steps[curves.steps.index > curves.start + dropped]


def _without_profiled(steps: "pd.DataFrame", curves: Curves, profiled: ProfiledSteps | None) -> "pd.DataFrame":
    if profiled is None:
        return steps
    interval = logging_interval(curves.steps.index.tolist())
    return steps[[not profiled.spoils(iteration, interval) for iteration in steps.index]]


class _Statistics(NamedTuple):
    """Of one metric over the steady window; all None where it was not measured."""

    median: float | None = None
    p05: float | None = None
    p95: float | None = None
    midmean: float | None = None
    spread: float | None = None


def _statistics(values: "pd.Series[float]") -> _Statistics:
    """Quantiles (linear between neighbours) and so on; none without values, or when one is not a finite number."""
    if not len(values) or len(_finite(values)) < len(values):
        return _Statistics()
    p05, median, p95 = (float(values.quantile(quantile)) for quantile in (0.05, 0.5, 0.95))
    deviation = float((values - median).abs().median())
    quarter = len(values) // 4
    midmean = float(values.sort_values().iloc[quarter : len(values) - quarter].mean())
    return _Statistics(median, p05, p95, midmean, _NORMAL_SIGMA * deviation / abs(median) if median else None)


def tail_slowdown(values: "pd.Series[float]") -> float | None:
    """How slow the last steps are against all; None where the window is too short to have an end of its own."""
    steps = max(_MIN_TAIL, math.ceil(_TAIL_SHARE * len(values)))
    if len(values) < 3 * steps or len(_finite(values)) < len(values):
        return None
    median = float(values.median())
    return float(values.iloc[-steps:].median()) / median if median else None


def _tokens_per_second(
    curves: Curves, window: "pd.DataFrame", step_time: float | None, settings: RunSettings
) -> float | None:
    """Tokens per second and GPU over the window: from batch, sequence, step time and GPUs, else as the run says.

    The run's own tag is there only once its averaging window, 100 iterations by default, is full.
    """
    batch = _recorded(curves, window, _BATCH_SIZE_TAG) or settings.global_batch_size
    gpus = _recorded(curves, window, _WORLD_SIZE_TAG) or settings.num_gpus
    if batch and gpus and settings.sequence_length and step_time:
        return batch * settings.sequence_length / step_time / gpus
    return _recorded(curves, window, _TOKENS_TAG)


def _recorded(curves: Curves, window: "pd.DataFrame", tag: str) -> float | None:
    """The median of a tag over the window, None where it was not recorded."""
    table = curves.table
    values = table.loc[(table["tag"] == tag) & ~table["superseded"] & table["step"].isin(window.index), "value"]
    return float(values.median()) if len(values) and len(_finite(values)) == len(values) else None


def _finite(values: "pd.Series[float]") -> "pd.Series[float]":
    import numpy as np

    return values[np.isfinite(values)]


def _final_loss(curves: Curves, steps_expected: int | None) -> float | None:
    """The loss at the last expected iteration, or the last one done when nothing is expected."""
    last = steps_expected if steps_expected is not None else curves.steps_done
    losses = _finite(curves.steps["loss"])
    return float(losses.loc[last]) if last in losses.index else None
