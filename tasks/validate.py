"""Stage 3, validate: every rule against the pinned code and the cluster's limits, then exactly what will be started.

Before the first stage: everything that can be checked without a checkout, so that nothing is fetched in vain.
"""

from collections.abc import Sequence
from pathlib import Path

from prefect.artifacts import create_table_artifact
from prefect.logging import get_run_logger

from nightbridge.config.scenarios import sweeps_nodes
from nightbridge.errors import InvalidInput, TransientError
from nightbridge.files import check_workspace
from nightbridge.launch.plan import make_plan
from nightbridge.models import Checkout, ClusterLimits, Image, LaunchPlan, RunSpec, Scenario, Site
from nightbridge.rules import Violation, check, errors_of
from nightbridge.slurm.attempts import ended_jobs, without_failed_nodes
from nightbridge.slurm.factory import open_cluster
from nightbridge.store.factory import open_store
from nightbridge.tasks.mirror import show
from nightbridge.tasks.secrets import block_value
from nightbridge.tasks.stage import stage


def show_violations(scenario: Scenario) -> None:
    """Show everything that is wrong or odd in a night's tests, all of them at once, as an artifact of the flow run."""
    rows = [
        {"test": test.id, "severity": "error", "what": violation}
        for test in scenario.invalid
        for violation in test.violations
    ]
    rows += [{"test": "", "severity": "warning", "what": warning} for warning in scenario.warnings]
    if rows:
        description = f"{scenario.name}: {len(rows)} violations"
        show("the violations", lambda: create_table_artifact(rows, key="violations", description=description))


@stage("validate", waits_for=(TransientError,))
def validate(run: RunSpec, checkout: Checkout, image: Image, site: Site, attempt: int, attempt_dir: Path) -> LaunchPlan:
    """Check the run, and plan its launch."""
    limits = open_cluster(site.cluster, site.workspace).limits()
    violations = check(run, limits, checkout)
    _show(run, violations)
    refuse_errors(run, violations)
    plan = make_plan(run, checkout, image, limits, site, attempt, attempt_dir)
    plan = without_failed_nodes(plan, ended_jobs(run, site), limits)
    log = get_run_logger()
    for warning in plan.warnings:
        log.warning("%s", warning)
    log.info("%d node(s) x %d task(s): %s", plan.nodes, plan.tasks_per_node, " ".join(plan.argv))
    return plan


def _show(run: RunSpec, violations: Sequence[Violation]) -> None:
    if violations:
        show(
            f"what {run.test.id} breaks",
            lambda: create_table_artifact(
                [violation.model_dump(mode="json") for violation in violations],
                key=f"{run.test_slug}-violations",
                description=f"What {run.test.id} breaks, against the pinned code and the cluster's limits",
            ),
        )


def refuse_errors(run: RunSpec, violations: Sequence[Violation]) -> None:
    """Log what was found.

    Raises:
        InvalidInput: There are errors among it; all of them are told.
    """
    for violation in violations:
        get_run_logger().warning("%s", violation)
    if found := errors_of(violations):
        raise InvalidInput(
            f"{len(found)} rule(s) broken", thing=run.test.id, violations=[str(violation) for violation in found]
        )


@stage("prepare", waits_for=(TransientError,))
def prepare(run: RunSpec, site: Site) -> None:
    """Check the run's configuration by every rule that needs no checkout, and its place."""
    _check_place(site)
    refuse_errors(run, check(run, open_cluster(site.cluster, site.workspace).limits()))


@stage("place", waits_for=(TransientError,))
def check_place(site: Site) -> None:
    """Check what every run of a night needs, and its report: that the workspace and the store can be written."""
    _check_place(site)


def node_limits(tests: Scenario, site: Site) -> ClusterLimits | None:
    """What the cluster says of itself, asked only where a test sweeps over its nodes: their GPUs follow from it.

    No stage: the runs of a night are made again after every restart.
    """
    return open_cluster(site.cluster, site.workspace).limits() if sweeps_nodes(tests) else None


def _check_place(site: Site) -> None:
    store = open_store(site.store_settings, block_value)
    check_workspace(site.workspace)
    store.check_writable()
