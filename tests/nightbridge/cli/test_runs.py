"""`run`, `logs` and `demo`: nights, and how they are reported."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import cast
from xml.etree import ElementTree

import pytest

from nightbridge.models import ClusterSettings, NightReport, Verdict, VerdictStatus
from nightbridge.slurm.attempt_files import open_attempt
from tests.nightbridge.cli.conftest import TEST, Program


@pytest.mark.parametrize("command", [["demo"], ["demo", "--prepare"]])
def test_a_workspace_in_the_place_of_a_file_is_told_in_one_line(
    nightbridge: Program, tmp_path: Path, command: list[str]
) -> None:
    file = tmp_path / "file"
    file.write_text("kept")

    code, out, err = nightbridge(*command, "--workspace", str(file))

    assert (code, out) == (4, "")
    assert err.startswith(f"nightbridge: {file}: the workspace cannot be written: File exists. ")
    assert file.read_text() == "kept"


def test_an_empty_night_is_refused_and_not_a_new_one(nightbridge: Program) -> None:
    code, _, err = nightbridge("run", TEST, "--night", "")

    assert code == 2
    assert "not a night id" in err


def test_a_run_without_a_log_says_so(nightbridge: Program, tmp_path: Path) -> None:
    workspace = tmp_path / "ws"
    site = tmp_path / "site.toml"
    site.write_text(f'workspace = "{workspace}"\n')
    attempt = open_attempt(workspace, "test-2026-11-21-0123456789", ClusterSettings())

    code, out, err = nightbridge("logs", attempt.run_key, "--system", str(site))

    assert (code, out) == (0, "")
    assert err == f"{attempt.name} has no log yet\n"


def test_a_log_cannot_drive_the_terminal(nightbridge: Program, tmp_path: Path) -> None:
    site = tmp_path / "site.toml"
    site.write_text(f'workspace = "{tmp_path}/ws"\n')
    attempt = open_attempt(tmp_path / "ws", "test-2026-11-21-0123456789", ClusterSettings())
    # A colour, the window's title, a report of the cursor that is typed back, an 8-bit code, and a line that is overwritten.
    hostile = "a\x1b[31mred\x1b[0m\x1b]0;title\x07\x1b[6n\x9b31m\tb\r\x08c\n" + "x" * 70_000 + "\x1b[0m grün\n"
    (attempt.attempt_dir / "launcher.log").write_bytes(hostile.encode())

    _, out, _ = nightbridge("logs", attempt.run_key, "--system", str(site))

    assert out == "ared31m\tbc\n" + "x" * 70_000 + " grün\n"


# --- JUnit XML --------------------------------------------------------------------------------------------------------


@pytest.fixture
def night_of(monkeypatch: pytest.MonkeyPatch) -> Callable[[VerdictStatus], None]:
    """A night that ends with this verdict, without running anything."""

    def end_with(status: VerdictStatus) -> None:
        verdict = Verdict(run_key="llama3-8b-n1-0123456789", test_id="llama3-8b", night="n1", status=status)
        report = NightReport(scenario="nightly", night="n1", verdicts=(verdict,), report="file:///reports/n1.html")
        flows = SimpleNamespace(nightly_regression=lambda *_given, **_named: report)
        monkeypatch.setitem(sys.modules, "nightbridge.flows", cast("ModuleType", flows))

    return end_with


@pytest.mark.parametrize(
    ("status", "code", "failures"), [(VerdictStatus.PASSED, 0, "0"), (VerdictStatus.REGRESSED, 1, "1")]
)
def test_run_writes_the_verdicts_for_a_ci_system(
    nightbridge: Program,
    night_of: Callable[[VerdictStatus], None],
    tmp_path: Path,
    status: VerdictStatus,
    code: int,
    failures: str,
) -> None:
    night_of(status)

    ended, out, _ = nightbridge("run", TEST, "--night", "n1", "--json", "--junit", "verdicts.xml")

    suite = ElementTree.parse(tmp_path / "verdicts.xml").getroot()[0]
    assert (ended, suite.get("name"), suite.get("failures")) == (code, "nightly", failures)
    assert json.loads(out)["exit_code"] == code


def test_a_junit_file_without_a_folder_is_refused_before_the_night_begins(
    nightbridge: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_given: object, **_named: object) -> None:
        raise AssertionError("the night began")

    monkeypatch.setitem(sys.modules, "nightbridge.flows", cast("ModuleType", SimpleNamespace(nightly_regression=never)))

    code, _, err = nightbridge("run", TEST, "--night", "n1", "--junit", "no/such/folder.xml")

    assert code == 2
    assert "no/such/folder.xml: its folder does not exist" in err


def test_a_junit_file_that_cannot_be_written_is_told_after_the_verdicts(
    nightbridge: Program, night_of: Callable[[VerdictStatus], None], tmp_path: Path
) -> None:
    night_of(VerdictStatus.PASSED)
    (tmp_path / "taken").mkdir()

    code, out, err = nightbridge("run", TEST, "--night", "n1", "--junit", "taken")

    assert code == 2
    assert "passed" in out
    assert "taken: cannot be written" in err
