"""The decisions of an attribution: which run to make next, and when a cause is certain enough to be named.

What changed between a good and a bad run are *factors*, each at its good or at its bad level. A run is a choice of
levels, a *design*. Exchanging one factor at a time needs a run for each and misses what only two of them do together:
here every design moves about half of what is still in doubt (a fractional factorial design, chosen run by run), so that
the number of runs grows with the logarithm of that of the factors.

The hypotheses, each with a probability that every measurement moves (Bayes):

* one factor made the change; or it made a part of it, and the rest is gone today, or is there with any factor (the
  cluster's own);
* two factors share the change, make it only together, or make it each on its own;
* none did: the good point is as bad today (the cluster changed), or the bad one as good (it has passed).

What a measurement may mean is as in `bisect.search`: the levels of the history, the noise between runs, stray runs,
and a drift of the cluster since. The next design is the one that is expected to tell most about the hypotheses
(mutual information). Both controls, everything good and everything bad, come first. A cause is named when it is certain
enough and a run with everything bad but the cause has shown its part.

A design that does not start, as an old launcher with a new submodule, says nothing, and others that combine the same
two levels are avoided. Where no design is left that could tell, what cannot be distinguished is named together.
"""

import itertools
import math
import statistics
from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from nightbridge.bisect.search import (
    DOUBT,
    DRIFTS,
    MIDDLES,
    REPEAT_COST,
    Array,
    BisectPolicy,
    Densities,
    Failure,
    Levels,
    Measured,
)
from nightbridge.models import Model

Design = tuple[bool, ...]
"""Of each factor whether it is at its bad level."""

TWO_CAUSES = 0.1
"""Probability, beforehand, that two factors have to do with the change: changes come in bundles."""
PART_OF_IT = 0.1
"""Of the probability of one factor, the part for its having made less than all of the change."""

RANDOM_DESIGNS = 96
"""Designs that are drawn in each round, besides the controls and those that move one factor or two."""
LIKELIEST = 10
"""Factors that designs of their own are considered for."""

LEAST_WORTH = 0.01
"""Expected information (nats) below which a run is not worth making."""
DOES_NOT_START = 0.3
"""How much less a design is worth for each failed one that it shares a combination of levels with."""

FARTHEST_DRIFT, DRIFT_STEPS = 2.0, 30
"""How far the cluster may have moved since the bad night, in units of the change, and steps of that at most."""

BINS = 16
SURE_FAILURE, CHANCE_FAILURE = 0.85, 0.02
"""How the expected information takes runs of bad and of good points to fail."""

Relation = Literal["alone", "partly", "shared", "together", "either"]
"""`alone`: one factor made the change; `partly`: a part of it. Two factors: they share it, make it only together, or
make it each on its own."""

CauseKind = Literal["found", "undecided", "indistinct", "already_bad", "still_good"]


class Exchange(Model):
    """One run: its design, and what it measured in the metric's unit; of a failure 1 where it failed alike, else 0."""

    design: Design
    value: float | None = Field(description="None where the design does not start.")


class Cause(Model):
    """The answer by the runs so far. Factors are counted from 0."""

    kind: CauseKind
    factors: tuple[int, ...] = Field((), description="The likeliest cause; those that cannot be distinguished.")
    relation: Relation = "alone"
    parts: tuple[float, ...] = Field((), description="What share of the change each of the factors makes.")
    probability: float = Field(description="That these factors are the cause.")
    relation_probability: float = Field(0.0, description="That they have to do with each other in this way.")
    marginals: tuple[float, ...] = Field((), description="Of each factor, that it has a part in the cause.")
    runs: int = Field(description="Measurements that it rests on.")


class _Hypotheses(NamedTuple):
    """Of each hypothesis its factors (twice the same for one), its relation, and which level a run has by its design.

    `table`: a line each; number 0 where neither factor is bad, 1 the first, 2 the second, 3 both. Factor number `n` is
    one that is always bad: the cluster.
    """

    first: NDArray[np.intp]
    second: NDArray[np.intp]
    relation: NDArray[np.intp]
    table: NDArray[np.intp]
    prior: Array


_ALONE, _PARTLY, _SHARED, _TOGETHER, _EITHER, _ALREADY_BAD, _STILL_GOOD = range(7)
_RELATIONS: tuple[Relation, ...] = ("alone", "partly", "shared", "together", "either")


class FactorSearch(NamedTuple):
    """The factors of a change, and how a cause is found among them.

    `weights`: of each factor beforehand. `levels`: what is searched. `policy`: how much is believed, and at most how
    many runs are made.
    """

    weights: Sequence[float]
    levels: Levels | Failure
    policy: BisectPolicy

    def answer(self, runs: Sequence[Exchange]) -> Cause:
        """The cause by these runs, in any order."""
        found = self._likeliest(runs)
        if found.kind == "undecided" and found.runs and not self._worthwhile(runs, 1):
            return self._indistinct(found)
        if found.kind == "found" and self._lacking(found, runs):
            return found.model_copy(update={"kind": "undecided"})
        return found

    def next_designs(self, runs: Sequence[Exchange], at_once: int = 1) -> tuple[Design, ...]:
        """The designs to run next, up to `at_once`; empty when the cause is named, or no run could tell any more."""
        wanted = min(at_once, self.policy.most_runs - len(runs))
        if wanted <= 0:
            return ()
        if controls := self._controls(runs):
            further = self._worthwhile(runs, wanted - len(controls), controls) if wanted > len(controls) else []
            return (*controls[:wanted], *further)
        found = self._likeliest(runs)
        if found.kind != "undecided":
            return tuple(self._lacking(found, runs)[:wanted])
        if _only_the_cluster_is_in_doubt(found) and (shown := self._lacking(found, runs)):
            return tuple(shown[:wanted])
        return tuple(self._worthwhile(runs, wanted))

    def _likeliest(self, runs: Sequence[Exchange]) -> Cause:
        """The answer without the direct evidence that a named cause needs."""
        hypotheses = _hypotheses(self.weights, self.levels, self.policy)
        posterior = self._posterior(hypotheses, runs)
        n, measured = len(self.weights), sum(run.value is not None for run in runs)
        already_bad, still_good = (
            float(posterior[hypotheses.relation == kind].sum()) for kind in (_ALREADY_BAD, _STILL_GOOD)
        )
        elsewhere = already_bad + still_good
        one = np.bincount(hypotheses.first, posterior * (hypotheses.relation <= _PARTLY), n + 1)[:n]
        is_pair = (hypotheses.relation >= _SHARED) & (hypotheses.relation <= _EITHER)
        codes = hypotheses.first * (n + 1) + hypotheses.second
        two = np.bincount(codes, posterior * is_pair, (n + 1) ** 2).reshape(n + 1, n + 1)
        # Beside the cluster, a factor is the only one that anybody can do something about.
        one, two[:, n] = one + two[:n, n], 0.0
        marginals = one + two[:n, :n].sum(axis=0) + two[:n, :n].sum(axis=1)
        pairs = float(two.sum())
        known = {"marginals": tuple(float(each) for each in marginals), "runs": measured}
        best = int(np.argmax(one))
        if elsewhere >= max(float(one[best]), float(two.max())):
            kind: CauseKind = "already_bad" if already_bad >= still_good else "still_good"
            sure = elsewhere >= self.policy.confidence and not self._controls(runs)
            return Cause(kind=kind if sure else "undecided", probability=elsewhere, **known)
        if two.max() > one[best]:
            factors = tuple(int(each) for each in np.unravel_index(int(np.argmax(two)), two.shape))
            probability = float(two.max())
        else:
            factors = (best,)
            # That it had no small part in it cannot be proved of any other factor: up to a point that is no doubt.
            probability = float(one[best]) + (float(marginals[best] - one[best]) if pairs < DOUBT else 0.0)
        relation, share, parts = self._relation(hypotheses, posterior, factors)
        return Cause(
            kind="found" if probability >= self.policy.confidence else "undecided",
            factors=factors,
            relation=relation,
            parts=parts,
            probability=min(probability, 1.0),
            relation_probability=share,
            **known,
        )

    def _posterior(self, hypotheses: _Hypotheses, runs: Sequence[Exchange]) -> Array:
        """The probability of each hypothesis."""
        measured = [run for run in runs if run.value is not None]
        designs = _columns([run.design for run in measured], len(self.weights))
        values = np.array([run.value for run in measured], dtype=np.float64)
        density = _densities(self.levels, values, self.policy.stray)
        by_part = np.stack([density.good, *density.middles, density.bad])
        total = np.repeat(density.unknowns[None, :], hypotheses.first.size, axis=0)
        for number, design in enumerate(designs):
            total += by_part[_parts_at(hypotheses, design), number]
        top = total.max(axis=1)
        evidence = top + np.log(np.exp(total - top[:, None]).sum(axis=1))
        weighed = hypotheses.prior * np.exp(evidence - evidence.max())
        posterior: Array = weighed / weighed.sum()
        return posterior

    def _relation(
        self, hypotheses: _Hypotheses, posterior: Array, factors: tuple[int, ...]
    ) -> tuple[Relation, float, tuple[float, ...]]:
        """How the factors of the cause have to do with each other, how sure that is, and what each makes of it."""
        n = len(self.weights)
        first, second = factors[0], factors[-1]
        own = (hypotheses.first == first) & (hypotheses.second == second)
        if first == second:
            own |= (hypotheses.first == first) & (hypotheses.second == n)
        weights = posterior * own
        kinds = np.bincount(hypotheses.relation, weights, _STILL_GOOD + 1)
        if first == second:
            kinds[_PARTLY] += kinds[_SHARED]  # with the cluster
            kinds[_SHARED] = 0.0
        kind = int(np.argmax(kinds))
        values = _part_values(self.levels)
        per_hypothesis = values[hypotheses.table]
        one, other = (
            float((weights * (per_hypothesis[:, 3] - per_hypothesis[:, left])).sum() / weights.sum())
            for left in ((2, 1) if first != second else (2, 2))
        )
        parts = (one,) if first == second else (one, other)
        return _RELATIONS[kind], float(kinds[kind] / kinds.sum()), parts

    def _controls(self, runs: Sequence[Exchange]) -> list[Design]:
        """Of everything bad and everything good, what has not been run: a drift could be taken for either."""
        done = {run.design for run in runs}
        return [
            control for control in ((True,) * len(self.weights), (False,) * len(self.weights)) if control not in done
        ]

    def _lacking(self, found: Cause, runs: Sequence[Exchange]) -> list[Design]:
        """The run with everything bad but the cause, unless it was made: the cause's part, seen directly."""
        if not found.factors:
            return []
        design = tuple(number not in found.factors for number in range(len(self.weights)))
        return [] if any(run.design == design for run in runs) else [design]

    def _worthwhile(self, runs: Sequence[Exchange], wanted: int, chosen: Sequence[Design] = ()) -> list[Design]:
        """The designs that tell most, given what those that are chosen already will tell."""
        hypotheses = _hypotheses(self.weights, self.levels, self.policy)
        posterior = self._posterior(hypotheses, runs)
        candidates = self._candidates(hypotheses, posterior, runs)
        if not candidates:
            return []
        columns = _columns(candidates, len(self.weights))
        outcomes = _outcomes(self.levels, self.policy.stray)
        handicap = np.array([self._handicap(design, runs) for design in candidates])
        parts = np.stack([_parts_at(hypotheses, column) for column in columns])
        known = np.zeros(hypotheses.first.size, dtype=np.intp)
        for design in _columns(chosen, len(self.weights)):
            known = _refined(known, _parts_at(hypotheses, design))
        found: list[Design] = []
        for _ in range(wanted):
            worth = _information(parts, posterior, known, outcomes) * handicap
            best = int(np.argmax(worth))
            if worth[best] < LEAST_WORTH and not found:
                return []
            found.append(candidates[best])
            known = _refined(known, parts[best])
            handicap[best] /= 1 + REPEAT_COST
        return found

    def _candidates(self, hypotheses: _Hypotheses, posterior: Array, runs: Sequence[Exchange]) -> list[Design]:
        """Designs to choose from: the controls, one or two of the likeliest factors moved, and drawn ones.

        What is drawn depends on the number of runs alone, so that a search that is resumed chooses the same.
        """
        n = len(self.weights)
        share = (
            np.bincount(hypotheses.first, posterior, n + 1)[:n] + np.bincount(hypotheses.second, posterior, n + 1)[:n]
        )
        likeliest = [int(each) for each in np.argsort(-share, kind="stable")[:LIKELIEST]]
        moved = [(), *((each,) for each in likeliest), *itertools.combinations(likeliest[:4], 2)]
        designs = [tuple((number in some) is side for number in range(n)) for some in moved for side in (True, False)]
        random = np.random.default_rng(len(runs))
        for _ in range(RANDOM_DESIGNS):
            order = random.permutation(n)
            # Half of what is still in doubt, and half of the others.
            half = np.cumsum(share[order]) <= share.sum() * random.uniform(0.3, 0.7)
            bad = np.zeros(n, dtype=bool)
            bad[order[half]] = True
            designs.append(tuple(bool(each) for each in bad))
        broken = {run.design for run in runs if run.value is None}
        return [design for design in dict.fromkeys(designs) if design not in broken]

    def _handicap(self, design: Design, runs: Sequence[Exchange]) -> float:
        """How much less a design is worth: for runs of it that were made, and where it may not start."""
        repeats = sum(run.design == design for run in runs)
        works = set().union(*(_mixed(run.design) for run in runs if run.value is not None))
        suspect = [_mixed(run.design) - works for run in runs if run.value is None]
        shared = sum(bool(_mixed(design) & each) for each in suspect)
        return float(DOES_NOT_START**shared / (1 + REPEAT_COST * repeats))

    def _indistinct(self, found: Cause) -> Cause:
        """The fewest factors one of which is the cause, as sure as that is wanted."""
        order = sorted(range(len(self.weights)), key=lambda number: -found.marginals[number])
        total, named = 0.0, []
        for number in order:
            named.append(number)
            total += found.marginals[number]
            if total >= self.policy.confidence:
                break
        return found.model_copy(
            update={"kind": "indistinct", "factors": tuple(sorted(named)), "probability": min(total, 1.0), "parts": ()}
        )


def _only_the_cluster_is_in_doubt(found: Cause) -> bool:
    """Whether a cause is likely, and if it is none, then no other factor either: what moved is the cluster.

    What a run is expected to tell counts no drift, and so would not choose the one that shows the cause directly.
    """
    others = sum(share for number, share in enumerate(found.marginals) if number not in found.factors)
    return bool(found.factors) and found.probability >= 0.5 and 1 - found.probability > 2 * others


def _hypotheses(weights: Sequence[float], levels: Levels | Failure, policy: BisectPolicy) -> _Hypotheses:
    """Every hypothesis about these factors, with its probability beforehand."""
    n, top = len(weights), _part_values(levels).size - 1
    share = np.asarray(weights, dtype=np.float64) / sum(weights)
    middles = range(1, top)
    first, second = np.triu_indices(n, 1)
    both = share[first] * share[second]
    both = both / both.sum() if both.size else both
    ones, cluster = np.arange(n), np.full(n, n)
    inside = 1 - policy.elsewhere
    two = inside * TWO_CAUSES * (both.size > 0)
    one = inside - two
    partly = one * PART_OF_IT * bool(middles)
    of_pairs: list[tuple[int, tuple[int, int, int, int], float]] = [
        *((_SHARED, (0, middle, top - middle, top), 0.6 / len(middles)) for middle in middles),
        (_TOGETHER, (0, 0, 0, top), 0.2 if middles else 0.5),
        (_EITHER, (0, top, top, top), 0.2 if middles else 0.5),
    ]
    groups = [(ones, ones, _ALONE, (0, 0, 0, top), share * (one - partly))]
    for middle in middles:
        each = share * partly / (2 * len(middles))
        groups.append((ones, ones, _PARTLY, (0, 0, 0, middle), each))
        groups.append((ones, cluster, _SHARED, (0, 0, middle, top), each))
    groups += [(first, second, kind, table, both * two * part) for kind, table, part in of_pairs if both.size]
    none = np.array([n])
    for kind, level in ((_ALREADY_BAD, top), (_STILL_GOOD, 0)):
        groups.append((none, none, kind, (level,) * 4, np.array([policy.elsewhere / 2])))
    return _Hypotheses(
        np.concatenate([group[0] for group in groups]),
        np.concatenate([group[1] for group in groups]),
        np.concatenate([np.full(group[0].size, group[2]) for group in groups]),
        np.concatenate([np.tile(np.array(group[3], dtype=np.intp), (group[0].size, 1)) for group in groups]),
        np.concatenate([group[4] for group in groups]),
    )


def _densities(levels: Levels | Failure, values: Array, stray: float) -> Densities:
    """As of bisect; but the cluster may have moved by more than the change since, and that hides no cause."""
    if isinstance(levels, Failure):
        return levels.densities(values, stray)
    far = FARTHEST_DRIFT * abs(levels.bad - levels.good) / levels.noise
    step = max(1.0, far / DRIFT_STEPS)
    drifts = [*DRIFTS, *(side * drift for side in (-1, 1) for drift in np.arange(DRIFTS[-1] + step, far + step, step))]
    return levels.densities(values, stray, np.array(drifts))


def _part_values(levels: Levels | Failure) -> Array:
    """The parts of the change that a run may show."""
    inner = MIDDLES if isinstance(levels, Levels) else np.zeros(0)
    return np.concatenate([[0.0], inner, [1.0]])


def _columns(designs: Sequence[Design], factors: int) -> NDArray[np.bool_]:
    """A line for each design, and one more factor that is always bad."""
    columns = np.ones((len(designs), factors + 1), dtype=bool)
    if designs:
        columns[:, :factors] = designs
    return columns


def _parts_at(hypotheses: _Hypotheses, design: NDArray[np.bool_]) -> NDArray[np.intp]:
    """By each hypothesis, which part of the change a design shows."""
    codes = design[hypotheses.first] + 2 * design[hypotheses.second]
    return hypotheses.table[np.arange(codes.size), codes]


def _outcomes(levels: Levels | Failure, stray: float) -> Array:
    """What a run is expected to show: a line for each part of the change, a column for each kind of outcome."""
    if isinstance(levels, Failure):
        return np.array([[1 - CHANCE_FAILURE, CHANCE_FAILURE], [1 - SURE_FAILURE, SURE_FAILURE]])
    sigmas = abs(levels.bad - levels.good) / levels.noise
    edges = np.linspace(-0.5, 1.5, BINS + 1)
    edges[0], edges[-1] = -math.inf, math.inf
    below = np.array(
        [
            [0.5 * (1 + math.erf((edge - part) * sigmas / math.sqrt(2))) for edge in edges]
            for part in _part_values(levels)
        ]
    )
    outcomes: Array = (1 - stray) * np.diff(below, axis=1) + stray / BINS
    return outcomes


def _refined(known: NDArray[np.intp], parts: NDArray[np.intp]) -> NDArray[np.intp]:
    """Classes of hypotheses, divided by what one more design would show."""
    index: NDArray[np.intp] = np.unique(known * (len(MIDDLES) + 2) + parts, return_inverse=True)[1]
    return index


def _information(parts: NDArray[np.intp], posterior: Array, known: NDArray[np.intp], outcomes: Array) -> Array:
    """The information that each design is expected to give about the hypotheses, in nats, within classes of them."""
    classes, kinds = int(known.max()) + 1, outcomes.shape[0]
    noise = -(outcomes * np.log(outcomes)).sum(axis=1)
    found = np.empty(parts.shape[0])
    for number, line in enumerate(parts):
        mass = np.bincount(known * kinds + line, posterior, classes * kinds).reshape(classes, kinds)
        whole = mass.sum(axis=1, keepdims=True)
        shown = (mass / np.where(whole > 0, whole, 1.0)) @ outcomes
        entropy = -(shown * np.log(np.where(shown > 0, shown, 1.0))).sum(axis=1)
        found[number] = (whole[:, 0] * entropy).sum() - (mass.sum(axis=0) * noise).sum()
    return found


def _mixed(design: Design) -> set[tuple[int, int]]:
    """The pairs of a good and a bad level that a design combines."""
    good = [number for number, bad in enumerate(design) if not bad]
    return {(one, other) for one in good for other, bad in enumerate(design) if bad}


class Descent(NamedTuple):
    """What the search for a commit inside a factor, or two, begins with.

    `good`: other factors of the cause that have to be good in its runs. `levels`: of both of its ends. `known`: what
    runs have measured already at either.
    """

    good: tuple[int, ...]
    levels: Levels | Failure
    known: tuple[Measured, ...]


def descent_into(
    factors: Sequence[int], cause: Cause, levels: Levels | Failure, runs: Sequence[Exchange], commits: int
) -> Descent:
    """How to search inside factors of a cause that is known: no other one matters, so that every run is one of theirs.

    Args:
        factors: One factor of the cause, or both where they lie in one range.
        cause: The cause, found.
        levels: The levels of the whole change.
        runs: The runs so far.
        commits: How many the range has.
    """
    other = next((each for each in cause.factors if each not in factors), None)
    # Where either makes the change, the other one would hide what this one does.
    other_is_bad = cause.relation != "either"
    known = [run for run in runs if run.value is not None and (other is None or run.design[other] is other_is_bad)]
    at_good, at_bad = (
        tuple(run.value for run in known if run.value is not None and {run.design[own] for own in factors} == {side})
        for side in (False, True)
    )
    if isinstance(levels, Levels) and len(factors) == 1 and cause.relation in ("partly", "shared"):
        part = cause.parts[cause.factors.index(factors[0])]
        bad = statistics.median(at_bad) if cause.relation == "partly" else levels.bad
        levels = levels.model_copy(update={"good": bad - part * (levels.bad - levels.good), "bad": bad})
    at_ends = ((0, at_good), (commits, at_bad))
    measured = (Measured(place=place, value=value) for place, values in at_ends for value in values)
    return Descent(() if other is None or other_is_bad else (other,), levels, tuple(measured))
