"""How often the slowness of a run's last steps is news without a cause, and whether half speed at the end is seen.

    python benchmarks/tail.py --noise FILE.json.gz

FILE is a list of objects with `path` (the test), `t` (the time) and `it`: seconds per step of a real run. Each run's
last steps are measured as the pipeline does, and compared with the median of the up to seven runs of the same test
before it, with the narrowest and the widest band of the metric. Printed are the share of runs beyond it as they are,
and with their last 9 % of steps at half speed. A run beyond the band is run again before it raises an alarm.
"""

import argparse
import gzip
import json
import statistics
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from nightbridge.models import GatePolicy
from nightbridge.models.metrics import METRIC_BY_NAME
from nightbridge.outputs.measurements import tail_slowdown

SLOW_SHARE, SLOW_FACTOR = 0.09, 2.0
BASELINE = GatePolicy().baseline_runs
WARMUP = GatePolicy().warmup_steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--noise", type=Path, required=True)
    with gzip.open(parser.parse_args().noise, "rt") as file:
        runs = json.load(file)
    by_test: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for run in sorted((run for run in runs if usable(run["it"])), key=lambda run: run["t"]):
        steps = np.array(run["it"], dtype=float)
        slowed = steps.copy()
        slowed[-max(1, round(SLOW_SHARE * steps.size)) :] *= SLOW_FACTOR
        as_it_is, at_half_speed = tail(steps), tail(slowed)
        if as_it_is is not None and at_half_speed is not None:
            by_test[run["path"]].append((as_it_is, at_half_speed))
    metric = METRIC_BY_NAME["tail_slowdown"]
    for name, width in (("narrowest", metric.least_change), ("widest", metric.threshold(GatePolicy()))):
        print_share(name, width, list(by_test.values()))


def usable(steps: Sequence[float] | None) -> bool:
    return steps is not None and len(steps) > 0 and all(isinstance(step, int | float) and step > 0 for step in steps)


def tail(steps: NDArray[np.float64]) -> float | None:
    """The measurement itself, over the steps after the warm-up."""
    dropped = WARMUP if steps.size >= 2 * WARMUP else steps.size // 2
    return tail_slowdown(pd.Series(steps[dropped:]))


def print_share(name: str, width: float, tests: Sequence[Sequence[tuple[float, float]]]) -> None:
    alarms, found = [], []
    for values in tests:
        for index in range(1, len(values)):
            reference = statistics.median(value for value, _slow in values[max(0, index - BASELINE) : index])
            alarms.append(values[index][0] > reference * (1 + width))
            found.append(values[index][1] > reference * (1 + width))
    print(
        f"{name} band, {width:.0%}: {100 * np.mean(alarms):.2f} % of {len(alarms)} runs beyond it as they are, "
        f"{100 * np.mean(found):.1f} % with half speed in the last {SLOW_SHARE:.0%} of their steps"
    )


if __name__ == "__main__":
    main()
