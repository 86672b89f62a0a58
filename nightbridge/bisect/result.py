"""What bisect has found so far: the points that were run, the answer that they support, and their cost."""

import itertools
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from pydantic import Field

from nightbridge.bisect.plan import BUMPS, RANGES, RUNS_OF_A_POINT, BisectPlan, Step, point_key, short_name
from nightbridge.bisect.search import Culprit, Failure, Measured
from nightbridge.bisect.shift import SearchTarget, failure_of, metric_named
from nightbridge.harvest.manifest import load_record
from nightbridge.history.nightly_values import BROKEN
from nightbridge.history.rows import gpu_hours, measured, other_losses
from nightbridge.models import Model, RunRecord, StoredModel, Verdict, VerdictStatus
from nightbridge.models.base import slug_in
from nightbridge.models.metrics import label_of
from nightbridge.numbers import format_change, format_count, format_value
from nightbridge.store.object_store import ObjectStore, read_stored

# No evidence about the commit: the point is run again.
NOTHING_SAID = frozenset({VerdictStatus.INFRASTRUCTURE, VerdictStatus.CANCELLED})

TRIES = 3
"""Runs of a point, one after the other, that say nothing before it is given up: lost, or broken unlike others."""

_ADVICE = "Delete it; the same command runs the point again"


class SearchRun(Model):
    """A run of a search, and what it measured."""

    number: int
    run_key: str
    status: VerdictStatus
    value: float | None = None
    gpu_seconds: float = 0.0
    nodes: str = ""


class Point(SearchRun):
    """One run of a bisect."""

    place: int


class BisectResult(StoredModel):
    """The answer, and what it rests on."""

    plan: BisectPlan
    answer: Culprit
    points: tuple[Point, ...]
    skipped: tuple[int, ...] = Field((), description="Places that do not run, so that nothing was measured there.")

    @property
    def culprits(self) -> tuple[Step, ...]:
        """The commit that was found: more than one where those between could not be run, none while undecided.

        Two that share the change are both here.
        """
        commits = self.plan.all_commits
        return tuple(commits[place - 1] for place in self.culprit_places)

    @property
    def culprit_places(self) -> tuple[int, ...]:
        """The places of the culprits."""
        found = self.answer
        if found.kind != "found":
            return ()
        second = range(found.second[0], found.second[1] + 1) if found.second else ()
        return (*range(found.first, found.last + 1), *second)

    @property
    def gpu_hours(self) -> float:
        """What all points cost."""
        return sum(point.gpu_seconds for point in self.points) / 3600.0


def point_of(plan: BisectPlan, place: int, number: int, verdict: Verdict, record: RunRecord | None) -> Point:
    """The measurement of a point's run, by its verdict and, where it was harvested, its record."""
    return Point(place=place, number=number, **measured_by(plan, verdict, record))


def stored_points(store: ObjectStore, plan: BisectPlan, base: RunRecord) -> tuple[Point, ...]:
    """Every point of the plan that an earlier process has finished, by one listing and two reads for each.

    Raises:
        DamagedData: A stored run or its verdict is not what was committed.
    """
    # The longer a night's name, the less of the test's stands before it.
    folder = f"runs/{slug_in(point_key(plan, base, 0, 1), plan.bisect_id)}/{plan.bisect_id}/"
    stored = {
        parts[-2]: found.key for found in store.list(folder) if (parts := found.key.split("/"))[-1] == "verdict.json"
    }
    if not stored:
        return ()
    points = []
    for place in plan.places:
        # Of a place more than the policy allows, where an earlier request's allowed more.
        for number in range(1, max(plan.policy.most_runs, len(stored)) + 1):
            key = stored.get(point_key(plan, base, place, number))
            verdict = read_stored(store, key, Verdict, what="not a verdict", advice=_ADVICE) if key else None
            if verdict is not None:
                points.append(point_of(plan, place, number, verdict, load_record(store, verdict.prefix)))
    return tuple(points)


def evaluate(plan: BisectPlan, points: Sequence[Point]) -> BisectResult:
    """Sum up all points."""
    measured, given_up = _measured(points, plan.known), _given_up(points)
    found = plan.search.answer(measured, given_up)
    skipped = given_up - {one.place for one in measured}
    return BisectResult(plan=plan, answer=found, points=tuple(points), skipped=tuple(sorted(skipped)))


def next_points(plan: BisectPlan, points: Sequence[Point], at_once: int) -> tuple[tuple[int, int], ...]:
    """Place and number of the runs to start next; empty when bisect has ended.

    Raises:
        InvalidInput: No commit of the range can be run.
    """
    left = plan.policy.most_runs - len(plan.known) - len(points)
    places = plan.search.next_places(_measured(points, plan.known), _given_up(points), max(1, min(at_once, left)))
    places = places or _second_try(plan, points)
    used = {(point.place, point.number) for point in points}
    chosen = []
    for place in places if left > 0 else ():
        number = next(number for number in range(1, RUNS_OF_A_POINT) if (place, number) not in used)
        used.add((place, number))
        chosen.append((place, number))
    return tuple(chosen)


def _second_try(plan: BisectPlan, points: Sequence[Point]) -> tuple[int, ...]:
    """The middle one of several commits that would be named together because those between them failed once.

    So is an end that failed once and leaves open whether the commits beside it did it. A build may fail by chance.
    Where one of them has failed twice, that range is taken to be broken.
    """
    found = evaluate(plan, points)
    tries = Counter(point.place for point in points if point.status not in NOTHING_SAID)
    beside_end = range(found.answer.first - 1, found.answer.last + 1) if found.answer.last else ()
    in_doubt = found.culprit_places or beside_end
    between = [place for place in in_doubt if place in found.skipped]
    once = [place for place in between if tries[place] == 1]
    return (once[len(once) // 2],) if once and max(tries[place] for place in between) == 1 else ()


def price_of(plan: BisectPlan, points: Sequence[Point], base: RunRecord) -> str:
    """What a bisect will about cost: `6 runs of 10 min on 8 nodes = 64 GPU-hours`, and `most_runs` would at most.

    A change that stands out of the noise takes about so many; one that hardly does may take them all.

    Args:
        plan: What is searched.
        points: The runs that it has already.
        base: The run as long as which each further one is taken to be.
    """
    runs = _runs_ahead(plan, points)
    hours = gpu_hours(base) or 0.0
    minutes = 60.0 * hours / (base.plan.nodes * base.plan.tasks_per_node)
    on = format_count(base.plan.nodes, "node")
    most = max(runs, plan.policy.most_runs - len(plan.known) - len(points))
    about = f"{format_count(runs, 'run')} of {minutes:.3g} min on {on} = {runs * hours:.3g} GPU-hours"
    return f"{about}, at most {format_count(most, 'run')} = {format_value(most * hours, 'GPU-hours')}"


def _runs_ahead(plan: BisectPlan, points: Sequence[Point]) -> int:
    """How many runs find a commit in the middle where each measures its own side's level."""
    levels, middle = plan.levels, len(plan.all_commits) // 2 + 1
    good, bad = (0.0, 1.0) if isinstance(levels, Failure) else (levels.good, levels.bad)
    tried = list(points)
    while chosen := next_points(plan, tried, 1):
        for place, number in chosen:
            value = bad if place >= middle else good
            tried.append(Point(place=place, number=number, run_key="", status=VerdictStatus.PASSED, value=value))
    return len(tried) - len(points)


def result_lines(result: BisectResult) -> tuple[str, ...]:
    """The answer for a terminal, the commit first, then what it rests on and what it cost."""
    plan = result.plan
    searched = ", ".join(map(str, plan.ranges))
    inner = Counter(step.folder for step in plan.all_commits if step.folder)
    of_submodules = ", ".join(f"{count} of them of {folder}" for folder, count in inner.items())
    lines = [
        f"bisect {plan.bisect_id}: {target_text(plan)} of {plan.test_id} since {plan.since}, "
        f"{format_count(len(plan.all_commits), _noun(plan))}{of_submodules and f' ({of_submodules})'}, {searched}",
        *_answer_lines(result),
        *_disagreements(result),
    ]
    for place, runs in sorted(Counter(one.place for one in _measured(result.points)).items()):
        shown = _shown(plan, place, result)
        lines.append(f"  {_place_name(plan, place)}: {shown}, {format_count(runs, 'run')}")
    lines += [f"  {_place_name(plan, place)}: does not run, skipped" for place in result.skipped]
    if unopened := sum(one.unopened for one in plan.ranges):
        lines.append(
            f"{format_count(unopened, 'bump')} of submodules not searched: the test does not check them out "
            "(init_submodules = false), so that its image brings its own"
        )
    lines.append(f"{format_count(len(result.points), 'run')}, {result.gpu_hours:.2f} GPU-hours")
    return tuple(lines)


def _noun(plan: BisectPlan) -> str:
    return "image" if plan.repository == "image" else "commit"


def target_text(target: SearchTarget) -> str:
    """What is searched: `step time +7.1 %`."""
    if isinstance(target.levels, Failure):
        return target.levels.question
    change = (target.levels.bad - target.levels.good) / abs(target.levels.good)
    return f"{label_of(target.metric)} {format_change(change)}"


def _shown(plan: BisectPlan, place: int, result: BisectResult) -> str:
    """What the runs of a place measured: the median, or how many failed."""
    values = _values_at(place, result)
    if isinstance(plan.levels, Failure):
        return f"{int(sum(values))} of {len(values)} {plan.levels.shown}"
    return format_value(statistics.median(values), plan.unit)


def _values_at(place: int, result: BisectResult) -> list[float]:
    return [one.value for one in _measured(result.points) if one.place == place]


def _answer_lines(result: BisectResult) -> Iterable[str]:
    plan, found = result.plan, result.answer
    sure = f"{100 * min(found.probability, 0.9999):.4g} %"
    good, bad = short_name(plan.commit_at(0)), short_name(plan.commit_at(len(plan.all_commits)))
    other = "" if len(plan.ranges) > 1 else " or the other repository"
    words = {
        "already_bad": f"not among these {_noun(plan)}s: {good} is as bad today ({sure}); "
        f"the cluster, the image{other} changed",
        "still_good": f"not among these {_noun(plan)}s: {bad} is as good as before today ({sure}); "
        "the cause was the cluster or its nodes",
        "undecided": f"undecided after {found.runs} runs: {_likeliest(result)} ({sure})",
    }
    if found.kind in words:
        return [words[found.kind]]
    return [f"{_head(result)} ({sure}):", *(_commit_line(plan, place) for place in result.culprit_places)]


def _likeliest(result: BisectResult) -> str:
    """What is likeliest while it is undecided, or which end has to be another one before it can be decided."""
    plan, first, last, noun = result.plan, result.answer.first, result.answer.last, _noun(result.plan)
    if first > last:
        return f"most likely none of these {noun}s"
    for place, beside, side in ((0, first - 1, "good"), (len(plan.all_commits), last, "bad")):
        if place == beside and place in _given_up(result.points):
            at = f"{noun} {first}" if first == last else f"one of the {noun}s {first} to {last}"
            end = f"the {side} end {short_name(plan.commit_at(place))} does not run"
            return f"{at}, or none, for {end}: name another one with --{side}"
    return f"most likely {noun} {first}"


def _head(result: BisectResult) -> str:
    """What the culprits are."""
    if result.answer.second:
        return f"two {_noun(result.plan)}s share the change"
    if all(step.kind in BUMPS for step in result.culprits):
        return "a commit inside this bump, which cannot be run one by one"
    if len(result.culprits) > 1:
        return f"one of {len(result.culprits)}, those in between do not run"
    return f"the first bad {_noun(result.plan)}"


def _place_name(plan: BisectPlan, place: int) -> str:
    if place == 0:
        return f"good end {short_name(plan.commit_at(0))}"
    folder = plan.all_commits[place - 1].folder
    return f"{_noun(plan)} {place} {f'{folder} ' if folder else ''}{short_name(plan.commit_at(place))}"


def _commit_line(plan: BisectPlan, place: int) -> str:
    one = plan.all_commits[place - 1]
    name = RANGES[plan.range_of(place).repository]
    where = f"{one.folder} " if one.folder else f"{name} " if len(plan.ranges) > 1 else ""
    who = f" ({one.author}, {one.authored_at:%Y-%m-%d %H:%M %z})" if one.author else ""
    return f"  {where}{one.commit} {one.subject}{who}{_lineage(plan, one, name)}"


def _lineage(plan: BisectPlan, one: Step, repository: str) -> str:
    """How a commit of a submodule came, or what of a commit that moves one is meant."""
    size = sum((step.bump, step.folder) == (one.bump, one.folder) for step in plan.all_commits)
    by = f"the bump of {format_count(size, 'commit')} {one.bump[:12]} of {repository}"
    words = {
        "inner": f", inside {by}",
        "nested": f", inside {by}",
        "reverted": f", reverted by {by}",
        "bump": f", {one.bump[:12]} of {repository}",
        "rest": ", by what it does beside its bump",
    }
    return words.get(one.kind, "")


def _disagreements(result: BisectResult) -> Iterable[str]:
    """Ends whose own runs do not agree with each other: they have two speeds, or fail now and then."""
    levels, ends = result.plan.levels, {0: "good", len(result.plan.all_commits): "bad"}
    middle = 0.5 if isinstance(levels, Failure) else (levels.good + levels.bad) / 2
    for place, name in ends.items():
        values = _values_at(place, result)
        beyond = sum(value > middle for value in values)
        if 0 < beyond < len(values):
            few = min(beyond, len(values) - beyond)
            yield f"the runs of the {name} end disagree: {few} of {len(values)} are on the other side"


def measured_by(target: SearchTarget, verdict: Verdict, record: RunRecord | None) -> dict[str, Any]:
    """The fields of a `SearchRun` but its number, by the run's verdict and, where it was harvested, its record."""
    return {
        "run_key": verdict.run_key,
        "status": verdict.status,
        "value": _value_of(target, verdict, record),
        "gpu_seconds": 3600.0 * (gpu_hours(record) or 0.0) if record is not None else 0.0,
        "nodes": record.job.status.nodes if record is not None and record.job.status else "",
    }


def _value_of(target: SearchTarget, verdict: Verdict, record: RunRecord | None) -> float | None:
    """What a run says of its point; None where it says nothing: the cluster lost it, or it failed in another way."""
    if verdict.status in NOTHING_SAID:
        return None
    if isinstance(target.levels, Failure) and not target.levels.digest:
        failed = failure_of(verdict)
        return {None: 0.0, target.levels.signature: 1.0}.get(failed)
    if verdict.status in BROKEN or record is None:
        return None
    if isinstance(target.levels, Failure):
        differs = other_losses(target.levels.digest, record.summary)
        return None if differs is None else float(differs)
    return measured(metric_named(target.metric), record.summary, target.statistic)


def _measured(points: Iterable[Point], known: Sequence[Measured] = ()) -> list[Measured]:
    own = (Measured(place=point.place, value=point.value) for point in points if point.value is not None)
    return [*known, *own]


def _given_up(points: Sequence[Point]) -> frozenset[int]:
    """The places that are not run any more: none of their runs said anything, or the last three did not."""
    found = set()
    for place in {point.place for point in points}:
        own = sorted((point for point in points if point.place == place), key=lambda point: point.number)
        silent = list(itertools.takewhile(lambda point: point.value is None, reversed(own)))
        never = len(silent) == len(own) and any(point.status not in NOTHING_SAID for point in silent)
        if never or len(silent) >= TRIES:
            found.add(place)
    return frozenset(found)
