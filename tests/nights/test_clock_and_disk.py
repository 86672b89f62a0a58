"""Clocks that jump, slots that are missed, and a database that takes nothing: nights of the shipped schedule itself.

Prefect's server (on SQLite) and the worker go by a clock that the tests set, so that one in the morning comes at once. Each
test goes on from the day at which the one before it left the clock.
"""

import random
import sqlite3
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from datetime import date, datetime, timedelta
from pathlib import Path

import pytest

from tests.nights.conftest import (
    PLAIN,
    SEED,
    SLOT,
    ZONE,
    ClockRig,
    in_any_stage,
    in_one_night,
    names,
    start_clock_rig,
)
from tests.nights.night import DEPLOYMENT, log_sizes

pytestmark = pytest.mark.launcher

CHANGED = random.Random(SEED).choice((date(2027, 10, 31), date(2028, 3, 26)))
"""A day on which the clocks of the schedule's zone are changed, an hour or two after the slot: in autumn or in spring."""

DAY = timedelta(days=1)

BROKEN = 10.0
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
        rig = start_clock_rig(folder, disk, CHANGED - DAY, PLAIN, environments_dir, launcher_python, stack)
        rig.installed.go_straight(DEPLOYMENT)  # what the tests do to a night comes after its workspace is prepared
        yield rig


@pytest.fixture
def clock_rig(whole_clock_rig: ClockRig) -> ClockRig:
    whole_clock_rig.mend()
    return whole_clock_rig


def today(rig: ClockRig) -> date:
    return rig.clock.now().astimezone(ZONE).date()


def disk_is_full(rig: ClockRig, disk: Path) -> None:
    """Leave the server no room for some seconds, where the disk is a small one."""
    if not disk.is_mount():
        return
    filler, full_until = disk / "filler", time.monotonic() + BROKEN
    with filler.open("wb", buffering=0) as stream:
        # What the server gives back meanwhile, as the end of a log that it has written home, is taken as well.
        while time.monotonic() < full_until:
            with suppress(OSError):
                while stream.write(bytes(4096)):
                    pass
            time.sleep(0.1)
    filler.unlink()


def database_is_locked(rig: ClockRig, disk: Path) -> None:
    with sqlite3.connect(rig.server.home / "prefect.db", timeout=60, isolation_level=None) as database:
        database.execute("BEGIN EXCLUSIVE")
        time.sleep(BROKEN)
        database.execute("ROLLBACK")


@pytest.mark.parametrize("faults", in_one_night((disk_is_full, database_is_locked)), ids=names)
@in_any_stage()
def test_of_missed_slots_the_last_is_a_night_that_waits_for_a_full_disk_and_a_locked_database_whatever_the_clock_does(
    clock_rig: ClockRig, disk: Path, faults: Sequence[Callable[[ClockRig, Path], None]], stage: str
) -> None:
    """The faults come one after another, in either order: what the night has to ask after the first one waits a while.

    Then the clock jumps over midnight, and where the night is that of `CHANGED` over the change of the clocks, too.
    """
    earlier = clock_rig.installed.stored("runs/*/*/*/verdict.json")
    is_over = clock_rig.clock.now().astimezone(ZONE).time() > SLOT
    # At first the last one is that of CHANGED.
    missed = [today(clock_rig) + (days + is_over) * DAY for days in range(2)]
    slots = [datetime.combine(day, SLOT, ZONE) for day in missed]
    log_from = log_sizes(clock_rig.installed)
    for slot in slots:
        clock_rig.wait_for_slot(slot)
    clock_rig.server.stop()
    clock_rig.go_to(slots[1] + timedelta(minutes=40))
    clock_rig.server.start()

    first, last = (clock_rig.night_of(day, log_from) for day in missed)

    last.wait_until(stage)  # the beginning is that of whichever of them begins first
    for fault in random.Random(SEED).sample(faults, len(faults)):
        fault(clock_rig, disk)
    first.wait_for_state("Skipped")
    clock_rig.go_to(datetime.combine(today(clock_rig) + DAY, datetime.min.time(), ZONE))

    last.passes()
    assert ("no_baseline" in last.verdicts().values()) == (not earlier)  # it is no earlier night that was found again
    (page,) = last.stored(f"reports/{last.night}/*.html")
    assert "after its slot" in page.read_text()
    assert not first.stored(f"reports/{first.night}/*")
    if disk_is_full in faults and not disk.is_mount():
        pytest.skip("as it should be, but on no full disk: mounting a small one needs root")
