"""Stage 3, validate: every rule against the pinned code and the cluster's limits, then exactly what will be started."""

from collections.abc import Sequence
from pathlib import Path

from prefect.artifacts import create_table_artifact
from prefect.logging import get_run_logger

from nightbridge.errors import InvalidInput, TransientError
from nightbridge.launch.plan import make_plan
from nightbridge.models import Checkout, Image, LaunchPlan, RunSpec, Scenario, Site
from nightbridge.rules import Violation, check, errors_of
from nightbridge.slurm.factory import open_cluster
from nightbridge.slurm.failed_nodes import without_failed_nodes
from nightbridge.slurm.ledger import ended_jobs
from tasks.mirror import show
from tasks.stage import stage


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
