"""How far a metric may be from its last good nights before one night is news.

The band comes from the test's own history. `sigmas` times the noise between its nights (robust: the four fifths of the
differences between consecutive nights that are smallest, so that neither bad nodes nor changes of level count), but

* never less than `least_change`: a month of quiet nights proves little;
* while `sigmas` times the noise is more than the metric's threshold, the threshold;
* where even `TOO_NOISY` times the noise is more than the threshold, that: a threshold inside the noise only flakes,
  and its alerts would soon be ignored. Floors and ceilings and the test for changes of level still hold there.

Cold start: with fewer than `cold_start` good nights the band is the threshold, whatever those nights say.

One night's band finds what is large, at once. What is smaller than the band is found over several nights, by the test
for changes of level (`standing`).
"""

import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

from nightbridge.models import GatePolicy
from nightbridge.regression.metrics import Metric

TOO_NOISY = 3.0
NOISE_NIGHTS = 28


class Band(NamedTuple):
    """What a night is compared with: a reference in the metric's unit, and how far from it is no news (a share)."""

    reference: float | None
    width: float
    nights: int
    noise: float

    def place(self, value: float) -> int:
        """1 above the band, -1 below it, 0 inside; a change of exactly the width is inside."""
        if self.reference is None:
            return 0
        difference = value - self.reference
        # Multiplied out, so that a reference of zero needs no case of its own: any step away from it counts.
        allowed = self.width * abs(self.reference)
        if math.isclose(abs(difference), allowed, rel_tol=1e-9) or abs(difference) < allowed:
            return 0
        return 1 if difference > 0 else -1


def band_of(metric: Metric, gate: GatePolicy, good: Sequence[float], singles: Sequence[float | None]) -> Band:
    """The band of a metric.

    Args:
        metric: The metric.
        gate: The test's policy.
        good: The values of the good nights, oldest first.
        singles: The same nights' first runs alone: what one run is compared with must have the noise of one run.
    """
    threshold = metric.threshold(gate)
    reference = statistics.median(good[-gate.baseline_runs :]) if good else None
    if len(good) < gate.cold_start:
        return Band(reference, threshold, len(good), math.nan)
    noise = _noise(singles[-NOISE_NIGHTS:])
    least = min(max(gate.least_change, metric.least_change), threshold)
    width = max(least, min(gate.sigmas * noise, max(threshold, TOO_NOISY * noise)))
    return Band(reference, width, len(good), noise)


def fixed_band(metric: Metric, gate: GatePolicy, values: Sequence[float]) -> Band:
    """The band around runs chosen by a user: their median, and the metric's threshold."""
    return Band(statistics.median(values) if values else None, metric.threshold(gate), len(values), math.nan)


def _noise(values: Sequence[float | None]) -> float:
    # numpy is imported with the first band from history: commands that compare nothing do not pay for it.
    from nightbridge.regression.changepoints import night_noise

    noise = night_noise(values)
    return 0.0 if math.isnan(noise) else noise
