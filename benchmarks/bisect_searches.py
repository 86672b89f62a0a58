"""Simulated bisects with a known culprit: how often the right commit is named, and after how many runs.

    PYTHONPATH=. .venv/bin/python benchmarks/bisect_searches.py [SEARCHES [SEED]]

Each search has 2 to 64 commits, one in twenty of which does not run. Slow-downs are of 3 to 6 times the noise between
runs that the history shows; the noise of the searched runs is as large, or twice as large; one run in 50 is a stray
one. A failure is one of six kinds, which differ in how often a bad commit fails and a good one fails alike by chance.
"""

import sys
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from nightbridge.bisect.search import Culprit, Failure, Levels, Measured, Search

MOST_COMMITS = 64
BROKEN = 0.05
STRAY = 0.02
LEVELS = Levels(good=1.0, bad=1.03, noise=0.01)

FAILURES = {
    "crash": (1.0, 0.0),
    "non-finite loss": (0.95, 0.0),
    "out of memory": (0.98, 0.01),
    "hang": (0.6, 0.01),
    "short": (0.8, 0.02),
    "vanished metric": (1.0, 0.005),
}
"""By kind, the share of a bad commit's runs that fail and of a good commit's that fail alike."""


class Case(NamedTuple):
    """One search: how many commits, the culprits' places, those that do not run, and what a run measures."""

    levels: Levels | Failure
    commits: int
    culprits: tuple[int, ...]
    broken: frozenset[int]
    value: Callable[[int], float]


def slow_down(random: np.random.Generator, noise: float, culprits: int = 1) -> Case:
    """A step of 3 to 6 times the history's noise; `noise` is that of the runs, in units of the history's."""
    commits = int(random.integers(2 * culprits, MOST_COMMITS + 1))
    places = tuple(sorted(int(place) for place in random.choice(commits, culprits, replace=False) + 1))
    levels = Levels(good=1.0, bad=1.0 + 0.01 * random.uniform(3, 6) * culprits, noise=0.01)

    def value(place: int) -> float:
        part = sum(place >= culprit for culprit in places) / culprits
        stray = random.uniform(0.05, 0.3) if random.random() < STRAY else 0.0
        level = levels.good + part * (levels.bad - levels.good)
        return float(level * (1 + stray) + noise * levels.noise * random.standard_normal())

    return Case(levels, commits, places, _broken(random, commits), value)


def failure(random: np.random.Generator, fails: float, by_chance: float) -> Case:
    """A failure that a bad commit shows in a share of its runs."""
    commits = int(random.integers(2, MOST_COMMITS + 1))
    place = int(random.integers(1, commits + 1))

    def value(at: int) -> float:
        return float(random.random() < (fails if at >= place else by_chance))

    return Case(Failure(signature="failed"), commits, (place,), _broken(random, commits), value)


def _broken(random: np.random.Generator, commits: int) -> frozenset[int]:
    return frozenset(int(place) for place in range(1, commits) if random.random() < BROKEN)


def run(case: Case) -> Culprit:
    """Search to the end, four runs at once."""
    search = Search(case.commits, case.levels)
    measured: list[Measured] = []
    skipped: frozenset[int] = frozenset()
    while places := search.next_places(measured, skipped, 4):
        for place in places:
            if place in case.broken:
                skipped |= {place}
            else:
                measured.append(Measured(place=place, value=case.value(place)))
    return search.answer(measured, skipped)


def is_right(case: Case, answer: Culprit) -> bool:
    """Whether exactly the culprits are named; one of several that cannot be told apart counts."""
    named = [(answer.first, answer.last)] + ([answer.second] if answer.second else [])
    return len(named) == len(case.culprits) and all(
        first <= culprit <= last for culprit, (first, last) in zip(case.culprits, named, strict=True)
    )


def main(searches: int = 1000, seed: int = 20261123) -> None:
    """Print one line for each kind."""
    kinds: dict[str, Callable[[np.random.Generator], Case]] = {
        "slow-down": lambda random: slow_down(random, 1.0),
        "slow-down, twice the noise": lambda random: slow_down(random, 2.0),
        "two culprits": lambda random: slow_down(random, 1.0, culprits=2),
        **{
            name: (lambda random, rates=rates: failure(random, *rates))  # type: ignore[misc]
            for name, rates in FAILURES.items()
        },
    }
    print(f"{searches} searches of each kind, seed {seed}")
    for name, make in kinds.items():
        random = np.random.default_rng(seed)
        right = wrong = 0
        runs = []
        for _ in range(searches):
            case = make(random)
            answer = run(case)
            runs.append(answer.runs)
            if answer.kind == "found":
                right += is_right(case, answer)
                wrong += not is_right(case, answer)
            elif answer.kind != "undecided":
                wrong += 1
        said = max(right + wrong, 1)
        print(
            f"{name:28} right {right / searches:6.1%}  undecided {1 - (right + wrong) / searches:6.1%}  "
            f"wrong {wrong / said:6.2%} of those said  "
            f"runs: median {np.median(runs):.0f}, 95 % {np.percentile(runs, 95):.0f}"
        )


if __name__ == "__main__":
    main(*(int(argument) for argument in sys.argv[1:]))
