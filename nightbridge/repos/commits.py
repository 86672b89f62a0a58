"""Pins: the commit of a ref, resolved once per night, the same for all its runs and after a restart.

Also the commits between two pins: suspects for the report, and the range of a bisect.
"""

import hashlib
from contextlib import suppress
from datetime import datetime
from pathlib import Path

from pydantic import Field

from nightbridge.errors import InvalidInput
from nightbridge.locking import get_or_create
from nightbridge.models import RangeCommit, Site, StoredModel, utc_now
from nightbridge.repos.git import attempt, git
from nightbridge.repos.mirrors import Mirror
from nightbridge.repos.remotes import masked


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
            url=masked(mirror.url),
            ref=ref,
            commit=mirror.resolve(ref),
            resolved_at=utc_now(),
            previous=_previous(path),
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
_FORMAT = "%H%x1f%an%x1f%aI%x1f%s%x1e"


def commits_in_range(mirror: Mirror, good: str, bad: str) -> tuple[RangeCommit, ...]:
    """The commits that came after `good`, up to and with `bad`, oldest first.

    Only the main line (first parents) is listed: what a merge brought in was never what a night ran, and comes and goes
    with the merge.

    Raises:
        InvalidInput: The mirror lacks one of them, or `good` is no ancestor of `bad`.
        TransientError: git did not answer in time.
    """
    for commit in (good, bad):
        if not mirror.has(commit):
            raise InvalidInput("the mirror has no such commit", thing=f"{commit[:12]} of {masked(mirror.url)}")
    related = attempt("merge-base", "--is-ancestor", good, bad, timeout=mirror.timeout, folder=mirror.path)
    if related.code:
        raise InvalidInput(
            "the branch was rewritten: the good commit is not an ancestor of the bad one",
            thing=f"{good[:12]}..{bad[:12]} of {masked(mirror.url)}",
            advice="Name a good commit that is an ancestor of the bad one",
        )
    text = git(
        "log", "--first-parent", "--reverse", f"--max-count={MAX_COMMITS}", f"--format={_FORMAT}", f"{good}..{bad}",
        timeout=mirror.timeout, folder=mirror.path, thing=mirror.url,
    )  # fmt: skip
    return tuple(_commit(record) for record in text.split("\x1e") if record.strip())


def commits_between(site: Site, url: str, good: str, bad: str) -> tuple[RangeCommit, ...]:
    """The commits of a repository after one commit, up to another; a commit that the mirror lacks is fetched.

    Raises what `commits_in_range` raises.
    """
    mirror = Mirror(url, site.workspace, timeout=site.git_timeout)
    return commits_in_range(mirror, mirror.resolve(good), mirror.resolve(bad))


def known_commits_between(site: Site, url: str, good: str, bad: str) -> tuple[RangeCommit, ...]:
    """As `commits_between`, for full commits and from what this workspace has: nothing is fetched."""
    mirror = Mirror(url, site.workspace, timeout=site.git_timeout)
    if not mirror.path.exists():
        raise InvalidInput("this workspace has no mirror of it", thing=masked(url))
    return commits_in_range(mirror, good, bad)


def _commit(record: str) -> RangeCommit:
    commit, author, authored_at, subject = record.strip("\n").split("\x1f", 3)
    return RangeCommit(commit=commit, subject=subject, author=author, authored_at=datetime.fromisoformat(authored_at))
