"""Bisect decisions: which commit to measure next, and when one is certain enough to be named. Nothing is run here.

A binary search that believes each measurement goes wrong as soon as noise is no longer small against the change. Here
every commit has a probability of being the first bad one, each measurement moves those (Bayes), and the next point is
where the two halves are equally likely, so that a point is measured again exactly as long as it is in doubt.

What a measurement may mean:

* A run at a commit before the first bad one lies around the good level, any other around the bad level, with the noise
  between runs that the history shows.
* Any run may be a stray one (a bad node): a share of `stray` of them is noise. This bounds what one run can prove.
* Today's runs may all lie a little off history's levels (the cluster drifts): that offset is estimated with the rest.
* The change may not be among the commits at all. Those two answers, "already bad at the good end" and "still good at
  the bad end", take part like any commit, and win where the measurements support it.

A commit that does not build or start is skipped: commits that are indistinguishable without it are named together.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from nightbridge.errors import InvalidInput
from nightbridge.models import Model

Array = NDArray[np.float64]

DRIFT_STEPS = 25
"""Offsets between today and history that are considered, from minus to plus `DRIFT_RANGE` times the noise."""
DRIFT_RANGE = 3.0

REPEAT_COST = 0.15
"""How much less each run of a place makes the next one there worth."""

STRAY_RANGE = 4.0
"""Stray runs are taken to lie anywhere in so many times the change."""


class BisectPolicy(Model):
    """When a commit is certain enough, and what it may cost."""

    confidence: float = Field(0.99, gt=0.5, lt=1, description="Probability from which on a commit is named.")
    most_runs: int = Field(100, ge=1, description="Runs after which the search ends undecided.")
    elsewhere: float = Field(
        0.1, gt=0, lt=1, description="Probability, beforehand, that no commit of the range did it."
    )
    stray: float = Field(0.03, gt=0, lt=0.5, description="Share of runs without information: bad nodes, busy networks.")


DEFAULT_POLICY = BisectPolicy()

AnswerKind = Literal["found", "undecided", "already_bad", "still_good"]


class Levels(Model):
    """The two levels of a metric and the noise between runs, all in the metric's unit."""

    good: float
    bad: float
    noise: float = Field(gt=0, description="Standard deviation of a run's value around its level.")


class Measured(Model):
    """One run of one point. Places count the commits from 1, oldest first; 0 is the good end."""

    place: int = Field(ge=0)
    value: float


class Answer(Model):
    """The answer by the measurements so far."""

    kind: AnswerKind
    first: int = Field(0, description="Place of the first commit that may be the first bad one; 0 where none may.")
    last: int = Field(0, description="Place of the last such commit: more than one where those between were skipped.")
    probability: float = Field(description="Of the answer, or of the likeliest one while undecided.")
    runs: int = Field(description="Measurements that it rests on.")


class Search(NamedTuple):
    """A range of commits in which one changed the level from good to bad.

    `commits`: how many there are after the good end, the bad end included. `prior`: weight of each commit beforehand;
    all alike when None. `policy`: how much is believed.
    """

    commits: int
    levels: Levels
    prior: Sequence[float] | None = None
    policy: BisectPolicy = DEFAULT_POLICY

    def likelihoods(self, measured: Sequence[Measured]) -> Array:
        """The probability of each place to be the first bad one: `commits + 2` numbers that add up to 1.

        Number 0 is "already bad at the good end", the last one "still good at the bad end".

        Args:
            measured: All measurements, in any order.

        Raises:
            InvalidInput: There is no commit, the levels are equal, or a place is not in the range.
        """
        levels = self.levels
        _check(self.commits, levels, measured)
        drift = np.linspace(-DRIFT_RANGE, DRIFT_RANGE, DRIFT_STEPS)
        # By first bad place and drift: the drift is Gaussian beforehand, with the noise as its standard deviation.
        belief = np.log(_prior(self.commits, self.prior, self.policy))[:, None] - drift[None, :] ** 2 / 2
        if measured:
            values = np.array([one.value for one in measured])
            good, bad = (
                _log_density(values - level, drift, levels, self.policy) for level in (levels.good, levels.bad)
            )
            # A measurement counts as bad for every first bad place up to its own.
            by_place = np.zeros((self.commits + 2, drift.size))
            np.add.at(by_place, [one.place for one in measured], bad - good)
            belief += good.sum(axis=0)[None, :] + by_place[::-1].cumsum(axis=0)[::-1]
        weights = np.exp(belief - belief.max()).sum(axis=1)
        probabilities: Array = weights / weights.sum()
        return probabilities

    def answer(self, measured: Sequence[Measured], skipped: frozenset[int] = frozenset()) -> Answer:
        """The answer: a commit, several indistinguishable ones, undecided, or none of them.

        Args:
            measured: All measurements, in any order.
            skipped: Places that cannot be measured.
        """
        probabilities = self.likelihoods(measured)
        groups = _groups(self.commits, skipped)
        sums = [float(probabilities[first : last + 1].sum()) for first, last in groups]
        best = int(np.argmax(sums))
        first, last = groups[best]
        probability = sums[best]
        if best in (0, len(groups) - 1) and len(groups) > 1:
            # That it is none of the commits is one answer: which of the two is only as sure as the drift is known.
            probability = sums[0] + sums[-1]
        if probability < self.policy.confidence:
            kind: AnswerKind = "undecided"
        else:
            kind = "already_bad" if first == 0 else "still_good" if last == self.commits + 1 else "found"
        named = kind in ("found", "undecided")
        return Answer(
            kind=kind,
            first=max(first, 1) if named else 0,
            last=min(last, self.commits) if named else 0,
            probability=probability,
            runs=len(measured),
        )

    def next_places(
        self, measured: Sequence[Measured], skipped: frozenset[int] = frozenset(), at_once: int = 1
    ) -> tuple[int, ...]:
        """The places to measure next, `at_once` of them, which may name one place several times; empty when decided.

        Both ends are measured first. After that one point divides the probability in halves, k points in k + 1 parts.

        Raises:
            InvalidInput: Every place is skipped.
        """
        commits = self.commits
        open_places = [place for place in range(commits + 1) if place not in skipped]
        if not open_places:
            raise InvalidInput(
                "no commit of the range can be run", thing=f"{commits} commits", advice="Choose other ends"
            )
        found = self.answer(measured, skipped)
        wanted = min(at_once, self.policy.most_runs - found.runs)
        if wanted <= 0:
            return ()
        # Both ends come first: without them a drift of the cluster could be taken for either level.
        if ends := sorted({0, commits} - skipped - {one.place for one in measured}):
            return tuple(ends[:wanted])
        if found.kind != "undecided":
            return ()
        # The probability that a place is bad: that the first bad one is there or before it.
        is_bad = np.cumsum(self.likelihoods(measured))[open_places]
        chosen: list[int] = []
        runs = {place: sum(one.place == place for one in measured) for place in open_places}
        for number in range(1, wanted + 1):
            share = number / (wanted + 1)
            # 1 where a run divides the probability as wanted, 0 where it would tell nothing.
            worth = np.minimum(is_bad / share, (1 - is_bad) / (1 - share))
            # A place that many runs have left in doubt is given up for its neighbours: it may be the drift that is in
            # doubt, and the same place never separates it from the change.
            worth /= 1 + REPEAT_COST * np.array([runs[place] for place in open_places])
            place = open_places[int(np.argmax(worth))]
            chosen.append(place)
            runs[place] += 1
        return tuple(chosen)


def prior_of_nights(
    commits: int, levels: Levels, nights: Sequence[Measured], policy: BisectPolicy = DEFAULT_POLICY
) -> tuple[float, ...]:
    """The weight of each commit as the nights of the history suggest it, for pins that lie in the range.

    Nights may have been slow for another reason than the code, so that they only order the search: no commit
    gets less than a fifth of an equal share, and nights do not decide whether the change is in the range at all.
    """
    if not nights:
        return (1.0 / commits,) * commits
    inside = Search(commits, levels, None, policy).likelihoods(nights)[1 : commits + 1]
    mixed = 0.8 * inside / inside.sum() + 0.2 / commits
    return tuple(float(weight) for weight in mixed / mixed.sum())


def medians(measured: Sequence[Measured]) -> Mapping[int, tuple[int, float]]:
    """Number of runs and median value, by place."""
    by_place: dict[int, list[float]] = {}
    for one in measured:
        by_place.setdefault(one.place, []).append(one.value)
    return {place: (len(values), float(np.median(values))) for place, values in sorted(by_place.items())}


def _check(commits: int, levels: Levels, measured: Sequence[Measured]) -> None:
    if commits < 1:
        raise InvalidInput("no commit to search", thing="range", advice="Name a good commit before the bad one")
    if levels.good == levels.bad:
        raise InvalidInput("both levels are the same", thing=f"{levels.good:.6g}", advice="There is nothing to bisect")
    for one in measured:
        if one.place > commits or not math.isfinite(one.value):
            raise InvalidInput("not a measurement of this range", thing=f"place {one.place}: {one.value}")


def _prior(commits: int, weights: Sequence[float] | None, policy: BisectPolicy) -> Array:
    inside = np.asarray(weights if weights is not None else np.ones(commits), dtype=np.float64)
    if inside.size != commits or not (inside > 0).all():
        raise InvalidInput(f"{inside.size} weights for {commits} commits", thing="prior", advice="Give positive ones")
    ends = [policy.elsewhere / 2]
    return np.concatenate([ends, inside / inside.sum() * (1 - policy.elsewhere), ends])


def _log_density(residuals: Array, drift: Array, levels: Levels, policy: BisectPolicy) -> Array:
    """How likely runs are so far from a level: one line per run, one column per drift (in units of the noise)."""
    deviation = residuals[:, None] / levels.noise - drift[None, :]
    usual = np.exp(-(deviation**2) / 2) / (levels.noise * math.sqrt(2 * math.pi))
    stray = 1.0 / (STRAY_RANGE * max(abs(levels.bad - levels.good), levels.noise))
    density: Array = np.log((1 - policy.stray) * usual + policy.stray * stray)
    return density


def _groups(commits: int, skipped: frozenset[int]) -> list[tuple[int, int]]:
    """First bad places that no measurement can tell apart: those between two places that can be measured."""
    groups: list[tuple[int, int]] = []
    first = 0
    for place in range(commits + 2):
        # Places up to here and those after are distinguished by measuring here.
        if place == commits + 1 or place not in skipped:
            groups.append((first, place))
            first = place + 1
    return groups
