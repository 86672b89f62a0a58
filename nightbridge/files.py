"""Files that appear whole or not at all, on local and shared file systems."""

import contextlib
import errno
import grp
import os
import pwd
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, TypeVar

from nightbridge.errors import DamagedData, PermanentError, TransientError

if TYPE_CHECKING:
    # The embedded cluster's commands write files and start too often to pay for pydantic's import.
    from pydantic import BaseModel

_M = TypeVar("_M", bound="BaseModel")

# What a shared file system answers while its server is away.
_PASSING = frozenset({errno.EAGAIN, errno.EIO, errno.ESTALE, errno.ETIMEDOUT})


def write_atomically(path: Path, data: bytes) -> None:
    """Write `data` beside `path`, flush it to disk, then rename it into place; readers never see a part of it.

    Raises:
        TransientError: The disk quota is used up; the message names whose it is.
        OSError: Anything else.

    """
    with _naming_the_quota(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with new_file(path) as stream:
            stream.write(data)


@contextlib.contextmanager
def _naming_the_quota(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno == errno.EDQUOT:
            raise quota_error(path) from error
        raise


@contextlib.contextmanager
def new_file(path: Path) -> Iterator[BinaryIO]:
    """Open a file beside `path` for writing. When the block ends it is flushed to disk and renamed to `path`."""
    # A part of the name says whose it is, and leaves room for the rest where the name is as long as a name can be.
    temporary = path.with_name(f".{path.name[:100]}.{uuid.uuid4().hex}.tmp")
    try:
        with temporary.open("xb") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())  # where NFS and Lustre report a quota
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def used_up_quota(path: Path) -> str:
    """Whose quota it may be that a write to `path` met: of the user who writes, or of whom the folder belongs to."""
    folder = next((parent for parent in path.parents if parent.is_dir()), path.parent)
    status = folder.stat()
    user, owner = _user_name(os.geteuid()), _user_name(status.st_uid)
    return f"the disk quota of {user} is used up ({folder} belongs to {owner}, group {_group_name(status.st_gid)})"


def quota_error(path: Path) -> TransientError:
    """The error of a write to `path` that met a quota (EDQUOT)."""
    return TransientError(
        used_up_quota(path),
        thing=str(path),
        advice="Free space there or have the quota raised (`quota -s`); progress so far is kept",
    )


def _user_name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"user {uid}"


def _group_name(gid: int) -> str:
    try:
        return grp.getgrgid(gid).gr_name
    except KeyError:
        return str(gid)


def write_model(path: Path, model: "BaseModel") -> None:
    """Write a model as indented JSON, atomically."""
    write_atomically(path, model.model_dump_json(indent=2).encode() + b"\n")


def read_model(path: Path, kind: type[_M], *, what: str, advice: str) -> _M | None:
    """Read a model that was written as JSON; None where there is no such file.

    Args:
        path: The file.
        kind: The model.
        what: The message for a file that holds something else.
        advice: How the user can fix that.

    Raises:
        DamagedData: The file does not hold such a model.

    """
    try:
        return kind.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise DamagedData(what, thing=str(path), advice=advice) from error


def create_exclusively(path: Path, data: bytes) -> bool:
    """Create `path` whole with `data` unless it exists; return whether this call created it.

    A hard link is the one creation that is atomic on NFS as well and never shows a half-written file. Errors as for
    `write_atomically`.
    """
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    with _naming_the_quota(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with new_file(temporary) as stream:
            stream.write(data)
    try:
        os.link(temporary, path)
    except FileExistsError:
        return False
    finally:
        temporary.unlink(missing_ok=True)
    return True


def flush_folder(folder: Path) -> None:
    """Put a folder's names on disk: the name of a new file survives a power cut only when its folder does."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def check_writable(folder: Path, *, what: str, advice: str) -> None:
    """Make a folder if it is not there, and check that files can be written in it.

    Args:
        folder: The folder.
        what: What the folder is to the user, such as `the workspace`.
        advice: How the user can fix it where it cannot be written.

    Raises:
        PermanentError: They cannot.
        TransientError: They cannot now.

    """
    probe = folder / f".check-{uuid.uuid4().hex}"
    try:
        write_atomically(probe, b"")
        probe.unlink()
    except OSError as error:
        raise write_error(error, what=what, thing=str(folder), advice=advice) from error


def check_workspace(workspace: Path) -> None:
    """Make the workspace if it is not there, and check that files can be written in it.

    Raises:
        PermanentError: They cannot.
        TransientError: They cannot now.
    """
    check_writable(
        workspace,
        what="the workspace",
        advice="Choose another folder with --workspace, or get write access to this one",
    )


def write_error(error: OSError, *, what: str, thing: str, advice: str) -> PermanentError | TransientError:
    """The error of ours for a file or folder that could not be written."""
    kind = TransientError if error.errno in _PASSING else PermanentError
    return kind(f"{what} cannot be written: {error.strerror or error}", thing=thing, advice=advice)
