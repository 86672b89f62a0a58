"""Old images: which ones nobody needs any more, and their removal. Files that people brought themselves stay."""

import re
import time
from collections.abc import Sequence
from pathlib import Path

from nightbridge.leases import lease
from nightbridge.removals import Candidate, Policy, Removal, choose, text_of_live_jobs

_IMAGE = re.compile(r"[0-9a-f]{64}\.sqsh")


def find_old_images(workspace: Path, images: Path, policy: Policy) -> list[Removal]:
    """The imported images that `policy` does not keep; nothing is removed.

    Args:
        workspace: Whose jobs may use them.
        images: Where images are kept.
        policy: How much is kept.

    """
    candidates = [
        Candidate(path=path, size=path.stat().st_size, last_used=_last_used(path))
        for path in images.absolute().glob("*.sqsh")
        if _IMAGE.fullmatch(path.name)
    ]
    return choose(candidates, policy, text_of_live_jobs(workspace), now=time.time())


def remove_images(workspace: Path, removals: Sequence[Removal]) -> list[Removal]:
    """Remove images, each under its lease; return those that are gone. One that was wanted meanwhile stays.

    Raises:
        TransientError: Somebody else holds an image's lease for too long.

    """
    removed = []
    for removal in removals:
        path = removal.path
        with lease(path.with_name(f".{path.stem}.lease")):
            wanted_again = path.exists() and removal.wanted_since(_last_used(path))
            if not path.exists() or wanted_again or str(path) in text_of_live_jobs(workspace):
                continue
            # The sidecar first: a file without one is not trusted by anybody.
            path.with_suffix(".json").unlink(missing_ok=True)
            path.unlink()
        removed.append(removal)
    return removed


def _last_used(path: Path) -> float:
    """Unix time when an image was last wanted: each pull touches its sidecar; without one the file's own time."""
    sidecar = path.with_suffix(".json")
    return (sidecar if sidecar.exists() else path).stat().st_mtime
