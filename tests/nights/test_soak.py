"""A month of nights on the shipped schedule, with compressed time and a fault in most of them.

Every night has its verdicts, its report and one event, no run has a second job, and nothing is left behind. `make soak`
runs 30 nights of six tests (`NIGHTBRIDGE_SOAK_NIGHTS`, `NIGHTBRIDGE_SOAK_TESTS`). Its short form is `test_faults.py` with
`test_clock_and_disk.py`: `make test` has each of these faults there.
"""

import os
import random
import sqlite3
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import date, timedelta
from pathlib import Path

import pytest

from tests.flows.practice_night import WIDE, Entry
from tests.nights.conftest import SEED, ClockRig, start_clock_rig
from tests.nights.night import STAGES, Night
from tests.real.prefect_proxy import at_random

pytestmark = [
    pytest.mark.launcher,
    pytest.mark.timeout(7200),
    pytest.mark.skipif("NIGHTBRIDGE_SOAK_NIGHTS" not in os.environ, reason="a month of nights, in make soak"),
]

NIGHTS = int(os.environ.get("NIGHTBRIDGE_SOAK_NIGHTS", "30"))
TESTS = int(os.environ.get("NIGHTBRIDGE_SOAK_TESTS", "6"))
FIRST = date(2027, 3, 1)
OUTAGE = 8.0
PATIENCE = 900.0
"""A reaper that dies with its worker keeps its one slot until its lease is over, after five minutes."""


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory, environments_dir: Path, launcher_python: Path) -> Iterator[ClockRig]:
    # Every third one goes through NeMo-Run's launcher, which takes most of the time.
    entries = [
        Entry(id=f"t{number}", sample="vlm_small", cmd_args={"train_samples": 80, "save_interval": 10}, gate=WIDE)
        if number % 3 < 2
        else Entry(id=f"t{number}", cmd_args={"max_steps": 10, "save_interval": 10}, gate=WIDE)
        for number in range(TESTS)
    ]
    folder = tmp_path_factory.mktemp("soak")
    with ExitStack() as stack:
        yield start_clock_rig(folder, folder, FIRST, entries, environments_dir, launcher_python, stack)


def flow_dies(rig: ClockRig, night: Night) -> None:
    night.kill()


def worker_dies(rig: ClockRig, night: Night) -> None:
    rig.workers[-1].kill()
    rig.start_worker()


def host_dies(rig: ClockRig, night: Night) -> None:
    rig.workers[-1].lose_host()
    rig.start_worker()


def server_is_away(rig: ClockRig, night: Night) -> None:
    rig.server.kill()
    time.sleep(OUTAGE)
    rig.server.start()


def database_is_locked(rig: ClockRig, night: Night) -> None:
    with sqlite3.connect(rig.server.home / "prefect.db", timeout=60, isolation_level=None) as database:
        database.execute("BEGIN EXCLUSIVE")
        time.sleep(OUTAGE)
        database.execute("ROLLBACK")


def calls_fail(rig: ClockRig, night: Night) -> None:
    rig.proxy.fault = at_random(SEED, 0.1)


def clock_jumps(rig: ClockRig, night: Night) -> None:
    rig.go_to(rig.clock.now() + timedelta(hours=12))


def nothing(rig: ClockRig, night: Night) -> None:
    pass


FAULTS: tuple[Callable[[ClockRig, Night], None], ...] = (
    flow_dies,
    worker_dies,
    host_dies,
    server_is_away,
    database_is_locked,
    calls_fail,
    clock_jumps,
    nothing,
)


def test_every_night_of_a_month_ends_in_its_verdicts(rig: ClockRig) -> None:
    chance = random.Random(SEED)
    print(f"NIGHTBRIDGE_FAULT_SEED={SEED}")
    faults = [fault for _ in range(0, NIGHTS, len(FAULTS)) for fault in chance.sample(FAULTS, len(FAULTS))]
    for number, fault in enumerate(faults[:NIGHTS]):
        stage = chance.choice(tuple(STAGES)[1:])  # before it has its plan the reaper takes an hour to miss it
        rig.mend()
        night = rig.next_night(FIRST + number * timedelta(days=1))
        began = time.monotonic()
        night.wait_until(stage)

        fault(rig, night)

        night.passes(patience=PATIENCE, meanwhile=rig.reap)
        print(f"{night.night}: {fault.__name__} in {stage}; {time.monotonic() - began:.0f} s")

    jobs = Counter(job.name for job in rig.installed.jobs())
    # A run that load has slowed is confirmed by re-runs, each a job of its own.
    reruns = len(jobs) - NIGHTS * TESTS
    assert set(jobs.values()) == {1}
    assert reruns >= 0
    print(f"{NIGHTS * TESTS} jobs, and {reruns} of confirming re-runs")
    size = sum(path.stat().st_size for path in rig.server.home.glob("prefect.db*"))
    print(f"Prefect's database after {NIGHTS} nights of {TESTS} tests: {size / 1e6:.1f} MB")
