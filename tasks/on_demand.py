"""What people start from a form reads the store, the workspace or the site here."""

from collections.abc import Sequence
from datetime import datetime
from functools import partial

from nightbridge.doctor import Check, checks
from nightbridge.errors import TransientError
from nightbridge.gate.accept import accept, is_series, withdraw
from nightbridge.gate.decisions import Decision, DecisionKind, StoredDecision, Withdrawal
from nightbridge.gate.stored_verdicts import Rejudged
from nightbridge.goldens.parity import Parity
from nightbridge.harvest.retention import find_old_runs, remove_runs
from nightbridge.models import MetricName, ReferencePolicy, Site, slug, utc_now
from nightbridge.nights.records import find_run
from nightbridge.prune import Old, Policy, find_old, remove_old
from nightbridge.report.queries import parity_stored
from nightbridge.repos.commits import known_commits_between
from nightbridge.tasks.prefect_calls import show_markdown, show_table
from nightbridge.tasks.site_access import store_of
from nightbridge.tasks.stage import never_reused, stage


@stage("accept", waits_for=(TransientError,))
def decide(
    run: str,
    kind: DecisionKind,
    *,
    who: str,
    why: str,
    metrics: Sequence[MetricName],
    until: str,
    when: datetime,
    site: Site,
) -> Decision:
    """Store a decision about the level of a run, or of the last run of a series, once. Raises as `accept` does."""
    store = store_of(site)
    target = run if is_series(run) else find_run(store, run)
    cluster = site.cluster.name
    return accept(store, target, kind, who=who, why=why, metrics=metrics, until=until, cluster=cluster, when=when)


@stage("withdraw", waits_for=(TransientError,), key=never_reused)
def withdraw_decision(decision: str, *, who: str, why: str, site: Site) -> tuple[StoredDecision, Rejudged]:
    """Withdraw a decision, and judge its nights again. Raises as `withdraw` does."""
    store = store_of(site)
    target = find_run(store, decision) if "@" in decision else decision
    withdrawal = Withdrawal(who=who, why=why, when=utc_now())
    return withdraw(store, target, withdrawal, site.contract, partial(known_commits_between, site))


@stage("parity", waits_for=(TransientError,), key=never_reused)
def compare_step_by_step(run_a: str, run_b: str, policy: ReferencePolicy, site: Site) -> Parity:
    """Compare two stored runs.

    Raises:
        InvalidInput: One of the runs is not in the store.
        DamagedData: One of them is not what was committed, or has no scalars.
    """
    store = store_of(site)
    return parity_stored(store, find_run(store, run_a), find_run(store, run_b), policy)


@stage("prune", waits_for=(TransientError,), key=never_reused)
def prune_site(site: Site, policy: Policy, remove: bool) -> Old:
    """Find what is old, list it as an artifact of the flow run, and remove it if that is wanted.

    The store's own retention decides about stored runs.
    """
    store = store_of(site)
    old = find_old(site, policy, lambda: store)
    runs = find_old_runs(store, site.store_settings.retention)
    if remove:
        old, runs = remove_old(site, old), remove_runs(store, runs)
    old = old.model_copy(update={"runs": tuple(runs)})
    show_table("what is old", _rows(old), key=f"prune-{slug(site.cluster.name)}", description=str(old))
    return old


def _rows(found: Old) -> list[dict[str, str]]:
    of_workspace = ((str(each.path), each.size, each.last_used, each.reason) for each in found.removals)
    of_store = ((old.url, old.run.size, old.run.stored_at, old.reason) for old in found.runs)
    return [
        {"what": what, "MB": f"{size / 1e6:.0f}", "last used": f"{when:%Y-%m-%d}", "reason": reason}
        for what, size, when, reason in (*of_workspace, *of_store)
    ]


@stage("check", key=never_reused)
def check_site(site: Site) -> list[Check]:
    """Try what a night will do at a site, and show it as an artifact of the flow run."""
    found = [*checks(site, lambda: store_of(site))]
    rows = [f"| {'✓' if each.healthy else '✗'} {each.subject} | {each.what} | {each.advice} |" for each in found]
    table = "\n".join(["| | found | what to do |", "|---|---|---|", *rows])
    show_markdown("the check", table, key=f"check-{slug(site.cluster.name)}", description="Check of the site")
    return found
