"""How long the commands that list what there is take on a large store.

    PYTHONPATH=. python benchmarks/reading_commands.py [TESTS NIGHTS REPEATS]      default: 100 400 5

Writes a store with so many nights of so many tests, a verdict for each, and prints for each command the wall time and
the processor time of a cold process: the median of so many.
"""

import os
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import date, timedelta
from pathlib import Path

from nightbridge.models import Comparison, StoreSettings, VerdictStatus
from nightbridge.store.object_store import open_store
from tests.builders import store_night

NIGHTBRIDGE = str(Path(sys.executable).with_name("nightbridge"))
COMMANDS = (["ls", "--limit", "1"], ["ls"], ["status"], ["history"], ["nights"], ["status", "test-007"])


def main(tests: int, nights: int, repeats: int) -> None:
    with tempfile.TemporaryDirectory(prefix="reading-") as folder:
        workspace = Path(folder)
        store = open_store(StoreSettings(url=f"file://{workspace}/store"))
        step_time = Comparison(
            metric="step_time",
            unit="s",
            lower_is_better=True,
            value=1.2,
            baseline=1.2,
            threshold=0.05,
            status="passed",
        )
        verdicts = {f"test-{number:03}": VerdictStatus.PASSED for number in range(tests)}
        for number in range(nights):
            night = str(date(2026, 1, 1) + timedelta(days=number))
            store_night(store, night, verdicts, workspace, comparisons=(step_time,))
        for command in COMMANDS:
            measured = [seconds_of([NIGHTBRIDGE, *command, "--workspace", folder]) for _ in range(repeats)]
            wall, processor = (statistics.median(each) for each in zip(*measured, strict=True))
            print(f"{' '.join(command):20} {wall:6.2f} s, {processor:6.2f} s of processor time")


def seconds_of(command: list[str]) -> tuple[float, float]:
    """Wall time and the child's processor time."""
    before, started = os.times(), time.perf_counter()
    subprocess.run(command, check=False, capture_output=True)
    wall, after = time.perf_counter() - started, os.times()
    return wall, (after.children_user - before.children_user) + (after.children_system - before.children_system)


if __name__ == "__main__":
    main(*(int(argument) for argument in (sys.argv[1:4] or ("100", "400", "5"))))
