"""Subflows side by side: in order, in this flow run's context, and ended together."""

import os
import threading
import time

import pytest

from nightbridge.flows.side_by_side import side_by_side
from nightbridge.processes import run
from nightbridge.tasks.context import mark_started, raise_if_interrupted


def test_results_come_in_the_arguments_order_whoever_ends_first() -> None:
    def call(delay: float) -> float:
        mark_started()
        time.sleep(delay)
        return delay

    assert side_by_side(call, [0.2, 0.0, 0.1], most=3) == [0.2, 0.0, 0.1]


def test_each_call_begins_only_after_the_one_before_it_has_begun() -> None:
    begun: list[int] = []

    def call(number: int) -> None:
        time.sleep(0.05 * (3 - number))  # the first would begin last if nobody waited
        begun.append(number)
        mark_started()

    side_by_side(call, range(4), most=4)

    assert begun == [0, 1, 2, 3]


def test_they_go_on_at_the_same_time() -> None:
    meeting = threading.Barrier(3, timeout=60)

    def call(_: int) -> None:
        mark_started()
        meeting.wait()

    side_by_side(call, range(3), most=3)


def test_a_call_that_never_says_that_it_has_begun_holds_nobody_up_when_it_ends() -> None:
    assert side_by_side(lambda number: number, [1, 2], most=2) == [1, 2]


def test_when_one_is_interrupted_the_others_end_and_no_further_one_starts() -> None:
    started = []

    def call(number: int) -> None:
        started.append(number)
        mark_started()
        if number == 0:
            raise KeyboardInterrupt
        while True:
            raise_if_interrupted()
            time.sleep(0.05)

    with pytest.raises(KeyboardInterrupt):
        side_by_side(call, range(20), most=2)

    assert len(started) < 20


def test_one_that_hears_nothing_is_left_behind_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nightbridge.flows.side_by_side.GRACE_SECONDS", 0.5)
    for_ever, begun = threading.Event(), time.monotonic()

    def call(number: int) -> None:
        mark_started()
        if number == 1:
            raise KeyboardInterrupt
        for_ever.wait(120)

    with pytest.raises(KeyboardInterrupt):
        side_by_side(call, range(2), most=2)

    assert time.monotonic() - begun < 60
    for_ever.set()


def test_programs_that_the_others_wait_for_are_ended() -> None:
    def call(number: int) -> None:
        mark_started()
        if number == 1:
            raise KeyboardInterrupt
        run(["sleep", "120"], environment=os.environ, timeout=600)

    begun = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        side_by_side(call, range(2), most=2)

    assert time.monotonic() - begun < 60


def test_what_interrupted_one_call_is_over_for_the_next() -> None:
    def call(number: int) -> int:
        raise_if_interrupted()
        return number

    def interrupted(_: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        side_by_side(interrupted, [1], most=1)

    raise_if_interrupted()
    assert side_by_side(call, [1, 2], most=2) == [1, 2]
