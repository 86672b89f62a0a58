"""How verdicts are shown: their words and order, a metric's cell, tables for Markdown and a terminal, and JUnit XML."""

import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from nightbridge.models import NO_VALUE, Comparison, Verdict, VerdictStatus
from nightbridge.models.base import WordTable
from nightbridge.models.metrics import COLUMNS, INVERSES, label_of
from nightbridge.numbers import format_change, format_count, format_value

if TYPE_CHECKING:
    from xml.etree.ElementTree import Element

    from rich.table import Table

    from nightbridge.history.rows import HistoryRow

Tone = Literal["good", "bad", "warn", "none"]

RICH_STYLES: dict[Tone, str] = {"good": "blue", "bad": "bold red", "warn": "yellow", "none": ""}


class StatusWords(NamedTuple):
    """How a verdict is shown, and what to do about it."""

    label: str
    symbol: str
    tone: Tone
    task: str


def _words_of_newer(status: VerdictStatus) -> StatusWords:
    task = "A newer release of nightbridge gave this verdict; look at its report."
    return StatusWords(status.replace("_", " "), "?", "bad", task)


# The gravest first: the order of the matrix and of the morning's list.
STATUS_WORDS = WordTable(
    {
        VerdictStatus.REGRESSED: StatusWords(
            "regressed", "◆", "bad", "Find the cause in the changes below, then fix it or accept the new level."
        ),
        VerdictStatus.SUSPICIOUS: StatusWords(
            "suspicious", "?", "bad", "Find out why it is so much better; accept it as baseline if it is real."
        ),
        VerdictStatus.UNSTABLE: StatusWords("unstable", "≈", "bad", "Rerun it, and compare the nodes it ran on."),
        VerdictStatus.FAILED: StatusWords("failed", "✕", "bad", "Read the job's log; changed pins are listed below."),
        VerdictStatus.SHORT: StatusWords(
            "short", "✕", "bad", "Read the job's log: why did it end before its last step?"
        ),
        VerdictStatus.INFRASTRUCTURE: StatusWords(
            "infrastructure", "!", "warn", "The code was not tested. Fix the cause, then start a new attempt."
        ),
        VerdictStatus.INVALID: StatusWords("invalid", "!", "warn", "Fix the test's file; nothing was started."),
        VerdictStatus.CANCELLED: StatusWords("cancelled", "–", "warn", "Start a new attempt if it is still needed."),
        VerdictStatus.NO_BASELINE: StatusWords("no baseline", "○", "none", ""),
        VerdictStatus.INSUFFICIENT_DATA: StatusWords("insufficient data", "◔", "none", ""),
        VerdictStatus.IMPROVED: StatusWords("improved", "★", "good", ""),
        VerdictStatus.PASSED: StatusWords("passed", "✓", "good", ""),
    },
    _words_of_newer,
)

_GRAVITY = {status: place for place, status in enumerate(STATUS_WORDS)}

COMPARISON_WORDS: dict[str, tuple[str, Tone]] = {
    "regressed": ("worse", "bad"),
    "improved": ("better", "good"),
    "suspicious": ("too good", "bad"),
    "passed": ("", "none"),
    "missing": ("not measured", "bad"),
    "no_baseline": ("nothing to compare with", "none"),
}


class Cell(NamedTuple):
    """One metric of one test in the matrix."""

    label: str
    unit: str
    value: str
    change: str
    word: str
    tone: Tone
    golden: str = ""


def gravity(status: VerdictStatus) -> int:
    """The place of a verdict in the order in which they are shown; one that only a newer release knows is first."""
    return _GRAVITY.get(status, -1)


def gravest_first(verdicts: Iterable[Verdict]) -> list[Verdict]:
    """The order in which verdicts are shown."""
    return sorted(verdicts, key=lambda verdict: (gravity(verdict.status), verdict.test_id, verdict.run_key))


def cause_of(verdict: Verdict) -> str:
    """The commits that a verdict suspects, in one clause; empty where it knows none.

    `suspect bf75d9e "Synchronise after every gradient bucket" (only commit)`
    """
    changed = verdict.suspects.repositories if verdict.suspects else ()
    # What only moves a submodule is never the cause: the submodule's commits may be.
    guilty = [one for change in changed for one in change.listed if not one.is_bump]
    if not guilty or STATUS_WORDS[verdict.status].tone != "bad":
        return ""
    newest = guilty[0]
    which = "only commit" if len(guilty) == 1 else f"newest of {len(guilty)} commits"
    return f'suspect {newest.commit.commit[:7]} "{newest.text}" ({which})'


def further_runs_of(verdict: Verdict) -> str:
    """How many further runs a night had or is to have, what they cost, and why; empty where there are none.

    `2 further runs, 0.53 GPU-hours: step time +2.1 % from its reference; ...`
    """
    wanted = max(verdict.reruns - verdict.further_runs, 0)
    count = verdict.further_runs + wanted
    cost = verdict.confirmation_gpu_hours + wanted * verdict.gpu_hours
    text = f"{format_count(count, 'further run')}, {cost:.2f} GPU-hours: {verdict.rerun_reason}" if count else ""
    return text.removesuffix(": ")


def next_command(verdict: Verdict) -> str:
    """What to type after a verdict, as a shell takes it; empty where there is nothing to do.

    It names the run by its key: of a sweep, of iterations and of two scenarios a night has several runs of one test.
    """
    match verdict.status:
        case VerdictStatus.REGRESSED:
            found = verdict.suspects
            code_only = found and found.repositories and not found.configuration and not found.environment
            return f"nightbridge {'bisect' if code_only else 'attribute'} {verdict.run_key}"
        case VerdictStatus.UNSTABLE:  # no level to search the beginning of
            return f"nightbridge history {verdict.run_key}"
        case VerdictStatus.SUSPICIOUS:
            return f'nightbridge accept {verdict.run_key} --as baseline --why "..."'
        case VerdictStatus.FAILED | VerdictStatus.SHORT | VerdictStatus.INFRASTRUCTURE:
            return f"nightbridge logs --errors {verdict.run_key}"
        case VerdictStatus.CANCELLED:
            return f"nightbridge run FILE --night {verdict.night} --retry"
    return ""


def short_reason(verdict: Verdict) -> str:
    """The verdict in a few words: the metrics that regressed, else the status and its first reason."""
    news = [item for item in verdict.comparisons if item.status == verdict.status.value]
    said = INVERSES if any(item.metric == "step_time" for item in news) else ()
    moved = [
        f"{label_of(item.metric)} {format_change(item.change)}".rstrip() for item in news if item.metric not in said
    ]
    since = f", since {verdict.since}" if verdict.news in ("standing", "worse") else ""
    if verdict.status in (VerdictStatus.REGRESSED, VerdictStatus.SUSPICIOUS) and moved:
        return ", ".join(moved) + since
    label = STATUS_WORDS[verdict.status].label
    return (f"{label}, {verdict.reasons[0]}" if verdict.reasons else label) + since


def cell_of(comparison: Comparison, verdict: VerdictStatus) -> Cell:
    """One metric in words. The arrow shows the direction, the word whether that is good."""
    judged = verdict not in NO_VALUE or comparison.status == "missing"
    word, tone = COMPARISON_WORDS[comparison.status if judged else "passed"]
    change = format_change(comparison.change)
    arrow = "" if not change or change.startswith("±") else "▲ " if change.startswith("+") else "▼ "
    golden = ""
    if comparison.value is not None and comparison.golden:
        golden = f"golden {format_change((comparison.value - comparison.golden) / abs(comparison.golden))}"
    return Cell(
        label=label_of(comparison.metric),
        unit=comparison.unit,
        value=format_value(comparison.value),
        change=arrow + change,
        word=word,
        tone=tone,
        golden=golden,
    )


def markdown_table(verdicts: Iterable[Verdict], report: str = "") -> str:
    """The verdicts as a Markdown table: one row per run, one column per metric, the reasons last.

    `report`: address of the night's report, whose part about a run its test links to; no links without.
    """
    header = ("test", "verdict", *(metric.label for metric in COLUMNS), "why")
    lines = [header, ("---",) * len(header)]
    for verdict in gravest_first(verdicts):
        words, name = STATUS_WORDS[verdict.status], markdown_text(verdict.test_id)
        lines.append(
            (
                f"[{name}]({report}#{verdict.run_key})" if report else name,
                f"{words.symbol} {words.label}",
                *(_markdown_cell(cell) for cell in cells_of(verdict)),
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
    for metric in COLUMNS:
        table.add_column(metric.heading, justify="right", no_wrap=True)
    for verdict in gravest_first(verdicts):
        words = STATUS_WORDS[verdict.status]
        cells = cells_of(verdict)
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
        for reason in (*verdict.reasons, further_runs_of(verdict))
        if reason
    )


def next_lines(verdicts: Iterable[Verdict], options: str = "") -> tuple[str, ...]:
    """For each test that needs somebody: since when, how sure that is, the suspect, and the command to type next.

    `options` name the site, to be copied with the command; empty or with a leading space.
    """
    lines = []
    for verdict in gravest_first(verdicts):
        if command := next_command(verdict):
            since = f" since {verdict.since}" if verdict.since and STATUS_WORDS[verdict.status].tone == "bad" else ""
            since += f" ({verdict.certainty})" if verdict.certainty else ""
            cause = f"; {cause}" if (cause := cause_of(verdict)) else ""
            label = STATUS_WORDS[verdict.status].label
            lines.append(f"{verdict.test_id}: {label}{since}{cause}. next: {command}{options}")
    return tuple(lines)


def compact_lines(verdicts: Iterable[Verdict], options: str = "") -> tuple[str, ...]:
    """The verdicts where no terminal is: a line for each test, for a bad one why, and what to type next."""
    lines = []
    ordered = gravest_first(verdicts)
    width = max((len(verdict.test_id) for verdict in ordered), default=0)
    for verdict in ordered:
        words = STATUS_WORDS[verdict.status]
        cells = ", ".join(
            f"{cell.label} {' '.join(filter(None, (cell.value, cell.unit, cell.change)))}"
            for cell in cells_of(verdict)
            if cell and cell.value != "–"
        )
        why = "; ".join(" ".join(reason.split()) for reason in (*verdict.reasons, further_runs_of(verdict)) if reason)
        shown = (f"{words.symbol} {verdict.test_id:{width}}  {words.label}", cells, why if not words.task else "")
        lines.append("  ".join(filter(None, shown)))
        lines += [f"{verdict.test_id}: {why}"] if words.task and why else []
        lines += next_lines((verdict,), options)
    return tuple(lines)


def cells_of(verdict: Verdict) -> list[Cell | None]:
    """One cell per metric, None where nothing was measured."""
    cells = {item.metric: cell_of(item, verdict.status) for item in verdict.comparisons}
    return [cells.get(metric.name) for metric in COLUMNS]


def _markdown_cell(cell: Cell | None) -> str:
    """`1.081 s (▲ +8.1 %)`; a dash where nothing was measured."""
    if cell is None or cell.value == "–":
        return "–"
    value = f"{cell.value} {cell.unit}".rstrip()
    changes = ", ".join(text for text in (cell.change, cell.golden) if text)
    return f"{value} ({changes})" if changes else value


def format_point(point: Mapping[str, Any]) -> str:
    """A point of a sweep, `tp = 2, cuda_graph_scope = attn mlp`; variables without the name of their table."""
    return ", ".join(f"{name.rpartition('.')[2]} = {format_choice(value)}" for name, value in point.items())


def sweep_point_of(row: "HistoryRow") -> str:
    """The point of a run of a sweep, its fields by name; empty where there is no sweep."""
    return format_point(dict(sorted(row.sweep_point.items())))


def format_choice(value: object) -> str:
    """One value of a sweep's axis, as its file has it; a list as its items, with spaces between them."""
    if isinstance(value, list | tuple):
        return " ".join(format_choice(item) for item in value)
    return str(value).lower() if isinstance(value, bool) else str(value)


def markdown_text(text: str) -> str:
    """A text from outside in one line of Markdown, in which none of its characters has a meaning."""
    return re.sub(r"([\\`*_{}\[\]<>|#])", r"\\\1", " ".join(text.split()))


# --- JUnit XML -------------------------------------------------------------------------------------------------------

JunitKind = Literal["failure", "error", "skipped"]

# What XML 1.0 cannot hold, escaped or not: control characters of logs, halves of surrogate pairs.
_NOT_XML = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def junit_kind(status: VerdictStatus) -> JunitKind | None:
    """A verdict in JUnit's words.

    `failure`: the code is worse, or did not run to its end; `error`: nothing is known about the code; `skipped`: there
    was nothing to compare with yet. A cancelled run is an error, since CI systems show a skipped test as a good one.
    """
    if status is VerdictStatus.NO_BASELINE:
        return "skipped"
    kinds: dict[Tone, JunitKind] = {"bad": "failure", "warn": "error"}
    return kinds.get(STATUS_WORDS[status].tone)


def junit_xml(
    scenario: str, night: str, verdicts: Sequence[Verdict], *, report: str = "", written_at: datetime | None = None
) -> bytes:
    """The verdicts of a night as a JUnit document, the form in which CI systems take test results, the gravest first.

    One `testsuite` per night, one `testcase` per verdict. What CI systems agree on is used and nothing more: the counts
    of a suite, and in a case what `junit_kind` says.

    Args:
        scenario: The scenario's name; the suite is called so.
        night: Night id.
        verdicts: One per run. Points of a sweep have one test id, so cases are distinguished by their run keys.
        report: Where the night's report is.
        written_at: Time of the suite; left out when None.
    """
    from xml.etree import ElementTree

    kinds = [junit_kind(verdict.status) for verdict in verdicts]
    counts = {
        "tests": str(len(verdicts)),
        "failures": str(kinds.count("failure")),
        "errors": str(kinds.count("error")),
        "skipped": str(kinds.count("skipped")),
    }
    root = ElementTree.Element("testsuites", {"name": "nightbridge", **counts})
    suite = ElementTree.SubElement(root, "testsuite", {"name": scenario, **counts})
    if written_at is not None:
        suite.set("timestamp", written_at.replace(tzinfo=None).isoformat(timespec="seconds"))
    properties = ElementTree.SubElement(suite, "properties")
    for name, value in (("night", night), ("report", report)):
        ElementTree.SubElement(properties, "property", {"name": name, "value": value})
    for verdict in gravest_first(verdicts):
        _add_case(suite, scenario, verdict)
    ElementTree.indent(root)
    document = _NOT_XML.sub("\ufffd", ElementTree.tostring(root, encoding="unicode"))
    return f"<?xml version='1.0' encoding='utf-8'?>\n{document}\n".encode()


def _add_case(suite: "Element", scenario: str, verdict: Verdict) -> None:
    from xml.etree import ElementTree

    names = {"classname": f"{scenario}.{verdict.test_id}", "name": verdict.run_key}
    case = ElementTree.SubElement(suite, "testcase", names)
    kind = junit_kind(verdict.status)
    reasons = "\n".join(verdict.reasons)
    if kind:
        detail = ElementTree.SubElement(case, kind, {"message": short_reason(verdict)})
        if kind != "skipped":
            detail.set("type", verdict.status.value)
            detail.text = reasons
    lines = [STATUS_WORDS[verdict.status].label, reasons]
    if verdict.prefix:
        lines.append(f"kept at {verdict.store_url}/{verdict.prefix}")
    ElementTree.SubElement(case, "system-out").text = "\n".join(line for line in lines if line)
