"""Repository addresses as users write them: made absolute, and without passwords in messages."""

import hashlib
import re
from pathlib import Path
from urllib.parse import unquote

from nightbridge.errors import InvalidInput
from nightbridge.models import slug
from nightbridge.secrets import MASK

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
