"""How sbatch's options are parsed."""

import pytest

from nightbridge.errors import InvalidInput
from nightbridge.sbatch_options import SBATCH, parse_time_limit, script_options, split_options


def test_a_double_dash_ends_options_and_the_last_of_two_counts() -> None:
    assert split_options(["-J", "a", "--job-name=b", "--", "-x"], SBATCH) == ({"job-name": "b"}, ["-x"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--nodes"], "option '--nodes' requires an argument"),
        (["-y"], "invalid option -- 'y'"),
        (["--no-such-option"], "unrecognized option '--no-such-option'"),
    ],
)
def test_a_wrong_option_is_named(words: list[str], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        split_options(words, SBATCH)


def test_sbatch_lines_are_read_up_to_the_first_command() -> None:
    script = (
        "#!/bin/bash\n#\n# Generated\n\n#SBATCH --job-name='two words' # why\n"
        "  # indented comment\n#SBATCH -N 2\nset -e\n#SBATCH --nodes=9\n"
    )

    assert script_options(script) == ["--job-name=two words", "-N", "2"]


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("30", 1800),
        ("30:15", 1815),
        ("08:00:00", 28_800),
        ("1-00:00:00", 86_400),
        ("2-12", 216_000),
        ("infinite", None),
        ("", None),
    ],
)
def test_time_limits_are_read_as_slurm_writes_them(text: str, seconds: int | None) -> None:
    assert parse_time_limit(text) == seconds
