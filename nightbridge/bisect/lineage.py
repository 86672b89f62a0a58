"""Lineage: the commits of a range as points that can be run, those of submodules among them.

A commit that moves a submodule brings all of the submodule's commits between two pins at once. Each of them is a point
of its own: the tree of the commit before, with the submodule there. What the commit does besides comes last; one that
only moves the pointer does nothing besides, so that it is never the one that did it.

Where the two pins are on different branches, the way between them leads over their merge base: first the old side's
commits are taken back, the newest first, then those of the new side come.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

from pydantic import Field

from nightbridge.models import Bump, GitRepo, Model, RangeCommit

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


class Step(RangeCommit):
    """One point of a range: what it has that the point before has not."""

    kind: StepKind = Field(
        "commit",
        description="A commit of the repository; one of a submodule that came with a bump, one that only moves "
        "submodules of its own, or one that was taken back with it; a bump whose commits cannot be listed; or what a "
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
    before_move: int = Field(0, description="Of an older plan: commits before the repository moved, not searched.")
    former: GitRepo | None = Field(None, description="Of a repository that moved since: as the good run named it.")
    moved: dict[str, str] = Field({}, description="At the good end, submodules at other commits than its tree pins.")

    def __str__(self) -> str:
        return f"{RANGES[self.repository]} {short_name(self.good)}..{short_name(self.bad)}"


def short_name(point: str) -> str:
    """A commit by 12 digits, an image without its registry or folder."""
    return point[:12] if re.fullmatch("[0-9a-f]{40}", point) else point.rpartition("/")[2]


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
        for point in _way(bump, commit):
            moved = {**moved, bump.folder: point.at}
            about = {"kind": point.kind, "folder": bump.folder, "bump": commit.commit, "tree": before, "moved": moved}
            steps.append(_step(point.of, **about, url=commit.url))
    if steps and commit.only_bumps:
        # All that it does is done: this point is the commit itself.
        steps[-1] = steps[-1].model_copy(update={"tree": commit.commit, "moved": {}})
        return steps
    return [*steps, _step(commit, kind="rest" if steps else "commit")]


class _Point(NamedTuple):
    """A point inside a bump: what is new in it, and where the submodule is."""

    kind: StepKind
    of: RangeCommit
    at: str


def _way(bump: Bump, commit: RangeCommit) -> Iterator[_Point]:
    if not (bump.commits or bump.reverted):
        whole = commit.model_copy(update={"commit": bump.after, "subject": f"{bump}: {bump.note}"})
        yield _Point("bump", whole, bump.after)
        return
    left = [bump.base, *(one.commit for one in bump.reverted)]
    for one, at in zip(reversed(bump.reverted), reversed(left[:-1]), strict=True):
        yield _Point("reverted", one, at)
    for one in bump.commits:
        # A submodule's own submodules come as its commits pin them: one that only moves these says which.
        if one.only_bumps:
            subject = f"{', '.join(map(str, one.bumps))}: {one.subject}"
            yield _Point("nested", one.model_copy(update={"subject": subject}), one.commit)
        else:
            yield _Point("inner", one, one.commit)


def _step(commit: RangeCommit, **about: object) -> Step:
    return Step.model_validate(
        {**commit.model_dump(include={"commit", "subject", "author", "authored_at", "url"}), **about}
    )
