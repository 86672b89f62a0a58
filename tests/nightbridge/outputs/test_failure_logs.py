"""The useful line of real failure logs: named, and with the first rank and node that failed."""

import tomllib
from pathlib import Path

import pytest

from nightbridge.outputs.logs import read_logs

LOGS = tomllib.loads((Path(__file__).parents[2] / "data" / "failure_logs.toml").read_text())["log"]


@pytest.mark.parametrize("log", LOGS, ids=[f"{log['part']} {log['source'][-60:]}" for log in LOGS])
def test_the_cause_is_named(log: dict[str, str], tmp_path: Path) -> None:
    path = tmp_path / "log.out"
    path.write_text(log["text"])

    error = read_logs([path]).last_error

    assert log["cause"] in error
    assert log["cause"] or error == "" or error.startswith("possibly: ")
    assert log.get("where", "") in error
