"""Whatever stands in a file, the command line says what is wrong with it: exit code 0 or 2, never a traceback.

Of each kind of file a third of the cases is tried; with NIGHTBRIDGE_EVERY_STAGE=1 (`make soak`) all of them are.
"""

import contextlib
import io
import itertools
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from nightbridge.cli import main as cli

pytestmark = pytest.mark.thorough

ROOT = Path(__file__).parents[2]
SAMPLES = sorted(path for folder in ("examples", "practice") for path in (ROOT / "conf" / folder).rglob("*.toml"))
TEXTS = {str(path.relative_to(ROOT / "conf")): path.read_text(encoding="utf-8") for path in SAMPLES}
CONTAINER = "model:\n  num_layers: 32\n  seq_length: 4096\ntrain:\n  train_iters: 50\n  global_batch_size: 8\n"

SHARE = 1 if os.environ.get("NIGHTBRIDGE_EVERY_STAGE") == "1" else 3

# What is put in place of a value, or between two characters, of a sample.
PIECES = (
    *(
        "",
        "0",
        "-1",
        "1e400",
        "nan",
        "inf",
        "true",
        "[]",
        "[[]]",
        "{}",
        '""',
        '"\\u0000"',
        '"None"',
        '"env:"',
        "[1, 'a']",
    ),
    *(
        "1979-05-27",
        "07:32:00",
        "99999999999999999999999999",
        '"' + "a" * 300 + '"',
        "[",
        "]",
        "{",
        "'",
        "#",
        "\n",
        "=",
    ),
    *("[cmd_args]\n", "[[Tests]]\n", "cmd_args = 3\n", "\x00", "\ufeff", "é", "{a = {b = {c = 1}}}", "[[1, 2], [3]]"),
)


def told(arguments: Sequence[str | Path]) -> tuple[int, str]:
    """Run one command as `main` does; its exit code, and everything that it printed."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        code = cli.run([str(argument) for argument in arguments])
    return code, out.getvalue()


def check_file(data: bytes, *commands: Sequence[str], suffix: str = ".toml") -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"any{suffix}"
        path.write_bytes(data)
        for command in commands:
            code, text = told([path if word == "FILE" else word for word in command])
            assert code in (0, 2), text
            assert "Traceback" not in text
            assert "internal error" not in text
            assert code == 0 or text.strip()


VALIDATE = ("validate", "FILE")
AS_TEST = (VALIDATE, ("validate", "FILE", "--json"), ("render", "FILE"))
AS_SYSTEM = (("validate", str(ROOT / "conf/examples/llama3_8b.toml"), "--system", "FILE", "--cluster", "local"),)


@st.composite
def mutated(draw: st.DrawFn) -> str:
    """A sample with a few changes: a value replaced, a line dropped, doubled or moved, a text put in anywhere."""
    text = draw(st.sampled_from(sorted(TEXTS.values())))
    for _ in range(draw(st.integers(1, 3))):
        lines = text.splitlines(keepends=True) or [""]
        place = draw(st.integers(0, len(lines) - 1))
        piece = draw(st.sampled_from(PIECES))
        change = draw(st.sampled_from(("value", "drop", "double", "move", "insert", "key")))
        if change == "value":
            lines[place] = f"{lines[place].partition('=')[0]}= {piece}\n"
        elif change == "drop":
            del lines[place]
        elif change == "double":
            lines.insert(place, lines[place])
        elif change == "move":
            lines.insert(draw(st.integers(0, len(lines) - 1)), lines.pop(place))
        elif change == "key":
            lines[place] = lines[place].replace("_", "", 1)
        else:
            column = draw(st.integers(0, len(lines[place])))
            lines[place] = lines[place][:column] + piece + lines[place][column:]
        text = "".join(lines)
    return text


@settings(max_examples=60 // SHARE, deadline=None)
@given(st.binary(max_size=200))
@example(b"\xff\xfe")
@example(b"a = " + b"[" * 2000)
@example(b"a = " + b"9" * 5000)
def test_any_bytes_as_a_test(data: bytes) -> None:
    check_file(data, VALIDATE)


@settings(max_examples=150 // SHARE, deadline=None)
@given(mutated())
def test_any_change_of_a_sample_as_a_test(text: str) -> None:
    check_file(text.encode("utf-8", "surrogatepass"), *AS_TEST)


@settings(max_examples=80 // SHARE, deadline=None)
@given(mutated() | st.text(max_size=100))
def test_any_text_as_a_system_file(text: str) -> None:
    check_file(text.encode("utf-8", "surrogatepass"), *AS_SYSTEM)


@settings(max_examples=100 // SHARE, deadline=None)
@given(st.text(max_size=60), st.integers(0, len(CONTAINER)), st.sampled_from(PIECES))
def test_any_text_as_a_configuration_of_megatron_bridge(text: str, place: int, piece: str) -> None:
    changed = CONTAINER[:place] + piece + CONTAINER[place:]

    check_file(text.encode("utf-8", "surrogatepass"), VALIDATE, suffix=".yaml")
    check_file(changed.encode(), VALIDATE, suffix=".yaml")


@settings(max_examples=60 // SHARE, deadline=None)
@given(st.text(max_size=20))
@example("=")
@example("a=[")
@example("model.num_layers=!!python/object:os.system x")
@example("model.num_layers.deeper=1")
def test_any_override_of_a_configuration(override: str) -> None:
    check_file(CONTAINER.encode(), ("validate", "FILE", f"--override={override}"), suffix=".yaml")


@pytest.mark.parametrize(("sample", "piece"), list(itertools.product(sorted(TEXTS)[:3], ("\x00", "[", "= ="))))
def test_a_sample_that_is_no_toml_any_more_is_told_with_its_file(sample: str, piece: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "broken.toml"
        path.write_text(TEXTS[sample] + piece, encoding="utf-8")

        code, text = told(["validate", path])

    assert code == 2
    assert f"{path}: not valid TOML" in text


@pytest.mark.parametrize(
    "line",
    [
        "cmd_args.tp." + ".".join("a" * 3000) + " = 1",
        "cmd_args.tp = " + "[" * 100 + "]" * 100,
        "cmd_args.tp = " + "{a = " * 100 + "1" + "}" * 100,
        "[cmd_args." + ".".join("x" * 2000) + "]",
    ],
    ids=["dotted key", "lists", "tables", "header"],
)
@pytest.mark.parametrize("command", ["validate", "render"])
def test_endless_nesting_is_told_and_not_followed(line: str, command: str, tmp_path: Path) -> None:
    path = tmp_path / "deep.toml"
    path.write_text(f'name = "t"\ntest_template_name = "MegatronBridge"\n{line}\n', encoding="utf-8")

    code, text = told([command, path])

    assert code == 2
    assert "tables are nested more than 50 deep" in text


@pytest.mark.parametrize(
    ("file", "arguments"),
    [
        ('[cluster]\nkind = "slurm"\nbin_dir = "\\u0000"\n', ("--system", "FILE")),
        ('[cluster.env_vars]\n"A\\u0000" = "1"\n', ("--system", "FILE", "--cluster", "local")),
    ],
)
def test_a_nul_character_is_refused_before_anything_is_done_with_it(
    file: str, arguments: tuple[str, ...], tmp_path: Path
) -> None:
    path = tmp_path / "site.toml"
    path.write_text(file, encoding="utf-8")
    sample = str(ROOT / "conf/examples/llama3_8b.toml")

    code, text = told(["validate", sample, *(path if word == "FILE" else word for word in arguments)])

    assert code == 2
    assert f"{path}: contains a NUL character" in text
