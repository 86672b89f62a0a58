"""The stages of a bisect besides those of a run: what is searched, what a point measured, and the answer."""

from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

from prefect.logging import get_run_logger

from nightbridge.bisect.plan import (
    BisectPlan,
    BisectRequest,
    ListInner,
    Repository,
    check_named,
    keep_plan,
    load_plan,
    make_bisect_plan,
    point_key,
)
from nightbridge.bisect.result import BisectResult, Point, evaluate, price_of, result_lines, stored_points
from nightbridge.bisect.shift import decisions_of, find_rows, requested_shift
from nightbridge.errors import DamagedData
from nightbridge.harvest.manifest import load_record
from nightbridge.history.nightly_values import nights_of
from nightbridge.history.rows import HistoryRow, gpu_hours
from nightbridge.models import GitRepo, Outcome, RunRecord, Site, Verdict
from nightbridge.nights.records import read_verdict
from nightbridge.slurm.attempt_files import may_have_job, read_ended
from nightbridge.slurm.factory import cluster_of
from nightbridge.store.object_store import ObjectStore
from nightbridge.tasks.prefect_calls import show_markdown
from nightbridge.tasks.site_access import commit_named, commits_between, open_bumps, store_of
from nightbridge.tasks.stage import never_reused, stage


@stage("bisect-plan")
def plan_bisect(test_id: str, request: BisectRequest, site: Site) -> BisectPlan:
    """Find the change in the test's history and the commits that may have done it; the first such plan holds.

    A request that names a bisect resumes it. How many runs it may take, and how sure it has to be, are the request's.
    """
    plan = keep_plan(store_of(site), find_plan(test_id, request, site))
    get_run_logger().info("bisect %s: %d commits; the same id resumes it", plan.bisect_id, len(plan.all_commits))
    return plan


def find_plan(test_id: str, request: BisectRequest, site: Site) -> BisectPlan:
    """What a request would search, or searches already. Nothing is written."""
    store = store_of(site)
    if request.bisect_id:
        plan = load_plan(store, request.bisect_id)
        check_named(plan, test_id, site.cluster.name, request)
        return plan.model_copy(update={"policy": request.policy})
    every = find_rows(store, test_id, site.cluster.name, request)
    series = nights_of(every)[-1].own.series
    rows = [row for row in every if row.series == series]
    verdicts = partial(verdict_of, store)
    return make_bisect_plan(
        rows,
        partial(commits_between, site),
        verdicts,
        request,
        requested_shift(rows, verdicts, request.metric, decisions_of(store, rows)),
        inner_of=partial(inner_of, store, site),
        repo_of=partial(repo_of, store),
        commit_named=partial(commit_named, site),
    )


def price(test_id: str, request: BisectRequest, site: Site) -> str:
    """What a bisect will about cost, its earlier runs taken off; said before it begins.

    Each run is taken to be as long as the longer one of both nights: a bad one may have died at once.
    """
    store, plan = store_of(site), find_plan(test_id, request, site)
    base = load_record(store, plan.base)
    if base is None:
        return ""
    return price_of(plan, stored_points(store, plan, base), dearer(store, plan.good_run, base))


def dearer(store: ObjectStore, good: str, bad: RunRecord) -> RunRecord:
    """The good run, by its prefix, or the bad one: what took more GPU-hours. One that is gone or damaged does not."""
    found = None
    with suppress(DamagedData):
        found = load_record(store, good) if good else None
    return max(bad, found or bad, key=lambda record: gpu_hours(record) or 0.0)


def verdict_of(store: ObjectStore, row: HistoryRow) -> Verdict | None:
    """The stored verdict of a run in the history."""
    return read_verdict(store, row.run_key, row.night)


def inner_of(store: ObjectStore, site: Site, row: HistoryRow, repository: Repository) -> ListInner | None:
    """What lists the commits inside bumps, where a run had the submodules of a repository checked out."""
    repo = repo_of(store, row, repository)
    return partial(open_bumps, site, repo.url) if repo and repo.init_submodules else None


def repo_of(store: ObjectStore, row: HistoryRow, repository: Repository) -> GitRepo | None:
    """A repository as a stored run named it; None where the run is not stored any more."""
    record = load_record(store, row.prefix) if row.prefix else None
    if record is None:
        return None
    test = record.spec.test
    return {"megatron_bridge": test.megatron_bridge, "nemo_run": test.nemo_run_repo}[repository]


@stage("bisect-base", key=never_reused)
def base_run(plan: BisectPlan, site: Site) -> RunRecord:
    """The bad night's own run, whose configuration and other pins all points have."""
    return stored_base(plan.base, site, advice="Name another range")


def stored_base(prefix: str, site: Site, advice: str) -> RunRecord:
    """The run that all others repeat.

    Raises:
        DamagedData: It is not stored any more.
    """
    store = store_of(site)
    record = load_record(store, prefix)
    if record is None:
        raise DamagedData("the bad night's run is gone", subject=store.url_of(prefix), advice=advice)
    return record


def begun_points(plan: BisectPlan, base: RunRecord, points: Sequence[Point], site: Site) -> tuple[tuple[int, int], ...]:
    """Place and number of the runs that an earlier process has submitted and that have no verdict.

    There may be room for another number of runs now than there was then: others would be chosen, and these lost.
    """
    ended = {point.run_key for point in points}
    folders = (each for each in (site.workspace / "runs").glob(f"*-{plan.bisect_id}-*") if each.name not in ended)
    open_ones = {folder.name for folder in folders if any(map(_is_open, folder.glob("a[1-9]*")))}
    most = len(open_ones) + max((point.number for point in points), default=0) if open_ones else 0
    runs = ((place, number) for number in range(1, most + 1) for place in plan.places)
    return tuple(run for run in runs if point_key(plan, base, *run) in open_ones)


def _is_open(attempt_dir: Path) -> bool:
    """Whether an attempt has a job, or may have one, that nobody has cancelled."""
    ended = read_ended(attempt_dir)
    return may_have_job(attempt_dir) and (ended is None or ended.outcome is not Outcome.CANCELLED)


def room_for(base: RunRecord, site: Site, most: int) -> int:
    """How many points to run at once: as many as the cluster would start now."""
    return max(1, min(most, cluster_of(site).available_slots(base.plan.nodes)))


@stage("bisect-result", key=never_reused)
def keep_result(plan: BisectPlan, points: tuple[Point, ...], site: Site) -> BisectResult:
    """Keep the answer with its evidence, and show it."""
    store = store_of(site)
    result = evaluate(plan, points)
    store.put(f"bisects/{plan.bisect_id}/result.json", result.model_dump_json(indent=2).encode() + b"\n")
    show_answer(result_lines(result), "bisect", key=f"bisect-{plan.bisect_id}", description=f"Bisect of {plan.test_id}")
    return result


def show_answer(lines: Sequence[str], search: str, *, key: str, description: str) -> None:
    """Show the answer of a search as an artifact, and in the log."""
    text = "```\n" + "\n".join(lines).replace("```", "'''") + "\n```\n"
    show_markdown(f"the {search}'s answer", text, key=key, description=description)
    for line in lines:
        get_run_logger().info("%s", line)
