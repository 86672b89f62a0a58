"""Bisect's decisions, on measurements whose first bad commit is known."""

from collections.abc import Callable, Sequence

import numpy as np
import pytest

from nightbridge.bisect.search import (
    BisectPolicy,
    Culprit,
    Failure,
    Levels,
    Measured,
    Search,
    prior_of_nights,
)
from nightbridge.errors import InvalidInput

COMMITS = 64
LEVELS = Levels(good=1.0, bad=1.03, noise=0.01)


def search(
    value: Callable[[int], float | None],
    *,
    commits: int = COMMITS,
    levels: Levels | Failure = LEVELS,
    at_once: int = 1,
    policy: BisectPolicy | None = None,
) -> tuple[Culprit, Sequence[Measured], int]:
    """Measure what is wanted until nothing is; a value of None is a commit that does not run."""
    decisions = Search(commits, levels, policy=policy or BisectPolicy())
    measured: list[Measured] = []
    skipped: frozenset[int] = frozenset()
    rounds = 0
    while places := decisions.next_places(measured, skipped, at_once):
        rounds += 1
        for place in places:
            found = value(place)
            if found is None:
                skipped |= {place}
            else:
                measured.append(Measured(place=place, value=found))
    return decisions.answer(measured, skipped), measured, rounds


def noisy(first_bad: int, seed: int, *, drift: float = 0.0, stray: float = 0.0) -> Callable[[int], float]:
    random = np.random.default_rng(seed)

    def value(place: int) -> float:
        level = LEVELS.bad if place >= first_bad else LEVELS.good
        bad_node = random.uniform(0.05, 0.3) if random.random() < stray else 0.0
        return level * (1 + drift) * (1 + bad_node) * (1 + 0.01 * float(random.standard_normal()))

    return value


# --- what is found ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("first_bad", [1, 2, 31, 32, 63, 64])
def test_the_first_bad_commit_is_named_whatever_its_place(first_bad: int) -> None:
    found, measured, _ = search(lambda place: LEVELS.bad if place >= first_bad else LEVELS.good)

    assert (found.kind, found.first, found.last) == ("found", first_bad, first_bad)
    assert found.probability >= 0.99
    assert found.runs == len(measured) <= 20


@pytest.mark.thorough
def test_noise_of_a_third_of_the_change_is_searched_through_by_repeating() -> None:
    random = np.random.default_rng(1)
    right, runs = 0, []
    for seed in range(25):
        first_bad = int(random.integers(1, COMMITS + 1))
        found, measured, _ = search(noisy(first_bad, seed))
        right += (found.kind, found.first) == ("found", first_bad)
        runs.append(len(measured))

    assert right >= 24
    assert np.mean(runs) < 25


def test_a_stray_run_on_a_bad_node_does_not_mislead() -> None:
    strays = iter([1.2, 1.031])

    def value(place: int) -> float:
        # The two first runs, both of good commits, lie where a bad one would, and beyond.
        return next(strays, LEVELS.bad if place >= 60 else LEVELS.good)

    found, _, _ = search(value)

    assert (found.kind, found.first) == ("found", 60)


def test_a_cluster_that_drifted_a_little_does_not_mislead() -> None:
    found, _, _ = search(lambda place: 1.008 * (LEVELS.bad if place >= 20 else LEVELS.good))

    assert (found.kind, found.first) == ("found", 20)


def test_no_commit_is_named_when_the_bad_end_is_good_today() -> None:
    found, _, _ = search(lambda place: LEVELS.good)

    assert found.kind == "still_good"
    assert found.first == 0


def test_no_commit_is_named_when_the_good_end_is_bad_today() -> None:
    found, _, _ = search(lambda place: LEVELS.bad)

    assert found.kind == "already_bad"


def test_a_metric_that_falls_is_searched_alike() -> None:
    levels = Levels(good=700.0, bad=680.0, noise=3.0)

    found, _, _ = search(lambda place: levels.bad if place >= 7 else levels.good, levels=levels)

    assert (found.kind, found.first) == ("found", 7)


@pytest.mark.thorough
def test_noise_twice_that_of_the_history_is_seen_in_the_points_and_searched_through() -> None:
    random = np.random.default_rng(2)

    def twice_as_noisy(first_bad: int) -> Callable[[int], float]:
        return lambda place: 1.0 + 0.04 * (place >= first_bad) + 0.02 * float(random.standard_normal())

    places = [int(random.integers(1, COMMITS + 1)) for _ in range(20)]
    levels = Levels(good=1.0, bad=1.04, noise=0.01)
    answers = [search(twice_as_noisy(place), levels=levels, at_once=4)[0] for place in places]
    named = [(place, answer.first) for place, answer in zip(places, answers, strict=True) if answer.kind == "found"]

    assert sum(place != first for place, first in named) <= 1
    assert len(named) >= 19


def test_no_commit_is_named_before_it_and_the_one_before_it_were_run_twice() -> None:
    found, measured, _ = search(lambda place: 2.0 if place >= 5 else 1.0, levels=Levels(good=1, bad=2, noise=0.001))
    runs = [one.place for one in measured]

    assert found.first == 5
    assert min(runs.count(4), runs.count(5)) == 2
    once = [one for index, one in enumerate(measured) if one.place not in runs[:index]]
    assert Search(COMMITS, Levels(good=1, bad=2, noise=0.001)).answer(once).kind == "undecided"


def test_two_commits_that_share_the_change_are_said_to_be_two() -> None:
    random = np.random.default_rng(3)

    def value(place: int) -> float:
        return 1.0 + 0.03 * (place >= 12) + 0.03 * (place >= 47) + 0.005 * random.standard_normal()

    found, _, _ = search(value, levels=Levels(good=1.0, bad=1.06, noise=0.005))

    assert (found.kind, found.first, found.second) == ("found", 12, (47, 47))


@pytest.mark.parametrize("noise", [0.0, 0.3])
@pytest.mark.parametrize("repaired", [14, 30, 46])
def test_of_a_culprit_that_was_repaired_and_came_again_one_coming_is_named(repaired: int, noise: float) -> None:
    random = np.random.default_rng(5)

    def value(place: int) -> float:
        is_bad = 12 <= place < repaired or place >= 47
        return (LEVELS.bad if is_bad else LEVELS.good) + noise * LEVELS.noise * random.standard_normal()

    found, _, _ = search(value)

    assert (found.kind, found.first) in (("found", 12), ("found", 47))
    assert found.second is None


def test_a_culprit_that_was_repaired_within_the_range_is_no_longer_there() -> None:
    found, measured, _ = search(lambda place: LEVELS.bad if 12 <= place < 40 else LEVELS.good)

    assert found.kind == "still_good"
    assert len(measured) <= 10


# --- failures --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("first_bad", [1, 33, 64])
def test_a_commit_that_fails_every_time_is_named(first_bad: int) -> None:
    found, measured, _ = search(lambda place: float(place >= first_bad), levels=Failure(signature="failed: crash"))

    assert (found.kind, found.first) == ("found", first_bad)
    assert len(measured) <= 25


@pytest.mark.thorough
def test_a_commit_that_hangs_in_six_runs_of_ten_is_named() -> None:
    random = np.random.default_rng(4)
    hang = Failure(signature="failed: the job ran into its time limit")

    answers = [search(lambda place: float(place >= 20 and random.random() < 0.6), levels=hang)[0] for _ in range(20)]

    assert {(answer.kind, answer.first) for answer in answers} == {("found", 20)}


def test_a_failure_that_is_gone_today_names_no_commit() -> None:
    found, _, _ = search(lambda place: 0.0, levels=Failure(signature="failed: crash"))

    assert found.kind == "still_good"


# --- commits that do not run -----------------------------------------------------------------------------------------


def test_commits_that_do_not_run_are_named_together_with_the_one_after_them() -> None:
    broken = {30, 31}

    found, _, _ = search(lambda place: None if place in broken else LEVELS.bad if place >= 31 else LEVELS.good)

    assert (found.kind, found.first, found.last) == ("found", 30, 32)


def test_commits_that_do_not_run_elsewhere_cost_the_answer_nothing() -> None:
    broken = set(range(40, 60))

    found, _, _ = search(lambda place: None if place in broken else LEVELS.bad if place >= 10 else LEVELS.good)

    assert (found.kind, found.first, found.last) == ("found", 10, 10)


@pytest.mark.parametrize("seed", range(10))
def test_commits_that_start_now_and_then_widen_the_answer_at_most(seed: int) -> None:
    random = np.random.default_rng(seed)
    flaky = set(range(20, 30))

    def value(place: int) -> float | None:
        fails = place in flaky and random.random() < 0.5
        return None if fails else LEVELS.bad if place >= 25 else LEVELS.good

    found, _, _ = search(value)

    assert found.kind == "found"
    assert found.first <= 25 <= found.last
    assert set(range(found.first, found.last)) <= flaky


def test_a_range_in_which_nothing_runs_is_refused() -> None:
    with pytest.raises(InvalidInput, match="no commit of the range can be run"):
        Search(2, LEVELS).next_places((), frozenset({0, 1, 2}))


# --- what it costs ---------------------------------------------------------------------------------------------------


def test_points_at_once_divide_the_range_in_as_many_parts() -> None:
    ends = [Measured(place=0, value=LEVELS.good), Measured(place=99, value=LEVELS.bad)]

    assert Search(99, LEVELS).next_places(ends, at_once=1) in ((49,), (50,))
    assert Search(99, LEVELS).next_places(ends, at_once=3) == pytest.approx((24, 50, 75), abs=2)


def test_both_ends_are_measured_before_anything_between_them() -> None:
    assert Search(99, LEVELS).next_places((), at_once=4) == (0, 99)
    assert Search(99, LEVELS).next_places((Measured(place=0, value=1.0),)) == (99,)


def test_points_at_once_need_fewer_rounds() -> None:
    value = noisy(40, 3)
    _, _, alone = search(value)
    found, _, together = search(value, at_once=4)

    assert found.first == 40
    assert together < alone


def test_it_ends_undecided_when_the_runs_are_spent() -> None:
    found, measured, _ = search(noisy(30, 0), policy=BisectPolicy(most_runs=3))

    assert found.kind == "undecided"
    assert len(measured) == 3
    assert 1 <= found.first <= COMMITS


# --- what is believed ------------------------------------------------------------------------------------------------


def test_probabilities_add_up_to_one_and_start_out_equal() -> None:
    posterior = Search(COMMITS, LEVELS).posterior(())
    beforehand = posterior.alone + posterior.first

    assert beforehand.sum() == pytest.approx(1.0)
    assert beforehand[1:-1] == pytest.approx([0.9 / COMMITS] * COMMITS, rel=0.01)
    assert beforehand[0] == beforehand[-1] == pytest.approx(0.05, rel=0.05)


def test_nights_of_the_history_say_where_to_look_first_and_exclude_nothing() -> None:
    nights = [Measured(place=10, value=1.0), Measured(place=20, value=1.03), Measured(place=30, value=1.03)]

    weights = prior_of_nights(COMMITS, LEVELS, nights)

    assert sum(weights) == pytest.approx(1.0)
    assert sum(weights[10:20]) > 0.7
    assert min(weights) >= 0.19 / COMMITS
