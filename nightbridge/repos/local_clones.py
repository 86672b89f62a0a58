"""Clones of a mirror on the same file system: whole repositories whose object files are the mirror's, hard-linked."""

import os
import shutil
import stat
from pathlib import Path

from nightbridge.repos.git import git
from nightbridge.repos.mirrors import Mirror
from nightbridge.repos.urls import masked


def clone_at(mirror: Mirror, commit: str, folder: Path) -> None:
    """Recreate `folder` as a clone of a mirror with a commit of it checked out, its files read-only.

    A program that would change a file fails, and says so. Folders stay writable: NeMo-Run's packager puts a short-lived
    archive there. git records no write permission.

    Raises:
        PermanentError: The mirror is damaged, or has no such commit.
        TransientError: Another process holds the mirror for too long.

    """
    shutil.rmtree(folder, ignore_errors=True)
    with mirror.lease():
        # Under the mirror's lease: a fetch may pack its objects again while they are linked.
        git(
            "clone", "--quiet", "--local", "--no-checkout", "--template=",
            "--config=gc.auto=0", "--config=core.logAllRefUpdates=false", mirror.path, folder,
            timeout=mirror.timeout,
        )  # fmt: skip
    git("config", "remote.origin.url", masked(mirror.url), timeout=mirror.timeout, folder=folder)
    _make_folders(mirror, commit, folder)
    # Written without the permission, not robbed of it later: that would change the times that git has noted of each
    # file, and git would have to read all of them once more. (So no log of HEAD: its folder could not be written.)
    umask = ~stat.S_IMODE(folder.stat().st_mode) & 0o777 | 0o222
    git(
        "checkout", "--quiet", "--detach", commit,
        timeout=mirror.timeout, folder=folder, thing=f"{commit} of {mirror.url}", umask=umask,
    )  # fmt: skip


def _make_folders(mirror: Mirror, commit: str, folder: Path) -> None:
    """Make the folders of a commit, which git would make without the permission to write into them."""
    listing = git(
        "ls-tree", "-r", "-d", "-z", "--name-only", commit,
        timeout=mirror.timeout, folder=folder, thing=f"{commit} of {mirror.url}",
    )  # fmt: skip
    for path in listing.split("\0"):
        # What no honest commit has is left to git, which refuses it.
        if path and not {"", ".", "..", ".git"} & set(path.lower().split("/")):
            os.makedirs(os.path.join(folder, path), exist_ok=True)
