"""What a night shows while it goes on: little on the terminal, all of it in a file."""

import fcntl
import logging
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest
from prefect.logging.handlers import PrefectConsoleHandler
from rich import box
from rich.table import Table

from nightbridge.cli.output import note, print_all, quiet, spoken

RUN = "llama-small-2026-11-21-0123456789"


def log(message: str, stage: str = "", level: int = logging.INFO) -> None:
    logger = logging.getLogger("prefect.task_runs" if stage else "prefect.flow_runs")
    extra = {
        "flow_run_name": RUN,
        "flow_name": "run-pipeline",
        "task_run_name": stage,
        "flow_run_id": "",
        "task_name": stage,
    }
    logger.log(level, message, extra=extra)


@pytest.fixture(autouse=True)
def console(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prefect's loggers as a flow run has them, whatever other tests did to them."""
    for name in ("prefect.flow_runs", "prefect.task_runs"):
        monkeypatch.setattr(logging.getLogger(name), "handlers", [PrefectConsoleHandler()])
        monkeypatch.setattr(logging.getLogger(name), "propagate", False)
        monkeypatch.setattr(logging.getLogger(name), "level", logging.INFO)
        logging.getLogger(name).manager._clear_cache()  # type: ignore[attr-defined]


def test_a_line_for_each_job_each_warning_once_and_all_in_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "ws" / "nights" / "n1" / "log"

    with quiet(file):
        log("Megatron-Bridge at 0123456789ab (main)", "clone")
        log("job 3 on local is llama-small-2026-11-21-0123456789-a1", "submit")
        log(" iteration 1/ 40 | lm loss: 4.2", "watch")
        for _ in range(3):
            log("num_gpus 12 do not fill nodes of 8 GPUs", level=logging.WARNING)
        log("Crash detected! Execution was aborted by an interrupt signal.", level=logging.ERROR)
        log("Finished in state Crashed('Execution was aborted by an interrupt signal.')", "watch", logging.ERROR)

    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.splitlines() == [
        "job 3 on local is llama-small-2026-11-21-0123456789-a1",
        "num_gpus 12 do not fill nodes of 8 GPUs",
    ]
    text = file.read_text()
    assert "iteration 1/ 40" in text
    assert text.count("num_gpus 12 do not fill") == 3


def test_what_threads_log_after_an_interruption_is_in_the_file_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "ws" / "nights" / "n1" / "log"

    with pytest.raises(KeyboardInterrupt), quiet(file):
        raise KeyboardInterrupt
    log("Error emitting event: can't register atexit after shutdown", "harvest", logging.ERROR)

    assert capsys.readouterr().err == ""
    assert "Error emitting event" in file.read_text()


def test_a_full_disk_under_the_log_is_said_once_and_ends_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "ws" / "nights" / "n1" / "log"
    file.parent.mkdir(parents=True)
    file.symlink_to("/dev/full")

    with quiet(file):
        for _ in range(3):
            log("saved iteration 1", "watch")
        log("the last words", "watch", logging.WARNING)

    assert capsys.readouterr().err.splitlines() == [
        f"{file}: the log is not written: No space left on device",
        "the last words",
    ]


def test_a_night_goes_on_when_what_reads_its_notes_has_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    file = tmp_path / "ws" / "nights" / "n1" / "log"

    with os.fdopen(writer, "w", buffering=1) as unread, quiet(file):
        monkeypatch.setattr(sys, "stderr", unread)
        log("job 3 on local is llama-small-2026-11-21-0123456789-a1", "submit")
        log("the night goes on", level=logging.WARNING)

    assert "the night goes on" in file.read_text()


def test_a_night_that_is_told_in_full_goes_on_when_its_reader_has_ended() -> None:
    """rich's console ends the program there, and with it the flow."""
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w", buffering=1) as unread:
        handler = PrefectConsoleHandler(stream=unread)
        logger = logging.getLogger("prefect.flow_runs")
        logger.addHandler(handler)
        try:
            with spoken():
                log("job 3 on local is llama-small-2026-11-21-0123456789-a1", "submit")
                handler.emit(logging.LogRecord("prefect.flow_runs", logging.INFO, "", 1, "it goes on", None, None))
        finally:
            logger.removeHandler(handler)


def test_a_night_is_logged_where_who_started_it_has_closed_stderr(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "ws" / "nights" / "n1" / "log"
    monkeypatch.setattr(sys, "stderr", None)

    with quiet(file):
        log("the night goes on", level=logging.WARNING)

    assert "the night goes on" in file.read_text()


def test_a_note_without_a_stderr_is_not_taken_for_a_result(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stderr", None)

    note("site: site.toml")

    assert capsys.readouterr().out == ""


def test_names_in_a_table_can_be_searched_for_in_a_pipe(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    names = [f"practice-nightly-{number}" for number in range(6)]
    table = Table()
    table.add_row(*names)

    print_all([table])

    shown = capsys.readouterr().out
    assert [name for name in names if name not in shown] == []


def test_a_narrow_terminal_cuts_off_no_number_and_folds_no_name_to_letters(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    table.add_column("night", no_wrap=True)
    table.add_column("scenario", overflow="fold")
    table.add_column("tests")
    for metric in ("step time", "throughput"):
        table.add_column(metric, no_wrap=True)
    cells = ("2026-11-21-090507", "nightly", "llama", "◆ 1.315", "▲ +8.2 %")
    table.add_row(*cells)

    print_all([table])

    shown = capsys.readouterr().out
    assert [cell for cell in cells if cell not in shown] == []


def test_a_night_that_logs_nothing_leaves_no_file_and_the_console_comes_back(tmp_path: Path) -> None:
    before = [list(logging.getLogger(name).handlers) for name in ("prefect", "prefect.flow_runs", "prefect.task_runs")]

    with quiet(tmp_path / "ws" / "nights" / "n1" / "log"):
        pass

    after = [list(logging.getLogger(name).handlers) for name in ("prefect", "prefect.flow_runs", "prefect.task_runs")]
    assert [{*handlers} for handlers in after] == [{*handlers} for handlers in before]
    assert not (tmp_path / "ws").exists()


# --- on a terminal ----------------------------------------------------------------------------------------------------

NIGHT = """
import logging, sys, time
from pathlib import Path
from nightbridge.cli import main, output
from prefect.logging.handlers import PrefectConsoleHandler

def night():
    logger = logging.getLogger("prefect.task_runs")
    logger.handlers, logger.propagate = [PrefectConsoleHandler()], False
    logger.setLevel(logging.INFO)
    with output.quiet(Path("ws/nights/n1/log")):
        for number in range(1000):
            for test in ("llama-small", "a-test-whose-name-is-as-long-as-names-of-tests-may-be"):
                names = {"flow_run_name": test + "-2026-11-21-0123456789", "task_run_name": "watch"}
                extra = {**names, "flow_name": "", "task_name": ""}
                logger.info("a long message, " * 20, extra=extra | {"flow_run_name": "other", "task_run_name": "clone"})
                logger.info(f"saved\\n iteration {number}/ 1000 | elapsed time per iteration (ms): 1220 | ", extra=extra)
            logger.warning("a warning", extra=extra)
            time.sleep(0.05)

main.app.command("night")(night)
sys.exit(main.run(["night"]))
"""

WATCH = """
import sys, time
from nightbridge.cli import main, output

def frames():
    for number in range(1000):
        yield ["nightly, night n1", f"  llama  running, {number}/1,000 steps, " + "since long ago, " * 20]
        time.sleep(1)

main.app.command("watch")(lambda: output.show_in_place(frames()))
sys.exit(main.run(["watch"]))
"""


def on_a_terminal(program: str, columns: int, until: str, cwd: Path) -> tuple[int, str]:
    """Run a program on a terminal, and interrupt it once it has shown a text: its exit code, and all that it wrote."""
    terminal, side = pty.openpty()
    fcntl.ioctl(side, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "", "NO_COLOR": ""}
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdin=side, stdout=side, stderr=side, cwd=cwd, env=environment
    )
    os.close(side)
    written, interrupted = b"", False
    while True:
        try:
            written += os.read(terminal, 1 << 16)
        except OSError:  # its last writer is gone
            break
        if until.encode() in written and not interrupted:
            time.sleep(0.2)  # the program is between two frames then
            process.send_signal(signal.SIGINT)
            interrupted = True
    os.close(terminal)
    return process.wait(timeout=30), written.decode()


@pytest.mark.thorough
@pytest.mark.parametrize("columns", [80, 200])
@pytest.mark.parametrize("program", [NIGHT, WATCH], ids=["run", "watch"])
def test_a_terminal_is_redrawn_in_place_and_left_as_it_was(tmp_path: Path, program: str, columns: int) -> None:
    code, written = on_a_terminal(program, columns, "/1,000", tmp_path)

    last_frame = written.rindex("\x1b[?25l"), written.rindex("\x1b[?25h")
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", written[last_frame[0] : last_frame[1]])
    assert code == 130
    assert max(map(len, re.split(r"[\r\n]+", shown))) <= columns
    assert "\x1b[2J" not in written
    assert written.rstrip().endswith("interrupted; a job that was submitted keeps running")
