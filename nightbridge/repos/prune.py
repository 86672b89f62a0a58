"""Finds and removes unused checkouts."""

import re
import shutil
import time
import uuid
from collections.abc import Sequence
from pathlib import Path

from nightbridge.locking import lease
from nightbridge.removals import (
    Candidate,
    Policy,
    Removal,
    choose,
    old_leftovers,
    size_of,
    text_of_live_jobs,
)
from nightbridge.repos.checkouts import old_changed_trees, unfinished

_CHECKOUT = re.compile(r"[0-9a-f]{40}(\+submodules)?")


def find_old_checkouts(workspace: Path, policy: Policy) -> list[Removal]:
    """The checkouts that `policy` does not keep, counted per repository; nothing is removed.

    Changed trees that are old, and what killed check-outs left, are among them: the next check-out of the same commit
    removes these too, but most commits are never checked out again.
    """
    used = text_of_live_jobs(workspace)
    found = []
    for repository in sorted((workspace.absolute() / "checkouts").glob("*")):
        candidates = [
            Candidate(path=path, size=size_of(path), last_used=path.stat().st_mtime)
            for path in repository.glob("*")
            if _CHECKOUT.fullmatch(path.name)
        ]
        found += choose(candidates, policy, used, now=time.time())
        changed = [tree for tree in old_changed_trees(repository) if _checkout(tree) not in used]
        found += old_leftovers(changed, "modified copy, replaced by a fresh one")
        found += old_leftovers(unfinished(repository), "left by an interrupted checkout")
    return found


def remove_checkouts(workspace: Path, removals: Sequence[Removal]) -> list[Removal]:
    """Remove checkouts, each under its lease; return those that are gone. One that was wanted meanwhile stays.

    Raises:
        TransientError: Another process holds a checkout's lease for too long.

    """
    removed = []
    for removal in removals:
        folder = removal.path
        checkout = _checkout(folder)
        with lease(folder.with_name(f"{checkout}.lease")):
            wanted_again = folder.exists() and removal.wanted_since(folder.stat().st_mtime)
            if not folder.exists() or wanted_again or checkout in text_of_live_jobs(workspace):
                continue
            # The name of a leftover: if this is killed, the next one, or a check-out of the commit, removes the rest.
            aside = folder.with_name(f".{checkout}.{uuid.uuid4().hex}.tmp")
            folder.rename(aside)
        shutil.rmtree(aside, ignore_errors=True)
        removed.append(removal)
    return removed


def _checkout(folder: Path) -> str:
    """The name of the checkout that a folder is, was, or was to become."""
    found = _CHECKOUT.search(folder.name)
    return found[0] if found else folder.name
