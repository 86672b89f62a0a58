"""Scratch folders of imports, named so that those of a killed import are found and removed.

The unfinished image has a folder of its own too. The programs of a killed import run for a while longer, on this
machine or on another; once their folders are gone they fail, instead of leaving an orphaned image.
"""

import hashlib
import os
import shutil
import tempfile
import time
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from nightbridge.files import check_writable, write_error
from nightbridge.images.registry import ImageReference

OTHER_FOLDERS = "Check it, or set the Image Cache's cache and temp (ENROOT_CACHE_PATH, ENROOT_TEMP_PATH) to other disks"
"""The advice for a folder of imports that cannot be written."""

_PATIENCE_SECONDS = 3.0
_SUFFIX = ".sqsh.tmp"


@contextmanager
def unfinished(images: Path, name: str) -> Iterator[Path]:
    """The path, in a fresh folder beside the images, at which the image `name` is made; removed at the end."""
    folder = images / f".{name}.{uuid.uuid4().hex}{_SUFFIX}"
    folder.mkdir(parents=True)
    try:
        yield folder / "image.sqsh"
    finally:
        remove_tree(folder)


@contextmanager
def scratch_dir(output: Path, base: Path) -> Iterator[Path]:
    """A fresh folder in `base` for the import of the file `output` (see `unfinished`), removed at the end."""
    folder = base / scratch_name(output)
    folder.mkdir(parents=True, mode=0o700)
    try:
        yield folder
    finally:
        remove_tree(folder)


def temporary_folder(configured: Path | None) -> Path:
    """Where images are unpacked: the configured folder, `ENROOT_TEMP_PATH`, else the system's temporary folder.

    Unpacking needs a local file system.
    """
    return configured or Path(os.environ.get("ENROOT_TEMP_PATH") or tempfile.gettempdir())


def cache_folder(configured: Path | None) -> Path:
    """Where fetched layers are kept: the configured folder, `ENROOT_CACHE_PATH`, else enroot's own default."""
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return configured or Path(os.environ.get("ENROOT_CACHE_PATH") or home / "enroot")


def check_folders(cache: Path, temp: Path) -> None:
    """Raise unless an import can write into its folders.

    Args:
        cache: Where fetched layers are kept.
        temp: Where the image is unpacked.

    Raises:
        PermanentError: A folder cannot be written.
        TransientError: A folder cannot be written now.
    """
    for folder, what in ((cache, "the cache of images"), (temp, "the folder in which images are unpacked")):
        check_writable(folder, what=what, advice=OTHER_FOLDERS)


@contextmanager
def named_write_errors(reference: ImageReference, folder: Path) -> Iterator[None]:
    """Turn an error of the file system during an import into ours, which names the image and the file, else `folder`.

    Raises:
        PermanentError: A file could not be written.
        TransientError: It could not be written now.
    """
    try:
        yield
    except OSError as error:
        what, thing = f"a file of the import of {reference}", str(error.filename or folder)
        raise write_error(error, what=what, thing=thing, advice=OTHER_FOLDERS) from error


def leftover_scratch_dirs(images: Path, bases: Iterable[Path]) -> list[Path]:
    """The folders, beside the images and in `bases`, in which imports work or were killed at work."""
    here = list(images.glob(f".*{_SUFFIX}"))
    return here + [folder for base in bases for folder in base.glob(f"{_prefix(images, '.')}*{_SUFFIX}")]


def remove_leftovers(images: Path, name: str, bases: Iterable[Path]) -> None:
    """Remove what killed imports of an image left beside the images and in `bases`. Only its lease's holder may."""
    for folder in images.glob(f".{name}.*{_SUFFIX}"):
        remove_tree(folder)
    # A sidecar whose writer was killed; a lease's own files may be another process's.
    for leftover in images.glob(f".{name}.json.*.tmp"):
        leftover.unlink(missing_ok=True)
    remove_scratch_dirs(images, name, bases)


def remove_scratch_dirs(images: Path, name: str, bases: Iterable[Path]) -> None:
    """Remove what killed imports of an image left in `bases` alone: on the machine where they worked."""
    for base in bases:
        for leftover in base.glob(f"{_prefix(images, f'.{name}.')}*{_SUFFIX}"):
            remove_tree(leftover)


def remove_tree(folder: Path) -> None:
    """Remove a folder with whatever an image put there; a killed import's tools may write there a little longer."""
    patience = time.monotonic() + _PATIENCE_SECONDS
    while folder.exists():
        with suppress(OSError):
            _let_owner_in(folder)
        shutil.rmtree(folder, ignore_errors=True)
        if time.monotonic() > patience:
            return
        if folder.exists():
            time.sleep(0.1)


def _let_owner_in(folder: Path) -> None:
    """Give the owner all rights to every folder below: an image may have some that only root could empty."""
    folder.chmod(0o700)
    for parent, folders, _ in os.walk(folder):
        for name in folders:
            path = Path(parent) / name
            if not path.is_symlink():
                path.chmod(0o700)


def scratch_name(output: Path) -> str:
    """The name of the folder in which the import of a file (see `unfinished`) works."""
    return _prefix(output.parent.parent, output.parent.name)


def _prefix(images: Path, name: str) -> str:
    # The system's temporary folder serves other workspaces too, whose imports of the same image are not ours to remove.
    return f"nightbridge-{hashlib.sha256(str(images.absolute()).encode()).hexdigest()[:12]}{name}"
