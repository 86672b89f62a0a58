"""Syntax trees: as many threads as want them, whatever the garbage collector does meanwhile."""

import ast
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from nightbridge.launch import parser_source, syntax_tree

SECONDS = 2.0
"""`ast.parse` of Python 3.11.7 raises a SystemError several times in each of them."""


@pytest.fixture
def _threads_take_turns_quickly() -> Iterator[None]:
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


class Litter:
    """Garbage that only the collector finds, and whose end is a turn for other threads."""

    def __init__(self) -> None:
        self.itself = self

    def __del__(self) -> None:
        for _ in range(200):
            pass


@pytest.mark.thorough
@pytest.mark.usefixtures("_threads_take_turns_quickly")
def test_threads_that_parse_at_once_do_not_disturb_each_other() -> None:
    source = Path(parser_source.__file__).read_text(encoding="utf-8")
    over = time.monotonic() + SECONDS

    def parse() -> None:
        while time.monotonic() < over:
            syntax_tree(source)

    def litter() -> None:
        while time.monotonic() < over:
            for _ in range(50):
                Litter()
            time.sleep(0.0005)

    with ThreadPoolExecutor(4) as threads:
        for ended in [threads.submit(work) for work in (parse, parse, parse, litter)]:
            ended.result()


def test_an_expression_is_one() -> None:
    assert ast.literal_eval(syntax_tree("[1, 'a']", "eval")) == [1, "a"]
