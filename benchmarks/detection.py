"""How often the change-point detection cries wolf, and how fast it finds a planted slow-down.

    python benchmarks/detection.py [--noise FILE.json.gz] [--series N] [--steps N] [--otava PYTHON] [--seed SEED]
                                   [--tallies FILE.jsonl]

Nights are simulated. Every night is one run of 50 steps whose 40 steady steps are drawn from a real run's residuals (in
blocks of 5, so that their autocorrelation stays); its `STATISTICS` are known. FILE is a list of
objects with `it`: seconds per step of a real run. Without it, synthetic residuals with the same spread, autocorrelation
and spikes are used. On top of that, four kinds of nights:

    gaussian    each run 1 % faster or slower (standard deviation)
    bad nodes   the same, and 3 % of the runs slowed by 5 to 30 %
    node sets   the same as gaussian, and 20 % of the nights on a second set of nodes that is 3 % slower
    drift       the cluster drifts (AR(1), 0.7, 1 %), each run 0.5 % more; a canary runs every night

What is printed, for each method:

    FA/year     new alarms per series and year without any change, slower and faster both counted, after 60 nights
    +3 %, +5 %  share of planted slow-downs found within 14 nights, the first slow night being night 1; median of that
                night over all steps; share of the found whose start was named within one night

with 95 % intervals: exact (Poisson) for rates, Wilson for shares, bootstrap for medians. A change that is found counts
once. Re-runs: a night that is suspicious is run twice more, one of a noisy test up to six times more, and the median
counts; "runs a night" is what that costs. Re-runs share the night's drift and node set. "quiet runs" leaves out the
sources whose own 40-step median wobbles by more than 1 %: there 3 % is about as small as the noise. The other methods
see the median. Our detection looks back 100 nights, and knows the node set of each night.

With --tallies every series' result is kept in a file as soon as it is known, and a run that was interrupted goes on
from there; --summary prints what the file has, and how many series that are.

The parameters of `ChangePointPolicy` were chosen with seeds below 1000; the default seed is above.
"""

import argparse
import gzip
import json
import math
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from nightbridge.history.changepoints import DEFAULT_POLICY, ChangePointPolicy, find_change_points
from nightbridge.history.noise import night_noise, remove_canary, remove_node_effects, steadiest

Array = NDArray[np.float64]

HISTORY = 60
YEAR = 365
FOUND_WITHIN = 14
LOOK_BACK = 100
SAME_CHANGE = 7
STEADY_STEPS = 40
BLOCK = 5
RUNS_A_NIGHT = 7
STATISTICS = ("median", "5th percentile", "mean of the middle half")
QUIET = 0.01

NOISY = 1.35
"""Noise up to this much above what is wanted is left: a month of nights does not tell it any better."""

KINDS = ("gaussian", "bad nodes", "node sets", "drift")
SIZES = (0.03, 0.05)

# Quantiles over the runs of Megatron-LM's golden values, from 0 to 100 %: robust deviation of the steady steps, their
# lag-1 autocorrelation, and the share of steps that are spikes.
PERCENT = (0, 1, 5, 10, 25, 50, 75, 90, 95, 99, 100)
SIGMA = (0.001, 0.0015, 0.0030, 0.0039, 0.0060, 0.0097, 0.0173, 0.0358, 0.0924, 0.2557, 0.3)
LAG_ONE = (-0.5, -0.41, -0.23, -0.15, -0.02, 0.24, 0.51, 0.70, 0.78, 0.87, 0.9)
SPIKES = (0.0, 0.0, 0.0, 0.0, 0.0, 0.02, 0.04, 0.08, 0.12, 0.2, 0.3)


class Nights(NamedTuple):
    """One simulated series: what each night's own run and its re-runs measured, and what else is known of it."""

    values: Array  # nights x runs x STATISTICS
    canary: Array | None
    nodes: list[str] | None
    wobble: float
    reruns: list[int]  # how many, of each night that was run again


class Tally(NamedTuple):
    """What one method did on one series: alarms where nothing changed, or the night (from 1) and start of a finding."""

    alarms: int
    found: int | None
    start_error: int | None
    wobble: float
    runs: float  # a night


Method = Callable[[Nights, int], "Iterable[tuple[int, int]]"]
"""Yields (night of the alarm, first night of the change), from the given night on, as they become known."""


def read_noise(path: Path) -> list[Array]:
    """Residuals of real runs: steady steps over their median."""
    with gzip.open(path, "rt") as file:
        runs = json.load(file)
    residuals = []
    for run in runs:
        steps = np.array(run["it"] or [], dtype=float)
        steady = steps[len(steps) // 3 :]
        if steady.size >= 10 and np.isfinite(steady).all() and (steady > 0).all():
            residuals.append(steady / np.median(steady))
    return residuals


def synthetic_noise(runs: int, seed: int) -> list[Array]:
    """Residuals with the statistics of real ones: AR(1) noise, its width and memory drawn per run, and spikes."""
    rng = np.random.default_rng(seed)
    residuals = []
    for _ in range(runs):
        sigma, memory, spikes = (
            float(np.interp(rng.uniform(0, 100), PERCENT, table)) for table in (SIGMA, LAG_ONE, SPIKES)
        )
        noise = ar1(rng, 60, memory, sigma)
        noise += (rng.random(60) < spikes) * rng.lognormal(-0.7, 0.8, 60)
        residual = np.exp(noise)
        residuals.append(residual / np.median(residual))
    return residuals


def ar1(rng: np.random.Generator, size: int, memory: float, sigma: float) -> Array:
    """A stationary AR(1) series with the given standard deviation."""
    shocks = rng.standard_normal(size) * sigma
    values = np.empty(size)
    values[0] = shocks[0]
    for at in range(1, size):
        values[at] = memory * values[at - 1] + math.sqrt(1 - memory**2) * shocks[at]
    return values


def measured_runs(rng: np.random.Generator, residual: Array, shape: tuple[int, ...]) -> Array:
    """`STATISTICS` (last axis) of runs that are block bootstraps of one run's residuals."""
    starts = rng.integers(0, residual.size, (*shape, STEADY_STEPS // BLOCK))
    steps = (starts[..., None] + np.arange(BLOCK)).reshape(*shape, -1) % residual.size
    ordered = np.sort(residual[steps], axis=-1)
    middle, quarter = STEADY_STEPS // 2, STEADY_STEPS // 4
    median = (ordered[..., middle - 1] + ordered[..., middle]) / 2
    midmean = ordered[..., quarter : STEADY_STEPS - quarter].mean(axis=-1)
    return np.stack([median, ordered[..., 2], midmean], axis=-1)


def simulate(kind: str, residual: Array, quiet: Array, nights: int, rng: np.random.Generator) -> Nights:
    """One series without a change."""
    shape = (nights, RUNS_A_NIGHT)
    inside = measured_runs(rng, residual, shape)
    wobble = float(np.std(inside[..., 0]))
    canary, nodes = None, None
    if kind == "drift":
        drift = ar1(rng, nights, 0.7, 0.01)
        factors = np.exp(drift[:, None] + 0.005 * rng.standard_normal(shape))
        canary = measured_runs(rng, quiet, (nights,))[:, 0] * np.exp(drift + 0.005 * rng.standard_normal(nights))
    else:
        factors = 1 + 0.01 * rng.standard_normal(shape)
    if kind == "bad nodes":
        factors = factors * np.where(rng.random(shape) < 0.03, 1 + rng.uniform(0.05, 0.30, shape), 1.0)
    if kind == "node sets":
        second = rng.random(nights) < 0.2
        factors = factors * np.where(second, 1.03, 1.0)[:, None]
        nodes = ["node[5-8]" if other else "node[1-4]" for other in second]
    return Nights(inside * factors[..., None], canary, nodes, wobble, [])


def adjusted(series: Nights, values: Array, first: int, last: int) -> Sequence[float | None]:
    """Nights first..last as the detection sees them: the steadier statistic, canary and node effects taken out."""
    parts = {name: values[first : last + 1, at].tolist() for at, name in enumerate(STATISTICS)}
    part: Sequence[float | None] = parts[steadiest(parts)]
    if series.canary is not None:
        return remove_canary(part, series.canary[first : last + 1].tolist())
    if series.nodes is not None:
        return remove_node_effects(part, series.nodes[first : last + 1])
    return part


def reruns_needed(
    value: float,
    earlier: Sequence[float | None],
    first_runs: Sequence[float | None],
    nights: int = 28,
    sigmas: float = 3.0,
    least_change: float = 0.01,
    noise_wanted: float = 0.013,
    usual: int = 2,
    most: int = 6,
) -> int:
    """How often a night should be run again before it is judged: what the product did before it had a control arm.

    `usual` times when it is far from the nights before it or was not measured, and as often as it takes, up to `most`
    times, when single runs of this test are so noisy that one says little. Fewer than 5 earlier nights need none.

    Args:
        value: Tonight's value, or NaN where nothing was measured.
        earlier: The nights before, oldest first: the median of each night's runs.
        first_runs: The same nights, each night's first run alone: they show how noisy a single run is.
        nights: How many of the last nights are looked at.
        sigmas: How many standard deviations are far.
        least_change: What is never far, relative to the median of those nights.
        noise_wanted: The relative standard deviation that the median of a night's runs should have.
        usual: Re-runs of a suspicious night.
        most: Re-runs at most.
    """
    if not math.isfinite(value):
        return usual
    recent = np.array([known for known in earlier if known is not None and math.isfinite(known)])[-nights:]
    if recent.size < 5:
        return 0
    noise = night_noise(first_runs[-nights:])
    # A median of n runs has about the noise of one over the square root of n, times 1.25 for many.
    for_noise = math.ceil(1.25 * (noise / noise_wanted) ** 2) - 1 if noise > noise_wanted * NOISY else 0
    centre = float(np.median(recent))
    far = abs(value - centre) > max(sigmas * night_noise(recent.tolist()), least_change) * abs(centre)
    return min(max(for_noise, usual if far else 0), most)


def ours(policy: ChangePointPolicy, reruns: bool, series: Nights, start: int) -> Iterable[tuple[int, int]]:
    """The detection of this project, night by night."""
    values = series.values[:, 0].copy()
    last_rerun = -1
    for night in range(10 if reruns else start, len(values)):
        first = max(0, night - LOOK_BACK + 1)
        part = adjusted(series, values, first, night)
        if reruns:
            # Without re-runs among these nights their single runs are what they are known by.
            single = adjusted(series, series.values[:, 0], first, night) if last_rerun >= first else part
            more = reruns_needed(part[-1] or math.nan, part[:-1], single[:-1])
            if more:
                values[night] = np.median(series.values[night, : 1 + more], axis=0)
                part = adjusted(series, values, first, night)
                series.reruns.append(more)
                last_rerun = night
        if night >= start:
            for point in find_change_points(part, policy):
                yield night, first + point.index


def golden(series: Nights, start: int) -> Iterable[tuple[int, int]]:
    """One golden run, fails beyond 5 % either way. Bad nights in a row are one alarm."""
    values = series.values[:, 0, 0]
    beyond = np.abs(values / values[0] - 1) > 0.05
    for night in range(start, len(values)):
        if beyond[night] and not beyond[night - 1]:
            yield night, night


def perfherder(series: Nights, start: int) -> Iterable[tuple[int, int]]:
    """Perfherder's rule: weighted t above 7 between 24 nights before and 12 after, at least 2 %."""
    values = series.values[:, 0, 0]
    fore, back = 12, 24
    weights_back, weights_fore = np.arange(1, back + 1) / back, np.arange(fore, 0, -1) / fore
    scores = np.zeros(len(values))
    changes = np.zeros(len(values))
    for split in range(back, len(values) - fore + 1):
        left, right = values[split - back : split], values[split : split + fore]
        mean_left, mean_right = np.average(left, weights=weights_back), np.average(right, weights=weights_fore)
        var_left = np.sum(weights_back * (left - mean_left) ** 2) / np.sum(weights_back) * back / (back - 1)
        var_right = np.sum(weights_fore * (right - mean_right) ** 2) / np.sum(weights_fore) * fore / (fore - 1)
        pooled = ((back - 1) * var_left + (fore - 1) * var_right) / (back + fore - 2)
        scores[split] = abs(mean_right - mean_left) / math.sqrt(pooled * (1 / back + 1 / fore))
        changes[split] = abs(mean_right / mean_left - 1)
    for night in range(start, len(values)):
        split = night - fore + 1
        near = scores[max(0, split - 2) : split + 1]
        if scores[split] > 7 and changes[split] >= 0.02 and scores[split] == near.max():
            yield night, split


OTAVA = """
import json, sys
from otava.series import AnalysisOptions, Metric, Series
for line in sys.stdin:
    values = json.loads(line)
    series = Series("t", None, list(range(len(values))), {"m": Metric(1, 1.0)}, {"m": values}, {})
    points = series.analyze(AnalysisOptions()).change_points["m"]
    print(json.dumps([int(point.index) for point in points]), flush=True)
"""

# One Otava per process of this benchmark, started when it is first asked.
_otava: dict[str, subprocess.Popen[str]] = {}


def otava(python: str, series: Nights, start: int) -> Iterable[tuple[int, int]]:
    """Otava with its defaults, in a Python of its own: it needs other versions of our libraries."""
    if python not in _otava:
        _otava[python] = subprocess.Popen(
            [python, "-W", "ignore", "-c", OTAVA], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
    process = _otava[python]
    if process.stdin is None or process.stdout is None:
        raise RuntimeError("Otava has no pipes")
    values = series.values[:, 0, 0]
    for night in range(start, len(values)):
        first = max(0, night - LOOK_BACK + 1)
        process.stdin.write(json.dumps(values[first : night + 1].tolist()) + "\n")
        process.stdin.flush()
        for index in json.loads(process.stdout.readline()):
            yield night, first + index


def quiet_enough(residual: Array) -> bool:
    """Whether a run's 40-step median is steady to a quarter of a percent: what people choose a canary for."""
    return float(np.std(measured_runs(np.random.default_rng(0), residual, (200,))[:, 0])) <= 0.0025


def run_series(method: Method, kind: str, size: float, noise: list[Array], seed: tuple[int, ...]) -> Tally:
    """One series: a year without a change (size 0), or a step after the history."""
    rng = np.random.default_rng(seed)
    residual = noise[rng.integers(len(noise))]
    quiet = next(other for other in (noise[rng.integers(len(noise))] for _ in range(10_000)) if quiet_enough(other))
    series = simulate(kind, residual, quiet, HISTORY + (YEAR if size == 0 else FOUND_WITHIN), rng)
    if size == 0:
        known: list[int] = []
        for _night, start in method(series, HISTORY):
            if all(abs(start - other) > SAME_CHANGE for other in known):
                known.append(start)
        runs = 1 + sum(series.reruns) / len(series.values)
        return Tally(len(known), None, None, series.wobble, runs)
    values = series.values.copy()
    values[HISTORY:] *= 1 + size
    for night, start in method(series._replace(values=values), HISTORY):
        if abs(start - HISTORY) <= SAME_CHANGE:
            return Tally(0, night - HISTORY + 1, start - HISTORY, series.wobble, 1)
    return Tally(0, None, None, series.wobble, 1)


def poisson_interval(count: int) -> tuple[float, float]:
    """Exact 95 % interval of a Poisson mean, by bisection of its distribution."""

    def at_most(k: int, mean: float) -> float:
        return math.fsum(math.exp(i * math.log(mean) - mean - math.lgamma(i + 1)) for i in range(k + 1))

    def solve(k: int, share: float) -> float:
        low, high = 1e-9, 10.0 + 3 * k
        for _ in range(80):
            middle = (low + high) / 2
            low, high = (middle, high) if at_most(k, middle) > share else (low, middle)
        return low

    return (solve(count - 1, 0.975) if count else 0.0), solve(count, 0.025)


def wilson_interval(hits: int, total: int) -> tuple[float, float]:
    """95 % interval of a share."""
    if total == 0:
        return 0.0, 1.0
    z, share = 1.96, hits / total
    centre = (share + z * z / (2 * total)) / (1 + z * z / total)
    half = z / (1 + z * z / total) * math.sqrt(share * (1 - share) / total + z * z / (4 * total * total))
    return max(0.0, centre - half), min(1.0, centre + half)


def median_interval(delays: Sequence[float], seed: int) -> tuple[float, float]:
    """95 % interval of a median, by bootstrap."""
    draws = np.random.default_rng(seed).choice(np.asarray(delays), (1000, len(delays)))
    low, high = np.quantile(np.median(draws, axis=1), [0.025, 0.975])
    return float(low), float(high)


def false_alarm_text(tallies: Sequence[Tally]) -> str:
    alarms = sum(tally.alarms for tally in tallies)
    low, high = poisson_interval(alarms)
    years = len(tallies)
    runs = sum(tally.runs for tally in tallies) / years
    return f"{alarms / years:6.3f} [{low / years:.3f}-{high / years:.3f}]  {runs:.2f} runs a night"


def detection_text(tallies: Sequence[Tally], seed: int) -> str:
    delays = [float(FOUND_WITHIN + 1 if tally.found is None else tally.found) for tally in tallies]
    errors = [tally.start_error for tally in tallies if tally.start_error is not None]
    near = sum(abs(error) <= 1 for error in errors)
    found = wilson_interval(len(errors), len(tallies))
    start = wilson_interval(near, len(errors))
    median = median_interval(delays, seed)
    return (
        f"{100 * len(errors) / len(tallies):5.1f} % [{100 * found[0]:.1f}-{100 * found[1]:.1f}]  "
        f"night {np.median(delays):g} [{median[0]:g}-{median[1]:g}]  "
        f"start {100 * near / max(1, len(errors)):.1f} % [{100 * start[0]:.1f}-{100 * start[1]:.1f}]"
    )


def methods(policy: ChangePointPolicy, otava_python: str | None) -> dict[str, tuple[Any, int]]:
    """The methods compared, each with what its number of series is divided by: Otava takes a hundred times as long."""
    chosen: dict[str, tuple[Any, int]] = {
        "nightbridge": (partial(ours, policy, False), 1),
        "nightbridge, re-runs": (partial(ours, policy, True), 1),
        "one golden, 5 %": (golden, 1),
        "Perfherder": (perfherder, 1),
    }
    if otava_python:
        chosen["Otava, defaults"] = (partial(otava, otava_python), 5)
    return chosen


class Kept:
    """The results of single series in a file of JSON lines, so that nothing is computed twice."""

    def __init__(self, path: Path | None, about: str) -> None:
        self._path, self._about = path, about
        self._known: dict[tuple[Any, ...], Tally] = {}
        if path and path.exists():
            for line in path.read_text(encoding="utf-8").splitlines():
                about_line, *key, tally = json.loads(line)
                if about_line == about:
                    self._known[self._key(*key)] = Tally(*tally)

    def _key(self, method: str, size: float, seed: Sequence[int]) -> tuple[Any, ...]:
        return (method, size, *seed)

    def results(
        self, pool: ProcessPoolExecutor | None, method: str, size: float, one: Callable[..., Tally], seeds: list[Any]
    ) -> list[Tally]:
        """The results of these seeds; those that are not known are computed, or left out where there is no pool."""
        missing = [seed for seed in seeds if self._key(method, size, seed) not in self._known]
        if pool:
            for seed, tally in zip(missing, pool.map(one, missing), strict=True):
                self._known[self._key(method, size, seed)] = tally
                if self._path:
                    with self._path.open("a", encoding="utf-8") as file:
                        file.write(json.dumps([self._about, method, size, seed, tally]) + "\n")
        keys = (self._key(method, size, seed) for seed in seeds)
        return [self._known[key] for key in keys if key in self._known]


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--noise", type=Path, help="per-step times of real runs, .json.gz")
    parser.add_argument("--series", type=int, default=500, help="series-years without a change, per kind of nights")
    parser.add_argument("--steps", type=int, default=1000, help="planted steps, per kind of nights and size")
    parser.add_argument("--otava", help="a Python that has apache-otava; it gets a fifth of the series")
    parser.add_argument("--seed", type=int, default=20261122)
    parser.add_argument("--kinds", nargs="+", default=KINDS, choices=KINDS)
    parser.add_argument("--only", nargs="+", help="names of methods")
    parser.add_argument("--policy", default="{}", help="fields of ChangePointPolicy, as JSON")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--tallies", type=Path, help="file of results, which is continued")
    parser.add_argument("--summary", action="store_true", help="only print what that file has")
    given = parser.parse_args(arguments)
    policy = DEFAULT_POLICY.model_copy(update=json.loads(given.policy))
    noise = read_noise(given.noise) if given.noise else synthetic_noise(2000, 7)
    source = given.noise.name if given.noise else "synthetic"
    kept = Kept(given.tallies, f"{source} {policy}")
    print(f"noise of {len(noise)} {'real' if given.noise else 'synthetic'} runs, seed {given.seed}, policy {policy}")
    with ProcessPoolExecutor(given.processes) as pool:
        for kind in given.kinds:
            for name, (method, divisor) in methods(policy, given.otava).items():
                if given.only and name not in given.only:
                    continue
                began = time.perf_counter()
                results = {}
                for number, size in enumerate((0.0, *SIZES)):
                    count = (given.steps if size else given.series) // divisor
                    one = partial(run_series, method, kind, size, noise)
                    # The same seeds for all methods: they judge the same nights.
                    seeds = [(given.seed, KINDS.index(kind), number, each) for each in range(count)]
                    results[size] = kept.results(None if given.summary else pool, name, size, one, seeds)
                print_results(kind, name, results, given.seed)
                print(f"{'':44} {time.perf_counter() - began:.0f} s", flush=True)


def print_results(kind: str, name: str, results: dict[float, list[Tally]], seed: int) -> None:
    """Every line with the number of series that it is made of."""
    for label, limit in (("", math.inf), (" quiet runs", QUIET)):
        chosen = {size: [tally for tally in part if tally.wobble <= limit] for size, part in results.items()}
        years = chosen[0.0]
        if years:
            print(f"{kind:10}{label:11} {name:21} FA/year {false_alarm_text(years)}  of {len(years)} series-years")
        for size in SIZES:
            if chosen[size]:
                print(f"{'':44} +{size:.0%}  {detection_text(chosen[size], seed)}  of {len(chosen[size])} steps")


if __name__ == "__main__":
    main(sys.argv[1:])
