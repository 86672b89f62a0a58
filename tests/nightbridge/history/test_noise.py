"""Noise between nights, and two speeds of one test, told from noise, drift, bad nodes and a change of level."""

import numpy as np
import pytest

from nightbridge.gate.run_verdict import compare
from nightbridge.gate.tonight import Evidence
from nightbridge.history.noise import find_modes, noise_of
from nightbridge.history.rows import HistoryRow, row_of
from nightbridge.models import GatePolicy, ReferenceResult, Verdict, VerdictStatus
from tests.builders import make_record, make_summary

GOOD = 0.003
SLOW = 1.1


def two_speeds(nights: int, share: float, seed: int, slow: float = SLOW, sigma: float = 0.01) -> list[float]:
    rng = np.random.default_rng(seed)
    values = (1 + sigma * rng.standard_normal(nights)) * np.where(rng.random(nights) < share, slow, 1.0)
    return [float(value) for value in values]


@pytest.mark.parametrize(("share", "nights"), [(0.2, 100), (0.4, 60), (0.5, 60)])
def test_two_speeds_are_named_in_most_series_within_some_nights(share: float, nights: int) -> None:
    named = [find_modes(two_speeds(nights, share, seed)) for seed in range(40)]

    assert sum(map(bool, named)) >= 38
    modes = next(filter(None, named))
    assert modes.fast == pytest.approx(1.0, abs=0.01)
    assert modes.slow == pytest.approx(1.1, abs=0.02)


@pytest.mark.parametrize(("distance", "least", "most"), [(6.0, 38, 40), (3.0, 0, 1)])
def test_speeds_are_two_where_nights_between_them_are_rarer(distance: float, least: int, most: int) -> None:
    named = [find_modes(two_speeds(100, 0.35, seed, slow=1 + 0.01 * distance)) for seed in range(40)]

    assert least <= sum(map(bool, named)) <= most


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["gaussian", "heavy tails", "bad nodes", "skewed"])
def test_one_speed_is_not_taken_for_two_in_any_night_of_a_year(kind: str) -> None:
    named = 0
    for seed in range(20):
        rng = np.random.default_rng(seed)
        noise = rng.standard_t(3, 365) if kind == "heavy tails" else rng.standard_normal(365)
        values = np.exp(0.01 * (np.exp(noise) if kind == "skewed" else noise))
        if kind == "bad nodes":
            values *= np.where(rng.random(365) < 0.03, 1 + rng.uniform(0.05, 0.3, 365), 1.0)
        nights = values.tolist()
        named += any(find_modes(nights[max(0, night - 100) : night]) is not None for night in range(28, 366))

    assert named == 0


@pytest.mark.parametrize("kind", ["gaussian", "heavy tails", "bad nodes", "step", "repaired", "drift"])
def test_one_speed_is_not_taken_for_two(kind: str) -> None:
    named = 0
    for seed in range(60):
        rng = np.random.default_rng(seed)
        noise = rng.standard_t(3, 60) if kind == "heavy tails" else rng.standard_normal(60)
        values = 1 + 0.01 * noise
        if kind == "bad nodes":
            values *= np.where(rng.random(60) < 0.03, 1 + rng.uniform(0.05, 0.3, 60), 1.0)
        elif kind == "step":
            values[40:] *= 1.1
        elif kind == "repaired":
            values[20:40] *= 1.1
        elif kind == "drift":
            values = 1 + 0.005 * np.cumsum(noise)
        named += find_modes(values.tolist()) is not None

    assert named <= 1


def test_few_nights_and_a_mode_of_long_ago_are_none() -> None:
    values = two_speeds(60, 0.4, seed=1)

    assert find_modes(values) is not None
    assert find_modes(values[:20]) is None
    assert find_modes([*values[:44], *two_speeds(16, 0.0, seed=2)]) is None


# --- through the gate --------------------------------------------------------------------------------------------------


def judge_nights(values: list[float], golden: ReferenceResult | None = None) -> list[Verdict]:
    """The verdicts of nights with these step times; `golden`: what golden values say of the last one."""
    rows: list[HistoryRow] = []
    verdicts = []
    for number, value in enumerate(values):
        month, day = divmod(number, 28)
        summary = make_summary([value] * 50, tflops=700.0 / value)
        record = make_record(summary, f"2026-{month + 5:02}-{day + 1:02}")
        is_last = number + 1 == len(values)
        verdicts.append(compare(record, rows, Evidence(golden=golden if is_last else None)))
        rows.append(row_of(record, verdicts[-1]))
    return verdicts


def test_a_test_with_two_speeds_is_unstable_whatever_tonight_was_and_nobody_is_blamed() -> None:
    verdicts = judge_nights(two_speeds(50, 0.4, seed=4, sigma=GOOD))

    assert {verdict.status for verdict in verdicts[40:]} == {VerdictStatus.UNSTABLE}
    assert {verdict.news for verdict in verdicts[42:]} == {"standing"}
    reason = verdicts[-1].reasons[0]
    assert "of 1 run in the slow mode, 1.1" in reason
    assert reason.endswith("of the last nights: no commit is to blame until that share changes")


@pytest.mark.parametrize(
    ("tonight", "status"),
    [
        ([1.0], VerdictStatus.UNSTABLE),
        ([0.7], VerdictStatus.SUSPICIOUS),
        ([1.001, 1.002, 1.0, 0.999, 1.001, 1.002, 1.0], VerdictStatus.SUSPICIOUS),
    ],
    ids=["the fast one", "faster than that", "a week without a slow run"],
)
def test_of_two_speeds_far_apart_the_fast_one_is_not_too_good_where_a_test_began_slow(
    tonight: list[float], status: VerdictStatus
) -> None:
    nights = [1.3, *two_speeds(50, 0.4, seed=4, sigma=GOOD, slow=1.3), 1.3]

    assert judge_nights([*nights, *tonight])[-1].status is status


@pytest.mark.parametrize(
    ("only_slower", "expected"),
    [(False, (VerdictStatus.REGRESSED, "new")), (True, (VerdictStatus.UNSTABLE, "standing"))],
)
def test_two_speeds_excuse_no_losses_that_leave_golden_values(
    only_slower: bool, expected: tuple[VerdictStatus, str]
) -> None:
    golden = ReferenceResult(whole=True, as_good=False, reasons=("golden values",), only_slower=only_slower)

    verdict = judge_nights(two_speeds(50, 0.4, seed=4, sigma=GOOD), golden)[-1]

    assert (verdict.status, verdict.news) == expected


def test_runs_that_disagree_in_something_else_than_speed_are_news() -> None:
    gate = GatePolicy(control="off")
    rows: list[HistoryRow] = []
    for number, value in enumerate([*two_speeds(50, 0.4, seed=4, sigma=GOOD), 1.0], start=1):
        night, memory = f"2026-{number // 28 + 5:02}-{number % 28 + 1:02}", 96.0 if number == 51 else 80.0
        summary = make_summary([value] * 50, tflops=700.0 / value, memory=memory)
        record = make_record(summary, night, gate=gate)
        again = row_of(make_record(make_summary(), night, gate=gate, repeat=1), None)
        verdict = compare(record, [*rows, again] if number == 51 else rows)
        rows.append(row_of(record, verdict))

    assert [row.verdict for row in rows[-2:]] == [VerdictStatus.UNSTABLE] * 2
    assert (verdict.news, verdict.since) == ("new", rows[-1].night)


def test_what_is_slower_than_the_slow_mode_is_regressed() -> None:
    verdict = judge_nights([*two_speeds(50, 0.4, seed=4, sigma=GOOD), 1.25])[-1]

    assert verdict.status is VerdictStatus.REGRESSED


def test_a_week_without_a_fast_run_is_no_longer_the_usual_share() -> None:
    verdicts = judge_nights([*two_speeds(50, 0.2, seed=5, sigma=GOOD), *[SLOW] * 9])

    assert verdicts[-1].status is VerdictStatus.REGRESSED


def test_nights_that_follow_each_other_by_chance_keep_the_noise_of_their_distance_from_the_week_before() -> None:
    found = [noise_of(following(28, 0.01, seed)) for seed in range(100)]

    assert np.median(found) == pytest.approx(0.0085, rel=0.08)


def following(count: int, sigma: float, seed: int) -> list[float]:
    """Nights of which each is like the one before it: AR(1), 0.7."""
    rng = np.random.default_rng(seed)
    values = [sigma * rng.standard_normal()]
    for step in sigma * np.sqrt(1 - 0.7**2) * rng.standard_normal(count - 1):
        values.append(0.7 * values[-1] + step)
    return [1 + value for value in values]
