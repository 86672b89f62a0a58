"""Flaky nodes: which of those that a night ran on the history knows to be slow."""

from collections.abc import Sequence

import pytest

from nightbridge.gate.nodes import suspects_among
from nightbridge.history.nightly_values import NightRuns, nights_of
from tests.builders import make_row, make_summary

NOISE = (1.0, 1.003, 0.998, 1.002, 0.997)
"""Of the nights one after the other; no multiple of how often the nodes change."""


def nights_on(
    slow: float, turns: Sequence[str], count: int = 24, drift: float = 0.0, noise: float = 1.0
) -> tuple[NightRuns, ...]:
    """Nights that run on the nodes in turn; those with node2 are so much slower."""
    rows = []
    for at in range(count):
        nodes = turns[at % len(turns)]
        chance = 1 + noise * (NOISE[at % len(NOISE)] - 1)
        step_time = chance * (slow if nodes == "node[1-2]" else 1.0) * (1 + drift * (at >= count // 2))
        row = make_row(make_summary([step_time] * 50), f"2026-10-{at + 1:02}")
        rows.append(row.model_copy(update={"nodes": nodes}))
    return nights_of(rows)


TURNS = ("node[1-2]", "node[1,3]", "node[3-4]", "node[1,4]")


@pytest.mark.parametrize(
    ("slow", "count", "drift", "suspects"),
    [
        (1.05, 24, 0.0, ("node2",)),
        (1.05, 24, 0.1, ("node2",)),
        (1.012, 24, 0.0, ("node2",)),
        (1.005, 24, 0.0, ()),
        (0.95, 24, 0.0, ()),
        (1.05, 12, 0.0, ()),
    ],
    ids=["slow", "and slower code", "a little", "hardly", "fast", "three nights"],
)
def test_a_node_that_slowed_its_nights_down_is_suspect(
    slow: float, count: int, drift: float, suspects: tuple[str, ...]
) -> None:
    past = nights_on(slow, TURNS, count, drift)

    found, reasons = suspects_among(past, past[0])

    assert found == suspects
    assert [reason.partition(":")[0] for reason in reasons] == [f"{node} is a slow node" for node in suspects]


@pytest.mark.parametrize(("noise", "suspects"), [(30.0, ()), (0.0, ("node2",))])
def test_what_may_be_chance_makes_no_node_suspect(noise: float, suspects: tuple[str, ...]) -> None:
    past = nights_on(1.05, TURNS, noise=noise)

    assert suspects_among(past, past[0])[0] == suspects


def test_a_slow_node_that_tonight_did_not_have_explains_nothing() -> None:
    past = nights_on(1.05, TURNS)

    assert suspects_among(past, past[2]) == ((), ())


def test_a_slow_node_is_suspect_rather_than_all_nodes_of_a_night_whose_pins_are_the_same() -> None:
    past = nights_on(1.05, TURNS)

    found, (reason,) = suspects_among(past, past[0], "2026-10-24")

    assert found == ("node2",)
    assert reason.startswith("node2 is a slow node: +5.")
    assert reason.endswith("% step time in the 6 nights that had it")


def test_a_node_is_kept_where_the_rest_are_too_few_to_run_on() -> None:
    past = nights_on(1.05, ("node[1-2]", "node1"))

    found, reasons = suspects_among(past, past[0])

    assert (found, len(reasons)) == ((), 1)
