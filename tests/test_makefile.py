"""What the README's commands need is there, or is named in one line with the way out; what they install is pinned."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

OLD = """[ "$1" = --version ] && echo Python 3.9.1
[ "$1" = --version ]
"""
WITHOUT_VENV = """case "$2" in *ensurepip*) exit 1 ;; esac
"""


@pytest.fixture
def require(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs `make require` on a machine that has nothing but a shell and the given programs."""

    def run(*programs: str, python: str = "") -> subprocess.CompletedProcess[str]:
        for program in ("sh", *programs):
            (tmp_path / program).symlink_to(str(shutil.which(program)))
        if python:
            (tmp_path / "python3").write_text(f"#!{tmp_path}/sh\n{python}")
            (tmp_path / "python3").chmod(0o755)
        return subprocess.run(
            [str(shutil.which("make")), "--no-print-directory", "require"],
            # Not a make below the one that runs the tests: that would say so in its messages.
            env={name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
            | {"PATH": str(tmp_path)},
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        )

    return run


def test_what_make_starts_keeps_prefects_telemetry_at_home() -> None:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "DO_NOT", "PREFECT"))}
    show = "show: ; @echo $$DO_NOT_TRACK $$PREFECT_SERVER_ANALYTICS_ENABLED"
    shown = subprocess.run(
        ["make", "--no-print-directory", f"--eval={show}", "show"], env=clean, cwd=ROOT, capture_output=True, check=True
    )

    assert shown.stdout.split() == [b"1", b"false"]


@pytest.mark.parametrize(
    ("programs", "python", "told"),
    [
        ((), "", "git is missing: install it, on Debian or Ubuntu with: apt-get install git"),
        (("git",), "", "python3 is missing: install Python 3.11 to 3.13, or name one with PYTHON=..."),
        (("git",), OLD, "Python 3.9.1 is not between 3.11 and 3.13: name another one with PYTHON=..."),
        (
            ("git",),
            WITHOUT_VENV,
            "Python's venv is missing: install it, on Debian or Ubuntu with: apt-get install python3-venv",
        ),
    ],
)
def test_what_is_missing_is_named_in_one_line(
    require: Callable[..., subprocess.CompletedProcess[str]], programs: tuple[str, ...], python: str, told: str
) -> None:
    refused = require(*programs, python=python)

    assert refused.returncode != 0
    lines = [line for line in refused.stderr.splitlines() if not line.startswith("make: ***")]
    assert (refused.stdout, lines) == ("", [told])


def test_a_machine_that_has_all_of_it_is_not_bothered(require: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    accepted = require("git", python=f'exec {sys.executable} "$@"')

    assert (accepted.returncode, accepted.stdout, accepted.stderr) == (0, "", "")


@pytest.mark.parametrize("path", ["requirements.lock", "nightbridge/repos/launcher.lock"])
def test_a_lock_file_pins_each_file_by_its_hash_and_names_no_index(path: str) -> None:
    entries = (ROOT / path).read_text().replace(" \\\n", " ").splitlines()

    assert entries
    assert [
        entry for entry in entries if not re.fullmatch(r"[\w.-]+==\S+( ; [^#]+?)?( +--hash=sha256:\w{64})+", entry)
    ] == []


def test_all_that_the_project_asks_for_is_locked() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    names = [
        re.split(r"[<>=\[ ;]", requirement)[0]
        for requirement in (*project["dependencies"], *project["optional-dependencies"]["dev"])
    ]
    locked = set(re.findall(r"^([\w.-]+)==", (ROOT / "requirements.lock").read_text(), re.MULTILINE))

    assert [name for name in names if name not in locked] == []


def test_users_of_one_host_share_the_folder_of_prefects_workers(tmp_path: Path) -> None:
    (tmp_path / "prefect").write_text(
        '#!/bin/sh\n[ "$1" = worker ] && echo started || echo PREFECT_API_URL=http://prefect\n'
    )
    (tmp_path / "prefect").chmod(0o755)

    def worker(temporary: Path) -> subprocess.CompletedProcess[str]:
        command = ["make", "--no-print-directory", "--assume-old=install", f"BIN={tmp_path}", "worker"]
        environment = {**os.environ, "TMPDIR": str(temporary)}
        return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)

    assert "started" in worker(tmp_path).stdout
    assert (tmp_path / "runner_storage").stat().st_mode & 0o7777 == 0o1777

    taken = tmp_path / "taken"
    taken.mkdir()
    (taken / "runner_storage").touch()  # as little use as another user's folder, which root could write to
    refused = worker(taken)
    assert refused.returncode != 0
    assert "started" not in refused.stdout
    assert f"{taken}/runner_storage is another user's" in refused.stderr
    assert "TMPDIR=" in refused.stderr


def test_a_worker_without_a_server_is_refused_for_nothing_would_ever_be_due(tmp_path: Path) -> None:
    (tmp_path / "prefect").write_text("#!/bin/sh\necho PREFECT_PROFILE=ephemeral\n")
    (tmp_path / "prefect").chmod(0o755)
    command = ["make", "--no-print-directory", "--assume-old=install", f"BIN={tmp_path}", "worker"]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}

    refused = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    (tmp_path / "prefect").write_text('#!/bin/sh\n[ "$1" = worker ] && echo started\n')
    named = environment | {"PREFECT_API_URL": "http://prefect/api"}
    begun = subprocess.run(command, cwd=ROOT, env=named, capture_output=True, text=True, check=False)

    assert refused.returncode != 0
    assert "export PREFECT_API_URL=http://127.0.0.1:4200/api" in refused.stderr
    assert begun.stdout.splitlines()[-1] == "started"


@pytest.mark.parametrize("target", ["test", "soak", "soak-newest-prefect"])
def test_the_real_parts_are_installed_before_the_first_test(target: str) -> None:
    """A test that lacks its part is skipped: on a new host, all of them on the newest Prefect would be."""
    # A dry run; without the variables of the make that runs the tests, whose own dry run would be none.
    command = [str(shutil.which("make")), "--dry-run", "--no-print-directory", "--assume-old=install", target]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    shown = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True).stdout

    assert "tests/real/packages.py" in shown.partition("bin/pytest")[0]


def test_a_long_count_that_fails_costs_none_of_the_others_its_hours(tmp_path: Path) -> None:
    for name in ("python", "uv", "prefect", "pytest"):
        (tmp_path / name).write_text(f'#!/bin/sh\necho ran {name} "$@"\n[ {name} != pytest ]\n')
        (tmp_path / name).chmod(0o755)
    newest = tmp_path / "newest" / "bin"
    newest.mkdir(parents=True)
    for name in ("prefect", "pytest"):
        (newest / name).symlink_to(tmp_path / name)
    (tmp_path / ".installed").touch()
    command = [str(shutil.which("make")), f"BIN={tmp_path}", f"VENV={tmp_path}", "soak"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    counted = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)

    ran = [line for line in counted.stdout.splitlines() if line.startswith("ran")]
    assert counted.returncode != 0
    assert sum(line.startswith("ran pytest") for line in ran) == 6, "each fails"
    assert any("benchmarks/restore.py" in line for line in ran)


def test_clean_keeps_the_store_and_clean_all_asks(tmp_path: Path) -> None:
    (tmp_path / "Makefile").write_text((ROOT / "Makefile").read_text())
    kept = tmp_path / ".nightbridge" / "store" / "nights" / "2026-11-21"
    kept.mkdir(parents=True)
    (tmp_path / ".nightbridge" / "envs").mkdir()
    (tmp_path / ".venv").mkdir()

    def make(target: str, answer: str = "") -> subprocess.CompletedProcess[str]:
        command = [str(shutil.which("make")), "--no-print-directory", target]
        return subprocess.run(command, cwd=tmp_path, input=answer, capture_output=True, text=True, check=False)

    assert make("clean").returncode == 0
    assert not (tmp_path / ".venv").exists()
    assert not (tmp_path / ".nightbridge" / "envs").exists()
    refused = make("clean-all", "no\n")
    assert refused.returncode != 0
    assert "removes .nightbridge: 1 nights" in refused.stdout
    assert kept.exists()
    assert make("clean-all", "yes\n").returncode == 0
    assert not kept.exists()
