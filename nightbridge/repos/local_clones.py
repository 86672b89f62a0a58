"""Clones of a mirror on the same file system: whole repositories whose object files are the mirror's, hard-linked."""

import shutil
from pathlib import Path

from nightbridge.repos.git import git
from nightbridge.repos.mirrors import Mirror
from nightbridge.repos.urls import masked


def clone_at(mirror: Mirror, commit: str, folder: Path) -> None:
    """Make `folder` anew as a clone of a mirror with a commit of it checked out.

    Raises:
        PermanentError: The mirror is damaged, or has no such commit.
        TransientError: Somebody else holds the mirror for too long.

    """
    shutil.rmtree(folder, ignore_errors=True)
    with mirror.lease():
        # Under the mirror's lease: a fetch may pack its objects again while they are linked.
        git(
            "clone", "--quiet", "--local", "--no-checkout", "--template=", "--config=gc.auto=0", mirror.path, folder,
            timeout=mirror.timeout,
        )  # fmt: skip
    git("config", "remote.origin.url", masked(mirror.url), timeout=mirror.timeout, folder=folder)
    git(
        "checkout", "--quiet", "--detach", commit,
        timeout=mirror.timeout, folder=folder, thing=f"{commit} of {mirror.url}",
    )  # fmt: skip
