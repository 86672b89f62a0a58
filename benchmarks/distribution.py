"""How often a run's distribution of step times is news without a cause, and whether what a median hides is seen.

    python benchmarks/distribution.py --noise FILE.json.gz

FILE is a list of objects with `path` (the test), `t` (the time) and `it`: seconds per step of a real run. Each run is
measured as the pipeline does, relative to its median step, and compared with the median of the up to seven runs of the
same test before it, with the narrowest and the widest band of each metric. Printed are the share of runs beyond it as
they are, and with a fault that the metric is for. A run beyond the band is run again before it raises an alarm.
"""

import argparse
import gzip
import json
import statistics
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from nightbridge.models import GatePolicy
from nightbridge.models.metrics import METRIC_BY_NAME
from nightbridge.outputs.measurements import tail_slowdown

Steps = NDArray[np.float64]
BASELINE, WARMUP = GatePolicy().baseline_runs, GatePolicy().warmup_steps


def slowed(steps: Steps, where: slice, factor: float) -> Steps:
    changed = steps.copy()
    changed[where] *= factor
    return changed


def steady(steps: Steps) -> "pd.Series[float]":
    return pd.Series(steps[warm_up(steps) :])


def warm_up(steps: Steps) -> int:
    return WARMUP if steps.size >= 2 * WARMUP else steps.size // 2


class Case(NamedTuple):
    """A metric as a ratio to the median step, and the fault that it is for."""

    measure: Callable[[Steps], float | None]
    fault: str
    apply: Callable[[Steps], Steps]


CASES: dict[str, Case] = {
    "wall_step_time": Case(
        lambda steps: float(steady(steps).mean() / steady(steps).median()),
        "every 5th step at half speed",
        lambda steps: slowed(steps, slice(None, None, 5), 2.0),
    ),
    "slow_steps": Case(
        lambda steps: float(steady(steps).quantile(0.95) / steady(steps).median()),
        "every 5th step at a third of the speed",
        lambda steps: slowed(steps, slice(None, None, 5), 3.0),
    ),
    "tail_slowdown": Case(
        lambda steps: tail_slowdown(steady(steps)),
        "half speed in the last 9 % of the steps",
        lambda steps: slowed(steps, slice(-max(1, round(0.09 * steps.size)), None), 2.0),
    ),
    "warmup_step_time": Case(
        lambda steps: float(steps[1 : warm_up(steps)].mean() / steady(steps).median()) if warm_up(steps) > 1 else None,
        "a warm-up ten times as slow",
        lambda steps: slowed(steps, slice(1, warm_up(steps)), 10.0),
    ),
    "first_step_time": Case(
        lambda steps: float(steps[0] / steady(steps).median()),
        "a first step ten times as slow",
        lambda steps: slowed(steps, slice(0, 1), 10.0),
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--noise", type=Path, required=True)
    with gzip.open(parser.parse_args().noise, "rt") as file:
        runs = json.load(file)
    usable = sorted((run for run in runs if is_usable(run["it"])), key=lambda run: run["t"])
    for name, case in CASES.items():
        by_test: dict[str, list[tuple[float, float]]] = defaultdict(list)
        for run in usable:
            steps = np.array(run["it"], dtype=float)
            as_it_is, with_fault = case.measure(steps), case.measure(case.apply(steps))
            if as_it_is is not None and with_fault is not None:
                by_test[run["path"]].append((as_it_is, with_fault))
        metric = METRIC_BY_NAME[name]
        for band, width in (("narrowest", metric.least_change), ("widest", metric.threshold(GatePolicy()))):
            print_share(f"{name}, {band} band, {width:.0%}", case.fault, width, list(by_test.values()))


def is_usable(steps: Sequence[float] | None) -> bool:
    return (
        steps is not None and len(steps) >= WARMUP and all(isinstance(step, int | float) and step > 0 for step in steps)
    )


def print_share(name: str, fault: str, width: float, tests: Sequence[Sequence[tuple[float, float]]]) -> None:
    alarms, found = [], []
    for values in tests:
        for index in range(1, len(values)):
            reference = statistics.median(value for value, _fault in values[max(0, index - BASELINE) : index])
            alarms.append(values[index][0] > reference * (1 + width))
            found.append(values[index][1] > reference * (1 + width))
    print(
        f"{name}: {100 * np.mean(alarms):.2f} % of {len(alarms)} runs beyond it as they are, "
        f"{100 * np.mean(found):.1f} % with {fault}"
    )


if __name__ == "__main__":
    main()
