"""Commits made with `git fast-import`: the same commits on every machine, and no work tree in between.

Nothing of the user's own git reaches in: no configuration, identity, hooks, signing, line endings or clock.
"""

import os
import subprocess
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path

from pydantic import Field

from nightbridge.errors import PermanentError
from nightbridge.models import Model

TIMEOUT_SECONDS = 60.0
AUTHOR = "Practice <practice@nightbridge.invalid>"

_ENVIRONMENT = {
    "GIT_CONFIG_GLOBAL": os.devnull,
    "GIT_CONFIG_SYSTEM": os.devnull,
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_TERMINAL_PROMPT": "0",
    "LC_ALL": "C",
}


class Change(Model):
    """A commit to be made: files that it writes (path to content), submodules (path to commit), and its tag, if any."""

    message: str
    made_at: datetime
    files: dict[str, bytes]
    submodules: dict[str, str] = Field({}, repr=False, description="Not in what tells editions of a history apart.")
    tag: str | None = None


def git(repository: Path, *arguments: str, data: bytes | None = None) -> str:
    """Run git in a bare repository and return its output without the last line end.

    Raises:
        PermanentError: git is not installed, or it failed; its last line of stderr is in the message.

    """
    kept = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    try:
        done = subprocess.run(
            ["git", f"--git-dir={repository}", *arguments],
            input=data if data is not None else b"",
            capture_output=True,
            check=True,
            env=kept | _ENVIRONMENT,
            timeout=TIMEOUT_SECONDS,
        )
    except FileNotFoundError as error:
        raise PermanentError("git is not installed", subject="git", advice="Install git") from error
    except subprocess.TimeoutExpired as error:
        raise PermanentError(
            f"git {arguments[0]} took over {TIMEOUT_SECONDS:.0f} s", subject=str(repository)
        ) from error
    except subprocess.CalledProcessError as error:
        lines = error.stderr.decode(errors="replace").strip().splitlines()
        raise PermanentError(
            f"git {arguments[0]} failed: {lines[-1] if lines else f'code {error.returncode}'}", subject=str(repository)
        ) from error
    return done.stdout.decode().rstrip("\n")


def create(repository: Path, settings: Mapping[str, str]) -> None:
    """Make an empty bare repository whose branch is `main`, with these settings of its own."""
    repository.parent.mkdir(parents=True, exist_ok=True)
    git(repository, "init", "--quiet", "--bare", "--object-format=sha1", "--template=", str(repository))
    git(repository, "symbolic-ref", "HEAD", "refs/heads/main")
    for name, value in settings.items():
        git(repository, "config", name, value)


def add_commits(repository: Path, changes: Iterable[Change]) -> None:
    """Add commits to the end of `main`, each with the files of the one before it and its own.

    Raises:
        PermanentError: git refused them.

    """
    tip = git(repository, "for-each-ref", "--format=%(objectname)", "refs/heads/main")
    stream = b""
    parent = tip
    for number, change in enumerate(changes, start=1):
        stream += _commit(change, number, parent)
        parent = f":{number}"
        if change.tag:
            stream += _tag(change, number)
    git(repository, "fast-import", "--quiet", "--date-format=raw", data=stream + b"done\n")


def _commit(change: Change, number: int, parent: str) -> bytes:
    who = f"{AUTHOR} {_raw(change.made_at)}"
    head = f"commit refs/heads/main\nmark :{number}\nauthor {who}\ncommitter {who}\n".encode()
    files = (f"M 100644 inline {path}\n".encode() + _data(content) for path, content in sorted(change.files.items()))
    links = (f"M 160000 {commit} {path}\n".encode() for path, commit in sorted(change.submodules.items()))
    start = _data(change.message.encode()) + (f"from {parent}\n".encode() if parent else b"")
    return head + start + b"".join((*files, *links))


def _tag(change: Change, number: int) -> bytes:
    head = f"tag {change.tag}\nfrom :{number}\ntagger {AUTHOR} {_raw(change.made_at)}\n"
    return head.encode() + _data(f"Release {change.tag}".encode())


def _data(content: bytes) -> bytes:
    return f"data {len(content)}\n".encode() + content + b"\n"


def _raw(moment: datetime) -> str:
    return f"{int(moment.astimezone(UTC).timestamp())} +0000"
