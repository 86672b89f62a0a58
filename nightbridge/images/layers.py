"""Layers that are kept between imports with standard tools: one folder of blobs, each known by its digest.

`<layers>/blobs/sha256/<hex>` is the blob folder of every OCI layout that an import makes (OCI image layout
specification). skopeo writes a blob under a temporary name and renames it, so that one that is there is whole.
"""

import json
import os
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from nightbridge.images.squashfs import sha256_of

LAYERS_KEPT_SECONDS = 30 * 24 * 3600.0
"""How long a layer is kept that no import has used."""


def layout_over(layout: Path, layers: Path) -> Path:
    """Make an OCI layout in an empty folder whose blobs are the kept ones; return it."""
    (layers / "blobs" / "sha256").mkdir(parents=True, exist_ok=True)
    (layout / "blobs").symlink_to(os.path.relpath(layers / "blobs", layout))
    return layout


def drop_damaged(layout: Path) -> list[Path]:
    """Remove the blobs of a layout's image that are not what their names say; return those, and what was missing."""
    damaged = [path for path in _blobs_of(layout) if not path.is_file() or sha256_of(path) != path.name]
    for path in damaged:
        path.unlink(missing_ok=True)
    return damaged


def keep_used(layout: Path, layers: Path, *, now: float | None = None) -> None:
    """Note that a layout's blobs were used, and remove those that nobody has used for `LAYERS_KEPT_SECONDS`.

    An import that was about to use one finds it missing, and fetches it again (see `drop_damaged`).
    """
    now = time.time() if now is None else now
    for path in _blobs_of(layout):
        with suppress(OSError):
            os.utime(path, (now, now))
    for path in (layers / "blobs" / "sha256").iterdir():
        with suppress(OSError):
            if now - path.stat().st_mtime > LAYERS_KEPT_SECONDS:
                path.unlink()


def _blobs_of(layout: Path) -> Iterator[Path]:
    """Manifest, configuration and layers of a layout's one image, as far as they can be read."""
    blobs = layout / "blobs"
    try:
        (described,) = json.loads((layout / "index.json").read_bytes())["manifests"]
        manifest = blobs / described["digest"].replace(":", "/")
        yield manifest
        content = json.loads(manifest.read_bytes())
        for blob in (content["config"], *content["layers"]):
            yield blobs / blob["digest"].replace(":", "/")
    except (OSError, ValueError, KeyError, TypeError):
        return
