"""Planted causes on seven axes: how often an attribution names the right one, how sure it was, and after how many runs.

    PYTHONPATH=. .venv/bin/python benchmarks/attribution.py [--noise FILE.json.gz] [--causes N] [--at-once N] [--seed N]

Each case is a test with 30 good nights and 3 bad ones, whose levels and noise are found as `nightbridge attribute`
finds them, and a change of 3 to 12 %, at least 4 times the noise between its runs (--sigmas). Between
both nights the axis of the cause has changed, and each other one in seven cases of ten:

    image, Megatron-Bridge (5 to 60 commits, bumps of the submodule among them), Megatron-Core (5 to 60), NeMo-Run (1 to
    5), configuration (1 to 8 keys), environment (1 to 6 variables), nodes (1 to 8 of them)

A run's steps are bootstrapped from a real run's (FILE; see `detection.py`), run to run it is 0.5 % faster or slower,
and one in 50 is slowed by 5 to 30 % by something else; the cluster has drifted since the bad night (0.3 %). One commit
in twenty does not start, and in one case of five neither does an old Megatron-Bridge with a new submodule. Decisions
are those of `nightbridge.attribution.factor_search` and, for commits, of `nightbridge.bisect.search`, which begins with
what the exchanged runs have measured. A cause is right when exactly its factors are named, and its commit among those
that cannot be told apart.

Printed are the shares of one cause and of two simultaneous ones that were named right, the runs in all, and by how sure
an answer was how many of them were right. `bump`: answers that name a commit which only moves the submodule.
"""

import argparse
import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from benchmarks.detection import Array, measured_runs, read_noise, synthetic_noise, wilson_interval
from benchmarks.error_rate import record_at
from benchmarks.verdict import STEPS, record_of
from nightbridge.attribution.factor_search import Cause, Design, Exchange, FactorSearch, descent_into
from nightbridge.bisect.search import BisectPolicy, Failure, Levels, Measured, Search
from nightbridge.bisect.shift import find_shift
from nightbridge.history.rows import row_of
from nightbridge.models import Summary, VerdictStatus

FACTORS: Mapping[str, tuple[int, int]] = {
    "image": (1, 1),
    "megatron_bridge": (1, 1),
    "submodule": (1, 1),
    "nemo_run": (1, 1),
    "configuration": (1, 8),
    "environment": (1, 6),
    "nodes": (1, 8),
}
"""By axis, how many factors it may have."""

COMMITS: Mapping[str, tuple[int, int]] = {"megatron_bridge": (5, 60), "submodule": (5, 60), "nemo_run": (1, 5)}
CHANGED, BROKEN, MISMATCH, STRAY = 0.7, 0.05, 0.2, 0.02
GOOD_NIGHTS, BAD_NIGHTS = 30, 3
SIGMA, DRIFT = 0.005, 0.003
POLICY = BisectPolicy(confidence=0.99, most_runs=40)
BOUNDS = (0.0, 0.5, 0.9, 0.99, 0.999, 1.01)


class Case(NamedTuple):
    """A test whose level has changed: the axis of each factor, the causes with their sizes, and what a run measures.

    `commits`: of a factor that is a range, how many; `culprits`: of a cause that is one, which; `broken`: those that do
    not start; `bumps`: of Megatron-Bridge those that only move the submodule; `mismatch`: factors of which the first at
    its good level does not start with the second at its bad one.
    """

    axes: tuple[str, ...]
    sizes: Mapping[int, float]
    commits: Mapping[int, int]
    culprits: Mapping[int, int]
    broken: Mapping[int, frozenset[int]]
    bumps: frozenset[int]
    mismatch: tuple[int, int] | None
    residual: Array
    random: np.random.Generator
    drift: float

    def starts(self, design: Design) -> bool:
        """Whether a run of a design starts."""
        return self.mismatch is None or design[self.mismatch[0]] or not design[self.mismatch[1]]

    def value(self, bad: Sequence[int], drift: float = 0.0) -> float:
        """The step time of a run with these causes in it."""
        factor = 1 + sum(self.sizes[cause] for cause in bad) + drift + SIGMA * float(self.random.standard_normal())
        if self.random.random() < STRAY:
            factor *= 1 + float(self.random.uniform(0.05, 0.3))
        return float(measured_runs(self.random, self.residual, (1,))[0, 0]) * factor


class Named(NamedTuple):
    """What one case came to."""

    axis: str
    right: bool
    said: bool
    probability: float
    runs: int
    bump: bool
    kind: str


def make_case(random: np.random.Generator, noise: Sequence[Array], causes: int, sigmas: float) -> Case:
    """Draw a test, what changed in it, and which of that did it."""
    guilty = [str(each) for each in random.choice(list(FACTORS), causes, replace=False)]
    axes = [
        axis
        for axis, (least, most) in FACTORS.items()
        if axis in guilty or random.random() < CHANGED
        for _ in range(int(random.integers(least, most + 1)))
    ]
    commits = {
        at: int(random.integers(COMMITS[axis][0], COMMITS[axis][1] + 1))
        for at, axis in enumerate(axes)
        if axis in COMMITS
    }
    bumps = frozenset[int]()
    if "megatron_bridge" in axes and "submodule" in axes:
        bridge = commits[axes.index("megatron_bridge")]
        bumps = frozenset(place for place in range(1, bridge + 1) if random.random() < 0.1)
    chosen = {int(random.choice([at for at, each in enumerate(axes) if each == axis])) for axis in guilty}
    real = {at: [place for place in range(1, commits[at] + 1) if axes[at] != "megatron_bridge" or place not in bumps]
            for at in chosen if at in commits}  # fmt: skip
    culprits = {at: int(random.choice(places)) if places else 1 for at, places in real.items()}
    # The ends of a range have run in the nights.
    broken = {
        at: frozenset(place for place in range(1, count) if random.random() < BROKEN) for at, count in commits.items()
    }
    mismatch = None
    if bumps and random.random() < MISMATCH:
        mismatch = (axes.index("megatron_bridge"), axes.index("submodule"))
    while True:
        residual = noise[int(random.integers(len(noise)))]
        spread = float(np.hypot(np.std(measured_runs(random, residual, (64,))[:, 0]), SIGMA))
        sizes = {at: float(np.exp(random.uniform(np.log(0.03), np.log(0.12)))) for at in sorted(chosen)}
        if min(sizes.values()) >= sigmas * spread:
            break
    drift = DRIFT * float(random.standard_normal())
    return Case(tuple(axes), sizes, commits, culprits, broken, bumps, mismatch, residual, random, drift)


def levels_of(case: Case) -> Levels | Failure:
    """The levels as the product finds them in the history of the test."""
    template, rows = record_of(1, 0, Summary()), []
    for night in range(GOOD_NIGHTS + BAD_NIGHTS):
        bad = night >= GOOD_NIGHTS
        value = case.value(list(case.sizes) if bad else ())
        summary = Summary(steps_expected=STEPS, steps_done=STEPS, step_time=value, source="tensorboard")
        row = row_of(record_at(template, night, "node[1-2]", summary), None)
        status = VerdictStatus.REGRESSED if bad else VerdictStatus.PASSED
        rows.append(row.model_copy(update={"verdict": status}))
    return find_shift(rows, "step_time").levels


def attribute(case: Case, levels: Levels | Failure, at_once: int) -> tuple[Cause, list[Exchange]]:
    """Exchange factors until the cause is named."""
    sharing = Counter(case.axes)
    search = FactorSearch(tuple(1 / sharing[axis] for axis in case.axes), levels, POLICY)
    runs: list[Exchange] = []
    while designs := search.next_designs(runs, at_once):
        for design in designs:
            bad = [at for at in case.sizes if design[at]]
            value = case.value(bad, case.drift) if case.starts(design) else None
            runs.append(Exchange(design=design, value=value))
    return search.answer(runs), runs


def descend(
    case: Case, at: int, cause: Cause, levels: Levels | Failure, runs: Sequence[Exchange], at_once: int
) -> tuple[bool, float, int, bool]:
    """Bisect inside a factor: whether its commit is named, how sure, after how many runs, whether that is a bump."""
    count = case.commits[at]
    descent = descent_into([at], cause, levels, runs, count)
    search = Search(count, descent.levels, None, POLICY)
    measured, skipped, made = list(descent.known), frozenset[int](), 0
    others = [other for other in case.sizes if other != at and other not in descent.good]
    while places := search.next_places(measured, skipped, at_once):
        for place in places:
            made += 1
            if place in case.broken[at]:
                skipped |= {place}
                continue
            bad = [*others, *([at] if at in case.sizes and place >= case.culprits[at] else [])]
            measured.append(Measured(place=place, value=case.value(bad, case.drift)))
    answer = search.answer(measured, skipped)
    named = range(answer.first, answer.last + 1) if answer.kind == "found" and not answer.second else range(0)
    bump = len(named) == 1 and case.axes[at] == "megatron_bridge" and named[0] in case.bumps
    return case.culprits.get(at) in named, answer.probability, made, bump


def solve(noise: Sequence[Array], sigmas: float, at_once: int, causes: int, seed: tuple[int, ...]) -> Named:
    """One case from its history to its answer."""
    random = np.random.default_rng(seed)
    case = make_case(random, noise, causes, sigmas)
    levels = levels_of(case)
    cause, runs = attribute(case, levels, at_once)
    said, count, probability, bump = cause.kind == "found", len(runs), cause.probability, False
    right = said and set(cause.factors) == set(case.sizes)
    for at in cause.factors if said else ():
        if at in case.commits:
            found, sure, made, is_bump = descend(case, at, cause, levels, runs, at_once)
            count, probability, bump = count + made, probability * sure, bump or is_bump
            right &= found
    axis = "+".join(case.axes[at] for at in case.sizes)
    return Named(axis, right, said, probability, count, bump, cause.kind)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a table for one cause and for two."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--noise", type=Path, help="per-step times of real runs, .json.gz")
    parser.add_argument("--causes", type=int, default=200, help="cases with one planted cause, and as many with two")
    parser.add_argument("--at-once", type=int, default=1, help="runs that are made at once")
    parser.add_argument("--sigmas", type=float, default=4.0, help="least change, in standard deviations of a run")
    parser.add_argument("--seed", type=int, default=20261123)
    parser.add_argument("--processes", type=int, default=2)
    given = parser.parse_args(arguments)
    noise = read_noise(given.noise) if given.noise else synthetic_noise(500, 7)
    print(
        f"noise of {len(noise)} runs, {given.causes} cases of each, seed {given.seed}, {given.at_once} run(s) at once"
    )
    with ProcessPoolExecutor(given.processes) as pool:
        for causes in (1, 2):
            seeds = [(given.seed, causes, each) for each in range(given.causes)]
            print_table(causes, list(pool.map(partial(solve, noise, given.sigmas, given.at_once, causes), seeds)))


def print_table(causes: int, found: Sequence[Named]) -> None:
    """What became of the cases."""
    runs = [each.runs for each in found]
    right = sum(each.right for each in found)
    low, high = wilson_interval(right, len(found))
    print(
        f"{causes} cause(s): right {right / len(found):.1%} [{low:.1%}-{high:.1%}], bump {sum(e.bump for e in found)}, "
        f"runs median {np.median(runs):.0f}, 95 % {np.percentile(runs, 95):.0f}; {dict(Counter(e.kind for e in found))}"
    )
    for axis in FACTORS if causes == 1 else ():
        own = [each for each in found if each.axis == axis]
        if own:
            share = sum(each.right for each in own) / len(own)
            print(f"    {axis:16} {len(own):3} cases, right {share:.1%}, runs {np.median([e.runs for e in own]):.0f}")
    for least, most in itertools.pairwise(BOUNDS):
        own = [each for each in found if each.said and least <= each.probability < most]
        if own:
            share = sum(each.right for each in own) / len(own)
            print(f"    said with {least:.1%} and more: {len(own):3}, right {share:.1%}")


if __name__ == "__main__":
    main()
