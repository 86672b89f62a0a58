"""The stages of a bisect that are not those of a run: what is searched, what a point says, and the answer."""

from prefect.artifacts import create_markdown_artifact
from prefect.logging import get_run_logger

from nightbridge.bisect.plan import BisectPlan, Repository, keep_plan, load_plan, make_plan
from nightbridge.bisect.result import (
    BisectResult,
    Point,
    evaluate,
    point_of,
    result_lines,
    stored_points,
)
from nightbridge.bisect.search import BisectPolicy
from nightbridge.errors import DamagedData
from nightbridge.harvest.manifest import load_record
from nightbridge.models import RunRecord, Site, Verdict, slug
from nightbridge.report.queries import history_of
from nightbridge.slurm.attempts import attempts_of, cancel_jobs, read_ended
from nightbridge.slurm.factory import open_cluster
from nightbridge.store.factory import open_store
from nightbridge.store.protocol import ObjectStore
from nightbridge.tasks.mirror import show
from nightbridge.tasks.secrets import block_value, commits_between
from nightbridge.tasks.stage import stage


@stage("bisect-plan")
def plan_bisect(
    test_id: str,
    site: Site,
    metric: str | None,
    repository: Repository | None,
    good: str | None,
    bad: str | None,
    policy: BisectPolicy,
) -> BisectPlan:
    """Find the change in the test's history and the commits that may have done it; the first such plan holds."""
    store = open_store(site.store_settings, block_value)
    rows = history_of(store, test_id, site.cluster.name).rows

    made = make_plan(
        rows, commits_between(site), metric=metric, repository=repository, good=good, bad=bad, policy=policy
    )
    return _told(keep_plan(store, made))


@stage("bisect-plan")
def resume_plan(bisect_id: str, site: Site) -> BisectPlan:
    """Go on with a bisect that was begun."""
    return _told(load_plan(open_store(site.store_settings, block_value), bisect_id))


@stage("bisect-base")
def base_run(plan: BisectPlan, site: Site) -> RunRecord:
    """The bad night's own run, whose configuration and other pins all points have."""
    store = open_store(site.store_settings, block_value)
    record = load_record(store, plan.base)
    if record is None:
        raise DamagedData("the bad night's run is gone", thing=store.url_of(plan.base), advice="Name another range")
    return record


def earlier_points(plan: BisectPlan, base: RunRecord, site: Site) -> tuple[Point, ...]:
    """What an earlier process has already run. No stage: it has to be asked again after every restart."""
    return stored_points(open_store(site.store_settings, block_value), plan, base)


def read_point(plan: BisectPlan, place: int, number: int, verdict: Verdict, site: Site) -> Point:
    """What a finished run says."""
    store = open_store(site.store_settings, block_value)
    record = load_record(store, verdict.prefix) if verdict.prefix else None
    return point_of(plan, place, number, verdict, record)


def room_for(base: RunRecord, site: Site, most: int) -> int:
    """How many points to run at once: as many as the cluster would start now."""
    return max(1, min(most, open_cluster(site.cluster, site.workspace).available_slots(base.plan.nodes)))


@stage("bisect-result")
def keep_result(plan: BisectPlan, points: tuple[Point, ...], site: Site) -> BisectResult:
    """Keep the answer with its evidence, and show it."""
    store: ObjectStore = open_store(site.store_settings, block_value)
    result = evaluate(plan, points)
    store.put(f"bisects/{plan.bisect_id}/result.json", result.model_dump_json(indent=2).encode() + b"\n")
    lines = result_lines(result)
    show(
        "the bisect's answer",
        lambda: create_markdown_artifact(
            "```\n" + "\n".join(lines).replace("```", "'''") + "\n```\n",
            key=f"bisect-{plan.bisect_id}",
            description=f"Bisect of {plan.test_id}",
        ),
    )
    for line in lines:
        get_run_logger().info("%s", line)
    return result


def cancel_points(test_id: str, bisect_id: str | None, site: Site) -> None:
    """Cancel the live jobs of a test's bisects, or of one of them; they are found by their folders' names."""
    cluster = open_cluster(site.cluster, site.workspace)
    wanted = f"*-{bisect_id}-*" if bisect_id else f"{slug(test_id)}-*-bisect-*"
    for folder in sorted((site.workspace / "runs").glob(wanted)):
        if not all(read_ended(attempt.attempt_dir) for attempt in attempts_of(folder.name, site.workspace)):
            cancel_jobs(folder.name, site.workspace, cluster)


def _told(plan: BisectPlan) -> BisectPlan:
    get_run_logger().info("bisect %s: %d commits; the same id goes on with it", plan.bisect_id, len(plan.commits))
    return plan
