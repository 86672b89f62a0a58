"""A site's repositories, read with the login that it keeps for them."""

from collections.abc import Callable
from contextlib import AbstractContextManager

from nightbridge.models import RangeCommit, Site
from nightbridge.repos import ranges
from nightbridge.repos.logins import git_logins
from nightbridge.secrets import resolve_secret
from tasks.secrets import block_value


def site_logins(site: Site) -> AbstractContextManager[None]:
    """Let git log in with the site's secret for the length of a block; git's own helpers do where it names none.

    Raises:
        InvalidInput: The secret is not where the site says.

    """
    named = site.git_credentials
    return git_logins(resolve_secret(named, block_value) if named else "")


def commits_between(site: Site) -> Callable[[str, str, str], tuple[RangeCommit, ...]]:
    """As `nightbridge.repos.ranges.commits_between`, logged in: a commit that the mirror lacks is fetched."""
    find = ranges.commits_between(site)

    def find_logged_in(url: str, good: str, bad: str) -> tuple[RangeCommit, ...]:
        with site_logins(site):
            return find(url, good, bad)

    return find_logged_in
