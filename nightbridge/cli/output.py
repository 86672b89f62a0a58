"""What commands print: results on stdout, as text or as one JSON document, and notes for people on stderr.

While a night runs, everything that Prefect and the jobs log goes to a file, and little to the terminal.
"""

import errno
import logging
import os
import re
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from nightbridge.errors import DamagedData, InvalidInput
from nightbridge.files import RefusedFile, open_regular, open_workspace, write_atomically

if TYPE_CHECKING:
    from io import TextIOWrapper
    from typing import IO, TextIO

    from prefect.logging.handlers import PrefectConsoleHandler
    from rich.console import Console
    from rich.live import Live
    from rich.table import Table

    from nightbridge.models import SiteChoice, Verdict
    from nightbridge.store.parallel import Progress


def show(as_json: bool, document: object, lines: "Callable[[], Iterable[str | Table]]") -> None:
    """Print the result of a command.

    Args:
        as_json: Print `document`, and nothing else.
        document: Models, dictionaries and lists. What is infinite or not a number is null, as JSON requires.
        lines: Returns the lines and tables for people; called only if they are printed.
    """
    if as_json:
        from pydantic_core import to_json

        with _until_unread():
            print(to_json(document, indent=2, by_alias=False, inf_nan_mode="null", fallback=str).decode(), flush=True)
    else:
        print_all(lines())


_WIDE = 400


def print_all(lines: "Iterable[str | Table]") -> None:
    """Print lines and tables on stdout, each as soon as it is there, whether or not somebody reads them.

    A line may hold what a job has written: it cannot drive the terminal.
    """
    for line in lines:
        with _until_unread():
            if isinstance(line, str):
                print(printable(line), flush=True)
            else:
                from rich.console import Console

                # In a file or a pipe no name is folded, so that it can be searched for.
                as_terminal = sys.stdout is None or is_terminal(sys.stdout) or "COLUMNS" in os.environ
                console = Console(width=None if as_terminal else _WIDE)
                console.width = max(console.width, _least_width(console, line))
                console.print(line)


_LEAST_FOLD = 8


def _least_width(console: "Console", table: "Table") -> int:
    """The columns below which rich cuts numbers off: a narrower terminal breaks the lines itself and shows all."""
    widths = 0
    for column in table.columns:
        sizes = [console.measure(cell) for cell in (column.header, *column.cells)]
        widths += max(size.maximum if column.no_wrap else min(size.minimum, _LEAST_FOLD) for size in sizes)
    return widths + 2 * len(table.columns)


def is_terminal(stream: "TextIO | None") -> bool:
    """Whether a standard stream is one; None is a stream that who started this has closed."""
    return stream is not None and stream.isatty()


def print_csv(rows: Iterable[Sequence[object]]) -> None:
    """Print comma-separated values on stdout, as RFC 4180 quotes them."""
    import csv

    with _until_unread():
        csv.writer(sys.stdout, lineterminator="\n").writerows(rows)
        sys.stdout.flush()


_UNREAD = frozenset({errno.EPIPE, errno.EIO})
"""What a pipe, and a terminal, answer when their reader is gone."""


@contextmanager
def _until_unread() -> Iterator[None]:
    """Print to a reader that may end before, as `head` does: the command goes on, and its exit code says its result."""
    try:
        yield
    except SystemExit:  # rich's answer to a BrokenPipeError
        write_nowhere(sys.stdout)
    except OSError as error:
        if error.errno not in _UNREAD:
            raise
        write_nowhere(sys.stdout)


def write_nowhere(stream: "IO[str]") -> None:
    """Let a stream whose reader is gone take everything, also what it still holds and writes when the program ends."""
    with suppress(OSError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def verdict_lines(verdicts: "Sequence[Verdict]", options: str = "") -> "list[str | Table]":
    """A table of verdicts, below it the reasons and what to type next; `options` name the site."""
    from nightbridge.report.tables import next_lines, reason_lines, verdict_table

    return [verdict_table(verdicts), *reason_lines(verdicts), *next_lines(verdicts, options)]


def note(line: str) -> None:
    """Print a line for people on stderr, where there are any: no night ends with its terminal, or what reads it."""
    if sys.stderr is None:  # closed by who started this; print would take stdout
        return
    try:
        print(printable(line), file=sys.stderr)
    except OSError:
        write_nowhere(sys.stderr)


def note_all(lines: Iterable[str]) -> None:
    """Print lines for people on stderr."""
    for line in lines:
        note(line)


def show_progress(progress: "Progress") -> None:
    """Show how far a transfer is, on a terminal only."""
    if is_terminal(sys.stderr):
        end = "\n" if progress.files_done == progress.files_total else "\r"
        # Cleared first: the line before it may have been longer.
        print(f"\x1b[2K{progress}", end=end, file=sys.stderr, flush=True)


_PIECE = 1 << 16
_CONTROLS = {code: None for code in (*range(32), *range(127, 160)) if chr(code) not in "\t\n"}


def printable(line: str) -> str:
    """A line without the control codes by which it could drive the terminal."""
    return line.translate(_CONTROLS)


def show_text_file(path: Path) -> None:
    """Print a file that a job wrote, without the escape codes by which it could drive the terminal."""
    from nightbridge.outputs.logs import clean_line

    try:
        with open_regular(path) as stream:
            while piece := stream.readline(_PIECE):
                with _until_unread():
                    sys.stdout.write(printable(clean_line(piece)))
        with _until_unread():
            sys.stdout.flush()
    except RefusedFile as error:
        advice = "Look at what the job left there"
        raise DamagedData(f"not read: {error.strerror}", subject=str(path), advice=advice) from error


def write_file(path: Path, data: bytes) -> None:
    """Write a file that an option names.

    Raises:
        InvalidInput: It cannot be written.
    """
    with writing(path):
        write_atomically(path, data)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Writing a file that an option names.

    Raises:
        InvalidInput: It cannot be written.
    """
    try:
        yield
    except OSError as error:
        reason = f"cannot be written: {error.strerror or error}"
        raise InvalidInput(reason, subject=str(path), advice="Name a file that can be written") from error


# --- a running night ------------------------------------------------------------------------------------------------

ENGINE_WORDS = ("Finished in state", "Crash detected!")
"""What Prefect's engine says of any task or flow: the verdict, and what an interruption prints, say more."""
FAILED_TASK = "Task run failed with "
"""What it says of a task at each retry, and as an error after the last one: the flow says that one in our words."""

FLOW_LOGGERS = ("prefect.flow_runs", "prefect.task_runs")
SHOWN_LETTERS, MAX_NAME = 300, 36
NIGHT_IN_KEY = re.compile(r"-\d{4}-\d\d-\d\d\b.*-([0-9a-f]{4})[0-9a-f]{6}$")


def log_of(choice: "SiteChoice", night: str) -> Path:
    """Where the log of a night or bisect goes; the site is read silently, warnings about it are printed later."""
    from nightbridge.config.sites import plain_site

    plain = plain_site(choice)
    workspace = plain[0].workspace if plain else Path(choice.workspace or ".nightbridge")
    return workspace / "nights" / night / "log"


@contextmanager
def quiet(log: Path) -> Iterator[None]:
    """Log to a file; stderr gets each warning once, and a table of the runs on a terminal, else a line for each job.

    An interruption leaves the file in the consoles' place: threads that it ends log tracebacks of Prefect's after us.
    """
    progress, file = RunTable(), _LogFile(log, encoding="utf-8", delay=True)
    with ExitStack() as logs, ExitStack() as stack:
        logs.callback(file.close)
        for logger, console in _consoles():
            file.setFormatter(console.formatter)
            logger.removeHandler(console)
            logger.addHandler(file)
            logs.callback(logger.addHandler, console)
            logs.callback(logger.removeHandler, file)
        for name in FLOW_LOGGERS:
            logging.getLogger(name).addHandler(progress)
            stack.callback(logging.getLogger(name).removeHandler, progress)
        if is_terminal(sys.stderr):
            from rich.console import Console
            from rich.live import Live

            terminal = Console(stderr=True)
            live = Live(console=terminal, get_renderable=progress.table, transient=True, refresh_per_second=1)
            live.start()
            stack.callback(_stop, live)
        try:
            yield
        except Exception:
            raise
        except BaseException:
            logs.pop_all()
            raise


def _stop(live: "Live") -> None:
    """Take the table from the terminal, where that is still there."""
    try:
        live.stop()
    except OSError:
        write_nowhere(sys.stderr)


@contextmanager
def spoken() -> Iterator[None]:
    """Log to stderr, also when what reads it has ended: rich would end the program, and the night with it."""
    for _logger, handler in _consoles():
        stream = handler.console.file
        handler.console.on_broken_pipe = partial(write_nowhere, stream)  # type: ignore[method-assign]
    yield


def _consoles() -> "list[tuple[logging.Logger, PrefectConsoleHandler]]":
    """What Prefect logs to a terminal by, each with its logger."""
    from prefect.logging.handlers import PrefectConsoleHandler

    loggers = map(logging.getLogger, ("", *logging.root.manager.loggerDict))
    return [
        (logger, handler)
        for logger in loggers
        for handler in logger.handlers
        if isinstance(handler, PrefectConsoleHandler)
    ]


@contextmanager
def logged(choice: "SiteChoice", name: str) -> Iterator[None]:
    """Log a search or a trial to a file, which is named first."""
    log = log_of(choice, name)
    note(f"log {log}")
    with quiet(log):
        yield


def show_in_place(frames: Iterable[list[str]]) -> None:
    """Show each frame of lines in the place of the one before, cut to the terminal; the last one stays, whole."""
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    lines: list[str] = []
    try:
        with Live(console=Console(), auto_refresh=False, transient=True) as live:
            for lines in frames:
                live.update(Text("\n".join(lines), no_wrap=True, overflow="ellipsis"), refresh=True)
    finally:
        print_all(lines)


class _LogFile(logging.FileHandler):
    """A file that is made, with its folders, when something is logged: a night that cannot begin leaves nothing.

    A disk that is full ends no night and is said once: what must be written says by itself that it could not be.
    """

    _said = ""

    def handleError(self, record: logging.LogRecord) -> None:
        """Say why the log is not written, once."""
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            super().handleError(record)
        elif (reason := error.strerror or str(error)) != self._said:
            self._said = reason
            note(f"{self.baseFilename}: the log is not written: {reason}")

    def close(self) -> None:
        """Close the file; what a full disk had no room for is lost."""
        with suppress(OSError):
            super().close()

    def _open(self) -> "TextIOWrapper":
        folder = Path(self.baseFilename).parent
        open_workspace(folder.parents[1])
        folder.mkdir(parents=True, exist_ok=True)
        return super()._open()


class RunTable(logging.Handler):
    """The newest stage of each run, and the warnings of a night, from the log records of Prefect's runs."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self._runs: dict[str, tuple[str, str]] = {}
        self._shown: set[str] = set()
        self._guard = threading.Lock()

    def emit(self, record: logging.LogRecord) -> None:
        """Take in a record: of a flow run whose name is a run key, or of one of its tasks."""
        message = printable(record.getMessage()).strip().partition("\n")[0][:SHOWN_LETTERS]
        run, stage = getattr(record, "flow_run_name", ""), getattr(record, "task_run_name", "")
        is_said_again = record.levelno >= logging.ERROR and message.startswith(FAILED_TASK)
        if is_said_again or getattr(record, "ends_flow", False) or message.startswith(ENGINE_WORDS):
            return
        with self._guard:
            if stage:
                self._runs[run] = (stage, _steps_in(record.getMessage()) or message)
            is_news = record.levelno >= logging.WARNING or (stage == "submit" and message.startswith("job "))
            if not is_news or message in self._shown:
                return
            self._shown.add(message)
        if record.levelno >= logging.WARNING or not is_terminal(sys.stderr):
            note(message)

    def table(self) -> "Table":
        """Every run with its stage and what that said last."""
        from rich.table import Table
        from rich.text import Text

        table = Table.grid(padding=(0, 2))
        table.add_column(no_wrap=True, max_width=MAX_NAME)
        table.add_column(no_wrap=True)
        with self._guard:
            for run, (stage, message) in self._runs.items():
                # What a narrow terminal has no room for: the night, and most of a run key's digits.
                name = NIGHT_IN_KEY.sub(r" \1", run)
                table.add_row(Text(name), Text(stage, "bold"), Text(message, overflow="ellipsis", no_wrap=True))
        return table


def _steps_in(text: str) -> str:
    """How far a training is, by the lines of its log; empty where none of them is a step's."""
    from nightbridge.numbers import format_value
    from nightbridge.outputs.logs import parse_steps

    if not (steps := parse_steps(text)):
        return ""
    elapsed = steps[-1].elapsed_ms
    speed = "" if elapsed is None else f", {format_value(elapsed / 1000, 's')} a step"
    return f"{steps[-1].iteration:,}/{steps[-1].total:,} steps{speed}"
