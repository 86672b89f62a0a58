"""Stage 6, compare: the run against its history, and a verdict."""

from prefect.artifacts import create_markdown_artifact
from prefect.logging import get_run_logger

from nightbridge.models import RunRecord, Site, Verdict
from nightbridge.regression.gate import compare as compare_with_history
from nightbridge.regression.history import add, read_history, row_of
from nightbridge.regression.report import markdown_table
from nightbridge.store.objects import open_store
from tasks.secrets import block_value
from tasks.stage import stage


@stage("compare")
def compare(record: RunRecord, site: Site) -> Verdict:
    """Judge the run, then make it part of the history that later runs are judged by."""
    store = open_store(site.store_settings, block_value)
    verdict = compare_with_history(record, read_history(store, site.cluster.name, record.series))
    add(store, row_of(record, verdict))
    store.put(f"{record.prefix.rsplit('/', 1)[0]}/verdict.json", verdict.model_dump_json(indent=2).encode())
    create_markdown_artifact(
        markdown_table((verdict,)), key=record.spec.test_slug, description=f"Verdict of {record.spec.test.id}"
    )
    get_run_logger().info("%s: %s %s", record.spec.test.id, verdict.status, "; ".join(verdict.reasons))
    return verdict
