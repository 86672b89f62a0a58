"""`nightbridge demo`: works from a checkout, wherever it is called, and is refused without one."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from nightbridge.cli import demo
from nightbridge.models import NightReport, VerdictStatus
from tests.builders import make_verdict
from tests.nightbridge.cli.conftest import Program

ROOT = Path(__file__).parents[3]


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """A folder with the package alone, as a wheel installs it."""
    folder = tmp_path / "site-packages"
    shutil.copytree(ROOT / "nightbridge", folder / "nightbridge", ignore=shutil.ignore_patterns("__pycache__"))
    return folder


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder with packages of the workload's names; importing one of them is a failure."""
    for name in ("examples", "examples/practice"):
        (tmp_path / "place" / name).mkdir(parents=True)
        (tmp_path / "place" / name / "__init__.py").write_text("raise ImportError('of the user')\n")
    return tmp_path / "place"


def test_without_a_checkout_it_is_refused_in_one_line_and_leaves_nothing(installed: Path, place: Path) -> None:
    before = sorted(place.rglob("*"))
    environment = os.environ | {"PYTHONPATH": str(installed)}
    command = [sys.executable, "-m", "nightbridge", "demo"]

    ended = subprocess.run(command, cwd=place, env=environment, capture_output=True, text=True, check=False)

    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr == (
        f"nightbridge: {installed}/examples: the practice workload is not installed. "
        "Clone the repository of nightbridge and run `make demo` there\n"
    )
    assert sorted(place.rglob("*")) == before


def test_it_takes_its_own_workload_beside_a_folder_of_that_name(place: Path) -> None:
    code = (
        "from pathlib import Path; from nightbridge.cli.demo import practice_nights; "
        f"print(practice_nights(Path({str(ROOT / 'examples')!r})).__file__)"
    )

    ended = subprocess.run([sys.executable, "-c", code], cwd=place, capture_output=True, text=True, check=False)

    assert (ended.returncode, ended.stdout.strip()) == (0, str(ROOT / "examples/practice/demo.py"))


def test_what_it_says_to_do_next_names_the_demo_s_own_site(
    nightbridge: Program, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    verdict = make_verdict(VerdictStatus.REGRESSED, "slow", test_id="llama-small")
    report = NightReport(scenario="nightly", night="2026-11-21", verdicts=(verdict,), report="report")

    def run_demo(_folder: Path, show: Callable[..., None]) -> list[NightReport]:
        show(SimpleNamespace(subject="Slower"), report)
        return [report]

    nights = SimpleNamespace(NIGHTS=(1,), run_demo=run_demo, slow_night=lambda reports: reports[0])
    monkeypatch.setattr(demo, "practice_nights", lambda _examples: nights)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "environ", dict(os.environ))  # it sets Prefect's home and level of logging

    code, out, err = nightbridge("demo")

    told = [line for line in (out + err).splitlines() if "next: nightbridge" in line]
    assert (code, len(told)) == (0, 2)
    assert all(line.endswith(" llama-small --system .nightbridge/demo/site.toml") for line in told)
