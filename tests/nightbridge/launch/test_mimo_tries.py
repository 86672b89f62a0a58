"""The examples' command lines are those that Megatron-LM's own parser took: a changed one demands a new try."""

from pathlib import Path

import pytest

from nightbridge.launch.parser_source import newest_parser
from tests.nightbridge.launch.mimo_tries import EXAMPLES, RECORD, Try, argv_of

AGAIN = "Megatron-LM has not seen this command line: try again as tests/nightbridge/launch/mimo_tries.py says"


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_megatron_lm_has_taken_the_command_line_of_an_example(example: Path) -> None:
    tries = [Try.model_validate_json(line) for line in RECORD.read_text().splitlines()]
    found = next(each for each in tries if each.example == example.name)

    assert (found.ranks, found.argv) == argv_of(example), AGAIN
    assert found.refusal == ""
    assert found.commit == newest_parser().commit
