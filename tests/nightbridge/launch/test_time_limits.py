"""Time limits of tests."""

import pytest

from nightbridge.errors import InvalidInput
from nightbridge.launch.resources import clock, seconds_of


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("30", 1800),
        ("30:15", 108900),
        ("01:30:00", 5400),
        ("1-2", 93600),
        ("1-02:30", 95400),
        ("1-02:30:15", 95415),
        ("30m", 1800),
        ("2h", 7200),
        ("90s", 90),
        ("1d", 86400),
        ("2H", 7200),
        ("1w", 604800),
        (" 00:30:00 ", 1800),
    ],
)
def test_every_form_of_cloudai_and_of_sbatch_is_read(text: str, seconds: int) -> None:
    assert seconds_of(text) == seconds


@pytest.mark.parametrize("text", ["", "0", "soon", "1:2:3:4", "-5", "00:00:00", "1-", "1.5h", "UNLIMITED"])
def test_anything_else_is_refused_with_the_forms_that_are_read(text: str) -> None:
    with pytest.raises(InvalidInput, match="HH:MM:SS"):
        seconds_of(text)


@pytest.mark.parametrize(("seconds", "text"), [(1800, "00:30:00"), (95415, "1-02:30:15"), (59, "00:00:59")])
def test_seconds_are_written_as_slurm_reads_them(seconds: int, text: str) -> None:
    assert clock(seconds) == text
    assert seconds_of(text) == seconds
