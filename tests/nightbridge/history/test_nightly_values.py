"""The band of a metric: from the test's own history, never too narrow, and the threshold while there is little of it."""

import numpy as np
import pytest

from nightbridge.errors import InvalidInput
from nightbridge.history.nightly_values import Band, band_of, rows_until
from nightbridge.models import GatePolicy
from nightbridge.models.metrics import METRIC_BY_NAME
from tests.builders import make_row

STEP_TIME = METRIC_BY_NAME["step_time"]


def nights(count: int, sigma: float, seed: int = 3) -> list[float]:
    values: list[float] = (1 + sigma * np.random.default_rng(seed).standard_normal(count)).tolist()
    return values


def width(values: list[float], gate: GatePolicy | None = None) -> float:
    return band_of(STEP_TIME, gate or GatePolicy(), values, values).width


def test_a_steady_history_has_the_narrowest_band() -> None:
    assert width([1.0] * 20) == 0.02
    assert width(nights(28, 0.003)) == 0.02


def test_the_band_follows_the_noise_of_the_nights() -> None:
    assert width(nights(28, 0.01)) == pytest.approx(0.04, rel=0.25)


def test_the_threshold_is_the_widest_band_of_a_test_that_is_steady_enough() -> None:
    assert width(nights(28, 0.014)) == 0.05
    assert width(nights(28, 0.01), GatePolicy(step_time=0.03)) == pytest.approx(0.03, rel=0.1)


def test_a_threshold_inside_the_noise_gives_way() -> None:
    assert width(nights(28, 0.05)) == pytest.approx(0.15, rel=0.25)


def test_a_stricter_threshold_is_narrower_than_the_narrowest_band() -> None:
    assert width([1.0] * 20, GatePolicy(step_time=0.005)) == 0.005


def test_the_first_nights_have_the_threshold_whatever_their_noise() -> None:
    assert width(nights(6, 0.001)) == 0.05
    assert width(nights(6, 0.001), GatePolicy(cold_start=5)) == 0.02


def test_bad_nodes_and_a_change_of_level_make_no_band_wider() -> None:
    values = nights(28, 0.002)
    values[5], values[17] = 1.3, 1.2
    values[20:] = [value * 1.1 for value in values[20:]]

    assert width(values) == 0.02


@pytest.mark.parametrize("factors", [[0.93] * 5, [0.93] * 9 + [0.87] * 6, [0.93] * 7 + [1.0] * 7 + [0.93] * 7])
@pytest.mark.parametrize("before", [8, 13])
@pytest.mark.parametrize("sigma", [0.0005, 0.002, 0.005])
def test_several_changes_of_level_or_one_in_the_first_weeks_make_no_band_wider(
    before: int, factors: list[float], sigma: float
) -> None:
    steady = nights(before + len(factors), sigma)
    changed = [value * factor for value, factor in zip(steady, [1.0] * before + factors, strict=True)]

    for metric in (STEP_TIME, METRIC_BY_NAME["peak_memory"]):
        band = band_of(metric, GatePolicy(), changed, changed)
        assert band.width <= max(metric.least(0.02), 12 * sigma)


def test_what_one_night_in_five_does_is_inside_the_band() -> None:
    values = nights(28, 0.002)
    values[::5] = [value * 1.2 for value in values[::5]]

    assert width(values) > 0.2


def test_nights_that_follow_each_other_have_the_band_of_their_distance_from_the_week_before() -> None:
    drift = [1 + 0.02 * np.sin(night / 3) for night in range(28)]

    assert width(drift, GatePolicy(step_time=0.2)) > 0.05


def test_the_first_nights_of_a_noisy_test_have_a_wider_band() -> None:
    assert width(nights(6, 0.05)) > 0.1


def test_without_a_reference_nothing_is_beyond() -> None:
    assert band_of(STEP_TIME, GatePolicy(), [], []).side(5.0) == 0
    assert band_of(STEP_TIME, GatePolicy(), [], [], [1.0] * 20).side(5.0) == 0


def test_a_young_level_has_the_noise_of_the_nights_before_it_and_its_own_when_that_is_known() -> None:
    before = [1 + 0.01 * (-1) ** number for number in range(20)]
    widths = [band_of(STEP_TIME, GatePolicy(), [1.5] * count, [1.5] * count, before).width for count in (1, 3, 7)]

    assert widths[0] > widths[1] > widths[2] == pytest.approx(0.02)
    assert widths[0] < 0.08


@pytest.mark.parametrize(("value", "place"), [(1.05, 0), (1.0500001, 1), (0.95, 0), (0.94, -1), (float("nan"), -1)])
def test_the_edge_is_inside(value: float, place: int) -> None:
    assert Band(1.0, 0.05, 7, 0.01).side(value) == place


def test_the_history_until_a_night_ends_with_it() -> None:
    rows = [make_row(night=f"2026-11-{day:02}") for day in range(1, 6)]

    assert [row.night[-2:] for row in rows_until(rows, "2026-11-03")] == ["01", "02", "03"]
    assert rows_until(rows, None) == tuple(rows)
    with pytest.raises(
        InvalidInput, match=r"2026-10-31: no such night in the history\. The last ones are 2026-11-01, "
    ):
        rows_until(rows, "2026-10-31")
