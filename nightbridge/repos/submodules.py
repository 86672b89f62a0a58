"""Submodules of a checkout, at the commits that its tree pins, each from a mirror of its own."""

import re
from collections.abc import Callable, Collection
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import copy_context
from functools import partial
from pathlib import Path

from nightbridge.models import Model
from nightbridge.repos.git import git
from nightbridge.repos.mirrors import Mirror, clone_at


class Submodule(Model):
    """One submodule: its name in `.gitmodules`, its folder, its absolute address, and the commit the tree pins."""

    name: str
    path: str
    url: str
    commit: str


def clone_with_submodules(mirror: Mirror, commit: str, folder: Path, workspace: Path) -> None:
    """Recreate `folder` as a clone of a mirror with a commit checked out, every submodule in its place, and theirs.

    All repositories are checked out side by side. A submodule is made beside `folder` (as `<folder>.<number>`) and
    moved into it: git wants no one else to write into the tree that it makes.

    Args:
        mirror: The mirror; relative addresses of submodules are relative to its repository.
        commit: Full commit, which the mirror has.
        folder: Where the tree is made.
        workspace: Where mirrors are kept.

    Raises:
        InvalidInput: A submodule's repository or commit does not exist.
        PermanentError: A submodule's repository refuses us.
        TransientError: It cannot be reached.

    """
    with ThreadPoolExecutor() as pool:

        def begin(action: Callable[[], None]) -> "Future[None]":
            return pool.submit(copy_context().run, action)  # a context holds the site's logins

        own = begin(partial(clone_at, mirror, commit, folder))
        made = []
        for number, submodule in enumerate(find_submodules(mirror, commit)):
            source = Mirror(submodule.url, workspace, timeout=mirror.timeout)
            aside = folder.with_name(f"{folder.name}.{number}")
            action = partial(_check_out, source, submodule.commit, aside, workspace)
            made.append((submodule, aside, begin(partial(source.repaired, action))))
        own.result()
        for submodule, aside, ended in made:
            ended.result()
            aside.rename(folder / submodule.path)
            git("config", f"submodule.{submodule.name}.active", "true", timeout=mirror.timeout, folder=folder)


def _check_out(source: Mirror, commit: str, folder: Path, workspace: Path) -> None:
    source.resolve(commit)
    # A repository of its own in the submodule's folder: what `git submodule update` makes in many more steps.
    clone_with_submodules(source, commit, folder, workspace)


def find_submodules(mirror: Mirror, commit: str) -> list[Submodule]:
    """The submodules that a commit of a mirror pins."""
    pinned = _pinned_commits(mirror.path, commit, timeout=mirror.timeout)
    return [
        Submodule(name=name, path=path, url=absolute_submodule_url(url, mirror.url), commit=pinned[path])
        for path, (name, url) in _addresses(mirror.path, commit, pinned, timeout=mirror.timeout).items()
    ]


def absolute_submodule_url(url: str, parent: str) -> str:
    """A submodule's address: `./` and `../` are relative to its parent's, as gitmodules(5) says."""
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
    """The commits that the tree of a checkout pins for its submodules, by folder, checked out or not."""
    if not (tree / ".gitmodules").is_file():
        return {}
    pinned = _pinned_commits(tree, "HEAD", timeout=timeout)
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
