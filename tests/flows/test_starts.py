"""Subflows side by side: in order, in this flow run's context, and ended together."""

import threading
import time

import pytest

from flows.starts import side_by_side, tell_begun


def nothing() -> None:
    return None


def test_results_come_in_the_arguments_order_whoever_ends_first() -> None:
    def call(delay: float) -> float:
        tell_begun()
        time.sleep(delay)
        return delay

    assert side_by_side(call, [0.2, 0.0, 0.1], most=3, on_interrupt=nothing) == [0.2, 0.0, 0.1]


def test_each_call_begins_only_after_the_one_before_it_has_begun() -> None:
    begun: list[int] = []

    def call(number: int) -> None:
        time.sleep(0.05 * (3 - number))  # the first would begin last if nobody waited
        begun.append(number)
        tell_begun()

    side_by_side(call, range(4), most=4, on_interrupt=nothing)

    assert begun == [0, 1, 2, 3]


def test_they_go_on_at_the_same_time() -> None:
    meeting = threading.Barrier(3, timeout=60)

    def call(_: int) -> None:
        tell_begun()
        meeting.wait()

    side_by_side(call, range(3), most=3, on_interrupt=nothing)


def test_a_call_that_never_says_that_it_has_begun_holds_nobody_up_when_it_ends() -> None:
    assert side_by_side(lambda number: number, [1, 2], most=2, on_interrupt=nothing) == [1, 2]


def test_an_interrupted_caller_makes_the_others_end_and_starts_no_further_one() -> None:
    ended, started = threading.Event(), []

    def call(number: int) -> None:
        started.append(number)
        tell_begun()
        if number == 0:
            raise KeyboardInterrupt
        assert ended.wait(60)

    with pytest.raises(KeyboardInterrupt):
        side_by_side(call, range(20), most=2, on_interrupt=ended.set)

    assert len(started) < 20
