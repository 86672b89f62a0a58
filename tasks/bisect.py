"""The stages of a bisect besides those of a run: what is searched, what a point measured, and the answer."""

from functools import partial

from prefect.logging import get_run_logger

from nightbridge.bisect.plan import BisectPlan, BisectRequest, keep_plan, load_plan, make_plan
from nightbridge.bisect.result import (
    BisectResult,
    Point,
    evaluate,
    point_of,
    result_lines,
    stored_points,
)
from nightbridge.errors import DamagedData
from nightbridge.harvest.manifest import load_record
from nightbridge.models import RunRecord, Site, Verdict, slug
from nightbridge.report.queries import history_of
from nightbridge.slurm.attempts import attempts_of, read_ended
from nightbridge.slurm.factory import cluster_of
from nightbridge.tasks.mirror import show_markdown
from nightbridge.tasks.site import commits_between, store_of
from nightbridge.tasks.stage import stage


@stage("bisect-plan")
def plan_bisect(test_id: str, request: BisectRequest, site: Site) -> BisectPlan:
    """Find the change in the test's history and the commits that may have done it; the first such plan holds.

    A request that names a bisect resumes it.
    """
    store = store_of(site)
    if request.bisect_id:
        plan = load_plan(store, request.bisect_id)
    else:
        rows = history_of(store, test_id, site.cluster.name).rows
        plan = keep_plan(store, make_plan(rows, partial(commits_between, site), request))
    get_run_logger().info("bisect %s: %d commits; the same id resumes it", plan.bisect_id, len(plan.commits))
    return plan


@stage("bisect-base")
def base_run(plan: BisectPlan, site: Site) -> RunRecord:
    """The bad night's own run, whose configuration and other pins all points have."""
    store = store_of(site)
    record = load_record(store, plan.base)
    if record is None:
        raise DamagedData("the bad night's run is gone", thing=store.url_of(plan.base), advice="Name another range")
    return record


def earlier_points(plan: BisectPlan, base: RunRecord, site: Site) -> tuple[Point, ...]:
    """What an earlier process has already run. No stage: it is looked up again after every restart."""
    return stored_points(store_of(site), plan, base)


def read_point(plan: BisectPlan, index: int, number: int, verdict: Verdict, site: Site) -> Point:
    """What a finished run measured."""
    record = load_record(store_of(site), verdict.prefix) if verdict.prefix else None
    return point_of(plan, index, number, verdict, record)


def room_for(base: RunRecord, site: Site, most: int) -> int:
    """How many points to run at once: as many as the cluster would start now."""
    return max(1, min(most, cluster_of(site).available_slots(base.plan.nodes)))


@stage("bisect-result")
def keep_result(plan: BisectPlan, points: tuple[Point, ...], site: Site) -> BisectResult:
    """Keep the answer with its evidence, and show it."""
    store = store_of(site)
    result = evaluate(plan, points)
    store.put(f"bisects/{plan.bisect_id}/result.json", result.model_dump_json(indent=2).encode() + b"\n")
    lines = result_lines(result)
    text = "```\n" + "\n".join(lines).replace("```", "'''") + "\n```\n"
    show_markdown("the bisect's answer", text, key=f"bisect-{plan.bisect_id}", description=f"Bisect of {plan.test_id}")
    for line in lines:
        get_run_logger().info("%s", line)
    return result


def unfinished_points(test_id: str, bisect_id: str | None, site: Site) -> list[str]:
    """The run keys of a test's bisects, or of one of them, whose job has not ended; found by their folders' names."""
    wanted = f"*-{bisect_id}-*" if bisect_id else f"{slug(test_id)}-*-bisect-*"
    names = sorted(folder.name for folder in (site.workspace / "runs").glob(wanted))
    return [
        name
        for name in names
        if not all(read_ended(attempt.attempt_dir) for attempt in attempts_of(name, site.workspace))
    ]
