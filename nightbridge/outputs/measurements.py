"""The summary of a run: what it did, how fast, with how much memory, to what loss.

The steady window. With S the iteration that the run started from (0 unless it resumed) and D the last iteration done,
the first `warmup_steps` iterations after S are left out; when D - S is less than twice that, the first half is. The
window is all recorded iterations from there to D. Its medians and percentiles need a finite value at every recorded
iteration of the window: a statistic over the part that happened to be recorded could hide the part that went wrong.
"""

from typing import TYPE_CHECKING

from nightbridge.models import GatePolicy, Summary
from nightbridge.outputs.curves import METRICS, Curves, read_curves
from nightbridge.outputs.experiment import RunOutput

if TYPE_CHECKING:
    import pandas as pd


def measure(output: RunOutput, gate: GatePolicy, steps_expected: int | None) -> "tuple[Summary, pd.DataFrame]":
    """Measure a run from its event files and logs.

    Args:
        output: What the run left.
        gate: Only `warmup_steps` is used.
        steps_expected: The iterations that the run had to reach; None when the recipe decides.

    Returns:
        The summary, where None means not measured, and the scalar table for `metrics.parquet`
        (`event_files.COLUMNS`; rows from the log have the file `log`).

    """
    curves = read_curves(output.event_files, output.logs)
    return summarise(curves, gate, steps_expected), curves.table


def summarise(curves: Curves, gate: GatePolicy, steps_expected: int | None) -> Summary:
    """Summarise curves; see the module for the steady window."""
    window = steady_window(curves, gate.warmup_steps)
    damage = list(curves.damage)
    if curves.missing_steps:
        damage.append(f"{curves.missing_steps} iterations up to {curves.steps_done} were not recorded")
    for name in ("step_time", "tflops_per_gpu"):
        present = len(_finite(window[name]))
        # A metric that is nowhere was not asked for; one that is there only at times was lost.
        if 0 < present < len(window):
            lost = f"{len(window) - present} of {len(window)} steady iterations"
            damage.append(f"`{METRICS[name].tag}` is missing or not finite at {lost}")
    return Summary(
        steps_expected=steps_expected,
        steps_done=curves.steps_done,
        steady_first_step=int(window.index[0]) if len(window) else None,
        steady_last_step=int(window.index[-1]) if len(window) else None,
        step_time=_quantile(window["step_time"], 0.5),
        step_time_p05=_quantile(window["step_time"], 0.05),
        step_time_p95=_quantile(window["step_time"], 0.95),
        tflops_per_gpu=_quantile(window["tflops_per_gpu"], 0.5),
        peak_memory=curves.peak_memory,
        final_loss=_final_loss(curves, steps_expected),
        non_finite_steps=curves.non_finite_steps,
        source=curves.source,
        damage=tuple(damage),
        notes=curves.notes,
    )


def steady_window(curves: Curves, warmup_steps: int) -> "pd.DataFrame":
    """The rows of `curves.steps` that statistics are made of."""
    done = max(curves.steps_done - curves.start, 0)
    dropped = warmup_steps if done >= 2 * warmup_steps else done // 2
    return curves.steps[curves.steps.index > curves.start + dropped]


def _finite(values: "pd.Series[float]") -> "pd.Series[float]":
    import numpy as np

    return values[np.isfinite(values)]


def _quantile(values: "pd.Series[float]", quantile: float) -> float | None:
    """A quantile (linear between neighbours); None without values, or when one of them is not a finite number."""
    if not len(values) or len(_finite(values)) < len(values):
        return None
    return float(values.quantile(quantile))


def _final_loss(curves: Curves, steps_expected: int | None) -> float | None:
    """The loss at the last expected iteration, or the last one done when nothing is expected."""
    last = steps_expected if steps_expected is not None else curves.steps_done
    losses = _finite(curves.steps["loss"])
    return float(losses.loc[last]) if last in losses.index else None
