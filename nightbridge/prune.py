"""Finding and removing old checkouts, images, launcher environments and what runs wrote, but nothing still needed.

Image files that users provided stay.
"""

import os
import re
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial
from itertools import compress
from pathlib import Path

from pydantic import Field

from nightbridge.errors import DamagedData, PermanentError
from nightbridge.files import MODEL_LIMIT, RefusedFile, open_regular, remove_tree
from nightbridge.harvest.manifest import committed_attempts
from nightbridge.harvest.retention import RunRemoval
from nightbridge.images.enroot import leftover_scratch_dirs, temporary_folder
from nightbridge.images.image import workspace_refs
from nightbridge.locking import brief_lease
from nightbridge.models import ImageImport, Model, Site
from nightbridge.nights.liveness import living
from nightbridge.nights.records import nights_without_end, plan_path, read_plan, read_verdict
from nightbridge.repos.checkouts import old_changed_trees, unfinished_checkouts
from nightbridge.repos.environments import unneeded_bases
from nightbridge.slurm.attempt_files import ATTEMPT_FILE, ENDED_FILE, JOB_SCRIPT, last_attempt
from nightbridge.slurm.script import EXIT_CODE
from nightbridge.store.object_store import ObjectStore
from nightbridge.store.parallel import in_parallel

DAY_SECONDS = 24 * 3600.0

# Between a pull and the job's own files lies the rest of a stage, and perhaps its retries.
NEVER_YOUNGER_THAN_SECONDS = DAY_SECONDS
# A job whose node failed never writes its exit code, and an unwatched run has no end on record.
_MAX_LIFE_SECONDS = 14 * DAY_SECONDS
# Where the launcher and the job name what they use: NeMo-Run copies the code, but its scripts name the checkout.
_FILES_THAT_NAME = (JOB_SCRIPT, "launcher.log", "intent*.json", "nemorun/experiments/*/*/*/scripts/*.sh")


class Policy(Model):
    """How much is kept."""

    days: float = Field(30.0, ge=1, description="Remove what was unused for this many days.")
    keep: int = Field(20, ge=1, description="Keep at most this many of each kind, the newest.")
    max_gb: float | None = Field(
        None, ge=0, description="Images only: remove the oldest until the rest fits, 1e9 bytes."
    )
    run_days: float | None = Field(
        None, ge=1, description="Remove what runs wrote in the workspace, once stored and ended for this many days."
    )


class Removal(Model):
    """Something unused that can be removed."""

    path: Path
    size: int = Field(description="Bytes.")
    last_used: datetime
    reason: str

    @classmethod
    def candidate(cls, path: Path, size: int, last_used: float) -> "Removal":
        """What may be removed; `last_used` is Unix time."""
        return cls(path=path, size=size, last_used=datetime.fromtimestamp(last_used, UTC), reason="")

    @property
    def is_unused(self) -> bool:
        """Whether it is still there, and was not used after it was chosen; a `datetime` is coarser than file times."""
        return self.path.exists() and _last_used(self.path) - self.last_used.timestamp() <= 0.001


class Old(Model):
    """What is not needed any more, or what of it was removed."""

    checkouts: tuple[Removal, ...]
    images: tuple[Removal, ...]
    environments: tuple[Removal, ...]
    run_folders: tuple[Removal, ...] = Field((), description="Of the workspace.")
    runs: tuple[RunRemoval, ...] = Field((), description="Of the store.")

    @property
    def removals(self) -> tuple[Removal, ...]:
        """All of it that is not in the store."""
        return (*self.checkouts, *self.images, *self.environments, *self.run_folders)

    def __str__(self) -> str:
        size = sum(each.size for each in self.removals) + sum(old.run.size for old in self.runs)
        return (
            f"{len(self.checkouts)} checkouts, {len(self.images)} images, {len(self.environments)} launcher "
            f"environments, {len(self.run_folders)} folders of runs and {len(self.runs)} stored runs, "
            f"{size / 1e9:.1f} GB"
        )


def choose(candidates: Sequence[Removal], policy: Policy, used_by_jobs: str, *, now: float) -> list[Removal]:
    """Choose what goes, oldest first: never what a live job names or what was used within a day.

    Args:
        candidates: All checkouts or images. What has to stay counts among the ones that are kept.
        policy: How much is kept.
        used_by_jobs: `text_of_live_jobs` of the workspace. It names an image or a checkout by its digest or commit: the
            folders above may be spelt in another way, such as through a link.
        now: Unix time.
    """
    chosen, kept_bytes = [], 0
    for index, candidate in enumerate(sorted(candidates, key=lambda one: one.last_used, reverse=True)):
        age = now - candidate.last_used.timestamp()
        kept_bytes += candidate.size
        reasons = (
            (age > policy.days * DAY_SECONDS, f"unused for {age / DAY_SECONDS:.0f} days"),
            (index >= policy.keep, f"{policy.keep} newer ones are kept"),
            (policy.max_gb is not None and kept_bytes > policy.max_gb * 1e9, "the newer ones fill the allowed size"),
        )
        reason = next((text for holds, text in reasons if holds), None)
        if reason and age > NEVER_YOUNGER_THAN_SECONDS and candidate.path.name not in used_by_jobs:
            chosen.append(candidate.model_copy(update={"reason": reason}))
            kept_bytes -= candidate.size
    return chosen[::-1]


def old_leftovers(folders: Iterable[Path], reason: str) -> list[Removal]:
    """Leftover work folders: those older than a day, longer than any work takes."""
    latest = datetime.fromtimestamp(time.time() - NEVER_YOUNGER_THAN_SECONDS, UTC)
    old = (found for found in _still_there(_folder, folders) if found.last_used < latest)
    return [found.model_copy(update={"reason": reason}) for found in old]


def _still_there(candidate: Callable[[Path], Removal], paths: Iterable[Path]) -> Iterator[Removal]:
    """Each as a candidate, but for what another `prune` has removed since it was listed, and links to nothing."""
    for path in paths:
        with suppress(FileNotFoundError):
            yield candidate(path)


def _folder(path: Path) -> Removal:
    return Removal.candidate(path, size_of(path), path.stat().st_mtime)


def size_of(folder: Path) -> int:
    """Bytes that removing a folder frees; files with a further name elsewhere are not among them."""
    total, folders = 0, [str(folder)]
    while folders:  # `os.walk` goes a thousand folders deep and ends with an exception; a job may leave more
        with suppress(OSError), os.scandir(folders.pop()) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    folders.append(entry.path)
                else:
                    status = entry.stat(follow_symlinks=False)
                    total += status.st_blocks * 512 if status.st_nlink == 1 else 0
    return total


def text_of_live_jobs(workspace: Path) -> str:
    """The files in which the attempts of a workspace that have not ended name what they use.

    An attempt has ended when its job left an exit code, or a watcher has seen its end.

    Raises:
        PermanentError: The workspace is another user's, who does not let us in.
    """
    texts: list[str] = []
    try:  # `glob` finds nothing in a folder that it may not read
        os.scandir(workspace.absolute() / "runs").close()
    except FileNotFoundError:
        return ""
    except PermissionError as error:
        raise PermanentError(
            "cannot read which images and checkouts the jobs of this workspace use",
            subject=str(workspace),
            advice="Run `nightbridge prune` as a user who can read every workspace that shares the folder of images",
        ) from error
    for attempt in (workspace.absolute() / "runs").glob(f"*/a*/{ATTEMPT_FILE}"):
        folder = attempt.parent
        ended = (folder / EXIT_CODE).exists() or (folder / ENDED_FILE).exists()
        if ended or time.time() - attempt.stat().st_mtime > _MAX_LIFE_SECONDS:
            continue
        for pattern in _FILES_THAT_NAME:
            texts += map(_text_of, folder.glob(pattern))
    return "\n".join(texts)


def _text_of(path: Path) -> str:
    with suppress(RefusedFile), open_regular(path) as stream:
        return stream.read(MODEL_LIMIT).decode(errors="replace")
    return ""


_CHECKOUT = re.compile(r"[0-9a-f]{40}(\+submodules(-[0-9a-f]{12})?)?")


def find_old_checkouts(workspace: Path, policy: Policy) -> list[Removal]:
    """The checkouts that `policy` does not keep, counted per repository; nothing is removed.

    Changed trees that are old, and what killed check-outs left, are among them: the next check-out of the same commit
    removes these too, but most commits are never checked out again.
    """
    used = text_of_live_jobs(workspace)
    found = []
    for repository in sorted((workspace.absolute() / "checkouts").glob("*")):
        checkouts = (path for path in repository.glob("*") if _CHECKOUT.fullmatch(path.name))
        found += choose([*_still_there(_folder, checkouts)], policy, used, now=time.time())
        changed = [tree for tree in old_changed_trees(repository) if _named(tree, _CHECKOUT) not in used]
        found += old_leftovers(changed, "modified copy, replaced by a fresh one")
        found += old_leftovers(unfinished_checkouts(repository), "left by an interrupted checkout")
    return found


def remove_checkouts(workspace: Path, removals: Sequence[Removal]) -> list[Removal]:
    """Remove checkouts, each under its lease; return those that are gone. One that was used meanwhile stays.

    Raises:
        TransientError: Another process holds a checkout's lease for too long.
    """
    removed = []
    for removal in removals:
        folder = removal.path
        checkout = _named(folder, _CHECKOUT)
        with brief_lease(folder.with_name(f"{checkout}.lease")):
            if not removal.is_unused or checkout in text_of_live_jobs(workspace):
                continue
            # The name of a leftover: if this is killed, the next one, or a check-out of the commit, removes the rest.
            aside = folder.with_name(f".{checkout}.{uuid.uuid4().hex}.tmp")
            folder.rename(aside)
        remove_tree(aside)
        removed.append(removal)
    return removed


def _named(path: Path, pattern: re.Pattern[str]) -> str:
    """The name of the checkout, or digest of the image, that a path is, was, or was to become."""
    found = pattern.search(path.name)
    return found[0] if found else path.name


_LAYER = re.compile(r"[0-9a-f]{16}")


def find_old_environments(environments: Path, policy: Policy) -> list[Removal]:
    """The layers of launcher environments that `policy` does not keep, and bases without one; nothing is removed.

    The folder may be shared between workspaces: every use touches a layer, and only the launcher, which runs for
    minutes, needs it. So nothing that was used within a day goes, whoever used it.
    """
    layers = [path for path in environments.absolute().glob("*") if _LAYER.fullmatch(path.name)]
    old = choose([*_still_there(_folder, layers)], policy, "", now=time.time())
    kept = {*layers} - {removal.path for removal in old}
    return [*old, *old_leftovers(unneeded_bases(environments, kept), "no launcher environment is built on it")]


def remove_environments(removals: Sequence[Removal]) -> list[Removal]:
    """Remove launcher environments, each under its lease; return those that are gone. One used meanwhile stays.

    Raises:
        TransientError: Another process holds the lease of one for too long.
    """
    removed = []
    for removal in removals:
        path = removal.path
        with brief_lease(path.with_name(f".{path.name}.lease")):
            if not removal.is_unused:
                continue
            folder = path.resolve()
            if path.is_symlink():
                path.unlink()
            # The name of a leftover: if this is killed, whoever makes it again removes the rest.
            aside = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
            folder.rename(aside)
        remove_tree(aside)
        removed.append(removal)
    return removed


class Usage(Model):
    """What a part of workspace or store takes."""

    what: str
    where: str
    items: int
    size: int = Field(description="Bytes.")


def disk_usage(workspace: Path, environments: Path, images: Path) -> list[Usage]:
    """What each part of a workspace takes, the largest first; environments and images may lie elsewhere."""
    folders = {path.name: path for path in workspace.absolute().glob("*") if path.is_dir()}
    folders |= {"envs": environments.absolute(), "images": images.absolute()}
    found = [
        Usage(what=name, where=str(path), items=sum(1 for _ in path.glob("*")), size=size_of(path))
        for name, path in folders.items()
        if path.is_dir() and name != "store"
    ]
    return sorted(found, key=lambda usage: -usage.size)


_IMAGE_NAME = re.compile(r"[0-9a-f]{64}(-\w+)?")


def find_old_images(
    workspace: Path, images: Path, policy: Policy, settings: ImageImport | None = None
) -> list[Removal]:
    """The imported images that `policy` does not keep; nothing is removed.

    What killed imports left, here and where imports of this machine work, is among them: the next import of the same
    digest removes it too, but most digests are never imported again.

    Jobs of `workspace` may use them, and those of others that share the folder.

    Raises:
        PermanentError: The jobs that use the images are unknown.
    """
    imported = (path for path in images.absolute().glob("*.sqsh") if _IMAGE_NAME.fullmatch(path.stem))
    candidates = _still_there(lambda path: Removal.candidate(path, path.stat().st_size, _last_used(path)), imported)
    bases = (temporary_folder((settings or ImageImport()).temp),)
    return [
        *choose([*candidates], policy, _text_of_live_jobs(images, workspace), now=time.time()),
        *old_leftovers(leftover_scratch_dirs(images.absolute(), bases), "left by an interrupted import"),
    ]


def remove_images(workspace: Path, images: Path, removals: Sequence[Removal]) -> list[Removal]:
    """Remove images and what killed imports left, each under the lease of its digest; return those that are gone.

    One that was used meanwhile stays.

    Raises:
        PermanentError: The jobs that use the images are unknown.
        TransientError: Another process holds an image's lease for too long.
    """
    removed = []
    for removal in removals:
        path = removal.path
        with brief_lease(images.absolute() / f".{_named(path, _IMAGE_NAME)}.lease"):
            if not removal.is_unused or path.name in _text_of_live_jobs(images, workspace):
                continue
            if path.is_dir():
                remove_tree(path)
            else:
                # The sidecar first: an image without one is never used.
                path.with_suffix(".json").unlink(missing_ok=True)
                path.unlink()
        removed.append(removal)
    return removed


def find_old_run_folders(workspace: Path, policy: Policy, open_store: Callable[[], ObjectStore]) -> list[Removal]:
    """What runs wrote that `policy` does not keep; nothing is removed.

    A run's folder goes once its last attempt is stored and judged, for nothing else has its checkpoints. None goes that
    a live job names, or whose night is at work or has no end: its records keep the job from being submitted again.

    Raises:
        PermanentError: The workspace is another user's, or the store refuses us.
        TransientError: The workspace or the store does not answer.
    """
    if policy.run_days is None:
        return []
    runs = workspace.absolute() / "runs"
    used, at_work = text_of_live_jobs(workspace), _nights_at_work(workspace)
    ages = {folder: age for folder in runs.glob("[!.]*") if (age := _days_since_end(folder)) > policy.run_days}
    idle = [folder for folder in ages if folder.name not in used and not _is_of(folder.name, at_work)]
    if idle:
        store = open_store()
        unended = tuple(f"-{night}" for night in nights_without_end(store))
        idle = [folder for folder in idle if not folder.name.rpartition("-")[0].endswith(unended)]
        idle = [*compress(idle, in_parallel(partial(_is_judged, store), idle))]
    old = _still_there(_folder, idle)
    return [
        *(run.model_copy(update={"reason": f"stored, and ended {ages[run.path]:.0f} days ago"}) for run in old),
        *old_leftovers(runs.glob(".*.tmp"), "left by an interrupted prune"),
    ]


def remove_run_folders(workspace: Path, removals: Sequence[Removal]) -> list[Removal]:
    """Remove what runs wrote; return what is gone. A run that was tried again meanwhile, or whose night is, stays.

    Raises:
        TransientError: The workspace does not answer.
    """
    removed = []
    for removal in removals:
        folder = removal.path
        if not removal.is_unused or _is_of(folder.name, _nights_at_work(workspace)):
            continue
        # The name of a leftover: if this is killed, the next one removes the rest.
        aside = folder if folder.name.startswith(".") else folder.with_name(f".{folder.name}.{uuid.uuid4().hex}.tmp")
        try:
            os.utime(folder)  # it is young now, also under its new name: another prune leaves it to this one
            folder.rename(aside)
        except (FileNotFoundError, PermissionError):  # another one has it, or it is another user's
            continue
        # A night shows that it lives before it looks for its runs: one that began meanwhile is seen, or has seen none.
        if _is_of(folder.name, _nights_at_work(workspace)):
            aside.rename(folder)
            continue
        remove_tree(aside)
        if not aside.exists():
            removed.append(removal)
    return removed


def _days_since_end(folder: Path) -> float:
    """Days since the last attempt of a run was seen to have ended; 0 unless all have, and for a link to elsewhere."""
    if folder.is_symlink():
        return 0.0
    try:
        end = max((attempt / ENDED_FILE).stat().st_mtime for attempt in folder.glob("a[1-9]*"))
    except (OSError, ValueError):
        return 0.0
    return (time.time() - end) / DAY_SECONDS


def _is_judged(store: ObjectStore, folder: Path) -> bool:
    """Whether the store has the last attempt of a run, and its verdict: a search without one runs it again."""
    prefix = (committed_attempts(store, folder.name) or ("",))[-1]
    if not prefix.endswith(f"/a{last_attempt(folder)}"):
        return False
    with suppress(DamagedData):
        verdict = read_verdict(store, folder.name, prefix.split("/")[2])
        return verdict is not None and verdict.prefix == prefix
    return False


def _nights_at_work(workspace: Path) -> list[str]:
    """The nights whose process lives; empty for one that has no plan yet, or a search: it may have any run."""
    plans = [read_plan(plan_path(workspace, flow_run)) for flow_run in living(workspace)]
    return [plan.start.night if plan else "" for plan in plans]


def _is_of(run_key: str, nights: Iterable[str]) -> bool:
    """Whether a run may be one of these nights, by its key, which names its own."""
    return any(f"-{night}-" in run_key or not night for night in nights)


def find_old(site: Site, policy: Policy, open_store: Callable[[], ObjectStore]) -> Old:
    """What of a site's workspace `policy` does not keep, and of the folders that it shares; nothing is removed.

    `open_store` is called where the store has to know what runs wrote.

    Raises:
        PermanentError: The jobs that use the checkouts or images are unknown.
        TransientError: The workspace or the store does not answer.
    """
    return Old(
        checkouts=tuple(find_old_checkouts(site.workspace, policy)),
        images=tuple(find_old_images(site.workspace, site.images_dir, policy, site.image_import)),
        environments=tuple(find_old_environments(site.environments_dir, policy)),
        run_folders=tuple(find_old_run_folders(site.workspace, policy, open_store)),
    )


def remove_old(site: Site, old: Old) -> Old:
    """Remove what `find_old` has found; return what is gone. What was used meanwhile stays.

    Raises:
        PermanentError: The jobs that use the images are unknown.
        TransientError: Another process holds a lease for too long.
    """
    return Old(
        run_folders=tuple(remove_run_folders(site.workspace, old.run_folders)),
        environments=tuple(remove_environments(old.environments)),
        checkouts=tuple(remove_checkouts(site.workspace, old.checkouts)),
        images=tuple(remove_images(site.workspace, site.images_dir, old.images)),
    )


def _text_of_live_jobs(images: Path, workspace: Path) -> str:
    users = {workspace.absolute(), *workspace_refs(images.absolute())}
    return "\n".join(text_of_live_jobs(user) for user in sorted(users))


def _last_used(path: Path) -> float:
    """Unix time of the last use: each pull of an image touches its sidecar; what has none is touched itself."""
    sidecar = path.with_suffix(".json")
    return (sidecar if sidecar.exists() else path).stat().st_mtime
