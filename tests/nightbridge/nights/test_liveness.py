"""A night's process says that it lives, for as long as it does, and nothing else makes it dead."""

import os
import signal
import time
from pathlib import Path

import pytest

from nightbridge.errors import TransientError
from nightbridge.files import write_model
from nightbridge.locking import this_process
from nightbridge.nights.liveness import alive, alive_path, is_alive, last_sign
from tests.nightbridge.nights.flow_process import flow_process
from tests.waiting import wait_until

RUN = "0b5e8a4e-8a53-4b5f-9a46-0d1c6d3f3a11"


def sign_from_another_host(workspace: Path, *, seconds_ago: float) -> Path:
    """What the process of another host left: its last beat `seconds_ago`."""
    path = alive_path(workspace, RUN)
    write_model(path, this_process().model_copy(update={"host": "another-host"}))
    beat = time.time() - seconds_ago
    os.utime(path, (beat, beat))
    return path


def pid_of_the_last_sign(workspace: Path) -> int:
    sign = last_sign(workspace, RUN)
    assert sign is not None
    assert sign.holder is not None
    return sign.holder.pid


def test_nobody_has_said_so_before_the_block_and_after_it(tmp_path: Path) -> None:
    before = is_alive(tmp_path, RUN)
    with alive(tmp_path, RUN):
        during = is_alive(tmp_path, RUN)

    assert (before, during, is_alive(tmp_path, RUN)) == (None, True, None)
    assert list((tmp_path / "nights").iterdir()) == []


def test_the_file_is_removed_when_the_block_fails(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="boom"), alive(tmp_path, RUN):
        raise ValueError("boom")

    assert is_alive(tmp_path, RUN) is None


def test_a_killed_process_is_dead_at_once_on_its_own_host(tmp_path: Path) -> None:
    with flow_process(tmp_path, RUN) as process:
        assert is_alive(tmp_path, RUN) is True
        process.kill()
        process.wait()

    assert is_alive(tmp_path, RUN) is False
    assert pid_of_the_last_sign(tmp_path) == process.pid


def test_a_stopped_process_lives_however_long_it_was_silent(tmp_path: Path) -> None:
    with flow_process(tmp_path, RUN) as process:
        process.send_signal(signal.SIGSTOP)
        time.sleep(0.3)

        assert is_alive(tmp_path, RUN, silence=0.1) is True


def test_a_process_of_another_host_is_dead_when_it_was_silent_for_too_long(tmp_path: Path) -> None:
    sign_from_another_host(tmp_path, seconds_ago=60)

    assert is_alive(tmp_path, RUN, silence=90) is True
    assert is_alive(tmp_path, RUN, silence=30) is False


def test_silence_is_counted_by_the_clock_of_the_file_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sign_from_another_host(tmp_path, seconds_ago=0)

    monkeypatch.setattr(time, "time", lambda: 4_000_000_000.0)

    assert is_alive(tmp_path, RUN, silence=30) is True


def test_a_beat_is_a_new_modification_time(tmp_path: Path) -> None:
    with alive(tmp_path, RUN, interval=0.02):
        path = alive_path(tmp_path, RUN)
        os.utime(path, (0, 0))

        wait_until(lambda: path.stat().st_mtime > 0)


def test_a_workspace_that_comes_back_empty_gets_the_file_again(tmp_path: Path) -> None:
    with alive(tmp_path, RUN, interval=0.02):
        (tmp_path / "nights").rename(tmp_path / "before")  # at once: a beat may write while a tree is removed

        wait_until(lambda: is_alive(tmp_path, RUN))


def test_a_workspace_that_is_away_from_the_beginning_stops_no_night(tmp_path: Path) -> None:
    sign_from_another_host(tmp_path, seconds_ago=1000)
    workspace = tmp_path / "mount"
    workspace.write_text("not a folder: every access fails")

    with alive(workspace, RUN, interval=0.02):
        with pytest.raises(TransientError, match="cannot be read just now"):
            is_alive(workspace, RUN)
        workspace.unlink()
        # What was left by the process that ran it before is taken over as soon as the workspace is back.
        tmp_path.joinpath("nights").rename(tmp_path / "before")
        workspace.mkdir()
        tmp_path.joinpath("before").rename(workspace / "nights")

        wait_until(lambda: is_alive(workspace, RUN))


def test_the_process_that_began_last_has_the_file(tmp_path: Path) -> None:
    with flow_process(tmp_path, RUN) as first, alive(tmp_path, RUN):
        first.communicate("\n")

        assert first.returncode == 0
        assert pid_of_the_last_sign(tmp_path) == os.getpid()


def test_a_restart_takes_over_from_the_dead(tmp_path: Path) -> None:
    with flow_process(tmp_path, RUN) as process:
        process.kill()
        process.wait()
    with alive(tmp_path, RUN):
        assert is_alive(tmp_path, RUN) is True


def test_a_damaged_file_counts_by_its_age(tmp_path: Path) -> None:
    path = alive_path(tmp_path, RUN)
    path.parent.mkdir()
    path.write_text("{")

    assert is_alive(tmp_path, RUN) is True
    os.utime(path, (0, 0))
    assert is_alive(tmp_path, RUN) is False
