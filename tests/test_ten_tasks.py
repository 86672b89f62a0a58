"""The ten tasks of a second week, as docs/ten_tasks.sh has them: none is blocked, none takes over three minutes."""

import os
import re
import subprocess
import sys
from pathlib import Path

from tests.real.prefect_server import PrefectServer

ROOT = Path(__file__).parents[1]
LONGEST = 180
"""Seconds that a task may take, whatever else the machine does."""

FEWER_NIGHTS = """
import sys
from pathlib import Path
from examples.practice import demo
from examples.practice.demo import DemoNight

commit, scenario, repositories = demo.commit_behaviour, demo._scenario, []

def one_test(folder):
    file = scenario(folder)
    file.write_text(file.read_text().partition("[[Tests]]\\nid = \\"deepseek")[0])
    test = file.with_name("llama_small.toml")
    test.write_text(test.read_text() + "[gate]\\npairs = 0\\n")
    return file

def crash_once(of, subject, **changed):
    repositories.append(of)
    commit(of, subject, **changed, crash_at=5 if subject == "Crash" else None)

demo._scenario, demo.commit_behaviour = one_test, crash_once
demo.NIGHTS = (DemoNight(subject="Crash"), DemoNight(subject="Repair it"), demo.NIGHTS[3])
demo.run_demo(Path(sys.argv[1]), lambda night, report: print(night.subject, report.exit_code))
commit(repositories[0], "Sleep between the steps", slow_wall=0.2)
"""
"""A demo of one test and three nights, the first of which fails, without pairs; the run that is cancelled later sleeps."""


def test_the_ten_tasks_are_done_with_the_commands_alone(
    tmp_path: Path, environments_dir: Path, prefect_server: PrefectServer
) -> None:
    demo = tmp_path / "demo"
    demo.mkdir()
    (demo / "envs").symlink_to(environments_dir)
    # One of their own for the demo and each night would be five seconds of a core: tests/flows/test_server.py has those.
    environment = prefect_server.environment | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    made = subprocess.run(
        [sys.executable, "-c", FEWER_NIGHTS, demo],
        cwd=tmp_path,
        env=environment | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert [line.split()[-1] for line in made.stdout.splitlines()] == ["3", "0", "1"]

    done = subprocess.run(
        [ROOT / "docs" / "ten_tasks.sh", demo],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    seconds = {int(number): int(taken) for number, taken in re.findall(r"^== (\d+) .*: (\d+) s$", done.stdout, re.M)}
    assert sorted(seconds) == list(range(1, 11))
    assert max(seconds.values()) <= LONGEST, seconds
