"""Report: the page that people open in the morning."""

from prefect.artifacts import create_link_artifact, create_markdown_artifact
from prefect.logging import get_run_logger

from nightbridge.models import NightReport, Site, Verdict
from nightbridge.regression.report import markdown_table, night_report_html
from nightbridge.store.objects import open_store
from tasks.secrets import block_value
from tasks.stage import stage


@stage("report")
def report(scenario: str, night: str, verdicts: tuple[Verdict, ...], site: Site) -> NightReport:
    """Write the night's report to the store, and show it in the Prefect UI."""
    store = open_store(site.store_settings, block_value)
    page = night_report_html(store, scenario, night, verdicts, cluster=site.cluster.name)
    key = f"reports/{night}/{scenario}.html"
    store.put(key, page.encode())
    create_markdown_artifact(markdown_table(verdicts), key="nightly-verdicts", description=f"{scenario}, night {night}")
    create_link_artifact(store.url_of(key), key="nightly-report", link_text=f"{scenario}, night {night}")
    get_run_logger().info("report: %s", store.url_of(key))
    return NightReport(scenario=scenario, night=night, verdicts=verdicts, report=store.url_of(key))
