"""Old checkouts: which ones nobody needs any more, and their removal."""

import os
import re
import shutil
import time
import uuid
from collections.abc import Sequence
from pathlib import Path

from nightbridge.leases import lease
from nightbridge.removals import Candidate, Policy, Removal, choose, text_of_live_jobs

_CHECKOUT = re.compile(r"[0-9a-f]{40}(\+submodules)?")


def find_old_checkouts(workspace: Path, policy: Policy) -> list[Removal]:
    """The checkouts that `policy` does not keep, counted per repository; nothing is removed."""
    used = text_of_live_jobs(workspace)
    found = []
    for repository in sorted((workspace.absolute() / "checkouts").glob("*")):
        candidates = [
            Candidate(path=path, size=_size(path), last_used=path.stat().st_mtime)
            for path in repository.glob("*")
            if _CHECKOUT.fullmatch(path.name)
        ]
        found += choose(candidates, policy, used, now=time.time())
    return found


def remove_checkouts(workspace: Path, removals: Sequence[Removal]) -> list[Removal]:
    """Remove checkouts, each under its lease; return those that are gone. One that was wanted meanwhile stays.

    Raises:
        TransientError: Somebody else holds a checkout's lease for too long.

    """
    removed = []
    for removal in removals:
        folder = removal.path
        with lease(folder.with_name(f"{folder.name}.lease")):
            wanted_again = folder.exists() and removal.wanted_since(folder.stat().st_mtime)
            if not folder.exists() or wanted_again or str(folder) in text_of_live_jobs(workspace):
                continue
            # The name of a leftover: if this is killed, whoever checks the commit out again clears the rest away.
            aside = folder.with_name(f".{folder.name}.{uuid.uuid4().hex}.tmp")
            folder.rename(aside)
        shutil.rmtree(aside, ignore_errors=True)
        removed.append(removal)
    return removed


def _size(folder: Path) -> int:
    """Bytes that removing a checkout frees; object files that the mirror shares are not among them."""
    total = 0
    for parent, _, files in os.walk(folder):
        for name in files:
            status = os.lstat(os.path.join(parent, name))
            total += status.st_blocks * 512 if status.st_nlink == 1 else 0
    return total
