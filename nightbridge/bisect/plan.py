"""From a stored change to a question that bisect can answer: which commits, which metric, which levels, which run.

The plan is kept in the store, `bisects/<id>/plan.json`, and a bisect with the same id resumes it. Its id is also the
night id of its runs, so that every point is found again, whoever started it.

Its points are the commits of a range, those of submodules among them. A commit that moves a submodule brings all of the
submodule's commits between two pins at once. Each is a point of its own: the tree of the commit before, with the
submodule there. What the commit does besides comes last; one that only moves the pointer does nothing besides, so that
it is never the one that did it. Where the two pins are on different branches, the way between them leads over their
merge base: first the old side's commits are reverted, the newest first, then those of the new side come.
"""

import hashlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Literal

from pydantic import Field

from nightbridge.bisect.search import Measured, Search, prior_of_nights
from nightbridge.bisect.shift import (
    FAILURE,
    SearchRequest,
    SearchTarget,
    Shift,
    VerdictOf,
    metric_named,
    requested_shift,
)
from nightbridge.errors import InvalidInput
from nightbridge.gate.control_arm import run_at
from nightbridge.history.nightly_values import night_value, nights_of
from nightbridge.history.rows import COMPLETE_OUTCOMES, HistoryRow, Pin
from nightbridge.models import GOOD_VERDICTS, Bump, GitRepo, Model, RangeCommit, RunRecord, RunSpec, StoredModel
from nightbridge.store.object_store import ObjectStore, read_stored

Repository = Literal["megatron_bridge", "nemo_run"]
REPOSITORIES: dict[Repository, str] = {"megatron_bridge": "Megatron-Bridge", "nemo_run": "NeMo-Run"}

Searched = Literal[Repository, "image"]
RANGES: Mapping[Searched, str] = {"megatron_bridge": "Megatron-Bridge", "nemo_run": "NeMo-Run", "image": "image"}
"""Everything that has points between a good and a bad one, as results call it."""

ListInner = Callable[[RangeCommit], RangeCommit]
"""Lists the commits inside the bumps of a commit."""

StepKind = Literal["commit", "inner", "nested", "reverted", "bump", "rest"]

BUMPS: frozenset[StepKind] = frozenset({"bump", "nested"})
"""Points that bring commits which are no points of their own: something in one did it, not the bump."""

FindCommits = Callable[[str, str, str], tuple[RangeCommit, ...]]
"""Repository address, good and bad commit to the commits after the good one, oldest first."""

CommitNamed = Callable[[str, str], str]
"""Repository address and any name of a commit to the full commit."""

InnerOf = Callable[[HistoryRow, Repository], ListInner | None]
"""What lists a repository's submodules' commits; None where a run did not have them checked out."""

RepoOf = Callable[[HistoryRow, Repository], GitRepo | None]
"""A repository as a run named it; None where that is not known any more."""

ROOT = "bisects"

RUNS_OF_A_POINT = 1000
"""More than any point is ever given; the number of a point's run is `place * RUNS_OF_A_POINT + n`."""


class Step(RangeCommit):
    """One point of a range: what it has that the point before has not."""

    kind: StepKind = Field(
        "commit",
        description="A commit of the repository; one of a submodule that came with a bump, one that only moves "
        "submodules of its own, or one that was reverted with it; a bump whose commits cannot be listed; or what a "
        "commit does beside its bumps.",
    )
    folder: str = Field("", description="The submodule that it is a commit of; empty for the repository's own.")
    bump: str = Field("", description="The repository's commit that moved the submodule.")
    tree: str = Field("", description="The repository's commit that is checked out; its own when empty.")
    moved: dict[str, str] = Field({}, description="Submodules of that tree at other commits, by folder.")

    @property
    def checked_out(self) -> str:
        """The repository's commit that a run of this point has."""
        return self.tree or self.commit


class SearchedRange(Model):
    """The commits of one repository that are searched."""

    repository: Searched
    url: str
    good: str
    bad: str
    commits: tuple[Step, ...] = Field(
        description="What came after `good`, up to `bad`, oldest first: commits, and those of submodules."
    )
    unopened: int = Field(0, description="Commits that move submodules which the runs do not check out.")
    former: GitRepo | None = Field(None, description="Of a repository that moved since: as the good run named it.")
    moved: dict[str, str] = Field({}, description="At the good end, submodules at other commits than its tree pins.")

    def __str__(self) -> str:
        return f"{RANGES[self.repository]} {short_name(self.good)}..{short_name(self.bad)}"


def short_name(point: str) -> str:
    """A commit by 12 digits, an image without its registry or folder."""
    return point[:12] if re.fullmatch("[0-9a-f]{40}", point) else point.rpartition("/")[2]


class BisectRequest(SearchRequest):
    """What to search for the first bad commit. What is left out is found in the test's history."""

    repository: Repository | None = Field(None, description="Which repository; each whose commit changed when unset.")
    good: str | None = Field(
        None,
        description="Commit to start after, any name of it, as it is when the search begins; that of the last night "
        "with the old level when unset.",
    )
    bad: str | None = Field(
        None,
        description="Commit to end with, named in the same way; that of the first night with the new level when unset.",
    )
    bisect_id: str | None = Field(
        None, description="Resume this bisect, however the history has grown; the same search has the same id."
    )


DEFAULT_REQUEST = BisectRequest()


class BisectPlan(SearchTarget, SearchedRange, StoredModel):
    """What is searched: the first range's fields are its own. Only its policy changes once the first run was started.

    The places of several ranges follow each other: a later range's commits run on the bad end of the ones before it.
    """

    bisect_id: str
    others: tuple[SearchedRange, ...] = Field((), description="Further repositories, in the order of their places.")
    prior: tuple[float, ...]
    base: str
    good_run: str = Field("", description="Prefix of the last good run; empty in an older plan.")
    known: tuple[Measured, ...] = Field((), description="What runs that were made for another question say of it.")

    @property
    def ranges(self) -> tuple[SearchedRange, ...]:
        """Every range, in the order of the places."""
        first = {name: getattr(self, name) for name in SearchedRange.model_fields}
        return (SearchedRange.model_validate(first), *self.others)

    @property
    def all_commits(self) -> tuple[Step, ...]:
        """The commits of all ranges: that of place n is number n - 1."""
        return tuple(commit for one in self.ranges for commit in one.commits)

    @property
    def search(self) -> Search:
        """The decisions over these commits."""
        return Search(len(self.all_commits), self.levels, self.prior, self.policy)

    @property
    def places(self) -> range:
        """Every place that can be measured: 0 is where every range is at its good commit."""
        return range(len(self.all_commits) + 1)

    def range_of(self, place: int) -> SearchedRange:
        """The range that the commit of a place belongs to; of place 0 the first one."""
        owners = [one for one in self.ranges for _commit in one.commits]
        return owners[max(place - 1, 0)]

    def pins_at(self, place: int) -> dict[str, str]:
        """The commit of each repository at a place, and of submodules that are elsewhere than it pins (`run_at`)."""
        pins: dict[str, str] = {}
        for one in self.ranges:
            within = max(min(place, len(one.commits)), 0)
            step = one.commits[within - 1] if within else None
            pins[one.repository] = step.checked_out if step else one.good
            moved = step.moved if step else one.moved
            pins |= {f"{one.repository}/{folder}": commit for folder, commit in moved.items()}
            place -= len(one.commits)
        return pins

    def former_at(self, place: int) -> dict[str, GitRepo]:
        """Of the repositories that moved, those that a place is of before, as the good run named them."""
        found: dict[str, GitRepo] = {}
        for one in self.ranges:
            if one.former and (place <= 0 or any(step.url for step in one.commits[place - 1 : place])):
                found[one.repository] = one.former
            place -= len(one.commits)
        return found

    def commit_at(self, place: int) -> str:
        """The commit of a place."""
        return self.all_commits[place - 1].commit if place else self.good


def make_bisect_plan(
    rows: Sequence[HistoryRow],
    find_commits: FindCommits,
    verdict_of: VerdictOf,
    request: BisectRequest = DEFAULT_REQUEST,
    shift: Shift | None = None,
    inner_of: InnerOf = lambda row, repository: None,
    repo_of: RepoOf = lambda row, repository: None,
    commit_named: CommitNamed = lambda url, name: name,
) -> BisectPlan:
    """Find the change and the commits that may have done it.

    Args:
        rows: The rows of one series.
        find_commits: Lists the commits of a range.
        verdict_of: Reads a run's verdict, which says how it failed.
        request: What to search.
        shift: What became worse, where that is known.
        inner_of: Whether submodules are searched as well, and what lists their commits.
        repo_of: Reads how the good run named a repository that moved since.
        commit_named: What a name of an end means now; a branch may move while it is searched.

    Raises:
        InvalidInput: Nothing became worse, or no commit changed.
    """
    shift = shift or requested_shift(rows, verdict_of, request.metric)
    ranges = _ranges(shift, rows, find_commits, request, inner_of, repo_of, commit_named)
    ends = [end for one in ranges for end in (one.repository, one.good, one.bad)]
    # A search that was planned over the same ends without their submodules has other places.
    ends += ["with submodules"] if any(step.folder for one in ranges for step in one.commits) else []
    identity = "\n".join((shift.bad.series, *ends, shift.metric, shift.statistic))
    digest = hashlib.sha256(identity.encode()).hexdigest()[:8]
    # Of a failure, and of several repositories, the nights between both say nothing: all commits are alike.
    inside = _nights_inside(rows, shift, ranges[0]) if len(ranges) == 1 and shift.statistic else []
    return BisectPlan(
        bisect_id=f"{shift.bad.night[:23].rstrip('-')}-bisect-{digest}",
        **shift.target_fields(request.policy),
        **dict(ranges[0]),
        others=ranges[1:],
        prior=prior_of_nights(sum(len(one.commits) for one in ranges), shift.levels, inside, request.policy),
        base=shift.bad.prefix,
        good_run=shift.good.prefix,
    )


def keep_plan(store: ObjectStore, plan: BisectPlan) -> BisectPlan:
    """Keep a plan, and return the one that holds: the first that was kept under this id, by this one's policy."""
    store.put_if_absent(_key(plan.bisect_id), plan.model_dump_json(indent=2).encode() + b"\n")
    return load_plan(store, plan.bisect_id).model_copy(update={"policy": plan.policy})


def load_plan(store: ObjectStore, bisect_id: str) -> BisectPlan:
    """Read a plan.

    Raises:
        InvalidInput: There is no bisect of this id.
        DamagedData: It cannot be read.
    """
    key = _key(bisect_id)
    plan = read_stored(store, key, BisectPlan, what="not a bisect plan", advice="Delete it to start over")
    if plan is None:
        raise InvalidInput("no bisect of this id", subject=store.url_of(key), advice="Check the id and the store")
    return plan


def check_named(plan: BisectPlan, test_id: str, cluster: str, request: BisectRequest) -> None:
    """That a bisect which a request names searches what the rest of the request says.

    Raises:
        InvalidInput: It searches something else.
    """
    own = {"test": plan.test_id, "cluster": plan.cluster}
    requested = {"test": test_id, "cluster": cluster}
    others = [f"{name} {own[name]}, not {value}" for name, value in requested.items() if value != own[name]]
    named = ("metric", "good", "bad", "repository", "run_key")
    others += [f"a question of its own, and takes no {name}" for name in named if getattr(request, name)]
    if others:
        advice = "Leave the id out for another question"
        raise InvalidInput(f"this bisect has {others[0]}", subject=plan.bisect_id, advice=advice)


def point_run(plan: BisectPlan, base: RunRecord, place: int, number: int) -> RunSpec:
    """The run of a point: the configuration and the other pins of the bad night, at the point's commit.

    `base` is the bad night's own run; `number` counts the runs of the place from 1.
    """
    again = searched_run(run_at(base, plan.pins_at(place), plan.former_at(place)), plan, base)
    return again.model_copy(update=_name_of_point(plan, place, number))


def point_key(plan: BisectPlan, base: RunRecord, place: int, number: int) -> str:
    """The key of that run, without the run: of a long range there are a hundred thousand of them."""
    return base.spec.model_copy(update=_name_of_point(plan, place, number)).run_key


def _name_of_point(plan: BisectPlan, place: int, number: int) -> dict[str, str | int]:
    return {"night": plan.bisect_id, "repeat": place * RUNS_OF_A_POINT + number}


def searched_run(run: RunSpec, target: SearchTarget, bad: RunRecord) -> RunSpec:
    """A run of the bad night's as a search repeats it: by itself, and with nothing to fail by but what is searched.

    The jobs that it depended on are over, and the files of its golden values may have been moved or replaced since.
    """
    # A job that failed did so without golden values; where it ended well, these may be what the run failed by.
    may_be_golden = target.metric == FAILURE and bad.job.outcome in COMPLETE_OUTCOMES
    gate = run.test.gate if may_be_golden else run.test.gate.without_golden()
    return run.model_copy(update={"test": run.test.model_copy(update={"gate": gate}), "after": ()})


def _key(bisect_id: str) -> str:
    return f"{ROOT}/{bisect_id}/plan.json"


def _ranges(
    shift: Shift,
    rows: Sequence[HistoryRow],
    find_commits: FindCommits,
    request: BisectRequest,
    inner_of: InnerOf,
    repo_of: RepoOf,
    commit_named: CommitNamed,
) -> tuple[SearchedRange, ...]:
    """What changed between both nights, repository by repository; or what the user named."""
    pins: dict[Repository, tuple[Pin, Pin]] = {
        name: (before, after)
        for name in REPOSITORIES
        if (before := getattr(shift.good, name)) and (after := getattr(shift.bad, name))
    }
    changed = [name for name, (before, after) in pins.items() if before.commit != after.commit]
    if request.repository:
        changed = [request.repository]
    elif request.good or request.bad:
        # Ends that a user names are those of one repository.
        changed = changed[:1] or ["megatron_bridge"]
    if not changed:
        raise InvalidInput(
            "no commit changed with it",
            subject=f"{shift.label} of {shift.good.test_id} since {shift.since}",
            advice="Use `nightbridge attribute`: it exchanges image, configuration, environment and nodes as well",
        )
    found = []
    for name in changed:
        if name not in pins:
            raise InvalidInput(f"no {REPOSITORIES[name]} in these runs", subject=shift.bad.run_key)
        before, after = pins[name]
        good = commit_named(after.url, request.good) if request.good else before.commit
        bad = commit_named(after.url, request.bad) if request.bad else after.commit
        if good == bad:
            raise InvalidInput(
                f"{REPOSITORIES[name]} had the same commit before and after",
                subject=f"{shift.good.test_id} since {shift.since}",
                advice="Use `nightbridge attribute` for image, configuration and nodes, or name --good and --bad",
            )
        older = () if request.good else _older_good_commits(rows, shift, name)
        good, commits = _newest_ancestor((good, *older), bad, partial(find_commits, after.url))
        former = repo_of(shift.good, name) if before.url != after.url else None
        if former is None and any(one.url for one in commits):
            raise InvalidInput(
                "how its commits before the repository moved are run is unknown: the good run is not stored any more",
                subject=f"{REPOSITORIES[name]} {short_name(good)}..{short_name(bad)}",
                advice="Name a commit since the move with --good",
            )
        searched = range_of_steps((name, after.url, good, bad), commits, inner_of(shift.bad, name))
        found.append(searched.model_copy(update={"former": former}))
    if not any(one.commits for one in found):
        raise InvalidInput(
            "only submodules moved, and the runs do not check them out: the image brings its own",
            subject=", ".join(map(str, found)),
            advice="Look at the image, or set init_submodules = true in the test",
        )
    return tuple(one for one in found if one.commits)


def _older_good_commits(rows: Sequence[HistoryRow], shift: Shift, name: Repository) -> list[str]:
    """The commits of a repository in the good nights before the shift's, the newest first."""
    before = [night.own for night in nights_of(rows) if night.own.order < shift.good.order]
    pins = [getattr(row, name) for row in reversed(before) if row.verdict in GOOD_VERDICTS]
    return list(dict.fromkeys(pin.commit for pin in pins if pin))


def _newest_ancestor(
    goods: Sequence[str], bad: str, find_commits: Callable[[str, str], tuple[RangeCommit, ...]]
) -> tuple[str, tuple[RangeCommit, ...]]:
    """The first of the good commits that the bad one descends from, and the commits after it.

    A test may have been pinned to an older commit, so that the last good night is newer than the bad one.

    Raises:
        InvalidInput: The bad commit descends from none of them; said of the first.
    """
    problem: InvalidInput | None = None
    for good in goods:
        try:
            if good != bad and (commits := find_commits(good, bad)):
                return good, commits
        except InvalidInput as error:
            problem = problem or error
    raise problem or InvalidInput("no commits between them", subject=f"{goods[0][:12]}..{bad[:12]}")


def _nights_inside(rows: Sequence[HistoryRow], shift: Shift, searched: SearchedRange) -> list[Measured]:
    """Nights whose pin lies inside the range: they order the search."""
    metric = metric_named(shift.metric)
    places = {one.checked_out: place for place, one in enumerate(searched.commits, start=1) if not one.moved}
    found = []
    for night in nights_of(rows):
        pin: Pin | None = getattr(night.own, searched.repository)
        place = places.get(pin.commit) if pin else None
        value = night_value(night, metric, shift.statistic)
        if place is not None and place < len(searched.commits) and value is not None:
            found.append(Measured(place=place, value=value))
    return found


# --- the points of a range -------------------------------------------------------------------------------------------


def range_of_steps(
    ends: tuple[Repository, str, str, str], commits: Sequence[RangeCommit], list_inner: ListInner | None
) -> SearchedRange:
    """A range with its points. `ends`: repository, address, good and bad commit; for the others see `steps_of`."""
    repository, url, good, bad = ends
    steps = steps_of(good, commits, list_inner)
    unopened = 0 if list_inner else sum(bool(one.bumps) for one in commits)
    return SearchedRange(repository=repository, url=url, good=good, bad=bad, commits=steps, unopened=unopened)


def steps_of(good: str, commits: Sequence[RangeCommit], list_inner: ListInner | None) -> tuple[Step, ...]:
    """The points of a range, oldest first; the last one is the tree of the range's last commit.

    Args:
        good: The commit before the range.
        commits: Of the repository, oldest first.
        list_inner: What lists the commits of submodules; None where runs do not have them checked out: what moves
            only these changes nothing then, and is no point.
    """
    steps: list[Step] = []
    for commit in commits:
        if list_inner is not None:
            steps += _opened(good, list_inner(commit) if commit.bumps else commit)
        elif not commit.only_bumps:
            steps.append(_step(commit, kind="commit"))
        good = commit.commit
    return tuple(steps)


def _opened(before: str, commit: RangeCommit) -> list[Step]:
    """The points of a commit: first its submodules move one after the other, then comes what it does besides."""
    steps, moved = [], dict[str, str]()
    for bump in commit.bumps:
        for kind, new, at in _way(bump, commit):
            moved = {**moved, bump.folder: at}
            about = {"kind": kind, "folder": bump.folder, "bump": commit.commit, "tree": before, "moved": moved}
            steps.append(_step(new, **about, url=commit.url))
    if steps and commit.only_bumps:
        # All that it does is done: this point is the commit itself.
        steps[-1] = steps[-1].model_copy(update={"tree": commit.commit, "moved": {}})
        return steps
    return [*steps, _step(commit, kind="rest" if steps else "commit")]


def _way(bump: Bump, commit: RangeCommit) -> Iterator[tuple[StepKind, RangeCommit, str]]:
    """The points inside a bump: of each its kind, what is new in it, and where the submodule is."""
    if not (bump.commits or bump.reverted):
        whole = commit.model_copy(update={"commit": bump.after, "subject": f"{bump}: {bump.note}"})
        yield "bump", whole, bump.after
        return
    left = [bump.base, *(one.commit for one in bump.reverted)]
    for one, at in zip(reversed(bump.reverted), reversed(left[:-1]), strict=True):
        yield "reverted", one, at
    for one in bump.commits:
        # A submodule's own submodules come as its commits pin them: one that only moves these says which.
        if one.only_bumps:
            subject = f"{', '.join(map(str, one.bumps))}: {one.subject}"
            yield "nested", one.model_copy(update={"subject": subject}), one.commit
        else:
            yield "inner", one, one.commit


def _step(commit: RangeCommit, **about: object) -> Step:
    return Step.model_validate(
        {**commit.model_dump(include={"commit", "subject", "author", "authored_at", "url"}), **about}
    )
