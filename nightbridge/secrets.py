"""Secrets: looked up in the process that needs them, and masked wherever text leaves it.

A `SecretRef` is all that models hold. The domain resolves environment variables and TOML keys; blocks are Prefect's, so
the tasks layer passes a function for them.

Logins are lines of netrc(5), the format that curl and enroot use. A program is given them in a file that
exists in memory, through this process's `/proc/PID/fd`: no other user can open it, and it ends with the process.
"""

import netrc
import os
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from nightbridge.errors import InvalidInput, PermanentError

if TYPE_CHECKING:
    # git's credential helper reads logins, and starts too often to pay for pydantic's import.
    from nightbridge.models import SecretRef

MASK = "********"

Login = tuple[str, str]
"""User and password. Never logged, never part of a model."""


def resolve_secret(ref: "SecretRef", block_value: Callable[[str], str] | None = None) -> str:
    """Return the secret's value.

    Args:
        ref: Where it is found.
        block_value: Returns the value of a Prefect `Secret` block by name; None where there is no Prefect.

    Raises:
        InvalidInput: The place does not exist or is empty. The message names the place, never a value.

    """
    value = _RESOLVERS[ref.source](ref.name, block_value)
    if not value:
        raise InvalidInput(f"secret not found in {ref.source}", thing=ref.name, advice="Set it, or name another place")
    return value


def mask_secrets(text: str, values: Iterable[str]) -> str:
    """Replace every secret value in `text`. Values under four characters are left: they would mask ordinary words."""
    for value in sorted({value for value in values if len(value) >= 4}, key=len, reverse=True):
        text = text.replace(value, MASK)
    return text


@contextmanager
def file_in_memory(content: str) -> Iterator[Path]:
    """A file that this user's processes can read under the given path, and that no disk ever holds."""
    descriptor = os.memfd_create("login")
    try:
        os.write(descriptor, content.encode())
        yield Path(f"/proc/{os.getpid()}/fd/{descriptor}")
    finally:
        os.close(descriptor)


def whole_lines(text: str) -> str:
    """The same lines, the last one ended as well."""
    return text.rstrip("\n") + "\n"


def read_netrc(path: Path, name: str) -> Mapping[str, Login]:
    """The logins of a file by host; `name` is what it is called in messages.

    Raises:
        PermanentError: They cannot be read.

    """
    try:
        hosts = netrc.netrc(path).hosts
    except (netrc.NetrcParseError, OSError, UnicodeDecodeError) as error:
        # The parser's own message shows the word that it stumbled over, which may be the password.
        where = f" at line {error.lineno}" if isinstance(error, netrc.NetrcParseError) else ""
        raise PermanentError(
            f"cannot read these logins{where}",
            thing=name,
            advice="Each is a line `machine HOST login USER password PASSWORD` (netrc(5))",
        ) from None
    return {host: (user, password) for host, (user, _, password) in hosts.items()}


def _from_environment(name: str, _: Callable[[str], str] | None) -> str:
    return os.environ.get(name, "")


def _from_block(name: str, block_value: Callable[[str], str] | None) -> str:
    if block_value is None:
        raise InvalidInput("Prefect Secret blocks are available in flows only", thing=name, advice="Run it as a flow")
    return block_value(name)


def _from_toml(name: str, _: Callable[[str], str] | None) -> str:
    file, _hash, dotted = name.partition("#")
    try:
        table: object = tomllib.loads(Path(file).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InvalidInput(
            "cannot read the file that holds this secret", thing=name, advice="Fix it, or start a new run"
        ) from error
    for part in dotted.split("."):
        if isinstance(table, list) and part.isdecimal() and int(part) < len(table):
            table = table[int(part)]  # an element of [[Tests]]
            continue
        if not isinstance(table, dict) or part not in table:
            return ""
        table = table[part]
    return table if isinstance(table, str) else ""


_RESOLVERS: dict[str, Callable[[str, Callable[[str], str] | None], str]] = {
    "env": _from_environment,
    "block": _from_block,
    "toml": _from_toml,
}
