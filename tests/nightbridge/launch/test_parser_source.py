"""Reading a launcher's argument parser without running it."""

from collections.abc import Callable
from pathlib import Path

import pytest

from nightbridge.errors import InvalidInput
from nightbridge.launch.parser_source import PARSER, flags_in, known_flags

SOURCE = """
import argparse, module_that_does_not_exist

SCOPES = ["attn", "mlp"]
GPUS = {"h100": 8, "gb200": 4}

def scope(text):
    if all(word in SCOPES for word in text.split(",")):
        return text
    raise ValueError

YES, NO = ["yes"], ["no"]
ON = ["on"]
OFF = ["off"]

def switch(text):
    if text.lower() in ON:
        return True
    if text.lower() in OFF:
        return False
    raise ValueError

def exact_switch(text):
    if text in ON:
        return True
    if text in OFF:
        return False
    raise ValueError

def with_a_default(text):
    return text if text in SCOPES else "attn"

def lower(text):
    return text.lower()

def parser():
    parser = argparse.ArgumentParser()
    parser.add_argument("-m", "--model_family_name", type=lower, required=True)
    group = parser.add_argument_group("more")
    group.add_argument("--task", choices=["pretrain", "sft"])
    group.add_argument("-g", "--gpu", choices=GPUS.keys())
    group.add_argument("--cuda_graph_scope", type=scope)
    group.add_argument("--backend", choices=["deepep", None])
    group.add_argument("--computed", choices=sorted(GPUS))
    group.add_argument("--switch", type=switch)
    group.add_argument("--exact_switch", type=exact_switch)
    group.add_argument("--with_a_default", type=with_a_default)
    group.add_argument("positional")
    return parser
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Callable[[str], Path]:
    def _checkout(source: str) -> Path:
        (tmp_path / PARSER).parent.mkdir(parents=True)
        (tmp_path / PARSER).write_text(source)
        return tmp_path

    return _checkout


def test_every_option_is_found_with_what_it_allows_and_nothing_is_imported(checkout: Callable[[str], Path]) -> None:
    assert known_flags(checkout(SOURCE)) == {
        "-m": None,
        "--model_family_name": None,
        "--task": ("pretrain", "sft"),
        "-g": ("h100", "gb200"),
        "--gpu": ("h100", "gb200"),
        "--cuda_graph_scope": ("attn", "mlp"),
        "--backend": ("deepep", "None"),
        "--computed": None,
        "--switch": None,
        "--exact_switch": ("on", "off"),
        "--with_a_default": None,
    }


def test_a_checkout_without_a_launcher_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="no launcher at scripts/performance"):
        known_flags(tmp_path)


def test_a_parser_that_is_no_python_is_refused(checkout: Callable[[str], Path]) -> None:
    with pytest.raises(InvalidInput, match="cannot read the launcher's parser"):
        known_flags(checkout("def ("))


def test_an_option_with_two_forms_has_both(tmp_path: Path) -> None:
    file = tmp_path / "args.py"
    file.write_text('parser.add_argument("-o", "--overlap", action=argparse.BooleanOptionalAction)\n')

    assert set(flags_in(file)) == {"-o", "--overlap", "--no-overlap"}
