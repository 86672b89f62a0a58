"""The command lines of today are those that each version's real launcher took: a changed one demands a new try."""

import pytest

from nightbridge.launch.flags import FLAGS
from nightbridge.launch.versions import version_for_pin
from tests.nightbridge.launch.dry_runs import recorded
from tests.nightbridge.launch.examples import EXAMPLES, VERSIONS, argv_of

AGAIN = "the launcher has not seen this command line: try again as tests/nightbridge/launch/dry_runs.py says"


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("example", EXAMPLES)
def test_the_real_launcher_has_taken_this_command_line(example: str, version: str) -> None:
    record = recorded()[version, example]

    assert argv_of(example, version) == record.argv, AGAIN
    assert record.exit_status == 0
    # What its parser does not know goes to Hydra, so that may be overrides only.
    assert record.not_recognised == tuple(word for word in record.argv if word.startswith("logger."))


@pytest.mark.parametrize("version", VERSIONS)
def test_every_flag_of_a_version_has_been_tried(version: str) -> None:
    tried = {word.partition("=")[0] for example in EXAMPLES for word in recorded()[version, example].argv}

    sent = [flag for flag in FLAGS if flag.option and not flag.secret and flag.first <= version_for_pin(version)]
    left_out = {flag.field for flag in sent if flag.option not in tried}
    # The tries are dry runs anyway, and the other one makes the launcher ask a person.
    assert left_out == {"dryrun", "list_config_variants"}
