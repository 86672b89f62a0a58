"""Student's t distribution, without scipy: it alone is larger than all that nightbridge imports."""

import math


def t_test_p_value(statistic: float, degrees: float) -> float:
    """Two-sided p-value of Student's t."""
    if not math.isfinite(statistic):
        return 0.0 if math.isinf(statistic) else 1.0
    return _incomplete_beta(degrees / 2, 0.5, degrees / (degrees + statistic * statistic))


def _incomplete_beta(a: float, b: float, x: float) -> float:
    """The regularised incomplete beta function, by its continued fraction (modified Lentz)."""
    if x <= 0.0 or x >= 1.0:
        return min(max(x, 0.0), 1.0)
    if x > (a + 1) / (a + b + 2):
        return 1.0 - _incomplete_beta(b, a, 1.0 - x)
    front = math.exp(math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)) / a
    tiny = 1e-300
    c, d = 1.0, 1.0 / (1.0 - (a + b) * x / (a + 1) or tiny)
    result = d
    for m in range(1, 300):
        for numerator in (
            m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m)),
            -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1)),
        ):
            d = 1.0 / (1.0 + numerator * d or tiny)
            c = 1.0 + numerator / c or tiny
            result *= c * d
        if abs(c * d - 1.0) < 1e-14:
            break
    return front * result
