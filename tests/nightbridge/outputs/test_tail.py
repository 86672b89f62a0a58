"""A growing log is read on from where the last look ended."""

import os
from pathlib import Path
from typing import Any

import pytest

from nightbridge.outputs.logs import LogTail


@pytest.fixture
def log(tmp_path: Path) -> Any:
    return tmp_path / "log.out"


def append(log: Any, text: str) -> None:
    with log.open("a") as stream:
        stream.write(text)


def test_each_line_is_read_once_when_it_is_finished(log: Any) -> None:
    tail = LogTail(log)
    looks = []
    for text in ("one\ntw", "o\n", "", "three\rfour\n"):
        append(log, text)
        looks.append(tail.new_lines())
    assert looks == [["one"], ["two"], [], ["three", "four"]]


def test_a_log_that_is_not_there_yet_has_no_lines(log: Any) -> None:
    tail = LogTail(log)
    before = tail.new_lines()
    append(log, "one\n")
    assert (before, tail.new_lines()) == ([], ["one"])


def test_a_line_that_is_never_finished_is_told_at_the_end(log: Any) -> None:
    tail = LogTail(log)
    append(log, "one\nhalf")
    assert (tail.new_lines(), tail.last_line(), tail.last_line()) == (["one"], ["half"], [])


def test_a_log_that_is_rotated_is_read_from_its_beginning(log: Any) -> None:
    tail = LogTail(log)
    append(log, "a long line before\nhalf of")
    tail.new_lines()
    log.rename(log.with_suffix(".1"))
    append(log, "new, and longer than what was there before it\n")
    assert tail.new_lines() == ["new, and longer than what was there before it"]


def test_a_log_that_is_cut_to_nothing_and_written_again_is_read_from_its_beginning(log: Any) -> None:
    tail = LogTail(log)
    append(log, "a long line before\n")
    tail.new_lines()
    os.truncate(log, 0)
    append(log, "short\n")
    assert tail.new_lines() == ["short"]


def test_a_log_of_a_gigabyte_costs_one_bounded_read(log: Any) -> None:
    log.touch()
    os.truncate(log, 1 << 30)
    append(log, "\nlast\n")
    tail = LogTail(log)
    assert tail.new_lines() == ["last"]


def test_what_is_written_faster_than_it_is_read_leaves_out_the_older_part_and_no_half_line(log: Any) -> None:
    tail = LogTail(log, most=25)
    append(log, "first\n")
    tail.new_lines()
    append(log, "".join(f"line {number:03}\n" for number in range(100)))
    assert tail.new_lines() == ["line 098", "line 099"]
    append(log, "after\n")
    assert tail.new_lines() == ["after"]


def test_a_line_without_an_end_is_not_kept_for_ever(log: Any) -> None:
    tail = LogTail(log, most=1 << 20)
    append(log, "x" * (100 << 10))
    first = tail.new_lines()
    append(log, "end of it\nnext\n")
    assert (first, tail.new_lines(), tail.last_line()) == ([], ["next"], [])
