"""Messages of other programs become errors of ours by tables that are read from the top."""

import re

import pytest

from nightbridge.errors import ErrorPattern, InvalidInput, PermanentError, TransientError, classify
from nightbridge.images import enroot, registry
from nightbridge.repos import environments, git
from nightbridge.slurm import sbatch_errors as refusals
from nightbridge.store import s3_client

SPECIAL = ErrorPattern(r"refused \(login\)", PermanentError, "no login", "Log in to {host}")
GENERAL = ErrorPattern(r"refused", TransientError, "busy")


def test_the_first_pattern_that_occurs_counts() -> None:
    assert classify("connection refused (login)\nbye", (SPECIAL, GENERAL)) is SPECIAL
    assert classify("connection refused", (SPECIAL, GENERAL)) is GENERAL
    assert classify("all is well", (SPECIAL, GENERAL)) is None


def test_the_error_has_the_programs_own_words_and_fields_in_its_advice() -> None:
    error = SPECIAL.error("an image", "connection refused", host="nvcr.io")

    assert type(error) is PermanentError
    assert str(error) == "an image: no login (connection refused). Log in to nvcr.io"
    assert str(GENERAL.error("an image", "")) == "an image: busy"


@pytest.mark.parametrize(
    "table",
    [
        enroot._ERRORS,
        registry._REFUSALS,
        registry._FAULTS,
        git._ERRORS,
        environments._PIP_ERRORS,
        (*refusals._KNOWN, refusals._BY_SITE),
        s3_client._CODES,
        s3_client._EXCEPTIONS,
    ],
)
def test_every_table_can_be_read_and_says_what_a_person_who_wrote_something_wrong_can_do(
    table: tuple[ErrorPattern, ...],
) -> None:
    for known in table:
        re.compile(known.pattern)
        assert known.advice or not issubclass(known.kind, InvalidInput)
        assert not known.what.endswith(".")
