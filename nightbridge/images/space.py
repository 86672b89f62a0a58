"""Whether an import can write where it works, and has room there, asked before it: a disk that fills up after an hour
helps nobody.

How much an import needs follows from the compressed size that the registry tells. The factors are those of images of
machine learning software, whose layers shrink to a third, rounded up: what was compressed with gzip is kept in the
cache with zstd, unpacked as it is, and packed again with lzo, which is faster and packs less.
"""

import contextlib
import logging
import os
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

from nightbridge.errors import NightbridgeError, PermanentError
from nightbridge.files import check_writable, write_error
from nightbridge.images.references import ImageReference
from nightbridge.images.registry import download_size
from nightbridge.models import Model

log = logging.getLogger(__name__)

CACHE_FACTOR = 1.1
UNPACKED_FACTOR = 3.5
IMAGE_FACTOR = 1.6

OTHER_FOLDERS = "Check it, or set the Image Cache's cache and temp (ENROOT_CACHE_PATH, ENROOT_TEMP_PATH) to other disks"
"""The advice for a folder of imports that cannot be written."""


class Need(Model):
    """Bytes that an import is going to write into a folder, which need not be there yet."""

    folder: Path
    size: int


def known_size(reference: ImageReference, credentials: str) -> int:
    """Compressed bytes of an image; 0 where the registry does not tell, which the import itself will explain."""
    try:
        return download_size(reference, credentials)
    except NightbridgeError as error:
        log.info("the size of this image is not known before its import: %s", error)
        return 0


def check_folders(cache: Path, temp: Path, images: Path, *, size: int, reference: ImageReference) -> None:
    """Raise unless an import can write into its folders and each file system has room for it.

    Args:
        cache: Where fetched layers are kept.
        temp: Where the image is unpacked.
        images: Where the finished image goes.
        size: Compressed bytes of the image; 0 when they are not known.
        reference: The image.

    Raises:
        PermanentError: A folder cannot be written, or has too little space.
        TransientError: A folder cannot be written now.

    """
    for folder, what in ((cache, "the cache of images"), (temp, "the folder in which images are unpacked")):
        check_writable(folder, what=what, advice=OTHER_FOLDERS)
    check_space(
        (
            Need(folder=cache, size=int(CACHE_FACTOR * size)),
            Need(folder=temp, size=int(UNPACKED_FACTOR * size)),
            Need(folder=images, size=int(IMAGE_FACTOR * size)),
        ),
        reference,
    )


@contextlib.contextmanager
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


def check_space(needs: Iterable[Need], reference: ImageReference) -> None:
    """Raise unless every file system has room for all that is going to be written into it.

    Raises:
        PermanentError: One has not; the message says the folder, the bytes it needs, and the bytes that are free.

    """
    by_device: dict[int, list[Need]] = {}
    for need in needs:
        by_device.setdefault(os.stat(_existing(need.folder)).st_dev, []).append(need)
    for together in by_device.values():
        needed = sum(need.size for need in together)
        free = shutil.disk_usage(_existing(together[0].folder)).free
        if needed > free:
            raise too_little_space(
                " and ".join(sorted({str(need.folder) for need in together})), needed, free, reference
            )


def too_little_space(where: str, needed: int, free: int, reference: ImageReference) -> PermanentError:
    """The error of a folder that has no room for an import; sizes in bytes."""
    return PermanentError(
        f"too little space in {where}: the import needs {needed:,d} bytes, and {free:,d} are free",
        thing=str(reference),
        advice="Free some, or set the Image Cache's folder, cache and temp (ENROOT_CACHE_PATH, ENROOT_TEMP_PATH) "
        "to larger disks",
    )


def _existing(folder: Path) -> Path:
    return next(path for path in (folder, *folder.absolute().parents) if path.exists())
