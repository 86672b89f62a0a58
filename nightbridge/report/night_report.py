"""The report of a night: gathered from the store, rendered as one HTML page."""

import bisect
import contextlib
import html
import io
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING
from urllib.parse import quote

from nightbridge.errors import DamagedData
from nightbridge.harvest.manifest import MANIFEST, Manifest, committed_record, load_record, load_scalars, read_manifest
from nightbridge.history.reading import kept_as, read_recent
from nightbridge.models import NO_VALUE, StoredFile, SweepResult, Verdict, has_date
from nightbridge.nights.records import NightStart
from nightbridge.numbers import format_count, format_duration, format_value
from nightbridge.outputs.log_errors import ErrorFinder
from nightbridge.outputs.logs import MAX_LINE_BYTES, clean_line, raw_lines
from nightbridge.report.charts import exchange_chart
from nightbridge.report.night_page import MAX_CHARTED, ReportedRun, build_page, last_good_run, render_page, way_up
from nightbridge.report.sweeps import sweep_section
from nightbridge.report.tables import gravest_first
from nightbridge.store.object_store import ObjectStore
from nightbridge.store.parallel import in_parallel

if TYPE_CHECKING:
    from nightbridge.attribution.attribution_result import AttributionResult

REPORTS = "reports/"

LATER_NIGHT = "<!-- the night after -->"
"""Stands on a page until there is one."""

RANK_LOG = "logs/log"
LOG_TAIL, LAST_LINES = 1 << 20, 30
"""Bytes of a log that are searched for an error, and lines of it that are shown."""

MAX_LINKS = 20
MAX_FACTORS = 16
"""Changes that an attribution's picture shows: the likeliest; its table has all."""

FIRST = ("summary.json", "metrics.parquet")
"""The files that are opened most often come first."""


def night_report_html(
    store: ObjectStore,
    scenario: str,
    night: str,
    verdicts: Sequence[Verdict],
    *,
    cluster: str,
    sweeps: Sequence[SweepResult] = (),
    note: str = "",
    site_options: str = "",
) -> str:
    """Gather the histories and tonight's curves from the store, and render the night's report.

    What is damaged is named on the page of its test; the other tests are not held up by it.

    Args:
        store: Where the runs are.
        scenario: The scenario's name.
        night: Night id.
        verdicts: One per run.
        cluster: Name of the cluster.
        sweeps: The results of the night's swept tests.
        note: A note about the night as a whole.
        site_options: What names the site behind the commands that it proposes; empty or with a leading space.

    Raises:
        TransientError: The store did not answer.
    """
    runs = in_parallel(lambda verdict: _reported_run(store, verdict, cluster), gravest_first(verdicts))
    runs[:MAX_CHARTED] = in_parallel(lambda run: _with_curves(store, run), runs[:MAX_CHARTED])
    found, notes = _attributions(store, verdicts, cluster)
    note = " ".join(filter(None, (note, *notes)))
    return render_report(
        night, scenario, runs, sweeps, note, neighbours_of(store, scenario, night), found, site_options
    )


def neighbours_of(store: ObjectStore, scenario: str, night: str) -> tuple[str, str]:
    """The nights of a scenario before and after one that have a report; empty where there is none.

    A night that is named by a word is no neighbour: by its name it would come after each one for ever.
    """
    if not has_date(night):
        return "", ""
    end = f"/{scenario}.html"
    names = (item.key[len(REPORTS) : -len(end)] for item in store.list(REPORTS) if item.key.endswith(end))
    found = sorted(name for name in names if has_date(name) and "/" not in name)  # a slash: another scenario's
    at, after = bisect.bisect_left(found, night), bisect.bisect_right(found, night)
    return found[at - 1] if at else "", found[after] if after < len(found) else ""


def link_from_night_before(store: ObjectStore, scenario: str, night: str) -> None:
    """Give the page of the night before its link to this one; one that has it, or an older page, stays as it is."""
    before, _after = neighbours_of(store, scenario, night)
    key = f"{REPORTS}{before}/{scenario}.html"
    data = store.get(key) if before else None
    if data is None or (mark := LATER_NIGHT.encode()) not in data:
        return
    link = f'<a href="{way_up(scenario)}{night}/{quote(scenario)}.html" rel="next">{html.escape(night)} →</a>'
    store.put(key, data.replace(mark, link.encode(), 1))


def night_note(store: ObjectStore, start: NightStart, verdicts: Iterable[Verdict]) -> str:
    """The report's note on a night that began late: how late, and which code ran; empty for one in time.

    Raises:
        TransientError: The store did not answer.
    """
    if start.late_by is None or start.slot is None:
        return ""

    def code_of(verdict: Verdict) -> list[str]:
        with contextlib.suppress(DamagedData):  # what is damaged is named on the page of its test
            record = load_record(store, verdict.prefix) if verdict.prefix else None
            pinned = record.checkout.repositories if record else ()
            return [f"{one.url.rstrip('/').rpartition('/')[2].removesuffix('.git')} {one.commit[:8]}" for one in pinned]
        return []

    code = dict.fromkeys(each for found in in_parallel(code_of, [*verdicts]) for each in found)
    ran = f"; it ran {', '.join(code)}" if code else ""
    return f"This night began {format_duration(start.late_by)} after its slot, {start.slot:%Y-%m-%d %H:%M %z}{ran}."


def render_report(
    night: str,
    scenario: str,
    runs: Sequence[ReportedRun],
    sweeps: Sequence[SweepResult] = (),
    note: str = "",
    neighbours: tuple[str, str] = ("", ""),
    attributions: "Sequence[AttributionResult]" = (),
    site_options: str = "",
) -> str:
    """Render one self-contained HTML page: no script, nothing loaded from anywhere. See `night_report_html`.

    `runs` are in any order. `neighbours` are the nights that it links to; `attributions` say what was found out about
    the causes of what became worse.
    """
    page = build_page(night, scenario, runs, neighbours, site_options)
    shown = [sweep_section(sweep) for sweep in sweeps]
    causes = [_attribution_section(each) for each in attributions]
    return render_page(
        "report.html.j2", page=page, sweeps=shown, note=note, later_night=LATER_NIGHT, attributions=causes
    )


def _attributions(
    store: ObjectStore, verdicts: Sequence[Verdict], cluster: str
) -> "tuple[list[AttributionResult], list[str]]":
    """The attributions of what is not good tonight, and what is damaged of them."""
    bad = [verdict for verdict in verdicts if verdict.exit_code]
    if not bad:
        return [], []
    from nightbridge.attribution.attribution_result import result_for

    def answer(verdict: Verdict) -> "tuple[AttributionResult | None, list[str]]":
        notes: list[str] = []
        with _noted(notes):
            return result_for(store, verdict, cluster), notes
        return None, notes

    answers = in_parallel(answer, bad)
    found = {result.plan.attribution_id: result for result, _notes in answers if result}
    return list(found.values()), [note for _result, notes in answers for note in notes]


def _attribution_section(result: "AttributionResult") -> dict[str, object]:
    """The search for the cause of one test's change.

    `rows`: of each factor its axis, name, change and probability. `runs`: number, value and design of each.
    """
    from nightbridge.attribution.attribution_result import design_words, sentence, shown_part
    from nightbridge.attribution.axes import AXIS_WORDS
    from nightbridge.bisect.result import target_text

    plan, cause = result.plan, result.cause
    likeliest = sorted(range(len(plan.factors)), key=lambda number: -cause.marginals[number])
    drawn = sorted(likeliest[:MAX_FACTORS])
    measured = [shown_part(plan, result.runs, run) for run in result.runs]
    rows = (
        (AXIS_WORDS[factor.axis].removeprefix("the "), factor.name, factor.change, f"{share:.1%}")
        for factor, share in ((plan.factors[number], cause.marginals[number]) for number in likeliest)
    )
    values = (format_value(run.value, plan.unit) if run.value is not None else run.status.value for run in result.runs)
    further = (f"then {format_count(len(one.points), 'run')} inside {one.plan.ranges[0]}" for one in result.descents)
    return {
        "plan": plan,
        "headline": f"{target_text(plan)} since {plan.since}: {sentence(result)}",
        "chart": exchange_chart(
            [plan.factors[number].name for number in drawn],
            [[run.design[number] for number in drawn] for run in result.runs],
            measured,
            [cause.marginals[number] for number in drawn],
        ),
        "rows": list(rows),
        "runs": [
            (run.number, value, design_words(plan, run.design)) for run, value in zip(result.runs, values, strict=True)
        ],
        "notes": (*further, *result.notes, *(f"not exchanged: {rest}" for rest in plan.rest)),
    }


def run_links(store: ObjectStore, manifest: Manifest) -> tuple[tuple[str, str], ...]:
    """Path and web address of a stored run's objects, checkpoints left out; none where the store has no addresses."""
    paths = [file.path for file in manifest.files if file.kind != "checkpoint"]
    paths.sort(key=lambda path: (FIRST.index(path) if path in FIRST else len(FIRST), path))
    links = ((path, store.link_of(f"{manifest.prefix}/{path}")) for path in (*paths[:MAX_LINKS], MANIFEST))
    return tuple((path, link) for path, link in links if link)


def _reported_run(store: ObjectStore, verdict: Verdict, cluster: str) -> ReportedRun:
    damage: list[str] = []
    run = ReportedRun(verdict, notes=damage)
    if verdict.series:
        with _noted(damage):
            # A run that died was never looked up in the store: its verdict has the series' present name.
            series = verdict.series if verdict.prefix else kept_as(store, cluster, verdict.series)
            run = run._replace(rows=read_recent(store, cluster, series, verdict.night))
    if not verdict.prefix:
        return run
    manifest: Manifest | None = None
    with _noted(damage):
        if manifest := read_manifest(store, verdict.prefix):
            checkout = committed_record(store, manifest).checkout
            named = (("Megatron-Bridge", checkout.megatron_bridge), ("NeMo-Run", checkout.nemo_run))
            new = tuple((name, pin.commits_since) for name, pin in named if pin and pin.commits_since)
            run = run._replace(commits=new)
    with _noted(damage):
        if manifest:
            run = run._replace(links=run_links(store, manifest))
            if verdict.status in NO_VALUE:
                error, lines = last_log_lines(store, manifest)
                run = run._replace(error=error, log=lines)
    return run


def _with_curves(store: ObjectStore, run: ReportedRun) -> ReportedRun:
    damage = list(run.notes)
    good = last_good_run(run.verdict, run.rows)
    if run.verdict.prefix:
        with _noted(damage):
            run = run._replace(scalars=load_scalars(store, run.verdict.prefix))
        if good and good.prefix:
            with _noted(damage):
                run = run._replace(baseline=load_scalars(store, good.prefix))
    return run._replace(notes=damage)


def last_log_lines(store: ObjectStore, manifest: Manifest) -> tuple[str, tuple[str, ...]]:
    """The line that says best why a run failed, and the last lines of its log.

    That is the log of the ranks where they wrote one: in the batch script's stands last who ended them.
    """
    logs = [file for file in manifest.files if file.path.startswith("logs/") and file.size]
    if not logs:
        return "", ()
    newest = max(logs, key=lambda file: (file.mtime_ns, file.path))
    of_ranks = [file for file in logs if file.path.startswith(RANK_LOG)]
    shown = max(of_ranks, key=lambda file: (file.mtime_ns, file.path), default=newest)
    lines = _end_of(store, manifest, shown)
    error = _best_error(lines) or (_best_error(_end_of(store, manifest, newest)) if shown != newest else "")
    # Nothing of a log that a page or a terminal would take for more than text.
    shown_lines = (filter(lambda letter: letter.isprintable() or letter == "\t", line) for line in lines[-LAST_LINES:])
    return error, tuple(map("".join, shown_lines))


def _end_of(store: ObjectStore, manifest: Manifest, log: StoredFile) -> list[str]:
    begin = max(log.size - LOG_TAIL, 0)
    data = b"".join(store.read(f"{manifest.prefix}/{log.path}", begin, log.size - begin))
    return [clean_line(line[:MAX_LINE_BYTES]) for line in raw_lines(io.BytesIO(data))][bool(begin) :]


def _best_error(lines: Iterable[str]) -> str:
    finder = ErrorFinder()
    for line in lines:
        finder.see(line)
    return finder.best


@contextlib.contextmanager
def _noted(notes: list[str]) -> Iterator[None]:
    """Damage of one test's evidence is shown on the page, and the other tests are reported all the same."""
    try:
        yield
    except DamagedData as error:
        notes.append(str(error))
