"""Addresses of stored objects that a browser can open."""

from nightbridge.harvest.manifest import MANIFEST, Manifest
from nightbridge.store.protocol import ObjectStore

MAX_LINKS = 20
FIRST = ("record.json", "summary.json", "metrics.parquet")
"""The files that are opened most often come first."""


def run_links(store: ObjectStore, manifest: Manifest) -> tuple[tuple[str, str], ...]:
    """Path and address of a stored run's objects, checkpoints left out; none where there are no addresses."""
    paths = [file.path for file in manifest.files if file.kind != "checkpoint"]
    paths.sort(key=lambda path: (FIRST.index(path) if path in FIRST else len(FIRST), path))
    shown = [*paths[:MAX_LINKS], MANIFEST]
    links = ((path, store.link_of(f"{manifest.prefix}/{path}")) for path in shown)
    return tuple((path, link) for path, link in links if link)
