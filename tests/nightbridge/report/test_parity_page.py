"""Two runs laid over each other, as a page."""

import re

import pandas as pd
import pytest

from nightbridge.goldens.parity import ParityGate, compare_runs
from nightbridge.report.charts import differences_chart
from nightbridge.report.queries import parity_html
from tests.builders import scalar_table as table

LOSS = {step: 10.0 - 0.1 * step for step in range(1, 51)}


def page(a: pd.DataFrame, b: pd.DataFrame, gate: ParityGate = "convergence") -> str:
    return parity_html(compare_runs(a, b, names=("ref<1>", "new")), a, b, gate)


def test_every_quantity_is_drawn_with_the_reference_below_it() -> None:
    run = table(lm_loss=LOSS, grad_norm=LOSS)

    text = page(run, run)

    assert re.findall(r"<h2>(.*?)</h2>", text) == ["loss", "grad norm"]
    assert text.count("<svg") == 3  # the loss has its differences beside it
    assert "The two runs converge alike" in text
    assert "equal, bit for bit</dt><dd>at every step" in text


def test_nothing_is_loaded_and_names_are_text() -> None:
    text = page(table(lm_loss=LOSS), table(lm_loss=LOSS))

    assert "ref&lt;1&gt;" in text
    assert "ref<1>" not in text
    assert "<script" not in text
    assert not re.search(r'(src|href)="http', text)


@pytest.mark.parametrize(
    ("gate", "headline"),
    [
        ("numerics", "do not compute the same"),
        ("convergence", "converge alike"),
        ("iterations", "do not agree at every iteration"),
    ],
)
def test_the_headline_speaks_of_the_gate_that_was_asked_for(gate: ParityGate, headline: str) -> None:
    other = LOSS | {30: LOSS[30] * 1.03}

    text = page(table(lm_loss=LOSS), table(lm_loss=other), gate)

    assert f"The two runs {headline}" in text
    assert ("differs at step 30" in text) == (gate == "numerics")
    assert ("at iteration 30, +3.00 %" in text) == (gate == "iterations")


def test_runs_without_a_step_in_common_have_a_page_that_says_so() -> None:
    text = page(table(lm_loss=LOSS), table(lm_loss={step + 100: value for step, value in LOSS.items()}))

    assert "no step in common" in text
    assert "steps in common</dt><dd>none" in text


def test_no_differences_make_no_drawing() -> None:
    assert differences_chart([], [], []) == ""


def test_a_difference_that_is_infinite_does_not_stop_the_drawing() -> None:
    assert "<svg" in differences_chart([1, 2, 3], [0.0, float("inf"), 0.02], [0.005, 0.015, 0.015])
