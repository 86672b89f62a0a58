"""The night's HTML page: verdicts and history turned into the words, rows and drawings that its template lays out."""

from collections import Counter
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

import jinja2

from nightbridge.gate.run_verdict import OUTCOMES
from nightbridge.history.nightly_values import NightRuns, good_runs_before, night_value, nights_of, repeats_of, up_to
from nightbridge.history.rows import HistoryRow, Pin
from nightbridge.models import GOOD_VERDICTS, Verdict, VerdictStatus
from nightbridge.models.metrics import COLUMNS, METRIC_BY_NAME
from nightbridge.numbers import format_count, format_percent
from nightbridge.report.charts import (
    LOSS_TAG,
    MAX_NIGHTS,
    STEP_TIME_TAG,
    NightPoint,
    PointKind,
    has_gaps,
    nights_chart,
    sparkline,
    spread_chart,
    step_times,
    steps_chart,
)
from nightbridge.report.tables import (
    STATUS_WORDS,
    Cell,
    StatusWords,
    cause_of,
    cells_of,
    further_runs_of,
    gravest_first,
    next_command,
    short_reason,
    sweep_point_of,
)

if TYPE_CHECKING:
    import pandas as pd

MAX_CHARTED, MAX_COMMANDS, SPARKLINE_NIGHTS = 8, 3, 30
"""Tests whose charts are drawn (a third of a second and 60 kB each), commands of a case, nights of a sparkline."""


class ReportedRun(NamedTuple):
    """One run of the night, and what the page shows of it.

    `rows`: the history of its series, tonight's row included where there is one. `scalars`: columns tag, step, value
    and superseded. `baseline`: the scalars of the last good run, which tonight's curves are laid over. `notes`: about
    the evidence itself. `links`: names and web addresses of what the store has of the run. `commits`: of each
    repository what it got since the night before, hash and subject, newest first. `error`, `log`: of a failed run, the
    line that says best why, and the last lines of its log.
    """

    verdict: Verdict
    rows: Sequence[HistoryRow] = ()
    scalars: "pd.DataFrame | None" = None
    baseline: "pd.DataFrame | None" = None
    notes: Sequence[str] = ()
    links: Sequence[tuple[str, str]] = ()
    commits: Sequence[tuple[str, Sequence[str]]] = ()
    error: str = ""
    log: Sequence[str] = ()


class PinChange(NamedTuple):
    """What one part of the run was, tonight and in the last good night. Texts may hold anything: escape them."""

    name: str
    now: str
    subject: str
    before: str
    subject_before: str
    changed: bool | None
    link: str


class Drawing(NamedTuple):
    """One chart: what it shows for those who do not see it, the drawing, and the words below."""

    label: str
    svg: str
    caption: str


class Section(NamedTuple):
    """One test of the night: its run, and that in words, rows and drawings.

    `cells`: one for each column, None where it was not measured; none at all where nothing was.
    """

    run: ReportedRun
    point: str
    words: StatusWords
    notes: tuple[str, ...]
    cells: tuple[Cell | None, ...]
    sparkline: str
    nights: Drawing | None
    curves: tuple[Drawing, ...]
    pins: tuple[PinChange, ...]
    last_good: str
    facts: tuple[tuple[str, str], ...]
    cause: str
    command: str


def render_page(template: str, **values: object) -> str:
    """Fill a template of this package's folder `templates`; a value that it lacks is an error, text is escaped."""
    return _environment().get_template(template).render(**values)


def way_up(scenario: str) -> str:
    """The way from a night's page to the folder of all reports; a scenario's name may have slashes."""
    return "../" * (1 + scenario.count("/"))


def build_page(
    night: str, scenario: str, runs: Sequence[ReportedRun], neighbours: tuple[str, str], site_options: str = ""
) -> dict[str, object]:
    """Everything that the template needs, the gravest test first. Charts are drawn for `MAX_CHARTED` of them.

    `neighbours`: nights of its scenario before and after it, or empty.
    """
    by_key = {run.verdict.run_key: run for run in runs}
    verdicts = gravest_first(run.verdict for run in runs)
    sections = [
        (_charted if number < MAX_CHARTED else _section)(by_key[verdict.run_key])
        for number, verdict in enumerate(verdicts)
    ]
    calls = [verdict for verdict in verdicts if STATUS_WORDS[verdict.status].task]
    headline, subline = headline_of(verdicts)
    return {
        "scenario": scenario,
        "night": night,
        "headline": headline,
        "subline": subline,
        "tone": STATUS_WORDS[calls[0].status].tone if calls else "good",
        "columns": [(metric.label, metric.unit) for metric in COLUMNS],
        "cases": _cases(sections[: len(calls)], site_options),
        "sections": sections,
        "has_golden": any(cell.golden for section in sections for cell in section.cells if cell),
        "neighbours": neighbours,
        "up": way_up(scenario),
    }


def headline_of(verdicts: Sequence[Verdict]) -> tuple[str, str]:
    """What needs attention in one sentence, and how the night went in another."""
    if not verdicts:
        return "Nothing ran tonight.", "No test ran."
    calls = [verdict for verdict in verdicts if STATUS_WORDS[verdict.status].task]
    labels = Counter(STATUS_WORDS[verdict.status].label for verdict in gravest_first(verdicts))
    counts = [f"{count} {label}" for label, count in labels.items()]
    tests = format_count(len(verdicts), "test")
    confirmation = sum(verdict.confirmation_gpu_hours for verdict in verdicts)
    hours = sum(verdict.gpu_hours for verdict in verdicts) + confirmation
    cost = f" {hours:,.2f} GPU-hours, {confirmation:,.2f} of them confirmation." if hours else ""
    subline = f"{tests}: {', '.join(counts)}.{cost}"
    if not calls:
        return "Nothing to do this morning.", subline
    causes = {cause_of(verdict) for verdict in calls}
    cause = next(iter(causes)) if len(causes) == 1 else ""
    if len(calls) == 1:
        return f"Look at {calls[0].test_id}: {short_reason(calls[0])}{cause and f'; {cause}'}.", subline
    return f"{len(calls)} of {tests} need attention{cause and f': {cause}'}.", subline


def _cases(sections: Sequence[Section], site_options: str) -> list[dict[str, object]]:
    """The tests that need somebody: those with one verdict and one known cause together."""
    together: dict[tuple[str, str], list[Section]] = {}
    for section in sections:
        together.setdefault((section.words.label, section.cause or section.run.verdict.run_key), []).append(section)
    found: list[dict[str, object]] = []
    for some in together.values():
        commands = dict.fromkeys(section.command + site_options for section in some if section.command)
        case = {"words": some[0].words, "sections": some, "cause": some[0].cause}
        found.append({**case, "commands": tuple(commands)[:MAX_COMMANDS]})
    return found


def last_good_run(verdict: Verdict, rows: Sequence[HistoryRow]) -> HistoryRow | None:
    """The run that tonight's curves are laid over: the last good one before it."""
    return next(reversed(good_runs_before(verdict.night, rows)), None)


def _charted(run: ReportedRun) -> Section:
    """The section of a test with its charts."""
    rows = _rows_until_tonight(run)
    return _section(run)._replace(nights=_nights(run.verdict, rows), curves=_curves(run, rows))


def _rows_until_tonight(run: ReportedRun) -> list[HistoryRow]:
    return sorted(up_to(run.rows, run.verdict.night), key=lambda row: (row.order, row.harvested_at))


def _tonights(verdict: Verdict, rows: Sequence[HistoryRow]) -> tuple[HistoryRow | None, int]:
    """Tonight's row, and how many runs tonight had."""
    tonight = next((row for row in rows if row.run_key == verdict.run_key), None)
    return tonight, 1 + len(repeats_of(tonight, rows)) if tonight else 1


def _section(run: ReportedRun) -> Section:
    verdict, rows = run.verdict, _rows_until_tonight(run)
    (tonight, runs), last_good = _tonights(verdict, rows), last_good_run(verdict, rows)
    points, cells = _night_points(verdict, rows)[-SPARKLINE_NIGHTS:], cells_of(verdict)
    return Section(
        run=run,
        point=sweep_point_of(tonight) if tonight else "",
        words=STATUS_WORDS[verdict.status],
        notes=(*run.notes, *(tonight.summary.notes if tonight else ())),
        cells=tuple(cells) if any(cells) else (),
        sparkline=sparkline(points) if len(points) > 1 else "",
        nights=None,
        curves=(),
        pins=_pins(tonight, last_good),
        last_good=last_good.night if last_good else "",
        facts=_facts(verdict, tonight, runs),
        cause=cause_of(verdict),
        command=next_command(verdict),
    )


def _nights(verdict: Verdict, rows: Sequence[HistoryRow]) -> Drawing | None:
    """The step time over the nights, with tonight's baseline."""
    points = _night_points(verdict, rows)
    if all(point.value is None for point in points[-MAX_NIGHTS:]):
        return None
    comparison = verdict.metric("step_time")
    baseline = comparison.baseline if comparison else None
    caption = "Median step time of each night; the thin lines reach from the 5th to the 95th percentile of its steps."
    if comparison and baseline is not None:
        caption += f" Band: baseline ± {format_percent(comparison.threshold)}."
    drawn = nights_chart(points, "step time, s", baseline, comparison.threshold if comparison else 0.0)
    return Drawing("Step time over the nights", drawn, caption)


def _night_points(verdict: Verdict, rows: Sequence[HistoryRow]) -> list[NightPoint]:
    """The nights' step times, tonight included also when it has no row; none where no night has one.

    A night's is the median of its runs; tonight's the one that the table shows.
    """
    points = [_night_point(night) for night in nights_of(rows)]
    if points and points[-1].night != verdict.night:
        points.append(NightPoint(verdict.night, None, None, None, "other"))
    shown = verdict.metric("step_time")
    return [*points[:-1], points[-1]._replace(value=shown.value)] if points and shown else points


def _night_point(night: NightRuns) -> NightPoint:
    own, median = night.own.summary, night_value(night, METRIC_BY_NAME["step_time"])
    step_time = own.step_time if median is None else median
    kind: PointKind = "regressed" if night.own.verdict is VerdictStatus.REGRESSED else "other"
    if night.own.verdict in GOOD_VERDICTS:
        kind = "good"
    return NightPoint(night.own.night, step_time, own.step_time_p05, own.step_time_p95, kind)


def _curves(run: ReportedRun, rows: Sequence[HistoryRow]) -> tuple[Drawing, ...]:
    """Loss and time of every step, and how the steady step times are distributed."""
    curve, baseline, last_good = run.scalars, run.baseline, last_good_run(run.verdict, rows)
    if curve is None:
        return ()
    tonight, runs = _tonights(run.verdict, rows)
    whose = "tonight" if runs == 1 else f"of the first of tonight's {runs} runs"
    overlaid = f" Dashed: the last good night, {last_good.night}." if last_good and baseline is not None else ""
    crosses = " A cross is a step whose loss is not finite, or absurdly large." if has_gaps(curve) else ""
    steady = _steady(curve, tonight)
    before = _steady(baseline, last_good) if baseline is not None else []
    drawings = (
        Drawing(
            "Loss of every step",
            steps_chart(curve, baseline, LOSS_TAG, "loss"),
            f"Loss of every step {whose}.{crosses}{overlaid}",
        ),
        Drawing(
            "Time of every step",
            steps_chart(curve, baseline, STEP_TIME_TAG, "step time, s", cut=True),
            f"Time of every step {whose}; an arrow is a step that took longer than the axis shows.{overlaid}",
        ),
        Drawing(
            "Distribution of step times",
            spread_chart(steady, before),
            f"How the {len(steady)} step times of the steady window are distributed.{overlaid}",
        ),
    )
    return tuple(drawing for drawing in drawings if drawing.svg)


def _steady(curve: "pd.DataFrame", row: HistoryRow | None) -> list[float]:
    window = (row.summary.steady_first_step, row.summary.steady_last_step) if row else (None, None)
    return step_times(curve, *window)


def _pins(tonight: HistoryRow | None, before: HistoryRow | None) -> tuple[PinChange, ...]:
    if tonight is None:
        return ()
    old = before.pins if before else {}
    return (
        *(_commit_change(name, now, old.get(name)) for name, now in tonight.pins.items()),
        _plain_change("Image", _image(tonight), _image(before) if before else None),
        _plain_change("Nodes", tonight.nodes or "–", (before.nodes or "–") if before else None),
    )


def _commit_change(name: str, now: Pin, before: Pin | None) -> PinChange:
    if before is None:
        return PinChange(name, _commit_text(now), now.subject, "", "", None, "")
    changed = before.commit != now.commit
    link = compare_link(now.url, before.commit, now.commit) if changed else ""
    return PinChange(name, _commit_text(now), now.subject, _commit_text(before), before.subject, changed, link)


def _plain_change(name: str, now: str, before: str | None) -> PinChange:
    return PinChange(name, now, "", before or "", "", None if before is None else before != now, "")


def _commit_text(pin: Pin) -> str:
    day = f" of {pin.committed_at:%Y-%m-%d}" if pin.committed_at else ""
    # `git describe` ends with the abbreviated commit, except on a tag.
    names = pin.describe if pin.commit[:7] in pin.describe else f"{pin.describe} {pin.commit[:10]}".strip()
    return names + day


def _image(row: HistoryRow) -> str:
    if row.image_digest is None:
        return row.image or "no container"
    digest = row.image_digest.removeprefix("sha256:")[:12]
    return f"{row.image} ({digest})" if row.image else digest


def _facts(verdict: Verdict, row: HistoryRow | None, runs: int) -> tuple[tuple[str, str], ...]:
    """Further details, as name and value; unknown things are left out. `runs` is how many tonight had."""
    facts = [("Job", str(verdict.job_id) if verdict.job_id is not None else "")]
    if row:
        summary, (_fault, outcome) = row.summary, OUTCOMES[row.outcome]
        expected = f" of {summary.steps_expected}" if summary.steps_expected is not None else ""
        facts += [
            ("Cluster", row.cluster),
            ("Attempt", str(row.attempt) if row.attempt > 1 else ""),
            ("Outcome", f"{outcome} ({row.outcome_reason})" if row.outcome_reason else outcome),
            ("Steps recorded", f"{summary.steps_done}{expected}"),
        ]
    facts.append(("GPU-hours", f"{verdict.gpu_hours:.2f}" if verdict.gpu_hours else ""))
    facts.append(("Confirmation", further_runs_of(verdict)))
    facts.append(("Compared", f"median of tonight's {runs} runs" if runs > 1 else ""))
    if good := len(verdict.baseline_runs):
        facts.append(("Baseline", f"median of {good} good runs" if good > 1 else "the last good run"))
    return tuple((name, value) for name, value in facts if value)


def compare_link(url: str, before: str, now: str) -> str:
    """A link to the commits between two pins, where the host is known to have such a page."""
    return web_link(url, f"compare/{before}...{now}")


def web_link(url: str, page: str) -> str:
    """A link to a page of a repository, where the host is known to have it; else empty."""
    base = url.removesuffix("/").removesuffix(".git")
    return f"{base}/{page}" if base.startswith("https://github.com/") else ""


@cache
def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("nightbridge.report"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals |= {"compare_link": compare_link, "web_link": web_link, "format_count": format_count}
    return environment
