"""What an attribution searches, fixed once, and the designs that it has begun: kept in the store, so that it resumes.

    attributions/<cluster>/<series>/<id>/plan.json            the question, and every factor
    attributions/<cluster>/<series>/<id>/designs/<n>.json     the design of run n, written before the run is started
    attributions/<cluster>/<series>/<id>/result.json          the answer

The id is also the night id of the runs, and a design's number their `repeat`: who resumes finds every run. A
change whose cause was searched once is not searched again, however the history has grown.
"""

import hashlib
from collections.abc import Callable, Iterator, Sequence

from pydantic import Field

from nightbridge.attribution.axes import (
    AXIS_WORDS,
    Axis,
    Factor,
    exchanged_run,
    find_factors,
    not_exchanged,
    weights_of,
)
from nightbridge.attribution.factor_search import Design, FactorSearch
from nightbridge.bisect.plan import BisectPlan, ListInner, SearchedRange, Step, searched_run, short_name, steps_of
from nightbridge.bisect.shift import SearchRequest, SearchTarget, Shift, VerdictOf, moved_shift, requested_shift
from nightbridge.errors import DamagedData, InvalidInput
from nightbridge.gate.decisions import Decision
from nightbridge.history.nightly_values import nights_of
from nightbridge.history.rows import HistoryRow
from nightbridge.models import Bump, NightId, RangeCommit, RunRecord, RunSpec, StoredModel, VerdictStatus
from nightbridge.store.object_store import ObjectStore, folder_of_series, read_stored

ROOT = "attributions"

MAX_RUNS = 40
"""Runs that exchange factors at most where nothing else is requested; a search for a commit has as many of its own."""


class AttributionRequest(SearchRequest):
    """What to find the cause of, and what that may cost. What is left out is found in the test's history."""

    good: NightId | None = Field(None, description="The last good night; both nights are named, or neither.")
    bad: NightId | None = Field(None, description="The first bad night.")
    budget: float | None = Field(
        None, gt=0, allow_inf_nan=False, description="GPU-hours after which it ends undecided; no limit when unset."
    )
    most_runs: int = Field(MAX_RUNS, ge=2, description="Runs after which it ends undecided, those of a commit apart.")


DEFAULT_REQUEST = AttributionRequest()


class AttributionPlan(SearchTarget, StoredModel):
    """The question. Nothing in it changes once the first run was started."""

    attribution_id: str
    good_night: str
    bad_night: str
    good_order: str = Field(description="What the good night sorts by.")
    bad_order: str = Field(description="What the bad night sorts by.")
    good: str = Field(description="Prefix of the last good run.")
    bad: str = Field(description="Prefix of the first bad run.")
    factors: tuple[Factor, ...]
    same_nodes: bool = Field(False, description="Whether pairs on the same nodes have shown the change.")
    rest: tuple[str, ...] = Field((), description="What changed as well and is not exchanged.")
    budget: float | None = None

    @property
    def search(self) -> FactorSearch:
        """The decisions over these factors."""
        return FactorSearch(weights_of(self.factors), self.levels, self.policy)

    def overlaps(self, good: str, bad: str) -> bool:
        """Whether the change that it is about may be one between two other nights, by what these sort by."""
        return self.good_order < bad and good < self.bad_order

    @property
    def axes(self) -> tuple[Axis, ...]:
        """The axes that changed, in the order of results."""
        return tuple(axis for axis in AXIS_WORDS if any(factor.axis == axis for factor in self.factors))


class PlannedRun(StoredModel):
    """A design that was begun."""

    number: int
    design: Design


def find_change(
    rows: Sequence[HistoryRow], verdict_of: VerdictOf, request: AttributionRequest, decisions: Sequence[Decision] = ()
) -> Shift:
    """What became worse: between two nights that are named; else in the latest series, or since the one before it.

    `decisions`: users' decisions about the latest series.

    Raises:
        InvalidInput: Nothing did, or one of two nights is missing, or the good one is not before the bad one.
    """
    nights = [night.own for night in nights_of(rows)]
    if request.good or request.bad:
        indices = {night.night: index for index, night in enumerate(nights)}
        if missing := [night or "none" for night in (request.good, request.bad) if night not in indices]:
            raise InvalidInput("no such night in the history", subject=missing[0], advice="Name a good and a bad night")
        good, bad = (indices[night] for night in (request.good or "", request.bad or ""))
        if good >= bad:
            raise InvalidInput(f"it is not before {request.bad}", subject=str(request.good), advice="Swap the nights")
        return moved_shift(rows, nights, good, nights[bad], request.metric, decisions)
    own = [row for row in rows if row.series == nights[-1].series]
    try:
        return requested_shift(own, verdict_of, request.metric, decisions)
    except InvalidInput:
        if len(own) == len(rows):
            raise
    return requested_shift(rows, verdict_of, request.metric, decisions)


def make_attribution_plan(
    rows: Sequence[HistoryRow], shift: Shift, read: Callable[[str], RunRecord | None], request: AttributionRequest
) -> AttributionPlan:
    """Find what changed between both nights. `read` reads the record of a run by its prefix.

    Raises:
        InvalidInput: Nothing that can be exchanged changed.
        DamagedData: One of both runs is not stored any more.
    """
    good, bad = (_record(read, row) for row in (shift.good, shift.bad))
    # Pairs that proved it had both points on the same nodes, one after the other.
    arms = next(night.arms for night in nights_of(rows) if night.own.night == shift.bad.night)
    same_nodes = bool(arms) and shift.bad.verdict is VerdictStatus.REGRESSED
    factors = find_factors(good, bad, same_nodes=same_nodes)
    rest = not_exchanged(good, bad, factors)
    if not factors:
        raise InvalidInput(
            "nothing changed that can be exchanged",
            subject=f"{shift.label} of {shift.good.test_id} between {shift.good.night} and {shift.bad.night}",
            advice=f"Look at the cluster: {'; '.join(rest) or 'no difference is recorded'}",
        )
    identity = "\n".join((shift.bad.series, shift.metric, shift.statistic, shift.good.run_key, shift.bad.run_key))
    digest = hashlib.sha256(identity.encode()).hexdigest()[:8]
    return AttributionPlan(
        attribution_id=f"{shift.bad.night[:17].rstrip('-')}-attribute-{digest}",
        **shift.target_fields(request.policy),
        good_night=shift.good.night,
        bad_night=shift.bad.night,
        good_order=shift.good.order,
        bad_order=shift.bad.order,
        good=shift.good.prefix,
        bad=shift.bad.prefix,
        factors=factors,
        same_nodes=same_nodes,
        rest=rest,
        budget=request.budget,
    )


def plans_of(store: ObjectStore, cluster: str, series: str) -> Iterator[AttributionPlan]:
    """Every attribution of a series, the latest change first.

    Raises:
        DamagedData: One of them cannot be read.
    """
    keys = [item.key for item in store.list(folder_of_series(ROOT, cluster, series)) if item.key.endswith("/plan.json")]
    yield from filter(None, (_read(store, key) for key in reversed(keys)))


def same_change(
    store: ObjectStore, shift: Shift, request: AttributionRequest = DEFAULT_REQUEST
) -> AttributionPlan | None:
    """The attribution that was begun for this change: one between nights that overlap with the change's own.

    Where the request names both nights it is one between these.
    """
    for plan in plans_of(store, shift.bad.cluster, shift.bad.series):
        if request.good and (request.good, request.bad) != (plan.good_night, plan.bad_night):
            continue
        if plan.metric == shift.metric and plan.overlaps(shift.good.order, shift.bad.order):
            return plan
    return None


def keep_plan(store: ObjectStore, plan: AttributionPlan) -> AttributionPlan:
    """Keep a plan, and return the one that holds: the first that was kept under this id, by what this one may cost."""
    key = f"{folder_of(plan)}/plan.json"
    store.put_if_absent(key, plan.model_dump_json(indent=2).encode() + b"\n")
    kept = _read(store, key)
    assert kept is not None  # it was written
    return kept.model_copy(update={"policy": plan.policy, "budget": plan.budget})


def folder_of(plan: AttributionPlan) -> str:
    """Where everything about an attribution is kept."""
    return f"{folder_of_series(ROOT, plan.cluster, plan.series)}/{plan.attribution_id}"


def begun_designs(store: ObjectStore, plan: AttributionPlan) -> tuple[PlannedRun, ...]:
    """Every design that was begun, in the order of their numbers."""
    keys = sorted(item.key for item in store.list(f"{folder_of(plan)}/designs"))
    found = (read_stored(store, key, PlannedRun, what="not a design", advice="Delete it") for key in keys)
    return tuple(each for each in found if each is not None)


def begin_designs(store: ObjectStore, plan: AttributionPlan, designs: Sequence[Design]) -> tuple[PlannedRun, ...]:
    """Write down designs before their runs are started. What another process has just begun under a number holds."""
    first = len(begun_designs(store, plan)) + 1
    for number, design in enumerate(designs, start=first):
        data = PlannedRun(number=number, design=design).model_dump_json().encode()
        store.put_if_absent(f"{folder_of(plan)}/designs/{number:04}.json", data)
    return begun_designs(store, plan)[first - 1 :]


def design_run(plan: AttributionPlan, bad: RunRecord, planned: PlannedRun) -> RunSpec:
    """The run of a design."""
    run = searched_run(exchanged_run(bad, plan.factors, planned.design), plan, bad)
    return run.model_copy(update={"night": plan.attribution_id, "repeat": planned.number})


# --- ranges inside a factor that no commit of a repository makes -----------------------------------------------------


def images_range(factor: Factor, versions: Sequence[str], bad: RunRecord) -> SearchedRange:
    """The range of the images between two. `versions`: what came after the good one, up to the bad one.

    No image has another time than that of the bad run.
    """
    when = bad.job.submitted_at
    before = (factor.good, *versions)
    steps = tuple(
        Step(commit=one, subject=f"after {short_name(old)}", author="", authored_at=when)
        for old, one in zip(before, versions, strict=False)
    )
    return SearchedRange(repository="image", url="", good=factor.good, bad=factor.bad, commits=steps)


def submodule_range(factor: Factor, bad: RunRecord, list_inner: ListInner) -> SearchedRange:
    """The range of a submodule that the test moved: its repository stays where the bad run has it.

    Raises:
        InvalidInput: The commits cannot be listed.
    """
    pinned = bad.checkout.megatron_bridge
    moved = Bump(folder=factor.folder, before=factor.good, after=factor.bad, base=factor.good)
    when = pinned.committed_at or bad.job.submitted_at
    as_one = RangeCommit(
        commit=pinned.commit, subject=pinned.subject, author="", authored_at=when, bumps=(moved,), only_bumps=True
    )
    *steps, last = steps_of(pinned.commit, [as_one], list_inner)
    if last.kind == "bump":
        raise InvalidInput("its commits cannot be listed", subject=factor.name, advice=last.subject)
    # No commit of the repository pins it there, the last of them neither.
    steps = [*steps, last.model_copy(update={"moved": {factor.folder: factor.bad}})]
    return SearchedRange(
        repository="megatron_bridge",
        url=pinned.url,
        good=pinned.commit,
        bad=pinned.commit,
        commits=tuple(step.model_copy(update={"bump": ""}) for step in steps),
        moved={factor.folder: factor.good},
    )


def plan_of_range(plan: AttributionPlan, searched: SearchedRange) -> BisectPlan:
    """The bisect of a range inside a factor, before anything is known of it."""
    count = len(searched.commits)
    return BisectPlan(
        bisect_id=plan.attribution_id,
        base=plan.bad,
        prior=(1 / count,) * count,
        **dict(searched),
        **{name: getattr(plan, name) for name in SearchTarget.model_fields},
    )


def _read(store: ObjectStore, key: str) -> AttributionPlan | None:
    return read_stored(
        store, key, AttributionPlan, what="not an attribution", advice="Delete it to start another search"
    )


def _record(read: Callable[[str], RunRecord | None], row: HistoryRow) -> RunRecord:
    record = read(row.prefix) if row.prefix else None
    if record is None:
        raise DamagedData("the run is not stored any more", subject=row.run_key, advice="Name other nights")
    return record
