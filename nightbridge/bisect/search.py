"""Bisect decisions: which commit to measure next, and when one is certain enough to be named. Nothing is run here.

A binary search that believes each measurement goes wrong as soon as noise is no longer small against the change. Here
every commit has a probability of being the first bad one, each measurement moves those (Bayes), and the next point is
where the two halves are equally likely, so that a point is measured again exactly as long as it is in doubt.

What a measurement may mean:

* A run at a commit before the first bad one lies around the good level, any other around the bad level, with the noise
  between runs that the history shows, or more or less of it: how much is estimated from the points themselves.
* Any run may be a stray one (a bad node): a share of `stray` of them is noise. This bounds what one run can prove.
* Today's runs may all lie a little off history's levels (the cluster drifts): that offset is estimated with the rest.
* A failure is bisected in the same way: a run fails alike (1) or does not (0), and neither is certain proof. How often
  a good commit fails by chance, and how often a bad one passes, is estimated from the points.
* Two commits may have made half of the change each, so that runs between them lie in the middle.
* The change may not be among the commits at all. Those two answers, "already bad at the good end" and "still good at
  the bad end", take part like any commit, and win where the measurements support it.

A commit that does not build or start is skipped: commits that are indistinguishable without it are named together, once
one of those that failed was tried again (`bisect.result`). No commit is named before it, and the one before it, were
each run twice, but for one that was measured and does not run any more.
"""

import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from nightbridge.errors import InvalidInput
from nightbridge.models import Model

Array = NDArray[np.float64]

DRIFTS = np.linspace(-3.0, 3.0, 13)
"""Offsets between today and history that are considered, in units of the history's noise."""
FAR_DRIFT = -6.0
"""Logarithm of how likely an offset is beforehand that is so large that the cluster must have changed."""
SCALES = np.array([0.5, 0.7, 1.0, 1.4, 2.0, 2.8, 4.0])
"""How much noisier today's runs may be than the history's."""
SCALE_SPREAD = 0.6
"""Standard deviation of the logarithm of that scale, beforehand."""

CHANCE_FAILURES = np.array([0.003, 0.01, 0.03, 0.1, 0.25])
"""Shares of the runs of a good commit that fail alike, as a bad one's do."""
FAILURES = np.array([0.3, 0.5, 0.7, 0.85, 0.95, 0.995])
"""Shares of the runs of a bad commit that fail."""

MIDDLES = np.array([0.3, 0.5, 0.7])
"""What part of the change the first of two culprits may have made."""
TWO_CULPRITS = 0.03
"""Probability, beforehand, that two commits share the change."""

DOUBT = 0.1
"""Probability of two culprits from which on one is not named alone."""

PAIR_RUNS = 2
"""Runs of a commit, and of the one before it, before it is named."""

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

CulpritKind = Literal["found", "undecided", "already_bad", "still_good"]


class Densities(NamedTuple):
    """How likely each measurement is, as logarithms: one line per measurement, one column per state of the unknowns."""

    unknowns: Array
    good: Array
    bad: Array
    middles: tuple[Array, ...]


class Levels(Model):
    """The two levels of a metric and the noise between runs, all in the metric's unit."""

    good: float
    bad: float
    noise: float = Field(gt=0, description="Standard deviation of a run's value around its level.")

    def densities(self, values: Array, stray: float, drifts: Array = DRIFTS) -> Densities:
        """Unknown are the drift, Gaussian beforehand, and how noisy runs are today."""
        drift, scale = (grid.ravel() for grid in np.meshgrid(drifts, SCALES, indexing="ij"))
        noise = self.noise * scale
        anywhere = stray / (STRAY_RANGE * max(abs(self.bad - self.good), self.noise))

        def around(level: float) -> Array:
            deviation = (values[:, None] - level - drift * self.noise) / noise
            density: Array = np.log(
                (1 - stray) * np.exp(-(deviation**2) / 2) / (noise * math.sqrt(2 * math.pi)) + anywhere
            )
            return density

        return Densities(
            np.maximum(-(drift**2) / 2, FAR_DRIFT) - (np.log(scale) / SCALE_SPREAD) ** 2 / 2,
            around(self.good),
            around(self.bad),
            tuple(around(self.good + part * (self.bad - self.good)) for part in MIDDLES),
        )


class Failure(Model):
    """A failure instead of a metric: a run measures 1 where it fails alike, 0 where it does not fail.

    The losses of a deterministic test are one, too: a run measures 1 where they are not the good ones, bit for bit.
    """

    signature: str = Field(description="What two failures that are alike have in common.")
    digest: str = Field("", description="`Summary.loss_digest` of the good runs; empty where runs fail.")

    @property
    def question(self) -> str:
        """What is searched, in words."""
        return "losses not the same bit for bit" if self.digest else f"failure ({self.signature})"

    @property
    def shown(self) -> str:
        """What a bad run did, in words."""
        return "with other losses" if self.digest else "failed"

    def densities(self, values: Array, stray: float) -> Densities:
        """Unknown are the shares of good and of bad commits' runs that fail alike; the former is small beforehand."""
        chance, failing = (grid.ravel() for grid in np.meshgrid(CHANCE_FAILURES, FAILURES, indexing="ij"))
        failed = values[:, None] > 0.5

        def share(of: Array) -> Array:
            density: Array = np.where(failed, np.log(of), np.log1p(-of))
            return density

        return Densities(-np.log1p(10 * chance), share(chance), share(failing), ())


class Measured(Model):
    """One run of one point. Places count the commits from 1, oldest first; 0 is the good end."""

    place: int = Field(ge=0)
    value: float = Field(description="In the metric's unit; of a failure 1 where the run failed alike, else 0.")


class Culprit(Model):
    """The answer by the measurements so far."""

    kind: CulpritKind
    first: int = Field(0, description="Place of the first commit that may be the first bad one; 0 where none may.")
    last: int = Field(0, description="Place of the last such commit: more than one where those between were skipped.")
    second: tuple[int, int] | None = Field(
        None, description="The same of the second culprit, where two commits share the change; None for one."
    )
    probability: float = Field(description="Of the answer, or of the likeliest one while undecided.")
    runs: int = Field(description="Measurements that it rests on.")


class Posterior(NamedTuple):
    """Probabilities by place, `commits + 2` numbers each; number 0 is "already bad", the last one "still good".

    `alone`: that this commit did it alone; adds up to `1 - shared`. `first` and `second`: that it is the first or the
    second of two that share the change; each adds up to `shared`.
    """

    alone: Array
    first: Array
    second: Array

    @property
    def shared(self) -> float:
        """Probability that two commits share the change."""
        return float(self.first.sum())


class Search(NamedTuple):
    """A range of commits in which one changed the level from good to bad.

    `commits`: how many there are after the good end, the bad end included. `levels`: what is searched for. `prior`:
    weight of each commit beforehand; all alike when None. `policy`: how much is believed.
    """

    commits: int
    levels: Levels | Failure
    prior: Sequence[float] | None = None
    policy: BisectPolicy = DEFAULT_POLICY

    def posterior(self, measured: Sequence[Measured]) -> Posterior:
        """Who may have done it, by all measurements, in any order."""
        weights = np.array(self.prior or (1.0,) * self.commits)
        inside = np.concatenate([[0.0], weights / weights.sum(), [0.0]])
        prior = (1 - self.policy.elsewhere) * inside
        prior[[0, -1]] = self.policy.elsewhere / 2
        density = self.levels.densities(np.array([one.value for one in measured]), self.policy.stray)
        # First bad places between two measured ones have the same evidence: it is computed once for each such group.
        places, index = np.unique([one.place for one in measured], return_inverse=True)
        groups = np.searchsorted(places, np.arange(self.commits + 2))
        sums = [_before(one, index, places.size) for one in (density.good, density.bad, *density.middles)]
        good, bad, middles = sums[0], sums[1][-1] - sums[1], sums[2:]
        alone = _evidence(good + bad + density.unknowns)
        first, second = np.triu_indices(places.size + 1)
        shared = [
            _evidence(good[first] + middle[second] - middle[first] + bad[second] + density.unknowns)
            for middle in middles
        ]
        top = max(evidence.max() for evidence in (alone, *shared))
        single = np.exp(alone - top) * np.bincount(groups, prior, alone.size)
        share, same = (np.bincount(groups, weights, alone.size) for weights in (inside, inside**2))
        ways = np.where(first == second, share[first] ** 2 - same[first], 2 * share[first] * share[second])
        double: Array = sum((np.exp(evidence - top) * ways for evidence in shared), start=np.zeros(first.size))
        double *= TWO_CULPRITS / max(len(shared), 1)
        total = single.sum() + double.sum()
        return Posterior(
            _spread(single / total, groups, prior),
            _spread(np.bincount(first, double / total, alone.size), groups, inside),
            _spread(np.bincount(second, double / total, alone.size), groups, inside),
        )

    def answer(self, measured: Sequence[Measured], skipped: frozenset[int] = frozenset()) -> Culprit:
        """The answer: a commit, several indistinguishable ones, two that share the change, undecided, or none of them.

        `skipped`: places that are not run any more. An end that was never measured leaves open whether the commits
        beside it did it.
        """
        likeliest = self._likeliest(measured, skipped)
        beside_end = likeliest.kind in ("already_bad", "still_good") and likeliest.last > 0
        if beside_end or _once(likeliest, measured, skipped):
            return likeliest.model_copy(update={"kind": "undecided"})
        return likeliest

    def _likeliest(self, measured: Sequence[Measured], skipped: frozenset[int]) -> Culprit:
        """The same without the repetition that a named commit needs, and with what an end that is skipped may be."""
        posterior = self.posterior(measured)
        # What was measured separates them though it is not run again, where that is enough to decide.
        for apart in (skipped - {one.place for one in measured}, skipped):
            found = self._likeliest_of(_groups(self.commits, apart), posterior, len(measured))
            if found.kind != "undecided":
                break
        return found

    def _likeliest_of(self, groups: Sequence[tuple[int, int]], posterior: Posterior, runs: int) -> Culprit:
        """The same by the groups of places that are not told apart. `runs`: measurements that it rests on."""
        alone, firsts, seconds = (
            [float(share[first : last + 1].sum()) for first, last in groups] for share in posterior
        )
        second = None
        if posterior.shared > 0.5:
            best, other = int(np.argmax(firsts)), int(np.argmax(seconds))
            second = groups[other]
            probability = max(firsts[best] + seconds[other] - 1, 0.0)
        else:
            best = int(np.argmax(alone))
            # That it had no small part in it cannot be proved of any other commit: up to a point that is no doubt.
            probability = alone[best] + (firsts[best] + seconds[best] if posterior.shared < DOUBT else 0.0)
            if best in (0, len(groups) - 1) and len(groups) > 1:
                # That it is none of the commits is one answer: which of the two is as sure as the drift is known.
                probability = alone[0] + alone[-1]
        first, last = groups[best]
        if probability < self.policy.confidence:
            kind: CulpritKind = "undecided"
        else:
            kind = "already_bad" if first == 0 else "still_good" if last == self.commits + 1 else "found"
        named = kind in ("found", "undecided") or first < last
        return Culprit(
            kind=kind,
            first=max(first, 1) if named else 0,
            last=min(last, self.commits) if named else 0,
            second=(max(second[0], 1), min(second[1], self.commits)) if second else None,
            probability=probability,
            runs=runs,
        )

    def next_places(
        self, measured: Sequence[Measured], skipped: frozenset[int] = frozenset(), at_once: int = 1
    ) -> tuple[int, ...]:
        """The places to measure next, `at_once` of them, which may name one place several times; empty when decided.

        Both ends are measured first. After that one point divides the probability in halves, k points in k + 1 parts.

        Raises:
            InvalidInput: Every place is skipped, and nothing was measured.
        """
        commits = self.commits
        open_places = [place for place in range(commits + 1) if place not in skipped]
        if not open_places and not measured:
            raise InvalidInput(
                "no commit of the range can be run", subject=f"{commits} commits", advice="Choose other ends"
            )
        found = self._likeliest(measured, skipped)
        wanted = min(at_once, self.policy.most_runs - found.runs)
        if wanted <= 0 or not open_places:
            return ()
        # Both ends come first: without them a drift of the cluster could be taken for either level.
        if ends := sorted({0, commits} - skipped - {one.place for one in measured}):
            return tuple(ends[:wanted])
        if found.kind != "undecided":
            return tuple(_once(found, measured, skipped)[:wanted])
        posterior = self.posterior(measured)
        # The probability that a place is past the first culprit, and past the last one: the same, where there is one.
        past = [np.cumsum(posterior.alone + share)[open_places] for share in (posterior.first, posterior.second)]
        chosen: list[int] = []
        runs = {place: sum(one.place == place for one in measured) for place in open_places}
        for number in range(1, wanted + 1):
            share = number / (wanted + 1)
            # 1 where a run divides the probability as wanted, 0 where it would tell nothing.
            worth = np.max([np.minimum(is_bad / share, (1 - is_bad) / (1 - share)) for is_bad in past], axis=0)
            # A place that many runs have left in doubt is given up for its neighbours: it may be the drift that is in
            # doubt, and the same place never separates it from the change.
            worth /= 1 + REPEAT_COST * np.array([runs[place] for place in open_places])
            place = open_places[int(np.argmax(worth))]
            chosen.append(place)
            runs[place] += 1
        return tuple(chosen)


def prior_of_nights(
    commits: int, levels: Levels | Failure, nights: Sequence[Measured], policy: BisectPolicy = DEFAULT_POLICY
) -> tuple[float, ...]:
    """The weight of each commit as the nights of the history suggest it, for pins that lie in the range.

    Nights may have been slow for another reason than the code, so that they only order the search: no commit
    gets less than a fifth of an equal share, and nights do not decide whether the change is in the range at all.
    """
    if not nights:
        return (1.0 / commits,) * commits
    inside = Search(commits, levels, None, policy).posterior(nights).alone[1 : commits + 1]
    mixed = 0.8 * inside / inside.sum() + 0.2 / commits
    return tuple(float(weight) for weight in mixed / mixed.sum())


def _before(density: Array, index: NDArray[np.intp], places: int) -> Array:
    """Sums over the measurements before each of the measured places, and over all: one line more than there are."""
    by_place = np.zeros((places, density.shape[1]))
    np.add.at(by_place, index, density)
    return np.concatenate([np.zeros((1, density.shape[1])), by_place.cumsum(axis=0)])


def _evidence(logarithms: Array) -> Array:
    """The logarithm of the sum over all states of the unknowns."""
    top = logarithms.max(axis=1)
    summed: Array = top + np.log(np.exp(logarithms - top[:, None]).sum(axis=1))
    return summed


def _spread(masses: NDArray[Any], groups: NDArray[np.intp], prior: Array) -> Array:
    """The probability of each place by that of its group, in proportion to what was likely beforehand."""
    weights = np.bincount(groups, prior, masses.size)
    return masses[groups] * prior / np.where(weights > 0, weights, 1.0)[groups]


def _once(found: Culprit, measured: Sequence[Measured], skipped: frozenset[int]) -> list[int]:
    """Places that have to be run again before the answer is named: the pair (k-1, k) of each culprit."""
    if found.kind != "found":
        return []
    pairs = [(found.first - 1, found.last)] + ([(found.second[0] - 1, found.second[1])] if found.second else [])
    runs = [one.place for one in measured]
    places = {place for pair in pairs for place in pair} - skipped
    return [place for place in sorted(places) if runs.count(place) < PAIR_RUNS]


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
