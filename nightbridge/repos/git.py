"""Running git: repository addresses, the logins for them, and git's messages as errors.

A site keeps logins for git over HTTPS as a secret, which is never written to disk. git runs a credential helper
(gitcredentials(7)) only when a server requires a login. Ours is this module, run as a program of its own that reads the
secret from a file in memory. Neither git's arguments nor its environment, its configuration or its addresses ever hold
a password.
"""

import os
import re
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import UTC, datetime
from pathlib import Path
from urllib.parse import unquote, urlsplit

from nightbridge.errors import (
    AccessRefused,
    ErrorPattern,
    InvalidInput,
    NightbridgeError,
    PermanentError,
    TransientError,
    classify,
)
from nightbridge.masking import MASK
from nightbridge.models import slug
from nightbridge.processes import Finished, own_program, run
from nightbridge.secrets import file_in_memory, read_netrc

# The user's own settings must not change what a commit looks like on disk, run their hooks, or start daemons.
_SETTINGS = (
    "advice.detachedHead=false",
    "core.autocrlf=false",
    "core.fsmonitor=false",
    "core.hooksPath=/dev/null",
    "gc.autoDetach=false",
    "maintenance.autoDetach=false",
    # What we read of a commit has no words of gpg in it, and its letters are UTF-8; mirrors are bare.
    "log.showSignature=false",
    "i18n.logOutputEncoding=UTF-8",
    "safe.bareRepository=all",
    # A stalled transfer ends with an error instead of never.
    "http.lowSpeedLimit=1000",
    "http.lowSpeedTime=60",
)

_ENVIRONMENT = {
    "GIT_TERMINAL_PROMPT": "0",
    "SSH_ASKPASS_REQUIRE": "never",
    "LC_ALL": "C",
    "LANGUAGE": "C",
    "GIT_LFS_SKIP_SMUDGE": "1",
}

# What git, ssh and curl read. Everything else may be a secret of the site, and is none of git's business.
_VARIABLES = re.compile(
    r"PATH|HOME|USER|LOGNAME|SHELL|TMPDIR|TZ|LANG|LD_LIBRARY_PATH|XDG_\w+|GIT_\w+|SSH_\w+|SSL_CERT_\w+|CURL_\w+|KRB5\w+"
    r"|(?i:(https?|all|no)_proxy)"
)

# A credential helper of the user's own may read any variable (`gh` reads GH_TOKEN); the site's logins replace those.
_LOGIN_COMMANDS = frozenset({"clone", "fetch", "ls-remote", "submodule"})

# Set inside hooks and aliases of git; they would point us to another repository.
_FOREIGN_VARIABLES = {
    "GIT_ALTERNATE_OBJECT_DIRECTORIES",
    "GIT_COMMON_DIR",
    "GIT_DIR",
    "GIT_INDEX_FILE",
    "GIT_NAMESPACE",
    "GIT_OBJECT_DIRECTORY",
    "GIT_PREFIX",
    "GIT_WORK_TREE",
}

_VERSION_TIMEOUT_SECONDS = 10.0

# The second is what git said before 2.38.
_OTHERS = r"dubious ownership|unsafe repository"

# git leaves out what a shallow clone has, warns, and ends with 0.
_LEFT_OUT = "shallow roots are not allowed"

# Read from the top: a refused login ends with the same "Could not read from remote repository" as a lost connection.
_ERRORS = (
    ErrorPattern(
        _LEFT_OUT, InvalidInput, "the repository is a shallow clone, which lacks its history",
        "Run `git fetch --unshallow` in it, or give the address that it was cloned from",
    ),
    ErrorPattern(
        r"couldn't find remote ref|not our ref|unadvertised object|no such remote ref",
        InvalidInput, "the repository has no such ref", "Check its spelling, and that it was pushed",
    ),
    ErrorPattern(
        r"Authentication failed|could not read (Username|Password)|terminal prompts disabled"
        r"|Permission denied \(|returned error: 40[13]|Invalid username or (password|token)|[Aa]ccess denied"
        r"|HTTP Basic: Access",
        AccessRefused, "the repository refused our credentials",
        "Check that git on this machine can read it: `git ls-remote URL` must work without a prompt; or name "
        "a secret with logins as git_credentials",
    ),
    ErrorPattern(
        r"Host key verification failed",
        AccessRefused, "the host's ssh key is not known here", "Add it to ~/.ssh/known_hosts",
    ),
    ErrorPattern(
        _OTHERS, PermanentError, "git does not trust a repository of another user",
        "Run `git config --global --add safe.directory FOLDER`, or use a workspace of your own",
    ),
    ErrorPattern(
        r"[Rr]epository not found|does not appear to be a git repository"
        r"|repository '[^']*' (does not exist|not found)"
        r"|returned error: 404|not found: did you run git update-server-info|no such repository",
        InvalidInput, "no such repository",
        "Check its address: a relative one is taken from the folder that the command runs in, and a private repository "
        "also looks missing without read access",
    ),
    ErrorPattern(
        r"SSL certificate problem|certificate verif(y|ication) failed",
        AccessRefused, "the server's certificate is not trusted here",
        "Check GIT_SSL_CAINFO, or install the site's certificate authority",
    ),
    ErrorPattern(
        r"No space left on device|[Dd]isk quota exceeded",
        PermanentError, "no space left on the disk", "Free up space in the workspace",
    ),
    ErrorPattern(
        # A full disk as well: `git checkout` does not say why.
        r"unable to write file|unable to create file",
        PermanentError, "a file could not be written", "Check free space and permissions of the workspace",
    ),
    ErrorPattern(
        r"[Uu]nable to find remote helper|Unsupported protocol|URL using bad/illegal format"
        r"|transport '[^']*' not allowed|Port number",
        InvalidInput, "git does not support this address", "Give an https://, ssh:// or file:// URL, or a folder",
    ),
    ErrorPattern(
        r"repository corruption on the remote side|packfile .* cannot be accessed"
        r"|object file .* is (empty|corrupt)",
        PermanentError, "the repository is damaged or incomplete",
        "Run `git fsck` in it, or clone it again from its origin",
    ),
    ErrorPattern(
        r"Unable to create '[^']*\.lock'|cannot lock ref|[Cc]ould not lock|Another git process",
        TransientError, "another git process holds a lock",
    ),
    ErrorPattern(
        # What came, not what lies here: a damaged object of the mirror is "corrupt".
        r"(?s)^(?!.*\bis corrupt\b).*(inflate.*unpack-objects failed|final sha1 did not match"
        r"|pack is corrupted \(SHA1 mismatch\))",
        TransientError, "the objects were corrupted in transit",
    ),
    ErrorPattern(
        r"early EOF|unexpected disconnect|hung up|RPC failed|fetch-pack: invalid index-pack|index-pack died"
        r"|returned error: (408|429|5\d\d)|Could not resolve host|[Cc]onnection (refused|reset|timed out|closed)"
        r"|[Ff]ailed to connect|Network is unreachable|No route to host|[Oo]peration (too slow|timed out)"
        r"|SSL_ERROR_SYSCALL|gnutls|GnuTLS|kex_exchange|unable to access|unable to look up|unable to connect"
        r"|Could not read from remote repository|Temporary failure|Stale file handle",
        TransientError, "the repository is unreachable, or the transfer was interrupted",
    ),
)  # fmt: skip

OLDEST_GIT = (2, 29)
"""The first with `git fetch --no-write-fetch-head`."""


def git_version() -> str:
    """What `git --version` says.

    Raises:
        PermanentError: git is too old, or there is none.
        TransientError: It does not answer.
    """
    said = git("--version", timeout=_VERSION_TIMEOUT_SECONDS)
    found = re.search(r"(\d+)\.(\d+)", said)
    if found and (int(found[1]), int(found[2])) < OLDEST_GIT:
        needed = ".".join(map(str, OLDEST_GIT))
        raise PermanentError(f"{said} is too old", subject="git", advice=f"Put git {needed} or newer first on PATH")
    return said


def git(*arguments: str | Path, timeout: float, folder: Path | None = None, subject: str = "") -> str:
    """Run git and return its output without the last line end.

    Args:
        arguments: Subcommand and its arguments.
        timeout: Longest time it may take, seconds.
        folder: The repository, bare or not; the current folder when unset.
        subject: What an error is about; the folder when empty.

    Raises:
        InvalidInput: No such ref or repository, or one that is a shallow clone.
        PermanentError: Credentials refused, disk full, and unknown failures of git.
        TransientError: Network, lock contention, time limit.
    """
    finished = _run(arguments, timeout, folder)
    if finished.code or _LEFT_OUT in finished.stderr:
        raise classify_failure(finished, subject or str(folder or ""), arguments)
    return finished.stdout.decode(errors="surrogateescape").rstrip("\n")


def one_line(text: str) -> str:
    """What people have named or written, as one line of any document or terminal: what is not UTF-8 becomes �."""
    letters = text.encode(errors="surrogateescape").decode(errors="replace")
    return "".join(letter if letter.isprintable() else " " for letter in letters)


def time_of(text: str) -> datetime:
    """A time of a commit, `%aI` or `%cI`; one that no calendar has is 1970, as git itself shows it."""
    try:
        return datetime.fromisoformat(text)
    except ValueError:
        return datetime.fromtimestamp(0, UTC)


def attempt(*arguments: str | Path, timeout: float, folder: Path | None = None) -> Finished:
    """Run git and return how it ended, for queries whose answer may be no.

    Raises:
        PermanentError: The repository is another user's, and git looks into none that it does not trust: that is
            neither a no nor a sign of damage.
        TransientError: It did not end in time.
    """
    finished = _run(arguments, timeout, folder)
    if finished.code and re.search(_OTHERS, finished.stderr):
        # To trust it would not do: hard links to files of another user are refused, too.
        what = "another user's repository, which git does not trust"
        advice = "Use a workspace of your own: only one user runs nights in a workspace"
        raise PermanentError(what, subject=str(folder or ""), advice=advice)
    return finished


def _run(arguments: Sequence[str | Path], timeout: float, folder: Path | None) -> Finished:
    argv: list[str | Path] = ["git"]
    for setting in (*_SETTINGS, *login_settings()):
        argv += ["-c", setting]
    # A helper of the user's own gets all of our environment; otherwise git gets no secrets, and asks no questions.
    has_helpers = not login_settings() and not _LOGIN_COMMANDS.isdisjoint(arguments)
    kept = {name: value for name, value in os.environ.items() if has_helpers or _VARIABLES.fullmatch(name)}
    variables = {name: value for name, value in kept.items() if name not in _FOREIGN_VARIABLES} | _ENVIRONMENT
    if folder is not None:
        argv += ["-C", folder]
        # A damaged repository must not be mistaken for the one that the workspace happens to lie in.
        variables["GIT_CEILING_DIRECTORIES"] = str(folder.absolute().parent)
    return run([*argv, *arguments], environment=variables, timeout=timeout)


def classify_failure(finished: Finished, subject: str, arguments: Sequence[str | Path] = ()) -> NightbridgeError:
    """Map a failed git command to an error. Its message ends with git's last lines, without credentials."""
    output = masked(finished.tail)
    if known := classify(finished.stderr, _ERRORS):
        return known.error(masked(subject), output)
    if finished.code < 0:
        return TransientError(f"git was killed by signal {-finished.code}", subject=masked(subject))
    command = next((str(argument) for argument in arguments if not str(argument).startswith("-")), "")
    what = f"git {command} failed with code {finished.code}: {output or 'no output'}".replace("git  ", "git ")
    return PermanentError(what, subject=masked(subject), advice="Run the same command manually for details")


# --- addresses --------------------------------------------------------------------------------------------------------

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
        raise InvalidInput("not a repository address", subject=repr(text), advice="Give a URL or a folder")
    userinfo = _USERINFO.match(text)
    if userinfo and ":" in userinfo["userinfo"]:
        what = "a password in a repository address would appear in process lists and logs"
        advice = "Remove it and use a git credential helper (git help credentials)"
        raise InvalidInput(what, subject=masked(text), advice=advice)
    if text.startswith("file://"):
        return str(Path(unquote(text.removeprefix("file://"))).absolute())
    if "://" in text or _SSH_SHORTHAND.match(text):
        return text.rstrip("/")
    return str(Path(os.path.expanduser(text)).absolute())


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


# --- logins -----------------------------------------------------------------------------------------------------------

_LOGIN_SETTINGS: ContextVar[tuple[str, ...]] = ContextVar("login_settings", default=())
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
        helper = shlex.join(own_program("nightbridge.repos.git", [str(path)]))
        # The empty one removes all helpers of the user: git would pass each of them a login that worked, to keep it.
        token = _LOGIN_SETTINGS.set(("credential.helper=", f"credential.helper=!{helper}"))
        try:
            yield
        finally:
            _LOGIN_SETTINGS.reset(token)


def login_settings() -> tuple[str, ...]:
    """The settings, as `NAME=VALUE`, that make git use the logins of the enclosing `git_logins`."""
    return _LOGIN_SETTINGS.get()


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


def pull_request_ref(text: str, url: str) -> str:
    """The ref of a pull request by its number, as `5129` or `#5129`; any other ref as it is.

    Args:
        text: What a user wrote.
        url: The repository: GitLab's requests have refs of other names than GitHub's.
    """
    number = re.fullmatch(r"#?(\d{1,6})", text)
    if number is None:
        return text
    return f"refs/merge-requests/{number[1]}/head" if "gitlab" in url else f"refs/pull/{number[1]}/head"
