"""Many processes that want one commit at once make one fetch from a real server; killed at any moment, none is lost."""

import random
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from nightbridge.models import PinnedRepository
from nightbridge.repos.checkouts import check_out, find_changes
from nightbridge.repos.commits import pinned
from nightbridge.repos.mirrors import Mirror
from tests.conftest import SEEDS
from tests.real.git_server import served_over_http

PROCESSES = 20
NIGHT = "2026-11-21"

# Says when it begins: how long Python needs to start is no part of what is measured or killed.
CHECK_OUT = f"""
import sys
from pathlib import Path
from nightbridge.repos.checkouts import check_out
from nightbridge.repos.mirrors import Mirror
from nightbridge.repos.commits import pinned
workspace = Path(sys.argv[2])
mirror = Mirror(sys.argv[1], workspace, timeout=600)
print("ready", flush=True)
pin = pinned(mirror, "main", "{NIGHT}", workspace)
print(check_out(mirror, "main", pin.commit, workspace, with_submodules=True).model_dump_json())
"""


def start(url: str, workspace: Path) -> "subprocess.Popen[str]":
    command = [sys.executable, "-c", CHECK_OUT, url, str(workspace)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def wait_until_it_begins(process: "subprocess.Popen[str]") -> None:
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"


@pytest.fixture
def family(origin: Any, make_origin: Any) -> Any:
    """`origin` with a submodule by a relative address, and copies of both that can be served."""
    lm = make_origin("Megatron-LM")
    lm.commit("Core", {f"core{number}.py": f"x = {number}\n" for number in range(30)})
    origin.git("submodule", "--quiet", "add", "../Megatron-LM", "3rdparty/Megatron-LM")
    origin.commit("Add Megatron-LM", {f"src/file{number}.py": f"y = {number}\n" for number in range(100)})
    for repository in (origin, lm):
        shutil.copytree(repository.path / ".git", repository.path.parent / "served" / repository.path.name)
    return origin


@pytest.mark.thorough
def test_twenty_processes_make_one_fetch_of_each_repository(family: Any, workspace: Path) -> None:
    with served_over_http(family.path.parent / "served") as server:
        processes = [start(f"{server.url}/Megatron-Bridge", workspace) for _ in range(PROCESSES)]
        answers = [process.communicate()[0] for process in processes]

    assert [process.returncode for process in processes] == [0] * PROCESSES
    assert len(set(answers)) == 1
    made = PinnedRepository.model_validate_json(answers[0].removeprefix("ready\n"))
    assert made.commit == family.git("rev-parse", "main")
    assert find_changes(made.path, made.commit) == []
    assert (made.path / "3rdparty" / "Megatron-LM" / "core7.py").read_text() == "x = 7\n"
    # The two repositories were asked for their refs, and for objects, once each.
    assert sorted(server.asked) == ["fetch", "fetch", "ls-refs", "ls-refs"]


@pytest.fixture(scope="module")
def undisturbed() -> list[float]:
    """Seconds that a check-out takes on this machine, once somebody has measured it."""
    return []


def measure(url: str, workspace: Path) -> float:
    process = start(url, workspace)
    wait_until_it_begins(process)
    started = time.monotonic()
    process.communicate()
    assert process.returncode == 0
    return time.monotonic() - started


@pytest.mark.random_kill
@pytest.mark.parametrize("seed", SEEDS)
def test_killed_at_any_moment_the_next_one_succeeds(
    family: Any, workspace: Path, tmp_path: Path, undisturbed: list[float], seed: int
) -> None:
    if not undisturbed:
        undisturbed.append(measure(family.url, tmp_path / "measured"))
    process = start(family.url, workspace)
    wait_until_it_begins(process)
    time.sleep(random.Random(seed).uniform(0, undisturbed[0]))
    process.kill()
    process.communicate()

    mirror = Mirror(family.url, workspace, timeout=600)
    commit = pinned(mirror, "main", NIGHT, workspace).commit
    made = check_out(mirror, "main", commit, workspace, with_submodules=True)

    assert commit == family.git("rev-parse", "main")
    assert find_changes(made.path, commit) == []
    assert len(list((made.path / "src").iterdir())) == 100
    assert (made.path / "3rdparty" / "Megatron-LM" / "core7.py").read_text() == "x = 7\n"
    assert [entry.name for entry in made.path.parent.iterdir() if entry.is_dir()] == [made.path.name]
    assert mirror.damage() == []
