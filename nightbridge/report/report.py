"""Reports of a night: the HTML page, a Markdown table for Prefect's artifacts, and a table for the terminal."""

import contextlib
import io
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from pydantic import ValidationError

from nightbridge.errors import DamagedData
from nightbridge.gate.gate import METRICS
from nightbridge.harvest.manifest import RECORD, load_record, read_manifest
from nightbridge.history.metrics import format_duration, markdown_text
from nightbridge.history.reading import HistoryRow, read_recent
from nightbridge.models import RunRecord, SweepResult, Verdict
from nightbridge.nights.records import NightStart
from nightbridge.report.links import run_links
from nightbridge.report.page import (
    STATUS_WORDS,
    Cell,
    NewCommits,
    build_page,
    cell_of,
    gravest_first,
    last_good_run,
)
from nightbridge.report.sweep_tables import sweep_section
from nightbridge.report.templating import render_page
from nightbridge.store.protocol import ObjectStore

if TYPE_CHECKING:
    import pandas as pd
    from rich.table import Table

RICH_STYLES = {"good": "blue", "bad": "bold red", "warn": "yellow", "none": ""}


def night_report_html(
    store: ObjectStore,
    scenario: str,
    night: str,
    verdicts: Sequence[Verdict],
    *,
    cluster: str,
    sweeps: Sequence[SweepResult] = (),
    note: str = "",
) -> str:
    """Gather the histories and tonight's curves from the store, and render the night's report.

    What is damaged is named on the page of its test; the other tests are not held up by it.

    Args:
        store: Where the runs are.
        scenario: The scenario's name.
        night: Night id.
        verdicts: One per run.
        cluster: Name of the cluster.
        sweeps: What became of the night's swept tests.
        note: A note about the night as a whole.

    Raises:
        TransientError: The store did not answer.
    """
    rows: dict[str, Sequence[HistoryRow]] = {}
    curves: dict[str, pd.DataFrame | None] = {}
    baselines: dict[str, pd.DataFrame | None] = {}
    links: dict[str, Sequence[tuple[str, str]]] = {}
    commits: dict[str, Sequence[NewCommits]] = {}
    notes: dict[str, list[str]] = {}
    for verdict in verdicts:
        damage = notes.setdefault(verdict.run_key, [])
        if verdict.series:
            with _noted(damage):
                rows[verdict.run_key] = read_recent(store, cluster, verdict.series, verdict.night)
        if verdict.prefix:
            with _noted(damage):
                curves[verdict.run_key] = _read_metrics(store, f"{verdict.prefix}/metrics.parquet")
            with _noted(damage):
                commits[verdict.run_key] = _new_commits(store, f"{verdict.prefix}/{RECORD}")
            with _noted(damage):
                manifest = read_manifest(store, verdict.prefix)
                links[verdict.run_key] = run_links(store, manifest) if manifest else ()
        good = last_good_run(verdict, rows.get(verdict.run_key, ()))
        if good and good.prefix and verdict.prefix:
            with _noted(damage):
                baselines[verdict.run_key] = _read_metrics(store, f"{good.prefix}/metrics.parquet")
    return render_report(night, scenario, verdicts, rows, curves, notes, sweeps, baselines, links, commits, note)


def night_note(store: ObjectStore, start: NightStart, verdicts: Iterable[Verdict]) -> str:
    """What the report says of a night that began late: how late, and which code ran; empty for one in time.

    Raises:
        TransientError: The store did not answer.
    """
    if start.late_by is None or start.slot is None:
        return ""
    code: dict[str, None] = {}
    for verdict in verdicts:
        with contextlib.suppress(DamagedData):  # what is damaged is named on the page of its test
            record = load_record(store, verdict.prefix) if verdict.prefix else None
            for repository in record.checkout.repositories if record else ():
                name = repository.url.rstrip("/").rpartition("/")[2].removesuffix(".git")
                code[f"{name} {repository.commit[:8]}"] = None
    ran = f"; it ran {', '.join(code)}" if code else ""
    return f"This night began {format_duration(start.late_by)} after its slot, {start.slot:%Y-%m-%d %H:%M %z}{ran}."


def render_report(
    night: str,
    scenario: str,
    verdicts: Sequence[Verdict],
    rows: Mapping[str, Sequence[HistoryRow]],
    curves: "Mapping[str, pd.DataFrame | None] | None" = None,
    notes: Mapping[str, Sequence[str]] | None = None,
    sweeps: Sequence[SweepResult] = (),
    baselines: "Mapping[str, pd.DataFrame | None] | None" = None,
    links: Mapping[str, Sequence[tuple[str, str]]] | None = None,
    commits: Mapping[str, Sequence[NewCommits]] | None = None,
    note: str = "",
) -> str:
    """Render one self-contained HTML page: no script, nothing loaded from anywhere.

    Args:
        night: Night id.
        scenario: The scenario's name.
        verdicts: One per run, in any order.
        rows: By run key, the history of the run's series, tonight's row included where there is one.
        curves: By run key, tonight's scalars (columns tag, step, value, superseded).
        notes: By run key, notes about the evidence itself.
        sweeps: What became of the night's swept tests.
        baselines: By run key, the scalars of the last good run, which tonight's curves are laid over.
        links: By run key, names and web addresses of what the store has of the run.
        commits: By run key, what each repository got since the night before.
        note: A note about the night as a whole.
    """
    page = build_page(night, scenario, verdicts, rows, curves or {}, notes or {}, baselines, links, commits)
    shown = [sweep_section(sweep) for sweep in sweeps]
    return render_page("report.html.j2", page=page, sweeps=shown, note=note)


def markdown_table(verdicts: Iterable[Verdict]) -> str:
    """The verdicts as a Markdown table: one row per run, one column per metric, the reasons last."""
    header = ("test", "verdict", *(metric.label for metric in METRICS), "why")
    lines = [header, ("---",) * len(header)]
    for verdict in gravest_first(verdicts):
        words = STATUS_WORDS[verdict.status]
        lines.append(
            (
                markdown_text(verdict.test_id),
                f"{words.symbol} {words.label}",
                *(_markdown_cell(cell) for cell in _cells(verdict)),
                markdown_text("; ".join(verdict.reasons)),
            )
        )
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def verdict_table(verdicts: Iterable[Verdict]) -> "Table":
    """The verdicts as a table for a terminal of 80 columns or more, the gravest first; `reason_lines` go below it."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    table.add_column("test", overflow="fold")
    table.add_column("verdict", no_wrap=True)
    for metric in METRICS:
        table.add_column(metric.heading, justify="right", no_wrap=True)
    for verdict in gravest_first(verdicts):
        words = STATUS_WORDS[verdict.status]
        cells = _cells(verdict)
        # Texts from outside are Text, never rich's markup.
        table.add_row(
            Text(verdict.test_id),
            Text(f"{words.symbol} {words.label}", style=RICH_STYLES[words.tone]),
            *(Text(f"{cell.value}\n{cell.change}".rstrip(), RICH_STYLES[cell.tone]) if cell else "–" for cell in cells),
        )
    return table


def reason_lines(verdicts: Iterable[Verdict]) -> tuple[str, ...]:
    """Why the verdicts are what they are, one line each and none of them broken, so that they can be searched."""
    return tuple(
        f"{verdict.test_id}: {' '.join(reason.split())}"
        for verdict in gravest_first(verdicts)
        for reason in verdict.reasons
    )


def _cells(verdict: Verdict) -> list[Cell | None]:
    """One cell per metric, None where nothing was measured."""
    cells = {item.metric: cell_of(item, verdict.status) for item in verdict.comparisons}
    return [cells.get(metric.name) for metric in METRICS]


def _markdown_cell(cell: Cell | None) -> str:
    """`1.081 s (▲ +8.1 %)`; a dash where nothing was measured."""
    if cell is None or cell.value == "–":
        return "–"
    value = f"{cell.value} {cell.unit}".rstrip()
    said = ", ".join(text for text in (cell.change, cell.golden) if text)
    return f"{value} ({said})" if said else value


@contextlib.contextmanager
def _noted(notes: list[str]) -> Iterator[None]:
    """Damage of one test's evidence is shown on the page, and the other tests are reported all the same."""
    try:
        yield
    except DamagedData as error:
        notes.append(str(error))


def _new_commits(store: ObjectStore, key: str) -> tuple[NewCommits, ...]:
    data = store.get(key)
    if data is None:
        return ()
    try:
        checkout = RunRecord.model_validate_json(data).checkout
    except ValidationError as error:
        raise DamagedData("not the record of a run", thing=store.url_of(key), advice="Harvest the run again") from error
    named = (("Megatron-Bridge", checkout.megatron_bridge), ("NeMo-Run", checkout.nemo_run))
    return tuple(NewCommits(name, pin.commits_since) for name, pin in named if pin and pin.commits_since)


def _read_metrics(store: ObjectStore, key: str) -> "pd.DataFrame | None":
    data = store.get(key)
    if data is None:
        return None
    import pandas as pd
    import pyarrow as pa

    try:
        return pd.read_parquet(io.BytesIO(data), columns=["tag", "step", "value", "superseded"])
    except (pa.ArrowException, ValueError) as error:
        raise DamagedData("not a table of scalars", thing=store.url_of(key), advice="Harvest the run again") from error
