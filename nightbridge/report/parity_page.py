"""An HTML page that overlays two runs.

The pages' templates.
"""

from typing import TYPE_CHECKING, NamedTuple

from nightbridge.goldens.parity import (
    GATE_WORDS,
    GRAD_NORM,
    LEARNING_RATE,
    LOSS,
    CurveParity,
    Parity,
    ParityGate,
)
from nightbridge.report.charts import differences_chart, steps_chart

if TYPE_CHECKING:
    import pandas as pd

from nightbridge.report.page import render_page

LABELS = {LOSS: "loss", GRAD_NORM: "grad norm", LEARNING_RATE: "learning rate"}


class _Section(NamedTuple):
    label: str
    overlay: str
    facts: tuple[tuple[str, str], ...]


def parity_html(found: Parity, a: "pd.DataFrame", b: "pd.DataFrame", gate: ParityGate) -> str:
    """Render one self-contained HTML page: no script, nothing loaded from anywhere.

    Args:
        found: What the comparison of B with A has found.
        a: The reference's scalars: columns tag, step, value and superseded.
        b: The other run's.
        gate: The one that the headline speaks of.
    """
    faults = found.faults_of(gate)
    steps = found.following.steps
    return render_page(
        "parity.html.j2",
        found=found,
        tone="bad" if faults else "good",
        headline=f"The two runs {GATE_WORDS[gate][bool(faults)]}",
        faults=faults,
        differences=differences_chart(
            [step.step for step in steps], [step.difference for step in steps], [step.limit for step in steps]
        ),
        sections=[
            _Section(
                label=LABELS.get(curve.tag, curve.tag),
                overlay=steps_chart(b, a, curve.tag, LABELS.get(curve.tag, curve.tag)),
                facts=_facts(curve),
            )
            for curve in found.curves
        ],
    )


def _facts(curve: CurveParity) -> tuple[tuple[str, str], ...]:
    if not curve.steps:
        return (("steps in common", "none"),)
    return (
        ("steps in common", f"{curve.steps}, from {curve.first_step} to {curve.last_step}"),
        ("equal, bit for bit", _until(curve.first_difference)),
        ("within the bands", _until(curve.first_divergence)),
        ("largest difference of a step", f"{_percent(curve.largest)} at step {curve.largest_at}"),
        ("of the moving averages", f"{_percent(curve.smoothed)} at step {curve.smoothed_at}"),
        ("of the tails' means", _percent(curve.tail)),
    )


def _until(step: int | None) -> str:
    return "at every step" if step is None else f"until step {step}"


def _percent(share: float | None) -> str:
    return "unknown" if share is None else f"{100 * share:.3g} %"
