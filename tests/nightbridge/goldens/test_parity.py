"""Whether two runs compute the same numbers, or converge alike."""

import math
from collections.abc import Callable

import numpy as np
import pandas as pd
import pytest

from nightbridge.goldens.parity import (
    LEAST_BANDS,
    UNKNOWN_WORDS,
    CurveParity,
    calibrated,
    compare_curves,
    curve_of,
    run_parity,
)
from nightbridge.models import ReferencePolicy
from tests.builders import scalar_table as table

STEPS = range(1, 101)


@pytest.fixture
def loss() -> dict[int, float]:
    return {step: 7 + 4 * math.exp(-step / 20) for step in STEPS}


class TestSameNumerics:
    def test_equal_to_the_last_bit(self, loss: dict[int, float]) -> None:
        found = compare_curves(loss, dict(loss))

        assert not found.unequal
        assert not found.faults
        assert (found.steps, found.first_step, found.last_step) == (100, 1, 100)
        assert (found.first_difference, found.largest, found.tail) == (None, 0.0, 0.0)

    def test_one_bit_in_one_step_is_found_and_named(self, loss: dict[int, float]) -> None:
        other = loss | {41: math.nextafter(loss[41], math.inf)}

        found = compare_curves(loss, other)

        assert found.unequal
        assert not found.faults
        assert found.first_difference == 41

    def test_a_curve_that_is_not_whole_is_never_the_same(self, loss: dict[int, float]) -> None:
        both_nan = loss | {50: math.nan}

        assert compare_curves(both_nan, both_nan).unequal
        assert compare_curves({}, {}).unequal
        assert compare_curves(loss, {step: loss[step] for step in range(1, 100)}).unequal


FAULTS: dict[str, Callable[[dict[int, float]], dict[int, float]]] = {
    "half a percent in the second half": lambda loss: {s: v * (1.005 if s > 50 else 1) for s, v in loss.items()},
    "lower in the second half": lambda loss: {s: v * (0.995 if s > 50 else 1) for s, v in loss.items()},
    "lag": lambda loss: {s: loss[max(1, round(0.9 * s))] for s in loss},
    "drift": lambda loss: {s: v * (1 + 0.0002 * s) for s, v in loss.items()},
    "spike": lambda loss: loss | {60: 2 * loss[60]},
    "a bump that is over before the tail": lambda loss: {s: v * (1.02 if 30 < s < 60 else 1) for s, v in loss.items()},
    "reversal": lambda loss: {s: loss[101 - s] for s in loss},
    "NaN": lambda loss: {s: math.nan if s > 50 else v for s, v in loss.items()},
    "one NaN": lambda loss: loss | {7: math.nan},
    "infinity": lambda loss: loss | {100: math.inf},
    "a missing step": lambda loss: {s: v for s, v in loss.items() if s != 30},
    "half the steps": lambda loss: {s: v for s, v in loss.items() if s <= 50},
    "one step more": lambda loss: loss | {101: loss[100]},
    "nothing": lambda loss: {},
    "off by one step": lambda loss: {s + 1: v for s, v in loss.items()},
}


class TestSameConvergence:
    def test_rounding_noise_is_no_difference(self, loss: dict[int, float]) -> None:
        rng = np.random.default_rng(1)
        other = {step: value * (1 + 1e-3 * rng.standard_normal()) for step, value in loss.items()}

        assert not compare_curves(loss, other).faults

    @pytest.mark.parametrize("fault", FAULTS)
    def test_a_fault_is_flagged_with_its_reason(self, fault: str, loss: dict[int, float]) -> None:
        found = compare_curves(loss, FAULTS[fault](loss))

        assert found.unequal
        assert found.faults

    def test_a_fault_in_the_reference_counts_as_well(self, loss: dict[int, float]) -> None:
        assert compare_curves(loss | {7: math.nan}, loss).faults

    def test_steps_are_paired_by_number_and_not_by_position(self, loss: dict[int, float]) -> None:
        without = {step: value for step, value in loss.items() if step != 3}

        found = compare_curves(loss, without)

        assert found.only_in_a == (3,)
        assert found.largest == 0.0

    def test_where_they_part_is_named(self, loss: dict[int, float]) -> None:
        found = compare_curves(loss, {s: v * (1.2 if s >= 70 else 1) for s, v in loss.items()})

        assert found.first_divergence == 70
        assert found.largest == pytest.approx(0.2)
        assert found.largest_at is not None
        assert found.largest_at >= 70
        assert found.tail == pytest.approx(0.2)
        assert "the mean of the tail differs by +20 % (limit 0.25 %)" in " ".join(found.faults)

    def test_a_lower_loss_is_not_said_to_be_a_higher_one(self, loss: dict[int, float]) -> None:
        found = " ".join(compare_curves(loss, {s: v * (0.5 if s >= 70 else 1) for s, v in loss.items()}).faults)

        assert "a single step differs by 50 % at step" in found
        assert "the mean of the tail differs by -50 %" in found

    def test_a_reference_of_zero_is_left_by_any_step_away_from_it(self) -> None:
        zeros = dict.fromkeys(STEPS, 0.0)

        assert not compare_curves(zeros, dict(zeros)).faults
        assert compare_curves(zeros, zeros | {50: 1e-9}).faults

    def test_many_missing_steps_are_counted_and_not_listed(self, loss: dict[int, float]) -> None:
        found = compare_curves(loss, {s: v for s, v in loss.items() if s <= 50})

        assert found.faults[0] == "lm loss: steps 51, 52, 53, 54, 55 and 45 more missing in B"


class TestRuns:
    def test_loss_grad_norm_and_learning_rate_are_compared(self, loss: dict[int, float]) -> None:
        run = table(lm_loss=loss, grad_norm=loss, learning_rate=loss)

        found = run_parity(run, run, names=("x", "y"))

        assert [curve.tag for curve in found.curves] == ["lm loss", "grad-norm", "learning-rate"]
        assert found.same_numerics
        assert not found.faults_of("convergence")
        assert (found.a, found.b) == ("x", "y")

    def test_a_noisy_grad_norm_does_not_break_the_convergence_but_the_numerics(self, loss: dict[int, float]) -> None:
        noisy = {step: value * 1.5 for step, value in loss.items()}

        found = run_parity(table(lm_loss=loss, grad_norm=loss), table(lm_loss=loss, grad_norm=noisy))

        assert not found.faults_of("convergence")
        assert not found.same_numerics

    def test_bands_of_the_loss_say_nothing_of_other_quantities(self, loss: dict[int, float]) -> None:
        noisy = {step: value * (1 + 0.01 * (-1) ** step) for step, value in loss.items()}
        runs = table(lm_loss=loss, grad_norm=loss), table(lm_loss=noisy, grad_norm=noisy)

        usual, own = run_parity(*runs).curves, run_parity(*runs, bands=LEAST_BANDS).curves

        assert own[0].faults != usual[0].faults
        assert own[1] == usual[1]

    def test_a_grad_norm_that_is_not_finite_breaks_both(self, loss: dict[int, float]) -> None:
        broken = table(lm_loss=loss, grad_norm=loss | {9: math.nan})

        found = run_parity(table(lm_loss=loss, grad_norm=loss), broken)

        assert found.faults_of("convergence")
        assert not found.same_numerics

    def test_a_quantity_that_only_one_run_has_is_never_parity(self, loss: dict[int, float]) -> None:
        assert run_parity(table(lm_loss=loss, grad_norm=loss), table(lm_loss=loss)).faults_of("convergence")

    def test_runs_without_a_loss_are_never_alike(self) -> None:
        empty = table()

        found = run_parity(empty, empty, names=("a", "b"))

        assert not found.same_numerics
        assert found.faults_of("convergence")
        assert found.faults == ("a has no lm loss", "b has no lm loss")

    def test_each_gate_says_why_it_is_not_passed(self, loss: dict[int, float]) -> None:
        other = loss | {5: loss[5] * 1.03}

        found = run_parity(table(lm_loss=loss), table(lm_loss=other))

        assert found.faults_of("numerics") == ("lm loss: first differs at step 5",)
        assert found.faults_of("convergence") == ()
        assert ["at iteration 5, +3.00 % (limit 1.5 %)" in fault for fault in found.faults_of("iterations")] == [True]

    def test_what_a_log_has_rounded_is_never_the_same_bit_for_bit_nor_another(self, loss: dict[int, float]) -> None:
        rounded = table(lm_loss={step: float(f"{value:.6E}") for step, value in loss.items()}).assign(file="log")
        board = table(lm_loss=loss).assign(file="events.out.tfevents.1")

        mixed, logs, boards = (run_parity(*runs) for runs in ((board, rounded), (rounded, rounded), (board, board)))

        assert mixed.faults_of("numerics") == (
            "lm loss: the log's in a part, which rounds, and TensorBoard's in another",
        )
        assert logs.faults_of("numerics") == ("lm loss: the log's in both, which rounds",)
        assert {found.words_of("numerics") for found in (mixed, logs)} == {UNKNOWN_WORDS}
        assert boards.words_of("numerics") == "compute the same, bit for bit"
        assert not mixed.faults_of("convergence")

    def test_what_two_logs_have_otherwise_is_another(self, loss: dict[int, float]) -> None:
        one, other = (table(lm_loss=curve).assign(file="log") for curve in (loss, loss | {7: 2.0}))

        found = run_parity(one, other)

        assert found.faults_of("numerics") == ("lm loss: first differs at step 7",)
        assert found.words_of("numerics") == "do not compute the same"

    def test_the_first_iteration_has_a_limit_of_its_own(self, loss: dict[int, float]) -> None:
        other = loss | {1: loss[1] * 1.01}
        wide, narrow = ReferencePolicy(first=0.02), ReferencePolicy()

        answers = [
            run_parity(table(lm_loss=loss), table(lm_loss=other), policy=policy).faults_of("iterations")
            for policy in (wide, narrow)
        ]

        assert [bool(faults) for faults in answers] == [False, True]

    def test_iterations_that_nobody_has_seen_never_agree(self, loss: dict[int, float]) -> None:
        short = {step: value for step, value in loss.items() if step <= 50}

        found = run_parity(table(lm_loss=loss), table(lm_loss=short))

        assert all(found.faults_of(gate) for gate in ("numerics", "convergence", "iterations"))

    def test_what_a_resumed_run_wrote_twice_counts_once(self, loss: dict[int, float]) -> None:
        rows = table(lm_loss=loss)
        again = pd.concat([rows.assign(superseded=True, value=99.0), rows])

        assert curve_of(again, "lm loss") == loss

    def test_the_result_survives_json(self, loss: dict[int, float]) -> None:
        found = compare_curves(loss, loss | {5: 8.0})

        assert CurveParity.model_validate_json(found.model_dump_json()) == found


class TestCalibrated:
    @staticmethod
    def runs(loss: dict[int, float], count: int, sigma: float) -> list[dict[int, float]]:
        noise = np.random.default_rng(3)
        return [
            {step: value * (1 + sigma * noise.standard_normal()) for step, value in loss.items()} for _ in range(count)
        ]

    def test_runs_of_the_same_noise_follow_and_others_do_not(self, loss: dict[int, float]) -> None:
        *good, tonight = self.runs(loss, 9, 0.002)
        known = calibrated(good)
        assert known is not None
        reference, bands = known

        assert not compare_curves(reference, tonight, bands=bands).faults
        for share in (1.01, 0.99):
            late = {step: value * (share if step > 50 else 1) for step, value in tonight.items()}
            assert compare_curves(reference, late, bands=bands).faults
        assert compare_curves(reference, tonight | {30: tonight[30] * 1.1}, bands=bands).faults

    def test_the_bands_are_as_wide_as_the_runs_are_apart(self, loss: dict[int, float]) -> None:
        quiet, noisy = (calibrated(self.runs(loss, 8, sigma)) for sigma in (0.0, 0.02))

        assert quiet is not None
        assert quiet[1] == LEAST_BANDS
        assert noisy is not None
        assert noisy[1].single_step > 0.1 > quiet[1].single_step

    def test_few_runs_or_runs_of_other_steps_calibrate_nothing(self, loss: dict[int, float]) -> None:
        runs = self.runs(loss, 8, 0.002)

        assert calibrated([]) is None
        assert calibrated(runs[:4]) is None
        assert calibrated([*({1: 2.0},) * 4, *runs[:4]]) is None
        assert calibrated([{}, *({1: math.nan},) * 6]) is None

    @pytest.mark.parametrize("newest", [{}, {1: 2.0}, {1: math.nan}])
    def test_a_newest_run_that_is_not_whole_is_one_less_to_calibrate_with(
        self, loss: dict[int, float], newest: dict[int, float]
    ) -> None:
        runs = self.runs(loss, 8, 0.002)

        assert calibrated([*runs, newest]) == calibrated(runs) is not None
