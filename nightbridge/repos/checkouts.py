"""Checkouts: one real git checkout per commit, shared by many jobs and changed by none.

A checkout is a local clone of its mirror, whose object files it hard-links. So it costs no space for history, stays
whole when the mirror is packed again or removed (a clone that borrows objects, or a worktree, would not), and git
commands work in it without the mirror, as NeMo-Run's packager needs. Submodules are checked out at the commits that
the tree pins, each from a mirror of its own.

A checkout may have submodules at other commits than its tree pins. Its index then pins those, so that git takes them
for staged, and the folder's name ends with their digest: a tree that is moved afterwards is known as modified.
"""

import hashlib
import json
import logging
import os
import re
import shutil
import time
import uuid
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from contextvars import copy_context
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

from nightbridge.errors import DamagedData, InvalidInput
from nightbridge.files import remove_tree
from nightbridge.locking import lease
from nightbridge.models import Model, PinnedRepository
from nightbridge.repos.git import attempt, git, masked, one_line
from nightbridge.repos.mirrors import Mirror, clone_at

log = logging.getLogger(__name__)

CHANGED_TREES_KEPT_SECONDS = 7 * 24 * 3600
WITH_SUBMODULES = "+submodules"
"""How the folder of a checkout ends that has its submodules; any other's have to be empty. After it comes `-<digest>`
where some of them are at other commits than the tree pins."""

_AS_PINNED: Mapping[str, str] = {}


def check_out(
    mirror: Mirror,
    ref: str,
    commit: str,
    workspace: Path,
    *,
    with_submodules: bool = False,
    moved: Mapping[str, str] = _AS_PINNED,
) -> PinnedRepository:
    """Return the checkout of a commit; make it when there is none, or when the existing one was modified.

    Args:
        mirror: The mirror of the repository. The commit is fetched when it is missing there.
        ref: The ref as the user wrote it, for the record.
        commit: Full commit.
        workspace: Checkouts are kept under `checkouts/<name>/<commit>`, and with submodules under
            `checkouts/<name>/<commit>+submodules`: the one without must keep its submodules' folders empty.
        with_submodules: Whether submodules are checked out too, at the commits that the tree pins.
        moved: Full commits that take the place of pinned ones, by the folder of the submodule.

    Raises:
        InvalidInput: The repository has no such commit or submodule.
        PermanentError: The repository refuses us, or the checkout cannot be made.
        TransientError: The repository cannot be reached, or another process holds the checkout for too long.
    """
    mirror.resolve(commit)
    moved = _really_moved(mirror, commit, moved)
    ending = f"{WITH_SUBMODULES}{_digest(moved)}" if with_submodules else ""
    folder = workspace.absolute() / "checkouts" / mirror.name / f"{commit}{ending}"
    with lease(folder.with_name(f"{folder.name}.lease")) as held:
        _remove_leftovers(folder)
        if folder.exists():
            changes = find_changes(folder, commit, timeout=mirror.timeout)
            if changes:
                log.warning("%s: modified since it was checked out, recreating it: %s", folder, "; ".join(changes[:5]))
                held.ensure_held()
                # Not removed at once: a live launcher or job may still read it.
                folder.rename(folder.with_name(f"changed-{folder.name}.{uuid.uuid4().hex}"))
        if not folder.exists():
            started = time.monotonic()
            temporary = folder.with_name(f".{folder.name}.{uuid.uuid4().hex}.tmp")
            made = temporary / folder.name
            try:
                mirror.repaired(partial(_make, mirror, commit, made, workspace, with_submodules, moved))
                held.ensure_held()
                made.rename(folder)
            finally:
                shutil.rmtree(temporary, ignore_errors=True)
            log.info("%s at %s checked out in %.1f s", mirror.name, commit[:12], time.monotonic() - started)
        # When it was last used, for `prune`.
        os.utime(folder)
    pointers = find_lfs_pointers(folder, timeout=mirror.timeout)
    if pointers:
        message = "%s: %d files are Git LFS pointers without content, such as %s"
        log.warning(message, masked(mirror.url), len(pointers), pointers[0])
    return PinnedRepository(
        url=masked(mirror.url),
        ref=ref,
        commit=commit,
        path=folder,
        **mirror.about(commit).model_dump(),
        lfs_pointers=tuple(map(one_line, pointers)),
        submodules=pinned_commits(folder, timeout=mirror.timeout),
    )


def find_lfs_pointers(folder: Path, *, timeout: float = 600.0) -> list[str]:
    """The files of a checkout, submodules included, whose content lies in Git LFS: only pointers are checked out.

    A launcher does not need them, so they are never fetched; who does need one must see that it is not there.
    """
    listing = git("ls-files", "-z", "--", ":(attr:filter=lfs)", timeout=timeout, folder=folder)
    found = [path for path in listing.split("\0") if path]
    for path in pinned_commits(folder, timeout=timeout):
        if (folder / path / ".git").exists():
            found += [f"{path}/{inner}" for inner in find_lfs_pointers(folder / path, timeout=timeout)]
    return found


def find_changes(folder: Path, commit: str, *, timeout: float = 600.0) -> list[str]:
    """The differences of a checkout from its commit, one line each; empty when there are none.

    Files that git ignores count too, because a launcher may read them. Python's bytecode caches do not: Python
    itself checks them against their sources.

    Raises:
        TransientError: git did not answer in time.
    """
    _, with_submodules, digest = folder.name.partition(WITH_SUBMODULES)
    return _find_changes(folder, commit, bool(with_submodules), timeout, digest)


def unfinished_checkouts(repository: Path) -> list[Path]:
    """The folders in which check-outs of a repository, a folder of `checkouts`, work or were killed at work."""
    return [path for path in repository.glob(".*.tmp") if path.is_dir()]


def old_changed_trees(repository: Path) -> list[Path]:
    """The trees of a repository that were found modified and recreated so long ago that they are no longer needed."""
    return [tree for tree in repository.glob("changed-*") if _is_old(tree)]


def find_replaced(folder: Path, since: datetime) -> list[str]:
    """When a checkout was found modified after `since` and recreated, one line each; usually none.

    A job that began before then used the modified tree, whatever is there now.
    """
    times = []
    for path in folder.parent.glob(f"changed-{folder.name}.*"):
        with suppress(FileNotFoundError):  # an old one, just removed
            # The time of the rename; that of the content may be any.
            times.append(datetime.fromtimestamp(path.stat().st_ctime, UTC))
    return [f"found modified at {time:%Y-%m-%d %H:%M:%S} UTC and recreated" for time in sorted(times) if time > since]


def _find_changes(folder: Path, commit: str, with_submodules: bool, timeout: float, digest: str = "") -> list[str]:
    head = attempt("rev-parse", "HEAD", timeout=timeout, folder=folder)
    if head.code:
        return [f"not a complete git checkout: {head.tail}"]
    found = head.stdout.decode().strip()
    changes = [] if found == commit else [f"it is at commit {found}"]
    submodules = pinned_commits(folder, timeout=timeout)
    tree = _pinned_commits(folder, "HEAD", timeout=timeout) if digest else submodules
    moved = {path: pin for path, pin in submodules.items() if tree.get(path) != pin}
    if _digest(moved) != digest:
        changes.append("other submodules are staged than those it was made with")
    inner = submodules if with_submodules else {}
    with ThreadPoolExecutor(max_workers=len(inner) + 1) as pool:
        found_inside = {
            # In this context: what it works for may be interrupted.
            path: pool.submit(copy_context().run, _find_changes, folder / path, pin, True, timeout)
            for path, pin in inner.items()
        }
        status = attempt(
            "status", "--porcelain=v1", "-z", "--untracked-files=all", "--ignored=matching", "--no-renames",
            "--ignore-submodules=dirty",
            timeout=timeout, folder=folder,
        )  # fmt: skip
    if status.code:
        return [*changes, f"git status fails: {status.tail}"]
    for entry in status.stdout.decode(errors="replace").split("\0"):
        state, path = entry[:2], entry[3:]
        if path and not (state in _ADDED and _HARMLESS.search(path)) and not (state == _STAGED and path in moved):
            changes.append(f"{_STATES.get(state, 'changed')}: {path}")
    for path, found_there in found_inside.items():
        changes += [f"{path}: {change}" for change in found_there.result()]
    # What lies in the folder of a submodule that is not checked out is nothing to git.
    return changes + [f"added: {path}" for path in submodules if path not in inner and any((folder / path).glob("*"))]


_ADDED = ("??", "!!")
_STAGED = "M "
_STATES = {"??": "added", "!!": "added (ignored by git)", " D": "deleted"}
# Bytecode caches, and the folder in which NeMo-Run's packager puts an archive together while a launcher runs.
_HARMLESS = re.compile(r"(^|/)__pycache__/|^temp_extract_[0-9a-f-]{36}/")


def _make(
    mirror: Mirror, commit: str, folder: Path, workspace: Path, with_submodules: bool, moved: Mapping[str, str]
) -> None:
    mirror.resolve(commit)
    folder.parent.mkdir(parents=True, exist_ok=True)
    if with_submodules:
        clone_with_submodules(mirror, commit, folder, workspace, moved)
    else:
        clone_at(mirror, commit, folder)
    changes = find_changes(folder, commit, timeout=mirror.timeout)
    if changes:
        what = f"a fresh checkout differs from its commit: {'; '.join(changes[:5])}"
        advice = "Check the git attributes and filters configured on this machine"
        raise DamagedData(what, subject=f"{masked(mirror.url)} at {commit}", advice=advice)


def _really_moved(mirror: Mirror, commit: str, moved: Mapping[str, str]) -> dict[str, str]:
    """Those of the moved submodules that are not where the tree pins them."""
    pinned = {one.path: one.commit for one in find_submodules(mirror, commit)} if moved else {}
    for path in moved:
        if path not in pinned:
            what = f"{path} is not a submodule"
            advice = f"Its submodules are {', '.join(pinned)}" if pinned else "It has no submodules"
            raise InvalidInput(what, subject=f"{masked(mirror.url)} at {commit[:12]}", advice=advice)
    return {path: pin for path, pin in sorted(moved.items()) if pin != pinned[path]}


def _digest(moved: Mapping[str, str]) -> str:
    """How the name of a checkout ends with these submodules elsewhere than its tree pins them; empty without any."""
    text = json.dumps(moved, sort_keys=True)
    return f"-{hashlib.sha256(text.encode()).hexdigest()[:12]}" if moved else ""


def _remove_leftovers(folder: Path) -> None:
    """Remove what a killed process left half made, and changed trees that are old."""
    for temporary in folder.parent.glob(f".{folder.name}.*.tmp"):
        remove_tree(temporary)
    for changed in folder.parent.glob(f"changed-{folder.name}.*"):
        if _is_old(changed):
            remove_tree(changed)


def _is_old(changed: Path) -> bool:
    return time.time() - changed.stat().st_ctime > CHANGED_TREES_KEPT_SECONDS


class Submodule(Model):
    """One submodule: its name in `.gitmodules`, its folder, its absolute address, and the commit the tree pins."""

    name: str
    path: str
    url: str
    commit: str


def clone_with_submodules(
    mirror: Mirror, commit: str, folder: Path, workspace: Path, moved: Mapping[str, str] = _AS_PINNED
) -> None:
    """Recreate `folder` as a clone of a mirror with a commit checked out, every submodule in its place, and theirs.

    All repositories are checked out side by side. A submodule is made beside `folder` (as `<folder>.<number>`) and
    moved into it: nothing else may write into the tree that git makes.

    Relative addresses of submodules are relative to the mirror's repository. `moved` has, by folder, the commits that
    take the place of pinned ones of its own submodules.

    Raises:
        InvalidInput: A submodule's repository or commit does not exist.
        PermanentError: A submodule's repository refuses us.
        TransientError: It cannot be reached.
    """
    mirror.resolve(commit)
    with ThreadPoolExecutor() as pool:

        def begin(action: Callable[[], None]) -> "Future[None]":
            return pool.submit(copy_context().run, action)  # a context holds the site's logins

        own = begin(partial(clone_at, mirror, commit, folder))
        made = []
        for number, submodule in enumerate(find_submodules(mirror, commit)):
            source = Mirror(submodule.url, workspace, timeout=mirror.timeout)
            aside = folder.with_name(f"{folder.name}.{number}")
            pin = moved.get(submodule.path, submodule.commit)
            # A repository of its own: what `git submodule update` makes in many more steps.
            action = partial(clone_with_submodules, source, pin, aside, workspace)
            made.append((submodule, aside, begin(partial(source.repaired, action))))
        own.result()
        for path, pin in moved.items():
            git("update-index", "--cacheinfo", f"160000,{pin},{path}", timeout=mirror.timeout, folder=folder)
        for submodule, aside, ended in made:
            ended.result()
            aside.rename(folder / submodule.path)
            git("config", f"submodule.{submodule.name}.active", "true", timeout=mirror.timeout, folder=folder)


def find_submodules(mirror: Mirror, commit: str) -> list[Submodule]:
    """The submodules that a commit of a mirror pins."""
    pinned = _pinned_commits(mirror.path, commit, timeout=mirror.timeout)
    return [
        Submodule(name=name, path=path, url=absolute_submodule_url(url, mirror.url), commit=pinned[path])
        for path, (name, url) in _addresses(mirror.path, commit, pinned, timeout=mirror.timeout).items()
    ]


def absolute_submodule_url(url: str, parent: str) -> str:
    """A submodule's address: `./` and `../` are relative to its parent's (gitmodules(5))."""
    if not url.startswith(("./", "../")):
        return url
    parent, separator = parent.rstrip("/"), "/"
    while url.startswith(("./", "../")):
        if url.startswith("../"):
            cut = max(parent.rfind("/"), parent.rfind(":"))
            parent, separator = parent[:cut], parent[cut]
        url = url.split("/", 1)[1]
    return f"{parent}{separator}{url}"


def pinned_commits(tree: Path, *, timeout: float) -> dict[str, str]:
    """The commits that a checkout pins for its submodules, by folder, checked out or not: those of its index."""
    if not (tree / ".gitmodules").is_file():
        return {}
    # Nothing where the index cannot be read: `git status` says so too.
    listing = attempt("ls-files", "--stage", "-z", timeout=timeout, folder=tree).stdout.decode(errors="surrogateescape")
    staged = (entry.partition("\t") for entry in listing.split("\0") if entry.startswith("160000 "))
    pinned = {path: facts.split()[1] for facts, _, path in staged}
    return {path: pinned[path] for path in _addresses(tree, "HEAD", pinned, timeout=timeout)}


def _pinned_commits(repository: Path, commit: str, *, timeout: float) -> dict[str, str]:
    """The commits that a commit pins, by folder; empty where it names no addresses for them."""
    commits, named = {}, False
    listing = git("ls-tree", "-r", "-z", commit, timeout=timeout, folder=repository)
    for entry in listing.split("\0"):
        facts, _, path = entry.partition("\t")
        named = named or path == ".gitmodules"
        if facts.startswith("160000 commit "):
            commits[path] = facts.split()[2]
    return commits if named else {}


def _addresses(repository: Path, commit: str, pinned: Collection[str], *, timeout: float) -> dict[str, tuple[str, str]]:
    """Name and address of those folders that have one in a commit's `.gitmodules`; git passes over the others too."""
    if not pinned:
        return {}
    settings: dict[str, dict[str, str]] = {}
    listing = git("config", "--blob", f"{commit}:.gitmodules", "--null", "--list", timeout=timeout, folder=repository)
    for entry in listing.split("\0"):
        key, _, value = entry.partition("\n")
        match = re.fullmatch(r"submodule\.(?P<name>.+)\.(?P<key>path|url)", key, re.DOTALL)
        if match:
            settings.setdefault(match["name"], {})[match["key"]] = value
    return {
        found["path"]: (name, found["url"])
        for name, found in settings.items()
        if found.get("path") in pinned and "url" in found
    }
