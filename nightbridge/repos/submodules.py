"""Submodules of a checkout, at the commits that its tree pins, each from a mirror of its own."""

import re
from functools import partial
from pathlib import Path

from nightbridge.models import Model
from nightbridge.repos.git import git
from nightbridge.repos.local_clones import clone_at
from nightbridge.repos.mirrors import Mirror


class Submodule(Model):
    """One submodule: its name in `.gitmodules`, its folder, its absolute address, and the commit the tree pins."""

    name: str
    path: str
    url: str
    commit: str


def add_submodules(tree: Path, mirror: Mirror, workspace: Path) -> None:
    """Check out every submodule of a checkout, and theirs.

    Args:
        tree: The checkout.
        mirror: The mirror that it was made from; relative addresses are relative to this repository.
        workspace: Where mirrors are kept.

    Raises:
        InvalidInput: A submodule's repository or commit does not exist.
        PermanentError: A submodule's repository refuses us.
        TransientError: It cannot be reached.

    """
    timeout = mirror.timeout
    for submodule in find_submodules(tree, mirror.url, timeout=timeout):
        source = Mirror(submodule.url, workspace, timeout=timeout)
        inner = tree / submodule.path
        source.repaired(partial(_check_out, source, submodule.commit, inner))
        git("config", f"submodule.{submodule.name}.active", "true", timeout=timeout, folder=tree)
        add_submodules(inner, source, workspace)


def _check_out(source: Mirror, commit: str, folder: Path) -> None:
    source.resolve(commit)
    # A repository of its own in the submodule's folder: what `git submodule update` makes in many more steps.
    clone_at(source, commit, folder)


def find_submodules(tree: Path, url: str, *, timeout: float) -> list[Submodule]:
    """The submodules that the checkout `tree` of the repository `url` pins."""
    if not (tree / ".gitmodules").is_file():
        return []
    settings: dict[str, dict[str, str]] = {}
    listing = git("config", "--file", ".gitmodules", "--null", "--list", timeout=timeout, folder=tree)
    for entry in listing.split("\0"):
        key, _, value = entry.partition("\n")
        match = re.fullmatch(r"submodule\.(?P<name>.+)\.(?P<key>path|url)", key, re.DOTALL)
        if match:
            settings.setdefault(match["name"], {})[match["key"]] = value
    pinned = pinned_commits(tree, timeout=timeout)
    return [
        Submodule(
            name=name, path=found["path"], url=absolute_submodule_url(found["url"], url), commit=pinned[found["path"]]
        )
        for name, found in settings.items()
        if found.get("path") in pinned and "url" in found
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
    listing = git("ls-tree", "-r", "-z", "HEAD", timeout=timeout, folder=tree)
    commits = {}
    for entry in listing.split("\0"):
        facts, _, path = entry.partition("\t")
        if facts.startswith("160000 commit "):
            commits[path] = facts.split()[2]
    return commits
