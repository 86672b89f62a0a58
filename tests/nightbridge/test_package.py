"""The program and Prefect's collections beside modules of a user that are called like ours.

What a wheel installs, and what loads Prefect, is tested in `tests/test_packaging.py`.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

TEST_FILE = Path(__file__).parents[2] / "conf" / "examples" / "llama3_8b.toml"


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A user's folder; importing one of its modules is a failure."""
    for name in ("flows/__init__.py", "blocks/__init__.py", "tasks.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("raise ImportError('of the user')\n")
    return tmp_path


def python(*arguments: str, cwd: Path) -> "subprocess.CompletedProcess[str]":
    """Run Python in a folder, which is the first that it imports from."""
    environment = os.environ | {"PREFECT_SERVER_ANALYTICS_ENABLED": "false", "DO_NOT_TRACK": "1"}
    return subprocess.run(
        [sys.executable, *arguments], cwd=cwd, env=environment, capture_output=True, text=True, timeout=300, check=False
    )


@pytest.mark.prefect
def test_a_run_begins(place: Path) -> None:
    (place / "site.toml").write_text('workspace = "/proc/nowhere"\n')

    ended = python("-m", "nightbridge", "run", str(TEST_FILE), "--system", "site.toml", cwd=place)

    assert ended.returncode == 4
    assert "nightbridge: /proc/nowhere: " in ended.stderr


@pytest.mark.thorough  # a process that imports Prefect
def test_prefect_finds_our_blocks(place: Path) -> None:
    code = (
        "import prefect.plugins; found = prefect.plugins.load_prefect_collections();"
        "print(found['nightbridge'].__file__)"
    )

    ended = python("-c", code, cwd=place)

    assert (ended.returncode, Path(ended.stdout.strip()).parts[-3:]) == (0, ("nightbridge", "blocks", "__init__.py"))
