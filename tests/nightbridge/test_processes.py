"""Programs of others run to their end or their limit, and leave nothing behind."""

import errno
import os
import subprocess
import threading
import time
from pathlib import Path
from unittest import mock

import pytest

from nightbridge.errors import PermanentError, TransientError
from nightbridge.processes import run


def test_output_and_exit_code_come_back_and_lines_as_they_come() -> None:
    heard: list[str] = []

    finished = run(
        ["sh", "-c", "echo out; echo one >&2; echo two >&2; exit 3"],
        environment=os.environ,
        timeout=60,
        on_line=heard.append,
    )

    assert (finished.code, finished.stdout, finished.tail) == (3, b"out\n", "one | two")
    assert heard == ["one", "two"]


def test_the_time_limit_ends_the_program_and_its_children(tmp_path: Path) -> None:
    started = time.monotonic()

    with pytest.raises(TransientError, match="sh did not end within"):
        run(
            ["sh", "-c", f"sleep 60 & echo $! > {tmp_path}/child; wait"],
            environment=os.environ,
            timeout=0.3,
        )

    assert time.monotonic() - started < 50
    child = int((tmp_path / "child").read_text())
    deadline = time.monotonic() + 60
    while Path(f"/proc/{child}").exists() and "Z" not in Path(f"/proc/{child}/stat").read_text().split()[2]:
        assert time.monotonic() < deadline, "the child lives on"
        time.sleep(0.05)


def test_there_is_no_terminal_and_no_input() -> None:
    finished = run(["sh", "-c", "cat; test -t 0 || echo none"], environment=os.environ, timeout=60)

    assert finished.stdout == b"none\n"


def test_a_program_that_is_not_there_is_named() -> None:
    with pytest.raises(PermanentError, match="no-such-program-here: not installed"):
        run(["no-such-program-here"], environment=os.environ, timeout=60)


def test_a_program_that_is_nowhere_is_not_refused_for_a_folder_of_path_that_cannot_be_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # What Popen raises then. For root every folder can be read.
    monkeypatch.setattr(subprocess, "Popen", mock.Mock(side_effect=PermissionError(errno.EACCES, "Permission denied")))

    with pytest.raises(PermanentError, match="no-such-program-here: not installed"):
        run(["no-such-program-here"], environment=os.environ, timeout=60)
    with pytest.raises(PermanentError, match="true: cannot be started: Permission denied"):
        run(["true"], environment=os.environ, timeout=60)
    with pytest.raises(PermanentError, match="/home/other/bin/python: cannot be started: Permission denied"):
        run(["/home/other/bin/python"], environment=os.environ, timeout=60)


@pytest.mark.parametrize("number", [errno.EAGAIN, errno.ENOMEM, errno.ESTALE])
def test_a_moment_in_which_nothing_can_be_started_passes(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def fork(*arguments: object, **named: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(subprocess, "Popen", fork)

    with pytest.raises(TransientError, match=f"true: cannot be started now: {os.strerror(number)}"):
        run(["true"], environment=os.environ, timeout=60)


def test_a_moment_in_which_no_thread_can_be_started_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)

    with pytest.raises(TransientError, match="sleep: cannot be started now: can't start new thread"):
        run(["sleep", "600"], environment=os.environ, timeout=60)


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(PermanentError, match="no such folder"):
        run(["true"], environment=os.environ, timeout=60, cwd=tmp_path / "gone")


def test_what_it_is_given_is_its_whole_input() -> None:
    finished = run(["cat"], environment=os.environ, timeout=60, given=b"a secret\n")

    assert finished.stdout == b"a secret\n"
