"""Since when a metric has another level, and whether the change is real."""

import itertools
import math
from collections.abc import Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from nightbridge.history.changepoints import (
    DEFAULT_POLICY,
    ChangePointPolicy,
    find_change_points,
    t_test_p_value,
    winsorise,
)
from nightbridge.history.noise import night_noise, remove_canary, remove_node_effects, steadiest

Array = NDArray[np.float64]


def noise(nights: int, seed: int, sigma: float = 0.01) -> Array:
    """Gaussian nights around 1."""
    return 1 + sigma * np.random.default_rng(seed).standard_normal(nights)


def starts(values: Sequence[float | None] | Array, policy: ChangePointPolicy = DEFAULT_POLICY) -> list[int]:
    return [point.index for point in find_change_points(list(values), policy)]


class TestFinding:
    """The whole of it: values in, changes out."""

    @pytest.mark.parametrize("seed", range(5))
    def test_a_step_is_found_with_its_night_its_size_and_its_certainty(self, seed: int) -> None:
        values = 40 * noise(100, seed)
        values[60:] *= 1.05

        (point,) = find_change_points(values.tolist())

        assert abs(point.index - 60) <= 1
        assert point.earliest <= 60 <= point.latest
        assert point.change == pytest.approx(0.05, abs=0.01)
        assert [point.before, point.after] == pytest.approx([40, 42], rel=0.01)
        assert point.p_value < 1e-20
        assert point.p_value == pytest.approx(0)

    def test_a_level_that_falls_is_a_change_with_a_negative_sign(self) -> None:
        values = noise(100, 1)
        values[60:] *= 0.95

        (point,) = find_change_points(values.tolist())

        assert point.change == pytest.approx(-0.05, abs=0.01)

    def test_noise_alone_is_no_change(self) -> None:
        false_alarms = sum(len(starts(noise(100, seed))) for seed in range(200))

        assert false_alarms <= 1

    def test_a_regression_that_was_repaired_is_two_changes(self) -> None:
        values = noise(90, 2)
        values[40:55] *= 1.05

        found = starts(values)

        assert [pytest.approx(40, abs=1), pytest.approx(55, abs=1)] == found

    def test_changes_are_found_all_over_a_history_of_years(self) -> None:
        values = noise(5 * 365, 3)
        planted = [200, 730, 1100, 1500]
        for night in planted:
            values[night:] *= 1.04

        found = starts(values)

        assert len(found) == len(planted)
        assert all(abs(night - other) <= 1 for night, other in zip(found, planted, strict=True))

    def test_a_single_bad_night_is_no_change_however_bad(self) -> None:
        values = noise(100, 4)
        values[50] = 10.0

        assert starts(values) == []

    def test_two_bad_nights_at_the_end_are_not_yet_a_change(self) -> None:
        values = noise(100, 5)
        values[-2:] = 1.3

        assert starts(values) == []

    def test_two_bad_nights_of_three_are_not_carried_by_either_of_them(self) -> None:
        values = noise(100, 6)
        values[-3], values[-2], values[-1] = 1.25, 1.0, 1.25

        assert starts(values) == []

    def test_a_large_step_is_found_on_its_third_night(self) -> None:
        values = noise(63, 7)
        values[60:] *= 1.06

        assert starts(values[:62]) == []
        assert starts(values) == [60]

    def test_what_is_smaller_than_the_minimum_is_left_alone_however_certain(self) -> None:
        values = noise(200, 8, sigma=0.002)
        values[100:] *= 1.01

        assert starts(values) == []
        assert starts(values, ChangePointPolicy(minimum_change=0.005)) == [100]

    def test_a_metric_without_any_noise_still_changes_when_it_changes(self) -> None:
        memory = [80.0] * 30 + [82.0] * 5

        (point,) = find_change_points(memory)

        assert (point.index, point.earliest) == (30, 30)
        assert (point.before, point.after) == (80.0, 82.0)

    def test_nights_without_a_value_are_counted_but_say_nothing(self) -> None:
        values: list[float | None] = noise(100, 9).tolist()
        for night in range(60, 100):
            values[night] = (values[night] or 0) * 1.05
        values[10], values[59], values[80] = None, math.nan, math.inf

        assert starts(values) == [60]

    @pytest.mark.parametrize("values", [[], [1.0], [None] * 50, [1.0, 2.0, 1.0], [0.0] * 40])
    def test_too_little_is_no_change(self, values: list[float | None]) -> None:
        assert find_change_points(values) == ()

    def test_the_unit_does_not_matter(self) -> None:
        values = noise(100, 10)
        values[70:] *= 1.03

        assert starts(values) == starts(values * 1e9) == starts(values * 1e-9)

    def test_a_negative_level_changes_too(self) -> None:
        values = -noise(100, 11)
        values[70:] *= 1.05

        (point,) = find_change_points(values.tolist())

        assert point.change == pytest.approx(-0.05, abs=0.01)


class TestWinsorising:
    def test_a_bad_night_counts_as_slow_but_not_as_ten_slow_nights(self) -> None:
        values = noise(50, 1)
        values[20] = 1.3

        pulled = winsorise(values)

        assert 1.02 < pulled[20] < 1.06
        assert np.delete(pulled, 20) == pytest.approx(np.delete(values, 20), abs=0.01)

    def test_a_level_that_lasts_is_left_as_it_is(self) -> None:
        values = np.r_[np.full(30, 1.0), np.full(30, 1.5)]

        assert winsorise(values).tolist() == values.tolist()


class TestCanary:
    def drifting(self, seed: int) -> tuple[Array, Array]:
        rng = np.random.default_rng(seed)
        drift = np.exp(np.cumsum(0.01 * rng.standard_normal(150)))
        return 40 * drift * noise(150, seed + 1, 0.003), 3 * drift * noise(150, seed + 2, 0.003)

    def test_the_clusters_drift_is_taken_out(self) -> None:
        metric, canary = self.drifting(1)

        assert starts(metric) != []
        assert starts(remove_canary(metric.tolist(), canary.tolist())) == []

    def test_a_change_of_the_code_stays(self) -> None:
        metric, canary = self.drifting(2)
        metric[100:] *= 1.03

        assert starts(remove_canary(metric.tolist(), canary.tolist())) == [100]

    def test_a_metric_that_does_not_follow_the_canary_is_left_alone(self) -> None:
        metric, canary = noise(200, 3), np.exp(np.cumsum(noise(200, 4) - 1))

        changed = remove_canary(metric.tolist(), canary.tolist())

        assert changed == pytest.approx(metric.tolist(), rel=0.02)

    def test_nights_without_a_canary_take_that_of_the_nights_around(self) -> None:
        metric, canary = self.drifting(5)
        gappy: list[float | None] = canary.tolist()
        gappy[70] = None

        corrected = remove_canary(metric.tolist(), gappy)

        assert corrected[70] == pytest.approx(remove_canary(metric.tolist(), canary.tolist())[70], rel=0.03)

    def test_a_canary_that_only_ran_in_nights_without_a_value_says_nothing(self) -> None:
        metric = [1.0, 1.1, None, None, 1.2]

        changed = remove_canary(metric, [None, None, 1.0, 1.1, None])

        assert changed == pytest.approx([1.0, 1.1, math.nan, math.nan, 1.2], nan_ok=True)

    def test_nights_without_a_value_stay_without_one(self) -> None:
        assert math.isnan(remove_canary([1.0, None, 1.0], [1.0, 1.1, 1.0])[1])


class TestNodeEffects:
    def test_a_slower_node_set_is_brought_to_the_level_of_the_others(self) -> None:
        slow = np.random.default_rng(1).random(100) < 0.2
        values = noise(100, 1) * np.where(slow, 1.05, 1.0)

        level = np.array(remove_node_effects(values.tolist(), np.where(slow, "b", "a").tolist()))

        assert np.median(level[slow]) == pytest.approx(np.median(level[~slow]), rel=0.005)
        assert level[~slow].tolist() == values[~slow].tolist()

    def test_a_change_on_both_sets_stays(self) -> None:
        slow = np.random.default_rng(2).random(100) < 0.2
        values = noise(100, 2) * np.where(slow, 1.05, 1.0)
        values[70:] *= 1.04

        assert starts(remove_node_effects(values.tolist(), np.where(slow, "b", "a").tolist())) == [
            pytest.approx(70, abs=1)
        ]

    def test_nodes_that_changed_for_good_cannot_be_told_from_the_code_and_stay_a_change(self) -> None:
        values = noise(100, 3)
        values[70:] *= 1.05
        nodes = ["old"] * 70 + ["new"] * 30

        assert starts(remove_node_effects(values.tolist(), nodes)) == [70]

    def test_three_nights_are_too_few_to_believe_in_an_effect(self) -> None:
        values = [1.0] * 40
        values[10] = values[20] = values[30] = 1.1
        nodes = ["b" if value > 1 else "a" for value in values]

        assert remove_node_effects(values, nodes) == values


class TestStatistics:
    def test_the_statistic_with_the_least_noise_is_taken(self) -> None:
        jumping = np.where(np.random.default_rng(1).random(60) < 0.5, 1.0, 1.2).tolist()

        assert steadiest({"median": jumping, "p05": noise(60, 2).tolist()}) == "p05"
        assert steadiest({"median": noise(60, 2).tolist(), "p05": jumping}) == "median"

    def test_a_statistic_that_was_never_measured_is_not_taken(self) -> None:
        assert steadiest({"p05": [None] * 60, "median": noise(60, 1).tolist()}) == "median"

    def test_the_noise_is_that_of_the_nights_and_not_of_the_steps_between_levels(self) -> None:
        values = noise(400, 1)
        values[100:] *= 1.5

        assert night_noise((values[:100]).tolist()) == pytest.approx(0.01, rel=0.25)
        assert night_noise(values.tolist()) * np.median(values) == pytest.approx(0.0137, rel=0.25)


class TestMemory:
    @staticmethod
    def drifting(nights: int, seed: int) -> list[float]:
        rng = np.random.default_rng(seed)
        level, values = 0.0, []
        for _ in range(nights):
            level = 0.7 * level + 0.714 * float(rng.normal())
            values.append(1 + 0.01 * level)
        return values

    def test_nights_that_follow_each_other_are_no_change_of_level(self) -> None:
        found = [find_change_points(self.drifting(90, seed)) for seed in range(60)]

        assert sum(map(bool, found)) <= 6

    @pytest.mark.parametrize("start", [0, 14, 30])
    @pytest.mark.parametrize("a_night", [0.001, 0.002, 0.003, 0.005])
    def test_a_drift_is_no_memory_and_is_found(self, a_night: float, start: int) -> None:
        worse = 1 + a_night * np.maximum(0, np.arange(60) - start)
        found = [find_change_points((worse * noise(60, seed, 0.002)).tolist()) for seed in range(10)]

        assert all(found)

    def test_a_change_is_found_in_independent_nights_as_soon_as_before(self) -> None:
        found = 0
        for seed in range(40):
            values = noise(66, seed)
            values[60:] *= 1.04
            found += [point.index for point in find_change_points(values.tolist())] in ([59], [60], [61])

        assert found >= 38


# --- Student's t, against printed tables and the closed form of two degrees of freedom -------------------------------


@pytest.mark.parametrize(
    ("statistic", "degrees", "p_value"),
    [(12.706, 1, 0.05), (4.303, 2, 0.05), (2.228, 10, 0.05), (4.587, 10, 0.001), (1.960, 10**7, 0.05)],
)
def test_the_p_value_is_students(statistic: float, degrees: float, p_value: float) -> None:
    assert t_test_p_value(statistic, degrees) == pytest.approx(p_value, rel=2e-3)
    assert t_test_p_value(-statistic, degrees) == t_test_p_value(statistic, degrees)


def test_the_p_value_agrees_with_the_closed_form_of_two_degrees_far_out_in_the_tail() -> None:
    for statistic in (0.0, 0.5, 3.0, 50.0):
        share = statistic / math.sqrt(2 + statistic**2)
        assert t_test_p_value(statistic, 2) == pytest.approx(1 - share, rel=1e-9)


def test_the_p_value_falls_with_the_statistic() -> None:
    values = [t_test_p_value(0.25 * step, 98) for step in range(60)]

    assert values[0] == 1.0
    assert all(after < before for before, after in itertools.pairwise(values))
