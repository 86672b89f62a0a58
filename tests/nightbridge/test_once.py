"""A decision is made once, by whoever comes first."""

import threading
import time
from pathlib import Path

import pytest

from nightbridge.errors import DamagedData
from nightbridge.models import Model
from nightbridge.once import decide_once


class Choice(Model):
    number: int


def test_many_who_ask_at_once_get_the_answer_of_one(tmp_path: Path) -> None:
    asked: list[int] = []
    answers: list[int] = []

    def ask(number: int) -> None:
        def decide() -> Choice:
            asked.append(number)
            time.sleep(0.1)
            return Choice(number=number)

        answers.append(decide_once(tmp_path / "choice.json", Choice, decide).number)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert len(asked) == 1
    assert answers == asked * 8


def test_a_decision_that_fails_is_not_kept(tmp_path: Path) -> None:
    def fail() -> Choice:
        raise ValueError("boom")

    with pytest.raises(ValueError, match="boom"):
        decide_once(tmp_path / "choice.json", Choice, fail)

    assert decide_once(tmp_path / "choice.json", Choice, lambda: Choice(number=7)).number == 7


def test_an_unreadable_decision_is_damage_and_not_decided_again(tmp_path: Path) -> None:
    path = tmp_path / "choice.json"
    path.write_text("{")

    with pytest.raises(DamagedData, match=str(path)):
        decide_once(path, Choice, lambda: Choice(number=1))
