"""A lease has one holder at a time, outlives no dead one, and says who holds it; a value is made once for all."""

import errno
import json
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from nightbridge.errors import DamagedData, PermanentError, TransientError
from nightbridge.files import create_exclusively
from nightbridge.locking import brief_lease, get_or_create, lease
from nightbridge.models import Model
from tests.conftest import SEEDS


def holder_process(path: Path, script: str) -> "subprocess.Popen[str]":
    """A process that runs `script` while it holds the lease; it says `held` first."""
    program = f"""
import os, sys, time
from pathlib import Path
from nightbridge.locking import lease
with lease(Path({str(path)!r}), ttl=60) as held:
    print("held", flush=True)
    {script}
"""
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def foreign_lease(path: Path, host: str = "another-host") -> None:
    """A lease file as a holder on another host would have left it."""
    content = {"token": "theirs", "host": host, "pid": 4711, "since": "2026-11-21T02:00:00Z"}
    assert create_exclusively(path, json.dumps(content).encode())


def test_the_file_exists_while_held_and_is_gone_afterwards(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "thing.lease"

    with lease(path):
        assert path.exists()

    assert [entry.name for entry in path.parent.iterdir()] == []


def test_a_lease_is_released_when_the_block_fails(tmp_path: Path) -> None:
    path = tmp_path / "thing.lease"

    with pytest.raises(ValueError, match="boom"), lease(path):
        raise ValueError("boom")

    assert not path.exists()


def test_threads_of_one_process_exclude_each_other(tmp_path: Path) -> None:
    inside, most, order = [], [], []

    def work(number: int) -> None:
        with lease(tmp_path / "thing.lease"):
            inside.append(number)
            most.append(len(inside))
            time.sleep(0.01)
            inside.remove(number)
            order.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert sorted(order) == list(range(8))
    assert max(most) == 1


def test_a_waiter_that_runs_out_of_time_names_the_holder(tmp_path: Path) -> None:
    path = tmp_path / "thing.lease"
    process = holder_process(path, "time.sleep(60)")
    try:
        with pytest.raises(TransientError, match=f"process {process.pid} on ") as caught, lease(path, timeout=0.2):
            pytest.fail("held twice")
    finally:
        process.kill()
        process.wait()

    assert str(path) in str(caught.value)


def test_a_wait_ends_with_what_the_waiter_raises_meanwhile(tmp_path: Path) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    with lease(tmp_path / "l"):
        with pytest.raises(KeyboardInterrupt), lease(tmp_path / "l", on_wait=interrupt):
            pass
        assert (tmp_path / "l").exists()


def test_a_lease_of_a_killed_process_of_this_host_is_taken_at_once(tmp_path: Path) -> None:
    path = tmp_path / "thing.lease"
    process = holder_process(path, "time.sleep(60)")
    process.kill()
    process.wait()
    assert path.exists()

    started = time.monotonic()
    with lease(path, ttl=60, timeout=60):
        taken_after = time.monotonic() - started

    assert taken_after < 50


def test_a_lease_of_another_host_is_taken_after_its_time_to_live_and_not_before(tmp_path: Path) -> None:
    path = tmp_path / "thing.lease"
    foreign_lease(path)

    with pytest.raises(TransientError, match="process 4711 on another-host"), lease(path, ttl=30, timeout=0.5):
        pytest.fail("broke a lease that may be alive")
    started = time.monotonic()
    with lease(path, ttl=0.6, timeout=60):
        taken_after = time.monotonic() - started

    assert 0.6 <= taken_after < 25


def test_a_file_that_is_no_lease_is_broken_like_an_old_one(tmp_path: Path) -> None:
    path = tmp_path / "thing.lease"
    path.write_bytes(b"")

    with lease(path, ttl=0.3, timeout=60):
        assert b"token" in path.read_bytes()


def test_a_living_holder_keeps_its_lease_far_beyond_the_time_to_live(tmp_path: Path) -> None:
    path = tmp_path / "thing.lease"

    with lease(path, ttl=0.4) as held:
        # As a waiter on another host sees it: the process cannot be asked, only the heartbeat tells.
        record = json.loads(path.read_bytes()) | {"host": "another-host"}
        path.write_bytes(json.dumps(record).encode())
        with pytest.raises(TransientError), lease(path, ttl=0.4, timeout=2):
            pytest.fail("broke a living lease")
        held.ensure_held()


def test_a_holder_notices_that_its_lease_was_broken_and_leaves_the_new_one_alone(tmp_path: Path) -> None:
    path = tmp_path / "thing.lease"

    with lease(path, ttl=60) as held:
        path.unlink()
        foreign_lease(path)
        with pytest.raises(TransientError, match="lost the lease"):
            held.ensure_held()

    assert json.loads(path.read_bytes())["token"] == "theirs"


def test_the_guard_of_a_breaker_that_died_is_cleared(tmp_path: Path) -> None:
    path = tmp_path / "thing.lease"
    process = holder_process(path, "time.sleep(60)")
    process.kill()
    process.wait()
    path.with_name("thing.lease.break").write_bytes(path.read_bytes())

    with lease(path, timeout=60):
        pass

    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    with pytest.raises(PermanentError, match=str(tmp_path / "file")), lease(tmp_path / "file" / "thing.lease"):
        pytest.fail("held")


@pytest.mark.random_kill
@pytest.mark.parametrize("seed", SEEDS)
def test_whatever_is_killed_never_two_hold_it_and_the_others_continue(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    journal = tmp_path / "journal"
    program = f"""
import os, time
from pathlib import Path
from nightbridge.locking import lease
journal = os.open({str(journal)!r}, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
for _ in range(10):
    with lease(Path({str(tmp_path / "thing.lease")!r}), ttl=60, timeout=60):
        os.write(journal, f"in {{os.getpid()}}\\n".encode())
        time.sleep(0.01)
        os.write(journal, f"out {{os.getpid()}}\\n".encode())
"""
    workers = [subprocess.Popen([sys.executable, "-c", program]) for _ in range(3)]
    victim = chance.choice(workers)
    while not journal.exists():
        time.sleep(0.01)
    time.sleep(chance.uniform(0, 0.4))
    victim.send_signal(signal.SIGKILL)

    codes = {worker.pid: worker.wait(timeout=60) for worker in workers}

    assert [code for pid, code in codes.items() if pid != victim.pid] == [0, 0]
    inside: int | None = None
    for line in journal.read_text().splitlines():
        what, pid = line.split()
        if what == "in":
            assert inside in (None, victim.pid), "two processes held it at once"
            inside = int(pid)
        else:
            assert inside == int(pid)
            inside = None
    with lease(tmp_path / "thing.lease", timeout=60):
        pass


# --- values that one process makes for all ----------------------------------------------------------------------------


class Choice(Model):
    number: int


def test_many_callers_at_once_get_the_value_of_one(tmp_path: Path) -> None:
    called: list[int] = []
    answers: list[int] = []

    def ask(number: int) -> None:
        def create() -> Choice:
            called.append(number)
            time.sleep(0.1)
            return Choice(number=number)

        answers.append(get_or_create(tmp_path / "choice.json", Choice, create).number)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert len(called) == 1
    assert answers == called * 8


def test_a_value_whose_creation_fails_is_not_stored(tmp_path: Path) -> None:
    def fail() -> Choice:
        raise ValueError("boom")

    with pytest.raises(ValueError, match="boom"):
        get_or_create(tmp_path / "choice.json", Choice, fail)

    assert get_or_create(tmp_path / "choice.json", Choice, lambda: Choice(number=7)).number == 7


def test_an_unreadable_value_is_damage_and_not_created_again(tmp_path: Path) -> None:
    path = tmp_path / "choice.json"
    path.write_text("{")

    with pytest.raises(DamagedData, match=str(path)):
        get_or_create(path, Choice, lambda: Choice(number=1))


def test_a_brief_lease_needs_no_room_and_lets_nobody_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, data: bytes) -> bool:
        raise PermanentError("no space left on the device", subject=str(path)) from OSError(errno.ENOSPC, "full")

    path = tmp_path / "a.lease"
    with monkeypatch.context() as disk:
        disk.setattr("nightbridge.locking.create_exclusively", full)
        lock = brief_lease(path)
        lock.__enter__()
        with pytest.raises(PermanentError, match="no space left"), brief_lease(tmp_path / "no-folder" / "a.lease"):
            pass

    with pytest.raises(TransientError, match="locked for"), lease(path, timeout=0.2):
        pass
    lock.__exit__(None, None, None)
    with lease(path, timeout=0.2):
        pass


def test_a_brief_lease_that_was_left_behind_is_broken(tmp_path: Path) -> None:
    (tmp_path / "a.lease").touch()

    with lease(tmp_path / "a.lease", ttl=0.2, timeout=20):
        pass
