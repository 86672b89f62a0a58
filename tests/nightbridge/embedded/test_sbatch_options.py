"""How command lines and #SBATCH lines are read, as sbatch reads them."""

import signal

import pytest

from nightbridge.embedded.options import SRUN
from nightbridge.embedded.sbatch_options import (
    SBATCH,
    EarlySignal,
    parse_early_signal,
    parse_time_limit,
    script_options,
    split_options,
)
from nightbridge.errors import InvalidInput


def test_options_end_at_the_first_word_that_is_none() -> None:
    options, rest = split_options(["-N2", "-n", "4", "--wait=60", "-lu", "-K1", "--overlap", "env", "-i", "-n"], SRUN)

    assert options == {
        "nodes": "2",
        "ntasks": "4",
        "wait": "60",
        "label": "",
        "unbuffered": "",
        "kill-on-bad-exit": "1",
        "overlap": "",
    }
    assert rest == ["env", "-i", "-n"]


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


def test_signals_before_the_time_limit() -> None:
    assert parse_early_signal("TERM@120") == EarlySignal(signal.SIGTERM, 120, to_script=False)
    assert parse_early_signal("B:10") == EarlySignal(signal.SIGUSR1, 60, to_script=True)
    for wrong in ("NOPE@3", "TERM@x", "X:TERM", ""):
        with pytest.raises(InvalidInput):
            parse_early_signal(wrong)
