"""Stage 3, validate: every rule against the pinned code and the cluster's limits, then exactly what will be started."""

from collections.abc import Sequence
from pathlib import Path

from prefect.logging import get_run_logger

from nightbridge.errors import InvalidInput
from nightbridge.launch.plan import make_plan
from nightbridge.models import Checkout, Image, LaunchPlan, RunSpec, Site
from nightbridge.rules import Violation, check, errors_of
from nightbridge.slurm.cluster import open_cluster
from tasks.stage import stage


@stage("validate")
def validate(run: RunSpec, checkout: Checkout, image: Image, site: Site, attempt: int, attempt_dir: Path) -> LaunchPlan:
    """Check the run, and plan its launch."""
    limits = open_cluster(site.cluster, site.workspace).limits()
    refuse_errors(run, check(run, limits, checkout))
    plan = make_plan(run, checkout, image, limits, site, attempt, attempt_dir)
    log = get_run_logger()
    for warning in plan.warnings:
        log.warning("%s", warning)
    log.info("%d node(s) x %d task(s): %s", plan.nodes, plan.tasks_per_node, " ".join(plan.argv))
    return plan


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
