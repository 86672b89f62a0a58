"""What a process has started ends with it, and at once when it is asked to."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from nightbridge.processes import GUARD, INTERRUPTED, run


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until_gone(pid: int) -> None:
    deadline = time.monotonic() + 60
    while alive(pid):
        assert time.monotonic() < deadline, "it lives on"
        time.sleep(0.05)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_program_and_its_children_end_with_the_process_that_is_killed(tmp_path: Path, number: signal.Signals) -> None:
    # The helper knows a program as soon as its lines are read.
    script = f"""
import os
from pathlib import Path
from nightbridge.processes import run
def started(child):
    Path("{tmp_path}/child").write_text(child)
    os.rename("{tmp_path}/child", "{tmp_path}/started")
run(["true"], environment=os.environ, timeout=60)
run(["sh", "-c", "sleep 600 & echo $! >&2; wait"], environment=os.environ, timeout=600, on_line=started)
"""
    process = subprocess.Popen([sys.executable, "-c", script])
    started = tmp_path / "started"
    while not started.exists():
        assert process.poll() is None
        time.sleep(0.05)
    child = int(started.read_text())

    process.send_signal(number)
    process.wait(60)

    wait_until_gone(child)


def test_those_of_what_is_interrupted_are_ended_and_no_others(tmp_path: Path) -> None:
    interrupted = threading.Event()
    codes: list[int] = []

    def wait() -> None:
        INTERRUPTED.set(interrupted.is_set)
        codes.append(run(["sh", "-c", f"touch {tmp_path}/one; sleep 600"], environment=os.environ, timeout=600).code)
        codes.append(run(["sleep", "600"], environment=os.environ, timeout=600).code)

    def wait_for_another() -> None:
        codes.append(run(["sh", "-c", f"touch {tmp_path}/other; sleep 1"], environment=os.environ, timeout=600).code)

    threads = [threading.Thread(target=wait), threading.Thread(target=wait_for_another)]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + 60
    while not ((tmp_path / "one").exists() and (tmp_path / "other").exists()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    interrupted.set()
    GUARD.kill_interrupted()
    for thread in threads:
        thread.join(60)

    assert codes == [-signal.SIGKILL, -signal.SIGKILL, 0]


def test_one_whose_helper_is_gone_does_its_work() -> None:
    run(["true"], environment=os.environ, timeout=60)
    helper = GUARD._helper
    assert helper is not None
    helper.kill()
    helper.wait()

    assert run(["echo", "done"], environment=os.environ, timeout=60).stdout == b"done\n"
