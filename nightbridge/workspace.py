"""The workspace: the one folder that everything of ours lies in, and that the compute nodes must see."""

import errno
import uuid
from pathlib import Path

from nightbridge.errors import PermanentError, TransientError
from nightbridge.files import write_atomically

# What a shared file system answers while its server is away.
_PASSING = frozenset({errno.EAGAIN, errno.EIO, errno.ESTALE, errno.ETIMEDOUT})


def check_workspace(workspace: Path) -> None:
    """Make the workspace if it is not there, and check that files can be written in it.

    Raises:
        PermanentError: They cannot.
        TransientError: They cannot now.
    """
    probe = workspace / f".check-{uuid.uuid4().hex}"
    try:
        write_atomically(probe, b"")
        probe.unlink()
    except OSError as error:
        kind = TransientError if error.errno in _PASSING else PermanentError
        raise kind(
            f"the workspace cannot be written: {error.strerror or error}",
            thing=str(workspace),
            advice="Choose another folder with --workspace, or get write access to this one",
        ) from error
