"""A stored run, checked and downloaded: what `nightbridge verify` and `nightbridge fetch` do."""

from collections.abc import Callable
from pathlib import Path

from nightbridge.errors import DamagedData, PermanentError
from nightbridge.files import write_model
from nightbridge.harvest.manifest import MANIFEST, Manifest, read_manifest
from nightbridge.models import StoredFile
from nightbridge.store.checksum import sha256_of_file
from nightbridge.store.protocol import ObjectInfo, ObjectStore, checked_key
from nightbridge.store.transfers import Meter, Progress, in_parallel


def missing_objects(store: ObjectStore, manifest: Manifest) -> list[str]:
    """What a listing alone shows to be wrong: objects that are missing or have another size. One line each."""
    found = {each.key: each for each in store.list(manifest.prefix)}
    problems = (_missing(file, found.get(f"{manifest.prefix}/{file.path}")) for file in manifest.files)
    return [problem for problem in problems if problem]


def verify_run(store: ObjectStore, prefix: str, on_progress: Callable[[Progress], None] | None = None) -> list[str]:
    """Check a run against its manifest; returns one line per problem, none when every object is there and intact.

    Checks presence, size and checksum. A directory's checksums are computed from its bytes; those of S3 are the ones
    recorded with the objects, or the ETags of those sent in parts. Their bytes `fetch_run` checks.
    """
    manifest = read_manifest(store, prefix)
    if manifest is None:
        return [f"{MANIFEST}: missing; this run was never committed"]
    wrong_prefix = "" if manifest.prefix == prefix else f"{MANIFEST}: belongs to {manifest.prefix}"
    problems = in_parallel(
        lambda file: _problem(store, prefix, file),
        manifest.files,
        Meter("reading", [file.size for file in manifest.files], on_progress),
    )
    return [problem for problem in (wrong_prefix, *problems) if problem]


def fetch_run(
    store: ObjectStore, prefix: str, destination: Path, on_progress: Callable[[Progress], None] | None = None
) -> Manifest:
    """Restore a whole run below `destination` as it is in the store, every byte verified, the manifest last.

    Files that are there already with the right bytes are kept, so an interrupted fetch resumes.

    Raises:
        PermanentError: The run was never committed, or `destination` cannot be written.
        DamagedData: An object is missing or differs from the manifest.

    """
    manifest = read_manifest(store, prefix)
    if manifest is None:
        advice = "Check the run key; its harvest may still be running"
        raise PermanentError("no committed run under this prefix", thing=store.url_of(prefix), advice=advice)
    in_parallel(
        lambda file: _fetch(store, prefix, file, destination / checked_key(file.path)),
        manifest.files,
        Meter("fetching", [file.size for file in manifest.files], on_progress),
    )
    write_model(destination / MANIFEST, manifest)
    return manifest


def _missing(file: StoredFile, found: ObjectInfo | None) -> str:
    if found is None:
        return f"{file.path}: missing"
    return "" if found.size == file.size else f"{file.path}: {found.size} bytes, expected {file.size}"


def _problem(store: ObjectStore, prefix: str, file: StoredFile) -> str:
    found = store.stat(f"{prefix}/{file.path}", file.part_size)
    if found is None or found.size != file.size:
        return _missing(file, found)
    if found.sha256 is None and file.etag:
        return "" if found.etag == file.etag else f"{file.path}: ETag {found.etag}, expected {file.etag}"
    return "" if found.sha256 == file.sha256 else f"{file.path}: sha256 {found.sha256}, expected {file.sha256}"


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
