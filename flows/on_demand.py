"""Flows that people start from a form: decisions, parity of two runs, pruning, and the check of a site."""

from typing import Any, Literal

from prefect import flow
from prefect.client.schemas.objects import State
from prefect.logging import get_run_logger
from prefect.states import Completed, Failed

from nightbridge.blocks import site_of
from nightbridge.errors import NightbridgeError
from nightbridge.flows.final_states import ends_plainly
from nightbridge.flows.forms import ClusterField, MetricsField, NightField, RunField, StoreField, SystemField, TextField
from nightbridge.gate.decisions import Decision, DecisionKind, StoredDecision
from nightbridge.goldens.parity import Parity
from nightbridge.models import ReferencePolicy, Site, utc_now
from nightbridge.prune import Old, Policy
from nightbridge.tasks.on_demand import check_site, compare_step_by_step, decide, prune_site, withdraw_decision

USUAL_LIMITS = ReferencePolicy()
USUAL_POLICY = Policy()


@flow(name="accept", flow_run_name="accept {run}")
@ends_plainly
def accept(  # noqa: D417  (`SiteChoice` describes the others)
    run: RunField,
    why: TextField,
    who: TextField,
    kind: DecisionKind = "acknowledged",
    metrics: MetricsField = (),
    until: NightField | None = None,
    system: SystemField = None,
    store: StoreField = None,
) -> State[Decision]:
    """Acknowledge a regression, mark it as fixed, or make its level the new baseline; silences the alert.

    Args:
        run: A run of that level: a run key, or TEST, TEST@NIGHT; or a series.
        why: The reason, as verdicts will show it.
        who: Who decides.
        kind: What is decided.
        metrics: The metrics that it is about; none for all.
        until: The last night that it holds for; none for one without an end.
    """
    site = site_of(system=system, store=store)
    made = decide(run, kind, who=who, why=why, metrics=metrics, until=until or "", when=utc_now(), site=site)
    return _state(made, "Decided", [f"{made.series}: {made.text}"])


@flow(name="withdraw", flow_run_name="withdraw {decision}")
@ends_plainly
def withdraw(  # noqa: D417  (`SiteChoice` describes the others)
    decision: RunField, why: TextField, who: TextField, system: SystemField = None, store: StoreField = None
) -> State[StoredDecision]:
    """Withdraw a decision, and judge the nights since its level began again: those it let pass are no baseline.

    Args:
        decision: Its id, or the run, test or series that it is about.
        why: The reason.
        who: Who withdraws it.
    """
    stored, rejudged = withdraw_decision(decision, who=who, why=why, site=site_of(system=system, store=store))
    level = f"the level since {stored.decision.since}{' alerts again' if rejudged.alarms else ''}"
    return _state(stored, "Withdrawn", [f"withdrawn: {stored.decision.text}", f"{level} ({rejudged})"])


@flow(name="parity", flow_run_name="parity {run_a} {run_b}")
@ends_plainly
def parity(  # noqa: D417  (`SiteChoice` describes the others)
    run_a: RunField,
    run_b: RunField,
    gate: Literal["numerics", "convergence", "iterations"] = "convergence",
    limits: ReferencePolicy = USUAL_LIMITS,
    system: SystemField = None,
    store: StoreField = None,
) -> State[Parity]:
    """Compare two stored runs step by step: whether they compute the same, or converge alike.

    Args:
        run_a: The run that is compared with: a run key, or TEST, TEST@NIGHT, TEST@last-good.
        run_b: The run that is compared.
        gate: What decides: every bit, the course of the loss, or each iteration's loss.
        limits: How far the losses of single iterations may be apart.
    """
    found = compare_step_by_step(run_a, run_b, limits, site_of(system=system, store=store))
    faults = found.faults_of(gate)
    return _state(found, "Different" if faults else "Alike", [found.result_of(gate), *faults], bad=bool(faults))


@flow(name="prune", flow_run_name="prune")
@ends_plainly
def prune(  # noqa: D417  (`SiteChoice` describes the others)
    remove: bool = False,
    policy: Policy = USUAL_POLICY,
    system: SystemField = None,
    store: StoreField = None,
    workspace: str | None = None,
) -> State[Old]:
    """List old checkouts, images, launcher environments and stored runs, and remove them; never what is still needed.

    The list is an artifact of the flow run.

    Args:
        remove: Remove them; otherwise they are only listed.
        policy: What of the workspace stays. Of stored runs the store's own retention decides.
    """
    old = prune_site(site_of(system=system, store=store, workspace=workspace), policy, remove)
    return _state(old, "Removed" if remove else "Listed", [f"{'removed' if remove else 'would remove'} {old}"])


@flow(name="check-site", flow_run_name="check of a site")
@ends_plainly
def check(
    system: SystemField = None, cluster: ClusterField = None, store: StoreField = None, workspace: str | None = None
) -> State[Site]:
    """Check what a night needs at a site, on the worker's host: nothing is submitted.

    What is wrong is said with what to do about it. It is the Check of the blocks: those that are picked are checked.
    """
    site = site_of(system=system, cluster=cluster, store=store, workspace=workspace)
    found = check_site(site)
    bad = [each for each in found if not each.healthy]
    return _state(site, "Unhealthy" if bad else "Healthy", [*map(str, bad or found)], bad=bool(bad))


def _state(data: Any, name: str, lines: list[str], *, bad: bool = False) -> State[Any]:
    """Completed or Failed, named for people, with what was found in its message; the log has it as well."""
    message = "\n".join(lines)
    get_run_logger().info("%s", message)
    if bad:
        return Failed(name=name, message=message, data=NightbridgeError(message))
    return Completed(name=name, message=message, data=data)
