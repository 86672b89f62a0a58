"""The decisions of an attribution, on runs whose cause is known."""

from collections.abc import Callable

import numpy as np
import pytest

from nightbridge.attribution.factor_search import Cause, Design, Exchange, FactorSearch, descent_into
from nightbridge.bisect.search import BisectPolicy, Failure, Levels, Measured

LEVELS = Levels(good=1.0, bad=1.06, noise=0.01)
POLICY = BisectPolicy(confidence=0.99, most_runs=60)
FACTORS = 12

Value = Callable[[Design], float | None]


def attribute(
    value: Value, *, factors: int = FACTORS, levels: Levels | Failure = LEVELS, at_once: int = 1
) -> tuple[Cause, list[Exchange]]:
    """Run what is wanted until nothing is."""
    search = FactorSearch((1.0,) * factors, levels, POLICY)
    runs: list[Exchange] = []
    while designs := search.next_designs(runs, at_once):
        runs += [Exchange(design=design, value=value(design)) for design in designs]
    return search.answer(runs), runs


def part(made: float) -> float:
    """The value of a run that shows this part of the change."""
    return LEVELS.good + made * (LEVELS.bad - LEVELS.good)


# --- what is found ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("culprit", range(FACTORS))
def test_one_factor_of_many_is_named_with_fewer_runs_than_factors(culprit: int) -> None:
    cause, runs = attribute(lambda design: part(design[culprit]))

    assert (cause.kind, cause.factors, cause.relation) == ("found", (culprit,), "alone")
    assert cause.probability >= 0.99
    assert cause.runs == len(runs) <= 10


def test_both_controls_come_first_and_a_named_cause_was_seen_directly() -> None:
    _cause, runs = attribute(lambda design: part(design[3]))
    designs = [run.design for run in runs]

    assert designs[:2] == [(True,) * FACTORS, (False,) * FACTORS]
    assert tuple(number != 3 for number in range(FACTORS)) in designs


@pytest.mark.parametrize(
    ("relation", "made"),
    [
        ("shared", lambda one, other: 0.5 * one + 0.5 * other),
        ("together", lambda one, other: float(one and other)),
        ("either", lambda one, other: float(one or other)),
    ],
)
def test_two_factors_are_told_apart_from_one_with_what_they_do_together(
    relation: str, made: Callable[[bool, bool], float]
) -> None:
    cause, _runs = attribute(lambda design: part(made(design[2], design[7])))

    assert (cause.kind, cause.factors, cause.relation) == ("found", (2, 7), relation)
    assert cause.relation_probability > 0.9


def test_two_unequal_parts_are_said() -> None:
    cause, _runs = attribute(lambda design: part(0.7 * design[1] + 0.3 * design[4]))

    assert cause.factors == (1, 4)
    assert cause.parts == pytest.approx((0.7, 0.3), abs=0.05)


@pytest.mark.parametrize(("kind", "shown"), [("already_bad", 1.0), ("still_good", 0.0)])
def test_what_no_factor_did_is_known_after_a_few_runs(kind: str, shown: float) -> None:
    cause, runs = attribute(lambda _design: part(shown))

    assert (cause.kind, cause.factors) == (kind, ())
    assert len(runs) <= 6


@pytest.mark.parametrize("rest", [0.5, 0.0])
def test_a_factor_that_made_half_of_it_is_named_with_its_part(rest: float) -> None:
    """The other half is the cluster's, be it still there or gone."""
    cause, _runs = attribute(lambda design: part(rest + 0.5 * design[5]))

    assert (cause.kind, cause.factors, cause.relation) == ("found", (5,), "partly")
    assert cause.parts == pytest.approx((0.5,), abs=0.1)


def test_noise_drift_and_stray_runs_hide_nothing() -> None:
    random = np.random.default_rng(3)
    right, counts = 0, []
    for culprit in range(FACTORS):
        drift = 0.01 * float(random.standard_normal())

        def value(design: Design, culprit: int = culprit, drift: float = drift) -> float:
            stray = float(random.uniform(0.05, 0.3)) if random.random() < 0.03 else 0.0
            return part(design[culprit]) + drift + stray + 0.01 * float(random.standard_normal())

        cause, runs = attribute(value)
        right += (cause.kind, cause.factors) == ("found", (culprit,))
        counts.append(len(runs))

    assert right >= FACTORS - 1
    assert np.median(counts) <= 12


@pytest.mark.parametrize("moved", [-0.06, 0.02, 0.04, 0.06, 0.1])
def test_a_cluster_that_has_moved_by_more_than_the_change_hides_no_cause(moved: float) -> None:
    cause, runs = attribute(lambda design: part(design[3]) + moved)

    assert (cause.kind, cause.factors) == ("found", (3,))
    assert len(runs) <= 16


def test_a_failure_is_attributed_like_a_metric() -> None:
    cause, _runs = attribute(lambda design: float(design[6]), levels=Failure(signature="out of memory"))

    assert (cause.kind, cause.factors) == ("found", (6,))


def test_several_runs_at_once_are_different_designs_and_cost_little_more() -> None:
    cause, runs = attribute(lambda design: part(design[9]), at_once=4)

    assert cause.factors == (9,)
    assert len({run.design for run in runs[:4]}) == 4
    assert len(runs) <= 12


# --- designs that do not start ---------------------------------------------------------------------------------------


def test_a_combination_that_does_not_start_is_avoided() -> None:
    """An old launcher with a new submodule: factor 0 good, factor 1 bad."""

    def starts(design: Design) -> bool:
        return design[0] or not design[1]

    cause, runs = attribute(lambda design: part(design[4]) if starts(design) else None)

    assert (cause.kind, cause.factors) == ("found", (4,))
    assert sum(run.value is None for run in runs) <= 3


@pytest.mark.parametrize("factors", [1, 2, 3])
def test_it_ends_undecided_where_nothing_starts(factors: int) -> None:
    search = FactorSearch((1.0,) * factors, LEVELS, BisectPolicy(most_runs=40))
    runs: list[Exchange] = []
    while designs := search.next_designs(runs, 2):
        runs += [Exchange(design=design, value=None) for design in designs]

    assert len(runs) == 2**factors
    assert search.answer(runs).kind == "undecided"


def test_what_only_starts_together_is_named_together() -> None:
    cause, _runs = attribute(lambda design: part(design[0]) if design[0] == design[1] else None, factors=4)

    assert (cause.kind, cause.factors) == ("indistinct", (0, 1))
    assert cause.probability >= 0.99


# --- what a search goes on with --------------------------------------------------------------------------------------


def test_an_interrupted_search_chooses_what_it_would_have_chosen() -> None:
    search = FactorSearch((1.0,) * FACTORS, LEVELS, POLICY)
    _cause, runs = attribute(lambda design: part(design[3]))

    for number in range(len(runs)):
        assert search.next_designs(runs[:number]) == (runs[number].design,)


def test_it_ends_undecided_when_its_runs_are_spent() -> None:
    search = FactorSearch((1.0,) * FACTORS, LEVELS, BisectPolicy(most_runs=3))
    runs = [Exchange(design=(side,) * FACTORS, value=part(side)) for side in (True, False)]
    runs.append(Exchange(design=tuple(number < 6 for number in range(FACTORS)), value=part(0.0)))

    assert search.next_designs(runs) == ()
    assert search.answer(runs).kind == "undecided"


# --- into a factor ---------------------------------------------------------------------------------------------------


def test_a_descent_begins_with_what_every_run_says_of_its_factor() -> None:
    cause, runs = attribute(lambda design: part(design[3]))

    descent = descent_into([3], cause, LEVELS, runs, 9)

    assert descent.levels == LEVELS
    assert descent.good == ()
    assert len(descent.known) == len(runs)
    assert {(one.place, one.value) for one in descent.known} == {(0, part(0)), (9, part(1))}


def test_a_descent_into_a_shared_cause_has_its_own_part_of_the_change() -> None:
    cause, runs = attribute(lambda design: part(0.5 * design[2] + 0.5 * design[7]))

    descent = descent_into([2], cause, LEVELS, runs, 5)

    assert isinstance(descent.levels, Levels)
    assert (descent.levels.good, descent.levels.bad) == pytest.approx((part(0.5), part(1.0)), abs=0.004)
    assert {one.value for one in descent.known} == {part(0.5), part(1.0)}


def test_a_descent_into_one_of_two_that_each_suffice_has_the_other_at_its_good_level() -> None:
    cause, runs = attribute(lambda design: part(design[2] or design[7]))

    descent = descent_into([2], cause, LEVELS, runs, 5)

    assert descent.good == (7,)
    assert all(one == Measured(place=0, value=part(0)) for one in descent.known if one.place == 0)
