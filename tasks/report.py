"""Report: the page that people open in the morning, what became of the night's sweeps, and the record of its end."""

import json
import shutil
from functools import partial

from prefect.artifacts import create_link_artifact
from prefect.logging import get_run_logger

from nightbridge.errors import NightbridgeError, TransientError
from nightbridge.models import NightReport, Site, SweepResult, Verdict, utc_now
from nightbridge.nights.records import NightStart, read_end, record_end, was_reported
from nightbridge.prune import disk_usage
from nightbridge.report.night_report import link_from_night_before, night_note, night_report_html
from nightbridge.report.overview import INDEX, index_html
from nightbridge.report.sweeps import best_line, sweep_markdown
from nightbridge.report.tables import junit_xml, markdown_table
from nightbridge.store.object_store import ObjectStore
from nightbridge.tasks.events import send_report_events
from nightbridge.tasks.prefect_calls import artifact_key, show, show_markdown
from nightbridge.tasks.site_access import store_of
from nightbridge.tasks.stage import never_reused, stage


@stage("report", waits_for=(TransientError,), key=never_reused)
def report(
    start: NightStart, verdicts: tuple[Verdict, ...], site: Site, sweeps: tuple[SweepResult, ...] = ()
) -> NightReport:
    """Write the night's report to the store, record how the night ended, and show both in the Prefect UI."""
    store = store_of(site)
    scenario, night = start.scenario, start.night
    if sweeps:
        document = json.dumps([sweep.model_dump(mode="json") for sweep in sweeps], indent=2)
        store.put(f"reports/{night}/{scenario}-sweeps.json", document.encode())
    note = night_note(store, start, verdicts)
    page = night_report_html(
        store,
        scenario,
        night,
        verdicts,
        cluster=site.cluster.name,
        sweeps=sweeps,
        note=note,
        site_options=start.site_options,
    )
    key = f"reports/{night}/{scenario}.html"
    store.put(key, page.encode())
    link_from_night_before(store, scenario, night)
    junit = junit_xml(scenario, night, verdicts, report=store.url_of(key), written_at=utc_now())
    store.put(f"reports/{night}/{scenario}.junit.xml", junit)
    written = NightReport(
        scenario=scenario,
        night=night,
        verdicts=verdicts,
        report=store.url_of(key),
        sweeps=sweeps,
        note=note,
        found_again=was_reported(read_end(store, night, scenario), verdicts),
    )
    end = record_end(store, written)
    _write_index(store, site)
    _show(written, site.cluster.name)
    if note:
        get_run_logger().warning("%s", note)
    get_run_logger().info("report: %s", written.report)
    send_report_events(written, end.title, site.cluster.name)
    return written


def _write_index(store: ObjectStore, site: Site) -> None:
    """Write the page of all nights again. Nothing depends on it, so whatever stops it stops nothing else."""
    try:
        disk = shutil.disk_usage(site.workspace)
        free = f"{disk.free / 1e9:,.0f} of {disk.total / 1e9:,.0f} GB are free at the workspace {site.workspace}"
        usages = disk_usage(site.workspace, site.environments_dir, site.images_dir)
        parts = ", ".join(f"{usage.what} {usage.size / 1e9:,.1f} GB" for usage in usages)
        store.put(INDEX, index_html(store, (f"{free}: {parts}",)).encode())
    except (NightbridgeError, OSError) as error:
        get_run_logger().warning("the page of all nights was not written: %s", error)


def _show(written: NightReport, cluster: str) -> None:
    title = f"{written.scenario}, night {written.night}"
    table = markdown_table(written.verdicts, report=written.report)
    key_of = partial(artifact_key, scenario=written.scenario, cluster=cluster)
    show_markdown("the verdicts", table, key=key_of("verdicts"), description=title)
    show("the report", lambda: create_link_artifact(written.report, key=key_of("report"), link_text=title))
    for sweep in written.sweeps:
        test, key = sweep.test_id, key_of("sweep", test=sweep.test_id)
        show_markdown(f"the sweep {test}", sweep_markdown(sweep), key=key, description=f"Sweep {test}")
        get_run_logger().info("%s: %s", test, best_line(sweep))
