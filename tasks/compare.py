"""Stage 6, compare: the run against its history, and a verdict."""

from functools import partial

from prefect.logging import get_run_logger

from nightbridge.errors import DamagedData, NightbridgeError, TransientError
from nightbridge.gate.control import proof_needed
from nightbridge.gate.judging import judge_and_record
from nightbridge.harvest.manifest import committed_attempts, load_record
from nightbridge.history.history_store import compact
from nightbridge.models import RunRecord, RunSpec, Site, Verdict
from nightbridge.nights.records import read_verdict
from nightbridge.report.tables import markdown_table
from nightbridge.store.protocol import ObjectStore
from nightbridge.tasks.context import run_log, this_night
from nightbridge.tasks.mirror import artifact_key, show_markdown
from nightbridge.tasks.site import commits_between, store_of
from nightbridge.tasks.stage import never_reused, stage


@stage("compare", waits_for=(TransientError,))
def compare(record: RunRecord, site: Site) -> Verdict:
    """Judge the run, then make it part of the history that later runs are judged by."""
    return _judge(record, store_of(site), site)


@stage("confirm", waits_for=(TransientError,), key=never_reused)
def confirm(run: RunSpec, site: Site, attempt: int) -> Verdict:
    """Judge a stored run again, now that its night has further runs; `attempt` is how many were requested."""
    store = store_of(site)
    attempts = committed_attempts(store, run.run_key)
    record = load_record(store, attempts[-1]) if attempts else None
    if record is None:
        raise DamagedData("no record", subject=run.run_key, advice="Harvest the run again")
    return _judge(record, store, site)


def stored_verdict(run: RunSpec, site: Site) -> Verdict | None:
    """The verdict that a run of this night already has; None without one, or where it cannot be read."""
    try:
        return read_verdict(store_of(site), run.run_key, run.night)
    except NightbridgeError as error:
        run_log().warning("the stored verdict of %s cannot be read: %s", run.run_key, error)
        return None


def _judge(record: RunRecord, store: ObjectStore, site: Site) -> Verdict:
    night, log = this_night(), get_run_logger()
    proof = proof_needed(night.runs, site.budget.false_alarms)
    commits = partial(commits_between, site)
    verdict = judge_and_record(store, record, site.contract, commits, night.canary_series, proof)
    test, cluster = record.spec.test.id, record.job.cluster
    key = artifact_key("verdict", record.spec.scenario, cluster, test)
    show_markdown(f"the verdict of {test}", markdown_table((verdict,)), key=key, description=f"Verdict of {test}")
    log.info("%s: %s %s", test, verdict.status, "; ".join(verdict.reasons))
    try:
        compact(store, cluster, record.series)
    except NightbridgeError as error:  # it only keeps the history quick to read
        log.warning("the history was not compacted: %s", error)
    return verdict
