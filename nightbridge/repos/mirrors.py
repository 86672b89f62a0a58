"""One bare mirror per repository address, fetched incrementally: refs are resolved in it, and checkouts cloned from it.

A clone on the same file system is a whole repository whose object files are the mirror's, hard-linked.
"""

import difflib
import hashlib
import logging
import os
import re
import shutil
import stat
import time
import uuid
from collections.abc import Callable
from contextlib import AbstractContextManager
from datetime import datetime
from pathlib import Path
from typing import TypeVar

from nightbridge.errors import AccessRefused, InvalidInput, PermanentError
from nightbridge.locking import Lease, lease
from nightbridge.models import Model
from nightbridge.models.scenario import is_ref
from nightbridge.repos.git import absolute_url, attempt, git, masked, one_line, repository_name, time_of

log = logging.getLogger(__name__)

FULL_COMMIT = re.compile(r"^[0-9a-f]{40}$")
_ABBREVIATED_COMMIT = re.compile(r"^[0-9a-f]{4,39}$")
_BRANCHES_AND_TAGS = ("+refs/heads/*:refs/heads/*", "+refs/tags/*:refs/tags/*")
# Where refs that are neither branch nor tag are kept; outside what a fetch prunes.
_OTHER_REFS = "refs/nightbridge/fetched"
_LOCK_PATIENCE_SECONDS = 3.0
_COMMITS_SHOWN = 49
_WRITABLE = stat.S_IWUSR | stat.S_IWGRP | stat.S_IWOTH

T = TypeVar("T")


class Commit(Model):
    """What reports show of a commit."""

    subject: str
    committed_at: datetime
    describe: str


class Mirror:
    """The bare mirror of one repository. Nothing is fetched before it is needed.

    Args:
        url: Repository address, as the user wrote it.
        workspace: Where mirrors are kept, under `repos/`.
        timeout: Longest time one git command may take, seconds.
    """

    def __init__(self, url: str, workspace: Path, *, timeout: float) -> None:
        self.url = absolute_url(url)
        self.name = repository_name(self.url)
        digest = hashlib.sha256(self.url.encode()).hexdigest()[:10]  # tells repositories of one name apart
        self.path = workspace.absolute() / "repos" / f"{self.name}-{digest}.git"
        self.timeout = timeout

    def resolve(self, ref: str) -> str:
        """The full commit that `ref` means now.

        Args:
            ref: Branch, tag, full or abbreviated commit, `HEAD`, or a full ref name such as `refs/pull/7/head`.

        Raises:
            InvalidInput: No such repository or ref, or the ref means two different commits.
            PermanentError: The repository refuses us.
            TransientError: The repository cannot be reached, or another process holds the mirror for too long.
        """
        return self.repaired(lambda: self._resolve(ref.strip()))

    def repaired(self, action: Callable[[], T]) -> T:
        """Do something with the mirror; when that fails and the mirror is damaged, make the mirror and it again.

        git checks every object that it reads, so what a disk has damaged shows as a failure; a whole `git fsck`
        each night would take longer than all the rest.
        """
        try:
            return action()
        except (AccessRefused, InvalidInput):
            raise
        except PermanentError:
            damage = self.damage()
            if not damage:
                raise
        log.warning("%s: damaged, mirroring again: %s", masked(self.url), "; ".join(damage[:5]))
        with self.lease() as held:
            self._make(held, _BRANCHES_AND_TAGS)
        return action()

    def damage(self) -> list[str]:
        """What `git fsck` finds wrong in the mirror, one line each; empty where nothing is, or no mirror."""
        if not self.path.is_dir():
            return []
        finished = attempt("fsck", "--full", "--no-dangling", "--no-progress", timeout=self.timeout, folder=self.path)
        if not finished.code:
            return []
        lines = (*finished.stderr.splitlines(), *finished.stdout.decode(errors="replace").splitlines())
        return [line for line in lines if line] or [f"git fsck ended with code {finished.code}"]

    def commits_between(self, old: str, new: str) -> tuple[str, ...]:
        """Hash and subject of the commits that `new` has and `old` has not, newest first, at most 50 lines.

        Empty when the mirror no longer has the old one.
        """
        if old == new or not self.has(old):
            return ()
        log_of_range = self._git("log", f"--max-count={_COMMITS_SHOWN}", "--format=%h %s", f"{old}..{new}")
        lines = [one_line(line) for line in log_of_range.split("\n") if line]
        if len(lines) < _COMMITS_SHOWN:
            return tuple(lines)
        count = int(self._git("rev-list", "--count", f"{old}..{new}"))
        return (*lines, f"... and {count - len(lines)} more") if count > len(lines) else tuple(lines)

    def _resolve(self, ref: str) -> str:
        if not is_ref(ref):
            raise InvalidInput("not a ref", subject=repr(ref), advice="Give a branch, a tag or a commit")
        if FULL_COMMIT.match(ref.lower()):
            return self._ensure(ref.lower())
        with self.lease() as held:
            if ref == "HEAD" or ref.startswith("refs/"):
                return self._resolve_full_name(ref, held)
            self._fetch(held, *_BRANCHES_AND_TAGS)
            return self._resolve_short_name(ref)

    def has(self, commit: str) -> bool:
        """Whether the mirror holds a commit."""
        return self._peel(commit) is not None

    def about(self, commit: str) -> Commit:
        """Subject, time and description of a commit that the mirror holds."""
        # Of a commit without a message the second line is missing: the output's last line end is cut off.
        when, _, subject = self._git("show", "--no-patch", "--format=%cI%n%s", commit).partition("\n")
        describe = self._git("describe", "--tags", "--always", commit)
        return Commit(subject=one_line(subject), committed_at=time_of(when), describe=one_line(describe))

    def lease(self) -> AbstractContextManager[Lease]:
        """The lease under which the mirror changes, and under which its files may be linked elsewhere."""
        return lease(self.path.with_suffix(".lease"))

    def _ensure(self, commit: str) -> str:
        if self.has(commit):
            return commit
        with self.lease() as held:
            if not self.has(commit):
                self._fetch(held, *_BRANCHES_AND_TAGS)
            if not self.has(commit):
                # On no branch and no tag: servers still hand out a commit of a pull request to those who name it.
                self._fetch(held, commit, about=f"commit {commit}")
        return commit

    def _resolve_full_name(self, ref: str, held: Lease) -> str:
        # Flat, because a name that another one has become a folder of (`release`, `release/26.02`) would be in its way.
        kept = f"{_OTHER_REFS}/{hashlib.sha256(ref.encode()).hexdigest()[:16]}"
        self._fetch(held, *_BRANCHES_AND_TAGS, f"+{ref}:{kept}", about=ref)
        commit = self._peel(kept)
        if commit is None:
            raise InvalidInput("this ref does not name a commit", subject=f"{ref} of {masked(self.url)}")
        return commit

    def _resolve_short_name(self, ref: str) -> str:
        branch, tag = self._peel(f"refs/heads/{ref}"), self._peel(f"refs/tags/{ref}")
        if branch and tag and branch != tag:
            what = f"a branch and a tag of this name differ ({branch[:12]}, {tag[:12]})"
            advice = f"Write refs/heads/{ref} or refs/tags/{ref}"
            raise InvalidInput(what, subject=f"{ref} of {masked(self.url)}", advice=advice)
        commit = branch or tag or self._abbreviated(ref)
        if commit is None:
            what = "the repository has no such branch, tag or commit"
            raise InvalidInput(what, subject=f"{ref} of {masked(self.url)}", advice=self._nearest(ref))
        return commit

    def _abbreviated(self, ref: str) -> str | None:
        if not _ABBREVIATED_COMMIT.match(ref.lower()):
            return None
        objects = self._git("rev-parse", f"--disambiguate={ref.lower()}").split()
        commits = sorted({commit for found in objects if (commit := self._peel(found)) is not None})
        if len(commits) > 1:
            what = f"{len(commits)} commits begin with these digits"
            advice = f"Write more digits: {', '.join(commit[:12] for commit in commits[:5])}"
            raise InvalidInput(what, subject=f"{ref} of {masked(self.url)}", advice=advice)
        return commits[0] if commits else None

    def _nearest(self, ref: str) -> str:
        names = self._git("for-each-ref", "--format=%(refname:lstrip=2)", "refs/heads", "refs/tags").split()
        close = difflib.get_close_matches(ref, names, n=1) or [name for name in names if name == ref.split("/")[-1]]
        return f"The nearest is {close[0]}" if close else "Check its spelling, and that it was pushed"

    def _peel(self, name: str) -> str | None:
        if not self.path.is_dir():
            return None
        finished = attempt(
            "rev-parse", "--verify", "--quiet", "--end-of-options", f"{name}^{{commit}}",
            timeout=self.timeout, folder=self.path,
        )  # fmt: skip
        commit = finished.stdout.decode().strip()
        # rev-parse repeats a full commit without looking for it when it is not peeled; peeled, it must be there.
        return commit if finished.code == 0 and FULL_COMMIT.match(commit) else None

    def _git(self, *arguments: str) -> str:
        return git(*arguments, timeout=self.timeout, folder=self.path, subject=self.url)

    def _fetch(self, held: Lease, *refspecs: str, about: str = "") -> None:
        self._remove_leftovers()
        is_bare = attempt("rev-parse", "--is-bare-repository", timeout=self.timeout, folder=self.path).stdout
        if is_bare == b"true\n":
            self._fetch_into(self.path, refspecs, about)
        else:
            self._make(held, refspecs, about)

    def _make(self, held: Lease, refspecs: tuple[str, ...], about: str = "") -> None:
        log.info("%s: mirroring the whole repository", masked(self.url))
        started = time.monotonic()
        temporary = self.path.with_name(f".{self.path.name}.{uuid.uuid4().hex}.tmp")
        try:
            git("init", "--quiet", "--bare", "--template=", temporary, timeout=self.timeout)
            # A commit that a branch has left stays: last month's runs refer to it.
            git("config", "gc.pruneExpire", "never", timeout=self.timeout, folder=temporary)
            self._fetch_into(temporary, refspecs, about)
            held.ensure_held()
            shutil.rmtree(self.path, ignore_errors=True)
            temporary.rename(self.path)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        log.info("%s: mirrored in %.1f s", masked(self.url), time.monotonic() - started)

    def _fetch_into(self, folder: Path, refspecs: tuple[str, ...], about: str) -> None:
        subject = f"{about} of {self.url}" if about else self.url
        git(
            "fetch", "--quiet", "--prune", "--force", "--no-tags", "--no-write-fetch-head", "--end-of-options",
            self.url, *refspecs,
            timeout=self.timeout, folder=folder, subject=subject,
        )  # fmt: skip

    def _remove_leftovers(self) -> None:
        """Remove what a killed process left: only the holder of the lease makes these, so they are dead.

        The killed process's git may live a little longer, so its lock files get a moment to go away by themselves.
        """
        for temporary in self.path.parent.glob(f".{self.path.name}.*.tmp"):
            shutil.rmtree(temporary, ignore_errors=True)
        patience = time.monotonic() + _LOCK_PATIENCE_SECONDS
        while locks := [*self.path.glob("*.lock"), *(self.path / "refs").rglob("*.lock")]:
            if time.monotonic() > patience:
                for path in locks:
                    log.warning("%s: removed the lock file of a killed git process", path)
                    path.unlink(missing_ok=True)
                return
            time.sleep(0.1)


def clone_at(mirror: Mirror, commit: str, folder: Path) -> None:
    """Recreate `folder` as a clone of a mirror with a commit of it checked out, its files read-only.

    A program that tries to change a file fails. Folders stay writable: NeMo-Run's packager puts a short-lived
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
            "--config=gc.auto=0", mirror.path, folder,
            timeout=mirror.timeout,
        )  # fmt: skip
    git("config", "remote.origin.url", masked(mirror.url), timeout=mirror.timeout, folder=folder)
    git(
        "checkout", "--quiet", "--detach", commit,
        timeout=mirror.timeout, folder=folder, subject=f"{commit} of {mirror.url}",
    )  # fmt: skip
    _make_files_read_only(folder)
    # Older than all files: the first look for changes compares each of them with the commit, whatever filters did.
    os.utime(folder / ".git" / "index", (1, 1))


def _make_files_read_only(tree: Path) -> None:
    for folder, folders, names in os.walk(tree):
        if ".git" in folders:
            folders.remove(".git")
        for path in (Path(folder, name) for name in names):
            if not path.is_symlink():
                path.chmod(path.stat().st_mode & ~_WRITABLE)
