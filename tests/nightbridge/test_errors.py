"""Errors: what happened, to what, and what to do; the same after a trip through another process."""

import importlib
import importlib.util
import pickle
import pkgutil
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import nightbridge
from nightbridge.errors import InvalidInput, NightbridgeError, PermanentError, TransientError


def every_kind(kind: type[NightbridgeError] = NightbridgeError) -> Iterator[type[NightbridgeError]]:
    """Every error of the project, also those that a single module defines."""
    yield kind
    for below in kind.__subclasses__():
        yield from every_kind(below)


@pytest.fixture(scope="module")
def kinds() -> set[type[NightbridgeError]]:
    """Imports every module that has one, Prefect with some: not while tests are collected, which each worker does."""
    for module in pkgutil.walk_packages(nightbridge.__path__, "nightbridge."):
        if _has_a_kind(module.name):
            importlib.import_module(module.name)
    return set(every_kind())


def _has_a_kind(module: str) -> bool:
    """Whether a class of the module is one by its base's name: to import all, with Prefect's server, takes two seconds."""
    spec = importlib.util.find_spec(module)
    assert spec is not None
    text = Path(str(spec.origin)).read_text(encoding="utf-8")
    return re.search(r"^class \w+\(\w*(Error|Input|Data)\b", text, re.MULTILINE) is not None


def test_a_suggestion_that_is_a_question_gets_no_full_stop() -> None:
    error = InvalidInput("unknown key; did you mean 'nodes'?", subject="node", advice="Look it up")

    assert str(error) == "node: unknown key; did you mean 'nodes'? Look it up"


def test_the_message_says_what_happened_to_which_thing_and_what_to_do() -> None:
    error = PermanentError("no such bucket", subject="s3://nightly", advice="Create it")

    assert str(error) == "s3://nightly: no such bucket. Create it"


@pytest.mark.parametrize(
    ("subject", "advice", "message"),
    [("", "", "it broke"), ("x", "", "x: it broke"), ("", "Mend it", "it broke. Mend it")],
)
def test_what_is_not_known_leaves_no_trace_in_the_message(subject: str, advice: str, message: str) -> None:
    assert str(NightbridgeError("it broke", subject=subject, advice=advice)) == message


def test_invalid_input_tells_every_violation_on_a_line_of_its_own() -> None:
    error = InvalidInput("2 violations", subject="a.toml", advice="Mend them", violations=["tp is 3", "gb is 0"])

    assert str(error).splitlines() == ["a.toml: 2 violations. Mend them", "  tp is 3", "  gb is 0"]


def test_every_error_is_the_same_after_pickling(kinds: set[type[NightbridgeError]]) -> None:
    for kind in kinds:
        error = kind("it broke", subject="x", advice="Mend it")

        back = pickle.loads(pickle.dumps(error))

        assert type(back) is kind
        assert (back.what, back.subject, back.advice) == ("it broke", "x", "Mend it")
        assert str(back) == str(error)


def test_violations_survive_pickling() -> None:
    back = pickle.loads(pickle.dumps(InvalidInput("bad", subject="a.toml", violations=["one", "two"])))

    assert back.violations == ("one", "two")


def test_no_error_is_worth_trying_again_and_not_worth_it_at_once(kinds: set[type[NightbridgeError]]) -> None:
    both = {kind for kind in kinds if issubclass(kind, TransientError) and issubclass(kind, PermanentError)}

    assert not both
