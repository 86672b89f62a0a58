"""Student's t, against printed tables and the closed form of two degrees of freedom."""

import itertools
import math

import pytest

from nightbridge.history.student import t_test_p_value

# Two-sided critical values from the printed tables of Student's t.


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
