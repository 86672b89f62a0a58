"""What commands print: results on stdout, as text or as one JSON document, and notes for people on stderr."""

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from nightbridge.errors import DamagedData, InvalidInput
from nightbridge.files import RefusedFile, open_regular

if TYPE_CHECKING:
    from rich.table import Table

    from nightbridge.models import Verdict
    from nightbridge.store.transfers import Progress


def show(as_json: bool, document: object, lines: "Callable[[], Iterable[str | Table]]") -> None:
    """Print the result of a command.

    Args:
        as_json: Print `document`, and nothing else.
        document: Models, dictionaries and lists. What is infinite or not a number is null, as JSON requires.
        lines: Returns the lines and tables for people; called only if they are printed.
    """
    if as_json:
        from pydantic_core import to_json

        print(to_json(document, indent=2, by_alias=False, inf_nan_mode="null", fallback=str).decode())
    else:
        print_all(lines())


def print_all(lines: "Iterable[str | Table]") -> None:
    """Print lines and tables on stdout, each as soon as it is there."""
    for line in lines:
        if isinstance(line, str):
            print(line, flush=True)
        else:
            from rich.console import Console

            Console().print(line)


def print_csv(rows: Iterable[Sequence[object]]) -> None:
    """Print comma-separated values on stdout, as RFC 4180 quotes them."""
    import csv

    csv.writer(sys.stdout, lineterminator="\n").writerows(rows)


def verdict_lines(verdicts: "Sequence[Verdict]", options: str = "") -> "list[str | Table]":
    """A table of verdicts, below it the reasons and what to type next; `options` name the site."""
    from nightbridge.report.tables import next_lines, reason_lines, verdict_table

    return [verdict_table(verdicts), *reason_lines(verdicts), *next_lines(verdicts, options)]


def note(line: str) -> None:
    """Print a line for people on stderr."""
    print(line, file=sys.stderr)


def note_all(lines: Iterable[str]) -> None:
    """Print lines for people on stderr."""
    for line in lines:
        note(line)


def show_progress(progress: "Progress") -> None:
    """Show how far a transfer is, on a terminal only."""
    if sys.stderr.isatty():
        end = "\n" if progress.files_done == progress.files_total else "\r"
        # Cleared first: the line before it may have been longer.
        print(f"\x1b[2K{progress}", end=end, file=sys.stderr, flush=True)


_PIECE = 1 << 16
_CONTROLS = {code: None for code in (*range(32), *range(127, 160)) if chr(code) not in "\t\n"}


def printable(line: str) -> str:
    """A line of a log without the control codes by which it could drive the terminal."""
    return line.translate(_CONTROLS)


def show_text_file(path: Path) -> None:
    """Print a file that a job wrote, without the escape codes by which it could drive the terminal."""
    from nightbridge.outputs.logs import clean_line

    try:
        with open_regular(path) as stream:
            while piece := stream.readline(_PIECE):
                sys.stdout.write(printable(clean_line(piece)))
    except RefusedFile as error:
        advice = "Look at what the job left there"
        raise DamagedData(f"not read: {error.strerror}", thing=str(path), advice=advice) from error


def write_file(path: Path, data: bytes) -> None:
    """Write a file that an option names.

    Raises:
        InvalidInput: It cannot be written.
    """
    from nightbridge.files import write_atomically

    with writing(path):
        write_atomically(path, data)


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Writing a file that an option names.

    Raises:
        InvalidInput: It cannot be written.
    """
    try:
        yield
    except OSError as error:
        reason = f"cannot be written: {error.strerror or error}"
        raise InvalidInput(reason, thing=str(path), advice="Name a file that can be written") from error
