"""Logins as lines of netrc(5), the one format that curl, enroot and people share: read, and handed on in memory.

A secret of such lines is only ever given to a program in a file that exists in memory, through this process's
`/proc/PID/fd`: no other user can open it, and it ends with the process.
"""

import netrc
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from nightbridge.errors import PermanentError

Login = tuple[str, str]
"""User and password. Never logged, never part of a model."""


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
            f"these logins cannot be read{where}",
            thing=name,
            advice="Each is a line `machine HOST login USER password PASSWORD` (netrc(5))",
        ) from None
    return {host: (user, password) for host, (user, _, password) in hosts.items()}
