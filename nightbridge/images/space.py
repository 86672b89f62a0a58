"""Whether there is room for an import, asked before it: a disk that fills up after an hour helps nobody.

How much an import needs follows from the compressed size that the registry tells. The factors are those of images of
machine learning software, whose layers shrink to a third, rounded up: what was compressed with gzip is kept in the
cache with zstd, unpacked as it is, and packed again with lzo, which is faster and packs less.
"""

import logging
import os
import shutil
from collections.abc import Iterable
from pathlib import Path

from nightbridge.errors import NightbridgeError, PermanentError
from nightbridge.images.references import ImageReference
from nightbridge.images.registry import download_size
from nightbridge.models import Model

log = logging.getLogger(__name__)

CACHE_FACTOR = 1.1
UNPACKED_FACTOR = 3.5
IMAGE_FACTOR = 1.6


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
