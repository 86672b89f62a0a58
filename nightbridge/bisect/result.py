"""What bisect has found so far: the points that were run, the answer that they support, and their cost."""

from collections.abc import Iterable, Sequence

from nightbridge.bisect.plan import (
    REPOSITORIES,
    RUNS_OF_A_POINT,
    BisectPlan,
    metric_named,
    point_run,
)
from nightbridge.bisect.search import Answer, Measured, medians
from nightbridge.harvest.manifest import load_record
from nightbridge.history.metrics import format_change, format_count, format_value, measured
from nightbridge.models import Model, RangeCommit, RunRecord, StoredModel, Verdict, VerdictStatus
from nightbridge.store.protocol import ObjectStore, read_stored

# No evidence about the commit: the point is run again.
NOTHING_SAID = frozenset({VerdictStatus.INFRASTRUCTURE, VerdictStatus.CANCELLED})
# The commit does not run: it is skipped.
DOES_NOT_RUN = frozenset({VerdictStatus.FAILED, VerdictStatus.SHORT, VerdictStatus.INVALID})

TRIES = 3
"""Runs of a point that the cluster may lose before the point is given up."""

_ADVICE = "Delete it; the same command runs the point again"


class Point(Model):
    """One run of a bisect."""

    place: int
    number: int
    run_key: str
    status: VerdictStatus
    value: float | None = None
    gpu_seconds: float = 0.0
    nodes: str = ""


class BisectResult(StoredModel):
    """The answer, and what it rests on."""

    plan: BisectPlan
    answer: Answer
    points: tuple[Point, ...]
    skipped: tuple[int, ...] = ()

    @property
    def culprits(self) -> tuple[RangeCommit, ...]:
        """The commit that was found: more than one where those between could not be run, none while undecided."""
        if self.answer.kind != "found":
            return ()
        return self.plan.commits[self.answer.first - 1 : self.answer.last]

    @property
    def gpu_hours(self) -> float:
        """What all points cost."""
        return sum(point.gpu_seconds for point in self.points) / 3600.0


def point_of(plan: BisectPlan, place: int, number: int, verdict: Verdict, record: RunRecord | None) -> Point:
    """The measurement of a point's run.

    Args:
        plan: What is searched.
        place: Which commit it ran.
        number: Which of its runs it is.
        verdict: What the pipeline returned.
        record: The harvested run; None where there is none.
    """
    metric = metric_named(plan.metric)._replace(field=plan.statistic)
    ran = record is not None and verdict.status not in NOTHING_SAID | DOES_NOT_RUN
    return Point(
        place=place,
        number=number,
        run_key=verdict.run_key,
        status=verdict.status,
        value=measured(metric, record.summary) if record is not None and ran else None,
        gpu_seconds=_gpu_seconds(record) if record is not None else 0.0,
        nodes=record.job.status.nodes if record is not None and record.job.status else "",
    )


def stored_points(store: ObjectStore, plan: BisectPlan, base: RunRecord) -> tuple[Point, ...]:
    """Every point of the plan that an earlier process has finished, by one listing and two reads for each.

    Raises:
        DamagedData: A stored run or its verdict is not what was committed.
    """
    folder = f"runs/{point_run(plan, base, 0, 1).test_slug}/{plan.bisect_id}/"
    stored = {
        parts[-2]: found.key for found in store.list(folder) if (parts := found.key.split("/"))[-1] == "verdict.json"
    }
    if not stored:
        return ()
    points = []
    for place in plan.places:
        for number in range(1, plan.policy.most_runs + 1):
            key = stored.get(point_run(plan, base, place, number).run_key)
            verdict = read_stored(store, key, Verdict, what="not a verdict", advice=_ADVICE) if key else None
            if verdict is not None:
                points.append(point_of(plan, place, number, verdict, load_record(store, verdict.prefix)))
    return tuple(points)


def evaluate(plan: BisectPlan, points: Sequence[Point]) -> BisectResult:
    """Sum up all points."""
    skipped = _skipped(points)
    found = plan.search.answer(_measured(points), skipped)
    return BisectResult(plan=plan, answer=found, points=tuple(points), skipped=tuple(sorted(skipped)))


def next_points(plan: BisectPlan, points: Sequence[Point], at_once: int) -> tuple[tuple[int, int], ...]:
    """Place and number of the runs to start next; empty when bisect has ended.

    Raises:
        InvalidInput: No commit of the range can be run.
    """
    left = plan.policy.most_runs - len(points)
    places = plan.search.next_places(_measured(points), _skipped(points), max(1, min(at_once, left)))
    used = {(point.place, point.number) for point in points}
    chosen = []
    for place in places if left > 0 else ():
        number = next(number for number in range(1, RUNS_OF_A_POINT) if (place, number) not in used)
        used.add((place, number))
        chosen.append((place, number))
    return tuple(chosen)


def result_lines(result: BisectResult) -> tuple[str, ...]:
    """The answer for a terminal, the commit first, then what it rests on and what it cost."""
    plan = result.plan
    metric = metric_named(plan.metric)
    change = (plan.levels.bad - plan.levels.good) / abs(plan.levels.good)
    searched = f"{format_count(len(plan.commits), 'commit')} of {REPOSITORIES[plan.repository]}"
    lines = [
        f"bisect {plan.bisect_id}: {metric.label} of {plan.test_id} {format_change(change)} since {plan.since}, "
        f"{searched}, {plan.good[:12]}..{plan.bad[:12]}",
        *_answer_lines(result),
    ]
    for place, (runs, value) in medians(_measured(result.points)).items():
        name = "good end" if place == 0 else f"commit {place}"
        counted = format_count(runs, "run")
        lines.append(f"  {name} {plan.commit_at(place)[:12]}: {format_value(value, plan.unit)}, {counted}")
    lines += [f"  commit {place} {plan.commit_at(place)[:12]}: does not run, skipped" for place in result.skipped]
    lines.append(f"{format_count(len(result.points), 'run')}, {result.gpu_hours:.2f} GPU-hours")
    return tuple(lines)


def _answer_lines(result: BisectResult) -> Iterable[str]:
    plan, found = result.plan, result.answer
    sure = f"{100 * min(found.probability, 0.9999):.4g} %"
    words = {
        "already_bad": f"not among these commits: {plan.good[:12]} is as bad today ({sure}); "
        "the cluster, the image or the other repository changed",
        "still_good": f"not among these commits: {plan.bad[:12]} is as good as before today ({sure}); "
        "the cause was the cluster or its nodes",
        "undecided": f"undecided after {found.runs} runs: most likely commit {found.first} ({sure})",
    }
    if found.kind in words:
        return [words[found.kind]]
    several = len(result.culprits) > 1
    head = f"one of {len(result.culprits)}, those in between do not run" if several else "the first bad commit"
    return [
        f"{head} ({sure}):",
        *(
            f"  {one.commit} {one.subject} ({one.author}, {one.authored_at:%Y-%m-%d %H:%M %z})"
            for one in result.culprits
        ),
    ]


def _measured(points: Iterable[Point]) -> list[Measured]:
    return [Measured(place=point.place, value=point.value) for point in points if point.value is not None]


def _skipped(points: Sequence[Point]) -> frozenset[int]:
    skipped = set()
    for place in {point.place for point in points}:
        own = [point for point in points if point.place == place]
        if any(point.value is not None for point in own):
            continue
        lost = sum(point.status in NOTHING_SAID for point in own)
        if lost < len(own) or lost >= TRIES:
            skipped.add(place)
    return frozenset(skipped)


def _gpu_seconds(record: RunRecord) -> float:
    """GPUs times the time that the jobs of all attempts have run."""
    seconds = 0.0
    for job in record.jobs:
        if job.status and job.status.started_at and job.status.ended_at:
            seconds += (job.status.ended_at - job.status.started_at).total_seconds()
    return seconds * record.plan.nodes * record.plan.tasks_per_node
