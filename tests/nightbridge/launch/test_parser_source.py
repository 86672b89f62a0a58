"""Argument parsers are read without running them: a launcher's, and those of Megatron-LM's programs."""

from collections.abc import Callable
from pathlib import Path

import pytest

from nightbridge.errors import InvalidInput
from nightbridge.launch.parser_source import (
    PARSER,
    Option,
    ProgramParser,
    flags_in,
    known_flags,
    newest_parser,
    read_parser,
)

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


PROGRAM = "examples/mimo/pretrain_mimo.py"


def write_program(root: Path, *, megatron: str = "", required: str = "[]") -> None:
    """Write a program of two grids, and a Megatron-LM whose parser has these options, in the shape of the real ones."""
    files = {
        PROGRAM: (
            "from examples.mimo.training.args import add_grid_args\n"
            "from megatron.training.arguments import parse_args, validate_args\n"
            "def extra_args_provider(parser):\n"
            "    parser = add_grid_args(parser)\n"
            "    return parser\n"
            "def main():\n"
            "    args = parse_args(extra_args_provider)\n"
        ),
        "examples/mimo/training/args.py": "def add_grid_args(parser):\n"
        "    grid = parser.add_argument_group('grids')\n"
        + "".join(f"    grid.add_argument('--llm-{axis}', type=int)\n" for axis in ("tp", "dp", "ep"))
        + "    grid.add_argument('--encoder-dp', type=int, default=2)\n"
        "    grid.add_argument('--freeze-vit', action='store_true')\n"
        "def unused(parser):\n"
        "    parser.add_argument('--never-added')\n",
        "megatron/training/arguments.py": (
            "from megatron.training.argument_utils import ArgumentGroupFactory\n"
            "from megatron.training.config import Tuning\n"
            "def add_megatron_arguments(parser):\n"
            "    parser = _add_args(parser)\n"
            "    return parser\n"
            f"def _add_args(parser):\n{megatron or '    pass'}\n"
            "    left_out = ['internal']\n"
            "    left_out += ['derived']\n"
            "    factory = ArgumentGroupFactory(Tuning, exclude=left_out)\n"
            "    group = factory.build_group(parser, 'tuning')\n"
            "    return parser\n"
            "def parse_args(extra_args_provider=None):\n"
            "    parser = argparse.ArgumentParser(allow_abbrev=False)\n"
            "    parser = add_megatron_arguments(parser)\n"
            "    return extra_args_provider(parser).parse_args()\n"
            "def validate_args(args, defaults={}):\n"
            f"    required_args = {required}\n"
        ),
        "megatron/training/config.py": (
            "import enum\n"
            "from dataclasses import dataclass, field\n"
            "from typing import Literal\n"
            "class Backend(enum.Enum):\n    flash = 1\n    fused = 2\n"
            "@dataclass\n"
            "class Base:\n    depth: int = 3\n    rate: float | None = None\n"
            "@dataclass\n"
            "class Tuning(Base):\n"
            "    depth: Literal[1, 2] = 1\n"
            "    fast: bool = False\n"
            "    fused: bool = True\n"
            "    backend: Backend = Backend.flash\n"
            "    heads: list[int] | None = None\n"
            "    bias: bool = field(default=True, metadata={'argparse_meta': {'arg_names': ['--disable-bias-linear']}})\n"
            "    limit: int | str = field(default=1, metadata={'argparse_meta': {'type': str, 'nargs': '?'}})\n"
            "    internal: int = 0\n"
            "    derived: int = 0\n"
            "    computed: int = field(init=False, default=0)\n"
        ),
    }
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


def parser_of(root: Path, megatron: str = "", required: str = "[]") -> ProgramParser:
    write_program(root, megatron=megatron, required=required)
    found = read_parser(root, PROGRAM)
    assert found is not None
    return found


def test_options_are_those_of_functions_that_the_program_calls(tmp_path: Path) -> None:
    options = parser_of(tmp_path, "    parser.add_argument('--seed', type=int, default=1)\n").options

    assert options["--seed"] == Option(kind="int")
    assert options["--freeze-vit"] == Option(values="none")
    assert {"--llm-tp", "--llm-dp", "--llm-ep", "--encoder-dp"} <= set(options)
    assert "--never-added" not in options


def test_fields_of_a_configuration_class_are_options(tmp_path: Path) -> None:
    options = parser_of(tmp_path).options

    fields = {name: option for name, option in options.items() if not name.startswith(("--llm", "--enc", "--freeze"))}
    assert fields == {
        "--depth": Option(choices=("1", "2")),  # as the class itself says, not its base
        "--rate": Option(kind="float"),
        "--fast": Option(values="none"),
        "--no-fused": Option(values="none"),
        "--disable-fused": Option(values="none"),
        "--backend": Option(choices=("flash", "fused")),
        "--heads": Option(values="many", kind="int"),
        "--disable-bias-linear": Option(values="none"),
        "--limit": Option(values="optional"),
    }


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ("type=int", None),
        ("choices=['1', '7']", None),
        ("choices=['1', '2']", "--x: '7' is not one of 1, 2"),
        ("action='store_true'", "--x: it takes no value, and '7' is written"),
        ("action='store_const', const=7", "--x: it takes no value, and '7' is written"),
        ("action=argparse.BooleanOptionalAction", "--x: it takes no value, and '7' is written"),
        ("nargs='+', type=int", None),
        ("type=some_function", None),
    ],
)
def test_a_value_is_read_as_argparse_would(tmp_path: Path, words: str, problem: str | None) -> None:
    parser = parser_of(tmp_path, f"    parser.add_argument('--x', {words})\n")

    assert list(parser.problems([("--x", "7")])) == ([problem] if problem else [])


def test_a_switch_with_two_forms_has_both(tmp_path: Path) -> None:
    text = "    parser.add_argument('--tiles', action=argparse.BooleanOptionalAction)\n"

    assert list(parser_of(tmp_path, text).problems([("--tiles",), ("--no-tiles",)])) == []


def test_several_values_are_words_of_one_text(tmp_path: Path) -> None:
    parser = parser_of(tmp_path)

    assert list(parser.problems([("--heads", "1 2")])) == []
    assert list(parser.problems([("--heads", "1 two")])) == ["--heads: 'two' is no int"]
    assert list(parser.problems([("--heads", "1 '2")])) == [
        '--heads: "1 \'2" cannot be split into words: No closing quotation'
    ]


def test_what_no_run_can_do_without_is_missed_unless_a_file_brings_it(tmp_path: Path) -> None:
    parser = parser_of(tmp_path, required="['num_layers', 'hidden_size']")

    assert parser.missing([("--num-layers", "2")]) == ("--hidden-size",)
    assert parser.missing([("--yaml-cfg", "model.yaml")]) == ()


def test_a_program_whose_parser_cannot_be_found_is_not_guessed(tmp_path: Path) -> None:
    write_program(tmp_path)
    (tmp_path / "megatron/training/arguments.py").unlink()

    assert read_parser(tmp_path, PROGRAM) is None
    assert read_parser(tmp_path, "examples/none.py") is None


def test_the_shipped_parser_is_that_of_a_named_commit() -> None:
    parser = newest_parser()

    assert len(parser.commit) == 40
    assert parser.required == ("--num-layers", "--hidden-size", "--num-attention-heads", "--max-position-embeddings")
    assert parser.options["--kv-channels"] == Option(kind="int")
