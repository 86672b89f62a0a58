"""Repository addresses, made absolute and masked in messages, and the logins for them.

A site keeps logins for git over HTTPS as a secret, which is never written to disk. git runs a credential helper
(gitcredentials(7)) only when a server requires a login. Ours is this module, run as a program of its own that reads the
secret from a file in memory. Neither git's arguments nor its environment, its configuration or its addresses ever hold
a password.
"""

import hashlib
import re
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from urllib.parse import unquote, urlsplit

from nightbridge.errors import InvalidInput
from nightbridge.masking import MASK
from nightbridge.models import slug
from nightbridge.processes import own_program
from nightbridge.secrets import file_in_memory, read_netrc

_USERINFO = re.compile(r"(?P<scheme>[a-z][a-z0-9+.-]*://)(?P<userinfo>[^/@\s]+)@", re.IGNORECASE)
# git-clone(1): an address with a colon before the first slash is `host:path`, over ssh.
_SSH_SHORTHAND = re.compile(r"^[^/:\s]+:")


def absolute_url(text: str) -> str:
    """Return the address that git is given: a URL as it is, a local path or `file://` as an absolute path.

    Raises:
        InvalidInput: Empty, an option, or it carries a password, which would end up in process lists and logs.
    """
    text = text.strip()
    if not text or text.startswith("-"):
        raise InvalidInput("not a repository address", thing=repr(text), advice="Give a URL or a folder")
    userinfo = _USERINFO.match(text)
    if userinfo and ":" in userinfo["userinfo"]:
        raise InvalidInput(
            "a password in a repository address would appear in process lists and logs",
            thing=masked(text),
            advice="Remove it and use a git credential helper (git help credentials)",
        )
    if text.startswith("file://"):
        return str(Path(unquote(text.removeprefix("file://"))).absolute())
    if "://" in text or _SSH_SHORTHAND.match(text):
        return text.rstrip("/")
    return str(Path(text).expanduser().absolute())


def masked(text: str) -> str:
    """Replace user names and passwords in every URL of a text; an ssh login such as `git@` is no secret and stays."""
    return _USERINFO.sub(
        lambda match: (
            match[0]
            if match["scheme"].startswith("ssh") and ":" not in match["userinfo"]
            else f"{match['scheme']}{MASK}@"
        ),
        text,
    )


def repository_name(url: str) -> str:
    """The last part of an address without `.git`, as part of a path: `Megatron-Bridge`."""
    last = re.split(r"[/:]", url.rstrip("/").removesuffix("/.git"))[-1].removesuffix(".git")
    return re.sub(r"[^A-Za-z0-9._-]+", "-", last).strip(".-") or slug(url)


def url_hash(url: str) -> str:
    """Ten hex digits that tell repositories of one name apart."""
    return hashlib.sha256(url.encode()).hexdigest()[:10]


_SETTINGS: ContextVar[tuple[str, ...]] = ContextVar("settings", default=())
# No password is sent unencrypted over the network.
_HERE = frozenset({"127.0.0.1", "localhost", "::1"})


@contextmanager
def git_logins(lines: str) -> Iterator[None]:
    """Let git log in with a secret for the length of the block; git's own helpers do when there are no lines.

    Args:
        lines: `machine HOST login USER password TOKEN`, one a line (netrc(5)).

    Raises:
        PermanentError: The lines cannot be read.
    """
    if not lines.strip():
        yield
        return
    with file_in_memory(lines) as path:
        read_netrc(path, "the git credentials")
        # The empty one removes all helpers of the user: git would pass each of them a login that worked, to keep it.
        token = _SETTINGS.set(("credential.helper=", f"credential.helper={_command(path)}"))
        try:
            yield
        finally:
            _SETTINGS.reset(token)


def login_settings() -> tuple[str, ...]:
    """The settings, as `NAME=VALUE`, that make git use the logins of the enclosing `git_logins`."""
    return _SETTINGS.get()


def main(arguments: Sequence[str]) -> int:
    """Be git's credential helper: `FILE get`, with the question on stdin. Nothing is ever stored."""
    path, action = arguments
    if action != "get":
        return 0
    request = dict(line.split("=", 1) for line in sys.stdin.read().splitlines() if "=" in line)
    address = urlsplit(f"{request.get('protocol')}://{request.get('host')}")
    logins = read_netrc(Path(path), "the git credentials")
    login = logins.get(address.netloc) or logins.get(address.hostname or "")
    if login and (address.scheme == "https" or address.hostname in _HERE):
        print(f"username={login[0]}\npassword={login[1]}")
    return 0


def _command(path: Path) -> str:
    """The helper as git's shell runs it."""
    return "!" + shlex.join(own_program("nightbridge.repos.remotes", [str(path)]))
