"""Pins: the commit of a ref, resolved once per night, the same for all its runs and after a restart.

Also the commits between two pins: suspects for the report, and the range of a bisect.
"""

import hashlib
import re
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime
from pathlib import Path

from pydantic import Field

from nightbridge.errors import InvalidInput, PermanentError
from nightbridge.locking import get_or_create
from nightbridge.models import Bump, RangeCommit, Site, StoredModel, utc_now
from nightbridge.repos.checkouts import find_submodules
from nightbridge.repos.git import absolute_url, attempt, git, masked, one_line, time_of
from nightbridge.repos.mirrors import Mirror


class CommitPin(StoredModel):
    """The commit that a ref resolved to when the night first needed it."""

    url: str
    ref: str
    commit: str
    resolved_at: datetime
    previous: str | None = Field(None, description="The commit that it resolved to in the latest other night.")


def pinned(mirror: Mirror, ref: str, night: str, workspace: Path) -> CommitPin:
    """Return the commit of a ref for a night; resolve it on the night's first call.

    Each pin is a file of its own, `nights/<night>/pins/<name>-<hash>.json`, so that many processes have no common
    file to rewrite.

    Raises:
        InvalidInput: No such repository or ref.
        PermanentError: The repository refuses us.
        TransientError: The repository cannot be reached.
        DamagedData: The pin cannot be read.
    """
    identity = hashlib.sha256(f"{mirror.url}\n{ref}".encode()).hexdigest()[:16]
    path = workspace.absolute() / "nights" / night / "pins" / f"{mirror.name}-{identity}.json"
    return get_or_create(
        path,
        CommitPin,
        lambda: CommitPin(
            url=masked(mirror.url), ref=ref, commit=mirror.resolve(ref), resolved_at=utc_now(), previous=_previous(path)
        ),
    )


def _previous(path: Path) -> str | None:
    """The commit of the newest pin of the same ref that another night has."""
    found = []
    for other in path.parents[2].glob(f"*/pins/{path.name}"):
        with suppress(OSError, ValueError):  # A damaged pin is reported when its own night reads it.
            found.append(CommitPin.model_validate_json(other.read_bytes()))
    return max(found, key=lambda pin: pin.resolved_at).commit if found else None


MAX_COMMITS = 20000
"""More than any branch gets between two nights; a longer range is most likely a wrong end point."""

# Unit and record separators: neither occurs in a subject or a name.
_FORMAT = "%x1e%H%x1f%P%x1f%an%x1f%aI%x1f%s%x1f"
_DIFF = ("-z", "--raw", "--no-abbrev", "--no-renames", "--ignore-submodules=none")
_CHANGED_PATH = re.compile(r":(\d+) (\d+) ([0-9a-f]+) ([0-9a-f]+) [A-Z]\0([^\0]+)")
_SUBMODULE = "160000"
# What only says again where submodules are: Megatron-Bridge's bumps write .main.commit and .dev.commit as well.
_PIN_RECORD = re.compile(r"\.gitmodules|\.\w+\.commit")


def commits_in_range(mirror: Mirror, good: str, bad: str) -> tuple[RangeCommit, ...]:
    """The commits that came after `good`, up to and with `bad`, oldest first.

    Only the main line (first parents) is listed: what a merge brought in was never what a night ran, and comes and goes
    with the merge. The submodules that a commit moves are named without what lies between their pins (`open_bumps`).

    Raises:
        InvalidInput: The mirror lacks one of them, or `good` is no ancestor of `bad`.
        TransientError: git did not answer in time.
    """
    for commit in (good, bad):
        _known(mirror, commit)
    related = attempt("merge-base", "--is-ancestor", good, bad, timeout=mirror.timeout, folder=mirror.path)
    if related.code:
        what = "the branch was rewritten: the good commit is not an ancestor of the bad one"
        advice = "Name a good commit that is an ancestor of the bad one"
        raise InvalidInput(what, subject=f"{good[:12]}..{bad[:12]} of {masked(mirror.url)}", advice=advice)
    return _main_line(mirror, good, bad)


def commits_between(site: Site, url: str, good: str, bad: str) -> tuple[RangeCommit, ...]:
    """The commits of a repository after one commit, up to another; a commit that the mirror lacks is fetched.

    So are those of submodules, where this workspace has a mirror of them: runs here have checked them out.

    A good commit of the repository that this one is the successor of begins a range across the move.

    Raises what `commits_in_range` raises.
    """
    found = _across_moves(Mirror(url, site.workspace, timeout=site.git_timeout), good, bad, site, Mirror.resolve)
    return tuple(_opened(mirror, commit, site, _mirrored_before) for mirror, commit in found)


def known_commits_between(site: Site, url: str, good: str, bad: str) -> tuple[RangeCommit, ...]:
    """As `commits_between`, for full commits and from what this workspace has: nothing is fetched."""
    found = _across_moves(Mirror(url, site.workspace, timeout=site.git_timeout), good, bad, site, _known)
    return tuple(_opened(mirror, commit, site, _known) for mirror, commit in found)


def commit_named(site: Site, url: str, name: str) -> str:
    """The full commit that a name means now: in a repository, or in the one that it is the successor of.

    Raises what `Mirror.resolve` raises.
    """
    mirror = Mirror(url, site.workspace, timeout=site.git_timeout)
    try:
        return mirror.resolve(name)
    except InvalidInput:
        former = _former(mirror, site)
        if former is None:
            raise
        return Mirror(former, site.workspace, timeout=site.git_timeout).resolve(name)


def open_bumps(site: Site, url: str, commit: RangeCommit) -> RangeCommit:
    """A commit of a repository with the commits inside its bumps; the submodules are mirrored where they are not yet.

    Raises:
        TransientError: A submodule's repository cannot be reached. What is wrong with it for good is a bump's note.
    """
    mirror = Mirror(commit.url or url, site.workspace, timeout=site.git_timeout)
    return _opened(mirror, commit, site, Mirror.resolve)


Find = Callable[[Mirror, str], str]
"""Returns the full commit of a name in a mirror; an error where the mirror has not, and does not get it."""


def _across_moves(mirror: Mirror, good: str, bad: str, site: Site, find: Find) -> list[tuple[Mirror, RangeCommit]]:
    """The commits of a range with the mirrors that they are in: one, unless the repository moved in between."""
    try:
        ends = find(mirror, good), find(mirror, bad)
    except InvalidInput:
        former = _former(mirror, site)
        if former is None:
            raise
        before, to = Mirror(former, site.workspace, timeout=site.git_timeout), site.successors[former]
        old = commits_in_range(before, find(before, good), find(before, to.last))
        new = _since_the_move(mirror, find(mirror, to.commit), find(mirror, bad), to.folder)
        moved = [(before, commit.model_copy(update={"url": masked(before.url)})) for commit in old]
        return moved + [(mirror, commit) for commit in new]
    return [(mirror, commit) for commit in commits_in_range(mirror, *ends)]


def _former(mirror: Mirror, site: Site) -> str | None:
    """The repository that this one is the successor of; None for most."""
    return next((url for url, to in site.successors.items() if absolute_url(to.url) == mirror.url), None)


def _since_the_move(mirror: Mirror, first: str, bad: str, folder: str) -> tuple[RangeCommit, ...]:
    """The commit with which the code came, and what touched it later."""
    commits_in_range(mirror, first, bad)  # says what is wrong with the ends
    (came,) = _main_line(mirror, "", first, "--max-count=1")
    touched = _main_line(mirror, first, bad, "--", folder or ".")
    return (came.model_copy(update={"bumps": (), "only_bumps": False}), *touched)


def _main_line(mirror: Mirror, good: str, bad: str, *more: str) -> tuple[RangeCommit, ...]:
    """The first parents after `good`, up to `bad`, oldest first, with the submodules that each moves.

    All of history where `good` is empty; `more` are further arguments of `git log`.
    """
    text = git(
        "log", "--first-parent", "-m", "--reverse", *_DIFF, f"--max-count={MAX_COMMITS}", f"--format={_FORMAT}",
        f"{good}..{bad}" if good else bad, *more,
        timeout=mirror.timeout, folder=mirror.path, subject=mirror.url,
    )  # fmt: skip
    found: list[RangeCommit] = []
    for record in text.split("\x1e")[1:]:
        commit, parents, author, authored_at, subject, changes = record.split("\x1f", 5)
        if good and not found and parents.split()[:1] != [good]:
            # The good commit was merged: what is new to it is not what is new to the main line.
            changes = git("diff-tree", "-r", *_DIFF, good, commit, timeout=mirror.timeout, folder=mirror.path)
        bumps, only_bumps = _bumps(changes)
        found.append(
            RangeCommit(
                commit=commit,
                subject=one_line(subject),
                author=one_line(author),
                authored_at=time_of(authored_at),
                bumps=bumps,
                only_bumps=only_bumps,
            )
        )
    return tuple(found)


def _bumps(changes: str) -> tuple[tuple[Bump, ...], bool]:
    """The submodules that a commit moves, and whether it changes nothing else."""
    bumps, others = [], False
    for old_mode, new_mode, before, after, path in _CHANGED_PATH.findall(changes):
        if old_mode == new_mode == _SUBMODULE:
            bumps.append(Bump(folder=path, before=before, after=after, base=before))
        else:
            others |= not _PIN_RECORD.fullmatch(path)
    return tuple(bumps), bool(bumps) and not others


def _opened(mirror: Mirror, commit: RangeCommit, site: Site, find: Find) -> RangeCommit:
    if not commit.bumps:
        return commit
    urls: dict[str, str] = {}
    with suppress(PermanentError):  # A `.gitmodules` that git cannot read has no address.
        urls = {one.path: one.url for one in find_submodules(mirror, commit.commit)}
    bumps = tuple(_with_commits(bump, urls.get(bump.folder, ""), site, find) for bump in commit.bumps)
    return commit.model_copy(update={"bumps": bumps})


def _with_commits(bump: Bump, url: str, site: Site, find: Find) -> Bump:
    """A bump with the commits between its pins.

    `url` is the submodule's, empty where `.gitmodules` has none; `find` raises where a mirror does not get a commit.
    """
    if not url:
        return bump.model_copy(update={"note": "it has no address in .gitmodules"})
    mirror = Mirror(url, site.workspace, timeout=site.git_timeout)
    try:
        for commit in (bump.before, bump.after):
            find(mirror, commit)
        merge_base = attempt("merge-base", bump.before, bump.after, timeout=mirror.timeout, folder=mirror.path)
        base = merge_base.stdout.decode().strip()
        if merge_base.code:
            raise InvalidInput("the branch was rewritten: both have no common ancestor", subject=masked(url))
        came, reverted = (_main_line(mirror, *ends) for ends in ((base, bump.after), (base, bump.before)))
    except PermanentError as error:
        return bump.model_copy(update={"note": " ".join(str(error).split())})
    return bump.model_copy(update={"url": masked(url), "base": base, "commits": came, "reverted": reverted, "note": ""})


def _known(mirror: Mirror, commit: str) -> str:
    if not mirror.path.exists():
        raise InvalidInput("this workspace has no mirror of it", subject=masked(mirror.url))
    if not mirror.has(commit):
        raise InvalidInput("the mirror has no such commit", subject=f"{commit[:12]} of {masked(mirror.url)}")
    return commit


def _mirrored_before(mirror: Mirror, commit: str) -> str:
    if not mirror.path.exists():
        raise InvalidInput("no test of this workspace checks it out", subject=masked(mirror.url))
    return mirror.resolve(commit)
