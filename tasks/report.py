"""Report: the page that people open in the morning, and what became of the night's sweeps."""

import json
from collections.abc import Sequence

from prefect.artifacts import create_link_artifact, create_markdown_artifact
from prefect.logging import get_run_logger

from nightbridge.models import NightReport, Site, SweepResult, Verdict, slug, utc_now
from nightbridge.regression.junit import junit_xml
from nightbridge.regression.report import markdown_table, night_report_html
from nightbridge.regression.sweep_tables import best_line, sweep_markdown
from nightbridge.store.objects import ObjectStore, open_store
from tasks.events import emit_verdicts
from tasks.secrets import block_value
from tasks.stage import stage


@stage("report")
def report(
    scenario: str, night: str, verdicts: tuple[Verdict, ...], site: Site, sweeps: tuple[SweepResult, ...] = ()
) -> NightReport:
    """Write the night's report to the store, and show it in the Prefect UI."""
    store = open_store(site.store_settings, block_value)
    _keep_sweeps(store, scenario, night, sweeps)
    page = night_report_html(
        store,
        scenario,
        night,
        verdicts,
        cluster=site.cluster.name,
        sweeps=sweeps,
        settings=site.store_settings,
    )
    key = f"reports/{night}/{scenario}.html"
    store.put(key, page.encode())
    document = junit_xml(scenario, night, verdicts, report=store.url_of(key), written_at=utc_now())
    store.put(f"reports/{night}/{scenario}.junit.xml", document)
    create_markdown_artifact(markdown_table(verdicts), key="nightly-verdicts", description=f"{scenario}, night {night}")
    create_link_artifact(store.url_of(key), key="nightly-report", link_text=f"{scenario}, night {night}")
    get_run_logger().info("report: %s", store.url_of(key))
    emit_verdicts(scenario, night, verdicts, store.url_of(key), site.cluster.name)
    return NightReport(scenario=scenario, night=night, verdicts=verdicts, report=store.url_of(key), sweeps=sweeps)


def _keep_sweeps(store: ObjectStore, scenario: str, night: str, sweeps: Sequence[SweepResult]) -> None:
    """Keep the points of all sweeps as JSON beside the report, and show them."""
    if not sweeps:
        return
    document = json.dumps([sweep.model_dump(mode="json") for sweep in sweeps], indent=2)
    store.put(f"reports/{night}/{scenario}-sweeps.json", document.encode())
    for sweep in sweeps:
        create_markdown_artifact(
            sweep_markdown(sweep), key=f"sweep-{slug(sweep.test_id)}", description=f"Sweep {sweep.test_id}"
        )
        get_run_logger().info("%s: %s", sweep.test_id, best_line(sweep))
