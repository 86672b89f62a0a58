"""Files that appear whole or not at all, on local and shared file systems; and files that somebody else wrote.

A job can put anything under any name of its folders: a link to credentials, a FIFO that blocks whoever opens it, a file
of a terabyte, and another one in the moment between a look at the name and its use. `open_regular` is the one way to
open such a file, and what it returns is what was checked.
"""

import contextlib
import errno
import grp
import os
import pwd
import shutil
import stat
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, NamedTuple, TypeVar

from nightbridge.errors import DamagedData, PermanentError, TransientError

if TYPE_CHECKING:
    # The embedded cluster's commands write files and start too often to pay for pydantic's import.
    from pydantic import BaseModel

_M = TypeVar("_M", bound="BaseModel")

CHUNK = 1 << 20
"""Bytes of a file that are in memory at once while it is copied."""

LEAST_HOLE = 64 << 20
"""Bytes of a hole that is passed over. A smaller one is read: some file systems have told of holes where data was."""

PASSING = frozenset({errno.EAGAIN, errno.EIO, errno.ENOTCONN, errno.ESHUTDOWN, errno.ESTALE, errno.ETIMEDOUT})
"""What a shared file system answers while its server is away."""

_NOT_ITS_FAULT = PASSING | {errno.EMFILE, errno.ENFILE}
"""What says nothing about a file that cannot be read; too many open files are no fault of it, either."""


def write_atomically(path: Path, data: bytes) -> None:
    """Write `data` beside `path`, flush it to disk, then rename it into place; readers never see a part of it.

    Raises:
        TransientError: The disk quota is used up; the message names whose it is.
        PermanentError: The disk is full.
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
        if error.errno == errno.ENOSPC:
            raise PermanentError("no space left on the device", subject=str(path), advice="Free space there") from error
        raise


@contextlib.contextmanager
def new_file(path: Path, put: Callable[[Path, Path], object] = os.replace) -> Iterator[BinaryIO]:
    """Open a file beside `path` for writing. When the block ends it is flushed to disk and renamed to `path`.

    `put` gives it that name in another way.
    """
    # A part of the name says whose it is, and leaves room for the rest where the name is as long as a name can be.
    temporary = path.with_name(f".{path.name[:100]}.{uuid.uuid4().hex}.tmp")
    try:
        with temporary.open("xb") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())  # where NFS and Lustre report a quota
        put(temporary, path)
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
        subject=str(path),
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


class RefusedFile(OSError):
    """A file that is not read, because it is none that this program or its job would have written so."""


class Confinement(NamedTuple):
    """What one process may open: nothing but files of these folders. Set once, for good, as a child is (`confine`)."""

    roots: Sequence[Path]
    refused: Mapping[Path, str]
    """Files that are not opened, and why not."""
    on_open: Callable[[Path, int], None]
    """Called with each file that is about to be read, and the bytes that it has on disk."""

    def root_of(self, path: Path) -> Path:
        """The folder that a file must be reached from without a link."""
        if reason := self.refused.get(path):
            raise RefusedFile(errno.EACCES, reason, str(path))
        found = next((root for root in self.roots if path.is_relative_to(root)), None)
        if found is None:
            raise RefusedFile(errno.EXDEV, _ELSEWHERE, str(path))
        return found


_confinement: Confinement | None = None


def confine(confinement: Confinement) -> None:
    """Let this process open through `open_regular` only what its confinement says, from now on."""
    global _confinement
    _confinement = confinement


# O_NONBLOCK: a FIFO is opened at once, and then refused; to a regular file it makes no difference.
_TO_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_TO_PASS = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC

MODEL_LIMIT = 64 << 20
"""Bytes of the largest stored model; the plan of a night of 10,000 runs has half as many."""

_ELSEWHERE = "it does not lie in the run's folder"
_LINK, _NOT_REGULAR = "it is a link, which is not followed", "it is not a regular file"
# What opening a link and a socket gives.
_REFUSED = {errno.ELOOP: _LINK, errno.ENXIO: _NOT_REGULAR}


@contextlib.contextmanager
def open_regular(
    path: Path, *, below: Path | None = None, limit: int | None = None, buffering: int = -1
) -> Iterator[BinaryIO]:
    """Open a file that others can write, for reading: a regular file, and no link.

    Args:
        path: The file.
        below: The run's folder that it lies in. Neither that folder nor any between the two may be a link, at the
            moment of opening, nor may the file be a hard link to another user's. None: the file itself is no link.
        limit: Bytes; a larger file is refused. None for what is read in pieces.
        buffering: As of the built-in `open`.

    Raises:
        RefusedFile: It is a link or reached through one, not a regular file, a hard link to another user's file, or too
            large; `strerror` says which.
        OSError: There is no such file, or it cannot be read.
    """
    if _confinement is not None:
        below = _confinement.root_of(path)
    descriptor = _descriptor(path, below)
    try:
        status = os.fstat(descriptor)
        _check(status, path, limit, of_run=below is not None)
    except OSError:
        os.close(descriptor)
        raise
    if _confinement is not None:
        _confinement.on_open(path, status.st_blocks * 512)
    with open(descriptor, "rb", buffering=buffering) as stream:
        yield stream


def read_regular(path: Path, *, limit: int, below: Path | None = None) -> bytes:
    """The content of a small file that others can write; arguments and errors are those of `open_regular`."""
    with open_regular(path, below=below, limit=limit) as stream:
        data = stream.read(limit + 1)
    if len(data) > limit:
        raise _too_large(path, limit)
    return data


MAX_DEPTH, MAX_NAMES = 64, 100_000
"""How many folders within folders, and names below one folder, are looked at: each further one only takes time."""


def _stop(error: OSError) -> None:
    raise error


def unless_away(error: OSError, path: Path | None = None) -> None:
    """Return if an error is the fault of the file that could not be read, which whoever reads may then leave out.

    Raises:
        TransientError: The file system is away, or this process has too many files open. The message names `path`, or
            the file of the error.
    """
    if error.errno in _NOT_ITS_FAULT:
        subject = str(path or error.filename or "")
        raise TransientError(f"cannot be read now: {error.strerror}", subject=subject, advice="Try again") from error


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn an `OSError` of the block into `DamagedData`, or the `TransientError` of `unless_away`."""
    try:
        yield
    except OSError as error:
        unless_away(error, path)
        raise DamagedData(f"cannot be read: {error.strerror or error}", subject=str(path)) from error


def walk(folder: Path, on_error: Callable[[OSError], None] = _stop) -> Iterator[tuple[Path, list[str], list[str]]]:
    """Folders, with the names of folders and of files in them, as of `os.walk`, below one that others can write.

    Args:
        folder: Where to begin.
        on_error: Called with a folder that cannot be listed, one that lies deeper than `MAX_DEPTH` (which Python would
            follow down to the end of its stack), and that in which the names become more than `MAX_NAMES`.

    Raises:
        OSError: There is such a folder, unless `on_error` takes it.
    """
    left = MAX_NAMES
    for name, folders, names in os.walk(folder, onerror=on_error):
        parent = Path(name)
        left -= len(folders) + len(names)
        if left < 0:
            on_error(RefusedFile(errno.E2BIG, f"more than {MAX_NAMES} files and folders lie below {folder.name}", name))
            folders.clear()
            del names[left:]
        if folders and len(parent.parts) - len(folder.parts) >= MAX_DEPTH:
            on_error(RefusedFile(errno.ENAMETOOLONG, f"its folders lie more than {MAX_DEPTH} deep", name))
            folders.clear()
        yield parent, folders, names
        if left < 0:
            return


def copy_regular(
    source: Path,
    target: Path,
    below: Path | None,
    change: Callable[[bytes], bytes] = bytes,
    length: int | None = None,
) -> None:
    """Copy what a file that others can write has when it is opened, however fast it grows.

    Args:
        source: The file, opened as by `open_regular`.
        target: The copy; replaced.
        below: As of `open_regular`.
        change: What is written of each chunk; called with b"" after the last one.
        length: How many bytes of it; when None all of a text, in which a line stands for a hole of `LEAST_HOLE`.

    Raises:
        DamagedData: The source cannot be read.
        PermanentError: The target cannot be written.
        TransientError: One of them cannot now.
    """
    try:
        with target.open("wb") as writer:
            for piece in _pieces(source, below, length):
                writer.write(change(piece))
    except OSError as error:
        kind = TransientError if error.errno in PASSING else PermanentError
        advice = "Free space, or make it writable"
        raise kind(f"cannot be written: {error.strerror}", subject=str(target), advice=advice) from error


def _pieces(source: Path, below: Path | None, length: int | None) -> Iterator[bytes]:
    """A file in chunks; the last one is empty."""
    with reading(source), open_regular(source, below=below, buffering=0) as reader:
        at, end = 0, os.fstat(reader.fileno()).st_size if length is None else length
        while at < end and (piece := os.pread(reader.fileno(), min(end - at, CHUNK), at)):
            yield piece
            at += len(piece)
            # Whose log was cut while it wrote goes on where it was: a terabyte in between costs it nothing.
            if length is None and (data := min(data_from(reader.fileno(), at), end)) - at >= LEAST_HOLE:
                yield b"\n[%d bytes were never written here]\n" % (data - at)
                at = data
    yield b""


def data_from(descriptor: int, at: int) -> int:
    """Where in a file the first byte from `at` on lies that somebody has written."""
    try:
        return os.lseek(descriptor, at, os.SEEK_DATA)
    except OSError as error:
        return sys.maxsize if error.errno == errno.ENXIO else at


def _descriptor(path: Path, below: Path | None) -> int:
    """Open the file for reading, from one folder to the next, so that no name is looked up twice."""
    try:
        if below is None:
            return os.open(path, _TO_READ)
        *folders, name = path.relative_to(below).parts
        if ".." in (*folders, name):
            raise ValueError("a way up")
        folder = os.open(below, _TO_PASS)
        try:
            for part in folders:
                inner = os.open(part, _TO_PASS, dir_fd=folder)
                os.close(folder)
                folder = inner
            return os.open(name, _TO_READ, dir_fd=folder)
        finally:
            os.close(folder)
    except OSError as error:
        if reason := _REFUSED.get(error.errno or 0):
            raise RefusedFile(error.errno, reason, str(path)) from error
        raise
    except ValueError as error:  # it is not below that folder, or its name has a NUL
        raise RefusedFile(errno.EXDEV, _ELSEWHERE, str(path)) from error


def _check(status: os.stat_result, path: Path, limit: int | None, *, of_run: bool) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise RefusedFile(errno.EINVAL, _NOT_REGULAR, str(path))
    # Elsewhere, users who share a workspace create files by hard links (`create_exclusively`).
    if of_run and status.st_nlink > 1 and status.st_uid != os.geteuid():
        raise RefusedFile(errno.EPERM, "it is a hard link to another user's file", str(path))
    if limit is not None and status.st_size > limit:
        raise _too_large(path, limit)


def _too_large(path: Path, limit: int) -> RefusedFile:
    return RefusedFile(errno.EFBIG, f"it is larger than {limit} bytes", str(path))


def write_model(path: Path, model: "BaseModel") -> None:
    """Write a model as indented JSON, atomically."""
    write_atomically(path, model.model_dump_json(indent=2).encode() + b"\n")


def create_model(path: Path, model: "BaseModel") -> bool:
    """Write a model as indented JSON unless the file exists; return whether this call did: see `create_exclusively`."""
    return create_exclusively(path, model.model_dump_json(indent=2).encode() + b"\n")


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
        return kind.model_validate_json(read_regular(path, limit=MODEL_LIMIT))
    except FileNotFoundError:
        return None
    except (RefusedFile, PermissionError, ValueError) as error:
        raise DamagedData(what, subject=str(path), advice=advice) from error


def create_exclusively(path: Path, data: bytes) -> bool:
    """Create `path` whole with `data` unless it exists; return whether this call created it.

    A hard link is the one creation that is atomic on NFS as well and never shows a half-written file. Errors as for
    `write_atomically`.
    """
    with _naming_the_quota(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with new_file(path, os.link) as stream:
                stream.write(data)
        except FileExistsError:
            return False
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
    with write_errors(folder, what=what, advice=advice):
        write_atomically(probe, b"")
        probe.unlink()


_PATIENCE_SECONDS = 3.0
_DEEP = 100


def remove_tree(folder: Path) -> None:
    """Remove a folder with whatever others put there; a killed process's programs may write there a little longer."""
    patience = time.monotonic() + _PATIENCE_SECONDS
    while folder.exists():
        _let_owner_in(folder)
        shutil.rmtree(folder, ignore_errors=True)
        if time.monotonic() > patience:
            return
        if folder.exists():
            time.sleep(0.1)


def _let_owner_in(top: Path) -> None:
    """Give the owner all rights to every folder below: a job or an image may have left some that only root could empty.

    Those that lie deep are moved to the top: `shutil.rmtree` ends with an exception a thousand folders deep.
    """
    folders = [(top, 0)]
    while folders:
        folder, depth = folders.pop()
        with contextlib.suppress(OSError):
            folder.chmod(0o700)
            if depth > _DEEP:
                folder, depth = folder.rename(top / uuid.uuid4().hex), 1
            with os.scandir(folder) as entries:
                folders += [(Path(entry), depth + 1) for entry in entries if entry.is_dir(follow_symlinks=False)]


OTHERS = 0o007
GROUP = 0o070


def make_workspace(workspace: Path) -> None:
    """Make the workspace if it is not there, for this user alone: it holds what jobs print, which may be anything.

    One that was there before keeps its mode, which says what its group may do (`chmod 2750` lets it read). From here on
    the umask of this process and of its children, Slurm jobs included, gives other users nothing, and the group no more
    than that.
    """
    workspace.parent.mkdir(parents=True, exist_ok=True)
    workspace.mkdir(mode=0o700, exist_ok=True)
    os.umask(os.umask(GROUP | OTHERS) | ~workspace.stat().st_mode & GROUP | OTHERS)


def open_workspace(workspace: Path) -> None:
    """Make the workspace, and check that files can be written in it.

    Raises:
        PermanentError: They cannot.
        TransientError: They cannot now.
    """
    what, advice = "the workspace", "Choose another folder with --workspace, or get write access to this one"
    with write_errors(workspace, what=what, advice=advice):
        make_workspace(workspace)
    check_writable(workspace, what=what, advice=advice)


@contextlib.contextmanager
def write_errors(path: Path, *, what: str, advice: str) -> Iterator[None]:
    """Turn an `OSError` of the block into `write_error`."""
    try:
        yield
    except OSError as error:
        raise write_error(error, what=what, subject=str(path), advice=advice) from error


def write_error(error: OSError, *, what: str, subject: str, advice: str) -> PermanentError | TransientError:
    """The error of ours for a file or folder that could not be written."""
    kind = TransientError if error.errno in PASSING else PermanentError
    return kind(f"{what} cannot be written: {error.strerror or error}", subject=subject, advice=advice)
