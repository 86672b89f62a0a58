"""Nights for people at a terminal: a table of many, and the lines of one."""

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from nightbridge.errors import TransientError
from nightbridge.models import EXIT_CODES
from nightbridge.nights.liveness import is_alive
from nightbridge.nights.records import Night
from nightbridge.nights.status import RunStatus

if TYPE_CHECKING:
    from rich.table import Table


def nights_table(nights: Iterable[Night]) -> "Table":
    """One row for each night, in the given order."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table("night", "scenario", "began (UTC)", "ended", "verdict", "tests", box=box.SIMPLE_HEAD, pad_edge=False)
    for night in nights:
        start, end = night.start, night.end
        bad = ", ".join(verdict.test_id for verdict in end.verdicts if EXIT_CODES[verdict.status]) if end else ""
        count = len(start.tests) + len(start.invalid)
        table.add_row(
            *map(Text, (start.night, start.scenario, f"{start.begun_at:%Y-%m-%d %H:%M}")),
            Text(f"{end.ended_at:%H:%M}" if end else "–"),
            Text(state_of(night), style="bold red" if end and end.exit_code else ""),
            Text(f"{count}: {bad}" if bad else str(count)),
        )
    return table


def night_lines(night: Night, runs: Sequence[RunStatus]) -> Iterator[str]:
    """A night in a few lines: what it is, then a line for each run."""
    start, end = night.start, night.end
    yield f"{start.scenario}, night {start.night} on {start.cluster}: {state_of(night)}"
    if start.late_by is not None and start.slot is not None:
        yield f"began {start.begun_at:%Y-%m-%d %H:%M} UTC, its slot was {start.slot:%Y-%m-%d %H:%M %z}"
    width = max((len(run.test_id) for run in runs), default=0)
    for run in runs:
        yield f"  {run.test_id:{width}}  {run}  {run.run_key}"
    for test_id in start.invalid:
        yield f"  {test_id:{width}}  invalid"
    if end and end.report:
        yield f"report: {end.report}"


def state_of(night: Night) -> str:
    """How a night ended, else whether its process still lives."""
    if night.end and night.end.ended_at >= night.start.begun_at:
        return night.end.title.replace("_", " ")
    try:
        living = is_alive(night.start.workspace, night.start.flow_run)
    except TransientError:
        return "not ended; the workspace does not answer"
    return "running" if living else "not ended, and its process is gone"
