"""Secrets: looked up in the process that needs them; `masking` takes them out of what leaves it.

A `SecretRef` is all that models hold. The domain resolves environment variables and TOML keys; blocks are Prefect's, so
the tasks layer passes a function for them. Logins are lines of netrc(5), the format that curl and enroot use.
"""

import contextlib
import netrc
import os
import tomllib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from nightbridge.errors import InvalidInput, PermanentError

if TYPE_CHECKING:
    # git's credential helper reads logins, and starts too often to pay for pydantic's import.
    from nightbridge.models import SecretRef

BlockValue = Callable[[str], str]
"""Returns the value of a Prefect `Secret` block by name; None of it where there is no Prefect."""

Login = tuple[str, str]
"""User and password. Never logged, never part of a model."""


def resolve_secret(ref: "SecretRef", block_value: BlockValue | None = None) -> str:
    """Return the secret's value.

    Raises:
        InvalidInput: It does not exist or is empty. The message names the source, never a value.
    """
    value = _RESOLVERS[ref.source](ref.name, block_value)
    if not value:
        raise InvalidInput(
            f"secret not found in {ref.source}", subject=ref.name, advice="Set it, or name another source"
        )
    return value


def _from_block(name: str, block_value: BlockValue | None) -> str:
    if block_value is None:
        raise InvalidInput("Prefect Secret blocks are available in flows only", subject=name, advice="Run it as a flow")
    return block_value(name)


def _from_toml(name: str, _: BlockValue | None) -> str:
    file, _hash, dotted = name.rpartition("#")  # a folder may be called C#, and no key is
    try:
        table: object = tomllib.loads(Path(file).read_text(encoding="utf-8-sig"))
    except (OSError, ValueError) as error:
        advice = "Fix it, or start a new run"
        raise InvalidInput("cannot read the file that holds this secret", subject=name, advice=advice) from error
    for part in dotted.split("."):
        if isinstance(table, list) and part.isdecimal() and int(part) < len(table):
            table = table[int(part)]  # an element of [[Tests]]
            continue
        if not isinstance(table, dict) or part not in table:
            return ""
        table = table[part]
    return table if isinstance(table, str) else ""


_RESOLVERS: dict[str, Callable[[str, BlockValue | None], str]] = {
    "env": lambda name, _: os.environ.get(name, ""),
    "block": _from_block,
    "toml": _from_toml,
}


@contextlib.contextmanager
def file_in_memory(content: str) -> Iterator[Path]:
    """A file with these lines that this user's processes can read under the given path, and that no disk ever holds."""
    descriptor = os.memfd_create("login")
    try:
        os.write(descriptor, (content.rstrip("\n") + "\n").encode())
        yield Path(f"/proc/{os.getpid()}/fd/{descriptor}")
    finally:
        os.close(descriptor)


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
        advice = "Each is a line `machine HOST login USER password PASSWORD` (netrc(5))"
        raise PermanentError(f"cannot read these logins{where}", subject=name, advice=advice) from None
    return {host: (user, password) for host, (user, _, password) in hosts.items()}
