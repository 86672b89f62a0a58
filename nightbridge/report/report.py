"""The report of a night: gathered from the store, rendered as one HTML page."""

import contextlib
from collections.abc import Iterable, Iterator, Sequence

from nightbridge.errors import DamagedData
from nightbridge.harvest.manifest import MANIFEST, Manifest, load_record, load_scalars, read_manifest
from nightbridge.history.metrics import format_duration
from nightbridge.history.reading import read_recent
from nightbridge.models import SweepResult, Verdict
from nightbridge.nights.records import NightStart
from nightbridge.report.page import NewCommits, ReportedRun, build_page, last_good_run, render_page
from nightbridge.report.sweeps import sweep_section
from nightbridge.store.protocol import ObjectStore

MAX_LINKS = 20
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

    Raises:
        TransientError: The store did not answer.
    """
    runs = [_reported_run(store, verdict, cluster) for verdict in verdicts]
    return render_report(night, scenario, runs, sweeps, note)


def night_note(store: ObjectStore, start: NightStart, verdicts: Iterable[Verdict]) -> str:
    """The report's note on a night that began late: how late, and which code ran; empty for one in time.

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
    night: str, scenario: str, runs: Sequence[ReportedRun], sweeps: Sequence[SweepResult] = (), note: str = ""
) -> str:
    """Render one self-contained HTML page: no script, nothing loaded from anywhere.

    Args:
        night: Night id.
        scenario: The scenario's name.
        runs: The night's runs, in any order.
        sweeps: The results of the night's swept tests.
        note: A note about the night as a whole.
    """
    page, shown = build_page(night, scenario, runs), [sweep_section(sweep) for sweep in sweeps]
    return render_page("report.html.j2", page=page, sweeps=shown, note=note)


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
            run = run._replace(rows=read_recent(store, cluster, verdict.series, verdict.night))
    if not verdict.prefix:
        return run
    with _noted(damage):
        run = run._replace(scalars=load_scalars(store, verdict.prefix))
    with _noted(damage):
        run = run._replace(commits=_new_commits(store, verdict.prefix))
    with _noted(damage):
        manifest = read_manifest(store, verdict.prefix)
        run = run._replace(links=run_links(store, manifest) if manifest else ())
    good = last_good_run(verdict, run.rows)
    if good and good.prefix:
        with _noted(damage):
            run = run._replace(baseline=load_scalars(store, good.prefix))
    return run


@contextlib.contextmanager
def _noted(notes: list[str]) -> Iterator[None]:
    """Damage of one test's evidence is shown on the page, and the other tests are reported all the same."""
    try:
        yield
    except DamagedData as error:
        notes.append(str(error))


def _new_commits(store: ObjectStore, prefix: str) -> tuple[NewCommits, ...]:
    record = load_record(store, prefix)
    if record is None:
        return ()
    named = (("Megatron-Bridge", record.checkout.megatron_bridge), ("NeMo-Run", record.checkout.nemo_run))
    return tuple(NewCommits(name, pin.commits_since) for name, pin in named if pin and pin.commits_since)
