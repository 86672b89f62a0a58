"""What a process has started ends with it, and at once when it is asked to."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from nightbridge.processes import GUARD, run


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
    program = f"sleep 600 & echo $! > {tmp_path}/child; mv {tmp_path}/child {tmp_path}/started; wait"
    script = f"""
import os
from nightbridge.processes import run
run(["true"], environment=os.environ, timeout=60)
run(["sh", "-c", {program!r}], environment=os.environ, timeout=600)
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


def test_all_of_them_are_ended_on_request_and_what_had_ended_is_left_alone() -> None:
    run(["true"], environment=os.environ, timeout=60)
    codes: list[int] = []

    def wait() -> None:
        codes.append(run(["sleep", "600"], environment=os.environ, timeout=600).code)

    thread = threading.Thread(target=wait)
    thread.start()
    deadline = time.monotonic() + 60
    while thread.is_alive() and time.monotonic() < deadline:
        GUARD.kill_all()
        time.sleep(0.05)

    assert codes == [-signal.SIGKILL]


def test_one_whose_helper_is_gone_does_its_work() -> None:
    run(["true"], environment=os.environ, timeout=60)
    helper = GUARD._helper
    assert helper is not None
    helper.kill()
    helper.wait()

    assert run(["echo", "done"], environment=os.environ, timeout=60).stdout == b"done\n"
