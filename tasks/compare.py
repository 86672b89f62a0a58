"""Stage 6, compare: the run against its history, and a verdict."""

from prefect.artifacts import create_markdown_artifact
from prefect.logging import get_run_logger

from nightbridge.errors import DamagedData
from nightbridge.models import RunRecord, RunSpec, Site, Verdict
from nightbridge.regression.evidence import gather_evidence
from nightbridge.regression.gate import compare as compare_with_history
from nightbridge.regression.history import add, read_history, row_of
from nightbridge.regression.report import markdown_table
from nightbridge.store.find import last_attempt
from nightbridge.store.harvest import load_record
from nightbridge.store.objects import ObjectStore, open_store
from tasks.secrets import block_value
from tasks.stage import stage


@stage("compare")
def compare(record: RunRecord, site: Site) -> Verdict:
    """Judge the run, then make it part of the history that later runs are judged by."""
    return _judge(record, open_store(site.store_settings, block_value), site)


@stage("confirm")
def confirm(run: RunSpec, site: Site, attempt: int) -> Verdict:
    """Judge a stored run again, now that its night has further runs; `attempt` is how many were asked for."""
    store = open_store(site.store_settings, block_value)
    record = load_record(store, last_attempt(store, run.run_key))
    if record is None:
        raise DamagedData("no record", thing=run.run_key, advice="Harvest the run again")
    return _judge(record, store, site)


def _judge(record: RunRecord, store: ObjectStore, site: Site) -> Verdict:
    history = read_history(store, site.cluster.name, record.series)
    verdict = compare_with_history(record, history, gather_evidence(store, record, site.contract))
    add(store, row_of(record, verdict))
    store.put(f"{record.prefix.rsplit('/', 1)[0]}/verdict.json", verdict.model_dump_json(indent=2).encode())
    create_markdown_artifact(
        markdown_table((verdict,)), key=record.spec.test_slug, description=f"Verdict of {record.spec.test.id}"
    )
    get_run_logger().info("%s: %s %s", record.spec.test.id, verdict.status, "; ".join(verdict.reasons))
    return verdict
