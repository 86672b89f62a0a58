"""Clocks that jump, slots that are missed, and a database that takes nothing: nights of the shipped schedule itself.

Prefect's server (on SQLite) and the worker go by a clock that the tests set, so that one in the morning comes at once. Each
test goes on from the day at which the one before it left the clock.
"""

import sqlite3
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from datetime import date, datetime, timedelta
from pathlib import Path

import pytest

from tests.nights.conftest import PLAIN, SLOT, ZONE, ClockRig, in_any_stage, start_clock_rig
from tests.nights.night import DEPLOYMENT, log_sizes

pytestmark = pytest.mark.launcher

AUTUMN, SPRING = date(2027, 10, 31), date(2028, 3, 26)
"""Days on which the clocks of the schedule's zone are changed, two hours after the slot."""

DAY = timedelta(days=1)

LOCKED = 10.0
"""Seconds: several times as long as the server waits for its database here."""


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder on a small disk of its own, where one can be mounted; else any."""
    folder = tmp_path_factory.mktemp("disk")
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64m", "nightbridge-test", folder], capture_output=True, check=False
    )
    yield folder
    if mounted.returncode == 0:
        subprocess.run(["umount", "--lazy", folder], check=True)


@pytest.fixture(scope="module")
def whole_clock_rig(
    tmp_path_factory: pytest.TempPathFactory, disk: Path, environments_dir: Path, launcher_python: Path
) -> Iterator[ClockRig]:
    folder = tmp_path_factory.mktemp("rig")
    with ExitStack() as stack:
        rig = start_clock_rig(folder, disk, AUTUMN - DAY, PLAIN, environments_dir, launcher_python, stack)
        rig.go_straight(DEPLOYMENT)  # what the tests do to a night comes after its workspace is prepared
        yield rig


@pytest.fixture
def clock_rig(whole_clock_rig: ClockRig) -> ClockRig:
    whole_clock_rig.mend()
    return whole_clock_rig


def today(rig: ClockRig) -> date:
    return rig.clock.now().astimezone(ZONE).date()


@in_any_stage()
def test_of_the_slots_that_a_server_missed_the_last_one_is_a_night_and_a_full_disk_of_the_server_is_waited_for(
    clock_rig: ClockRig, disk: Path, stage: str
) -> None:
    missed = [today(clock_rig) + DAY, today(clock_rig) + 2 * DAY]  # at first the last one is that of AUTUMN
    slots = [datetime.combine(day, SLOT, ZONE) for day in missed]
    log_from = log_sizes(clock_rig.installed)
    for slot in slots:
        clock_rig.wait_for_slot(slot)
    clock_rig.server.stop()
    clock_rig.go_to(slots[1] + timedelta(hours=8))
    clock_rig.server.start()

    first, last = (clock_rig.night_of(day, log_from) for day in missed)

    last.wait_until(stage)  # the beginning is that of whichever of them begins first
    if disk.is_mount():
        fill(disk)
    first.wait_for_state("Skipped")
    last.passes()
    (page,) = last.stored(f"reports/{last.night}/*.html")
    assert "after its slot" in page.read_text()
    assert not first.stored(f"reports/{first.night}/*")
    if not disk.is_mount():
        pytest.skip("as it should be, but on no full disk: mounting a small one needs root")


def fill(disk: Path) -> None:
    """Leave no room on a disk for some seconds."""
    filler, full_until = disk / "filler", time.monotonic() + LOCKED
    with filler.open("wb", buffering=0) as stream:
        # What the server gives back meanwhile, as the end of a log that it has written home, is taken as well.
        while time.monotonic() < full_until:
            with suppress(OSError):
                while stream.write(bytes(4096)):
                    pass
            time.sleep(0.1)
    filler.unlink()


@in_any_stage()
def test_a_locked_database_is_waited_for_and_a_clock_that_jumps_over_midnight_and_into_summer_time_changes_no_night(
    clock_rig: ClockRig, stage: str
) -> None:
    earlier = clock_rig.installed.stored("runs/*/*/*/verdict.json")
    # The slots before SPRING were never run: this is a server that was away for half a year.
    night = clock_rig.next_night(SPRING if today(clock_rig) < SPRING else None)
    night.wait_until(stage)

    with sqlite3.connect(clock_rig.server.home / "prefect.db", timeout=60, isolation_level=None) as database:
        database.execute("BEGIN EXCLUSIVE")
        time.sleep(LOCKED)
        database.execute("ROLLBACK")
    # What the night wanted of it meanwhile is asked again some seconds later. At first the lost hour is jumped over, too.
    clock_rig.go_to(datetime.combine(today(clock_rig) + DAY, datetime.min.time(), ZONE))

    night.passes()
    assert ("no_baseline" in night.verdicts().values()) == (not earlier)  # it is no earlier night that was found again
