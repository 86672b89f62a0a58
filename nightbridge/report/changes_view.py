"""What changed since the good level, as the report lays it out: commits with links, settings, surroundings."""

from typing import NamedTuple

from nightbridge.history.metrics import format_count
from nightbridge.models import RangeCommit, RepositoryChange, Suspects, ValueChange

OPEN_COMMITS = 12
"""So many commits are shown at once; more are folded, and printed all the same."""


class CommitLine(NamedTuple):
    """One commit. Texts may hold anything: escape them."""

    short: str
    link: str
    subject: str
    author: str
    day: str


class RepositoryLines(NamedTuple):
    """One repository whose pin changed."""

    name: str
    before: str
    after: str
    link: str
    heading: str
    is_open: bool
    commits: tuple[CommitLine, ...]
    note: str


class Since(NamedTuple):
    """The block of one test. `values` are tables: their captions and rows."""

    caption: str
    repositories: tuple[RepositoryLines, ...]
    values: tuple[tuple[str, tuple[ValueChange, ...]], ...]
    notes: tuple[str, ...]


def changes_since(suspects: Suspects) -> Since:
    """Lay out what a verdict says about what changed."""
    tables = (("Configuration", suspects.configuration), ("Environment", suspects.environment))
    found = tuple((caption, changes) for caption, changes in tables if changes)
    changed = bool(suspects.repositories or found)
    return Since(
        caption=f"What changed between the last good night, {suspects.last_good}, and {suspects.night}"
        if changed
        else f"No known change between the last good night, {suspects.last_good}, "
        f"and {suspects.night}: suspect the machines",
        repositories=tuple(_repository_lines(change) for change in suspects.repositories),
        values=found,
        notes=suspects.notes,
    )


def compare_link(url: str, before: str, now: str) -> str:
    """A link to the commits between two pins, where the host is known to have such a page."""
    return f"{base}/compare/{before}...{now}" if (base := _web_address(url)) else ""


def _repository_lines(change: RepositoryChange) -> RepositoryLines:
    count = len(change.commits)
    return RepositoryLines(
        name=change.name,
        before=change.before[:10],
        after=change.after[:10],
        link=compare_link(change.url, change.before, change.after),
        heading=format_count(count, "commit") if count else "another commit",
        is_open=count <= OPEN_COMMITS,
        commits=tuple(_commit_line(change.url, commit) for commit in change.commits),
        note=change.note,
    )


def _commit_line(url: str, commit: RangeCommit) -> CommitLine:
    return CommitLine(
        short=commit.commit[:10],
        link=f"{base}/commit/{commit.commit}" if (base := _web_address(url)) else "",
        subject=commit.subject,
        author=commit.author,
        day=f"{commit.authored_at:%Y-%m-%d}",
    )


def _web_address(url: str) -> str:
    base = url.removesuffix("/").removesuffix(".git")
    return base if base.startswith("https://github.com/") else ""
