"""How numbers are written for people."""

import pytest

from nightbridge.numbers import format_change, format_count, format_percent, format_value


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (0.081, "+8.1 %"),
        (-0.25, "−25.0 %"),
        (0.0004, "±0.0 %"),
        (-0.0004, "±0.0 %"),
        (0.0006, "+0.1 %"),
        (12.0, "+1,200.0 %"),
        (2e29, "+2e+31 %"),
        (None, ""),
    ],
)
def test_a_change_has_a_sign(change: float | None, text: str) -> None:
    assert format_change(change) == text


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (1.0, "s", "1.000 s"),
        (0.22613, "s", "0.2261 s"),
        (81.904, "GB", "81.90 GB"),
        (700.0, "TFLOP/s/GPU", "700.0 TFLOP/s/GPU"),
        (53048.6, "ms", "53,049 ms"),
        (6.52, "", "6.520"),
        (1e30, "", "1.000e+30"),
        (-3.4e38, "", "-3.400e+38"),
        (None, "s", "–"),
    ],
)
def test_a_value_has_four_digits_and_its_unit(value: float | None, unit: str, text: str) -> None:
    assert format_value(value, unit) == text


@pytest.mark.parametrize(("count", "text"), [(0, "0 runs"), (1, "1 run"), (2, "2 runs"), (1800, "1,800 runs")])
def test_one_thing_is_not_told_as_many(count: int, text: str) -> None:
    assert format_count(count, "run") == text


@pytest.mark.parametrize(
    ("share", "text"),
    [
        (0.05, "5 %"),
        (0.025, "2.5 %"),
        (1.5, "150 %"),
        (9.994, "999 %"),
        (10.0, "1,000 %"),
        (-12.346, "-1,235 %"),
        (2e29, "2e+31 %"),
        (float("inf"), "inf %"),
    ],
)
def test_a_threshold_is_a_percentage(share: float, text: str) -> None:
    assert format_percent(share) == text
