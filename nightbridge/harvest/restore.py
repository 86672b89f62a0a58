"""A stored run, checked and brought back: what `nightbridge verify` and `nightbridge fetch` do."""

from collections.abc import Callable
from pathlib import Path

from nightbridge.errors import DamagedData, PermanentError
from nightbridge.files import write_atomically
from nightbridge.harvest.manifest import MANIFEST, Manifest, read_manifest
from nightbridge.models import StoredFile
from nightbridge.store.checksum import sha256_of_file
from nightbridge.store.protocol import ObjectStore, checked_key
from nightbridge.store.transfers import Meter, Progress, in_parallel


def missing_objects(store: ObjectStore, manifest: Manifest) -> list[str]:
    """What a listing alone shows to be wrong: objects that are not there or have another size. One line each."""
    sizes = {found.key: found.size for found in store.list(manifest.prefix)}
    problems = []
    for file in manifest.files:
        size = sizes.get(f"{manifest.prefix}/{file.path}")
        if size is None:
            problems.append(f"{file.path}: missing")
        elif size != file.size:
            problems.append(f"{file.path}: {size} bytes, expected {file.size}")
    return problems


def verify_run(store: ObjectStore, prefix: str, on_progress: Callable[[Progress], None] | None = None) -> list[str]:
    """Check a run against its manifest; returns one line per problem, none when every object is there and whole.

    Checks presence, size and checksum. A directory's checksums are computed from its bytes; those of S3 are the ones
    recorded with the objects, or the ETags of those sent in parts. Their bytes `fetch_run` checks.
    """
    manifest = read_manifest(store, prefix)
    if manifest is None:
        return [f"{MANIFEST}: missing; this run was never committed"]
    wrong_prefix = [] if manifest.prefix == prefix else [f"{MANIFEST}: belongs to {manifest.prefix}"]
    checked = in_parallel(
        lambda file: _problem(store, prefix, file),
        manifest.files,
        Meter("reading", [file.size for file in manifest.files], on_progress),
    )
    return wrong_prefix + [problem for problem in checked if problem]


def fetch_run(
    store: ObjectStore, prefix: str, destination: Path, on_progress: Callable[[Progress], None] | None = None
) -> Manifest:
    """Restore a whole run below `destination` as it lies in the store, every byte verified, the manifest last.

    Files that are there already with the right bytes are kept, so an interrupted fetch resumes.

    Raises:
        PermanentError: The run was never committed, or `destination` cannot be written.
        DamagedData: An object is missing or differs from the manifest.

    """
    manifest = read_manifest(store, prefix)
    if manifest is None:
        raise PermanentError(
            "no committed run at this place",
            thing=store.url_of(prefix),
            advice="Check the run key; its harvest may still be running",
        )
    in_parallel(
        lambda file: _fetch(store, prefix, file, destination / checked_key(file.path)),
        manifest.files,
        Meter("fetching", [file.size for file in manifest.files], on_progress),
    )
    write_atomically(destination / MANIFEST, manifest.model_dump_json(indent=2).encode() + b"\n")
    return manifest


def _problem(store: ObjectStore, prefix: str, file: StoredFile) -> str:
    found = store.stat(f"{prefix}/{file.path}", file.part_size)
    if found is None:
        return f"{file.path}: missing"
    if found.size != file.size:
        return f"{file.path}: {found.size} bytes, expected {file.size}"
    if found.sha256 is None and file.etag:
        return "" if found.etag == file.etag else f"{file.path}: ETag {found.etag}, expected {file.etag}"
    if found.sha256 != file.sha256:
        return f"{file.path}: sha256 {found.sha256}, expected {file.sha256}"
    return ""


def _fetch(store: ObjectStore, prefix: str, file: StoredFile, path: Path) -> None:
    if path.is_file() and sha256_of_file(path, file.part_size) == file.sha256:
        return
    key = f"{prefix}/{file.path}"
    store.get_file(key, path)
    if sha256_of_file(path, file.part_size) != file.sha256:
        path.unlink()
        raise DamagedData(
            "differs from the manifest", thing=store.url_of(key), advice="It was modified or damaged in the store"
        )
