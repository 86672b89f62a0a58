"""Finds and removes unused images. Image files that users provided stay."""

import re
import time
from collections.abc import Sequence
from pathlib import Path

from nightbridge.images.scratch_dirs import leftover_scratch_dirs, remove_tree, temporary_folder
from nightbridge.images.workspace_refs import workspace_refs
from nightbridge.locking import lease
from nightbridge.models import ImageImport
from nightbridge.removals import (
    Candidate,
    Policy,
    Removal,
    choose,
    is_named,
    old_leftovers,
    text_of_live_jobs,
)

_IMAGE = re.compile(r"[0-9a-f]{64}\.sqsh")
_DIGEST = re.compile(r"[0-9a-f]{64}")


def find_old_images(
    workspace: Path, images: Path, policy: Policy, settings: ImageImport | None = None
) -> list[Removal]:
    """The imported images that `policy` does not keep; nothing is removed.

    What killed imports left, here and where imports of this machine work, is among them: the next import of the same
    digest removes it too, but most digests are never imported again.

    Args:
        workspace: Whose jobs may use them, besides those of others that share the folder.
        images: Where images are kept.
        policy: How much is kept.
        settings: Folders of imports.

    Raises:
        PermanentError: The jobs that use the images are unknown.

    """
    candidates = [
        Candidate(path=path, size=path.stat().st_size, last_used=_last_used(path))
        for path in images.absolute().glob("*.sqsh")
        if _IMAGE.fullmatch(path.name)
    ]
    bases = (temporary_folder((settings or ImageImport()).temp),)
    return [
        *choose(candidates, policy, _text_of_live_jobs(images, workspace), now=time.time()),
        *old_leftovers(leftover_scratch_dirs(images.absolute(), bases), "left by an interrupted import"),
    ]


def remove_images(workspace: Path, images: Path, removals: Sequence[Removal]) -> list[Removal]:
    """Remove images and what killed imports left, each under the lease of its digest; return those that are gone.

    One that was wanted meanwhile stays.

    Args:
        workspace: Whose jobs may use them, besides those of others that share the folder.
        images: Where images are kept.
        removals: What `find_old_images` has found.

    Raises:
        PermanentError: The jobs that use the images are unknown.
        TransientError: Another process holds an image's lease for too long.

    """
    removed = []
    for removal in removals:
        path = removal.path
        with lease(images.absolute() / f".{_digest(path)}.lease"):
            wanted_again = path.exists() and removal.wanted_since(_last_used(path))
            if not path.exists() or wanted_again or is_named(path, _text_of_live_jobs(images, workspace)):
                continue
            if path.is_dir():
                remove_tree(path)
            else:
                # The sidecar first: an image without one is never used.
                path.with_suffix(".json").unlink(missing_ok=True)
                path.unlink()
        removed.append(removal)
    return removed


def _text_of_live_jobs(images: Path, workspace: Path) -> str:
    users = {workspace.absolute(), *workspace_refs(images.absolute())}
    return "\n".join(text_of_live_jobs(user) for user in sorted(users))


def _digest(path: Path) -> str:
    """The digest of an image, or of the one that an import was to make in a folder."""
    found = _DIGEST.search(path.name)
    return found[0] if found else path.name


def _last_used(path: Path) -> float:
    """Unix time when an image was last wanted: each pull touches its sidecar; without one the file's own time."""
    sidecar = path.with_suffix(".json")
    return (sidecar if sidecar.exists() else path).stat().st_mtime
